"""The command `sandbox dead`: calls that no worker survived.

A gateway keeps the last thousand of them in Redis. These commands ask it for them, so they work from any machine that
reaches it, with a key that is good for `admin` where there are keys.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from typing import Annotated
from urllib.parse import quote

import typer
from pydantic import BaseModel, TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sandbox.api_keys import key_of_caller
from sandbox.calls import ToolResult
from sandbox.client import DEFAULT_URL
from sandbox.errors import InternalError
from sandbox.link import MAX_RESULT_BYTES
from sandbox.wire import Wire

dead_app = typer.Typer(no_args_is_help=True, help="Calls that no worker survived.")

#: A call that is sent again waits and runs for as long as any other.
_SEND_S = 90.0

Url = Annotated[str, typer.Option(help="Where the gateway listens.")]
Entry = Annotated[str, typer.Argument(help="As `sandbox dead list` names it.")]


class _Letter(BaseModel):
    entry: str
    id: str
    tenant: str
    reason: str
    times_delivered: int
    died_ms: int


class _Letters(BaseModel):
    letters: list[_Letter]


@dead_app.command("list")
def list_letters(
    count: Annotated[int, typer.Option(min=1, max=1000, help="As many at most, the newest first.")] = 100,
    url: Url = DEFAULT_URL,
) -> None:
    """List them, the newest first."""
    try:
        letters = _Letters.model_validate_json(_ask("GET", f"?count={count}", url)).letters
    except ValidationError as exc:
        raise InternalError(f"{url} gave a list that this command cannot read") from exc
    table = Table("entry", "call", "tenant", "died", "workers", "reason")
    for letter in letters:
        died = datetime.datetime.fromtimestamp(letter.died_ms / 1000, tz=datetime.UTC)
        words = (letter.entry, letter.id, letter.tenant, f"{died:%Y-%m-%d %H:%M:%S} UTC")
        # A call is delivered once more than it had workers: the last one refused it.
        table.add_row(*map(escape, words), str(letter.times_delivered - 1), escape(letter.reason))
    Console(width=None if Console().is_terminal else 10_000).print(table)


@dead_app.command()
def show(entry: Entry, url: Url = DEFAULT_URL) -> None:
    """Print one as JSON, with its program."""
    print(json.dumps(json.loads(_ask("GET", _path(entry), url)), indent=2))


@dead_app.command()
def send(entry: Entry, url: Url = DEFAULT_URL) -> None:
    """Run it again, under a new id, and print its result as JSON. A verdict takes it off the list."""
    print(TypeAdapter(ToolResult).validate_json(_ask("POST", f"{_path(entry)}/send", url)).model_dump_json())


@dead_app.command()
def drop(entry: Entry, url: Url = DEFAULT_URL) -> None:
    """Forget it."""
    _ask("POST", f"{_path(entry)}/drop", url)


def _path(entry: str) -> str:
    return f"/{quote(entry, safe='')}"


def _ask(method: str, path: str, url: str) -> bytes:
    async def ask() -> bytes:
        wire = Wire(url, max_in_flight=1, api_key=key_of_caller())
        wire.open()
        try:
            return await wire.page(method, f"/v1/dead{path}", _SEND_S, MAX_RESULT_BYTES)
        finally:
            await wire.close()

    return asyncio.run(ask())
