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
