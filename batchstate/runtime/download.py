"""Device values on their way to the host: a copy that was started, and the values once it has run."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate.runtime.fences import Fence
from batchstate.runtime.staging import Staging, StagingBlock

Array = npt.NDArray[Any]


@final
class Download:
    """Several device tensors in one copy to the host. Made by `Runtime.download`.

    The copy lands in pinned memory that is lent to it until its values are taken out; a download that nobody takes
    gives the memory back when its copy has run.

    Attributes:
        done: the fence behind the copy.
        name: for reports.
    """

    def __init__(
        self,
        staging: Staging,
        block: StagingBlock,
        done: Fence,
        step: int,
        stream: object,
        kinds: Sequence[tuple[np.dtype[Any], tuple[int, ...]]],
        name: str,
        refuse_capture: Callable[[str], None],
        host_reads: Callable[[StagingBlock, int], None],
    ) -> None:
        self.done = done
        self._refuse_capture = refuse_capture
        self._host_reads = host_reads
        self.name = name
        self._staging = staging
        self._block = block
        self._lending = block.lending
        self._step = step
        self._kinds = kinds
        self._arrays: list[Array] | None = None
        self._abandoned = weakref.finalize(self, staging.release, block, done, step, stream)
        self._abandoned.atexit = False  # at the end of the process the memory goes anyway

    def __repr__(self) -> str:
        return f"Download({self.name!r}, {len(self._kinds)} arrays)"

    def ready(self) -> bool:
        """Whether `resolve` would return at once. Never waits; not to be asked while a stream is captured."""
        return self._arrays is not None or self.done.query()

    def resolve(self) -> list[Array]:
        """The values, in memory of their own. Waits for this copy and for nothing behind it.

        Raises:
            CaptureError: the current stream is being captured; what is waited for may then not be asked.
            Violation: STAGING_REUSED, at `cheap`: the memory was given to another copy meanwhile.
        """
        if self._arrays is None:
            self._refuse_capture(f"{self.name}: resolve")
            self._await_copy()
            self._abandoned.detach()  # from here on it is given back below, or was given to another, who keeps it
            if levels.cheap:
                invariants.staging_reused(
                    self._lending, self._block.lending, object=self, operation="resolve", step=self._step
                )
            sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in self._kinds]
            self._host_reads(self._block, sum(sizes))
            arrays, start = [], 0
            for (dtype, shape), nbytes in zip(self._kinds, sizes, strict=True):
                # Copied as bytes: in the block a number may stand where it is not aligned.
                arrays.append(self._block.bytes[start : start + nbytes].copy().view(dtype).reshape(shape))
                start += nbytes
            self._arrays = arrays
            self._staging.give_up(self._block)
        return self._arrays

    def _await_copy(self) -> None:
        if not self.done.query():
            self.done.wait()
