# SHOWS: Vieta without solving, then the same by solving
# EXPECT: ok
# STDOUT: 29
# STDOUT: 29
from sympy import symbols, Poly, solve, simplify, expand

# The roots of x^3 - 5x^2 - 2x + 24 are a, b, c. Find a^2 + b^2 + c^2.
x = symbols('x')
p = Poly(x**3 - 5*x**2 - 2*x + 24, x)
_, e1, e2, e3 = p.all_coeffs()
print(e1**2 - 2*e2)

roots = solve(p.as_expr(), x)
print(simplify(sum(r**2 for r in roots)))
