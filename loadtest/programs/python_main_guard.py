# SHOWS: the program is __main__, so its guard opens
# EXPECT: ok
# STDOUT: 3628800
# STDOUT: __main__
import sys

def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)

def main(argv):
    assert len(argv) == 1
    print(factorial(10))
    return 0

if __name__ == "__main__":
    code = main(sys.argv)
    print(main.__module__)
    sys.exit(code)
