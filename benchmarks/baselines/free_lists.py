"""Baselines for pools: free lists of numbers 1 to size, as engines keep them. None checks what is given back."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol, final

import attrs
import numpy as np
import torch


class FreeListBaseline(Protocol):
    """Takes and returns numbers; what `take` gave goes back as it is."""

    name: ClassVar[str]

    def take(self, n: int) -> Any:
        """`n` free numbers, in the form in which this list keeps them."""
        ...

    def free(self, taken: Any) -> None:
        """Gives back what `take` gave."""
        ...

    def numbers(self, taken: Any) -> list[int]:
        """The entries that were taken, as numbers."""
        ...


@final
class PopList:
    """A Python list, one `pop` a number."""

    name: ClassVar[str] = "Python list, pop and extend"

    def __init__(self, size: int, device: torch.device) -> None:
        self._free = list(range(size, 0, -1))

    def take(self, n: int) -> list[int]:
        free = self._free
        return [free.pop() for _ in range(n)]

    def free(self, taken: list[int]) -> None:
        self._free.extend(taken)

    def numbers(self, taken: list[int]) -> list[int]:
        return taken


@final
class SliceList:
    """A Python list, taken from its end by slices: the fastest that Python has, and nothing but numbers."""

    name: ClassVar[str] = "Python list, slices of its end"

    def __init__(self, size: int, device: torch.device) -> None:
        self._free = list(range(size, 0, -1))

    def take(self, n: int) -> list[int]:
        at = len(self._free) - n
        taken = self._free[at:]
        del self._free[at:]
        return taken

    def free(self, taken: list[int]) -> None:
        self._free.extend(taken)

    def numbers(self, taken: list[int]) -> list[int]:
        return taken


@final
class TensorList:
    """A device tensor: the front is handed out as a slice, what comes back is concatenated behind the rest."""

    name: ClassVar[str] = "torch free list"

    def __init__(self, size: int, device: torch.device) -> None:
        self._free = torch.arange(1, size + 1, dtype=torch.int64, device=device)

    def take(self, n: int) -> torch.Tensor:
        taken = self._free[:n]
        self._free = self._free[n:]
        return taken

    def free(self, taken: torch.Tensor) -> None:
        self._free = torch.cat((self._free, taken))

    def numbers(self, taken: torch.Tensor) -> list[int]:
        numbers: list[int] = taken.tolist()
        return numbers


@attrs.define(eq=False, repr=False)
class Block:
    """One block and its neighbours among the free ones.

    Attributes:
        number: which.
        references: how many use it.
        before, after: neighbours, if it is free.
    """

    number: int
    references: int = 0
    before: "Block | None" = None
    after: "Block | None" = None


@final
class LinkedBlocks:
    """A doubly linked list of block objects with reference counts: out at the front, in at the back."""

    name: ClassVar[str] = "linked block list"

    def __init__(self, size: int, device: torch.device) -> None:
        self._head, self._tail = Block(0), Block(0)
        self._head.after, self._tail.before = self._tail, self._head
        self.count = 0
        self._append_n([Block(number) for number in range(1, size + 1)])

    def take(self, n: int) -> list[Block]:
        taken = self._popleft_n(n)
        for block in taken:
            block.references += 1
        return taken

    def free(self, taken: Sequence[Block]) -> None:
        for block in taken:
            block.references -= 1
        self._append_n([block for block in taken if block.references == 0])

    def numbers(self, taken: Iterable[Block]) -> list[int]:
        return [block.number for block in taken]

    def _popleft_n(self, n: int) -> list[Block]:
        if n > self.count:
            raise ValueError(f"{n} of {self.count} free blocks")
        taken: list[Block] = []
        block = self._head.after
        for _ in range(n):
            if block is None or block is self._tail:
                raise ValueError(f"a list of {self.count} blocks ends after {len(taken)}")
            taken.append(block)
            following = block.after
            block.before = block.after = None
            block = following
        if block is not None:
            self._head.after, block.before = block, self._head
        self.count -= n
        return taken

    def _append_n(self, blocks: Sequence[Block]) -> None:
        last = self._tail.before
        if last is None:
            raise ValueError("a list without a head")
        for block in blocks:
            last.after, block.before = block, last
            last = block
        last.after, self._tail.before = self._tail, last
        self.count += len(blocks)


def shuffled(free_list: FreeListBaseline, size: int, *, seed: int = 0) -> None:
    """Puts the numbers in the order in which a pool has them after long use: no run of neighbours is left.

    A list that is still in its first order has neighbours side by side in memory too, which no server enjoys for long.
    """
    order = np.random.default_rng(seed).permutation(size)
    taken = free_list.take(size)
    if isinstance(taken, torch.Tensor):
        free_list.free(taken[torch.from_numpy(order).to(taken.device)])
    else:
        free_list.free([taken[i] for i in order.tolist()])
