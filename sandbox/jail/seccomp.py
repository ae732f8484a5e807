"""Compiles policy.seccomp into the two filters of the jail: pure functions, text in, BPF out.

The kernel runs a filter on `struct seccomp_data`: the call's number at offset 0, the architecture at 4, and six
64-bit arguments from 16 on. Every argument that the policy looks at is 32 bits wide in the kernel too (commands,
flags of clone, address families), so the low half is all there is to compare.
"""

from __future__ import annotations

import errno
import platform
import re
import struct
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from sandbox.calls import Network
from sandbox.errors import ConfigError

Stage = Literal["all", "program"]
#: Where a rule stands: in a stage, or in the program's stage where programs share the worker's user with the host.
Place = Literal["all", "program", "shared"]

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000

#: AUDIT_ARCH_* of the machines we know.
_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}

#: What a denied call answers. OK is success without having done anything.
_ANSWERS = {"OK": 0} | {name: number for number, name in errno.errorcode.items()}


@dataclass(frozen=True, slots=True)
class Test:
    """A condition on the low half of one argument."""

    argument: int
    operator: Literal["==", "!=", "&", "not in"]
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One denied call on one machine, if all tests hold."""

    place: Place
    network: Network | None  # None: whatever the network
    answer: int
    number: int
    name: str
    tests: tuple[Test, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """All rules for one machine, and the newest call number that was reviewed."""

    rules: tuple[Rule, ...]
    newest: int


_NUMBER_TEXT = r"(?:0x[0-9a-f]+|\d+)"
_TEST = re.compile(
    rf"arg([0-5]) (==|!=|&) ({_NUMBER_TEXT})|arg([0-5]) (not in) \{{({_NUMBER_TEXT}(?:, {_NUMBER_TEXT})*)\}}"
)
_RULE = re.compile(
    r"(?P<place>all|program|shared)(?:/(?P<network>none|loopback))?\s+(?P<answer>[A-Z]+)\s+(?P<x86_64>\d+|-)\s+(?P<aarch64>\d+|-)"
    r"\s+(?P<name>\w+)(?:\s+(?P<tests>arg.+))?"
)


def parse(text: str, machine: str) -> Policy:
    """Read a policy for one machine. Raises ConfigError naming the line that is not understood."""
    rules, newest = [], None
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        if match := re.fullmatch(r"newest\s+(\d+)", content):
            newest = int(match[1])
        elif (match := _RULE.fullmatch(content)) and match["answer"] in _ANSWERS:
            if match[machine] != "-":
                rules.append(_rule(match, machine, number))
        else:
            raise ConfigError(f"line {number} of the system call policy is not understood: {content}")
    if newest is None:
        raise ConfigError("the system call policy names no newest call")
    return Policy(tuple(rules), newest)


def _rule(match: re.Match[str], machine: str, line: int) -> Rule:
    place: Place = match["place"]  # type: ignore[assignment] # the pattern admits just these
    network: Network | None = match["network"]  # type: ignore[assignment] # the pattern admits just these
    tests = tuple(_test(text, line) for text in (match["tests"] or "").split(" and ") if text)
    return Rule(place, network, _ANSWERS[match["answer"]], int(match[machine]), match["name"], tests)


def _test(text: str, line: int) -> Test:
    match = _TEST.fullmatch(text)
    if match is None:
        raise ConfigError(f"line {line} of the system call policy is not understood: {text}")
    argument, operator, operands = [group for group in match.groups() if group is not None]
    return Test(int(argument), operator, tuple(int(each, 0) for each in operands.split(", ")))  # type: ignore[arg-type]


def _instruction(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, constant)


def _deny(rule: Rule) -> list[bytes]:
    """Falls through with the call's number loaded when the rule does not apply."""
    body = [_instruction(_RETURN, _ERRNO | rule.answer)]
    if rule.tests:
        body.append(_instruction(_LOAD, _NUMBER))  # where a test that does not hold goes on
    for test in reversed(rule.tests):
        body = _jump_unless(test, len(body) - 1) + body
    return [_instruction(_IF_EQUAL, rule.number, 0, len(body)), *body]


def _jump_unless(test: Test, distance: int) -> list[bytes]:
    """Go on when the test holds, else as many instructions further."""
    load = _instruction(_LOAD, _ARGUMENTS + 8 * test.argument)
    first, *others = reversed(test.operands)
    match test.operator:
        case "==":
            return [load, _instruction(_IF_EQUAL, first, 0, distance)]
        case "&":
            return [load, _instruction(_IF_ANY_BIT, first, 0, distance)]
        case "!=" | "not in":
            jumps = [
                _instruction(_IF_EQUAL, each, distance + n, 0) for n, each in enumerate((first, *others))
            ]
            return [load, *reversed(jumps)]


def compile_filter(
    policy: Policy, stage: Stage, network: Network, machine: str, *, is_shared: bool = False
) -> bytes:
    """One stage as an array of `struct sock_filter`."""
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_IF_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
        # x32 numbers are above every reviewed one too.
        _instruction(_IF_AT_LEAST, policy.newest + 1, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    places = {stage, "shared"} if is_shared and stage == "program" else {stage}
    mine = [rule for rule in policy.rules if rule.place in places and rule.network in {None, network}]
    for rule in sorted(mine, key=lambda rule: not rule.tests):  # the kernel caches plain answers, not these
        program += _deny(rule)
    program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


def filters(
    network: Network = "none", machine: str | None = None, *, is_shared: bool = False
) -> tuple[bytes, bytes]:
    """The shipped policy for this machine: the forkserver's stage, and the program's on top of it.

    `is_shared`: programs run as a user who owns more of the host than their scratch folder.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise ConfigError(f"the jail knows {' and '.join(_ARCHITECTURES)}, and this machine is {machine}")
    text = resources.files("sandbox.jail").joinpath("policy.seccomp").read_text(encoding="utf-8")
    policy = parse(text, machine)
    return (
        compile_filter(policy, "all", network, machine),
        compile_filter(policy, "program", network, machine, is_shared=is_shared),
    )
