"""`Launches`: the forwards that use the slots of a pool, and whether they have ended. Nothing here waits."""

from typing import Unpack, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate.runtime.base import Fence, Runtime, Stream
from batchstate.violations import Code, Where

Ints = npt.NDArray[np.int64]

_IN_FLIGHT = Code.SLOT_IN_FLIGHT

MOST_OPEN = 32
"""Forwards of a stream, before it is asked which have ended: a question may tell a race detector of an order."""


@final
@attrs.define(eq=False)
class Launch:
    """A forward that was given to a stream. Its fence is the first that is known behind it, None before there is one."""

    number: int
    stream: Stream
    step: int
    fence: Fence | None = None


@final
class Launches:
    """The forwards whose inputs were taken, of the slots of one pool.

    No event is recorded for a forward that publishes: the fence of its publish says that it has ended. Another gets one
    when the next forward is given to its stream; before, its stream is asked.

    Attributes:
        used: int64[capacity], the last forward that uses each slot, counted from 1; 0 for none. The core writes it.
        last: the number of the last.
    """

    __slots__ = ("_open", "_runtime", "last", "used")

    def __init__(self, runtime: Runtime, used: Ints) -> None:
        self._runtime = runtime
        self.used = used
        self.last = 0
        self._open: dict[object, list[Launch]] = {}

    def begin(self, stream: Stream) -> int:
        """The number of a forward that is given to `stream`, the current one; what it was given before ends here."""
        launches = self._open.get(stream.key)
        if launches is None:
            launches = self._open[stream.key] = []
        elif launches:
            if launches[-1].fence is None:
                launches[-1].fence = self._runtime.record(stream)
            if len(launches) > MOST_OPEN:
                self._forget(launches)
        self.last = number = self.last + 1
        launches.append(Launch(number, stream, self._runtime.step))
        return number

    def ended(self, stream: Stream, fence: Fence) -> None:
        """A fence was recorded on `stream`, behind what it was given."""
        launches = self._open.get(stream.key)
        if launches and launches[-1].fence is None:
            launches[-1].fence = fence

    def check_ended(self, rows: Ints, **where: Unpack[Where]) -> None:
        """Refuses (SLOT_IN_FLIGHT) slots int64[n] that a forward uses which is not known to have ended."""
        numbers = self.used[rows]
        if not self._open or self._runtime.capturing or not np.count_nonzero(numbers):
            invariants.times_checked[_IN_FLIGHT] += 1
            return
        running = {launch.number: launch for launches in self._open.values() for launch in self._forget(launches)}
        in_flight = np.isin(numbers, [*running])
        at = np.flatnonzero(in_flight)
        behind = None
        if at.size:
            launch = running[int(numbers[at[0]])]
            behind = f"{launch.fence or 'no fence yet'} of the forward of step {launch.step} on stream {launch.stream.name!r}"
        invariants.slot_in_flight(rows, in_flight, behind=behind, **where)

    def _forget(self, launches: list[Launch]) -> list[Launch]:
        """Those of one stream that have not ended; the others are forgotten."""
        for i in range(len(launches) - 1, -1, -1):
            launch = launches[i]
            if self._runtime.has_run(launch.stream) if launch.fence is None else launch.fence.query():
                del launches[: i + 1]
                break
        return launches
