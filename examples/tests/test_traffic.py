"""Traffic: an engine without a model serves requests, and the batch state costs and loses nothing."""

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate import levels
from batchstate.errors import ArgumentError
from batchstate.runtime import Runtime, open_runtime
from batchstate.testing import LateRuntime
from examples.traffic import (
    EngineSettings,
    TrafficEngine,
    TrafficProgress,
    TrafficReport,
    TrafficRun,
    Workload,
    draw_requests,
    fitted_workload,
    read_trace,
    run_traffic,
)
from examples.traffic.__main__ import main
from examples.traffic.scheduler import chunk_lengths, rows_that_fit

TINY = EngineSettings(max_running=8, max_tokens_per_step=24, page_size=4, num_pages=30, step_seconds=1.0)


def workload(*rows: tuple[float, int, int]) -> Workload:
    """Requests by arrival, prompt tokens, answer tokens."""
    arrival, context, generated = zip(*rows, strict=True)
    return Workload(np.array(arrival), np.array(context, np.int64), np.array(generated, np.int64))


def many(count: int, seed: int = 0) -> Workload:
    """Requests that crowd the tiny engine: up to 60 tokens each, two a step."""
    rng = np.random.default_rng(seed)
    return Workload(np.sort(rng.uniform(0, count / 2, count)), rng.integers(1, 24, count), rng.integers(8, 40, count))


def outcome(report: TrafficReport) -> dict:
    """All of a report that does not depend on the machine's speed."""
    figures = report.as_dict()
    for timing in ("seconds", "host_us_per_step", "laws_asked"):  # a fence that is late is asked again
        figures.pop(timing)
    return figures


def test_every_token_is_generated_once(rt: Runtime) -> None:
    """All requests are answered in full, and each token is generated exactly once."""
    hour = fitted_workload(60, seed=1)
    report = run_traffic(hour, device=rt)
    assert report.clean
    assert report.finished == report.requests == 60
    assert report.tokens == report.tokens_delivered == hour.total_generated
    # The last token of an answer is generated but never computed: nobody asks what follows it.
    assert report.prefill_tokens + report.tokens == (hour.context_tokens + hour.generated_tokens - 1).sum()
    assert report.retractions == 0


def test_retraction_repeats_no_token(rt: Runtime) -> None:
    """Where pages run out again and again, KV is computed anew, but no token is generated twice."""
    crowd = many(60)
    report = run_traffic(crowd, device=rt, settings=TINY)
    assert report.clean, report.broken
    assert report.retractions > 20
    assert report.finished == 60
    assert report.tokens == report.tokens_delivered == crowd.total_generated
    assert report.prefill_tokens > crowd.context_tokens.sum()


def test_step_costs_one_copy_and_one_operation(rt: Runtime) -> None:
    """Every step, whoever leaves, joins or is retracted: one copy, at most one device operation, no sync."""
    report = run_traffic(many(60), device=rt, settings=TINY, aborts=0.3)
    assert report.host_to_device_copies_per_step == report.most_host_to_device_copies == 1
    assert report.device_operations_per_step <= 1
    assert report.most_device_operations == 1
    assert report.forced_syncs == 0


@pytest.mark.parametrize(("count", "aborts", "least"), [(80, 0.6, 10), (30, 1.0, 1)])
def test_aborts_give_everything_back(rt: Runtime, count: int, aborts: float, least: int) -> None:
    """Clients that hang up while they wait, prefill or decode, even all of them, leave no slot and no page behind."""
    crowd = many(count, seed=4)
    report = run_traffic(crowd, device=rt, settings=TINY, aborts=aborts, seed=2)
    assert report.clean, report.broken
    assert report.aborted > least
    assert report.finished + report.aborted == count
    assert report.tokens == report.tokens_delivered < crowd.total_generated


