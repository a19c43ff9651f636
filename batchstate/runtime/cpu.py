"""A plain CPU as device: every operation runs at once, and device memory is an allocation of its own.

The point of this runtime is that host and device side stay two memories. `.to("cpu")` and `torch.from_numpy` would
alias them, a pair that aliases always agrees, and every check on it would be vacuous.
"""

import contextlib
import itertools
from collections.abc import Iterator

import torch

from batchstate.runtime.base import Array, Runtime
from batchstate.runtime.fences import DoneFence, Fence, Stream
from batchstate.runtime.staging import StagingBlock

_DONE = DoneFence()
_ids = itertools.count()


class CpuRuntime(Runtime):
    """Runs on CPU tensors, with streams that have a name and no concurrency."""

    def __init__(self, *, steps_in_flight: int = 2) -> None:
        super().__init__(torch.device("cpu"), steps_in_flight=steps_in_flight)
        self._current = self.stream("default")

    def _pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _device_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def _copied_to_device(self, block: StagingBlock, nbytes: int, into: torch.Tensor | None) -> torch.Tensor:
        # By numpy: torch copies from 32 KiB on with all its threads, which then wait for each other and for more work.
        # On a busy machine that makes a copy of microseconds one of milliseconds. The tensor aliases the copy alone.
        if into is not None:
            target = into if into.numel() == nbytes else into[:nbytes]
            target.numpy()[...] = block.bytes[:nbytes]
            return target
        if not nbytes:
            return self._device_memory((0,), torch.uint8)  # numpy gives nothing a stride of 0, which torch cannot view
        return torch.from_numpy(block.bytes[:nbytes].copy())

    def _copied_to_host(self, block: StagingBlock, source: torch.Tensor) -> None:
        block.bytes[: source.numel()] = source.numpy()

    def _read_back(self, source: torch.Tensor) -> Array:
        copy: Array = source.detach().clone().numpy()
        return copy

    def _wait_for_device(self) -> None:
        return

    def stream(self, name: str) -> Stream:
        """A new stream; it has an identity and runs at once."""
        return Stream(name, None, next(_ids))

    @property
    def current_stream(self) -> Stream:
        """The stream of the innermost `use`."""
        return self._current

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """A window in which `stream` is the current one."""
        self.check_owner("use")
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, stream: Stream | None = None) -> Fence:
        """A fence that is complete: everything has run."""
        return _DONE

    def _stream_wait(self, stream: Stream, fence: Fence) -> None:
        return

    def _keep_alive(self, tensor: torch.Tensor, stream: Stream) -> None:
        return

    @property
    def capturing(self) -> bool:
        """False: there are no graphs."""
        return False
