"""The device side of a value: a tensor that may not exist before somebody uses it."""

from collections.abc import Callable
from typing import NamedTuple, final

import torch

from batchstate.runtime import Fence, Runtime, Stream


class Made(NamedTuple):
    """A device tensor, the stream it was made on, a fence behind its making, and the streams that have its memory."""

    tensor: torch.Tensor
    stream: Stream
    ready: Fence | None
    handed: set[object]


@final
class DeviceSide:
    """Makes its tensor at first use, once, and makes it safe on whichever stream uses it."""

    __slots__ = ("_made", "_make", "mark")

    def __init__(self, make: Callable[[], Made] | None, made: Made | None = None) -> None:
        self._make = make
        self._made = made
        self.mark = None if made is None else version_mark(made.tensor)

    @classmethod
    def of(cls, tensor: torch.Tensor, runtime: Runtime) -> "DeviceSide":
        """A tensor that exists, made on the current stream."""
        return cls(None, Made(tensor, runtime.current_stream, None, set()))

    @property
    def made(self) -> torch.Tensor | None:
        """The tensor if it exists already; for checks, which put it in no order with a stream."""
        return None if self._made is None else self._made.tensor

    def make(self, runtime: Runtime) -> Made:
        """The tensor and where it was made; it is made now if it was not yet, and is safe on the current stream."""
        self.tensor(runtime)
        if self._made is None:  # pragma: no cover - `tensor` makes it
            raise RuntimeError("a device side that was made and is not there")
        return self._made

    def tensor(self, runtime: Runtime) -> torch.Tensor:
        """The tensor, ordered before and kept alive for what the current stream does next."""
        made = self._made
        if made is None:
            if self._make is None:  # pragma: no cover - the constructor is given one of the two
                raise RuntimeError("a device side with neither a tensor nor a way to make it")
            made = self._made = self._make()
            self._make = None
            self.mark = version_mark(made.tensor)
        return runtime.acquire(made.tensor, made.stream, made.ready, handed=made.handed)


def version_mark(tensor: torch.Tensor) -> int | None:
    """Torch's count of writes in place to the tensor's memory; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version
