# SHOWS: a string is echoed as its repr, a notebook's way
# EXPECT: ok
# ECHO: yes
# STDOUT: 'level'
word = "Level".lower()
is_palindrome = word == word[::-1]
word if is_palindrome else None
