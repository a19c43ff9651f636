"""The memory of the overlap machine: each piece made on another stream than those that use it."""

from typing import final

import attrs
import torch

from batchstate.future_map import FutureMap, relay_field
from batchstate.pages import PagePool
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime, Stream
from batchstate.testing.machines.overlap.requests import MARKS, MOST_TOKENS


@final
@attrs.frozen(eq=False)
class Streams:
    """The streams of the engine; the relay has one more, to the host.

    Attributes:
        schedule: plans are uploaded, table rows written, slots begun.
        forward: forwards.
        arrivals: what comes from outside: prebuilt requests, nudges.
        audit: looks at what the others hold, and tells the host.
        origin: what was current before. The relay is made on it, and nothing else ever happens there.
    """

    schedule: Stream
    forward: Stream
    arrivals: Stream
    audit: Stream
    origin: Stream

    @property
    def all(self) -> tuple[Stream, ...]:
        """All of them."""
        return self.schedule, self.forward, self.arrivals, self.audit, self.origin


@final
class Memory:
    """Pools, tables, KV memory and relay of one example.

    Whoever first uses a piece on another stream than the one that made it zero has to wait for that one.

    Args:
        runtime: the device.
        size: slots.
        num_pages: pages.
        page_size: tokens a page.

    Attributes:
        runtime: the device.
        streams: of the engine.
        slots, pages: who owns what.
        tokens: [slot, position] -> token; the library orders who reads and writes it.
        marks: [slot, MARKS], like that, but whole rows are rewritten and cleared.
        states: [slot], the engine's own. Nothing orders a slot's next owner behind its last but the fence of the free.
        relay: tokens and logs of forwards, and nudges for them.
    """

    def __init__(self, runtime: Runtime, size: int, num_pages: int, page_size: int) -> None:
        self.runtime = runtime
        self.slots = SlotPool(runtime, size)
        fields = {
            "token": relay_field(torch.int64, read_by="both", non_negative=True),
            "log": relay_field(torch.int64, (2,), read_by="host"),
            "nudge": relay_field(torch.int64),
        }
        self.relay = FutureMap(self.slots, fields)
        schedule, forward, arrivals, audit = (
            runtime.stream(name) for name in ("schedule", "forward", "arrivals", "audit")
        )
        self.streams = Streams(schedule, forward, arrivals, audit, origin=runtime.current_stream)
        with runtime.use(self.streams.schedule):
            self.tokens = self.slots.table("req_to_token", (MOST_TOKENS,), holds="token", host=True)
            self.marks = self.slots.table("marks", (MARKS,), torch.int64, host=True)
        with runtime.use(self.streams.arrivals):
            self.states = self.slots.table("states", (), torch.int64)
        self.pages = PagePool(
            runtime,
            self.slots,
            num_pages,
            page_size,
            max_tokens_per_request=MOST_TOKENS,
            token_table=self.tokens,
        )
        with runtime.use(self.streams.forward):
            self._kv = runtime.device_zeros((self.pages.token_capacity, 2), torch.int64)
            self._zeroed = runtime.record()
        self._handed: set[object] = set()

    @property
    def kv(self) -> torch.Tensor:
        """int64[token, 2], behind its being made."""
        return self.runtime.acquire(self._kv, self.streams.forward, self._zeroed, handed=self._handed)
