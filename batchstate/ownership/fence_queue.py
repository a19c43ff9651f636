"""Indices that become free when a fence completes: the one waiting room of slots, pages and states.

The queue owns what waits in it: it copies on entry, so that nothing a caller does later reaches it. It asks fences
and never waits for one.
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
class FenceQueue:
    """Groups of indices, each behind its fence. Groups leave in any order, as their fences complete.

    Attributes:
        count: indices that wait.
    """

    count: int = attrs.field(default=0, init=False)
    _groups: list[tuple[Fence, list[Ints]]] = attrs.field(factory=list, init=False)

    def __repr__(self) -> str:
        return f"FenceQueue({self.count} behind {len(self._groups)} fences)"

    def defer(self, fence: Fence, indices: Ints) -> None:
        """Keeps a copy of `indices` until `fence` is complete."""
        mine = self._own(indices)
        if self._groups and self._groups[-1][0] is fence:  # one query for all that one step frees
            self._groups[-1][1].append(mine)
        else:
            self._groups.append((fence, [mine]))
        self.count += mine.size

    def completed(self) -> list[tuple[Fence, Ints]]:
        """Removes and returns the groups whose fences are complete, oldest first."""
        waiting: list[tuple[Fence, list[Ints]]] = []
        done: list[tuple[Fence, Ints]] = []
        for fence, parts in self._groups:
            if self._complete(fence):
                done.append((fence, parts[0] if len(parts) == 1 else np.concatenate(parts)))
            else:
                waiting.append((fence, parts))
        if done:
            self._groups = waiting
            self.count -= sum(indices.size for _, indices in done)
        return done

    def indices(self) -> Ints:
        """Everything that waits, int64[count]."""
        parts = [part for _, group in self._groups for part in group]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _own(self, indices: Ints) -> Ints:
        return indices.copy()

    def _complete(self, fence: Fence) -> bool:
        return fence.query()
