"""KV that lands in device pages: taken for a writer in another process, granted, arrived, and a request's from then on.

That no byte of any request is lost or wrong, whatever the engine does, is shown by the machine `transfers`.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import HostKVPool, Locations, PagePool, PoolExhaustedError, SlotPool, Slots, open_runtime
from batchstate.errors import ArgumentError, TransferError
from batchstate.kv.host_pool import KVBuffer
from batchstate.kv.pages import PageLease
from batchstate.testing import ManualStream
from batchstate.transport.engines.base import Engine, open_engine
from batchstate.transport.engines.in_process import InProcessEngine, Network
from batchstate.transport.plan import KVLayout
from batchstate.transport.receiver import Lease, LeaseState, Receiver
from batchstate.transport.sender import Sender, Transfer, TransferState
from batchstate.transport.workers import ON_DEVICE, Description
from batchstate.violations import Code, Violation
from tests.doubles import refused

LAYERS = ("keys", "values")
PAGE, ITEM = 4, 3


class World:
    """A decode worker with a host pool and device pages, and a prefill worker with 64 locations of its own."""

    def __init__(
        self, *, page_size: int = PAGE, device: bool = True, host: bool = True, token_major: bool = True
    ) -> None:
        self.runtime = open_runtime("cpu")
        self.slots = SlotPool(self.runtime, 4)
        self.pages = PagePool(self.runtime, self.slots, 36 // page_size, page_size, max_tokens_per_request=24)
        self.host = HostKVPool(self.runtime, 9, PAGE, layers=LAYERS, item_shape=(ITEM,), dtype=torch.uint8)
        self.kv = [
            self.runtime.device_zeros((self.pages.location_capacity, ITEM), torch.uint8, name=layer) for layer in LAYERS
        ]
        self.network = Network(5)
        engine = InProcessEngine(self.network, max_rows=3)
        layout = KVLayout(PAGE, "uint8", LAYERS, ITEM, token_major=token_major)
        regions = [engine.register(buffer.memory, buffer.name) for buffer in self.host.contiguous_buffers() if host]
        there = [engine.register(kv, layer + ON_DEVICE) for kv, layer in zip(self.kv, LAYERS, strict=True) if device]
        about = Description("decode", engine.instance, layout, engine.endpoint())
        self.receiver = Receiver(engine, about, regions, there)
        self.source = np.random.default_rng(1).integers(1, 200, (2, 64, ITEM), dtype=np.uint8)
        engine = InProcessEngine(self.network, max_rows=3)
        ours = [engine.register(memory, layer) for memory, layer in zip(self.source, LAYERS, strict=True)]
        self.sender = Sender(engine, Description("prefill-0", engine.instance, layout, engine.endpoint()), ours)
        self.receiver.accept(self.sender.introduce())
        self.sender.accept(self.receiver.introduce())

    def carry(self) -> None:
        for side, other, name in ((self.receiver, self.sender, "decode"), (self.sender, self.receiver, "prefill-0")):
            messages, side.outbox = side.outbox, []
            for _, message in messages:
                other.on_message(message, name)

    def lease(self, tokens: int = 10, first: int = 0) -> Lease:
        return self.receiver.lease("r", tokens, ["prefill-0"], first=first)

    def landing(self, lease: Lease) -> PageLease:
        return self.pages.take(-(-lease.num_tokens // self.pages.page_size), writer=lease.ended)

    def granted(self, lease: Lease, memory: Any) -> Transfer:
        self.receiver.grant(lease, memory)
        self.carry()
        (transfer,) = self.sender.poll()
        return transfer

    def send(self, transfer: Transfer, first: int = 0) -> None:
        """Sends locations 20, 21, ... as the granted tokens."""
        sources = Locations.from_host(self.runtime, np.arange(20, 20 + transfer.grant.num_tokens))
        self.sender.send(transfer, sources, first, True, after=self.runtime.record())

    def run(self) -> list[Lease]:
        changed = []
        for _ in range(9):
            self.network.step()
            self.sender.poll()
            self.carry()
            changed += self.receiver.poll()
        return changed


@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_each_request_lands_where_it_was_granted(page_size: int) -> None:
    """Of two requests in one deployment one comes into the host tier and one into device pages of any size."""
    world = World(page_size=page_size)
    here, there = world.lease(), world.lease()
    landing = world.landing(there)
    (ranges,) = world.host.take([10], [1], writer=here.ended)
    for lease, memory in ((here, ranges), (there, landing)):
        world.send(world.granted(lease, memory))
    assert set(world.run()) == {here, there}
    world.pages.commit(landing, 10)
    slot = world.slots.take(1)
    extension = world.pages.assign(landing, slot, 10)
    assert landing.released
    np.testing.assert_array_equal(extension.positions, np.arange(10))
    for layer in range(2):
        arrived = world.runtime.inspect(world.kv[layer])[extension.locations.np]
        np.testing.assert_array_equal(arrived, world.source[layer, 20:30])
        np.testing.assert_array_equal(world.host.buffers[layer][ranges.locations(0, 10)], world.source[layer, 20:30])
        assert np.count_nonzero(world.runtime.inspect(world.kv[layer]).any(axis=1)) == 10
    world.pages.advance(slot, 3)  # the page that the tokens end in is the request's to write
    world.pages.verify()
    world.pages.release_requests(slot, after=None)
    world.pages.expect_idle()


def test_pages_wait_for_their_writer_whatever_they_are_released_behind() -> None:
    """Given back while its writer may still write, the memory is nobody's until the lease has ended."""
    world = World()
    lease = world.lease()
    landing = world.landing(lease)
    transfer = world.granted(lease, landing)
    world.send(transfer)
    world.receiver.abort(lease)
    landing.release(after=None)
    assert (world.pages.stats.free, world.pages.stats.pending) == (6, 3)
    with pytest.raises(PoolExhaustedError):
        world.pages.take(7)
    again = world.receiver.retry(lease)
    with pytest.raises(ArgumentError, match="kept until Ended"):
        world.receiver.grant(again, landing)
    assert world.run() == [lease]
    assert world.pages.stats.free == 9


