"""Transfers into host memory and device pages over an engine that injects faults: no byte is wrong, and none is lost.

A prefill group of one or two pipeline stages and ranks, and a decode worker; both end and start again. Messages arrive
in any order, twice, or late; writes split, fail, end unknown and go on landing. Memory is freed at any time, and the
pools keep it until `Lease.ended`. KV is sent in the same turn as the forward that computes it, or later. With the KV go
index keys and a state, into memory of the decode worker's device. Each request has host locations or device pages.

The model is a copy of each byte of the decode worker. It does not ask the library what may change: it follows from the
requests, and from what the network still has under way.
"""

import random
from collections.abc import Iterable, Mapping
from functools import partial

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import Code, Locations, PagePool, SlotPool, Slots, invariants, levels
from batchstate.errors import ArgumentError, HandshakeError, PoolExhaustedError, TransferError
from batchstate.kv.host_pool import HostKVPool, HostRanges, KVBuffer
from batchstate.kv.pages import PageLease
from batchstate.mirror import StateRow
from batchstate.runtime import Fence
from batchstate.runtime.memory import bytes_of
from batchstate.testing.fences import ManualFence, ManualStream
from batchstate.transport.engines.in_process import GRACE_STEPS, Faults, InProcessEngine, Network
from batchstate.transport.plan import KVLayout, Layouts
from batchstate.transport.receiver import Lease, LeaseState, Receiver
from batchstate.transport.sender import Sender, Transfer, TransferState
from batchstate.transport.workers import ON_DEVICE, Description
from tests.selfcheck.machine import Machine, agree, ask

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

LAYERS = ("keys", "values")
HEADS, HEAD_BYTES = 2, 2
OTHERS = (KVBuffer("index", (3,), torch.uint8, on_device=True), KVBuffer("state", (5,), torch.uint8, on_device=True))
"""Index keys have a row per token, and a state one per request; every rank of its stage has all of it."""
SOURCE_PAGES = 24
POISON = 0xC3  # written by a pool, at `full`, over memory that is free


