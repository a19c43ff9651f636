"""Worlds of tests: pools, pages, a relay and a host tier as engines build them, with a few requests in known states.

A test takes the smallest world that shows its fact, and adds what is its own. `Pools` and `Tier` are states without
a request; `Mixed`, `Shared`, `Relayed` and `Tiered` begin with requests. A subclass says what else it builds.

    world = Pools.of(rt, size=4, longest=24)
    slots = world.joined([5, 3])  # live, with pages for so many committed tokens
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import attrs
import numpy as np
import torch

from batchstate import FutureMap, MirroredTensor, PagePool, SlotPool, Slots
from batchstate.batch import Batch, Extras
from batchstate.columns import mirrored, slot_column
from batchstate.forward.inputs import ForwardInputs
from batchstate.forward.plan import ForwardPlan
from batchstate.future_map import RelayField, relay_field
from batchstate.kv.hisparse import HiSparse
from batchstate.kv.host_pool import HostKVPool, KVBuffer
from batchstate.kv.pages import PageLease
from batchstate.runtime import Runtime
from batchstate.tables import Table
from tests.doubles import Gate

LONGEST, PAGE_SIZE = 24, 4


@attrs.define(eq=False)
class Pools:
    """Slots, a table of their tokens' locations, and pages; no requests.

    Attributes:
        table: int32[slot, longest] -> location, on both sides.
    """

    rt: Runtime
    slots: SlotPool
    table: Table
    pages: PagePool

    @classmethod
    def of(
        cls,
        rt: Runtime,
        size: int = 8,
        *,
        pages: int | None = None,
        page_size: int = PAGE_SIZE,
        longest: int = LONGEST,
        slots: SlotPool | None = None,
    ) -> Self:
        """Capacity for `size` requests of `longest` tokens, or `pages`; `slots` where they are of a special kind."""
        slots, pages = slots or SlotPool(rt, size), pages or size * longest
        table = slots.table("req_to_token", (longest,), torch.int32, holds="location", host=True)
        pool = PagePool(rt, slots, pages, page_size, max_tokens_per_request=longest, req_to_token=table)
        return cls(rt, slots, table, pool)

    def joined(self, lengths: Sequence[int]) -> Slots:
        """Requests with pages for so many committed tokens, whose locations are in the table on both sides."""
        slots = self.slots.take(len(lengths))
        self.pages.extend(slots, lengths).entry().launch()
        self.pages.commit(slots, lengths)
        return slots

    def locations(self, slot: int, positions: Sequence[int]) -> list[int]:
        """Locations of positions of a request, by its pages."""
        pages, size = self.pages.page_table[slot], self.pages.page_size
        return [int(pages[position // size]) * size + position % size for position in positions]

    def stats(self) -> tuple[object, ...]:
        """All that a refused call must leave alone, as far as the pools count it."""
        live = self.slots.live_slots().tolist()
        return self.slots.stats, self.pages.stats, self.pages.page_table[live].tolist()


@attrs.define(eq=False)
class Mixed:
    """Two live requests, and one that has left behind a fence that is shut; the other slots are free."""

    pools: Pools
    live: Slots
    left: Slots
    gate: Gate

    @classmethod
    def of(cls, pools: Pools, lengths: Sequence[int] = (5, 3), left: int = 2) -> "Mixed":
        """Requests of these lengths."""
        live, leaving, gate = pools.joined(lengths), pools.joined([left]), Gate()
        pools.pages.release_requests(leaving, after=gate)
        return cls(pools, live, leaving, gate)


@attrs.define(eq=False)
class Shared:
    """A request of five tokens, another that begins on its first page, and a lease on that page."""

    pools: Pools
    first: Slots
    second: Slots
    lease: PageLease

    @classmethod
    def of(cls, pools: Pools) -> "Shared":
        """Pages hold at most five tokens."""
        first, second, shared = pools.joined([5]), pools.slots.take(1), pools.pages.page_size
        pools.pages.share(first, second, shared)
        return cls(pools, first, second, pools.pages.hold(first, shared))


@attrs.define(eq=False)
class Relayed:
    """A relay over the slots; `tokens` publishes 10 * slot in a field of each request."""

    pools: Pools
    relay: FutureMap

    @classmethod
    def of(cls, pools: Pools, fields: Mapping[str, RelayField]) -> "Relayed":
        """A relay with these fields."""
        return cls(pools, FutureMap(pools.slots, fields))

    def tokens(self, slots: Slots, field: str = "token") -> None:
        """Publishes."""
        self.relay.publish(slots, **{field: 10 * slots.np})


@attrs.define(eq=False)
class Tier:
    """A host tier without a request, with KV on the device."""

    pools: Pools
    host: HostKVPool
    kv: list[torch.Tensor]
    tier: HiSparse

    @classmethod
    def of(
        cls,
        pools: Pools,
        layers: Sequence[KVBuffer] = (KVBuffer("kv", (1,), torch.float32),),
        *,
        host_pages: int = 160,
        hot_tokens: int = 6,
    ) -> Self:
        """A host pool with these layers, of pages of one token."""
        host, rows = HostKVPool(pools.rt, host_pages, 1, layers=layers), pools.pages.location_capacity
        shapes = [((rows, *one.item_shape), one.dtype) for one in layers if not one.on_device]
        kv = [pools.rt.device_zeros(shape, dtype, name=f"kv {layer}") for layer, (shape, dtype) in enumerate(shapes)]
        return cls(pools, host, kv, HiSparse(pools.pages, host, kv, hot_tokens=hot_tokens))


@attrs.define(eq=False)
class Tiered(Tier):
    """A request of the tier that is reserved, one that decodes, and one outside of it."""

    reserved: Slots = attrs.field(init=False)
    ready: Slots = attrs.field(init=False)
    outside: Slots = attrs.field(init=False)

    def join(self, length: int = 3, most: int = 9, outside: int = 3) -> Self:
        """The three requests come."""
        self.outside, self.reserved, self.ready = self.pools.joined([outside]), *map(self.pools.slots.take, (1, 1))
        for slots in (self.reserved, self.ready):
            self.tier.reserve(slots, length, most)
        self.tier.admit_direct(self.ready)
        return self


class Running(Batch):
    """The requests of a forward; the host may know bounds of their lengths alone."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64, contract="upper_bound")


@attrs.define(eq=False)
class ForwardWorld(Pools):
    """A relay with a token, two drafts and a length for each request."""

    relay: FutureMap = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.relay = FutureMap(
            self.slots,
            {
                "last_token": relay_field(torch.int64, non_negative=True),
                "drafts": relay_field(torch.int64, (2,), non_negative=True),
                "lens": relay_field(torch.int64, non_negative=True),
                "narrow": relay_field(torch.int32),
                "pairs": relay_field(torch.int64, (2, 2)),
                "outputs": relay_field(torch.int64, read_by="host"),
            },
        )

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
