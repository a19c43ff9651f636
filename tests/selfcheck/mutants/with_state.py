"""Mutants that a diff cannot say: they need state, or there is one for each operation of a list."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np

from batchstate import ForwardInputs, ForwardPlan, FutureMap, HostLocations, Locations
from batchstate._arrays import Ints
from batchstate._core import Block
from batchstate._rows import RowState
from batchstate._upload import BatchDevice, Extras
from batchstate.kv import host_pool
from batchstate.kv.hisparse import HiSparse, LastLocation
from batchstate.runtime import Fence, Runtime
from batchstate.tables import TableWrite
from batchstate.transport.engines.base import Delivery
from batchstate.transport.receiver import Lease, Receiver
from batchstate.transport.wire import Tag
from tests.selfcheck.machines import batch as batches
from tests.selfcheck.machines import mirrored_tensor as values
from tests.selfcheck.machines import steps
from tests.selfcheck.mutants.diffs import Change, Diff, mutant
from tests.selfcheck.mutants.registry import Patch


def _overrules_a_write(machine: str, operation: str, where: str, condition: str) -> None:
    """Registers the mutant in which one operation compares nothing."""
    change = Change(where, ((condition, f"{condition} and operation != {operation!r}"),))

    def switch(patch: Patch) -> None:
        Diff((change,))(patch)

    name = {"+ n": "add", "- n": "subtract"}.get(operation, operation)
    kind = {"steps": "step"}.get(machine, machine)
    switch.__name__ = f"{name}_of_a_{kind}_overrules_a_write"
    switch.__doc__ = f"A kernel wrote one side of a {kind}, and `{operation}` replaces it by the other without a word."
    mutant(f"MIRROR_FOREIGN_WRITE MIRROR_EQUAL MIRROR_BOUND | {machine} | sglang #8056, vllm #50432", "drift")(switch)


for _operation in sorted(dict(batches.OPERATIONS).keys() - {"update_device", "tighten"}):  # these replace nothing there
    _overrules_a_write("batch", _operation, "batch:Batch._check_unwritten", "if levels.full")
for _operation in dict(steps.OPERATIONS):
    _overrules_a_write("steps", _operation, "batch:Batch._check_unwritten", "if levels.full")
for _operation in dict(values.OPERATIONS):
    _overrules_a_write("mirrored_tensor", _operation, "mirror:MirroredTensor.check", "if levels.full")


@mutant("MIRROR_EQUAL | batch | sglang #15132, sglang #15227", "drift")
def upload_takes_older_stack(patch: Patch) -> None:
    """The upload of a batch sends the columns of the batch before it, if that had as many rows."""
    before: WeakKeyDictionary[Runtime, Block] = WeakKeyDictionary()

    def upload(self: BatchDevice, writes: Sequence[TableWrite], extras: Mapping[str, object]) -> Extras:
        mine = self.state.block
        if not self.uploaded:
            older = before.get(self._runtime)
            if older is not None and older.columns is mine.columns and older.n == mine.n:
                self.state.block = older
            before[self._runtime] = mine
        try:
            uploaded: Extras = original(self, writes, extras)
        finally:
            self.state.block = mine
        return uploaded

    original = patch(BatchDevice, "upload", upload)


@mutant("SLOT_STALE_HANDLE | engine | sglang #18647, sglang #26941", "reuse")
def generations_not_filtered(patch: Patch) -> None:
    """`filter` moves the slots and forgets their generations: the rows hold handles of others."""

    def taken(self: RowState, rows: Ints) -> RowState:
        result: RowState = original(self, rows)
        result.generations[:] = self.generations[: rows.size]
        return result

    original = patch(RowState, "taken", taken)


@mutant("FUTURE_CONSUMED DERIVED_STALE | future_map | sglang #25945 | level=cheap", "relay")
def prompt_installed_again(patch: Patch) -> None:
    """A snapshot that isolates a step puts back inputs that were used: the prompt before runs a second time."""
    before: WeakKeyDictionary[FutureMap, tuple[ForwardPlan, Extras]] = WeakKeyDictionary()

    def resolve(self: FutureMap, plan: ForwardPlan, uploaded: Extras, **named: Any) -> ForwardInputs:
        used = plan, uploaded
        if isinstance(plan, ForwardPlan):
            last, crossed = before.get(self, used)
            before[self] = used
            fits = np.array_equal(last.slots.np, plan.slots.np) and set(last.extras) <= set(plan.extras)
            here = fits and np.array_equal(last.slots.generations, plan.slots.generations)
            if here and not len(last.relay_rows):
                used = last, crossed
        inputs: ForwardInputs = original(self, *used, **named)
        return inputs

    original = patch(FutureMap, "resolve_forward_inputs", resolve)


@mutant("MIRROR_EQUAL | host_tier | sglang #30435, sglang-jax #1504", "host_tier")
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


@mutant("TRANSFER_LATE_WRITE | host_tier | sglang #35360, sglang #38961, vllm #32255", "host_tier")
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


@mutant("MIRROR_EQUAL TRANSFER_LATE_WRITE | transfers | sglang #38961, sglang #27372", "transfers")
def tags_name_the_request_alone(patch: Patch) -> None:
    """A late tag of one attempt counts for the next one of the same request, whose memory is another."""
    later: WeakKeyDictionary[Receiver, dict[int, int]] = WeakKeyDictionary()

    def retry(self: Receiver, lease: Lease, writers: Any = None) -> Lease:
        new: Lease = retried(self, lease, writers)
        later.setdefault(self, {})[lease.serial] = new.serial
        return new

    def arrived(self: Receiver, delivery: Delivery) -> None:
        tag = Tag.unpacked(delivery.tag)
        again = later.get(self, {})
        while tag is not None and tag.serial in again:
            tag = attrs.evolve(tag, serial=again[tag.serial], attempt=tag.attempt + 1)
        arrive(self, delivery if tag is None else Delivery(tag.packed(), delivery.instance))

    retried = patch(Receiver, "retry", retry)
    arrive = patch(Receiver, "_arrive", arrived)
