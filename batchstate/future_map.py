"""`FutureMap`: carries what only a forward knows to the next step and to the host, and no thread waits for the device.

A relay is device memory with one entry a slot for each declared field. Forward N publishes into it, on its stream;
forward N + 1 gathers from it, on its stream; the host asks for rows at launch, and reads them when it needs them::

    publish   lengths as soon as they are certain, tokens and drafts after sampling; from the host, what a request
              that arrives prebuilt or comes back starts from
    gather    on the device, into the next forward
    prefetch  to the host, over a private stream, only the rows asked for; `resolve` is prefetch and wait

An entry is unwritten, published or consumed. Each publish has its own fence, and a reader on another stream waits for
the fences of those publishes whose entries it reads. Reading an entry too early, twice or as another request, and
overwriting one unread, is reported at level `cheap`, on the host, before anything is launched.

The relay is always on: an engine that waits for each step uses it as one that runs ahead does.
"""

import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import carried, check_dense, put_rows, select_rows, shape_of
from batchstate._relay import (
    DEVICE,
    HOST,
    READ_CODES,
    READERS,
    UNREAD_OVERWRITTEN,
    Entries,
    EntryState,
    Publication,
    PublishedRows,
    RelayEntries,
)
from batchstate._upload import Extras
from batchstate.errors import (
    ArgumentError,
    CaptureError,
    DeclarationError,
    DeviceError,
    DtypeError,
    ShapeError,
    another_runtime,
    expected,
    one_of,
)
from batchstate.forward.inputs import ForwardInputs, Sources, end_to_end
from batchstate.forward.plan import ForwardPlan
from batchstate.invariants import times_checked
from batchstate.mirror import Contract, DeviceSide, MirroredTensor, Slots
from batchstate.nvtx import ranges
from batchstate.pools import SlotPool
from batchstate.runtime.base import Download, Fence, OfThisProcess, Runtime, Stream
from batchstate.runtime.memory import NUMPY_DTYPES, ReadyTensor, host_dtype, numpy_dtype
from batchstate.tables import Table
from batchstate.violations import Code, Where

__all__ = ["EntryState", "FutureMap", "Prefetched", "RelayField", "relay_field"]

Array = npt.NDArray[Any]

_MOVABLE = {*NUMPY_DTYPES, torch.bfloat16, torch.complex64, torch.complex128}
"""Dtypes that torch moves by index on every device."""

_MOST_IN_RECORD = 256
"""Bytes of the largest entry that lies in a record with others. Larger ones, such as hidden states, lie by themselves:
there a copy of the values into one piece costs more than a launch."""

NO_RECORDS: Mapping[tuple[str, ...], torch.Tensor] = {}

_READ_BY = {"device": DEVICE, "host": HOST, "both": DEVICE | HOST}


