"""The host tier: requests whose KV lies in host memory, with a ring of the newest tokens on the device."""

import contextlib
import functools
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from batchstate import checks
from batchstate.batch import Batch
from batchstate.columns import mirrored, slot_column
from batchstate.errors import (
    ArgumentError,
    CaptureError,
    DeviceError,
    DtypeError,
    OwnerThreadError,
    ShapeError,
)
from batchstate.kv._tier import TierState
from batchstate.kv.hisparse import HiSparse, LastLocation
from batchstate.kv.host_pool import HostKVPool, HostRanges, KVBuffer
from batchstate.kv.pages import PagePool
from batchstate.mirror import HostLocations, Locations, MirroredTensor, Slots
from batchstate.pools import SlotPool
from batchstate.races import Race, RaceRuntime
from batchstate.runtime import CpuRuntime, Fence, Runtime, open_runtime
from batchstate.runtime.memory import bytes_of
from batchstate.tables import Table
from batchstate.testing import LateRuntime, ManualStream
from batchstate.violations import Code
from tests.doubles import in_a_thread, refused
from tests.selfcheck.machines.host_tier import PrefillWorker
from tests.worlds import Pools, Tier

LAYERS = 2


@attrs.define(eq=False)
class World(Tier):
    """A host tier, and what each position of each request holds."""

    rt: Runtime = attrs.field(init=False)
    slots: SlotPool = attrs.field(init=False)
    pages: PagePool = attrs.field(init=False)
    dice: np.random.Generator = attrs.field(factory=lambda: np.random.default_rng(0))
    content: dict[int, Any] = attrs.field(factory=dict)
    ranges: dict[int, HostRanges] = attrs.field(factory=dict)

    @classmethod
    def on(cls, rt: Runtime, size: int = 8, *, host_pages: int = 200) -> "World":
        """No requests yet."""
        layers = [KVBuffer(str(layer), (1, 2), torch.float64) for layer in range(LAYERS)]
        world = cls.of(Pools.of(rt, size, pages=60, longest=64), layers, host_pages=host_pages)
        world.rt, world.slots, world.pages = rt, world.pools.slots, world.pools.pages
        return world

    def new(self, positions: int) -> Any:
        """float64[LAYERS, positions, 1, 2]."""
        return self.dice.random((LAYERS, positions, 1, 2))

    def reserve(self, lengths: list[int], max_tokens: int, writer: Fence | None = None) -> Slots:
        """Requests that wait for their KV."""
        slots = self.slots.take(len(lengths))
        for slot, ranges in zip(
            slots.np.tolist(), self.tier.reserve(slots, lengths, max_tokens, writer=writer), strict=True
        ):
            self.ranges[slot] = ranges
        return slots

    def deliver(self, slots: Slots) -> Slots:
        """Another process writes their KV, by address."""
        for slot, length in zip(slots.np.tolist(), self.tier.lengths(slots).tolist(), strict=True):
            self.content[slot] = self.new(length)
            for buffer, values in zip(self.host.contiguous_buffers(), self.content[slot], strict=True):
                memory = bytes_of(buffer.memory).view(np.float64).reshape(-1, 1, 2)
                memory[self.ranges[slot].locations(0, length)] = values
        return slots

    def direct(self, lengths: list[int], max_tokens: int = 40) -> Slots:
        """Requests that decode, whose KV came from another process."""
        slots = self.deliver(self.reserve(lengths, max_tokens))
        self.tier.admit_direct(slots)
        return slots

    def prefill(self, lengths: list[int]) -> Slots:
        """Requests outside of the tier with KV on the device."""
        slots = self.slots.take(len(lengths))
        locations = self.pages.extend(slots, lengths).locations.np
        values = [self.new(length) for length in lengths]
        self.content.update(zip(slots.np.tolist(), values, strict=True))
        self.write(locations, np.concatenate(values, axis=1))
        self.pages.commit(slots, lengths)
        return slots

    def write(self, locations: Any, values: Any) -> None:
        """A forward writes KV."""
        upload = self.rt.upload([locations, values])
        at, new = upload.view(0), upload.view(1)
        for layer, kv in enumerate(self.kv):
            self.rt.launch(_put, kv, at, new, layer, reads=(at, new), writes=(kv,), name="forward")

    def step(self, slots: Slots, *, packed: bool = False) -> LastLocation:
        """One decode step."""
        plan = self.tier.map_last_location(slots, self.tier.lengths(slots) + 1)
        uploaded = None
        if packed:
            upload = self.rt.upload(list(plan.extras.values()))
            uploaded = {name: upload.view(at) for at, name in enumerate(plan.extras)}
        self.tier.back_up(plan, uploaded)
        values = self.new(len(slots))
        self.write(plan.locations.np, values)
        for row, slot in enumerate(slots.np.tolist()):
            self.content[slot] = np.concatenate([self.content[slot], values[:, row : row + 1]], axis=1)
        return plan

    def check(self, slots: Slots) -> None:
        """Every byte of every position, host rows first, ring rows after them."""
        self.tier.verify()
        hot = self.tier.hot_tokens
        for row, slot in enumerate(slots.np.tolist()):
            length = self.content[slot].shape[1]
            first = int(self.tier._requests.hot_from[slot])
            first = max(first, length - hot)
            cold = self.tier.host_locations(slots.take([row]), first)
            rows = [p if p < hot else p % hot for p in range(first, length)]
            locations = self.pools.locations(slot, rows)
            for layer in range(LAYERS):
                on_host = self.rt.inspect(self.host.buffers[layer])[cold.np]
                on_device = self.rt.inspect(self.kv[layer])[locations]
                read = np.concatenate([on_host, on_device])
                assert read.tobytes() == np.ascontiguousarray(self.content[slot][layer]).tobytes(), (slot, layer)

    def numbers(self) -> tuple[Any, ...]:
        """Of all pools; free, pending and live."""
        return tuple((s.free, s.pending, s.live) for s in (self.slots.stats, self.pages.stats, self.host.stats))

    def snapshot(self) -> tuple[Any, ...]:
        """All that a refused call must leave alone."""
        return self.numbers(), self.pages.page_table.tolist(), self.pages.committed_lengths.tolist(), rows(self.tier)

    def expect_idle(self) -> None:
        """Everything came back."""
        self.tier.verify()
        for pool in (self.slots, self.pages, self.host):
            pool.expect_idle()
        assert all(live == pending == 0 for _, pending, live in self.numbers())


