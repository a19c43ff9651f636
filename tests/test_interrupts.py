"""A KeyboardInterrupt at any point leaves a pool as it was, or with the operation done, or visibly broken.

`python -m tests.test_interrupts` tries every call, line and return of every operation and prints how they end; the
tests try some of them.
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Batch, StepPlanner, levels, mirrored, slot_column
from batchstate._allocator import Allocator
from batchstate.errors import PoolBrokenError
from batchstate.future_map import FutureMap, relay_field
from batchstate.hybrid import HybridSlotPool
from batchstate.kv.hisparse import HiSparse
from batchstate.kv.host_pool import HostKVPool
from batchstate.kv.pages import PagePool
from batchstate.kv.prefix_cache import PrefixCache
from batchstate.mirror import Slots
from batchstate.pools import SlotPool
from batchstate.runtime import CpuRuntime
from batchstate.step import PlannedStep
from batchstate.violations import Violation
from tests.doubles import Gate
from tests.interrupts import Interrupt


class World:
    """Slots with states, pages and relay entries: requests a (long), b (shares a prefix) and c; some are pending."""

    def __init__(self) -> None:
        self.rt = rt = CpuRuntime()
        self.slots = self.make_slots()
        self.pages = PagePool(rt, self.slots, 24, 2, max_tokens_per_request=12)
        token = relay_field(torch.int64, read_by="both", must_read=False)
        self.relay = FutureMap(self.slots, {"token": token, "more": relay_field(torch.int64, read_by="both")})
        self.gate, self.shut = Gate(done=True), Gate()
        slots = self.slots.take(6)
        self.a, self.b, self.c, left, d, e = (slots.take([row]) for row in range(6))
        self.pages.extend(self.a, 5)
        self.pages.commit(self.a, 5)
        self.pages.share(self.a, self.b, 4)
        self.pages.extend(left, 3)
        self.lease = self.pages.hold(self.a, 4)
        self.pages.share(self.lease, d, 4)
        self.pages.release_requests(d, after=self.gate)
        self.pages.release_requests(left, after=self.gate)
        self.slots.free(e, after=self.shut)
        self.both = self.a.merge(self.b)
        self.values = rt.upload([np.array([7, 8])]).view(0).clone()
        self.relay.publish(self.both, token=self.values, more=self.values)
        self.values = self.values + 2
        self.table = self.slots.table("rows", (3,), torch.int32, host=True)

    def make_slots(self) -> SlotPool:
        """A pool of 7 and one more."""
        return HybridSlotPool(self.rt, 7, states=16, states_per_slot=2, reserve=1)

    def settle(self) -> None:
        """Makes free what is behind complete fences: every operation may do so."""
        self.slots.reap()
        self.pages.reap()

    def state(self) -> Any:
        """All that an operation changes, in an order of its own."""
        slots, pages, relay = self.slots, self.pages, self.relay._entries
        references, table = pages._references, pages._table
        owners = slots._owners.values() if isinstance(slots, HybridSlotPool) else ()
        return (
            [_indices(slots._allocator), _indices(references.allocator)],
            [_indices(one.allocator) for one in owners],
            [
                part.tolist()
                for one in owners
                for part in (one.mapping, one.turns, one.newest * (one.mapping[:, 0] > 0))
            ],
            [one.tolist() for one in (table.pages, table.num_pages, table.committed)],
            references.further.tolist(),
            references.shared,
            [(lease.pages.tolist(), lease._written) for lease in pages._sharing.leases.values()],
            pages.writes.tokens.tolist(),
            [(entries.number != 0).tolist() + entries.taken.tolist() for entries in relay.fields.values()],
            [self.relay._memory_of(name)[entries.number != 0].tolist() for name, entries in relay.fields.items()],
            None if self.table.host_memory is None else (self.table.host_memory.tolist(), self._written().tolist()),
        )

    def _written(self) -> Any:
        """Which rows of the table are written for a live owner: one that takes a slot twice has a higher generation."""
        live = self.slots._allocator.live_among(np.arange(self.slots.capacity))
        return live & (self.table._written == self.slots._generations._generations)

    def broken(self) -> list[bool]:
        """Which of some later calls are refused because the pool is broken."""
        calls: list[Callable[[], object]] = [
            lambda: self.slots.take(0),
            lambda: self.slots.free(self.slots_of([])),
            self.slots.verify,
            lambda: self.slots.stats,
            lambda: self.pages.take(0).release(),
            lambda: self.pages.advance(self.slots_of([])),
            self.pages.verify,
            lambda: self.relay.discard(self.slots_of([])),
        ]
        return [_is_broken(call) for call in calls]

    def slots_of(self, rows: list[int]) -> Slots:
        """Handles of slots as they are now."""
        generations = self.slots._generations._generations[rows]
        return Slots.from_host(self.rt, np.array(rows, np.int64), generations=generations, pool_id=self.slots.pool_id)

    def drain(self) -> None:
        """All leave; then everything can be taken, once."""
        self.slots.verify()
        self.shut.done = True
        for lease in list(self.pages._sharing.leases.values()):
            lease.release()
        self.pages.release_requests(self.slots_of(self.slots.live_slots().tolist()))
        self.slots.expect_idle()
        self.pages.expect_idle()
        assert sorted(self.slots.take(8, reserved=True).np.tolist()) == list(range(1, 9))
        assert sorted(self.pages.take(24).pages.tolist()) == list(range(1, 25))
        self.slots.verify()
        self.pages.verify()


class Tier(World):
    """Requests of the host tier: a is STAGED and copied, b is DIRECT, c READY, d outside."""

    def __init__(self) -> None:
        self.rt = rt = CpuRuntime()
        self.slots = HybridSlotPool(rt, 6, states=6)
        self.pages = PagePool(rt, self.slots, 24, 2, max_tokens_per_request=12)
        self.relay = FutureMap(self.slots, {"token": relay_field(torch.int64)})
        self.host = HostKVPool(rt, 40, 2, layers=1, item_shape=(1,), dtype=torch.float32)
        kv = rt.device_zeros((self.pages.location_capacity, 1), torch.float32)
        self.tier = HiSparse(self.pages, self.host, [kv], hot_tokens=4)
        self.a, self.b, self.c, self.d, self.e = (self.slots.take(1) for _ in range(5))
        self.table, self.shut = self.slots.table("rows", host=True), Gate()
        self.pages.extend(self.a, 7)
        self.pages.extend(self.d, 5)
        self.pages.commit(self.a.merge(self.d), [7, 5])
        self.tier.admit_staged(self.a, 12)
        self.tier.reserve(self.b, 3, 8)
        self.tier.reserve(self.c, 6, 10)
        self.tier.admit_direct(self.c)
        self.ranges = self.host.take([3, 5], [0, 0])
        self.plan = self.tier.map_last_location(self.c, 7) if self.planned else None

    planned = False

    def settle(self) -> None:
        super().settle()
        self.host.reap()
        self.tier.poll_staged()

    def state(self) -> Any:
        host, requests = self.host, self.tier._requests
        own = (requests.states, requests.length, requests.backed, requests.hot_from, requests.max_tokens)
        return (
            super().state(),
            _indices(host._allocator),
            host._owner.tolist(),
            sorted(host._sizes.values()),
            [one.tolist() for one in own],
            sorted(requests.ranges),
            sorted(requests.fences),
            requests.planned.tolist(),
            self.tier._open is None,
        )

    def broken(self) -> list[bool]:
        if _is_broken(self.host.verify):
            return [_is_broken(lambda: self.host.take(1, 0)), _is_broken(lambda: self.host.free([]))]
        none = self.slots_of([])
        calls: list[Callable[[], object]] = [
            self.tier.verify,
            self.slots.verify,
            self.tier.poll_staged,
            lambda: self.slots.take(0),
            lambda: self.tier.reserve(none, [], []),
            lambda: self.tier.finish(none),
        ]
        return [_is_broken(call) for call in calls]

    def drain(self) -> None:
        self.tier.verify()
        if self.tier._open is not None:
            self.tier.back_up(self.tier._open)
        self.tier.poll_staged()
        rows = np.array(sorted(self.tier._requests.ranges), dtype=np.int64)
        self.tier.abort(self.slots_of(rows.tolist()))
        assert self.host._allocator.live == sum(self.host._sizes.values())
        self.pages.release_requests(self.slots_of(self.slots.live_slots().tolist()))
        self.pages.expect_idle()
        self.slots.expect_idle()
        self.tier.verify()


class Planned(Tier):
    """The same with a step planned."""

    planned = True


class Plain(World):
    """Slots that own no states: another take and another free."""

    def make_slots(self) -> SlotPool:
        return SlotPool(self.rt, 7, reserve=1)


class Cached(World):
    """Keys x and y are pages of a, which two leases hold too; u, v and w are of requests that have left."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(self.pages)
        self.cache.insert(self.a, ["x", "y"])
        past, self.twin = self.slots.take(1), self.c
        self.pages.extend(past, 6)
        self.pages.commit(past, 6)
        self.cache.insert(past, ["u", "v", "w"])
        self.pages.release_requests(past)
        self.pages.extend(self.twin, 5)
        self.pages.commit(self.twin, 5)
        self.first, self.rest = self.pages.hold(self.a, 2), self.pages.hold(self.a, 4, first=2)
        self.pages.release_requests(self.b)
        self.b = self.slots.take(1)

    def state(self) -> Any:
        cached = self.pages._references.cached
        assert cached is not None
        return (
            super().state(),
            dict(cached.pages),
            cached.cached.tolist(),
            cached.generations.tolist(),
            cached.oldest(cached.idle).tolist(),
            cached.evicted,
        )

    def broken(self) -> list[bool]:
        calls: list[Callable[[], object]] = [
            lambda: self.cache.match(["x"]).release(),
            lambda: self.cache.fit(1),
            lambda: self.cache.evict(0),
            lambda: self.cache.remove([]),
        ]
        return super().broken() + [_is_broken(call) for call in calls]


