"""Operations with several outputs, with outputs that are given, on many tensors at once, and what they make."""

import torch

from batchstate.races.report import RaceKind
from batchstate.runtime import Stream
from tests.race_cases.plain import CaseRuntime
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import fence_behind, given, result_and_fence, table, use, vector


@pair(RaceKind.READ_AFTER_WRITE, "left: max", "right: clone", "all 8 elements")
def several_outputs(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """`max` gives numbers and places; another stream reads the places.

    Racy: the places are a result as much as the numbers, and nothing waits for them.
    Safe: the reader waits for the operation.
    """
    numbers = table(rt)
    places, made = result_and_fence(rt, left, lambda: numbers.max(1).indices)
    with use(rt, right, behind=None if racy else made):
        return [places.clone(), places]


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: add", "rows 0-3")
def output_given(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """`out=` writes into memory that is there.

    Racy: the upper half is given to be written, and read.
    Safe: the lower half is given.
    """
    numbers, others = table(rt), table(rt, 4)
    with rt.use(left):
        copy = numbers[:4].clone()
    with rt.use(right):
        torch.add(others, 1, out=numbers[:4] if racy else numbers[4:])
    return [copy, numbers]


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: max", "all 8 elements")
def outputs_given(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """`out=` with two tensors.

    Racy: the second of two outputs is memory that is read.
    Safe: both are memory of their own.
    """
    numbers, values, places, other = table(rt), vector(rt), vector(rt), vector(rt)
    with rt.use(left):
        copy = places.clone()
    with rt.use(right):
        torch.max(numbers, 1, out=(values, places if racy else other))
    return [copy, values]


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: _foreach_add_", "all 8 elements")
def many_tensors_at_once(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """`torch._foreach_add_` raises several tensors with one kernel.

    Racy: one of the tensors is read.
    Safe: none of them is read.
    """
    columns = [vector(rt) for _ in range(4)]
    with rt.use(left):
        copy = columns[2].clone()
    with rt.use(right):
        torch._foreach_add_(columns[1:] if racy else columns[:2], 1)
    return [copy]


@pair(RaceKind.READ_AFTER_WRITE, "left: _foreach_add", "right: clone", "all 8 elements")
def many_results_at_once(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """`torch._foreach_add` makes several tensors.

    Racy: one of its results is read, and nothing waits.
    Safe: the reader waits.
    """
    columns = [vector(rt) for _ in range(3)]
    raised, made = result_and_fence(rt, left, lambda: torch._foreach_add(columns, 1))
    with use(rt, right, behind=None if racy else made):
        return [raised[1].clone(), *raised]


@pair(RaceKind.READ_AFTER_WRITE, "left: copy_", "right: copy_", "rows 2-3")
def copies_between_device_tensors(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Rows go from one table to a second, and from there to a third.

    Racy: the second copy reads rows that the first one writes.
    Safe: the second copy reads other rows.
    """
    numbers, second, third = table(rt), table(rt), table(rt)
    with rt.use(left):
        second[:4].copy_(numbers[4:])
    with rt.use(right):
        third[:2].copy_(second[2:4] if racy else second[4:6])
    return [third]


@pair(RaceKind.READ_AFTER_WRITE, "left: zeros", "right: add", "all 8 rows")
def made_by_a_factory(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """`torch.zeros` makes a tensor on one stream, another uses it.

    Racy: what is made is also written, and nothing waits for it.
    Safe: the reader waits.
    """
    numbers = table(rt)
    zeros, made = result_and_fence(rt, left, lambda: torch.zeros((8, 4), dtype=torch.int64, device=rt.device))
    with use(rt, right, behind=None if racy else made):
        return [numbers + zeros, zeros]


@pair(RaceKind.READ_AFTER_WRITE, "left: add", "right: mul", "all 8 rows")
def result_of_an_operation(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """An operation makes a tensor on one stream, another uses it.

    Racy: the result is used at once.
    Safe: the reader waits.
    """
    numbers = table(rt)
    raised, made = result_and_fence(rt, left, lambda: numbers + 1)
    with use(rt, right, behind=None if racy else made):
        return [raised * 2, raised]


@pair(RaceKind.READ_AFTER_WRITE, "left: zero_", "right: mm", "all 4 rows")
def matrix_product(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A matrix is cleared by one stream and multiplied by another.

    Racy: the product is made of what may be half cleared.
    Safe: the product waits.
    """
    weights = table(rt, 4, 4, torch.float32)
    cleared = fence_behind(rt, left, lambda: weights.zero_())
    with use(rt, right, behind=None if racy else cleared):
        return [weights @ weights]


@pair(RaceKind.WRITE_AFTER_READ, "left: where", "right: fill_", "all 8 elements")
def where_reads_both(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """`torch.where` chooses between two tensors.

    Racy: the tensor that no element was taken from was read all the same.
    Safe: a tensor that the choice is not made from.
    """
    first, second, other = vector(rt), vector(rt), vector(rt)
    with rt.use(left):
        torch.where(given(rt, [True] * 8), first, second)
    with rt.use(right):
        (second if racy else other).fill_(9)
    return None


@pair(RaceKind.WRITE_AFTER_READ, "forward: gather", "schedule: masked_fill_", "elements 3-4")
def tokens_relayed_between_forwards(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A forward takes the tokens of its requests from a relay, which the schedule clears for those that left.

    Racy: the relay is cleared for requests whose token a forward still takes.
    Safe: the relay is cleared for other requests.
    """
    schedule, forward = rt.stream("schedule"), rt.stream("forward")
    relay = vector(rt)
    with rt.use(forward):
        tokens = relay.gather(0, given(rt, [3, 4, 5]))
    with rt.use(schedule):
        gone = (1, 3, 4) if racy else (1, 2, 6)
        relay.masked_fill_(given(rt, [slot in gone for slot in range(8)]), -1)
    return [tokens]
