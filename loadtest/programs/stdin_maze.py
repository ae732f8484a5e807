# SHOWS: a maze from stdin, breadth-first search
# EXPECT: ok
# STDIN: 4 5
# STDIN: S.#..
# STDIN: .##.#
# STDIN: ....#
# STDIN: ##..E
# STDOUT: 7
import sys
from collections import deque

def main():
    data = sys.stdin.read().split()
    h, w = int(data[0]), int(data[1])
    grid = data[2:2 + h]
    start = next((r, c) for r in range(h) for c in range(w) if grid[r][c] == "S")
    queue, seen = deque([(start, 0)]), {start}
    while queue:
        (r, c), d = queue.popleft()
        if grid[r][c] == "E":
            return d
        for dr, dc in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            nr, nc = r + dr, c + dc
            if 0 <= nr < h and 0 <= nc < w and grid[nr][nc] != "#" and (nr, nc) not in seen:
                seen.add((nr, nc))
                queue.append(((nr, nc), d + 1))
    return -1

print(main())
