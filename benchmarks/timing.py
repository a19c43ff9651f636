"""Times several ways to do one thing, interleaved, so that a busy machine is unfair to none of them."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.benchmark import Timer

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
        most_seconds: where that many rounds take longer, there are fewer, though never less than `FEWEST`.
    """

    rounds: int
    sample_us: float
    most_seconds: float = math.inf

    def rounds_of(self, round_us: float) -> int:
        """How many rounds, of which each takes so long."""
        in_time = self.most_seconds * 1e6 / round_us
        return self.rounds if in_time >= self.rounds else min(self.rounds, max(FEWEST, int(in_time)))


# Samples are many and far shorter than the milliseconds for which a scheduler gives a core away: on a busy
# machine few are interrupted, and the median is not among them.
THOROUGH = Effort(rounds=501, sample_us=250, most_seconds=6)
QUICK = Effort(rounds=15, sample_us=100, most_seconds=0.5)

# For ways that differ by a per cent: with this many rounds their median is known to a few thousandths.
PRECISE = Effort(rounds=3001, sample_us=100, most_seconds=5)

FEWEST = 15
"""Rounds that a median and its quartiles need."""


@final
@attrs.frozen(eq=False)
class Times:
    """Samples of one contender, in microseconds a run.

    Attributes:
        host: float64[rounds], a number of rounds that `measure` chooses: until the host may go on.
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


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """A window without Python's garbage collector, which has run before.

    As `timeit` has it: a collection would hit the contender that runs, not the one that left the garbage. And
    while a million objects are created, to be measured later, it would look at all of them again and again.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
    samplers = [_Sampler(runtime, contender, effort) for contender in contenders]
    rounds = effort.rounds_of(sum(sampler.us for sampler in samplers))
    host = np.empty((len(contenders), rounds))
    total = np.empty_like(host)
    with no_collector():
        for round_ in range(rounds):
            for turn in range(len(contenders)):
                at = (round_ + turn) % len(contenders)
                host[at, round_], total[at, round_] = samplers[at].sample()
    return [Times(host[i], total[i]) for i in range(len(contenders))]


class _Clock:
    """Tells the time when the device is done, and remembers when it was asked: so long the host was busy."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._told = 0.0
        self.host = 0.0

    def __call__(self) -> float:
        asked = time.perf_counter()
        self.host = asked - self._told
        self._runtime.synchronize()
        self._told = time.perf_counter()
        return self._told


@final
class _Sampler:
    """Times one contender with `torch.utils.benchmark.Timer`, a sample at a time.

    The timer lets the work run twice before each sample, untimed. So no sample pays for the caches that the contender
    before it has filled: a contender whose turn came behind a large one would look slow.

    Attributes:
        us: what one sample takes.
    """

    def __init__(self, runtime: Runtime, contender: Contender, effort: Effort) -> None:
        self._clock = _Clock(runtime)
        self._timer = Timer("run()", globals={"run": contender.run}, timer=self._clock)
        self._checks = contender.checks
        self._runs = 1
        self.sample()  # first runs allocate and compile
        _, us = self.sample()
        self._runs = max(1, int(effort.sample_us / us))
        self.us = (2 + self._runs) * us

    def sample(self) -> tuple[float, float]:
        """Microseconds a run, on the host and in all."""
        with checks(self._checks):
            measured = self._timer.timeit(self._runs)
        return self._clock.host / self._runs * 1e6, measured.mean * 1e6
