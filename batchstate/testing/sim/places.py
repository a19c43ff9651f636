"""Which memory of a program is the device's, in which block it lies, and what an operation keeps of it."""

from collections.abc import Callable
from typing import Any, final

import attrs
import torch

from batchstate.testing.sim.blocks import Allocator, Block, bytes_of
from batchstate.testing.sim.calls import View
from batchstate.testing.sim.queues import Lane
from batchstate.testing.sim.shapes import Made
from batchstate.testing.watching.memory import Memories, Place


@final
@attrs.define(eq=False)
class Kept:
    """What is known of a piece of memory.

    Attributes:
        place: whose it is.
        block: where it lies. None for memory of the host, for empty tensors, and for memory that was there before the
            window or that numpy shares: when that is given back is the program's affair, and no other tensor gets it.
    """

    place: Place
    block: Block | None = None


@final
class Places:
    """All memory of a program.

    Args:
        allocator: of the device.
        current: the stream that allocates.

    Attributes:
        memories: what is known of each piece.
    """

    def __init__(self, allocator: Allocator, current: Callable[[], Lane]) -> None:
        self._allocator = allocator
        self._current = current
        self.memories: Memories[Kept] = Memories(self._died)

    def of(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies; None for memory that was not seen yet."""
        kept = self.memories.of(tensor)
        return None if kept is None else kept.place

    def keep(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        """Says where a tensor lies."""
        self.memories.add(tensor, Kept(place))
        return tensor

    def on_device(self, tensor: torch.Tensor) -> Kept:
        """What is known of device memory, which an operation of the device makes of any memory it touches."""
        kept = self.memories.of(tensor)
        if kept is None:
            return self.memories.add(tensor, Kept(Place.DEVICE))
        if kept.place is Place.UNDECIDED:
            kept.place = Place.DEVICE
        return kept

    def new(self, made: Made) -> torch.Tensor:
        """New device memory of the current stream; it holds what it held."""
        return self._tensor(made, Place.DEVICE, self._allocator.allocate)

    def copied_to_device(self, values: torch.Tensor) -> torch.Tensor:
        """New device memory with these values at once: the stream has nothing before it."""
        tensor = self.new(Made(values.dtype, tuple(values.shape), values.stride()))
        return tensor.copy_(values.detach())

    def undecided(self, values: torch.Tensor, *, filled: bool) -> torch.Tensor:
        """The same in memory that may turn out to be the device's; without `filled` the values do not matter."""
        made = Made(values.dtype, tuple(values.shape), values.stride())
        tensor = self._tensor(made, Place.UNDECIDED, self._allocator.fresh)
        return tensor.copy_(values.detach()) if filled else tensor

    def pack(self, tensor: torch.Tensor) -> View | torch.Tensor:
        """What stands for a tensor until an operation of the device runs."""
        kept = self.memories.of(tensor)
        if kept is not None and kept.place in (Place.HOST, Place.PINNED):
            return tensor.detach().clone()  # one number: an operation takes it along when it is enqueued
        kept = self.on_device(tensor)
        return tensor.data if kept.block is None else View.of(tensor, kept.block)

    def _tensor(self, made: Made, place: Place, allocate: Callable[[Lane, int], Block]) -> torch.Tensor:
        nbytes = bytes_of(made.dtype, made.shape, made.stride)
        if not nbytes:
            return self.keep(torch.empty_strided(made.shape, made.stride, dtype=made.dtype), place)
        block = allocate(self._current(), nbytes)
        tensor = block.handed_out(made.dtype, made.shape, made.stride)
        self.memories.add(tensor, Kept(place, block))
        return tensor

    def _died(self, kept: Kept) -> None:
        if kept.block is not None and kept.place is Place.DEVICE:
            self._allocator.free(kept.block)


def new_tensors(result: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A result with each tensor replaced by what `make` makes of it."""
    if isinstance(result, torch.Tensor):
        return make(result)
    if isinstance(result, list | tuple):
        return type(result)(new_tensors(one, make) for one in result)
    return result
