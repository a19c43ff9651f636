"""Engines that run the exact model: every text is the right one, and a fault of the state changes one."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

pytest.importorskip("transformers")

from batchstate.testing.exact import Arrival, ExactModel, History, Oracle, Verifier, Wave, play
from examples.exact import cost, planted
from examples.exact.__main__ import engine_named, main
from examples.exact.bugs import Bug, bugs
from examples.exact.disaggregated import DISAGGREGATED
from examples.exact.example import EXAMPLE
from examples.exact.stand_ins import MissingPeerError
from examples.exact.transformers import GENERATE

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
            (Wave((Arrival(((0, 1),), 1, abort=0), Arrival(((0, 1), (0, 89)), 20), Arrival(((0, 1), (0, 1)), 18)), 0),),
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
    assert len(outcome.finished) + sum(it.abort is not None for it in waves[0].arrivals) == history.requests


def test_a_prompt_is_prefilled_where_there_is_room_still() -> None:
    """A history on which the decode worker once failed, shrunk: requests that arrived had taken the host locations."""
    settings: dict[str, object] = {
        "degree": 2, "dtype": torch.float64, "host_page_size": 0, "landing": "mixed", "max_running": 2,
        "transport": "in_process", "accepted": 1.0, "page_size": 1, "drafts": 3, "staged": 0.3, "hot_tokens": 8,
        "stages": 1,
    }  # fmt: skip
    one, other = ((0, 1),), ((1, 1),)
    first: list[Any] = [
        (one, 1),
        (other, 1),
        (other, 2),
        (((1, 92), (1, 2)), 1),
        (other, 1),
        (one, 1),
        (other, 1),
        (one, 1),
    ]
    first += [(other, 1), (other, 1)]
    waves: list[tuple[list[Any], int]] = [(first, 6), ([(one, 11), (one, 1), (one, 21)], 30)]
    history = History(settings, tuple(Wave(tuple(Arrival(*part) for part in parts), steps) for parts, steps in waves))
    assert_right(history)


def test_a_chunk_of_padding_reads_no_state() -> None:
    """`generate` in chunks, a long prompt beside a short one, with a layer of state: the verifier accuses nobody."""
    settings = {name: values[0] for name, values in GENERATE.choices.items()} | {"chunk": 7, "layers": 2}
    history = History(settings, (Wave((Arrival(((0, 30),), 3), Arrival(((1, 2),), 3)), 0),))
    spec, verifier = GENERATE.spec(settings), Verifier()
    outcome = play(GENERATE, history, Oracle(spec), ExactModel(spec), verifier)
    assert (outcome.wrong, verifier.reports) == (False, [])


def assert_right(history: History) -> None:
    """The disaggregated engine says every right text, and stops."""
    engine = attrs.evolve(DISAGGREGATED, patience=1000)
    spec = engine.spec(history.settings)
    outcome = play(engine, history, Oracle(spec), ExactModel(spec, dtype=history.settings["dtype"]))
    assert (outcome.error, outcome.wrong) == (None, False)


def test_a_request_without_room_lets_those_behind_it_pass() -> None:
    """A history that once did not end, shrunk: what the first of two arrivals waited for was held by the second."""
    settings = {name: values[0] for name, values in DISAGGREGATED.choices.items()}
    settings |= {"landing": "mixed", "staged": 0.3, "max_running": 2}
    arrivals = tuple(Arrival(((0, 1),), 1) for _ in range(18))
    assert_right(History(settings, (Wave((*arrivals, Arrival(((0, 90),), 24)), 0),)))


@pytest.mark.parametrize("name", ["mini_sglang_mended", "nano_vllm"])
def test_engines_of_checkouts(name: str) -> None:
    """Every text of their own schedulers and caches is right, where their checkouts are."""
    try:
        engine_named(name)
    except MissingPeerError as error:
        pytest.skip(str(error))
    assert main(["--engine", name, "--requests", "60", "--verify"]) == 0


def test_a_missing_checkout_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to clone, and where; that is no failure."""
    monkeypatch.delenv("BATCHSTATE_PEERS", raising=False)
    assert main(["--engine", "nano_vllm", "--requests", "1"]) == 0
    assert capsys.readouterr().out == (
        "nano_vllm: skipped: nano-vllm: no checkout; clone it into a folder DIR, and set BATCHSTATE_PEERS=DIR\n"
    )


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_planted_bugs_fit(bug: Bug) -> None:
    """Each piece of each diff is in our source, once, and each function of another engine that is changed is there."""
    try:
        engine_named(bug.engine)
    except MissingPeerError as error:
        pytest.skip(str(error))
    with bug.planted():
        pass


def test_a_planted_bug_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It changes what a forward reads, then a text, and the verifier names request and page."""
    file = tmp_path / "planted.json"
    few = ["--requests", "80", "--sequences", "1", "--json", str(file)]
    assert planted.main(["example_length_short", "disaggregated_draft_kept", *few]) == 0
    figures = json.loads(file.read_text())
    assert (figures["bugs"], figures["texts"], figures["named"], figures["false_alarms"]) == (2, 2, 2, 0)
    assert all(row["read"] and "read from page" in row["report"] for row in figures["rows"])


def test_cost(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured texts are right, too."""
    monkeypatch.setattr(cost, "REQUESTS", 4)
    assert cost.main() == 0
    assert capsys.readouterr().out.count("requests a second") == 3
