# SHOWS: nothing can be written outside of the scratch directory
# EXPECT: ok
# STDOUT: scratch: written
# STDOUT: system: refused 6 of 6
import os, sys, tempfile, json

with tempfile.NamedTemporaryFile("w") as f:
    f.write("scratch")
    f.flush()
    print("scratch: written")

places = ["/", "/etc", "/usr", "/proc/sys/kernel", sys.prefix, os.path.dirname(json.__file__)]
refused = 0
for place in places:
    try:
        open(os.path.join(place, "mine.txt"), "w").close()
        print("written:", place)
    except OSError:
        refused += 1
print(f"system: refused {refused} of {len(places)}")
