# SHOWS: the CPU limit counts all processes of a call together
# EXPECT: timeout
# LIMITS: wall_s=30 cpu_s=1
# BOUND: three processes, 60 s each at most
import multiprocessing
import time

def burn():
    end = time.monotonic() + 60
    while time.monotonic() < end:
        sum(i * i for i in range(1000))

if __name__ == "__main__":
    workers = [multiprocessing.Process(target=burn) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print("never printed")
