"""Worlds of tests: pools, pages, a relay and a host tier as engines build them, with a few requests in known states.

A test takes the smallest world that shows its fact, and adds what is its own. `Pools` is the state without a request;
`Mixed`, `Shared`, `Relayed` and `Tiered` begin with requests. A subclass says what else it builds.

    world = Pools.of(rt, size=4, longest=24)
    slots = world.joined([5, 3])  # live, with pages for so many committed tokens
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import attrs
import torch

from batchstate import FutureMap, PagePool, SlotPool, Slots
from batchstate.future_map import RelayField
from batchstate.kv.hisparse import HiSparse
from batchstate.kv.host_pool import HostKVPool
from batchstate.kv.pages import PageLease
from batchstate.runtime import Runtime
from batchstate.tables import Table
from tests.doubles import Gate


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
        pages: int = 64,
        page_size: int = 4,
        longest: int = 24,
        slots: SlotPool | None = None,
    ) -> Self:
        """Capacity for `size` requests of `longest` tokens; `slots` where they are of a special kind."""
        slots = slots or SlotPool(rt, size)
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
class Tiered:
    """A host tier: a request that is reserved, one that decodes, and one outside of it, with KV on the device."""

    pools: Pools
    host: HostKVPool
    kv: list[torch.Tensor]
    tier: HiSparse
    reserved: Slots
    ready: Slots
    outside: Slots

    @classmethod
    def of(
        cls, pools: Pools, *, host_pages: int = 160, hot_tokens: int = 6, length: int = 3, most: int = 9, **layers: Any
    ) -> "Tiered":
        """One layer of float32[1], or the `layers`, `item_shape` and `dtype` that are named."""
        named = {"layers": 1, "item_shape": (1,), "dtype": torch.float32, **layers}
        host = HostKVPool(pools.rt, host_pages, 1, **named)
        shape = (pools.pages.location_capacity, *named["item_shape"])
        kv = [pools.rt.device_zeros(shape, named["dtype"]) for _ in range(named["layers"])]
        tier = HiSparse(pools.pages, host, kv, hot_tokens=hot_tokens)
        reserved, ready = pools.slots.take(1), pools.slots.take(1)
        for slots in (reserved, ready):
            tier.reserve(slots, length, most)
        tier.admit_direct(ready)
        return cls(pools, host, kv, tier, reserved, ready, pools.joined([length]))
