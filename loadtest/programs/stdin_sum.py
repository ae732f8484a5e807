# SHOWS: a contest program that reads numbers with input()
# EXPECT: ok
# STDIN: 3
# STDIN: 10 20 30
# STDOUT: 60
n = int(input())
a = list(map(int, input().split()))
assert len(a) == n
print(sum(a))
