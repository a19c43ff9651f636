"""Leases, senders and receivers, one rule at a time, over the engine of one process.

What histories show is not repeated here. The machine `transfers` shows that all tokens of a
request arrive, or none count; that repeated, late, lost and reordered messages and tags, aborts at any time, suspicions
and other instances of a worker change no final state; and that memory has ended only when nothing can land any more.
"""

import functools
import inspect
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch

from batchstate import HostLocations, HybridSlotPool, Locations, Pages, open_runtime
from batchstate.errors import (
    ArgumentError,
    DtypeError,
    HandshakeError,
    OwnerThreadError,
    ShapeError,
    TransferError,
)
from batchstate.kv.host_pool import HostRanges
from batchstate.mirror import StateRow
from batchstate.runtime import Fence
from batchstate.testing import ManualStream
from batchstate.transport import sender as sender_module
from batchstate.transport.engines.base import Copies, Delivery, Endpoint, Handle, Status
from batchstate.transport.engines.in_process import GRACE_STEPS, Faults, InProcessEngine, Network
from batchstate.transport.plan import KVLayout, buffers_of
from batchstate.transport.receiver import Lease, LeaseState, Receiver
from batchstate.transport.sender import Sender, Transfer, TransferState
from batchstate.transport.wire import (
    MAGIC,
    MOST_ATTEMPTS,
    MOST_TEXT,
    MOST_TOKENS,
    Grant,
    Kind,
    Notice,
    Tag,
    packed,
    unpacked,
)
from batchstate.transport.workers import Description, Session
from batchstate.violations import Code, Violation
from tests.doubles import refused
from tests.transport_peers import altered

LAYERS = ("keys", "values")
TOKENS, HEADS, HEAD_BYTES = 64, 2, 4
PAGE = 4


def layout(rank: int = 0, degree: int = 1, **changes: Any) -> KVLayout:
    """Of rank `rank` of `degree`."""
    fields: dict[str, Any] = {
        "page_size": PAGE,
        "dtype": "uint8",
        "layers": LAYERS,
        "item_bytes": HEADS * HEAD_BYTES // degree,
    }
    return KVLayout(**(fields | {"rank": rank, "degree": degree, "heads": HEADS} | changes))


@attrs.define(eq=False)
class Side:
    """A worker: its engine, memory and session."""

    name: str
    engine: InProcessEngine
    memories: list[npt.NDArray[np.uint8]]
    session: Any

    @property
    def introduction(self) -> bytes:
        return bytes(self.session.introduce())

    def renamed(self) -> bytes:
        """An introduction under `name`."""
        return attrs.evolve(Description.from_bytes(self.introduction), worker=self.name).to_bytes()


def made(
    kind: type, network: Network, name: str, *layouts: KVLayout, faults: Faults | None = None, **rest: Any
) -> Side:
    """A worker with a `Sender` or a `Receiver`."""
    engine = InProcessEngine(network, faults, max_rows=3)
    buffers = buffers_of(layouts)
    memories = [np.full((TOKENS, kv.item_bytes), 0xEE, dtype=np.uint8) for _, kv in buffers]
    regions = [engine.register(memory, layer) for memory, (layer, _) in zip(memories, buffers, strict=True)]
    description = Description(name, engine.instance, layouts, engine.endpoint())
    return Side(name, engine, memories, kind(engine, description, regions, clock=lambda: float(network.now), **rest))


def carried(sides: Iterable[Side], repeat: int = 1) -> None:
    """Every message arrives, `repeat` times."""
    by_name = {side.name: side for side in sides}
    for side in by_name.values():
        messages, side.session.outbox = side.session.outbox, []
        for to, data in messages * repeat:
            by_name[to].session.on_message(data, side.name)


RUNTIME = open_runtime("cpu")
WRITTEN = RUNTIME.record()


def at(places: object) -> Locations:
    """Places in KV memory."""
    return Locations.from_host(RUNTIME, np.asarray(places))


def state(row: int) -> StateRow:
    """A row of states."""
    return StateRow.from_host(RUNTIME, [row])


def send(sender: Any, transfer: Any, places: object, first: Any, last: Any) -> None:
    """Sends tokens whose forward is over."""
    sender.send(transfer, at(places), first, last, after=WRITTEN)


def grant(receiver: Receiver, lease: Lease, ranges: Any) -> None:
    """Grants starts and lengths of host memory that is kept until the lease ends; none where there are none."""
    starts, lengths = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    receiver.grant(lease, HostRanges(1, 1, 1, starts, lengths, lease.ended) if starts.size else None)


