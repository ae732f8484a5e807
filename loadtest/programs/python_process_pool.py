# SHOWS: multiprocessing.Pool
# EXPECT: ok
# STDOUT: 285
from multiprocessing import Pool

def f(x):
    return x * x

if __name__ == '__main__':
    with Pool(2) as p:
        print(sum(p.map(f, range(10))))
