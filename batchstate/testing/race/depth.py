"""How many steps are under way at once, as far as the host knows: without two there is nothing to race."""

from collections import deque
from typing import final

from batchstate.testing.race.clocks import Clocks


@final
class InFlight:
    """Counts steps with work that the host does not know to be over. Fences and waits are no work, set-up no step.

    Args:
        clocks: of the run.

    Attributes:
        most: the most there ever were, as of the last `note`.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._ends: deque[list[int]] = deque()  # of each earlier step: the newest work of each stream by then
        self._before: list[int] = []  # the newest work of each stream when the present step began
        self._began = False
        self.most = 0

    @property
    def now(self) -> int:
        """Steps under way, the present one included. What comes before the first `next_step` is no step."""
        host, streams = self._clocks.host, self._clocks.lanes[1:]
        while self._ends and all(host.knows(at, event) for at, event in enumerate(self._ends[0], start=1)):
            self._ends.popleft()
        before = self._before
        present = any(
            not host.knows(lane.number, lane.work)
            and (lane.number > len(before) or lane.work > before[lane.number - 1])
            for lane in streams
        )
        return len(self._ends) + (present and self._began)

    def note(self) -> None:
        """To be called before the host learns something, and before a step ends: the number only falls there."""
        self.most = max(self.most, self.now)

    def step_ends(self) -> None:
        """What comes next is another step's."""
        self.note()
        ends = [lane.work for lane in self._clocks.lanes[1:]]
        if self._began and any(ends) and ends != self._before:
            self._ends.append(ends)
        self._before = ends
        self._began = True
