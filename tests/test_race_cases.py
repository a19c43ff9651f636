"""The micro-cases: what the race detector says of each, and how other tools are asked and their answers kept."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from batchstate.errors import BatchStateError
from batchstate.races import Race, RaceKind, RaceRuntime
from batchstate.races.sim import PORTFOLIO
from batchstate.runtime import Stream
from tests.race_cases import CASES, GROUPS, Case, sanitizer, verdicts
from tests.race_cases import __main__ as command
from tests.race_cases.plain import PlainCpu
from tests.race_cases.tools import (
    Says,
    Verdict,
    by_detector,
    by_simulator,
    expected,
    races_of,
    right_values,
)
from tests.race_cases.verdicts import Column, Made, Table, load, run_tools, save

RACY = [case for case in CASES.values() if case.racy]
SAFE = [case for case in CASES.values() if not case.racy]
KEPT = Path(__file__).parents[1] / "docs" / "reference" / "race-cases.json"


def named(cases: Sequence[Case]) -> Any:
    """Parametrizes by case."""
    return pytest.mark.parametrize("case", cases, ids=[case.pair for case in cases])


@named(RACY)
def test_the_race_is_reported_and_nothing_else(case: Case) -> None:
    """Its kind, both operations, their streams, and the rows; where races are raised it ends the program."""
    (report,) = races_of(case)
    found = (report.kind, str(report.first.operation), report.first.lane, report.second.operation, report.second.lane)
    assert found == (case.kind, case.first.operation, case.first.stream, case.second.operation, case.second.stream)
    assert report.rows == case.rows
    with pytest.raises(Race) as caught, RaceRuntime() as rt:
        case.run(rt)
    assert expected(case, caught.value.report)


@named(SAFE)
def test_nothing_is_reported_of_its_safe_twin(case: Case) -> None:
    """The one thing that differs makes the difference."""
    assert races_of(case) == ()


def test_every_kind_of_race_has_cases() -> None:
    """Pairs of a racy and a safe program, with the same name, in files that are listed; each says what it shows."""
    assert {case.kind for case in RACY} == set(RaceKind) - {
        RaceKind.UNWRITTEN_READ,
        RaceKind.LEFTOVER_READ,
        RaceKind.PROGRAMS_CLASH,
    }  # on one stream
    assert [case.pair for case in RACY] == [case.pair for case in SAFE]
    assert len({case.pair for case in RACY}) == len(RACY) >= 25
    assert {case.group for case in RACY} == set(GROUPS)
    for case in CASES.values():
        assert CASES[case.name] is case
        assert case.about.endswith(".")
        assert case.shows
        assert case.racy is ("(racy)" in case.name)


def test_programs_compute_the_same_each_time() -> None:
    """On a plain CPU, in program order: these are the right values."""
    for case in CASES.values():
        first, second = right_values(case), right_values(case)
        assert (first is None) is (second is None), case
        if first is not None and second is not None:
            assert [one.tolist() for one in first] == [one.tolist() for one in second], case
            assert any(one.size for one in first), case


@pytest.mark.parametrize("scheduler", PORTFOLIO)
def test_the_simulated_device_computes_what_is_right(scheduler: str) -> None:
    """The values of safe programs, whichever stream lags."""
    assert {case.name for case in SAFE if by_simulator(case, (scheduler,), 2).says is Says.RACE} == set()


def test_the_simulated_device_is_right_by_values() -> None:
    """Under some order a racy program computes something else; of one that computes nothing it cannot say."""
    schedulers = ("eager", "lazy", "pct")
    found = by_simulator(CASES["pinned memory refilled through numpy (racy)"], schedulers, 5)
    assert found.says is Says.RACE
    assert found.detail.startswith("lazy, pct ")
    assert by_simulator(CASES["same value rewritten (racy)"], schedulers, 1).says is Says.UNKNOWN
    assert by_simulator(CASES["read after write (racy)"], ("eager",), 1) == Verdict(Says.NONE)


def test_an_unexpected_race_is_none_that_was_found() -> None:
    """A report of other streams, or a second report, is another race."""
    case = CASES["write after read (racy)"]
    (report,) = races_of(CASES["read after write (racy)"])
    assert not expected(case, report)
    read = CASES["read after write (racy)"]
    assert expected(read, report, operations=False)
    assert by_detector(read) == Verdict(Says.RACE, "read after write")


# Words


@pytest.mark.parametrize(
    ("verdict", "racy", "said"),
    [
        (Verdict(Says.RACE, "write after read"), True, "write after read"),
        (Verdict(Says.RACE, "lazy"), False, "false alarm: lazy"),
        (Verdict(Says.ANOTHER, "freed in use"), True, "another race: freed in use"),
        (Verdict(Says.NONE), True, "missed"),
        (Verdict(Says.NONE), False, "none"),
        (Verdict(Says.UNKNOWN, "no value shows it"), False, "cannot say: no value shows it"),
        (Verdict(Says.ERROR, "the process ended"), True, "error: the process ended"),
    ],
)
def test_a_verdict_says_whether_it_is_right(verdict: Verdict, racy: bool, said: str) -> None:
    """What was overlooked and what was made up is called so."""
    assert verdict.text(racy) == said


# torch.cuda._sanitizer


def program(action: Any) -> Case:
    """A case that does something."""
    return attrs.evolve(CASES["read after write (racy)"], program=lambda rt, racy, left, right: action())


def raises(error: BaseException) -> Any:
    """An action that fails."""

    def act() -> None:
        raise error

    return act


def _line(name: str, says: str, detail: str = "") -> str:
    return json.dumps({"case": name, "says": says, "detail": detail})


def test_a_process_that_ends_loses_one_case() -> None:
    """The case that ended it is an error, and a new process begins with the next; each is tried once."""
    names = [case.name for case in RACY[:5]]
    started: list[list[str]] = []

    def child(waiting: Sequence[str]) -> Iterable[str]:
        started.append(list(waiting))
        for name in waiting:
            if name == names[2]:
                return
            yield _line(name, "no race")

    found = sanitizer.verdicts(names, child)
    assert list(found) == names
    assert found[names[2]] == Verdict(Says.ERROR, "the process ended")
    assert [found[name].says for name in names if name != names[2]] == [Says.NONE] * 4
    assert started == [names, names[3:]]
    assert {one.says for one in sanitizer.verdicts(names, lambda waiting: []).values()} == {Says.ERROR}


def test_the_sanitizer_still_has_what_is_asked_of_it() -> None:
    """Its errors hold two accesses each, with the schema of their operation."""
    module = pytest.importorskip("torch.cuda._sanitizer")
    access = module.Access(module.AccessType.READ, 1, 0, torch.ops.aten.clone.default._schema, [], False, None)
    error = module.UnsynchronizedAccessError(0, None, access, access)
    case = program(raises(module.CUDASanitizerErrors([error])))
    found = sanitizer.verdict_on(case, PlainCpu(), module.CUDASanitizerErrors)
    assert found == Verdict(Says.RACE, "clone behind clone")


# The table


def made(date: str = "2026-01-02") -> Made:
    """How a column came about."""
    return Made(date, "a machine", "2.13.0")


def small() -> Table:
    """Two tools that run_tools two cases."""
    racy, safe = RACY[0].name, SAFE[0].name
    return Table(
        {
            "detector": Column(made(), {racy: Verdict(Says.RACE, "write after read"), safe: Verdict(Says.NONE)}),
            "sanitizer": Column(made(), {racy: Verdict(Says.NONE), safe: Verdict(Says.RACE, "b behind a")}),
        }
    )


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    """As it was; where there is no file it is empty."""
    path = tmp_path / "cases.json"
    assert load(path) == Table({})
    save(small(), path)
    assert load(path) == small()


def test_what_a_machine_cannot_run_stays() -> None:
    """A column is replaced as a whole by the tool that ran; the others are kept with their dates."""
    new = Table({"detector": Column(made("2026-03-04"), {})})
    both = new.without_those_of(small())
    assert both.columns["detector"].made.date == "2026-03-04"
    assert both.columns["sanitizer"] == small().columns["sanitizer"]


def test_a_tool_that_did_not_run_says_so() -> None:
    """In its column, for a case that is newer than its column, and in the summary."""
    table = small()
    assert table.text("simulator", RACY[0]) == "not run"
    assert table.text("detector", RACY[1]) == "not run"
    assert table.text("sanitizer", RACY[0]) == "missed"
    rows = {row[0]: row[1:] for row in table.summary()}
    assert rows["race detector"] == (
        f"1 of {len(RACY)}",
        f"0 of {len(SAFE)}",
        "2026-01-02, torch 2.13.0, a machine",
    )
    assert rows["torch.cuda._sanitizer"][:2] == (f"0 of {len(RACY)}", f"1 of {len(SAFE)}")
    assert rows["simulated device"] == ("not run", "not run", "")


def test_tools_that_this_machine_lacks_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are, and say how."""
    monkeypatch.setattr(verdicts, "CASES", {RACY[0].name: RACY[0]})
    monkeypatch.setattr(sanitizer, "available", lambda: False)
    table = run_tools(["detector", "sanitizer", "detector on CUDA"])
    if not torch.cuda.is_available():
        assert list(table.columns) == ["detector"]
    assert table.columns["detector"].made.torch == torch.__version__
    assert table.text("detector", RACY[0]) == str(RACY[0].kind)


