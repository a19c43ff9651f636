"""`LastLocation`: a decode step of requests of the host tier, as `HiSparse.map_last_location` plans it."""

from typing import final

import attrs

from batchstate._arrays import Ints
from batchstate.mirror import HostLocations, Locations, Slots
from batchstate.tables import Table, TableWrite


@final
@attrs.define(eq=False, repr=False)
class LastLocation:
    """Where the new tokens of each request go, and what is backed up before: what `map_last_location` returns.

    The t new tokens stand one request after the other: one each, or drafts too. Rows of padding have location 0. Where
    the lengths are bounds these are the last places that the tokens may take; the device knows which they do, and finds
    the place of a position in the table that `entry` writes.

    Attributes:
        slots: the n requests, then padding.
        positions: int64[t], of the new tokens.
        hot_rows: int64[t], rows of the hot buffers that take them.
        locations: int64[t], device locations that take their KV: the slot mapping of the step.
        hot_from: int64[n], first position whose KV is on the device; those before are read from the host.
        backup_from, backup_to: tokens of steps before: int64[k] device locations, int64[k] host locations.
        host_locations: int64[t], rows of the new tokens in buffers that the host pool has on the device; None without
            such buffers.
        hot_tokens: rows of a hot buffer.
        extras: name -> array, for `batch.upload(extras=...)`.
        owners: the request of each new token, t of them.
        backed: int64[n], tokens of each whose backup was launched before this step.
        guesses: whether some tokens to back up are not confirmed, so that perhaps no forward has written them.
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
    host_locations: HostLocations | None
    owners: Slots
    backed: Ints
    guesses: bool
    launched: bool = False

    def __repr__(self) -> str:
        return f"LastLocation({len(self.slots)} requests, {len(self.backup_from)} to back up)"

    @property
    def extras(self) -> dict[str, Ints]:
        """Arrays for the step's copy, by name."""
        index_rows = {} if self.host_locations is None else {"host_locations": self.host_locations.np}
        return {
            "hot_locations": self.locations.np,
            "hot_from": self.hot_from,
            "backup_from": self.backup_from.np,
            "backup_to": self.backup_to.np,
            **index_rows,
        }

    def entry(self, table: Table) -> TableWrite:
        """The write of new rows of hot buffers into a table [slot, hot row] -> location, for a batch's upload.

        A row that is used again has its location in the table already: it is written once, while the buffer grows.

        Raises:
            As `Table.entry`.
        """
        grows = (self.hot_rows == self.positions) & (self.locations.np > 0)
        if grows.all():
            return table.entry(self.owners, self.hot_rows, self.locations)
        return table.entry(self.owners.filter(grows), self.hot_rows[grows], self.locations.filter(grows))
