# SHOWS: recursion 20,000 deep after sys.setrecursionlimit, as contest programs do it
# EXPECT: ok
# STDOUT: 20000
import sys
sys.setrecursionlimit(10**6)

children = {i: [i + 1] for i in range(1, 20000)}

def depth(node):
    deepest = 0
    for child in children.get(node, ()):
        deepest = max(deepest, depth(child))
    return deepest + 1

print(depth(1))
