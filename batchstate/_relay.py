"""The publishes that the entries of a relay come from, and the order of streams around them.

The contents of an entry, and its readers, are in `_core.Entries`. A publish has a fence of its own, and a stream waits
for the fences of those publishes whose entries it touches, on the device and once each. While a relay is used on one
stream, nothing is looked up or waited for, since its own order does.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate._arrays import Ints
from batchstate._core import Entries, Requests, refused_read, refused_write, take_entries, tally
from batchstate.errors import unexplained
from batchstate.invariants import times_checked
from batchstate.pools import SlotListener
from batchstate.runtime.base import Fence, Runtime, Stream
from batchstate.violations import Code, Where

# Members of an enumeration that the hot path counts by, looked up once.
FUTURE_ORDER, UNREAD_OVERWRITTEN = Code.FUTURE_ORDER, Code.FUTURE_UNREAD_OVERWRITTEN
READ_CODES = (Code.FUTURE_UNWRITTEN, Code.FUTURE_GENERATION, Code.FUTURE_CONSUMED)

DEVICE, HOST = 1, 2
"""The readers of an entry, as bits: the next forward, and the host."""

READERS = {DEVICE: "the next forward", HOST: "the host", DEVICE | HOST: "the next forward and the host"}

KEPT = 32
"""At least so many publishes are told apart, and twice as many at most. The fence of each keeps an event from reuse."""

MOST_STREAMS = 8
"""Streams with older uses, before it is asked which have run: an engine may make its streams anew in each step."""

NO_READS: dict[object, Any] = {}

Mask = npt.NDArray[np.bool_]
Numbers = set[int]  # of publishes


class EntryState(enum.StrEnum):
    """The life of an entry: published, and consumed when every reader has taken it."""

    UNWRITTEN = "unwritten"
    PUBLISHED = "published"
    CONSUMED = "consumed"


@final
class Use:
    """A publish, or a read of entries that came from one: a later reader or writer comes behind it.

    Attributes:
        number: from 1, in the order of the calls.
        operation: "publish" or "a read".
        fence: behind it, and for a publish no other's; None for a read behind which none was needed yet.
        ordered: keys of the streams that are ordered behind it.
        reads: of a publish, the last read on each stream, by its key; only where there are several streams.
    """

    __slots__ = ("fence", "number", "operation", "ordered", "reads", "step", "stream")

    def __init__(self, number: int, operation: str, step: int, stream: Stream, fence: Fence | None) -> None:
        self.number, self.operation, self.step, self.stream, self.fence = number, operation, step, stream, fence
        self.ordered: tuple[object, ...] = (stream.key,)
        self.reads = NO_READS

    @property
    def by(self) -> str:
        return f"{self.operation} in step {self.step} on stream {self.stream.name!r}"


@final
@attrs.define(eq=False, repr=False)
class RelayEntries(SlotListener):
    """The entries of all fields of one relay, the publishes they come from, and the order of streams around them.

    A listener of the slot pool: entries end with their owner. It has no device memory, which goes when the relay does,
    however long the pool lives.

    Attributes:
        fields: name -> entries.
        label: of the relay, for reports.
        publishes: number -> publish, the last ones.
        only: the stream of all uses, before there is a second.
    """

    _runtime: Runtime
    fields: dict[str, Entries]
    _is_live: Callable[[Ints], Mask]  # int64[n] -> bool[n]
    label: str
    publishes: dict[int, Use] = attrs.field(factory=dict, init=False)
    last: Use | None = attrs.field(default=None, init=False)  # publish
    _older: dict[object, Use] = attrs.field(factory=dict, init=False)  # stream -> the last use not told apart
    only: Stream | None = attrs.field(default=None, init=False)
    _read: int = attrs.field(default=0, init=False)  # the last publish of which this stream may have read entries
    _count: int = attrs.field(default=0, init=False)  # of uses

    # Checks

    def numbers(self, stream: Stream) -> Numbers | None:
        """Where a check puts the publishes that entries come from; None while all was on `stream`, the current one."""
        return None if stream is self.only else set()

    def check_overwrite(self, requests: Requests, fields: list[Entries], stream: Stream) -> Numbers | None:
        """The publishes that wrote these entries last; they must be read first: FUTURE_UNREAD_OVERWRITTEN, at `cheap`.

        To be passed to `come_behind`.
        """
        cheap = levels.cheap
        numbers: Numbers | None = None if stream is self.only else set()
        if cheap:
            times_checked[UNREAD_OVERWRITTEN] += len(fields)
        refused = refused_write(fields, requests, cheap, numbers)
        if refused >= 0:
            self._refuse_overwrite(requests, fields[refused])
        return numbers

    def _refuse_overwrite(self, requests: Requests, entries: Entries) -> NoReturn:
        rows = requests.handles()[0]
        number, taken = entries.arrays["number"][rows], entries.arrays["taken"][rows]
        unread = (number != 0) & ((taken & entries.readers) != entries.readers)
        writer, readers = self._writer(number), READERS[entries.readers]
        where = self.where("publish", entries.name)
        invariants.future_unread_overwritten(rows, unread, writer, self.by("publish"), readers, **where)
        raise unexplained("FutureMap", "publish", UNREAD_OVERWRITTEN)

    def check_read(
        self, requests: Requests, names: Sequence[str], reader: int, stream: Stream, operation: str
    ) -> Numbers | None:
        """The publishes that entries of live requests come from, which `reader` has not taken.

        To be passed to `come_behind`. FUTURE_UNWRITTEN, FUTURE_GENERATION, FUTURE_CONSUMED, at `cheap`.
        """
        numbers = self.numbers(stream)
        refused = refused_read([self.fields[name] for name in names], requests, reader, levels.cheap, numbers)
        if levels.cheap:
            tally(times_checked, READ_CODES * len(names))
        if refused >= 0:
            self.refuse_read(requests, names[refused], reader, operation)
        return numbers

    def refuse_read(self, requests: Requests, name: str, reader: int, operation: str) -> NoReturn:
        """Raises for the entries of a field that `reader` may not take."""
        entries, (rows, generations) = self.fields[name], requests.handles()
        number, by, where = entries.arrays["number"][rows], self.by(operation), self.where(operation, name)
        writer, taken = self._writer(number), (entries.arrays["taken"][rows] & reader) != 0
        invariants.future_unwritten(rows, number != 0, by, **where)
        invariants.future_generation(rows, entries.arrays["generation"][rows], generations, writer, by, **where)
        invariants.future_consumed(rows, taken, writer, by, **where)
        raise unexplained("FutureMap", operation, READ_CODES[0])

    def verify(self) -> None:
        """Every entry belongs to a live slot: FUTURE_GENERATION."""
        for name, entries in self.fields.items():
            rows = np.flatnonzero(entries.arrays["number"])
            published = entries.arrays["generation"][rows]
            held = np.where(self._is_live(rows), published, 0)
            writer = self._writer(entries.arrays["number"][rows])
            invariants.future_generation(rows, published, held, writer, "not read yet", **self.where("verify", name))

    # The order of streams

    def come_behind(self, numbers: Numbers | None, stream: Stream, operation: str, *, to_write: bool = False) -> None:
        """Puts `stream` behind these publishes, and `to_write` behind the reads of what they wrote.

        FUTURE_ORDER, at `cheap`, where it does not stand there afterwards.
        """
        if numbers is None:
            return
        if not self.publishes:
            self.only = stream
            return
        if self.only is not None:
            self._note_reads_of(self.only)
        uses: list[Use] = []
        key, older = stream.key, False
        for number in numbers:
            publish = self.publishes.get(number)
            if publish is not None:
                uses.append(publish)
                if to_write:
                    uses += publish.reads.values()
            else:
                older = True
        if older:
            self._forget_complete()
            uses += self._older.values()
        for use in uses:
            if key not in use.ordered:
                self._runtime.wait(self._fence_of(use), stream=stream)
                use.ordered = (*use.ordered, key)
            if key not in use.ordered and levels.cheap:
                missing, where = f"a wait for {use.by}", self.where(operation)
                invariants.future_order(False, use.by, self.by(operation, stream), missing, **where)
        times_checked[FUTURE_ORDER] += len(uses) * levels.cheap

    def note_read(self, numbers: Numbers | None, stream: Stream, fence: Fence | None = None) -> None:
        """Notes a read on `stream` of what these publishes wrote; `fence` is behind it.

        Without one, a writer on another stream waits for all that the stream has by then.
        """
        if numbers is None or stream is self.only:
            self._read = self._count
            return
        self._count += 1
        read = Use(self._count, "a read", self._runtime.step, stream, fence)
        for number in numbers:
            publish = self.publishes.get(number)
            if publish is None and read.fence is None:
                read.fence = self._runtime.record(stream)
            if publish is None:
                self._older[stream.key] = read
            else:
                publish.reads = {**publish.reads, stream.key: read}

    def published(self, numbers: Numbers | None) -> list[Use]:
        """Those of the publishes that are told apart; on one stream the last, which is behind the others."""
        numbers = {self._count} if numbers is None else numbers
        return [self.publishes[number] for number in numbers if number in self.publishes]

    def _note_reads_of(self, only: Stream) -> None:
        """A second stream has come: until its last read, the first one may have read all that there was."""
        self.only = None
        self.note_read({number for number in self.publishes if number <= self._read}, only)
        if self._older:
            self.note_read({0}, only)

    def _fence_of(self, use: Use) -> Fence:
        """The fence behind a use: if it has none, that of the next publish on its stream, or one that is made now."""
        if use.fence is None:
            key, number = use.stream.key, use.number
            later = (one.fence for one in self.publishes.values() if one.number > number and one.stream.key == key)
            use.fence = next(later, None) or self._runtime.record(use.stream)
        return use.fence

    def _forget(self) -> None:
        """Tells the first publishes apart no longer: a use of their entries comes behind all uses that are as old.

        The last one of these on each stream is behind the others, so nothing is asked of the device.
        """
        publishes = [*self.publishes.items()]
        self.publishes = dict(publishes[KEPT:])
        # While there is one stream, no read was noted, and the last publish is behind all.
        for _, publish in publishes[KEPT - 1 if self.only is not None else 0 : KEPT]:
            for use in (publish, *publish.reads.values()):
                before = self._older.get(use.stream.key)
                if before is None or before.number < use.number:
                    self._older[use.stream.key] = use
            publish.reads = NO_READS
        for use in self._older.values():
            self._fence_of(use)
        if len(self._older) > MOST_STREAMS:
            self._forget_complete()

    def _forget_complete(self) -> None:
        self._older = {key: use for key, use in self._older.items() if not self._fence_of(use).query()}

    # Notes

    def publish(
        self,
        requests: Requests,
        fields: list[Entries],
        fence: Fence,
        stream: Stream,
        to_host: Collection[str] = (),
    ) -> Use:
        """Notes a publish for live requests on `stream`; `fence` is behind it, its own.

        The host has the values of the fields `to_host` already. FUTURE_ORDER, at `cheap`: the publish before
        shares the fence, which is not complete.
        """
        if levels.cheap:
            times_checked[FUTURE_ORDER] += 1
            last = self.last
            if last is not None and last.fence is fence and not fence.query():
                by, missing = self.by("publish", stream), "a fence for each publish"
                invariants.future_order(False, last.by, by, missing, **self.where("publish"))
        self._count = number = self._count + 1
        publishes = self.publishes
        self.last = publishes[number] = publish = Use(number, "publish", self._runtime.step, stream, fence)
        if len(publishes) > 2 * KEPT:
            self._forget()
        for entries in fields:
            entries.publish(requests, number, HOST if entries.name in to_host else 0)
        return publish

    def mark_failed(self, requests: Requests, names: Iterable[str], fence: Fence, stream: Stream) -> None:
        """Notes a publish that failed half way: the memory of `names` was written, and the entries are unwritten."""
        publish, (rows, _) = self.publish(requests, [], fence, stream), requests.handles()
        for name in names:
            self.fields[name].clear(rows, publish.number)

    def take(self, requests: Requests, names: Iterable[str], reader: int) -> None:
        take_entries([self.fields[name] for name in names], requests, reader)

    def give_back(self, requests: Requests, names: Iterable[str], reader: int) -> None:
        """`reader` has not taken these entries, as it turned out; nothing of requests that have left."""
        rows, generations = requests.handles()
        for name in names:
            arrays = self.fields[name].arrays
            arrays["taken"][rows[arrays["generation"][rows] == generations]] &= ~reader & 0xFF

    def clear(self, rows: Ints, names: Iterable[str]) -> None:
        for name in names:
            self.fields[name].clear(rows)

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        for entries in self.fields.values():
            entries.clear(rows)

    # Reports

    def states(self, rows: Ints, name: str) -> list[EntryState]:
        entries = self.fields[name]
        numbers, taken = entries.arrays["number"][rows], entries.arrays["taken"][rows] & entries.readers
        states = np.where(numbers == 0, 0, np.where((taken != entries.readers) | (entries.readers == 0), 1, 2))
        return [[*EntryState][state] for state in states.tolist()]

    def by(self, operation: str, stream: Stream | None = None) -> str:
        """The reader or writer of now: operation, step and stream, by default the current one."""
        return Use(0, operation, self._runtime.step, stream or self._runtime.current_stream, None).by

    def where(self, operation: str, field: str | None = None) -> Where:
        where: Where = {"object": self.label, "operation": operation, "step": self._runtime.step}
        if field is not None:
            where["column"] = field
        return where

    def _writer(self, numbers: Ints) -> Callable[[int], str]:
        """Names the publish that wrote the entry in a row."""

        def writer(row: int) -> str:
            publish = self.publishes.get(int(numbers[row]))
            return "an older publish" if publish is None else publish.by

        return writer
