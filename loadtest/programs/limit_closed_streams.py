# SHOWS: a program that closes its streams and every other descriptor is waited for all the same
# EXPECT: error
# EXIT: 7
# STDOUT: closing
# BOUND: a fifth of a second of sleep
import os, time

print("closing", flush=True)
os.closerange(0, 256)
time.sleep(0.2)
os._exit(7)
