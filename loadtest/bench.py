"""`sandbox bench`."""

from __future__ import annotations

import typer

from loadtest.inflight import inflight
from loadtest.sockets import sockets

bench_app = typer.Typer(help="Measure a service under load.")
bench_app.command()(sockets)
bench_app.command()(inflight)
