"""`python -m loadtest.agreement FILE.jsonl`: what programs print here, and what they printed elsewhere.

Sends every program of a corpus (lines with `id`, `code`, `stdout`) through HTTP and lists each whose stdout
is not the recorded one, a last newline aside, with both outputs and our status. A program that was recorded
as timed out must be a `timeout` here too; the latencies of the calls beside it show whether it held up
others. Exit code 1 when such a program ended in another way, or when any call got no verdict.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from loadtest.corpus import Agreement, Recorded, compare, read_corpus
from loadtest.stack import service_at
from loadtest.terminal import counted, make_console, print_error
from loadtest.timing import Answered, ask_all, percentile
from sandbox import CallStatus, SandboxClient, SandboxError, ToolCall


def main(
    file: Annotated[Path, typer.Argument(help="Recorded programs, one JSON object a line.")],
    url: Annotated[str, typer.Option(help="A gateway that runs; without it, a stack of our own.")] = "",
    callers: Annotated[int, typer.Option(min=1, help="Calls in flight at a time.")] = 8,
) -> None:
    """Compare what programs print here with what was recorded elsewhere."""
    console = make_console()
    try:
        recorded = read_corpus(file)
        with service_at(url) as base:
            answers = asyncio.run(_send(console, base, recorded, callers))
    except SandboxError as exc:
        print_error(console, exc)
        raise typer.Exit(1) from exc
    _print_differences(console, recorded, answers)
    _print_counts(console, recorded, answers)
    endless_held = _print_endless(console, recorded, answers)
    raise typer.Exit(0 if endless_held and all(_has_verdict(answered) for answered in answers) else 1)


async def _send(console: Console, url: str, recorded: Sequence[Recorded], callers: int) -> list[Answered]:
    calls = [ToolCall(code=program.code) for program in recorded]
    async with SandboxClient(url) as client:
        await client.run("print('ready')")
        with counted(console, "recorded programs", len(calls)) as count:
            return await ask_all(client, calls, callers, count)


def _print_differences(console: Console, recorded: Sequence[Recorded], answers: Sequence[Answered]) -> None:
    for program, answered in zip(recorded, answers, strict=True):
        if compare(program, answered.outcome) is not Agreement.EXACT:
            ours, errors = _both_streams(answered)
            console.print(Text(f"{program.id}: {answered.status}", style="bold"))
            console.print(Text(f"    recorded {program.stdout!r}\n    here     {ours!r}  {errors!r}"))


def _both_streams(answered: Answered) -> tuple[str, str]:
    """Stdout and the last line of stderr."""
    if isinstance(answered.outcome, SandboxError):
        return "", str(answered.outcome)
    return answered.outcome.stdout, answered.outcome.stderr.rstrip("\n").rpartition("\n")[2]


def _print_counts(console: Console, recorded: Sequence[Recorded], answers: Sequence[Answered]) -> None:
    pairs = zip(recorded, answers, strict=True)
    agreement = Counter(compare(program, answered.outcome) for program, answered in pairs)
    statuses = Counter(answered.status for answered in answers)
    seconds = max(a.answered_s for a in answers) - min(a.sent_s for a in answers)
    console.print(f"{len(answers)} programs in {seconds:.1f} s, {len(answers) / seconds:.0f} calls/s")
    console.print("agreement:", ", ".join(f"{kind.value} {agreement[kind]}" for kind in Agreement))
    console.print("statuses: ", ", ".join(f"{name} {count}" for name, count in statuses.most_common()))
    console.print("latency:  ", _latencies(answers))


def _print_endless(console: Console, recorded: Sequence[Recorded], answers: Sequence[Answered]) -> bool:
    """Whether each program that had timed out elsewhere is a `timeout` here; shows the calls beside it."""
    held = True
    for program, endless in zip(recorded, answers, strict=True):
        if program.timed_out:
            held = held and endless.status == CallStatus.TIMEOUT
            beside = [
                other
                for other in answers
                if other is not endless
                and other.sent_s < endless.answered_s
                and other.answered_s > endless.sent_s
            ]
            console.print(f"{program.id} has no end: {endless.status} after {endless.latency_s:.1f} s")
            console.print(f"    {len(beside)} calls beside it: {_latencies(beside)}")
    return held


def _latencies(answers: Sequence[Answered]) -> str:
    latencies = [answered.latency_s for answered in answers]
    return ", ".join(
        f"p{share} {percentile(latencies, share / 100) * 1000:.0f} ms" for share in (50, 99, 100)
    )


def _has_verdict(answered: Answered) -> bool:
    return not isinstance(answered.outcome, SandboxError) and not answered.outcome.status.is_fault


if __name__ == "__main__":
    typer.run(main)
