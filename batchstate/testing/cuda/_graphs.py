"""What a CUDA graph has recorded: operations with their memory, which each replay runs again."""

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch

from batchstate.testing.tracing.operations import Operation


class Node(NamedTuple):
    """One operation of a graph.

    Attributes:
        operation, func, args, kwargs: the call.
        results: its tensors; `new` says of each whether it is memory of the graph.
        copies: whether it is a copy between pinned memory and the device.
    """

    operation: Operation
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: list[torch.Tensor]
    new: list[bool]
    copies: bool


@final
class Capture:
    """What is recorded between `capture_begin` and `capture_end`.

    While it is recorded the operations run, so that the code sees shapes; what they write of older memory is put back.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()

    def made(self, tensor: torch.Tensor) -> None:
        """Memory of the graph's own."""
        self._made.add(tensor.untyped_storage()._cdata)

    def keep(self, tensor: torch.Tensor) -> None:
        """Older memory is about to be written."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made and storage._cdata not in self._kept:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._kept[storage._cdata] = (whole, whole.clone())

    def restore(self) -> None:
        """Older memory is as it was."""
        for whole, before in self._kept.values():
            whole.copy_(before)
        self._kept.clear()
