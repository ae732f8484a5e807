# SHOWS: sys.exit with a number, from inside a function
# EXPECT: error
# EXIT: 3
# STDOUT: bad input
import sys

def fail(message, code):
    print(message)
    sys.exit(code)

fail("bad input", 3)