@final
@attrs.frozen
class RelayField:
    """One declared field of a `FutureMap`; `relay_field` makes it, and says what each attribute means.

    Attributes:
        readers: bits of `read_by`: `DEVICE`, `HOST`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    readers: int
    non_negative: bool
    must_read: bool
    ragged: bool = False

    @property
    def nbytes(self) -> int:
        """Size of one entry."""
        return math.prod(self.shape) * self.dtype.itemsize


def relay_field(
    dtype: torch.dtype,
    shape: Sequence[int] = (),
    *,
    read_by: str = "device",
    non_negative: bool = False,
    must_read: bool = True,
    ragged: bool = False,
) -> RelayField:
    """Declares a field of a `FutureMap`.

    Args:
        dtype: any that torch moves by index (no float8, nothing quantised); one that numpy shares if the host reads it,
            or if `non_negative`.
        shape: of one entry.
        read_by: the reader that takes each published entry, once: `device` (the next forward, by `gather`), `host` (by
            `prefetch` or `resolve`) or `both`. An entry that one of them has not taken must not be overwritten.
        non_negative: the values are ids, lengths or indices. A negative one is then SENTINEL_ESCAPED wherever the host
            sees it, and at `full` on the device too.
        must_read: whether overwriting what was not read is a violation. Not for what is wanted now and then, such as
            log-probabilities.
        ragged: requests have different numbers of values, such as the drafts of an n-gram or a tree, and `shape` is the
            most, `(k,)`. A forward puts in the first ones of each request, as many as its plan says; what follows them
            may hold anything. Lists of unequal lengths are published with -1 behind them.

    Raises:
        DeclarationError: another reader; a ragged field that is not one row of signed integers.
        DtypeError: a dtype that cannot be moved, or one that the host cannot read.
        ShapeError, ArgumentError, DtypeError: `shape` is not a tuple or list of counts.
    """
    if read_by not in _READ_BY:
        raise DeclarationError(f"relay_field: read_by is {read_by!r}", read_by, one_of(_READ_BY, read_by))
    if dtype not in _MOVABLE:
        raise DtypeError(f"a relay field of {dtype}", dtype, "view such values as torch.uint8, and declare that")
    readers = _READ_BY[read_by]
    if readers & HOST or non_negative:
        numpy_dtype(dtype)
    sizes = shape_of(shape, "a relay field")
    if ragged and (len(sizes) != 1 or dtype not in (torch.int32, torch.int64)):
        remedy = "declare the most values of a request, as relay_field(torch.int64, (k,), ragged=True)"
        raise DeclarationError(f"a ragged relay field of {dtype}{list(sizes)}", sizes, remedy)
    return RelayField(dtype, sizes, readers, non_negative, must_read, ragged)


@final
@attrs.frozen(eq=False)
class SelectedRecord:
    """Entries of fields that lie side by side, taken out in one piece.

    Attributes:
        rows: their bytes, uint8[n, nbytes] on the device.
        places: of each field in a row of it, with its declaration.
    """

    rows: torch.Tensor
    places: Sequence[tuple[slice, RelayField]]

    def split(self, rows: Array) -> list[Array]:
        """Each field [n, *shape] on the host, in memory of its own; `rows` are the bytes that arrived there."""
        return [
            rows[:, part].copy().view(numpy_dtype(field.dtype)).reshape(len(rows), *field.shape)
            for part, field in self.places
        ]


@final
@attrs.define(eq=False, repr=False)
class Prefetched(Mapping[str, MirroredTensor]):
    """Fields of some requests, asked for with `FutureMap.prefetch`; row i is that of `slots[i]`.

    Reading a field waits for the copy, if it has not run yet: `prefetched["tokens"]`, or `resolve()` for all. The slots
    may be freed meanwhile: the rows were taken out when they were asked for, and stay those of the requests that had
    the slots then. `prefetched["tokens"].aligned(batch.slots)` has the rows of a batch.

    Attributes:
        slots: the requests.
    """

    slots: Slots
    _fields: Mapping[str, RelayField]
    _rows: Sequence[torch.Tensor | None]  # None where the device side is made from the host's when it is asked for
    _read: tuple[Stream, Fence]  # the stream that selected the rows, and a fence behind that
    _download: Download
    _publications: Sequence[Publication]
    _relay: str
    _record: SelectedRecord | None = None  # where the fields came in one piece
    _values: dict[str, MirroredTensor] | None = attrs.field(default=None, init=False)

    def __repr__(self) -> str:
        return f"Prefetched({', '.join(self._fields)} of {len(self.slots)} requests)"

    @property
    def _where(self) -> Where:
        return {"object": self._relay, "operation": "resolve", "step": self._download.step}

    # Two prefetches are never equal; a mapping would compare values, and wait for them.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def ready(self) -> bool:
        """Whether `resolve` would return at once. Never waits."""
        return self._values is not None or (not self.slots.runtime.capturing and self._download.ready())

    def resolve(self) -> Mapping[str, MirroredTensor]:
        """Each field as an exact value, both sides from one read of the relay. Waits for that copy alone.

        Raises:
            OwnerThreadError: called from a second thread.
            CaptureError: a stream is being captured, under which no fence may be asked.
            Violation: FUTURE_ORDER, SENTINEL_ESCAPED, STAGING_REUSED, at `cheap`.
        """
        if self._values is None:
            runtime = self.slots.runtime
            if get_ident() != runtime.owner.ident:
                runtime.check_owner(f"{self._download.name}: resolve")
            arrays = self._download.resolve()
            if self._record is not None:
                arrays = self._record.split(arrays[0])
            if levels.cheap:
                self._check_order()
            values = {}
            for (name, field), array, device in zip(self._fields.items(), arrays, self._rows, strict=True):
                if levels.cheap and field.non_negative and not field.ragged:
                    where: Where = {**self._where, "column": name}
                    invariants.sentinel_escaped(array.reshape(-1), **where)
                values[name] = MirroredTensor(
                    runtime,
                    array,
                    None if device is None else DeviceSide(ReadyTensor(device, *self._read, set())),
                    dtype=field.dtype,
                    shape=array.shape,
                    contract=Contract.EXACT,
                    name=name,
                    row_set=self.slots.row_set,
                )
                if device is not None:
                    values[name].check("resolve")
            self._values = values
        return self._values

    def _check_order(self) -> None:
        """The values had been published when they were read, as the publish's fence says, and have landed."""
        times_checked[Code.FUTURE_ORDER] += 1 + len(self._publications)
        done = self._download.done
        for publish in self._publications:
            if publish.fence is not done and not publish.fence.query():
                invariants.future_order(False, publish.by, "the host", f"a wait for {publish.by}", **self._where)
        if not done.query():
            invariants.future_order(False, "the copy from the device", "the host", "a wait for the copy", **self._where)

    def __getitem__(self, field: str) -> MirroredTensor:
        if field not in self._fields:
            raise KeyError(f"{field!r} was not prefetched, only {', '.join(self._fields)}")
        return self.resolve()[field]

    def __contains__(self, field: object) -> bool:
        return field in self._fields  # and waits for nothing, which `__getitem__` would

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


