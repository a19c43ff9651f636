"""Pinned host memory is filled again, read or given to others while a copy still uses it."""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from batchstate.indices import Slots
from batchstate.kv._tier import TierState
from batchstate.kv.hisparse import HiSparse, LastLocation
from batchstate.levels import Level
from batchstate.runtime import Fence, Staging
from batchstate.runtime.memory import Download, StagingBlock
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code

race = partial(mutant, Code.RACE, machine="overlap", level=Level.OFF, tool="race")


@race(origin="vllm #24527, vllm #34866, TRT-LLM#15546, mini-sglang #103", seeded="b")
def staging_refilled_in_flight(patch: Patch) -> None:
    """A staging block is free as soon as its copy is enqueued, and the host fills it again before the copy has run."""

    def release(self: Staging, block: StagingBlock, fence: Fence, step: int, stream: object = None) -> None:
        self.give_up(block)

    patch(Staging, "release", release)


@race(origin="vllm #47644, vllm #48085, vllm-ascend #16428")
def staging_ring_turns_by_calls(patch: Patch) -> None:
    """Staging is a ring that turns with each call, however many calls a step makes and wherever the device is."""
    rings: WeakKeyDictionary[Staging, list[StagingBlock]] = WeakKeyDictionary()

    def release(self: Staging, block: StagingBlock, fence: Fence, step: int, stream: object = None) -> None:
        ring = rings.setdefault(self, [])
        ring.append(block)
        if len(ring) > self.depth:
            self.give_up(ring.pop(0))

    patch(Staging, "release", release)


@race(origin="TRT-LLM#18485, TRT-LLM#16088")
def staging_ring_turns_by_steps(patch: Patch) -> None:
    """A block is free when the next step begins: one buffer for each step, and two steps in flight."""
    kept: WeakKeyDictionary[Staging, list[tuple[int, StagingBlock]]] = WeakKeyDictionary()

    def release(self: Staging, block: StagingBlock, fence: Fence, step: int, stream: object = None) -> None:
        blocks = kept.setdefault(self, [])
        for older in [one for one in blocks if one[0] < step]:
            blocks.remove(older)
            self.give_up(older[1])
        blocks.append((step, block))

    patch(Staging, "release", release)


@race(origin="lightseekorg/tokenspeed#376, vllm #40756")
def one_staging_buffer(patch: Patch) -> None:
    """There is one buffer for each size, and every upload is staged in it."""
    only: WeakKeyDictionary[Staging, dict[int, StagingBlock]] = WeakKeyDictionary()

    def take(self: Staging, nbytes: int) -> StagingBlock:
        block: StagingBlock = original(self, nbytes)
        first = only.setdefault(self, {}).setdefault(len(block.bytes), block)
        first.lending = block.lending
        return first

    original = patch(Staging, "take", take)


@race(origin="vllm #36013, vllm #51571", seeded="d")
def host_reads_before_the_copy(patch: Patch) -> None:
    """The host reads what a copy from the device brings without waiting for the copy."""
    patch(Download, "_await_copy", lambda self: None)


@race(origin="vllm #51571, pytorch #68749")
def landing_given_back_at_once(patch: Patch) -> None:
    """The memory that a copy lands in is free for the next copy as soon as it is enqueued."""

    def init(self: Download, staging: Any, block: Any, *rest: Any) -> None:
        original(self, staging, block, *rest)
        staging.give_up(block)

    original = patch(Download, "__init__", init)


tier = partial(mutant, Code.RACE, machine="host_tier", level=Level.OFF, tool="race")


@tier(origin="sglang #26425, sglang #31687")
def backup_beside_the_forward(patch: Patch) -> None:
    """Backups run on a stream of their own, which does not wait for the forward that wrote the token."""

    def back_up(self: HiSparse, location: LastLocation, uploaded: object = None) -> None:
        with self.runtime.use(self._stream):
            original(self, location)

    original = patch(HiSparse, "back_up", back_up)


@tier(origin="sglang #21652, sglang #24527")
def staged_pages_freed_under_the_copy(patch: Patch) -> None:
    """A staged request that is aborted gives its device pages back while the copy to the host still reads them."""

    def release(
        self: HiSparse, slots: Slots, allowed: tuple[TierState, ...], after: Fence | None, operation: str
    ) -> None:
        rows = self.slots.rows_of(slots, operation, unique=True)
        self._requests.check_state(rows, allowed, operation)
        with self._requests.allow_release():
            self.pages.release_requests(slots, after=after)

    patch(HiSparse, "_release", release)
