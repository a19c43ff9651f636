"""What a slot pool asks of a relay over its slots: entries end with their owner."""

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate.relaying.entries import Entries
from batchstate.runtime import Fence
from batchstate.violations import Where

Ints = npt.NDArray[np.int64]


@final
class RelayGuard:
    """The companion of a slot pool over whose slots a relay lies. Slots are taken without entries.

    Args:
        entries: of each field.
        is_live: which of some slots int64[n] are live, bool[n].
        where: of reports, for an operation.
    """

    def __init__(
        self,
        entries: Sequence[Entries],
        is_live: Callable[[Ints], npt.NDArray[np.bool_]],
        where: Callable[[str], Where],
    ) -> None:
        self._entries = entries
        self._is_live = is_live
        self._where = where

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
        for entries in self._entries:
            entries.clear(rows)

    def check_conservation(self, live: int, operation: str) -> None:
        """Entries are counted with nobody."""

    def verify(self) -> None:
        """No entry belongs to a slot that is nobody's.

        Raises:
            Violation: FUTURE_GENERATION.
        """
        for entries in self._entries:
            rows = np.flatnonzero(entries.number)
            published = entries.generation[rows]
            held = np.where(self._is_live(rows), published, 0)
            invariants.future_generation(
                rows, published, held, lambda row: "a publish for its former owner", "nobody", **self._where("verify")
            )