class Pair:
    """One decode worker, and prefill ranks that know it."""

    def __init__(self, degree: int = 1, faults: Faults | None = None) -> None:
        self.network = Network(7)
        self.faults = faults
        self.decode = made(Receiver, self.network, "decode", layout(), grace_seconds=GRACE_STEPS)
        self.prefills = [self.prefill(rank, degree) for rank in range(degree)]
        self.receiver: Receiver = self.decode.session

    def prefill(self, rank: int = 0, degree: int = 1) -> Side:
        side = made(Sender, self.network, f"prefill-{rank}", layout(rank, degree), faults=self.faults)
        values = np.random.default_rng(rank)
        for memory in side.memories:
            memory[:] = values.integers(0, 200, memory.shape)
        self.decode.session.accept(memoryview(side.introduction))  # as a socket gives it
        side.session.accept(self.decode.introduction)
        return side

    @property
    def sender(self) -> Sender:
        sender: Sender = self.prefills[0].session
        return sender

    def carry(self, repeat: int = 1) -> None:
        carried((self.decode, *self.prefills), repeat)

    def new(self, tokens: int = 10) -> Lease:
        """A lease before its grant."""
        return self.receiver.lease("r", tokens, [side.name for side in self.prefills])

    def lease(self, tokens: int = 10, ranges: object = ((8, 8), (20, 4))) -> Lease:
        lease = self.new(tokens)
        grant(self.receiver, lease, ranges)
        return lease

    def granted(self, tokens: int = 10, ranges: object = ((8, 8), (20, 4))) -> tuple[Lease, list[Transfer]]:
        lease = self.lease(tokens, ranges)
        self.carry()
        return lease, [side.session.poll()[0] for side in self.prefills]

    def run(self, steps: int = 20) -> list[Lease]:
        changed = []
        for _ in range(steps):
            self.network.step()
            for side in self.prefills:
                side.session.poll()
            self.carry()
            changed += self.receiver.poll()
        return changed


SOURCES = np.arange(30, 40)
TARGETS = np.array([*range(8, 16), 20, 21])


@pytest.mark.parametrize("degree", [1, 2])
def test_a_request_arrives_where_it_was_granted(degree: int) -> None:
    """All ranks together write every byte of the granted tokens, in their order, and no other byte."""
    pair = Pair(degree)
    lease, transfers = pair.granted()
    for side, transfer in zip(pair.prefills, transfers, strict=True):
        send(side.session, transfer, SOURCES[:8], 0, last=False)
        send(side.session, transfer, SOURCES[8:], 8, last=True)
    assert pair.run() == [lease]
    assert lease.state is LeaseState.DELIVERED
    assert lease.ended.query()
    lease.ended.wait()
    assert all(transfer.state is TransferState.DONE and transfer.sources_free.query() for transfer in transfers)
    for layer, memory in enumerate(pair.decode.memories):
        expected = np.full_like(memory, 0xEE)
        expected[TARGETS] = np.concatenate([side.memories[layer][SOURCES] for side in pair.prefills], axis=1)
        assert (memory == expected).all()
    assert not pair.receiver.leases()
    assert not pair.sender.transfers()


def test_both_sides_refuse_a_peer_that_does_not_fit() -> None:
    """A mismatch is refused by both sides, and nothing can be leased or sent."""
    network = Network()
    decode = made(Receiver, network, "decode", layout())
    prefill = made(Sender, network, "prefill-0", layout(page_size=8))
    for one, other in ((decode, prefill), (prefill, decode)):
        with pytest.raises(HandshakeError):
            one.session.accept(other.introduction)
    with pytest.raises(HandshakeError, match="unknown"):
        decode.session.lease("r", 1, ["prefill-0"])