def rows(tier: HiSparse) -> list[Any]:
    """The state of each request of a tier."""
    requests = tier._requests
    states = requests.states, requests.length, requests.backed, requests.hot_from, requests.held, requests.max_tokens
    return [state.tolist() for state in states]


def _put(kv: torch.Tensor, at: torch.Tensor, new: torch.Tensor, layer: int) -> None:
    kv.index_copy_(0, at, new[layer])


@pytest.fixture
def world(rt: Runtime) -> World:
    """Hot buffers of 6 tokens on pages of 4."""
    return World.on(rt)


def test_plan_of_a_step(rt: Runtime, world: World) -> None:
    """A plan says where new tokens go, from which position on the device has KV, and what is backed up; all typed."""
    slots = world.direct([2, 9])
    first = world.step(slots)
    assert first.positions.tolist() == [2, 9]
    assert first.hot_from.tolist() == [0, 9]
    assert isinstance(first.locations, Locations)
    assert isinstance(first.backup_to, HostLocations)
    assert (len(first.backup_from), len(first.backup_to)) == (0, 0)
    second = world.tier.map_last_location(slots, MirroredTensor.from_host(rt, [4, 11]))
    assert second.backup_from.np.tolist() == first.locations.np.tolist()
    assert second.backup_to.np.tolist() == [world.ranges[1].locations()[2], world.ranges[2].locations()[9]]
    assert set(second.extras) == {"hot_locations", "hot_from", "backup_from", "backup_to"}
    assert "2 to back up" in repr(second)
    world.tier.back_up(second)
    assert world.tier.lengths(slots).tolist() == [4, 11]


