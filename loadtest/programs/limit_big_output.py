# SHOWS: 300,000 bytes of output come back whole when the call's limit allows them
# EXPECT: ok
# LIMITS: output_bytes=400000
# STDOUT-BYTES: 300000
for n in range(5000):
    print(f"{n:05d}", "ab" * 26, "")
