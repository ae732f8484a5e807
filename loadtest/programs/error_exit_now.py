# SHOWS: os._exit, which skips everything; a whole line printed before is there
# EXPECT: error
# EXIT: 9
# STDOUT: about to leave
import os
print("about to leave")
os._exit(9)
