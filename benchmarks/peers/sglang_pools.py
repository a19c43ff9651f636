"""SGLang's allocators of KV tokens and of request rows against `SlotPool`."""

from collections.abc import Callable
from typing import Any, ClassVar, final

import numpy as np
import torch

from batchstate.levels import Level, checks
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from benchmarks.baselines.free_lists import FreeListBaseline, shuffled
from benchmarks.comparisons import Absent, Comparison, require_equal
from benchmarks.peers.installed import named, or_absent, peer, theirs
from benchmarks.pools import all_numbers
from benchmarks.timing import Contender

OURS = f"SlotPool, checks {Level.CHEAP.value}"
CONTEXT = 4


@final
class TokenAllocator:
    """Locations, out of a tensor."""

    name: ClassVar[str] = "token allocator"

    def __init__(self, size: int, device: torch.device) -> None:
        module = peer("sglang", "sglang.srt.mem_cache.allocator")
        with theirs("TokenToKVPoolAllocator"):
            self._pool: Any = module.TokenToKVPoolAllocator(size, torch.float16, str(device), None, need_sort=False)

    def take(self, n: int) -> Any:
        return self._pool.alloc(n)

    def free(self, taken: Any) -> None:
        self._pool.free(taken)

    def numbers(self, taken: Any) -> list[int]:
        numbers: list[int] = taken.tolist()
        return numbers


@final
class RequestRows:
    """Rows of requests, out of a list, all at once."""

    name: ClassVar[str] = "ReqToTokenPool, rows"

    def __init__(self, size: int, device: torch.device) -> None:
        module = peer("sglang", "sglang.srt.mem_cache.memory_pool")
        with theirs("ReqToTokenPool"):
            self.pool: Any = module.ReqToTokenPool(size, CONTEXT, str(device), enable_memory_saver=False)

    def take(self, n: int) -> list[int]:
        rows: list[int] = self.pool.alloc_rows(n)
        return rows

    def free(self, taken: list[int]) -> None:
        self.pool.free_rows(taken)

    def numbers(self, taken: list[int]) -> list[int]:
        return taken


class _Holder:
    """Of a request, what the pool looks at."""

    def __init__(self, kv: Any) -> None:
        self.kv = kv


def slots_against_token_allocator(runtime: Runtime, *, size: int = 1_000_000, n: int = 256) -> Comparison | Absent:
    """Slots against tokens."""
    return _against(runtime, size, n, TokenAllocator.name, lambda: _turnover_of(TokenAllocator, runtime, size, n))


def slots_against_request_pool(runtime: Runtime, *, size: int = 1_000_000, n: int = 256) -> Comparison | Absent:
    """Slots against request rows: taken and freed at once, and as the scheduler does, freed one request at a time."""

    def baselines() -> tuple[RequestRows, list[Contender]]:
        rows, contenders = _turnover_of(RequestRows, runtime, size, n)
        kinds = peer("sglang", "sglang.srt.managers.schedule_batch")
        with theirs("ReqKvInfo"):
            requests = [_Holder(kinds.ReqKvInfo()) for _ in range(n)]

        def by_request() -> None:
            rows.pool.alloc(requests)
            for request in requests:
                rows.pool.free(request)

        return rows, [*contenders, Contender(_of_sglang("ReqToTokenPool, requests"), by_request)]

    return _against(runtime, size, n, RequestRows.name, baselines)


def _of_sglang(what: str) -> str:
    return named("SGLang", "sglang", what)


def _turnover_of(kind: Callable[..., Any], runtime: Runtime, size: int, n: int) -> tuple[Any, list[Contender]]:
    one = kind(size, runtime.device)
    shuffled(one, size)
    return one, [Contender(_of_sglang(one.name), lambda: one.free(one.take(n)))]


def _against(
    runtime: Runtime,
    size: int,
    n: int,
    name: str,
    baselines: Callable[[], tuple[FreeListBaseline, list[Contender]]],
) -> Comparison | Absent:
    task = f"take and return {n:,} of {size:,} slots"

    def make() -> Comparison:
        other, contenders = baselines()
        pool = SlotPool(runtime, size)
        with checks(Level.OFF):
            everything = pool.take(size)
            pool.free(everything.take(np.random.default_rng(0).permutation(size)))

        def verify() -> None:
            for contender in contenders:
                contender.run()
            ours = all_numbers(pool.take, pool.free, lambda slots: slots.np.tolist(), size, n)
            require_equal(f"numbers of {name}", ours, all_numbers(other.take, other.free, other.numbers, size, n))
            pool.expect_idle()

        return Comparison(
            task=task,
            ours=[
                Contender(f"SlotPool, checks {level.value}", lambda: pool.free(pool.take(n)), level)
                for level in (Level.CHEAP, Level.OFF)
            ],
            baselines=contenders,
            verify=verify,
        )

    return or_absent(task, OURS, _of_sglang(name), make)
