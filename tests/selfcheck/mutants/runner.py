"""Switches the mutants on, one at a time, and runs the state machines until one fails."""

import contextlib
import difflib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, final

import attrs

from batchstate.errors import ArgumentError
from batchstate.levels import Level
from batchstate.testing import MachineResult
from tests.selfcheck.fuzzing import shares
from tests.selfcheck.machine import run_machine, stop_at_failure
from tests.selfcheck.machines import MACHINES
from tests.selfcheck.mutants.registry import MUTANTS, Mutant

EXAMPLES = 100
"""Examples after which a mutant has survived."""

CLEAN_EXAMPLES = 2000
"""Examples of the library as it is, of all machines together, none of which may fail."""

CLEAN_STEPS = 25
"""Rules of one such example: many short examples differ more than few long ones, in the same time."""

SCHEDULERS = ("random", "oldest", "lazy", "pct")
"""Schedulers of the simulated device under which seeded bugs are tried, until one shows them."""

SIMULATED_EXAMPLES = 30
"""Examples under each of them."""

Progress = Callable[[int, int, str], None]
"""Called with the number of parts done, the number of all parts, and the name of the next one."""


@final
@attrs.frozen
class MutantResult:
    mutant: Mutant
    by: str | None  # code of the invariant that failed, or name of another error; None when nothing failed
    examples: int  # until then, that one included; all of them for a survivor
    seconds: float
    failure: str | None  # the report
    simulated: tuple[str, str, int] | None = None
    """The first scheduler of the simulated device that shows a seeded bug, the code, and the number of examples."""
    never_ran: tuple[str, ...] = ()
    """Of a survivor: the functions whose changed lines its machine never runs."""

    @property
    def killed(self) -> bool:
        """Whether one of its invariants fired; a seeded bug must also fail on the simulated device."""
        fired = self.by in [code.value for code in self.mutant.killed_by]
        return fired and (self.mutant.seeded is None or self.simulated is not None)

    def as_dict(self) -> dict[str, Any]:
        mutant = self.mutant
        figures: dict[str, Any] = {
            "name": mutant.name,
            "origin": mutant.origin,
            "killed": self.killed,
            "by": self.by,
            "examples": self.examples,
        }
        if mutant.seeded is not None:
            scheduler, by, examples = self.simulated or (None, None, None)
            figures["planted"] = mutant.seeded
            figures["simulated"] = {"scheduler": scheduler, "by": by, "examples": examples}
        return figures


@final
@attrs.frozen
class MutantReport:
    """The outcome of several mutants, and of the library as it is."""

    device: str
    results: tuple[MutantResult, ...]
    clean: tuple[MachineResult, ...]  # one per machine without a mutant, and one per tool that some mutant needs
    seconds: float

    @property
    def killed(self) -> int:
        return sum(result.killed for result in self.results)

    @property
    def total(self) -> int:
        return len(self.results)

    @property
    def clean_examples(self) -> int:
        return sum(result.examples for result in self.clean)

    @property
    def false_reports(self) -> int:
        return sum(result.violations for result in self.clean)

    @property
    def sound(self) -> bool:
        """Whether every mutant was killed and the library as it is had no failure."""
        return self.killed == self.total and not self.false_reports

    def as_dict(self) -> dict[str, Any]:
        names = ("killed", "total", "false_reports", "clean_examples")
        mutants = [result.as_dict() for result in self.results]
        return {"device": self.device, "mutants": mutants} | {name: getattr(self, name) for name in names}


def run(
    names: Sequence[str] | None = None,
    *,
    device: str = "cpu",
    examples: int = EXAMPLES,
    clean_examples: int = CLEAN_EXAMPLES,
    progress: Progress = lambda *_: None,
) -> MutantReport:
    """Runs each mutant's machine until an invariant fires, then the machines on the library as it is.

    The same examples are tried every time. Meanwhile the library of the whole process is changed. Without `names` all
    mutants run that the device can have. `clean_examples` are spread over all machines, or over those of the named
    mutants, and as many again run under each tool that some mutant needs.
    """
    chosen = _chosen(names, device)
    machines = list(MACHINES) if names is None else sorted({mutant.machine for mutant in chosen})
    if clean_examples < 0:
        raise ArgumentError(f"mutants: clean_examples is {clean_examples}", clean_examples, "pass 0 or more")
    parts = shares(clean_examples, machines)
    devices = list(dict.fromkeys([device, *(mutant.runs_on(device) for mutant in chosen)]))
    steps = len(chosen) + len(parts) * len(devices)
    start = time.perf_counter()
    results: list[MutantResult] = []
    clean: list[MachineResult] = []
    for mutant in chosen:
        progress(len(results), steps, mutant.name)
        result = run_mutant(mutant, device=device, examples=examples)
        if not result.killed:
            result = attrs.evolve(result, never_ran=never_ran(mutant, device=device, examples=examples))
        results.append(result)
    for where in devices:
        for name, share in parts.items():
            progress(len(results) + len(clean), steps, f"{name} without a mutant, on {where}")
            clean.append(run_machine(MACHINES[name], device=where, examples=share, steps=CLEAN_STEPS, derandomize=True))
    return MutantReport(device, tuple(results), tuple(clean), time.perf_counter() - start)


