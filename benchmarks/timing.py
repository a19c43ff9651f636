"""Times several ways to do one thing, interleaved, so that a busy machine is unfair to none of them."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.levels import Level, checks, current_checks
from batchstate.runtime import Runtime

Microseconds = npt.NDArray[np.float64]


@final
@attrs.frozen
class Contender:
    """One way to do the work.

    Attributes:
        name: for reports.
        run: does the work once and leaves the state as it found it.
        checks: level that it runs at; for the ways of others it changes nothing.
    """

    name: str
    run: Callable[[], object]
    checks: Level = attrs.field(factory=current_checks)


@final
@attrs.frozen
class Effort:
    """How long to measure.

    Attributes:
        rounds: samples of each contender.
        sample_us: length of a sample; as many runs as fit in it are timed together.
    """

    rounds: int
    sample_us: float


# Samples are many and far shorter than the milliseconds for which a scheduler gives a core to somebody else: on a busy
# machine few are interrupted, and the median is not among them.
THOROUGH = Effort(rounds=501, sample_us=250)
QUICK = Effort(rounds=15, sample_us=100)


@final
@attrs.frozen(eq=False)
class Times:
    """Samples of one contender, in microseconds a run.

    Attributes:
        host: float64[rounds], until the host may go on.
        total: float64[rounds], until the device is done too. On a CPU that is the same moment.
    """

    host: Microseconds
    total: Microseconds


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A window in which torch computes on one CPU thread, as a scheduler does; at these sizes more only add noise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def median(samples: Microseconds) -> float:
    """The middle sample: what a run takes when nothing disturbs it, and nothing favours it."""
    return float(np.median(samples))


def quartiles(samples: Microseconds) -> tuple[float, float]:
    """Between these lies half of the samples: the spread, which one slow outlier does not move."""
    low, high = np.percentile(samples, (25, 75))
    return float(low), float(high)


def measure(runtime: Runtime, contenders: Sequence[Contender], effort: Effort) -> list[Times]:
    """Samples all contenders in turns; each round begins with another one.

    Args:
        runtime: the device; it is idle at the start of each sample.
        contenders: what to time.
        effort: how long.

    Returns:
        the times of each contender, in their order.
    """
    runs = [_runs_a_sample(runtime, contender, effort) for contender in contenders]
    host = np.empty((len(contenders), effort.rounds))
    total = np.empty_like(host)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # as `timeit` does: a collection would hit whoever runs, not whoever left the garbage
    try:
        for round_ in range(effort.rounds):
            for turn in range(len(contenders)):
                at = (round_ + turn) % len(contenders)
                host[at, round_], total[at, round_] = _sample(runtime, contenders[at], runs[at])
    finally:
        if collecting:
            gc.enable()
    return [Times(host[i], total[i]) for i in range(len(contenders))]


def _runs_a_sample(runtime: Runtime, contender: Contender, effort: Effort) -> int:
    _sample(runtime, contender, 3)  # first runs allocate and compile
    _, one = _sample(runtime, contender, 3)
    return max(1, int(effort.sample_us / one))


def _sample(runtime: Runtime, contender: Contender, runs: int) -> tuple[float, float]:
    """Microseconds a run, on the host and in all."""
    run: Callable[[], Any] = contender.run
    with checks(contender.checks):
        runtime.synchronize()
        start = time.perf_counter_ns()
        for _ in range(runs):
            run()
        host = time.perf_counter_ns()
        runtime.synchronize()
        end = time.perf_counter_ns()
    return (host - start) / runs / 1e3, (end - start) / runs / 1e3
