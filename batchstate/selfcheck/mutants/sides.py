"""A mutant of `sides.mutants` that changes two functions of one line."""

from batchstate._allocator import FreeList, Ints, PendingQueue
from batchstate.runtime import Fence
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code


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