@ranges("publish", "gather", "prefetch", "resolve", "resolve_forward_inputs")
@final
class FutureMap(OfThisProcess):
    """A relay over the slots of one pool. Belongs to the runtime's thread.

    Args:
        slots: the pool; entries end when their slot is freed.
        fields: name -> `relay_field(...)`.
        name: for reports.

    Raises:
        DeclarationError: no fields.
        ArgumentError: fields larger than memory can be.
    """

    def __init__(self, slots: SlotPool, fields: Mapping[str, RelayField], *, name: str = "relay") -> None:
        self.slots = slots
        self.runtime = slots.runtime
        self.name = name
        self._fields = dict(fields)
        if not fields:
            remedy = "pass a mapping, such as {'last_token': relay_field(torch.int64)}"
            raise DeclarationError(f"{name}: expected fields by name, got none", fields, remedy)
        capacity, entries = slots.capacity, {}
        for field, declared in self._fields.items():
            shape_of(declared.shape, f"{name}: {field}", rows=capacity)
            entries[field] = Entries(declared.readers, declared.must_read, capacity)
        self._record: torch.Tensor  # uint8[capacity, nbytes], the entries of all small fields, if there are several
        self._places: dict[str, slice] = {}  # of these in it
        self._gathered_elements: dict[tuple[str, ...], ReadyTensor] = {}  # of fields that lie apart in it
        self._memory = self._allocated(capacity)
        self._entries = RelayEntries(self.runtime, entries, slots.is_live, label=repr(self))
        self._gather_names = {field: f"{name}: gather {field}" for field in self._fields}
        self._publish_names = {field: f"{name}: {field}" for field in self._fields}
        self._transaction = slots.transaction
        self._private = self.runtime.stream(f"{name}: to the host")
        slots.add_listener(self._entries)
        weakref.finalize(self, slots.remove_listener, self._entries).atexit = False
        self._zeroed_on, self._zeroed = self.runtime.current_stream, self.runtime.record()
        self._synchronised: dict[str, set[object]] = {field: set() for field in self._fields}

    def __repr__(self) -> str:
        return f"FutureMap({self.name!r}, {', '.join(self._fields)})"

    def _allocated(self, capacity: int) -> dict[str, torch.Tensor]:
        """The memory of each field [capacity, *shape]. Entries of small ones lie side by side in a record per slot."""
        small = {name: field for name, field in self._fields.items() if 0 < field.nbytes <= _MOST_IN_RECORD}
        memory = {}
        if len(small) > 1:
            end = 0
            for name in sorted(small, key=lambda name: -small[name].dtype.itemsize):  # so that each is aligned
                self._places[name] = slice(end, end + small[name].nbytes)
                end += small[name].nbytes
            width = end + -end % max(field.dtype.itemsize for field in small.values())
            named = f"{self.name}: {', '.join(self._places)}"
            self._record = record = self.runtime.device_zeros((capacity, width), torch.uint8, name=named)
            with torch.inference_mode(False):  # a view made in inference mode can be written there alone
                for name, part in self._places.items():
                    memory[name] = record[:, part].view(small[name].dtype).view(capacity, *small[name].shape)
        for name, field in self._fields.items():
            if name not in memory:
                shape = capacity, *field.shape
                memory[name] = self.runtime.device_zeros(shape, field.dtype, name=f"{self.name}: {name}")
        return memory

    def _runs(self, names: Iterable[str]) -> list[list[str]]:
        """The names in runs that lie side by side in the record; a field that is not in it is a run of its own."""
        runs: list[list[str]] = []
        end = -1
        places = self._places
        for name in sorted(names, key=lambda name: places[name].start if name in places else -1):
            if name in places and places[name].start == end:
                runs[-1].append(name)
            else:
                runs.append([name])
            end = places[name].stop if name in places else -1
        return runs

    @property
    def fields(self) -> Mapping[str, RelayField]:
        """The declarations by name."""
        return dict(self._fields)

    def states(self, slots: Slots, field: str) -> list[EntryState]:
        """The states of the entries of some requests.

        Raises:
            DeclarationError: no such field. Handles: as for `SlotPool.check_handles`.
        """
        self._check_fields((field,), "states")
        return self._entries.fields[field].states(self._live(slots, "states").np)

    # Writing

    def publish(self, slots: Slots, /, **values: object) -> None:
        """Makes values known to the next forward and to the host, on the current stream: two launches, one fence.

        So it is for any number of fields that lie side by side, as small ones of one element size do in the order of
        their declaration, larger elements first; others go by themselves, with a launch each.

        Publish what is certain early, such as lengths right after verification, in a call of its own: readers on other
        streams wait for this publish, and for nothing that the forward does behind it. Values that the host has, for
        requests that arrive prebuilt or come back, are uploaded in one copy; fields side by side are then one array and
        one launch. They count as read by the host.

        Args:
            slots: the requests; live handles, each once. Padded rows at the end are left out.
            **values: field -> device tensor `[n, *shape]`, made on the current stream, or a mirrored value, whose
                device side is published; or host values, as a list or an array `[n, *shape]`.

        Raises:
            DeclarationError: no such field, or none at all.
            ShapeError, DtypeError, DeviceError, ValueOverflowError: values that do not go into the field.
            CaptureError: the stream is being captured; a replay would publish without the relay's knowledge.
            Violation: codes of handles; SLOT_SHARED; SENTINEL_ESCAPED: a negative host value in a field that has none;
                DERIVED_STALE, at `cheap`: a mirrored value whose rows are of other requests; FUTURE_UNREAD_OVERWRITTEN
                and FUTURE_ORDER at `cheap`. Nothing was published.
        """
        live, device, host = self._checked_publish(slots, values)
        if not len(live):
            return
        tensors = {name: _live_rows(value, len(live)) for name, value in device.items()}
        records: dict[tuple[str, ...], torch.Tensor] = {}
        if host:
            runs = self._runs(host)
            packed = self.runtime.upload([live.np, *(_host_record([host[name] for name in run]) for run in runs)])
            index = packed.view(0)
            records = {tuple(run): packed.view(i) for i, run in enumerate(runs, 1)}
        else:
            index = self._index(slots, live)
        self._scatter(live.np, live.generations, index, tensors, host, records)

    def _checked_publish(
        self, slots: Slots, values: Mapping[str, object]
    ) -> tuple[Slots, dict[str, torch.Tensor | MirroredTensor], dict[str, Array]]:
        """The checks of `publish`, before it changes anything: live rows, values on the device and on the host."""
        self._check_call("publish")
        if not values:
            raise DeclarationError(f"{self.name}: publish of no field", None, f"name one of: {', '.join(self._fields)}")
        self._check_fields(values, "publish")
        self._entries.prune()
        live = self._live(slots, "publish")
        num_rows = len(live), len(slots)
        device: dict[str, torch.Tensor | MirroredTensor] = {}
        host: dict[str, Array] = {}
        for name, value in values.items():
            if isinstance(value, (torch.Tensor, MirroredTensor)):
                if isinstance(value, MirroredTensor) and value.row_set is not None:
                    slots.row_set.check_same(value.row_set, value, **self._entries.where("publish", name))
                subject = f"{self.name}: publish of {name!r}"
                _check_device_values(value, self._fields[name], num_rows, self.runtime, subject)
                device[name] = value
            else:
                host[name] = self._checked_host_values(name, value, num_rows)
        self._entries.check_overwrite(live.np, values)
        return live, device, host

    def packed(self, rows: Array, generations: Array, values: Mapping[str, object]) -> "PackedPublish":
        """A publish of host values that cross with the copy of a step, for checked handles. For the library.

        Raises:
            As `publish`; ArgumentError: values that are on the device already.
        """
        self._check_fields(values, "publish")
        host: dict[str, Array] = {}
        for name, value in values.items():
            if isinstance(value, (torch.Tensor, MirroredTensor)):
                problem = f"{self.name}: {name!r} from the device, with the copy of a step"
                raise ArgumentError(problem, name, "publish what a forward has made with `publish`")
            host[name] = self._checked_host_values(name, value, (rows.size, rows.size))
        self._entries.check_overwrite(rows, host)
        return PackedPublish(self, rows, generations, host)

    def _checked_host_values(self, name: str, value: object, num_rows: tuple[int, int]) -> Array:
        field = self._fields[name]
        array = _host_values(value, field, num_rows, f"{self.name}: publish of {name!r}")
        if field.non_negative and not field.ragged:
            invariants.sentinel_escaped(array.reshape(-1), **self._entries.where("publish", name))
        return array

    def _scatter(
        self,
        rows: Array,
        generations: Array,
        index: torch.Tensor,
        values: Mapping[str, torch.Tensor],
        from_host: Collection[str],
        records: Mapping[tuple[str, ...], torch.Tensor] = NO_RECORDS,
    ) -> Publication:
        """Launches and notes a publish; `index` and `values` are safe on this stream.

        `from_host` names the fields that the host has read by this; `records` are further values, of fields side by
        side in one tensor.
        """
        names = [*values]
        for several in records:
            names += several
        self._entries.wait_to_overwrite(rows, names)
        launched: list[str] = []
        self._transaction.operation = "publish"
        try:
            # Two launches one by one, too.
            runs = self._runs(values) if len(values) > 2 else [[name] for name in values]
            for run in (*runs, *records):
                if len(run) > 1:
                    memory, label = self._part_of_record(run), f"{self.name}: {', '.join(run)}"
                else:
                    memory, label = self._memory_of(run[0]), self._publish_names[run[0]]
                if isinstance(run, tuple):
                    tensor = records[run]
                elif len(run) == 1:
                    tensor = values[run[0]]
                else:
                    parts = [values[name] for name in run]
                    tensor = self.runtime.launch(_as_record, parts, reads=parts, name=f"{label}: pack")
                self.runtime.launch(
                    put_rows, memory, index, tensor, reads=(index, tensor), writes=(memory,), name=label
                )
                launched += run
            stream = self.runtime.current_stream
            all_from_host = len(from_host) == len(names)
            fence, readers = self.runtime.record(stream), HOST if all_from_host else 0
            publication = self._entries.publish(rows, generations, names, fence, stream, readers)
            if not all_from_host:
                self._entries.take(rows, from_host, HOST)
        except Exception:
            self._publish_failed(rows, launched)
            raise
        self._transaction.operation = None
        if levels.full:
            self.check("publish")
        return publication

    def _publish_failed(self, rows: Array, written: Collection[str]) -> None:
        """Notes a publish that torch could not launch: a device takes no launch back."""
        if written:
            self._entries.mark_failed(rows, written, self.runtime.record())
        self._transaction.operation = None

    def discard(self, slots: Slots, *fields: str) -> None:
        """Makes entries unwritten that no reader wants any more; all fields by default. Touches no device memory.

        Raises:
            DeclarationError: no such field. Handles: as for `SlotPool.check_handles`.
        """
        self._check_fields(fields, "discard")
        self._discard(self._live(slots, "discard").np, fields or self._fields)

    def _discard(self, rows: Array, names: Iterable[str]) -> None:
        self._transaction.operation = "discard"
        self._entries.clear(rows, names)
        self._transaction.operation = None

    # Reading

    def gather(self, slots: Slots, field: str) -> torch.Tensor:
        """Takes the entries of some requests into a forward, on the current stream: one launch, no copy, no wait.

        Args:
            slots: the requests; live handles. Padded rows at the end read the zeros of slot 0.
            field: one that the next forward reads.

        Returns:
            a new device tensor `[n, *shape]`.

        Raises:
            DeclarationError: no such field, or one that only the host reads.
            CaptureError: the stream is being captured.
            Violation: codes of handles; FUTURE_UNWRITTEN, FUTURE_GENERATION, FUTURE_CONSUMED, FUTURE_ORDER at `cheap`,
                SENTINEL_ESCAPED at `full`. Nothing was taken.
        """
        self._check_call("gather")
        self._check_fields((field,), "gather", DEVICE)
        live = self._live(slots, "gather")
        publications = self._entries.check_read(live.np, live.generations, (field,), DEVICE, "gather")
        values = self._gathered(publications, (field,), slots.device)
        self._entries.take(live.np, (field,), DEVICE)
        return values

    def _gathered(
        self, publications: Sequence[Publication], fields: Sequence[str], index: torch.Tensor
    ) -> torch.Tensor:
        """Launches and notes a gather of checked entries, end to end; `index` is safe on this stream."""
        stream = self.runtime.current_stream
        self._entries.wait_to_read(publications, stream, "gather")
        alone, field = len(fields) == 1, fields[0]
        if alone:
            rows = self._select(self._memory_of(field), index, self._gather_names[field])
        else:
            rows = self._select_several(fields, index)
        if publications:
            self._entries.note_read(publications, stream)
        if levels.full:
            widths = [math.prod(self._fields[field].shape) for field in fields]
            for i, field in enumerate(fields):
                first = sum(widths[:i])
                self._check_gathered(field, rows if alone else rows[:, first : first + widths[i]])
        return rows

    def _check_gathered(self, field: str, rows: torch.Tensor) -> None:
        declared = self._fields[field]
        if declared.non_negative and not (declared.ragged or self.runtime.checks_suspended()):
            invariants.sentinel_escaped(self.runtime.inspect(rows).reshape(-1), **self._entries.where("gather", field))

    # The same requests in step after step: `StepPlanner` calls these.

    def published_rows(self, field: str, rows: Array, generations: Array) -> PublishedRows:
        """The record that `gather_again` and `publish_again` keep of these requests; its `live` is set later."""
        dtype = numpy_dtype(self._fields[field].dtype)
        kinds = [(dtype, rows.shape, rows.size * dtype.itemsize)]
        return PublishedRows(self._entries.fields[field], rows, generations, kinds)

    def gather_again(self, kept: PublishedRows, field: str, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """`gather` for checked handles on the current `stream`: the entries, and the slots on the device."""
        if levels.full:
            kept.live.check("gather")
        if self._transaction.operation is not None:
            self._transaction.enter("gather")
        entries = self._entries
        if kept.unchanged and not kept.taken & DEVICE:
            publications = kept.publications
            for code in READ_CODES if levels.cheap else ():
                times_checked[code] += 1
        else:
            publications = entries.check_read(kept.rows, kept.generations, (field,), DEVICE, "gather")
        entries.wait_to_read(publications, stream, "gather")
        if kept.read_on is None or kept.read_on[0] is not stream:
            index = kept.live.device.data  # with a count of its own writes
            kept.read_on = stream, self._memory_of(field), index
            kept.counted = None if index.is_inference() else index
        _, memory, index = kept.read_on
        gathered: torch.Tensor = self.runtime.launch(
            torch.gather, memory, 0, index, reads=(memory, index), name=self._gather_names[field]
        )
        entries.note_read(publications, stream)
        if levels.full:
            self._check_gathered(field, gathered)
        self._transaction.operation = "gather"
        kept.take(DEVICE, publications)
        self._transaction.operation = None
        return gathered, index

    def publish_again(self, kept: PublishedRows, field: str, values: torch.Tensor, to_host: bool) -> Prefetched | None:
        """`publish` of checked values int64[n] for handles of this pool, and with `to_host` one copy to the host."""
        if levels.full:
            kept.live.check("publish")
        if self._transaction.operation is not None:
            self._transaction.enter("publish")
        entries, declared, names = self._entries, self._fields[field], (field,)
        if len(entries.publications) >= entries.prune_at:
            entries.prune()
        runtime = self.runtime
        if runtime.capturing:
            runtime.refuse_capture("a publish")
        stream = runtime.current_stream
        if to_host and not values.is_contiguous():
            values = values.contiguous()
        unchanged = kept.unchanged
        if not unchanged:  # else all are there: entries change when their slot is freed
            self.slots.check_rows(kept.rows, kept.generations, "publish")
        if unchanged and kept.taken & declared.readers == declared.readers:
            times_checked[UNREAD_OVERWRITTEN] += levels.cheap
        else:
            entries.check_overwrite(kept.rows, names)
        if kept.read_on is not None and kept.in_order(stream):
            _, memory, index = kept.read_on
        else:
            memory, index = self._memory_of(field), kept.live.device
            entries.wait_to_overwrite(kept.rows, names)
        name = self._publish_names[field]
        readers, launched, download = HOST if to_host else 0, False, None
        self._transaction.operation = "publish"
        try:
            runtime.launch(memory.index_copy_, 0, index, values, reads=(index, values), writes=(memory,), name=name)
            launched = True
            if to_host:  # on this stream, where what is published may be written over later; one fence is behind both
                download = runtime.land(values, kept.kinds, self.name, stream)
            fence = runtime.record(stream) if download is None else download.done
            publication = entries.publish(kept.rows, kept.generations, names, fence, stream, readers)
            kept.noted([publication], readers)
        except Exception:
            self._publish_failed(kept.rows, names if launched else ())
            raise
        self._transaction.operation = None
        if levels.full:
            self.check("publish")
        if download is None:
            return None
        here = stream, download.done
        return Prefetched(kept.live, {field: declared}, (None,), here, download, (publication,), entries.label)

    def prefetch(self, slots: Slots, *fields: str) -> Prefetched:
        """Starts to bring entries to the host, over the relay's private stream, in one copy. Does not wait.

        Call it right behind the publish: the host gets the values that the entries hold now, whatever comes later.

        Args:
            slots: the requests; live handles. Padded rows at the end are left out.
            *fields: those that the host reads.

        Raises:
            DeclarationError: no such field, one named twice, none, or one that the host does not read.
            CaptureError, Violation: as `gather`. Nothing was taken.
        """
        self._check_call("prefetch")
        self._check_fields(fields, "prefetch", HOST)
        if not fields or len(set(fields)) < len(fields):
            problem = f"{self.name}: prefetch of {fields}"
            raise DeclarationError(problem, fields, "name each field once, and at least one")
        live = self._live(slots, "prefetch")
        publications = self._entries.check_read(live.np, live.generations, fields, HOST, "prefetch")
        with self.runtime.use(self._private):
            index = self._index(slots, live)
            stream = self.runtime.current_stream
            self._entries.wait_to_read(publications, stream, "prefetch")
            record = self._selected_record(fields, index) if len(fields) > 1 else None
            if record is None:
                rows = [self._select(self._memory_of(name), index, self._gather_names[name]) for name in fields]
            else:
                rows = [record.rows]
            read = self.runtime.record(stream)
            self._entries.note_read(publications, stream, read)
            download = self.runtime.download(rows, name=self.name)
        self._transaction.operation = "prefetch"
        self._entries.take(live.np, fields, HOST)
        self._transaction.operation = None
        declared = {name: self._fields[name] for name in fields}
        label = self._entries.label
        sides = rows if record is None else [None] * len(fields)
        return Prefetched(live, declared, sides, (self._private, read), download, publications, label, record)

    def resolve(self, slots: Slots, field: str) -> MirroredTensor:
        """One field as an exact value, both sides from one read of the relay. Waits for its publish and its copy.

        Raises:
            As `prefetch`, and `Prefetched.resolve`.
        """
        return self.prefetch(slots, field)[field]

    def resolve_forward_inputs(
        self,
        plan: ForwardPlan,
        uploaded: Extras,
        *,
        ids: str | Sequence[str] = (),
        lengths: str | None = None,
        req_to_token: Table | None = None,
    ) -> ForwardInputs:
        """The inputs of a forward, at its entry, on its stream: one path for prompts, decodes and both at once.

        Ids of prompts are uploaded from staging memory here, on the current stream; ids of all other requests come
        from the relay. Where the host knows only bounds of the lengths, the true ones come from the relay too, and
        positions, KV lengths and slot mapping are set right in the forward's own view.

        Args:
            plan: the host's part. It is used once.
            uploaded: returned by `batch.upload(extras=plan.extras)`.
            ids: the field, or fields, whose entries end to end are the tokens that a request puts in: the last token,
                or the last token and drafts. None where the plan has no ids, or the host knows all of them.
            lengths: the field with the tokens in KV memory before this step; needed where the plan has bounds. Name it
                in every step of an engine that publishes it: where the host knows them, its entries are taken unread.
            req_to_token: [slot, position] -> token; needed where the plan has bounds and a slot mapping.

        Raises:
            DeclarationError: no such field, one named twice, or one whose entries cannot be ids or lengths; none for
                ids that the relay has, or one for a plan without ids.
            DtypeError: ids of another dtype than the plan's, or lengths that are neither int64 nor int32.
            ShapeError: a request puts in another number of tokens than its entries have.
            ContractError: bounds, and no field with the true lengths.
            ArgumentError: an upload without the plan's extras; no token table for a slot mapping, or none of this
                pool's slots.
            Violation: DERIVED_STALE, at `cheap`: a plan of other rows than those of the upload, or of pages that have
                changed since; PAGE_OWNER: a page that it writes has got further holders; FUTURE_CONSUMED: the plan was
                used before. Else as `gather`, for all requests of the plan. Device values (MIRROR_BOUND, MIRROR_EQUAL,
                SENTINEL_ESCAPED at `full`) are checked after they were taken.
        """
        operation = "resolve_forward_inputs"
        self._check_call(operation)
        names = (ids,) if isinstance(ids, str) else tuple(ids)
        read = names if lengths is None else (*names, lengths)
        self._check_fields(read, operation)
        if len(set(read)) < len(read):
            raise DeclarationError(f"{self.name}: inputs from fields {read}", read, "name each field once")
        widths = [_id_width(name, self._fields[name], plan.id_dtype, self.name) for name in names]
        width = least = sum(widths)
        ragged = [name for name in names if self._fields[name].ragged]
        if ragged and ragged != [*names[-1:]]:
            problem = f"{self.name}: inputs from fields {names}, of which {', '.join(ragged)} is ragged"
            remedy = "name one ragged field, and name it last: the ids of a request are in one sequence"
            raise DeclarationError(problem, names, remedy)
        if ragged:
            least -= widths[-1]
        if not names and plan.relay_rows.size:
            width = int(plan.query_lens[plan.relay_rows[0]])
        if lengths is not None:
            _check_lengths(lengths, self._fields[lengths], self.name)
        if req_to_token is not None and req_to_token.space is not self.slots:
            problem = f"{self.name}: expected a table of slots of {self.slots.name!r}, got {req_to_token!r}"
            raise ArgumentError(problem, req_to_token, "pass the token table over the relay's pool")
        self._live(plan.slots, operation)
        sources, gathered = self._sources(names, width, lengths, req_to_token, least)
        sources.check(plan, uploaded, self.name)
        if len(plan.relayed):
            self._check_fields(read, operation, DEVICE)
            relayed = plan.relayed
            self._entries.check_read(relayed.np, relayed.generations, read, DEVICE, operation)
        return self._resolved(plan, uploaded, sources, gathered)

    def resolve_checked(self, plan: ForwardPlan, uploaded: Extras, ids: tuple[str, ...]) -> ForwardInputs:
        """The same for `StepPlanner`, which has made the plan for this relay, and has sent it.

        Only what may have changed since is checked: that the requests are there, their pages, and their entries.
        """
        operation = "resolve_forward_inputs"
        self._check_call(operation)
        self.slots.rows_of(plan.slots, operation)
        plan.check(None, operation)
        return self._resolved(plan, uploaded, *self._sources(ids, 1, None, None, 1))

    def _sources(
        self, names: tuple[str, ...], width: int, lengths: str | None, req_to_token: Table | None, least: int
    ) -> tuple[Sources, list[str]]:
        """Where inputs come from, and the fields that were gathered: these are taken when all has succeeded."""
        gathered: list[str] = []

        def gather(slots: Slots, *fields: str) -> torch.Tensor:
            live = _unpadded(slots)
            again = fields[0] in gathered
            publications = self._entries.check_read(live.np, live.generations, fields, DEVICE, "gather", again=again)
            gathered.extend(fields)
            return self._gathered(publications, fields, slots.device)

        return Sources(self.runtime, gather, names, width, lengths, req_to_token, least), gathered

    def _resolved(self, plan: ForwardPlan, uploaded: Extras, sources: Sources, gathered: list[str]) -> ForwardInputs:
        """The inputs of a checked plan, with the entries that they take."""
        operation, lengths = "resolve_forward_inputs", sources.lengths
        plan.check_unused()
        inputs = ForwardInputs.resolve(plan, uploaded, sources)
        if lengths is not None and not plan.bounded:
            self._check_known_lengths(plan, lengths)
            gathered.append(lengths)  # without a read, since the host knows them: so entries end alike in every mode
        self._transaction.operation = operation
        self._entries.take(plan.relayed.np, gathered, DEVICE)
        plan.use()
        self._transaction.operation = None
        return inputs

    def _check_known_lengths(self, plan: ForwardPlan, lengths: str) -> None:
        """MIRROR_EQUAL, at `full`: the last forward published other lengths than those that the host has."""
        relayed = plan.relayed
        if levels.full and len(relayed) and not self.runtime.checks_suspended():
            before = (plan.seq_lens - plan.query_lens)[plan.relay_rows]
            index = self.runtime.upload([relayed.np]).view(0)
            operation = "resolve_forward_inputs"
            publications = self._entries.publications_of(relayed.np, lengths)
            stream = self.runtime.current_stream
            self._entries.wait_to_read(publications, stream, operation)
            true = self.runtime.inspect(self._memory_of(lengths).index_select(0, index))
            invariants.mirror_equal(before.astype(true.dtype), true, **self._entries.where(operation, lengths))

    # Checks

    def check(self, operation: str = "check") -> None:
        """Row 0 of each field is zero, and no entry outlived its owner. Reads device memory; not under capture.

        Raises:
            Violation: SLOT_ZERO_DIRTY, FUTURE_GENERATION.
        """
        self._transaction.enter(f"{self.name}: check")
        if self.runtime.checks_suspended():
            return
        for name in self._memory:
            bits = self._memory_of(name)[0].reshape(-1).view(torch.uint8)
            invariants.slot_zero_dirty(self.runtime.inspect(bits), **self._entries.where(operation, name))
        self._entries.verify()

    def _check_call(self, operation: str) -> None:
        """Refuses calls from a second thread, and calls whose effects a replayed graph would repeat unnoticed."""
        self._transaction.enter(f"{self.name}: {operation}")
        if self.runtime.capturing:
            raise CaptureError(
                f"{self.name}: {operation} while the stream is captured: replays would bypass the relay's bookkeeping",
                remedy="gather before the replay, into the graph's inputs, and publish its outputs after it",
            )

    def _check_fields(self, names: Iterable[str], operation: str, reader: int = 0) -> None:
        """Refuses names of fields that are not declared, or not for `reader`."""
        for name in names:
            field = self._fields.get(name)
            if field is None:
                problem = f"{self.name}: {operation} of {name!r}, which is not declared"
                raise DeclarationError(problem, name, one_of(self._fields, name))
            if reader & ~field.readers:
                problem = f"{self.name}: {operation} of {name!r}, which is read by {READERS[field.readers]}"
                raise DeclarationError(problem, name, "declare the field with read_by='both'")

    def _live(self, slots: Slots, operation: str) -> Slots:
        """The rows of `slots` before the padding at their end, each a live handle and named once."""
        live = _unpadded(slots)
        self.slots.rows_of(live, f"{self.name}: {operation}", unique=True)  # refuses a zero elsewhere
        return live

    # Device memory

    def _index(self, slots: Slots, live: Slots) -> torch.Tensor:
        """The live rows on the device, out of those that were uploaded with the batch."""
        index = slots.device
        return index if len(live) == len(slots) else index[: len(live)]

    def _memory_of(self, field: str) -> torch.Tensor:
        """The entries of a field, safe on the current stream: it comes behind the kernel that zeroed them."""
        return self.runtime.use_on_current_stream(
            self._memory[field], self._zeroed_on, self._zeroed, synchronised=self._synchronised[field]
        )

    def _part_of_record(self, run: Sequence[str]) -> torch.Tensor:
        """The bytes [capacity, nbytes] of fields that lie side by side, safe on the current stream."""
        self._memory_of(run[0])  # one allocation for all
        return self._record[:, self._places[run[0]].start : self._places[run[-1]].stop]

    def _select(self, memory: torch.Tensor, index: torch.Tensor, label: str) -> torch.Tensor:
        return self.runtime.launch(select_rows, memory, index, reads=(memory, index), name=label)

    def _selected_record(self, names: Sequence[str], index: torch.Tensor) -> SelectedRecord | None:
        """The entries of fields, in one launch; None where they do not lie side by side, each aligned in the piece."""
        runs = self._runs(names)
        if len(runs) > 1:
            return None
        memory = self._part_of_record(runs[0])
        start = self._places[runs[0][0]].start
        if memory.shape[1] % max(self._fields[name].dtype.itemsize for name in names):
            return None
        rows = self._select(memory, index, f"{self.name}: gather {', '.join(names)}")
        parts = [slice(self._places[name].start - start, self._places[name].stop - start) for name in names]
        return SelectedRecord(rows, [(part, self._fields[name]) for part, name in zip(parts, names, strict=True)])

    def _select_several(self, names: Sequence[str], index: torch.Tensor) -> torch.Tensor:
        """The entries of fields of one dtype, end to end for each request, [n, width]: one launch from the record."""
        label, dtype = f"{self.name}: gather {', '.join(names)}", self._fields[names[0]].dtype
        if self._runs(names) == [[*names]]:
            return self._select(self._part_of_record(names).view(dtype), index, label)
        if all(name in self._places for name in names):  # in another order, or with others between
            elements = self._elements(names, dtype.itemsize)
            self._memory_of(names[0])  # one allocation for all
            operands = self._record.view(dtype), index, elements
            return self.runtime.launch(_elements_of, *operands, reads=operands, name=label)
        parts = [self._select(self._memory_of(name), index, self._gather_names[name]) for name in names]
        return self.runtime.launch(end_to_end, parts, reads=parts, name="ids of requests")

    def _elements(self, names: Sequence[str], size: int) -> torch.Tensor:
        """The elements, of so many bytes each, that these fields are in a record, int64[width]; they cross once."""
        elements = self._gathered_elements.get((*names,))
        if elements is None:
            parts = [self._places[name] for name in names]
            upload = self.runtime.upload(
                [np.concatenate([np.arange(part.start // size, part.stop // size) for part in parts])]
            )
            elements = self._gathered_elements[(*names,)] = ReadyTensor.uploaded(upload.view(0), upload)
        return elements.on_current_stream(self.runtime)


@final
@attrs.frozen(eq=False)
class PackedPublish:
    """A checked publish of host values, which is launched once they have crossed. Made by `FutureMap.packed`."""

    _relay: FutureMap
    _rows: Array
    _generations: Array
    _values: Mapping[str, Array]

    @property
    def arrays(self) -> list[Array]:
        """The values of each field, which have to cross first."""
        return [*self._values.values()]

    def launch(self, index: torch.Tensor, sides: Sequence[torch.Tensor]) -> Publication:
        """Scatters them on the current stream; `index` is the slots on the device, `sides` those of `arrays`."""
        values = dict(zip(self._values, sides, strict=True))
        return self._relay._scatter(self._rows, self._generations, index, values, self._values)

    def launch_alone(self) -> None:
        """The same with a copy of their own."""
        packed = self._relay.runtime.upload([self._rows, *self.arrays])
        self.launch(packed.view(0), [packed.view(1 + i) for i in range(len(self._values))])

    def take_back(self) -> None:
        """Makes the entries unwritten again."""
        self._relay._discard(self._rows, self._values)


def _as_record(parts: list[torch.Tensor]) -> torch.Tensor:
    """The bytes of values [n, *shape], those of one request behind each other, uint8[n, nbytes]. One kernel."""
    return end_to_end([part.contiguous().view(part.shape[0], -1).view(torch.uint8) for part in parts])


def _host_record(parts: list[Array]) -> Array:
    """The same on the host; a single part as it is."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.ascontiguousarray(part.reshape(len(part), -1)).view(np.uint8) for part in parts], axis=1)


def _elements_of(record: torch.Tensor, rows: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    return record[rows[:, None], elements]  # one kernel


def _unpadded(slots: Slots) -> Slots:
    """The rows before the padding at their end."""
    rows = slots.np
    if not rows.size or rows[-1]:
        return slots
    zeros = int(np.count_nonzero(rows == 0))
    padded = not rows[len(slots) - zeros :].any()
    return slots.split([len(slots) - zeros, zeros])[0] if padded else slots


def _check_device_values(
    value: torch.Tensor | MirroredTensor, field: RelayField, num_rows: tuple[int, int], runtime: Runtime, subject: str
) -> None:
    """Refuses values that do not go into `field`. Does not touch the device: a mirrored value may have no tensor yet.

    `num_rows` are the live rows, and all rows; the values may be as many as either.
    """
    if isinstance(value, MirroredTensor):
        if value.runtime is not runtime:
            raise another_runtime(subject, value)
        _ = value.device_side  # refuses one that is knowingly old
        if levels.full:
            value.check("publish")
    elif value.device != runtime.device:
        problem = f"{subject}: expected a tensor on {runtime.device}, got one on {value.device}"
        remedy = "pass a tensor of the runtime's device, or host values as a list or an array"
        raise DeviceError(problem, str(value.device), remedy)
    else:
        check_dense(value, subject)
    if value.dtype != field.dtype:
        raise expected(subject, field.dtype, value.dtype, "convert it in the forward", DtypeError)
    _check_shape(tuple(value.shape), field, num_rows, subject)


def _host_values(value: object, field: RelayField, num_rows: tuple[int, int], subject: str) -> Array:
    """The live rows of host values for `field`, which are sent on at once: an array may be the caller's own."""
    if type(value) is np.ndarray and value.dtype is NUMPY_DTYPES.get(field.dtype) and not field.ragged:
        _check_shape(value.shape, field, num_rows, subject)
        return value[: num_rows[0]]
    if field.ragged:
        value = _filled(value, field.shape[0])
    array: Array = carried(value, *host_dtype(field.dtype), subject)
    if array.shape == (0,) and num_rows[0] == 0:
        array = np.empty((0, *field.shape), array.dtype)  # an empty list knows no shape of a row
    _check_shape(array.shape, field, num_rows, subject)
    return array[: num_rows[0]]


def _filled(value: object, width: int) -> object:
    """Lists of up to `width` values each, as rows with -1 behind them; anything else as it is."""
    if not isinstance(value, list | tuple) or not all(isinstance(row, list | tuple) for row in value):
        return value
    return [[*row, *[-1] * (width - len(row))] for row in value]


def _check_shape(shape: tuple[int, ...], field: RelayField, num_rows: tuple[int, int], subject: str) -> None:
    if not shape or shape[1:] != field.shape or shape[0] not in num_rows:
        allowed = " or ".join(str([number, *field.shape]) for number in dict.fromkeys(num_rows))
        problem = f"{subject}: expected shape {allowed}, got {list(shape)}"
        raise ShapeError(problem, shape, "pass one entry per request, in the order of the slots")


def _live_rows(value: torch.Tensor | MirroredTensor, live: int) -> torch.Tensor:
    """The first `live` rows of a checked value, safe on the current stream."""
    tensor = value.device if isinstance(value, MirroredTensor) else value
    if tensor.requires_grad:
        tensor = tensor.detach()  # else the relay would keep the graph behind each value, for ever
    return tensor[:live] if tensor.shape[0] != live else tensor


def _id_width(name: str, field: RelayField, dtype: torch.dtype, relay: str) -> int:
    """Ids per request in a field that feeds a forward whose ids are `dtype`."""
    subject = f"{relay}: ids from field {name!r}"
    if field.dtype != dtype:
        remedy = f"declare it {dtype}, as the ids of this forward are; ForwardPlan.of(..., int32=...) says which"
        raise DtypeError(f"{subject} of {field.dtype}", field.dtype, remedy)
    if len(field.shape) > 1:
        remedy = "ids of a request are one number, or one row of them"
        raise DeclarationError(f"{subject} of {list(field.shape)}", field.shape, remedy)
    return field.shape[0] if field.shape else 1


def _check_lengths(name: str, field: RelayField, relay: str) -> None:
    """Refuses a field whose entries cannot be lengths."""
    subject = f"{relay}: lengths from field {name!r}"
    if field.shape:
        remedy = "the length of a request is one number"
        raise DeclarationError(f"{subject} of {list(field.shape)}", field.shape, remedy)
    if field.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{subject} of {field.dtype}", field.dtype, "declare it torch.int64 or torch.int32")