def test_tokens_from_a_position_on() -> None:
    """A lease is a range of tokens: those before are here already, and both sides name its place."""
    world = World()
    lease = world.lease(6, first=8)
    transfer = world.granted(lease, world.landing(lease))
    with pytest.raises(
        ArgumentError, match=r"expected the tokens from 8 on, got those from 0 on; 0 of 8 to 13 are sent"
    ):
        world.send(transfer, first=0)
    sources = Locations.from_host(world.runtime, np.arange(20, 28))
    with pytest.raises(ArgumentError, match="ends at token 16 of 14"):
        world.sender.send(transfer, sources, 8, False, after=world.runtime.record())
    assert (transfer.sent, transfer.handles) == (0, [])
    world.send(transfer, first=8)
    assert world.run() == [lease]
    assert (lease.state, lease.ended.arrived()) == (LeaseState.DELIVERED, 6)


def _committed(world: World) -> tuple[PageLease, Any]:
    landing = world.pages.take(3)
    world.pages.commit(landing, 10)
    return landing, world.slots.take(1)


def _under_way(world: World) -> tuple[Lease, PageLease]:
    """A lease that waits, with granted pages."""
    lease = world.lease()
    landing = world.landing(lease)
    world.granted(lease, landing)
    return lease, landing


def _written_late(world: World) -> None:
    """Pages whose tokens have arrived while another process may still write them."""
    writer = ManualStream().record()
    landing = world.pages.take(3, writer=writer)
    landing._written = {"kv": 10}
    world.pages.assign(landing, world.slots.take(1), 10)


def _twice(world: World) -> None:
    landing, slot = _committed(world)
    world.pages.assign(landing, slot, 10)
    world.pages.assign(landing, world.slots.take(1), 10)


def _into_one_with_pages(world: World) -> None:
    landing, slot = _committed(world)
    world.pages.extend(slot, 1)
    world.pages.assign(landing, slot, 10)


