"""How costs grow: with the rows of a batch, and with the size of a pool."""

from collections.abc import Callable

import numpy as np

from batchstate.kv.pages import PagePool
from batchstate.levels import Level, checks
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from benchmarks.baselines.twin_columns import TENSORS
from benchmarks.comparisons import Comparison, require_equal
from benchmarks.decode_steps import Scene
from benchmarks.timing import Contender

FLAT = 1.5
"""A pool of thousands of times the size lies in no cache; beyond that its size may not show."""

PAGE_SIZE = 16
PAGES_PER_REQUEST = 16

Turnover = tuple[Callable[[], None], Callable[[], int]]
"""Takes and returns, and what is free when everything is given back."""


def growth_with_rows(runtime: Runtime, *, few: int = 256, many: int = 8_192, num_columns: int = 12) -> Comparison:
    """A decode step of few and of many rows, of which the same share leaves and joins: at most linear."""
    scenes = [Scene.of(runtime, num_columns=num_columns, rows=n, churn=max(1, n // 51)) for n in (few, many)]

    def verify() -> None:
        for scene in scenes:
            scene.verify([scene.twins(TENSORS)])

    return Comparison(
        task=f"decode step from {few:,} to {many:,} rows, {num_columns} columns",
        ours=[Contender(f"{few:,} rows, checks cheap", scenes[0].packed_step, Level.CHEAP)],
        baselines=[Contender(f"{many:,} rows, checks cheap", scenes[1].packed_step, Level.CHEAP)],
        verify=verify,
        limit=many / few,
        paired=True,
    )


def slots_flat(runtime: Runtime, *, small: int = 1_000, large: int = 4_000_000, n: int = 256) -> Comparison:
    """`SlotPool` turnover in a small pool and in a large one."""
    return _flat("SlotPool", f"{n} slots", {size: _slots(runtime, size, n) for size in (small, large)})


def pages_flat(runtime: Runtime, *, small: int = 1_000, large: int = 4_000_000, n: int = 256) -> Comparison:
    """`PagePool` turnover in a small pool and in a large one, by as many requests."""
    return _flat("PagePool", f"{n} pages", {size: _pages(runtime, size, n) for size in (small, large)})


def _flat(pool: str, work: str, turnovers: dict[int, Turnover]) -> Comparison:
    (small, (few, _)), (large, (many, _)) = turnovers.items()

    def verify() -> None:
        for size, (turnover, free) in turnovers.items():
            turnover()
            require_equal(f"free in the {pool} of {size:,}", free(), size)

    return Comparison(
        task=f"{pool}: take and return {work}, of {small:,} against of {large:,}",
        ours=[Contender(f"of {small:,}, checks cheap", few, Level.CHEAP)],
        baselines=[Contender(f"of {large:,}, checks cheap", many, Level.CHEAP)],
        verify=verify,
        limit=FLAT,
        paired=True,
    )


def _slots(runtime: Runtime, size: int, n: int) -> Turnover:
    pool = SlotPool(runtime, size)
    with checks(Level.OFF):  # leave them in no order
        everything = pool.take(size)
        pool.free(everything.take(np.random.default_rng(0).permutation(size)), after=None)
    return lambda: pool.free(pool.take(n), after=None), lambda: pool.stats.free


def _pages(runtime: Runtime, size: int, n: int) -> Turnover:
    most = -(-size // PAGES_PER_REQUEST)
    slots = SlotPool(runtime, most)
    pool = PagePool(runtime, slots, size, PAGE_SIZE, max_tokens_per_request=PAGE_SIZE * PAGES_PER_REQUEST)
    with checks(Level.OFF):
        everyone = slots.take(most)
        pages = np.full(most, PAGES_PER_REQUEST)
        pages[-1] = size - PAGES_PER_REQUEST * (most - 1)
        pool.grow(everyone, pages * PAGE_SIZE)
        for some in np.array_split(np.random.default_rng(0).permutation(most), 8):
            pool.release(everyone.take(some), after=None)
        slots.free(everyone, after=None)
    owners = slots.take(n // PAGES_PER_REQUEST)
    lengths = np.full(len(owners), PAGE_SIZE * PAGES_PER_REQUEST)

    def turnover() -> None:
        pool.grow(owners, lengths)
        pool.release(owners, after=None)

    return turnover, lambda: pool.stats.free