def test_seed_settles_everything(device: str) -> None:
    """The same workload and seed give the same run; another seed of aborts another."""
    crowd = many(40)
    first, same, other = (run_traffic(crowd, device=device, settings=TINY, aborts=0.5, seed=seed) for seed in (7, 7, 8))
    assert outcome(first) == outcome(same)
    assert outcome(first) != outcome(other)


def test_slow_device_changes_no_decision() -> None:
    """Where nothing is complete before the host waits for it, the run is the same, and nothing is lost."""
    crowd = many(60)
    slow = run_traffic(crowd, device=LateRuntime(), settings=TINY, aborts=0.2)
    quick = run_traffic(crowd, settings=TINY, aborts=0.2)
    assert slow.clean, slow.broken
    assert slow.retractions > 0
    # Whoever asks a pool too early asks twice, and the laws with it.
    assert outcome(attrs.evolve(slow, laws_asked=0)) == outcome(attrs.evolve(quick, laws_asked=0))


def test_full_checks_find_nothing(rt: Runtime) -> None:
    """At level `full`, where both sides are compared again and again, a crowded run is clean and decides the same."""
    crowd = many(20)
    full = run_traffic(crowd, device=rt, settings=TINY, checks="full")
    off = run_traffic(crowd, device=open_runtime(rt.device), settings=TINY, checks="off")
    assert full.clean, full.broken
    assert (full.steps, full.retractions, full.tokens) == (off.steps, off.retractions, off.tokens)
    assert full.laws_asked > off.laws_asked
    assert levels.current_checks() is levels.Level.CHEAP


