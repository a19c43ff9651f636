"""Operations that touch a part of a tensor because an index or a mask says so."""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as all of torch's own code calls it

from batchstate.testing.race.report import RaceKind
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import given, index, table, two_streams, vector
from tests.race_cases.surface import CaseRuntime


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: masked_fill_",
    second="right: index_select",
    rows="row 5",
    racy="a row of the mask is read",
    safe="only rows outside of the mask are read",
)
def masked_fill(rt: CaseRuntime, racy: bool) -> Values:
    """Rows of a table are cleared by a mask, which never makes the host wait."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        numbers.masked_fill_(given(rt, [[row in (2, 5)] for row in range(8)]), 0)
    with rt.use(right):
        return [numbers.index_select(0, index(rt, 1, 5 if racy else 6))]


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: gather",
    second="right: scatter_",
    rows="parts of row 1",
    racy="one element is in both",
    safe="other elements of the same rows",
)
def gather_and_scatter(rt: CaseRuntime, racy: bool) -> Values:
    """Elements of a table, one in each row."""
    left, right = two_streams(rt)
    numbers = table(rt, 3, 4)
    with rt.use(left):
        taken = numbers.gather(1, given(rt, [[0], [2], [3]]))
    with rt.use(right):
        numbers.scatter_(1, given(rt, [[1], [2 if racy else 1], [0]]), given(rt, [[-1], [-2], [-3]]))
    return [taken, numbers]


@pair(
    RaceKind.WRITE_AFTER_WRITE,
    first="left: index_copy_",
    second="right: index_copy_",
    rows="row 0",
    racy="both write row 0, where padding goes",
    safe="each writes rows of its own",
)
def padding_rows(rt: CaseRuntime, racy: bool) -> Values:
    """Two batches, padded to the same length, store their rows."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        numbers.index_copy_(0, index(rt, 1, 2, 0), given(rt, [[7] * 4] * 3))
    with rt.use(right):
        numbers.index_copy_(0, index(rt, 3, 4, 0 if racy else 5), given(rt, [[8] * 4] * 3))
    return [numbers]


@pair(
    RaceKind.WRITE_AFTER_WRITE,
    first="left: index_put_",
    second="right: index_put_",
    rows="parts of row 2",
    racy="one place is in both",
    safe="the places differ, though the rows do not",
)
def places_by_row_and_column(rt: CaseRuntime, racy: bool) -> Values:
    """Single places of a table, named by a row and a column each."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        numbers[index(rt, 1, 2), index(rt, 0, 3)] = 7
    with rt.use(right):
        numbers[index(rt, 1, 2), index(rt, 1, 3 if racy else 2)] = 8
    return [numbers]


@pair(
    RaceKind.WRITE_AFTER_WRITE,
    first="left: index_put_",
    second="right: index_put_",
    rows="parts of row 3",
    racy="one page is in both",
    safe="the pages are not the same",
)
def columns_of_indexed_rows(rt: CaseRuntime, racy: bool) -> Values:
    """Rows by index and columns by slice: pages of a request are added to its row."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        numbers[index(rt, 1, 3), 0:2] = given(rt, [[7, 7], [7, 7]])
    with rt.use(right):
        columns = slice(1, 3) if racy else slice(2, 4)
        numbers[index(rt, 3), columns] = given(rt, [[8, 8]])
    return [numbers]


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: index_add_",
    second="right: index_select",
    rows="row 2",
    racy="a row that is added to",
    safe="another row",
)
def index_add(rt: CaseRuntime, racy: bool) -> Values:
    """Counts of some requests are raised, others are read."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        numbers.index_add_(0, index(rt, 2, 4), given(rt, [[1] * 4] * 2))
    with rt.use(right):
        return [numbers.index_select(0, index(rt, 2 if racy else 3))]


@pair(
    RaceKind.WRITE_AFTER_WRITE,
    first="left: scatter_add_",
    second="right: index_fill_",
    rows="element 6",
    racy="an element that is cleared",
    safe="no element that is cleared",
)
def scatter_add(rt: CaseRuntime, racy: bool) -> Values:
    """Elements of a vector are counted up by one stream, and others are cleared by another."""
    left, right = two_streams(rt)
    counts = vector(rt)
    with rt.use(left):
        counts.scatter_add_(0, index(rt, 1, 6 if racy else 2, 1), index(rt, 1, 1, 1))
    with rt.use(right):
        counts.index_fill_(0, index(rt, 5, 6), 0)
    return [counts]


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: put_",
    second="right: take",
    rows="parts of row 1",
    racy="place 5 is in both",
    safe="no place is in both",
)
def put_and_take(rt: CaseRuntime, racy: bool) -> Values:
    """Places of a table, counted through all of it."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        numbers.put_(index(rt, 2, 5), index(rt, -1, -2))
    with rt.use(right):
        return [numbers.take(index(rt, 9, 5 if racy else 6))]


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: embedding",
    second="right: index_copy_",
    rows="row 4",
    racy="the vector of a token that is looked up is replaced",
    safe="the vector of another token is replaced",
)
def embedding(rt: CaseRuntime, racy: bool) -> Values:
    """Tokens are looked up in a table of vectors."""
    left, right = two_streams(rt)
    weights = table(rt, dtype=torch.float32)
    with rt.use(left):
        found = F.embedding(index(rt, 1, 4, 1), weights)
    with rt.use(right):
        weights.index_copy_(0, index(rt, 4 if racy else 5), weights.new_zeros((1, 4)))
    return [found]


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: cat",
    second="right: fill_",
    rows="row 6",
    racy="the row between two slices, and one of a slice",
    safe="the row between two slices",
)
def cat_of_slices(rt: CaseRuntime, racy: bool) -> Values:
    """Two slices of a table are joined, and rows near them are overwritten."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        joined = torch.cat([numbers[:2], numbers[5:7]])
    with rt.use(right):
        numbers[3 : 7 if racy else 5 : 3].fill_(9)
    return [joined]


@pair(
    RaceKind.WRITE_AFTER_READ,
    first="left: index",
    second="right: fill_",
    rows="row 2",
    racy="an index of another stream, which was waited for; the table was not",
    safe="the table is written behind the fence as well",
)
def index_of_another_stream(rt: CaseRuntime, racy: bool) -> Values:
    """The rows to gather are uploaded by one stream, gathered by another, and overwritten."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(right):
        packed = rt.upload([np.array([2, 5])])
    with rt.use(left):
        taken = numbers[rt.use_part_on_current_stream(packed, 0)]
        read = rt.record()
    with rt.use(right):
        if not racy:
            rt.wait(read)
        numbers[1:3].fill_(9)
    return [taken]


@pair(
    RaceKind.READ_AFTER_WRITE,
    first="left: copy to device",
    second="right: index_select",
    rows="bytes 0-15",
    racy="the index itself may not be there yet: what it holds then is no row of the table",
    safe="the index is acquired, which waits for it and keeps its memory",
)
def index_not_there_yet(rt: CaseRuntime, racy: bool) -> Values:
    """One stream uploads an index, another gathers with it."""
    left, right = two_streams(rt)
    numbers = table(rt)
    with rt.use(left):
        packed = rt.upload([np.array([2, 5])])
    with rt.use(right):
        rows = packed.view(0) if racy else rt.use_part_on_current_stream(packed, 0)
        return [numbers.index_select(0, rows)]
