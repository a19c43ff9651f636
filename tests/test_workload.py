"""Workloads: read from a trace, or drawn like one."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchstate.errors import ArgumentError, BatchStateError
from examples.traffic import TraceError, Workload, draw_requests, fitted_workload, read_trace

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
    with pytest.raises(TraceError, match=f"line {line}") as caught:
        read_trace(trace(tmp_path, HEADER + rows))
    assert caught.value.line == line
    assert caught.value.value == value
    assert repr(value) in str(caught.value)


def test_missing_column_is_named(tmp_path: Path) -> None:
    """A file without one of the columns raises an error that names it."""
    with pytest.raises(TraceError, match="no column GeneratedTokens") as caught:
        read_trace(trace(tmp_path, "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n"))
    assert caught.value.line == 1


@pytest.mark.parametrize("text", ["", HEADER, HEADER + "\n\n"])
def test_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    """A file without requests raises an error."""
    with pytest.raises(TraceError):
        read_trace(trace(tmp_path, text))


def test_binary_file_is_no_trace(tmp_path: Path) -> None:
    """Any bytes at all give a typed error."""
    path = tmp_path / "trace.csv"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(TraceError):
        read_trace(path)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Whatever follows the header, reading gives a workload or a typed error that names a line."""
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    path.write_text(HEADER + text, encoding="utf-8", newline="")
    try:
        workload = read_trace(path)
    except TraceError as error:
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


@pytest.mark.parametrize(("requests", "seed"), [(0, 0), (-3, 0), (3, -1)])
def test_impossible_draws_are_refused(requests: int, seed: int) -> None:
    """No requests, or a negative seed, raise a typed error."""
    with pytest.raises(ArgumentError):
        fitted_workload(requests, seed)


def test_first_requests() -> None:
    """`first` keeps the earliest requests, or all when there are fewer."""
    workload = fitted_workload(10)
    assert workload.first(3).context_tokens.tolist() == workload.context_tokens[:3].tolist()
    assert len(workload.first(99)) == 10
    with pytest.raises(ArgumentError):
        workload.first(0)


@pytest.mark.parametrize(
    ("arrival", "context", "generated"),
    [([], [], []), ([0.0], [1, 2], [1]), ([1.0, 0.0], [1, 1], [1, 1]), ([0.0], [0], [1]), ([0.0], [1], [-1])],
)
def test_inconsistent_workloads_are_refused(arrival: list, context: list, generated: list) -> None:
    """A workload is not empty, has one row a request, in order, with at least a token in and out."""
    with pytest.raises(BatchStateError):
        Workload(np.array(arrival), np.array(context, np.int64), np.array(generated, np.int64))


def test_requests_carry_the_workload() -> None:
    """Each request has its row's lengths; the seed settles the rest; `aborts` is the share that hangs up."""
    workload = fitted_workload(400, 1)
    requests = draw_requests(workload, seed=2, aborts=0.25)
    again = draw_requests(workload, seed=2, aborts=0.25)
    assert [one.answer_tokens for one in requests] == workload.generated_tokens.tolist()
    assert [one.sampling for one in requests] == [one.sampling for one in again]
    assert 60 < sum(one.hangs_up < np.inf for one in requests) < 140
    assert all(one.hangs_up >= one.arrival for one in requests)
    assert all(one.hangs_up == np.inf for one in draw_requests(workload))


@pytest.mark.parametrize(("seed", "aborts"), [(-1, 0.0), (0, -0.1), (0, 1.1), (0, float("nan"))])
def test_impossible_shares_are_refused(seed: int, aborts: float) -> None:
    """A share outside 0 to 1, or a negative seed, raises a typed error."""
    with pytest.raises(ArgumentError):
        draw_requests(fitted_workload(3), seed=seed, aborts=aborts)