def test_the_kept_table_is_of_the_present_cases() -> None:
    """Else: python -m tests.race_cases --json docs/reference/race-cases.json."""
    table = load(KEPT)
    column = table.columns["detector"]
    assert set(column.verdicts) == set(CASES)
    assert [column.text(case) for case in RACY] == [str(case.kind) for case in RACY]
    assert [column.text(case) for case in SAFE] == ["none"] * len(SAFE)
    assert set(table.columns["simulator"].verdicts) == set(CASES)


def test_the_command_prints_and_keeps_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All cases by group, and a line for each tool; exit code 0 if the race detector is right, and else 1."""
    some = {name: CASES[name] for name in list(CASES)[:4]}
    monkeypatch.setattr(verdicts, "CASES", some)
    monkeypatch.setattr(command, "CASES", some)
    path = tmp_path / "cases.json"
    save(Table({"sanitizer": small().columns["sanitizer"]}), path)
    monkeypatch.setattr(sys, "argv", ["race_cases", "--tool", "detector", "--json", str(path)])
    assert command.main() == 0
    printed = capsys.readouterr().out
    assert "4 race cases" in printed
    assert next(iter(some)) in printed
    assert "torch.cuda._sanitizer" in printed
    assert set(load(path).columns) == {"detector", "sanitizer"}
    wrong = {RACY[0].name: Verdict(Says.NONE)}
    monkeypatch.setattr(command, "run_tools", lambda names, progress: Table({"detector": Column(made(), wrong)}))
    monkeypatch.setattr(sys, "argv", ["race_cases"])
    assert command.main() == 1
    assert "missed" in capsys.readouterr().out


def test_a_fault_of_the_simulated_device_counts_as_wrong() -> None:
    """A kernel that meets poison may fail instead of computing something else."""

    def broken(rt: Any, racy: bool, left: Stream, right: Stream) -> list[torch.Tensor]:
        if not isinstance(rt, PlainCpu):
            raise BatchStateError("a fault", value=None, remedy="none")
        return [torch.ones(1)]

    failing = attrs.evolve(RACY[0], program=broken)
    assert by_simulator(failing, ("lazy",), 1) == Verdict(Says.RACE, "lazy")