def _too_few(world: World) -> None:
    lease = world.lease(13)
    world.receiver.grant(lease, world.pages.take(3, writer=lease.ended))


def _of_another(world: World) -> None:
    _, landing = _under_way(world)
    world.receiver.grant(world.lease(), landing)


def _cleared(world: World) -> None:
    _under_way(world)
    world.slots.clear()


REFUSED: list[tuple[Callable[[World], object], type[Exception] | Code, str]] = [
    (lambda world: world.receiver.grant(world.lease(), world.pages.take(3)), ArgumentError, "not kept until a writer"),
    (_of_another, ArgumentError, "kept until Ended"),
    (_too_few, ArgumentError, "for 13 tokens"),
    (lambda world: world.lease(4, first=3), ArgumentError, "expected `first` to begin a page of 4, got 3"),
    (lambda world: world.pages.take(3, writer=3), ArgumentError, "expected a fence"),  # type: ignore[arg-type]
    (lambda world: world.pages.commit(_under_way(world)[1], 10), Code.PAGE_UNWRITTEN, "10 tokens are to be read"),
    (_written_late, Code.SLOT_IN_FLIGHT, "changes owner while"),
    (_twice, ArgumentError, "does not hold"),
    (_into_one_with_pages, ArgumentError, "has pages already"),
    (lambda world: world.pages.assign(*_committed(world), 11), Code.PAGE_UNWRITTEN, "11 tokens"),
    (lambda world: world.pages.assign(*_committed(world), 13), Code.LENGTH_ORDER, "12 are allocated"),
    (lambda world: world.pages.assign(_committed(world)[0], world.slots.take(2), 10), ArgumentError, "one slot"),
    (_cleared, Code.SLOT_IN_FLIGHT, "changes owner while"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "says"), REFUSED)
def test_what_is_refused_changes_nothing(
    call: Callable[[World], object], error: type[Exception] | Code, says: str
) -> None:
    """Each refusal says why; every page is free, pending or held as before, and a request lands."""
    world = World()
    with pytest.raises(Violation if isinstance(error, Code) else error, match=says) as caught:
        call(world)
    if isinstance(caught.value, Violation):
        assert caught.value.code is error
    world.pages.verify()
    for lease in world.receiver.leases():
        world.receiver.abort(lease)
    for held in list(world.pages._holders.leases.values()):
        held.release(after=None)
    world.run()
    lease = world.lease(4)
    world.send(world.granted(lease, world.landing(lease)))
    assert world.run() == [lease]


def test_a_worker_without_such_memory() -> None:
    """A receiver without device pages, or without a host pool, refuses a grant there; one without either is no peer."""
    for world, holds in ((World(device=False), "location"), (World(host=False), "host_location")):
        lease = world.lease()
        memory = world.landing(lease) if holds == "location" else world.host.take([10], [1], writer=lease.ended)[0]
        with pytest.raises(ArgumentError, match=f"expected ranges below {holds} 0, got one up to"):
            world.receiver.grant(lease, memory)
        assert (lease.ranges, world.receiver.outbox) == (None, [])
    with pytest.raises(ArgumentError, match="expected regions"):
        World(device=False, host=False)
    world = World()
    engine = InProcessEngine(world.network)
    region = engine.register(np.zeros(64, dtype=np.uint8), "keys")
    about = Description("other", engine.instance, KVLayout(PAGE, "uint8", ("keys",), ITEM), engine.endpoint())
    with pytest.raises(ArgumentError, match="expected regions"):
        Receiver(engine, about, (), (region,))


def test_pages_that_are_anothers_by_now_are_reported() -> None:
    """A fence that says too early that a writer has ended is found in the next poll, not by wrong tokens."""
    world = World()
    _, landing = _under_way(world)
    landing.writer = None  # as a pool that forgets it
    landing.release(after=None)
    assert not world.receiver.poll()
    world.pages.take(9)
    with pytest.raises(Violation, match="is older than its present owner") as caught:
        world.receiver.poll()
    assert caught.value.code is Code.SLOT_STALE_HANDLE


