# SHOWS: signals work as in any process: one caught by a handler, one that ends the program
# EXPECT: signaled
# SIGNAL: 15
# STDOUT: caught SIGALRM
import os, signal

def on_alarm(number, frame):
    print("caught", signal.Signals(number).name)

signal.signal(signal.SIGALRM, on_alarm)
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
os.kill(os.getpid(), signal.SIGTERM)
