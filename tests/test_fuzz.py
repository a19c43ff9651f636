"""`run_machine` and `fuzz`: deterministic by seed, honest about what they found, and able to replay it."""

import importlib
import json
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.stateful import initialize, rule

from batchstate import cli
from batchstate.errors import ArgumentError
from batchstate.pools import SlotPool
from batchstate.races import RaceKind, RaceReport
from batchstate.races.sim import PORTFOLIO
from batchstate.testing import Machine, run_machine
from tests.selfcheck.__main__ import main
from tests.selfcheck.fuzzing import fuzz
from tests.selfcheck.machines import MACHINES
from tests.selfcheck.mutants import MUTANTS

trace: list[object] = []


class Recorder(Machine):
    """Writes down what it was told to do, and fails on the number that `fails_at` names."""

    NAME = "recorder"
    fails_at = 10**9

    @initialize()
    def begin(self) -> None:
        """Opens the runtime."""
        self.open()

    @rule(number=st.integers(0, 10**6), flags=st.sets(st.sampled_from("abcd")))
    def tell(self, number: int, flags: set[str]) -> None:
        """Anything."""
        trace.append((number, sorted(flags)))
        if number >= self.fails_at:
            raise ZeroDivisionError(f"{number} is too much")


class Failing(Recorder):
    NAME = "failing"
    fails_at = 1000


def traced(machine: type[Machine], seed: int, **options: object) -> list[object]:
    """What a run did."""
    trace.clear()
    run_machine(machine, seed=seed, examples=20, steps=10, **options)  # type: ignore[arg-type]
    return list(trace)


def test_same_seed_same_examples() -> None:
    """The seed alone decides what is tried."""
    assert traced(Recorder, 5) == traced(Recorder, 5)
    assert traced(Recorder, 5) != traced(Recorder, 6)


def test_modules_that_are_loaded_change_no_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis draws numbers that it finds in the source of loaded modules; a run by seed does not."""
    before = traced(Recorder, 5)
    (tmp_path / "loaded_meanwhile.py").write_text(f"NUMBERS = {list(range(1000, 2000))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("loaded_meanwhile")
    assert traced(Recorder, 5) == before


@pytest.mark.parametrize("name", list(MACHINES))
def test_same_seed_same_run(name: str, device: str) -> None:
    """Two runs of a machine by one seed take the same steps and reach the same states."""
    first, second = (run_machine(MACHINES[name], device=device, seed=9, examples=3, steps=15) for _ in range(2))
    assert first.failure is None, first.failure
    assert (first.examples, first.steps, first.reached) == (second.examples, second.steps, second.reached)


def test_ci_explores_too() -> None:
    """Where CI is set, Hypothesis loads a profile that tries the same examples every time; a fuzz run does not."""
    before = settings.get_current_profile_name()
    settings.load_profile("ci")
    try:
        assert settings().derandomize
        assert traced(Recorder, 1) != traced(Recorder, 2)
    finally:
        settings.load_profile(before)


def test_derandomized_runs_leave_the_seed_aside() -> None:
    """With derandomize the machine alone decides, whatever the seed."""
    assert traced(Recorder, 1, derandomize=True) == traced(Recorder, 2, derandomize=True)


def test_failure_is_shrunk_and_can_be_replayed() -> None:
    """A failure is reported once, with the shortest program and the number of examples it took."""
    result, again = (run_machine(Failing, examples=100, seed=3) for _ in range(2))
    assert result.violations == 1
    assert result.code == "ZeroDivisionError"
    assert result.first_failure == result.examples <= 100
    assert result.failure is not None
    assert "state.tell(flags=set(), number=1000)" in result.failure
    assert f"\n  {__file__}:" in result.failure  # where it was raised
    assert again != result  # only the wall time differs
    assert again.failure == result.failure


def test_first_failure_is_found_without_shrinking_too() -> None:
    """Shrinking changes the program, not when it was found."""
    found = [run_machine(Failing, examples=100, seed=3, shrink=shrink).first_failure for shrink in (True, False)]
    assert found[0] == found[1]


@pytest.mark.parametrize("draws_more", [False, True])
def test_a_failure_that_does_not_come_again_is_reported_as_it_was(draws_more: bool) -> None:
    """What fails once and passes when it is run again, as races on a GPU do, keeps its error and the program."""
    failures: list[int] = []

    class Late(Recorder):
        NAME = "late"

        @rule(data=st.data())
        def wait(self, data: st.DataObject) -> None:
            """Fails once in the life of the class; then it may draw more than in the example that failed."""
            if not failures:
                failures.append(1)
                raise ZeroDivisionError("too late")
            if draws_more:
                data.draw(st.integers(0, 1000))

    result = run_machine(Late, examples=50, seed=3)
    assert (result.code, result.violations) == ("ZeroDivisionError", 1)
    assert result.failure is not None
    assert "too late" in result.failure
    assert "It did not fail when it was run again" in result.failure


def test_kept_examples_are_tried_first() -> None:
    """What failed once is tried first by the next run, whatever its seed."""
    database = InMemoryExampleDatabase()
    run_machine(Failing, examples=100, seed=3, database=database)
    assert run_machine(Failing, examples=100, seed=4, database=database).first_failure == 1


@pytest.mark.parametrize(
    "options",
    [{"examples": 0}, {"steps": 0}, {"seed": -1}, {"device": "abacus"}],
    ids=["examples", "steps", "seed", "device"],
)
def test_bad_arguments_are_refused(options: dict) -> None:
    """What cannot be meant is the caller's mistake, not a finding."""
    with pytest.raises(ArgumentError):
        run_machine(Recorder, **options)


