# SHOWS: decimal money with rounding half up, year by year
# EXPECT: ok
# STDOUT: year 1: 1035.00
# STDOUT: year 2: 1071.23
# STDOUT: year 3: 1108.72
# STDOUT: interest: 108.72
from decimal import Decimal, ROUND_HALF_UP

CENT = Decimal("0.01")
balance = Decimal("1000.00")
rate = Decimal("0.035")
for year in range(1, 4):
    balance = (balance * (1 + rate)).quantize(CENT, rounding=ROUND_HALF_UP)
    print(f"year {year}: {balance}")
print("interest:", balance - 1000)
