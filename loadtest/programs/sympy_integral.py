# SHOWS: definite and indefinite integrals, and a check by differentiation
# EXPECT: ok
# STDOUT: x*log(x) - x
# STDOUT: sqrt(pi)
# STDOUT: True
import sympy as sp

x = sp.Symbol('x')
F = sp.integrate(sp.log(x), x)
print(F)
print(sp.integrate(sp.exp(-x**2), (x, -sp.oo, sp.oo)))
print(sp.simplify(sp.diff(F, x) - sp.log(x)) == 0)