class Ended(World):
    """The same when the last forward is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.shut.done = True


class EndedCached(Cached, Ended):
    """The same of a cache."""


class Running(Batch):
    """What a decode step needs."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


class Stepped(World):
    """Requests a, b and c run, one has arrived from elsewhere, and a slot is pending."""

    steps = 0

    def __init__(self) -> None:
        self.rt = rt = CpuRuntime()
        self.slots = self.make_slots()
        self.table = self.slots.table("req_to_token", (12,), torch.int32, holds="location", host=True)
        self.pages = PagePool(rt, self.slots, 24, 2, max_tokens_per_request=12, req_to_token=self.table)
        self.relay = FutureMap(self.slots, {"token": relay_field(torch.int64, read_by="both", must_read=False)})
        self.planner = StepPlanner(Running, pages=self.pages, relay=self.relay, ids="token", results=("token",))
        self.gate, self.shut = Gate(done=True), Gate()
        slots = self.pages.take_requests([5, 2, 3])
        self.relay.publish(slots, token=[1, 2, 3])
        self.slots.free(self.slots.take(1), after=self.gate)
        self.batch: Batch = Running.build(rt, slots=slots, seq_lens=[5, 2, 3])
        self.arrived = Running.build(rt, slots=self.pages.take_requests([4]), seq_lens=[4])
        self.step: PlannedStep | None = None
        for _ in range(self.steps):
            self.step = self.planner.plan(self.batch)
            self.batch = self.step.batch
            if _ + 1 < self.steps:
                self.step.inputs()
                self.step.publish(token=rt.upload([np.array([4, 5, 6])]).view(0).clone())


