# SHOWS: 0/1 knapsack with the choice read back
# EXPECT: ok
# STDOUT: best value: 90
# STDOUT: items: camera, map, tent
items = {"tent": (4, 45), "stove": (3, 25), "camera": (2, 30), "map": (1, 15), "book": (2, 10)}
capacity = 7
names = list(items)
best = [[0] * (capacity + 1) for _ in range(len(names) + 1)]
for i, name in enumerate(names, 1):
    weight, value = items[name]
    for c in range(capacity + 1):
        best[i][c] = best[i - 1][c]
        if weight <= c:
            best[i][c] = max(best[i][c], best[i - 1][c - weight] + value)

chosen, c = [], capacity
for i in range(len(names), 0, -1):
    if best[i][c] != best[i - 1][c]:
        chosen.append(names[i - 1])
        c -= items[names[i - 1]][0]
print("best value:", best[-1][capacity])
print("items:", ", ".join(sorted(chosen)))
