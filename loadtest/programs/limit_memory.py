# SHOWS: memory beyond the limit is `memory_limit`, told apart from a kill and a time limit
# EXPECT: memory_limit
# LIMITS: memory_bytes=268435456
# STDOUT: filling
# BOUND: 1 GiB
print("filling")
blocks = []
for _ in range(64):
    blocks.append(b"x" * (16 * 1024 * 1024))
print(len(blocks))
