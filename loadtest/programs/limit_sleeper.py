# SHOWS: the wall limit counts sleep too, and keeps a line that has no end yet on stderr
# EXPECT: timeout
# LIMITS: wall_s=0.5
# STDOUT: waiting for a file that never comes
# STDERR-HAS: waited 0 s
import os, sys, time

print("waiting for a file that never comes")
print("waited 0 s", end="", file=sys.stderr, flush=True)
while not os.path.exists("result.txt"):
    time.sleep(60)