def test_device_has_what_the_host_planned(rt: Runtime) -> None:
    """After every step, the table on the device names the pages of each running request, each token for one of them."""
    run = TrafficRun(many(25), rt, settings=TINY)
    engine = run.engine
    while run.step():
        batch = engine.batch
        table = rt.inspect(engine.req_to_token.memory)
        seen: set[int] = set()
        for slot, length in zip(batch.slots.np.tolist(), batch.seq_lens.np.tolist(), strict=True):
            tokens = table[slot, :length]
            pages = engine.pages.page_table[slot, : -(-length // TINY.page_size)]
            assert tokens.tolist() == [
                int(pages[position // TINY.page_size]) * TINY.page_size + position % TINY.page_size
                for position in range(length)
            ]
            assert seen.isdisjoint(tokens.tolist())
            seen.update(tokens.tolist())
        assert not any(token < TINY.page_size for token in seen)
        for column in ("slots", "seq_lens", "temperature", "lora_id"):
            np.testing.assert_array_equal(rt.inspect(batch[column].device), batch[column].np)


def test_youngest_is_retracted_and_comes_back_first(rt: Runtime) -> None:
    """When pages run out, the youngest request waits again, ahead of those that never ran."""
    # Five pages of four tokens: two requests fit at first, and grow to four pages each.
    small = EngineSettings(max_running=4, max_tokens_per_step=24, page_size=4, num_pages=5, step_seconds=1.0)
    run = TrafficRun(workload((0, 6, 8), (0, 6, 8), (0, 6, 8)), rt, settings=small)
    while not run.engine.retractions:
        assert run.step()
    assert [request.request_id for request in run.engine.batch.requests] == [0]
    assert [request.request_id for request in run.engine.waiting] == [1, 2]
    assert run.engine.waiting[0].num_generated > 0
    while run.step():
        pass
    assert run.engine.finished == 3


def test_long_prompt_is_computed_in_chunks(rt: Runtime) -> None:
    """A prompt longer than a step is cut, and whoever decodes meanwhile goes on decoding."""
    run = TrafficRun(workload((0, 2, 10), (0.5, 50, 1)), rt, settings=TINY)
    lengths = []
    while run.step():
        batch = run.engine.batch
        lengths.append({request.request_id: batch.seq_lens.np[row] for row, request in enumerate(batch.requests)})
    assert [at[1] for at in lengths if 1 in at] == [23, 46, 50]
    assert [at[0] for at in lengths if 0 in at] == list(range(2, 12))


def test_clock_jumps_over_silence(rt: Runtime) -> None:
    """Where nobody is there, no step is made."""
    report = run_traffic(workload((0, 3, 2), (1000, 3, 2)), device=rt, settings=TINY)
    assert report.steps == 4
    assert report.simulated_seconds > 1000


def test_request_as_large_as_the_pool_runs(rt: Runtime) -> None:
    """A request that needs every page runs, alone."""
    report = run_traffic(workload((0, 5, 5), (0, 100, 20), (0, 5, 5)), device=rt, settings=TINY)
    assert report.clean, report.broken
    assert report.finished == 3


def test_progress_is_reported(rt: Runtime) -> None:
    """`progress` hears where the run is, the end included."""
    heard: list[TrafficProgress] = []
    run_traffic(many(40), device=rt, settings=TINY, progress=heard.append)
    assert [at.done for at in heard] == sorted(at.done for at in heard)
    assert heard[-1].done == heard[-1].requests == 40


def test_hang_up_of_a_finished_request_is_no_news(rt: Runtime) -> None:
    """An abort that comes too late changes nothing."""
    run = TrafficRun(workload((0, 3, 1)), rt, settings=TINY)
    engine: TrafficEngine = run.engine
    while run.step():
        pass
    engine.abort(run.requests[0])
    assert (engine.finished, engine.aborted) == (1, 0)


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(0, 60))
def test_chunks_fill_the_budget(remaining: list[int], spare: int) -> None:
    """Each row that decodes gets its token; prompts get the rest, oldest first, until nothing is left."""
    lengths = np.array(remaining, np.int64)
    budget = len(remaining) + spare
    chunks = chunk_lengths(lengths, budget)
    assert ((chunks >= 0) & (chunks <= lengths)).all()
    assert (chunks[lengths == 1] == 1).all()
    assert chunks.sum() == min(budget, lengths.sum())
    prompts = lengths > 1
    cut = np.flatnonzero(chunks[prompts] < lengths[prompts])
    assert not chunks[prompts][cut[1:]].any()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=10),
    st.integers(0, 20),
)
def test_rows_that_fit_are_the_most_that_do(rows: list[tuple[int, int]], available: int) -> None:
    """The oldest rows that fit with the pages of the younger ones; one row more would not."""
    new = np.array([row[0] for row in rows], np.int64)
    owned = np.array([row[1] for row in rows], np.int64)
    fitting = [kept for kept in range(len(rows) + 1) if new[:kept].sum() <= available + owned[kept:].sum()]
    assert rows_that_fit(new, owned, available) == max(fitting)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_small_traffic_is_served(data: st.DataObject) -> None:
    """Whatever arrives, whatever the sizes: all is served or aborted, nothing is lost, nothing is broken."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    sizes = EngineSettings(
        max_running=data.draw(st.integers(1, 5)),
        max_tokens_per_step=data.draw(st.integers(5, 20)),
        page_size=page_size,
        num_pages=data.draw(st.integers(-(-24 // page_size), 40)),
        step_seconds=1.0,
    )
    rows = data.draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 16), st.integers(1, 8)), min_size=1, max_size=9)
    )
    report = run_traffic(
        workload(*sorted(rows)),
        settings=sizes,
        aborts=data.draw(st.sampled_from([0.0, 0.5])),
        checks=data.draw(st.sampled_from(["cheap", "full"])),
    )
    assert report.clean, report.broken
    assert report.finished + report.aborted == len(rows)
    assert report.most_host_to_device_copies == 1


# Workloads: read from a trace, or drawn like one

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def trace(tmp_path: Path, text: str) -> Path:
    """A file with that text."""
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_trace_is_read(tmp_path: Path) -> None:
    """Arrivals count from the first request, with seven digits of a second and either line ending."""
    path = trace(
        tmp_path,
        HEADER + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:16:46,2,7\n",
    )
    workload = read_trace(path)
    np.testing.assert_allclose(workload.arrival, [0, 4.314579, 59.31941])
    assert workload.context_tokens.tolist() == [374, 396, 2]
    assert workload.generated_tokens.tolist() == [44, 109, 7]
    assert workload.total_generated == 160
    assert workload.longest == 505
    assert workload.source == "trace.csv"


def test_trace_is_sorted_by_arrival(tmp_path: Path) -> None:
    """Rows out of order are put in order, and columns may stand anywhere."""
    path = trace(
        tmp_path,
        "x,GeneratedTokens,TIMESTAMP,ContextTokens\n,1,2024-01-01T00:00:09Z,10\n,2,2024-01-01T01:00:05+01:00,20\n",
    )
    workload = read_trace(path)
    assert workload.arrival.tolist() == [0, 4]
    assert workload.context_tokens.tolist() == [20, 10]


@pytest.mark.parametrize(
    ("rows", "line", "value"),
    [
        ("2023-11-16 18:15:46,374,44\n2023-11-16 18:15:47,-1,44\n", 3, "-1"),
        ("2023-11-16 18:15:46,374,0\n", 2, "0"),
        ("2023-11-16 18:15:46,3.5,1\n", 2, "3.5"),
        ("2023-11-16 18:15:46,1e3,1\n", 2, "1e3"),
        ("2023-11-16 18:15:46,,1\n", 2, ""),
        ("2023-11-16 18:15:46,5\n", 2, None),
        ("2023-11-16 18:15:46,5,12345678901234567890\n", 2, "12345678901234567890"),
        ("yesterday,374,44\n", 2, "yesterday"),
        ("\n2023-11-16 18:15:46,3,4\n,374,44\n", 4, ""),
    ],
)
def test_bad_row_is_named(tmp_path: Path, rows: str, line: int, value: str | None) -> None:
    """A row that is none raises an error with its line and the offending text."""
    with pytest.raises(ArgumentError, match=f"line {line}: .* is ") as caught:
        read_trace(trace(tmp_path, HEADER + rows))
    assert caught.value.value == value
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("content", [b"", HEADER.encode(), HEADER.encode() + b"\n\n", bytes(range(256))])
def test_a_file_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    """Empty files, headers alone and any bytes at all give a typed error."""
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"trace\.csv"):
        read_trace(path)


def test_missing_column_is_named(tmp_path: Path) -> None:
    """A file without one of the columns raises an error that names it."""
    with pytest.raises(ArgumentError, match="no column GeneratedTokens"):
        read_trace(trace(tmp_path, "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n"))


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Whatever follows the header, reading gives a workload or a typed error that names a line."""
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    path.write_text(HEADER + text, encoding="utf-8", newline="")
    try:
        workload = read_trace(path)
    except ArgumentError as error:
        message = str(error)
    else:
        message = f"{path}" if len(workload) else ""
    assert str(path) in message


def test_fitted_workload_looks_like_the_hour() -> None:
    """The generator gives the published figures of the hour: count, medians, most, mean, duration."""
    workload = fitted_workload(seed=3)
    assert len(workload) == 19_366
    assert np.median(workload.context_tokens) == pytest.approx(1020, rel=0.03)
    assert workload.context_tokens.mean() == pytest.approx(1155, rel=0.03)
    assert 6_000 < workload.context_tokens.max() <= 14_050
    assert np.median(workload.generated_tokens) == pytest.approx(129, rel=0.06)
    assert workload.generated_tokens.mean() == pytest.approx(211, rel=0.03)
    assert 900 < workload.generated_tokens.max() <= 1_000
    assert workload.arrival[-1] == pytest.approx(3_502, rel=0.01)


def test_fitted_workload_depends_on_the_seed_alone() -> None:
    """One seed gives one workload; another gives another."""
    first, same, other = (fitted_workload(50, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first.arrival, same.arrival)
    np.testing.assert_array_equal(first.generated_tokens, same.generated_tokens)
    assert first.generated_tokens.tolist() != other.generated_tokens.tolist()


def test_fewer_requests_keep_the_load() -> None:
    """A tenth of the requests takes a tenth of the hour."""
    assert fitted_workload(1_936).arrival[-1] == pytest.approx(350, rel=0.02)
    assert len(fitted_workload(1)) == 1


def test_first_requests() -> None:
    """`first` keeps the earliest requests, or all when there are fewer."""
    workload = fitted_workload(10)
    assert workload.first(3).context_tokens.tolist() == workload.context_tokens[:3].tolist()
    assert len(workload.first(99)) == 10


def rows(arrival: list[float], context: list[int], generated: list[int]) -> Workload:
    """A workload of columns."""
    return Workload(np.array(arrival), np.array(context, np.int64), np.array(generated, np.int64))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: attrs.evolve(TINY, max_running=0), "max_running is 0"),
        (lambda: attrs.evolve(TINY, num_pages=-1), "num_pages is -1"),
        (lambda: attrs.evolve(TINY, step_seconds=-1.0), "step_seconds is -1.0"),
        (lambda: attrs.evolve(TINY, max_tokens_per_step=7), "max_tokens_per_step is 7 and max_running 8"),
        (lambda: run_traffic(workload((0, 100, 30)), settings=TINY), "needs 33 pages for 130 tokens; there are 30"),
        (lambda: fitted_workload(0), "0 requests with seed 0"),
        (lambda: fitted_workload(3, -1), "3 requests with seed -1"),
        (lambda: fitted_workload(10).first(0), "0 requests"),
        (lambda: draw_requests(fitted_workload(3), seed=-1), "seed is -1"),
        (lambda: draw_requests(fitted_workload(3), aborts=1.1), "aborts is 1.1"),
        (lambda: draw_requests(fitted_workload(3), aborts=float("nan")), "aborts is nan"),
        (lambda: rows([], [], []), r"arrays of \(0, 0, 0\) rows"),
        (lambda: rows([0.0], [1, 2], [1]), r"arrays of \(1, 2, 1\) rows"),
        (lambda: rows([1.0, 0.0], [1, 1], [1, 1]), "out of order"),
        (lambda: rows([0.0], [0], [1]), "context_tokens has a 0"),
        (lambda: rows([0.0], [1], [-1]), "generated_tokens has a -1"),
    ],
)
def test_impossible_values_are_refused(refused: Callable[[], object], message: str) -> None:
    """Sizes, shares, seeds and workloads that cannot be meant raise a typed error that names the value."""
    with pytest.raises(ArgumentError, match=message):
        refused()


