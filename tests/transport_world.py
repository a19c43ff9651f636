"""A prefill group and a decode worker over an engine that injects faults, and an oracle that knows every byte.

One `World` is one history. Whatever it does comes from one seed. The oracle never asks the library what it believes:
it looks at the bytes of the decode worker's memory, and at what the network still has under way.

    python -m tests.transport_world FIRST COUNT   # runs as many histories, from that seed on
"""

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import levels, open_runtime
from batchstate.errors import HandshakeError, PoolExhaustedError, TransferError
from batchstate.kv.host_pool import HostKVPool, HostRanges, KVBuffer
from batchstate.mirror import Locations
from batchstate.transport.engines.in_process import GRACE_STEPS, Faults, InProcessEngine, Network
from batchstate.transport.plan import KVLayout
from batchstate.transport.receiver import Lease, LeaseState, Receiver
from batchstate.transport.sender import Sender, Transfer, TransferState
from batchstate.transport.workers import Description

Bytes = npt.NDArray[np.uint8]
LAYERS = ("keys", "values")
HEADS, HEAD_BYTES = 2, 3
STATES, STATE_BYTES = 12, 5
"""Rows for states that requests can have at once, and bytes of one: each rank has all of it."""
SENTINEL = 0xEE
PAGES = {1: 24, 16: 8, 64: 6}
"""Pages of every pool, by page size."""

CALM = Faults()
BREEZE = Faults(delay=2, split=0.6, duplicate_tag=0.3, duplicate_rows=0.2)
STORM = attrs.evolve(BREEZE, failed=0.01, unknown=0.04, stuck=0.2, lost_tag=0.01, refused=0.005)
HURRICANE = attrs.evolve(STORM, delay=4, failed=0.05, unknown=0.12, stuck=0.3, lost_tag=0.05, refused=0.02)
_runtime = open_runtime("cpu")


