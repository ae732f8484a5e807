# SHOWS: processes are bounded, and those left behind end with the call
# EXPECT: ok
# LIMITS: processes=24
# STDOUT: refused before 100
# BOUND: 100 forks, each child sleeps 60 s
import os
import time

made = 0
try:
    while made < 100:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
    print("nobody stopped it")
except OSError:
    print("refused before 100")
