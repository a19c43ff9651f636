"""What else a slot owns, taken and freed with it as one transaction."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from batchstate.runtime import Fence

Ints = npt.NDArray[np.int64]


class Companion(Protocol):
    """Attached to a `SlotPool`, which asks first and acts only when every companion agrees."""

    def check_take(self, n: int) -> None:
        """Refuses if what `n` slots need is not there. Changes nothing."""
        ...

    def taken(self, rows: Ints) -> None:
        """Gives the slots `rows` int64[n] what they need. On an error it has changed nothing."""
        ...

    def check_free(self, rows: Ints, operation: str) -> None:
        """Refuses if the slots may not be freed now. Changes nothing."""
        ...

    def freed(self, rows: Ints, after: Fence | None) -> None:
        """Releases what the slots own, behind the same fence."""
        ...

    def check_conservation(self, live: int, operation: str) -> None:
        """Refuses if what is owned does not go with `live` slots. Costs O(1)."""
        ...

    def verify(self) -> None:
        """Every law from scratch."""
        ...
