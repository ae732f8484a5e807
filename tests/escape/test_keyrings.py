"""The kernel's keyrings, which outlive processes, are closed."""

from __future__ import annotations

from tests.sandbox.jail.box import Box

from .probe import outcomes


def test_no_key_calls(box: Box) -> None:
    """No key can be made, looked for, linked or listed, in whichever ring."""
    code = """
for ring in range(-8, 1):
    attempt(f"add{ring}", lambda: syscall("add_key", b"user", b"name", b"payload", 7, ring))
    attempt(f"search{ring}", lambda: syscall("keyctl", 10, ring, b"user", b"name", 0))
    attempt(f"id{ring}", lambda: syscall("keyctl", 0, ring, 1, 0, 0))
attempt("request", lambda: syscall("request_key", b"user", b"name", 0, -3))
attempt("join", lambda: syscall("keyctl", 1, b"session", 0, 0, 0))
attempt("list", lambda: open("/proc/keys").read())
attempt("users", lambda: open("/proc/key-users").read())
"""
    assert set(outcomes(box, code).values()) <= {"EPERM", "ENOENT"}
