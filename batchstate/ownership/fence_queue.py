"""Indices that become free when a fence completes: the one waiting room of slots, pages and states.

The queue owns what waits in it: it copies on entry, so that nothing a caller does later reaches it. It asks fences
and never waits for one. A fence is code of the engine's: it may raise, or call the pool that asks it. So all are asked
before anything moves, and one that has said yes is not asked again.
"""

from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.runtime import Fence

Ints = npt.NDArray[np.int64]


@final
@attrs.frozen(eq=False)
class AllFences:
    """Complete when each of `fences` is."""

    fences: tuple[Fence, ...]

    def query(self) -> bool:
        """Whether all are complete. Never waits."""
        return all(fence.query() for fence in self.fences)

    def wait(self) -> None:
        """Blocks the host until all are complete."""
        for fence in self.fences:
            fence.wait()


@final
@attrs.define(eq=False)
class AskedFence:
    """A fence and its answer. Completion is final: once it was seen, `fence` is not asked again.

    Attributes:
        fence: whom to ask.
        complete: whether it has said so.
    """

    fence: Fence
    complete: bool = attrs.field(default=False, init=False)

    def query(self) -> bool:
        """Whether it is complete. Never waits."""
        if not self.complete:
            self.complete = bool(self.fence.query())
        return self.complete

    def wait(self) -> None:
        """Blocks the host until it is complete."""
        self.fence.wait()


@final
@attrs.define(eq=False)
class FenceQueue:
    """Groups of indices, each behind its fence. Groups leave in any order, as their fences complete.

    Attributes:
        count: indices that wait.
    """

    count: int = attrs.field(default=0, init=False)
    _groups: list[tuple[AskedFence, list[Ints]]] = attrs.field(factory=list, init=False)

    def __repr__(self) -> str:
        return f"FenceQueue({self.count} behind {len(self._groups)} fences)"

    def defer(self, fence: Fence, indices: Ints) -> None:
        """Keeps a copy of `indices` until `fence` is complete."""
        mine = self._own(indices)
        if self._groups and self._groups[-1][0].fence is fence:  # one query for all that one step frees
            self._groups[-1][1].append(mine)
        else:
            self._groups.append((AskedFence(fence), [mine]))
        self.count += mine.size

    def completed(self) -> list[tuple[AskedFence, Ints]]:
        """Removes and returns the groups whose fences are complete, oldest first.

        Asks each fence once, and only then removes anything: an error of a fence leaves all as it was.
        """
        answers = [(group, self._complete(group[0])) for group in tuple(self._groups)]
        ready = [group for group, complete in answers if complete]
        if not ready:
            return []
        done = [(fence, parts[0] if len(parts) == 1 else np.concatenate(parts)) for fence, parts in ready]
        gone = {id(group) for group in ready}
        self._groups = [group for group in self._groups if id(group) not in gone]
        self.count -= sum(indices.size for _, indices in done)
        return done

    def indices(self) -> Ints:
        """Everything that waits, int64[count]."""
        parts = [part for _, group in self._groups for part in group]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _own(self, indices: Ints) -> Ints:
        return indices.copy()

    def _complete(self, fence: AskedFence) -> bool:
        return fence.query()
