# SHOWS: files given with the call lie beside the program, and others are written and read back
# EXPECT: ok
# FILE: notes/todo.txt = "buy milk\ncall Bob\n"
# FILE: pixel.bin = {"base64": "iVBORw=="}
# STDOUT: 2 lines to do
# STDOUT: b'\x89PNG'
# STDOUT: ['copy.txt', 'main.py', 'notes', 'pixel.bin']
import os
from pathlib import Path

todo = Path("notes/todo.txt").read_text()
print(len(todo.splitlines()), "lines to do")
print(Path("pixel.bin").read_bytes())
with open("copy.txt", "w") as f:
    f.write(todo.upper())
assert Path("copy.txt").read_text().startswith("BUY")
print(sorted(os.listdir(".")))
