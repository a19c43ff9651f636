"""Which comparisons there are. They are made one at a time: some hold a million objects."""

from collections.abc import Callable, Iterator
from functools import partial

from batchstate.runtime import Runtime
from benchmarks import transfers
from benchmarks.comparisons import Comparison, Row, run
from benchmarks.decode_steps import against_checks, against_twins
from benchmarks.pools import pages_against_lists, slots_against_lists
from benchmarks.timing import QUICK, THOROUGH
from benchmarks.transfer_peers import ENGINES

Make = Callable[[], Comparison]


def comparisons(runtime: Runtime, *, quick: bool) -> list[Make]:
    """Makers of all comparisons; `quick` leaves large pools out, and changes nothing else."""
    columns = (12, 40)
    slots = (10_000,) if quick else (10_000, 1_000_000)
    pages = 4_096 if quick else 65_536
    return [
        *(partial(against_twins, runtime, num_columns=n) for n in columns),
        *(partial(against_checks, runtime, num_columns=n) for n in columns),
        *(partial(slots_against_lists, runtime, size=size, n=256) for size in slots),
        *(partial(pages_against_lists, runtime, size=pages, n=n) for n in (16, 128, 2_048)),
    ]


def transports(*, quick: bool) -> tuple[str, ...]:
    """Over which rows are moved into a second process; those that cannot be opened here are left out."""
    return ("nixl",) if quick else tuple(ENGINES)


def how_many(runtime: Runtime, *, quick: bool) -> int:
    """Comparisons of `run_all`, if every transport can be opened."""
    moved = len(transports(quick=quick)) * len(transfers.works_of(quick=quick))
    return len(comparisons(runtime, quick=quick)) + moved


def run_all(runtime: Runtime, *, quick: bool) -> Iterator[list[Row]]:
    """Runs the comparisons in turn, those of transfers behind the others, and yields the rows of each.

    Raises:
        MismatchError: two ways to do one work gave different results.
        TransferError: a transfer failed.
    """
    effort = QUICK if quick else THOROUGH
    for make in comparisons(runtime, quick=quick):
        yield run(runtime, make(), effort)
    yield from transfers.run_all(runtime, transports(quick=quick), quick=quick)