class Steady(Stepped):
    """The same three steps later."""

    steps = 3


class Mixed(Steady):
    """Then a step in which one request runs a chunk of its prompt, one pauses and one samples."""

    def __init__(self) -> None:
        super().__init__()
        self.step = self.planner.plan(
            self.batch, [2, 0, 1], prompt_ids=[[7, 8], None, None], samples=[False, False, True]
        )
        self.batch = self.step.batch


def _indices(allocator: Allocator) -> object:
    free = sorted(allocator._ordinary.entries().tolist()), sorted(allocator._reserved.entries().tolist())
    return free, sorted(allocator._queue.indices().tolist()), allocator._states.tolist(), allocator.live


def _is_broken(call: Callable[[], object]) -> bool:
    try:
        call()
    except PoolBrokenError:
        return True
    return False


Operation = Callable[[Any], object]

OPERATIONS: dict[str, tuple[type[World], Operation]] = {
    "take": (World, lambda w: w.slots.take(2)),
    "take reserved": (World, lambda w: w.slots.take(2, reserved=True, write=False)),
    "free": (World, lambda w: w.slots.free(w.c)),
    "free behind": (World, lambda w: w.slots.free(w.c, after=w.shut)),
    "reap": (World, lambda w: w.slots.reap()),
    "stats": (World, lambda w: w.slots.stats),
    "verify": (World, lambda w: w.slots.verify()),
    "write": (World, lambda w: w.table.write(w.c, None, [[1, 2, 3]])),
    "grow": (World, lambda w: w.pages.grow(w.c, 7)),
    "commit": (World, lambda w: w.pages.commit(w.a, 6)),
    "extend": (World, lambda w: w.pages.extend(w.both, [9, 8])),
    "advance": (World, lambda w: w.pages.advance(w.both)),
    "advance by some": (World, lambda w: w.pages.advance(w.both, [3, 0])),
    "share": (World, lambda w: w.pages.share(w.a, w.c, 4)),
    "share from a lease": (World, lambda w: w.pages.share(w.lease, w.c, 2)),
    "hold": (World, lambda w: w.pages.hold(w.b, 2)),
    "take pages": (World, lambda w: w.pages.take(3)),
    "take_requests": (World, lambda w: w.pages.take_requests([3])),
    "release a lease": (World, lambda w: w.lease.release(after=w.shut)),
    "clear": (Ended, lambda w: w.slots.clear()),
    "turns": (World, lambda w: w.slots.state_turns(w.both).launched()),
    "truncate": (World, lambda w: w.pages.truncate(w.a, 2)),
    "release": (World, lambda w: w.pages.release(w.both)),
    "release behind": (World, lambda w: w.pages.release(w.a, after=w.shut)),
    "release_requests": (World, lambda w: w.pages.release_requests(w.both)),
    "release_requests behind": (World, lambda w: w.pages.release_requests(w.a.merge(w.c), after=w.shut)),
    "publish": (World, lambda w: w.relay.publish(w.both, token=w.values)),
    "publish from the host": (World, lambda w: w.relay.publish(w.c, token=[5], more=[6])),
    "gather": (World, lambda w: w.relay.gather(w.both, "token")),
    "prefetch": (World, lambda w: w.relay.prefetch(w.both, "token", "more")),
    "discard": (World, lambda w: w.relay.discard(w.both)),
    "host take": (Tier, lambda w: w.host.take([3, 1, 6], [1, 2, 3])),
    "host free": (Tier, lambda w: w.host.free(w.ranges)),
    "reserve": (Tier, lambda w: w.tier.reserve(w.e, 3, 5)),
    "admit_direct": (Tier, lambda w: w.tier.admit_direct(w.b)),
    "admit_staged": (Tier, lambda w: w.tier.admit_staged(w.d, 9)),
    "poll_staged": (Tier, lambda w: w.tier.poll_staged()),
    "map_last_location": (Tier, lambda w: w.tier.map_last_location(w.c, 7)),
    "back_up": (Planned, lambda w: w.tier.back_up(w.plan)),
    "finish": (Tier, lambda w: w.tier.finish(w.c)),
    "abort": (Tier, lambda w: w.tier.abort(w.a.merge(w.b))),
    "free of the tier": (Tier, lambda w: w.slots.free(w.b)),
    "clear of the tier": (Tier, lambda w: w.slots.clear()),
    "keep": (Tier, lambda w: w.host.keep(w.ranges[0], w)),
    "plain take": (Plain, lambda w: w.slots.take(2)),
    "plain take reserved": (Plain, lambda w: w.slots.take(2, reserved=True)),
    "plain free": (Plain, lambda w: w.slots.free(w.c)),
    "plain release_requests": (Plain, lambda w: w.slots.release_requests(w.both)),
    "plain take_requests": (Plain, lambda w: w.pages.take_requests([3, 2])),
    "insert": (Cached, lambda w: w.cache.insert(w.c, ["x", "k"])),
    "insert of a lease": (Cached, lambda w: w.cache.insert(w.lease, ["x", "y"])),
    "match": (Cached, lambda w: w.cache.match(["u", "v", "k"])),
    "fit": (Cached, lambda w: w.cache.fit(20, ["u", "v"])),
    "cache stats": (Cached, lambda w: w.cache.stats),
    "evict": (Cached, lambda w: w.cache.evict(2)),
    "remove": (Cached, lambda w: w.cache.remove(["x", "v"])),
    "clear keys": (Cached, lambda w: w.cache.clear()),
    "take and evict": (Cached, lambda w: w.pages.take(w.pages.stats.free - 1)),
    "release of cached pages": (Cached, lambda w: w.pages.release_requests(w.a)),
    "rebase": (Cached, lambda w: w.pages.rebase(w.c, w.a, 4, after=w.shut)),
    "split": (Cached, lambda w: w.lease.split(2)),
    "share from leases": (Cached, lambda w: w.pages.share([w.first, w.rest], w.b, 4)),
    "clear with a cache": (EndedCached, lambda w: w.slots.clear()),
    "first plan": (Stepped, lambda w: w.planner.plan(w.batch)),
    "steady plan": (Steady, lambda w: w.planner.plan(w.batch)),
    "plan joining": (Steady, lambda w: w.planner.plan(w.batch, joining=w.arrived, published={"token": [9]})),
    "plan leaving": (Steady, lambda w: w.planner.plan(w.batch, keep=[2, 0], after=w.shut)),
    "plan turning over": (
        Steady,
        lambda w: w.planner.plan(w.batch, keep=[1], joining=w.arrived, published={"token": [9]}, after=w.shut),
    ),
    "plan joining columns": (
        Steady,
        lambda w: w.planner.plan(w.batch, keep=[1], joining={"seq_lens": [3]}, published={"token": [9]}, after=w.shut),
    ),
    "plan joining columns padded": (
        Steady,
        lambda w: w.planner.plan(w.batch, joining={"seq_lens": [3]}, published={"token": [9]}, pad_rows=6),
    ),
    "mixed plan": (
        Steady,
        lambda w: w.planner.plan(
            w.batch,
            [0, 3, 1, 1],
            prompt_ids=[None, [7, 8, 9], None, None],
            samples=[False, True, True, True],
            joining=w.arrived,
            published={"token": [9]},
        ),
    ),
    "mixed plan turning over": (
        Steady,
        lambda w: w.planner.plan(
            w.batch,
            [0, 3, 1],
            prompt_ids=[None, [7, 8, 9], None],
            samples=[False, True, True],
            keep=[2, 0],
            joining=w.arrived,
            published={"token": [9]},
            after=w.shut,
        ),
    ),
    "inputs of a mixed step": (Mixed, lambda w: w.step.inputs()),
    "publish of a mixed step": (Mixed, lambda w: w.step.publish(token=w.rt.upload([np.array([7])]).view(0).clone())),
    "plan padded": (
        Steady,
        lambda w: w.planner.plan(w.batch, keep=[1], joining=w.arrived, published={"token": [9]}, pad_rows=4),
    ),
    "inputs": (Steady, lambda w: w.step.inputs()),
    "publish of a step": (Steady, lambda w: w.step.publish(token=w.rt.upload([np.array([7, 8, 9])]).view(0).clone())),
}


