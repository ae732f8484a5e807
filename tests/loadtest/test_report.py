"""The page of a bench: what it holds, and that nothing but itself is in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from loadtest.figures import to_run
from loadtest.machine import this_machine
from loadtest.measure import Bench
from loadtest.openloop import Sent
from loadtest.report import make_page

EVIL = '<script src="http://evil.example/x.js">$title</script>&"\''

#: Elements that have no end tag.
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Notes what a page is made of, and refuses one whose tags do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def bench_of(*runs: list[Sent], name: str = "mixed", load: str = "poisson 10/s") -> Bench:
    return Bench(
        how="measured",
        answered_by="jail",
        target="v1",
        url="http://127.0.0.1:8000",
        workload=name,
        seed=17,
        machine=this_machine(),
        goes_first=True,
        runs=[
            to_run(load, 1.0, calls, started_s=2.0 * n, generator_cpu_s=0.1, cpu_s={"gateway": 0.5})
            for n, calls in enumerate(runs)
        ],
    )


def calls(outcome: str = "ok", late_s: float = 0.0, why: str = "") -> list[Sent]:
    return [
        Sent(
            "print", n / 10, late_s, 0.01 * (n + 1), outcome, is_right=outcome == "ok", wall_s=0.001, why=why
        )
        for n in range(10)
    ]


def test_the_page_shows_what_was_measured() -> None:
    """Every figure of the table, three drawings, the machine, the command and the seed are there."""
    sent = [calls(), calls()]

    page = Page(make_page(bench_of(*sent), sent, "sandbox bench --rate 10"))

    assert page.tags["svg"] == 3
    assert page.tags["tr"] == 3
    for text in ("sandbox bench --rate 10", "17", "10 ok", "latency, ms", "calls/s", "Measured", "jail"):
        assert text in page.text
    assert this_machine().kernel in page.text


def test_the_page_is_whole_in_itself() -> None:
    """Nothing is loaded from anywhere: no script, no link, no image, and no address in any attribute or style."""
    sent = [calls(), calls("no_answer")]

    text = make_page(bench_of(*sent), sent, "sandbox bench")
    page = Page(text)

    assert not page.tags.keys() & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "image",
        "base",
        "foreignobject",
    }
    for name, value in page.attributes:
        assert "//" not in value, f"{name}={value}"
        assert not name.startswith("on")
        if name in {"href", "xlink:href", "src"}:
            assert value.startswith("#")
    assert "@import" not in text
    assert text.count("url(") == text.count("url(#")


def test_ids_are_unique_and_references_lead_somewhere() -> None:
    """The drawings do not take each other's parts."""
    sent = [calls()]

    page = Page(make_page(bench_of(*sent), sent, "sandbox bench"))

    ids = Counter(value for name, value in page.attributes if name == "id")
    assert set(ids.values()) == {1}
    assert {value[1:] for name, value in page.attributes if name == "xlink:href"} <= set(ids)


def test_what_strangers_wrote_is_text() -> None:
    """Names of files, the words of a service and the command are shown as they are, and are never tags."""
    sent = [calls("http_500", why=EVIL)]

    page = Page(make_page(bench_of(*sent, name=EVIL, load=EVIL[:60]), sent, EVIL))

    assert page.tags["script"] == 0
    assert page.text.count(EVIL) >= 4  # title twice, notice, command


@pytest.mark.parametrize("load", ["trace $x$_{.jsonl", "trace ^_^.jsonl", r"trace \frac.jsonl"])
def test_a_files_name_is_no_formula(load: str) -> None:
    """Drawings show a name with signs of mathematics as it is."""
    sent = [calls()]

    page = Page(make_page(bench_of(*sent, load=load), sent, "sandbox bench"))

    assert page.text.count(load) == 6  # heading, row, two facts, and the legends of two drawings


def test_an_invalid_run_is_called_that() -> None:
    """Notice, table and curve say that a run is not to be believed, and why."""
    sent = [calls(late_s=0.05)]

    page = Page(make_page(bench_of(*sent), sent, "sandbox bench"))

    assert page.text.count("INVALID") == 2
    assert "late by" in page.text
    assert "(invalid)" in page.text


def test_a_run_without_an_answer_has_a_page() -> None:
    """Where nothing was served the page says so, without curves."""
    sent = [calls("connection_error", why="nobody there")]
    bench = bench_of(*sent)

    page = Page(make_page(replace(bench, url=""), sent, "sandbox bench"))

    assert "nobody there" in page.text
    assert "0.0%" in page.text
