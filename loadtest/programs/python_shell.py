# SHOWS: shell commands with a pipe, over a file that the program wrote
# EXPECT: ok
# STDOUT: 3 apples
# STDOUT: 2
import os
import subprocess

with open("fruit.txt", "w") as f:
    f.write("5 pears\n3 apples\n")
print(subprocess.check_output("sort -n fruit.txt | head -1", shell=True, text=True).strip())
print(os.popen("wc -l < fruit.txt").read().strip(), flush=True)