@functools.cache
def ends(name: str) -> tuple[Any, Any]:
    """The states before and after an operation."""
    make, operation = OPERATIONS[name]
    old, done = make(), make()
    old.settle()
    operation(done)
    done.settle()
    return old.state(), done.state()


def outcome(name: str, at: int) -> str:
    """How an operation ends that is interrupted at its n-th event."""
    make, operation = OPERATIONS[name]
    world = make()
    try:
        with Interrupt(at).armed():
            operation(world)
        return "not interrupted"
    except KeyboardInterrupt:
        pass
    try:
        broken = world.broken()
        if any(broken):
            return "broken" if all(broken) else f"broken for {broken}"
        world.settle()
        state = world.state()
        with levels.checks("full"):
            world.drain()
    except Exception as error:
        return f"damaged: {type(error).__name__}: {error!s:.60}"
    old, done = ends(name)
    if state == old:
        return "as it was"
    if state == done:
        return "done"
    if isinstance(world, Stepped):
        return repeated(name, at)
    if isinstance(world, Cached) and state[0] == old[0]:  # pages were taken, and given back
        return "as it was, but for keys"
    return "unwritten" if name.startswith("publish") else "something else"


def repeated(name: str, at: int) -> str:
    """How a step ends that is interrupted between its parts, and then asked for once more."""
    make, operation = OPERATIONS[name]
    world = make()
    with contextlib.suppress(KeyboardInterrupt), Interrupt(at).armed():
        operation(world)
    try:
        operation(world)
    except Violation as error:
        return f"half, and refused: {error.code}"
    world.settle()
    return "half, and finished" if world.state() == ends(name)[1] else "half, and something else"


