"""The books of a relay: what every field holds for whom, and the laws of reading and writing it.

All of it is on the host, and asked before anything is launched. The memory itself is the relay's business.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate.errors import DeclarationError
from batchstate.indices import Slots
from batchstate.relaying.entries import Entries, EntryState, Ints, Publication, Publications
from batchstate.relaying.fields import RelayField
from batchstate.runtime import Runtime
from batchstate.violations import Where


@final
class RelayLedger:
    """The entries of all fields of one relay, and the publishes that they come from.

    Args:
        runtime: whose steps and streams reports name.
        fields: the declarations.
        capacity: slots of the pool, slot 0 included.
        name: of the relay, for messages; `label` is how reports call it.

    Attributes:
        entries: by field.
        publications: behind which fence each is.
    """

    def __init__(
        self, runtime: Runtime, fields: Mapping[str, RelayField], capacity: int, *, name: str, label: str
    ) -> None:
        self.entries = {field: Entries(one, capacity) for field, one in fields.items()}
        self.publications = Publications()
        self._runtime = runtime
        self._name = name
        self._label = label

    def __repr__(self) -> str:
        return f"RelayLedger of {self._label}"

    def field(self, name: object, operation: str) -> Entries:
        """The entries of a field.

        Raises:
            DeclarationError: not declared.
        """
        entries = self.entries.get(name) if isinstance(name, str) else None
        if entries is None:
            raise DeclarationError(
                f"{self._name}: {operation} of {name!r}, which is not declared",
                value=name,
                remedy=f"use one of: {', '.join(self.entries)}",
            )
        return entries

    def rows_of(self, slots: Ints) -> Ints:
        """Where the entries of slots are noted, int64[n]: a row each, so that no publish ever wraps around."""
        return slots

    def states(self, live: Slots, name: str) -> list[EntryState]:
        """What has become of the entries of one field."""
        return self.entries[name].states(self.rows_of(live.np))

    # Writing

    def check_overwrite(self, live: Slots, names: Sequence[str], operation: str) -> None:
        """Refuses to write over what somebody still has to read.

        Raises:
            Violation: FUTURE_UNREAD_OVERWRITTEN, at `cheap`.
        """
        if levels.cheap:
            rows = self.rows_of(live.np)
            for name in names:
                entries = self.entries[name]
                invariants.future_unread_overwritten(
                    live.np,
                    entries.missed(rows),
                    self._writer(entries, rows),
                    self.by(operation),
                    entries.field.readers_named,
                    **self.where(operation, name),
                )

    def in_the_way(self, live: Slots, name: str) -> list[Publication]:
        """The publishes into the memory of these entries that the device may still be at, or be reading."""
        return self.publications.running(self.entries[name].wrote[self.rows_of(live.np)])

    def publish(self, live: Slots, names: Sequence[str], publication: Publication) -> None:
        """Notes a publish."""
        rows = self.rows_of(live.np)
        for name in names:
            entries = self.entries[name]
            entries.publish(rows, live.generations, publication.number)
            publication.written.append((entries.number, rows))

    def spoil(self, live: Slots, names: Sequence[str], publication: Publication) -> None:
        """Notes a publish that failed half way: what it wrote is nobody's value, and is written all the same."""
        self.clear(live, names)
        for name in names:
            self.entries[name].wrote[self.rows_of(live.np)] = publication.number

    def clear(self, live: Slots, names: Sequence[str]) -> None:
        """Makes entries unwritten."""
        for name in names:
            self.entries[name].clear(self.rows_of(live.np))

    # Reading

    def check_read(self, live: Slots, names: Sequence[str], reader: int, operation: str) -> list[Publication]:
        """Judges the entries of live handles, and says which publishes they come from.

        Raises:
            DeclarationError: a field that is not declared, or not for this reader.
            Violation: FUTURE_UNWRITTEN, FUTURE_GENERATION, FUTURE_CONSUMED, at `cheap`.
        """
        rows = self.rows_of(live.np)
        publications: dict[int, Publication] = {}
        for name in names:
            entries = self.field(name, operation)
            if not entries.field.readers & reader:
                raise DeclarationError(
                    f"{self._name}: {operation} of {name!r}, which is read by {entries.field.readers_named}",
                    value=name,
                    remedy="declare the field with read_by='both'",
                )
            if levels.cheap:
                who, where, writer = self.by(operation), self.where(operation, name), self._writer(entries, rows)
                invariants.future_unwritten(rows, entries.number[rows] != 0, who, **where)
                invariants.future_generation(rows, entries.generation[rows], live.generations, writer, who, **where)
                invariants.future_consumed(rows, (entries.taken[rows] & reader) != 0, writer, who, **where)
            for made in self.publications.of(entries.number[rows]):
                publications[made.number] = made
        return list(publications.values())

    def take(self, live: Slots, names: Sequence[str], reader: int) -> None:
        """Notes that `reader` has taken entries."""
        for name in names:
            self.entries[name].take(self.rows_of(live.np), reader)

    # Owners

    def end(self, rows: Ints) -> None:
        """The slots `rows` have no owner any more: their entries are unwritten."""
        for entries in self.entries.values():
            entries.clear(rows)

    def check_owners(self, is_live: Callable[[Ints], npt.NDArray[np.bool_]], operation: str) -> None:
        """No entry belongs to a slot that is nobody's.

        Raises:
            Violation: FUTURE_GENERATION.
        """
        for name, entries in self.entries.items():
            rows = np.flatnonzero(entries.number)
            published = entries.generation[rows]
            held = np.where(is_live(rows), published, 0)
            writer = self._writer(entries, rows)
            invariants.future_generation(rows, published, held, writer, "nobody", **self.where(operation, name))

    # Reports

    def by(self, operation: str) -> str:
        """Who reads or writes now."""
        return f"{operation} in step {self._runtime.step} on stream {self._runtime.current_stream.name!r}"

    def where(self, operation: str, field: str | None = None) -> Where:
        """Where a law is asked."""
        where: Where = {"object": self._label, "operation": operation, "step": self._runtime.step}
        if field is not None:
            where["column"] = field
        return where

    def _writer(self, entries: Entries, rows: Ints) -> Callable[[int], str]:
        return lambda row: self.publications.describe(int(entries.number[rows[row]]))
