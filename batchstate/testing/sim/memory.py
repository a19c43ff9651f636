"""Which memory of a program is the device's, in which block it lies, and what an operation keeps of it."""

from collections.abc import Callable
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.testing.sim.calls import View
from batchstate.testing.sim.device import Allocator, Block, Device, Lane, Task, bytes_of, poison
from batchstate.testing.sim.shapes import Made
from batchstate.testing.tracing.memory import Memories, Place
from batchstate.testing.tracing.sites import site


@final
@attrs.define(eq=False)
class Kept:
    """What is known of a piece of memory.

    Attributes:
        place: whose it is.
        block: where it lies. None for memory of the host, for empty tensors, and for memory that was there before the
            window or that numpy shares: when that is given back is the program's affair, and no other tensor gets it.
        fill: what was put there while nobody knew whose it is.
    """

    place: Place
    block: Block | None = None
    fill: "Fill | None" = None


@final
@attrs.define(eq=False)
class Fill:
    """What a factory has put into memory that may turn out to be the device's.

    The numbers are there at once, as the host would need them. Once an operation of the device touches them, they were
    put there by an operation of the stream that was current then: if that has not run, they are not there yet.

    Attributes:
        block: the memory.
        task: the operation.
        values: what it puts there; None as long as it is there already.
        done: it has run.
    """

    block: Block
    task: Task | None = None
    values: npt.NDArray[np.uint8] | None = None
    done: bool = False

    def __call__(self) -> None:
        """Runs it."""
        self.done = True
        if self.values is not None:
            self.block.memory[...] = self.values

    def happens_late(self, device: Device) -> None:
        """It is the device's."""
        if not self.done and self.task is not None:
            self.values = self.block.memory.copy()
            poison(self.block.memory)
            device.awaken(self.task)


@final
class Places:
    """All memory of a program.

    Args:
        device: that runs late.
        allocator: of its memory.
        current: the stream that allocates.

    Attributes:
        memories: what is known of each piece.
    """

    def __init__(self, device: Device, allocator: Allocator, current: Callable[[], Lane]) -> None:
        self._device = device
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
            if kept.fill is not None:
                kept.fill.happens_late(self._device)
                kept.fill = None
        return kept

    def new(self, made: Made) -> torch.Tensor:
        """New device memory of the current stream; it holds what it held."""
        return self._tensor(made, Place.DEVICE, self._allocator.allocate)

    def copied_to_device(self, values: torch.Tensor) -> torch.Tensor:
        """New device memory with these values at once: the stream has nothing before it."""
        tensor = self.new(Made(values.dtype, tuple(values.shape), values.stride()))
        self._device.settle()  # what the allocation wipes is wiped before
        return tensor.copy_(values.detach())

    def undecided(self, values: torch.Tensor) -> torch.Tensor:
        """The same in memory that may turn out to be the device's."""
        made = Made(values.dtype, tuple(values.shape), values.stride())
        return self._tensor(made, Place.UNDECIDED, self._allocator.fresh)

    def filled(self, values: torch.Tensor, name: str, step: int, *, late: bool) -> torch.Tensor:
        """The same with these values. `late`: on the device, an operation of the current stream puts them there."""
        tensor = self.undecided(values).copy_(values.detach())
        kept = self.memories.of(tensor)
        if late and kept is not None and kept.block is not None:
            block = kept.block
            fill = kept.fill = Fill(block)
            fill.task = Task(name, step, site(4), fill, lambda: [block.memory], dormant=True)
            self._device.enqueue(self._current(), fill.task)
        return tensor

    def pack(self, tensor: torch.Tensor) -> View | torch.Tensor:
        """What stands for a tensor that an operation reads, until it runs."""
        place = self.of(tensor)
        if place in (Place.HOST, Place.PINNED) or (place is Place.UNDECIDED and not tensor.ndim):
            return tensor.detach().clone()  # one number: an operation takes it along when it is enqueued
        return self.pack_written(tensor)

    def pack_written(self, tensor: torch.Tensor) -> View | torch.Tensor:
        """What stands for a tensor that an operation writes: device memory, whatever it was taken for."""
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
