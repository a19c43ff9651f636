"""Memory that is freed while another stream may still use it, and what keeps it."""

import torch

from batchstate.testing.race.report import RaceKind
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import index, record_stream, table, two_streams
from tests.race_cases.surface import CaseRuntime


def _next_owner(rt: CaseRuntime) -> torch.Tensor:
    """Memory of the same size, which a caching allocator takes from what was freed on this stream, and writes."""
    return rt.device_empty((8, 4), torch.int64).fill_(-1)


@pair(
    RaceKind.FREED_IN_USE,
    first="right: clone",
    second="left: empty",
    rows="rows 2-3",
    racy="an order of execution is all there is, and it does not keep memory",
    safe="the tensor is acquired, which keeps it for the stream that reads",
)
def freed_while_a_view_is_read(rt: CaseRuntime, racy: bool) -> Values:
    """A tensor made on one stream is dropped while another stream reads rows of it, and memory is allocated."""
    left, right = two_streams(rt)
    with rt.use(left):
        numbers = rt.device_empty((8, 4), torch.int64).fill_(7)
        made = rt.record()
    with rt.use(right):
        rt.wait(made)
        if not racy:
            rt.use_on_current_stream(numbers, left, made)
        copy = numbers[2:4].clone()
    del numbers
    with rt.use(left):
        other = _next_owner(rt)
    return [copy, other]


@pair(
    RaceKind.FREED_IN_USE,
    first="right: clone",
    second="left: empty",
    rows="all 8 rows",
    racy="the allocator was told of another stream than the one that reads",
    safe="the allocator was told of the stream that reads",
)
def kept_for_a_stream(rt: CaseRuntime, racy: bool) -> Values:
    """`record_stream` keeps memory for one stream."""
    left, right = two_streams(rt)
    middle = rt.stream("middle")
    with rt.use(left):
        numbers = rt.device_empty((8, 4), torch.int64).fill_(7)
        made = rt.record()
    with rt.use(right):
        rt.wait(made)
        record_stream(rt, numbers, middle if racy else right)
        copy = numbers.clone()
    del numbers
    with rt.use(left):
        other = _next_owner(rt)
    return [copy, other]


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: fill_",
    second="right: clone",
    rows="all 8 rows",
    racy="memory is kept, and nothing is ordered",
    safe="acquired: it is kept, and the stream waits",
)
def keeping_is_not_waiting(rt: CaseRuntime, racy: bool) -> Values:
    """`record_stream` is taken for an order of execution."""
    left, right = two_streams(rt)
    with rt.use(left):
        numbers = rt.device_empty((8, 4), torch.int64).fill_(7)
        made = rt.record()
    with rt.use(right):
        if racy:
            record_stream(rt, numbers, right)
        else:
            rt.use_on_current_stream(numbers, left, made)
        return [numbers.clone()]


@pair(
    RaceKind.FREED_IN_USE,
    first="right: clone",
    second="left: empty",
    rows="all 8 rows",
    racy="the stream that owns the memory does not wait for the one that reads",
    safe="it waits for the reader before it allocates",
)
def freed_and_waited_for(rt: CaseRuntime, racy: bool) -> Values:
    """A tensor is dropped while another stream reads it, and its stream then allocates."""
    left, right = two_streams(rt)
    with rt.use(left):
        numbers = rt.device_empty((8, 4), torch.int64).fill_(7)
        made = rt.record()
    with rt.use(right):
        rt.wait(made)
        copy = numbers.clone()
        read = rt.record()
    del numbers
    with rt.use(left):
        if not racy:
            rt.wait(read)
        other = _next_owner(rt)
    return [copy, other]