def test_requests_carry_the_workload() -> None:
    """Each request has its row's lengths; the seed settles the rest; `aborts` is the share that hangs up."""
    workload = fitted_workload(400, 1)
    requests = draw_requests(workload, seed=2, aborts=0.25)
    again = draw_requests(workload, seed=2, aborts=0.25)
    assert [request.answer_tokens for request in requests] == workload.generated_tokens.tolist()
    assert [request.sampling for request in requests] == [request.sampling for request in again]
    assert 60 < sum(request.hangs_up < np.inf for request in requests) < 140
    assert all(request.hangs_up >= request.arrival for request in requests)
    assert all(request.hangs_up == np.inf for request in draw_requests(workload))


# The command

FIGURES = {
    "requests",
    "tokens",
    "steps",
    "violations",
    "leaks",
    "host_us_per_step",
    "host_to_device_copies_per_step",
    "device_operations_per_step",
    "forced_syncs",
    "seconds",
}


def test_command_prints_a_table_and_writes_json(
    tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table ends a run in plain words; the JSON file has every figure; all well is 0."""
    path = tmp_path / "traffic.json"
    assert main(["--requests", "20", "--seed", "3", "--device", device, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert set(figures) >= FIGURES
    assert set(figures["host_us_per_step"]) == {"median", "p99"}
    assert (figures["requests"], figures["violations"], figures["leaks"], figures["forced_syncs"]) == (20, 0, 0, 0)
    output = capsys.readouterr()
    assert "each exactly once" in output.out
    assert f"{figures['tokens']:,}" in output.out
    assert not output.err


def test_command_reads_a_trace(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--trace` serves the requests of a file, and `--requests` the first of them."""
    file, path = trace(tmp_path, HEADER + "2024-01-01,100,7\n2024-01-02,50,5\n2024-01-03,9,9\n"), tmp_path / "t.json"
    assert main(["--trace", str(file), "--requests", "2", "--device", device, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert (figures["requests"], figures["tokens"], figures["prefill_tokens"]) == (2, 12, 148)
    assert "trace.csv" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "nowhere/trace.csv"], "^examples.traffic: nowhere/trace.csv: No such file or directory\n$"),
        (["--trace", "bad.csv"], "line 2: ContextTokens is 'zero'.*remedy"),
        (["--trace", "long.csv", "--num-pages", "6"], "--num-pages"),
        (["--requests", "1", "--device", "abacus"], "'abacus'"),
    ],
    ids=["file", "trace", "pages", "device"],
)
def test_an_error_is_one_message(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Work that cannot be done ends with 2 and a few short lines: the problem, its place and the remedy."""
    monkeypatch.chdir(tmp_path)
    for name, context in (("bad.csv", "zero"), ("long.csv", "100")):
        Path(name).write_text(HEADER + f"2024-01-01 00:00:00,{context},7\n")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert re.search(words, error, re.DOTALL)
    assert "Traceback" not in error
    assert max(map(len, error.splitlines())) < 200
    if "--num-pages" in arguments:  # the option that the message names makes room
        assert main([*arguments[:-1], "7", "--device", "cpu"]) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--requests", "0"],
        ["--seed", "-1"],
        ["--aborts", "2"],
        ["--checks", "some"],
        ["--json", "nowhere/at/all.json"],
        ["--json", "."],
    ],
)
def test_bad_option_is_refused_before_the_run(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A value that cannot be meant is refused by name, with 2, before any work is done."""
    with pytest.raises(SystemExit) as done:
        main(options)
    assert done.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_violation_is_printed_and_1(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken invariant ends the run with its report on stderr, is in the figures, and gives 1."""
    release = TrafficEngine.give_back

    def twice(engine: TrafficEngine, leaves: Any) -> Any:
        leaving = engine.batch.filter(leaves)
        requests = release(engine, leaves)
        engine.pages.release_requests(leaving.slots, after=None)
        return requests

    monkeypatch.setattr(TrafficEngine, "give_back", twice)
    path = tmp_path / "traffic.json"
    assert main(["--requests", "3", "--device", device, "--json", str(path)]) == 1
    output = capsys.readouterr()
    assert json.loads(path.read_text())["violations"] == 1
    assert "SLOT_" in output.err
    assert "remedy" in output.err


def test_closed_streams_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was started without stdout and stderr does its work all the same."""
    file = tmp_path / "figures.json"
    with monkeypatch.context() as closed:
        for stream in ("sys.stdout", "sys.stderr"):
            closed.setattr(stream, None)
        code = main(["--requests", "3", "--device", "cpu", "--json", str(file)])
    assert code == 0
    assert json.loads(file.read_text())


def test_file_that_cannot_be_written_does_not_lose_the_table(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is printed before the file is written, so a full disk costs only the file; the code is 2."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["--requests", "3", "--device", device, "--json", str(tmp_path / "figures.json")]) == 2
    output = capsys.readouterr()
    assert "====" in output.out
    assert "No space left on device" in output.err
