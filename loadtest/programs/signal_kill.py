# SHOWS: a program that kills itself is `signaled`, not a time or memory limit
# EXPECT: signaled
# SIGNAL: 9
# STDOUT: goodbye
import os
import signal

print("goodbye")
os.kill(os.getpid(), signal.SIGKILL)
