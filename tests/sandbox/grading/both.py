"""What math-verify itself says of lines of JSON, [gold, answer] each, and what our program in the jail says of them.

Run by the runtime's interpreter, in no jail: the texts are the tests' own. `argv[1]` is the program.
"""

from __future__ import annotations

import json
import logging
import runpy
import sys

from math_verify import parse, verify

logging.disable()
compare = runpy.run_path(sys.argv[1], run_name="program")["compare"]
for line in sys.stdin:
    gold, answer = json.loads(line)
    parsed = [parse(f"${text}$", parsing_timeout=0) for text in (gold, answer)]
    verdict = verify(*parsed, timeout_seconds=0)
    print(json.dumps([verdict, compare(gold, answer, None)]), flush=True)
