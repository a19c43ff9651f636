"""What `Batch.to_static` asks of the memory that it writes to; `batchstate.static` has it."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from batchstate.batching.upload import Extras
from batchstate.tables import TableWrite


class StaticMemory(abc.ABC):
    """Takes a batch over to addresses that stay."""

    @abc.abstractmethod
    def receive(self, batch: Any, writes: Sequence[TableWrite], extras: Mapping[str, object]) -> Extras:
        """Copies the batch, its writes and its extras to the device."""
