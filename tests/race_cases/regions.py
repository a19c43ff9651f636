"""Parts of one tensor: rows, columns and elements."""

import torch

from batchstate.testing.race.report import RaceKind
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import given, index, read_and_written, table, two_streams, vector
from tests.race_cases.surface import CaseRuntime


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: index_select",
    second="right: index_put_",
    rows="row 3",
    racy="row 3 is in both",
    safe="no row is in both",
)
def rows_by_index(rt: CaseRuntime, racy: bool) -> Values:
    """Rows of one table that two streams name by an index."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        copy = numbers.index_select(0, index(rt, 1, 3))
    with rt.use(right):
        numbers[index(rt, 5, 3 if racy else 4)] = given(rt, [[9, 9, 9, 9], [8, 8, 8, 8]])
    return [copy, numbers]


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: clone",
    second="right: fill_",
    rows="row 3",
    racy="the slices share row 3",
    safe="one slice begins where the other ends",
)
def rows_by_slice(rt: CaseRuntime, racy: bool) -> Values:
    """Two slices of one table."""
    left, right = two_streams(rt)
    numbers = table(rt)
    return read_and_written(rt, left, right, numbers[:4], numbers[3 if racy else 4 :])


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: clone",
    second="right: fill_",
    rows="rows 2, 4, 6",
    racy="every other row, and every other row from the third on",
    safe="the even rows and the odd ones",
)
def every_other_row(rt: CaseRuntime, racy: bool) -> Values:
    """Slices with a step."""
    left, right = two_streams(rt)
    numbers = table(rt)
    return read_and_written(rt, left, right, numbers[::2], numbers[2 if racy else 1 :: 2])


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: clone",
    second="right: fill_",
    rows="parts of rows 0-7",
    racy="the second column is in both",
    safe="the first half of each row, and the second half",
)
def columns(rt: CaseRuntime, racy: bool) -> Values:
    """Columns of one table: in memory they lie like the teeth of two combs."""
    left, right = two_streams(rt)
    numbers = table(rt)
    return read_and_written(rt, left, right, numbers[:, :2], numbers[:, 1 if racy else 2 :])


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: fill_",
    second="right: clone",
    rows="row 2",
    racy="the whole begins before the slice, and contains it",
    safe="everything but that row is read",
)
def slice_against_whole(rt: CaseRuntime, racy: bool) -> Values:
    """One row is written, and the table is read."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        numbers[2].fill_(7)
    with rt.use(right):
        if racy:
            return [numbers.clone()]
        return [torch.cat([numbers[:2], numbers[3:]])]


@pair(
    RaceKind.WRITE_AFTER_WRITE,
    first="left: copy_",
    second="right: copy_",
    rows="element 4",
    racy="the same element",
    safe="neighbours, which share no byte",
)
def adjacent_elements(rt: CaseRuntime, racy: bool) -> Values:
    """Elements of one vector, written one by one."""
    left, right = two_streams(rt)
    lengths = vector(rt, dtype=torch.int32)
    with rt.use(left):
        lengths[4] = 7
    with rt.use(right):
        lengths[4 if racy else 5] = 8
    return [lengths]


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: clone",
    second="right: copy_",
    rows="row 1",
    racy="the swapped rows and the row that is read share one",
    safe="they share none",
)
def rows_swapped_through_views(rt: CaseRuntime, racy: bool) -> Values:
    """One stream swaps two rows of a table through views, another reads a row."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        copy = numbers[1 if racy else 3].clone()
    with rt.use(right):
        first, second = numbers[0], numbers[1]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    return [copy]


@pair(
    RaceKind.WRITE_AFTER_WRITE,
    first="left: fill_",
    second="right: fill_",
    rows="row 2",
    racy="one row",
    safe="no row at all, at the same place",
)
def nothing_at_all(rt: CaseRuntime, racy: bool) -> Values:
    """A tensor without elements touches nothing."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        numbers[2:3].fill_(7)
    with rt.use(right):
        numbers[2 : 3 if racy else 2].fill_(8)
        numbers[index(rt)] = 9
    return [numbers]
