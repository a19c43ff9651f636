"""KV rows on their way between device pages and host tokens: one gather and one scatter a layer, never a wait."""

from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import CaptureError, DtypeError, ShapeError
from batchstate.host_tokens import HostTokenPool
from batchstate.pages import PagePool
from batchstate.runtime import Fence, PackedUpload

Ints = npt.NDArray[np.int64]


@final
class Moves:
    """Launches copies on the current stream.

    Args:
        pages: index the device buffers.
        host: the host buffers.
        kv: the device buffers.

    Raises:
        ShapeError, DtypeError: the buffers do not go together.

    Attributes:
        kv: the device buffers, one a layer.
    """

    def __init__(self, pages: PagePool, host: HostTokenPool, kv: Sequence[torch.Tensor]) -> None:
        self._runtime = host.runtime
        self._host = host
        self.kv = tuple(kv)
        self._last: dict[object, Fence] = {}  # stream -> behind its last launch
        wanted = (pages.token_capacity, *host.item_shape)
        if len(self.kv) != len(host.layers):
            raise ShapeError(
                f"{len(self.kv)} device buffers for {len(host.layers)} layers",
                value=len(self.kv),
                remedy="pass one for each layer of the host pool",
            )
        for layer, tensor in zip(host.layers, self.kv, strict=True):
            if tensor.dtype is not host.dtype:
                raise DtypeError(
                    f"layer {layer}: {tensor.dtype} on the device, {host.dtype} in the host tier",
                    value=tensor.dtype,
                    remedy="use one dtype",
                )
            if tuple(tensor.shape) != wanted or tensor.device != self._runtime.device:
                raise ShapeError(
                    f"layer {layer}: {list(tensor.shape)} on {tensor.device}",
                    value=tuple(tensor.shape),
                    remedy=f"pass {list(wanted)} on {self._runtime.device}",
                )

    def __repr__(self) -> str:
        return f"Moves({len(self.kv)} layers)"

    @property
    def last(self) -> tuple[Fence, ...]:
        """Behind all launches: one fence a stream that copied."""
        return tuple(self._last.values())

    def uploaded(self, sources: Ints, targets: Ints) -> PackedUpload:
        """Both index arrays on their way to the device, in one copy on the current stream."""
        return self._runtime.upload([sources, targets])

    def indices(self, upload: PackedUpload) -> tuple[torch.Tensor, torch.Tensor]:
        """What `uploaded` sends, safe to use on the current stream."""
        return self._runtime.acquire_part(upload, 0), self._runtime.acquire_part(upload, 1)

    def to_host(self, source: torch.Tensor, target: torch.Tensor, name: str) -> Fence:
        """Copies device tokens int64[n] to host tokens int64[n], all layers; the fence behind it."""
        return self._copy(self.kv, source, self._host.buffers, target, name)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, name: str) -> Fence:
        """Copies host tokens int64[n] to device tokens int64[n], all layers; the fence behind it."""
        return self._copy(self._host.buffers, source, self.kv, target, name)

    def _copy(
        self,
        sources: Sequence[torch.Tensor],
        source: torch.Tensor,
        targets: Sequence[torch.Tensor],
        target: torch.Tensor,
        name: str,
    ) -> Fence:
        if self._runtime.capturing:
            raise CaptureError(f"{name} while the stream is captured", remedy="move KV outside of the capture")
        try:
            for from_buffer, to_buffer in zip(sources, targets, strict=True):
                self._runtime.launch(
                    _copy_rows,
                    from_buffer,
                    source,
                    to_buffer,
                    target,
                    reads=(from_buffer, source, target),
                    writes=(to_buffer,),
                    name=name,
                    operations=2,
                )
        finally:  # what was launched before an error is under way all the same
            copied = self._runtime.record()
            self._last[self._runtime.current_stream.key] = copied
        return copied


def _copy_rows(source: torch.Tensor, from_rows: torch.Tensor, target: torch.Tensor, to_rows: torch.Tensor) -> None:
    target.index_copy_(0, to_rows, source.index_select(0, from_rows))
