# SHOWS: daemons that left the program's session and ignore every signal do not outlive it
# EXPECT: ok
# STDOUT: parent done
# BOUND: four daemons, 60 s each
import os, signal, time

for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        time.sleep(60)
        os._exit(0)
    os.wait()
print("parent done")
