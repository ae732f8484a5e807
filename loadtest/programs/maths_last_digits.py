# SHOWS: a competition question on remainders, with big integers
# EXPECT: ok
# STDOUT: 343
# STDOUT: 846
# STDOUT: 31

# last three digits of 7^2023, number of digits of 7^1000, digit sum of 2^20
print(pow(7, 2023, 1000))
print(len(str(7**1000)))
print(sum(map(int, str(2**20))))
