# SHOWS: a CSV file given with the call, read with the standard library
# EXPECT: ok
# FILE: data/marks.csv = "name,mark\n\"Müller, J.\",1.7\nSmith,2.3\n"
# STDOUT: Müller, J. 1.7
# STDOUT: mean 2.00
import csv
from statistics import mean

with open("data/marks.csv", newline="", encoding="utf-8") as f:
    rows = list(csv.DictReader(f))
print(rows[0]["name"], rows[0]["mark"])
print(f"mean {mean(float(r['mark']) for r in rows):.2f}")