def layouts_of(page_size: int, whole: bool, stage: int = 0, stages: int = 1, rank: int = 0, degree: int = 1) -> Layouts:
    """The layouts of a worker: of two stages the first has keys and states, the second values and index keys.

    Pages of index keys are `whole` where they are not token-major.
    """
    keys, values = LAYERS
    first, second = (stage == 0, stage == stages - 1)
    of_kv = KVLayout(page_size, "uint8", LAYERS, HEADS * HEAD_BYTES // degree, rank, degree, HEADS)
    index = KVLayout(page_size, "uint8", ("index",), 3, rank, degree, replicated=True, token_major=not whole)
    state = KVLayout(page_size, "uint8", ("state",), 5, rank, degree, replicated=True, per_request=True)
    return (
        attrs.evolve(of_kv, stage=(keys,) * first + (values,) * second),
        attrs.evolve(index, stage=index.layers * second),
        attrs.evolve(state, stage=state.layers * first),
    )


TURNS = st.integers(0, 5)
"""Turns of both sides: every rule takes some, since Hypothesis leaves rules out of an example, `serve` too."""

CALM = Faults()
BREEZE = Faults(delay=5, split=0.7, duplicate_tag=0.6, duplicate_rows=0.2)
STORM = attrs.evolve(BREEZE, failed=0.01, unknown=0.04, stuck=0.2, lost_tag=0.01, refused=0.01)
HURRICANE = attrs.evolve(STORM, delay=6, failed=0.05, unknown=0.25, lost_tag=0.05, refused=0.05)


def rows_of(spans: Iterable[tuple[int, int]], memories: Mapping[str, Bytes]) -> set[tuple[str, int]]:
    """Buffer and row of each byte in spans of memory: addresses, and how many bytes from there on."""
    rows = set[tuple[str, int]]()
    for address, nbytes in spans:
        for name, memory in memories.items():
            begin, size = address - memory.ctypes.data, memory.shape[1]
            if 0 <= begin < memory.nbytes:
                rows |= {(name, row) for row in range(begin // size, (begin + nbytes - 1) // size + 1)}
    return rows


@attrs.define(eq=False)
class Attempt:
    lease: Lease
    kv: dict[str, Bytes]  # that is to arrive, uint8[rows, bytes] for each buffer by its name
    ranges: HostRanges | PageLease | None  # None where it has no tokens
    row: HostRanges  # of its state
    unit: int = 1  # tokens of index keys that go in one piece
    slot: Slots | None = None  # that owns the device pages, once all has arrived
    told: LeaseState | None = None  # the final state, as `poll` has said it
    ended: bool = False  # when the memory was last looked at

    @property
    def locations(self) -> Ints:
        if self.ranges is None:
            return np.empty(0, np.int64)
        return np.concatenate([np.arange(at, at + n) for at, n in self.ranges.table.tolist()])

    @property
    def tokens(self) -> Ints:
        return self.locations[: self.lease.num_tokens]

    def buffer(self, name: str) -> str:
        """The memory that a kind of KV comes into."""
        return name + ON_DEVICE * (name != "state" and isinstance(self.ranges, PageLease))

    def rows(self, memory: str) -> Ints:
        """Its rows in a memory."""
        if memory == "state":
            return self.row.locations()
        if memory != self.buffer(name := memory.removesuffix(ON_DEVICE)):
            return np.empty(0, np.int64)
        rest = -self.lease.num_tokens % self.unit if name == "index" else 0  # of the last page, which comes as a whole
        return self.locations[: self.lease.num_tokens + rest]


@attrs.define(eq=False)
class PrefillInstance:
    name: str
    layouts: Layouts
    engine: InProcessEngine
    sender: Sender
    memories: dict[str, Bytes]  # uint8[rows, bytes] for each buffer by its name
    free: list[int]  # source pages
    pages: dict[Transfer, list[int]] = attrs.field(factory=dict)
    forwards: dict[Transfer, tuple[ManualFence, Ints, dict[str, Bytes]]] = attrs.field(factory=dict)
    """Transfer -> the fence of the forward that computes its KV, the rows that it writes, and the values."""
    stream: ManualStream = attrs.field(factory=ManualStream)  # of the forwards, which run late

    def run_forwards(self) -> None:
        held = self.layouts[0].held
        mine = slice(held.first * HEAD_BYTES, (held.first + held.heads) * HEAD_BYTES)
        for transfer, (_, rows, kv) in self.forwards.items():
            for name, memory in self.memories.items():
                if name == "state":
                    memory[self.pages[transfer][0]] = kv[name]
                else:
                    memory[rows] = kv[name][:, mine] if name in LAYERS else kv[name]
        self.stream.complete(self.stream.depth)


class TransfersMachine(Machine):
    """A prefill group that writes into a decode worker's memory."""

    NAME = "transfers"
    TARGETS = (
        "a grant",
        "a lease delivered",
        "a lease failed",
        "a lease aborted",
        "a tag twice",
        "a late tag",
        "a write refused",
        "a send before the KV is written refused",
        "a grant of memory that is not kept refused",
        "freed before it has ended",
        "freed while its writer may still write",
        "device pages freed while their writer may still write",
        "device pages given to a request",
        "device pages asked for before all had arrived",
        "two stages and two ranks",
        "pages of another size",
        "pages sent as a whole",
        "states without room",
        "the writer died while it wrote",
        "the decode worker died while it was written to",
        "an introduction of an earlier instance refused",
        "all leases ended by themselves",
        "host tokens exhausted",
    )

    @initialize(
        seed=st.integers(0, 2**16),
        page_size=st.sampled_from([1, 2, 3, 1, 2, 16, 64]),
        pages=st.sampled_from(["whole", "one token", "alike", "one token"]),
        shape=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
        num_pages=st.integers(4, 10),
        faults=st.sampled_from([HURRICANE, HURRICANE, STORM, BREEZE, CALM]),
        max_rows=st.sampled_from([2, 3, 1024, 1]),
    )
    def begin(
        self,
        seed: int,
        page_size: int,
        pages: str,
        shape: tuple[int, int],
        num_pages: int,
        faults: Faults,
        max_rows: int,
    ) -> None:
        """All workers meet. The host's pages have one token, or are as the writers', those of index keys not split."""
        self.open()
        self.dice = random.Random(seed)
        self.network = Network(self.dice)
        self.faults = faults
        self.page_size, (self.stages, self.degree) = page_size, shape
        self.part = max(page_size // 2, 1)
        self.max_rows = max_rows * self.part
        self.host_size = 1 if pages == "one token" else page_size
        self.num_pages = num_pages * page_size // self.host_size
        self.reached("two stages and two ranks", shape == (2, 2))
        self.whole = pages == "whole" and page_size > 1
        self.reached("pages of another size", self.host_size != page_size)
        self.reached("pages sent as a whole", self.whole)
        self.channel: list[tuple[bool, str, bytes]] = []  # to the decode worker from a writer, or from it to a writer
        self.named = 0
        self.writers: list[PrefillInstance] = []
        self._start_decode()
        self.writers += [self._start_writer(number) for number in range(self.stages * self.degree)]
        for _ in range(2):
            self._request(2 * page_size)

    def _start_decode(self) -> None:
        """The decode worker begins, with memory that is its own, and meets the writers."""
        kv = [KVBuffer(layer, (HEADS * HEAD_BYTES,), torch.uint8) for layer in LAYERS]
        self.host = HostKVPool(self.rt, self.num_pages, self.host_size, layers=[*kv, OTHERS[0]])
        self.states = HostKVPool(self.rt, 5, layers=OTHERS[1:], name="states")
        self.slots, size = SlotPool(self.rt, 8), self.dice.choice((1, 2, 4))
        tokens, size = self.num_pages * self.host_size, self.page_size if self.whole else size
        self.pages = PagePool(self.rt, self.slots, -(-tokens // size), size, max_tokens_per_request=16 * tokens)
        self.engine = InProcessEngine(self.network, self.faults, max_rows=self.max_rows)
        buffers = (*self.host.contiguous_buffers(), *self.states.contiguous_buffers())
        regions = [self.engine.register(buffer.memory, buffer.name) for buffer in buffers]
        self.memories = {buffer.name: buffer.memory.reshape(-1, buffer.item_bytes) for buffer in buffers}
        for spec in self.host.specs:
            shape, name = (self.pages.location_capacity, spec.item_bytes), spec.name + ON_DEVICE
            self.memories[name] = self.rt.device_zeros(shape, torch.uint8, name=name)
        there = [
            self.engine.register(self.memories[spec.name + ON_DEVICE], spec.name + ON_DEVICE)
            for spec in self.host.specs
        ]
        self.rt.synchronize()  # the network is on no stream that could wait for the zeros
        self.of_host = {
            name: bytes_of(memory).reshape(memory.shape)
            for name, memory in self.memories.items()
            if memory.device.type == "cpu"
        }
        self.shadow = {name: self._bytes(name).copy() for name in self.memories}
        layouts = layouts_of(self.host_size, self.whole)
        description = Description("decode", self.engine.instance, layouts, self.engine.endpoint())
        there.append(regions[-1])  # a state is where it is, wherever the tokens are
        self.receiver = Receiver(self.engine, description, regions, there, clock=self.now, grace_seconds=GRACE_STEPS)
        self.attempts: list[Attempt] = []
        self.freed: list[Attempt] = []  # whose leases have not ended
        self.told: set[Lease] = set()
        self.granted: dict[tuple[str, int], dict[str, Bytes]] = {}  # the KV of each lease, by epoch and serial
        self.earlier: list[bytes] = []  # introductions of writers that have ended
        self.unkept = 0  # grants of memory that is free too early, which the library refuses
        for writer in self.writers:
            self._meet(writer.sender)

    def _meet(self, sender: Sender) -> None:
        self.receiver.accept(sender.introduce())
        sender.accept(self.receiver.introduce())

    def now(self) -> float:
        return float(self.network.now)

    def _start_writer(self, number: int) -> PrefillInstance:
        engine = InProcessEngine(self.network, self.faults, max_rows=self.max_rows)
        name, (stage, rank) = f"prefill-{number}", divmod(number, self.degree)
        layouts = layouts_of(self.page_size, self.whole, stage, self.stages, rank, self.degree)
        rows = (SOURCE_PAGES + 1) * self.page_size
        memories: dict[str, Bytes] = {
            layer: np.zeros((rows, layout.item_bytes), dtype=np.uint8) for layout in layouts for layer in layout.stage
        }
        regions = [engine.register(memory, layer) for layer, memory in memories.items()]
        description = Description(name, engine.instance, layouts, engine.endpoint())
        sender = Sender(engine, description, regions, idle_polls=2, clock=self.now)
        self._meet(sender)
        return PrefillInstance(name, layouts, engine, sender, memories, list(range(1, SOURCE_PAGES + 1)))

    @property
    def names(self) -> list[str]:
        return [f"prefill-{number}" for number in range(self.stages * self.degree)]

    # Checks

    def check(self) -> None:
        """Every byte is as it was left, but where a writer may still write; every location is free, pending or live."""
        self._look()
        self.host.verify()
        self.states.verify()
        self.pages.verify()
        self.reached("device pages freed while their writer may still write", self.pages.stats.pending > 0)
        stats = self.host.stats
        agree(stats.size, stats.free + stats.pending + stats.live, "free + pending + live host tokens")
        self.reached("freed while its writer may still write", stats.pending > 0)

    def _bytes(self, name: str) -> Bytes:
        """The rows of a buffer; a copy, where it is memory of a device."""
        return self.of_host[name] if name in self.of_host else self.rt.inspect(self.memories[name])

    def _look(self) -> None:
        """Compares each byte. Those of leases that have not ended may change; free ones may be poisoned."""
        if self.automatic:
            return
        leased = [*self.attempts, *self.freed]
        for name, shadow in self.shadow.items():
            memory = self._bytes(name)
            owned, quiet = np.zeros(len(shadow), np.bool_), np.ones(len(shadow), np.bool_)
            for attempt in leased:
                rows = attempt.rows(name)
                owned[rows] = True
                quiet[rows] &= attempt.ended
            changed = (memory != shadow).any(axis=1) & quiet & (owned | (memory != POISON).any(axis=1))
            ask(invariants.transfer_late_write, np.arange(len(shadow)), changed, object=name, operation="look")
            shadow[:] = memory
        for attempt in leased:
            if not attempt.ended and attempt.lease.ended.query():
                attempt.ended = True
                spans = [(write.target, write.nbytes) for write in self.network.under_way(self.engine)]
                held = {(name, int(row)) for name in self.of_host for row in attempt.rows(name)}
                agree(set(), rows_of(spans, self.of_host) & held, "rows that are still written", attempt.lease)
        self.freed = [attempt for attempt in self.freed if not attempt.ended]

    def _delivered(self, attempt: Attempt) -> None:
        """All KV has arrived, and it is right. Then decoding goes on, on its own memory."""
        agree(True, attempt.lease.ended.query(), "ended", attempt.lease)
        self._look()
        if isinstance(attempt.ranges, PageLease) and self.slots.stats.free:
            attempt.slot = self.slots.take(1)
            self.pages.commit(attempt.ranges, attempt.lease.num_tokens)
            extension = self.pages.assign(attempt.ranges, attempt.slot, attempt.lease.num_tokens)
            agree(attempt.tokens.tolist(), extension.locations.np.tolist(), "the tokens of the request", attempt.lease)
            self.reached("device pages given to a request")
        for kind, kv in attempt.kv.items():
            name = attempt.buffer(kind)
            rows = attempt.rows(name)[: len(kv)]
            ask(invariants.mirror_equal, kv, self._bytes(name)[rows], object=attempt.lease, operation="delivered")
            if name in self.of_host:
                self.of_host[name][rows] = self.shadow[name][rows] = ~kv

    # The decode worker

    @rule(tokens=st.integers(0, 9), times=TURNS)
    def request(self, tokens: int, times: int) -> None:
        self._request(tokens)
        self.serve(times, True)

    def _request(self, tokens: int, again: Lease | None = None) -> None:
        try:
            if again is None:
                self.named += 1
                tokens = tokens * self.part - self.dice.randrange(self.part) * bool(tokens)
                writers = self.dice.sample(self.names, len(self.names))
                lease = self.receiver.lease(f"request {self.named}", tokens, writers)
            else:
                lease = self.receiver.retry(again)
        except TransferError:
            return  # the writer is gone
        kept = self.dice.random() < 0.9
        given_up = self.dice.random() < 0.05
        try:
            (row,) = self.states.take([1], [self.named], writer=lease.ended)
        except PoolExhaustedError:
            self.receiver.abort(lease)
            self.reached("states without room")
            return
        try:
            ranges = self._memory(tokens, lease.ended if kept else None)
        except PoolExhaustedError:
            self.receiver.abort(lease)
            self.states.free(row, after=None)
            self.reached("host tokens exhausted")
            return
        kv = {
            name: np.frombuffer(self.dice.randbytes(rows * memory.shape[1]), np.uint8).reshape(-1, memory.shape[1])
            for name, memory in self.memories.items()
            if not name.endswith(ON_DEVICE)
            for rows in [1 if name == "state" else tokens]
        }
        if given_up:
            self.receiver.abort(lease)
        try:
            self.receiver.grant(lease, ranges, row)
        except (ArgumentError, TransferError) as error:
            if kept and not self.unkept and not (given_up and isinstance(error, TransferError)):
                raise
            self.reached("a grant of memory that is not kept refused", not kept)
            self.receiver.abort(lease)
            self._give_back(ranges)
            self.states.free(row, after=None)
            return
        self.reached("a grant")
        self.unkept += not kept and ranges is not None
        self.attempts.append(Attempt(lease, kv, ranges, row, self.page_size if self.whole else 1))
        self.granted[lease.epoch, lease.serial] = kv

    def _memory(self, tokens: int, writer: Fence | None) -> HostRanges | PageLease | None:
        """Host locations or device pages for a request."""
        if not tokens:
            return None
        if self.dice.random() < 0.5:
            return self.pages.take(-(-tokens // self.pages.page_size), writer=writer)
        return self.host.take(tokens, [self.named], writer=writer)[0]

    def _give_back(self, ranges: HostRanges | PageLease | None) -> None:
        if isinstance(ranges, PageLease):
            ranges.release(after=None)
        elif ranges is not None:
            self.host.free(ranges, after=None)

    @rule(times=TURNS, free=st.booleans(), retry=st.booleans())
    def collect(self, times: int, free: bool, retry: bool) -> None:
        """The receiver reports its leases; memory of those that failed is freed, behind their end."""
        self.serve(times, False)
        self._collect()
        if free:
            self._free_failed(retry)

    def _free_failed(self, retry: bool) -> None:
        for attempt in list(self.attempts):
            if attempt.told in (LeaseState.FAILED, LeaseState.ABORTED):
                self._free(attempt)
                self.reached("freed before it has ended", not attempt.lease.ended.query())
                if retry:
                    self._request(attempt.lease.num_tokens, attempt.lease)

    def _collect(self) -> None:
        attempts = {attempt.lease: attempt for attempt in self.attempts}
        for lease, early in attempts.items():
            if isinstance(early.ranges, PageLease) and lease.state is LeaseState.WAITING and levels.cheap:
                self.refused(Code.PAGE_UNWRITTEN, partial(self.pages.commit, early.ranges, lease.num_tokens))
                self.reached("device pages asked for before all had arrived")
        for lease in self.receiver.poll():
            agree(False, lease in self.told, "told before", lease)
            self.told.add(lease)
            attempt = attempts.get(lease)
            if attempt is not None:
                attempt.told = lease.state
                self.reached(f"a lease {lease.state.value}")
                if lease.state is LeaseState.DELIVERED:
                    self._delivered(attempt)
        self.reached("a tag twice", self.receiver.ignored.duplicate > 0)
        self.reached("a late tag", self.receiver.ignored.late > 0)

    def _free(self, attempt: Attempt) -> None:
        self.attempts.remove(attempt)
        self.freed += [] if attempt.ended else [attempt]
        if attempt.slot is None:
            self._give_back(attempt.ranges)
        else:
            self.pages.release_requests(attempt.slot, after=None)
        self.states.free(attempt.row, after=None)

    @precondition(lambda self: any(attempt.told is LeaseState.DELIVERED for attempt in self.attempts))
    @rule(times=TURNS)
    def finish(self, times: int) -> None:
        self._finish()
        self.serve(times, True)
        self._request(1)

    def _finish(self) -> None:
        for attempt in [attempt for attempt in self.attempts if attempt.told is LeaseState.DELIVERED]:
            self._free(attempt)

    @precondition(lambda self: self.attempts)
    @rule(times=TURNS)
    def abort(self, times: int) -> None:
        self.serve(times, False)
        self.receiver.abort(self.dice.choice(self.attempts).lease)

    @rule(tokens=st.integers(0, 6), times=TURNS, steps=st.integers(0, 6), which=st.integers(0, 3))
    def suspect(self, tokens: int, times: int, steps: int, which: int) -> None:
        """A writer is suspected to be gone; it writes on, and introduces itself again."""
        self._request(tokens)
        self.serve(times, True)
        writer = self.writers[which % len(self.writers)]
        self.receiver.peer_lost(writer.name)
        self._collect()
        self._free_failed(False)
        self.time_passes(steps)
        self.receiver.accept(writer.sender.introduce())

    # The prefill worker

    @rule(tokens=st.integers(1, 6), times=st.integers(2, 12), whole=st.booleans(), end=st.integers(0, 2))
    def exchange(self, tokens: int, times: int, whole: bool, end: int) -> None:
        """Three requests are served for a while; they may be aborted and retried, and leave once they have arrived."""
        for _ in range(3):
            self._request(tokens)
        self.serve(times, whole)
        for attempt in self.attempts if end > 1 else ():
            self.receiver.abort(attempt.lease)
        self._collect()
        self._free_failed(end > 1)
        for _ in range(max(times, 6)):
            self.serve(2, whole)
            self._collect()
            if end:
                self._finish()

    @rule(times=st.integers(1, 8), whole=st.booleans())
    def serve(self, times: int, whole: bool) -> None:
        self._use_the_rest()
        for _ in range(times):
            self._carry(0.8)
            for writer in self.writers:
                if not writer.engine.killed:
                    self._prefill(writer, whole)
            self.network.step()
            self._look()

    @rule(steps=st.integers(1, 4))
    def time_passes(self, steps: int) -> None:
        self._use_the_rest()
        for _ in range(steps):
            self.network.step()
            self._look()

    def _use_the_rest(self) -> None:
        """Another request has all memory that is free, for a moment. At `full` pools look at what they hand out."""
        for pool in (self.host, self.states) if levels.full else ():
            if free := pool.stats.free:
                pool.free(pool.take([free], [0]), after=None)
        if levels.full:
            self.pages.take(self.pages.stats.free).release(after=None)

    def _carry(self, share: float) -> None:
        self.channel += [(False, to, message) for to, message in self.receiver.outbox]
        self.receiver.outbox.clear()
        for writer in self.writers:
            self.channel += [(True, writer.name, message) for _, message in writer.sender.outbox]
            writer.sender.outbox.clear()
        self.dice.shuffle(self.channel)
        later = []
        for to_decode, name, message in self.channel:
            arrives = self.dice.random() < share
            if not arrives or self.dice.random() < 0.2:
                later.append((to_decode, name, message))
            writer = self.writers[self.names.index(name)]
            if arrives and to_decode and not self.engine.killed:
                self.receiver.on_message(message, name)
            elif arrives and not to_decode and not writer.engine.killed:
                writer.sender.on_message(message, "decode")
        self.channel = later

    def _prefill(self, writer: PrefillInstance, whole: bool) -> None:
        writer.sender.poll()
        for transfer in [transfer for transfer in writer.pages if transfer.sources_free.query()]:
            pages = writer.pages.pop(transfer)
            spans = [(write.source, write.nbytes) for write in self.network.under_way(writer.engine)]
            for name, memory in writer.memories.items():
                rows = np.array(pages) if name == "state" else self._rows(pages)
                read = rows_of(spans, {name: memory}) & {(name, row) for row in rows.tolist()}
                agree(set(), read, "source rows that count as free, and are still read", transfer)
                memory[rows] = self.dice.randrange(256)  # they are another request's
            writer.free += pages
            del writer.forwards[transfer]
        if self.dice.random() < 0.8:
            writer.run_forwards()
        for transfer in writer.sender.transfers():
            if transfer.state is TransferState.OPEN and not transfer.complete:
                self._send(writer, transfer, whole)

    def _send(self, writer: PrefillInstance, transfer: Transfer, whole: bool) -> None:
        size, total = self.page_size, transfer.grant.num_tokens
        kv = self.granted.get((transfer.grant.sender, transfer.grant.serial))
        needed = max(-(-total // size), 1)  # the first has the state's row too
        without = transfer not in writer.pages and needed > len(writer.free)
        if kv is None or without or self.dice.random() < 0.02:
            writer.sender.fail(transfer, "no memory")
            return
        if transfer not in writer.pages:
            self.dice.shuffle(writer.free)  # so that rows are many
            pages = [writer.free.pop() for _ in range(needed)]
            writer.pages[transfer] = pages
            writer.forwards[transfer] = writer.stream.record(), self._rows(pages)[:total], kv
        left = total - transfer.sent
        tokens = left if whole or left <= size else size * self.dice.randint(1, min(2, left // size))
        rows = self._rows(writer.pages[transfer])[transfer.sent : transfer.sent + tokens]
        sources, last = Locations.from_host(self.rt, rows), transfer.sent + tokens == total
        computed = writer.forwards[transfer][0]
        states = last and "state" in writer.memories
        row = StateRow.from_host(self.rt, writer.pages[transfer][:1]) if states else None
        try:
            writer.sender.send(transfer, sources, transfer.sent, last, after=computed, state_row=row)
        except TransferError:
            self.reached("a write refused")
        except ArgumentError:
            if computed.query():
                raise
            writer.sender.hold(transfer)
            self.reached("a send before the KV is written refused")

    def _rows(self, pages: list[int]) -> Ints:
        size = self.page_size
        return (np.array(pages, dtype=np.int64)[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)

    # Ends of processes

    @rule(times=TURNS, told=st.booleans(), steps=st.integers(0, 3), which=st.integers(0, 3))
    def writer_dies(self, times: int, told: bool, steps: int, which: int) -> None:
        """A prefill process ends, as is known at once or later; its writes land for a while. Another starts."""
        self.serve(times, True)
        number = which % len(self.writers)
        writer = self.writers[number]
        self._lose_half(True, writer.name)
        self.network.kill(writer.engine)
        self.reached("the writer died while it wrote", bool(writer.sender.transfers()))
        if told:
            self.receiver.peer_ended(writer.name)
            self._collect()
            self._free_failed(False)
            self.time_passes(steps)
        else:
            self.serve(steps, True)
        self.earlier.append(writer.sender.introduce())
        self.writers[number] = self._start_writer(number)

    def _lose_half(self, by_writer: bool, *names: str) -> None:
        self._carry(0.0)
        said = [message for message in self.channel if message[0] == by_writer and message[1] in names]
        lost = self.dice.sample(said, len(said) // 2)
        self.channel = [message for message in self.channel if message not in lost]

    @precondition(lambda self: len(self.told) > 2)
    @rule(times=TURNS, told=st.integers(0, 3), steps=st.integers(0, 3))
    def decode_worker_dies(self, times: int, told: int, steps: int) -> None:
        """The decode process ends, with all its memory; some writers hear of it. Another starts, and all meet it."""
        self._request(9)
        self.serve(times, True)
        self.reached("the decode worker died while it was written to", bool(self.network.under_way(self.engine)))
        self._lose_half(False, *self.names)
        self.network.kill(self.engine)
        for writer in self.writers[:told]:
            writer.sender.peer_ended("decode", self.engine.instance)
        self.serve(steps, True)
        self._start_decode()

    @precondition(lambda self: self.earlier)
    @rule()
    def earlier_introduction(self) -> None:
        """An introduction that was under way since before its writer ended arrives, and is refused."""
        self.refused(HandshakeError, lambda: self.receiver.accept(self.dice.choice(self.earlier)))
        self.reached("an introduction of an earlier instance refused")

    @precondition(lambda self: len(self.told) > 2)
    @rule(by_themselves=st.booleans())
    def all_end(self, by_themselves: bool) -> None:
        """All is given up, and the writers drain or end; after a while all memory is free again."""
        for attempt in self.attempts:
            self.receiver.abort(attempt.lease)
        if by_themselves and not self.faults.stuck:
            for _ in range(200):
                if all(lease.ended.query() for lease in self.receiver.leases()):
                    break
                self.serve(1, True)
                self._collect()
            agree([], [lease for lease in self.receiver.leases() if not lease.ended.query()], "leases that never end")
            self.reached("all leases ended by themselves")
        else:
            for number in range(len(self.writers)):
                self.writer_dies(0, True, 0, number)
        self._collect()
        for attempt in list(self.attempts):
            self._free(attempt)
        for _ in range(GRACE_STEPS + 1):
            self.network.step()
            self._look()
            self.receiver.poll()
        agree((), self.receiver.leases(), "leases that have not ended when all have")
        for pool in (self.host, self.states):
            stats = pool.stats
            agree(
                (stats.size, 0, 0), (stats.free, stats.pending, stats.live), "free, pending, live when all have ended"
            )
        agree(self.pages.num_pages, self.pages.stats.free, "free device pages when all have ended")
