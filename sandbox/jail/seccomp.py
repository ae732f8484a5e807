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

from sandbox.errors import ConfigError

Stage = Literal["all", "program"]

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000

#: AUDIT_ARCH_* of the machines we know.
_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}


@dataclass(frozen=True, slots=True)
class Rule:
    """One denied call on one machine."""

    stage: Stage
    answer: int
    number: int
    name: str
    argument: int | None = None
    operator: Literal["==", "!=", "&", ""] = ""
    operand: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """All rules for one machine, and the newest call number that was reviewed."""

    rules: tuple[Rule, ...]
    newest: int


_RULE = re.compile(
    r"(?P<stage>all|program)\s+(?P<answer>[A-Z]+)\s+(?P<x86_64>\d+|-)\s+(?P<aarch64>\d+|-)\s+(?P<name>\w+)"
    r"(?:\s+arg(?P<argument>[0-5])\s*(?P<operator>==|!=|&)\s*(?P<operand>0x[0-9a-f]+|\d+))?"
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
        elif (match := _RULE.fullmatch(content)) and match["answer"] in errno.errorcode.values():
            if match[machine] != "-":
                rules.append(_rule(match, machine))
        else:
            raise ConfigError(f"line {number} of the system call policy is not understood: {content}")
    if newest is None:
        raise ConfigError("the system call policy names no newest call")
    return Policy(tuple(rules), newest)


def _rule(match: re.Match[str], machine: str) -> Rule:
    stage: Stage = "all" if match["stage"] == "all" else "program"
    rule = Rule(stage, getattr(errno, match["answer"]), int(match[machine]), match["name"])
    if match["argument"] is None:
        return rule
    return Rule(
        stage, rule.answer, rule.number, rule.name, int(match["argument"]),
        match["operator"], int(match["operand"], 0),  # type: ignore[arg-type] # the pattern admits just these
    )  # fmt: skip


def _instruction(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, constant)


def _deny(rule: Rule) -> list[bytes]:
    """Falls through with the call's number loaded when the rule does not apply."""
    answer = _instruction(_RETURN, _ERRNO | rule.answer)
    if rule.argument is None:
        return [_instruction(_IF_EQUAL, rule.number, 0, 1), answer]
    test = {
        "==": _instruction(_IF_EQUAL, rule.operand, 0, 1),
        "!=": _instruction(_IF_EQUAL, rule.operand, 1, 0),
        "&": _instruction(_IF_ANY_BIT, rule.operand, 0, 1),
    }[rule.operator]
    body = [_instruction(_LOAD, _ARGUMENTS + 8 * rule.argument), test, answer, _instruction(_LOAD, _NUMBER)]
    return [_instruction(_IF_EQUAL, rule.number, 0, len(body)), *body]


def compile_filter(policy: Policy, stage: Stage, machine: str) -> bytes:
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
    mine = [rule for rule in policy.rules if rule.stage == stage]
    for rule in sorted(
        mine, key=lambda rule: rule.argument is None
    ):  # the kernel caches plain answers, not these
        program += _deny(rule)
    program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


def filters(machine: str | None = None) -> tuple[bytes, bytes]:
    """The shipped policy for this machine: the forkserver's stage, and the program's on top of it."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise ConfigError(f"the jail knows {' and '.join(_ARCHITECTURES)}, and this machine is {machine}")
    text = resources.files("sandbox.jail").joinpath("policy.seccomp").read_text(encoding="utf-8")
    policy = parse(text, machine)
    return compile_filter(policy, "all", machine), compile_filter(policy, "program", machine)
