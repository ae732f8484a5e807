# SHOWS: children that were stopped end with the call, like any others
# EXPECT: ok
# STDOUT: 8 stopped
# BOUND: eight children that would sleep for 60 s
import os, signal, time

children = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    children.append(pid)
for pid in children:
    os.kill(pid, signal.SIGSTOP)
stopped = sum(os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]) for pid in children)
print(stopped, "stopped")
