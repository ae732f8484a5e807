"""The compiled filters do what policy.seccomp says, on both machines, by a plain reading and a tiny BPF interpreter."""

from __future__ import annotations

import errno
import re
import struct
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.calls import Network
from sandbox.errors import ConfigError
from sandbox.jail import seccomp
from sandbox.jail.seccomp import parse

TEXT = resources.files("sandbox.jail").joinpath("policy.seccomp").read_text(encoding="utf-8")
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
OTHERS = {"i386": 0x40000003, "arm": 0x40000028, "none": 0}
NETWORKS = get_args(Network)
FILTERS = {
    (network, machine): (
        *seccomp.filters(network, machine),
        seccomp.filters(network, machine, is_shared=True)[1],
    )
    for network in NETWORKS
    for machine in MACHINES
}
#: The places of rules that each filter is made of.
STAGES = {"all": {"all"}, "program": {"program"}, "shared": {"program", "shared"}}
ALLOW, KILL, X32 = "allow", "kill", 0x4000_0000


# ---- what the policy says: a reading that shares no code with the compiler ----


@dataclass(frozen=True)
class Line:
    """One rule of the text."""

    stage: str
    networks: tuple[str, ...]
    answer: str
    numbers: dict[str, int]  # by machine; a machine that lacks the call is not here
    name: str
    condition: str


def read_lines() -> list[Line]:
    """The rules, word by word."""
    lines = []
    for text in TEXT.splitlines():
        words = text.partition("#")[0].split(maxsplit=5)
        if len(words) >= 5:
            stage, answer, x86, arm, name = words[:5]
            numbers = {m: int(n) for m, n in (("x86_64", x86), ("aarch64", arm)) if n != "-"}
            stage, _, network = stage.partition("/")
            networks = (network,) if network else NETWORKS
            lines.append(Line(stage, networks, answer, numbers, name, words[5] if len(words) > 5 else ""))
    return lines


LINES = read_lines()
NEWEST = int(re.findall(r"^newest (\d+)$", TEXT, re.MULTILINE)[0])


def holds(condition: str, arguments: tuple[int, ...]) -> bool:
    """Whether a rule's condition is true; its words happen to be Python."""
    names = {f"arg{n}": value & 0xFFFF_FFFF for n, value in enumerate(arguments)}
    return not condition or bool(eval(condition, {}, names))


def said(stage: str, network: str, machine: str, number: int, arguments: tuple[int, ...]) -> str:
    """The answer to one call, by the text."""
    if number > NEWEST:
        return "ENOSYS"
    for line in LINES:
        applies = (
            line.stage in STAGES[stage] and network in line.networks and line.numbers.get(machine) == number
        )
        if applies and holds(line.condition, arguments):
            return line.answer
    return ALLOW


# ---- what the filter does ----


