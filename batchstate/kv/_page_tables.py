"""Checks of tensors and tables that are to go with a page pool: over its pages, the token table, maps, KV memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchstate import invariants
from batchstate._arrays import arange_per_row, converted
from batchstate.errors import ArgumentError, DtypeError, ShapeError
from batchstate.runtime.memory import numpy_dtype
from batchstate.tables import Table

if TYPE_CHECKING:
    from batchstate.kv.pages import PagePool


def check_map_to(pool: "PagePool", by: str, holds: str | None, shape: tuple[int, ...], of: "PagePool") -> None:
    """Refuses a table that cannot map each location of the pool to that of the same token in `of`."""
    fits = of is not pool and of.slots is pool.slots and of.page_size == pool.page_size
    if not fits or by != "location" or shape or holds not in (None, "location"):
        problem = f"{pool.name}: a table by {by}, {list(shape)} each, that holds {holds or 'location'} of {of!r}"
        remedy = "map locations to those of another PagePool of the same slots and the same page size"
        raise ArgumentError(problem, of, remedy)


def check_map(pool: "PagePool", table: Table, of: "PagePool", operation: str) -> None:
    """Each row of a map that is written for a token of a live request names where `of` has that token."""
    lengths = np.minimum(pool.committed_lengths, of.committed_lengths)
    rows = np.flatnonzero(lengths)
    counts = lengths[rows]
    columns, offset = np.divmod(arange_per_row(np.zeros_like(counts), counts), pool.page_size)
    pages = np.array([part.page_table[rows.repeat(counts), columns] for part in (pool, of)], dtype=np.int64)
    has = pages[0] > 0
    (here, there), offset = pages[:, has], offset[has]
    locations = here * pool.page_size + offset
    expected = np.where(there > 0, there * pool.page_size + offset, 0)
    written = table.written_for(locations, pool._spaces["page"].generations_of(here))
    actual = pool.runtime.inspect(table.memory)[locations].astype(np.int64)
    where = pool._where(operation)
    where["column"] = table.name
    invariants.table_link(locations[written], expected[written], actual[written], **where)


def check_page_zero(pool: "PagePool", buffers: Sequence[torch.Tensor], operation: str) -> None:
    """Checks that page 0 of KV memory is finite."""
    for buffer in buffers:
        page = buffer[: pool.page_size if buffer.shape[0] == pool.location_capacity else 1]
        finite = torch.isfinite(page.float()).reshape(page.shape[0], -1).all(1)
        invariants.page_zero_finite(pool.runtime.inspect(finite), **pool._where(operation))


def check_req_to_token(pool: "PagePool", table: Table) -> None:
    """Refuses a table of other slots, with rows too short for a request, or with values that are not locations."""
    label, where = f"{pool.name}: req_to_token", pool._where("req_to_token")
    shape, dtype, most = table.shape, numpy_dtype(table.dtype), pool.max_tokens_per_request
    if table.space is not pool.slots:
        problem = f"{label}: {table!r} is of another pool, {table.space.name!r}"
        raise ArgumentError(problem, table, f"make it with `table(...)` of {pool.slots!r}")
    if dtype.kind not in "iu":
        raise DtypeError(f"{label}: expected integers, got {dtype}", dtype, "it holds locations: use int32 or int64")
    invariants.table_capacity(table.capacity, pool.slots.capacity, **where)
    if table.holds not in (None, "location"):
        invariants.unit_mismatch("location", table.holds, **where)
    if len(shape) != 2 or shape[1] < most:
        problem = f"{label}: expected rows of at least {most} locations, got shape {list(shape[1:])}"
        remedy = "make the table with `slots.table(name, (max_tokens_per_request,), holds='location')`"
        raise ShapeError(problem, shape, remedy)
    converted(np.array([pool.location_capacity - 1]), dtype, label)
