# SHOWS: ProcessPoolExecutor, whose exceptions come back to the parent
# EXPECT: ok
# STDOUT: [False, True, True, False]
# STDOUT: ValueError: 1 is below 2
from concurrent.futures import ProcessPoolExecutor

def is_prime(n):
    if n < 2:
        raise ValueError(f"{n} is below 2")
    return all(n % d for d in range(2, int(n**0.5) + 1))

if __name__ == "__main__":
    with ProcessPoolExecutor(max_workers=2) as pool:
        print(list(pool.map(is_prime, [91, 97, 7919, 7917])))
        try:
            pool.submit(is_prime, 1).result()
        except ValueError as e:
            print(f"ValueError: {e}")
