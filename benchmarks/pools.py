"""Taking and returning slots and pages, against free lists of numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from batchstate.levels import Level, checks
from batchstate.pages import PagePool
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from benchmarks.comparisons import Comparison, require_equal
from benchmarks.free_lists import FreeListBaseline, LinkedBlocks, PopList, SliceList, TensorList, shuffled
from benchmarks.timing import Contender

LEVELS = (Level.CHEAP, Level.OFF)
PAGE_SIZE = 16
PAGES_PER_REQUEST = 16


def slots_against_lists(runtime: Runtime, *, size: int, n: int) -> Comparison:
    """`SlotPool`, with generations and double-free detection at both levels, against lists that have neither."""
    pool = SlotPool(runtime, size)
    with checks(Level.OFF):
        everything = pool.take(size)
        pool.free(everything.take(np.random.default_rng(0).permutation(size)))
    lists = _lists((PopList, SliceList, TensorList, LinkedBlocks), runtime, size)

    def take_and_free() -> None:
        pool.free(pool.take(n))

    def verify() -> None:
        ours = all_numbers(pool.take, pool.free, lambda slots: slots.np.tolist(), size, n)
        for other in lists:
            _require_same_numbers(other, ours, size, n)
        pool.verify()
        pool.expect_idle()

    return Comparison(
        task=f"take and return {n:,} of {size:,} slots",
        ours=[Contender(f"SlotPool, checks {level.value}", take_and_free, level) for level in LEVELS],
        baselines=[_turnover(other, n) for other in lists],
        verify=verify,
    )


def pages_against_lists(runtime: Runtime, *, size: int, n: int) -> Comparison:
    """`PagePool` against lists that know neither requests nor lengths.

    `grow` takes pages and writes them into each request's row, up to 16 pages a request; `extend` also says where each
    new token lies. The lists hand out numbers in one call for all requests together, and keep no rows.
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
            pool.release(everyone.take(some))
        slots.free(everyone)
    owners, lengths = slots.take(requests), _tokens(n)

    def grow_and_release() -> None:
        pool.grow(owners, lengths)
        pool.release(owners)

    def extend_and_release() -> None:
        pool.extend(owners, lengths)
        pool.release(owners)

    def verify() -> None:
        ours = _all_pages(pool, slots, size, n)
        for other in lists:
            _require_same_numbers(other, ours, size, n)
        pool.verify()
        pool.expect_idle()

    ways: Sequence[tuple[str, Callable[[], None]]] = (("grow", grow_and_release), ("extend", extend_and_release))
    return Comparison(
        task=f"take and return {n:,} of {size:,} pages",
        ours=[
            Contender(f"PagePool {name}, checks {level.value}", run, level) for name, run in ways for level in LEVELS
        ],
        baselines=[_turnover(other, n) for other in lists],
        verify=verify,
    )


def all_numbers(
    take: Callable[[int], Any], free: Callable[[Any], None], numbers: Callable[[Any], list[int]], size: int, n: int
) -> list[int]:
    """Everything that can be taken after a few turns, sorted; n may be half of `size` at most.

    Of every two ways to keep numbers 1 to `size` the result is the same: each number once.
    """
    for _ in range(3):
        first, second = take(n), take(n)
        free(first)
        free(second)
    everything = take(size)
    result = sorted(numbers(everything))
    free(everything)
    return result


def _all_pages(pool: PagePool, slots: SlotPool, size: int, n: int) -> list[int]:
    """`all_numbers` of a page pool, through slots of its own."""
    held = slots.take(slots.stats.free)

    def take(count: int) -> Any:
        owners = held.take(np.flatnonzero(pool.allocated(held) == 0)[: -(-count // PAGES_PER_REQUEST)])
        pool.grow(owners, _tokens(count))
        return owners

    result = all_numbers(take, pool.release, lambda owners: _pages_of(pool, owners.np), size, n)
    slots.free(held)
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
    for one in lists:
        shuffled(one, size)
    return lists


def _turnover(free_list: FreeListBaseline, n: int) -> Contender:
    return Contender(free_list.name, lambda: free_list.free(free_list.take(n)))


def _require_same_numbers(free_list: FreeListBaseline, ours: list[int], size: int, n: int) -> None:
    theirs = all_numbers(free_list.take, free_list.free, free_list.numbers, size, n)
    require_equal(f"numbers of the {free_list.name}", ours, theirs)
