# SHOWS: regular expressions over a text
# EXPECT: ok
# STDOUT: ['2024-03-05', '2023-12-31']
# STDOUT: order 17 costs 9.90, order 4 costs 120.00
import re

text = "Paid 2024-03-05, due 2023-12-31, ref 20240305."
print(re.findall(r"\b\d{4}-\d{2}-\d{2}\b", text))
print(re.sub(r"#(\d+)=(\d+)c", lambda m: f"order {m[1]} costs {int(m[2]) / 100:.2f}", "#17=990c, #4=12000c"))
