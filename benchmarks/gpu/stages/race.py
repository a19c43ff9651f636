"""The race detector round the device: what it says of known programs, beside torch's sanitizer, and some fuzzing."""

from collections.abc import Sequence

from hypothesis.database import InMemoryExampleDatabase

from batchstate.runtime import open_runtime
from benchmarks.gpu.outcome import Notes, Setting
from tests import idiom_verdicts
from tests.race_cases import CASES
from tests.race_cases.tools import Says
from tests.race_cases.verdicts import Column, Table, run_tools
from tests.selfcheck.fuzzing import fuzz

MACHINES = ("batch", "mirrored_tensor", "slot_pool", "page_pool", "future_map", "hybrid")
"""State machines that run on a device of any kind, and soon end."""


def run(setting: Setting, notes: Notes) -> None:
    """Runs all cases under the detector, fuzzes under it, and then asks the sanitizer, which may take long."""
    open_runtime(setting.device)
    detector = "detector on CUDA" if setting.on_cuda else "detector"
    notes.figures["cases"] = len(CASES)
    table = _judged(notes, detector, Table({}))
    if detector in table.columns:
        _detector(notes, detector, table.columns[detector])
    _fuzzed(notes, "race:cuda" if setting.on_cuda else "race", MACHINES[:2] if setting.quick else MACHINES, setting)
    if setting.on_cuda:
        table = _judged(notes, "sanitizer", table)
        if "sanitizer" in table.columns:
            _sanitizer(notes, table)
        _idioms(notes)


def _judged(notes: Notes, tool: str, table: Table) -> Table:
    """The table with the column of one more tool."""
    more = run_tools([tool])
    notes.require(tool in more.columns, f"{tool} did not run")
    table = more.without_those_of(table)
    notes.figures["table"] = table.as_dict()
    return table


def _detector(notes: Notes, tool: str, column: Column) -> None:
    """It has to be right about every case."""
    wrong = [name for name, case in CASES.items() if (column.verdicts[name].says is Says.RACE) != case.racy]
    errors = [name for name in CASES if column.verdicts[name].says is Says.ERROR]
    notes.figures[tool] = {"wrong": wrong, "errors": errors}
    notes.require(not wrong, f"{tool} is wrong about {len(wrong)} cases: {', '.join(wrong[:5])}")
    notes.require(not errors, f"{tool} failed in {len(errors)} cases: {', '.join(errors[:5])}")


def _sanitizer(notes: Notes, table: Table) -> None:
    """Its findings are noted. It has to find something: else it did not watch."""
    column = table.columns["sanitizer"]
    races = [name for name, case in CASES.items() if case.racy and column.verdicts[name].says is Says.RACE]
    alarms = [name for name, case in CASES.items() if not case.racy and column.verdicts[name].says is Says.RACE]
    errors = [name for name in CASES if column.verdicts[name].says is Says.ERROR]
    notes.figures["sanitizer"] = {
        "races found": len(races),
        "races": sum(case.racy for case in CASES.values()),
        "false alarms": alarms,
        "errors": errors,
    }
    notes.require(bool(races), "the sanitizer found none of the races")


def _idioms(notes: Notes) -> None:
    """Plain torch, watched, has to be judged rightly; what the sanitizer says of the idioms stands beside it."""
    table = idiom_verdicts.table()
    notes.figures["idioms"] = {"table": table.as_dict(), "said": list(idiom_verdicts.lines(table))}
    watched = table.columns["watched"].verdicts
    wrong = [name for name, verdict in watched.items() if not idiom_verdicts.right(name, verdict)]
    notes.require(not wrong, f"watch_cuda is wrong about {len(wrong)} programs: {', '.join(wrong[:5])}")


def _fuzzed(notes: Notes, device: str, machines: Sequence[str], setting: Setting) -> None:
    report = fuzz(device, 2 if setting.quick else 12, 0, machines, database=InMemoryExampleDatabase())
    notes.figures["fuzz"] = {
        "device": device,
        "examples": sum(result.examples for result in report.machines),
        "rules": sum(result.steps for result in report.machines),
        "violations": report.violations,
        "failures": {result.name: str(result.failure)[-1500:] for result in report.machines if result.violations},
    }
    notes.require_equal(f"violations by fuzzing on {device}", report.violations, 0)
