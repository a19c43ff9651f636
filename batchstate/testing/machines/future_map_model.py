"""What a relay should hold, as a dictionary: for each slot and field the values, and who has taken them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.batch import Batch
from batchstate.columns import mirrored, slot_column
from batchstate.future_map import EntryState, RelayField, relay_field
from batchstate.indices import Slots
from batchstate.relaying.fields import DEVICE, HOST
from batchstate.runtime import Runtime
from batchstate.violations import Code

Array = npt.NDArray[Any]

NUM_DRAFTS = 2


def declared(hidden: torch.dtype) -> dict[str, RelayField]:
    """One field for each reader, with and without a shape; `hidden` has a dtype that numpy may lack."""
    return {
        "token": relay_field(torch.int64, read_by="both", non_negative=True),
        "drafts": relay_field(torch.int64, (NUM_DRAFTS,), non_negative=True),
        "lengths": relay_field(torch.int64, read_by="both"),
        "accepted": relay_field(torch.int64, read_by="host"),
        "hidden": relay_field(hidden, (2, 3)),
    }


class Running(Batch):
    """The requests of one forward, lengths with its tokens; `bound_lens` is what the host knows of them."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    bound_lens = mirrored(torch.int64, contract="upper_bound")


@final
@attrs.define(eq=False, repr=False)
class Request:
    """One request.

    Attributes:
        handle: its slot.
        reused: whether the slot was another request's before.
        length: tokens in KV memory.
        bound: the most that the host knows of: tokens for which there are pages.
    """

    handle: Slots
    reused: bool = False
    length: int = 0
    bound: int = 0

    def __repr__(self) -> str:
        return f"<request in slot {self.slot}: {self.length} tokens, at most {self.bound}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would list the fields

    @property
    def slot(self) -> int:
        """The number of its slot."""
        return int(self.handle.np[0])


def handles_of(requests: Sequence[Request], runtime: Runtime) -> Slots:
    """Their handles, in order."""
    if not requests:
        return Slots.from_host(runtime, [])
    return Slots.cat([one.handle for one in requests])


@final
@attrs.define
class _Entry:
    """What a slot has in one field, and the readers that have taken it, as bits."""

    values: Array
    taken: int = 0


@final
class RelayModel:
    """The entries of all fields."""

    def __init__(self, fields: Mapping[str, RelayField]) -> None:
        self.fields = fields
        self._entries: dict[tuple[str, int], _Entry] = {}

    def publish(self, requests: Iterable[Request], values: Mapping[str, Array], *, seeded: bool = False) -> None:
        """Each request gets its row of each field; the host knows what it seeds."""
        for row, one in enumerate(requests):
            for name, array in values.items():
                self._entries[name, one.slot] = _Entry(array[row].copy(), HOST if seeded else 0)

    def unread(self, one: Request, field: str) -> bool:
        """Whether the entry is wanted by somebody who has not taken it."""
        entry = self._entries.get((field, one.slot))
        readers = self.fields[field].readers
        return entry is not None and entry.taken & readers != readers

    def refusal(self, requests: Iterable[Request], fields: Iterable[str], reader: int) -> Code | None:
        """Why a read is refused, or None."""
        for name in fields:
            entries = [self._entries.get((name, one.slot)) for one in requests]
            if None in entries:
                return Code.FUTURE_UNWRITTEN
            if any(entry is not None and entry.taken & reader for entry in entries):
                return Code.FUTURE_CONSUMED
        return None

    def peek(self, one: Request, field: str) -> Array | None:
        """What the entry holds, whoever has taken it; None where nothing was published."""
        entry = self._entries.get((field, one.slot))
        return None if entry is None else entry.values

    def take(self, requests: Sequence[Request], field: str, reader: int, num_rows: int) -> Array:
        """The values that `reader` takes, [num_rows, *shape]; zeros for padded rows."""
        declared = self.fields[field]
        dtype = np.int64 if declared.dtype is torch.int64 else np.float32
        found = np.zeros((num_rows, *declared.shape), dtype)
        for row, one in enumerate(requests):
            entry = self._entries[field, one.slot]
            entry.taken |= reader
            found[row] = entry.values
        return found

    def clear(self, requests: Iterable[Request], fields: Iterable[str]) -> None:
        """Nobody wants these entries any more."""
        names = list(fields)
        for one in requests:
            for name in names:
                self._entries.pop((name, one.slot), None)

    def state(self, one: Request, field: str) -> EntryState:
        """What has become of an entry."""
        if (field, one.slot) not in self._entries:
            return EntryState.UNWRITTEN
        return EntryState.PUBLISHED if self.unread(one, field) else EntryState.CONSUMED

    def readable(self, one: Request, fields: Iterable[str]) -> bool:
        """Whether the next forward may take these entries."""
        return self.refusal([one], fields, DEVICE) is None
