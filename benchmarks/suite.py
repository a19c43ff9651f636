"""What is measured. Comparisons are made one at a time, when their turn comes: some hold a million objects.

To add one, give `comparisons` a name and a function that makes it. A way that needs a package which is not there is
an `Absent`; it gets a row that says so.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import attrs

from batchstate.runtime import Runtime
from batchstate.traffic import Workload
from benchmarks import curves, transfers, whole_steps
from benchmarks.builds.priced_checks import NOTHING_LEFT, against_deleted, decode_step, of_cheap, of_full, whole_step
from benchmarks.comparisons import Absent, Asked, Comparison, Row, run
from benchmarks.counts import COLUMNS, Count, counted_steps
from benchmarks.decode_steps import against_checks, against_twins
from benchmarks.growth import growth_with_rows, pages_flat, slots_flat
from benchmarks.peers.catalog import against_peers
from benchmarks.pools import (
    pages_against_lists,
    pages_of_random_sizes,
    slots_against_lists,
    slots_of_random_sizes,
)
from benchmarks.real_hour import served
from benchmarks.timing import PRECISE, QUICK, THOROUGH, Effort

Make = Callable[[], Comparison | Absent]

TRANSPORT = "nixl"


@final
@attrs.define
class Results:
    """What was measured so far.

    Attributes:
        lines: our ways against those of others.
        counts: what a step costs in countable things.
        scaling: cost against size.
    """

    lines: list[Row | Absent] = attrs.field(factory=list)
    counts: list[Count] = attrs.field(factory=list)
    scaling: list[curves.Measured] = attrs.field(factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rows": [line.as_json() for line in self.lines],
            "counts": [count.as_json() for count in self.counts],
            "scaling": [curve.as_json() for curve in self.scaling],
        }


@final
@attrs.frozen
class Work:
    """Something to measure.

    Attributes:
        name: to choose it by.
        measure: does it, and adds what comes of it.
    """

    name: str
    measure: Callable[[Results], None]


def comparisons(runtime: Runtime, *, quick: bool) -> Mapping[str, Make]:
    """Makers of all comparisons, by name; `quick` leaves out large pools, and checks of many columns."""
    columns = (12, 40)
    slots = (10_000,) if quick else (10_000, 1_000_000)
    pages, large = (4_096, 10_000) if quick else (65_536, 4_000_000)
    turnovers = (16, 128, 2_048)
    makers: dict[str, Make] = {}
    for n in columns:
        makers[f"decode step, {n} columns"] = partial(against_twins, runtime, num_columns=n)
    for n in columns[:1] if quick else columns:
        for what, levels in (("decode step", against_checks), ("whole step", whole_steps.against_checks)):
            for level, some in (("cheap", of_cheap), ("full", of_full)):
                makers[f"{what}, {n} columns, checks {level}"] = partial(_priced, some, levels, runtime, n)
        for what, make, asked in (("decode", decode_step(n), NOTHING_LEFT), ("whole", whole_step(n), Asked())):
            name = f"{what} step, {n} columns"
            makers[f"{name}, builds"] = partial(against_deleted, runtime, name, make, asked)
    for size in slots:
        makers[f"256 of {size:,} slots"] = partial(slots_against_lists, runtime, size=size, n=256)
    for n in turnovers:
        makers[f"{n:,} of {pages:,} pages"] = partial(pages_against_lists, runtime, size=pages, n=n)
    makers[f"random sizes of {slots[-1]:,} slots"] = partial(slots_of_random_sizes, runtime, size=slots[-1])
    makers[f"random sizes of {pages:,} pages"] = partial(pages_of_random_sizes, runtime, size=pages)
    makers |= against_peers(runtime, quick=quick)
    makers["growth with rows"] = partial(growth_with_rows, runtime)
    makers["growth with slots"] = partial(slots_flat, runtime, large=large)
    makers["growth with pages"] = partial(pages_flat, runtime, large=large)
    return makers


def works(runtime: Runtime, *, quick: bool, hour: Workload | None = None) -> list[Work]:
    """Everything. `quick` leaves out the hour of traffic, and makes samples few and short.

    Of the transports only the default is here; `python -m benchmarks.transfers` has all.
    """
    effort = curves.QUICK if quick else curves.SWEEP
    some = [
        Work(name, partial(_compare, runtime, make, quick)) for name, make in comparisons(runtime, quick=quick).items()
    ]
    if not quick:
        some.append(Work("the real hour of traffic", lambda results: results.lines.append(served(runtime, hour))))
    some.append(Work(f"transfers over {TRANSPORT}", partial(_transfer, runtime, quick)))
    some += [Work(f"counts of a whole step, {n} columns", partial(_count, runtime, n)) for n in COLUMNS]
    some += [
        Work(f"scaling of {one}", partial(_sweep, runtime, one, effort)) for one in curves.curves(runtime, quick=quick)
    ]
    return some


def _priced(
    some: Callable[[Comparison], Comparison], levels: Callable[..., Comparison], runtime: Runtime, num_columns: int
) -> Comparison:
    return some(levels(runtime, num_columns=num_columns))


def _compare(runtime: Runtime, make: Make, quick: bool, results: Results) -> None:
    made = make()
    if isinstance(made, Absent):
        results.lines.append(made)
    else:
        results.lines += run(runtime, made, QUICK if quick else PRECISE if made.paired else THOROUGH)


def _transfer(runtime: Runtime, quick: bool, results: Results) -> None:
    for rows in transfers.run_all(runtime, [TRANSPORT], quick=quick):
        results.lines += rows


def _count(runtime: Runtime, num_columns: int, results: Results) -> None:
    results.counts += counted_steps(runtime, num_columns=num_columns)


def _sweep(runtime: Runtime, curve: curves.Curve, effort: Effort, results: Results) -> None:
    results.scaling.append(curve.measured(runtime, effort))