def interpret(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = (0,) * 6) -> str:
    """Run a filter as the kernel does, on one call."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments)
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator, counter = 0, 0
    while True:
        code, if_true, if_false, constant = instructions[counter]
        counter += 1
        match code:
            case 0x20:  # load a word of the call
                (accumulator,) = struct.unpack_from("<I", data, constant)
            case 0x15:
                counter += if_true if accumulator == constant else if_false
            case 0x35:
                counter += if_true if accumulator >= constant else if_false
            case 0x45:
                counter += if_true if accumulator & constant else if_false
            case 0x06:
                action, value = constant & 0xFFFF_0000, constant & 0xFFFF
                return {0x7FFF_0000: ALLOW, 0x8000_0000: KILL}.get(action) or {0: "OK", **errno.errorcode}[
                    value
                ]
            case _:
                pytest.fail(f"an instruction that we do not use: {code:#x}")


def did(stage: str, network: str, machine: str, number: int, arguments: tuple[int, ...] = (0,) * 6) -> str:
    """The answer to one call, by the filter of a stage."""
    program = FILTERS[network, machine][list(STAGES).index(stage)]
    return interpret(program, MACHINES[machine], number, arguments)


# ---- both agree ----

stages = st.sampled_from(list(STAGES))
networks = st.sampled_from(NETWORKS)
machines = st.sampled_from(list(MACHINES))
#: Numbers around those of the policy, and arguments around those that it looks at, so that each branch is met.
numbers = st.sampled_from([n for line in LINES for n in line.numbers.values()]) | st.integers(0, 0xFFFF_FFFF)
OPERANDS = [
    3,
    *(int(text, 0) for line in LINES for text in re.findall(r"\b(?:0x[0-9a-f]+|\d+)\b", line.condition)),
]
values = (
    st.sampled_from([*OPERANDS, 0, 37, 0x80, 0x8000, 0x10000000, 17])
    | st.sampled_from([1 << bit for bit in range(64)])
    | st.integers(0, 2**64 - 1)
)


@given(stages, networks, machines, numbers, st.tuples(*[values] * 6))
@settings(max_examples=500, deadline=None)
def test_filter_and_text_agree(
    stage: str, network: str, machine: str, number: int, arguments: tuple[int, ...]
) -> None:
    """Whatever the call, the filter answers what the text says."""
    assert did(stage, network, machine, number, arguments) == said(stage, network, machine, number, arguments)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_is_answered(network: str, machine: str) -> None:
    """Each call number up to far above the newest is answered as the text says, in all stages."""
    for stage in STAGES:
        for number in [*range(NEWEST + 64), X32, X32 + 59, 2**32 - 1]:
            assert did(stage, network, machine, number) == said(stage, network, machine, number, (0,) * 6), (
                stage,
                number,
            )


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.name} {line.condition}".strip())
def test_each_rule(line: Line) -> None:
    """Each rule denies on each machine that has the call."""
    arguments = [0] * 6
    for test in filter(None, line.condition.split(" and ")):  # each from all operands that any rule names
        arguments[int(test[3])] = next(value for value in OPERANDS if holds(test, (value,) * 6))
    assert holds(line.condition, tuple(arguments))
    for machine, number in line.numbers.items():
        for network in line.networks:
            assert did(line.stage, network, machine, number, tuple(arguments)) == line.answer


@pytest.mark.parametrize("machine", MACHINES)
def test_ordinary_calls_pass(machine: str) -> None:
    """What every program needs is let through by both stages, and so is what libc falls back to."""
    names = {
        "x86_64": {"read": 0, "write": 1, "mmap": 9, "fork": 57, "execve": 59, "socketpair": 53, "openat": 257, "clone": 56},
        "aarch64": {"read": 63, "write": 64, "mmap": 222, "execve": 221, "socketpair": 199, "openat": 56, "clone": 220},
    }  # fmt: skip
    thread = 0x3D0F00  # what pthread_create asks of clone
    for name, number in names[machine].items():
        arguments = (thread if name == "clone" else 1,) * 6
        for stage in ("all", "program"):
            assert did(stage, "none", machine, number, arguments) == ALLOW, name


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("flag", [0x80, 0x8000, *(1 << bit for bit in (17, 25, 26, 27, 28, 29, 30))])
def test_clone_flags_that_widen_the_jail(machine: str, flag: int) -> None:
    """No namespace and no sibling of the program can be asked of clone, whatever stands in its other half."""
    number = {"x86_64": 56, "aarch64": 220}[machine]
    for high in (0, 0xFFFF_FFFF << 32):
        assert did("program", "none", machine, number, (high | flag | 17, 0, 0, 0, 0, 0)) == "EPERM"


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("number", [0, 1, 59, NEWEST, NEWEST + 1, 2**32 - 1])
def test_another_architecture_kills(stage: int, machine: str, number: int) -> None:
    """Numbers of another architecture mean other calls, so the first one ends the process."""
    program = seccomp.filters("none", machine)[stage]
    for other in {**MACHINES, **OTHERS}.values():
        if other != MACHINES[machine]:
            assert interpret(program, other, number) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_filters_fit(machine: str) -> None:
    """The kernel takes at most 4096 instructions, and no jump leaves the filter."""
    for program in [*FILTERS["none", machine], *FILTERS["loopback", machine]]:
        instructions = list(struct.iter_unpack("<HBBI", program))
        assert len(instructions) <= 4096
        for position, (code, if_true, if_false, _) in enumerate(instructions):
            assert code == 0x06 or position + 1 + max(if_true, if_false) < len(instructions)


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernel(machine: str) -> None:
    """Every number belongs to the call whose name stands beside it."""
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not here (Debian: linux-libc-dev)")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text(encoding="ascii"))
    known = {name: int(number) for name, number in found}
    assert len(known) > 250
    # A call has a number here, or is one that the machine never had, or is newer than the headers.
    names = {line.name for line in LINES} & known.keys()
    numbers = {name: {line.numbers.get(machine) for line in LINES if line.name == name} for name in names}
    # What tells the machines apart has a line for each.
    assert {name: found - {None} for name, found in numbers.items()} == {
        name: {known[name]} for name in names
    }


class TestReading:
    """`parse`, and the kinds of text that are no policy."""

    @pytest.mark.parametrize(
        "line",
        [
            "all EPERM 1 2",
            "some EPERM 1 2 read",
            "all eperm 1 2 read",
            "all EPERM one 2 read",
            "all EPERM 1 2 read arg6 == 1",
            "all EPERM 1 2 read arg1 > 1",
            "all EPERM 1 2 read arg1 ==",
            "all EPERM 1 2 read arg1 == 1 and",
            "all EPERM 1 2 read arg1 == 1 or arg2 == 2",
            "all EPERM 1 2 read arg1 not in {}",
            "all/some EPERM 1 2 read",
            "newest",
            "newest x",
        ],
    )
    def test_a_line_that_is_not_understood(self, line: str) -> None:
        """A mistake is named with its line, and never taken for a comment."""
        with pytest.raises(ConfigError, match="line 3 "):
            parse(f"newest 9\n# fine\n{line}\n", "x86_64")

    def test_an_unknown_answer(self) -> None:
        """An answer that is no error of the system is refused with its line."""
        with pytest.raises(ConfigError, match=r"line 1 .*EWHAT"):
            parse("all EWHAT 1 2 read\nnewest 9", "x86_64")

    def test_a_policy_without_newest(self) -> None:
        """A policy that reviewed no numbers would let all of them through."""
        with pytest.raises(ConfigError, match="newest"):
            parse("all EPERM 1 2 read", "x86_64")

    def test_a_call_that_a_machine_lacks(self) -> None:
        """A rule with a dash is left out on that machine."""
        text = "all EPERM 1 - read\nnewest 9"
        assert [rule.name for rule in parse(text, "x86_64").rules] == ["read"]
        assert parse(text, "aarch64").rules == ()

    def test_an_unknown_machine(self) -> None:
        """A machine whose calls we do not know is refused, not left open."""
        with pytest.raises(ConfigError, match="riscv64"):
            seccomp.filters("none", "riscv64")
