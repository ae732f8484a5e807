# SHOWS: neither the service's variables nor its processes nor the host's secrets can be seen
# EXPECT: ok
# STDOUT: variables of the service: []
# STDOUT: processes seen: a handful
# STDOUT: shadow: hidden
import os

print("variables of the service:", [k for k in os.environ if k.startswith("SANDBOX") or "REDIS" in k or "TOKEN" in k])
seen = [p for p in os.listdir("/proc") if p.isdigit()]
print("processes seen:", "a handful" if 0 < len(seen) < 5 else len(seen))
try:
    print("shadow:", len(open("/etc/shadow").read()))
except OSError:
    print("shadow: hidden")
