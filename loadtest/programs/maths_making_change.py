# SHOWS: a counting question by memoised recursion
# EXPECT: ok
# STDOUT: 292
from functools import lru_cache

@lru_cache(None)
def ways(amount, coins=(50, 25, 10, 5, 1)):
    if amount == 0:
        return 1
    if amount < 0 or not coins:
        return 0
    return ways(amount - coins[0], coins) + ways(amount, coins[1:])

print(ways(100))
