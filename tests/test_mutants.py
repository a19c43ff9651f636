"""Named mutants: each real bug is found by an invariant that is there to find it, and the library as it is by none."""

import functools
import inspect
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from batchstate.batch import Batch
from batchstate.errors import ArgumentError, DeclarationError
from batchstate.future_map import FutureMap
from batchstate.hybrid import HybridSlotPool
from batchstate.invariants import Invariant
from batchstate.kv.hisparse import HiSparse
from batchstate.kv.host_pool import HostKVPool
from batchstate.kv.pages import PagePool
from batchstate.levels import Level
from batchstate.mirror import MirroredTensor
from batchstate.pools import SlotPool
from batchstate.tables import Table
from batchstate.violations import Code
from batchstate.watch import Watched
from tests.selfcheck.__main__ import main
from tests.selfcheck.machine import run_machine
from tests.selfcheck.machines import MACHINES
from tests.selfcheck.mutants import GROUPS, MUTANTS, Mutant, MutantResult, diffs, run, run_mutant
from tests.selfcheck.mutants.diffs import Change, Diff
from tests.selfcheck.mutants.runner import never_ran

ASKED = (
    *((owner, "verify") for owner in (SlotPool, HybridSlotPool, PagePool, HostKVPool, HiSparse)),
    *((owner, "check") for owner in (MirroredTensor, Batch, FutureMap, Table, Watched)),
    (Invariant, "__call__"),
)
"""What a machine may ask for, and an engine does not."""


@functools.cache
def ran(name: str, device: str) -> MutantResult:
    """The result of a mutant, which several tests look at."""
    return run_mutant(MUTANTS[name], device=device)


def of_device(device: str) -> list[Mutant]:
    """Mutants that the device can have."""
    return [mutant for mutant in MUTANTS.values() if mutant.exists_on(device)]


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name: str, device: str) -> None:
    """The mutant is found by one of its own invariants: another failure does not count."""
    if not MUTANTS[name].exists_on(device):
        pytest.skip(f"only on {MUTANTS[name].only_on}")
    result = ran(name, device)
    unreached = () if result.killed else never_ran(MUTANTS[name], device=device)
    summary = f"{name}: {result.by} after {result.examples} examples; changed lines that never ran: {unreached}"
    assert result.killed, f"{summary}\n{result.failure}"


def test_every_invariant_kills(device: str) -> None:
    """Each code fires for at least one mutant, so that every invariant has a purpose."""
    fired = {ran(mutant.name, device).by for mutant in of_device(device)}
    elsewhere = {code.value for mutant in MUTANTS.values() if not mutant.exists_on(device) for code in mutant.killed_by}
    assert {code.value for code in Code} - fired <= elsewhere


def test_each_is_described() -> None:
    """A mutant has a group, a machine and codes, names public threads, and says in one sentence what goes wrong."""
    thread = re.compile(r"[A-Za-z][\w./-]*( #|#| )\w[\w ]*")
    assert {mutant.group for mutant in MUTANTS.values()} == set(GROUPS)
    for mutant in MUTANTS.values():
        assert all(thread.fullmatch(origin) for origin in mutant.origin.split(", ")), mutant
        assert mutant.mechanism.endswith("."), mutant
        assert mutant.killed_by, mutant
        assert mutant.machine in MACHINES, mutant


def test_levels() -> None:
    """Invariants of the relay need no device and are checked at `cheap`. Races are found at `off`, others at `full`."""
    races = [mutant for mutant in MUTANTS.values() if Code.RACE in mutant.killed_by]
    assert {mutant.level for mutant in races} == {Level.OFF}
    assert {mutant.level for mutant in MUTANTS.values() if mutant.group == "relay"} == {Level.CHEAP}
    others = [mutant for mutant in MUTANTS.values() if mutant.group != "relay" and mutant not in races]
    assert {mutant.name for mutant in others if mutant.level is not Level.FULL} == {"others_kept_without_a_look"}


UNSEEN = [name for name, mutant in MUTANTS.items() if mutant.unseen is not None]


