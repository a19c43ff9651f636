"""A stack of free indices: the last ones freed are the first ones handed out.

It grows downwards in its memory, so that what is taken or pushed together is one slice, in the order in which it goes.
"""

from typing import Protocol, final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class FreeIndices(Protocol):
    """Free indices of a ledger, in an order of their own."""

    count: int
    room: int

    def top(self, n: int) -> Ints:
        """The next `n` to be handed out, in that order, as a new array. They stay free."""
        ...

    def drop(self, n: int) -> None:
        """Takes away what `top(n)` shows."""
        ...

    def push(self, indices: Ints) -> None:
        """Makes `indices` free."""
        ...

    def entries(self) -> Ints:
        """All free indices, as a new array."""
        ...


@final
class FreeList:
    """Free ones among the indices `first` to `last`. At first all are free, the lowest on top.

    Attributes:
        count: how many are free.
        room: how many there can be.
    """

    def __init__(self, first: int, last: int) -> None:
        self._stack = self._initial(first, last)
        self.count = len(self._stack)
        self.room = last - first + 1

    def __repr__(self) -> str:
        return f"FreeList({self.count} of {self.room})"

    def top(self, n: int) -> Ints:
        """The next `n` to be handed out, in that order, as a new array. They stay on the stack."""
        at = self.room - self.count
        return self._stack[at : at + n].copy()

    def drop(self, n: int) -> None:
        """Takes the next `n` off the stack."""
        self.count -= n

    def push(self, indices: Ints) -> None:
        """Puts copies of `indices` on the stack so that `top` gives them in the same order."""
        at = self.room - self.count
        self._stack[at - indices.size : at] = indices
        self.count += indices.size

    def entries(self) -> Ints:
        """All free indices, as a new array."""
        return self._stack[self.room - self.count :].copy()

    def _initial(self, first: int, last: int) -> Ints:
        return np.arange(first, last + 1, dtype=np.int64)
