# SHOWS: names, text and output in any alphabet
# EXPECT: ok
# STDOUT: Straße → STRASSE
# STDOUT: 你好, мир, 🐍
# STDOUT: π ≈ 3.14159
import math, unicodedata

straße = "Straße"
print(straße, "→", straße.upper())
print("你好", "мир", unicodedata.lookup("SNAKE"), sep=", ")
π = math.pi
print(f"π ≈ {π:.5f}")
