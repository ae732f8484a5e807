# SHOWS: the scratch folder takes no more files than its bound, and nothing of them stays
# EXPECT: ok
# STDOUT: refused before 10000
# BOUND: 10,000 empty files, 2,048 where the bound holds
made = 0
try:
    while made < 10_000:
        open(f"/tmp/file-{made}", "w").close()
        made += 1
    print("nobody stopped it")
except OSError:
    print("refused before 10000")
