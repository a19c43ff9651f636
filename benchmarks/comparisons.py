"""A comparison: our ways and the ways of others to do one work, shown to be equal and then timed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np

from batchstate.runtime import Runtime
from benchmarks.timing import Contender, Effort, Times, measure, median, quartiles


class MismatchError(Exception):
    """Two ways to do one work gave different results: their times would mean nothing."""


@final
@attrs.frozen
class Asked:
    """The demand on a ratio, or on our own time.

    Attributes:
        target: the least that the ratio may be, or None.
        limit: the most that the ratio may be, or None.
        limit_us: the most that our way may take on the machine that the project is measured on, or None.
    """

    target: float | None = None
    limit: float | None = None
    limit_us: float | None = None

    def met_by(self, ratio: float, ours_us: float) -> bool | None:
        """Whether both are as asked, or None where nothing is asked."""
        met = [
            asked >= 0
            for asked in (
                None if self.target is None else ratio - self.target,
                None if self.limit is None else self.limit - ratio,
                None if self.limit_us is None else self.limit_us - ours_us,
            )
            if asked is not None
        ]
        return all(met) if met else None


@final
@attrs.frozen
class Comparison:
    """One work.

    Attributes:
        task: what is done.
        ours: our ways, such as one at each level of checks.
        baselines: the ways of others.
        verify: shows that all ways give equal results.
        target, limit: what is asked of the ratio, or None; of every pair that is not in `asks`.
        asks: what is asked of single pairs, by the names of our way and of the other.
        paired: whether the ratio is the median of the ratios of single rounds, instead of the ratio of the medians:
            for ways that differ by a few per cent, which is less than a machine drifts in a second.
    """

    task: str
    ours: Sequence[Contender]
    baselines: Sequence[Contender]
    verify: Callable[[], None]
    target: float | None = None
    limit: float | None = None
    asks: Mapping[tuple[str, str], Asked] = attrs.field(factory=dict, kw_only=True)
    paired: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        pairs = {(mine.name, other.name) for mine in self.ours for other in self.baselines}
        unknown = [pair for pair in self.asks if pair not in pairs]
        if unknown:
            raise ValueError(f"{self.task}: something is asked of {unknown}, and there are {sorted(pairs)}")

    def asked_of(self, way: str, baseline: str) -> Asked:
        """The demand on a pair."""
        return self.asks.get((way, baseline), Asked(self.target, self.limit))


@final
@attrs.frozen
class Absent:
    """A way of other code that cannot be measured here.

    Attributes:
        task: what would be done.
        way: how we would do it.
        baseline: the other way.
        why: what is missing.
    """

    task: str
    way: str
    baseline: str
    why: str

    @property
    def work(self) -> str:
        """The work, and our way to do it."""
        return f"{self.task}: {self.way}"

    def as_json(self) -> dict[str, Any]:
        """A row like those of `Row`, without figures."""
        figures = dict.fromkeys(("ours_us", "baseline_us", "ratio", "spread", "target", "limit", "limit_us", "met"))
        return {"work": self.work, **attrs.asdict(self), **figures, "note": f"not installed: {self.why}"}


@final
@attrs.frozen
class Row:
    """One of our ways against one of others.

    Attributes:
        task: what is done.
        way: how we do it.
        ours_us: median of our way, the device included.
        baseline: the other way.
        baseline_us: its median; if `paired`, `ours_us` times the median of the ratios of single rounds.
        ratio: baseline_us / ours_us.
        spread: quartiles of all three; those of the ratio are of the ratios of single rounds.
        ours_host_us, baseline_host_us: medians until the host may go on.
        target: the least ratio that is asked for, or None.
        limit: the most that the ratio may be, or None.
        limit_us: the most that our way may take, or None.
        paired: see `Comparison`.
        note: what a reader has to know besides.
    """

    task: str
    way: str
    ours_us: float
    baseline: str
    baseline_us: float
    ratio: float
    spread: dict[str, tuple[float, float]]
    ours_host_us: float
    baseline_host_us: float
    target: float | None = None
    limit: float | None = None
    limit_us: float | None = None
    paired: bool = False
    note: str = ""

    @property
    def work(self) -> str:
        """The work, and our way to do it: no two works of one run have the same."""
        return f"{self.task}: {self.way}"

    @property
    def met(self) -> bool | None:
        """Whether the ratio and our time are as asked, or None where nothing is asked."""
        return Asked(self.target, self.limit, self.limit_us).met_by(self.ratio, self.ours_us)

    def as_json(self) -> dict[str, Any]:
        """The row under the names of its attributes, `work` first."""
        return {"work": self.work, **attrs.asdict(self), "met": self.met}


def sampled(runtime: Runtime, comparison: Comparison, effort: Effort) -> tuple[list[Times], list[Times]]:
    """Shows that all ways are equal, and times them in one interleaved run: ours, and the baselines.

    Raises:
        MismatchError: they are not equal.
    """
    comparison.verify()
    times = measure(runtime, [*comparison.ours, *comparison.baselines], effort)
    return times[: len(comparison.ours)], times[len(comparison.ours) :]


def run(runtime: Runtime, comparison: Comparison, effort: Effort) -> list[Row]:
    """`sampled`, and each of our ways set against each other one.

    Raises:
        MismatchError: they are not equal.
    """
    ours, baselines = sampled(runtime, comparison, effort)
    return [
        _row(comparison, mine, mine_took, other, other_took)
        for mine, mine_took in zip(comparison.ours, ours, strict=True)
        for other, other_took in zip(comparison.baselines, baselines, strict=True)
    ]


def require_equal(value: str, ours: object, others: object) -> None:
    """Two arrays, or what numpy makes of it, with the same dtype, shape and values.

    Raises:
        MismatchError: they differ.
    """
    mine, theirs = np.asarray(ours), np.asarray(others)
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape or not np.array_equal(mine, theirs):
        raise MismatchError(
            f"{value}: ours is {mine.dtype}{list(mine.shape)}, the baseline's {theirs.dtype}{list(theirs.shape)}"
            + (", with other values" if (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) else "")
        )


def _row(comparison: Comparison, mine: Contender, ours: Times, baseline: Contender, other: Times) -> Row:
    ratios = other.total / ours.total
    ours_us = median(ours.total)
    baseline_us = ours_us * median(ratios) if comparison.paired else median(other.total)
    asked = comparison.asked_of(mine.name, baseline.name)
    return Row(
        task=comparison.task,
        way=mine.name,
        ours_us=ours_us,
        baseline=baseline.name,
        baseline_us=baseline_us,
        ratio=baseline_us / ours_us,
        spread={
            "ours_us": quartiles(ours.total),
            "baseline_us": quartiles(other.total),
            "ratio": quartiles(ratios),
        },
        ours_host_us=median(ours.host),
        baseline_host_us=median(other.host),
        target=asked.target,
        limit=asked.limit,
        limit_us=asked.limit_us,
        paired=comparison.paired,
        note="paired" if comparison.paired else "",
    )