def test_refusals_say_what_to_do(world: World) -> None:
    """Calls out of order name the call that is missing. The machine shows that they change nothing."""
    tier = world.tier
    with pytest.raises(ArgumentError, match="admit_staged"):
        tier.reserve(world.prefill([4]), 4, 20)
    slots = world.direct([4])
    for lens in (4, 6):
        with pytest.raises(ArgumentError, match="had 4"):
            tier.map_last_location(slots, lens)
    plan = tier.map_last_location(slots, 5)
    with pytest.raises(ArgumentError, match="backup not launched"):
        tier.map_last_location(slots, 6)
    for leave in (tier.finish, tier.abort, world.pages.release_requests):
        with pytest.raises(ArgumentError, match="in a plan whose backup was not launched"):
            leave(slots, after=None)
    tier.back_up(plan)
    with pytest.raises(ArgumentError, match="not the plan of this step"):
        tier.back_up(plan)


def test_foreign_handles_and_threads(rt: Runtime, world: World) -> None:
    """Handles of another pool, and calls from another thread, are refused everywhere."""
    tier = world.tier
    mine, foreign = world.direct([3]), SlotPool(rt, 2).take(1)
    calls = {"states": (), "ready": (), "lengths": (), "host_locations": (1,), "reserve": (1, 1), "admit_direct": ()}
    calls |= {"admit_staged": (1,), "map_last_location": (4,), "finish": (), "abort": ()}
    for name, arguments in calls.items():
        call = getattr(tier, name)
        if name in ("finish", "abort"):
            call = functools.partial(call, after=None)
        with pytest.raises(ArgumentError, match="expected slots of pool"):
            call(foreign, *arguments)
        assert isinstance(in_a_thread(functools.partial(call, mine, *arguments)), OwnerThreadError)
    assert isinstance(in_a_thread(tier.poll_staged), OwnerThreadError)
    assert isinstance(in_a_thread(tier.verify), OwnerThreadError)


def test_parts_must_fit(world: World) -> None:
    """A tier is refused over buffers of another shape, dtype or number, or pools of another runtime."""
    pages, host, kv = world.pages, world.host, world.kv
    other = HostKVPool(open_runtime("cpu"), 4, layers=LAYERS, item_shape=(1, 2), dtype=torch.float64)
    for error, pool, buffers, hot_tokens in (
        (ShapeError, host, kv[:1], 4),
        (ShapeError, host, [one[:-1] for one in kv], 4),
        (DtypeError, host, [one.float() for one in kv], 4),
        (ArgumentError, host, kv, 65),
        (ArgumentError, host, kv, 1),
        (DeviceError, other, kv, 4),
    ):
        with pytest.raises(error):
            HiSparse(pages, pool, buffers, hot_tokens=hot_tokens)


def test_pages_that_others_give_a_request_are_noticed(world: World) -> None:
    """Pages from other code are found before a READY request's next step; a DIRECT one is not admitted with them."""
    ready, direct = world.direct([3]), world.deliver(world.reserve([5], 20))
    world.pages.advance(ready)
    refused(Code.MIRROR_EQUAL, lambda: world.tier.map_last_location(ready, 4))
    refused(Code.MIRROR_EQUAL, world.tier.verify)
    world.pages.extend(direct, 3)
    before = world.snapshot()
    with pytest.raises(ArgumentError, match="device pages"):
        world.tier.admit_direct(direct)
    assert world.snapshot() == before


