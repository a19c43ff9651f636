"""Checks of tensors and tables that are to go with a page pool: over its pages, the token table, maps, KV memory."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants
from batchstate._arrays import arange_per_row, converted
from batchstate.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from batchstate.runtime.memory import numpy_dtype
from batchstate.tables import Table
from batchstate.violations import Where

if TYPE_CHECKING:
    from batchstate.kv.pages import PagePool

Ints = npt.NDArray[np.int64]


def check_map_to(pool: "PagePool", by: str, holds: str | None, shape: tuple[int, ...], of: "PagePool") -> None:
    """Refuses a table that cannot map each location of the pool to that of the same token in `of`."""
    fits = by == "location" and not shape and holds in (None, "location")
    if of is pool or of.slots is not pool.slots or of.page_size != pool.page_size or not fits:
        problem = f"{pool.name}: a table by {by}, {list(shape)} each, that holds {holds or 'location'} of {of!r}"
        remedy = "map locations to those of another PagePool of the same slots and the same page size"
        raise ArgumentError(problem, of, remedy)


def check_map(pool: "PagePool", table: Table, of: "PagePool", operation: str) -> None:
    """Each row of a map that is written for a token of a live request names where `of` has that token."""
    lengths = np.minimum(pool.committed_lengths, of.committed_lengths)
    rows = np.flatnonzero(lengths)
    counts = lengths[rows]
    owners, positions = rows.repeat(counts), arange_per_row(np.zeros_like(counts), counts)
    columns, offset = np.divmod(positions, pool.page_size)
    here, there = (pages.page_table[owners, columns].astype(np.int64) for pages in (pool, of))
    at = np.flatnonzero(here)
    size, offset = pool.page_size, offset[at]
    locations, expected = here[at] * size + offset, np.where(there[at] > 0, there[at] * size + offset, 0)
    written = table.written_for(locations, pool._spaces["page"].generations_of(here[at]))
    actual = pool.runtime.inspect(table.memory)[locations].astype(np.int64)
    where: Where = {**pool._where(operation), "column": table.name}
    invariants.table_link(locations[written], expected[written], actual[written], **where)


def check_buffers(pool: "PagePool", buffers: tuple[torch.Tensor, ...]) -> None:
    """Refuses KV memory that locations or pages do not index."""
    label = f"{pool.name}: register_kv"
    for buffer in buffers:
        if buffer.device != pool.runtime.device:
            problem = f"{label}: expected a tensor on {pool.runtime.device}, got one on {buffer.device}"
            raise DeviceError(problem, buffer.device, "pass KV memory of the pool's device")
        if not buffer.ndim or buffer.shape[0] not in (pool.location_capacity, pool.num_pages + 1):
            problem = f"{label}: expected one row for each location or page, got shape {list(buffer.shape)}"
            remedy = f"pass [{pool.location_capacity}, ...] or [{pool.num_pages + 1}, ...]"
            raise ShapeError(problem, tuple(buffer.shape), remedy)


def check_page_zero(pool: "PagePool", buffers: tuple[torch.Tensor, ...], operation: str) -> None:
    """Checks that page 0 of KV memory is finite."""
    for buffer in buffers:
        page = buffer[: pool.page_size if buffer.shape[0] == pool.location_capacity else 1]
        finite = torch.isfinite(page.float()).reshape(page.shape[0], -1).all(1)
        invariants.page_zero_finite(pool.runtime.inspect(finite), **pool._where(operation))


def check_req_to_token(pool: "PagePool", table: Table) -> None:
    """Refuses a table of other slots, with rows too short for a request, or with values that are not locations."""
    if table.space is not pool.slots:
        other = f"{table!r}, of another pool, {table.space.name!r}"
        problem = f"{pool.name}: expected a table of its slots as req_to_token, got {other}"
        raise ArgumentError(problem, table, f"make it with `table(...)` of {pool.slots!r}")
    shape, dtype = table.shape, numpy_dtype(table.dtype)
    if dtype.kind not in "iu":
        problem = f"{pool.name}: req_to_token: expected integers, got {dtype}"
        raise DtypeError(problem, dtype, "it holds locations: use int32 or int64")
    where = pool._where("req_to_token")
    invariants.table_capacity(table.capacity, pool.slots.capacity, **where)
    if table.holds not in (None, "location"):
        invariants.unit_mismatch("location", table.holds, **where)
    most = pool.max_tokens_per_request
    if len(shape) != 2 or shape[1] < most:
        problem = f"{pool.name}: req_to_token: expected rows of at least {most} locations, got shape {list(shape[1:])}"
        remedy = "make the table with `slots.table(name, (max_tokens_per_request,), holds='location')`"
        raise ShapeError(problem, shape, remedy)
    converted(np.array([pool.location_capacity - 1]), dtype, f"{pool.name}: req_to_token")
