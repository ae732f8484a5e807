# SHOWS: a simulation with a seeded generator
# EXPECT: ok
# STDOUT: pi is about 3.1
import numpy as np

rng = np.random.default_rng(seed=12345)
n = 400_000
x, y = rng.random(n), rng.random(n)
inside = (x**2 + y**2 <= 1).sum()
print(f"pi is about {4 * inside / n:.1f}")
