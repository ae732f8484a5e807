"""The command `sandbox`.

Modules that need more than the base install are imported by the command that uses them, and the programs
(`gateway`, `worker`) are started by their command line, never imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Never

import typer
from pydantic import JsonValue, TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sandbox import api_keys, jsonl
from sandbox.calls import MIB, CallStatus, ToolCall, ToolResult, parse_call
from sandbox.client import DEFAULT_URL, SandboxClient
from sandbox.dead import dead_app
from sandbox.errors import CallTooLarge, ConfigError, Forbidden, InvalidCall, SandboxError, Unauthorized
from sandbox.settings import API_KEY, PREFIX, load_settings
from sandbox.wire import Answer

#: Exit codes of `sandbox run` beside the program's own and 128 + the signal that ended it. 2 means what it means
#: to most commands, 124 and 125 what they mean to timeout(1) and docker run.
EXIT_MISUSE = 2
EXIT_OUTPUT_LIMIT = 122
EXIT_MEMORY_LIMIT = 123
EXIT_TIMEOUT = 124
EXIT_FAULT = 125

_RUN_HELP = f"""Run one program and end as it ended.

Its stdout and stderr become ours, and so does its exit code; 128 + N if signal N ended it. A program that a
limit ended: {EXIT_TIMEOUT} time, {EXIT_MEMORY_LIMIT} memory, {EXIT_OUTPUT_LIMIT} output. {EXIT_FAULT}: the
service failed or was not there. {EXIT_MISUSE}: it refuses such a call, or the key in {API_KEY}. A line on stderr
says which.
"""

#: Errors that are the caller's own to mend.
_REFUSED = (InvalidCall, Unauthorized, Forbidden, CallTooLarge)

#: Fields of a call in errors, in the words of the command line.
_OPTIONS = {"limits.wall_s": "--wall", "limits.cpu_s": "--cpu", "limits.memory_bytes": "--memory, in bytes"}

app = typer.Typer(
    name="sandbox",
    help="Runs the Python that language models write, jailed, for reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
runtime_app = typer.Typer(no_args_is_help=True, help="The environment that programs see.")
app.add_typer(runtime_app, name="runtime")
keys_app = typer.Typer(no_args_is_help=True, help="API keys of a service.")
app.add_typer(keys_app, name="keys")
app.add_typer(dead_app, name="dead")

_MARKS = {True: "[green]yes[/]", False: "[red]no[/]"}
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())

Url = Annotated[str, typer.Option(help="Where the gateway listens.")]


def main() -> None:
    """The console command. An error of ours is one line on stderr and exit code 1."""
    try:
        app()
    except SandboxError as exc:
        print(f"sandbox: {exc.message}", file=sys.stderr)
        sys.exit(1)


@app.command()
def up(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one. [default: 8000]")] = None,
    also: Annotated[str | None, typer.Option(help="HOST:PORT of another address to listen on.")] = None,
    gateways: Annotated[
        int | None, typer.Option(min=1, help="Gateway processes. [default: one for each sixteen cores]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes. [default: one for each four cores]")
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(help="Calls that each worker runs at a time. [default: four for each core]"),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines though there are no API keys.")
    ] = False,
) -> None:
    """Run the whole service on this machine: Redis (unless REDIS_URL is set), gateways, workers."""
    _need_server("up")
    from sandbox import stack  # noqa: PLC0415 - needs the server's packages

    options = {
        "GATEWAY__HOST": host,
        "GATEWAY__PORT": port,
        "GATEWAY__ALSO": also,
        "GATEWAY__INSECURE": insecure or None,
        "WORKER__SLOTS": slots,
    }
    # The key of a caller is none of the service's business.
    environ = {k: v for k, v in os.environ.items() if k != API_KEY} | {  # noqa: TID251 - a command line, which hands it on
        f"{PREFIX}{k}": str(v) for k, v in options.items() if v is not None
    }
    settings = load_settings(environ)
    gateways = gateways or stack.gateways_for(stack.cores())
    workers = workers or max(1, stack.cores() // 4)  # one busy event loop feeds the slots of four cores
    asyncio.run(stack.up(settings, environ, gateways=gateways, workers=workers))


_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASS_ON)
def gateway(context: typer.Context) -> None:
    """Run one gateway, as `python -m gateway` does."""
    _need_server("gateway")
    _become("gateway", context.args)


@app.command()
def worker() -> None:
    """Run one worker, as `python -m worker` does: it takes calls from Redis and runs them in jails.

    It has no options. REDIS_URL says where the calls are, and SANDBOX_WORKER__SLOTS, for one, how many it runs
    at a time.
    """
    _need_server("worker")
    _become("worker", [])


@app.command(context_settings=_PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure a service under load: `sandbox bench --help` tells how."""
    _become_loadtest("bench", context.args)


