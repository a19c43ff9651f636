"""Transfers into host memory over an engine that injects faults: what is delivered is right, what is freed is quiet.

One prefill worker, which ends and starts again, and one decode worker. Messages arrive in any order, twice, or late;
writes split, fail, end unknown and go on landing. Memory is freed at any time, and the pool keeps it until
`Lease.ended`. KV is sent in the same turn as the forward that computes it, or later.
"""

import random

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import invariants
from batchstate.errors import ArgumentError, PoolExhaustedError, TransferError
from batchstate.indices import Locations
from batchstate.kv.host_pool import HostKVPool, HostRanges
from batchstate.runtime.memory import bytes_of
from batchstate.testing.fences import ManualFence, ManualStream
from batchstate.testing.machine import Machine, agree, ask
from batchstate.transport.engines.in_process import GRACE_STEPS, Faults, InProcessEngine, Network
from batchstate.transport.handshake import Description
from batchstate.transport.layout import KVLayout
from batchstate.transport.receiver import Lease, LeaseState, Receiver
from batchstate.transport.sender import Sender, Transfer, TransferState

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

LAYERS = ("keys", "values")
ITEM_BYTES = 4
SOURCE_PAGES = 24

BREEZE = Faults(delay=6, split=0.7, duplicate_tag=0.6, duplicate_rows=0.2)
STORM = attrs.evolve(BREEZE, failed=0.05, unknown=0.25, stuck=0.2, lost_tag=0.05, refused=0.05)


@attrs.define(eq=False)
class Attempt:
    """One attempt of one request.

    Attributes:
        lease: of the receiver.
        kv: what is to arrive, uint8[tokens, ITEM_BYTES] for each layer.
        ranges: the host locations; None where it needs none.
        told: the final state, as `poll` has said it.
    """

    lease: Lease
    kv: tuple[Bytes, ...]
    ranges: HostRanges | None
    told: LeaseState | None = None

    @property
    def tokens(self) -> Ints:
        """Its host locations, int64[n]."""
        return np.empty(0, np.int64) if self.ranges is None else self.ranges.locations(0, self.lease.num_tokens)


@attrs.define(eq=False)
class PrefillInstance:
    """One instance of the prefill worker.

    Attributes:
        engine: its end of the network.
        sender: of the library.
        memories: uint8[tokens, ITEM_BYTES] for each layer.
        free: source pages that are not used.
        pages: of each transfer.
        forwards: of each transfer, the fence of the forward that computes its KV, and what it writes: rows and values.
        stream: the forwards, which run late.
    """

    engine: InProcessEngine
    sender: Sender
    memories: list[Bytes]
    free: list[int]
    pages: dict[Transfer, list[int]] = attrs.field(factory=dict)
    forwards: dict[Transfer, tuple[ManualFence, Ints, tuple[Bytes, ...]]] = attrs.field(factory=dict)
    stream: ManualStream = attrs.field(factory=ManualStream)

    def run_forwards(self) -> None:
        """All forwards run."""
        for _, rows, kv in self.forwards.values():
            for memory, values in zip(self.memories, kv, strict=True):
                memory[rows] = values
        self.stream.complete(self.stream.depth)


