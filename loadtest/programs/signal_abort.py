# SHOWS: abort() is signal 6
# EXPECT: signaled
# SIGNAL: 6
import os

os.abort()
