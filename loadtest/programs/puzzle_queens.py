# SHOWS: backtracking with a recursive generator
# EXPECT: ok
# STDOUT: 92
# STDOUT: (0, 4, 7, 5, 2, 6, 1, 3)
def queens(n, placed=()):
    if len(placed) == n:
        yield placed
        return
    row = len(placed)
    for col in range(n):
        if all(col != c and abs(col - c) != row - r for r, c in enumerate(placed)):
            yield from queens(n, placed + (col,))

solutions = list(queens(8))
print(len(solutions))
print(solutions[0])
