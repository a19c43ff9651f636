"""Requests with pages, a token table and a relay: what tests of forward plans and inputs have in common."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from batchstate import MirroredTensor, SlotPool, Slots
from batchstate.batch import Batch, Extras
from batchstate.columns import mirrored, slot_column
from batchstate.forward.inputs import ForwardInputs
from batchstate.forward.plan import ForwardPlan
from batchstate.future_map import FutureMap, relay_field
from batchstate.kv.pages import PagePool
from batchstate.runtime import Runtime
from batchstate.tables import Table

LONGEST = 24
PAGE_SIZE = 4


class Running(Batch):
    """The requests of a forward; the host may know bounds of their lengths alone."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64, contract="upper_bound")


@attrs.define(eq=False)
class World:
    """Requests with pages and a token table, and a relay with a token, two drafts and a length for each."""

    rt: Runtime
    slots: SlotPool
    pages: PagePool
    table: Table
    relay: FutureMap

    @classmethod
    def of(cls, rt: Runtime, size: int = 8, page_size: int = PAGE_SIZE) -> "World":
        """Capacity for `size` requests of `LONGEST` tokens."""
        slots = SlotPool(rt, size)
        table = slots.table("req_to_token", (LONGEST,), holds="location", host=True)
        pages = PagePool(rt, slots, size * LONGEST, page_size, max_tokens_per_request=LONGEST, req_to_token=table)
        relay = FutureMap(
            slots,
            {
                "last_token": relay_field(torch.int64, non_negative=True),
                "drafts": relay_field(torch.int64, (2,), non_negative=True),
                "lens": relay_field(torch.int64, non_negative=True),
                "narrow": relay_field(torch.int32),
                "pairs": relay_field(torch.int64, (2, 2)),
                "outputs": relay_field(torch.int64, read_by="host"),
            },
        )
        return cls(rt, slots, pages, table, relay)

    def take(self, seq_lens: Sequence[int]) -> Slots:
        """Requests with pages for their tokens, in no order, whose locations are in the table."""
        slots = self.slots.take(len(seq_lens))
        for start in range(0, max(seq_lens, default=0), 3):  # in turns, so that no request's pages are neighbours
            extension = self.pages.extend(slots, [min(length, start + 3) for length in seq_lens])
            extension.entry().launch()
        return slots

    def bounds(self, bounds: list[int], true: list[int]) -> MirroredTensor:
        """A column of which the host knows bounds, and the device the true lengths."""
        on_device = self.rt.upload([np.array(true)]).view(0)
        return MirroredTensor.from_pair(self.rt, bounds, on_device, contract="upper_bound")

    def planned(
        self, slots: Slots, lens: Any, *arguments: Any, rows: int = 0, **named: Any
    ) -> tuple[ForwardPlan, Extras]:
        """A plan for a batch, and what was uploaded for it; `rows` with padding."""
        batch = Running.build(self.rt, slots=slots, seq_lens=lens)
        batch = batch.pad(rows) if rows else batch
        plan = ForwardPlan.of(batch.slots, batch.seq_lens, *arguments, **named)
        return plan, batch.upload(extras=plan.extras)

    def resolve(self, plan: ForwardPlan, uploaded: Extras, **named: Any) -> ForwardInputs:
        """The inputs of a plan, ids from `last_token`."""
        return self.relay.resolve_forward_inputs(plan, uploaded, **{"ids": "last_token", **named})

    def locations(self, slot: int, positions: Sequence[int]) -> list[int]:
        """Where the KV of some positions of a request lies."""
        assert self.table.host_memory is not None
        return [int(self.table.host_memory[slot, position]) for position in positions]

    def publish(self, slots: Slots) -> None:
        """A last token and drafts for each request: 10 * slot and the two numbers behind."""
        last = 10 * slots.np
        self.relay.publish(slots, last_token=last, drafts=np.stack([last + 1, last + 2], axis=1))

    def states(self, slots: Slots, field: str) -> list[str]:
        """The states of a field as words."""
        return [str(state) for state in self.relay.states(slots, field)]


def values(rt: Runtime, tensor: torch.Tensor | None) -> list[Any]:
    """A device tensor as numbers."""
    assert tensor is not None
    numbers: list[Any] = rt.inspect(tensor).tolist()
    return numbers
