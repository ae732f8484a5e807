# SHOWS: forty digits with mpmath
# EXPECT: ok
# STDOUT: 1.202056903159594285399738161511449990765
# STDOUT: 1.4142135623730950488016887242096980785697
from mpmath import mp, zeta, sqrt, mpf

mp.dps = 40
print(zeta(3))
print(mp.nstr(sqrt(mpf(2)), 41))
