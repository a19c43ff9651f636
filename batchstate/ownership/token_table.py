"""What a table must be to hold the tokens of a page pool."""

import numpy as np

from batchstate import invariants
from batchstate.errors import ArgumentError, DtypeError, ShapeError
from batchstate.ownership.table_write import SlotSpace
from batchstate.runtime import numpy_dtype
from batchstate.tables import Table
from batchstate.values.host_arrays import converted
from batchstate.violations import Where


def check_token_table(
    table: Table, slots: SlotSpace, *, max_tokens: int, token_capacity: int, name: str, where: Where
) -> None:
    """Refuses a table of other slots, without room for a request, or with values that are or hold no tokens.

    Raises:
        ArgumentError, ShapeError, DtypeError, ValueOverflowError: see `PagePool`.
        Violation: TABLE_CAPACITY, UNIT_MISMATCH.
    """
    if table.slots is not slots:
        raise ArgumentError(
            f"{name}: token_table {table!r} is indexed by slots of another pool, {table.slots.name!r}",
            value=table,
            remedy=f"make it with `table(...)` of {slots!r}",
        )
    shape, dtype = tuple(table.device.shape), numpy_dtype(table.device.dtype)
    if dtype.kind not in "iu":
        raise DtypeError(
            f"{name}: token_table of {dtype}", value=dtype, remedy="tokens are integers: use int32 or int64"
        )
    invariants.table_capacity(table.capacity, slots.capacity, **where)
    if table.holds not in (None, "token"):
        invariants.unit_mismatch("token", table.holds, **where)
    if len(shape) != 2 or shape[1] < max_tokens:
        raise ShapeError(
            f"{name}: rows of {list(shape[1:])} for {max_tokens} tokens",
            value=shape,
            remedy="make the table with `slots.table(name, (max_tokens_per_request,), holds='token')`",
        )
    converted(np.array([token_capacity - 1]), dtype, f"{name}: token_table")
