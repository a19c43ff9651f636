"""`--report`: the page of a run, read by a parser as a browser would read it."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from batchstate.cli import main
from examples.console import Row, Section
from examples.page import MOST_POINTS, Chart, Failure, page
from tests.selfcheck.mutants import MUTANTS

VOID = {"meta", "path"}
"""Elements without an end here: `meta`, and `path`, which is closed as it begins."""


class Read(HTMLParser):
    """Reads a page: its tags and attributes, the text by tag, and tags that are closed by others."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.crossed: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.crossed += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if self._open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.text.setdefault(self._open[-1], []).append(data.strip())


def assert_alone(text: str) -> Read:
    """The page is whole, and asks for no script, no other file and no connection."""
    read = Read(text)
    assert read.crossed == []
    assert "script" not in {tag for tag, _ in read.tags}
    assert not {name for _, attributes in read.tags for name in attributes} & {"src", "href", "srcset", "onclick"}
    assert "url(" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in read.tags
    return read


def test_traffic_writes_a_page(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page of a run of traffic has its figures as the table says them, and eight charts within their boxes."""
    path = tmp_path / "run.html"
    assert main(["traffic", "--requests", "20", "--device", device, "--report", str(path)]) == 0
    read = assert_alone(path.read_text())
    assert read.text["p"][1] == "No problem was found."
    table = capsys.readouterr().out
    assert all(label in table for label in read.text["th"])
    charts = [attributes["d"] or "" for tag, attributes in read.tags if tag == "path"]
    assert len(charts) == 8
    points = [tuple(map(float, point.split(","))) for path_ in charts for point in re.split("[ ML]", path_) if point]
    assert all(0 <= x <= 600 and 0 <= y <= 120 for x, y in points)


def test_fuzz_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A violation is first on the page, field by field, with its program and the command that replays it."""
    monkeypatch.chdir(tmp_path)  # failing examples are kept there
    with MUTANTS["generation_not_raised"].switched_on():
        assert main(["fuzz", "slot_pool", "--examples", "30", "--device", "cpu", "--report", "run.html"]) == 1
    read = assert_alone((tmp_path / "run.html").read_text())
    assert read.text["h3"][0].startswith("SLOT_STALE_HANDLE: ")
    fields = read.text["dt"]
    assert {"object", "operation", "slot", "expected", "actual"} <= set(fields)
    assert len(read.text["dd"] if "dd" in read.text else read.text["code"]) == len(fields)
    assert any(line.startswith("Remedy: ") for line in read.text["p"])
    assert "state.begin(" in "".join(read.text["pre"])
    assert "python -m tests.selfcheck fuzz --machine slot_pool --seed" in "".join(read.text["pre"])


def test_names_in_a_report_are_text() -> None:
    """Whatever a name or a value holds, it is shown, and is never markup; errors without fields are shown whole."""
    hostile = '<script>alert("x")</script>'
    sections = [Section(hostile, [Row(hostile, hostile, hostile, alarming=True)])]
    failures = [Failure(hostile, f"CODE: {hostile}\n  object     {hostile}\n  remedy     {hostile}\n\n{hostile}")]
    failures.append(Failure("other", "ValueError: first\nsecond\n\nthird"))
    read = assert_alone(page("fuzz", hostile, sections, failures, [Chart(hostile, hostile, [0.0], [0.0])]))
    assert read.text["h1"] == [hostile]
    assert "second" in "".join(read.text["pre"])
    assert "Problems were found." in read.text["p"]


def test_a_long_run_keeps_its_peak() -> None:
    """A chart has few points however long the run, and the largest value is one of them."""
    values = [1.0] * 10_000
    values[777] = 5.0
    text = page("traffic", "long", [], charts=[Chart("x", "y", [float(at) for at in range(10_000)], values)])
    (drawn,) = (attributes["d"] or "" for tag, attributes in assert_alone(text).tags if tag == "path")
    heights = [float(point.split(",")[1]) for point in re.split("[ ML]", drawn) if point]
    assert len(heights) <= MOST_POINTS
    assert min(heights) < max(heights)
    assert "at most 5<" in text
