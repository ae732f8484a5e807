# SHOWS: a crash in native code, with what was printed before it
# EXPECT: signaled
# SIGNAL: 11
# STDOUT: reading address 0
import ctypes

print("reading address 0")
ctypes.string_at(0)
print("never printed")