def run_mutant(mutant: Mutant, *, device: str = "cpu", examples: int = EXAMPLES) -> MutantResult:
    """Switches one mutant on and runs its machine, at the mutant's level, until the first failure.

    Only what the library checks by itself counts, unless the mutant says why that cannot find it.
    """
    with mutant.switched_on():
        result = _hunted(mutant, device, examples)
        simulated = None if mutant.seeded is None else _simulated(mutant)
    tried = result.examples if result.first_failure is None else result.first_failure
    return MutantResult(mutant, result.code, tried, result.seconds, result.failure, simulated)


def never_ran(mutant: Mutant, *, device: str = "cpu", examples: int = EXAMPLES) -> tuple[str, ...]:
    """The functions whose changed lines the machine never runs: it hunts again under a tracer, which takes longer."""
    ran: set[tuple[int, int]] = set()
    with mutant.switched_on() as patch:
        lines = {where: _lines(code, changed) for where, (code, changed) in patch.lines.items()}
        codes = {code for each in lines.values() for code, _ in each}

        def note(frame: FrameType, event: str, argument: object) -> Any:
            ran.add((id(frame.f_code), frame.f_lineno))
            return note if id(frame.f_code) in codes else None

        with contextlib.ExitStack() as stack:
            for module in (threading, sys):
                stack.callback(module.settrace, module.gettrace())
                module.settrace(note)
            _hunted(mutant, device, examples)
    return tuple(where for where, each in lines.items() if not each & ran)


def _lines(code: CodeType, changed: Sequence[int]) -> set[tuple[int, int]]:
    """Changed lines, each with the id of its code, or with the nearest line that has code, for one as `else:`."""
    codes = [code]
    for outer in codes:  # which grows
        codes += [inner for inner in outer.co_consts if isinstance(inner, CodeType)]
    there = [(id(each), line) for each in codes for *_, line in each.co_lines() if line is not None]
    nearest = {line: min(abs(line - other) for _, other in there) for line in changed}
    return {(each, at) for each, at in there for line in changed if abs(line - at) == nearest[line]}


def _hunted(mutant: Mutant, device: str, examples: int) -> MachineResult:
    where, automatic = mutant.runs_on(device), mutant.unseen is None
    return _until_failure(mutant, device=where, examples=examples, level=mutant.level, automatic=automatic)


def _until_failure(mutant: Mutant, **options: Any) -> MachineResult:
    machine = MACHINES[mutant.machine]
    return run_machine(machine, derandomize=True, shrink=False, on_example=stop_at_failure, **options)


def _simulated(mutant: Mutant) -> tuple[str, str, int] | None:
    """The first scheduler under which the machine fails while the bug is switched on."""
    for scheduler in SCHEDULERS:
        where = f"sim:{scheduler}"
        result = _until_failure(mutant, device=where, examples=SIMULATED_EXAMPLES, level=Level.OFF)
        if result.code is not None and result.first_failure is not None:
            return scheduler, result.code, result.first_failure
    return None


def _remedy(name: str) -> str:
    close = difflib.get_close_matches(name, MUTANTS, n=3)
    meant = f"use {' or '.join(close)}; " if close else ""
    return f"{meant}`python -m tests.selfcheck mutants --list` shows all {len(MUTANTS)}"


def _chosen(names: Sequence[str] | None, device: str) -> list[Mutant]:
    if names is None:
        return [mutant for mutant in MUTANTS.values() if mutant.exists_on(device)]
    for name in names:
        if name not in MUTANTS:
            raise ArgumentError(f"unknown mutant {name!r}", name, _remedy(name))
        if not MUTANTS[name].exists_on(device):
            raise ArgumentError(f"mutant {name!r} cannot exist on {device}", name, f"use {MUTANTS[name].only_on}")
    return [MUTANTS[name] for name in names]
