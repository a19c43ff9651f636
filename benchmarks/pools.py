"""Taking and returning slots and pages, against free lists of numbers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from batchstate.kv.pages import PageLease, PagePool
from batchstate.levels import Level, checks
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from benchmarks.baselines.free_lists import FreeListBaseline, LinkedBlocks, PopList, SliceList, TensorList, shuffled
from benchmarks.comparisons import Asked, Comparison, require_equal
from benchmarks.timing import Contender

LEVELS = (Level.CHEAP, Level.OFF)
PAGE_SIZE = 16
PAGES_PER_REQUEST = 16
TAKE = "take"
"""In the names of our ways that do what the lists do; others do more."""
NOTHING = Asked()
SLOTS_ASKED = {(1_000_000, 256): Asked(target=20.0)}
"""Size and slots -> what is asked of the ratio to a torch free list."""
PAGES_ASKED = {16: Asked(target=1.0), 2_048: Asked(target=5.0)}
"""Pages -> what is asked of the ratio to a linked block list."""


def slots_against_lists(runtime: Runtime, *, size: int, n: int) -> Comparison:
    """`SlotPool`, with generations and double-free detection at both levels, against lists that have neither."""
    names = {level: f"SlotPool, checks {level.value}" for level in LEVELS}
    pool = _shuffled_slots(runtime, size)
    lists = _lists((PopList, SliceList, TensorList, LinkedBlocks), runtime, size)

    def take_and_free() -> None:
        pool.free(pool.take(n), after=None)

    def verify() -> None:
        ours = all_numbers(pool.take, partial(pool.free, after=None), lambda slots: slots.np.tolist(), size, n)
        for other in lists:
            _require_same_numbers(other, ours, size, n)
        pool.verify()
        pool.expect_idle()

    return Comparison(
        task=f"take and return {n:,} of {size:,} slots",
        ours=[Contender(names[level], take_and_free, level) for level in LEVELS],
        baselines=[_turnover(other, n) for other in lists],
        verify=verify,
        asks={(name, TensorList.name): SLOTS_ASKED.get((size, n), NOTHING) for name in names.values()},
    )


def pages_against_lists(runtime: Runtime, *, size: int, n: int) -> Comparison:
    """`PagePool` against lists that know neither requests nor lengths.

    `take` does what the lists do: it hands out pages that no request has, in one call, and no rows are written. `grow`
    also writes them into each request's row, up to 16 pages a request, and `extend` says where each new token lies.
    """
    requests = -(-n // PAGES_PER_REQUEST)
    most_requests = -(-size // PAGES_PER_REQUEST)
    slots = SlotPool(runtime, most_requests + requests)  # those of the turnover, and those of the verification
    pool = PagePool(runtime, slots, size, PAGE_SIZE, max_tokens_per_request=PAGE_SIZE * PAGES_PER_REQUEST)
    lists = _lists((PopList, TensorList, LinkedBlocks), runtime, size)
    with checks(Level.OFF):  # leave the pages in no order, as the lists are
        everyone = slots.take(most_requests)
        pool.grow(everyone, _tokens(size))
        for some in np.array_split(np.random.default_rng(0).permutation(most_requests), 8):
            pool.release(everyone.take(some), after=None)
        slots.free(everyone, after=None)
    owners, lengths = slots.take(requests), _tokens(n)

    def take_and_release() -> None:
        pool.take(n).release(after=None)

    def grow_and_release() -> None:
        pool.grow(owners, lengths)
        pool.release(owners, after=None)

    def extend_and_release() -> None:
        pool.extend(owners, lengths)
        pool.release(owners, after=None)

    def verify() -> None:
        ours = _all_pages(pool, slots, size, n)
        taken = all_numbers(
            pool.take, partial(PageLease.release, after=None), lambda lease: lease.pages.tolist(), size, n
        )
        require_equal("pages of leases", ours, taken)
        for other in lists:
            _require_same_numbers(other, ours, size, n)
        pool.verify()
        pool.expect_idle()

    ways: Sequence[tuple[str, Callable[[], None]]] = (
        (TAKE, take_and_release),
        ("grow", grow_and_release),
        ("extend", extend_and_release),
    )
    asked = {f"PagePool {TAKE}, checks {level.value}": PAGES_ASKED.get(n, NOTHING) for level in LEVELS}
    return Comparison(
        task=f"take and return {n:,} of {size:,} pages",
        ours=[
            Contender(f"PagePool {name}, checks {level.value}", run, level) for name, run in ways for level in LEVELS
        ],
        baselines=[_turnover(other, n) for other in lists],
        verify=verify,
        asks={(name, LinkedBlocks.name): limits for name, limits in asked.items()},
    )


def slots_of_random_sizes(runtime: Runtime, *, size: int) -> Comparison:
    """1 to 64 slots at a time: one of 32 holders after the other gives back what it has and takes others."""
    pool = _shuffled_slots(runtime, size)
    ours = [
        (
            f"SlotPool, checks {level.value}",
            level,
            Mixed(pool.take, partial(pool.free, after=None), lambda slots: slots.np.tolist()),
        )
        for level in LEVELS
    ]
    return _of_random_sizes("slots", size, ours, (PopList, SliceList, TensorList, LinkedBlocks), runtime, pool.verify)


def pages_of_random_sizes(runtime: Runtime, *, size: int) -> Comparison:
    """The same for pages that no request has, taken and returned through leases."""
    slots = SlotPool(runtime, 1)
    pool = PagePool(runtime, slots, size, PAGE_SIZE, max_tokens_per_request=PAGE_SIZE)
    ours = [
        (
            f"PagePool {TAKE}, checks {level.value}",
            level,
            Mixed(pool.take, partial(PageLease.release, after=None), lambda lease: lease.pages.tolist()),
        )
        for level in LEVELS
    ]
    return _of_random_sizes("pages", size, ours, (PopList, TensorList, LinkedBlocks), runtime, pool.verify)


@final
class Mixed:
    """Entries taken and returned in random sizes and order, by the ways of one pool or list.

    Attributes:
        held: what each of the holders has.
    """

    def __init__(
        self, take: Callable[[int], Any], free: Callable[[Any], None], numbers: Callable[[Any], list[int]]
    ) -> None:
        rng = np.random.default_rng(0)
        self._steps = list(zip(rng.integers(0, 32, 64).tolist(), rng.integers(1, 65, 64).tolist(), strict=True))
        self._take, self._free, self._numbers = take, free, numbers
        self.held = [take(n) for n in rng.integers(1, 65, 32).tolist()]

    def run(self) -> None:
        """64 times one of the holders returns what it has and takes as many as it wants now."""
        take, free, held = self._take, self._free, self.held
        for holder, n in self._steps:
            free(held[holder])
            held[holder] = take(n)

    def counts(self) -> list[int]:
        """How many each holder has.

        Raises:
            MismatchError: a number has two holders.
        """
        numbers = [self._numbers(handles) for handles in self.held]
        everything = [number for some in numbers for number in some]
        require_equal("numbers that are held", sorted(everything), sorted(set(everything)))
        return [len(some) for some in numbers]


def _of_random_sizes(
    work: str,
    size: int,
    ours: Sequence[tuple[str, Level, Mixed]],
    kinds: Sequence[Callable[..., FreeListBaseline]],
    runtime: Runtime,
    check: Callable[[], None],
) -> Comparison:
    lists = [(kind.name, Mixed(kind.take, kind.free, kind.numbers)) for kind in _lists(kinds, runtime, size)]

    def verify() -> None:
        everyone = [*(mixed for _, _, mixed in ours), *(mixed for _, mixed in lists)]
        for mixed in everyone:
            mixed.run()
            require_equal("how many are held", everyone[0].counts(), mixed.counts())
        check()

    return Comparison(
        task=f"64 times return and take 1 to 64 of {size:,} {work}",
        ours=[Contender(name, mixed.run, level) for name, level, mixed in ours],
        baselines=[Contender(name, mixed.run) for name, mixed in lists],
        verify=verify,
    )


def all_numbers(
    take: Callable[[int], Any], free: Callable[[Any], None], numbers: Callable[[Any], list[int]], size: int, n: int
) -> list[int]:
    """Everything that can be taken after a few turns, sorted; n may be half of `size` at most.

    Any two ways to keep numbers 1 to `size` have the same result: each number once.
    """
    for _ in range(3):
        first, second = take(n), take(n)
        free(first)
        free(second)
    everything = take(size)
    result = sorted(numbers(everything))
    free(everything)
    return result


def _shuffled_slots(runtime: Runtime, size: int) -> SlotPool:
    pool = SlotPool(runtime, size)
    with checks(Level.OFF):
        everything = pool.take(size)
        pool.free(everything.take(np.random.default_rng(0).permutation(size)), after=None)
    return pool


def _all_pages(pool: PagePool, slots: SlotPool, size: int, n: int) -> list[int]:
    """`all_numbers` of a page pool, through slots of its own."""
    held = slots.take(slots.stats.free)

    def take(count: int) -> Any:
        owners = held.take(np.flatnonzero(pool.allocated(held) == 0)[: -(-count // PAGES_PER_REQUEST)])
        pool.grow(owners, _tokens(count))
        return owners

    result = all_numbers(take, partial(pool.release, after=None), lambda owners: _pages_of(pool, owners.np), size, n)
    slots.free(held, after=None)
    return result


def _pages_of(pool: PagePool, rows: Any) -> list[int]:
    pages = pool.page_table[rows]
    numbers: list[int] = pages[pages > 0].tolist()
    return numbers


def _tokens(num_pages: int) -> Any:
    """Lengths of requests that fill `num_pages` pages, all requests but the last with as many as one may have."""
    full, rest = divmod(num_pages, PAGES_PER_REQUEST)
    pages = [PAGES_PER_REQUEST] * full + ([rest] if rest else [])
    return np.array(pages, dtype=np.int64) * PAGE_SIZE


def _lists(kinds: Sequence[Callable[..., FreeListBaseline]], runtime: Runtime, size: int) -> list[FreeListBaseline]:
    lists = [kind(size, runtime.device) for kind in kinds]
    for free_list in lists:
        shuffled(free_list, size)
    return lists


def _turnover(free_list: FreeListBaseline, n: int) -> Contender:
    return Contender(free_list.name, lambda: free_list.free(free_list.take(n)))


def _require_same_numbers(free_list: FreeListBaseline, ours: list[int], size: int, n: int) -> None:
    theirs = all_numbers(free_list.take, free_list.free, free_list.numbers, size, n)
    require_equal(f"numbers of the {free_list.name}", ours, theirs)
