"""Fences, and whatever else of an engine runs inside of a call of a pool, may call it: nothing gets two owners.

`python -m tests.test_reentrance SEED COUNT` runs so many histories of each level, from a seed on; the tests run 600.
"""

import contextlib
import random
import sys
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from batchstate import levels
from batchstate.errors import ArgumentError, BatchStateError, PoolBrokenError, PoolExhaustedError
from batchstate.hybrid import HybridSlotPool
from batchstate.kv.pages import PageLease
from batchstate.kv.prefix_cache import PrefixCache
from batchstate.mirror import Slots
from batchstate.pools import SlotListener, SlotPool
from batchstate.runtime import CpuRuntime, Runtime
from batchstate.violations import Violation
from tests.doubles import Gate
from tests.worlds import Pools


class LostError(RuntimeError):
    """The error of a fence."""


@attrs.define(eq=False)
class Restless:
    """A fence that calls the pool, or raises, in some of its queries."""

    world: "World"
    done: bool = False

    def query(self) -> bool:
        dice = self.world.dice
        if dice.random() < 0.1:
            raise LostError
        if dice.random() < 0.4:
            self.world.act()
        self.done = self.done or dice.random() < 0.3
        return self.done

    def wait(self) -> None:
        raise AssertionError("the host waited")


@attrs.define(eq=False)
class Lengths:
    """Lengths that call the pool when they are read."""

    world: "World"
    number: int

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        self.world.act()
        return np.array(self.number)


