"""Whole tensors: who waits for whom."""

import torch

from batchstate.races.report import RaceKind
from batchstate.runtime import Fence, Stream
from tests.race_cases.plain import CaseRuntime
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import fence_behind, given, index, result_and_fence, table, use, vector


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "all 8 rows")
def read_after_write(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """One stream writes what another reads.

    Racy: nothing makes the reader wait.
    Safe: the reader's stream waits for a fence behind the write.
    """
    numbers = table(rt)
    written = fence_behind(rt, left, lambda: numbers.fill_(7))
    with use(rt, right, behind=None if racy else written):
        return [numbers.clone()]


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "all 8 rows")
def write_after_read(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """One stream overwrites what another reads.

    Racy: nothing makes the writer wait.
    Safe: the writer's stream waits for a fence behind the read.
    """
    numbers = table(rt)
    copy, read = result_and_fence(rt, left, lambda: numbers.clone())
    with use(rt, right, behind=None if racy else read):
        numbers.fill_(7)
    return [copy, numbers]


@pair(RaceKind.WRITE_AFTER_WRITE, "left: fill_", "right: fill_", "all 8 rows")
def write_after_write(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two streams write the same memory.

    Racy: the last to run wins.
    Safe: the second waits for the first.
    """
    numbers = table(rt)
    written = fence_behind(rt, left, lambda: numbers.fill_(7))
    with use(rt, right, behind=None if racy else written):
        numbers.fill_(8)
    return [numbers]


@pair(RaceKind.WRITE_AFTER_WRITE, "left: fill_", "right: fill_", "all 8 rows")
def same_value_rewritten(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two streams write the same values to the same memory.

    Racy: no value shows it, and it is a race all the same: the next change of the program will show it.
    Safe: the second waits for the first.
    """
    numbers = table(rt)
    written = fence_behind(rt, left, lambda: numbers.fill_(0))
    with use(rt, right, behind=None if racy else written):
        numbers.fill_(0)
    return None


@pair(RaceKind.WRITE_AFTER_READ, "forward: clone", "schedule: add_", "all 8 elements")
def in_place_add_under_a_reader(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """The lengths of the requests, which every step reads and then raises in place.

    Racy: the lengths grow for the next step while a forward may still read those of this one.
    Safe: the schedule waits until the forward has read them.
    """
    schedule, forward = rt.stream("schedule"), rt.stream("forward")
    lengths = vector(rt)
    seen = []
    for step in range(2):
        read = fence_behind(rt, forward, lambda: seen.append(lengths.clone()))
        with rt.use(schedule):
            if not racy or step:
                rt.wait(read)
            lengths.add_(1)
            raised = rt.record()
        rt.wait(raised, stream=forward)
    return seen


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "all 8 rows")
def a_chain_of_waits(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Three streams, each of which waits for the one before.

    Racy: the one in the middle records its fence before it waits, so the chain breaks there.
    Safe: the one in the middle waits, and then records.
    """
    middle = rt.stream("middle")
    numbers = table(rt)
    written = fence_behind(rt, left, lambda: numbers.fill_(7))
    with rt.use(middle):
        passed_on = rt.record()
        rt.wait(written)
        if not racy:
            passed_on = rt.record()
    with rt.use(right):
        rt.wait(passed_on)
        return [numbers.clone()]


@pair(RaceKind.WRITE_AFTER_READ, "reader 2: clone", "right: fill_", "all 8 rows")
def many_readers(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Four streams read one table at once, which is no race, and a fifth then overwrites it.

    Racy: the writer waits for all of them but one.
    Safe: the writer waits for all of them.
    """
    numbers = table(rt)
    copies, fences = [], []
    for reader in [rt.stream(f"reader {number}") for number in range(4)]:
        with rt.use(reader):
            copies.append(numbers.clone())
            fences.append(rt.record())
    with rt.use(right):
        for number, fence in enumerate(fences):
            if not racy or number != 2:
                rt.wait(fence)
        numbers.fill_(7)
    return copies


@pair(RaceKind.WRITE_AFTER_READ, "right: clone", "left: fill_", "all 8 rows")
def to_and_fro(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A producer hands a buffer to a consumer, and fills it again.

    Racy: the reader waited for the writer, and the writer does not wait for the reader.
    Safe: each waits for the other.
    """
    buffer = table(rt)
    with rt.use(left):
        buffer.fill_(7)
        rt.wait(rt.record(), stream=right)
    copy, read = result_and_fence(rt, right, lambda: buffer.clone())
    with use(rt, left, behind=None if racy else read):
        buffer.fill_(8)
    return [copy, buffer]


@pair(RaceKind.WRITE_AFTER_READ, "right: clone", "left: fill_", "all 4 rows")
def two_buffers_by_turns(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A producer fills two buffers by turns, a consumer reads them.

    Racy: two buffers, and the third step writes the first one unasked.
    Safe: the third step waits until the first buffer was read.
    """
    buffers = [table(rt, 4), table(rt, 4)]
    seen: list[torch.Tensor] = []
    fences: list[Fence] = []
    for step in range(3):
        buffer = buffers[step % 2]
        with rt.use(left):
            if step == 2 and not racy:
                rt.wait(fences[0])
            buffer.fill_(step)
            rt.wait(rt.record(), stream=right)
        with rt.use(right):
            seen.append(buffer.clone())
            fences.append(rt.record())
    return seen


@pair(RaceKind.WRITE_AFTER_READ, "left: index_select", "right: index_copy_", "row 3")
def a_row_given_to_the_next_request(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A request ends, and its row of a table goes to another request.

    Racy: the request is over for the host, which gives its row to the next one; the forward still reads it.
    Safe: the row is written behind the forward that read it.
    """
    numbers = table(rt)
    pages, read = result_and_fence(rt, left, lambda: numbers.index_select(0, index(rt, 1, 3)))
    with use(rt, right, behind=None if racy else read):
        numbers.index_copy_(0, index(rt, 3), given(rt, [[9, 9, 9, 9]]))
    return [pages]
