"""Targets of ratios are checked, missing peers are named, and the plots of equal figures are equal."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchstate.runtime import Runtime
from benchmarks import plots
from benchmarks.__main__ import main
from benchmarks.comparisons import Absent, Asked, Comparison, Row, run
from benchmarks.counts import Count
from benchmarks.curves import Curve, Measured, Point, Series
from benchmarks.growth import growth_with_rows, pages_flat, slots_flat
from benchmarks.machine import machine
from benchmarks.report import show, show_counts, summary
from benchmarks.suite import Results, comparisons
from benchmarks.timing import Contender, Effort
from benchmarks.whole_steps import EngineState

TINY = Effort(rounds=5, sample_us=20)


def idle(name: str) -> Contender:
    """A way that does nothing."""
    return Contender(name, lambda: None)


def row(ratio: float, **asked: float | None) -> Row:
    """A row of that ratio."""
    spread = {"ours_us": (1.0, 1.0), "baseline_us": (ratio, ratio), "ratio": (ratio, ratio)}
    return Row("task", "way", 1.0, "other", ratio, ratio, spread, 1.0, ratio, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "met"),
    [
        ({}, None),
        ({"target": 2.0}, True),
        ({"target": 2.1}, False),
        ({"limit": 2.0}, True),
        ({"limit": 1.9}, False),
        ({"target": 1.0, "limit": 3.0}, True),
        ({"target": 1.0, "limit": 1.5}, False),
        ({"limit_us": 1.0}, True),
        ({"target": 1.0, "limit_us": 0.9}, False),
    ],
)
def test_a_target_is_the_least_and_a_limit_the_most(asked: dict[str, float], met: bool | None) -> None:
    """A ratio of 2.0 against what is asked; rows say the same to readers and to machines."""
    measured = row(2.0, **asked)
    assert measured.met is met
    assert measured.as_json()["met"] is met
    assert Asked(**asked).met_by(2.0, 1.0) is met


def test_pairs_may_be_asked_different_things(rt: Runtime) -> None:
    """The demand on a pair stands above that on all; a pair that is not there is an error."""
    ours, others = [idle("a"), idle("b")], [idle("x"), idle("y")]
    comparison = Comparison("t", ours, others, lambda: None, target=0.001, asks={("a", "y"): Asked(limit=7)})
    rows = {
        (measured.way, measured.baseline): (measured.target, measured.limit) for measured in run(rt, comparison, TINY)
    }
    assert rows == dict.fromkeys([("a", "x"), ("b", "x"), ("b", "y")], (0.001, None)) | {("a", "y"): (None, 7)}
    with pytest.raises(ValueError, match=r"\('y', 'a'\)"):
        Comparison("t", ours, others, lambda: None, asks={("y", "a"): Asked(target=1)})


def test_a_paired_ratio_is_the_median_of_rounds(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down in the middle of a run moves both medians apart, and not the ratios of rounds."""
    from benchmarks import comparisons
    from benchmarks.timing import Times

    ours = np.array([10.0, 10.0, 10.0, 30.0, 30.0])
    others = np.array([11.0, 11.0, 36.0, 33.0, 33.0])
    monkeypatch.setattr(comparisons, "measure", lambda *_: [Times(ours, ours), Times(others, others)])
    for paired, ratio in ((True, 1.1), (False, 3.3)):
        (measured,) = run(rt, Comparison("t", [idle("a")], [idle("x")], lambda: None, paired=paired), TINY)
        assert measured.ratio == pytest.approx(ratio)


def test_what_is_not_installed_has_a_row_without_figures(rt: Runtime, capsys: pytest.CaptureFixture) -> None:
    """Readers and machines see which peer was not measured, and why; it counts as no target."""
    absent = Absent("task", "packed", "an engine", "no module 'engine'")
    figures = absent.as_json()
    assert figures["work"] == "task: packed"
    assert set(row(1.0).as_json()) - set(figures) == {"ours_host_us", "baseline_host_us", "paired"}
    assert (figures["ours_us"], figures["ratio"], figures["met"]) == (None, None, None)
    assert figures["note"] == "not installed: no module 'engine'"
    show(machine(rt), [row(2.0), absent])
    printed = capsys.readouterr().out
    assert "not installed: no module 'engine'" in printed
    assert summary([absent]).splitlines() == [
        "not measured: task, against an engine: not installed, no module 'engine'"
    ]


def test_the_summary_counts_and_names_what_is_missed(rt: Runtime, capsys: pytest.CaptureFixture) -> None:
    """Rows and counts alike, with figure and wish; what is met is not named."""
    lines: Sequence[Row] = [row(2.0, target=1.0), row(2.0, target=5.0), row(2.0), row(2.0, limit=1.5)]
    counts = [Count("step", "copies", 1, 1), Count("step", "syncs", 3, 0), Count("step", "calls", 14)]
    text = summary([*lines, *counts]).splitlines()
    assert text[:3] == ["1 of 3 ratios as asked", "1 of 2 counts as asked", "missed:"]
    assert "its ratios are noise" in summary(lines, quick=True)
    assert [line.strip() for line in text[3:]] == [
        "task: way, against other: 2.00, asked >= 5",
        "task: way, against other: 2.00, asked <= 1.5",
        "step: syncs 3, asked <= 0",
    ]
    show(machine(rt), lines)
    show_counts(counts)
    printed = capsys.readouterr().out
    assert "missed" in printed
    assert "syncs" in printed


