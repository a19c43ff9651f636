"""`Launches`: the forwards that use the slots of a pool, and whether they have ended. Nothing here waits."""

from typing import Any, Unpack, final

import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate.runtime.base import DoneFence, Fence, Runtime, Stream
from batchstate.violations import Code, Where

Ints = npt.NDArray[np.int64]

_IN_FLIGHT = Code.SLOT_IN_FLIGHT

KEPT = 64
"""Forwards that are told apart: more are not under way, since each has memory of its own."""


@final
class Launches:
    """The forwards whose inputs were taken, of the slots of one pool.

    No event is recorded for a forward that publishes: the fence of its publish says that it has ended. Another gets one
    when the next forward is launched; before, its stream is asked.

    Attributes:
        used: int64[capacity], the last forward that uses each slot, counted from 1; 0 for none. The core writes it.
        last: the number of the last.
    """

    __slots__ = ("_forwards", "_runtime", "last", "used")

    def __init__(self, runtime: Runtime, used: Ints) -> None:
        self._runtime = runtime
        self.used = used
        self.last = 0
        # Each forward's stream, its step, and the first fence that is known behind it; by number modulo `KEPT`.
        self._forwards: list[list[Any]] = [[None, 0, DoneFence()]] * KEPT

    def begin(self, stream: Stream) -> int:
        """The number of a forward that is given to `stream`, the current one."""
        number, forwards = self.last, self._forwards
        latest = forwards[number % KEPT]
        if latest[2] is None:
            latest[2] = self._runtime.record(latest[0])
        self.last = number = number + 1
        forwards[number % KEPT] = [stream, self._runtime.step, None]
        return number

    def ended(self, stream: Stream, fence: Fence) -> None:
        """A fence was recorded on `stream`, behind what it was given."""
        latest = self._forwards[self.last % KEPT]
        if latest[2] is None and latest[0] is stream:
            latest[2] = fence

    def check_ended(self, rows: Ints, **where: Unpack[Where]) -> None:
        """Refuses (SLOT_IN_FLIGHT) slots int64[n] that a forward uses which is not known to have ended."""
        numbers = self.used[rows]
        if self._runtime.capturing or not np.count_nonzero(numbers):
            invariants.times_checked[_IN_FLIGHT] += 1
            return
        in_flight = np.isin(numbers, self._running())
        at, behind = np.flatnonzero(in_flight), None
        if at.size:
            stream, step, fence = self._forwards[int(numbers[at[0]]) % KEPT]
            behind = f"{fence or 'no fence yet'} of the forward of step {step} on stream {stream.name!r}"
        invariants.slot_in_flight(rows, in_flight, behind=behind, **where)

    def _running(self) -> list[int]:
        """The forwards that are not known to have ended: neither they nor later ones of their streams."""
        running, ended = [], set()
        for number in range(self.last, max(self.last - KEPT, 0), -1):
            stream, _, fence = self._forwards[number % KEPT]
            if stream.key not in ended:
                if self._runtime.has_run(stream) if fence is None else fence.query():
                    ended.add(stream.key)
                else:
                    running.append(number)
        return running
