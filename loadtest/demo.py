"""`python -m loadtest.demo`: real calls through the whole service, and what came of them.

Starts the stack by `sandbox up` on a free port, sends every example call that ships with the project and,
where the file is there, programs of a corpus, all through HTTP with the client that everybody uses. Exit code
1 when an example does not give its expected outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import JsonValue
from rich.console import Console
from rich.text import Text

from loadtest.corpus import Agreement, Recorded, compare, read_corpus
from loadtest.samples import Sample, complaints, load_samples
from loadtest.stack import own_stack
from loadtest.terminal import counted, make_console, make_table, print_error
from loadtest.timing import Answered, ask_all, percentile
from sandbox import CallStatus, SandboxClient, SandboxError, ToolCall, ToolResult

DEFAULT_CORPUS = Path(__file__).parents[2] / "shared" / "data" / "tora_gsm8k_70b.jsonl"
_FIRST_OF_CORPUS = 200
#: One example of each verdict, shown with what it printed.
SHOWN = (
    "sympy_two_unknowns",
    "error_zero_division",
    "signal_segfault",
    "limit_endless_loop",
    "limit_memory",
    "limit_output_flood",
)
_COLOURS = {CallStatus.OK: "green", CallStatus.ERROR: "yellow"}  # every other one is red


@dataclass(frozen=True, slots=True)
class Run:
    """The answers to one set of calls."""

    name: str
    answers: Sequence[Answered]
    as_expected: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Seen:
    """All that one demonstration saw."""

    cold_start_s: float
    status: dict[str, JsonValue]
    samples: Sequence[Sample]
    runs: Sequence[Run]  # the first is that of the samples


def main(
    corpus: Annotated[
        Path | None,
        typer.Option(help="Recorded programs, one JSON object a line; by default ToRA's, if there."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All programs of the corpus.")] = False,
    callers: Annotated[int, typer.Option(min=1, help="Calls in flight at a time.")] = 8,
) -> None:
    """Run real tool calls through the whole service and show what came of them."""
    console = make_console()
    samples = load_samples()
    file = corpus or (DEFAULT_CORPUS if DEFAULT_CORPUS.is_file() else None)
    try:
        recorded = read_corpus(file, None if everything else _FIRST_OF_CORPUS) if file else []
        seen = _demonstrate(console, samples, recorded, callers)
    except SandboxError as exc:
        print_error(console, exc)
        raise typer.Exit(1) from exc
    _print_verdicts(console, seen)
    _print_runs(console, seen, file)
    failed = _print_failures(console, seen)
    raise typer.Exit(1 if failed else 0)


def _demonstrate(
    console: Console, samples: Sequence[Sample], recorded: Sequence[Recorded], callers: int
) -> Seen:
    console.print("Starting gateway, queue and workers …")
    started = time.perf_counter()
    with own_stack() as (url, _):

        async def send() -> Seen:
            async with SandboxClient(url) as client:
                await client.run("print('ready')")
                cold_start_s = time.perf_counter() - started
                console.print(f"The first result came after {cold_start_s:.1f} s from {url}")
                runs = [await _run_samples(client, console, samples, callers)]
                if recorded:
                    runs.append(await _run_recorded(client, console, recorded, callers))
                return Seen(cold_start_s, await client.status(), samples, runs)

        seen = asyncio.run(send())
        console.print("Stopping what was started …")
    return seen


async def _run_samples(
    client: SandboxClient, console: Console, samples: Sequence[Sample], callers: int
) -> Run:
    answers, seconds = await _send(
        client, console, "example calls", [sample.call for sample in samples], callers
    )
    as_expected = sum(
        not complaints(sample.expected, answered.outcome)
        for sample, answered in zip(samples, answers, strict=True)
    )
    return Run("example calls", answers, as_expected, seconds)


async def _run_recorded(
    client: SandboxClient, console: Console, recorded: Sequence[Recorded], callers: int
) -> Run:
    calls = [ToolCall(code=program.code) for program in recorded]
    answers, seconds = await _send(client, console, "recorded programs", calls, callers)
    as_expected = sum(
        compare(program, answered.outcome) is not Agreement.NONE
        for program, answered in zip(recorded, answers, strict=True)
    )
    return Run("recorded programs", answers, as_expected, seconds)


async def _send(
    client: SandboxClient, console: Console, name: str, calls: Sequence[ToolCall], callers: int
) -> tuple[list[Answered], float]:
    with counted(console, f"{name:<18}", len(calls)) as count:
        started = time.perf_counter()
        answers = await ask_all(client, calls, callers, count)
        return answers, time.perf_counter() - started


def _print_verdicts(console: Console, seen: Seen) -> None:
    table = make_table("One example of each verdict")
    table.add_column("verdict", no_wrap=True)
    table.add_column("example and what it shows", ratio=5)
    table.add_column("ended by", no_wrap=True)
    table.add_column("output", ratio=6)
    by_name = {s.name: (s, a) for s, a in zip(seen.samples, seen.runs[0].answers, strict=True)}
    for sample, answered in map(by_name.__getitem__, SHOWN):
        if isinstance(answered.outcome, ToolResult):
            table.add_row(
                Text(answered.status, style=_COLOURS.get(answered.outcome.status, "red")),
                Text.assemble(sample.name, "\n", (sample.shows, "dim")),
                _ending(answered.outcome),
                _output(answered.outcome),
            )
    console.print(table)


def _ending(result: ToolResult) -> str:
    how = "a limit"
    if result.status is CallStatus.SIGNALED:
        how = f"signal {result.signal}"
    elif result.exit_code is not None:
        how = f"exit {result.exit_code}"
    return f"{how}\n{result.usage.wall_s:.2f} s\n{result.usage.memory_peak_bytes / 1e6:.0f} MB"


def _output(result: ToolResult) -> Text:
    out = [Text(_excerpt(line)) for line in result.stdout.splitlines()[:2]]
    errors = [Text(f"stderr: {_excerpt(line)}", style="red") for line in result.stderr.splitlines()[-1:]]
    return Text("\n").join(out + errors)


def _excerpt(line: str, width: int = 60) -> str:
    """The start of a line, without the control characters that would steer the reader's terminal."""
    line = "".join(char if char.isprintable() else "·" for char in line)
    return line if len(line) <= width else f"{line[:width]}…"


