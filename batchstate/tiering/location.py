"""The plan of a decode step in the host tier."""

from typing import TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.contracts import Contract
from batchstate.indices import HostTokens, Slots, Tokens
from batchstate.runtime import Runtime
from batchstate.tables import Table, TableWrite

Ints = npt.NDArray[np.int64]
V = TypeVar("V", Tokens, HostTokens)


def host_only(unit: type[V], runtime: Runtime, numbers: Ints) -> V:
    """A value of an index space, of which the host has the numbers int64[n]."""
    shape, contract = numbers.shape, Contract.HOST_ONLY
    return unit(runtime, numbers, None, dtype=torch.int64, shape=shape, contract=contract)


@final
@attrs.define(eq=False, repr=False)
class LastLocation:
    """Where the newest token of each request goes, and what is backed up before. Made by `HiSparse.map_last_location`.

    Attributes:
        slots: the n requests.
        positions: int64[n], of the new token.
        hot_rows: int64[n], row of the hot buffer that takes it.
        tokens: int64[n], device tokens that take its KV: the slot mapping of the step. Riding as `hot_tokens`.
        hot_from: int64[n], first position whose KV is on the device; those before are read from the host.
        backup_from, backup_to: the tokens of the step before: int64[k] device tokens, int64[k] host tokens.
        extras: name -> array, for `batch.upload(extras=...)`.
        launched: whether `back_up` has been called.
    """

    slots: Slots
    positions: Ints
    hot_rows: Ints
    tokens: Tokens
    hot_from: Ints
    backup_from: Tokens
    backup_to: HostTokens
    launched: bool = False

    def __repr__(self) -> str:
        return f"LastLocation({self.positions.size} requests, {len(self.backup_from)} to back up)"

    @property
    def extras(self) -> dict[str, Ints]:
        """What rides in the step's copy."""
        return {
            "hot_tokens": self.tokens.np,
            "hot_from": self.hot_from,
            "backup_from": self.backup_from.np,
            "backup_to": self.backup_to.np,
        }

    def entry(self, table: Table) -> TableWrite:
        """The write of new rows of hot buffers into a table [slot, hot row] -> token; rides in a batch's upload.

        A row that is used again has its token in the table already: it is written once, while the buffer grows.

        Raises:
            As `Table.entry`.
        """
        grows = self.hot_rows == self.positions
        if grows.all():
            return table.entry(self.slots, self.hot_rows, self.tokens)
        return table.entry(self.slots.filter(grows), self.hot_rows[grows], self.tokens.filter(grows))
