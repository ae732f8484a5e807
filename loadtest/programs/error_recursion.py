# SHOWS: recursion without an end is a RecursionError, not a crash
# EXPECT: error
# STDERR-HAS: RecursionError: maximum recursion depth exceeded
def collatz_steps(n):
    return 1 + collatz_steps(n // 2 if n % 2 == 0 else 3 * n + 1)

print(collatz_steps(27))
