"""Helpers of an engine that order streams, taken out of its source: used rightly, misused, and without a statement."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.adoption import streams

SOURCE = """
import not_installed

class Sender:
    @not_installed.decorated
    def send(self, side: not_installed.Stream, table):
        side.wait_stream(torch.cuda.current_stream())
        side.synchronize()
        with torch.cuda.stream(side):
            copy = table * 2
            self.done.record()
        if self.other:
            side.synchronize()
        self.done.wait()
        return copy
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An engine whose imports fail."""
    (tmp_path / "small_engine").mkdir()
    (tmp_path / "small_engine" / "__init__.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "small_engine/__init__.py"
    assert "small_engine" not in sys.modules


def _use(code: SimpleNamespace, waits: bool = True) -> Any:
    owner, side, seen = SimpleNamespace(done=streams.cuda.Event(), other=False), streams.cuda.Stream(), []
    table = torch.zeros(4, device="cuda")
    for step in range(3):
        if waits:
            side.wait_stream(torch.cuda.current_stream())  # so that what the helper waits for is in order already
        table.fill_(step)
        seen.append(code.send(owner, side, table))
    return seen


def test_statements_are_deleted_one_at_a_time(package: str) -> None:
    """Found by the detector or by some order of the streams, redundant, or not reached; with the source line."""
    helper = streams.Helper("a helper", {package: ("Sender.send",)}, _use, {"nothing wrong": _use})
    report = streams.examined(helper)
    assert (report["right"]["races"], report["right"]["wrong"]) == ([], [])
    assert not report["misused"]["nothing wrong"]["races"]
    verdicts = {row["line"].rpartition(":")[2]: row["verdict"] for row in report["deleted"]}
    assert verdicts == {"7": "found", "8": "redundant", "11": "found", "13": "not reached", "14": "found"}
    (first, *_) = report["deleted"]
    assert first["races"] or first["wrong"]


def test_loops_that_ask_are_statements(package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loop that polls is deleted as a whole; decorators stay; fewer steps in flight than said are an error."""
    (tmp_path / "small_engine" / "polls.py").write_text(POLLS)

    def use(code: SimpleNamespace) -> Any:
        seen = []
        for step in range(3):
            code.window.next_step()
            landing = torch.zeros(4, pin_memory=True)
            landing.copy_(torch.full((4,), float(step), device="cuda"), non_blocking=True)
            code.landed(streams.cuda.current_stream().record_event())
            seen.append(landing.tolist())
        return seen

    parts = {"small_engine/polls.py": ("landed",)}
    helper = streams.Helper("loops", parts, use, given=lambda: {"twice": twice}, depth=9)
    assert streams.main([], [helper]) == 1
    printed = capsys.readouterr().out
    assert "used rightly: silent, right in all orders" in printed
    assert "found: while not event.query():" in printed
    assert "1 wrongly judged" in printed


POLLS = """
@twice
def landed(event):
    while not event.query():
        pass
"""


def twice(function: Any) -> Any:
    """A decorator that asks again."""
    return lambda event: (function(event), function(event))


def test_an_engine_that_is_not_there_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line; nothing else is examined less."""
    gone = streams.Helper("Gone: a class", {"not_an_engine/a.py": ("A",)}, _use)
    assert streams.main([], [gone]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "Gone: a class: skipped, not there: not_an_engine/a.py",
        "0 helpers, 0 wrongly judged; statements deleted: {}",
    ]
