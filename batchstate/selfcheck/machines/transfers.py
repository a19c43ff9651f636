"""Transfers into host memory over an engine that injects faults: what is delivered is right, what is freed is quiet.

A prefill group of one or two pipeline stages and ranks, whose workers end and start again, and one decode worker.
Messages arrive in any order, twice, or late; writes split, fail, end unknown and go on landing. Memory is freed at any
time, and the pools keep it until `Lease.ended`. KV is sent in the same turn as the forward that computes it, or later.
With the KV go index keys and a state, into memory of the decode worker's device.
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
from batchstate.kv.host_pool import HostKVPool, HostRanges, KVBuffer
from batchstate.mirror import Locations
from batchstate.runtime.memory import bytes_of
from batchstate.testing.fences import ManualFence, ManualStream
from batchstate.testing.machine import Machine, agree, ask
from batchstate.transport.engines.in_process import GRACE_STEPS, Faults, InProcessEngine, Network
from batchstate.transport.plan import KVLayout, Layouts
from batchstate.transport.receiver import Lease, LeaseState, Receiver
from batchstate.transport.sender import Sender, Transfer, TransferState
from batchstate.transport.workers import Description

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

LAYERS = ("keys", "values")
HEADS, HEAD_BYTES = 2, 2
OTHERS = (KVBuffer("index", (3,), torch.uint8, on_device=True), KVBuffer("state", (5,), torch.uint8, on_device=True))
"""Index keys have a row per token, and a state one per request; every rank of its stage has all of it."""
SOURCE_PAGES = 24


def layouts_of(page_size: int, stage: int = 0, stages: int = 1, rank: int = 0, degree: int = 1) -> Layouts:
    """Of one worker. Of two stages the first has keys and states, the second values and index keys."""
    keys, values = LAYERS
    first, second = (stage == 0, stage == stages - 1)
    of_kv = KVLayout(page_size, "uint8", LAYERS, HEADS * HEAD_BYTES // degree, rank, degree, HEADS)
    index = KVLayout(page_size, "uint8", ("index",), 3, rank, degree, replicated=True)
    state = KVLayout(page_size, "uint8", ("state",), 5, rank, degree, replicated=True, per_request=True)
    return (
        attrs.evolve(of_kv, stage=(keys,) * first + (values,) * second),
        attrs.evolve(index, stage=index.layers * second),
        attrs.evolve(state, stage=state.layers * first),
    )


BREEZE = Faults(delay=6, split=0.7, duplicate_tag=0.6, duplicate_rows=0.2)
STORM = attrs.evolve(BREEZE, failed=0.05, unknown=0.25, stuck=0.2, lost_tag=0.05, refused=0.05)


@attrs.define(eq=False)
class Attempt:
    """One attempt of one request.

    Attributes:
        lease: of the receiver.
        kv: what is to arrive, uint8[rows, bytes] for each buffer by its name.
        ranges: the host locations; None where it needs none.
        row: the row of its state.
        told: the final state, as `poll` has said it.
    """

    lease: Lease
    kv: dict[str, Bytes]
    ranges: HostRanges | None
    row: HostRanges
    told: LeaseState | None = None

    @property
    def tokens(self) -> Ints:
        return np.empty(0, np.int64) if self.ranges is None else self.ranges.locations(0, self.lease.num_tokens)

    def rows(self, name: str) -> Ints:
        """The rows of a buffer that it takes, int64[n]."""
        return self.row.locations() if name == "state" else self.tokens


@attrs.define(eq=False)
class PrefillInstance:
    """One instance of a prefill worker.

    Attributes:
        name: of the worker.
        layouts: of its buffers.
        engine: its end of the network.
        sender: of the library.
        memories: uint8[rows, bytes] for each buffer that it has, by its name.
        free: source pages that are not used.
        pages: of each transfer.
        forwards: of each transfer, the fence of the forward that computes its KV, and what it writes: rows and values.
        stream: the forwards, which run late.
    """

    name: str
    layouts: Layouts
    engine: InProcessEngine
    sender: Sender
    memories: dict[str, Bytes]
    free: list[int]
    pages: dict[Transfer, list[int]] = attrs.field(factory=dict)
    forwards: dict[Transfer, tuple[ManualFence, Ints, dict[str, Bytes]]] = attrs.field(factory=dict)
    stream: ManualStream = attrs.field(factory=ManualStream)

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
        "two stages and two ranks",
        "pages of another size",
        "states without room",
        "the writer died while it wrote",
        "host tokens exhausted",
    )

    @initialize(
        seed=st.integers(0, 2**16),
        page_size=st.integers(1, 3),
        one_token=st.booleans(),
        shape=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
        num_pages=st.integers(4, 10),
        faults=st.sampled_from([STORM, STORM, BREEZE]),
        max_rows=st.sampled_from([1, 2, 3]),
    )
    def begin(
        self,
        seed: int,
        page_size: int,
        one_token: bool,
        shape: tuple[int, int],
        num_pages: int,
        faults: Faults,
        max_rows: int,
    ) -> None:
        """All workers meet. `one_token`: the host's pages have one token, whatever the writers' have."""
        self.open()
        self.dice = random.Random(seed)
        self.network = Network(self.dice)
        self.faults, self.max_rows = faults, max_rows
        self.page_size, (self.stages, self.degree) = page_size, shape
        size = 1 if one_token else page_size
        kv = [KVBuffer(layer, (HEADS * HEAD_BYTES,), torch.uint8) for layer in LAYERS]
        self.host = HostKVPool(self.rt, num_pages * page_size // size, size, layers=[*kv, OTHERS[0]])
        self.states = HostKVPool(self.rt, 5, layers=OTHERS[1:], name="states")
        engine = InProcessEngine(self.network, faults, max_rows=max_rows)
        buffers = (*self.host.contiguous_buffers(), *self.states.contiguous_buffers())
        regions = [engine.register(buffer.memory, buffer.name) for buffer in buffers]
        self.memories = {one.name: one.memory.reshape(-1, one.item_bytes) for one in buffers}
        description = Description("decode", engine.instance, layouts_of(size), engine.endpoint())
        self.reached("two stages and two ranks", shape == (2, 2))
        self.reached("pages of another size", size != page_size)
        self.receiver = Receiver(engine, description, regions, clock=self.now, grace_seconds=GRACE_STEPS)
        self.attempts: list[Attempt] = []
        self.channel: list[tuple[bool, str, bytes]] = []  # to the decode worker from a writer, or from it to a writer
        self.named = 0
        self.unkept = 0  # grants of memory that is free too early, which the library refuses
        self.writers = [self._start_writer(number) for number in range(self.stages * self.degree)]
        for _ in range(2):
            self._request(2 * page_size)

    def now(self) -> float:
        """The clock of both sides: steps of the network."""
        return float(self.network.now)

    def _start_writer(self, number: int) -> PrefillInstance:
        engine = InProcessEngine(self.network, self.faults, max_rows=self.max_rows)
        name, (stage, rank) = f"prefill-{number}", divmod(number, self.degree)
        layouts = layouts_of(self.page_size, stage, self.stages, rank, self.degree)
        rows = (SOURCE_PAGES + 1) * self.page_size
        memories: dict[str, Bytes] = {
            layer: np.zeros((rows, one.item_bytes), dtype=np.uint8) for one in layouts for layer in one.stage
        }
        regions = [engine.register(memory, layer) for layer, memory in memories.items()]
        sender = Sender(engine, Description(name, engine.instance, layouts, engine.endpoint()), regions, clock=self.now)
        self.receiver.accept(sender.introduce())
        sender.accept(self.receiver.introduce())
        return PrefillInstance(name, layouts, engine, sender, memories, list(range(1, SOURCE_PAGES + 1)))

    @property
    def names(self) -> list[str]:
        return [f"prefill-{number}" for number in range(self.stages * self.degree)]

    # Checks

    def check(self) -> None:
        """Memory that is free is as it was left, and what was delivered stays what was sent."""
        self.host.verify()
        self.states.verify()
        for attempt in self.attempts:
            if attempt.told is LeaseState.DELIVERED:
                self._compare(attempt)
        self.reached("freed while its writer may still write", self.host.stats.pending > 0)

    def _compare(self, attempt: Attempt) -> None:
        for name, kv in attempt.kv.items():
            memory = self.memories[name]
            rows = bytes_of(memory).reshape(memory.shape) if memory.device.type == "cpu" else self.rt.inspect(memory)
            found = rows[attempt.rows(name)]
            ask(invariants.mirror_equal, kv, found, object=attempt.lease, operation="delivered")

    # The decode worker

    @rule(tokens=st.integers(0, 9))
    def request(self, tokens: int) -> None:
        """A request is admitted: a lease, host memory, a grant."""
        self._request(tokens)

    def _request(self, tokens: int, again: Lease | None = None) -> None:
        try:
            if again is None:
                self.named += 1
                lease = self.receiver.lease(f"request {self.named}", tokens, self.names)
            else:
                lease = self.receiver.retry(again)
        except TransferError:
            return  # the writer is gone
        kept = self.dice.random() < 0.9
        try:
            (row,) = self.states.take([1], [self.named], writer=lease.ended)
        except PoolExhaustedError:
            self.receiver.abort(lease)
            self.reached("states without room")
            return
        try:
            ranges = self.host.take(tokens, [self.named], writer=lease.ended if kept else None)[0] if tokens else None
        except PoolExhaustedError:
            self.receiver.abort(lease)
            self.states.free(row)
            self.reached("host tokens exhausted")
            return
        kv = {
            name: np.frombuffer(self.dice.randbytes(rows * memory.shape[1]), np.uint8).reshape(-1, memory.shape[1])
            for name, memory in self.memories.items()
            for rows in [1 if name == "state" else tokens]
        }
        try:
            self.receiver.grant(lease, ranges, row)
        except ArgumentError:
            if kept and not self.unkept:
                raise
            self.reached("a grant of memory that is not kept refused", not kept)
            self.receiver.abort(lease)
            self.host.free([ranges] if ranges is not None else [])
            self.states.free(row)
            return
        self.unkept += not kept and ranges is not None
        self.attempts.append(Attempt(lease, kv, ranges, row))

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
        self.states.free(attempt.row)

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

    @rule(tokens=st.integers(0, 6), times=st.integers(0, 4), steps=st.integers(0, 6), which=st.integers(0, 3))
    def suspect(self, tokens: int, times: int, steps: int, which: int) -> None:
        """A writer is suspected to be gone; it writes on, and introduces itself again."""
        self._request(tokens)
        self._serve(times, True)
        writer = self.writers[which % len(self.writers)]
        self.receiver.peer_lost(writer.name)
        self._collect()
        self._free_failed(False)
        self.host.reap()
        self._pass(steps)
        if not writer.engine.killed:
            self.receiver.accept(writer.sender.introduce())

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
            for writer in self.writers:
                self._prefill(writer, whole)
            self.network.step()

    @rule(steps=st.integers(1, 4))
    def time_passes(self, steps: int) -> None:
        """What is under way lands."""
        self._pass(steps)

    def _pass(self, steps: int) -> None:
        for _ in range(steps):
            self.network.step()
            ask(self.host.verify)
            ask(self.states.verify)

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
            if arrives and to_decode:
                self.receiver.on_message(message, name)
            elif arrives:
                self.writers[self.names.index(name)].sender.on_message(message, "decode")
        self.channel = later

    def _prefill(self, writer: PrefillInstance, whole: bool) -> None:
        writer.sender.poll()
        for transfer in [one for one in writer.pages if one.sources_free.query()]:
            writer.free += writer.pages.pop(transfer)
            del writer.forwards[transfer]
        if self.dice.random() < 0.7:
            writer.run_forwards()
        for transfer in writer.sender.transfers():
            if transfer.state is TransferState.OPEN and not transfer.complete:
                self._send(writer, transfer, whole)

    def _send(self, writer: PrefillInstance, transfer: Transfer, whole: bool) -> None:
        size, total = self.page_size, transfer.grant.num_tokens
        found = [one for one in self.attempts if one.lease.serial == transfer.grant.serial]
        needed = max(-(-total // size), 1)  # the first has the state's row too
        if not found or (transfer not in writer.pages and needed > len(writer.free)):
            writer.sender.fail(transfer, "no memory")
            return
        if transfer not in writer.pages:
            self.dice.shuffle(writer.free)  # so that rows are many
            pages = [writer.free.pop() for _ in range(needed)]
            writer.pages[transfer] = pages
            writer.forwards[transfer] = writer.stream.record(), self._rows(pages)[:total], found[0].kv
        left = total - transfer.sent
        tokens = left if whole or left <= size else size
        rows = self._rows(writer.pages[transfer])[transfer.sent : transfer.sent + tokens]
        sources, last = Locations.from_host(self.rt, rows), transfer.sent + tokens == total
        computed = writer.forwards[transfer][0]
        row = writer.pages[transfer][0] if last and "state" in writer.memories else 0
        try:
            writer.sender.send(transfer, sources, transfer.sent, last, after=computed, state_row=row)
        except TransferError:
            self.reached("a write refused")
        except ArgumentError:
            if computed.query():
                raise
            self.reached("a send before the KV is written refused")

    def _rows(self, pages: list[int]) -> Ints:
        size = self.page_size
        return (np.array(pages, dtype=np.int64)[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)

    @rule(told=st.booleans(), steps=st.integers(0, 3), which=st.integers(0, 3))
    def writer_dies(self, told: bool, steps: int, which: int) -> None:
        """A prefill process ends, and its supervisor says so; what it has sent lands for a while. Another starts."""
        number = which % len(self.writers)
        writer = self.writers[number]
        self.network.kill(writer.engine)
        self.channel = [one for one in self.channel if one[:2] != (True, writer.name) or self.dice.random() < 0.5]
        self.reached("the writer died while it wrote", bool(writer.sender.transfers()))
        if told:
            self.receiver.peer_ended(writer.name)
            self._collect()
            self._free_failed(False)
            self.host.reap()
            self._pass(steps)
        self.writers[number] = self._start_writer(number)

    @rule()
    def all_end(self) -> None:
        """All is given up and the writers end; after a while all memory is free again."""
        for attempt in self.attempts:
            self.receiver.abort(attempt.lease)
        for number in range(len(self.writers)):
            self.writer_dies(True, 0, number)
        self._collect()
        for attempt in list(self.attempts):
            self._free(attempt)
        for _ in range(GRACE_STEPS + 1):
            self.network.step()
            self.receiver.poll()
        for pool in (self.host, self.states):
            stats = pool.stats
            agree(
                (stats.size, 0, 0), (stats.free, stats.pending, stats.live), "free, pending, live when all have ended"
            )
