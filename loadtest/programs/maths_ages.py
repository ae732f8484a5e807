# SHOWS: a word problem solved by trying everything
# EXPECT: ok
# STDOUT: Ann is 24, Ben is 18

# Ann is twice as old as Ben was when Ann was as old as Ben is now. Together they are 42.
solutions = []
for ann in range(1, 100):
    for ben in range(1, ann):
        age_gap = ann - ben
        ben_then = ben - age_gap
        if ann + ben == 42 and ann == 2 * ben_then:
            solutions.append((ann, ben))

assert len(solutions) == 1
ann, ben = solutions[0]
print(f"Ann is {ann}, Ben is {ben}")
