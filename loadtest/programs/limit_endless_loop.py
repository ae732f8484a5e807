# SHOWS: a loop without end is ended by the wall limit; what it printed before is kept
# EXPECT: timeout
# LIMITS: wall_s=1
# STDOUT: step 0
# STDOUT: step 1
# BOUND: one process that counts
i = 0
while i >= 0:
    if i < 2:
        print("step", i)
    i += 1
