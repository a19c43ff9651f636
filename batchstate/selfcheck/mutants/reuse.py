"""A slot changes hands while somebody still uses it, or while an old handle still opens it."""

from batchstate._allocator import Allocator, FenceQueue, Generations, Ints
from batchstate._rows import GENERATION_SUFFIX, HostRows
from batchstate.runtime import Fence
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code


@mutant(Code.SLOT_IN_FLIGHT, machine="slot_pool", origin="sglang #18744, sglang #18746, sglang #18803")
def free_ignores_fence(patch: Patch) -> None:
    """A finished request's row goes to the free list while the launched forward still reads it."""

    def defer(self: Allocator, indices: Ints, fence: Fence) -> None:
        self._push_free(indices)

    patch(Allocator, "_defer", defer)


@mutant(Code.SLOT_IN_FLIGHT, machine="slot_pool", origin="sglang #29352, sglang #29353")
def fence_queue_pops_all(patch: Patch) -> None:
    """Everything that waits is freed when anything is complete: a fence that is too early for most of it."""
    patch(FenceQueue, "_complete", lambda self, fence: True)


@mutant(Code.SLOT_IN_FLIGHT, machine="slot_pool", origin="sglang #26376, sglang #26380")
def pending_handed_out(patch: Patch) -> None:
    """Admission counts pending rows as free and hands them out, and the next request overwrites them in flight."""

    def take(self: Allocator, n: int, operation: str, *, reserved: bool = False) -> Ints:
        waiting = self._waiting.indices()
        if n and not reserved and waiting.size >= n:
            self._ordinary.push(waiting[:n])
        indices: Ints = original(self, n, operation, reserved=reserved)
        return indices

    original = patch(Allocator, "take", take)


@mutant(Code.SLOT_STALE_HANDLE, machine="slot_pool", origin="sglang #34876")
def generation_not_raised(patch: Patch) -> None:
    """A row that is reused keeps its generation, so that the handle of the request before opens it."""

    def raise_generations(self: Generations, rows: Ints, before: Ints) -> Ints:
        generations: Ints = original(self, rows, before)
        reused = before > 0
        self._generations[rows[reused]] = before[reused]
        generations[reused] = before[reused]
        return generations

    original = patch(Generations, "_raise_generations", raise_generations)


@mutant(Code.SLOT_STALE_HANDLE, machine="engine", origin="sglang #18647, sglang #26941")
def generations_not_filtered(patch: Patch) -> None:
    """`filter` moves the slots and forgets their generations: the rows hold handles of others."""

    def taken(self: HostRows, rows: Ints) -> HostRows:
        result: HostRows = original(self, rows)
        for name in self.layout.places:
            if name.endswith(GENERATION_SUFFIX):
                result.column(name)[...] = self.column(name)[: rows.size]
        return result

    original = patch(HostRows, "taken", taken)
