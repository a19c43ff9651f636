"""What this library's tools say of a micro-case: the race detector by its report, the simulated device by values."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.errors import BatchStateError
from batchstate.races import RaceReport, RaceRuntime
from batchstate.races.sim import SimRuntime
from batchstate.runtime import Runtime
from tests.race_cases.plain import CaseRuntime, PlainCpu
from tests.race_cases.registry import CASES, Case, Values

Arrays = list[npt.NDArray[Any]] | None


class Says(StrEnum):
    """What a tool says of a program."""

    RACE = "race"
    ANOTHER = "another race"
    """A race, but not the one that is there."""
    NONE = "no race"
    UNKNOWN = "cannot say"
    ERROR = "error"
    """The program failed under the tool, in a way that is no finding."""


@final
@attrs.frozen
class Verdict:
    """What a tool says of one case.

    Attributes:
        says: it.
        detail: which race, by what it was seen, or what failed.
    """

    says: Says = attrs.field(converter=Says)
    detail: str = ""

    def text(self, racy: bool) -> str:
        """The verdict in words: what was overlooked, and what was made up, is called so."""
        if self.says is Says.NONE:
            return "missed" if racy else "none"
        if self.says in (Says.RACE, Says.ANOTHER) and not racy:
            return f"false alarm: {self.detail}"
        return self.detail if self.says is Says.RACE else ": ".join(one for one in (self.says, self.detail) if one)


def values_of(rt: CaseRuntime, values: Values) -> Arrays:
    """What a program computed, once everything has run."""
    rt.synchronize()
    if values is None:
        return None
    return [np.array(one) if isinstance(one, np.ndarray) else rt.read_back(one) for one in values]


def right_values(case: Case) -> Arrays:
    """What a case computes where everything runs in program order."""
    rt = PlainCpu()
    return values_of(rt, case.run(rt))


def races_of(case: Case, inner: Callable[[], Runtime] = PlainCpu) -> tuple[RaceReport, ...]:
    """What the race detector reports, by default on a CPU."""
    with RaceRuntime(inner(), on_race="collect") as rt:
        case.run(rt)
    return rt.races


def expected(case: Case, report: RaceReport, *, operations: bool = True) -> bool:
    """Whether a report is of the race that a case has.

    Args:
        case: a racy one.
        report: of the race detector.
        operations: hold the names of the operations and the rows against it too, which are those of a CPU.
    """
    first, second = report.first, report.second
    if (report.kind, first.lane, second.lane) != (case.kind, case.first.stream, case.second.stream):
        return False
    named = (first.operation, second.operation, report.rows)
    return not operations or named == (case.first.operation, case.second.operation, case.rows)


def by_detector(case: Case, inner: Callable[[], Runtime] = PlainCpu) -> Verdict:
    """The race detector's verdict: right if it reports the race that is there, and nothing else."""
    races = races_of(case, inner)
    if not races:
        return Verdict(Says.NONE)
    kinds = ", ".join(str(race.kind) for race in races)
    right = case.racy and len(races) == 1 and expected(case, races[0], operations=inner is PlainCpu)
    return Verdict(Says.RACE if right or not case.racy else Says.ANOTHER, kinds)


SEEDED = ("random", "priority", "pct")
"""Schedulers of the simulated device that a seed changes; the others have one order."""


def by_simulator(case: Case, schedulers: Sequence[str], seeds: int) -> Verdict:
    """The simulated device's verdict: under which schedulers the program computes something wrong, or fails.

    Args:
        case: that returns values; of another nothing can be said.
        schedulers: their names.
        seeds: how many runs those have that a seed changes.
    """
    right = right_values(case)
    if right is None:
        return Verdict(Says.UNKNOWN, "no value shows it")
    seen = []
    for name in schedulers:
        runs = seeds if name in SEEDED else 1
        wrong = sum(_goes_wrong(case, right, name, seed) for seed in range(runs))
        if wrong:
            seen.append(name if runs == 1 else f"{name} {wrong}/{runs}")
    return Verdict(Says.RACE, ", ".join(seen)) if seen else Verdict(Says.NONE)


def simulated(scheduler: str, seed: int) -> list[str]:
    """The operations of every fourth case, in the order in which the simulated device ran them."""
    lines = []
    for case in list(CASES.values())[::4]:
        with SimRuntime(scheduler=scheduler, seed=seed) as rt:
            case.run(rt)
        lines += [case.name, *rt.trace()]
    return lines


def _goes_wrong(case: Case, right: list[npt.NDArray[Any]], scheduler: str, seed: int) -> bool:
    try:
        with SimRuntime(scheduler=scheduler, seed=seed) as rt:
            got = values_of(rt, case.run(rt)) or []
    except (BatchStateError, RuntimeError, IndexError):  # what a kernel makes of poison
        return True
    return not all(np.array_equal(one, other) for one, other in zip(got, right, strict=True))