def _print_runs(console: Console, seen: Seen, corpus: Path | None) -> None:
    table = make_table("All calls")
    table.add_column("", no_wrap=True)
    for heading in ("calls", "as expected", "calls/s", "p50", "p99", "added p50", "added p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in seen.runs:
        latencies = [answered.latency_s for answered in run.answers]
        added = [answered.added_s for answered in run.answers if answered.added_s is not None]
        milliseconds = [percentile(of, share) * 1000 for of in (latencies, added) for share in (0.5, 0.99)]
        table.add_row(
            run.name,
            str(len(run.answers)),
            str(run.as_expected),
            f"{len(run.answers) / run.seconds:.0f}",
            *(f"{value:.0f} ms" for value in milliseconds),
        )
    console.print(table)
    statuses = Counter(answered.status for run in seen.runs for answered in run.answers)
    for name, text in (
        ("statuses", ", ".join(f"{status} {count}" for status, count in statuses.most_common())),
        ("added", "what a caller waits beyond the program's own run time, waiting in line included"),
        ("isolation", _levels(seen.status)),
        ("cold start", f"{seen.cold_start_s:.1f} s from nothing to the first result"),
        ("recorded", str(corpus) if corpus else "no programs; --corpus FILE names some"),
    ):
        console.print(Text(f"{name:<12}{text}"))


def _levels(status: dict[str, Any]) -> str:
    return ", ".join(sorted({worker["level"] for worker in status["workers"]}))


def _print_failures(console: Console, seen: Seen) -> int:
    """Every example that did not give its outcome, and why. Returns how many."""
    failed = 0
    console.print()
    for sample, answered in zip(seen.samples, seen.runs[0].answers, strict=True):
        if reasons := complaints(sample.expected, answered.outcome):
            failed += 1
            console.print(Text.assemble((f"{sample.name}: ", "red"), "; ".join(reasons)))
    total = len(seen.samples)
    if failed:
        console.print(
            Text(f"{failed} of {total} example calls did not give the expected outcome.", style="red")
        )
    else:
        console.print(Text(f"All {total} example calls gave the expected outcome.", style="green"))
    return failed


if __name__ == "__main__":
    typer.run(main)
