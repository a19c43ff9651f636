"""Ranges of consecutive indices: finding them, and a free list made of them."""

from typing import final

import numpy as np
import numpy.typing as npt

from batchstate._arrays import arange_per_row

Ints = npt.NDArray[np.int64]


def ranges_of(indices: Ints) -> tuple[Ints, Ints]:
    """The ranges of consecutive indices, in the order given: starts and lengths, int64[k] each."""
    if not indices.size:
        return indices, indices
    firsts = np.concatenate([[0], np.flatnonzero(np.diff(indices) != 1) + 1])
    return indices[firsts], np.diff(firsts, append=indices.size)


@final
class FreeRanges:
    """Free indices among `first` to `last`, kept as ranges, all of them free at first.

    Takes the place of a `FreeList` in an `Allocator` where indices that are taken together should be neighbours. Best
    fit: the smallest range that holds all that is asked for, from its low end; where none does, the largest ones.
    Neighbours that are freed become one range. Costs O(ranges): at most one more than there are ranges in use.

    Attributes:
        count: how many are free.
        capacity: how many there can be.
    """

    def __init__(self, first: int, last: int) -> None:
        whole = last >= first
        self._starts: Ints = np.array([first] if whole else [], dtype=np.int64)
        self._ends: Ints = np.array([last + 1] if whole else [], dtype=np.int64)  # exclusive
        self.capacity = last - first + 1
        self.count = self.capacity

    def __repr__(self) -> str:
        return f"FreeRanges({self.count} of {self.capacity} in {self._starts.size} ranges)"

    @property
    def largest(self) -> int:
        """Length of the largest range."""
        return int((self._ends - self._starts).max(initial=0))

    def top(self, n: int) -> Ints:
        """The next `n` to be handed out, in that order, as a new array. They stay free."""
        chosen, sizes = self._choose(n)
        return arange_per_row(self._starts[chosen], sizes)

    def drop(self, n: int) -> None:
        """Takes away what `top(n)` shows."""
        chosen, sizes = self._choose(n)
        self._starts[chosen] += sizes
        self.count -= n
        left = self._starts < self._ends
        self._starts, self._ends = self._starts[left], self._ends[left]

    def push(self, indices: Ints) -> None:
        """Makes `indices` free, in any order."""
        if not indices.size:
            return
        more, lengths = ranges_of(np.sort(indices))
        starts = np.concatenate([self._starts, more])
        ends = np.concatenate([self._ends, more + lengths])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        gaps = starts[1:] != ends[:-1]
        self._starts = starts[np.append(True, gaps)]
        self._ends = ends[np.append(gaps, True)]
        self.count += indices.size

    def entries(self) -> Ints:
        """All free indices in ascending order, as a new array."""
        return arange_per_row(self._starts, self._ends - self._starts)

    def _choose(self, n: int) -> tuple[Ints, Ints]:
        """The ranges that `n` indices are taken from, and how many from each."""
        sizes = self._ends - self._starts
        fitting = np.flatnonzero(sizes >= n)
        if fitting.size:
            best = fitting[[np.argmin(sizes[fitting])]]
            return best, np.full(1, n, dtype=np.int64)
        chosen = np.argsort(-sizes, kind="stable")
        taken = np.diff(np.minimum(np.cumsum(sizes[chosen]), n), prepend=0)
        used = taken > 0
        return chosen[used], taken[used]
