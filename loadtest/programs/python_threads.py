# SHOWS: threads that share a lock and a queue
# EXPECT: ok
# STDOUT: 4000
# STDOUT: [0, 1, 4, 9, 16]
import threading
from concurrent.futures import ThreadPoolExecutor

counter = 0
lock = threading.Lock()

def work():
    global counter
    for _ in range(1000):
        with lock:
            counter += 1

threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
print(counter)
with ThreadPoolExecutor(max_workers=3) as pool:
    print(list(pool.map(lambda x: x * x, range(5))))
