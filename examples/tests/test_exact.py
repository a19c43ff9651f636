"""Engines that run the exact model: every text is the right one, and a fault of the state changes one."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from batchstate.testing.exact import Arrival, ExactModel, History, Oracle, Wave, play
from examples.exact.__main__ import main
from examples.exact.example import EXAMPLE

PLAIN = {name: values[0] for name, values in EXAMPLE.choices.items()}


@pytest.mark.parametrize("name", ["example", "transformers", "generate"])
def test_every_text_is_right(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command plays histories on an engine, and finds nothing."""
    file = tmp_path / "report.json"
    assert main(["--engine", name, "--requests", "40", "--verify", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["engine"] == name
    assert figures["requests"] >= 40
    assert figures["differences"] == 0
    assert figures["histories"] > 0


@pytest.mark.parametrize(
    ("changed", "waves"),
    [
        pytest.param(
            {"kv_tokens": 140, "drafts": 4},
            (Wave((Arrival(((0, 1),), 1), Arrival(((0, 1), (0, 89)), 20), Arrival(((0, 1), (0, 1)), 18)), 0, (0,)),),
            id="pages of guesses",
        ),
        pytest.param(
            {"step_tokens": 8, "drafts": 1, "prebuilt": True},
            (Wave(tuple(Arrival(((0, n),), m) for n, m in [(1, 2), (1, 1), (1, 1), (1, 2), (2, 1), (1, 1)]), 0),),
            id="no token for one that joins",
        ),
    ],
)  # fmt: skip
def test_faults_that_were_found_stay_mended(changed: dict[str, object], waves: tuple[Wave, ...]) -> None:
    """Histories on which the example engine once failed, shrunk: finished requests give back pages of their guesses
    before others are admitted, and a request joins only with a token of the step.
    """
    history = History(PLAIN | changed, waves)
    spec = EXAMPLE.spec(history.settings)
    outcome = play(EXAMPLE, history, Oracle(spec), ExactModel(spec))
    assert not outcome.wrong
    assert len(outcome.finished) + len(waves[0].aborts) == history.requests
