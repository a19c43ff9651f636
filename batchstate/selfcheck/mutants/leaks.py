"""Something that is taken never comes back, or is not counted while it is away."""

from batchstate._allocator import Allocator, FenceQueue, Ints
from batchstate.runtime import Fence
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code


@mutant(Code.SLOT_CONSERVATION, machine="slot_pool", origin="sglang #12224, sglang #26941")
def last_row_not_freed(patch: Patch) -> None:
    """A free gives back all but the last row, by a length that is off by one."""

    def push_free(self: Allocator, indices: Ints) -> None:
        original(self, indices[:-1])

    original = patch(Allocator, "_push_free", push_free)


@mutant(Code.SLOT_CONSERVATION, machine="slot_pool", origin="sglang #21652, sglang #35360")
def reserve_never_returned(patch: Patch) -> None:
    """A slot of the reserve, taken for a request whose KV was to arrive, has no way back."""
    patch(Allocator, "_push_reserved", lambda self, indices: None)


@mutant(Code.SLOT_CONSERVATION, Code.SLOT_OUT_OF_RANGE, machine="slot_pool", origin="sglang #22453, sglang #32184")
def reserve_becomes_ordinary(patch: Patch) -> None:
    """Slots of the reserve come back to the ordinary list, and admission hands out more than it has budget for."""

    def push_reserved(self: Allocator, indices: Ints) -> None:
        if indices.size:
            self._push(self._ordinary, indices)

    patch(Allocator, "_push_reserved", push_reserved)


@mutant(Code.SLOT_CONSERVATION, machine="slot_pool", origin="vllm #49675, TensorRT-LLM #16278")
def pending_not_counted(patch: Patch) -> None:
    """A deferred free leaves one list and enters no count: the scheduler cannot see that waiting would help."""

    def defer(self: FenceQueue, fence: Fence, indices: Ints) -> None:
        before = self.count
        original(self, fence, indices)
        self.count = before

    original = patch(FenceQueue, "defer", defer)
