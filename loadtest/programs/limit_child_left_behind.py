# SHOWS: a child in the background that holds stdout does not delay the answer and does not outlive it
# EXPECT: ok
# STDOUT: started
# STDOUT: done
# BOUND: one child, 60 s
import subprocess, sys

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60); print('late')"], start_new_session=True)
print("started")
assert child.poll() is None
print("done")
