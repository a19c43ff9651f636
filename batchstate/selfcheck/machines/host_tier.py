"""`HiSparse` against a memory of stamps: both admissions, decoding, aborts in every state, writers that write late.

Whoever brings KV from outside may write until it ends, and does, at the worst moments. Nobody else's bytes may change.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import levels
from batchstate.errors import ArgumentError, DtypeError, PoolExhaustedError, ShapeError
from batchstate.indices import Pages, Slots
from batchstate.kv._tier import TierState
from batchstate.kv.hisparse import HiSparse, LastLocation
from batchstate.kv.host_pool import HostKVPool, HostRanges
from batchstate.kv.pages import PagePool
from batchstate.mirror import MirroredTensor
from batchstate.pools import SlotPool
from batchstate.runtime import CpuRuntime, Fence, Runtime
from batchstate.runtime.memory import Download, bytes_of
from batchstate.testing.fences import LateRuntime, ManualFence, ManualStream
from batchstate.testing.machine import DisagreementError, Machine, Misuse, agree, agree_on
from batchstate.violations import Code

# What the machine of the host tier knows by itself: requests, what each position of them holds, and who may write.

Ints = npt.NDArray[np.int64]

LAYERS = 2
ITEM = 2
"""Numbers that one position has in each layer."""

SCRIBBLE = -77
"""What a writer writes that nobody expects any more."""


@final
class Stamps:
    """Numbers for the KV of new positions, none twice."""

    def __init__(self) -> None:
        self._next = 1

    def new(self, positions: int) -> Ints:
        """int64[LAYERS, positions, ITEM]."""
        n = LAYERS * positions * ITEM
        self._next += n
        return np.arange(self._next - n, self._next, dtype=np.int64).reshape(LAYERS, positions, ITEM)


@final
@attrs.define(eq=False)
class Arrival:
    """The end of a writer, which also says how much has arrived, as that of a lease does.

    Attributes:
        fence: complete when it writes no more.
        tokens: what a request may count on.
    """

    fence: ManualFence
    tokens: int = 0

    def query(self) -> bool:
        """Whether it writes no more."""
        return self.fence.query()

    def wait(self) -> None:
        """Ends it."""
        self.fence.wait()

    def arrived(self) -> int:
        """What a request may count on."""
        return self.tokens


@final
class PrefillWorker:
    """Another process, which writes into the host tokens of one request until it ends: by address, unseen by all.

    Args:
        host: the pool of the tokens.
        ranges: which of them it may write.
        content: int64[LAYERS, n, ITEM], what it writes.
        stream: of its one fence.
        ended: what its memory was reserved behind.

    Attributes:
        ranges, ended: see above.
    """

    def __init__(
        self, host: HostKVPool, ranges: HostRanges, content: Ints, stream: ManualStream, ended: Arrival
    ) -> None:
        self._memory = [bytes_of(one.memory).view(np.int64).reshape(-1, ITEM) for one in host.contiguous_buffers()]
        self.ranges = ranges
        self._content = content
        self._stream = stream
        self.ended = ended

    @property
    def tokens(self) -> Ints:
        """Its host tokens, int64[n]."""
        return self.ranges.locations(0, self._content.shape[1])

    def write(self, first: int, stop: int) -> None:
        """Writes some of its positions."""
        tokens = self.tokens[first:stop]
        for memory, content in zip(self._memory, self._content, strict=True):
            memory[tokens] = content[first:stop]

    def scribble(self) -> None:
        """Writes once more, into what it takes for its own still."""
        self._content = np.full_like(self._content, SCRIBBLE)
        self.write(0, self._content.shape[1])

    def end(self) -> None:
        """From now on it writes nothing."""
        self._stream.complete()


@final
@attrs.define(eq=False, repr=False)
class Tiered:
    """A request.

    Attributes:
        slot: its handle.
        content: int64[LAYERS, n, ITEM], what each position holds.
        room: tokens that it has host tokens for; 0 outside of the tier.
        state: where it should be.
        ranges: its host tokens.
        writer: who brings its KV, or None.
        delivered: positions that have arrived.
        hot_from: first position that the device has.
        steps: that it has decoded in the tier.
        spoiled: whether somebody may write into what its last forwards still read.
    """

    slot: Slots
    content: Ints
    room: int = 0
    state: TierState = TierState.OUTSIDE
    ranges: HostRanges | None = None
    writer: PrefillWorker | None = None
    delivered: int = 0
    hot_from: int = 0
    steps: int = 0
    spoiled: bool = False

    def __repr__(self) -> str:
        return f"<request on slot {self.number}: {self.length} tokens, {self.state.name}>"

    @property
    def number(self) -> int:
        """Of its slot."""
        return int(self.slot.np[0])

    @property
    def length(self) -> int:
        """Its tokens."""
        return int(self.content.shape[1])

    def add(self, content: Ints) -> None:
        """Further positions."""
        self.content = np.concatenate([self.content, content], axis=1)

    def host_tokens(self, stop: int) -> Ints:
        """Where the host has the positions up to `stop`, int64[stop]."""
        return np.empty(0, np.int64) if self.ranges is None else self.ranges.locations(0, stop)

    def device_tokens(self, pages: npt.NDArray[np.int32], page_size: int, hot_tokens: int) -> Ints:
        """Where the device has the positions from `hot_from` on, int64[length - hot_from]; `pages` are its own."""
        places = []
        for position in range(self.hot_from, self.length):
            wraps = self.state is TierState.READY and position >= hot_tokens
            row = position % hot_tokens if wraps else position
            places.append(int(pages[row // page_size]) * page_size + row % page_size)
        return np.array(places, dtype=np.int64)


@final
@attrs.frozen(eq=False)
class Reading:
    """What a forward has read, on its way to the host.

    Attributes:
        download: int64[k, ITEM] for each layer.
        requests: whose KV it is, one after the other.
        expected: int64[LAYERS, n, ITEM] of each.
    """

    download: Download
    requests: tuple[Tiered, ...]
    expected: tuple[Ints, ...]


# Requests of a host tier for its machine: forwards that write and read KV, and the judgement of every byte.

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
        self.host = HostKVPool(
            self.rt, host_pages, host_page_size, layers=LAYERS, item_shape=(ITEM,), dtype=torch.int64
        )
        with self.on(apart):
            shape = (self.pages.location_capacity, ITEM)
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

    def check(self) -> None:
        """Every law; then who has which host tokens; then every byte of every request, where it should be."""
        self.haunt()
        with self.on(self.apart):
            self.tier.verify()
            self.slots.verify()
            self._check_owners()
            for request in self.requests:
                self._check_request(request)
        self.reached("two steps in flight", sum(not one.download.ready() for one in self.readings) >= IN_FLIGHT)
        outside = {request.state is TierState.OUTSIDE for request in self.requests}
        self.reached("requests outside beside some inside", len(outside) == 2)

    def _check_owners(self) -> None:
        stats = self.host.stats
        agree(stats.size, stats.free + stats.pending + stats.live, "free + pending + live host tokens")
        everything: list[int] = []
        for request in self.requests:
            if request.ranges is not None:
                tokens = request.ranges.locations().tolist()
                everything += tokens
                agree([request.number] * len(tokens), self.host.owner_of(tokens).tolist(), f"owner of {request!r}")
                self.reached("a request in several runs", request.ranges.starts.size > 1)
        agree(len(set(everything)), len(everything), "host tokens that two requests have")
        agree(len(everything) + sum(len(one) for one in self.strangers), stats.live, "live host tokens")
        for ghost in self.ghosts:
            agree(set(), set(everything) & set(ghost.ranges.locations().tolist()), "tokens that a stranger may write")
        agree([request.number for request in self._by_slot()], self.slots.live_slots().tolist(), "live slots")

    def _by_slot(self) -> list[Tiered]:
        return sorted(self.requests, key=lambda request: request.number)

    def _check_request(self, request: Tiered) -> None:
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
        requests = self.tier._requests
        return (
            self.slots.live_slots().tolist(),
            self.pages.page_table.tolist(),
            self.pages.committed_lengths.tolist(),
            self.host.live_pages,
            sorted((slot, ranges.generation) for slot, ranges in requests.ranges.items()),
            [
                row.tolist()
                for row in (requests.states, requests.length, requests.backed, requests.hot_from, requests.max_tokens)
            ],
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
                self.haunted.update(request.writer.ranges.locations().tolist())
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


# Decode steps of the host tier for its machine, and how requests leave.

STAGED, READY = TierState.STAGED, TierState.READY

_READY = precondition(lambda self: bool(self.of(READY)))


class TierSteps(TierRequests):
    """Requests that decode in the tier."""

    # Decoding

    @_READY
    @rule(data=st.data(), times=st.integers(1, 5), ride=st.booleans(), mirrored=st.booleans())
    def decode(self, data: st.DataObject, times: int, ride: bool, mirrored: bool) -> None:
        """Decode steps of some requests; each byte they read is compared."""
        requests = self.some(data, self.of(READY))
        for _ in range(times):
            if not self._decode(requests, ride, mirrored):
                return

    @precondition(lambda self: len(self.of(READY)) > 1)
    @rule(times=st.integers(1, 8))
    def decode_all(self, times: int) -> None:
        """Decode steps of all, for which there is room."""
        self._decode_on(self.of(READY), times)

    def _decode_on(self, requests: list[Tiered], times: int) -> None:
        for _ in range(times):
            requests = [one for one in requests if one.length < one.room]
            if not requests or not self._decode(requests, True, False):
                return

    def _decode(self, requests: list[Tiered], ride: bool, mirrored: bool) -> bool:
        slots = self.handles(requests)
        lens = np.array([one.length + 1 for one in requests], dtype=np.int64)
        given = MirroredTensor.from_host(self.rt, lens) if mirrored else lens
        if any(one.length >= len(one.ranges or ()) for one in requests):
            self.reached("a request without room refused")
            with self.refused(Code.LENGTH_ORDER):
                self.tier.map_last_location(slots, given)
            return False
        size, hot = self.pages.page_size, self.tier.hot_tokens
        grown = any(one.length < hot and one.length % size == 0 for one in requests)
        plans = []
        if not self.tried(lambda: plans.append(self.tier.map_last_location(slots, given)), "device pages"):
            return False
        plan = plans[0]
        with self.refused(ArgumentError):
            self.tier.map_last_location(slots, given)
        with self.refused(ArgumentError):
            self.tier.abort(slots)
        added = [self.stamps.new(1) for _ in requests]
        for request in requests:
            request.hot_from = max(request.hot_from, request.length + 1 - hot)
            self.reached("the ring went round", request.length >= 2 * hot)
            self.reached("grown by a page", grown)
            self.reached("read from the host", request.hot_from > 0)
        self.forward(requests, added, plan.locations.np, plan, ride)
        if levels.full:  # before what the forward read is compared
            with self.on(self.apart):
                self.tier.verify()
        agree([one.length - 1 for one in requests], plan.positions.tolist(), "positions of the new tokens")
        agree([one.hot_from for one in requests], plan.hot_from.tolist(), "first positions on the device")
        owed = sum(one.steps > 0 for one in requests)
        agree((owed, owed), (len(plan.backup_from), len(plan.backup_to)), "tokens to back up")
        with self.refused(ArgumentError):
            self.tier.back_up(plan)
        for request in requests:
            request.steps += 1
        return True

    # Leaving

    def _finish(self, requests: list[Tiered], raw: bool) -> None:
        slots = self.handles(requests)
        if raw:
            self.pages.release_requests(slots, after=self.last)
        else:
            self.tier.finish(slots, after=self.last)
        self.leave(requests)
        with self.refused(Code.SLOT_DOUBLE_FREE, Code.SLOT_STALE_HANDLE):
            self.tier.finish(slots)

    def _abort(self, requests: list[Tiered], ended: bool) -> None:
        staged = [one for one in requests if one.state is STAGED]
        before = self.host.stats.pending
        self.tier.abort(self.handles(requests), after=self.last)
        for request in requests:
            if ended and request.writer is not None:
                request.writer.end()
        self.leave(requests)
        self.reached("staged abort while the copy is under way", bool(staged) and self.host.stats.pending > before)

    def _leave_outside(self, request: Tiered) -> None:
        self.pages.release_requests(request.slot, after=self.last)
        self.leave([request])


# How requests come into the host tier for its machine: from another process, or from device pages.

OUTSIDE, STAGED, DIRECT, READY = TierState.OUTSIDE, TierState.STAGED, TierState.DIRECT, TierState.READY

_OUTSIDE = precondition(lambda self: bool(self.of(OUTSIDE)))
_DIRECT = precondition(lambda self: bool(self.of(DIRECT)))


class TierArrivals(TierSteps):
    """Requests that are staged, or written directly."""

    @rule(n=st.integers(1, 2))
    def come(self, n: int) -> None:
        """Requests come and have nothing yet."""
        self.take(n)

    # Requests whose KV comes from another process

    @rule(n=st.integers(1, 2), length=st.integers(1, 9), more=st.integers(0, 9), delivered=st.integers(0, 9))
    def reserve(self, n: int, length: int, more: int, delivered: int) -> None:
        """Requests get host tokens; their writers begin."""
        self._reserve(n, length, more, delivered)

    def _reserve(self, n: int, length: int, more: int, delivered: int) -> list[Tiered]:
        room = min(length + more, self.host.num_tokens)
        length = min(length, room)
        arriving = []
        for request in self.take(n):
            arriving += self._reserve_one(request, length, room)
            if request.writer is not None:
                request.delivered = min(delivered, length)
                request.writer.write(0, request.delivered)
        return arriving

    def _reserve_one(self, request: Tiered, length: int, room: int) -> list[Tiered]:
        content = self.stamps.new(length)
        made: list[PrefillWorker] = []
        stream = ManualStream("writer")
        ended = Arrival(stream.record())

        def call() -> None:
            ranges = self.tier.reserve(request.slot, length, room, writer=ended)[0]
            made.append(PrefillWorker(self.host, ranges, content, stream, ended))

        if not self.tried(call, "host tokens"):
            self._leave_outside(request)
            return []
        request.writer, request.content, request.room = made[0], content, room
        request.ranges, request.state = made[0].ranges, DIRECT
        self.reached(
            "host tokens used again after their writer", bool(self.haunted & set(request.ranges.locations().tolist()))
        )
        return [request]

    @_DIRECT
    @rule(data=st.data(), ended=st.booleans())
    def admit_direct(self, data: st.DataObject, ended: bool) -> None:
        """All has arrived, and the requests may decode, whether or not their writers are known to have ended."""
        self._admit(self.some(data, self.of(DIRECT)), ended)

    def _admit(self, requests: list[Tiered], ended: bool) -> bool:
        for request in requests:
            if request.writer is not None:
                request.writer.write(request.delivered, request.length)
                request.delivered = request.writer.ended.tokens = request.length
                if ended:
                    request.writer.end()
        hot = self.tier.hot_tokens
        with self.on(self.apart):
            if not self.tried(lambda: self.tier.admit_direct(self.handles(requests)), "device pages"):
                return False
        for request in requests:
            request.state = READY
            short = request.length <= hot
            request.hot_from = 0 if short else request.length
            self.reached("a short request loaded" if short else "a long request admitted")
        return True

    @rule(
        n=st.integers(1, 2),
        length=st.integers(1, 6),
        more=st.sampled_from([0, 1, 5, 14]),
        ended=st.booleans(),
        times=st.integers(0, 14),
        leave=st.booleans(),
    )
    def arrive(self, n: int, length: int, more: int, ended: bool, times: int, leave: bool) -> None:
        """Reserve, deliver, admit, decode, and perhaps leave."""
        requests = self._reserve(n, length, more, length // 2)
        if requests and self._admit(requests, ended):
            self._decode_on(requests, times)
            if leave:
                self._finish(requests, False)

    @precondition(lambda self: any(one.writer is not None for one in self.requests) or self.ghosts)
    @rule(data=st.data(), again=st.booleans())
    def writer_ends(self, data: st.DataObject, again: bool) -> None:
        """A writer ends, perhaps with a last write: the same bytes once more, or whatever, where nobody reads them."""
        chosen = data.draw(st.integers(-1, len(self.ghosts) - 1), label="writer of a request that left")
        if chosen >= 0:
            ghost = self.ghosts.pop(chosen)
            if again:
                ghost.scribble()
            ghost.end()
            self.reached("a writer that ends after its request")
            return
        for request in self.requests:
            if request.writer is not None and request.state is READY:
                if again:
                    request.writer.write(0, request.delivered)
                request.writer.end()

    # Requests that this worker has prefilled

    @rule(n=st.integers(1, 2), length=st.integers(1, MOST_TOKENS - 1))
    def prefill(self, n: int, length: int) -> None:
        """Requests come and stay outside: their KV is on the device."""
        self._prefill(n, length)

    def _prefill(self, n: int, length: int) -> list[Tiered]:
        return [request for request in self.take(n) if self._extended(request, length)]

    def _extended(self, request: Tiered, length: int) -> bool:
        if not self.tried(lambda: self.pages.extend(request.slot, length), "device pages"):
            self._leave_outside(request)
            return False
        self._written([request], length)
        return True

    def _written(self, requests: list[Tiered], n: int) -> None:
        """A forward writes further positions of requests outside of the tier."""
        added = [self.stamps.new(n) for _ in requests]
        size, table = self.pages.page_size, self.pages.page_table
        tokens = [
            int(table[request.number, position // size]) * size + position % size
            for request in requests
            for position in range(request.length, request.length + n)
        ]
        self.forward(requests, added, np.array(tokens, dtype=np.int64), None, False)

    @_OUTSIDE
    @rule(data=st.data())
    def decode_outside(self, data: st.DataObject) -> None:
        """Requests outside of the tier decode as if there were none."""
        growing = [one for one in self.of(OUTSIDE) if 0 < one.length < MOST_TOKENS]
        if growing:
            requests = self.some(data, growing)
            if self.tried(lambda: self.pages.advance(self.handles(requests)), "device pages"):
                self._written(requests, 1)

    @_OUTSIDE
    @rule(data=st.data(), more=st.integers(0, 6), fence=st.booleans())
    def stage(self, data: st.DataObject, more: int, fence: bool) -> None:
        """Requests outside are copied out to the host."""
        if hot := [one for one in self.of(OUTSIDE) if one.length]:
            self._stage(self.some(data, hot), more, fence)

    def _stage(self, requests: list[Tiered], more: int, fence: bool) -> bool:
        room = np.array([min(one.length + more, self.host.num_tokens) for one in requests], dtype=np.int64)
        if any(one.length > most for one, most in zip(requests, room.tolist(), strict=True)):
            return False
        after = self.last if fence else None

        def call() -> None:
            self.tier.admit_staged(self.handles(requests), room, after=after)

        with self.on(self.apart):
            staged = self.tried(call, "host tokens")
        if not staged:
            return False
        self.copies.append((self.rt.step, self.tier._staging[-1][1]))
        for request, most in zip(requests, room.tolist(), strict=True):
            request.state, request.room = STAGED, most
            request.ranges = self.tier._requests.ranges[request.number]
        return True

    @rule()
    def poll_staged(self) -> None:
        """What is copied may decode."""
        self._settle()

    def _settle(self) -> None:
        settled = self.tier.poll_staged()
        ready = [one for one in self.of(STAGED) if self.tier.ready(one.slot)[0]]
        with self.on(self.apart):
            self.tier.verify()
        agree(len(ready), settled, "requests that became ready")
        for request in ready:
            request.state = READY
            request.hot_from = request.length if request.length > self.tier.hot_tokens else 0

    @rule(
        n=st.integers(1, 2),
        length=st.integers(1, MOST_TOKENS - 1),
        more=st.integers(0, 9),
        then=st.sampled_from(["ask too early", "abort", "wait", "wait"]),
        times=st.integers(0, 9),
    )
    def prefill_and_stage(self, n: int, length: int, more: int, then: str, times: int) -> None:
        """Prefill and stage; then ask too early, abort and prefill others, or wait until it is copied, and decode."""
        requests = self._prefill(n, length)
        if not requests or not self._stage(requests, more, True):
            return
        if then == "ask too early":
            self._settle()
        elif then == "abort":
            self._abort(requests, False)
            if self.last is not None:
                self.last.wait()  # for the forward, and not for the copy
            self._prefill(n, length)
        else:
            self.rt.synchronize()
            self._settle()
            self._decode_on(requests, times)


# Ways to misuse a `HiSparse`, given the tier and the handle of a live request of some state.

It = tuple[HiSparse, Slots]
_TIER = (Code.TIER_STATE,)


def _state(it: It) -> TierState:
    return it[0].states(it[1])[0]


def _inside(it: It) -> bool:
    return _state(it) is not TierState.OUTSIDE


def _outside(it: It) -> bool:
    return not _inside(it)


def _not_ready(it: It) -> bool:
    return _state(it) is not TierState.READY


def _not_direct(it: It) -> bool:
    return _state(it) is not TierState.DIRECT


def _ready(it: It) -> bool:
    return not _not_ready(it)


def _cold(it: It) -> bool:
    return _outside(it) and not it[0].pages.committed(it[1])[0]


def _hot(it: It) -> bool:
    return _outside(it) and bool(it[0].pages.committed(it[1])[0])


def _next(it: It) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return it[0].lengths(it[1]) + 1


MISUSES: tuple[Misuse[It], ...] = (
    Misuse("reserve what is in the tier", _TIER, lambda it: it[0].reserve(it[1], 1, 1), _inside),
    Misuse("reserve what is on the device", (ArgumentError,), lambda it: it[0].reserve(it[1], 1, 1), _hot),
    Misuse("reserve behind a number", (ArgumentError,), lambda it: it[0].reserve(it[1], 1, 1, writer=3), _cold),  # type: ignore[arg-type]
    Misuse("reserve less than comes", (Code.LENGTH_ORDER,), lambda it: it[0].reserve(it[1], 2, 1), _cold),
    Misuse("reserve nothing", (ArgumentError,), lambda it: it[0].reserve(it[1], 0, 1), _cold),
    Misuse("reserve -1", (ArgumentError,), lambda it: it[0].reserve(it[1], -1, 1), _cold),
    Misuse("reserve half a token", (DtypeError,), lambda it: it[0].reserve(it[1], 0.5, 1), _cold),
    Misuse(
        "reserve more than there is",
        (Code.LENGTH_ORDER,),
        lambda it: it[0].reserve(it[1], 1, it[0].host.num_tokens + 1),
        _cold,
    ),
    Misuse("admit what has not been reserved", _TIER, lambda it: it[0].admit_direct(it[1]), _not_direct),
    Misuse("stage what is in the tier", _TIER, lambda it: it[0].admit_staged(it[1], 99), _inside),
    Misuse(
        "stage into too little",
        (Code.LENGTH_ORDER,),
        lambda it: it[0].admit_staged(it[1], it[0].pages.committed(it[1]) - 1),
        _hot,
    ),
    Misuse("decode what is not ready", _TIER, lambda it: it[0].map_last_location(it[1], 9), _not_ready),
    Misuse("finish what is not ready", _TIER, lambda it: it[0].finish(it[1]), _not_ready),
    Misuse("abort what is outside", _TIER, lambda it: it[0].abort(it[1]), _outside),
    Misuse("abort behind a number", (ArgumentError,), lambda it: it[0].abort(it[1], after=3), _inside),  # type: ignore[arg-type]
    Misuse("abort one twice", (Code.SLOT_SHARED,), lambda it: it[0].abort(it[1].take([0, 0])), _inside),
    Misuse(
        "decode without a new token",
        (ArgumentError, Code.LENGTH_ORDER),
        lambda it: it[0].map_last_location(it[1], _next(it) - 1),
        _ready,
    ),
    Misuse(
        "decode two tokens",
        (ArgumentError, Code.LENGTH_ORDER),
        lambda it: it[0].map_last_location(it[1], _next(it) + 1),
        _ready,
    ),
    Misuse(
        "decode with one length too many",
        (ShapeError,),
        lambda it: it[0].map_last_location(it[1], np.concatenate([_next(it), [1]])),
        _ready,
    ),
    Misuse(
        "decode one twice",
        (Code.SLOT_SHARED,),
        lambda it: it[0].map_last_location(it[1].take([0, 0]), _next(it)),
        _ready,
    ),
    Misuse(
        "decode padding",
        (Code.SLOT_ZERO_ALLOCATED,),
        lambda it: it[0].map_last_location(it[1].pad(2), _next(it)),
        _ready,
    ),
    Misuse("host tokens beyond the ranges", (ArgumentError,), lambda it: it[0].host_locations(it[1], 10_000), _inside),
    Misuse("host tokens of nobody", _TIER, lambda it: it[0].host_locations(it[1], 1), _outside),
    Misuse(
        "finish slots of another pool",
        (ArgumentError,),
        lambda it: it[0].finish(SlotPool(it[0].runtime, 1).take(1)),
    ),
    Misuse(
        "abort pages",
        (Code.UNIT_MISMATCH,),
        lambda it: it[0].abort(Pages.from_host(it[0].runtime, [1])),  # type: ignore[arg-type]
    ),
)

_STAGED = precondition(lambda self: bool(self.of(STAGED)))
_INSIDE = precondition(lambda self: bool(self.of(STAGED, DIRECT, READY)))


class HostTierMachine(TierArrivals):
    """Requests that are staged, written directly, decoded, finished and aborted."""

    NAME = "host_tier"
    TARGETS = (
        "two steps in flight",
        "requests outside beside some inside",
        "a request in several runs",
        "a short request loaded",
        "a long request admitted",
        "read from the host",
        "grown by a page",
        "the ring went round",
        "a request without room refused",
        "host tokens exhausted",
        "device pages exhausted",
        "staged abort while the copy is under way",
        "direct abort before the writer has ended",
        "a late write into memory of nobody",
        "a writer that ends after its request",
        "host tokens used again after their writer",
    )

    # Leaving

    @_READY
    @rule(data=st.data(), raw=st.booleans())
    def finish(self, data: st.DataObject, raw: bool) -> None:
        """Requests leave behind the last forward; a second exit is refused."""
        self._finish(self.some(data, self.of(READY)), raw)

    @_INSIDE
    @rule(data=st.data(), ended=st.booleans())
    def abort(self, data: st.DataObject, ended: bool) -> None:
        """Requests leave in whatever state they are."""
        self._abort(self.some(data, self.of(STAGED, DIRECT, READY)), ended)

    @_STAGED
    @rule()
    def abort_staged(self) -> None:
        """What is being copied leaves, behind the copy."""
        self._abort(self.of(STAGED), False)

    @_DIRECT
    @rule()
    def free_direct(self) -> None:
        """The slots alone are freed, by one who knows nothing of the tier: the host tokens go with them."""
        requests = self.of(DIRECT)
        self.slots.free(self.handles(requests), after=self.last)
        self.leave(requests)

    @_OUTSIDE
    @rule(data=st.data())
    def leave_outside(self, data: st.DataObject) -> None:
        """Requests outside leave."""
        for request in self.some(data, self.of(OUTSIDE)):
            self._leave_outside(request)

    @rule()
    def all_leave(self) -> None:
        """Everybody leaves, the device ends: what is pending then is what writers may still write, and no more."""
        self._abort(self.of(STAGED, DIRECT, READY), False)
        for request in self.of(OUTSIDE):
            self._leave_outside(request)
        self.host.free(self.strangers)
        self.strangers = []
        self.resolve(0)
        self.rt.synchronize()
        self.slots.expect_idle()
        self.pages.expect_idle()
        self.host.expect_idle()
        for _ in range(4):
            self.haunt()
            self.host.verify()
        stats, haunted = self.host.stats, sum(len(ghost.ranges) for ghost in self.ghosts)
        agree((haunted, stats.size - haunted), (stats.pending, stats.free), "host tokens pending and free, all gone")
        agree(self.pages.num_pages, self.pages.stats.free, "device pages free, all gone")

    # Time and misuse

    @rule(read=st.integers(0, 2), all_of_it=st.booleans())
    def time_passes(self, read: int, all_of_it: bool) -> None:
        """The host reads what forwards brought, or waits for everything."""
        self.resolve(read)
        if all_of_it:
            self.rt.synchronize()

    @precondition(lambda self: self.gone)
    @rule(back=st.integers(1, 3))
    def use_gone(self, back: int) -> None:
        """Handles and ranges of requests that left are refused everywhere."""
        late = self.gone[-min(back, len(self.gone))]
        tier, slot = self.tier, late.slot
        for call in (
            lambda: tier.reserve(slot, 1, 1),
            lambda: tier.admit_direct(slot),
            lambda: tier.admit_staged(slot, 1),
            lambda: tier.map_last_location(slot, late.length + 1),
            lambda: tier.states(slot),
            lambda: tier.host_locations(slot, 1),
            lambda: tier.abort(slot),
        ):
            with self.refused(Code.SLOT_STALE_HANDLE):
                call()
        ranges = late.ranges
        if ranges is not None:
            with self.refused(Code.SLOT_STALE_HANDLE, Code.SLOT_DOUBLE_FREE):
                self.host.free(ranges)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), misuse=st.sampled_from(MISUSES))
    def misuse(self, data: st.DataObject, misuse: Misuse[tuple[HiSparse, Slots]]) -> None:
        """What cannot be meant is refused, and changes nothing."""
        it = (self.tier, self.some(data, self.requests)[0].slot)
        if misuse.applies(it):
            with self.refused(*misuse.expected):
                misuse.call(it)
