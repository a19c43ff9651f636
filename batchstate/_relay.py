"""What is given to a relay, or named of it, checked before anything is launched."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import converted, count
from batchstate.errors import DeclarationError, DeviceError, DtypeError, ShapeError
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.runtime import NUMPY_DTYPES, Fence, Runtime, Stream, numpy_dtype
from batchstate.violations import Where

# Declarations of relay fields: what a forward leaves for the next step, and who takes it.

DEVICE, HOST = 1, 2
"""The readers of an entry, as bits: the next forward, and the host."""

_MOVABLE = {*NUMPY_DTYPES, torch.bfloat16, torch.complex64, torch.complex128}
"""Dtypes that torch moves by index on every device."""

_READERS = {"device": DEVICE, "host": HOST, "both": DEVICE | HOST}


@final
@attrs.frozen
class RelayField:
    """One declared field of a `FutureMap`; made by `relay_field`.

    Attributes:
        dtype: of the elements.
        shape: of one entry.
        readers: who takes each publish once: `DEVICE`, `HOST`, or both bits.
        non_negative: whether a negative value is a stand-in that escaped.
        must_read: whether an entry that a reader has not taken must not be overwritten.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    readers: int
    non_negative: bool
    must_read: bool

    @property
    def readers_named(self) -> str:
        """The readers in words."""
        return {DEVICE: "the next forward", HOST: "the host"}.get(self.readers, "the next forward and the host")


def relay_field(
    dtype: torch.dtype,
    shape: Sequence[int] = (),
    *,
    read_by: str = "device",
    non_negative: bool = False,
    must_read: bool = True,
) -> RelayField:
    """Declares a field of a `FutureMap`.

    Args:
        dtype: any that torch moves by index (no float8, nothing quantised); one that numpy shares if the host reads it,
            or if `non_negative`.
        shape: of one entry.
        read_by: who takes each published entry, once: `device` (the next forward, by `gather`), `host` (by `prefetch`
            or `resolve`) or `both`. An entry that one of them has not taken must not be overwritten.
        non_negative: the values are ids, lengths or indices. A negative one is then SENTINEL_ESCAPED wherever the host
            sees it, and at `full` on the device too.
        must_read: whether overwriting what was not read is a violation. Not for what is wanted now and then, such as
            log-probabilities.

    Raises:
        DeclarationError: another reader.
        DtypeError: no torch dtype, one that cannot be moved, or one that the host cannot read.
        ShapeError: `shape` is no sequence.
        ArgumentError, DtypeError: it holds something else than counts.
    """
    given: Any = read_by
    if not isinstance(given, str) or given not in _READERS:
        raise DeclarationError(
            f"a relay field read by {given!r}", value=given, remedy=f"use one of: {', '.join(_READERS)}"
        )
    given = dtype
    if not isinstance(given, torch.dtype):
        raise DtypeError(f"a relay field of {given!r}", value=given, remedy="pass a torch dtype, as torch.int64")
    if given not in _MOVABLE:
        raise DtypeError(
            f"a relay field of {given}", value=given, remedy="view such values as torch.uint8, and declare that"
        )
    readers = _READERS[read_by]
    if readers & HOST or non_negative:
        numpy_dtype(dtype)
    given = shape
    if not isinstance(given, tuple | list):
        raise ShapeError(f"a relay field of shape {given!r}", value=given, remedy="pass a tuple, as `(8,)`")
    return RelayField(
        dtype, tuple(count(size, "shape") for size in shape), readers, bool(non_negative), bool(must_read)
    )


def checked_fields(fields: Mapping[str, RelayField], what: str) -> dict[str, RelayField]:
    """The declarations by name.

    Raises:
        DeclarationError: none at all, a name that is no identifier, or something that is no field.
    """
    given: Any = fields
    if not isinstance(given, Mapping) or not given:
        raise DeclarationError(f"{what}: no fields", value=given, remedy="pass a mapping of names to relay_field(...)")
    for name, field in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name in ("slots", "self", "by"):
            raise DeclarationError(
                f"{what}: {name!r} cannot name a field", value=name, remedy="use an identifier other than slots and by"
            )
        if not isinstance(field, RelayField):
            raise DeclarationError(
                f"{what}: field {name!r} is {type(field).__name__}", value=field, remedy="declare it with relay_field"
            )
    return dict(given)