@pytest.mark.parametrize("name", UNSEEN)
def test_unseen_is_unseen(name: str, device: str) -> None:
    """A mutant that says that nothing finds it by itself is not found so, in twice the examples of a run that asks."""
    mutant = MUTANTS[name]
    if not mutant.exists_on(device):
        pytest.skip(f"only on {mutant.only_on}")
    # Strangers take time, and an automatic run compares nothing of theirs, in the first example as in the last.
    examples = 5 if mutant.group == "strangers" else max(5, 2 * ran(name, device).examples)
    assert not run_mutant(attrs.evolve(mutant, unseen=None), device=device, examples=examples).killed
    assert len([name for name in UNSEEN if MUTANTS[name].group != "strangers"]) <= 3


@pytest.mark.parametrize("automatic", [False, True])
def test_automatic_run_asks_nothing(automatic: bool, device: str) -> None:
    """In an automatic run no machine calls `verify`, `check` or an invariant itself; otherwise each machine does."""
    for name, machine in MACHINES.items():
        asked = set[str]()

        def watched(question: Any, name: str, asked: set[str] = asked) -> Any:
            @functools.wraps(question)
            def call(*args: Any, **kwargs: Any) -> Any:
                caller = sys._getframe(1).f_globals["__name__"]
                if caller.startswith(("tests.selfcheck.", "batchstate.testing.")):
                    asked.add(name)
                return question(*args, **kwargs)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for owner, method in ASKED:
                patch.setattr(owner, method, watched(getattr(owner, method), f"{owner.__name__}.{method}"))
            examples = 5 if automatic else 1  # whether it asks at all shows in the first; `test_machines` runs many
            result = run_machine(
                machine, device=device, examples=examples, steps=20, derandomize=True, automatic=automatic
            )
        assert result.failure is None, name
        assert bool(asked) is not automatic, (name, asked)


def test_races_are_found_soon(device: str) -> None:
    """Seven seeded bugs, and 15 more of order, lifetime and host memory: each within 100 examples, half within 10."""
    results = [ran(mutant.name, device) for mutant in MUTANTS.values() if mutant.tool is not None]
    assert sorted(result.mutant.seeded for result in results if result.mutant.seeded) == list("abcdefg")
    others = [result for result in results if result.mutant.seeded is None]
    assert {result.mutant.group for result in others} >= {"races", "host_memory", "lifetimes"}
    assert {result.by for result in others} == {"RACE"}
    assert max(result.examples for result in results) <= 100
    assert statistics.median(result.examples for result in results) <= 10
    assert all(result.simulated for result in results if result.mutant.seeded), "none of the schedulers shows it"


def identity(value: object) -> tuple[int, ...]:
    """The ids of an attribute and of the code of the functions in it."""
    ids = [id(value)]
    while isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value):
        if inspect.isfunction(value):
            ids.append(id(value.__code__))
        value = value.fget if isinstance(value, property) else getattr(value, "__wrapped__", None)
    return tuple(ids)


def snapshot() -> dict[tuple[str, ...], tuple[int, ...]]:
    """Identity of every function and attribute of the library; those of a class once, wherever it is imported."""
    identities: dict[tuple[str, ...], tuple[int, ...]] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith("batchstate."):
            for name, value in vars(module).items():
                identities[module_name, name] = identity(value)
                if inspect.isclass(value) and value.__module__ == module_name:
                    identities |= {(module_name, name, key): identity(member) for key, member in vars(value).items()}
    return identities


def test_switched_off_again(device: str) -> None:
    """After its window nothing of a mutant is left in the library, also when the window ends in an error."""
    before = snapshot()
    for mutant in MUTANTS.values():
        with pytest.raises(RuntimeError, match="in between"), mutant.switched_on():
            raise RuntimeError("in between")
    assert snapshot() == before


def test_library_as_it_is_gets_no_report(device: str) -> None:
    """Without a mutant no machine reports anything."""
    first = next(iter(MUTANTS))
    report = run([first], device=device, clean_examples=30)
    assert report.sound
    assert report.clean_examples == 30
    assert [result.name for result in report.clean] == [MUTANTS[first].machine]


def test_same_hunt_every_time(device: str) -> None:
    """A mutant is tried with the same examples each time."""
    mutant = MUTANTS["filter_forgets_device"]
    assert run_mutant(mutant, device=device).examples == ran(mutant.name, device).examples


