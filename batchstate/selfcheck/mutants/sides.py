"""A side that is written in place, that shares memory with the other, or that is read while it is old."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import batchstate.mirror
from batchstate._allocator import FreeList, Ints, PendingQueue
from batchstate._arrays import Amounts, Array
from batchstate.mirror import Made, MirroredTensor, StaleWindow
from batchstate.runtime import Fence, Runtime
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code


@mutant(Code.MIRROR_FOREIGN_WRITE, machine="mirrored_tensor", origin="sglang #8056, vllm #50432")
def advance_device_in_place(patch: Patch) -> None:
    """`+ n` adds into the memory of the old value, which a launched forward still reads."""

    def add(source: torch.Tensor, amount: torch.Tensor | int) -> torch.Tensor:
        return source.copy_(original(source, amount))

    original = patch(batchstate.mirror, "add", add)


@mutant(Code.MIRROR_FOREIGN_WRITE, machine="mirrored_tensor", origin="sglang #8056")
def advance_host_in_place(patch: Patch) -> None:
    """`+ n` adds into the host list that the step before was planned with, and that something still reads."""

    def shifted(values: Array, amount: Amounts, what: str) -> Array:
        values[...] = original(values, amount, what)
        return values

    original = patch(batchstate.mirror, "shifted", shifted)


@mutant(Code.MIRROR_ALIASED, machine="mirrored_tensor", origin="sglang #34076, vllm #43894", only_on="cpu")
def device_side_is_host_memory(patch: Patch) -> None:
    """The upload returns the host's own memory, as `.to("cpu")` and `from_numpy` do: the sides can never disagree."""

    def uploaded(runtime: Runtime, host: Array) -> Made:
        return Made(torch.from_numpy(host), runtime.current_stream, None, set())

    patch(batchstate.mirror, "_uploaded", uploaded)


@mutant(Code.MIRROR_STALE_READ, machine="mirrored_tensor", origin="sglang admit_request_direct flag, sglang #25944")
def stale_flag_never_cleared(patch: Patch) -> None:
    """The flag that says a side is old is set in one place and cleared in another that nobody reaches."""

    @contextmanager
    def stale(self: MirroredTensor, side: str, *, reason: str) -> Iterator[None]:
        self._windows = (*self._windows, StaleWindow(side, reason))
        yield

    patch(MirroredTensor, "stale", stale)


@mutant(Code.MIRROR_STALE_READ, machine="mirrored_tensor", origin="sglang #25945, sglang #25944")
def filter_plans_with_old_side(patch: Patch) -> None:
    """`filter` looks at lengths on the host while a launched verification is about to change them."""

    def taken(self: MirroredTensor, rows: Any, operation: str) -> MirroredTensor:
        if self._host is not None:
            _ = self.np
        result: MirroredTensor = original(self, rows, operation)
        return result

    original = patch(MirroredTensor, "_taken", taken)


@mutant(
    Code.MIRROR_FOREIGN_WRITE,
    Code.SLOT_STALE_HANDLE,
    Code.SLOT_DOUBLE_FREE,
    machine="slot_pool",
    origin="sglang free_group view",
)
def deferred_free_keeps_view(patch: Patch) -> None:
    """The free list hands out views of itself, and a deferred free keeps one: it frees what was written there since."""

    def defer(self: PendingQueue, fence: Fence, indices: Ints) -> None:
        original(self, fence, indices)
        self._groups[-1][1][-1] = indices

    patch(FreeList, "top", lambda self, n: self._stack[self.capacity - self.count :][:n])
    original = patch(PendingQueue, "defer", defer)
