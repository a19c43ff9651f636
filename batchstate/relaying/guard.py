"""What a slot pool asks of a relay over its slots: entries end with their owner."""

from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt

from batchstate.relaying.ledger import RelayLedger
from batchstate.runtime import Fence

Ints = npt.NDArray[np.int64]


@final
class RelayGuard:
    """The companion of a slot pool over whose slots a relay lies. Slots are taken without entries.

    It holds the books and not the relay: device memory goes when the relay does, however long the pool lives.

    Args:
        ledger: the books.
        is_live: which of some slots int64[n] are live, bool[n].
    """

    def __init__(self, ledger: RelayLedger, is_live: Callable[[Ints], npt.NDArray[np.bool_]]) -> None:
        self._ledger = ledger
        self._is_live = is_live

    def check_take(self, n: int) -> None:
        """Nothing is needed."""

    def taken(self, rows: Ints) -> None:
        """Nothing is given."""

    def check_free(self, rows: Ints, operation: str) -> None:
        """Slots may always be freed: what was not read is then wanted by nobody."""

    def freed(self, rows: Ints, after: Fence | None) -> None:
        """The entries are unwritten again."""
        self._clear(rows)

    def _clear(self, rows: Ints) -> None:
        self._ledger.end(self._ledger.rows_of(rows))

    def check_conservation(self, live: int, operation: str) -> None:
        """Entries are counted with nobody."""

    def verify(self) -> None:
        """No entry belongs to a slot that is nobody's.

        Raises:
            Violation: FUTURE_GENERATION.
        """
        self._ledger.check_owners(self._is_live, "verify")
