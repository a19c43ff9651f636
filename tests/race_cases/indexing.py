"""Operations that touch a part of a tensor because an index or a mask says so."""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as all of torch's own code calls it

from batchstate.races.report import RaceKind
from batchstate.runtime import Stream
from tests.race_cases.plain import CaseRuntime
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import given, index, result_and_fence, table, use, vector


@pair(RaceKind.READ_AFTER_WRITE, "left: masked_fill_", "right: index_select", "row 5")
def masked_fill(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Rows of a table are cleared by a mask, which never makes the host wait.

    Racy: a row of the mask is read.
    Safe: only rows outside of the mask are read.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers.masked_fill_(given(rt, [[row in (2, 5)] for row in range(8)]), 0)
    with rt.use(right):
        return [numbers.index_select(0, index(rt, 1, 5 if racy else 6))]


@pair(RaceKind.WRITE_AFTER_READ, "left: gather", "right: scatter_", "parts of row 1")
def gather_and_scatter(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Elements of a table, one in each row.

    Racy: one element is in both.
    Safe: other elements of the same rows.
    """
    numbers = table(rt, 3, 4)
    with rt.use(left):
        taken = numbers.gather(1, given(rt, [[0], [2], [3]]))
    with rt.use(right):
        numbers.scatter_(1, given(rt, [[1], [2 if racy else 1], [0]]), given(rt, [[-1], [-2], [-3]]))
    return [taken, numbers]


@pair(RaceKind.WRITE_AFTER_WRITE, "left: index_copy_", "right: index_copy_", "row 0")
def padding_rows(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two batches, padded to the same length, store their rows.

    Racy: both write row 0, where padding goes.
    Safe: each writes rows of its own.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers.index_copy_(0, index(rt, 1, 2, 0), given(rt, [[7] * 4] * 3))
    with rt.use(right):
        numbers.index_copy_(0, index(rt, 3, 4, 0 if racy else 5), given(rt, [[8] * 4] * 3))
    return [numbers]


@pair(RaceKind.WRITE_AFTER_WRITE, "left: index_put_", "right: index_put_", "parts of row 2")
def places_by_row_and_column(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Single places of a table, named by a row and a column each.

    Racy: one place is in both.
    Safe: the places differ, though the rows do not.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers[index(rt, 1, 2), index(rt, 0, 3)] = given(rt, [7, 7])
    with rt.use(right):
        numbers[index(rt, 1, 2), index(rt, 1, 3 if racy else 2)] = given(rt, [8, 8])
    return [numbers]


@pair(RaceKind.WRITE_AFTER_WRITE, "left: index_put_", "right: index_put_", "parts of row 3")
def columns_of_indexed_rows(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Rows by index and columns by slice: pages of a request are added to its row.

    Racy: one page is in both.
    Safe: the pages are not the same.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers[index(rt, 1, 3), 0:2] = given(rt, [[7, 7], [7, 7]])
    with rt.use(right):
        columns = slice(1, 3) if racy else slice(2, 4)
        numbers[index(rt, 3), columns] = given(rt, [[8, 8]])
    return [numbers]


@pair(RaceKind.READ_AFTER_WRITE, "left: index_add_", "right: index_select", "row 2")
def index_add(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Counts of some requests are raised, others are read.

    Racy: a row that is added to.
    Safe: another row.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers.index_add_(0, index(rt, 2, 4), given(rt, [[1] * 4] * 2))
    with rt.use(right):
        return [numbers.index_select(0, index(rt, 2 if racy else 3))]


@pair(RaceKind.WRITE_AFTER_WRITE, "left: scatter_add_", "right: index_fill_", "element 6")
def scatter_add(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Elements of a vector are counted up by one stream, and others are cleared by another.

    Racy: an element that is cleared.
    Safe: no element that is cleared.
    """
    counts = vector(rt)
    with rt.use(left):
        counts.scatter_add_(0, index(rt, 1, 6 if racy else 2, 1), index(rt, 1, 1, 1))
    with rt.use(right):
        counts.index_fill_(0, index(rt, 5, 6), 0)
    return [counts]


@pair(RaceKind.READ_AFTER_WRITE, "left: put_", "right: take", "parts of row 1")
def put_and_take(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Places of a table, counted through all of it.

    Racy: place 5 is in both.
    Safe: no place is in both.
    """
    numbers = table(rt)
    with rt.use(left):
        numbers.put_(index(rt, 2, 5), index(rt, -1, -2))
    with rt.use(right):
        return [numbers.take(index(rt, 9, 5 if racy else 6))]


@pair(RaceKind.WRITE_AFTER_READ, "left: embedding", "right: index_copy_", "row 4")
def embedding(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Tokens are looked up in a table of vectors.

    Racy: the vector of a token that is looked up is replaced.
    Safe: the vector of another token is replaced.
    """
    weights = table(rt, dtype=torch.float32)
    with rt.use(left):
        found = F.embedding(index(rt, 1, 4, 1), weights)
    with rt.use(right):
        weights.index_copy_(0, index(rt, 4 if racy else 5), weights.new_zeros((1, 4)))
    return [found]


@pair(RaceKind.WRITE_AFTER_READ, "left: cat", "right: fill_", "row 6")
def cat_of_slices(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two slices of a table are joined, and rows near them are overwritten.

    Racy: the row between two slices, and one of a slice.
    Safe: the row between two slices.
    """
    numbers = table(rt)
    with rt.use(left):
        joined = torch.cat([numbers[:2], numbers[5:7]])
    with rt.use(right):
        numbers[3 : 7 if racy else 5 : 3].fill_(9)
    return [joined]


@pair(RaceKind.WRITE_AFTER_READ, "left: index", "right: fill_", "row 2")
def index_of_another_stream(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """The rows to gather are uploaded by one stream, gathered by another, and overwritten.

    Racy: an index of another stream, which was waited for; the table was not.
    Safe: the table is written behind the fence as well.
    """
    numbers = table(rt)
    with rt.use(right):
        packed = rt.upload([np.array([2, 5])])
    taken, read = result_and_fence(rt, left, lambda: numbers[rt.use_part_on_current_stream(packed, 0)])
    with use(rt, right, behind=None if racy else read):
        numbers[1:3].fill_(9)
    return [taken]


@pair(RaceKind.READ_AFTER_WRITE, "left: copy to device", "right: index_select", "bytes 0-15")
def index_not_there_yet(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """One stream uploads an index, another gathers with it.

    Racy: the index itself may not be there yet: what it holds then is no row of the table.
    Safe: the index is acquired, which waits for it and keeps its memory.
    """
    numbers = table(rt)
    with rt.use(left):
        packed = rt.upload([np.array([2, 5])])
    with rt.use(right):
        rows = packed.view(0) if racy else rt.use_part_on_current_stream(packed, 0)
        return [numbers.index_select(0, rows)]