def test_other_failure_is_no_kill(device: str) -> None:
    """A mutant that another error gives away has survived: nobody would know what is wrong."""

    def broken(patch: Any) -> None:
        patch(MirroredTensor, "_taken", lambda self, rows, operation: 1 / 0)

    result = run_mutant(attrs.evolve(MUTANTS["filter_forgets_device"], switch=broken), device=device)
    assert result.by == "ZeroDivisionError"
    assert not result.killed


def test_unknown_name_is_refused() -> None:
    """A mutant that does not exist is an error that says where those that do are listed, and which is like it."""
    with pytest.raises(ArgumentError, match="unknown mutant 'nobody'") as refused:
        run(["nobody"])
    assert "python -m tests.selfcheck mutants --list" in refused.value.remedy
    with pytest.raises(ArgumentError) as refused:
        run(["filter_forgets_devices"])
    assert "use filter_forgets_device" in refused.value.remedy
    with pytest.raises(ArgumentError, match="cannot exist on cuda"):
        run(["device_side_is_host_memory"], device="cuda")
    with pytest.raises(ArgumentError, match="clean_examples is -1"):
        run(["filter_forgets_device"], clean_examples=-1)


def test_name_is_taken_once() -> None:
    """Two mutants of one name are refused where the second is declared."""
    with pytest.raises(DeclarationError, match="two mutants are named 'filter_forgets_device'"):

        @diffs.mutant("MIRROR_EQUAL | mirrored_tensor | none #1", "drift")
        def filter_forgets_device(patch: Any) -> None:
            """Nothing."""


def test_command(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m tests.selfcheck mutants` prints a table, writes figures and ends with 0 when all are killed."""
    path = tmp_path / "mutants.json"
    arguments = ["mutants", "--device", device, "--json", str(path), "--name", "filter_forgets_device"]
    assert main([*arguments, "--clean-examples", "20"]) == 0
    figures = json.loads(path.read_text())
    assert list(figures) == ["device", "mutants", "killed", "total", "false_reports", "clean_examples"]
    assert figures["killed"] == figures["total"] == 1
    assert figures["false_reports"] == 0
    assert figures["clean_examples"] >= 20
    (figures,) = figures["mutants"]
    assert list(figures) == ["name", "origin", "killed", "by", "examples"]
    assert figures["by"] == "MIRROR_EQUAL"
    output = capsys.readouterr().out
    assert "1 of 1 mutants killed" in output
    assert "MIRROR_EQUAL" in output


def test_command_reports_survivors(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A change that breaks nothing survives, is marked with the lines that never ran, and the command ends with 1."""
    changes = (
        ("mirror:MirroredTensor.filter", 'self.check("filter")', 'self.check("filter")  # runs'),
        ("mirror:MirroredTensor.check", "if not levels.cheap:\nreturn", "if not levels.cheap:\n    return None"),
        ("pools:SlotPool.is_live", "array = as_array(", "array = as_array(  # in another machine\n"),
    )
    switch = Diff(tuple(Change(where, ((before, after),)) for where, before, after in changes))
    harmless = attrs.evolve(MUTANTS["filter_forgets_device"], name="harmless", switch=switch)
    monkeypatch.setitem(MUTANTS, "harmless", harmless)
    options = ["--device", device, "--examples", "3", "--clean-examples", "3"]
    assert main(["mutants", "--name", "harmless", *options]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "0 of 1 mutants killed" in output
    assert "SURVIVED 3 examples; MIRROR_EQUAL should have fired; changed lines that never ran:" in output
    assert never_ran(harmless, device=device, examples=3) == ("mirror:MirroredTensor.check", "pools:SlotPool.is_live")


def test_command_refuses_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name is one message, and 2."""
    assert main(["mutants", "--device", "cpu", "--name", "nobody"]) == 2
    assert "unknown mutant 'nobody'" in capsys.readouterr().err
    assert main(["mutants", "--device", "cpu", "--machine", "rank"]) == 2
    assert "machine 'rank' has no mutant\n  remedy: did you mean 'ranks'?" in capsys.readouterr().err


def test_command_runs_the_mutants_of_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """After a change of a machine, those that it is to find."""
    assert main(["mutants", "--device", "cpu", "--machine", "ranks", "--clean-examples", "2"]) == 0
    assert "4 of 4 mutants killed" in capsys.readouterr().out
