# SHOWS: signals work as in any process: one caught by a handler, one that ends the program
# EXPECT: signaled
# SIGNAL: 15
# STDOUT: caught SIGUSR1
import os, signal

def on_signal(number, frame):
    print("caught", signal.Signals(number).name)

signal.signal(signal.SIGUSR1, on_signal)
signal.raise_signal(signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
