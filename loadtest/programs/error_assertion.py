# SHOWS: a model checks itself and is wrong
# EXPECT: error
# STDOUT: 26
# STDERR-HAS: AssertionError: expected 25, got 26
def count_squares(limit):
    return len([n for n in range(0, limit) if int(n ** 0.5) ** 2 == n])

found = count_squares(626)
print(found)
assert found == 25, f"expected 25, got {found}"
