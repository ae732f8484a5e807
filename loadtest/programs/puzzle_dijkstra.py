# SHOWS: Dijkstra with a heap, in a class
# EXPECT: ok
# STDOUT: {'s': 0, 'a': 3, 'b': 1, 'c': 4}
import heapq
from collections import defaultdict

class Graph:
    def __init__(self):
        self.edges = defaultdict(list)

    def add(self, u, v, w):
        self.edges[u].append((v, w))
        self.edges[v].append((u, w))

    def distances(self, source):
        dist = {}
        heap = [(0, source)]
        while heap:
            d, u = heapq.heappop(heap)
            if u in dist:
                continue
            dist[u] = d
            for v, w in self.edges[u]:
                if v not in dist:
                    heapq.heappush(heap, (d + w, v))
        return dist

g = Graph()
for u, v, w in [("s", "a", 4), ("s", "b", 1), ("b", "a", 2), ("a", "c", 1), ("b", "c", 6)]:
    g.add(u, v, w)
d = g.distances("s")
print({node: d[node] for node in "sabc"})
