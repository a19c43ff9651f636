"""What planning a step of the host tier costs, counted: nothing grows with a context's length or a pool's size."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from batchstate import checks
from batchstate.kv.hisparse import HiSparse
from batchstate.kv.host_pool import FreeRanges, HostKVPool, HostRanges
from batchstate.kv.pages import PagePool
from batchstate.pools import SlotPool
from batchstate.runtime import open_runtime

HOT = 16


def planner(requests: int, tokens: int) -> Callable[[], None]:
    """A host tier of that many READY requests of that many tokens, one byte each; what it returns plans a step."""
    rt = open_runtime("cpu")
    slots = SlotPool(rt, requests)
    pages = PagePool(rt, slots, requests, HOT, max_tokens_per_request=HOT)
    per_request = tokens + 64
    host = HostKVPool(rt, requests * per_request, layers=1, item_shape=(1,), dtype=torch.uint8)
    kv = [rt.device_zeros((pages.location_capacity, 1), torch.uint8)]
    tier = HiSparse(pages, host, kv, hot_tokens=HOT)
    taken = slots.take(requests)
    tier.reserve(taken, tokens, per_request)
    tier.admit_direct(taken)
    lens = np.full(requests, tokens)

    def plan() -> None:
        lens[:] += 1
        tier.back_up(tier.map_last_location(taken, lens))

    return plan


def peak(plan: Callable[[], None]) -> int:
    """Most bytes that planning a step holds at once, beyond what was there."""
    plan()
    plan()
    tracemalloc.start()
    try:
        plan()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_memory_of_a_plan_grows_with_the_batch_alone(level: str) -> None:
    """1 k, 16 k and 128 k tokens take the same memory to plan; 64 times the requests at most 64 times as much."""
    with checks(level):
        few = [peak(planner(8, tokens)) for tokens in (1_000, 16_000, 128_000)]
        assert max(few) <= 1.1 * min(few) + 512
        some, many = (peak(planner(requests, 1_000)) for requests in (64, 512))
        assert some <= 8 * few[0]
        assert many <= 64 * few[0]


def test_no_step_touches_ranges_or_free_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning never expands a range and never looks at free host locations."""
    plan = planner(8, 16_000)
    plan()

    def refuse(*_: object) -> None:
        raise AssertionError("a step has cost that grows with the context or the pool")

    for owner, name in (
        (HostRanges, "locations"),
        (HostRanges, "__len__"),
        (FreeRanges, "top"),
        (FreeRanges, "entries"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    for _ in range(3):
        plan()
