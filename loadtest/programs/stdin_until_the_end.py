# SHOWS: a filter that reads lines until the input ends, in other alphabets too
# EXPECT: ok
# STDIN: naïve café
# STDIN: 東京 Токио
# STDIN: last
# STDOUT: 1: 10 characters, 12 bytes
# STDOUT: 2: 8 characters, 17 bytes
# STDOUT: 3: 4 characters, 4 bytes
import sys

for number, line in enumerate(sys.stdin, start=1):
    line = line.rstrip("\n")
    print(f"{number}: {len(line)} characters, {len(line.encode())} bytes")
