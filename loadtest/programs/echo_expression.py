# SHOWS: a sympy expression echoed, after work that prints nothing
# EXPECT: ok
# ECHO: yes
# STDOUT: (x - 2)*(x + 3)
import sympy as sp

x = sp.symbols("x")
expr = x**2 + x - 6
sp.factor(expr)
