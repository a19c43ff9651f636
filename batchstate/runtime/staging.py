"""Pinned host memory that uploads are staged in, reused only after the copy that read it has run.

The host writes a block once, the copy reads it when the device gets there, and a fence recorded behind the copy says
when that was. A block goes back to the pool only when its fence is complete, and only its fence decides: not the number
of calls, not a ring index. So a source can never be refilled in flight, however deep the engine runs; the depth it
declares (`steps_in_flight`) sets how many blocks are made in advance, and an engine that runs deeper is reported.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.runtime.fences import Fence

SMALLEST_BLOCK = 1 << 14
"""Bytes of the smallest block. Batch state of a few hundred requests fits."""


@final
@attrs.define(eq=False)
class StagingBlock:
    """One piece of pinned memory: `tensor` uint8[nbytes] and `bytes`, the same memory as an array.

    Attributes:
        lending: number of the present lending, 0 while it is free. A copy from the device checks that its is still it.
    """

    tensor: torch.Tensor
    bytes: npt.NDArray[np.uint8]
    lending: int = 0
    _memory: memoryview = attrs.field(init=False)
    _front: torch.Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._memory = self.bytes.data
        self._front = self.tensor

    def front(self, nbytes: int) -> torch.Tensor:
        """The first bytes, uint8[nbytes]. Steps are of one size for long, so the last answer is kept."""
        if self._front.numel() != nbytes:
            self._front = self.tensor[:nbytes]
        return self._front

    def write(self, array: npt.NDArray[Any], start: int) -> None:
        """Copies the elements of an array, in order, to where byte `start` is."""
        if not array.size:
            return
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        # Half as long as an assignment to a typed view of the block, which numpy makes three objects for.
        self._memory[start : start + array.nbytes] = array.data.cast("B")


@final
@attrs.define(eq=False)
class Staging:
    """Blocks by size, free or in flight.

    Attributes:
        allocate: makes uint8[nbytes] of host memory, pinned where that means something.
        depth: blocks made at once for a size that is asked for the first time.
    """

    allocate: Callable[[int], torch.Tensor]
    depth: int
    _free: dict[int, list[StagingBlock]] = attrs.field(factory=dict, init=False)
    _in_flight: dict[object, deque[tuple[Fence, int, StagingBlock]]] = attrs.field(factory=dict, init=False)
    _lendings: int = attrs.field(default=0, init=False)

    def take(self, nbytes: int) -> StagingBlock:
        """A block of at least `nbytes` that no copy still reads. Never waits; makes a new one if all are in flight."""
        self.reap()
        size = SMALLEST_BLOCK if nbytes <= SMALLEST_BLOCK else 1 << (nbytes - 1).bit_length()
        free = self._free.get(size)
        if free is None:
            free = self._free[size] = [self._make(size) for _ in range(self.depth)]
        block = free.pop() if free else self._make(size)
        self._lendings += 1
        block.lending = self._lendings
        return block

    def release(self, block: StagingBlock, fence: Fence, step: int, stream: object = None) -> None:
        """Gives a block back once `fence`, recorded behind the copy that reads it, is complete.

        `stream` is the key of the stream that copies: blocks of one stream come back in order, and a stream that is
        busy keeps none of another's.
        """
        self._in_flight.setdefault(stream, deque()).append((fence, step, block))

    def give_up(self, block: StagingBlock) -> None:
        """Gives back a block that no copy reads or writes any more."""
        block.lending = 0
        self._free[len(block.bytes)].append(block)

    def reap(self) -> None:
        """Makes every block free whose copy has run, oldest first on each stream."""
        # A copy: giving up an abandoned download, which a collection of garbage may do here, adds a stream.
        for in_flight in list(self._in_flight.values()):
            while in_flight and in_flight[0][0].query():
                self.give_up(in_flight.popleft()[2])

    def oldest_step(self) -> int | None:
        """Step of the oldest upload that has not run, or None."""
        self.reap()
        return min((in_flight[0][1] for in_flight in list(self._in_flight.values()) if in_flight), default=None)

    def _make(self, size: int) -> StagingBlock:
        tensor = self.allocate(size)
        array: Any = tensor.numpy()
        return StagingBlock(tensor, array)
