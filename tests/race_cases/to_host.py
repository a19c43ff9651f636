"""Pinned host memory that copies from the device write when they run, and that the host reads and writes."""

import torch

from batchstate.races.report import RaceKind
from batchstate.runtime import Stream
from tests.race_cases.plain import CaseRuntime, new_event
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import fence_behind, result_and_fence, vector


@pair(RaceKind.HOST_READS_EARLY, "left: copy to host", "host: clone", "all 8 elements")
def result_read_early(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Numbers come to pinned memory, and the host reads them.

    Racy: the host reads at once.
    Safe: the host waits for a fence behind the copy.
    """
    numbers, landing = vector(rt), rt.pinned((8,), torch.int64)
    landed = fence_behind(rt, left, lambda: landing.copy_(numbers, non_blocking=True))
    if not racy:
        landed.wait()
    return [landing.clone()]


@pair(RaceKind.HOST_READS_EARLY, "left: copy to host", "host: clone", "all 8 elements")
def to_cpu_without_blocking(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """`.to("cpu", non_blocking=True)` makes a tensor that the copy fills later.

    Racy: the result looks like a finished tensor, and is none.
    Safe: the host waits for the copy.
    """
    numbers = vector(rt)
    landing, landed = result_and_fence(rt, left, lambda: numbers.to("cpu", non_blocking=True))
    if not racy:
        landed.wait()
    return [landing.clone()]


@pair(RaceKind.HOST_READS_EARLY, "left: copy to host", "host: clone", "all 8 elements")
def host_asks_before_it_reads(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """An engine that polls: it asks the event behind a copy instead of waiting for it.

    Racy: the host asks once, and reads whatever the answer is.
    Safe: the host asks until the answer is yes.
    """
    numbers, landing = vector(rt), rt.pinned((8,), torch.int64)
    landed = new_event(rt)
    with rt.use(left):
        landing.copy_(numbers, non_blocking=True)
        landed.record()
    done = landed.query()
    while not racy and not done:
        done = landed.query()
    return [landing.clone()]


@pair(RaceKind.HOST_READS_EARLY, "left: copy to host", "host: clone", "all 8 elements")
def only_a_stream_waits_for_the_result(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A wait of a stream tells the host nothing.

    Racy: another stream waits for the copy, and the host reads.
    Safe: the host waits.
    """
    numbers, landing = vector(rt), rt.pinned((8,), torch.int64)
    landed = new_event(rt)
    with rt.use(left):
        landing.copy_(numbers, non_blocking=True)
        landed.record()
    if racy:
        landed.wait(right)
    else:
        landed.synchronize()
    return [landing.clone()]


@pair(RaceKind.HOST_READS_EARLY, "left: copy to host", "host: clone", "elements 4-7")
def halves_of_a_landing(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two copies bring a half each, and the host waits for the first.

    Racy: the half that the second copy brings is read behind the first.
    Safe: the half that the first copy brought is read.
    """
    numbers, landing = vector(rt), rt.pinned((8,), torch.int64)
    with rt.use(left):
        landing[:4].copy_(numbers[:4], non_blocking=True)
        first = rt.record()
        landing[4:].copy_(numbers[4:], non_blocking=True)
    first.wait()
    return [landing[4:].clone() if racy else landing[:4].clone()]


@pair(RaceKind.HOST_READS_EARLY, "left: copy to host", "host: clone", "all 8 elements")
def landing_used_again(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """One pinned buffer takes the results of two steps, and the host reads those of the first.

    Racy: the second copy into the same buffer is under way when the host reads what the first one brought.
    Safe: the host reads before the second copy starts.
    """
    numbers, landing = vector(rt), rt.pinned((8,), torch.int64)
    landed = fence_behind(rt, left, lambda: landing.copy_(numbers, non_blocking=True))
    read = []
    if not racy:
        landed.wait()
        read = [landing.clone()]
    with rt.use(left):
        numbers.add_(100)
        landing.copy_(numbers, non_blocking=True)
    if racy:
        landed.wait()
        read = [landing.clone()]
    return read


@pair(RaceKind.HOST_MEMORY_REUSED, "left: copy to host", "host: zero_", "all 8 elements")
def landing_cleared_by_the_host(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """The host clears the memory that a copy brings numbers to.

    Racy: the copy may land behind the clearing.
    Safe: the host waits for the copy.
    """
    numbers, landing = vector(rt), rt.pinned((8,), torch.int64)
    landed = fence_behind(rt, left, lambda: landing.copy_(numbers, non_blocking=True))
    if not racy:
        landed.wait()
    landing.zero_()
    return None


@pair(RaceKind.HOST_MEMORY_REUSED, "left: copy to host", "host: a write that torch did not see", "all 8 elements")
def landing_written_through_numpy(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """The host puts numbers of its own into the memory that a copy brings others to, where torch sees nothing.

    Racy: the copy may land on top of it.
    Safe: the host waits for the copy.
    """
    numbers, landing = vector(rt), rt.pinned((8,), torch.int64)
    array = landing.numpy()
    landed = fence_behind(rt, left, lambda: landing.copy_(numbers, non_blocking=True))
    if not racy:
        landed.wait()
    array[3:5] = -1
    landed.wait()
    return [array.copy()]


@pair(RaceKind.HOST_READS_EARLY, "left: copy to host", "host: clone", "all 8 elements")
def brought_by_the_library(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Results are read as soon as they are asked for.

    Racy: brought by hand, and read without waiting.
    Safe: brought by `download`, which waits for its own copy.
    """
    numbers = vector(rt)
    if not racy:
        with rt.use(left):
            pending = rt.download([numbers])
        return pending.resolve()
    landing = rt.pinned((8,), torch.int64)
    with rt.use(left):
        landing.copy_(numbers, non_blocking=True)
    return [landing.clone()]
