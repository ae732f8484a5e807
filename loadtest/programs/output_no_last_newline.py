# SHOWS: output comes back byte for byte, without a newline that the program did not print
# EXPECT: ok
# STDOUT-BYTES: 11
# STDOUT: 1, 2, 3, 42
print(1, 2, 3, sep=", ", end="")
import sys
sys.stdout.write(", 42")
