"""Switches the mutants on, one at a time, and runs the state machines until one fails."""

import difflib
import time
from collections.abc import Callable, Sequence
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
        results.append(run_mutant(mutant, device=device, examples=examples))
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
        result = run_machine(
            MACHINES[mutant.machine],
            device=mutant.runs_on(device),
            examples=examples,
            derandomize=True,
            shrink=False,
            on_example=stop_at_failure,
            level=mutant.level,
            automatic=mutant.unseen is None,
        )
        simulated = None if mutant.seeded is None else _simulated(mutant)
    tried = result.examples if result.first_failure is None else result.first_failure
    return MutantResult(mutant, result.code, tried, result.seconds, result.failure, simulated)


def _simulated(mutant: Mutant) -> tuple[str, str, int] | None:
    """The first scheduler under which the machine fails while the bug is switched on."""
    for scheduler in SCHEDULERS:
        result = run_machine(
            MACHINES[mutant.machine],
            device=f"sim:{scheduler}",
            examples=SIMULATED_EXAMPLES,
            derandomize=True,
            shrink=False,
            on_example=stop_at_failure,
            level=Level.OFF,
        )
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
