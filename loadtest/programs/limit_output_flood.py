# SHOWS: output beyond the limit ends the program; the first bytes up to the limit are kept
# EXPECT: output_limit
# LIMITS: output_bytes=5000
# STDOUT-BYTES: 5000
# TRUNCATED: stdout
# BOUND: 10 MB
for n in range(100_000):
    print(f"{n:09d} " * 10)
