# SHOWS: the long run of a Markov chain, by eigenvector and by matrix power
# EXPECT: ok
# STDOUT: [0.4286 0.5714]
# STDOUT: True
import numpy as np

P = np.array([[0.6, 0.4],
              [0.3, 0.7]])
values, vectors = np.linalg.eig(P.T)
v = np.real(vectors[:, np.isclose(values, 1)][:, 0])
stationary = v / v.sum()
print(np.round(stationary, 4))
print(np.allclose(np.linalg.matrix_power(P, 200)[0], stationary))
