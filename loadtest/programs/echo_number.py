# SHOWS: with echo_last_value the value of the last line is printed, as a notebook does
# EXPECT: ok
# ECHO: yes
# STDOUT: total so far: 10
# STDOUT: 5050
values = range(1, 101)
print("total so far:", sum(values[:4]))
sum(values)