@pair(
    RaceKind.FREED_IN_USE,
    first="right: clone",
    second="left: empty",
    rows="all 8 rows",
    racy="the host waits for a fence from before the read",
    safe="the host waits for a fence behind it",
)
def freed_behind_a_wait_of_the_host(rt: CaseRuntime, racy: bool) -> Values:
    """The host waits before it drops a tensor that another stream reads."""
    left, right = two_streams(rt)
    with rt.use(left):
        numbers = rt.device_empty((8, 4), torch.int64).fill_(7)
        made = rt.record()
    with rt.use(right):
        rt.wait(made)
        fence = rt.record()
        copy = numbers.clone()
        if not racy:
            fence = rt.record()
    fence.wait()
    del numbers
    with rt.use(left):
        other = _next_owner(rt)
    return [copy, other]


@pair(
    RaceKind.FREED_IN_USE,
    first="right: clone",
    second="left: empty",
    rows="row 0",
    racy="the last view goes too",
    safe="a view of another row keeps all of it",
)
def kept_by_a_view(rt: CaseRuntime, racy: bool) -> Values:
    """A tensor is dropped while another stream reads it, and a view of it lives on."""
    left, right = two_streams(rt)
    with rt.use(left):
        numbers = rt.device_empty((8, 4), torch.int64).fill_(7)
        made = rt.record()
    view = numbers[5]
    with rt.use(right):
        rt.wait(made)
        copy = numbers[0].clone()
    del numbers
    kept = [] if racy else [view]
    del view
    with rt.use(left):
        other = _next_owner(rt)
    return [copy, other, *kept]


@pair(
    RaceKind.FREED_IN_USE,
    first="right: clone",
    second="left: empty",
    rows="all 8 rows",
    racy="the next allocation is of the stream that gets the memory back",
    safe="the next allocation is of another stream, which has memory of its own",
)
def freed_memory_is_of_one_stream(rt: CaseRuntime, racy: bool) -> Values:
    """A tensor is dropped while another stream reads it, and somebody allocates."""
    left, right = two_streams(rt)
    middle = rt.stream("middle")
    with rt.use(left):
        numbers = rt.device_empty((8, 4), torch.int64).fill_(7)
        made = rt.record()
    with rt.use(right):
        rt.wait(made)
        copy = numbers.clone()
    del numbers
    with rt.use(left if racy else middle):
        other = _next_owner(rt)
    return [copy, other]


@pair(
    RaceKind.FREED_IN_USE,
    first="right: copy to host",
    second="left: empty",
    rows="all 8 rows",
    racy="nothing holds the source until the copy has run",
    safe="the source is held until the host has waited for the copy",
)
def source_freed_before_its_copy(rt: CaseRuntime, racy: bool) -> Values:
    """Results are brought to the host by a stream of its own, and the tensor is dropped at once."""
    left, right = two_streams(rt)
    landing = rt.pinned((8, 4), torch.int64)
    with rt.use(left):
        numbers = rt.device_empty((8, 4), torch.int64).fill_(7)
        made = rt.record()
    with rt.use(right):
        rt.wait(made)
        landing.copy_(numbers, non_blocking=True)
        landed = rt.record()
    if not racy:
        landed.wait()
    del numbers
    with rt.use(left):
        other = _next_owner(rt)
    landed.wait()
    return [landing.clone(), other]


@pair(
    RaceKind.FREED_IN_USE,
    first="forward: index_select",
    second="schedule: add",
    rows="rows 1-2",
    racy="the old batch goes when the name is bound to the new one, and the new one is made of its memory",
    safe="the old batch is held in a ring until its forward is over",
)
def name_bound_to_the_next_batch(rt: CaseRuntime, racy: bool) -> Values:
    """An engine builds the next batch under the same name while a forward reads the one before."""
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


@pair(
    RaceKind.FREED_IN_USE,
    first="right: clone",
    second="left: mul",
    rows="all 8 rows",
    racy="a temporary result of an expression ends with the statement",
    safe="the temporary is made on the stream that uses it",
)
def temporary_of_an_expression(rt: CaseRuntime, racy: bool) -> Values:
    """What an expression makes on the way is freed at once."""
    left, right = two_streams(rt)
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
