"""`HiSparse` against a memory of stamps: both admissions, decoding, aborts in every state, writers that write late.

A worker that brings KV from outside writes until it ends, at the worst moments. No other request's bytes may change.
"""

import functools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import Code, Contract, ForwardInputs, ForwardPlan, MirroredTensor, PagePool, SlotPool, Slots, levels
from batchstate._upload import Extras
from batchstate.errors import ArgumentError, PoolExhaustedError
from batchstate.kv._tier import TierState
from batchstate.kv.hisparse import HiSparse, LastLocation
from batchstate.kv.host_pool import HostKVPool, HostRanges
from batchstate.runtime import Fence, Runtime
from batchstate.runtime.base import Download
from batchstate.runtime.memory import bytes_of
from batchstate.testing.fences import ManualStream
from tests.selfcheck.machine import STALE, Machine, Misuse, agree, agree_on, ask, disagree, misuses

Ints = npt.NDArray[np.int64]

LAYERS = 2
ITEM = 2  # numbers of a position in each layer
MOST_TOKENS = 14  # of a request on the device
IN_FLIGHT = 2
SCRIBBLE = -77  # written by a writer into memory that is not its request's any more

OUTSIDE, STAGED, DIRECT, READY = TierState.OUTSIDE, TierState.STAGED, TierState.DIRECT, TierState.READY


@final
class PrefillWorker:
    """Another process, which writes `content` int64[LAYERS, n, ITEM] into the host locations of one request.

    It writes by address, unseen by the library. Also the fence of its own end, as `Lease.ended` is.
    """

    ranges: HostRanges  # that it may write

    def __init__(self, host: HostKVPool, content: Ints) -> None:
        self._memory = [
            bytes_of(buffer.memory).view(np.int64).reshape(-1, ITEM) for buffer in host.contiguous_buffers()
        ]
        self._content = content
        self._stream = ManualStream("writer")
        self._ended = self._stream.record()
        self.tokens = 0  # positions that have arrived

    def query(self) -> bool:
        return self._ended.query()

    def wait(self) -> None:
        self._ended.wait()

    def arrived(self) -> int:
        return self.tokens

    def write(self, first: int, stop: int) -> None:
        locations = self.ranges.locations(0, self._content.shape[1])[first:stop]
        for memory, content in zip(self._memory, self._content, strict=True):
            memory[locations] = content[first:stop]

    def scribble(self) -> None:
        self._content = np.full_like(self._content, SCRIBBLE)
        self.write(0, self._content.shape[1])

    def end(self) -> None:
        self._stream.complete()


@final
@attrs.define(eq=False, repr=False)
class TieredRequest:
    slot: Slots
    content: Ints  # of each position, int64[LAYERS, n, ITEM]
    max_tokens: int = 0  # tokens with host locations; 0 outside of the tier
    state: TierState = OUTSIDE
    ranges: HostRanges | None = None
    writer: PrefillWorker | None = None  # the process that brings its KV
    delivered: int = 0  # positions that have arrived
    hot_from: int = 0  # first position that the device has
    bound: int = 0  # tokens at the most, as far as the scheduler knows
    backed: int = 0  # tokens that the scheduler knew to be accepted in the last step
    held: int = 0  # tokens that its hot buffer has room for
    spoiled: bool = False  # a late writer may change memory that its last forwards still read

    def __repr__(self) -> str:
        return f"<request on slot {self.number}: {self.length} tokens, {self.state.name}>"

    @property
    def number(self) -> int:
        return int(self.slot.np[0])

    @property
    def length(self) -> int:
        return int(self.content.shape[1])

    def host_locations(self, stop: int) -> Ints:
        return np.empty(0, np.int64) if self.ranges is None else self.ranges.locations(0, stop)


@final
@attrs.frozen(eq=False)
class Reading:
    """KV that a forward has read, on its way to the host."""

    download: Download  # int64[k, ITEM] for each layer
    requests: tuple[TieredRequest, ...]  # whose KV it is, one after the other
    expected: tuple[Ints, ...]  # int64[LAYERS, n, ITEM] of each


@final
@attrs.frozen
class Decode:
    """How a step decodes."""

    packed: bool = True  # indices go with the step's copy
    mirrored: bool = False
    drafts: int = 1
    accepted: int = 1
    late: bool = False  # planned before the results of the step before are known
    padded: bool = False


_DECODES = st.builds(
    Decode, st.booleans(), st.booleans(), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans()
)


def _in_order(of_host: list[int], on_device: list[int]) -> Ints:
    """Where the rows of each request stand when all rows of the host come first, then all of the device."""
    rows: list[int] = []
    from_host, from_device = 0, sum(of_host)
    for cold, hot in zip(of_host, on_device, strict=True):
        rows += [*range(from_host, from_host + cold), *range(from_device, from_device + hot)]
        from_host, from_device = from_host + cold, from_device + hot
    return np.array(rows, dtype=np.int64)