# Which entries of a relay are unwritten, published or consumed, by whom, and behind which fence.
#
# Host bookkeeping in numpy, O(rows) a call. A publish is noted when it is enqueued; that the device gets there in the
# same order is the business of its fence.

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


# The order of streams around a relay: who reads comes behind who wrote, and who overwrites comes behind both.
#
# Every publish has its own fence, and a stream waits for the fences of those publishes whose entries it touches, on the
# device and once each. On one stream its own order does, and nothing is waited for.


@final
class StreamOrder:
    """Makes streams wait, and judges that they did.

    Args:
        runtime: the device.
        where: of reports, for an operation.
    """

    def __init__(self, runtime: Runtime, where: Callable[[str], Where]) -> None:
        self._runtime = runtime
        self._where = where

    def read(self, publications: Sequence[Publication], reader: str, operation: str) -> None:
        """Puts the current stream behind the publishes.

        Raises:
            Violation: FUTURE_ORDER, at `cheap`.
        """
        stream = self._runtime.current_stream
        for made in publications:
            self._await_publish(made, stream)
        if levels.cheap:
            for made in publications:
                invariants.future_order(
                    stream.key in made.known_to, made.by, reader, f"a wait for {made.by}", **self._where(operation)
                )

    def noted(self, publications: Sequence[Publication], fence: Fence) -> None:
        """Notes a read of the current stream; `fence` is behind it."""
        stream = self._runtime.current_stream
        for made in publications:
            made.reads[stream] = fence
            made.passed = {pair for pair in made.passed if pair[0] != stream}

    def overwrite(self, publications: Sequence[Publication], writer: str, operation: str) -> None:
        """Puts the current stream behind the publishes and behind everybody who has read from them.

        Raises:
            Violation: FUTURE_ORDER, at `cheap`.
        """
        self.read(publications, writer, operation)
        stream = self._runtime.current_stream
        for made in publications:
            waited = self._await_reads(made, stream)
            if levels.cheap:
                for reader in made.reads:
                    invariants.future_order(
                        reader == stream or reader in waited,
                        f"a read on stream {reader.name!r} of {made.by}",
                        writer,
                        "a wait for that read",
                        **self._where(operation),
                    )

    def check_fence(self, fence: Fence, others: Sequence[Publication], writer: str, operation: str) -> None:
        """Two publishes share no fence, unless it is complete and orders everything.

        Raises:
            Violation: FUTURE_ORDER.
        """
        shared = next((made for made in others if made.fence is fence), None)
        invariants.future_order(
            shared is None or fence.query(),
            "" if shared is None else shared.by,
            writer,
            "a fence for each publish",
            **self._where(operation),
        )

    def _await_publish(self, made: Publication, stream: Stream) -> None:
        if stream.key not in made.known_to:
            self._runtime.wait(made.fence, stream=stream)
            made.known_to.add(stream.key)

    def _await_reads(self, made: Publication, stream: Stream) -> set[Stream]:
        """The streams whose reads the current one now comes behind."""
        others = [reader for reader in made.reads if reader != stream]
        for reader in others:
            if (reader, stream.key) not in made.passed:
                self._runtime.wait(made.reads[reader], stream=stream)
                made.passed.add((reader, stream.key))
        return set(others)


# The books of a relay: what every field holds for whom, and the laws of reading and writing it.
#
# All of it is on the host, and asked before anything is launched. The memory itself is the relay's business.


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


Array = npt.NDArray[Any]


