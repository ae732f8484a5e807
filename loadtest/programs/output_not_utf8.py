# SHOWS: bytes that are not UTF-8 are replaced, and are no error
# EXPECT: ok
# STDOUT: caf� au lait
# STDOUT: café
import sys

sys.stdout.buffer.write("café au lait\n".encode("latin-1"))
sys.stdout.buffer.write("café\n".encode())
