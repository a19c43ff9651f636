"""Views that look at the same bytes in another way, and what torch shows of them."""

import torch

from batchstate.races.report import RaceKind
from batchstate.runtime import Stream
from tests.race_cases.plain import CaseRuntime
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import read_and_written, result_and_fence, table, use, vector


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "parts of element 2")
def views_of_another_dtype(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A vector of 64-bit numbers, seen as 32-bit numbers by the writer.

    Racy: half of the number that is read.
    Safe: half of its neighbour.
    """
    numbers = vector(rt)
    return read_and_written(rt, left, right, numbers[:3], numbers.view(torch.int32)[5 if racy else 6])


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "parts of rows 0-7")
def transposed_views(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A table, and the same table turned.

    Racy: row 1 of the transposed table is column 1.
    Safe: row 1 of the transposed table has nothing of column 2.
    """
    numbers = table(rt)
    return read_and_written(rt, left, right, numbers.t()[1], numbers[:, 1 if racy else 2])


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "element 2")
def expanded_views(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """One number of a vector, expanded to many.

    Racy: the one number that is repeated is written.
    Safe: its neighbour is written.
    """
    numbers = vector(rt)
    return read_and_written(rt, left, right, numbers[2:3].expand(5), numbers[2 if racy else 3])


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "parts of row 2")
def diagonal(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """The diagonal of a square table.

    Racy: an element on the diagonal.
    Safe: an element beside it.
    """
    numbers = table(rt, 4, 4)
    return read_and_written(rt, left, right, numbers.diagonal(), numbers[2, 2 if racy else 3])


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "elements 2-3")
def overlapping_windows(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Windows that slide over a vector, which share elements with each other.

    Racy: windows of three overlap, and the second one is written.
    Safe: what lies behind the last window is written.
    """
    numbers = vector(rt)
    windows = numbers[:6].unfold(0, 3, 1)  # int64[4, 3]
    return read_and_written(rt, left, right, windows[:2], numbers[2:6] if racy else numbers[4:])


@pair(RaceKind.WRITE_AFTER_READ, "right: clone", "left: fill_", "all 8 rows")
def reshape_views_or_copies(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A flat form of a table is made on one stream, read on another, and the table overwritten.

    Racy: `reshape` of a table is a view of it.
    Safe: `reshape` of the turned table has to copy it, in time.
    """
    numbers = table(rt)
    flat, made = result_and_fence(rt, left, lambda: (numbers if racy else numbers.t()).reshape(-1))
    with rt.use(right):
        rt.wait(made)
        copy = flat.clone()
    with rt.use(left):
        numbers.fill_(7)
    return [copy] if racy else [copy, flat]


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "row 2")
def unbound_and_split_views(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A table comes apart into rows on one stream, and into pairs of rows on the other.

    Racy: the same row.
    Safe: another row.
    """
    numbers = table(rt)
    return read_and_written(rt, left, right, numbers.unbind(0)[2], torch.split(numbers, 2)[1][0 if racy else 1])


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "all 8 rows")
def detached_aliases(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """One stream reads a detached tensor, another writes through `.data`.

    Racy: `.data` and `.detach()` are other names of the same memory.
    Safe: a clone is memory of its own.
    """
    numbers = table(rt)
    other = numbers if racy else numbers.clone()
    rt.synchronize()
    return read_and_written(rt, left, right, numbers.detach(), other.data)


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "all 8 rows")
def inference_mode(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Everything happens in inference mode, where torch shows a tool less: here a `reshape` that has to copy.

    Racy: a tensor of inference mode is memory like any other.
    Safe: the writer waits, in inference mode too.
    """
    with torch.inference_mode():
        numbers = table(rt)
        copy, read = result_and_fence(rt, left, lambda: numbers.t().reshape(-1))
        with use(rt, right, behind=None if racy else read):
            numbers.view(4, 8).fill_(7)
    return [copy]


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "all 8 rows")
def no_grad(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A parameter of a model is overwritten, as torch allows without gradients only, while a forward reads it.

    Racy: nothing makes the writer wait.
    Safe: the writer waits.
    """
    weights = table(rt, dtype=torch.float32).requires_grad_()
    with torch.no_grad():
        copy, read = result_and_fence(rt, left, lambda: weights.clone())
        with use(rt, right, behind=None if racy else read):
            weights.fill_(7)
    return [copy]
