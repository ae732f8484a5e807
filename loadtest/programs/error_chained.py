# SHOWS: an exception raised from another one, both in the traceback
# EXPECT: error
# STDERR-HAS: KeyError: 'price'
# STDERR-HAS: The above exception was the direct cause of the following exception:
# STDERR-HAS: RuntimeError: item 2 has no price
items = [{"price": 3}, {"cost": 4}]
total = 0
for number, item in enumerate(items, 1):
    try:
        total += item["price"]
    except KeyError as e:
        raise RuntimeError(f"item {number} has no price") from e
print(total)
