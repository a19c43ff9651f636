"""A comparison: our ways and the ways of others to do one work, shown to be equal and then timed."""

from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import numpy as np

from batchstate.runtime import Runtime
from benchmarks.timing import Contender, Effort, Times, measure, median, quartiles


class MismatchError(Exception):
    """Two ways to do one work gave different results: their times would mean nothing."""


@final
@attrs.frozen
class Comparison:
    """One work.

    Attributes:
        task: what is done.
        ours: our ways, such as one at each level of checks.
        baselines: the ways of others.
        verify: shows that all ways give equal results.
        target: the ratio that is asked for, or None.
    """

    task: str
    ours: Sequence[Contender]
    baselines: Sequence[Contender]
    verify: Callable[[], None]
    target: float | None = None


@final
@attrs.frozen
class Row:
    """One of our ways against one of others.

    Attributes:
        task: what is done.
        way: how we do it.
        ours_us: median of our way, the device included.
        baseline: the other way.
        baseline_us: its median.
        ratio: baseline_us / ours_us.
        spread: quartiles of all three; those of the ratio are of the ratios of single rounds.
        ours_host_us, baseline_host_us: medians until the host may go on.
        target: the ratio that is asked for, or None.
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

    @property
    def work(self) -> str:
        """What is done, and how we do it: no two works of one run have the same."""
        return f"{self.task}: {self.way}"

    def as_json(self) -> dict[str, Any]:
        """The row under the names of its attributes, `work` first."""
        return {"work": self.work, **attrs.asdict(self)}


def run(runtime: Runtime, comparison: Comparison, effort: Effort) -> list[Row]:
    """Shows that all ways are equal, times them in one interleaved run, and sets each of ours against each other.

    Raises:
        MismatchError: they are not equal.
    """
    comparison.verify()
    times = measure(runtime, [*comparison.ours, *comparison.baselines], effort)
    ours, baselines = times[: len(comparison.ours)], times[len(comparison.ours) :]
    return [
        _row(comparison, mine, mine_took, other, other_took)
        for mine, mine_took in zip(comparison.ours, ours, strict=True)
        for other, other_took in zip(comparison.baselines, baselines, strict=True)
    ]


def require_equal(what: str, ours: object, others: object) -> None:
    """Two arrays, or what numpy makes of it, with the same dtype, shape and values.

    Raises:
        MismatchError: they differ.
    """
    mine, theirs = np.asarray(ours), np.asarray(others)
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape or not np.array_equal(mine, theirs):
        raise MismatchError(
            f"{what}: ours is {mine.dtype}{list(mine.shape)}, the baseline's {theirs.dtype}{list(theirs.shape)}"
            + (", with other values" if (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) else "")
        )


def _row(comparison: Comparison, mine: Contender, ours: Times, baseline: Contender, other: Times) -> Row:
    ours_us, baseline_us = median(ours.total), median(other.total)
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
            "ratio": quartiles(other.total / ours.total),
        },
        ours_host_us=median(ours.host),
        baseline_host_us=median(other.host),
        target=comparison.target,
    )
