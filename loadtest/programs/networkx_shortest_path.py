# SHOWS: shortest path and spanning tree with networkx
# EXPECT: ok
# STDOUT: A -> C -> B -> D, length 7
# STDOUT: tree weight 7
import networkx as nx

G = nx.Graph()
G.add_weighted_edges_from([("A", "B", 5), ("A", "C", 2), ("B", "C", 1), ("B", "D", 4), ("C", "D", 8)])
path = nx.shortest_path(G, "A", "D", weight="weight")
print(" -> ".join(path) + f", length {nx.path_weight(G, path, 'weight')}")
T = nx.minimum_spanning_tree(G)
print("tree weight", int(T.size(weight="weight")))
