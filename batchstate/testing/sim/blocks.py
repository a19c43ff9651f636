"""Memory of the simulated device: blocks that are handed out again as soon as they are free, and poisoned in between.

A block goes back at once, in program order, to the stream that it was allocated on, whose next allocation may get it:
for that stream its own order suffices. Another stream is protected only where the allocator was told of it
(`record_stream`); the block then waits aside until that stream has run what it had when the block was freed. That
orders nothing: it only keeps the block away.

Poisoned is what was freed when its stream next allocates anything, at that place of the stream: before that nothing can
have become of it, and from then on anything. Which allocation really gets it depends on sizes, and is chance.
"""

from typing import final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.testing.sim.device import Device
from batchstate.testing.sim.poison import poison
from batchstate.testing.sim.queues import Lane, Marker

SMALLEST = 512
"""Bytes of the smallest block, as CUDA's allocator rounds: small results share a size, so that they meet again."""


@final
@attrs.define(eq=False)
class Block:
    """A piece of device memory. The allocator owns it; tensors are views of it, and so are operations' own views.

    What a program holds is one storage object over the block, whose end is the free. Operations that have not run yet
    refer to the block and make views of their own when they run: they keep nothing of the program's alive.

    Attributes:
        memory: the bytes.
        lane: of the stream that allocated it.
        users: other streams that the allocator was told of, by number.
    """

    memory: npt.NDArray[np.uint8] = attrs.field(repr=False)
    lane: Lane
    users: dict[int, Lane] = attrs.field(factory=dict)
    _typed: dict[torch.dtype, torch.Tensor] = attrs.field(factory=dict, repr=False)

    def handed_out(self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """The tensor that a program gets for an allocation."""
        return torch.from_numpy(self.memory).view(dtype).as_strided(shape, stride)

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
        """The same memory for an operation that runs. To be called in inference mode alone."""
        flat = self._typed.get(dtype)
        if flat is None:
            flat = self._typed[dtype] = torch.from_numpy(self.memory).view(dtype)
        view: torch.Tensor = flat.as_strided(shape, stride, offset)
        return view


def bytes_of(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Bytes from the first to the last element."""
    if 0 in shape:
        return 0
    last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    return (last + 1) * dtype.itemsize


@final
class Allocator:
    """Hands out blocks and takes them back.

    Args:
        device: its streams write what they get.

    Attributes:
        reused: times that memory was handed out that somebody had before.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[tuple[int, int], list[Block]] = {}
        self._given_back: dict[int, list[Block]] = {}
        self._aside: list[tuple[Block, list[Marker]]] = []
        self.reused = 0

    def allocate(self, lane: Lane, nbytes: int) -> Block:
        """A block for a stream: what it gave back last, or a new one."""
        if self._aside:
            self._reclaim()
        if lane.number in self._given_back:
            for block in self._given_back.pop(lane.number):
                self._device.wipe(lane, block.memory)
                self._free.setdefault((lane.number, block.memory.nbytes), []).append(block)
        free = self._free.get((lane.number, _rounded(nbytes)))
        if not free:
            return self.fresh(lane, nbytes)
        self.reused += 1
        return free.pop()

    def fresh(self, lane: Lane, nbytes: int) -> Block:
        """A block that nobody had before."""
        memory = np.empty(_rounded(nbytes), np.uint8)
        poison(memory)
        return Block(memory, lane)

    def free(self, block: Block) -> None:
        """The last tensor of a block is gone. Only notes it: this may be called anywhere."""
        users, block.users = list(block.users.values()), {}
        if users:
            self._aside.append((block, [self._device.mark(lane) for lane in users]))
        else:
            self._given_back.setdefault(block.lane.number, []).append(block)

    def _reclaim(self) -> None:
        aside, self._aside = self._aside, []
        for block, markers in aside:
            if all(self._device.has_reached(marker) for marker in markers):
                self._given_back.setdefault(block.lane.number, []).append(block)
            else:
                self._aside.append((block, markers))


def _rounded(nbytes: int) -> int:
    return max(SMALLEST, 1 << max(nbytes - 1, 0).bit_length())
