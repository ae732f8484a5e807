"""How many processes so many connections take."""

from __future__ import annotations

import resource

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loadtest.sizing import MOST_GATEWAYS, RESERVE, HostLimits, plan
from sandbox import ConfigError

COMMON = HostLimits(descriptors=20_000, ports=28_232, backlog=4096)


def test_what_the_issue_asks_for_fits_here() -> None:
    """45,000 connections over three gateways take three clients where a process may open 20,000 files."""
    sized = plan(45_000, 3, COMMON)
    assert (sized.gateways, sized.crowds, sized.note) == (3, (15_000, 15_000, 15_000), "")


def test_too_few_gateways_become_more_and_it_is_said() -> None:
    """Two gateways would have 22,500 connections each, so there are three, and the note says why."""
    sized = plan(45_000, 2, COMMON)
    assert sized.gateways == 3
    assert "each of 2 gateway process(es), and a process may open 20000 files" in sized.note
    assert sized.note.endswith("3 gateways instead")


def test_a_share_at_the_limit_is_too_much() -> None:
    """The kernel deals by chance, so a gateway whose mean share is all that it may have would get more."""
    limits = HostLimits(descriptors=15_000 + RESERVE, ports=28_232, backlog=4096)
    assert plan(45_000, 3, limits).gateways == 4
    assert plan(15_000, 1, limits).gateways == 1  # where there is no chance


def test_ports_bound_a_client_where_files_do_not() -> None:
    """With files for a million, a client has no more connections than its address has ports for."""
    sized = plan(45_000, 1, HostLimits(descriptors=1_000_000, ports=28_232, backlog=4096))
    assert sized.crowds == (15_000, 15_000, 15_000)
    assert sized.gateways == 1


@pytest.mark.parametrize("descriptors", [RESERVE - 1, RESERVE, 1024])
def test_what_no_number_of_processes_helps_is_refused(descriptors: int) -> None:
    """Limits that are far too low stop the start, with the limit in the message; nothing gets smaller by itself."""
    with pytest.raises(ConfigError, match=str(descriptors)):
        plan(45_000, 3, HostLimits(descriptors=descriptors, ports=28_232, backlog=4096))


@given(
    connections=st.integers(1, 100_000),
    gateways=st.integers(1, MOST_GATEWAYS),
    descriptors=st.integers(RESERVE + 1, 100_000),
    ports=st.integers(100, 60_000),
    backlog=st.integers(1, 65_535),
)
def test_every_plan_keeps_the_limits(
    connections: int, gateways: int, descriptors: int, ports: int, backlog: int
) -> None:
    """A plan has all connections that were asked for, and no process, address or queue above its bound."""
    limits = HostLimits(descriptors, ports, backlog)
    try:
        sized = plan(connections, gateways, limits)
    except ConfigError:
        assume(False)
        return
    assert sized.connections == connections
    assert sized.gateways >= gateways
    assert (sized.gateways > gateways) == bool(sized.note)
    assert connections / sized.gateways <= limits.connections
    assert min(sized.crowds) > 0
    assert max(sized.crowds) <= min(limits.connections, ports)
    assert max(sized.crowds) - min(sized.crowds) <= 1
    assert sized.burst >= 1
    assert sized.burst == 1 or sized.queue + sized.burst * len(sized.crowds) <= backlog


def test_limits_are_those_of_this_process() -> None:
    """What is read here is what the kernel lets this process have."""
    limits = HostLimits.read()
    assert limits.descriptors == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert limits.ports > 0
    assert limits.backlog > 0