def _put(kv: torch.Tensor, locations: torch.Tensor, content: torch.Tensor, layer: int) -> None:
    kv.index_copy_(0, locations, content[layer])


def _gathered(
    host: torch.Tensor, cold: torch.Tensor, kv: torch.Tensor, hot: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    return torch.cat([host.index_select(0, cold), kv.index_select(0, hot)]).index_select(0, order)


# Ways to misuse a `HiSparse`, given the tier and the handle of a live request of some state.

It = tuple[HiSparse, Slots]
_TIER = (Code.TIER_STATE,)
_LENGTHS = (ArgumentError, Code.LENGTH_ORDER)


def _in(*states: TierState) -> Callable[[It], bool]:
    return lambda it: it[0].states(it[1])[0] in states


_inside, _outside, _ready, _paged = _in(STAGED, DIRECT, READY), _in(OUTSIDE), _in(READY), _in(STAGED, READY)
_not_ready, _not_direct = _in(OUTSIDE, STAGED, DIRECT), _in(OUTSIDE, STAGED, READY)


def _cold(it: It) -> bool:
    return _outside(it) and not it[0].pages.committed(it[1])[0]


def _hot(it: It) -> bool:
    return _outside(it) and bool(it[0].pages.committed(it[1])[0])


def _ranges(it: It) -> HostRanges:
    return it[0]._requests.ranges[int(it[1].np[0])]


def _bound(rt: Runtime, lens: Ints) -> MirroredTensor:
    return MirroredTensor.from_pair(rt, lens, rt.device_zeros(lens.shape, torch.int64), contract=Contract.UPPER_BOUND)


def _next(it: It) -> Ints:
    return it[0].lengths(it[1]) + 1


def _decode(lens: Callable[[It], Any], confirmed: Callable[[It], Ints] | None = None) -> Any:
    return lambda it: it[0].map_last_location(it[1], lens(it), confirmed=None if confirmed is None else confirmed(it))


MISUSES = misuses(
    ("reserve what is in the tier", _TIER, lambda it: it[0].reserve(it[1], 1, 1), _inside),
    ("reserve what is on the device", ArgumentError, lambda it: it[0].reserve(it[1], 1, 1), _hot),
    ("reserve less than comes", Code.LENGTH_ORDER, lambda it: it[0].reserve(it[1], 2, 1), _cold),
    ("reserve too much", Code.LENGTH_ORDER, lambda it: it[0].reserve(it[1], 1, it[0].host.num_tokens + 1), _cold),
    ("admit what has not been reserved", _TIER, lambda it: it[0].admit_direct(it[1]), _not_direct),
    ("stage what is in the tier", _TIER, lambda it: it[0].admit_staged(it[1], 99), _inside),
    ("decode what is not ready", _TIER, lambda it: it[0].map_last_location(it[1], 9), _not_ready),
    ("finish what is not ready", _TIER, lambda it: it[0].finish(it[1], after=None), _not_ready),
    ("abort what is outside", _TIER, lambda it: it[0].abort(it[1], after=None), _outside),
    ("abort one twice", Code.SLOT_SHARED, lambda it: it[0].abort(it[1].take([0, 0]), after=None), _inside),
    ("decode two tokens", _LENGTHS, _decode(lambda it: _next(it) + 1), _ready),
    ("confirm what is not there", _LENGTHS, _decode(_next, confirmed=_next), _ready),
    ("decode one twice", Code.SLOT_SHARED, lambda it: it[0].map_last_location(it[1].take([0, 0]), _next(it)), _ready),
    (
        "free a request with device pages",
        Code.SLOT_CONSERVATION,
        lambda it: it[0].slots.free(it[1], after=it[0].runtime.record()),  # without, a forward may be under way
        _ready,
    ),
    ("truncate a hot buffer", _TIER, lambda it: it[0].pages.truncate(it[1], 1, after=it[0].runtime.record()), _paged),
    ("release a hot buffer", _TIER, lambda it: it[0].pages.release(it[1], after=it[0].runtime.record()), _paged),
    ("free the ranges of a request", ArgumentError, lambda it: it[0].host.free(_ranges(it), after=None), _inside),
    ("locations outside of the tier", _TIER, lambda it: it[0].host_locations(it[1], 1), _outside),
)

_READY = precondition(lambda self: bool(self.of(READY)))
_OUTSIDE = precondition(lambda self: bool(self.of(OUTSIDE)))
_DIRECT = precondition(lambda self: bool(self.of(DIRECT)))
_STAGED = precondition(lambda self: bool(self.of(STAGED)))
_INSIDE = precondition(lambda self: bool(self.of(STAGED, DIRECT, READY)))


class HostTierMachine(Machine):
    """Requests that are staged, written directly, decoded, finished and aborted."""

    NAME = "host_tier"
    LAGS = True

    TARGETS = (
        "two steps in flight",
        "requests outside beside some inside",
        "a request in several ranges",
        "a short request loaded",
        "a long request admitted",
        "read from the host",
        "grown by a page",
        "the ring went round",
        "planned by a bound",
        "too much that is not confirmed refused",
        "a request beyond its reservation refused",
        "host locations exhausted",
        "device pages exhausted",
        "staged abort while the copy is under way",
        "direct abort before the writer has ended",
        "a writer that ends after its request",
        "host locations used again after their writer",
        "cleared beside a writer that has not ended",
        "requests inside and outside in one plan",
    )

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

        `apart`: forwards have a stream of their own. `fragmented`: host pages here and there are taken already.
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
        self.host.free([ranges for at, ranges in enumerate(strangers) if at % 4], after=None)
        self.requests: list[TieredRequest] = []
        self.gone: list[TieredRequest] = []
        self.late_writers: list[PrefillWorker] = []
        self.late_locations: set[int] = set()
        self.readings: deque[Reading] = deque()
        self.numbers = 1
        self.last: Fence | None = None
        self.ends: deque[Fence] = deque()
        self.copies: deque[tuple[int, Fence]] = deque()

    # Checks

    def check(self) -> None:
        self._write_late()
        with self.on(self.apart):
            self.tier.verify()
            self.slots.verify()
            self._check_owners()
            for request in self.requests:
                self._check_request(request)
        self.reached("two steps in flight", sum(not reading.download.ready() for reading in self.readings) >= IN_FLIGHT)
        outside = {request.state is OUTSIDE for request in self.requests}
        self.reached("requests outside beside some inside", len(outside) == 2)

    def _check_owners(self) -> None:
        tier = self.tier.stats  # once: each reading reaps, and a device that is asked may get on
        stats = tier.host
        pending = sum(entry.tokens for entry in self.tier.in_flight() if entry.what == "pending")
        agree(stats.pending, pending, "host locations that wait for something")
        counts = tuple(len(self.of(state)) for state in (STAGED, DIRECT, READY))
        agree(counts, (tier.staged, tier.direct, tier.ready), "requests by state")
        everything: list[int] = []
        for request in self.requests:
            if request.ranges is not None:
                locations = request.ranges.locations().tolist()
                everything += locations
                owners = self.host.owner_of(locations).tolist()
                agree([request.number] * len(locations), owners, "owner", request)
                self.reached("a request in several ranges", request.ranges.starts.size > 1)
        agree(len(set(everything)), len(everything), "host locations that two requests have")
        agree(len(everything) + sum(len(ranges) for ranges in self.strangers), stats.live, "live host locations")
        for writer in self.late_writers:
            both = set(everything) & set(writer.ranges.locations().tolist())
            agree(set(), both, "locations that a late writer may write")
        agree(sorted(request.number for request in self.requests), self.slots.live_slots().tolist(), "live slots")

    def _check_request(self, request: TieredRequest) -> None:
        agree([request.state], self.tier.states(request.slot), "state", request)
        on_host = request.delivered if request.state is DIRECT else request.hot_from
        kv = request.content[:, :on_host], f"KV in host memory of {request!r}"
        self._compare(self.host.buffers, request.host_locations(on_host), *kv)
        if request.state is not DIRECT:
            hot = request.held if request.state is READY else request.length
            agree(hot, int(self.pages.committed(request.slot)[0]), "tokens on the device", request)
            kv = request.content[:, request.hot_from :], f"hot KV of {request!r}"
            self._compare(self.kv, self._locations(request, request.hot_from, request.length), *kv)

    def _compare(self, buffers: Sequence[torch.Tensor], locations: Ints, expected: Ints, label: str) -> None:
        for buffer, layer in zip(buffers, expected, strict=True):
            agree_on(np.ascontiguousarray(layer), self.rt.inspect(buffer)[locations], label)

    def _locations(self, request: TieredRequest, start: int, stop: int) -> Ints:
        """Where the device has these positions of a request, int64[stop - start]."""
        positions, pages, size = np.arange(start, stop), self.pages.page_table[request.number], self.pages.page_size
        rows = positions % self.tier.hot_tokens if request.state is READY else positions
        return np.asarray(pages[rows // size] * size + rows % size, dtype=np.int64)

    def snapshot(self) -> object:
        """Requests and their states. Locations that are free or pending change by themselves."""
        tier = self.tier._requests
        return (
            self.slots.live_slots().tolist(),
            self.pages.page_table.tolist(),
            self.pages.committed_lengths.tolist(),
            self.host._allocator.live,
            sorted((slot, ranges.generation) for slot, ranges in tier.ranges.items()),
            [row.tolist() for row in (tier.states, tier.length, tier.backed, tier.hot_from, tier.max_tokens)],
        )

    # Parts of rules

    def handles(self, requests: Sequence[TieredRequest]) -> Slots:
        return Slots.cat([self.slots.take(0), *(request.slot for request in requests)])

    def of(self, *states: TierState) -> list[TieredRequest]:
        return [request for request in self.requests if request.state in states]

    def _some(self, data: st.DataObject, among: list[TieredRequest]) -> list[TieredRequest]:
        return data.draw(st.lists(st.sampled_from(among), min_size=1, unique_by=id), label="requests")

    def _new(self, positions: int) -> Ints:
        """Content of new positions, int64[LAYERS, positions, ITEM], no number twice."""
        n = LAYERS * positions * ITEM
        self.numbers += n
        return np.arange(self.numbers - n, self.numbers, dtype=np.int64).reshape(LAYERS, positions, ITEM)

    def _write_late(self) -> None:
        """Writers whose requests have left go on writing, in what is free as soon as it can be."""
        self.host.reap()
        for writer in self.late_writers:
            writer.scribble()

    def _take(self, n: int) -> list[TieredRequest]:
        taken = self.slots.take(min(n, self.slots.stats.free))
        empty = np.empty((LAYERS, 0, ITEM), dtype=np.int64)
        new = [TieredRequest(taken.take([row]), empty) for row in range(len(taken))]
        self.requests += new
        return new

    def _tried(self, call: Callable[[], object], resource: str) -> bool:
        """Whether a pool had enough for a call; if not, nothing has changed."""
        self._write_late()
        before = self.snapshot()
        try:
            call()
        except PoolExhaustedError as error:
            if error.requested <= error.free:
                disagree(f"{resource} refused although enough are free: {error}")
            agree(before, self.snapshot(), "a refused call changed something")
            self.reached(f"{resource} exhausted")
            return False
        return True

    def _left(self, requests: Sequence[TieredRequest]) -> None:
        """These have left. Writers that have not ended go on writing into memory that is not allocated."""
        for request in requests:
            self.requests.remove(request)
            self.gone.append(request)
            if request.writer is not None and not request.writer.query():
                request.spoiled = True
                self.late_writers.append(request.writer)
                self.late_locations.update(request.writer.ranges.locations().tolist())
                self.reached("direct abort before the writer has ended", request.state is not READY)
                request.writer.scribble()

    def _resolve(self, most: int) -> None:
        """Waits for the oldest forwards, until at most so many are unread, and compares what they have read."""
        while len(self.readings) > most:
            reading = self.readings.popleft()
            layers = reading.download.resolve()
            start = 0
            for request, expected in zip(reading.requests, reading.expected, strict=True):
                stop = start + expected.shape[1]
                for layer, numbers in zip(layers, expected, strict=True):
                    if not request.spoiled:
                        agree_on(np.ascontiguousarray(numbers), layer[start:stop], "KV that a forward read of", request)
                start = stop

    def _begin_step(self) -> None:
        with self.on(self.apart):
            self.ends.append(self.rt.record())
        while len(self.ends) >= IN_FLIGHT:
            self.ends.popleft().wait()
        while self.copies and self.copies[0][0] < self.rt.step:
            self.copies.popleft()[1].wait()
        self.rt.next_step()

    def _forward(
        self,
        requests: Sequence[TieredRequest],
        added: Sequence[Ints],
        locations: Ints,
        plan: LastLocation | None,
        packed: bool,
        whole: ForwardPlan | None = None,
    ) -> None:
        """One forward: backs up, writes the KV of new positions, reads all of all requests, and tells the host."""
        self._begin_step()
        for request, content in zip(requests, added, strict=True):
            request.content = np.concatenate([request.content, content], axis=1)
        of_host = [request.host_locations(request.hot_from) for request in requests]
        on_device = [self._locations(request, request.hot_from, request.length) for request in requests]
        new = np.concatenate(added, axis=1)
        order = _in_order([rows.size for rows in of_host], [rows.size for rows in on_device])
        arrays: list[Ints] = [locations, new, np.concatenate(of_host), np.concatenate(on_device), order]
        with self.on(self.apart):
            extras = {} if plan is None or not packed else plan.extras
            upload = self.rt.upload([*arrays, *extras.values()])
            sent: Extras | None = None
            if plan is not None:
                uploaded = {name: upload.view(5 + at) for at, name in enumerate(extras)}
                sent = None if whole is None else whole.upload()
                self.tier.back_up(plan, sent if sent is not None else uploaded if packed else None)
            written, kv_of_step, cold, hot, order_on_device = (upload.view(at) for at in range(5))
            if whole is not None and sent is not None:
                mapping = ForwardInputs.of(whole, sent).slot_mapping
                written = written if mapping is None else mapping
                if levels.full:
                    agree(locations.tolist(), self.rt.inspect(written).tolist(), "slot mapping")
            read = []
            for layer, (kv, buffer) in enumerate(zip(self.kv, self.host.buffers, strict=True)):
                self.rt.launch(
                    _put, kv, written, kv_of_step, layer, reads=(written, kv_of_step), writes=(kv,), name="write KV"
                )
                inputs = (buffer, cold, kv, hot, order_on_device)
                reads = inputs if arrays[2].size else inputs[2:]
                read.append(self.rt.launch(_gathered, *inputs, reads=reads, name="read KV"))
            download = self.rt.download(read, name="what a forward read")
            self.last = self.rt.record()
        self.readings.append(Reading(download, tuple(requests), tuple(request.content for request in requests)))
        self._resolve(IN_FLIGHT)

    # Requests whose KV comes from another process

    @rule(n=st.integers(1, 2))
    def come(self, n: int) -> None:
        self._take(n)

    @rule(n=st.integers(1, 2), length=st.integers(1, 9), more=st.integers(0, 9), delivered=st.integers(0, 9))
    def reserve(self, n: int, length: int, more: int, delivered: int) -> None:
        """Requests get host locations; their writers begin."""
        self._reserve(n, length, more, delivered)

    def _reserve(self, n: int, length: int, more: int, delivered: int) -> list[TieredRequest]:
        most = min(length + more, self.host.num_tokens)
        length = min(length, most)
        arriving = []
        for request in self._take(n):
            content = self._new(length)
            writer = PrefillWorker(self.host, content)
            begin = functools.partial(self._begin_writing, request, writer, length, most)
            if not self._tried(begin, "host locations"):
                self._leave_outside(request)
                continue
            request.writer, request.content, request.max_tokens = writer, content, most
            request.ranges, request.state = writer.ranges, DIRECT
            again = self.late_locations & set(writer.ranges.locations().tolist())
            self.reached("host locations used again after their writer", bool(again))
            request.delivered = min(delivered, length)
            writer.write(0, request.delivered)
            arriving.append(request)
        return arriving

    def _begin_writing(self, request: TieredRequest, writer: PrefillWorker, length: int, most: int) -> None:
        (writer.ranges,) = self.tier.reserve(request.slot, length, most, writer=writer)

    @_DIRECT
    @rule(data=st.data(), ended=st.booleans())
    def admit_direct(self, data: st.DataObject, ended: bool) -> None:
        """All has arrived, and the requests may decode, whether or not their writers are known to have ended."""
        self._admit(self._some(data, self.of(DIRECT)), ended)

    def _admit(self, requests: list[TieredRequest], ended: bool) -> bool:
        for request in requests:
            if request.writer is not None:
                request.writer.write(request.delivered, request.length)
                request.delivered = request.writer.tokens = request.length
                if ended:
                    request.writer.end()
        with self.on(self.apart):
            if not self._tried(lambda: self.tier.admit_direct(self.handles(requests)), "device pages"):
                return False
        for request in requests:
            request.state = READY
            short = request.length <= self.tier.hot_tokens
            request.hot_from = 0 if short else request.length
            self._ready_now(request)
            self.reached("a short request loaded" if short else "a long request admitted")
        return True

    @rule(
        n=st.integers(1, 2),
        length=st.integers(1, 6),
        more=st.sampled_from([0, 1, 5, 14]),
        ended=st.booleans(),
        times=st.integers(0, 14),
        drafts=st.sampled_from([3, 2, 1]),
        accepted=st.sampled_from([1, 2]),
        leave=st.booleans(),
    )
    def arrive(
        self, n: int, length: int, more: int, ended: bool, times: int, drafts: int, accepted: int, leave: bool
    ) -> None:
        requests = self._reserve(n, length, more, length // 2)
        if requests and self._admit(requests, ended):
            self._decode_on(requests, times, drafts, accepted)
            if leave:
                self._finish(requests, False)

    @precondition(lambda self: any(req.writer is not None for req in self.requests) or self.late_writers)
    @rule(data=st.data(), again=st.booleans())
    def writer_ends(self, data: st.DataObject, again: bool) -> None:
        """A writer ends, perhaps with a last write: the same bytes once more, others if its request has left."""
        chosen = data.draw(st.integers(-1, len(self.late_writers) - 1), label="writer of a request that left")
        if chosen >= 0:
            writer = self.late_writers.pop(chosen)
            if again:
                writer.scribble()
            writer.end()
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
        self._prefill(n, length)

    def _prefill(self, n: int, length: int) -> list[TieredRequest]:
        return [request for request in self._take(n) if self._extended(request, length)]

    def _extended(self, request: TieredRequest, length: int) -> bool:
        if not self._tried(lambda: self.pages.extend(request.slot, length), "device pages"):
            self._leave_outside(request)
            return False
        self._written([request], length)
        return True

    def _written(self, requests: list[TieredRequest], n: int) -> None:
        added = [self._new(n) for _ in requests]
        size, table = self.pages.page_size, self.pages.page_table
        locations = [
            int(table[request.number, position // size]) * size + position % size
            for request in requests
            for position in range(request.length, request.length + n)
        ]
        self._forward(requests, added, np.array(locations, dtype=np.int64), None, False)
        slots = self.handles(requests)
        with self.on(self.apart):
            self.pages.commit(slots, self.pages.committed(slots))

    @_OUTSIDE
    @rule(data=st.data())
    def decode_outside(self, data: st.DataObject) -> None:
        """Requests outside of the tier decode as if there were none."""
        growing = [req for req in self.of(OUTSIDE) if 0 < req.length < MOST_TOKENS]
        if growing:
            requests = self._some(data, growing)
            if self._tried(lambda: self.pages.advance(self.handles(requests)), "device pages"):
                self._written(requests, 1)

    @_OUTSIDE
    @rule(data=st.data(), more=st.integers(0, 6), fence=st.booleans())
    def stage(self, data: st.DataObject, more: int, fence: bool) -> None:
        if hot := [req for req in self.of(OUTSIDE) if req.length]:
            self._stage(self._some(data, hot), more, fence)

    def _stage(self, requests: list[TieredRequest], more: int, fence: bool) -> bool:
        most = np.array([min(req.length + more, self.host.num_tokens) for req in requests], dtype=np.int64)
        if any(req.length > n for req, n in zip(requests, most.tolist(), strict=True)):
            return False
        slots, after = self.handles(requests), self.last if fence else None
        with self.on(self.apart):
            if not self._tried(lambda: self.tier.admit_staged(slots, most, after=after), "host locations"):
                return False
        self.copies.append((self.rt.step, self.tier._staging[-1][1].fence))
        for request, n in zip(requests, most.tolist(), strict=True):
            request.state, request.max_tokens = STAGED, n
            request.ranges = self.tier._requests.ranges[request.number]
        return True

    @rule()
    def poll_staged(self) -> None:
        copied = self.tier.poll_staged()
        ready = [req for req in self.of(STAGED) if self.tier.ready(req.slot)[0]]
        with self.on(self.apart):
            ask(self.tier.verify)
        agree(len(ready), copied, "requests that became ready")
        for request in ready:
            request.state = READY
            request.hot_from = request.length if request.length > self.tier.hot_tokens else 0
            self._ready_now(request)

    def _ready_now(self, request: TieredRequest) -> None:
        request.bound = request.backed = request.length
        request.held = min(request.length, self.tier.hot_tokens)

    @rule(
        n=st.integers(1, 2),
        length=st.integers(1, MOST_TOKENS - 1),
        more=st.integers(0, 9),
        aborted=st.booleans().map(operator.not_),
        waits=st.booleans().map(operator.not_),
        times=st.integers(0, 9),
    )
    def prefill_and_stage(self, n: int, length: int, more: int, aborted: bool, waits: bool, times: int) -> None:
        """Prefill and stage; abort and prefill others on the same pages; ask too early, or wait, and decode."""
        requests = self._prefill(n, length)
        if not requests or not self._stage(requests, more, True):
            return
        if aborted:
            self._abort(requests, False)
            if self.last is not None:
                self.last.wait()  # for the forward, and not for the copy
            requests = self._prefill(n, length)
            if not requests or not self._stage(requests, more, True):
                return
        if waits:
            self.rt.synchronize()
        self.poll_staged()
        if waits:
            self._decode_on(requests, times, drafts=3)

    # Decoding

    @rule(data=st.data(), times=st.integers(1, 5), step=_DECODES)
    def decode(self, data: st.DataObject, times: int, step: Decode) -> None:
        """Decode steps of some requests; each byte they read is compared."""
        if not self.of(READY):
            arriving = self._reserve(1, times, 9, times)
            if not arriving or not self._admit(arriving, True):
                return
        roomy = [req for req in self.of(READY) if req.max_tokens - req.length > self.tier.hot_tokens + step.drafts]
        requests = self._some(data, roomy if step.late and roomy else self.of(READY))
        for _ in range(times):
            if not self._decode(requests, step):
                return

    @precondition(lambda self: len(self.of(READY)) > 1)
    @rule(times=st.integers(1, 8), drafts=st.integers(1, 3), accepted=st.integers(1, 3))
    def decode_all(self, times: int, drafts: int, accepted: int) -> None:
        self._decode_on(self.of(READY), times, drafts, accepted)

    def _decode_on(self, requests: list[TieredRequest], times: int, drafts: int = 1, accepted: int = 1) -> None:
        """Every other step has one token; some are of padded size, or planned before results are known."""
        for number in range(times):
            several = 1 if number % 2 else drafts
            requests = [req for req in requests if req.length + several <= req.max_tokens]
            step = Decode(True, False, several, accepted, late=number % 4 == 2, padded=number % 3 == 1)
            if not requests or not self._decode(requests, step):
                return

    @rule(data=st.data(), times=st.integers(1, 6), length=st.integers(1, 6))
    def decode_together(self, data: st.DataObject, times: int, length: int) -> None:
        """Requests of the tier and others decode in one step of one plan, in any order; some come for it."""
        if not self.of(READY):
            arriving = self._reserve(1, length, times, length)
            if not arriving or not self._admit(arriving, True):
                return
        if not any(req.length for req in self.of(OUTSIDE)):
            self._prefill(1, length)
        inside = self.of(READY)
        for _ in range(times):
            inside = [req for req in inside if req.length < req.max_tokens]
            beside = [req for req in self.of(OUTSIDE) if 0 < req.length < MOST_TOKENS]
            order = data.draw(st.permutations(range(len(inside) + len(beside))), label="order")
            if not inside or not self._decode(inside, Decode(), beside, order):
                return

    def _decode(
        self,
        requests: list[TieredRequest],
        step: Decode,
        beside: list[TieredRequest] | None = None,
        order: Sequence[int] = (),
    ) -> bool:
        """A step of requests of the tier, and of others `beside` them: then one plan has all, in `order`."""
        slots, hot, size = self.handles(requests), self.tier.hot_tokens, self.pages.page_size
        drafts, late, padded = min(step.drafts, hot), step.late, step.padded
        before = np.array([req.bound if late else req.length for req in requests], dtype=np.int64)
        confirmed = np.array([req.backed if late else req.length for req in requests], dtype=np.int64)
        lengths = before + drafts
        counts: object = drafts if drafts == 1 else np.full(lengths.size, drafts)
        bounded = bool((before != confirmed).any())

        def plan_it() -> LastLocation:
            lens, backed = (np.concatenate([counts, [0, 0]]) if padded else counts for counts in (lengths, confirmed))
            seq_lens: object = lens
            if step.mirrored:
                seq_lens = _bound(self.rt, lens) if bounded else MirroredTensor.from_host(self.rt, lens)
            return self.tier.map_last_location(
                slots.pad(lens.size) if padded else slots,
                seq_lens,
                drafts if padded else counts,
                confirmed=backed if bounded or late else None,
                backups=lens.size * 3 * hot if padded else None,
            )

        outgrown = any(n > len(req.ranges or ()) for req, n in zip(requests, lengths.tolist(), strict=True))
        if outgrown or (lengths - confirmed > hot).any():
            problem = "a request beyond its reservation" if outgrown else "too much that is not confirmed"
            self.reached(f"{problem} refused")
            self.refused(Code.LENGTH_ORDER, plan_it)
            return False
        held = np.maximum([req.held for req in requests], np.minimum(lengths, hot))
        grown = any(-(-n // size) > -(-req.held // size) for req, n in zip(requests, held.tolist(), strict=True))
        plans: list[LastLocation] = []
        if not self._tried(lambda: plans.append(plan_it()), "device pages"):
            return False
        plan = plans[0]
        early = (
            plan_it,
            lambda: self.tier.abort(slots, after=self.rt.record()),
            lambda: self.pages.release_requests(slots, after=self.rt.record()),
        )
        self.refused(ArgumentError, *early)
        owed = int((before - [req.backed for req in requests]).sum())
        added = [self._new(drafts) for _ in requests]
        for row, request in enumerate(requests):
            request.bound, request.backed, request.held = int(lengths[row]), int(confirmed[row]), int(held[row])
            request.hot_from = max(request.hot_from, request.bound - hot)
            self.reached("the ring went round", request.length >= 2 * hot)
            self.reached("grown by a page", grown)
            self.reached("read from the host", request.hot_from > 0)
        positions = np.concatenate([np.arange(req.length, req.length + drafts) for req in requests])
        places = np.concatenate([self._locations(req, req.length, req.length + drafts) for req in requests])
        if beside is None:
            self._forward(requests, added, places, plan, step.packed)
        else:
            self._together(requests, added, plan, beside, order)
        if not bounded:
            agree(positions.tolist(), plan.positions[: positions.size].tolist(), "positions of the new tokens")
            agree(places.tolist(), plan.locations.np[: positions.size].tolist(), "places of the new tokens")
        for request in requests:
            request.content = request.content[:, : request.length - drafts + min(step.accepted, drafts)]
        if levels.full:  # before what the forward read is compared
            with self.on(self.apart):
                ask(self.tier.verify)
        hot_from = [req.hot_from for req in requests] + [0, 0] * padded
        agree(hot_from, plan.hot_from.tolist(), "first positions on the device")
        owed = lengths.size * 3 * hot + 6 * hot if padded else owed
        agree((owed, owed), (len(plan.backup_from), len(plan.backup_to)), "tokens to back up")
        self.refused(ArgumentError, lambda: self.tier.back_up(plan))
        self.reached("planned by a bound", bounded)
        return True

    def _together(
        self,
        requests: list[TieredRequest],
        added: list[Ints],
        plan: LastLocation,
        beside: list[TieredRequest],
        order: Sequence[int],
    ) -> None:
        """The forward of a step whose requests are in the tier and outside."""
        others = list(beside)
        if others and not self._tried(lambda: self.pages.advance(self.handles(others)), "device pages"):
            others = []
        self.reached("requests inside and outside in one plan", bool(others))
        added = added + [self._new(1) for _ in others]
        rows = [row for row in order if row < len(requests) + len(others)]
        everyone = [(requests + others)[row] for row in rows]
        whole = ForwardPlan.of(
            self.handles(everyone),
            np.array([req.length + 1 for req in everyone], dtype=np.int64),
            prompt_ids=[[7]] * len(everyone),
            pages=self.pages,
            tier=plan,
        )
        hot_from = [req.hot_from for req in everyone]
        agree(hot_from, whole.extras["hot_from"].tolist(), "first positions on the device, of all")
        places = np.concatenate([self._locations(req, req.length, req.length + 1) for req in everyone])
        self._forward(everyone, [added[row] for row in rows], places, plan, True, whole)

    # Leaving

    @_READY
    @rule(data=st.data(), raw=st.booleans())
    def finish(self, data: st.DataObject, raw: bool) -> None:
        self._finish(self._some(data, self.of(READY)), raw)

    def _finish(self, requests: list[TieredRequest], raw: bool) -> None:
        slots = self.handles(requests)
        if raw:
            self.pages.release_requests(slots, after=self.last)
        else:
            self.tier.finish(slots, after=self.last)
        self._left(requests)
        self.refused(STALE, lambda: self.tier.finish(slots, after=None))

    @_INSIDE
    @rule(data=st.data(), ended=st.booleans())
    def abort(self, data: st.DataObject, ended: bool) -> None:
        self._abort(self._some(data, self.of(STAGED, DIRECT, READY)), ended)

    def _abort(self, requests: list[TieredRequest], ended: bool) -> None:
        staged = any(req.state is STAGED for req in requests)
        before, places = self.host.stats.pending, self.tier.host_locations(self.handles(requests), 1)
        self.tier.abort(self.handles(requests), after=self.last)
        if requests and levels.cheap:
            self.refused(Code.SLOT_STALE_HANDLE, lambda: places.np)
        for request in requests:
            if ended and request.writer is not None:
                request.writer.end()
        self._left(requests)
        self.reached("staged abort while the copy is under way", staged and self.host.stats.pending > before)

    @_STAGED
    @rule()
    def abort_staged(self) -> None:
        self._abort(self.of(STAGED), False)

    @_DIRECT
    @rule()
    def free_direct(self) -> None:
        """The slots alone are freed, by code that knows nothing of the tier: the host locations go with them."""
        requests = self.of(DIRECT)
        self.slots.free(self.handles(requests), after=self.last)
        self._left(requests)

    @_OUTSIDE
    @rule(data=st.data())
    def leave_outside(self, data: st.DataObject) -> None:
        for request in self._some(data, self.of(OUTSIDE)):
            self._leave_outside(request)

    def _leave_outside(self, request: TieredRequest) -> None:
        self.pages.release_requests(request.slot, after=self.last)
        self._left([request])

    @rule()
    def all_leave(self) -> None:
        """All leave, the device ends: then locations that writers may still write are pending, and no others."""
        self._abort(self.of(STAGED, DIRECT, READY), False)
        for request in self.of(OUTSIDE):
            self._leave_outside(request)
        self.host.free(self.strangers, after=None)
        self.strangers = []
        self._resolve(0)
        self.rt.synchronize()
        self.slots.expect_idle()
        self.pages.expect_idle()
        self.tier.expect_idle()
        for _ in range(4):
            self._write_late()
            ask(self.host.verify)
        stats, late = self.host.stats, sum(len(writer.ranges) for writer in self.late_writers)
        agree((late, stats.size - late), (stats.pending, stats.free), "host locations pending and free, all gone")
        agree(self.pages.num_pages, self.pages.stats.free, "device pages free, all gone")

    @rule(among=st.integers(0, 3))
    def clear(self, among: int) -> None:
        """The host waits and begins anew, now and then; locations that a writer may write stay pending."""
        if among:
            return
        if not self.of(DIRECT):
            self._reserve(1, 2, 1, 1)
        self._resolve(0)
        self.rt.synchronize()
        self.reached("cleared beside a writer that has not ended", any(req.state is DIRECT for req in self.requests))
        self.slots.clear()
        self._left(list(self.requests))
        agree(self.pages.num_pages, self.pages.stats.free, "device pages free, all gone")

    # Time and misuse

    @rule(read=st.integers(0, 2), all_of_it=st.booleans())
    def time_passes(self, read: int, all_of_it: bool) -> None:
        """The host reads the results of forwards, or waits for everything."""
        self._resolve(read)
        if all_of_it:
            self.rt.synchronize()

    @precondition(lambda self: self.gone)
    @rule(back=st.integers(1, 3))
    def use_gone(self, back: int) -> None:
        """Handles and ranges of requests that left are refused everywhere."""
        late = self.gone[-min(back, len(self.gone))]
        tier, slot = self.tier, late.slot
        self.refused(
            Code.SLOT_STALE_HANDLE,
            lambda: tier.reserve(slot, 1, 1),
            lambda: tier.admit_direct(slot),
            lambda: tier.map_last_location(slot, late.length + 1),
            lambda: tier.states(slot),
            lambda: tier.host_locations(slot, 1),
            lambda: tier.abort(slot, after=None),
        )
        ranges = late.ranges
        if ranges is not None:
            self.refused(STALE, lambda: self.host.free(ranges, after=None))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), misuse=st.sampled_from(MISUSES))
    def misuse(self, data: st.DataObject, misuse: Misuse[It]) -> None:
        self.refuses(misuse, (self.tier, self._some(data, self.requests)[0].slot))
