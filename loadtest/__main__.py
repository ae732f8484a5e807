"""`python -m loadtest`, which is also `sandbox bench` and `sandbox plan`."""

from __future__ import annotations

import sys

import typer

from loadtest.bench import bench_app
from loadtest.plan import plan_app
from sandbox.errors import SandboxError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
app.add_typer(bench_app, name="bench")
app.add_typer(plan_app, name="plan")


def main() -> int:
    """An error of ours is one line on stderr and exit code 1."""
    try:
        app(prog_name="sandbox")
    except SandboxError as exc:
        print(f"sandbox: {exc.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
