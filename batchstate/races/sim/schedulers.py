"""Schedulers, which pick the stream that runs next: orders that a device may have, each deterministic for a seed.

None of them finds everything. A host that is too early shows where the device lags; a stream that is too early shows
where another one lags; and random choices meet cases that no test was written for.
"""

import random
from collections.abc import Callable, Sequence
from typing import final

from batchstate.errors import ArgumentError, one_of
from batchstate.races.sim.device import DeviceStream, Scheduler


def eager(ready: Sequence[DeviceStream], needed: DeviceStream | None) -> DeviceStream | None:
    """Everything runs when it is enqueued, as on a CPU: finds nothing, and shows that a program is right."""
    return ready[0]


def lazy(ready: Sequence[DeviceStream], needed: DeviceStream | None) -> DeviceStream | None:
    """Only operations run that a waiting host needs: the device is as late as it can be."""
    return needed


def by_age(newest_first: bool) -> Scheduler:
    """The newest stream that has had work runs at once and the others for the host alone, or the other way round."""
    newest = 0

    def choose(ready: Sequence[DeviceStream], needed: DeviceStream | None) -> DeviceStream | None:
        nonlocal newest
        newest = max(newest, ready[-1].number)
        if newest_first:
            return ready[-1] if ready[-1].number == newest else needed
        return needed if ready[0].number == newest else ready[0]

    return choose


def late(name: str) -> Scheduler:
    """One stream is as late as it can be, all others run at once: what it does first comes last.

    A race of an access on this stream with a later one, of another stream or of the host, has the other order here.
    """

    def choose(ready: Sequence[DeviceStream], needed: DeviceStream | None) -> DeviceStream | None:
        return next((stream for stream in ready if stream.name != name), needed)

    return choose


_PACES = (0.0, 0.05, 0.3, 0.6, 0.95)
_LONGEST = 60


@final
class AtRandom:
    """Any stream runs any number of operations, for a while more of them, for a while fewer."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._pace = 0.0
        self._left = 0

    def __call__(self, ready: Sequence[DeviceStream], needed: DeviceStream | None) -> DeviceStream | None:
        """Any, or only the one that is needed."""
        draw = self._draw
        if not self._left:
            # Even odds at every operation would never let anything lag for long.
            self._pace = draw.choice(_PACES)
            self._left = draw.randint(1, _LONGEST)
        self._left -= 1
        return draw.choice(ready) if draw.random() < self._pace else needed


@final
class Priorities:
    """Streams and the host have priorities, drawn when they are first met; the highest that can gets on.

    With changes: now and then the one that runs falls below all others. That is probabilistic concurrency testing
    (Burckhardt, Kothari, Musuvathi, Nagarakatte: A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs,
    ASPLOS 2010), over a run of unknown length.

    Args:
        seed: of the draws.
        change_every: operations between two changes, about; None for none.
    """

    def __init__(self, seed: int, change_every: int | None = None) -> None:
        self._draw = random.Random(seed)
        self._change_every = change_every
        self._until_change = self._gap()
        self._host = 0.5  # each stream lags or does not, by a coin of its own
        self._streams: list[float] = []
        self._lowest = 0.0

    def __call__(self, ready: Sequence[DeviceStream], needed: DeviceStream | None) -> DeviceStream | None:
        """The highest, if that is not the host."""
        # Drawn in the order of the streams, not in that in which they are met: the same seed means the same order.
        new = ready[-1].number + 1 - len(self._streams)
        self._streams += [self._draw.random() for _ in range(new)]
        best = max(ready, key=lambda stream: self._streams[stream.number])
        stream = best if self._streams[best.number] > self._host else needed
        self._until_change -= 1
        if not self._until_change:
            self._until_change = self._gap()
            self._fall(stream)
        return stream

    def _gap(self) -> int:
        return self._draw.randint(1, 2 * self._change_every) if self._change_every else 0

    def _fall(self, stream: DeviceStream | None) -> None:
        self._lowest -= 1.0
        if stream is None:
            self._host = self._lowest
        else:
            self._streams[stream.number] = self._lowest


PORTFOLIO: dict[str, Callable[[int], Scheduler]] = {
    "eager": lambda seed: eager,
    "lazy": lambda seed: lazy,
    "newest": lambda seed: by_age(newest_first=True),
    "oldest": lambda seed: by_age(newest_first=False),
    "random": AtRandom,
    "priority": Priorities,
    "pct": lambda seed: Priorities(seed, change_every=40),
}
"""Name -> makes the scheduler for a seed."""

LATE = "late="
"""Begins the name of a scheduler that is made for one stream."""


def scheduler_of(name: str, seed: int) -> Scheduler:
    """A scheduler of `PORTFOLIO`, or `late=STREAM`: see `late`.

    Raises:
        ArgumentError: there is none of that name.
    """
    if name.startswith(LATE):
        return late(name.removeprefix(LATE))
    if name not in PORTFOLIO:
        raise ArgumentError(f"unknown scheduler {name!r}", name, one_of(PORTFOLIO, name))
    return PORTFOLIO[name](seed)
