# SHOWS: exact rational arithmetic with fractions
# EXPECT: ok
# STDOUT: 27/10
# STDOUT: They meet after 2 h 42 min, 216 km from A.
from fractions import Fraction

distance = Fraction(459)
speed_a, speed_b = Fraction(80), Fraction(90)
t = distance / (speed_a + speed_b)
print(t)
hours = t.numerator // t.denominator
minutes = (t - hours) * 60
print(f"They meet after {hours} h {minutes} min, {speed_a * t} km from A.")
