"""Copies to the host against other copies, and against operations of the device."""

import torch

from batchstate.races.report import RaceKind
from batchstate.runtime import Stream
from tests.race_cases.plain import CaseRuntime
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import fence_behind, use, vector


@pair(RaceKind.HOST_MEMORY_REUSED, "left: copy to host", "right: copy to host", "all 8 elements")
def landing_used_by_two_streams(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two streams bring numbers to one pinned buffer.

    Racy: both land in the same memory, in either order.
    Safe: the second stream waits for the first copy.
    """
    numbers, others, landing = vector(rt), vector(rt), rt.pinned((8,), torch.int64)
    landed = fence_behind(rt, left, lambda: landing.copy_(numbers, non_blocking=True))
    with use(rt, right, behind=None if racy else landed):
        landing.copy_(others * 2, non_blocking=True)
        landed = rt.record()
    rt.synchronize()
    return [landing.clone()]


@pair(RaceKind.WRITE_AFTER_READ, "left: copy to host", "right: add_", "all 8 elements")
def source_overwritten_before_its_copy(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Numbers are copied to the host by one stream, and raised by another.

    Racy: the copy may bring the numbers of the next step.
    Safe: the writer waits for the copy.
    """
    numbers, landing = vector(rt), rt.pinned((8,), torch.int64)
    landed = fence_behind(rt, left, lambda: landing.copy_(numbers, non_blocking=True))
    with use(rt, right, behind=None if racy else landed):
        numbers.add_(100)
    landed.wait()
    return [landing.clone()]


@pair(RaceKind.READ_AFTER_WRITE, "left: add_", "right: copy to host", "all 8 elements")
def copied_on_another_stream(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A stream of its own brings results to the host.

    Racy: the copy may bring the numbers from before.
    Safe: the copying stream waits for the writer.
    """
    numbers, landing = vector(rt), rt.pinned((8,), torch.int64)
    raised = fence_behind(rt, left, lambda: numbers.add_(100))
    with use(rt, right, behind=None if racy else raised):
        landing.copy_(numbers, non_blocking=True)
        landed = rt.record()
    landed.wait()
    return [landing.clone()]


@pair(RaceKind.HOST_MEMORY_REUSED, "left: copy to host", "right: copy to device", "all 8 elements")
def relay_through_host_memory(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Numbers go to pinned memory and back to the device, and the host touches none of them.

    Racy: the second copy may read before the first one wrote.
    Safe: the second stream waits for the first.
    """
    numbers, target, between = vector(rt), vector(rt), rt.pinned((8,), torch.int64)
    landed = fence_behind(rt, left, lambda: between.copy_(numbers * 2, non_blocking=True))
    with use(rt, right, behind=None if racy else landed):
        target.copy_(between, non_blocking=True)
    return [target]


@pair(RaceKind.HOST_MEMORY_REUSED, "left: copy to device", "right: copy to host", "all 8 elements")
def one_buffer_both_ways(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A pinned buffer is the source of one copy and the target of the next.

    Racy: the memory may take the result before it was read.
    Safe: the second stream waits for the first.
    """
    numbers, target, between = vector(rt), vector(rt), rt.pinned((8,), torch.int64)
    between.fill_(7)
    copied = fence_behind(rt, left, lambda: target.copy_(between, non_blocking=True))
    with use(rt, right, behind=None if racy else copied):
        between.copy_(numbers, non_blocking=True)
    rt.synchronize()
    return [target, between.clone()]
