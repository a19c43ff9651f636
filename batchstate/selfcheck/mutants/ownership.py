"""One index with two owners, or freed by two."""

from batchstate._allocator import FenceQueue, FreeList, Ints
from batchstate.runtime import Fence
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code


@mutant(Code.SLOT_SHARED, machine="slot_pool", origin="FreeToken#204, sglang #35501")
def free_list_holds_index_twice(patch: Patch) -> None:
    """A free puts one index on the free list twice and forgets another: every sum stays balanced."""

    def push(self: FreeList, indices: Ints) -> None:
        twice = indices.copy()
        twice[-1:] = twice[:1]
        original(self, twice)

    original = patch(FreeList, "push", push)


@mutant(Code.SLOT_DOUBLE_FREE, Code.SLOT_SHARED, machine="slot_pool", origin="sglang #6888, sglang #9068")
def deferred_free_done_twice(patch: Patch) -> None:
    """What waited for a fence is freed when the fence completes, and once more at the next look."""

    def completed(self: FenceQueue) -> list[tuple[Fence, Ints]]:
        before = list(self._groups)
        done: list[tuple[Fence, Ints]] = original(self)
        self._groups = before
        return done

    original = patch(FenceQueue, "completed", completed)
