"""What the programs of the micro-cases use of a runtime: the race detector and the simulated device have all of it."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import torch

from batchstate.runtime import Fence, PackedUpload, Stream
from batchstate.runtime.base import Download

T = TypeVar("T")


class Event(Protocol):
    """An event that can be recorded again, as an engine uses one."""

    def record(self, stream: Stream | None = None) -> None:
        """Records it on a stream, by default the current one."""
        ...

    def wait(self, stream: Stream | None = None) -> None:
        """Makes a stream, by default the current one, wait for the last recording."""
        ...

    def query(self) -> bool:
        """Whether the last recording is complete. Never waits."""
        ...

    def synchronize(self) -> None:
        """The host waits for the last recording."""
        ...


class CaseRuntime(Protocol):
    """A runtime with events and pinned memory."""

    @property
    def device(self) -> torch.device:
        """Where device memory lies."""
        ...

    def event(self) -> Event:
        """A new event."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that `copy_(non_blocking=True)` uses without the host waiting."""
        ...

    @property
    def current_stream(self) -> Stream:
        """See `Runtime.current_stream`."""
        ...

    def stream(self, name: str) -> Stream:
        """See `Runtime.stream`."""
        ...

    def use(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        """See `Runtime.use`."""
        ...

    def record(self, stream: Stream | None = None) -> Fence:
        """See `Runtime.record`."""
        ...

    def wait(self, fence: Fence, *, stream: Stream | None = None) -> None:
        """See `Runtime.wait`."""
        ...

    def synchronize(self) -> None:
        """See `Runtime.synchronize`."""
        ...

    def device_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Runtime.device_empty`."""
        ...

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> PackedUpload:
        """See `Runtime.upload`."""
        ...

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """See `Runtime.download`."""
        ...

    def read_back(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """See `Runtime.read_back`."""
        ...

    def launch(
        self,
        operation: Callable[..., T],
        *args: Any,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        name: str = "",
    ) -> T:
        """See `Runtime.launch`."""
        ...

    def use_on_current_stream(self, tensor: torch.Tensor, made_on: Stream, ready: Fence | None = None) -> torch.Tensor:
        """See `Runtime.use_on_current_stream`."""
        ...

    def use_part_on_current_stream(self, packed: PackedUpload, index: int) -> torch.Tensor:
        """See `Runtime.use_part_on_current_stream`."""
        ...

    def _keep_alive(self, tensor: torch.Tensor, stream: Stream) -> None: ...
