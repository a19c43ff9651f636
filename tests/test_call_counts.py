"""What the single calls of a pool, and a whole prefill, cost in calls: these do not vary with the machine."""

import sys
from collections.abc import Callable

import numpy as np
import pytest

from batchstate import PagePool, Runtime, SlotPool, checks, open_runtime
from batchstate.mirror import Slots
from benchmarks.arrivals import Prefill
from benchmarks.steady_steps import Steady
from benchmarks.timing import no_collector


@pytest.fixture
def rt() -> Runtime:
    """A CPU, on any machine: an accelerator adds calls for its events, and how many varies with what is pending."""
    return open_runtime("cpu")


def calls(run: Callable[[], object]) -> int:
    """Python functions and functions in C that `run` calls, once it has run a few times; the fewest of some runs."""
    made, counts = 0, []

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    for _ in range(3):
        run()
    with no_collector():
        for _ in range(8):
            made = 0
            sys.setprofile(note)
            try:
                run()
            finally:
                sys.setprofile(None)
            counts.append(made)
    return min(counts)


def _turn_over(rt: Runtime) -> Callable[[], object]:
    """Requests arrive with all they have, and leave."""
    slots = SlotPool(rt, 64)
    pages = PagePool(rt, slots, 512, 16, max_tokens_per_request=128)
    lengths = np.full(32, 100)
    return lambda: pages.release_requests(pages.take_requests(lengths), after=rt.record())


def _one_slot(rt: Runtime) -> Callable[[], object]:
    pool = SlotPool(rt, 64)
    return lambda: pool.free(pool.take(1))


def _one_extension(rt: Runtime) -> Callable[[], object]:
    slots = SlotPool(rt, 1)
    pages, slot = PagePool(rt, slots, 64, 16, max_tokens_per_request=1_024), slots.take(1)
    return lambda: pages.extend(slot, pages.committed_lengths[1] + 1)


def _joined(rt: Runtime) -> Callable[[], object]:
    pool = SlotPool(rt, 256)
    parts = [pool.take(1) for _ in range(256)]
    return lambda: Slots.cat(parts)


def _prefill(rt: Runtime) -> Callable[[], object]:
    return Prefill(rt, [[1] * 10] * 64).step


def _churn(rt: Runtime, n: int) -> Callable[[], object]:
    return Steady(rt, n, max(1, n // 8)).step


def test_calls_of_a_step_with_churn(rt: Runtime) -> None:
    """An eighth of the requests leave and as many join: nearly as many calls for 256 as for one."""
    with checks("cheap"):
        few, many = calls(_churn(rt, 1)), calls(_churn(rt, 256))
    assert few <= 640
    assert many <= 670


@pytest.mark.parametrize(
    ("make", "most"),
    [(_one_slot, 47), (_one_extension, 65), (_joined, 25), (_turn_over, 175), (_prefill, 1_350)],
)
def test_calls_of_single_operations(rt: Runtime, make: Callable[[Runtime], Callable[[], object]], most: int) -> None:
    """One slot taken and freed, one request grown by a token, 256 handles joined, 32 arrivals, 64 prompts."""
    with checks("cheap"):
        assert calls(make(rt)) <= most
