"""The entries of a relay, as the host knows them: what each field holds for whom, and which stream comes behind which.

Bookkeeping in numpy, O(rows) a call. A publish is noted when it is enqueued, and has a fence of its own. A stream waits
for the fences of those publishes whose entries it touches, on the device and once each; on a single stream nothing is
waited for, since its own order does.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate.invariants import times_checked
from batchstate.mirror import Slots
from batchstate.pools import SlotListener
from batchstate.runtime.base import Fence, Runtime, Stream
from batchstate.violations import Code, Where

# Members of an enumeration that the hot path counts by, looked up once.
FUTURE_ORDER, UNREAD_OVERWRITTEN = Code.FUTURE_ORDER, Code.FUTURE_UNREAD_OVERWRITTEN
READ_CODES = (Code.FUTURE_UNWRITTEN, Code.FUTURE_GENERATION, Code.FUTURE_CONSUMED)

DEVICE, HOST = 1, 2
"""The readers of an entry, as bits: the next forward, and the host."""

READERS = {DEVICE: "the next forward", HOST: "the host", DEVICE | HOST: "the next forward and the host"}

_BITS = [np.array(bits, dtype=np.uint8) for bits in range(4)]  # numpy takes as long to convert one number as to add 100

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class EntryState(enum.StrEnum):
    """The life of an entry: published, and consumed when every reader has taken it."""

    UNWRITTEN = "unwritten"
    PUBLISHED = "published"
    CONSUMED = "consumed"


@final
@attrs.define(eq=False)
class Publication:
    """One publish: everything it wrote is behind its fence, and no other publish shares that.

    Attributes:
        number: from 1, in the order of the calls.
        step: of the runtime.
        stream: where it was enqueued.
        fence: behind it.
        ordered: keys of the streams that are ordered behind it.
        reads: for each stream that has read some of it, a fence behind the last such read; until one is needed, the
            number of the last publish before that.
        ordered_reads: pairs of a stream that has read, and the key of a stream that is ordered behind that read.
        published: for each field its entries, and the rows int64[n] that this publish wrote.
    """

    number: int
    step: int
    stream: Stream
    fence: Fence
    ordered: set[object]
    reads: dict[Stream, Fence | int] = attrs.field(factory=dict)
    ordered_reads: set[tuple[Stream, object]] = attrs.field(factory=set)
    published: "list[tuple[Entries, Ints]]" = attrs.field(factory=list)

    @property
    def by(self) -> str:
        return described("publish", self.step, self.stream)

    def needed(self, runtime: Runtime, complete: Mapping[object, int]) -> bool:
        """Whether an entry comes from it, or a writer may have to wait for it or for a read of it. Never waits.

        `complete` is the last complete publish of each stream, by its key: what that stream was given before has run.
        """
        number = self.number
        if number > complete.get(self.stream.key, 0):
            return True
        for entries, rows in self.published:
            if 1 in (entries.number[rows] == number).tobytes():
                return True
        for reader, fence in self.reads.items():
            if isinstance(fence, int):
                if fence < complete.get(reader.key, 0):
                    continue
                if not any(1 in (entries.last_writer[rows] == number).tobytes() for entries, rows in self.published):
                    continue  # each row has a later writer, who has waited for the read
                fence = runtime.record(reader)
            if not fence.query():
                return True
        return False


@final
class Entries:
    """The entries of one field, one for each slot: no publish ever wraps around.

    Attributes:
        readers: bits of those that take each entry once.
        must_read: whether an entry that a reader has not taken must not be overwritten.
        generation: int64[capacity], of the owner that an entry was published for; 0 where it is unwritten.
        number: int64[capacity], of the publish; 0 where it is unwritten.
        last_writer: int64[capacity], of the last publish into this memory, also when the entry is unwritten again: the
            next writer still comes behind that publish, and behind the streams that read it.
        taken: uint8[capacity], bits of the readers that have taken it; of an unwritten one none has anything to take.
        changes: how often any of these was written: while it stays, entries are as they were found.
    """

    __slots__ = ("_all", "changes", "generation", "last_writer", "must_read", "number", "readers", "taken")

    def __init__(self, readers: int, must_read: bool, capacity: int) -> None:
        self.readers = readers
        self._all = _BITS[readers]
        self.must_read = must_read
        self.generation = np.zeros(capacity, dtype=np.int64)
        self.number = np.zeros(capacity, dtype=np.int64)
        self.last_writer = np.zeros(capacity, dtype=np.int64)
        self.taken = np.full(capacity, readers, dtype=np.uint8)
        self.changes = 0

    def clear(self, rows: Ints) -> None:
        """Makes the entries of `rows` unwritten. The last writers and readers of their memory stay known."""
        self.changes += 1
        self.generation[rows] = 0
        self.number[rows] = 0
        self.taken[rows] = self._all

    def publish(self, rows: Ints, generations: Ints, number: int, readers: int) -> None:
        """Notes that publish `number` has written the entries of `rows`; `readers` have its values already."""
        self.changes += 1
        self.generation[rows] = generations
        self.number[rows] = self.last_writer[rows] = number
        self.taken[rows] = readers

    def unread(self, rows: Ints) -> Mask:
        """Whether each entry is published, and a reader has not taken it. bool[n]."""
        unread: Mask = (self.number[rows] != 0) & ((self.taken[rows] & self.readers) != self.readers)
        return unread

    def take(self, rows: Ints, reader: int) -> None:
        self.changes += 1
        self.taken[rows] |= _BITS[reader]

    def all_taken(self, rows: Ints) -> bool:
        """Whether every reader has taken each entry: the fast form of FUTURE_UNREAD_OVERWRITTEN."""
        return (self.taken[rows] & self._all).tobytes() == bytes((self.readers,)) * rows.size

    def to_be_read(self, rows: Ints, generations: Ints, reader: int) -> bool:
        """Whether each entry was published for this generation, and was not taken by `reader`.

        The fast form of three codes. An unwritten entry has generation 0, which no live handle has.
        """
        taken = self.taken[rows] & _BITS[reader]
        return self.generation[rows].tobytes() == generations.tobytes() and taken.tobytes() == bytes(rows.size)

    def states(self, rows: Ints) -> list[EntryState]:
        pairs = zip(self.number[rows].tolist(), self.unread(rows).tolist(), strict=True)
        published = EntryState.CONSUMED, EntryState.PUBLISHED
        return [published[unread] if number else EntryState.UNWRITTEN for number, unread in pairs]


@final
@attrs.define(eq=False)
class PublishedRows:
    """Entries of one field for the same requests, as their last publish or gather left them.

    Attributes:
        live: the requests.
        rows: their slots, int64[n].
        generations: theirs, int64[n].
        read_on: the stream of the last gather, and the field's memory and the slots on the device, safe to use there.
        counted: these slots, where torch counts the writes into them; None before, and in inference mode.
        publications: the publishes that the entries come from, which nothing has written since.
        taken: bits of the readers that have taken all of them.
        kinds: dtype, shape and bytes of their values, for the copy to the host.
    """

    entries: Entries
    rows: Ints
    generations: Ints
    kinds: "list[tuple[np.dtype[Any], tuple[int, ...], int]]"
    live: Slots = attrs.field(init=False)
    read_on: tuple[Stream, torch.Tensor, torch.Tensor] | None = attrs.field(default=None, init=False)
    counted: torch.Tensor | None = attrs.field(default=None, init=False)
    publications: list[Publication] = attrs.field(factory=list, init=False)
    taken: int = attrs.field(default=0, init=False)
    _changes: int = attrs.field(default=-1, init=False)

    @property
    def unchanged(self) -> bool:
        """Whether nothing has written any entry of the field since `noted`. O(1)."""
        return self.entries.changes == self._changes

    def noted(self, publications: list[Publication], taken: int) -> None:
        self.publications, self.taken, self._changes = publications, taken, self.entries.changes

    def take(self, reader: int, publications: list[Publication]) -> None:
        entries, rows = self.entries, self.rows
        if self.unchanged:
            self.taken |= reader
            entries.changes += 1
            entries.taken[rows] = self.taken
            self._changes += 1
            return
        entries.take(rows, reader)
        if entries.last_writer[rows].tobytes() == entries.number[rows].tobytes():
            taken = entries.taken[rows]
            if taken.tobytes() == taken[:1].tobytes() * rows.size:
                self.noted(publications, int(taken[0]))

    def in_order(self, stream: Stream) -> bool:
        """Whether the last gather has put `stream` behind all that a publish of these entries waits for."""
        if self.read_on is None or self.read_on[0] is not stream or not self.unchanged:
            return False
        asked = 0
        for publication in self.publications:
            reads = publication.reads  # another stream's too, if a prefetch has failed after it read
            if stream.key not in publication.ordered or len(reads) > 1 or next(iter(reads), stream) is not stream:
                return False
            asked += 1 + len(reads)
        times_checked[FUTURE_ORDER] += asked * levels.cheap
        return asked > 0


@final
@attrs.define(eq=False, repr=False)
class RelayEntries(SlotListener):
    """The entries of all fields of one relay, the publishes they come from, and the order of streams around them.

    A listener of the slot pool: entries end with their owner. It has no device memory, which goes when the relay does,
    however long the pool lives.

    Attributes:
        fields: name -> entries.
        label: of the relay, for reports.
        publications: number -> publish, as long as an entry comes from it or the device may still be at it.
        prune_at: at how many publishes `prune` looks which are still needed.
    """

    _runtime: Runtime
    fields: dict[str, Entries]
    _is_live: Callable[[Ints], Mask]  # int64[n] -> bool[n]
    label: str
    publications: dict[int, Publication] = attrs.field(factory=dict, init=False)
    _by_fence: dict[int, Publication] = attrs.field(factory=dict, init=False)  # by its id: the publish keeps it alive
    _count: int = attrs.field(default=0, init=False)
    prune_at: int = attrs.field(default=16, init=False)

    # Writing

    def check_overwrite(self, rows: Ints, names: Iterable[str]) -> None:
        """Refuses to publish over entries that a reader still has to take: FUTURE_UNREAD_OVERWRITTEN, at `cheap`."""
        if levels.cheap:
            for name in names:
                entries = self.fields[name]
                if not entries.must_read or entries.all_taken(rows):
                    times_checked[UNREAD_OVERWRITTEN] += 1
                    continue
                unread = entries.unread(rows)
                invariants.future_unread_overwritten(
                    rows,
                    unread,
                    self._writer(entries, rows),
                    self.by("publish"),
                    READERS[entries.readers],
                    **self.where("publish", name),
                )

    def wait_to_overwrite(self, rows: Ints, names: Iterable[str]) -> None:
        """Puts the current stream behind the last publishes into these entries, and behind the streams that read them.

        FUTURE_ORDER, at `cheap`, where it does not stand there afterwards.
        """
        stream = self._runtime.current_stream
        for name in names:
            numbers = _each(self.fields[name].last_writer[rows])
            publications = [self.publications[number] for number in numbers if number in self.publications]
            self.wait_to_read(publications, stream, "publish")
            for publication in publications:
                waited = self._wait_for_reads(publication, stream)
                if levels.cheap:
                    for reader in publication.reads:
                        if reader is stream or reader == stream or reader in waited:
                            times_checked[FUTURE_ORDER] += 1
                            continue
                        invariants.future_order(
                            False,
                            f"a read on stream {reader.name!r} of {publication.by}",
                            self.by("publish"),
                            "a wait for that read",
                            **self.where("publish"),
                        )

    def publish(
        self, rows: Ints, generations: Ints, names: Iterable[str], fence: Fence, stream: Stream, readers: int = 0
    ) -> Publication:
        """Notes a publish for slots int64[n] of these generations on `stream`; `fence` is behind it, its own.

        `readers` have its values already. FUTURE_ORDER, at `cheap`: another publish shares the fence, which is not
        complete.
        """
        publication = self._add(fence, stream)
        for name in names:
            entries = self.fields[name]
            entries.publish(rows, generations, publication.number, readers)
            publication.published.append((entries, rows))
        return publication

    def mark_failed(self, rows: Ints, names: Collection[str], fence: Fence) -> None:
        """Notes a publish that failed half way: the memory of `names` was written, and the entries are unwritten."""
        publication = self._add(fence, self._runtime.current_stream)
        self.clear(rows, names)
        for name in names:
            self.fields[name].last_writer[rows] = publication.number

    def clear(self, rows: Ints, names: Iterable[str]) -> None:
        for name in names:
            self.fields[name].clear(rows)

    # Reading

    def check_read(
        self, rows: Ints, generations: Ints, names: Iterable[str], reader: int, operation: str, *, again: bool = False
    ) -> list[Publication]:
        """Checks entries of live slots int64[n] of these generations, and returns the publishes that they come from.

        `again` says that the reader has read them before, and that this was not noted yet. FUTURE_UNWRITTEN,
        FUTURE_GENERATION, FUTURE_CONSUMED, at `cheap`.
        """
        publications: dict[int, Publication] = {}
        for name in names:
            entries = self.fields[name]
            numbers = entries.number[rows]
            if levels.cheap and not again and entries.to_be_read(rows, generations, reader):
                for code in READ_CODES:
                    times_checked[code] += 1
            elif levels.cheap:
                where, writer, by = self.where(operation, name), self._writer(entries, rows), self.by(operation)
                invariants.future_unwritten(rows, numbers != 0, by, **where)
                invariants.future_generation(rows, entries.generation[rows], generations, writer, by, **where)
                taken = (entries.taken[rows] & reader) != 0
                invariants.future_consumed(rows, taken | again, writer, by, **where)
            for number in _each(numbers):
                if number:
                    publications[number] = self.publications[number]
        return list(publications.values())

    def publications_of(self, rows: Ints, name: str) -> list[Publication]:
        return [self.publications[number] for number in _each(self.fields[name].number[rows]) if number]

    def wait_to_read(self, publications: Sequence[Publication], stream: Stream, operation: str) -> None:
        """Puts `stream` behind the publishes; FUTURE_ORDER, at `cheap`, where it does not stand there afterwards."""
        key = stream.key
        for publication in publications:
            if key not in publication.ordered:
                self._runtime.wait(publication.fence, stream=stream)
                publication.ordered.add(key)
        if levels.cheap:
            for publication in publications:
                if key in publication.ordered:
                    times_checked[FUTURE_ORDER] += 1
                else:
                    writer, by = publication.by, self.by(operation, stream)
                    invariants.future_order(False, writer, by, f"a wait for {writer}", **self.where(operation))

    def note_read(self, publications: Sequence[Publication], stream: Stream, fence: Fence | None = None) -> None:
        """Notes a read on `stream`; `fence` is behind it. Without one, a writer waits for all that the stream has."""
        for publication in publications:
            if publication.ordered_reads:
                publication.ordered_reads = {pair for pair in publication.ordered_reads if pair[0] != stream}
            publication.reads[stream] = self._count if fence is None else fence

    def take(self, rows: Ints, names: Iterable[str], reader: int) -> None:
        for name in names:
            self.fields[name].take(rows, reader)

    # The listener of the slot pool

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        for entries in self.fields.values():
            entries.clear(rows)

    def verify(self) -> None:
        """Every entry belongs to a live slot: FUTURE_GENERATION."""
        for name, entries in self.fields.items():
            rows = np.flatnonzero(entries.number)
            published = entries.generation[rows]
            held = np.where(self._is_live(rows), published, 0)
            writer = self._writer(entries, rows)
            invariants.future_generation(rows, published, held, writer, "not read yet", **self.where("verify", name))

    # Reports

    def by(self, operation: str, stream: Stream | None = None) -> str:
        """The reader or writer of now: operation, step and stream, by default the current one."""
        return described(operation, self._runtime.step, stream or self._runtime.current_stream)

    def where(self, operation: str, field: str | None = None) -> Where:
        where: Where = {"object": self.label, "operation": operation, "step": self._runtime.step}
        if field is not None:
            where["column"] = field
        return where

    # Publishes

    def prune(self) -> None:
        """Now and then forgets the publishes not needed, so that one costs O(rows). Queries fences."""
        if len(self.publications) >= self.prune_at:
            complete: dict[object, int] = {}
            for number, publish in reversed(self.publications.items()):
                if publish.stream.key not in complete and publish.fence.query():
                    complete[publish.stream.key] = number
            needed = [publish for publish in self.publications.values() if publish.needed(self._runtime, complete)]
            self.publications = {publish.number: publish for publish in needed}
            self._by_fence = {id(publish.fence): publish for publish in needed}
            self.prune_at = max(16, 2 * len(needed))

    def _add(self, fence: Fence, stream: Stream) -> Publication:
        self._count += 1
        publication = Publication(self._count, self._runtime.step, stream, fence, {stream.key})
        if levels.cheap:
            times_checked[FUTURE_ORDER] += 1
            shared = self._by_fence.get(id(publication.fence))
            if shared is not None and not publication.fence.query():
                invariants.future_order(
                    False, shared.by, publication.by, "a fence for each publish", **self.where("publish")
                )
        self.publications[self._count] = self._by_fence[id(fence)] = publication
        return publication

    def _wait_for_reads(self, publication: Publication, stream: Stream) -> list[Stream]:
        """The other streams whose reads `stream` is now ordered after."""
        others = [reader for reader in publication.reads if reader is not stream and reader != stream]
        for reader in others:
            if (reader, stream.key) not in publication.ordered_reads:
                fence = publication.reads[reader]
                if isinstance(fence, int):  # none was needed yet
                    fence = publication.reads[reader] = self._runtime.record(reader)
                self._runtime.wait(fence, stream=stream)
                publication.ordered_reads.add((reader, stream.key))
        return others

    def _writer(self, entries: Entries, rows: Ints) -> Callable[[int], str]:
        """Names the publish that wrote the entry in a row."""

        def writer(row: int) -> str:
            publication = self.publications.get(int(entries.number[rows[row]]))
            return "an older publish" if publication is None else publication.by

        return writer


def described(operation: str, step: int, stream: Stream) -> str:
    return f"{operation} in step {step} on stream {stream.name!r}"


def _each(numbers: Ints) -> list[int]:
    """Each number once."""
    first = int(numbers[0]) if numbers.size else 0
    if 1 not in (numbers != first).tobytes():  # mostly one publish wrote all rows
        return [first]
    return sorted(set(numbers.tolist()))  # a few times as fast as `np.unique`
