"""All sections of the table, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from loadtest.table import costs, forecast, loads
from loadtest.table.rows import Row, Size


class Section(NamedTuple):
    """Rows that one tool measures. What it raises becomes a row as well."""

    what: str
    command: str  # that repeats it
    measure: Callable[[Size], Iterator[Row]]


SECTIONS = (
    Section("start until the first result", "make demo", costs.start),
    Section("CPU of gateway and queue", costs.EDGE, costs.edge),
    Section("CPU of the jail", costs.COSTS, costs.walls),
    Section("CPU of the client", costs.CLIENT, costs.client),
    Section("calls through HTTP", loads.CALLERS, loads.closed_loop),
    Section("latency at low load", loads.BENCH, loads.low_load),
    Section("latency at loads that grow", loads.BENCH, loads.sweep),
    Section("CPU with more processes", loads.SCALING, loads.scaling),
    Section("requests open at once", loads.SOCKETS, loads.sockets),
    Section("batches in flight at once", loads.INFLIGHT, loads.inflight),
    Section("predictions beside measurements", forecast.VALIDATE, forecast.validation),
    Section("what very many calls need", forecast.PLAN, forecast.cores),
)
