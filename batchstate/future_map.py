"""`FutureMap`: what only a forward knows reaches the next step, and the host, without anybody waiting for the device.

A relay is device memory with one entry a slot for each declared field. Forward N publishes into it, on its stream;
forward N + 1 gathers from it, on its stream; the host, if it wants to know too, asks for rows when it launches and
reads them when it has something to do with them::

    publish   lengths as soon as they are certain, tokens and drafts after sampling; from the host, what a request
              that arrives prebuilt or comes back starts from
    gather    on the device, into the next forward
    prefetch  to the host, over a private stream, only the rows asked for; `resolve` is prefetch and wait

An entry is unwritten, published or consumed. Each publish has its own fence, and a reader on another stream waits for
the fences of those publishes whose entries it reads. Who reads an entry too early, twice, or as somebody else, and who
overwrites one unread, is told so at level `cheap`, on the host, before anything is launched.

The relay is always on: an engine that waits for each step uses it as one that runs ahead does.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import put_rows, select_rows
from batchstate._relay import (
    DEVICE,
    HOST,
    EntryState,
    Publication,
    RelayField,
    RelayLedger,
    StreamOrder,
    check_device_values,
    check_lengths,
    checked_fields,
    host_values,
    id_width,
    live_rows,
    relay_field,
)
from batchstate._upload import Extras
from batchstate.errors import ArgumentError, CaptureError, DeclarationError
from batchstate.forward.inputs import ForwardInputs, Sources
from batchstate.forward.plan import ForwardPlan
from batchstate.indices import Slots
from batchstate.mirror import Contract, DeviceSide, Made, MirroredTensor
from batchstate.pools import SlotListener, SlotPool
from batchstate.runtime import Fence, Runtime, Stream
from batchstate.runtime.memory import Download
from batchstate.tables import Table
from batchstate.violations import Where

# Relay entries on their way to the host.


@final
class Prefetched(Mapping[str, MirroredTensor]):
    """Fields of some requests, asked for with `FutureMap.prefetch`; row i is that of `slots[i]`.

    Reading a field waits for the copy, if it has not run yet: `prefetched["tokens"]`, or `resolve()` for all. What
    becomes of the slots meanwhile does not matter: the rows were taken out when they were asked for.

    Attributes:
        slots: the requests.
    """

    def __init__(
        self,
        runtime: Runtime,
        slots: Slots,
        fields: Mapping[str, RelayField],
        rows: Sequence[torch.Tensor],
        made: tuple[Stream, Fence],
        download: Download,
        publications: Sequence[Publication],
        where: Where,
    ) -> None:
        self.slots = slots
        self._runtime = runtime
        self._fields = fields
        self._rows = rows
        self._made = made
        self._download = download
        self._publications = publications
        self._where = where
        self._values: dict[str, MirroredTensor] | None = None

    def __repr__(self) -> str:
        return f"Prefetched({', '.join(self._fields)} of {len(self.slots)} requests)"

    # Two prefetches are never equal; a mapping would compare values, and wait for them.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def ready(self) -> bool:
        """Whether `resolve` would return at once. Never waits."""
        return self._values is not None or (not self._runtime.capturing and self._download.ready())

    def resolve(self) -> Mapping[str, MirroredTensor]:
        """Each field as an exact value, both sides from one read of the relay. Waits for that copy alone.

        Raises:
            OwnerThreadError: called from a second thread.
            CaptureError: a stream is being captured; what is waited for may then not be asked.
            Violation: FUTURE_ORDER, SENTINEL_ESCAPED, STAGING_REUSED, at `cheap`.
        """
        if self._values is None:
            self._runtime.check_owner(f"{self._download.name}: resolve")
            arrays = self._download.resolve()
            if levels.cheap:
                self._check_order()
            values = {}
            for (name, field), array, device in zip(self._fields.items(), arrays, self._rows, strict=True):
                if levels.cheap and field.non_negative:
                    where: Where = {**self._where, "column": name}
                    invariants.sentinel_escaped(array.reshape(-1), **where)
                values[name] = MirroredTensor(
                    self._runtime,
                    array,
                    DeviceSide(None, Made(device, *self._made, set())),
                    dtype=field.dtype,
                    shape=array.shape,
                    contract=Contract.EXACT,
                    name=name,
                )
                values[name].check("resolve")
            self._values = values
        return self._values

    def _check_order(self) -> None:
        """What was read had been published by then, as its own fence says, and has landed."""
        for made in self._publications:
            self._ordered(made.fence, made.by, f"a wait for {made.by}")
        self._ordered(self._download.done, "the copy from the device", "a wait for the copy")

    def _ordered(self, fence: Fence, writer: str, missing: str) -> None:
        invariants.future_order(fence.query(), writer, "the host", missing, **self._where)

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


# What a slot pool asks of a relay over its slots: entries end with their owner.

Ints = npt.NDArray[np.int64]


@final
class RelayGuard(SlotListener):
    """The listener of a slot pool over whose slots a relay lies. Slots are taken without entries.

    It holds the books and not the relay: device memory goes when the relay does, however long the pool lives.

    Args:
        ledger: the books.
        is_live: which of some slots int64[n] are live, bool[n].
    """

    def __init__(self, ledger: RelayLedger, is_live: Callable[[Ints], npt.NDArray[np.bool_]]) -> None:
        self._ledger = ledger
        self._is_live = is_live

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        """The entries are unwritten again."""
        self._clear(rows)

    def _clear(self, rows: Ints) -> None:
        self._ledger.end(self._ledger.rows_of(rows))

    def verify(self) -> None:
        """No entry belongs to a slot that is nobody's.

        Raises:
            Violation: FUTURE_GENERATION.
        """
        self._ledger.check_owners(self._is_live, "verify")


__all__ = ["EntryState", "FutureMap", "Prefetched", "RelayField", "relay_field"]


@final
class FutureMap:
    """A relay over the slots of one pool. Belongs to the runtime's thread.

    Args:
        slots: the pool; entries end when their slot is freed.
        fields: name -> `relay_field(...)`.
        name: for reports.

    Attributes:
        runtime: the device.
        name: for reports.
        slots: the pool.

    Raises:
        ArgumentError: `slots` is no pool.
        DeclarationError: no fields, or something that is none.
    """

    def __init__(self, slots: SlotPool, fields: Mapping[str, RelayField], *, name: str = "relay") -> None:
        if not isinstance(slots, SlotPool):
            raise ArgumentError(
                f"{name}: {type(slots).__name__} is no pool of slots",
                value=slots,
                remedy="pass the SlotPool or HybridSlotPool whose requests the relay serves",
            )
        self.slots = slots
        self.runtime: Runtime = self.slots.runtime
        self.name = name
        declared = checked_fields(fields, name)
        capacity = self.slots.capacity
        self._ledger = RelayLedger(self.runtime, declared, capacity, name=name, label=_label(name, declared))
        self._memory = {
            field: self.runtime.device_zeros((capacity, *one.shape), one.dtype, name=f"{name}: {field}")
            for field, one in declared.items()
        }
        self._order = StreamOrder(self.runtime, self._ledger.where)
        self._private = self.runtime.stream(f"{name}: to the host")
        self._guard = RelayGuard(self._ledger, self.slots.is_live)
        self.slots.add_listener(self._guard)
        weakref.finalize(self, self.slots.remove_listener, self._guard).atexit = False
        self._zeroed_on, self._zeroed = self.runtime.current_stream, self.runtime.record()
        self._synchronised: dict[str, set[object]] = {field: set() for field in declared}

    def __repr__(self) -> str:
        return _label(self.name, self._memory)

    @property
    def fields(self) -> Mapping[str, RelayField]:
        """The declarations by name."""
        return {name: entries.field for name, entries in self._ledger.entries.items()}

    def states(self, slots: Slots, field: str) -> list[EntryState]:
        """What has become of the entries of some requests.

        Raises:
            DeclarationError: no such field. Handles: as for `SlotPool.check_handles`.
        """
        self._ledger.field(field, "states")
        return self._ledger.states(self._owned(slots, "states"), field)

    # Writing

    def publish(self, slots: Slots, /, **values: object) -> None:
        """Makes values known to the next forward and to the host, on the current stream: a scatter a field, one fence.

        Publish what is certain early, such as lengths right after verification, in a call of its own: readers on other
        streams wait for this publish, and for nothing that the forward does behind it. Values that the host has, for
        requests that arrive prebuilt or come back, cross in one upload; they count as read by the host.

        Args:
            slots: the requests; live handles, each once. Padded rows at the end are left out.
            **values: field -> device tensor `[n, *shape]`, made on the current stream, or a mirrored value, whose
                device side is published; or host values, as a list or an array `[n, *shape]`.

        Raises:
            DeclarationError: no such field, or none given.
            ShapeError, DtypeError, DeviceError, ValueOverflowError: values that do not go into the field.
            CaptureError: the stream is being captured; a replay would publish without the relay's knowledge.
            Violation: SLOT_STALE_HANDLE and the other codes of handles; SLOT_SHARED; SENTINEL_ESCAPED: a negative host
                value in a field that has none; FUTURE_UNREAD_OVERWRITTEN and FUTURE_ORDER at `cheap`. Nothing was
                published.
        """
        live, num_rows = self._begin(slots, values, "publish")
        tensors: dict[str, Any] = {}
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, value in values.items():
            field, what = self._field(name), self._what("publish", name)
            if isinstance(value, (torch.Tensor, MirroredTensor)):
                check_device_values(value, field, (len(live), num_rows), self.runtime, what)
                tensors[name] = value
            else:
                arrays[name] = host_values(value, field, (len(live), num_rows), what)
        for name, array in arrays.items():
            if self._field(name).non_negative:
                invariants.sentinel_escaped(array.reshape(-1), **self._ledger.where("publish", name))
        self._ledger.check_overwrite(live, tuple(values), "publish")
        if not len(live):
            return
        for name, value in tensors.items():
            tensors[name] = live_rows(value, len(live))
        if not arrays:
            self._write(live, self._index(slots, live), tensors, "publish")
            return
        packed = self.runtime.upload([live.np, *arrays.values()])
        for i, name in enumerate(arrays, 1):
            tensors[name] = packed.view(i)
        self._write(live, packed.view(0), {name: tensors[name] for name in values}, "publish")
        self._ledger.take(live, tuple(arrays), HOST)  # whose values they are

    def discard(self, slots: Slots, *fields: str) -> None:
        """Makes entries unwritten that nobody wants any more; all fields by default. Touches no device memory.

        Raises:
            DeclarationError: no such field. Handles: as for `SlotPool.check_handles`.
        """
        live = self._owned(slots, "discard")
        for name in fields:
            self._ledger.field(name, "discard")
        self._ledger.clear(live, fields or tuple(self._memory))

    def _begin(self, slots: Slots, values: Mapping[str, Any], operation: str) -> tuple[Slots, int]:
        """The live rows of `slots`, checked, and how many rows there are with padding."""
        self.runtime.check_owner(f"{self.name}: {operation}")
        if not values:
            raise DeclarationError(
                f"{self.name}: {operation} of no field", value=None, remedy=f"name one of: {', '.join(self._memory)}"
            )
        for name in values:
            self._ledger.field(name, operation)
        self._refuse_capture(operation)
        return self._owned(slots, operation), len(slots)

    def _write(self, live: Slots, index: torch.Tensor, values: Mapping[str, torch.Tensor], operation: str) -> None:
        """Scatters, records the publish's own fence, and notes it; `index` and `values` are safe on this stream."""
        by = self._ledger.by(operation)
        for name in values:
            self._order.overwrite(self._ledger.in_the_way(live, name), by, operation)
        written: list[str] = []
        try:
            for name, tensor in values.items():
                memory, reads = self._memory_of(name), (index, tensor)
                self.runtime.launch(
                    put_rows, memory, index, tensor, reads=reads, writes=(memory,), name=f"{self.name}: {name}"
                )
                written.append(name)
        except BaseException:  # torch could not launch one, and a device takes none back
            if written:
                self._ledger.spoil(live, written, self._record(by, operation))
            raise
        self._ledger.publish(live, tuple(values), self._record(by, operation))
        if levels.full:
            self.check(operation)

    def _record(self, by: str, operation: str) -> Publication:
        """A publication with a fence of its own."""
        publications = self._ledger.publications
        publications.prune()  # before the new one, of which no entry is noted yet
        publication = publications.add(by, self.runtime.current_stream, self.runtime.record())
        if levels.cheap:
            self._order.check_fence(publication.fence, publications.others(publication), by, operation)
        return publication

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
        self.runtime.check_owner(f"{self.name}: gather")
        self._refuse_capture("gather")
        live = self._owned(slots, "gather")
        publications = self._ledger.check_read(live, [field], DEVICE, "gather")
        index = slots.device
        self._order.read(publications, self._ledger.by("gather"), "gather")
        rows = self._select(field, index)
        if publications:
            self._order.noted(publications, self.runtime.record())
        if levels.full and self._field(field).non_negative and not self.runtime.checks_suspended():
            invariants.sentinel_escaped(self.runtime.inspect(rows).reshape(-1), **self._ledger.where("gather", field))
        self._ledger.take(live, [field], DEVICE)
        return rows

    def prefetch(self, slots: Slots, *fields: str) -> Prefetched:
        """Starts to bring entries to the host, over the relay's private stream, in one copy. Nobody waits.

        Call it right behind the publish: what is asked for is what the entries hold now, whatever comes later.

        Args:
            slots: the requests; live handles. Padded rows at the end are left out.
            *fields: those that the host reads.

        Returns:
            the values, to be read when they are needed.

        Raises:
            DeclarationError: no such field, or one that the host does not read.
            CaptureError: the stream is being captured.
            Violation: as `gather`. Nothing was taken.
        """
        self.runtime.check_owner(f"{self.name}: prefetch")
        self._refuse_capture("prefetch")
        for name in fields:
            self._ledger.field(name, "prefetch")
        if not fields or len(set(fields)) < len(fields):
            raise DeclarationError(
                f"{self.name}: prefetch of {fields}", value=fields, remedy="name each field once, and at least one"
            )
        live = self._owned(slots, "prefetch")
        publications = self._ledger.check_read(live, fields, HOST, "prefetch")
        with self.runtime.use(self._private):
            index = self._index(slots, live)
            self._order.read(publications, self._ledger.by("prefetch"), "prefetch")
            rows = [self._select(name, index) for name in fields]
            read = self.runtime.record()
            self._order.noted(publications, read)
            download = self.runtime.download(rows, name=self.name)
        self._ledger.take(live, fields, HOST)
        declared = {name: self._field(name) for name in fields}
        where = self._ledger.where("resolve")
        return Prefetched(self.runtime, live, declared, rows, (self._private, read), download, publications, where)

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
        ids: str | Sequence[str],
        lengths: str | None = None,
        req_to_token: Table | None = None,
    ) -> ForwardInputs:
        """The inputs of a forward, at its entry, on its stream: one path for prompts, decodes and both at once.

        Ids of prompts are uploaded from staging memory here, on the current stream; ids of all other requests come
        from the relay. Where the host knows only bounds of the lengths, the true ones come from the relay too, and
        positions, KV lengths and slot mapping are set right in the forward's own view.

        Args:
            plan: what the host planned. It is used once.
            uploaded: what `batch.upload(extras=plan.extras)` returned.
            ids: the field, or fields, whose entries end to end are the tokens that a request puts in: the last token,
                or the last token and drafts.
            lengths: the field with the tokens in KV memory before this step; needed where the plan has bounds. Name it
                in every step of an engine that publishes it: where the host knows them, its entries are taken unread.
            req_to_token: [slot, position] -> token; needed where the plan has bounds and a slot mapping.

        Raises:
            DeclarationError: no such field, one named twice, or one whose entries are no ids or no lengths.
            DtypeError: ids that are not int64, or lengths that are neither that nor int32.
            ShapeError: a request puts in another number of tokens than its entries have.
            ContractError: bounds, and no field with the true lengths.
            ArgumentError: no plan; an upload without its extras; no token table for a slot mapping, or none of this
                pool's slots.
            Violation: FUTURE_CONSUMED: the plan was used before. Else as `gather`, for all requests of the plan. What
                the device holds (MIRROR_BOUND, MIRROR_EQUAL, SENTINEL_ESCAPED at `full`) is judged when it was taken.
        """
        for given, kind in ((plan, ForwardPlan), (uploaded, Extras)):
            if not isinstance(given, kind):
                raise ArgumentError(
                    f"{self.name}: resolve_forward_inputs of {type(given).__name__} where {kind.__name__} is meant",
                    value=given,
                    remedy="pass a ForwardPlan, and what `batch.upload(extras=plan.extras)` returned",
                )
        self.runtime.check_owner(f"{self.name}: resolve_forward_inputs")
        self._refuse_capture("resolve_forward_inputs")
        names = tuple(ids) if isinstance(ids, list | tuple) else (cast(str, ids),)
        read = names if lengths is None else (*names, lengths)
        for name in read:
            self._ledger.field(name, "resolve_forward_inputs")
        if not names or len(set(read)) < len(read):
            raise DeclarationError(
                f"{self.name}: inputs from fields {read}",
                value=read,
                remedy="name each field once, and one for the ids",
            )
        width = sum(id_width(name, self._field(name), self.name) for name in names)
        if lengths is not None:
            check_lengths(lengths, self._field(lengths), self.name)
        if req_to_token is not None and getattr(req_to_token, "slots", None) is not self.slots:
            raise ArgumentError(
                f"{self.name}: {req_to_token!r} is no table of slots of {self.slots.name!r}",
                value=req_to_token,
                remedy="pass the token table that was made over the relay's pool",
            )
        self._owned(plan.slots, "resolve_forward_inputs")
        sources = Sources(self.runtime, self.gather, names, width, lengths, req_to_token)
        sources.check(plan, uploaded, self.name)
        if len(plan.relayed):
            self._ledger.check_read(plan.relayed, read, DEVICE, "resolve_forward_inputs")
        inputs = ForwardInputs.made(plan, uploaded, sources)
        if lengths is not None and not plan.bounded:
            self._lengths_known(plan, lengths)
        return inputs

    def _lengths_known(self, plan: ForwardPlan, lengths: str) -> None:
        """The host knows the true lengths, so nobody needs to read them: they are taken all the same, in every mode.

        Raises:
            Violation: MIRROR_EQUAL, at `full`: the last forward published other ones.
        """
        relayed = plan.relayed
        self._ledger.take(relayed, [lengths], DEVICE)
        if levels.full and len(relayed) and not self.runtime.checks_suspended():
            before = (plan.seq_lens - plan.query_lens)[plan.relay_rows]
            index = self.runtime.upload([relayed.np]).view(0)
            entries = self._ledger.entries[lengths]
            published = self._ledger.publications.of(entries.number[self._ledger.rows_of(relayed.np)])
            self._order.read(published, self._ledger.by("resolve_forward_inputs"), "resolve_forward_inputs")
            true = self.runtime.inspect(self._memory_of(lengths).index_select(0, index))
            where = self._ledger.where("resolve_forward_inputs", lengths)
            invariants.mirror_equal(before.astype(true.dtype), true, **where)

    def _select(self, name: str, index: torch.Tensor) -> torch.Tensor:
        memory = self._memory_of(name)
        return self.runtime.launch(
            select_rows, memory, index, reads=(memory, index), name=f"{self.name}: gather {name}"
        )

    # Checks

    def check(self, operation: str = "check") -> None:
        """Row 0 of each field is zero, and no entry outlived its owner. Reads device memory; not under capture.

        Raises:
            Violation: SLOT_ZERO_DIRTY, FUTURE_GENERATION.
        """
        self.runtime.check_owner(f"{self.name}: check")
        if self.runtime.checks_suspended():
            return
        for name in self._memory:
            bits = self._memory_of(name)[0].reshape(-1).view(torch.uint8)
            invariants.slot_zero_dirty(self.runtime.inspect(bits), **self._ledger.where(operation, name))
        self._guard.verify()

    # Helpers

    def _memory_of(self, field: str) -> torch.Tensor:
        """The entries of a field, for the current stream: they were made zero before it got there."""
        return self.runtime.use_on_current_stream(
            self._memory[field], self._zeroed_on, self._zeroed, synchronised=self._synchronised[field]
        )

    def _live(self, slots: Any, operation: str) -> Slots:
        """The rows of `slots` before the padding at their end."""
        if not isinstance(slots, Slots):
            self.slots.check_handles(slots, f"{self.name}: {operation}")  # says what is wrong with it
        zeros = int(np.count_nonzero(slots.np == 0))
        if zeros and not slots.np[len(slots) - zeros :].any():
            slots = slots.split([len(slots) - zeros, zeros])[0]
        return cast(Slots, slots)  # a zero elsewhere is for the pool to refuse

    def _owned(self, slots: Any, operation: str) -> Slots:
        """The same, and all of them are live."""
        live = self._live(slots, operation)
        self.slots.rows_of(live, f"{self.name}: {operation}", unique=True)
        return live

    def _index(self, slots: Slots, live: Slots) -> torch.Tensor:
        """The live rows on the device, out of those that crossed with the batch."""
        index = slots.device
        return index if len(live) == len(slots) else index[: len(live)]

    def _field(self, name: str) -> RelayField:
        return self._ledger.entries[name].field

    def _what(self, operation: str, field: str) -> str:
        return f"{self.name}: {operation} of {field!r}"

    def _refuse_capture(self, operation: str) -> None:
        if self.runtime.capturing:
            raise CaptureError(
                f"{self.name}: {operation} while the stream is captured: replays would pass the relay's books by",
                remedy="gather before the replay, into the graph's inputs, and publish its outputs behind it",
            )


def _label(name: str, fields: Iterable[str]) -> str:
    return f"FutureMap({name!r}, {', '.join(fields)})"
