"""A write to a slot-indexed table that is checked and not launched yet, and what a table knows of its slots."""

from typing import TYPE_CHECKING, Any, Protocol, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.indices import Slots
from batchstate.runtime import Runtime

if TYPE_CHECKING:
    from batchstate.tables import Table

Ints = npt.NDArray[np.int64]


class SlotSpace(Protocol):
    """What a table knows of the pool whose slots index it."""

    name: str

    @property
    def runtime(self) -> Runtime:
        """The device of the pool."""
        ...

    @property
    def capacity(self) -> int:
        """Rows that a table needs: the largest slot + 1."""
        ...

    def check_handles(self, slots: Slots, operation: str) -> None:
        """Refuses handles that are not live or not of this pool."""
        ...


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A view of `array` that nobody can write through."""
    view = array.view()
    view.setflags(write=False)  # half the time that `flags.writeable = False` takes
    return view


@final
@attrs.frozen(eq=False)
class TableWrite:
    """A checked write that is not launched yet: `table.device.view(-1)[index] = values`.

    Attributes:
        table: where it goes.
        index: int64[n], flat places in the table; read-only, since they were checked.
        values: [n] of the table's dtype, read-only.
        owners: the handles that it was made from. They are asked again before it is launched: by then a slot may have
            become another request's. None for a write that was made from numbers.
    """

    table: "Table"
    index: Ints = attrs.field(converter=read_only)
    values: npt.NDArray[Any] = attrs.field(converter=read_only)
    owners: Slots | None = None

    def __repr__(self) -> str:
        return f"TableWrite({self.index.size} elements of {self.table!r})"
