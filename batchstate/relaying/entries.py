"""Which entries of a relay are unwritten, published or consumed, by whom, and behind which fence.

Host bookkeeping in numpy, O(rows) a call. A publish is noted when it is enqueued; that the device gets there in the
same order is the business of its fence.
"""

import enum
from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.relaying.fields import RelayField
from batchstate.runtime import Fence, Stream

Ints = npt.NDArray[np.int64]


class EntryState(enum.StrEnum):
    """What has become of an entry."""

    UNWRITTEN = "unwritten"
    PUBLISHED = "published"
    CONSUMED = "consumed"


@final
@attrs.define(eq=False)
class Publication:
    """One publish: everything it wrote is behind its fence, and no other publish shares that.

    Attributes:
        number: from 1, in the order of the calls.
        by: the operation, step and stream, for reports.
        stream: where it was enqueued.
        fence: behind it.
        known_to: keys of the streams that are ordered behind it.
        reads: for each stream that has read some of it, a fence behind the last such read.
        passed: pairs of a stream that has read, and the key of a stream that comes behind that read.
        written: for each field `Entries.number`, and the rows int64[n] of it that this publish wrote.
    """

    number: int
    by: str
    stream: Stream
    fence: Fence
    known_to: set[object]
    reads: dict[Stream, Fence] = attrs.field(factory=dict)
    passed: set[tuple[Stream, object]] = attrs.field(factory=set)
    written: list[tuple[Ints, Ints]] = attrs.field(factory=list)

    def has_entries(self) -> bool:
        """Whether some entry still comes from it."""
        return any(np.count_nonzero(numbers[rows] == self.number) for numbers, rows in self.written)

    def over(self) -> bool:
        """Whether it and all reads of it have run, so that nothing needs to wait for them. Never waits."""
        return self.fence.query() and all(fence.query() for fence in self.reads.values())


@final
class Entries:
    """The entries of one field, one for each slot.

    Attributes:
        field: the declaration.
        generation: int64[capacity], of the owner that an entry was published for; 0 where it is unwritten.
        number: int64[capacity], of the publish; 0 where it is unwritten.
        wrote: int64[capacity], of the last publish into this memory, also when the entry is unwritten again: whoever
            writes next still comes behind that one, and behind those that read it.
        taken: uint8[capacity], bits of the readers that have taken it.
    """

    __slots__ = ("field", "generation", "number", "taken", "wrote")

    def __init__(self, field: RelayField, capacity: int) -> None:
        self.field = field
        self.generation = np.zeros(capacity, dtype=np.int64)
        self.number = np.zeros(capacity, dtype=np.int64)
        self.wrote = np.zeros(capacity, dtype=np.int64)
        self.taken = np.zeros(capacity, dtype=np.uint8)

    def publish(self, rows: Ints, generations: Ints, number: int) -> None:
        """Notes a publish for the slots `rows`."""
        self.generation[rows] = generations
        self.number[rows] = number
        self.wrote[rows] = number
        self.taken[rows] = 0

    def take(self, rows: Ints, reader: int) -> None:
        """Notes that `reader` has taken the entries of `rows`."""
        self.taken[rows] |= np.uint8(reader)

    def clear(self, rows: Ints) -> None:
        """Makes the entries of `rows` unwritten. Who wrote and read their memory is not forgotten."""
        self.generation[rows] = 0
        self.number[rows] = 0
        self.taken[rows] = 0

    def missed(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Whether each entry would be overwritten although somebody still has to read it. bool[n]."""
        return self.unread(rows) if self.field.must_read else np.zeros(len(rows), dtype=np.bool_)

    def unread(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Whether each entry is written, and wanted by a reader that has not taken it. bool[n]."""
        wanted: npt.NDArray[np.bool_] = (self.number[rows] != 0) & (
            (self.taken[rows] & self.field.readers) != self.field.readers
        )
        return wanted

    def states(self, rows: Ints) -> list[EntryState]:
        """The state of each entry; consumed when every reader has taken it."""
        unread = self.unread(rows).tolist()
        written = (self.number[rows] != 0).tolist()
        return [
            EntryState.UNWRITTEN if not there else EntryState.PUBLISHED if wanted else EntryState.CONSUMED
            for there, wanted in zip(written, unread, strict=True)
        ]


@final
class Publications:
    """The publishes that some entry still comes from, or that the device may still be at."""

    def __init__(self) -> None:
        self._by_number: dict[int, Publication] = {}
        self._count = 0
        self._prune_at = 16

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, by: str, stream: Stream, fence: Fence) -> Publication:
        """A new one."""
        self._count += 1
        made = Publication(self._count, by, stream, fence, {stream.key})
        self._by_number[made.number] = made
        return made

    def of(self, numbers: Ints) -> list[Publication]:
        """Those of entries, by their numbers, each once; 0 stands for none."""
        return [self._by_number[number] for number in _each(numbers) if number]

    def running(self, numbers: Ints) -> list[Publication]:
        """The same for memory whose entries may be gone: those that are over and forgotten need no waiting for."""
        return [self._by_number[number] for number in _each(numbers) if number in self._by_number]

    def describe(self, number: int) -> str:
        """Who published, for reports."""
        made = self._by_number.get(number)
        return "nobody" if made is None else made.by

    def others(self, besides: Publication) -> Sequence[Publication]:
        """All but one."""
        return [made for made in self._by_number.values() if made is not besides]

    def prune(self) -> None:
        """Forgets those that are over and of which no entry is left; now and then, so that a publish costs O(rows).

        One of which no entry is left may still be running, or be read: whoever writes there next has to wait for it.
        """
        if len(self._by_number) >= self._prune_at:
            self._by_number = {
                number: made for number, made in self._by_number.items() if made.has_entries() or not made.over()
            }
            self._prune_at = max(16, 2 * len(self._by_number))


def _each(numbers: Ints) -> list[int]:
    """Each number once."""
    first = int(numbers[0]) if numbers.size else 0
    if not np.count_nonzero(numbers != first):  # nearly always: one publish wrote all rows
        return [first]
    found: list[int] = np.unique(numbers).tolist()
    return found
