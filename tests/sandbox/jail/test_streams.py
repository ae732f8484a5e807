"""What is kept of a program's output: all up to the limit, or its head and its tail, and how much there was."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox.calls import MIB
from sandbox.jail.streams import Output

from .box import Box

#: Characters of one to four bytes.
TEXT = "aé語🎉"
WRITE = "import os, sys\ndata = sys.stdin.buffer.read()\nwhile data: data = data[os.write(1, data):]\n"
#: How a program ends after it has written, and its status.
ENDS = {
    "ok": "",
    "error": "sys.exit(3)",
    "timeout": "while True: pass",
    "memory_limit": "x = bytearray(200 << 20)",
    "signaled": "os.kill(os.getpid(), 11)",
}


def read_of(written: bytes, limit: int, keep: int | None) -> Output:
    """An output that has read all of what was written into its pipe, in pieces."""
    read_end, write_end = os.pipe()
    output = Output(read_end, limit, keep)
    for start in range(0, len(written), 5):
        os.write(write_end, written[start : start + 5])
        if not output.read():
            break
    os.close(write_end)
    output.drain()
    return output


@given(
    st.text(st.sampled_from(TEXT), max_size=30),
    st.integers(0, 80),
    st.none() | st.integers(0, 80),
)
@example("é" * 10, 20, 19)
@example("語" * 10, 11, 10)
def test_head_and_tail(text: str, limit: int, keep: int | None) -> None:
    """Whole or in two, each half without the character that the cut tore; nothing comes twice, nothing is made up."""
    data = text.encode()
    let = data[:limit]
    kept = limit if keep is None else min(keep, limit)
    output = read_of(data, limit, keep)
    assert output.exceeded == (len(data) > limit)
    assert output.is_cut == (len(data) > kept)
    if len(data) <= kept:
        assert (output.text(), output.tail()) == (text, "")
        return
    tail_bytes = kept // 2 if kept < limit else 0
    assert output.text() == let[: kept - tail_bytes].decode("utf-8", "ignore")
    assert output.tail() == let[len(let) - tail_bytes :].decode("utf-8", "ignore")


@given(st.binary(max_size=60), st.integers(0, 60), st.none() | st.integers(0, 60))
def test_any_bytes(data: bytes, limit: int, keep: int | None) -> None:
    """What is no UTF-8 is kept within the same bounds, and all that was read is counted."""
    output = read_of(data, limit, keep)
    assert min(len(data), limit + 1) <= output.written <= len(data)
    assert len(output.text()) + len(output.tail()) <= limit
    assert output.is_cut or output.text() == data.decode("utf-8", "replace")


def test_memory_is_bounded(box: Box) -> None:
    """Of a flood within its limit no more than `keep_bytes` is ever held, and its end is its own."""
    code = "import os\nfor n in range(2000): os.write(1, b'%07d\\n' % n * 4096)"
    result = box.run(code, wall_s=20, output_bytes=64 * MIB, keep_bytes=10_000)
    assert (result.status, result.stdout_bytes, result.stdout_truncated) == ("ok", 2000 << 15, True)
    assert result.stdout == "0000000\n" * 625
    assert result.stdout_tail == "0001999\n" * 625


@pytest.mark.parametrize("end", ENDS)
def test_however_it_ends(box: Box, end: str) -> None:
    """Head, tail and count are there whatever ended the program, and its other stream is whole."""
    if end == "memory_limit" and not box.slots.free[0].group.enter_fds:
        pytest.skip("this host gives no cgroup")
    code = WRITE + "print('said', file=sys.stderr, flush=True)\n" + ENDS[end]
    text = "".join(f"{n:05d}é\n" for n in range(1000))
    result = box.run(code, stdin=text, keep_bytes=800, wall_s=0.5, memory_bytes=100 * MIB)
    assert (result.status, result.stdout_truncated, result.stderr_truncated) == (end, True, False)
    assert (result.stdout, result.stdout_tail) == (text[:350], text[-350:])
    assert (result.stdout_bytes, result.stderr_bytes) == (8000, 5)
    assert (result.stderr, result.stderr_tail) == ("said\n", "")


def test_beyond_the_limit(box: Box) -> None:
    """One byte more than `output_bytes` ends the program, whatever is kept; the tail is the end of what it was let."""
    text = "".join(f"{n:07d}\n" for n in range(2000))
    result = box.run(WRITE, stdin=text, keep_bytes=160, output_bytes=8000)
    assert (result.status, result.stdout_truncated) == ("output_limit", True)
    assert (result.stdout, result.stdout_tail) == (text[:80], text[7920:8000])
    assert 8000 < result.stdout_bytes <= 16000


def test_all_is_kept_where_nothing_else_is_asked(box: Box) -> None:
    """Without `keep_bytes`, or with more than there is, an output is in one piece."""
    for keep in ({}, {"keep_bytes": 4}, {"keep_bytes": MIB}):
        result = box.run("print('é🎉'[:1], end='é')", **keep)
        assert (result.stdout, result.stdout_tail, result.stdout_truncated) == ("éé", "", False)
        assert result.stdout_bytes == 4


def test_nothing_is_kept(box: Box) -> None:
    """`keep_bytes` of 0 counts only."""
    result = box.run("print('abc')", keep_bytes=0)
    assert (result.stdout, result.stdout_tail, result.stdout_bytes) == ("", "", 4)
    assert (result.status, result.stdout_truncated) == ("ok", True)