@app.command(context_settings=_PASS_ON)
def plan(context: typer.Context) -> None:
    """Say how many cores so many calls need, by simulation: `sandbox plan --help` tells how."""
    _become_loadtest("plan", context.args)


def _become_loadtest(command: str, args: list[str]) -> Never:
    _need(command, "loadtest", "aiohttp", "hdrh", "matplotlib", "redis", "uvloop")
    _become("loadtest", [command, *args])


def _become(program: str, args: list[str]) -> Never:
    os.execv(sys.executable, [sys.executable, "-P", "-m", program, *args])  # noqa: S606 - our own words


def _need_server(command: str) -> None:
    _need(command, "server", "fastapi", "redis", "uvicorn")


def _need(command: str, extra: str, *modules: str) -> None:
    if missing := [name for name in modules if not importlib.util.find_spec(name)]:
        raise ConfigError(
            f"`sandbox {command}` needs {', '.join(missing)}; "
            f"pip install '.[{extra}]' in the project's folder brings all of it"
        )


@app.command(help=_RUN_HELP)
def run(  # noqa: PLR0913, PLR0917 - the options of a command line
    file: Annotated[str | None, typer.Argument(help="The program; - reads it from stdin.")] = None,
    code: Annotated[str | None, typer.Option("-c", help="The program itself.")] = None,
    stdin: Annotated[str | None, typer.Option(help="File that it reads as stdin; - gives it ours.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead.")] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Show the value of a last-line expression.")] = False,
    wall: Annotated[float | None, typer.Option(help="Limit on its time, in seconds.")] = None,
    cpu: Annotated[float | None, typer.Option(help="Limit on its CPU time, in seconds.")] = None,
    memory: Annotated[int | None, typer.Option(help="Limit on its memory, in MiB.")] = None,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="Let it use sockets among its own processes.")
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Run one program and end as it ended."""
    if (file is None) == (code is None):
        raise typer.BadParameter("give a FILE or -c CODE, and not both")
    limits = {"wall_s": wall, "cpu_s": cpu, "memory_bytes": memory and memory * MIB}
    fields: dict[str, JsonValue] = {
        "code": code if code is not None else _read_text(file or "-"),
        "stdin": "" if stdin is None else _read_text(stdin),
        "limits": {name: limit for name, limit in limits.items() if limit is not None},
        "network": "loopback" if loopback else "none",
        "echo_last_value": echo,
    }
    try:
        # A person waits: a service that is not there shall not look like one that is slow.
        with SandboxClient.blocking(
            url, api_key=api_keys.key_of_caller(), attempts=3, patience_s=3.0
        ) as client:
            [answer] = client.run_many([parse_call(fields)])
    except SandboxError as exc:
        answer = exc
    raise typer.Exit(show(answer, as_json=as_json))


def show(answer: Answer, *, as_json: bool) -> int:
    """Print what came of a call and return the exit code that says it."""
    if isinstance(answer, SandboxError):
        if as_json:
            print(json.dumps(answer.to_wire()))
        field, colon, rule = answer.message.partition(":")
        print(f"sandbox: {type(answer).__name__}: {_OPTIONS.get(field, field)}{colon}{rule}", file=sys.stderr)
        return EXIT_MISUSE if isinstance(answer, _REFUSED) else EXIT_FAULT
    if as_json:
        print(answer.model_dump_json())
    else:
        for stream, text in ((sys.stdout, answer.stdout), (sys.stderr, answer.stderr)):
            stream.buffer.write(text.encode())
            stream.buffer.flush()
    code, why = _verdict(answer)
    if why:
        print(f"sandbox: {answer.status}: {why}", file=sys.stderr)
    return code


def _verdict(result: ToolResult) -> tuple[int, str]:
    """The exit code, and the sentence behind one that is not the program's own."""
    used = result.usage
    match result.status:
        case CallStatus.OK | CallStatus.ERROR:
            return result.exit_code or int(result.status is CallStatus.ERROR), ""
        case CallStatus.SIGNALED:
            number = result.signal or 0
            return 128 + number, f"the program was ended by signal {number}"
        case CallStatus.TIMEOUT:
            return EXIT_TIMEOUT, f"stopped after {used.wall_s:.2f} s and {used.cpu_s:.2f} s of CPU"
        case CallStatus.MEMORY_LIMIT:
            return EXIT_MEMORY_LIMIT, f"stopped at {used.memory_peak_bytes / MIB:.0f} MiB of memory"
        case CallStatus.OUTPUT_LIMIT:
            return EXIT_OUTPUT_LIMIT, "stopped at its limit on output, which was cut"
        case CallStatus.QUEUE_TIMEOUT | CallStatus.INTERNAL_ERROR:
            return EXIT_FAULT, result.reason or "the service failed, and not the program"


