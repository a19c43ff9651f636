"""Requests of a host tier for its machine: forwards that write and read KV, and the judgement of every byte."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from batchstate.errors import PoolExhaustedError
from batchstate.hisparse import HiSparse, LastLocation
from batchstate.host_tokens import HostTokenPool
from batchstate.indices import Slots
from batchstate.pages import PagePool
from batchstate.pools import SlotPool
from batchstate.runtime import CpuRuntime, Fence, Runtime
from batchstate.testing.late import LateRuntime
from batchstate.testing.machine import DisagreementError, Machine, agree, agree_on
from batchstate.testing.machines.host_tier_model import ITEM, LAYERS, Ints, PrefillWorker, Reading, Stamps, Tiered
from batchstate.tiering.books import TierState

MOST_TOKENS = 14
"""Of one request on the device."""

IN_FLIGHT = 2


class TierRequests(Machine):
    """Requests outside of the tier and in it. Subclasses let them come, go and be moved."""

    def open_runtime(self) -> Runtime:
        """A plain CPU runtime has fences that are always complete: one that lags takes its place."""
        opened = super().open_runtime()
        return LateRuntime(steps_in_flight=opened.steps_in_flight) if type(opened) is CpuRuntime else opened

    @initialize(
        size=st.integers(2, 4),
        page_size=st.integers(1, 3),
        host_page_size=st.integers(1, 3),
        hot_tokens=st.integers(2, 5),
        pages=st.integers(8, 16),
        host_pages=st.integers(8, 40),
        apart=st.booleans(),
        fragmented=st.booleans(),
    )
    def begin(
        self,
        size: int,
        page_size: int,
        host_page_size: int,
        hot_tokens: int,
        pages: int,
        host_pages: int,
        apart: bool,
        fragmented: bool,
    ) -> None:
        """Opens pools that are too small for all requests.

        `apart`: forwards have a stream of their own. `fragmented`: somebody else has host pages here and there.
        """
        self.open()
        self.apart = apart
        self.slots = SlotPool(self.rt, size)
        self.pages = PagePool(self.rt, self.slots, pages, page_size, max_tokens_per_request=MOST_TOKENS)
        self.host = HostTokenPool(
            self.rt, host_pages, host_page_size, layers=LAYERS, item_shape=(ITEM,), dtype=torch.int64
        )
        with self.on(apart):
            shape = (self.pages.token_capacity, ITEM)
            self.kv = [self.rt.device_zeros(shape, torch.int64, name=f"kv {layer}") for layer in range(LAYERS)]
        self.tier = HiSparse(self.pages, self.host, self.kv, hot_tokens=hot_tokens)
        strangers = self.host.take([1] * host_pages, [0] * host_pages) if fragmented else []
        self.strangers = strangers[::4]
        self.host.free([one for at, one in enumerate(strangers) if at % 4])
        self.requests: list[Tiered] = []
        self.gone: list[Tiered] = []
        self.ghosts: list[PrefillWorker] = []
        self.haunted: set[int] = set()
        self.readings: deque[Reading] = deque()
        self.stamps = Stamps()
        self.last: Fence | None = None
        self.ends: deque[Fence] = deque()
        self.copies: deque[tuple[int, Fence]] = deque()

    # Judging

    def judge(self) -> None:
        """Every law; then who has which host tokens; then every byte of every request, where it should be."""
        self.haunt()
        with self.on(self.apart):
            self.tier.verify()
            self.slots.verify()
            self._judge_owners()
            for request in self.requests:
                self._judge_request(request)
        self.reached("two steps in flight", sum(not one.download.ready() for one in self.readings) >= IN_FLIGHT)
        outside = {request.state is TierState.OUTSIDE for request in self.requests}
        self.reached("requests outside beside some inside", len(outside) == 2)

    def _judge_owners(self) -> None:
        stats = self.host.stats
        agree(stats.size, stats.free + stats.pending + stats.live, "free + pending + live host tokens")
        everything: list[int] = []
        for request in self.requests:
            if request.runs is not None:
                tokens = request.runs.tokens().tolist()
                everything += tokens
                agree([request.number] * len(tokens), self.host.owner_of(tokens).tolist(), f"owner of {request!r}")
                self.reached("a request in several runs", request.runs.starts.size > 1)
        agree(len(set(everything)), len(everything), "host tokens that two requests have")
        agree(len(everything) + sum(len(one) for one in self.strangers), stats.live, "live host tokens")
        for ghost in self.ghosts:
            agree(set(), set(everything) & set(ghost.runs.tokens().tolist()), "tokens that a stranger may write")
        agree([request.number for request in self._by_slot()], self.slots.live_slots().tolist(), "live slots")

    def _by_slot(self) -> list[Tiered]:
        return sorted(self.requests, key=lambda request: request.number)

    def _judge_request(self, request: Tiered) -> None:
        agree([request.state], self.tier.states(request.slot), f"state of {request!r}")
        if request.state is TierState.DIRECT:
            tokens, expected = request.host_tokens(request.delivered), request.content[:, : request.delivered]
            self._compare(self.host.buffers, tokens, expected, f"KV that has arrived for {request!r}")
            return
        hot = min(request.length, self.tier.hot_tokens) if request.state is TierState.READY else request.length
        agree(hot, int(self.pages.committed(request.slot)[0]), f"tokens on the device of {request!r}")
        self._compare(
            self.host.buffers,
            request.host_tokens(request.hot_from),
            request.content[:, : request.hot_from],
            f"KV in host memory of {request!r}",
        )
        self._compare(
            self.kv, self._device_tokens(request), request.content[:, request.hot_from :], f"hot KV of {request!r}"
        )

    def _compare(self, buffers: Sequence[torch.Tensor], tokens: Ints, expected: Ints, what: str) -> None:
        for buffer, layer in zip(buffers, expected, strict=True):
            agree_on(np.ascontiguousarray(layer), self.rt.inspect(buffer)[tokens], what)

    def _device_tokens(self, request: Tiered) -> Ints:
        row = self.pages.page_table[request.number]
        return request.device_tokens(row, self.pages.page_size, self.tier.hot_tokens)

    def snapshot(self) -> object:
        """Who has what, and how far each request is. What is free or pending changes by itself."""
        books = self.tier._books
        return (
            self.slots.live_slots().tolist(),
            self.pages.page_table.tolist(),
            self.pages.committed_lengths.tolist(),
            self.host.live_pages,
            sorted((slot, runs.generation) for slot, runs in books.runs.items()),
            [row.tolist() for row in (books.states, books.length, books.backed, books.hot_from, books.room)],
        )

    # Helpers of rules

    def handles(self, requests: Sequence[Tiered]) -> Slots:
        """The handles of requests."""
        return Slots.cat([self.slots.take(0), *(request.slot for request in requests)])

    def of(self, *states: TierState) -> list[Tiered]:
        """The requests in some states."""
        return [request for request in self.requests if request.state in states]

    def some(self, data: st.DataObject, among: list[Tiered], least: int = 1) -> list[Tiered]:
        """Some of them, in any order."""
        return data.draw(st.lists(st.sampled_from(among), min_size=least, unique_by=id), label="requests")

    def haunt(self) -> None:
        """Writers whose requests have left write on, in what is free as soon as it can be."""
        self.host.reap()
        for ghost in self.ghosts:
            ghost.scribble()

    def take(self, n: int) -> list[Tiered]:
        """Up to `n` new requests, without anything."""
        taken = self.slots.take(min(n, self.slots.stats.free))
        empty = np.empty((LAYERS, 0, ITEM), dtype=np.int64)
        made = [Tiered(taken.take([row]), empty) for row in range(len(taken))]
        self.requests += made
        return made

    def tried(self, call: Callable[[], object], what: str) -> bool:
        """Whether a call got what it needs of a pool; if not, there was too little, and nothing has changed."""
        self.haunt()
        before = self.snapshot()
        try:
            call()
        except PoolExhaustedError as error:
            if error.requested <= error.free:
                raise DisagreementError(f"{what} refused although enough are free: {error}") from error
            agree(before, self.snapshot(), "a refused call changed something")
            self.reached(f"{what} exhausted")
            return False
        return True

    def leave(self, requests: Sequence[Tiered]) -> None:
        """These have left: what their writers may still write is nobody's, and they go on."""
        for request in requests:
            self.requests.remove(request)
            self.gone.append(request)
            if request.writer is not None and not request.writer.ended.query():
                request.spoiled = True
                self.ghosts.append(request.writer)
                self.haunted.update(request.writer.runs.tokens().tolist())
                if request.state is not TierState.READY:
                    self.reached("direct abort before the writer has ended")
                request.writer.scribble()
                self.reached("a late write into memory of nobody")

    def resolve(self, most: int) -> None:
        """Waits for the oldest forwards, until at most so many are unread, and compares what they have read."""
        while len(self.readings) > most:
            reading = self.readings.popleft()
            layers = reading.download.resolve()
            start = 0
            for request, expected in zip(reading.requests, reading.expected, strict=True):
                stop = start + expected.shape[1]
                for layer, numbers in zip(layers, expected, strict=True):
                    if not request.spoiled:
                        agree_on(
                            np.ascontiguousarray(numbers), layer[start:stop], f"what a forward read of {request!r}"
                        )
                start = stop

    # The device's part

    def _begin_step(self) -> None:
        """Waits until the step before the present one is over, on all streams."""
        with self.on(self.apart):
            self.ends.append(self.rt.record())
        while len(self.ends) >= IN_FLIGHT:
            self.ends.popleft().wait()
        while self.copies and self.copies[0][0] < self.rt.step:
            self.copies.popleft()[1].wait()
        self.rt.next_step()

    def forward(
        self, requests: Sequence[Tiered], added: Sequence[Ints], tokens: Ints, plan: LastLocation | None, ride: bool
    ) -> None:
        """One forward: backs up, writes the KV of new positions, reads all of all requests, and tells the host."""
        self._begin_step()
        for request, content in zip(requests, added, strict=True):
            request.add(content)
        of_host = [request.host_tokens(request.hot_from) for request in requests]
        on_device = [self._device_tokens(request) for request in requests]
        new = np.concatenate(added, axis=1)
        arrays: list[Ints] = [tokens, new, np.concatenate(of_host), np.concatenate(on_device)]
        order = _in_order([one.size for one in of_host], [one.size for one in on_device])
        with self.on(self.apart):
            extras = {} if plan is None or not ride else plan.extras
            upload = self.rt.upload([*arrays, order, *extras.values()])
            if plan is not None:
                riding = {name: upload.view(5 + at) for at, name in enumerate(extras)}
                self.tier.back_up(plan, riding if ride else None)
            places, kv_of_step, cold, hot, order_on_device = (upload.view(at) for at in range(5))
            read = []
            for layer, (kv, buffer) in enumerate(zip(self.kv, self.host.buffers, strict=True)):
                self.rt.launch(
                    _put, kv, places, kv_of_step, layer, reads=(places, kv_of_step), writes=(kv,), name="write KV"
                )
                given = (buffer, cold, kv, hot, order_on_device)
                touched = given if arrays[2].size else given[2:]
                read.append(self.rt.launch(_gathered, *given, reads=touched, name="read KV"))
            download = self.rt.download(read, name="what a forward read")
            self.last = self.rt.record()
        self.readings.append(Reading(download, tuple(requests), tuple(request.content for request in requests)))
        self.resolve(IN_FLIGHT)


def _in_order(of_host: list[int], on_device: list[int]) -> Ints:
    """Where the rows of each request stand when all rows of the host come first, then all of the device."""
    rows: list[int] = []
    from_host, from_device = 0, sum(of_host)
    for cold, hot in zip(of_host, on_device, strict=True):
        rows += [*range(from_host, from_host + cold), *range(from_device, from_device + hot)]
        from_host, from_device = from_host + cold, from_device + hot
    return np.array(rows, dtype=np.int64)


def _put(kv: torch.Tensor, places: torch.Tensor, content: torch.Tensor, layer: int) -> None:
    kv.index_copy_(0, places, content[layer])


def _gathered(
    host: torch.Tensor, cold: torch.Tensor, kv: torch.Tensor, hot: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    return torch.cat([host.index_select(0, cold), kv.index_select(0, hot)]).index_select(0, order)
