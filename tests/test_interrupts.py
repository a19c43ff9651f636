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
from batchstate.errors import PoolBrokenError
from batchstate.future_map import FutureMap, relay_field
from batchstate.hybrid import HybridSlotPool
from batchstate.kv.hisparse import HiSparse
from batchstate.kv.host_pool import HostKVPool
from batchstate.kv.prefix_cache import PrefixCache
from batchstate.mirror import Slots
from batchstate.pools import SlotPool
from batchstate.runtime import CpuRuntime
from batchstate.step import PlannedStep
from batchstate.violations import Violation
from tests.doubles import Gate
from tests.interrupts import Interrupt
from tests.worlds import Pools

SIZE, PAGES = 12, 40


class Running(Batch):
    """The columns that a decode step needs."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


class World:
    """Slots with pages and relay entries: requests a (long), b (shares a prefix) and c; some are pending.

    Parts: `plain` slots own no states; with `ended` the last forward is complete; `cache`, `tier` (with a `backup` to
    come) and `steps` (none yet, some `steady` ones, or a `mixed` one behind them) come on top.
    """

    def __init__(self, parts: str = "") -> None:
        self.rt = rt = CpuRuntime()
        pool = HybridSlotPool(rt, SIZE, states=2 * SIZE + 2, states_per_slot=2, reserve=1)
        slots = SlotPool(rt, SIZE, reserve=1) if "plain" in parts else pool
        pools = Pools.of(rt, pages=PAGES, page_size=2, longest=12, slots=slots)
        self.slots, self.table = slots, pools.table
        self.pages = pages = pools.pages
        field = relay_field(torch.int64, read_by="both", must_read=False)
        self.relay = FutureMap(slots, {"token": field, "more": field})
        self.gate, self.shut = Gate(done=True), Gate(done="ended" in parts)
        self.cache: PrefixCache | None = None
        self.tier: HiSparse | None = None
        self.step: PlannedStep | None = None
        self.a, self.b, self.c, left, d, e = (slots.take(1) for _ in range(6))
        pages.extend(self.a, 5)
        pages.commit(self.a, 5)
        pages.share(self.a, self.b, 4)
        pages.extend(left, 3)
        self.lease = pages.hold(self.a, 4)
        pages.share(self.lease, d, 4)
        pages.release_requests(d.merge(left), after=self.gate)
        slots.free(e, after=self.shut)
        self.both = self.a.merge(self.b)
        self.relay.publish(self.both, token=self.on_device(7, 8), more=self.on_device(7, 8))
        self.values = self.on_device(9, 10)
        for part in ("cache", "tier", "steps"):
            if part in parts:
                getattr(self, f"add_{part}")(parts)

    def on_device(self, *numbers: int) -> torch.Tensor:
        """The numbers, int64[n], as a forward computes them."""
        return self.rt.upload([np.array(numbers)]).view(0).clone()

    def add_cache(self, parts: str) -> None:
        """Keys x and y are pages of a, which two leases hold too; u, v and w are of a request that has left."""
        cache, pages = PrefixCache(self.pages), self.pages
        cache.insert(self.a, ["x", "y"])
        past = self.slots.take(1)
        for slots, total in ((past, 6), (self.c, 5)):
            pages.extend(slots, total)
            pages.commit(slots, total)
        cache.insert(past, ["u", "v", "w"])
        pages.release_requests(past, after=None)
        self.parts_of_a = pages.hold(self.a, 2), pages.hold(self.a, 4, first=2)
        pages.release(self.b, after=None)
        self.cache = cache

    def add_tier(self, parts: str) -> None:
        """Requests of the host tier: f is STAGED and copied, g is DIRECT, h READY; i and j are outside."""
        self.host = HostKVPool(self.rt, 40, 2, layers=1, item_shape=(1,), dtype=torch.float32)
        kv = self.rt.device_zeros((self.pages.location_capacity, 1), torch.float32)
        self.tier = tier = HiSparse(self.pages, self.host, [kv], hot_tokens=4)
        self.f, self.g, self.h, self.i, self.j = (self.slots.take(1) for _ in range(5))
        self.pages.extend(self.f.merge(self.i), [7, 5])
        self.pages.commit(self.f.merge(self.i), [7, 5])
        tier.admit_staged(self.f, 12)
        tier.reserve(self.g, 3, 8)
        tier.reserve(self.h, 6, 10)
        tier.admit_direct(self.h)
        self.ranges = self.host.take([3, 5], [98, 99])
        self.plan = tier.map_last_location(self.h, 7) if "backup" in parts else None

    def add_steps(self, parts: str) -> None:
        """Three requests run, one has arrived from elsewhere, and a slot is pending."""
        self.planner = self.new_planner()
        slots = self.pages.take_requests([5, 2, 3])
        self.relay.publish(slots, token=[1, 2, 3])
        self.slots.free(self.slots.take(1), after=self.gate)
        self.batch: Batch = Running.build(self.rt, slots=slots, seq_lens=[5, 2, 3])
        self.arrived = Running.build(self.rt, slots=self.pages.take_requests([4]), seq_lens=[4])
        for number in range(3 if "steady" in parts else 4 if "mixed" in parts else 0):
            if self.step is not None:
                self.step.inputs()
                self.step.publish(token=self.on_device(4, 5, number))
            rows: dict[str, Any] = {}
            if number == 3:  # one runs a chunk of its prompt, one pauses and one samples
                prompts, samples = [[7, 8], None, None], [False, False, True]
                rows = {"query_lens": [2, 0, 1], "prompt_ids": prompts, "samples": samples}
            self.step = self.planner.plan(self.batch, **rows)
            self.batch = self.step.batch
        if "taken" in parts and self.step is not None:
            self.step.inputs()

    def new_planner(self) -> StepPlanner:
        """A planner that has planned nothing yet."""
        return StepPlanner(Running, pages=self.pages, relay=self.relay, ids="token", results=("token",))

    def handles(self, rows: list[int]) -> Slots:
        """Handles of slots as they are now."""
        return self.slots._allocator.handles(np.array(rows, np.int64))

    @property
    def live(self) -> Slots:
        """All live slots."""
        return self.handles(self.slots.live_slots().tolist())

    def settle(self) -> None:
        """Makes free the indices behind complete fences: every operation may do so."""
        self.slots.reap()
        self.pages.reap()
        if self.tier is not None:
            self.host.reap()
            self.tier.poll_staged()

    def state(self) -> dict[str, Any]:
        """All that an operation changes."""
        slots, pages, relay, live = self.slots, self.pages, self.relay, self.live
        counts = [(one.free, one.pending, one.live) for one in (slots.stats, pages.stats)]
        state: dict[str, Any] = {
            "slots": [live.np.tolist(), sorted(slot for group in slots.pending() for slot in group.slots)],
            "counts": [counts, pages.stats.shared, pages.stats.leases],
            "pages": [pages.page_table.tolist(), pages.committed_lengths.tolist(), pages.writes.marks["kv"].tolist()],
            "allocated": [pages.allocated(live).tolist(), self.lease.released or self.lease.pages.tolist()],
            "rows": np.where(self.table.written(live), np.array(self.table.host_memory)[live.np].T, 0).tolist(),
        }
        if isinstance(slots, HybridSlotPool):
            turns = slots.state_turns(live)
            state["states"] = slots.states_of(live).tolist(), turns.reads.tolist(), turns.writes.tolist()
        state["relay"] = []
        for field in ("token", "more"):
            entries = relay.states(live, field)
            written = [slot for slot, entry in zip(live.np, entries, strict=True) if str(entry) != "unwritten"]
            state["relay"].append((entries, relay._memory_of(field)[written].tolist()))
        if self.cache is not None:
            stats = self.cache.stats
            evicted = self.cache.fit(pages.stats.free).evicted
            state["cache"] = [key in self.cache for key in "xyuvwk"], stats.keys, stats.idle, stats.evicted, evicted
        if self.tier is not None:
            requests = self.tier._requests
            own = requests.backed.tolist(), requests.hot_from.tolist(), requests.planned.tolist()
            state["tier"] = self.tier.states(live), self.tier.lengths(live).tolist(), self.tier.stats, own
            state["host"] = self.host.stats, self.host.owner_of(np.arange(self.host.location_capacity)).tolist()
        return state

    def broken(self) -> list[bool]:
        """Whether each of some later calls is refused because the pool is broken."""
        none = self.handles([])
        calls: list[Callable[[], object]] = [self.slots.verify, lambda: self.slots.take(0)]
        if self.tier is not None:
            if _is_broken(self.host.verify):
                return [_is_broken(lambda: self.host.take(1, 0)), _is_broken(lambda: self.host.free([], after=None))]
            tier = self.tier
            calls += [
                tier.verify,
                tier.poll_staged,
                lambda: tier.reserve(none, [], []),
                lambda: tier.finish(none, after=None),
            ]
            return [_is_broken(call) for call in calls]
        calls += [lambda: self.slots.free(none, after=None), lambda: self.slots.stats, lambda: self.relay.discard(none)]
        calls += [self.pages.verify, lambda: self.pages.take(0).release(after=None), lambda: self.pages.advance(none)]
        if self.cache is not None:
            cache = self.cache
            calls += [lambda: cache.match(["x"]).release(after=None), lambda: cache.fit(1)]
            calls += [lambda: cache.evict(0), lambda: cache.remove([])]
        return [_is_broken(call) for call in calls]

    def drain(self) -> None:
        """All leave; then everything can be taken, once."""
        self.slots.verify()
        self.pages.verify()
        self.shut.done = True
        if self.tier is not None:
            self.tier.verify()
            if self.tier._open is not None:
                self.tier.back_up(self.tier._open)
            self.tier.poll_staged()
        self.pages.release_requests(self.live, after=None)
        self.slots.clear()
        if self.tier is not None:
            self.host.reap()
            assert self.host.stats.live == np.count_nonzero(self.host.owner_of(np.arange(82)))
            self.tier.verify()
        assert sorted(self.slots.take(SIZE + 1, reserved=True).np.tolist()) == list(range(1, SIZE + 2))
        assert sorted(self.pages.take(PAGES).pages.tolist()) == list(range(1, PAGES + 1))
        self.slots.verify()
        self.pages.verify()


def _is_broken(call: Callable[[], object]) -> bool:
    try:
        call()
    except PoolBrokenError:
        return True
    return False


Operation = Callable[[Any], object]

NINE: dict[str, Any] = {"published": {"token": [9]}}
MIXED: dict[str, Any] = {"prompt_ids": [None, [7, 8, 9], None], "samples": [False, True, True]}
MORE: dict[str, Any] = {"prompt_ids": [None, [7, 8, 9], None, None], "samples": [False, True, True, True]}

OPERATIONS: dict[str, tuple[str, Operation]] = {
    "take": ("", lambda w: w.slots.take(2)),
    "take reserved": ("", lambda w: w.slots.take(2, reserved=True, write=False)),
    "free": ("", lambda w: w.slots.free(w.c, after=None)),
    "free behind": ("", lambda w: w.slots.free(w.c, after=w.shut)),
    "reap": ("", lambda w: w.slots.reap()),
    "stats": ("", lambda w: w.slots.stats),
    "verify": ("", lambda w: w.slots.verify()),
    "write": ("", lambda w: w.table.write(w.c, [0], [3])),
    "clear a row": ("", lambda w: w.table.clear(w.c)),
    "grow": ("", lambda w: w.pages.grow(w.c, 7)),
    "commit": ("", lambda w: w.pages.commit(w.a, 6)),
    "extend": ("", lambda w: w.pages.extend(w.both, [9, 8])),
    "advance": ("", lambda w: w.pages.advance(w.both)),
    "advance by some": ("", lambda w: w.pages.advance(w.both, [3, 0])),
    "share": ("", lambda w: w.pages.share(w.a, w.c, 4)),
    "share from a lease": ("", lambda w: w.pages.share(w.lease, w.c, 2)),
    "hold": ("", lambda w: w.pages.hold(w.b, 2)),
    "take pages": ("", lambda w: w.pages.take(3)),
    "take_requests": ("", lambda w: w.pages.take_requests([3])),
    "release a lease": ("", lambda w: w.lease.release(after=w.shut)),
    "clear": ("ended", lambda w: w.slots.clear()),
    "turns": ("", lambda w: w.slots.state_turns(w.both).launched()),
    "truncate": ("", lambda w: w.pages.truncate(w.a, 2, after=None)),
    "release": ("", lambda w: w.pages.release(w.both, after=None)),
    "release behind": ("", lambda w: w.pages.release(w.a, after=w.shut)),
    "release_requests": ("", lambda w: w.pages.release_requests(w.both, after=None)),
    "release_requests behind": ("", lambda w: w.pages.release_requests(w.a.merge(w.c), after=w.shut)),
    "publish": ("", lambda w: w.relay.publish(w.both, token=w.values)),
    "publish from the host": ("", lambda w: w.relay.publish(w.c, token=[5], more=[6])),
    "gather": ("", lambda w: w.relay.gather(w.both, "token")),
    "prefetch": ("", lambda w: w.relay.prefetch(w.both, "token", "more")),
    "discard": ("", lambda w: w.relay.discard(w.both)),
    "host take": ("tier", lambda w: w.host.take([3, 1, 6], [1, 2, 3])),
    "host free": ("tier", lambda w: w.host.free(w.ranges, after=None)),
    "reserve": ("tier", lambda w: w.tier.reserve(w.j, 3, 5)),
    "admit_direct": ("tier", lambda w: w.tier.admit_direct(w.g)),
    "admit_staged": ("tier", lambda w: w.tier.admit_staged(w.i, 9)),
    "poll_staged": ("tier", lambda w: w.tier.poll_staged()),
    "map_last_location": ("tier", lambda w: w.tier.map_last_location(w.h, 7)),
    "back_up": ("tier backup", lambda w: w.tier.back_up(w.plan)),
    "finish": ("tier", lambda w: w.tier.finish(w.h, after=None)),
    "abort": ("tier", lambda w: w.tier.abort(w.f.merge(w.g), after=None)),
    "free of the tier": ("tier", lambda w: w.slots.free(w.g, after=None)),
    "clear of the tier": ("tier ended", lambda w: w.slots.clear()),
    "keep": ("tier", lambda w: w.host.keep(w.ranges[0], w)),
    "plain take": ("plain", lambda w: w.slots.take(2)),
    "plain take reserved": ("plain", lambda w: w.slots.take(2, reserved=True)),
    "plain free": ("plain", lambda w: w.slots.free(w.c, after=None)),
    "plain release_requests": ("plain", lambda w: w.slots.release_requests(w.both, after=None)),
    "plain take_requests": ("plain", lambda w: w.pages.take_requests([3, 2])),
    "insert": ("cache", lambda w: w.cache.insert(w.c, ["x", "k"])),
    "insert of a lease": ("cache", lambda w: w.cache.insert(w.lease, ["x", "y"])),
    "match": ("cache", lambda w: w.cache.match(["u", "v", "k"])),
    "fit": ("cache", lambda w: w.cache.fit(20, ["u", "v"])),
    "cache stats": ("cache", lambda w: w.cache.stats),
    "evict": ("cache", lambda w: w.cache.evict(2)),
    "remove": ("cache", lambda w: w.cache.remove(["x", "v"])),
    "clear keys": ("cache", lambda w: w.cache.clear()),
    "take and evict": ("cache", lambda w: w.pages.take(w.pages.stats.free - 1)),
    "release of cached pages": ("cache", lambda w: w.pages.release_requests(w.a, after=None)),
    "rebase": ("cache", lambda w: w.pages.rebase(w.c, w.a, 4, after=w.shut)),
    "split": ("cache", lambda w: w.lease.split(2)),
    "share from leases": ("cache", lambda w: w.pages.share(w.parts_of_a, w.b, 4)),
    "clear with a cache": ("cache ended", lambda w: w.slots.clear()),
    "first plan": ("steps", lambda w: w.planner.plan(w.batch)),
    "steady plan": ("steps steady", lambda w: w.planner.plan(w.batch)),
    "plan joining": ("steps steady", lambda w: w.planner.plan(w.batch, joining=w.arrived, **NINE)),
    "plan leaving": ("steps steady", lambda w: w.planner.plan(w.batch, keep=[2, 0], after=w.shut)),
    "plan turning over": (
        "steps steady",
        lambda w: w.planner.plan(w.batch, keep=[1], joining=w.arrived, after=w.shut, **NINE),
    ),
    "plan joining columns": (
        "plain steps steady",
        lambda w: w.planner.plan(w.batch, keep=[1], joining={"seq_lens": [3]}, after=w.shut, **NINE),
    ),
    "plan joining columns padded": (
        "plain steps steady",
        lambda w: w.planner.plan(w.batch, joining={"seq_lens": [3]}, pad_rows=6, **NINE),
    ),
    "mixed plan": (
        "steps steady",
        lambda w: w.planner.plan(w.batch, [0, 3, 1, 1], joining=w.arrived, **MORE, **NINE),
    ),
    "mixed plan turning over": (
        "steps steady",
        lambda w: w.planner.plan(w.batch, [0, 3, 1], keep=[2, 0], joining=w.arrived, after=w.shut, **MIXED, **NINE),
    ),
    "inputs of a mixed step": ("steps mixed", lambda w: w.step.inputs()),
    "publish of a mixed step": ("steps mixed taken", lambda w: w.step.publish(token=w.on_device(7))),
    "plan padded": (
        "steps steady",
        lambda w: w.planner.plan(w.batch, keep=[1], joining=w.arrived, after=None, pad_rows=4, **NINE),
    ),
    "inputs": ("steps steady", lambda w: w.step.inputs()),
    "publish of a step": ("steps steady taken", lambda w: w.step.publish(token=w.on_device(7, 8, 9))),
}

ALLOWED = (
    "not interrupted",  # Python has dropped it
    "as it was",
    "done",
    "broken",
    "unwritten",
    "as it was, but for keys",
    "half, and finished",
    "half, and refused",
)
"""Ends in which nothing is lost in silence."""


@functools.cache
def ends(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states before and after an operation."""
    parts, operation = OPERATIONS[name]
    old, done = World(parts), World(parts)
    old.settle()
    operation(done)
    done.settle()
    return old.state(), done.state()