@pytest.mark.parametrize("kind", ["in-process", "tcp", "nixl", "mooncake"])
def test_every_bit_lands_where_it_was_granted(kind: str) -> None:
    """bf16, fp8, and pages that cannot be split, into host memory and into device pages, over each engine.

    Of a page that ends early all comes that its source has: keys of its tokens, and the scales behind them.
    """
    runtime, network = open_runtime("cpu"), Network(1)
    slots = SlotPool(runtime, 4)
    pages = PagePool(runtime, slots, 8, PAGE, max_tokens_per_request=24)
    kinds = (torch.bfloat16, 3), (torch.float8_e4m3fn, 5), (torch.uint8, 6)
    names = "keys", "values", "index"
    specs = [KVBuffer(name, (n,), dtype) for name, (dtype, n) in zip(names, kinds, strict=True)]
    host = HostKVPool(runtime, 9, PAGE, layers=specs)
    layouts = [
        KVLayout(PAGE, str(spec.dtype), [spec.name], spec.item_bytes, token_major=spec.name != "index")
        for spec in specs
    ]
    try:
        engines = [_engine(kind, network) for _ in range(2)]
    except TransferError as error:
        pytest.skip(str(error))
    kv = [runtime.device_zeros((pages.location_capacity, n), dtype) for dtype, n in kinds]
    dice = np.random.default_rng(2)
    source = [
        torch.from_numpy(dice.integers(0, 256, (64, spec.item_bytes), dtype=np.uint8)).view(spec.dtype)
        for spec in specs
    ]
    regions = [engines[0].register(buffer.memory, buffer.name) for buffer in host.contiguous_buffers()]
    there = [engines[0].register(memory, name + ON_DEVICE) for memory, name in zip(kv, names, strict=True)]
    ours = [engines[1].register(memory, name) for memory, name in zip(source, names, strict=True)]
    about, other = (
        Description(name, engine.instance, layouts, engine.endpoint())
        for name, engine in zip(("decode", "prefill-0"), engines, strict=True)
    )
    receiver, sender = Receiver(engines[0], about, regions, there), Sender(engines[1], other, ours)
    receiver.accept(sender.introduce())
    sender.accept(receiver.introduce())
    leases = [receiver.lease(name, 10, ["prefill-0"]) for name in ("device", "host")]
    landing = pages.take(3, writer=leases[0].ended)
    (ranges,) = host.take([10], [1], writer=leases[1].ended)
    receiver.grant(leases[0], landing)
    receiver.grant(leases[1], ranges)
    arrived: list[Lease] = []
    deadline = time.monotonic() + 30
    while len(arrived) < 2 and time.monotonic() < deadline:
        network.step()
        for transfer in sender.poll():
            if transfer.state is TransferState.OPEN:
                sources = Locations.from_host(runtime, np.arange(20, 30))
                sender.send(transfer, sources, 0, True, after=runtime.record())
        for side, to, name in ((receiver, sender, "decode"), (sender, receiver, "prefill-0")):
            for _, message in side.outbox:
                to.on_message(message, name)
            side.outbox.clear()
        arrived += receiver.poll()
    assert [lease.state for lease in arrived] == [LeaseState.DELIVERED] * 2
    pages.commit(landing, 10)
    extension = pages.assign(landing, slots.take(1), 10)
    for memories, locations in ((kv, extension.locations.np), (host.buffers, ranges.locations(0, 10))):
        for memory, sent in zip(memories, source, strict=True):
            rows = runtime.inspect(memory.view(torch.uint8))
            np.testing.assert_array_equal(rows[locations], sent.view(torch.uint8)[20:30])
        tail = np.arange(2) + locations[-1] + 1  # of the last page
        np.testing.assert_array_equal(runtime.inspect(memories[2])[tail], source[2][30:32])
        assert not runtime.inspect(memories[0].view(torch.uint8))[tail].any()
    for engine in engines:
        engine.close()


