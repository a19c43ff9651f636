"""Copies to the host against other copies, and against operations of the device."""

import torch

from batchstate.testing.race.report import RaceKind
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import two_streams, vector
from tests.race_cases.surface import CaseRuntime


@pair(
    RaceKind.HOST_MEMORY_REUSED,
    first="left: copy to host",
    second="right: copy to host",
    rows="all 8 elements",
    racy="both land in the same memory, in either order",
    safe="the second stream waits for the first copy",
)
def landing_used_by_two_streams(rt: CaseRuntime, racy: bool) -> Values:
    """Two streams bring numbers to one pinned buffer."""
    left, right = two_streams(rt)
    numbers, others, landing = vector(rt), vector(rt), rt.pinned((8,), torch.int64)
    with rt.use(left):
        landing.copy_(numbers, non_blocking=True)
        landed = rt.record()
    with rt.use(right):
        if not racy:
            rt.wait(landed)
        landing.copy_(others * 2, non_blocking=True)
        landed = rt.record()
    rt.synchronize()
    return [landing.clone()]


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: copy to host",
    second="right: add_",
    rows="all 8 elements",
    racy="the copy may bring the numbers of the next step",
    safe="the writer waits for the copy",
)
def source_overwritten_before_its_copy(rt: CaseRuntime, racy: bool) -> Values:
    """Numbers are copied to the host by one stream, and raised by another."""
    left, right = two_streams(rt)
    numbers, landing = vector(rt), rt.pinned((8,), torch.int64)
    with rt.use(left):
        landing.copy_(numbers, non_blocking=True)
        landed = rt.record()
    with rt.use(right):
        if not racy:
            rt.wait(landed)
        numbers.add_(100)
    landed.wait()
    return [landing.clone()]


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: add_",
    second="right: copy to host",
    rows="all 8 elements",
    racy="the copy may bring the numbers from before",
    safe="the copying stream waits for the writer",
)
def copied_on_another_stream(rt: CaseRuntime, racy: bool) -> Values:
    """A stream of its own brings results to the host."""
    left, right = two_streams(rt)
    numbers, landing = vector(rt), rt.pinned((8,), torch.int64)
    with rt.use(left):
        numbers.add_(100)
        raised = rt.record()
    with rt.use(right):
        if not racy:
            rt.wait(raised)
        landing.copy_(numbers, non_blocking=True)
        landed = rt.record()
    landed.wait()
    return [landing.clone()]


@pair(
    RaceKind.HOST_MEMORY_REUSED,
    first="left: copy to host",
    second="right: copy to device",
    rows="all 8 elements",
    racy="the second copy may read before the first one wrote",
    safe="the second stream waits for the first",
)
def relay_through_host_memory(rt: CaseRuntime, racy: bool) -> Values:
    """Numbers go to pinned memory and back to the device, and the host touches none of them."""
    left, right = two_streams(rt)
    numbers, target, between = vector(rt), vector(rt), rt.pinned((8,), torch.int64)
    with rt.use(left):
        between.copy_(numbers * 2, non_blocking=True)
        landed = rt.record()
    with rt.use(right):
        if not racy:
            rt.wait(landed)
        target.copy_(between, non_blocking=True)
    return [target]


@pair(
    RaceKind.HOST_MEMORY_REUSED,
    first="left: copy to device",
    second="right: copy to host",
    rows="all 8 elements",
    racy="the memory may take the result before it was read",
    safe="the second stream waits for the first",
)
def one_buffer_both_ways(rt: CaseRuntime, racy: bool) -> Values:
    """A pinned buffer is the source of one copy and the target of the next."""
    left, right = two_streams(rt)
    numbers, target, between = vector(rt), vector(rt), rt.pinned((8,), torch.int64)
    between.fill_(7)
    with rt.use(left):
        target.copy_(between, non_blocking=True)
        copied = rt.record()
    with rt.use(right):
        if not racy:
            rt.wait(copied)
        between.copy_(numbers, non_blocking=True)
    rt.synchronize()
    return [target, between.clone()]
