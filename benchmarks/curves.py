"""Cost against size: of a decode step against rows and columns, of taking and returning against the size of a pool."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import attrs

from batchstate.levels import Level
from batchstate.runtime import Runtime
from benchmarks.baselines.twin_columns import ARRAYS, TENSORS
from benchmarks.comparisons import Absent, Comparison, sampled
from benchmarks.decode_steps import DecodeBaseline, Scene
from benchmarks.pools import pages_against_lists, slots_against_lists
from benchmarks.timing import Contender, Effort, median, quartiles

SWEEP = Effort(rounds=101, sample_us=250, most_seconds=1.5)
QUICK = Effort(rounds=5, sample_us=50, most_seconds=0.1)

ROWS = (1, 4, 16, 64, 256, 1_024, 4_096, 8_192)
COLUMNS = (2, 6, 12, 24, 40)
SIZES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)

Make = Callable[[], Comparison | Absent]


@final
@attrs.frozen
class Point:
    """Cost at one size.

    Attributes:
        x: the size.
        us: median, in microseconds.
        low, high: quartiles.
    """

    x: int
    us: float
    low: float
    high: float


@final
@attrs.frozen
class Series:
    """The costs of one way.

    Attributes:
        way: how it is done.
        ours: whether it is one of our ways.
        points: by size.
    """

    way: str
    ours: bool
    points: tuple[Point, ...]


@final
@attrs.frozen
class Curve:
    """The sweeps.

    Attributes:
        name: what is done; names files too.
        size: what x means.
        makers: a comparison for each x.
    """

    name: str
    size: str
    makers: Mapping[int, Make]

    def __str__(self) -> str:
        return f"{self.name}, {self.size}"

    def measured(self, runtime: Runtime, effort: Effort) -> "Measured":
        """Times each comparison by itself; only ways at the same x were interleaved.

        Raises:
            MismatchError: two ways gave different results.
        """
        points: dict[tuple[str, bool], list[Point]] = {}
        for x, make in self.makers.items():
            comparison = make()
            if isinstance(comparison, Absent):
                continue
            sides = zip((comparison.ours, comparison.baselines), sampled(runtime, comparison, effort), strict=True)
            for ours, (ways, times) in zip((True, False), sides, strict=True):
                for way, took in zip(ways, times, strict=True):
                    point = Point(x, median(took.total), *quartiles(took.total))
                    points.setdefault((way.name, ours), []).append(point)
        return Measured(self.name, self.size, tuple(Series(*way, tuple(some)) for way, some in points.items()))


@final
@attrs.frozen
class Measured:
    """A curve with its figures.

    Attributes:
        name: what is done.
        size: what x means.
        series: one for each way.
    """

    name: str
    size: str
    series: tuple[Series, ...]

    def as_json(self) -> dict[str, Any]:
        """Names and figures, in microseconds."""
        return attrs.asdict(self)


def decode_ways(runtime: Runtime, *, num_columns: int, rows: int) -> Comparison:
    """A decode step in every way that is here, of which one row in fifty leaves and joins, or at least one."""
    scene = Scene.of(runtime, num_columns=num_columns, rows=rows, churn=max(1, rows // 50))
    read = Contender("packed, each device side read, checks cheap", scene.packed_step_read, Level.CHEAP)
    at_fixed = partial(scene.static_step, scene.buffers())
    fixed = Contender("packed, to fixed addresses, checks cheap", at_fixed, Level.CHEAP)
    others: list[DecodeBaseline] = [scene.twins(TENSORS), scene.twins(ARRAYS), scene.persistent(), scene.staged()]
    return Comparison(
        task=f"decode step, {num_columns} columns, {rows} rows",
        ours=[*scene.packed_contenders(), read, fixed],
        baselines=[Contender(other.name, other.step) for other in others],
        verify=lambda: scene.verify(others),
    )


def curves(runtime: Runtime, *, quick: bool) -> list[Curve]:
    """All that is swept; `quick` leaves out large sizes, and changes nothing else."""
    rows, columns = (ROWS[::3], COLUMNS[::2]) if quick else (ROWS, COLUMNS)
    sizes = SIZES[:2] if quick else SIZES
    return [
        Curve(
            "decode step of 12 columns",
            "rows",
            {n: partial(decode_ways, runtime, num_columns=12, rows=n) for n in rows},
        ),
        Curve(
            "decode step of 256 rows",
            "columns",
            {n: partial(decode_ways, runtime, num_columns=n, rows=256) for n in columns},
        ),
        Curve(
            "take and return 256 slots",
            "slots in the pool",
            {n: partial(slots_against_lists, runtime, size=n, n=256) for n in sizes},
        ),
        Curve(
            "take and return 256 pages",
            "pages in the pool",
            {n: partial(pages_against_lists, runtime, size=n, n=256) for n in sizes},
        ),
    ]