def check_device_values(
    value: torch.Tensor | MirroredTensor, field: RelayField, num_rows: tuple[int, int], runtime: Runtime, what: str
) -> None:
    """Refuses what cannot be published into `field`. The device is not touched: a mirrored value may have none yet.

    Args:
        value: tensor or mirrored value, of as many rows as are live, or of all with the padded ones at the end.
        field: the declaration.
        num_rows: live rows, and all rows.
        runtime: the device.
        what: the operation, for messages.

    Raises:
        DtypeError, ShapeError, DeviceError: it does not go into the field.
    """
    if isinstance(value, MirroredTensor):
        if value.runtime is not runtime:
            raise DeviceError(f"{what}: {value!r} has another runtime", value=value, remedy="use one runtime")
        _ = value.device_side  # refuses one that is knowingly old
    elif value.device != runtime.device:
        raise DeviceError(
            f"{what}: expected a tensor on {runtime.device}, got one on {value.device}",
            value=str(value.device),
            remedy="pass a tensor of the runtime's device, or host values as a list or an array",
        )
    elif value.layout is not torch.strided:
        raise DtypeError(
            f"{what}: a tensor of layout {value.layout}", value=str(value.layout), remedy="pass a dense tensor"
        )
    if value.dtype != field.dtype:
        raise DtypeError(
            f"{what}: {value.dtype} for {field.dtype}", value=value.dtype, remedy="convert it in the forward"
        )
    _check_shape(tuple(value.shape), field, num_rows, what)


def live_rows(value: torch.Tensor | MirroredTensor, live: int) -> torch.Tensor:
    """The first `live` rows of a checked value, safe on the current stream."""
    tensor = value.device if isinstance(value, MirroredTensor) else value
    if tensor.requires_grad:
        tensor = tensor.detach()  # else the relay would keep the graph behind each value, for ever
    return tensor[:live] if tensor.shape[0] != live else tensor


def _check_shape(shape: tuple[int, ...], field: RelayField, num_rows: tuple[int, int], what: str) -> None:
    live, with_padding = num_rows
    if not shape or shape[1:] != field.shape or shape[0] not in num_rows:
        rows = str(live) if live == with_padding else f"{live} or {with_padding}"
        raise ShapeError(
            f"{what}: {list(shape)} for {rows} rows of {list(field.shape)}",
            value=shape,
            remedy="pass one entry a request, in the order of the slots",
        )


def host_values(value: object, field: RelayField, num_rows: tuple[int, int], what: str) -> Array:
    """The live rows of host values for `field`, in an array of their own.

    Arguments as for `check_device_values`.

    Raises:
        DtypeError, ShapeError, ValueOverflowError: they do not go into the field, or numpy lacks its dtype.
    """
    array: Array = converted(value, numpy_dtype(field.dtype), what)
    if array.shape == (0,) and num_rows[0] == 0:
        array = np.empty((0, *field.shape), array.dtype)  # an empty list knows no shape of a row
    _check_shape(array.shape, field, num_rows, what)
    return array[: num_rows[0]]


def id_width(name: str, field: RelayField, what: str) -> int:
    """Ids that an entry of a field holds, for fields that feed a forward.

    Raises:
        DtypeError, DeclarationError: entries that are no ids.
    """
    if field.dtype != torch.int64:
        raise DtypeError(
            f"{what}: ids from field {name!r} of {field.dtype}",
            value=field.dtype,
            remedy="declare it torch.int64: the ids of a forward are",
        )
    if len(field.shape) > 1:
        raise DeclarationError(
            f"{what}: ids from field {name!r} of {list(field.shape)}",
            value=field.shape,
            remedy="ids of a request are one number, or one row of them",
        )
    return field.shape[0] if field.shape else 1


def check_lengths(name: str, field: RelayField, what: str) -> None:
    """Refuses a field whose entries are no lengths.

    Raises:
        DtypeError, DeclarationError: see there.
    """
    if field.shape:
        raise DeclarationError(
            f"{what}: lengths from field {name!r} of {list(field.shape)}",
            value=field.shape,
            remedy="the length of a request is one number",
        )
    if field.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"{what}: lengths from field {name!r} of {field.dtype}",
            value=field.dtype,
            remedy="declare it torch.int64 or torch.int32",
        )
