# SHOWS: dataclasses, an enum and match
# EXPECT: ok
# STDOUT: Order(item='tea', size=<Size.LARGE: 3>, notes=['no sugar'])
# STDOUT: large tea, 1 note
from dataclasses import dataclass, field
from enum import Enum

class Size(Enum):
    SMALL = 1
    LARGE = 3

@dataclass(order=True)
class Order:
    item: str
    size: Size = Size.SMALL
    notes: list[str] = field(default_factory=list)

def describe(order):
    match order:
        case Order(size=Size.LARGE, notes=[_]):
            return f"large {order.item}, 1 note"
        case Order(size=size):
            return f"{size.name.lower()} {order.item}"

o = Order("tea", Size.LARGE, ["no sugar"])
print(o)
print(describe(o))
