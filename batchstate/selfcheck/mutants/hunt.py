"""Switches the mutants on, one at a time, and lets the state machines look for them."""

import difflib
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs

from batchstate.errors import ArgumentError
from batchstate.levels import Level
from batchstate.selfcheck.mutants.registry import MUTANTS, Mutant
from batchstate.testing.runner import MACHINES, MachineResult, run_machine

EXAMPLES = 100
"""Examples after which a mutant that nobody noticed has survived."""

CLEAN_EXAMPLES = 2000
"""Examples of the library as it is, of all machines together, none of which may be reported."""

CLEAN_STEPS = 25
"""Rules of one such example: many short examples differ more than few long ones, in the same time."""

SCHEDULERS = ("random", "oldest", "lazy", "pct")
"""Schedulers of the simulated device that planted bugs are tried under, until one shows them."""

SIMULATED_EXAMPLES = 30
"""Examples under one of them."""

Progress = Callable[[int, int, str], None]
"""Called with what is done, what will have been done, and what comes next."""


@final
@attrs.frozen
class MutantResult:
    """What became of one mutant.

    Attributes:
        mutant: which.
        by: what failed: an invariant's code, or the name of another error; None when nothing did.
        examples: examples until then, that one included; all of them for a survivor.
        seconds: wall time.
        failure: the report of what failed, or None.
        simulated: of a planted bug, the first scheduler of the simulated device under which it made something wrong,
            what that was, and after how many examples; None where none did, and for all other mutants.
    """

    mutant: Mutant
    by: str | None
    examples: int
    seconds: float
    failure: str | None
    simulated: tuple[str, str, int] | None = None

    @property
    def killed(self) -> bool:
        """Whether one of the invariants fired that are there for it; a planted bug must also show when simulated."""
        found = self.by in [code.value for code in self.mutant.killed_by]
        return found and (self.mutant.planted is None or self.simulated is not None)

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        figures: dict[str, Any] = {
            "name": self.mutant.name,
            "origin": self.mutant.origin,
            "killed": self.killed,
            "by": self.by,
            "examples": self.examples,
        }
        if self.mutant.planted is not None:
            scheduler, by, examples = self.simulated or (None, None, None)
            figures["planted"] = self.mutant.planted
            figures["simulated"] = {"scheduler": scheduler, "by": by, "examples": examples}
        return figures


@final
@attrs.frozen
class MutantReport:
    """What became of all of them, and of the library as it is.

    Attributes:
        device: where they ran.
        results: one for each mutant.
        clean: one for each machine, run without a mutant; and under each tool that found any.
        seconds: wall time.
    """

    device: str
    results: tuple[MutantResult, ...]
    clean: tuple[MachineResult, ...]
    seconds: float

    @property
    def killed(self) -> int:
        """Mutants that an invariant of theirs found."""
        return sum(result.killed for result in self.results)

    @property
    def total(self) -> int:
        """Mutants that were switched on."""
        return len(self.results)

    @property
    def clean_examples(self) -> int:
        """Examples run without a mutant."""
        return sum(result.examples for result in self.clean)

    @property
    def false_reports(self) -> int:
        """Failures without a mutant."""
        return sum(result.violations for result in self.clean)

    @property
    def sound(self) -> bool:
        """Every mutant was killed, and nothing else was accused."""
        return self.killed == self.total and not self.false_reports

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "device": self.device,
            "mutants": [result.as_dict() for result in self.results],
            "killed": self.killed,
            "total": self.total,
            "false_reports": self.false_reports,
            "clean_examples": self.clean_examples,
        }


