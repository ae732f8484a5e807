"""`sandbox bench`."""

from __future__ import annotations

import typer

bench_app = typer.Typer(help="Measure a service under load.")