def test_unknown_machine_lists_the_known() -> None:
    """An unknown machine is refused with the names of those there are."""
    with pytest.raises(ArgumentError, match="mirrored_tensor, batch, slot_pool"):
        fuzz(machines=["slots"])


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """`python -m tests.selfcheck fuzz` writes the figures of every machine and returns 0 when nothing was found."""
    monkeypatch.chdir(tmp_path)
    wanted = ["fuzz", "--machine", "hybrid", "--machine", "slot_pool", "--examples", "4", "--seed", "2"]
    assert main([*wanted, "--device", device, "--json", "fuzz.json"]) == 0
    figures = json.loads((tmp_path / "fuzz.json").read_text())
    assert (figures["device"], figures["seed"], figures["violations"]) == (device, 2, 0)
    assert [machine["name"] for machine in figures["machines"]] == ["hybrid", "slot_pool"]
    assert set(figures["machines"][0]) == {"name", "device", "examples", "steps", "violations", "seconds"}
    assert all(machine["examples"] == 4 for machine in figures["machines"])


def test_command_line_shows_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    """A pool that hands out a slot twice: the shrunk program, the command that replays it, one violation, and 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SlotPool, "release_rows", lambda self, rows, after, operation: None)
    command = ["fuzz", "--machine", "slot_pool", "--examples", "50", "--seed", "7", "--device", device]
    assert main([*command, "--json", "fuzz.json"]) == 1
    assert json.loads(Path("fuzz.json").read_text())["violations"] == 1
    shown = capsys.readouterr().err
    assert "state = SlotPoolMachine()" in shown
    assert f"python -m tests.selfcheck fuzz --machine slot_pool --seed 7 --examples 50 --device {device}" in shown
    assert (tmp_path / ".hypothesis" / "examples").is_dir()


def test_command_line_on_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fuzz --device race` runs machines with either kind of fences, and `--device sim` under every scheduler."""
    monkeypatch.chdir(tmp_path)
    arguments = ["fuzz", "--machine", "slot_pool", "--seed", "2", "--json", "fuzz.json", "--examples"]
    assert main([*arguments, "3", "--device", "race"]) == 0
    machines = json.loads((tmp_path / "fuzz.json").read_text())["machines"]
    assert [(machine["device"], machine["examples"]) for machine in machines] == [("race", 2), ("race:prompt", 1)]
    assert main([*arguments, str(len(PORTFOLIO)), "--device", "sim"]) == 0
    machines = json.loads((tmp_path / "fuzz.json").read_text())["machines"]
    assert [machine["device"] for machine in machines] == [f"sim:{name}" for name in PORTFOLIO]
    assert all(machine["examples"] == 1 for machine in machines)
    assert main([*arguments, "2", "--device", "sim:lazy"]) == 0
    assert main([*arguments, "2", "--device", "sim:nobody"]) == 2


def test_command_line_keeps_a_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A race is shrunk, reported, and kept in a file that `batchstate race` draws."""
    monkeypatch.chdir(tmp_path)
    with MUTANTS["kv_written_elsewhere_read_without_wait"].switched_on():
        arguments = ["fuzz", "--machine", "page_pool", "--seed", "2", "--examples", "20", "--device", "race"]
        assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert "A short program that shows it" in errors
    assert "batchstate race race-page_pool.json --out race.html" in errors
    report = RaceReport.load(tmp_path / "race-page_pool.json")
    assert report.kind is RaceKind.READ_AFTER_WRITE
    assert cli.main(["race", "race-page_pool.json", "--out", "race.html"]) == 0
    assert "missing edge" in (tmp_path / "race.html").read_text()