def test_pages_of_another_size_are_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A host pool without pages takes KV of prefill workers with pages: each side warns of it once."""
    network = Network()
    with caplog.at_level("WARNING", "batchstate"):
        decode = made(Receiver, network, "decode", layout(page_size=1))
        prefill, other = made(Sender, network, "prefill-0", layout()), made(Sender, network, "prefill-1", layout())
        for side, theirs in ((decode, prefill), (decode, other), (prefill, decode), (prefill, decode)):
            side.session.accept(theirs.introduction)
    assert [record.getMessage()[:60] for record in caplog.records] == [
        "decode has pages of 1 tokens, prefill-0 of 4: KV goes token ",
        "prefill-0 has pages of 4 tokens, decode of 1: KV goes token ",
    ]


class Stages:
    """A decode worker with KV, index keys and states, and two pipeline stages that write into it."""

    def __init__(self) -> None:
        self.network = Network(3)
        self.sides = {"decode": self.side(Receiver, "decode", (0, 1))}
        self.receiver: Receiver = self.sides["decode"].session
        for number in range(2):
            side = self.sides[f"prefill-{number}"] = self.side(Sender, f"prefill-{number}", (number,))
            self.receiver.accept(side.introduction)
            side.session.accept(self.sides["decode"].introduction)

    def side(self, kind: type, name: str, stages: tuple[int, ...]) -> Side:
        kv = layout(page_size=1 if name == "decode" else PAGE, stage=tuple(LAYERS[at] for at in stages))
        index = KVLayout(kv.page_size, "int8", ("index",), 3, replicated=True, stage=("index",) * (1 in stages))
        state = KVLayout(kv.page_size, "float32", ("ssm",), 12, replicated=True, per_request=True)
        return made(kind, self.network, name, kv, index, attrs.evolve(state, stage=("ssm",) * (0 in stages)))


def row_of(lease: Lease, start: int = 7, length: int = 1) -> HostRanges:
    """A row of states that is kept until the lease ends."""
    return HostRanges(2, 1, 1, np.array([start]), np.array([length]), lease.ended)


WRONG_STATES: list[Callable[[Stages, Lease, HostRanges], object]] = [
    lambda world, lease, ranges: world.receiver.grant(lease, ranges),
    lambda world, lease, ranges: world.receiver.grant(lease, ranges, attrs.evolve(row_of(lease), writer=None)),
    lambda world, lease, ranges: world.receiver.grant(lease, ranges, row_of(lease, length=2)),
    lambda world, lease, ranges: world.receiver.grant(lease, ranges, row_of(lease, TOKENS)),
    lambda world, _, __: world.receiver.lease("s", 4, ["prefill-0"]),
    lambda world, _, __: world.receiver.lease("s", 4, ["prefill-1"]),
    lambda world, _, __: world.receiver.lease("s", 4, ["prefill-0", "prefill-1", "prefill-1"]),
]


@pytest.mark.parametrize("wrong", WRONG_STATES)
def test_wrong_states_and_stages_change_nothing(wrong: Callable[[Stages, Lease, HostRanges], object]) -> None:
    """A grant without its state, or a lease without a stage, is refused; the right one goes through afterwards."""
    world = Stages()
    lease = world.receiver.lease("r", 4, ["prefill-1", "prefill-0"])
    ranges = HostRanges(1, 1, 1, np.array([8]), np.array([4]), lease.ended)
    with pytest.raises(ArgumentError):
        wrong(world, lease, ranges)
    assert (lease.ranges, world.receiver.outbox, world.receiver.leases()) == (None, [], (lease,))
    world.receiver.grant(lease, ranges, row_of(lease))
    again = world.receiver.lease("s", 4, ["prefill-0", "prefill-1"])
    other = HostRanges(1, 1, 2, np.array([30]), np.array([4]), again.ended)
    with pytest.raises(ArgumentError, match="row 7 for states, which another lease may still write"):
        world.receiver.grant(again, other, row_of(again))
    carried(world.sides.values())
    sender = world.sides["prefill-0"].session
    (transfer,) = sender.poll()
    for last, row in ((True, 0), (False, 5), (True, -1), (True, TOKENS)):
        with pytest.raises((ArgumentError, Violation)):
            sender.send(transfer, at(np.arange(40, 44)), 0, last, after=WRITTEN, state_row=state(row) if row else None)
        assert (transfer.sent, transfer.state) == (0, TransferState.OPEN)
    pool = HybridSlotPool(RUNTIME, 2, states=2)
    slots = pool.take(1)
    gone = pool.state_rows(slots)
    pool.free(slots, after=None)
    refused(
        Code.SLOT_STALE_HANDLE,
        lambda: sender.send(transfer, at(np.arange(40, 44)), 0, True, after=WRITTEN, state_row=gone),
    )
    side = world.sides["prefill-1"].session
    (other_transfer,) = side.poll()
    with pytest.raises(ArgumentError, match=r"expected no state_row, got \[5\]"):
        side.send(other_transfer, at(np.arange(40, 44)), 0, True, after=WRITTEN, state_row=state(5))
    with pytest.raises(HandshakeError, match="stage of worker 'prefill-0'"):
        world.receiver.accept(attrs.evolve(world.side(Sender, "prefill-1", (1,)), name="prefill-0").renamed())


def test_a_receiver_whose_regions_have_other_names_is_refused() -> None:
    """Each layer needs a region of its name on the side that is written."""
    network = Network()
    prefill = made(Sender, network, "prefill-0", layout())
    engine = InProcessEngine(network)
    regions = [engine.register(np.zeros(64, dtype=np.uint8), name) for name in LAYERS]
    rows = json.loads(engine.endpoint())["regions"]
    rows = [[index, name.replace("values", "others"), *rest] for index, name, *rest in rows]
    endpoint = altered(engine.endpoint(), regions=rows)
    receiver = Receiver(engine, Description("decode", engine.instance, layout(), endpoint), regions)
    with pytest.raises(HandshakeError, match="others"):
        prefill.session.accept(receiver.introduce())
    with pytest.raises(ArgumentError, match="regions"):
        Receiver(engine, Description("decode", engine.instance, layout(), endpoint), regions[:1])
    other = InProcessEngine(network)
    elsewhere = Description("decode", other.instance, layout(), other.endpoint())
    with pytest.raises(ArgumentError, match="instance"):
        Receiver(engine, elsewhere, regions)


def test_a_grant_outside_the_memory_is_refused_by_the_writer() -> None:
    """A writer believes no range that the receiver's regions do not have, and says so: the lease fails, and ends."""
    pair = Pair()
    lease = pair.lease()
    [(to, message)] = pair.receiver.outbox
    pair.receiver.outbox[:] = [(to, _altered(message, ranges=[[TOKENS - 4, 12]]))]
    pair.carry(repeat=2)
    assert not pair.sender.poll()
    assert pair.receiver.poll() == [lease]
    assert lease.ended.query()
    assert "ends at host_location" in lease.reason


WRONG_SENDS: list[tuple[Callable[[Sender, Transfer], None], type[Exception]]] = [
    (lambda sender, one: send(sender, one, SOURCES[:3], 0, last=False), ArgumentError),
    (lambda sender, one: send(sender, one, SOURCES[:4], 0, last=True), ArgumentError),
    (lambda sender, one: send(sender, one, SOURCES[:4], 4, last=False), ArgumentError),
    (lambda sender, one: send(sender, one, np.arange(1, 13), 0, last=False), ArgumentError),
    (lambda sender, one: sender.send(one, Pages.from_host(RUNTIME, [30] * 10), 0, True, after=WRITTEN), Violation),  # type: ignore[arg-type]
    (
        lambda sender, one: sender.send(one, HostLocations.from_host(RUNTIME, SOURCES), 0, True, after=WRITTEN),
        Violation,
    ),
    (lambda sender, one: sender.send(one, at(SOURCES), 0, True, after=None), ArgumentError),  # type: ignore[arg-type]
    (lambda sender, one: sender.send(one, at(SOURCES), 0, last=True, after=ManualStream().record()), ArgumentError),
    (lambda sender, one: send(sender, one, [*range(1, 10), 0], 0, last=True), Violation),
    (lambda sender, one: send(sender, one, [*range(1, 10), -5], 0, last=True), Violation),
    (lambda sender, one: send(sender, one, [TOKENS] * 10, 0, last=True), Violation),
]


