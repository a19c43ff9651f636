"""KV in host memory is lost, freed or read where it is not: mutants that keep state of their own."""

from weakref import WeakKeyDictionary

import attrs

from batchstate.indices import HostLocations, Locations
from batchstate.kv import host_pool
from batchstate.kv.hisparse import HiSparse, LastLocation
from batchstate.runtime import Fence
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code


@mutant(Code.MIRROR_EQUAL, machine="host_tier", origin="sglang #30435, sglang-jax #1504")
def backup_a_step_late(patch: Patch) -> None:
    """Tokens are copied out a step later than planned, when their rows of the ring may be those of newer ones."""
    planned: WeakKeyDictionary[HiSparse, tuple[Locations, HostLocations]] = WeakKeyDictionary()

    def back_up(self: HiSparse, plan: LastLocation, uploaded: object = None) -> None:
        if not plan.launched and plan is self._open:
            mine = plan.backup_from, plan.backup_to
            nothing = plan.backup_from.take([]), plan.backup_to.take([])
            plan.backup_from, plan.backup_to = planned.get(self, nothing)
            planned[self] = mine
        original(self, plan)

    original = patch(HiSparse, "back_up", back_up)


@mutant(Code.TRANSFER_LATE_WRITE, machine="host_tier", origin="sglang #35360, sglang #38961, vllm #32255")
def freed_by_time_out(patch: Patch) -> None:
    """Host locations in quarantine are freed after a while, whether or not their writer has ended."""

    def joined(after: Fence | None, writer: Fence | None) -> Fence | None:
        fence: Fence | None = original(after, None if writer is None else _Impatient(writer))
        return fence

    original = patch(host_pool, "joined", joined)


@attrs.define(eq=False)
class _Impatient:
    """A fence that is taken for complete when it was asked a few times."""

    fence: Fence
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 3 or self.fence.query()

    def wait(self) -> None:
        self.fence.wait()
