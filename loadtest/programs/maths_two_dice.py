# SHOWS: counting by enumeration, answer as m+n the way a competition wants it
# EXPECT: ok
# STDOUT: probability = 31/36
# STDOUT: m+n = 67
from fractions import Fraction
from itertools import product

# Two dice are thrown. How likely is it that the product is no multiple of 5, or is one of 10 as well?
good = total = 0
for a, b in product(range(1, 7), repeat=2):
    total += 1
    p = a * b
    if p % 5 != 0 or p % 10 == 0:
        good += 1
prob = Fraction(good, total)
print("probability =", prob)
print("m+n =", prob.numerator + prob.denominator)
