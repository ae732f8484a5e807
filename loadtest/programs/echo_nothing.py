# SHOWS: an assignment and a call that gives None echo nothing
# EXPECT: ok
# ECHO: yes
# STDOUT: [1, 2, 3]
numbers = [3, 1, 2]
numbers.sort()
print(numbers)
