# SHOWS: stdout and stderr come back apart; a warning is no error
# EXPECT: ok
# STDOUT: nan
# STDERR-HAS: RuntimeWarning: invalid value encountered
# STDERR-HAS: checked 1 matrix
import sys
import numpy as np

m = np.array([0.0])
print((m / m)[0])
print("checked 1 matrix", file=sys.stderr)
