# SHOWS: sys.exit with a text: the text on stderr, exit code 1, exit handlers run
# EXPECT: error
# STDOUT: cleaned up
# STDERR-HAS: no solution found
import atexit
import sys

atexit.register(print, "cleaned up")
sys.exit("no solution found")
