"""vLLM's `BlockPool` with prefix caching, as released, against a `PrefixCache`: a hit, and taking as many pages.

Both pools are full of cached pages, so that taking evicts. The two take turns in one process; thread CPU time, of which
the fastest tenth counts: what other processes do to the caches of a core only ever adds.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, final

from batchstate import PagePool, PrefixCache, SlotPool
from batchstate.levels import checks
from batchstate.runtime import open_runtime
from benchmarks.adoption.placeholders import stand_in

PAGE_SIZE = 16
POOL = 4096
"""Pages of a pool."""

Turn = tuple[float, float]
"""Seconds of a hit, and of taking pages."""


def key_of(number: int) -> bytes:
    """A hash, as vLLM's are."""
    return number.to_bytes(32, "big")


@final
class Blocks:
    """vLLM's pool."""

    def __init__(self) -> None:
        stand_in()
        from vllm.v1.core.block_pool import BlockPool

        self.pool: Any = BlockPool(POOL + 1, True, PAGE_SIZE)

    def turn(self, hot: list[bytes], new: list[bytes]) -> Turn:
        """Finds the blocks of `hot`, takes as many as `new` and caches them, and frees both."""
        pool = self.pool
        start = time.thread_time()
        hits = []
        for key in hot:
            blocks = pool.get_cached_block(key, [0])
            if not blocks:
                break
            hits.append(blocks[0])
        pool.touch(hits)
        hit = time.thread_time()
        taken = pool.get_new_blocks(len(new))
        end = time.thread_time()
        pool.cache_full_blocks(SimpleNamespace(block_hashes=new), taken, 0, len(new), PAGE_SIZE, 0)
        pool.free_blocks(reversed(taken))
        pool.free_blocks(reversed(hits))
        if len(hits) != len(hot):
            raise LookupError(f"found {len(hits)} of {len(hot)} blocks")
        return hit - start, end - hit


@final
class Cache:
    """Ours."""

    def __init__(self) -> None:
        runtime = open_runtime("cpu")
        self.pages = PagePool(
            runtime, SlotPool(runtime, 1), POOL, PAGE_SIZE, max_tokens_per_request=PAGE_SIZE, name="prefixes"
        )
        self.cache = PrefixCache(self.pages)

    def turn(self, hot: list[bytes], new: list[bytes]) -> Turn:
        """The same."""
        start = time.thread_time()
        lease = self.cache.match(hot)
        hit = time.thread_time()
        taken = self.pages.take(len(new))
        end = time.thread_time()
        self.pages.commit(taken, taken.tokens)
        self.cache.insert(taken, new)
        taken.release(after=None)
        lease.release(after=None)
        if lease.pages.size != len(hot):
            raise LookupError(f"found {lease.pages.size} of {len(hot)} pages")
        return hit - start, end - hit


def tenth(seconds: Iterable[float]) -> float:
    """The fastest tenth takes at most this long."""
    return statistics.quantiles(seconds, n=10)[0]


def compare(num_pages: int, *, rounds: int = 400, level: str = "cheap") -> dict[str, Any]:
    """Microseconds of a hit and of a take of `num_pages`, and how often ours goes into vLLM's, the sum of both."""
    ways: dict[str, Callable[[list[bytes], list[bytes]], Turn]] = {"vllm": Blocks().turn, "batchstate": Cache().turn}
    taken: dict[str, list[Turn]] = {way: [] for way in ways}
    number = num_pages
    hot = [key_of(at) for at in range(num_pages)]
    with checks(level):
        for turn in ways.values():
            turn([], hot)
        for at in range(rounds + 2 * POOL // num_pages):
            new = [key_of(number + cache) for cache in range(num_pages)]
            number += num_pages
            for way, cache in ways.items():
                seconds = cache(hot, new)
                if at >= 2 * POOL // num_pages:  # until then the pools fill up
                    taken[way].append(seconds)
    row: dict[str, Any] = {"pages": num_pages, "level": level}
    for way, turns in taken.items():
        hit, take = (tenth(turn[at] for turn in turns) * 1e6 for at in (0, 1))
        row[way] = {"hit_us": round(hit, 1), "take_us": round(take, 1)}
    theirs, ours = (tenth(sum(turn) for turn in taken[way]) for way in ("vllm", "batchstate"))
    row["times_as_fast"] = round(theirs / ours, 2)
    return row
