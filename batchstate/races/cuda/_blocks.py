"""Device memory that comes back: the next allocation of a size gets the block that was freed last, at its address."""

from typing import Any, final

import numpy as np
import torch

from batchstate.races.detector import RaceAllocation
from batchstate.races.sim.device import rounded


@final
class Blocks:
    """Blocks by stream and size. One that another stream was recorded for does not come back.

    On a CPU the addresses of freed memory come again or not, as malloc likes; torch's allocator for a GPU gives the
    newest block of a size out again, so that a table that is keyed by address meets entries of another tensor.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, int], list[Any]] = {}

    def move(self, tensor: torch.Tensor, stream: int) -> Any:
        """Moves a new tensor to a block; returns the block, or None for an empty tensor."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if not nbytes:
            return None
        free = self._free.get((stream, rounded(nbytes)))
        block = free.pop() if free else np.empty(rounded(nbytes), np.uint8)
        whole = torch.from_numpy(block)
        whole[:nbytes].copy_(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,)))
        where = tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor.set_(whole.untyped_storage(), *where)
        return block

    def free(self, allocation: RaceAllocation) -> None:
        """The last tensor of a block is gone. May be called anywhere."""
        stream, block = allocation.allocated_on, allocation.block
        if stream is not None and block is not None and not allocation.kept_for:
            self._free.setdefault((stream.number, block.nbytes), []).append(block)
