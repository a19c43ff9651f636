"""Memory that is freed while another stream may still use it, and what keeps it."""

import torch

from batchstate.races.report import RaceKind
from batchstate.runtime import Fence, Stream
from tests.race_cases.plain import CaseRuntime
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import index, record_stream, table


def _made_on(rt: CaseRuntime, stream: Stream) -> tuple[torch.Tensor, Fence]:
    """Memory int64[8, 4] that a stream allocates and fills, and a fence behind that."""
    with rt.use(stream):
        return rt.device_empty((8, 4), torch.int64).fill_(7), rt.record()


def _next_owner(rt: CaseRuntime, stream: Stream) -> torch.Tensor:
    """Memory of the same size, which a caching allocator takes from what was freed on this stream, and writes."""
    with rt.use(stream):
        return rt.device_empty((8, 4), torch.int64).fill_(-1)


@pair(RaceKind.FREED_IN_USE, "right: clone", "left: empty", "rows 2-3")
def freed_while_a_view_is_read(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A tensor made on one stream is dropped while another stream reads rows of it, and memory is allocated.

    Racy: an order of execution is all there is, and it does not keep memory.
    Safe: the tensor is acquired, which keeps it for the stream that reads.
    """
    numbers, made = _made_on(rt, left)
    with rt.use(right):
        rt.wait(made)
        if not racy:
            rt.use_on_current_stream(numbers, left, made)
        copy = numbers[2:4].clone()
    del numbers
    other = _next_owner(rt, left)
    return [copy, other]


@pair(RaceKind.FREED_IN_USE, "right: clone", "left: empty", "all 8 rows")
def kept_for_a_stream(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """`record_stream` keeps memory for one stream.

    Racy: the allocator was told of another stream than the one that reads.
    Safe: the allocator was told of the stream that reads.
    """
    middle = rt.stream("middle")
    numbers, made = _made_on(rt, left)
    with rt.use(right):
        rt.wait(made)
        record_stream(rt, numbers, middle if racy else right)
        copy = numbers.clone()
    del numbers
    other = _next_owner(rt, left)
    return [copy, other]


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "all 8 rows")
def keeping_is_not_waiting(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """`record_stream` is taken for an order of execution.

    Racy: memory is kept, and nothing is ordered.
    Safe: acquired: it is kept, and the stream waits.
    """
    numbers, made = _made_on(rt, left)
    with rt.use(right):
        if racy:
            record_stream(rt, numbers, right)
        else:
            rt.use_on_current_stream(numbers, left, made)
        return [numbers.clone()]


@pair(RaceKind.FREED_IN_USE, "right: clone", "left: empty", "all 8 rows")
def freed_and_waited_for(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A tensor is dropped while another stream reads it, and its stream then allocates.

    Racy: the stream that owns the memory does not wait for the one that reads.
    Safe: it waits for the reader before it allocates.
    """
    numbers, made = _made_on(rt, left)
    with rt.use(right):
        rt.wait(made)
        copy = numbers.clone()
        read = rt.record()
    del numbers
    if not racy:
        rt.wait(read, stream=left)
    other = _next_owner(rt, left)
    return [copy, other]


@pair(RaceKind.FREED_IN_USE, "right: clone", "left: empty", "all 8 rows")
def freed_behind_a_wait_of_the_host(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """The host waits before it drops a tensor that another stream reads.

    Racy: the host waits for a fence from before the read.
    Safe: the host waits for a fence behind it.
    """
    numbers, made = _made_on(rt, left)
    with rt.use(right):
        rt.wait(made)
        fence = rt.record()
        copy = numbers.clone()
        if not racy:
            fence = rt.record()
    fence.wait()
    del numbers
    other = _next_owner(rt, left)
    return [copy, other]


@pair(RaceKind.FREED_IN_USE, "right: clone", "left: empty", "row 0")
def kept_by_a_view(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A tensor is dropped while another stream reads it, and a view of it lives on.

    Racy: the last view goes too.
    Safe: a view of another row keeps all of it.
    """
    numbers, made = _made_on(rt, left)
    view = numbers[5]
    with rt.use(right):
        rt.wait(made)
        copy = numbers[0].clone()
    del numbers
    kept = [] if racy else [view]
    del view
    other = _next_owner(rt, left)
    return [copy, other, *kept]


@pair(RaceKind.FREED_IN_USE, "right: clone", "left: empty", "all 8 rows")
def freed_memory_is_of_one_stream(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A tensor is dropped while another stream reads it, and memory is allocated.

    Racy: the next allocation is of the stream that gets the memory back.
    Safe: the next allocation is of another stream, which has memory of its own.
    """
    middle = rt.stream("middle")
    numbers, made = _made_on(rt, left)
    with rt.use(right):
        rt.wait(made)
        copy = numbers.clone()
    del numbers
    other = _next_owner(rt, left if racy else middle)
    return [copy, other]


@pair(RaceKind.FREED_IN_USE, "right: copy to host", "left: empty", "all 8 rows")
def source_freed_before_its_copy(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Results are brought to the host by a stream of its own, and the tensor is dropped at once.

    Racy: nothing holds the source until the copy has run.
    Safe: the source is held until the host has waited for the copy.
    """
    landing = rt.pinned((8, 4), torch.int64)
    numbers, made = _made_on(rt, left)
    with rt.use(right):
        rt.wait(made)
        landing.copy_(numbers, non_blocking=True)
        landed = rt.record()
    if not racy:
        landed.wait()
    del numbers
    other = _next_owner(rt, left)
    landed.wait()
    return [landing.clone(), other]


@pair(RaceKind.FREED_IN_USE, "forward: index_select", "schedule: add", "rows 1-2")
def name_bound_to_the_next_batch(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """An engine builds the next batch under the same name while a forward reads the one before.

    Racy: the old batch goes when the name is bound to the new one, and the new one is made of its memory.
    Safe: the old batch is held in a ring until its forward is over.
    """
    schedule, forward = rt.stream("schedule"), rt.stream("forward")
    numbers = table(rt)
    held: list[torch.Tensor] = []
    taken = []
    with rt.use(schedule):
        batch = numbers + 0
    for step in range(2):
        rt.wait(rt.record(schedule), stream=forward)
        with rt.use(forward):
            taken.append(batch.index_select(0, index(rt, 1, 2)))
        if not racy:
            held.append(batch)
        del batch
        with rt.use(schedule):
            batch = numbers + 100 * (step + 1)
    return [*taken, batch, *held]


@pair(RaceKind.FREED_IN_USE, "right: clone", "left: mul", "all 8 rows")
def temporary_of_an_expression(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """What an expression makes on the way is freed at once.

    Racy: a temporary result of an expression ends with the statement.
    Safe: the temporary is made on the stream that uses it.
    """
    numbers = table(rt)
    with rt.use(left if racy else right):
        raised = numbers + 1
        made = rt.record()
    with rt.use(right):
        rt.wait(made)
        copy = raised.clone()
    del raised
    with rt.use(left):
        other = numbers * 2
    return [copy, other]
