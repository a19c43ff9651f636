"""The tokens that a step adds to its requests: where each lies, and whose it is."""

from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import levels
from batchstate.errors import ArgumentError
from batchstate.indices import Slots, Tokens
from batchstate.ownership.table_write import SlotSpace, TableWrite, read_only
from batchstate.tables import Table

Ints = npt.NDArray[np.int64]


@final
@attrs.frozen(eq=False)
class Extension:
    """t tokens of n requests, those of one request together, in order.

    The arrays are read-only: they were checked as they are.

    Attributes:
        slots: int64[t], the slot of each token.
        positions: int64[t], its position in the request.
        tokens: `host_only` int64[t], its place in KV memory.
        counts: int64[n], tokens of each request.
        owners: the handles of the n requests, which `entry` asks again: numbers do not say whose slot it is by then.
    """

    slots: Ints = attrs.field(converter=read_only)
    positions: Ints = attrs.field(converter=read_only)
    tokens: Tokens
    counts: Ints = attrs.field(converter=read_only)
    owners: Slots
    _space: SlotSpace
    _token_table: Table | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Extension({len(self)} tokens of {self.counts.size} requests)"

    def entry(self, table: Table | None = None) -> TableWrite:
        """The write that records the tokens in a table [slot, position] -> token; rides in a batch's upload.

        Args:
            table: by default the pool's token table.

        Raises:
            ArgumentError: no table given, and the pool has none; or a table of other slots.
            Violation: SLOT_STALE_HANDLE: a request has left since. Else see `Table.entry`.
            RowIndexError: see `Table.entry`.
        """
        target = self._token_table if table is None else table
        if target is None:
            raise ArgumentError(
                "entry without a table", value=None, remedy="pass a table, or give the PagePool a token_table"
            )
        if target.slots is not self._space:
            raise ArgumentError(
                f"entry of slots of {self._space.name!r} in {target!r} of {target.slots.name!r}",
                value=target,
                remedy="pass a table that was made by the pool of these slots",
            )
        self._space.check_handles(self.owners, "entry")
        if target is self._token_table and not levels.full:  # the pool made and checked all three
            return target.planned(self.slots, self.positions, self.tokens.np, self.owners)
        checked = target.entry(self.slots, self.positions, self.tokens)
        return attrs.evolve(checked, owners=self.owners)