@pytest.mark.parametrize(("wrong", "error"), WRONG_SENDS)
def test_refused_locations_send_nothing(wrong: Callable[[Sender, Transfer], None], error: type[Exception]) -> None:
    """Parts of pages, gaps, padding, other units, rows outside and KV not written yet send nothing; it goes on."""
    pair = Pair()
    lease, [transfer] = pair.granted()
    with pytest.raises(error):
        wrong(pair.sender, transfer)
    assert (transfer.state, transfer.handles) == (TransferState.OPEN, [])
    send(pair.sender, transfer, SOURCES, 0, last=True)
    with pytest.raises(ArgumentError, match="all"):
        send(pair.sender, transfer, SOURCES, 0, last=True)
    assert pair.run() == [lease]
    assert lease.state is LeaseState.DELIVERED


def test_sources_outside_the_memory_make_a_later_write_fail() -> None:
    """What the engine refuses in a later write ends the transfer: failed, drained, and known on both sides."""
    pair = Pair()
    lease, [transfer] = pair.granted()
    with pytest.raises(Violation):
        send(pair.sender, transfer, [*range(30, 48, 2), TOKENS], 0, last=True)
    assert transfer.state is TransferState.FAILED
    assert transfer.handles
    assert pair.run() == [lease]
    assert lease.state is LeaseState.FAILED
    assert lease.ended.query()


def test_an_error_in_the_third_write_leaves_nothing_half_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes are under way when the third is refused: the transfer fails, and ends once they have drained."""
    pair = Pair()
    lease, [transfer] = pair.granted()
    write = pair.prefills[0].engine.write

    def refuses(peer: Any, copies: Copies, tag: bytes) -> Any:
        if len(transfer.handles) == 2:
            raise TransferError("no more", tag, "none")
        return write(peer, copies, tag)

    monkeypatch.setattr(pair.prefills[0].engine, "write", refuses)
    scattered = np.array([9, 30, 2, 40, 5, 50, 7, 33, 44, 22])
    for says in ("no more", "refused"):
        with pytest.raises(TransferError, match=says):
            send(pair.sender, transfer, scattered, 0, last=True)
    pair.carry()
    assert (transfer.state, pair.receiver.poll()) == (TransferState.FAILED, [lease])
    for fence, says in ((transfer.sources_free, "may still read"), (lease.ended, "may still be written by prefill-0")):
        assert not fence.query()
        with pytest.raises(TransferError, match=says) as caught:
            fence.wait()
        assert caught.value.in_flight
    pair.run()
    assert lease.ended.query()
    assert transfer.sources_free.query()


def test_a_receiver_that_stood_still_counts_little_grace() -> None:
    """Time without a poll is a quarter of the grace period at most: what lay in sockets still lies there."""
    pair = Pair()
    lease, _ = pair.granted()
    pair.network.kill(pair.prefills[0].engine)
    pair.receiver.peer_ended("prefill-0")
    for _ in range(100 * GRACE_STEPS):
        pair.network.step()
    for looks in range(4):
        assert not lease.ended.query(), looks
        pair.receiver.poll()
        for _ in range(GRACE_STEPS):
            pair.network.step()
    assert lease.ended.query()


def test_a_receiver_that_ended_frees_the_sources() -> None:
    """Nothing is read for a receiver that has ended, whatever the engine knows of the writes."""
    pair = Pair(faults=Faults(unknown=1.0, stuck=1.0))
    _, [transfer] = pair.granted()
    send(pair.sender, transfer, SOURCES, 0, last=True)
    pair.network.kill(pair.decode.engine)
    pair.sender.peer_lost("decode")
    assert transfer.state is TransferState.FAILED
    pair.sender.peer_ended("decode")
    assert transfer.sources_free.query()
    assert not pair.sender.transfers()


def test_tags_of_others_are_counted_and_ignored() -> None:
    """Tags of another library, epoch, lease, attempt, writer or instance complete nothing; nor do notices end one."""
    pair = Pair()
    lease, _ = pair.granted(0, ())
    engine, writer = pair.decode.engine, pair.prefills[0].engine.instance
    right = Tag(engine.instance, lease.serial, 1, 0, 0, 1)
    assert Tag.unpacked(right.packed()) == right
    assert len(right.packed()) == 34
    assert Tag.unpacked(right.packed()[:-1]) is None
    for tag in (attrs.evolve(right, epoch="00" * 8), attrs.evolve(right, attempt=2), attrs.evolve(right, writer=1)):
        engine.arrived.append(Delivery(tag.packed(), writer))
    engine.arrived.append(Delivery(right.packed(), "ff" * 8))
    engine.arrived.append(Delivery(b"of another library", writer))
    engine.arrived.append(Delivery(attrs.evolve(right, chunk=3, total=9).packed(), writer))
    engine.arrived.append(Delivery(attrs.evolve(right, serial=lease.serial + 1).packed(), writer))
    assert not pair.receiver.poll()
    assert (pair.receiver.ignored.foreign, pair.receiver.ignored.late) == (6, 1)
    engine.arrived += [Delivery(right.packed(), writer)] * 2
    assert pair.receiver.poll() == [lease]
    assert pair.receiver.ignored.duplicate == 1
    pair.receiver.on_message(packed(Notice(Kind.DRAINED, writer, engine.instance, lease.serial)), "prefill-0")
    assert (pair.receiver.ignored.notices, lease.state) == (1, LeaseState.DELIVERED)


def test_a_grant_older_than_what_is_remembered_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a writer cannot tell from an old lease it refuses, and says so."""
    monkeypatch.setattr(sender_module, "REMEMBERED", 2)
    pair = Pair()
    late = pair.lease()
    held, pair.receiver.outbox = pair.receiver.outbox, []
    for begin in (24, 36, 48):
        pair.receiver.abort(pair.lease(10, ((begin, 12),)))
        pair.carry()
    pair.sender.poll()
    pair.receiver.outbox = held
    pair.carry()
    assert not pair.sender.transfers()
    pair.carry()
    assert late in pair.receiver.poll()
    assert late.state is LeaseState.FAILED
    assert late.ended.query()


