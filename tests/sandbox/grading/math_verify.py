"""What math-verify itself says of lines of JSON, [gold, answer] each: run by the runtime's interpreter, in no jail."""

from __future__ import annotations

import json
import logging
import sys

from math_verify import parse, verify

logging.disable()
for line in sys.stdin:
    gold, answer = json.loads(line)
    parsed = [parse(f"${text}$", parsing_timeout=0) for text in (gold, answer)]
    print(json.dumps(verify(*parsed, timeout_seconds=0)), flush=True)