def _read_text(file: str) -> str:
    try:
        return (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"cannot read {file}: {exc}") from exc


@app.command("map")
def map_file(
    file: Annotated[Path, typer.Argument(help="One call a line, as JSON; only `code` is required.")],
    output: Annotated[Path | None, typer.Option("-o", help="Where results go. [default: stdout]")] = None,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="Ignore fields of a line that are none of a call.")
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Run many programs: a JSON line for each call in, a JSON line for each answer out, in the same order.

    An answer is a result, or {"id", "error"} if the call got none. All lines are checked before the first
    call is sent. OUTPUT is replaced when all answers are there; until then they are in OUTPUT.part. The exit
    code is 1 if any answer is no verdict on its program.
    """
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is no regular file: its lines are read twice, so save them in one first")
    total = sum(1 for _ in jsonl.read_calls(file, lenient=lenient))
    if output and any(place.exists() and place.samefile(file) for place in (output, jsonl.part_of(output))):
        raise ConfigError(f"{output} would overwrite the calls in {file}; give another file")
    statuses: Counter[str] = Counter()
    with (
        _telling_what_is_there(output),
        Progress(*_COLUMNS, console=Console(stderr=True)) as progress,
        jsonl.writing(output) as out,
    ):
        bar = progress.add_task("calls", total=total)

        def write(call: ToolCall, answer: Answer) -> None:
            statuses[type(answer).__name__ if isinstance(answer, SandboxError) else answer.status] += 1
            out.write(jsonl.to_line(call, answer))

        calls = jsonl.read_calls(file, lenient=lenient)
        asyncio.run(
            jsonl.run_in_order(
                url, calls, write, on_done=lambda: progress.advance(bar), api_key=api_keys.key_of_caller()
            )
        )
    print(", ".join(f"{count} {word}" for word, count in statuses.most_common()), file=sys.stderr)
    verdicts = {status.value for status in CallStatus if not status.is_fault}
    raise typer.Exit(0 if statuses.keys() <= verdicts else 1)


@contextlib.contextmanager
def _telling_what_is_there(output: Path | None) -> Iterator[None]:
    """Say where the answers of an attempt are that did not get to its end."""
    try:
        yield
    except BaseException:
        if output and (part := jsonl.part_of(output)) != output.resolve() and part.exists():
            if part.stat().st_size:
                print(f"sandbox: the answers so far are in {part}", file=sys.stderr)
            else:
                part.unlink()
        raise


@app.command()
def mcp(url: Url = DEFAULT_URL) -> None:
    """Serve the Model Context Protocol over stdin and stdout, for programs that start their tools themselves.

    A gateway runs the calls; gateways also speak it themselves, at /mcp. The key in SANDBOX_API_KEY is shown to it.
    """
    _need("mcp", "mcp", "mcp")
    from sandbox.mcp_server import serve_stdio  # noqa: PLC0415 - the SDK takes a second

    # A model waits: a service that is not there shall not look like one that is slow.
    asyncio.run(serve_stdio(url, api_key=api_keys.key_of_caller(), attempts=5, patience_s=10.0))


@app.command()
def doctor() -> None:
    """Say what this host offers and lacks for the level that jail.level sets, and the remedy for what it lacks.

    Where nothing is lacking it opens a jail and tries its walls, as a worker does at its start.
    """
    from sandbox.jail.hostcheck import check_host, lacking  # noqa: PLC0415 - needs the server's packages
    from sandbox.jail.selftest import try_level  # noqa: PLC0415

    jail = load_settings().jail
    checks = check_host(jail)
    if not lacking(checks, jail.level):
        checks += asyncio.run(try_level(jail))
    # What reads a pipe wants each check on a line of its own, however long.
    is_terminal = sys.stdout.isatty()
    console = Console() if is_terminal else Console(width=10_000)
    for level in dict.fromkeys(check.level for check in checks):
        table = Table("check", "", title=level, title_justify="left", expand=is_terminal)
        table.add_column("found", overflow="fold")
        table.add_column("remedy", overflow="fold")
        for check in checks:
            if check.level == level:
                table.add_row(check.name, _MARKS[check.ok], escape(check.found), escape(check.remedy))
        console.print(table)
    if lacks := lacking(checks, jail.level):
        raise ConfigError(f"this host does not give the level {jail.level}: {', '.join(lacks)}")
    console.print(f"This host gives the level {jail.level}.")


@runtime_app.command()
def build(
    python: Annotated[
        Path | None,
        typer.Option(help="Interpreter for programs. [default: Python 3.13 or 3.12 of this host, else ours]"),
    ] = None,
    packages: Annotated[Path | None, typer.Option(help="Requirements file in place of ours.")] = None,
) -> None:
    """Make or renew the environment that programs see, at the place that the setting jail.runtime names."""
    from sandbox.jail import runtime  # noqa: PLC0415 - needs the server's packages

    path = load_settings().jail.runtime
    runtime.build(path, python=python, packages=packages, report=lambda line: print(line, file=sys.stderr))
    print(path)


@keys_app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Who it is for: a-z, 0-9, _ and -, up to 64 of them.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(help="What it is good for: run (calls), admin (metrics, dead letters). [default: run]"),
    ] = None,
) -> None:
    """Make an API key: its only copy on the first line, and below it the lines for the gateway's keys file.

    The file, which the setting gateway.keys_file names, has a digest only, so a key that was lost cannot be
    found again. Gateways see within a second that the file has changed.
    """
    if not re.fullmatch(api_keys.TENANT_PATTERN, tenant):
        raise typer.BadParameter(f"{tenant!r} is no name for a tenant: up to 64 of a-z, 0-9, _ and -")
    try:
        scopes = TypeAdapter(list[api_keys.Scope]).validate_python(scope or ["run"])
    except ValidationError as exc:
        raise typer.BadParameter("a scope is run or admin") from exc
    key = api_keys.new_key()
    print(f"{key}\n\n{api_keys.stanza(key, tenant, scopes)}", end="")


@app.command()
def version() -> None:
    """Print the version."""
    print(importlib.metadata.version("roc-sandbox"))
