# SHOWS: a line through points with numpy.linalg
# EXPECT: ok
# STDOUT: slope 2.00, intercept 0.95
# STDOUT: residual 0.0500
import numpy as np

xs = np.array([0, 1, 2, 3])
ys = np.array([1.0, 2.8, 5.1, 6.9])
A = np.vstack([xs, np.ones(len(xs))]).T
(slope, intercept), residual, rank, _ = np.linalg.lstsq(A, ys, rcond=None)
print(f"slope {slope:.2f}, intercept {intercept:.2f}")
print(f"residual {residual[0]:.4f}")
