# SHOWS: scipy.optimize, a minimum and a root
# EXPECT: ok
# STDOUT: x = 1.000, y = 2.500
# STDOUT: root = 0.567143
import numpy as np
from scipy.optimize import minimize, brentq

f = lambda p: (p[0] - 1) ** 2 + (p[1] - 2.5) ** 2
res = minimize(f, x0=[2, 0])
print(f"x = {res.x[0]:.3f}, y = {res.x[1]:.3f}")
root = brentq(lambda t: np.exp(-t) - t, 0, 1)
print("root =", round(root, 6))