def layouts(page_size: int, rank: int, degree: int) -> tuple[KVLayout, KVLayout]:
    of_kv = KVLayout(page_size, "uint8", LAYERS, HEADS * HEAD_BYTES // degree, rank, degree, HEADS)
    return of_kv, KVLayout(page_size, "uint8", ("state",), STATE_BYTES, rank, degree, replicated=True, per_request=True)


@attrs.define(eq=False)
class Writer:
    """One instance of a prefill rank, with its memory and a small pool of source pages."""

    name: str
    engine: InProcessEngine
    sender: Sender
    memories: list[Bytes]
    free: list[int]
    busy: list[tuple[list[int], Any]] = attrs.field(factory=list)
    pages: dict[Transfer, list[int]] = attrs.field(factory=dict)
    met: "Decode | None" = None


@attrs.define(eq=False)
class Decode:
    """One instance of the decode worker."""

    engine: InProcessEngine
    receiver: Receiver
    pool: HostKVPool
    states: HostKVPool
    memories: list[Bytes]
    shadow: list[Bytes]


@attrs.define(eq=False)
class Request:
    """What the oracle knows of one attempt of one request: what it took, and the rows and bytes of each buffer."""

    lease: Lease
    num_tokens: int
    taken: list[tuple[HostKVPool, HostRanges]] = attrs.field(factory=list)
    kv: list[Bytes] = attrs.field(factory=list)
    rows: list[npt.NDArray[np.int64]] = attrs.field(factory=list)
    freed: bool = False
    ended: bool = False
    told: LeaseState | None = None


class World:
    def __init__(self, seed: int, faults: Faults, page_size: int, degree: int) -> None:
        self.dice = random.Random(seed)
        self.network = Network(self.dice)
        self.values = np.random.default_rng(seed)
        self.faults, self.page_size, self.degree = faults, page_size, degree
        self.channel: list[tuple[str, str, bytes]] = []
        self.requests: list[Request] = []
        self.finished: list[LeaseState] = []
        self.transfers = 0
        self.names = 0
        self.old_introductions: list[bytes] = []
        deeds: dict[Callable[[], None], float] = {
            self.begin: 12.0,
            self.carry: 22.0,
            self.prefill_all: 20.0,
            self.move: 30.0,
            self.collect: 14.0,
            self.abort: 1.0,
            self.mourn_all: 2.5,
            self.reintroduce: 0.5,
            self.suspect: 0.4,
            self.reassure: 3.0,
        }
        if faults is not CALM:
            deeds |= {self.kill: 0.5, self.restart_decode: 0.3}
        self.deeds, self.weights = list(deeds), list(deeds.values())
        self.decode = self._decode()
        self.writers = [self._writer(rank) for rank in range(degree)]
        self._meet()

    # Processes

    def _decode(self) -> Decode:
        pool = HostKVPool(
            _runtime,
            PAGES[self.page_size],
            self.page_size,
            layers=LAYERS,
            item_shape=(HEADS, HEAD_BYTES),
            dtype=torch.uint8,
        )
        states = HostKVPool(_runtime, STATES, layers=[KVBuffer("state", (STATE_BYTES,), torch.uint8)])
        engine = InProcessEngine(self.network, self.faults, max_rows=8)
        buffers = (*pool.contiguous_buffers(), *states.contiguous_buffers())
        regions = [engine.register(buffer.memory, buffer.name) for buffer in buffers]
        memories = [buffer.memory.numpy().reshape(-1, buffer.item_bytes) for buffer in buffers]
        for memory in memories:
            memory[:] = SENTINEL
        description = Description("decode", engine.instance, layouts(self.page_size, 0, 1), engine.endpoint())
        receiver = Receiver(engine, description, regions, clock=self.clock, grace_seconds=GRACE_STEPS)
        return Decode(engine, receiver, pool, states, memories, [memory.copy() for memory in memories])

    def _writer(self, rank: int) -> Writer:
        name = f"prefill-{rank}"
        engine = InProcessEngine(self.network, self.faults, max_rows=self.dice.choice((2, 6, 1024)))
        mine, pages = layouts(self.page_size, rank, self.degree), PAGES[self.page_size] + 1
        memories = [np.full((pages * self.page_size, mine[0].item_bytes), 0x11, dtype=np.uint8) for _ in LAYERS]
        memories.append(np.full((pages, STATE_BYTES), 0x11, dtype=np.uint8))
        regions = [engine.register(memory, layer) for memory, layer in zip(memories, (*LAYERS, "state"), strict=True)]
        description = Description(name, engine.instance, mine, engine.endpoint())
        sender = Sender(
            engine,
            description,
            regions,
            clock=self.clock,
            max_bytes=self.dice.choice((None, None, 30 * self.page_size)),
        )
        return Writer(name, engine, sender, memories, list(range(1, PAGES[self.page_size] + 1)))

    def _meet(self) -> None:
        """Both sides of each pair that does not know each other yet accept each other's introduction."""
        for writer in self.writers:
            if not writer.engine.killed and not self.decode.engine.killed:
                self.decode.receiver.accept(writer.sender.introduce())
                writer.sender.accept(self.decode.receiver.introduce())
                writer.met = self.decode

    def clock(self) -> float:
        return float(self.network.now)

    # Requests

    def begin(self, lease: Lease | None = None) -> None:
        """Admits a request, or another attempt of one."""
        whole = self.dice.randint(0, 3) * self.page_size
        num_tokens = whole + self.dice.randint(0, self.page_size) if lease is None else lease.num_tokens
        with self._pool_at_work():
            room = self.decode.pool.stats.largest_free_range
        if room < num_tokens and self.dice.random() < 0.9:
            return
        names = [writer.name for writer in self.writers]
        self.dice.shuffle(names)
        self.names += 1
        receiver = self.decode.receiver
        try:
            made = receiver.lease(f"r{self.names}", num_tokens, names) if lease is None else receiver.retry(lease)
        except (HandshakeError, TransferError):
            return  # a writer is gone
        request = Request(made, num_tokens)
        self.requests.append(request)
        if self.dice.random() < 0.05:
            receiver.abort(made)
            return
        try:
            with self._pool_at_work():
                for pool, n in ((self.decode.pool, num_tokens), (self.decode.states, 1)):
                    request.taken += [(pool, one) for one in pool.take([n] * bool(n), [1] * bool(n), writer=made.ended)]
        except PoolExhaustedError:
            receiver.abort(made)
            return
        if self.dice.random() < 0.05:
            receiver.abort(made)
            return
        state = request.taken[-1][1]
        ranges = request.taken[0][1] if num_tokens else None
        tokens = np.empty(0, dtype=np.int64) if ranges is None else ranges.locations(0, num_tokens)
        request.rows = [*(tokens for _ in LAYERS), state.locations()]
        request.kv = [
            self.values.integers(0, 256, (rows.size, memory.shape[1]), dtype=np.uint8)
            for rows, memory in zip(request.rows, self.decode.memories, strict=True)
        ]
        receiver.grant(made, ranges, state)
        self.transfers += 1

    def request_of(self, transfer: Transfer) -> Request | None:
        """The attempt that a transfer belongs to; None where the decode worker that knew it is gone."""
        if transfer.grant.sender != self.decode.engine.instance:
            return None
        return next((one for one in self.requests if one.lease.serial == transfer.grant.serial), None)

    def prefill(self, writer: Writer) -> None:
        """Lets a writer follow its writes, and go on with some of its requests."""
        for transfer in writer.sender.poll():
            if transfer.state is not TransferState.OPEN and transfer in writer.pages:
                writer.busy.append((writer.pages.pop(transfer), transfer.sources_free))
        writer.busy, before = [], writer.busy
        for pages, fence in before:
            if fence.query():
                self._check_nothing_read(writer, pages)
                writer.free += pages
                for page in pages:  # KV of another request
                    for memory in writer.memories:
                        size = self._page_rows(memory)
                        memory[page * size : (page + 1) * size] = self.dice.randint(0, 255)
            else:
                writer.busy.append((pages, fence))
        for transfer in writer.sender.transfers():
            if transfer.state is TransferState.OPEN and not transfer.complete and self.dice.random() < 0.7:
                self._send(writer, transfer)

    def _send(self, writer: Writer, transfer: Transfer) -> None:
        request = self.request_of(transfer)
        if request is None or self.dice.random() < 0.02:
            writer.sender.fail(transfer, "no memory")
            return
        size, total = self.page_size, transfer.grant.num_tokens
        if transfer not in writer.pages:
            needed = max(-(-total // size), 1)  # the first has the state's row too
            if needed > len(writer.free):
                return
            self.dice.shuffle(writer.free)
            writer.pages[transfer], writer.free = writer.free[:needed], writer.free[needed:]
            self._fill(writer, request, writer.pages[transfer])
        last = self.dice.random() < 0.6
        end = total if last else transfer.sent + self.dice.randint(0, (total - transfer.sent) // size) * size
        sources = Locations.from_host(_runtime, tokens_on(writer.pages[transfer], size)[transfer.sent : end])
        row = writer.pages[transfer][0] if last else 0
        try:
            writer.sender.send(transfer, sources, transfer.sent, last, after=_runtime.record(), state_row=row)
        except TransferError:
            assert transfer.state is TransferState.FAILED

    def _fill(self, writer: Writer, request: Request, pages: list[int]) -> None:
        """The forward of this rank: its heads of the request's KV and the state, on its own pages."""
        rank = self.writers.index(writer)
        width = HEADS * HEAD_BYTES // self.degree
        rows = tokens_on(pages, self.page_size)[: request.num_tokens]
        *of_kv, states = writer.memories
        for memory, kv in zip(of_kv, request.kv, strict=False):
            memory[rows] = kv[:, rank * width : (rank + 1) * width]
        states[pages[0]] = request.kv[-1]

    def _page_rows(self, memory: Bytes) -> int:
        """Rows of a page of a writer: tokens of KV, or one state."""
        return len(memory) // (PAGES[self.page_size] + 1)

    # Messages

    def carry(self, share: float = 0.6) -> None:
        """Some messages arrive: in any order, some again, some only later."""
        for writer in self.writers:
            self.channel += [(writer.name, to, data) for to, data in writer.sender.outbox]
            writer.sender.outbox.clear()
        self.channel += [("decode", to, data) for to, data in self.decode.receiver.outbox]
        self.decode.receiver.outbox.clear()
        self.dice.shuffle(self.channel)
        later = []
        for source, to, data in self.channel:
            if self.dice.random() > share:
                later.append((source, to, data))
                continue
            if self.dice.random() < 0.15:
                later.append((source, to, data))
            self._hand_over(source, to, data)
        self.channel = later

    def _hand_over(self, source: str, to: str, data: bytes) -> None:
        if to == "decode":
            if not self.decode.engine.killed:
                self.decode.receiver.on_message(data, source)
            return
        writer = next(one for one in self.writers if one.name == to)
        if not writer.engine.killed:
            writer.sender.on_message(data, source)

    # Ends of processes

    def kill_writer(self, writer: Writer) -> None:
        """A prefill process ends; some of what it had to say is lost. It is not known yet."""
        self.network.kill(writer.engine)
        self.carry(0.0)
        self.channel = [one for one in self.channel if one[0] != writer.name or self.dice.random() < 0.5]

    def mourn(self, writer: Writer) -> None:
        """The supervisor has seen the end, and says so; or starts the next instance, which says the same."""
        if self.decode.engine.killed:
            return
        before = writer.sender.introduce()
        if self.dice.random() < 0.5:
            self._tell(self.decode.receiver.peer_ended, writer.name)
            if self.dice.random() < 0.5:
                return
        self.writers[self.writers.index(writer)] = self._writer(int(writer.name[-1]))
        self._meet()
        if writer.met is self.decode:
            self.old_introductions.append(before)

    def _tell(self, told: Callable[[str], None], name: str) -> None:
        with contextlib.suppress(HandshakeError):  # a receiver that was started since has never met it
            told(name)

    def restart_decode(self) -> None:
        """The decode process ends, with all its memory, and the next one starts."""
        self.network.kill(self.decode.engine)
        self.carry(0.0)
        self.channel = [one for one in self.channel if one[0] != "decode" or self.dice.random() < 0.5]
        for writer in self.writers:
            if not writer.engine.killed and self.dice.random() < 0.3:
                writer.sender.peer_ended("decode", self.decode.engine.instance)
        for _ in range(self.dice.randint(0, 3)):
            self.network.step()
            for writer in self.writers:
                if not writer.engine.killed:
                    self.prefill(writer)
        self.requests.clear()
        self.old_introductions.clear()
        self.decode = self._decode()
        self._meet()

    def reintroduce(self) -> None:
        """An introduction that was under way since before its instance ended arrives, and is refused."""
        if not self.old_introductions:
            return
        try:
            self.decode.receiver.accept(self.dice.choice(self.old_introductions))
        except HandshakeError:
            return
        raise AssertionError("an instance that has ended was accepted")

    # The oracle

    def receive(self) -> None:
        """Polls the receiver, and checks what it says."""
        known = {request.lease: request for request in self.requests}
        for lease in self.decode.receiver.poll():
            request = known[lease]
            assert request.told is None, f"{lease} changed its state again"
            request.told = lease.state
            self.finished.append(lease.state)
            if lease.state is LeaseState.DELIVERED:
                for memory, shadow, rows, kv in zip(
                    self.decode.memories, self.decode.shadow, request.rows, request.kv, strict=True
                ):
                    assert (memory[rows] == kv).all(), f"{lease} is delivered, its bytes are not"
                    memory[rows] = shadow[rows] = ~kv  # decoding goes on, on its own memory
                    request.ended = True
                assert lease.ended.query(), f"{lease} is delivered, and has not ended"
        self.look()

    def settle(self) -> None:
        """Frees the memory of requests that are over: the pool keeps it until `ended`."""
        for request in self.requests:
            if request.told is None or request.freed or self.dice.random() < 0.5:
                continue
            with self._pool_at_work():
                for pool, ranges in request.taken:
                    pool.free(ranges)
            request.freed = True
            if request.told is not LeaseState.DELIVERED and self.dice.random() < 0.5:
                self.begin(request.lease)
        with self._pool_at_work():
            self.decode.pool.reap()
            self.decode.states.reap()
        self.requests = [request for request in self.requests if not request.freed or not request.lease.ended.query()]

    def look(self) -> None:
        """Compares every byte. Memory of leases that have not ended may change, and nothing else may."""
        decode = self.decode
        quiet = [np.ones(len(shadow), dtype=np.bool_) for shadow in decode.shadow]
        for request in self.requests:
            if not request.rows or request.ended:
                continue
            if request.lease.ended.query():
                self._check_nothing_under_way(request)
                request.ended = True
                for memory, shadow, rows in zip(decode.memories, decode.shadow, request.rows, strict=True):
                    shadow[rows] = memory[rows]
            else:
                for still, rows in zip(quiet, request.rows, strict=True):
                    still[rows] = False
        for memory, shadow, still in zip(decode.memories, decode.shadow, quiet, strict=True):
            changed = np.flatnonzero((memory != shadow).any(axis=1) & still)
            assert not changed.size, f"host rows {changed[:8]} were written while no lease had them"

    @contextlib.contextmanager
    def _pool_at_work(self) -> Iterator[None]:
        """Takes note of what the pool itself writes into memory that is free, and of nothing else."""
        self.look()
        before = [memory.copy() for memory in self.decode.memories] if levels.full else []
        try:
            yield
        finally:
            for memory, shadow, old in zip(self.decode.memories, self.decode.shadow, before, strict=levels.full):
                rows = (memory != old).any(axis=1)
                shadow[rows] = memory[rows]

    def _check_nothing_under_way(self, request: Request) -> None:
        for piece in self.network.under_way(self.decode.engine):
            for memory, rows in zip(self.decode.memories, request.rows, strict=True):
                row = (piece.target - memory.ctypes.data) // memory.shape[1]
                assert row not in rows, f"{request.lease} has ended, and a write to {row} is under way"

    def _check_nothing_read(self, writer: Writer, pages: list[int]) -> None:
        for piece in self.network.under_way(writer.engine):
            for memory in writer.memories:
                page = (piece.source - memory.ctypes.data) // (memory.shape[1] * self._page_rows(memory))
                assert page not in pages, f"source page {page} counts as free, and a write still reads it"

    # Histories

    def step(self) -> None:
        """One thing happens."""
        self.dice.choices(self.deeds, self.weights)[0]()

    def prefill_all(self) -> None:
        for writer in self.writers:
            if not writer.engine.killed:
                self.prefill(writer)

    def move(self) -> None:
        self.network.step()
        self.look()

    def collect(self) -> None:
        self.receive()
        self.settle()

    def abort(self) -> None:
        if self.requests:
            self.decode.receiver.abort(self.dice.choice(self.requests).lease)

    def kill(self) -> None:
        live = [writer for writer in self.writers if not writer.engine.killed]
        if live:
            killed = self.dice.choice(live)
            self.kill_writer(killed)
            if self.dice.random() < 0.4:
                self.mourn(killed)

    def mourn_all(self) -> None:
        for writer in self.writers:
            if writer.engine.killed:
                self.mourn(writer)

    def reassure(self) -> None:
        """Workers that were suspected to be gone introduce themselves again."""
        for writer in self.writers:
            if not writer.engine.killed and writer.met is self.decode:
                self.decode.receiver.accept(writer.sender.introduce())

    def suspect(self) -> None:
        suspect = self.dice.choice(self.writers)
        self._tell(self.decode.receiver.peer_lost, suspect.name)

    def end(self) -> None:
        """All requests are given up and all processes end; then all memory is free again."""
        for request in self.requests:
            self.decode.receiver.abort(request.lease)
        for left in range(12 if self.faults.stuck else 200):
            self._round()
            if left > 12 and all(request.lease.ended.query() for request in self.requests):
                break
        if self.faults.stuck == 0 and not any(writer.engine.killed for writer in self.writers):
            assert all(request.lease.ended.query() for request in self.requests), "a lease never ends"
        for writer in self.writers:
            if not writer.engine.killed:
                self.kill_writer(writer)
            self._tell(self.decode.receiver.peer_ended, writer.name)
        for _ in range(GRACE_STEPS + 1):
            self._round()
        with self._pool_at_work():
            for request in self.requests:
                for pool, ranges in request.taken if not request.freed else ():
                    pool.free(ranges)
        for pool in (self.decode.pool, self.decode.states):
            pool.verify()
            stats = pool.stats
            assert stats.free == stats.size, f"memory was lost: {stats}"
        assert not self.decode.receiver.leases()

    def _round(self) -> None:
        self.carry(0.9)
        self.network.step()
        self.look()
        for writer in self.writers:
            if not writer.engine.killed:
                self.prefill(writer)
        self.receive()


def tokens_on(pages: list[int], page_size: int) -> npt.NDArray[np.int64]:
    """Every token of these pages, in order."""
    return (np.array(pages, dtype=np.int64)[:, None] * page_size + np.arange(page_size, dtype=np.int64)).reshape(-1)


def history(seed: int, steps: int = 160) -> World:
    """One whole history. An assertion that fails in it is a broken promise of the library."""
    dice = random.Random(f"world {seed}")
    faults = dice.choice((CALM, BREEZE, STORM, STORM, HURRICANE))
    world = World(seed, faults, dice.choice((1, 16, 64)), dice.choice((1, 2)))
    for _ in range(steps):
        world.step()
    world.end()
    return world


def histories(first: int, count: int) -> tuple[int, Counter[LeaseState]]:
    """The transfers of `count` histories, and how their leases ended."""
    transfers, ends = 0, Counter[LeaseState]()
    for seed in range(first, first + count):
        try:
            world = history(seed)
        except Exception as error:
            error.add_note(f"in history({seed})")
            raise
        transfers += world.transfers
        ends.update(world.finished)
    return transfers, ends


__all__ = ["World", "histories", "history"]

if __name__ == "__main__":
    print("{} transfers: {}".format(*histories(int(sys.argv[1]), int(sys.argv[2]))))
