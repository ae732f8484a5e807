# SHOWS: stderr has a limit of its own, and stdout is whole beside it
# EXPECT: output_limit
# LIMITS: output_bytes=1000
# STDOUT: result: 12
# TRUNCATED: stderr
# BOUND: 10 MB
import sys

print("result:", 12)
for n in range(100_000):
    print("warning: slow convergence in step", n, " " * 60, file=sys.stderr)