def _altered(message: bytes, **changes: object) -> bytes:
    return json.dumps(json.loads(message) | changes).encode()


def test_malformed_messages_are_refused_and_change_nothing() -> None:
    """Whatever arrives is checked field by field."""
    pair = Pair()
    pair.lease()
    _, grant = pair.receiver.outbox[0]
    broken = [b"", b"{}", b"\xff", b"[1]", grant[:-5], b"[" * 100_000, json.dumps({"is": MAGIC}).encode()]
    kinds: list[object] = ["sing", None, 3, []]
    broken += [_altered(grant, kind=one) for one in kinds]
    broken += [_altered(grant, serial=value) for value in (-1, True, 1.5, "1", 10**30)]
    broken += [_altered(grant, num_tokens=value) for value in (-1, 13, 10**12, None)]
    broken += [_altered(grant, writer=2**40), _altered(grant, more=1), _altered(grant, sender=5)]
    ranges: list[Any] = [None, [1, 2], [[1, 2, 3]], [[0, 12]], [[1, 2**63]], [[2**62, 2**62]], [[4, 8], [6, 8]]]
    broken += [_altered(grant, ranges=value) for value in (*ranges, [[1, True]])]
    for message in broken:
        with pytest.raises(ArgumentError):
            pair.sender.on_message(message, "decode")
    assert not pair.sender.poll()
    with pytest.raises(ArgumentError, match=r"Grant.* is not what the other side says"):
        pair.receiver.on_message(grant, "prefill-0")
    for kind in (Kind.FAILED, Kind.DRAINED):
        with pytest.raises(ArgumentError, match=r"Notice.* is not what the other side says"):
            pair.sender.on_message(packed(Notice(kind, "a", "b", 1)), "decode")
    with pytest.raises(HandshakeError, match="unknown"):
        pair.sender.on_message(grant, "nobody")
    with pytest.raises(HandshakeError, match="got one of instance"):
        pair.sender.on_message(_altered(grant, sender="ab" * 8), "decode")
    assert unpacked(grant).serial == 1
    pair.carry()
    assert len(pair.sender.poll()) == 1


