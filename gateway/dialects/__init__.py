"""The languages of other services, spoken by ours: whoever calls one of them changes a URL and nothing else.

Each module here is one language. It says what it listens to (`doors`), reads requests in that language's own words,
has `gateway.engine` run the calls, and answers in those words. Where the original is plainly wrong, ours is right;
README.md beside this file has the table. The setting `gateway.dialects` names those that are spoken, all by default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp

from gateway.engine import Engine
from sandbox.api_keys import Scope
from sandbox.settings import Dialect


@dataclass(frozen=True, slots=True)
class Door:
    """A path of a dialect, and what stands behind it."""

    path: str  # with "/" at its end: everything below it, which the application finds as `scope["path"]`
    app: ASGIApp
    methods: tuple[str, ...] = ("POST",)
    scope: Scope | None = "run"  # what a key must be good for; None: nobody needs one


# Each of them needs what stands above.
from gateway.dialects import code_judge  # noqa: E402

#: The doors of each dialect.
DIALECTS: Mapping[Dialect, Callable[[Engine], Sequence[Door]]] = {
    "code_judge": code_judge.doors,
}
