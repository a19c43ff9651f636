"""A pool of slots or states in numbers."""

from typing import Self

import attrs

from batchstate.ownership.ledger import Ledger


@attrs.frozen
class SlotStats:
    """A pool in numbers: free + pending + live = size + reserve.

    Attributes:
        size: slots that can be taken ordinarily.
        reserve: further slots, for `take(reserved=True)` alone.
        free: slots that are nobody's, `free_reserved` included.
        free_reserved: those among the free that only a reserved take hands out.
        pending: freed behind a fence that is not complete. They become free by themselves, so waiting helps.
        live: slots that are somebody's.
        taken_total, freed_total: since the pool was made.
        peak_live: the most that were ever live at once.
    """

    size: int
    reserve: int
    free: int
    free_reserved: int
    pending: int
    live: int
    taken_total: int
    freed_total: int
    peak_live: int

    @classmethod
    def of(cls, ledger: Ledger) -> Self:
        """The numbers of a ledger now."""
        return cls(
            size=ledger.size,
            reserve=ledger.reserve,
            free=ledger.free,
            free_reserved=ledger.free_reserved,
            pending=ledger.pending,
            live=ledger.live,
            taken_total=ledger.taken_total,
            freed_total=ledger.freed_total,
            peak_live=ledger.peak_live,
        )
