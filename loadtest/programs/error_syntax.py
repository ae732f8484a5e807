# SHOWS: a program that does not parse, with the line shown as Python shows it
# EXPECT: error
# STDERR-HAS: line 5
# STDERR-HAS: SyntaxError:
answer = (17 + 4
print(answer)
