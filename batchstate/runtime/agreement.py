"""`Agreement`: which fences all ranks of a group have seen complete, so that their pools come to the same answers.

Ranks of one group make the same calls, and their devices finish at different times. A pool that reaps what it sees
complete has other free slots than its peers a moment later, and so hands out others. With an agreement a fence counts
as complete when every rank has reported it, and from the same call on everywhere::

    agreement = runtime.join_group(size=8)  # before any pool is made
    reports = all_gather(agreement.report())  # once a step: a few integers, over whatever the engine has
    agreement.agree(reports)

A fence has the number in which it was first handed to the library, the same on every rank. One that completes late, as
that of a writer that is gone, holds back what is behind it, and nothing else.

Reports say besides what the ranks hold, as two digests: capacities of pools and rows of graphs; and what has happened
since, in order: indices handed out and taken back, tokens of each request, rows of each batch, and of its graph.
"""

import operator
import zlib
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate.errors import expected
from batchstate.runtime.streams import Fence


@final
@attrs.define(eq=False)
class QueriedFence:
    """A fence and its answer. Completion is final: once it was seen, `fence` is not queried again.

    Attributes:
        fence: the fence.
        step: of the runtime, when the first indices were freed behind it.
        complete: whether it has answered that it is; with an agreement, whether all ranks have agreed that it is.
    """

    fence: Any
    step: int
    complete: bool = attrs.field(default=False, init=False)

    def query(self) -> bool:
        """Whether it is complete. Never waits."""
        if not self.complete:
            self.complete = bool(self.fence.query())
        return self.complete


@final
class Agreement:
    """One rank's part. Made by `Runtime.join_group`; belongs to the runtime's thread.

    Attributes:
        size: ranks of the group.
    """

    def __init__(self, size: int, check_owner: Callable[[str], None]) -> None:
        self.size, self._check_owner = size, check_owner
        self._open: dict[int, QueriedFence] = {}
        self._newest = 0
        self._memory = 0
        self._digest = 0
        self._reported: list[int] = []
        self.note_memory("group", size)

    def __repr__(self) -> str:
        return f"Agreement({len(self._open)} of {self._newest} fences open)"

    def watch(self, fence: Fence, step: int = 0) -> QueriedFence:
        """Gives a fence the next number. It is `complete` when every rank has reported it.

        For an engine's own decisions too: `agreement.watch(lease.delivered)`, and admit when it is complete.
        """
        self._check_owner("watch")
        self._newest += 1
        watched = self._open[self._newest] = QueriedFence(fence, step)
        return watched

    def note(self, *numbers: npt.NDArray[np.integer[Any]]) -> None:
        """Adds indices, lengths or sizes of a call to the digest that ranks compare. For the library."""
        for array in numbers:
            self._digest = zlib.crc32(array.tobytes(), self._digest)

    def note_memory(self, name: str, capacity: int) -> None:
        """Adds the capacity of a pool, or the rows of a graph, to the digest of memory. For the library."""
        self._memory = zlib.crc32(f"{name} {capacity}".encode(), self._memory)

    @property
    def open(self) -> int:
        """Fences that are not agreed on."""
        return len(self._open)

    def report(self) -> list[int]:
        """The message of this rank to the others: how far it is, two digests, and the fences that are complete here.

        Asks each open fence; never waits.
        """
        self._check_owner("report")
        seen = [number for number, watched in tuple(self._open.items()) if watched.fence.query()]
        self._reported = [self._newest, self._memory, self._digest, *seen]
        return list(self._reported)

    def agree(self, reports: Sequence[Sequence[int]]) -> int:
        """Counts the fences as complete that every rank has reported; returns their number.

        Args:
            reports: of all ranks of the group, this one's last included, in any order.

        Raises:
            ArgumentError: not one of each rank, or one is cut. Nothing was counted.
            Violation: RANKS_DIFFER: the ranks have memory of other sizes, have not made the same calls, or got other
                indices. Nothing was counted.
        """
        self._check_owner("agree")
        heard = [[operator.index(number) for number in report] for report in reports]  # tensors are equal to nothing
        whole = len(heard) == self.size and min(map(len, heard)) >= 3
        if not whole or not self._reported or self._reported not in heard:
            remedy = "exchange `report()` among all ranks, and pass all of them to each"
            wanted = f"{self.size} whole reports, with {self._reported} among them"
            raise expected(f"{self!r}: agree", wanted, heard, remedy)
        invariants.ranks_differ(np.array([report[:3] for report in heard]), object=self, operation="agree")
        agreed = sorted(set.intersection(*(set(report[3:]) for report in heard)))
        self._reported = []
        for number in agreed:
            self._open.pop(number).complete = True
        return len(agreed)
