"""Pinned host memory that copies to the device read when they run."""

import numpy as np
import torch

from batchstate.races.report import RaceKind
from batchstate.runtime import Stream
from tests.race_cases.plain import CaseRuntime, new_event
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import fence_behind, use, vector


@pair(RaceKind.STAGING_REFILLED, "left: copy to device", "host: a write that torch did not see", "all 8 elements")
def pinned_memory_refilled_through_numpy(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A pinned buffer is filled through a numpy array of the same memory, as engines do, where torch sees nothing.

    Racy: the next step's numbers are written while the copy may not have run.
    Safe: the host waits for the copy.
    """
    staged, numbers = rt.pinned((8,), torch.int64), vector(rt)
    array = staged.numpy()
    array[:] = 7
    copied = fence_behind(rt, left, lambda: numbers.copy_(staged, non_blocking=True))
    if not racy:
        copied.wait()
    array[:] = 8
    return [numbers]


@pair(RaceKind.STAGING_REFILLED, "left: copy to device", "host: fill_", "all 8 elements")
def pinned_memory_refilled_through_torch(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A pinned buffer is filled by operations of torch on the host.

    Racy: the buffer is filled again while the copy may not have run.
    Safe: the host waits for the copy.
    """
    staged, numbers = rt.pinned((8,), torch.int64), vector(rt)
    staged.fill_(7)
    copied = fence_behind(rt, left, lambda: numbers.copy_(staged, non_blocking=True))
    if not racy:
        copied.wait()
    staged.fill_(8)
    return [numbers]


@pair(RaceKind.STAGING_REFILLED, "left: copy to device", "host: fill_", "elements 2-3")
def slice_of_pinned_memory(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A slice of a pinned buffer is copied: its memory is the buffer's, but it does not begin where that does.

    Racy: a slice of the slice that is copied.
    Safe: a slice that is not copied.
    """
    staged, numbers = rt.pinned((8,), torch.int64), vector(rt, 4)
    staged.fill_(7)
    with rt.use(left):
        numbers.copy_(staged[1:5], non_blocking=True)
    staged[2 if racy else 5 : 4 if racy else 8].fill_(8)
    return [numbers]


@pair(RaceKind.STAGING_REFILLED, "left: copy to device", "host: a write that torch did not see", "elements 4-7")
def halves_of_pinned_memory(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A pinned buffer of two halves, used by turns.

    Racy: the half that was just copied is filled again.
    Safe: the other half is filled.
    """
    staged, numbers = rt.pinned((8,), torch.int64), vector(rt)
    array = staged.numpy()
    with rt.use(left):
        array[:4] = 7
        numbers[:4].copy_(staged[:4], non_blocking=True)
        first = rt.record()
        array[4:] = 8
        numbers[4:].copy_(staged[4:], non_blocking=True)
    first.wait()
    array[4 if racy else 0 : 8 if racy else 4] = 9
    return [numbers]


@pair(RaceKind.STAGING_REFILLED, "left: copy to device", "host: copy_", "all 4 elements")
def ring_of_pinned_buffers(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two pinned buffers by turns: as many as steps were meant to be in flight, and one too few.

    Racy: two buffers, and the third step fills the first one unasked.
    Safe: the third step waits for the first copy.
    """
    ring = [(rt.pinned((4,), torch.int64), new_event(rt)) for _ in range(2)]
    targets = [vector(rt, 4) for _ in range(3)]
    for step, target in enumerate(targets):
        staged, copied = ring[step % 2]
        if step == 2 and not racy:
            copied.synchronize()
        staged.copy_(torch.from_numpy(np.full(4, step)))
        with rt.use(left):
            target.copy_(staged, non_blocking=True)
            copied.record()
    return targets


@pair(RaceKind.STAGING_REFILLED, "left: copy to device", "host: fill_", "all 8 elements")
def only_a_stream_waits_for_the_copy(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A stream or the host waits for a copy before its source is filled again.

    Racy: a stream waits for the copy: that keeps the host from nothing.
    Safe: the host itself waits.
    """
    staged, numbers = rt.pinned((8,), torch.int64), vector(rt)
    staged.fill_(7)
    copied = new_event(rt)
    with rt.use(left):
        numbers.copy_(staged, non_blocking=True)
        copied.record()
    if racy:
        copied.wait(right)
    else:
        copied.synchronize()
    staged.fill_(8)
    return [numbers]


@pair(RaceKind.STAGING_REFILLED, "left: copy to device", "host: fill_", "all 8 elements")
def blocking_copy(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A copy of pinned memory, with and without `non_blocking`.

    Racy: with `non_blocking` the host gets on at once.
    Safe: without it the host waits for the stream.
    """
    staged, numbers = rt.pinned((8,), torch.int64), vector(rt)
    staged.fill_(7)
    with rt.use(left):
        numbers.copy_(staged, non_blocking=racy)
    staged.fill_(8)
    return [numbers]


@pair(RaceKind.STAGING_REFILLED, "left: copy to device", "host: fill_", "all 8 elements")
def memory_that_is_not_pinned(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """`non_blocking` is a promise that only pinned memory keeps.

    Racy: pinned memory is read when the copy runs.
    Safe: memory that is not pinned is read before the call returns.
    """
    pageable = torch.from_numpy(np.zeros(8, np.int64))
    staged, numbers = rt.pinned((8,), torch.int64) if racy else pageable, vector(rt)
    staged.fill_(7)
    with rt.use(left):
        numbers.copy_(staged, non_blocking=True)
    staged.fill_(8)
    return [numbers]


@pair(RaceKind.READ_AFTER_WRITE, "left: copy to device", "right: clone", "all 8 elements")
def what_a_copy_brings(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A copy to the device is a write like any other.

    Racy: another stream reads what the copy may not have brought yet.
    Safe: it waits for the copy.
    """
    staged, numbers = rt.pinned((8,), torch.int64), vector(rt)
    staged.fill_(7)
    copied = fence_behind(rt, left, lambda: numbers.copy_(staged, non_blocking=True))
    with use(rt, right, behind=None if racy else copied):
        return [numbers.clone()]


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: copy to device", "elements 4-5")
def copy_into_a_slice(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A copy to the device goes into a part of a vector that another stream reads a part of.

    Racy: two elements that are read.
    Safe: two elements that are not read.
    """
    staged, numbers = rt.pinned((2,), torch.int64), vector(rt)
    staged.fill_(9)
    with rt.use(left):
        copy = numbers[:6].clone()
    with rt.use(right):
        target = numbers[4:6] if racy else numbers[6:]
        target.copy_(staged, non_blocking=True)
    return [copy]


@pair(RaceKind.STAGING_REFILLED, "left: copy to device", "host: a write that torch did not see", "all 8 elements")
def staged_by_the_library(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """The same array is filled and brought to the device in three steps, and the host does not wait.

    Racy: staged by hand, in one pinned buffer.
    Safe: staged by `upload`, which takes memory that no copy reads.
    """
    staged = rt.pinned((8,), torch.int64)
    array = staged.numpy() if racy else np.zeros(8, np.int64)
    brought = []
    with rt.use(left):
        for step in range(3):
            array[:] = step
            if racy:
                brought.append(torch.empty(8, dtype=torch.int64, device=rt.device).copy_(staged, non_blocking=True))
            else:
                brought.append(rt.upload([array]).view(0))
    return brought
