"""Free indices as intervals: what is taken together comes in few runs, and neighbours that are freed grow together.

Takes the place of a `FreeList` in a `Ledger`. Best fit: the smallest interval that holds all that is asked for, from
its low end; where none does, the largest ones. Costs O(intervals): at most one more than there are runs in use.
"""

from typing import final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@final
class ExtentList:
    """Free ones among the indices `first` to `last`. At first all are free, in one interval.

    Attributes:
        count: how many are free.
        room: how many there can be.
    """

    def __init__(self, first: int, last: int) -> None:
        whole = last >= first
        self._starts: Ints = np.array([first] if whole else [], dtype=np.int64)
        self._ends: Ints = np.array([last + 1] if whole else [], dtype=np.int64)  # exclusive
        self.room = last - first + 1
        self.count = self.room

    def __repr__(self) -> str:
        return f"ExtentList({self.count} of {self.room} in {self._starts.size} intervals)"

    @property
    def largest(self) -> int:
        """The most that can be had in one run."""
        return int((self._ends - self._starts).max(initial=0))

    def top(self, n: int) -> Ints:
        """The next `n` to be handed out, in that order, as a new array. They stay free."""
        chosen, sizes = self._choose(n)
        return spread(self._starts[chosen], sizes)

    def drop(self, n: int) -> None:
        """Takes away what `top(n)` shows."""
        chosen, sizes = self._choose(n)
        self._starts[chosen] += sizes
        self.count -= n
        self._keep_nonempty()

    def push(self, indices: Ints) -> None:
        """Makes `indices` free, in any order; intervals that touch become one."""
        if not indices.size:
            return
        starts, ends = intervals(np.sort(indices))
        starts = np.concatenate([self._starts, starts])
        ends = np.concatenate([self._ends, ends])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        apart = np.flatnonzero(starts[1:] != ends[:-1])
        self._starts = starts[np.concatenate([[0], apart + 1])]
        self._ends = ends[np.concatenate([apart, [ends.size - 1]])]
        self.count += indices.size

    def entries(self) -> Ints:
        """All free indices in ascending order, as a new array."""
        return spread(self._starts, self._ends - self._starts)

    def _choose(self, n: int) -> tuple[Ints, Ints]:
        """Which intervals, and how many of each."""
        sizes = self._ends - self._starts
        fitting = np.flatnonzero(sizes >= n)
        if fitting.size:
            best = fitting[[np.argmin(sizes[fitting])]]
            return best, np.full(1, n, dtype=np.int64)
        chosen = np.argsort(-sizes, kind="stable")
        taken = np.diff(np.minimum(np.cumsum(sizes[chosen]), n), prepend=0)
        used = taken > 0
        return chosen[used], taken[used]

    def _keep_nonempty(self) -> None:
        left = self._starts < self._ends
        self._starts, self._ends = self._starts[left], self._ends[left]


def intervals(ascending: Ints) -> tuple[Ints, Ints]:
    """The intervals that ascending, distinct indices form: starts and ends (exclusive), int64[k] each."""
    breaks = np.flatnonzero(np.diff(ascending) != 1)
    starts = ascending[np.concatenate([[0], breaks + 1])]
    ends = ascending[np.concatenate([breaks, [ascending.size - 1]])] + 1
    return starts, ends


def runs_of(indices: Ints) -> tuple[Ints, Ints]:
    """Runs of consecutive indices in the order given: starts and lengths, int64[k] each."""
    if not indices.size:
        return indices, indices
    starts, ends = intervals(indices)
    return starts, ends - starts


def spread(starts: Ints, lengths: Ints) -> Ints:
    """All indices of runs, one run after the other, int64[sum of lengths]."""
    if starts.size == 1:
        return np.arange(starts[0], starts[0] + lengths[0], dtype=np.int64)
    ends: Ints = lengths.cumsum()
    total = int(ends[-1]) if ends.size else 0
    bases: Ints = starts - (ends - lengths)
    return bases.repeat(lengths) + np.arange(total, dtype=np.int64)
