# SHOWS: a traceback with the program's own line numbers and source lines, and the output before it
# EXPECT: error
# STDOUT: mean of 3: 2.0
# STDERR-HAS: Traceback (most recent call last):
# STDERR-HAS: line 13, in <module>
# STDERR-HAS: print("mean of 0:", mean([]))
# STDERR-HAS: line 10, in mean
# STDERR-HAS: ZeroDivisionError: division by zero
def mean(values):
    return sum(values) / len(values)

print("mean of 3:", mean([1, 2, 3]))
print("mean of 0:", mean([]))
print("never printed")
