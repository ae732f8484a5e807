# SHOWS: limits, a Taylor series and an infinite sum
# EXPECT: ok
# STDOUT: 1/2
# STDOUT: 1 - x**2/2 + x**4/24 + O(x**6)
# STDOUT: pi**2/6
from sympy import *

x, k = symbols('x k')
print(limit((1 - cos(x))/x**2, x, 0))
print(series(cos(x), x, 0, 6))
print(summation(1/k**2, (k, 1, oo)))
