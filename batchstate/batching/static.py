"""What `Batch.to_static` asks of the memory that it writes to; `batchstate.static` has it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from batchstate.batching.upload import Extras
from batchstate.tables import TableWrite


@runtime_checkable
class StaticMemory(Protocol):
    """Takes a batch over to addresses that stay."""

    def receive(self, batch: Any, writes: Sequence[TableWrite], extras: Mapping[str, object]) -> Extras:
        """Copies the batch, its writes and its extras to the device."""
        ...
