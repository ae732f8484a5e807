# SHOWS: a plotting library that is not there fails with the ordinary import error
# EXPECT: error
# STDERR-HAS: import matplotlib.pyplot as plt
# STDERR-HAS: ModuleNotFoundError: No module named 'matplotlib'
import numpy as np
import matplotlib.pyplot as plt

x = np.linspace(0, 10, 100)
plt.plot(x, np.sin(x))
plt.show()