def second_launch_fails(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the second launch fails, and launches work again after it."""
    launch, launches = rt.launch, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        launches.append(1)
        if len(launches) == 2:
            monkeypatch.setattr(rt, "launch", launch)
            raise RuntimeError("out of memory")
        return launch(*args, **kwargs)

    monkeypatch.setattr(rt, "launch", failing)


def test_what_was_launched_before_an_error_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of which the second layer fails has begun all the same: its locations and pages wait for the first."""
    rt = LateRuntime()
    world = World.on(rt)
    hot = world.prefill([6])
    second_launch_fails(rt, monkeypatch)
    with pytest.raises(RuntimeError, match="out of memory"):
        world.tier.admit_staged(hot, 20)
    assert world.tier.states(hot) == [TierState.OUTSIDE]
    assert world.host.stats.pending == 20
    direct = world.deliver(world.reserve([5], 20))
    live = world.pages.stats.live
    second_launch_fails(rt, monkeypatch)
    with pytest.raises(RuntimeError, match="out of memory"):
        world.tier.admit_direct(direct)
    assert world.tier.states(direct) == [TierState.DIRECT]
    assert world.pages.stats.live == live
    assert world.pages.stats.pending > 0


def test_shared_pages_are_never_ring_rows(rt: Runtime, world: World) -> None:
    """The ring never goes round over a prefix that others use: staging it is refused, sharing it later is found."""
    source = world.prefill([8])
    sharer = world.slots.take(1)
    world.pages.share(source, sharer, 4)
    before = world.snapshot()
    refused(Code.PAGE_OWNER, lambda: world.tier.admit_staged(source, 20))
    assert world.snapshot() == before
    ready = world.direct([5])
    world.step(ready)
    lease = world.pages.hold(ready, 4)
    before = world.snapshot()
    refused(Code.PAGE_OWNER, lambda: world.tier.map_last_location(ready, 7))
    assert world.snapshot() == before
    lease.release(after=None)
    world.step(ready)
    world.check(ready)


# Late fences


def test_slot_used_again_is_not_settled_by_an_old_copy() -> None:
    """The copy of a request that left does not make the next request on its slot ready."""
    rt = LateRuntime()
    world = World.on(rt, size=1)
    slots = world.prefill([3])
    world.tier.admit_staged(slots, 9)
    assert world.tier.poll_staged() == 0
    rt.synchronize()
    world.pages.release_requests(slots, after=None)  # the copy is over, and the tier has not been polled
    again = world.prefill([4])
    world.tier.admit_staged(again, 9)
    assert world.tier.poll_staged() == 0
    assert world.tier.states(again) == [TierState.STAGED]
    rt.synchronize()
    assert world.tier.poll_staged() == 1
    world.tier.verify()


def test_a_staged_request_that_left_unpolled_is_passed_over(rt: Runtime) -> None:
    """Where every fence is complete at once, the next request on its slot is made ready, and made so once."""
    world = World.on(rt, size=1)
    gone = world.prefill([9])
    world.tier.admit_staged(gone, 20)
    world.tier.abort(gone, after=None)
    rt.synchronize()
    again = world.prefill([7])
    world.tier.admit_staged(again, 20)
    rt.synchronize()
    assert world.tier.poll_staged() == 1
    assert world.tier.states(again) == [TierState.READY]
    world.check(again)


def test_writer_that_has_not_ended_when_its_request_finishes(rt: Runtime) -> None:
    """A request may decode and finish while its writer is not known to have ended: only its host locations wait."""
    world = World.on(rt)
    writer = PrefillWorker(world.host, np.empty((LAYERS, 0, 2), dtype=np.int64))
    slots = world.deliver(world.reserve([4], 20, writer=writer))
    for missing in (4, 1, -1):
        writer.tokens = 4 - missing
        refused(Code.TIER_STATE, lambda: world.tier.admit_direct(slots))
        assert world.tier.states(slots) == [TierState.DIRECT]
    writer.tokens = 4
    world.tier.admit_direct(slots)
    world.step(slots)
    world.tier.finish(slots, after=rt.record())
    rt.synchronize()
    assert world.numbers() == ((8, 0, 0), (60, 0, 0), (180, 20, 0))
    writer.end()
    world.expect_idle()


def test_a_plan_writes_new_rows_of_hot_buffers(world: World) -> None:
    """Only while a buffer grows has its table a new entry: a row that is used again keeps its token."""
    table = world.slots.table("hot", (64,), torch.int32, holds="location")
    short, long = world.direct([3]), world.direct([30])
    both = short.merge(long)
    plan = world.tier.map_last_location(both, [4, 31])
    entry = plan.entry(table)
    assert [owners.np.tolist() for owners in entry.owners] == [short.np.tolist()]
    world.tier.back_up(plan)


def test_a_plain_fence_of_a_writer_has_to_be_complete(rt: Runtime) -> None:
    """A fence that does not say what has arrived stands for all of it: the request is not admitted before."""
    world, writer = World.on(rt), ManualStream("writer")
    slots = world.deliver(world.reserve([4], 20, writer=writer.record()))
    refused(Code.TIER_STATE, lambda: world.tier.admit_direct(slots))
    writer.complete()
    world.tier.admit_direct(slots)
    world.tier.finish(slots, after=None)
    rt.synchronize()
    world.expect_idle()


def test_backups_of_every_stream_are_waited_for() -> None:
    """Host locations come back behind the backup that still writes them, also if a later copy ran on another stream."""
    rt = LateRuntime()
    world = World.on(rt)
    decoding = world.direct([3])
    other = world.prefill([2])
    rt.synchronize()
    done = rt.record()
    rt.synchronize()
    forward = rt.stream("forward")
    with rt.use(forward):
        world.step(decoding)
        world.step(decoding)
    world.tier.admit_staged(other, 9, after=done)
    rt.complete(9, world.tier._stream)
    assert world.tier.poll_staged() == 1
    world.tier.finish(decoding, after=None)
    assert world.host.stats.pending == 40
    rt.complete(99, forward)
    rt.complete(99)
    assert world.host.stats.pending == 0


@pytest.mark.parametrize("told", [True, False])
def test_staging_waits_for_the_fence_it_is_given(told: bool) -> None:
    """KV of a forward on another stream than the one that committed it is copied behind `after`; without it, a race."""
    with RaceRuntime() as rt, contextlib.nullcontext() if told else pytest.raises(Race, match="host tier: stage"):
        world = World.on(rt)
        slots = world.slots.take(1)
        locations = world.pages.extend(slots, [5]).locations.np
        begun, forward = rt.record(), rt.stream("forward")
        with rt.use(forward):
            rt.wait(begun)
            world.write(locations, world.new(5))
            done = rt.record()
        world.pages.commit(slots, [5])
        world.tier.admit_staged(slots, 9, after=done if told else None)
        rt.synchronize()
        assert world.tier.poll_staged() == 1


class Capturing(CpuRuntime):
    """Says that a graph is captured when the test says so."""

    captures = False

    @property
    def capturing(self) -> bool:
        return self.captures


def test_capture() -> None:
    """While a graph is captured nothing is uploaded, no fence is asked, and what is refused changes nothing."""
    rt = Capturing()
    world = World.on(rt)
    ready, waiting, hot = world.direct([3]), world.deliver(world.reserve([3], 9)), world.prefill([3])
    world.step(ready)
    plan = world.tier.map_last_location(ready, 5)
    upload = rt.upload(list(plan.extras.values()))
    uploaded = {name: upload.view(at) for at, name in enumerate(plan.extras)}
    before = world.snapshot()
    rt.captures = True
    for call in (
        lambda: world.tier.admit_direct(waiting),
        lambda: world.tier.admit_staged(hot, 9),
        lambda: world.tier.back_up(plan),
        lambda: world.tier.back_up(plan, uploaded),
    ):
        with pytest.raises(CaptureError):
            call()
    assert world.tier.poll_staged() == 0
    world.tier.verify()
    rt.captures = False
    assert world.snapshot() == before
    world.tier.back_up(plan, uploaded)
    world.tier.verify()
    world.tier.finish(ready, after=None)


# Costs


class Decoding(Batch):
    """What a decode step of the host tier has."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_steady_decode_costs_one_upload(rt: Runtime, level: str) -> None:
    """A step with the plan packed into the batch's upload: one copy to the device, none from it, and no wait."""
    with checks(level):
        world = World.on(rt)
        slots = world.direct([3, 9, 20])
        batch = Decoding.build(rt, slots=slots, seq_lens=world.tier.lengths(slots))
        for step in range(8):
            rt.synchronize()
            rt.next_step()
            before = rt.counters.snapshot()
            batch = batch.advance("seq_lens", 1)
            plan = world.tier.map_last_location(batch.slots, batch.seq_lens)
            uploaded = batch.upload(extras=plan.extras)
            world.tier.back_up(plan, uploaded)
            spent = rt.counters - before
            assert spent.host_to_device_copies == 1
            assert spent.device_to_host_copies == spent.forced_syncs == spent.fence_waits == 0
            assert spent.check_reads == spent.staging_allocations == 0
            assert spent.device_operations == (2 * LAYERS if step else 0)
            assert uploaded["hot_locations"].tolist() == plan.locations.np.tolist()


def indexed_tier(rt: Runtime) -> tuple[HiSparse, Table, Slots]:
    """A tier with index keys on the device, a table of hot rows, and three requests of 5, 9 and 2 tokens."""
    slots = SlotPool(rt, 8)
    pages = PagePool(rt, slots, 30, 2, max_tokens_per_request=16)
    index = KVBuffer("index", (3,), torch.uint8, on_device=True)
    host = HostKVPool(rt, 100, layers=["kv", index], item_shape=(2,), dtype=torch.float32)
    kv = [rt.device_zeros((pages.location_capacity, 2), torch.float32)]
    table = slots.table("hot", (8,), torch.int32, holds="location")
    taken = slots.take(3)
    tier = HiSparse(pages, host, kv, hot_tokens=8)
    tier.reserve(taken, [5, 9, 2], 20)
    tier.admit_direct(taken).entry(table).launch()
    return tier, table, taken


def test_a_padded_step_of_several_tokens_has_one_size(rt: Runtime) -> None:
    """With padding and room for backups each array of a step is as long as in the last one: a graph can replay it."""
    tier, table, taken = indexed_tier(rt)
    lens, sizes = np.array([5, 9, 2]), set()
    for accepted in (3, 1, 2):
        batch = taken if accepted > 1 else taken.take([0, 1])
        have, n, padded = lens[: len(batch)], len(batch), batch.pad(4)
        plan = tier.map_last_location(padded, np.pad(have + 3, (0, 4 - n)), 3, backups=12)
        assert plan.positions.reshape(4, 3)[:n].tolist() == [[at, at + 1, at + 2] for at in have.tolist()]
        assert plan.locations.np.reshape(4, 3)[n:].tolist() == [[0, 0, 0]] * (4 - n)
        assert plan.host_locations is not None
        for row, written in enumerate(plan.host_locations.np.reshape(4, 3)[:n].tolist()):
            whole = tier.host_locations(batch.take([row]), 20).np
            assert written == whole[have[row] : have[row] + 3].tolist()
        entry = plan.entry(table)
        uploaded = Stepping.build(rt, slots=batch).upload(writes=[entry], extras=plan.extras)
        sizes.add(tuple(len(uploaded[name]) for name in plan.extras))
        tier.back_up(plan, uploaded)
        tier.verify()
        hot = tier.pages.page_table[batch.np[0]]
        at = table.device_for(batch)[int(batch.np[0]), : min(int(have[0]) + 3, 8)].tolist()
        assert at[5:] == [int(hot[row // 2]) * 2 + row % 2 for row in range(5, len(at))]
        lens[: len(batch)] += accepted
    assert sizes == {(12, 4, 12, 12, 12)}


def test_a_step_that_cannot_be_meant_is_refused(rt: Runtime) -> None:
    """Wrong tokens, confirmations, bounds or room: a typed error, and the step that was meant is planned afterwards."""
    tier, _, taken = indexed_tier(rt)
    lens = np.array([5, 9, 2])
    bound = MirroredTensor.from_pair(rt, lens + 3, rt.upload([lens + 3]).view(0), contract="upper_bound")
    plan = tier.map_last_location

    def state() -> object:
        return rows(tier), tier.pages.stats, tier.pages.page_table.tolist()

    before = state()
    wrong: list[tuple[Any, Any]] = [
        (ArgumentError, lambda: plan(taken, lens + 1, 0)),
        (ArgumentError, lambda: plan(taken, lens + 1, [1, 1, -1])),
        (DtypeError, lambda: plan(taken, lens + 1, 1.5)),
        (ShapeError, lambda: plan(taken, lens + 1, [1, 1])),
        (ArgumentError, lambda: plan(taken, lens + 3, 2)),
        (ArgumentError, lambda: plan(taken, bound, 3)),
        (ArgumentError, lambda: plan(taken, bound, 3, confirmed=lens + 1)),
        (ArgumentError, lambda: plan(taken, bound, 3, confirmed=lens - 1)),
        (ShapeError, lambda: plan(taken, bound, 3, confirmed=[5])),
        (Code.LENGTH_ORDER, lambda: plan(taken, lens + 9, 9)),
        (Code.LENGTH_ORDER, lambda: plan(taken, lens + 20, 20)),
        (DtypeError, lambda: plan(taken, lens + 1, backups="many")),  # type: ignore[arg-type]
        (Code.SLOT_ZERO_ALLOCATED, lambda: plan(taken.pad(4).take([3, 0, 1, 2]), [0, 6, 10, 3])),
    ]
    for expected, call in wrong:
        if isinstance(expected, Code):
            refused(expected, call)
        else:
            with pytest.raises(expected):
                call()
        assert state() == before
    tier.back_up(plan(taken, lens + 3, 3))
    with pytest.raises(ArgumentError, match="9 tokens to back up, and room for 8"):
        plan(taken, lens + 6, 3, backups=8)
    tier.back_up(plan(taken, lens + 6, 3, backups=9))
    refused(Code.LENGTH_ORDER, lambda: plan(taken, lens + 12, 3, confirmed=lens + 3))
    tier.verify()


def test_what_the_tier_waits_for_is_one_question() -> None:
    """Staging, writers, backups and freed host memory stand in one list; an idle tier has none of them."""
    late = LateRuntime()
    world = World.on(late, host_pages=60)
    tier = world.tier
    assert (tier.in_flight(), tier.stats.ready) == ([], 0)
    tier.expect_idle()
    staged = world.prefill([4])
    tier.admit_staged(staged, 10, after=late.record())
    writer = ManualStream("writer")
    ended = writer.record()
    arriving = world.reserve([3], 5, writer=ended)
    stats = tier.stats
    assert (stats.staged, stats.direct, stats.ready, stats.to_back_up) == (1, 1, 0, False)
    assert (stats.host.live, stats.host.pending) == (15, 0)
    found = {one.what: (one.slots.tolist(), one.tokens) for one in tier.in_flight()}
    assert found == {"staging": ([1], 10), "arriving": ([2], 5), "backup": ([], 0)}
    refused(Code.SLOT_CONSERVATION, tier.expect_idle)
    tier.abort(arriving, after=None)
    tier.abort(staged, after=None)
    found = {one.what: (one.slots.tolist(), one.tokens) for one in tier.in_flight()}
    assert found["pending"][0] == []
    assert sum(one.tokens for one in tier.in_flight()) == 15
    tier.expect_idle()
    late.synchronize()
    tier.host.reap()
    assert [(one.what, one.tokens) for one in tier.in_flight() if one.tokens] == [("pending", 5)]
    writer.complete()
    assert tier.stats.host.free == tier.stats.host.size
    lone = world.host.take([2], [0])
    refused(Code.SLOT_CONSERVATION, tier.expect_idle)
    world.host.free(lone, after=None)


class Stepping(Batch):
    """Slots alone."""

    slots = slot_column()
