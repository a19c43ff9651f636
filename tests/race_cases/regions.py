"""Parts of one tensor: rows, columns and elements."""

import torch

from batchstate.races.report import RaceKind
from batchstate.runtime import Stream
from tests.race_cases.plain import CaseRuntime
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import given, index, read_and_written, table, vector


@pair(RaceKind.WRITE_AFTER_READ, "left: index_select", "right: index_put_", "row 3")
def rows_by_index(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Rows of one table that two streams name by an index.

    Racy: row 3 is in both.
    Safe: no row is in both.
    """
    numbers = table(rt)
    with rt.use(left):
        copy = numbers.index_select(0, index(rt, 1, 3))
    with rt.use(right):
        numbers[index(rt, 5, 3 if racy else 4)] = given(rt, [[9, 9, 9, 9], [8, 8, 8, 8]])
    return [copy, numbers]


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "row 3")
def rows_by_slice(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two slices of one table.

    Racy: the slices share row 3.
    Safe: one slice begins where the other ends.
    """
    numbers = table(rt)
    return read_and_written(rt, left, right, numbers[:4], numbers[3 if racy else 4 :])


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "rows 2, 4, 6")
def every_other_row(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Slices with a step.

    Racy: every other row, and every other row from the third on.
    Safe: the even rows and the odd ones.
    """
    numbers = table(rt)
    return read_and_written(rt, left, right, numbers[::2], numbers[2 if racy else 1 :: 2])


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: fill_", "parts of rows 0-7")
def columns(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Columns of one table: in memory they lie like the teeth of two combs.

    Racy: the second column is in both.
    Safe: the first half of each row, and the second half.
    """
    numbers = table(rt)
    return read_and_written(rt, left, right, numbers[:, :2], numbers[:, 1 if racy else 2 :])


@pair(RaceKind.READ_AFTER_WRITE, "left: fill_", "right: clone", "row 2")
def slice_against_whole(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """One row is written, and the table is read.

    Racy: the whole begins before the slice, and contains it.
    Safe: everything but that row is read.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers[2].fill_(7)
    with rt.use(right):
        if racy:
            return [numbers.clone()]
        return [torch.cat([numbers[:2], numbers[3:]])]


@pair(RaceKind.WRITE_AFTER_WRITE, "left: fill_", "right: fill_", "element 4")
def adjacent_elements(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Elements of one vector, written one by one; each is a slice, as `lengths[4] = 7` would wait for the device.

    Racy: the same element.
    Safe: neighbours, which share no byte.
    """
    lengths = vector(rt, dtype=torch.int32)
    with rt.use(left):
        lengths[4:5] = 7
    with rt.use(right):
        at = 4 if racy else 5
        lengths[at : at + 1] = 8
    return [lengths]


@pair(RaceKind.WRITE_AFTER_READ, "left: clone", "right: copy_", "row 1")
def rows_swapped_through_views(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """One stream swaps two rows of a table through views, another reads a row.

    Racy: the swapped rows and the row that is read share one.
    Safe: they share none.
    """
    numbers = table(rt)
    with rt.use(left):
        copy = numbers[1 if racy else 3].clone()
    with rt.use(right):
        first, second = numbers[0], numbers[1]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    return [copy]


@pair(RaceKind.WRITE_AFTER_WRITE, "left: fill_", "right: fill_", "row 2")
def nothing_at_all(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A tensor without elements touches nothing.

    Racy: one row.
    Safe: no row at all, at the same place.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers[2:3].fill_(7)
    with rt.use(right):
        numbers[2 : 3 if racy else 2].fill_(8)
        numbers[index(rt)] = 9
    return [numbers]