class World:
    """One history: the slots and leases that the pools have handed out."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        rt = CpuRuntime()
        slots = HybridSlotPool(rt, 5, states=9, states_per_slot=2) if seed % 2 else None
        pools = Pools.of(rt, 5, pages=9, page_size=2, longest=8, slots=slots)
        self.slots, self.pages, self.cache = pools.slots, pools.pages, PrefixCache(pools.pages) if seed % 3 else None
        self.live: list[Slots] = []
        self.leases: list[PageLease] = []
        self.depth = self.keys = 0

    def act(self) -> None:
        """One call; what is refused changes nothing."""
        if self.depth > 3:
            return
        self.depth += 1
        calls: list[Callable[[], object]] = [self.take, self.take, self.free, self.extend, self.extend, self.advance]
        calls += [self.leave, self.truncate, self.share, self.hold, self.drop, self.slots.reap, self.pages.reap]
        calls += [self.arrive, self.rebase, self.split]
        if self.cache is not None:
            calls += [self.insert, self.match, lambda: self.cache and self.cache.evict(1)]
        with contextlib.suppress(ArgumentError, PoolExhaustedError, Violation, LostError):
            self.dice.choice(calls)()
        self.depth -= 1

    def fence(self) -> Restless | None:
        return self.dice.choice([None, Restless(self), Restless(self)])

    def some(self) -> Slots:
        return self.dice.choice(self.live) if self.live else self.slots.take(0)

    def lengths(self) -> Any:
        number = self.dice.randrange(9)
        return Lengths(self, number) if self.dice.random() < 0.2 else number

    def take(self) -> None:
        self.came(self.slots.take(self.dice.randrange(1, 3)))

    def arrive(self) -> None:
        self.came(self.pages.take_requests([self.dice.randrange(5)]))

    def came(self, slots: Slots) -> None:
        self.live += [slots.take([row]) for row in range(len(slots))]
        owned = [int(request.np[0]) for request in self.live]
        assert len(set(owned)) == len(owned), f"owned twice: {owned}"
        assert 0 not in owned

    def free(self) -> None:
        slots = self.some()
        self.slots.free(slots, after=self.fence())
        self.gone(slots)

    def leave(self) -> None:
        slots = self.some()
        self.pages.release_requests(slots, after=self.fence())
        self.gone(slots)

    def gone(self, slots: Slots) -> None:
        self.live = [request for request in self.live if request is not slots]

    def extend(self) -> None:
        slots, lengths = self.some(), self.lengths()
        assert (self.pages.extend(slots, lengths).locations.np >= 2).all()
        self.pages.commit(slots, self.pages.committed(slots))

    def advance(self) -> None:
        assert (self.pages.advance(self.some(), self.lengths()).locations.np >= 2).all()

    def truncate(self) -> None:
        self.pages.truncate(self.some(), self.lengths(), after=self.fence())

    def share(self) -> None:
        self.pages.share(self.some(), self.some(), 2 * self.dice.randrange(3))

    def hold(self) -> None:
        self.leases.append(self.pages.take(2) if self.dice.random() < 0.5 else self.pages.hold(self.some(), 2))

    def rebase(self) -> None:
        self.pages.rebase(self.some(), self.some(), 2, after=self.fence())

    def split(self) -> None:
        if self.leases:
            self.leases += self.dice.choice(self.leases).split(2)

    def insert(self) -> None:
        if self.cache is not None and self.live:
            slots = self.some()
            self.pages.commit(slots, self.pages.committed(slots))
            self.keys += 1
            self.cache.insert(slots, [self.keys])

    def match(self) -> None:
        if self.cache is not None:
            self.leases.append(self.cache.match([self.dice.randrange(self.keys + 1)]))

    def drop(self) -> None:
        if self.leases:
            self.dice.choice(self.leases).release(after=self.fence())

    def check(self) -> None:
        """Nothing is owned twice, and everything is somewhere."""
        with levels.checks("full"):
            self.slots.verify()
            self.pages.verify()
        assert sorted(int(request.np[0]) for request in self.live) == self.slots.live_slots().tolist()


def histories(seeds: range, level: str) -> None:
    """Runs one history for each seed, and checks what came of it."""
    for seed in seeds:
        world = World(seed)
        with levels.checks(level):
            for _ in range(20):
                world.act()
        world.check()


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_fences_that_call_the_pool_and_raise(level: str) -> None:
    """In 1,200 histories nothing gets two owners, nothing is lost, and nobody gets page 0."""
    histories(range(600), level)


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_fence_that_takes(rt: Runtime, level: str, hybrid: bool) -> None:
    """A fence that takes a slot while a take queries it gets one of its own, or the take finds too few."""
    with levels.checks(level):
        pool = HybridSlotPool(rt, 4, states=8, states_per_slot=2) if hybrid else SlotPool(rt, 4)
        inner: list[Slots] = []

        class Taking(Gate):
            def query(self) -> bool:
                if not inner:
                    inner.append(pool.take(2))
                return True

        pool.free(pool.take(1), after=Taking())
        got = [pool.take(1), *inner, pool.take(1)]
        assert sorted(slot for slots in got for slot in slots.np.tolist()) == [1, 2, 3, 4]


def test_a_listener_cannot_call_its_pool(rt: Runtime) -> None:
    """While a pool is being changed it refuses calls, and the take that was under way is undone."""
    pool = SlotPool(rt, 4)

    class Nosy(SlotListener):
        def on_take(self, rows: object) -> None:
            pool.take(1)

    nosy = Nosy()
    pool.add_listener(nosy)
    with pytest.raises(PoolBrokenError, match="`take` has not ended"):
        pool.take(2)
    pool.remove_listener(nosy)
    assert sorted(pool.take(4).np.tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("level", ["cheap", "full"])
def test_a_listener_may_count(rt: Runtime, level: str) -> None:
    """The checks of a listener compare what it holds with the numbers of the pool."""
    pool = SlotPool(rt, 4)

    class Counting(SlotListener):
        def check_conservation(self, live: int, operation: str) -> None:
            seen.append(pool.stats.live - live)

        def verify(self) -> None:
            seen.append(pool.reap())

    seen: list[int] = []
    pool.add_listener(Counting())
    with levels.checks(level):
        pool.free(pool.take(2), after=None)
        assert (pool.stats.free, set(seen)) == (4, {0})


@pytest.mark.parametrize("call", ["free", "extend", "truncate", "lease"])
def test_a_fence_that_frees_what_is_being_used(rt: Runtime, call: str) -> None:
    """Fences are queried before handles are checked: what one of them gives away is refused, at `off` too."""
    pools = Pools.of(rt, 4, pages=8, page_size=2, longest=8)
    slots, pages, request, other = pools.slots, pools.pages, pools.joined([4]), pools.slots.take(1)
    lease = pages.hold(request, 4)

    class Freeing(Gate):
        def query(self) -> bool:
            if not self.done:
                self.done = True
                pages.release_requests(request, after=None)
                lease.release(after=None)
            return True

    pages.extend(other, 2)
    pages.release(other, after=Freeing())
    calls: dict[str, Callable[[], object]] = {
        "free": lambda: slots.free(request, after=None),
        "extend": lambda: pages.extend(request, 6),
        "truncate": lambda: pages.truncate(request, 2, after=None),
        "lease": lambda: lease.release(after=None),
    }
    with levels.checks("off"), pytest.raises(BatchStateError):
        calls[call]()
    slots.verify()
    pages.verify()


if __name__ == "__main__":
    for level in ("off", "cheap"):
        histories(range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])), level)
