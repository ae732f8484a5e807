# SHOWS: a __future__ import stays the first statement; nothing is pasted before it
# EXPECT: ok
# STDOUT: Node
# STDOUT: 6
"""A linked list."""
from __future__ import annotations

class Node:
    def __init__(self, value: int, next: Node | None = None):
        self.value = value
        self.next = next

def total(node: Node | None) -> int:
    return 0 if node is None else node.value + total(node.next)

print(total.__annotations__["node"].split(" ")[0])
print(total(Node(1, Node(2, Node(3)))))
