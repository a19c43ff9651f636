"""Operations with several outputs, with outputs that are given, on many tensors at once, and what they make."""

import torch

from batchstate.testing.race.report import RaceKind
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import given, table, two_streams, vector
from tests.race_cases.surface import CaseRuntime


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: max",
    second="right: clone",
    rows="all 8 elements",
    racy="the places are a result as much as the numbers, and nothing waits for them",
    safe="the reader waits for the operation",
)
def several_outputs(rt: CaseRuntime, racy: bool) -> Values:
    """`max` gives numbers and places; another stream reads the places."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        places = numbers.max(1).indices
        made = rt.record()
    with rt.use(right):
        if not racy:
            rt.wait(made)
        return [places.clone(), places]


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: clone",
    second="right: add",
    rows="rows 0-3",
    racy="the upper half is given to be written, and read",
    safe="the lower half is given",
)
def output_given(rt: CaseRuntime, racy: bool) -> Values:
    """`out=` writes into memory that is there."""
    left, right = two_streams(rt)
    numbers, others = table(rt), table(rt, 4)
    with rt.use(left):
        copy = numbers[:4].clone()
    with rt.use(right):
        torch.add(others, 1, out=numbers[:4] if racy else numbers[4:])
    return [copy, numbers]


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: clone",
    second="right: max",
    rows="all 8 elements",
    racy="the second of two outputs is memory that is read",
    safe="both are memory of their own",
)
def outputs_given(rt: CaseRuntime, racy: bool) -> Values:
    """`out=` with two tensors."""
    left, right = two_streams(rt)
    numbers, values, places, other = table(rt), vector(rt), vector(rt), vector(rt)
    with rt.use(left):
        copy = places.clone()
    with rt.use(right):
        torch.max(numbers, 1, out=(values, places if racy else other))
    return [copy, values]


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: clone",
    second="right: _foreach_add_",
    rows="all 8 elements",
    racy="one of the tensors is read",
    safe="none of them is read",
)
def many_tensors_at_once(rt: CaseRuntime, racy: bool) -> Values:
    """`torch._foreach_add_` raises several tensors with one kernel."""
    left, right = two_streams(rt)
    columns = [vector(rt) for _ in range(4)]
    with rt.use(left):
        copy = columns[2].clone()
    with rt.use(right):
        torch._foreach_add_(columns[1:] if racy else columns[:2], 1)
    return [copy]


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: _foreach_add",
    second="right: clone",
    rows="all 8 elements",
    racy="one of its results is read, and nothing waits",
    safe="the reader waits",
)
def many_results_at_once(rt: CaseRuntime, racy: bool) -> Values:
    """`torch._foreach_add` makes several tensors."""
    left, right = two_streams(rt)
    columns = [vector(rt) for _ in range(3)]
    with rt.use(left):
        raised = torch._foreach_add(columns, 1)
        made = rt.record()
    with rt.use(right):
        if not racy:
            rt.wait(made)
        return [raised[1].clone(), *raised]


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: copy_",
    second="right: copy_",
    rows="rows 2-3",
    racy="the second copy reads rows that the first one writes",
    safe="the second copy reads other rows",
)
def copies_between_device_tensors(rt: CaseRuntime, racy: bool) -> Values:
    """Rows go from one table to a second, and from there to a third."""
    left, right = two_streams(rt)
    numbers, second, third = table(rt), table(rt), table(rt)
    with rt.use(left):
        second[:4].copy_(numbers[4:])
    with rt.use(right):
        third[:2].copy_(second[2:4] if racy else second[4:6])
    return [third]


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: zeros",
    second="right: add",
    rows="all 8 rows",
    racy="what is made is also written, and nothing waits for it",
    safe="the reader waits",
)
def made_by_a_factory(rt: CaseRuntime, racy: bool) -> Values:
    """`torch.zeros` makes a tensor on one stream, another uses it."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        zeros = torch.zeros((8, 4), dtype=torch.int64, device=rt.device)
        made = rt.record()
    with rt.use(right):
        if not racy:
            rt.wait(made)
        return [numbers + zeros, zeros]


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: add",
    second="right: mul",
    rows="all 8 rows",
    racy="the result is used at once",
    safe="the reader waits",
)
def result_of_an_operation(rt: CaseRuntime, racy: bool) -> Values:
    """An operation makes a tensor on one stream, another uses it."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        raised = numbers + 1
        made = rt.record()
    with rt.use(right):
        if not racy:
            rt.wait(made)
        return [raised * 2, raised]


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: zero_",
    second="right: mm",
    rows="all 4 rows",
    racy="the product is made of what may be half cleared",
    safe="the product waits",
)
def matrix_product(rt: CaseRuntime, racy: bool) -> Values:
    """A matrix is cleared by one stream and multiplied by another."""
    left, right = two_streams(rt)
    weights = table(rt, 4, 4, torch.float32)
    with rt.use(left):
        weights.zero_()
        cleared = rt.record()
    with rt.use(right):
        if not racy:
            rt.wait(cleared)
        return [weights @ weights]


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: where",
    second="right: fill_",
    rows="all 8 elements",
    racy="the tensor that no element was taken from was read all the same",
    safe="a tensor that the choice is not made from",
)
def where_reads_both(rt: CaseRuntime, racy: bool) -> Values:
    """`torch.where` chooses between two tensors."""
    left, right = two_streams(rt)
    first, second, other = vector(rt), vector(rt), vector(rt)
    with rt.use(left):
        torch.where(given(rt, [True] * 8), first, second)
    with rt.use(right):
        (second if racy else other).fill_(9)
    return None


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="forward: gather",
    second="schedule: masked_fill_",
    rows="elements 3-4",
    racy="the relay is cleared for requests whose token a forward still takes",
    safe="the relay is cleared for other requests",
)
def tokens_relayed_between_forwards(rt: CaseRuntime, racy: bool) -> Values:
    """A forward takes the tokens of its requests from a relay, which the schedule clears for those that left."""
    schedule, forward = rt.stream("schedule"), rt.stream("forward")
    relay = vector(rt)
    with rt.use(forward):
        tokens = relay.gather(0, given(rt, [3, 4, 5]))
    with rt.use(schedule):
        left = (1, 3, 4) if racy else (1, 2, 6)
        relay.masked_fill_(given(rt, [slot in left for slot in range(8)]), -1)
    return [tokens]
