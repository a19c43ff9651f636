"""`LastLocation`: a decode step of requests of the host tier, as `HiSparse.map_last_location` plans it."""

from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.indices import HostLocations, Locations, Slots
from batchstate.tables import Table, TableWrite

Ints = npt.NDArray[np.int64]


@final
@attrs.define(eq=False, repr=False)
class LastLocation:
    """Where the newest token of each request goes, and what is backed up before: what `map_last_location` returns.

    Attributes:
        slots: the n requests.
        positions: int64[n], of the new token.
        hot_rows: int64[n], row of the hot buffer that takes it.
        locations: int64[n], device locations that take its KV: the slot mapping of the step.
        hot_from: int64[n], first position whose KV is on the device; those before are read from the host.
        backup_from, backup_to: the tokens of the step before: int64[k] device locations, int64[k] host locations.
        hot_tokens: rows of a hot buffer.
        extras: name -> array, for `batch.upload(extras=...)`.
        launched: whether `back_up` has been called.
    """

    slots: Slots
    positions: Ints
    hot_rows: Ints
    locations: Locations
    hot_from: Ints
    backup_from: Locations
    backup_to: HostLocations
    hot_tokens: int
    launched: bool = False

    def __repr__(self) -> str:
        return f"LastLocation({self.positions.size} requests, {len(self.backup_from)} to back up)"

    @property
    def extras(self) -> dict[str, Ints]:
        """What goes into the step's copy."""
        return {
            "hot_locations": self.locations.np,
            "hot_from": self.hot_from,
            "backup_from": self.backup_from.np,
            "backup_to": self.backup_to.np,
        }

    def entry(self, table: Table) -> TableWrite:
        """The write of new rows of hot buffers into a table [slot, hot row] -> location, for a batch's upload.

        A row that is used again has its location in the table already: it is written once, while the buffer grows.

        Raises:
            As `Table.entry`.
        """
        grows = self.hot_rows == self.positions
        if grows.all():
            return table.entry(self.slots, self.hot_rows, self.locations)
        return table.entry(self.slots.filter(grows), self.hot_rows[grows], self.locations.filter(grows))