class TransfersMachine(Machine):
    """A prefill worker that writes into a decode worker's host memory."""

    NAME = "transfers"
    TARGETS = (
        "a lease delivered",
        "a lease failed",
        "a lease aborted",
        "another attempt",
        "a tag twice",
        "a late tag",
        "a write refused",
        "a send before the KV is written refused",
        "a grant of memory that is not kept refused",
        "freed before it has ended",
        "freed while its writer may still write",
        "the writer died while it wrote",
        "host tokens exhausted",
    )

    @initialize(
        seed=st.integers(0, 2**16),
        page_size=st.integers(1, 3),
        num_pages=st.integers(4, 10),
        faults=st.sampled_from([STORM, STORM, BREEZE]),
        max_rows=st.sampled_from([1, 2, 3]),
    )
    def begin(self, seed: int, page_size: int, num_pages: int, faults: Faults, max_rows: int) -> None:
        """Both workers meet."""
        self.open()
        self.dice = random.Random(seed)
        self.network = Network(self.dice)
        self.faults, self.max_rows = faults, max_rows
        self.layout = KVLayout(page_size, "uint8", LAYERS, ITEM_BYTES, 0, 1, 1)
        self.host = HostKVPool(
            self.rt, num_pages, page_size, layers=LAYERS, item_shape=(ITEM_BYTES,), dtype=torch.uint8
        )
        engine = InProcessEngine(self.network, faults, max_rows=max_rows)
        buffers = self.host.contiguous_buffers()
        regions = [engine.register(buffer.memory, buffer.name) for buffer in buffers]
        self.memories = [bytes_of(buffer.memory).reshape(-1, ITEM_BYTES) for buffer in buffers]
        description = Description("decode", engine.instance, self.layout, engine.endpoint())
        self.receiver = Receiver(engine, description, regions, clock=self.now, grace_seconds=GRACE_STEPS)
        self.attempts: list[Attempt] = []
        self.channel: list[tuple[bool, bytes]] = []  # to the decode worker or to the writer
        self.named = 0
        self.unkept = 0  # grants of memory that is free too early, which the library refuses
        self.writer = self._start_writer()
        for _ in range(2):
            self._request(2 * page_size)

    def now(self) -> float:
        """The clock of both sides: steps of the network."""
        return float(self.network.now)

    def _start_writer(self) -> PrefillInstance:
        engine = InProcessEngine(self.network, self.faults, max_rows=self.max_rows)
        tokens = (SOURCE_PAGES + 1) * self.layout.page_size
        memories: list[Bytes] = [np.zeros((tokens, ITEM_BYTES), dtype=np.uint8) for _ in LAYERS]
        regions = [engine.register(memory, name) for memory, name in zip(memories, LAYERS, strict=True)]
        description = Description("prefill", engine.instance, self.layout, engine.endpoint())
        sender = Sender(engine, description, regions, clock=self.now)
        self.receiver.accept(sender.introduce())
        sender.accept(self.receiver.introduce())
        return PrefillInstance(engine, sender, memories, list(range(1, SOURCE_PAGES + 1)))

    # Checks

    def check(self) -> None:
        """Memory that is free is as it was left, and what was delivered stays what was sent."""
        self.host.verify()
        for attempt in self.attempts:
            if attempt.told is LeaseState.DELIVERED:
                self._compare(attempt)
        stats = self.host.stats
        agree(stats.size, stats.free + stats.pending + stats.live, "free + pending + live host tokens")
        self.reached("freed while its writer may still write", stats.pending > 0)

    def _compare(self, attempt: Attempt) -> None:
        for memory, kv in zip(self.memories, attempt.kv, strict=True):
            ask(invariants.mirror_equal, kv, memory[attempt.tokens], object=attempt.lease, operation="delivered")

    # The decode worker

    @rule(tokens=st.integers(0, 9))
    def request(self, tokens: int) -> None:
        """A request is admitted: a lease, host memory, a grant."""
        self._request(tokens)

    def _request(self, tokens: int, again: Lease | None = None) -> None:
        try:
            if again is None:
                self.named += 1
                lease = self.receiver.lease(f"request {self.named}", tokens, ["prefill"])
            else:
                lease = self.receiver.retry(again)
        except TransferError:
            return  # the writer is gone
        kept = self.dice.random() < 0.9
        try:
            ranges = self.host.take(tokens, [self.named], writer=lease.ended if kept else None)[0] if tokens else None
        except PoolExhaustedError:
            self.receiver.abort(lease)
            self.reached("host tokens exhausted")
            return
        kv = tuple(np.frombuffer(self.dice.randbytes(tokens * ITEM_BYTES), np.uint8).reshape(-1, 4) for _ in LAYERS)
        try:
            self.receiver.grant(lease, ranges)
        except ArgumentError:
            if kept and not self.unkept:
                raise
            self.reached("a grant of memory that is not kept refused", not kept)
            self.receiver.abort(lease)
            self.host.free([ranges] if ranges is not None else [])
            return
        self.unkept += not kept and ranges is not None
        self.attempts.append(Attempt(lease, kv, ranges))

    @rule(free=st.booleans(), retry=st.booleans())
    def collect(self, free: bool, retry: bool) -> None:
        """The receiver says what has come of its leases; memory of those that failed is freed, behind their end."""
        self._collect()
        if free:
            self._free_failed(retry)

    def _free_failed(self, retry: bool) -> None:
        for attempt in list(self.attempts):
            if attempt.told in (LeaseState.FAILED, LeaseState.ABORTED):
                self._free(attempt)
                self.reached("freed before it has ended", not attempt.lease.ended.query())
                if retry:
                    self.reached("another attempt")
                    self._request(attempt.lease.num_tokens, attempt.lease)

    def _collect(self) -> None:
        known = {attempt.lease: attempt for attempt in self.attempts}
        for lease in self.receiver.poll():
            attempt = known.get(lease)
            if attempt is not None:
                attempt.told = lease.state
                self.reached(f"a lease {lease.state.value}")
                if lease.state is LeaseState.DELIVERED:
                    self._compare(attempt)
        self.reached("a tag twice", self.receiver.ignored.duplicate > 0)
        self.reached("a late tag", self.receiver.ignored.late > 0)

    def _free(self, attempt: Attempt) -> None:
        self.attempts.remove(attempt)
        if attempt.ranges is not None:
            self.host.free(attempt.ranges)

    @precondition(lambda self: any(one.told is LeaseState.DELIVERED for one in self.attempts))
    @rule()
    def finish(self) -> None:
        """All requests that were delivered leave, and another takes their memory."""
        self._finish()
        self._request(1)

    def _finish(self) -> None:
        for attempt in [one for one in self.attempts if one.told is LeaseState.DELIVERED]:
            self._free(attempt)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A request is given up, in whatever state its attempt is."""
        at = data.draw(st.integers(0, len(self.attempts) - 1), label="attempt")
        self.receiver.abort(self.attempts[at].lease)

    @rule(tokens=st.integers(0, 6), times=st.integers(0, 4), steps=st.integers(0, 6))
    def suspect(self, tokens: int, times: int, steps: int) -> None:
        """The writer is suspected to be gone; it writes on, and introduces itself again."""
        self._request(tokens)
        self._serve(times, True)
        self.receiver.peer_lost("prefill")
        self._collect()
        self._free_failed(False)
        self.host.reap()
        self._pass(steps)
        if not self.writer.engine.killed:
            self.receiver.accept(self.writer.sender.introduce())

    # The prefill worker

    @rule(tokens=st.integers(1, 6), times=st.integers(2, 12), whole=st.booleans(), end=st.integers(0, 2))
    def exchange(self, tokens: int, times: int, whole: bool, end: int) -> None:
        """Two requests are served for a while; they may be aborted, retried, and leave once they have arrived."""
        self._request(tokens)
        self._request(tokens)
        self._serve(times, whole)
        for attempt in self.attempts if end else ():
            self.receiver.abort(attempt.lease)
        self._collect()
        self._free_failed(end > 1)
        for _ in range(4):
            self._serve(times // 2, whole)
            self._collect()
            if end:
                self._finish()

    @rule(times=st.integers(1, 8), whole=st.booleans())
    def serve(self, times: int, whole: bool) -> None:
        """Messages, writes and time go on."""
        self._serve(times, whole)

    def _serve(self, times: int, whole: bool) -> None:
        for _ in range(times):
            self._carry(0.8)
            self._prefill(whole)
            self.network.step()

    @rule(steps=st.integers(1, 4))
    def time_passes(self, steps: int) -> None:
        """What is under way lands."""
        self._pass(steps)

    def _pass(self, steps: int) -> None:
        for _ in range(steps):
            self.network.step()
            ask(self.host.verify)

    def _carry(self, share: float) -> None:
        self.channel += [(False, message) for _, message in self.receiver.outbox]
        self.channel += [(True, message) for _, message in self.writer.sender.outbox]
        self.receiver.outbox.clear()
        self.writer.sender.outbox.clear()
        self.dice.shuffle(self.channel)
        later = []
        for to_decode, message in self.channel:
            arrives = self.dice.random() < share
            if not arrives or self.dice.random() < 0.2:
                later.append((to_decode, message))
            if arrives and to_decode:
                self.receiver.on_message(message, "prefill")
            elif arrives:
                self.writer.sender.on_message(message, "decode")
        self.channel = later

    def _prefill(self, whole: bool) -> None:
        writer = self.writer
        writer.sender.poll()
        for transfer in [one for one in writer.pages if one.sources_free.query()]:
            writer.free += writer.pages.pop(transfer)
            del writer.forwards[transfer]
        if self.dice.random() < 0.7:
            writer.run_forwards()
        for transfer in writer.sender.transfers():
            if transfer.state is TransferState.OPEN and not transfer.complete:
                self._send(transfer, whole)

    def _send(self, transfer: Transfer, whole: bool) -> None:
        writer, size, total = self.writer, self.layout.page_size, transfer.grant.num_tokens
        found = [one for one in self.attempts if one.lease.serial == transfer.grant.serial]
        if not found or -(-total // size) > len(writer.free):
            writer.sender.fail(transfer, "no memory")
            return
        if transfer not in writer.pages:
            self.dice.shuffle(writer.free)  # so that rows are many
            pages = [writer.free.pop() for _ in range(-(-total // size))]
            writer.pages[transfer] = pages
            writer.forwards[transfer] = writer.stream.record(), self._rows(pages)[:total], found[0].kv
        left = total - transfer.sent
        tokens = left if whole or left <= size else size
        rows = self._rows(writer.pages[transfer])[transfer.sent : transfer.sent + tokens]
        sources, last = Locations.from_host(self.rt, rows), transfer.sent + tokens == total
        computed = writer.forwards[transfer][0]
        try:
            writer.sender.send(transfer, sources, transfer.sent, last, after=computed)
        except TransferError:
            self.reached("a write refused")
        except ArgumentError:
            if computed.query():
                raise
            self.reached("a send before the KV is written refused")

    def _rows(self, pages: list[int]) -> Ints:
        size = self.layout.page_size
        return (np.array(pages, dtype=np.int64)[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)

    @rule(told=st.booleans(), steps=st.integers(0, 3))
    def writer_dies(self, told: bool, steps: int) -> None:
        """The prefill process ends, and its supervisor says so; what it has sent lands for a while. Another starts."""
        self.network.kill(self.writer.engine)
        self.channel = [one for one in self.channel if not one[0] or self.dice.random() < 0.5]
        self.reached("the writer died while it wrote", bool(self.writer.sender.transfers()))
        if told:
            self.receiver.peer_ended("prefill")
            self._collect()
            self._free_failed(False)
            self.host.reap()
            self._pass(steps)
        self.writer = self._start_writer()

    @rule()
    def all_end(self) -> None:
        """All is given up and the writer ends; after a while all memory is free again."""
        for attempt in self.attempts:
            self.receiver.abort(attempt.lease)
        self.writer_dies(True, 0)
        self._collect()
        for attempt in list(self.attempts):
            self._free(attempt)
        for _ in range(GRACE_STEPS + 1):
            self.network.step()
            self.receiver.poll()
        stats = self.host.stats
        agree((stats.size, 0, 0), (stats.free, stats.pending, stats.live), "free, pending, live when all have ended")