def allowed(one: str) -> bool:
    """Whether nothing is lost in silence. Python drops what is raised in a finalizer: that is "not interrupted"."""
    ends = (
        "not interrupted",
        "as it was",
        "done",
        "broken",
        "unwritten",
        "half, and finished",
        "as it was, but for keys",
    )
    return one in ends or one.startswith("half, and refused")


def events(name: str) -> int:
    """Calls, lines and returns of an operation."""
    make, operation = OPERATIONS[name]
    world, counting = make(), Interrupt()
    with counting.armed():
        operation(world)
    return counting.events


@pytest.mark.parametrize("level", ["off", "cheap"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_is_never_silent(name: str, level: str) -> None:
    """Wherever it comes, the pool is whole, or every later call says that it is not."""
    with levels.checks(level):
        events(name)  # once more than counted: what is made at first use is made
        count = events(name)
        points = np.unique(np.linspace(1, count, 12).astype(int)).tolist()
        found = {at: outcome(name, at) for at in points}
    assert {at: one for at, one in found.items() if not allowed(one)} == {}


def test_an_interrupted_table_write_of_a_step_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step is composed of parts, the parts that are taken back leave the mark of the one that is half done."""
    world = Steady()
    launched = world.rt.launch

    def launch(*args: Any, name: str = "", **options: Any) -> Any:
        if name.startswith("req_to_token"):
            raise KeyboardInterrupt
        return launched(*args, name=name, **options)

    monkeypatch.setattr(world.rt, "launch", launch)
    with pytest.raises(KeyboardInterrupt):
        OPERATIONS["plan padded"][1](world)
    assert all(world.broken())


def main() -> int:
    """Every point of every operation, or of those named, at `off` and at `cheap`; 1 if one is lost in silence."""
    total: Counter[str] = Counter()
    for level in ("off", "cheap"):
        for name in sys.argv[1:] or OPERATIONS:
            with levels.checks(level):
                events(name)
                found = Counter(outcome(name, at) for at in range(1, events(name) + 1))
            total += found
            print(f"{level:6}{name:26}", *(f"{one}: {times}" for one, times in found.most_common()), sep="  ")
    print(sum(total.values()), "points:", *(f"{one}: {times}" for one, times in total.most_common()), sep="  ")
    return int(not all(map(allowed, total)))


if __name__ == "__main__":
    sys.exit(main())