def _prompt(world: World, tokens: int = 10) -> tuple[PagePool, Slots]:
    """A request of the prefill worker, with its KV, in a pool over the memory that is sent."""
    pool = PagePool(world.runtime, SlotPool(world.runtime, 4), 15, PAGE, max_tokens_per_request=60)
    slots = pool.slots.take(1)
    pool.extend(slots, tokens)
    pool.commit(slots, tokens)
    return pool, slots


def test_what_is_sent_is_nobody_elses_until_it_is_read() -> None:
    """Pages of a request that is let go without `sources_free` while it is read wait; until then it can decode on."""
    world = World()
    pool, slots = _prompt(world)
    lease = world.lease()
    transfer = world.granted(lease, world.landing(lease))
    sources = pool.locations(slots, 0, 10)
    world.sender.send(transfer, sources.take(np.arange(8)), 0, False, after=world.runtime.record())
    world.sender.send(transfer, sources.take(np.arange(8, 10)), 8, True, after=world.runtime.record())
    pool.advance(slots)  # into the page that is read: behind what is sent
    pool.verify()
    pool.release_requests(slots, after=None)
    assert (pool.stats.free, pool.stats.pending) == (12, 3)
    with pytest.raises(PoolExhaustedError):
        pool.extend(pool.slots.take(1), 13 * PAGE)
    pool.verify()
    assert lease in world.run()
    assert transfer.sources_free.query()
    assert (pool.stats.free, pool.stats.pending) == (15, 0)
    pool.verify()


def test_locations_of_the_next_owner_are_not_sent() -> None:
    """Locations were made, their request has left, and another has its pages: nothing is sent, and it can be failed."""
    world = World()
    pool, slots = _prompt(world)
    lease = world.lease()
    transfer = world.granted(lease, world.landing(lease))
    sources = pool.locations(slots, 0, 10)
    pool.release_requests(slots, after=None)
    for owner in (None, pool.slots.take(1)):
        if owner is not None:
            pool.extend(owner, 10)
            pool.commit(owner, 10)
        for some in (sources, sources.take(np.arange(10))):
            send = partial(world.sender.send, transfer, some, 0, True, after=world.runtime.record())
            refused(Code.SLOT_STALE_HANDLE, send)
    assert (transfer.sent, transfer.state, pool.stats.pending) == (0, TransferState.OPEN, 0)


def test_memory_of_another_pool_is_refused() -> None:
    """Pages of a draft model's pool, in the regions of the target's: their numbers would be other requests' there."""
    world = World()
    draft = PagePool(world.runtime, world.slots, 4, PAGE, max_tokens_per_request=24)
    lease = world.lease()
    world.receiver.grant(lease, world.landing(lease))
    wrong = world.lease()
    with pytest.raises(ArgumentError, match="of another pool than those granted before"):
        world.receiver.grant(wrong, draft.take(3, writer=wrong.ended))
    assert wrong.ranges is None
    world.receiver.grant(wrong, world.landing(wrong))


def test_pages_that_cannot_be_split_go_only_as_whole_pages() -> None:
    """A part that ends inside such a page, and memory of which the lease does not own all of it, are refused."""
    world = World(token_major=False)
    lease = world.lease()
    transfer = world.granted(lease, world.landing(lease))
    sources = Locations.from_host(world.runtime, np.arange(20, 30))
    for rows, last, words in ((slice(0, 6), False, "ends at token 6"), (slice(1, 5), False, "its page of 4")):
        with pytest.raises(ArgumentError, match=words):
            world.sender.send(transfer, sources.take(np.arange(10)[rows]), 0, last, after=world.runtime.record())
    assert (transfer.sent, transfer.state) == (0, TransferState.OPEN)
    world.send(transfer)
    assert lease in world.run()
    small = World(page_size=1, token_major=False)  # the pool's pages are not those of the layout
    lease = small.lease()
    transfer = small.granted(lease, small.landing(lease))
    refused(Code.TRANSFER_BOUNDS, lambda: small.send(transfer))
    assert transfer.sent == 0


def _engine(kind: str, network: Network) -> Engine:
    if kind == "in-process":
        return InProcessEngine(network, max_rows=3)
    return open_engine(kind, **({"trusted_network": True} if kind == "mooncake" else {}))
