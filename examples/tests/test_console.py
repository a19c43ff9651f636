"""Tables, progress, options and pages of the commands of this checkout. A page is read as a browser would read it."""

import argparse
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from examples import console
from examples.console import Row, Section, progress, show
from examples.page import MOST_POINTS, Chart, Failure, page

TABLE = [Section("Group", [Row("requests", "12", "all"), Row("leaks", "3", "missing", True)])]


def test_progress_is_silent_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where stderr is no terminal, short work prints nothing and long work a line now and then."""
    for seconds, printed in ((console.SECONDS_BETWEEN_LINES, ""), (0.0, "work:  50 %  halfway\n")):
        monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", seconds)
        with progress("work", 10) as update:
            update(5, "halfway")
        assert capsys.readouterr().err == printed


def test_terminal_gets_a_bar_and_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal with `rich`, progress and tables are drawn by it, with the same words."""
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress("work", 10) as update:
        update(10, "all of it")
    show("Title", TABLE)
    output = capsys.readouterr()
    assert all(word in output.out for word in ("Title", "Group", "requests", "12", "leaks", "missing"))


def test_plain_table_marks_alarming_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal the table is aligned text, and an alarming figure has a mark."""
    show("Title", TABLE)
    lines = ["Title", "=====", "", "Group", "   requests  12  all", " ! leaks      3  missing"]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("option", "values"),
    [(console.whole(1), ["0", "many", "-1", "1.0", ""]), (console.share, ["2", "nan", "-0.1", "x"])],
    ids=["whole", "share"],
)
def test_values_out_of_range_are_refused(option: object, values: list[str]) -> None:
    """Whole numbers have a least value, shares are from 0 to 1; a value that cannot be meant ends with 2."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--value", type=option)  # type: ignore[arg-type]
    for value in values:
        with pytest.raises(SystemExit) as exited:
            parser.parse_args([f"--value={value}"])
        assert exited.value.code == 2
    assert parser.parse_args(["--value=1"]).value == 1


# Pages

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

    @property
    def paths(self) -> list[list[tuple[float, ...]]]:
        """The points of each chart."""
        drawn = [attributes["d"] or "" for tag, attributes in self.tags if tag == "path"]
        return [[tuple(map(float, at.split(","))) for at in re.split("[ ML]", path) if at] for path in drawn]


def read_alone(text: str) -> Read:
    """A page that is whole, and asks for no script, no other file and no connection."""
    read = Read(text)
    assert read.crossed == []
    assert "script" not in {tag for tag, _ in read.tags}
    assert not {name for _, attributes in read.tags for name in attributes} & {"src", "href", "srcset", "onclick"}
    assert "url(" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in read.tags
    return read


def test_a_violation_is_shown_by_its_fields() -> None:
    """It is first on the page, field by field, then its remedy, and its program as it is."""
    report = "SLOT_DOUBLE_FREE: freed twice\n  object     pool\n  slot       3\n             4\n  remedy     free once"
    read = read_alone(page("fuzz", "seed 1", TABLE, [Failure("slot_pool", f"{report}\n\n    state.begin()")]))
    assert read.text["h3"] == ["SLOT_DOUBLE_FREE: freed twice"]
    assert read.text["dt"] == ["object", "slot"]
    assert "Remedy: free once" in read.text["p"]
    assert "state.begin()" in "".join(read.text["pre"])


def test_names_in_a_report_are_text() -> None:
    """No name and no value is markup; errors without fields are shown whole."""
    hostile = '<script>alert("x")</script>'
    sections = [Section(hostile, [Row(hostile, hostile, hostile, alarming=True)])]
    failures = [Failure(hostile, f"CODE: {hostile}\n  object     {hostile}\n  remedy     {hostile}\n\n{hostile}")]
    failures.append(Failure("other", "ValueError: first\nsecond\n\nthird"))
    read = read_alone(page("fuzz", hostile, sections, failures, [Chart(hostile, hostile, [0.0], [0.0])]))
    assert read.text["h1"] == [hostile]
    assert "second" in "".join(read.text["pre"])
    assert "Problems were found." in read.text["p"]


def test_a_long_run_keeps_its_peak() -> None:
    """A chart has few points however long the run, and the largest value is one of them."""
    values = [1.0] * 10_000
    values[777] = 5.0
    text = page("traffic", "long", [], charts=[Chart("x", "y", [float(at) for at in range(10_000)], values)])
    (points,) = read_alone(text).paths
    heights = [height for _, height in points]
    assert len(heights) <= MOST_POINTS
    assert min(heights) < max(heights)
    assert "at most 5<" in text


def test_traffic_writes_a_page(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page of a run of traffic has the figures of its table, and eight charts within their boxes."""
    from examples.traffic.__main__ import main

    path = tmp_path / "run.html"
    assert main(["--requests", "20", "--device", device, "--report", str(path)]) == 0
    read = read_alone(path.read_text())
    assert read.text["p"][1] == "No problem was found."
    table = capsys.readouterr().out
    assert all(label in table for label in read.text["th"])
    assert len(read.paths) == 8
    assert all(0 <= x <= 600 and 0 <= y <= 120 for points in read.paths for x, y in points)