@pytest.mark.parametrize("sent", [True, False])
def test_an_interrupt_in_a_write_is_not_taken_for_nothing(sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """DRAINED is said only when no byte of an interrupted write can land any more, and it is said in the end."""
    pair = Pair(faults=Faults(delay=3))
    lease, [transfer] = pair.granted()
    depart = pair.network.depart

    def interrupted(*arguments: Any) -> None:
        if sent:
            depart(*arguments)
        raise KeyboardInterrupt

    owner: Any = pair.network if sent else pair.prefills[0].engine
    monkeypatch.setattr(owner, "depart" if sent else "_fated", interrupted)
    with pytest.raises(KeyboardInterrupt):
        send(pair.sender, transfer, SOURCES, 0, last=True)
    assert (transfer.state, len(transfer.handles)) == (TransferState.FAILED, int(sent))
    for _ in range(20):
        pair.sender.poll()
        pair.carry()
        pair.receiver.poll()
        assert not (lease.ended.query() and pair.network.under_way(pair.decode.engine))
        pair.network.step()
    assert lease.ended.query()
    assert transfer.sources_free.query()


def test_a_write_that_was_refused_may_be_tried_with_its_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that refuses a write keeps nothing of it, neither its tag nor its memory."""
    pair = Pair()
    side = pair.prefills[0]
    peer = side.session._named("decode").peer
    monkeypatch.setattr(side.engine, "faults", Faults(refused=1.0))
    with pytest.raises(TransferError, match="refused"):
        side.engine.write(peer, Copies.empty(), b"tag")
    assert side.engine.begun(b"tag") is None
    monkeypatch.setattr(side.engine, "faults", Faults())
    handle = side.engine.write(peer, Copies.empty(), b"tag")
    assert side.engine.begun(b"tag") is handle


def test_an_introduction_from_another_worker_is_refused() -> None:
    """Where the channel knows the sender, no other name is believed, and no lease ends."""
    pair = Pair()
    lease, _ = pair.granted()
    other = made(Sender, pair.network, "prefill-0", layout())
    for session in (pair.receiver, pair.sender):
        introduction = other.introduction if session is pair.receiver else pair.decode.introduction
        with pytest.raises(HandshakeError, match="came from 'prefill-1'"):
            session.accept(introduction, "prefill-1")
    assert lease.state is LeaseState.WAITING
    assert pair.receiver.accept(other.introduction, "prefill-0") == "prefill-0"


def test_the_next_instance_has_the_rank_of_the_last() -> None:
    """Another rank under a known name is a wrong name, not the end of a worker."""
    pair = Pair(2)
    lease, _ = pair.granted()
    for rank, degree in ((1, 2), (0, 1)):
        with pytest.raises(HandshakeError, match="of worker 'prefill-0' was"):
            pair.receiver.accept(made(Sender, pair.network, "prefill-0", layout(rank, degree)).introduction)
    assert not pair.receiver.poll()
    assert lease.state is LeaseState.WAITING


@pytest.mark.parametrize(
    ("tags", "state", "foreign"),
    [
        ([(0, 1), (5, 0)], LeaseState.DELIVERED, 1),
        ([(7, 0), (1, 2)], LeaseState.WAITING, 1),
        ([(1, 2), (2, 3), (2, 0)], LeaseState.WAITING, 2),
        ([(1, 2), (0, 1), (0, 0)], LeaseState.DELIVERED, 1),
    ],
)
def test_only_the_chunks_that_there_are_complete_a_lease(
    tags: list[tuple[int, int]], state: LeaseState, foreign: int
) -> None:
    """Chunks behind the last one, and a second last one, change nothing, neither before the end nor after it."""
    pair = Pair()
    lease = pair.lease()
    engine, writer = pair.decode.engine, pair.prefills[0].engine.instance
    for chunk, total in tags:
        engine.arrived.append(Delivery(Tag(engine.instance, lease.serial, 1, 0, chunk, total).packed(), writer))
        pair.receiver.poll()
    assert lease.state is state
    assert lease.ended.query() == (state is LeaseState.DELIVERED)
    # What arrives behind the end is late: its lease has ended.
    assert pair.receiver.ignored.foreign + pair.receiver.ignored.late == foreign


def test_a_grant_of_a_huge_range_costs_what_the_request_needs() -> None:
    """Of a range only as many tokens are listed as the request has: no more than a worker can list."""
    fields: dict[str, Any] = {"sender": "a", "to": "b", "serial": 1, "attempt": 1, "request": "r", "writer": 0}
    fields |= {"first": 0, "holds": "host_location"}
    grant = Grant(**fields, num_tokens=3, ranges=np.array([[8, 2], [2**20, 2**60]]))
    assert grant.targets.tolist() == [8, 9, 2**20]
    assert Grant(**fields, num_tokens=0, ranges=np.array([[8, 2]])).targets.size == 0
    with pytest.raises(ArgumentError, match="num_tokens"):
        unpacked(packed(attrs.evolve(grant, num_tokens=MOST_TOKENS + 1)))


def test_names_are_as_long_as_peers_take() -> None:
    """A name that no peer would take is refused where it is given; the longest that peers take goes through."""
    pair = Pair()
    with pytest.raises(ArgumentError, match=f"request: expected a name of at most {MOST_TEXT} characters, got a str"):
        pair.receiver.lease("r" * (MOST_TEXT + 1), 1, ["prefill"])
    engine = InProcessEngine(Network())
    with pytest.raises(ArgumentError, match=f"characters of the region's name is {MOST_TEXT + 1}"):
        engine.register(np.zeros(64, dtype=np.uint8), "k" * (MOST_TEXT + 1))
    engine.register(np.zeros(64, dtype=np.uint8), "k" * MOST_TEXT)
    assert Endpoint.from_bytes(engine.endpoint()).regions[0].name == "k" * MOST_TEXT
    notice = Notice(Kind.FAILED, "a", "b", 1, "long " * MOST_TEXT)
    assert unpacked(packed(notice)) == attrs.evolve(notice, reason=("long " * MOST_TEXT)[:MOST_TEXT])


def _aborted(pair: Pair) -> Lease:
    """A lease that was given up before its grant: it has ended without a message."""
    lease = pair.new()
    pair.receiver.abort(lease)
    assert lease.ended.query()
    assert not pair.receiver.outbox
    return lease


def _after_retry(pair: Pair) -> Lease:
    """A lease that has another attempt."""
    lease = _aborted(pair)
    again = pair.receiver.retry(lease)
    assert (again.request, again.attempt, again.state) == (lease.request, 2, LeaseState.WAITING)
    assert again.serial != lease.serial
    return lease


def _without_a_writer(pair: Pair) -> Receiver:
    """A receiver whose writer died: of another instance, when the lease that it may still write is not over."""
    pair.granted()
    pair.network.kill(pair.prefills[0].engine)
    pair.receiver.peer_ended("prefill-0")
    pair.prefills[0] = pair.prefill()
    return pair.receiver


def _suspicious(pair: Pair) -> Receiver:
    """A receiver that suspects its writer, after it was wrong once: the writer introduced itself again."""
    pair.receiver.peer_lost("prefill-0")
    pair.receiver.accept(pair.prefills[0].introduction)
    pair.new()
    pair.receiver.peer_lost("prefill-0", "no answer")
    return pair.receiver


def _stranger(kind: type, pair: Pair) -> Any:
    return made(kind, pair.network, "another", layout()).session


def _kept_behind(fence: Fence | None) -> HostRanges:
    """Host memory that is free once `fence` is complete."""
    return HostRanges(1, 1, 1, np.array([8]), np.array([12]), fence)


def _transfer(pair: Pair) -> Transfer:
    return pair.granted()[1][0]


REFUSED: list[tuple[Callable[[Pair], object], type[Exception], str]] = [
    # Leases: all ranks that hold the request's heads, once each; numbers that a message can say
    (lambda pair: pair.receiver.lease("r", 1, []), ArgumentError, "names of writers"),
    (lambda pair: pair.receiver.lease("r", 1, ["prefill-0"] * 2), ArgumentError, "writers of ranks"),
    (lambda pair: Pair(2).receiver.lease("r", 1, ["prefill-0"]), ArgumentError, "writers of ranks"),
    (lambda pair: Pair(2).receiver.lease("r", 1, ["prefill-1"]), ArgumentError, "writers of ranks"),
    (lambda pair: pair.receiver.lease(["r"], 1, ["prefill-0"]), ArgumentError, "expected a name"),  # type: ignore[arg-type]
    (lambda pair: pair.receiver.lease(b"r", 1, ["prefill-0"]), ArgumentError, "expected a name"),  # type: ignore[arg-type]
    (lambda pair: pair.receiver.lease("r", MOST_TOKENS + 1, ["prefill-0"]), ArgumentError, "expected <= "),
    (lambda pair: pair.receiver.lease("r", 1, ["prefill-0"], attempt=MOST_ATTEMPTS + 1), ArgumentError, "expected <= "),
    (lambda pair: _suspicious(pair).lease("r", 1, ["prefill-0"]), TransferError, "no answer"),
    (lambda pair: pair.receiver.retry(pair.lease()), ArgumentError, "has not failed"),
    (lambda pair: pair.receiver.retry(_after_retry(pair)), ArgumentError, "was retried already"),
    # Grants: enough locations, no padding, nothing empty, shared, outside the regions, or of a lease that has not ended
    (lambda pair: pair.receiver.grant(pair.new(), _kept_behind(None)), ArgumentError, "not kept until a writer"),
    (lambda pair: pair.receiver.grant(pair.new(), _kept_behind(WRITTEN)), ArgumentError, "kept until DoneFence"),
    (lambda pair: pair.receiver.grant(pair.new(), _kept_behind(pair.new().ended)), ArgumentError, "kept until Ended"),
    (lambda pair: grant(pair.receiver, pair.new(), [[8, 4]]), ArgumentError, "ranges"),
    (lambda pair: grant(pair.receiver, pair.new(), [[0, 12]]), ArgumentError, "ranges"),
    (lambda pair: grant(pair.receiver, pair.new(), [[8, 8], [15, 4]]), ArgumentError, "ranges"),
    (lambda pair: grant(pair.receiver, pair.new(), [[8, 0], [20, 12]]), ArgumentError, "ranges"),
    (lambda pair: grant(pair.receiver, pair.new(), [[60, 12]]), ArgumentError, "location 64, got one up to 72"),
    (lambda pair: grant(pair.receiver, pair.lease(), [[40, 12]]), ArgumentError, "is granted"),
    (lambda pair: grant(pair.receiver, _aborted(pair), [[8, 12]]), TransferError, "aborted"),
    (
        lambda pair: grant(_without_a_writer(pair), pair.new(), [[8, 12]]),
        ArgumentError,
        "another lease may still write",
    ),
    # Leases and transfers of others
    (lambda pair: _stranger(Receiver, pair).abort(pair.new()), ArgumentError, "expected a lease of"),
    (lambda pair: _stranger(Receiver, pair).retry(pair.new()), ArgumentError, "expected a lease of"),
    (lambda pair: grant(_stranger(Receiver, pair), pair.new(), [[8, 12]]), ArgumentError, "expected a lease of"),
    (
        lambda pair: send(_stranger(Sender, pair), _transfer(pair), SOURCES, 0, last=True),
        ArgumentError,
        "expected a transfer",
    ),
    (lambda pair: _stranger(Sender, pair).fail(_transfer(pair), "no"), ArgumentError, "expected a transfer of"),
    # Workers
    (lambda pair: pair.receiver.peer_lost("x"), HandshakeError, "unknown"),
    (lambda pair: made(Receiver, pair.network, "d", layout(), grace_seconds=float("nan")), ArgumentError, "grace_sec"),
    (lambda pair: made(Receiver, pair.network, "d", layout(), grace_seconds=float("inf")), ArgumentError, "grace_sec"),
    (lambda pair: made(Receiver, pair.network, "d", layout(), grace_seconds=-1), ArgumentError, "grace_seconds"),
    (lambda pair: made(Sender, pair.network, "d", layout(), holds="page"), ArgumentError, "expected holds='location'"),
]


@pytest.mark.parametrize(("call", "error", "says"), REFUSED)
def test_what_is_refused_changes_nothing(call: Callable[[Pair], object], error: type[Exception], says: str) -> None:
    """Each refusal is an error of the library that says why; nothing is to be sent, and the pair serves on."""
    pair = Pair()
    with pytest.raises(error, match=says):
        call(pair)
    if pair.receiver._named("prefill-0").lost is None and not pair.receiver.poll():
        pair.carry()
        pair.sender.poll()
        lease, [transfer] = pair.granted(10, ((52, 12),))
        send(pair.sender, transfer, SOURCES, 0, last=True)
        assert pair.run() == [lease]
        assert lease.state is LeaseState.DELIVERED


def test_a_transfer_that_nothing_is_sent_for_is_reported() -> None:
    """A part that is never started, or stands still, is said once on the writer; `send` and `hold` begin anew."""
    pair = Pair()
    prefill = made(Sender, pair.network, "prefill-0", layout(), idle_polls=3)
    pair.receiver.accept(prefill.introduction)
    prefill.session.accept(pair.decode.introduction)
    pair.prefills = [prefill]
    lease, [transfer] = pair.granted()
    for begins_anew in ("send", "hold"):
        for _ in range(2):
            pair.sender.poll()
        if begins_anew == "send":
            send(pair.sender, transfer, SOURCES[:4], 0, last=False)
        else:
            pair.sender.hold(transfer)
    for _ in range(3):
        pair.sender.poll()
    pair.lease(4, ((32, 4),))
    pair.carry()
    with pytest.raises(Violation, match="the transfer of 'r' was granted, and nothing is sent for it") as caught:
        pair.sender.poll()
    assert caught.value.code is Code.TRANSFER_IDLE
    assert (caught.value.expected, caught.value.actual) == ("`send`, `fail` or `hold` within 3 polls", "4")
    [other] = pair.sender.poll()  # nothing is lost, and nothing is said twice
    send(pair.sender, transfer, SOURCES[4:], 4, last=True)
    send(pair.sender, other, SOURCES[:4], 0, last=True)
    assert lease in pair.run()
    with pytest.raises(ArgumentError, match="idle_polls is 0"):
        made(Sender, pair.network, "other", layout(), idle_polls=0)


@pytest.mark.parametrize("shape", [(64, 2), (16, PAGE, 2), (128,), (32, PAGE), (64, 3), (8, PAGE, 2, 2)])
def test_memory_has_the_rows_of_its_layout(shape: tuple[int, ...]) -> None:
    """A token, or a page, is a row of memory that has rows; of other rows each token would be half another's."""
    engine = InProcessEngine(Network())
    regions = [engine.register(torch.zeros(shape, dtype=torch.float16), layer) for layer in LAYERS]
    about = Description("w", engine.instance, KVLayout(PAGE, "float16", LAYERS, 4), engine.endpoint())
    if shape[1:] in ((2,), (PAGE, 2), ()):
        Sender(engine, about, regions)
        return
    with pytest.raises(ShapeError, match=f"expected rows of 4 bytes, .* or pages of {PAGE}, got"):
        Sender(engine, about, regions)


def test_pages_that_are_not_token_major_are_told_by_their_shape() -> None:
    """Memory [pages, heads, tokens, bytes] is no memory of tokens one after the other: it is sent as whole pages."""
    engine = InProcessEngine(Network())
    regions = [engine.register(torch.zeros((8, 2, PAGE, 3), dtype=torch.float16), layer) for layer in LAYERS]
    layout = KVLayout(PAGE, "float16", LAYERS, 12, heads=2)
    with pytest.raises(ShapeError, match="tokens of a page one after the other, got"):
        Sender(engine, Description("w", engine.instance, layout, engine.endpoint()), regions)
    whole = attrs.evolve(layout, token_major=False)
    Sender(engine, Description("w", engine.instance, whole, engine.endpoint()), regions)


def test_memory_of_another_dtype_is_refused() -> None:
    """A layout says what its memory is; bytes, uint8, may be any."""
    network = Network()
    engine = InProcessEngine(network)
    regions = [engine.register(torch.zeros(64, 2, dtype=torch.float16), layer) for layer in LAYERS]
    for dtype, right in (("float16", True), ("bfloat16", False), ("int16", False)):
        about = Description("w", engine.instance, KVLayout(PAGE, dtype, LAYERS, 4), engine.endpoint())
        for kind in (Sender, Receiver):
            if right:
                kind(engine, about, regions)
                continue
            with pytest.raises(
                DtypeError, match=f"'keys': expected memory of {dtype}, as its layout says, got float16"
            ):
                kind(engine, about, regions)


def _calls(session: Session, made: Lease | Transfer) -> list[Callable[[], object]]:
    """Every public method of a side, with a lease or transfer of its own in the place of each argument."""
    names = [name for name in dir(session) if not name.startswith("_") and callable(getattr(session, name))]
    methods = [getattr(session, name) for name in names]
    return [
        functools.partial(method, **dict.fromkeys(inspect.signature(method).parameters, made)) for method in methods
    ]


def test_both_sides_belong_to_the_thread_of_their_engine() -> None:
    """Every call from another thread is refused before anything else, and every call once the engine is closed."""
    pair = Pair()
    lease, [transfer] = pair.granted()
    calls = _calls(pair.receiver, lease) + _calls(pair.sender, transfer)
    refused: list[Exception] = []

    def elsewhere() -> None:
        for call in calls:
            try:
                call()
            except OwnerThreadError as error:
                refused.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == len(calls) == 21
    pair.decode.engine.close()
    pair.prefills[0].engine.close()
    for call in calls:
        with pytest.raises(TransferError, match="closed"):
            call()


def test_a_write_that_cannot_be_asked_about_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's error about one write fails its transfer; the others arrive, and writes that are done are left."""
    pair = Pair()
    broken, [first] = pair.granted()
    lease, [second] = pair.granted(10, ((32, 12),))
    send(pair.sender, first, SOURCES, 0, last=True)
    send(pair.sender, second, SOURCES[:8], 0, last=False)
    engine = pair.prefills[0].engine
    poll, asked = engine.poll, []

    def some(handle: Handle) -> Status:
        if handle in first.handles:
            raise RuntimeError("out of order")
        asked.append((handle, handle.status))
        return poll(handle)

    monkeypatch.setattr(engine, "poll", some)
    assert broken in pair.run()
    send(pair.sender, second, SOURCES[8:], 8, last=True)
    assert lease in pair.run()
    assert lease.state is LeaseState.DELIVERED
    assert first.state is TransferState.FAILED
    assert "out of order" in first.reason
    assert not first.sources_free.query()
    assert all(status is Status.PENDING for _, status in asked)
    monkeypatch.setattr(engine, "poll", poll)
    pair.run()
    assert first.sources_free.query()
    assert broken.ended.query()
