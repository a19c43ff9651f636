"""`Launches`: the forwards that use the slots of a pool, and whether they have ended. Nothing here waits."""

from typing import Any, Unpack, final

import numpy as np

from batchstate import invariants
from batchstate._arrays import Ints
from batchstate.runtime.base import Fence, Runtime, Stream
from batchstate.violations import Code, Where

_IN_FLIGHT = Code.SLOT_IN_FLIGHT

KEPT = 16
"""Forwards that are told apart: more are not under way, since each has memory of its own."""


@final
class Launches:
    """The forwards whose inputs were taken, of the slots of one pool.

    The fence of its publish says that a forward has ended. One that publishes nothing is known to be under way while
    the copy of its step is. Beyond that it is believed: a fence that is recorded later stands behind other work too,
    and would accuse an engine that has waited for the forward.

    Attributes:
        used: int64[capacity], the last forward that uses each slot, counted from 1; 0 for none. The core writes it.
        last: the number of the last.
    """

    __slots__ = ("_forwards", "_runtime", "last", "used")

    def __init__(self, runtime: Runtime, used: Ints) -> None:
        self._runtime = runtime
        self.used = used
        self.last = 0
        # Stream, step, fence behind the copy of the step, and that of the publish or None; by number modulo `KEPT`.
        self._forwards: list[list[Any]] = [[None, 0, None, None]] * KEPT

    def begin(self, stream: Stream, copied: Fence | None) -> int:
        """The number of a forward that is given to `stream`, the current one, behind the copy of its step."""
        self.last = number = self.last + 1
        self._forwards[number % KEPT] = [stream, self._runtime.step, copied, None]
        return number

    def ended(self, stream: Stream, fence: Fence) -> None:
        """A publish was given to `stream`, with a fence behind it."""
        latest = self._forwards[self.last % KEPT]
        if latest[3] is None and latest[0] is stream:
            latest[3] = fence

    def check_ended(self, rows: Ints, **where: Unpack[Where]) -> None:
        """Refuses (SLOT_IN_FLIGHT) slots int64[n] that a forward uses which is known to be under way."""
        numbers = self.used[rows]
        if self._runtime.capturing or not np.count_nonzero(numbers):
            invariants.times_checked[_IN_FLIGHT] += 1
            return
        in_flight = np.isin(numbers, self._running())
        at, behind = np.flatnonzero(in_flight), None
        if at.size:
            stream, step, copied, published = self._forwards[int(numbers[at[0]]) % KEPT]
            behind = f"{published or copied!r} of the forward of step {step} on stream {stream.name!r}"
        invariants.slot_in_flight(rows, in_flight, behind=behind, **where)

    def _running(self) -> list[int]:
        """The forwards that are known to be under way: neither they nor later ones of their streams have ended."""
        running, ended = [], set()
        for number in range(self.last, max(self.last - KEPT, 0), -1):
            stream, _, copied, published = self._forwards[number % KEPT]
            if stream.key in ended:
                continue
            if published is not None and published.query():
                ended.add(stream.key)
            elif published is not None or (copied is not None and not copied.query()):
                running.append(number)
        return running