def run(
    names: Sequence[str] | None = None,
    *,
    device: str = "cpu",
    examples: int = EXAMPLES,
    clean_examples: int = CLEAN_EXAMPLES,
    progress: Progress | None = None,
) -> MutantReport:
    """Hunts each mutant with its machine until an invariant fires, then runs the machines on the library as it is.

    The same examples are tried every time. The library of the whole process is changed meanwhile.

    Args:
        names: of the mutants; by default all that the device can have.
        device: where they run.
        examples: the most for one mutant.
        clean_examples: examples without a mutant, spread over the machines: all of them, or those that are named
            mutants' own. Where mutants are found by a tool, so many again under it.
        progress: called before each mutant and each clean machine.

    Raises:
        ArgumentError: an unknown mutant, one that the device cannot have, or no examples.
    """
    chosen = _chosen(names, device)
    machines = list(MACHINES) if names is None else sorted({mutant.machine for mutant in chosen})
    if clean_examples < 0:
        raise ArgumentError(
            f"mutants: clean_examples is {clean_examples}", value=clean_examples, remedy="pass 0 or more"
        )
    shares = _shares(clean_examples, machines)
    places = list(dict.fromkeys([device, *(mutant.runs_on(device) for mutant in chosen)]))
    steps = len(chosen) + len(shares) * len(places)
    start = time.perf_counter()
    results: list[MutantResult] = []
    clean: list[MachineResult] = []
    for mutant in chosen:
        if progress is not None:
            progress(len(results), steps, mutant.name)
        results.append(hunt(mutant, device=device, examples=examples))
    for place in places:
        for name, each in shares.items():
            if progress is not None:
                progress(len(results) + len(clean), steps, f"{name} without a mutant, on {place}")
            clean.append(run_machine(MACHINES[name], device=place, examples=each, steps=CLEAN_STEPS, derandomize=True))
    return MutantReport(device, tuple(results), tuple(clean), time.perf_counter() - start)


def hunt(mutant: Mutant, *, device: str = "cpu", examples: int = EXAMPLES) -> MutantResult:
    """Switches one mutant on and runs its machine, at the mutant's level, until the first failure."""
    with mutant.switched_on():
        result = run_machine(
            MACHINES[mutant.machine],
            device=mutant.runs_on(device),
            examples=examples,
            derandomize=True,
            shrink=False,
            level=mutant.level,
        )
        simulated = None if mutant.planted is None else _simulated(mutant)
    tried = result.examples if result.first_failure is None else result.first_failure
    return MutantResult(mutant, result.code, tried, result.seconds, result.failure, simulated)


def _simulated(mutant: Mutant) -> tuple[str, str, int] | None:
    """The first scheduler under which the bug, which is switched on, makes something wrong."""
    for scheduler in SCHEDULERS:
        result = run_machine(
            MACHINES[mutant.machine],
            device=f"sim:{scheduler}",
            examples=SIMULATED_EXAMPLES,
            derandomize=True,
            shrink=False,
            level=Level.OFF,
        )
        if result.code is not None and result.first_failure is not None:
            return scheduler, result.code, result.first_failure
    return None


def mutants_table() -> str:
    """All mutants as a table in Markdown."""
    lines = ["| mutant | what goes wrong | seen in | found by |", "| --- | --- | --- | --- |"]
    for mutant in MUTANTS.values():
        codes = ", ".join(f"`{code.value}`" for code in mutant.killed_by)
        lines.append(f"| `{mutant.name}` | {mutant.mechanism} | {mutant.origin} | {codes} |")
    return "\n".join(lines) + "\n"


def _shares(examples: int, machines: Sequence[str]) -> dict[str, int]:
    """Machine -> its part of the examples; those that get none are left out."""
    each, more = divmod(examples, max(len(machines), 1))
    shares = {name: each + (place < more) for place, name in enumerate(machines)}
    return {name: share for name, share in shares.items() if share}


def _remedy(name: str) -> str:
    close = difflib.get_close_matches(name, MUTANTS, n=3)
    meant = f"use {' or '.join(close)}; " if close else ""
    return f"{meant}`batchstate mutants --list` shows all {len(MUTANTS)}"


def _chosen(names: Sequence[str] | None, device: str) -> list[Mutant]:
    if names is None:
        return [mutant for mutant in MUTANTS.values() if mutant.exists_on(device)]
    for name in names:
        if name not in MUTANTS:
            raise ArgumentError(f"unknown mutant {name!r}", value=name, remedy=_remedy(name))
        if not MUTANTS[name].exists_on(device):
            raise ArgumentError(
                f"mutant {name!r} cannot exist on {device}", value=name, remedy=f"use {MUTANTS[name].only_on}"
            )
    return [MUTANTS[name] for name in names]
