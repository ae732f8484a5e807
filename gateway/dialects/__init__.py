"""The languages of other services, spoken by ours: whoever calls one of them changes a URL and nothing else.

Each module here is one language. It says what it listens to (`doors`), reads requests in that language's own words,
has `gateway.engine` run the calls, and answers in those words. Where the original is plainly wrong, ours is right;
README.md beside this file has the table. The setting `gateway.dialects` names those that are spoken, all by default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gateway.dialects import code_judge, mcp, nemo_skills, openenv, piston, sandbox_fusion
from gateway.engine import Door, Engine
from sandbox.settings import Dialect

#: The doors of each dialect.
DIALECTS: Mapping[Dialect, Callable[[Engine], Sequence[Door]]] = {
    "code_judge": code_judge.doors,
    "mcp": mcp.doors,
    "nemo_skills": nemo_skills.doors,
    "openenv": openenv.doors,
    "piston": piston.doors,
    "sandbox_fusion": sandbox_fusion.doors,
}