def test_growth_is_measured_over_equal_work(rt: Runtime) -> None:
    """Small and large give back all they took, and their ratio is limited."""
    for make, limit in ((slots_flat, 1.5), (pages_flat, 1.5)):
        (measured,) = run(rt, make(rt, small=512, large=1_024), TINY)
        assert (measured.limit, measured.paired) == (limit, True)
    (measured,) = run(rt, growth_with_rows(rt, few=64, many=256, num_columns=4), TINY)
    assert measured.limit == 4


def test_levels_are_priced_one_at_a_time(rt: Runtime) -> None:
    """`cheap` and `full` each against `off`; `cheap` in pairs, with its limit."""
    makers = comparisons(rt, quick=False)
    asked = {}
    for step in ("decode step, 12 columns", "whole step, 12 columns"):
        for level in ("cheap", "full"):
            comparison = makers[f"{step}, checks {level}"]()
            assert isinstance(comparison, Comparison)
            comparison.verify()
            (pair,) = comparison.asks
            assert pair == ("checks off", f"checks {level}")
            asked[step, level] = (comparison.asks[pair].limit, comparison.paired)
    assert list(asked.values()) == [(1.12, True), (None, False), (1.06, True), (None, False)]


def test_a_whole_step_is_the_same_each_time(rt: Runtime) -> None:
    """Requests come and go; the batch keeps its size and its sum of lengths."""
    state = EngineState(rt, num_columns=3, rows=32)
    first = [len(state.step()), int(state.batch.seq_lens.np.sum())]
    for _ in range(20):
        assert [len(state.step()), int(state.batch.seq_lens.np.sum())] == first


def test_a_commit_is_named_with_the_machine(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a repository it is empty."""
    monkeypatch.setenv("GIT_DIR", "/no/such/repository")
    assert machine(rt)["commit"] == ""


def curve_of(*costs: float) -> Measured:
    """Our way, and another one, at sizes 1, 10, ..."""
    mine = tuple(Point(10**i, cost, cost * 0.9, cost * 1.1) for i, cost in enumerate(costs))
    other = tuple(Point(point.x, point.us * 1.01, point.low, point.high) for point in mine)
    series = (Series("SlotPool, checks cheap", True, mine), Series("SlotPool, checks off", True, mine))
    return Measured("take and return", "slots", (*series, Series("a list", False, other)))


def test_a_curve_has_every_way_at_every_size(rt: Runtime) -> None:
    """Each point is a median between its quartiles; a comparison that cannot be made leaves none."""

    def make() -> Comparison:
        return Comparison("t", [idle("a")], [idle("x")], lambda: None)

    measured = Curve("c", "n", {1: make, 2: lambda: Absent("t", "a", "x", "gone"), 4: make}).measured(rt, TINY)
    assert [(series.way, series.ours, [point.x for point in series.points]) for series in measured.series] == [
        ("a", True, [1, 4]),
        ("x", False, [1, 4]),
    ]
    for series in measured.series:
        assert all(point.low <= point.us <= point.high for point in series.points)
    assert Results(scaling=[measured]).as_json()["scaling"][0]["series"][0]["points"][1]["x"] == 4


def test_the_same_figures_give_the_same_files(tmp_path: Path, rt: Runtime) -> None:
    """Names follow the curve; neither a date nor anything random is in them; names of lines are drawn, not a legend."""
    pytest.importorskip("matplotlib")
    facts = machine(rt)
    first = plots.draw([curve_of(1, 5, 30)], tmp_path / "a", facts)
    second = plots.draw([curve_of(1, 5, 30)], tmp_path / "b", facts)
    assert [file.name for file in first] == ["take-and-return-by-slots.svg", "take-and-return-by-slots.png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    (changed, _) = plots.draw([curve_of(1, 5, 31)], tmp_path / "b", facts)
    assert changed.read_bytes() != first[0].read_bytes()
    assert b"<dc:date>" not in first[0].read_bytes()


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """And the library that draws is needed for nothing else."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--device", "cpu", "--plots", str(tmp_path)]) == 2
    assert "matplotlib" in capsys.readouterr().err
    assert main(["--device", "cpu", "--quick", "--only", "counts of a whole step, 2 columns"]) == 0


@given(st.lists(st.floats(-100, 100), max_size=12).map(sorted))
def test_names_of_lines_keep_their_distance_and_their_order(wanted: list[float]) -> None:
    """None is moved that touches no other, and the middle of a group stays where it was."""
    placed = plots.apart(wanted, 10)
    assert len(placed) == len(wanted)
    assert all(b - a >= 10 - 1e-6 for a, b in pairwise(placed))
    if len(wanted) > 0:
        assert sum(placed) == pytest.approx(sum(wanted), abs=1e-6)
    if all(b - a > 10 for a, b in pairwise(wanted)):
        assert placed == pytest.approx(wanted)