def outcome(name: str, at: int) -> str:
    """How an operation ends that is interrupted at its n-th event."""
    parts, operation = OPERATIONS[name]
    world = World(parts)
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
    changed = {part for part in old if state[part] != old[part]}
    if not changed:
        return "as it was"
    if state == done:
        return "done"
    if "steps" in parts:
        return repeated(name, at)
    if changed == {"cache"}:  # pages were taken, and given back
        return "as it was, but for keys"
    return "unwritten" if changed == {"relay"} and name.startswith("publish") else f"something else: {sorted(changed)}"


def repeated(name: str, at: int) -> str:
    """How a step ends that is interrupted between its parts, and then asked for once more."""
    parts, operation = OPERATIONS[name]
    world = World(parts)
    with contextlib.suppress(KeyboardInterrupt), Interrupt(at).armed():
        operation(world)
    try:
        operation(world)
    except Violation:
        return "half, and refused"
    world.settle()
    return "half, and finished" if world.state() == ends(name)[1] else "half, and something else"


def events(name: str) -> int:
    """Calls, lines and returns of an operation."""
    parts, operation = OPERATIONS[name]
    world, counting = World(parts), Interrupt()
    with counting.armed():
        operation(world)
    return counting.events


@pytest.mark.parametrize("level", ["off", "cheap"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_is_never_silent(name: str, level: str) -> None:
    """Wherever it comes, the pool is whole, or every later call says that it is not."""
    with levels.checks(level):
        events(name)  # once more than counted: objects made at first use are made
        count = events(name)
        points = np.unique(np.linspace(1, count, 12).astype(int)).tolist()
        outcomes = {at: outcome(name, at) for at in points}
    assert {at: end for at, end in outcomes.items() if end not in ALLOWED} == {}


def test_an_interrupted_table_write_of_a_step_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The places of pages are launched with the inputs, and an interrupt there leaves its mark."""
    world = World("steps steady")
    step = world.step
    assert step is not None
    launched = world.rt.launch

    def launch(*args: Any, name: str = "", **options: Any) -> Any:
        if name.startswith("req_to_token"):
            raise KeyboardInterrupt
        return launched(*args, name=name, **options)

    monkeypatch.setattr(world.rt, "launch", launch)
    with pytest.raises(KeyboardInterrupt):
        step.inputs()
    assert all(world.broken())


def test_leavers_of_a_step_are_under_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was taken, and whose leavers were not released, is no state to go on from: they would be lost."""

    def interrupted(pool: SlotPool, *_: object) -> None:
        raise KeyboardInterrupt

    world = World("plain steps steady")
    monkeypatch.setattr(SlotPool, "release_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        OPERATIONS["plan joining columns"][1](world)
    assert all(world.broken())


def main() -> int:
    """Every point of every operation, or of those named, at `off` and at `cheap`; 1 if one is lost in silence."""
    total: Counter[str] = Counter()
    for level in ("off", "cheap"):
        for name in sys.argv[1:] or OPERATIONS:
            with levels.checks(level):
                events(name)
                outcomes = Counter(outcome(name, at) for at in range(1, events(name) + 1))
            total += outcomes
            print(f"{level:6}{name:26}", *(f"{end}: {times}" for end, times in outcomes.most_common()), sep="  ")
    print(sum(total.values()), "points:", *(f"{end}: {times}" for end, times in total.most_common()), sep="  ")
    return int(not set(ALLOWED).issuperset(total))


if __name__ == "__main__":
    sys.exit(main())
