# SHOWS: input() without any stdin is an EOFError at once, not a hang
# EXPECT: error
# STDOUT: name?
# STDERR-HAS: name = input("name?")
# STDERR-HAS: EOFError: EOF when reading a line
name = input("name?")
print("Hello,", name)
