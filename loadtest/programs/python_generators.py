# SHOWS: endless generators cut by itertools
# EXPECT: ok
# STDOUT: [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]
# STDOUT: 4613732
from itertools import islice, takewhile

def fibonacci():
    a, b = 0, 1
    while True:
        yield a
        a, b = b, a + b

print(list(islice(fibonacci(), 10)))
print(sum(x for x in takewhile(lambda x: x < 4_000_000, fibonacci()) if x % 2 == 0))
