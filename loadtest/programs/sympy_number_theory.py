# SHOWS: factors, totient and the Chinese remainder theorem with sympy
# EXPECT: ok
# STDOUT: {2: 3, 3: 2, 5: 1, 7: 1}
# STDOUT: 576
# STDOUT: 48
# STDOUT: 23
from sympy import factorint, totient, divisor_count
from sympy.ntheory.modular import crt

n = 2520
print(dict(factorint(n)))
print(totient(n))
print(divisor_count(n))
r, m = crt([3, 5, 7], [2, 3, 2])
print(int(r) % int(m))
