"""What a slot pool asks of the pages that its slots own: no slot is freed while it has pages."""

from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate.ownership.page_books import PageBooks
from batchstate.runtime import Fence

Ints = npt.NDArray[np.int64]


@final
class PageGuard:
    """The companion of a slot pool whose slots own pages. Slots are taken without pages and get them by growing.

    Args:
        is_live: which of some slots int64[n] are live, bool[n].
        books: the pages.
    """

    def __init__(self, is_live: Callable[[Ints], npt.NDArray[np.bool_]], books: PageBooks) -> None:
        self._is_live = is_live
        self._books = books

    def __repr__(self) -> str:
        return f"PageGuard({self._books!r})"

    def check_take(self, n: int) -> None:
        """Nothing is needed."""

    def taken(self, rows: Ints) -> None:
        """Nothing is given."""

    def check_free(self, rows: Ints, operation: str) -> None:
        """Refuses to free slots that have pages: nobody would give those back.

        Raises:
            Violation: SLOT_CONSERVATION, naming slots.
        """
        owned = self._books.rows.num_pages[rows]
        if np.count_nonzero(owned):
            owners = rows[owned > 0]
            names = ", ".join(str(slot) for slot in owners[:8]) + (", ..." if owners.size > 8 else "")
            self._refuse(
                owners,
                int(owned.sum()),
                operation,
                problem=f"these slots still own {int(owned.sum())} pages: {names}",
                remedy="use `pages.release_requests(slots, after=...)`, which frees a request with all it has",
            )

    def _refuse(
        self, owners: Ints, pages: int, operation: str, *, problem: str | None = None, remedy: str | None = None
    ) -> None:
        ledger = self._books.references.ledger
        invariants.slot_conservation(
            ledger.free,
            ledger.pending,
            ledger.live - pages,
            ledger.size,
            leaked=owners,
            problem=problem,
            remedy=remedy,
            object=ledger.label,
            operation=operation,
        )

    def freed(self, rows: Ints, after: Fence | None) -> None:
        """Nothing is left."""

    def check_conservation(self, live: int, operation: str) -> None:
        """Pages are counted on their own, by their ledger."""

    def verify(self) -> None:
        """Every law of the pages from scratch, and none belongs to a slot that is nobody's.

        Raises:
            Violation: SLOT_CONSERVATION, and see `PageBooks.verify`.
        """
        self._books.verify()
        owners = np.flatnonzero(self._books.rows.num_pages)
        orphans = owners[~self._is_live(owners)]
        if orphans.size:
            self._refuse(orphans, int(self._books.rows.num_pages[orphans].sum()), "verify")
