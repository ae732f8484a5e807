# SHOWS: a sieve up to a million, some tenths of a second of pure Python
# EXPECT: ok
# STDOUT: 78498
# STDOUT: 999983
def sieve(n):
    is_prime = bytearray([1]) * (n + 1)
    is_prime[0] = is_prime[1] = 0
    for p in range(2, int(n ** 0.5) + 1):
        if is_prime[p]:
            is_prime[p * p :: p] = bytes(len(range(p * p, n + 1, p)))
    return [i for i, flag in enumerate(is_prime) if flag]

primes = sieve(10**6)
print(len(primes))
print(primes[-1])
