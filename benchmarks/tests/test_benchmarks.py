"""The benchmarks compare like with like and report under the documented names. No test here looks at a time."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from batchstate.errors import TransferError
from batchstate.levels import Level, checks, current_checks
from batchstate.runtime import Runtime
from batchstate.testing import LateRuntime
from batchstate.transport.engines.base import Engine
from benchmarks import counts, curves, staging, suite, transfers, watched
from benchmarks.__main__ import main
from benchmarks.arrivals import Prefill
from benchmarks.baselines.free_lists import LinkedBlocks, PopList, SliceList, TensorList, shuffled
from benchmarks.baselines.request_loops import PAGE_SIZE, ChunksInLists, Inputs
from benchmarks.baselines.twin_columns import ARRAYS, TENSORS, HostKind
from benchmarks.comparisons import Absent, Comparison, MismatchError, Row, require_equal, run
from benchmarks.decode_steps import Scene
from benchmarks.mixed_steps import AGE, VERIFIED, against_lists
from benchmarks.pools import all_numbers
from benchmarks.suite import served
from benchmarks.timing import FEWEST, Contender, Effort, measure, median, quartiles
from benchmarks.transfer_peers import ENGINES
from examples.traffic import fitted_workload, run_traffic

TINY = Effort(rounds=3, sample_us=20)


def test_a_quick_run_reports_everything_under_the_documented_names(
    tmp_path: Path, device: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m benchmarks --quick --json FILE` writes machine, rows, counts and curves; unequal results end it.

    Peers and transfers are measured by tests of their own.
    """
    absent = {"a peer": lambda: Absent("a peer's work", "ours", "a peer", "no distribution 'peer'")}
    monkeypatch.setattr(suite, "against_peers", lambda runtime, *, quick: absent)
    moved: list[str] = []

    def move(runtime: Runtime, transports: list[str], *, quick: bool) -> list[list[Row]]:
        moved.extend(transports)
        return []

    monkeypatch.setattr(transfers, "run_all", move)
    monkeypatch.setattr(suite, "QUICK", TINY)
    monkeypatch.setattr(curves, "QUICK", TINY)
    target = tmp_path / "rows.json"
    assert main(["--quick", "--device", device, "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    assert {"cpu", "cores", "python", "torch", "date", "commit"} <= set(report["machine"])
    assert report["commit"] == report["machine"]["commit"]
    names = {"work", "ours_us", "baseline", "baseline_us", "ratio", "target", "limit", "met", "spread", "note"}
    rows = [row for row in report["rows"] if row["ratio"] is not None]
    for row in report["rows"]:
        assert names <= set(row)
    for row in rows:
        assert row["ratio"] == pytest.approx(row["baseline_us"] / row["ours_us"])
        assert set(row["spread"]) == {"ours_us", "baseline_us", "ratio"}
        assert all(0 < low <= high for low, high in row["spread"].values())
        assert 0 < row["ours_host_us"] <= row["ours_us"]
    pairs = [(row["work"], row["baseline"]) for row in report["rows"]]
    assert len(set(pairs)) == len(pairs)
    asked = {row["task"]: (row["target"], row["limit"]) for row in rows if row["met"] is not None}
    if device == "cpu":
        assert asked["decode step, 12 columns, 256 rows"] == (None, 1.12)  # the last of that task; twins' are before
        assert asked["decode step from 256 to 8,192 rows, 12 columns"] == (None, 32)
    printed = capsys.readouterr().out
    for wanted in (
        "decode step, 12 columns",
        "decode step, 40 columns",
        "256 of 10,000 slots",
        "2,048 of 4,096 pages",
        "mixed step with chunked prompts, 16 requests",
        "a forward on a stream of its own, 256 requests",
    ):
        assert any(wanted in row["task"] for row in rows)
        assert wanted in printed
    assert "ratios as asked" in printed
    assert "its ratios are noise" in printed
    assert len(report["rows"]) == len(rows) + 1
    assert "not installed: no distribution 'peer'" in printed
    assert moved == ["nixl"]
    copies = [count for count in report["counts"] if count["counted"] == "host_to_device_copies"]
    assert [(count["count"], count["limit"], count["met"]) for count in copies] == [(1, 1, True)] * 3
    assert [curve["size"] for curve in report["scaling"]] == [
        "rows",
        "columns",
        "slots in the pool",
        "pages in the pool",
    ]
    for curve in report["scaling"]:
        for series in curve["series"]:
            assert all(0 < point["low"] <= point["us"] <= point["high"] for point in series["points"])


def test_a_run_can_be_chosen_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`--only` takes what has the text in its name, `--list` names it; a name of nothing is an error."""
    made: list[str] = []
    monkeypatch.setattr(suite, "_compare", lambda runtime, make, quick, results: made.append("compared"))
    assert main(["--device", "cpu", "--only", "growth", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["growth with rows", "growth with slots", "growth with pages"]
    assert made == []
    assert main(["--device", "cpu", "--only", "growth", "--only", "counts of a whole step, 2 columns"]) == 0
    assert made == ["compared"] * 3
    assert "7 of 7 counts as asked" in capsys.readouterr().out
    assert main(["--device", "cpu", "--only", "no such work"]) == 2
    assert "no such work" in capsys.readouterr().err


def test_a_trace_that_cannot_be_read_ends_a_run_at_once(capsys: pytest.CaptureFixture) -> None:
    """An error that was there from the start is not reported after minutes."""
    assert main(["--device", "cpu", "--trace", "/no/such/file.csv"]) == 2
    assert "/no/such/file.csv" in capsys.readouterr().err


def test_a_run_of_traffic_is_one_row(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wall time against the seconds asked; a run that lost a token is not a measurement."""
    row = served(rt, fitted_workload(20, 3))
    assert (row.baseline_us, row.target, row.met) == (9e6, 1.0, True)
    assert 0 < row.ours_us < 40e6
    assert row.note.startswith("20 requests, ")
    monkeypatch.setattr(
        suite, "run_traffic", lambda *workloads, **how: attrs.evolve(run_traffic(*workloads, **how), leaks=1)
    )
    with pytest.raises(MismatchError, match="1 leaks"):
        served(rt, fitted_workload(20, 3))


def test_calls_of_a_step_are_counted_by_part(rt: Runtime) -> None:
    """The parts of a step make all of its calls, as many for one request as for 256, and none is left out."""
    counted = counts.counted_calls(rt)
    by_work: dict[str, dict[str, int]] = {}
    for count in counted:
        by_work.setdefault(count.work, {})[count.counted.partition(", ")[2]] = count.count
    assert len(by_work) == 4
    for parts in by_work.values():
        assert parts.pop("") == sum(parts.values())
        assert all(parts[name] for name in ("runtime", "relay", "planner", "batch and values"))
    if rt.device.type == "cpu":  # a GPU that others use too may not be done with the step before
        assert by_work["decode step, 1 requests"] == by_work["decode step, 256 requests"]


@pytest.mark.parametrize("adjacent", [False, True])
def test_rows_to_be_moved_are_adjacent_or_not_at_all(adjacent: bool) -> None:
    """Scattered rows have no two adjacent ones on either side, in memory that holds them all."""
    work = transfers.Work(64, 8, adjacent=adjacent)
    sources, targets, runs = transfers.tokens_of(work)
    for tokens in (np.sort(sources), np.sort(targets)):
        assert (np.diff(tokens) == (1 if adjacent else 2)).all()
        assert tokens[0] > 0
        assert (tokens[-1] + 1) * work.nbytes <= work.memory
    assert len(runs) == (1 if adjacent else 64)


def test_a_transport_that_cannot_be_opened_is_named_and_left_out(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A machine without an engine still measures the others."""

    def closed() -> Engine:
        raise TransferError("no such library", value="nixl", remedy="install it")

    monkeypatch.setitem(ENGINES, "nixl", (closed, ENGINES["nixl"][1]))
    assert list(transfers.run_all(rt, ["nixl"], quick=True)) == []
    assert "without nixl: no such library" in capsys.readouterr().err


def test_adjacent_rows_are_asked_for_more(rt: Runtime) -> None:
    """Where each row of its own costs a write, coalescing is to pay; scattered rows are to cost no more than bare."""
    pytest.importorskip("nixl")
    rows = [row for some in transfers.run_all(rt, ["nixl"], quick=True) for row in some]
    floors = [row for row in rows if transfers.FLOOR in (row.way, row.baseline)]
    asked = {("scattered" in row.task, row.target) for row in rows if row not in floors}
    assert asked == {(True, 0.9), (False, 4.0)}
    assert {row.target for row in floors} == {None}
    assert ("nixl, not coalesced", transfers.FLOOR) in [(row.baseline, row.way) for row in floors], "what memory allows"


def test_a_direct_transfer_moves_half_the_bytes_of_a_staged_one(rt: Runtime) -> None:
    """Both leave the same rows, which is compared first; the copy out of the buffer reads and writes all again."""
    rows, counts = staging.measured(rt, "tcp", TINY, quick=True)
    (row,) = rows
    assert (row.way, row.baseline) == (staging.DIRECT, staging.STAGED)
    (work,) = staging.QUICK_PROMPTS.values()
    assert [count.count for count in counts] == [n * work.num_rows * work.nbytes for n in (2, 4)]


def test_rows_that_land_in_wrong_places_are_found(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a transfer is timed, every byte in the second process is compared."""
    work = transfers.Work(16, 64, adjacent=False)
    with transfers.linked("tcp", work.memory) as link:
        transfers.comparison(link, work).verify()
        right = link.bare.movers
        monkeypatch.setattr(link.bare, "movers", lambda sources, targets, n: right(sources, targets[::-1].copy(), n))
        with pytest.raises(MismatchError, match="memory after bare gloo"):
            run(rt, transfers.comparison(link, work), TINY)


def test_unequal_results_are_never_timed(rt: Runtime) -> None:
    """A comparison whose ways disagree ends before its first sample."""

    def disagree() -> None:
        require_equal("slots", [1, 2], [2, 1])

    def never() -> None:
        pytest.fail("was timed")

    way = Contender("a way", never)
    with pytest.raises(MismatchError, match="slots"):
        run(rt, Comparison("a task", [way], [way], disagree), TINY)


@pytest.mark.parametrize(
    ("ours", "others"),
    [
        ([1, 2], [1, 3]),
        ([1, 2], [1, 2, 3]),
        (np.zeros(2, np.int64), np.zeros(2, np.int32)),
    ],
)
def test_equal_means_dtype_shape_and_values(ours: object, others: object) -> None:
    """A baseline that works on narrower numbers, or on fewer, does less."""
    with pytest.raises(MismatchError):
        require_equal("column", ours, others)


@pytest.mark.parametrize("kind", [TENSORS, ARRAYS], ids=lambda kind: kind.name)
def test_a_baseline_that_forgets_one_side_is_found(rt: Runtime, kind: HostKind) -> None:
    """Verification reads both sides of each column: the very bug that twins kept by hand have."""
    scene = Scene.of(rt, num_columns=5, rows=16, churn=3)
    twins = scene.twins(kind)
    scene.verify([twins])
    twins.running.device["seq_lens"] = twins.running.device["seq_lens"] + 1
    with pytest.raises(MismatchError, match="device side of seq_lens"):
        scene.verify([twins])


@pytest.mark.parametrize("name", ["", "ids", "positions", "kv_lens", "places", "starts", "last"])
def test_a_mixed_step_with_other_inputs_is_found(rt: Runtime, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One number of one step differs, or the page of one token; over 40 steps all are equal."""
    steps, right = 0, ChunksInLists.step

    def step(loop: ChunksInLists, *scheduled: Any) -> Inputs:
        nonlocal steps
        steps += 1
        inputs = right(loop, *scheduled)
        if name and steps == AGE + 20:
            values = getattr(inputs, name).clone()
            values[-1] += PAGE_SIZE if name == "places" else 1
            inputs = attrs.evolve(inputs, **{name: values})
        return inputs

    monkeypatch.setattr(ChunksInLists, "step", step)
    comparison = against_lists(rt, num_requests=16)
    if not name:
        comparison.verify()
        assert steps == AGE + VERIFIED
        return
    with pytest.raises(MismatchError, match="page" if name == "places" else name):
        comparison.verify()


def test_waits_of_a_step_over_two_streams_are_counted(rt: Runtime) -> None:
    """The forward waits once, for the copy of the step, whatever the number of requests."""
    counted = counts.counted_waits(rt)
    assert [count.count for count in counted if count.work.endswith("two streams") and "churn" not in count.work] == [
        1
    ] * 2
    assert {count.limit for count in counted} == {1, 2, None}


@pytest.mark.parametrize("kind", [PopList, SliceList, TensorList, LinkedBlocks], ids=lambda kind: kind.__name__)
def test_each_free_list_hands_out_each_number_once(rt: Runtime, kind: type) -> None:
    """After shuffling and turnover, all of 1 to size are still there."""
    free_list = kind(50, rt.device)
    shuffled(free_list, 50)
    assert free_list.numbers(free_list.take(0)) == []
    assert all_numbers(free_list.take, free_list.free, free_list.numbers, 50, 20) == list(range(1, 51))


def test_a_linked_list_hands_out_no_more_than_it_has(rt: Runtime) -> None:
    """Running out is an error that takes nothing."""
    blocks = LinkedBlocks(3, rt.device)
    with pytest.raises(ValueError, match="4 of 3"):
        blocks.take(4)
    assert blocks.count == 3


def test_contenders_run_in_turns_at_their_own_level_of_checks(rt: Runtime) -> None:
    """Each round samples each contender once, behind two runs that are not timed; the level is as it was afterwards."""
    seen: list[tuple[str, Level]] = []

    def contender(name: str, level: Level) -> Contender:
        return Contender(name, lambda: seen.append((name, current_checks())), level)

    contenders = [contender("a", Level.OFF), contender("b", Level.CHEAP), contender("c", Level.FULL)]
    with checks(Level.CHEAP):
        times = measure(rt, contenders, Effort(rounds=3, sample_us=0))
        assert current_checks() is Level.CHEAP
    assert set(seen) == {("a", Level.OFF), ("b", Level.CHEAP), ("c", Level.FULL)}
    assert "".join(name for name, _ in seen[-27:]) == "aaabbbcccbbbcccaaacccaaabbb"
    assert all(way.total.shape == (3,) and (way.host <= way.total).all() for way in times)


def test_long_runs_are_not_repeated_beyond_the_time_there_is(rt: Runtime) -> None:
    """There are fewer rounds of them, though enough for a median."""
    runs: list[int] = []

    def long() -> None:
        runs.append(1)
        time.sleep(0.003)

    (times,) = measure(rt, [Contender("long", long)], Effort(rounds=500, sample_us=100, most_seconds=0.01))
    assert times.total.shape == (FEWEST,)
    assert len(runs) == 3 * (FEWEST + 2)
    effort = Effort(rounds=500, sample_us=100, most_seconds=1)
    assert [effort.rounds_of(us) for us in (100, 10_000, 1e9)] == [500, 100, FEWEST]


def test_one_disturbed_sample_moves_neither_median_nor_quartiles() -> None:
    """The figures are robust: an outlier of a busy machine does not show."""
    samples = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    disturbed = np.array([1.0, 2.0, 3.0, 4.0, 5_000.0])
    assert median(samples) == median(disturbed) == 3
    assert quartiles(samples) == quartiles(disturbed) == (2, 4)


def test_watched_runs_are_measured() -> None:
    """A run of the engine under the detector is a process of its own, with its time and its memory."""
    run = watched.run_engine("race", 1, "--family", "plain")
    assert run.tokens > 0
    assert run.steps > 0
    assert run.seconds > 0
    assert run.megabytes > 50


def test_watched_runs_report_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`python -m benchmarks.watched` sets each way against the plain one of its round, and writes both figures."""
    seconds = {"cpu": 1.0, "race": 5.0}
    monkeypatch.setattr(watched, "run_engine", lambda way, n: watched.Run(n * seconds.get(way, 8.0), 100.0, n, n))
    target = tmp_path / "watched.json"
    assert watched.main(["--requests", "2", "--rounds", "3", "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [(row["requests"], row["device"]) for row in rows] == [(n, way) for n in (2, 6) for way in watched.WAYS]
    assert {row["device"]: row["ratio"] for row in rows} == {way: seconds.get(way, 8.0) for way in watched.WAYS}
    assert "5.0 times" in capsys.readouterr().out


def test_an_unclean_watched_run_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A run with a wrong token is not a measurement."""

    def unclean(way: str, n: int) -> watched.Run:
        raise subprocess.CalledProcessError(1, ["engine", way], stderr="RACE")

    monkeypatch.setattr(watched, "run_engine", unclean)
    assert watched.main(["--requests", "1", "--rounds", "1"]) == 1
    assert "RACE" in capsys.readouterr().err


def test_arriving_requests_wait_for_the_slots_of_others(late: LateRuntime) -> None:
    """On a device that lags as many steps run as the engine keeps in flight, and none finds the pool exhausted."""
    step = Prefill(late, [[1, 2, 3]] * 4).step
    for _ in range(5):
        step()
    assert late.counters.fence_waits == 5 - late.steps_in_flight
