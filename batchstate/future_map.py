"""`FutureMap`: what only a forward knows reaches the next step, and the host, without anybody waiting for the device.

A relay is device memory with one entry a slot for each declared field. Forward N publishes into it, on its stream;
forward N + 1 gathers from it, on its stream; the host, if it wants to know too, asks for rows when it launches and
reads them when it has something to do with them::

    publish   lengths, as soon as they are certain: right after verification
    stash     tokens and what else the next forward takes: after sampling
    seed      the same from host values, for a request that arrives prebuilt or comes back
    gather    on the device, into the next forward
    prefetch  to the host, over a private stream, only the rows asked for; `resolve` is prefetch and wait

An entry is unwritten, published or consumed. Each publish has its own fence, and a reader on another stream waits for
the fences of those publishes whose entries it reads. Who reads an entry too early, twice, or as somebody else, and who
overwrites one unread, is told so at level `cheap`, on the host, before anything is launched.

The relay is always on: an engine that waits for each step uses it as one that runs ahead does.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import numpy as np
import torch

from batchstate import invariants, levels
from batchstate.batching.upload import Extras
from batchstate.errors import ArgumentError, CaptureError, DeclarationError, DtypeError
from batchstate.forward_inputs import ForwardInputs, Sources
from batchstate.forward_plan import ForwardPlan
from batchstate.hybrid import HybridSlotPool
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.pools import SlotPool
from batchstate.relaying.entries import Entries, EntryState, Ints, Publication, Publications
from batchstate.relaying.fields import DEVICE, HOST, RelayField, checked_fields, relay_field
from batchstate.relaying.given import check_device_values, host_values, live_rows
from batchstate.relaying.guard import RelayGuard
from batchstate.relaying.order import StreamOrder
from batchstate.relaying.prefetched import Prefetched
from batchstate.runtime import Runtime
from batchstate.tables import Table
from batchstate.values.device_ops import put_rows, select_rows
from batchstate.violations import Where

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

    def __init__(
        self, slots: SlotPool | HybridSlotPool, fields: Mapping[str, RelayField], *, name: str = "relay"
    ) -> None:
        if not isinstance(slots, SlotPool | HybridSlotPool):
            raise ArgumentError(
                f"{name}: {type(slots).__name__} is no pool of slots",
                value=slots,
                remedy="pass the SlotPool or HybridSlotPool whose requests the relay serves",
            )
        self.slots = slots if isinstance(slots, SlotPool) else slots.slots
        self.runtime: Runtime = self.slots.runtime
        self.name = name
        declared = checked_fields(fields, name)
        capacity = self.slots.capacity
        self._entries = {field: Entries(one, capacity) for field, one in declared.items()}
        self._memory = {
            field: self.runtime.device_zeros((capacity, *one.shape), one.dtype) for field, one in declared.items()
        }
        self._publications = Publications()
        self._order = StreamOrder(self.runtime, self._where)
        self._private = self.runtime.stream(f"{name}: to the host")
        self._guard = RelayGuard(tuple(self._entries.values()), self.slots.is_live, self._where)
        self.slots.attach(self._guard)
        self._zeroed_on, self._zeroed = self.runtime.current_stream, self.runtime.record()
        self._handed: dict[str, set[object]] = {field: set() for field in declared}

    def __repr__(self) -> str:
        return f"FutureMap({self.name!r}, {', '.join(self._entries)})"

    @property
    def fields(self) -> Mapping[str, RelayField]:
        """The declarations by name."""
        return {name: entries.field for name, entries in self._entries.items()}

    def states(self, slots: Slots, field: str) -> list[EntryState]:
        """What has become of the entries of some requests.

        Raises:
            DeclarationError: no such field. Handles: as for `SlotPool.check_handles`.
        """
        entries = self._field(field, "states")
        rows = self.slots.rows_of(self._live(slots, "states"), f"{self.name}: states")
        return entries.states(self._rows_of_entries(rows))

    # Writing

    def publish(self, slots: Slots, /, **values: torch.Tensor | MirroredTensor) -> None:
        """Makes values of a forward known to the next one, on the current stream: one scatter a field, one fence.

        For what is certain early, such as lengths right after verification: readers on other streams wait for this
        publish, and for nothing that the forward does behind it.

        Args:
            slots: the requests; live handles, each once. Padded rows at the end are left out.
            **values: field -> device tensor `[n, *shape]`, made on the current stream, or a mirrored value.

        Raises:
            DeclarationError: no such field, or none given.
            ShapeError, DtypeError, DeviceError: values that do not go into the field.
            CaptureError: the stream is being captured; a replay would publish without the relay's knowledge.
            Violation: SLOT_STALE_HANDLE and the other codes of handles; SLOT_SHARED; FUTURE_UNREAD_OVERWRITTEN and
                FUTURE_ORDER at `cheap`. Nothing was published.
        """
        self._publish(slots, values, "publish")

    def stash(self, slots: Slots, /, **values: torch.Tensor | MirroredTensor) -> None:
        """What `publish` does, for what a forward knows last: tokens and extras, after sampling."""
        self._publish(slots, values, "stash")

    def seed(self, slots: Slots, /, **values: object) -> None:
        """What `publish` does, from host values: for requests that arrive prebuilt, or come back.

        One upload and one scatter a field, on the current stream, whichever that is. The host has read what it seeds.

        Args:
            slots: the requests.
            **values: field -> list, array, CPU tensor or exact mirrored value, `[n, *shape]`.

        Raises:
            As `publish`; ValueOverflowError: a value outside the field's dtype; SENTINEL_ESCAPED: a negative one in a
                field that has none.
        """
        live, num_rows = self._begin(slots, values, "seed")
        arrays = {
            name: host_values(value, self._entries[name].field, (len(live), num_rows), self._what("seed", name))
            for name, value in values.items()
        }
        for name, array in arrays.items():
            if self._entries[name].field.non_negative:
                invariants.sentinel_escaped(array.reshape(-1), **self._where("seed", name))
        self._check_overwrite(live, tuple(values), "seed")
        if len(live):
            packed = self.runtime.upload([live.np, *arrays.values()])
            self._write(live, packed.view(0), {name: packed.view(i) for i, name in enumerate(arrays, 1)}, "seed")
            for name in arrays:
                self._take(live, name, HOST)  # whose values they are

    def discard(self, slots: Slots, *fields: str) -> None:
        """Makes entries unwritten that nobody wants any more; all fields by default. Touches no device memory.

        Raises:
            DeclarationError: no such field. Handles: as for `SlotPool.check_handles`.
        """
        rows = self.slots.rows_of(self._live(slots, "discard"), f"{self.name}: discard")
        rows = self._rows_of_entries(rows)
        for entries in [self._field(name, "discard") for name in fields or tuple(self._entries)]:
            entries.clear(rows)

    def _publish(self, slots: Slots, values: Mapping[str, Any], operation: str) -> None:
        live, num_rows = self._begin(slots, values, operation)
        for name, value in values.items():
            field, what = self._entries[name].field, self._what(operation, name)
            check_device_values(value, field, (len(live), num_rows), self.runtime, what)
        self._check_overwrite(live, tuple(values), operation)
        if len(live):
            tensors = {name: live_rows(value, len(live)) for name, value in values.items()}
            self._write(live, live.device, tensors, operation)

    def _begin(self, slots: Slots, values: Mapping[str, Any], operation: str) -> tuple[Slots, int]:
        """The live rows of `slots`, checked, and how many rows there are with padding."""
        self.runtime.check_owner(f"{self.name}: {operation}")
        if not values:
            raise DeclarationError(
                f"{self.name}: {operation} of no field", value=None, remedy=f"name one of: {', '.join(self._entries)}"
            )
        for name in values:
            self._field(name, operation)
        self._refuse_capture(operation)
        live = self._live(slots, operation)
        self.slots.rows_of(live, f"{self.name}: {operation}", unique=True)
        return live, len(slots)

    def _check_overwrite(self, live: Slots, names: Sequence[str], operation: str) -> None:
        if levels.cheap:
            rows = self._rows_of_entries(live.np)
            for name in names:
                entries = self._entries[name]
                invariants.future_unread_overwritten(
                    live.np,
                    entries.missed(rows),
                    self._writer(entries, rows),
                    self._by(operation),
                    entries.field.readers_named,
                    **self._where(operation, name),
                )

    def _write(self, live: Slots, index: torch.Tensor, values: Mapping[str, torch.Tensor], operation: str) -> None:
        """Scatters, records the publish's own fence, and notes it; `index` and `values` are safe on this stream."""
        by = self._by(operation)
        for name in values:
            wrote = self._entries[name].wrote[self._rows_of_entries(live.np)]
            self._order.overwrite(self._publications.running(wrote), by, operation)
        for name, tensor in values.items():
            memory = self._memory_of(name)
            self.runtime.launch(
                put_rows, memory, index, tensor, reads=(index, tensor), writes=(memory,), name=f"{self.name}: {name}"
            )
        publication = self._record(by, operation)
        for name in values:
            entries, rows = self._entries[name], self._rows_of_entries(live.np)
            entries.publish(rows, live.generations, publication.number)
            publication.written.append((entries.number, rows))
        if levels.full:
            self.check(operation)

    def _record(self, by: str, operation: str) -> Publication:
        """A publication with a fence of its own."""
        self._publications.prune()  # before the new one, of which no entry is noted yet
        publication = self._publications.add(by, self.runtime.current_stream, self.runtime.record())
        self._order.check_fence(publication.fence, self._publications.others(publication), by, operation)
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
        live = self._live(slots, "gather")
        publications = self._check_read(live, [field], DEVICE, "gather")
        index = slots.device
        self._order.read(publications, self._by("gather"), "gather")
        rows = self._select(field, index)
        if publications:
            self._order.noted(publications, self.runtime.record())
        if levels.full and self._entries[field].field.non_negative and not self.runtime.checks_stand_aside():
            invariants.sentinel_escaped(self.runtime.inspect(rows).reshape(-1), **self._where("gather", field))
        self._take(live, field, DEVICE)
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
        if not fields or len(set(fields)) < len(fields):
            raise DeclarationError(
                f"{self.name}: prefetch of {fields}", value=fields, remedy="name each field once, and at least one"
            )
        live = self._live(slots, "prefetch")
        publications = self._check_read(live, fields, HOST, "prefetch")
        with self.runtime.use(self._private):
            index = live.device
            self._order.read(publications, self._by("prefetch"), "prefetch")
            rows = [self._select(name, index) for name in fields]
            read = self.runtime.record()
            self._order.noted(publications, read)
            download = self.runtime.download(rows, name=self.name)
        for name in fields:
            self._take(live, name, HOST)
        declared = {name: self._entries[name].field for name in fields}
        return Prefetched(
            self.runtime, live, declared, rows, (self._private, read), download, publications, self._where("resolve")
        )

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
        token_table: Table | None = None,
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
            token_table: [slot, position] -> token; needed where the plan has bounds and a slot mapping.

        Raises:
            DeclarationError: no such field, one named twice, or one whose entries are no ids or no lengths.
            DtypeError: ids that are not int64, or lengths that are neither that nor int32.
            ShapeError: a request puts in another number of tokens than its entries have.
            ContractError: bounds, and no field with the true lengths.
            ArgumentError: no plan; an upload without its extras; no token table for a slot mapping, or none of this
                pool's slots.
            Violation: FUTURE_CONSUMED: the plan was used before. Else as `gather`, for all requests of the plan.
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
        names = (ids,) if isinstance(ids, str) else tuple(ids)
        read = names if lengths is None else (*names, lengths)
        if not names or len(set(read)) < len(read):
            raise DeclarationError(
                f"{self.name}: inputs from fields {read}",
                value=read,
                remedy="name each field once, and one for the ids",
            )
        widths = [self._width(name) for name in names]
        if lengths is not None:
            self._check_lengths(lengths)
        if token_table is not None and getattr(token_table, "slots", None) is not self.slots:
            raise ArgumentError(
                f"{self.name}: {token_table!r} is no table of slots of {self.slots.name!r}",
                value=token_table,
                remedy="pass the token table that was made over the relay's pool",
            )
        live = self._live(plan.slots, "resolve_forward_inputs")
        self.slots.rows_of(live, f"{self.name}: resolve_forward_inputs")
        sources = Sources(self.runtime, self.gather, names, sum(widths), lengths, token_table)
        sources.check(plan, uploaded, self.name)
        if len(plan.relayed):
            self._check_read(plan.relayed, read, DEVICE, "resolve_forward_inputs")
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
        self._take(relayed, lengths, DEVICE)
        if levels.full and len(relayed) and not self.runtime.checks_stand_aside():
            before = (plan.seq_lens - plan.query_lens)[plan.relay_rows]
            index = self.runtime.upload([relayed.np]).view(0)
            true = self.runtime.inspect(self._memory_of(lengths).index_select(0, index))
            invariants.mirror_equal(before.astype(true.dtype), true, **self._where("resolve_forward_inputs", lengths))

    def _width(self, name: str) -> int:
        field = self._field(name, "resolve_forward_inputs").field
        shape = field.shape
        if field.dtype != torch.int64:
            raise DtypeError(
                f"{self.name}: ids from field {name!r} of {field.dtype}",
                value=field.dtype,
                remedy="declare it torch.int64: the ids of a forward are",
            )
        if len(shape) > 1:
            raise DeclarationError(
                f"{self.name}: ids from field {name!r} of {list(shape)}",
                value=shape,
                remedy="ids of a request are one number, or one row of them",
            )
        return shape[0] if shape else 1

    def _check_lengths(self, name: str) -> None:
        field = self._field(name, "resolve_forward_inputs").field
        if field.shape:
            raise DeclarationError(
                f"{self.name}: lengths from field {name!r} of {list(field.shape)}",
                value=field.shape,
                remedy="the length of a request is one number",
            )
        if field.dtype not in (torch.int32, torch.int64):
            raise DtypeError(
                f"{self.name}: lengths from field {name!r} of {field.dtype}",
                value=field.dtype,
                remedy="declare it torch.int64 or torch.int32",
            )

    def _check_read(self, live: Slots, names: Sequence[str], reader: int, operation: str) -> list[Publication]:
        """Judges the entries of handles, and says which publishes they come from."""
        rows = self._rows_of_entries(self.slots.rows_of(live, f"{self.name}: {operation}"))
        publications: dict[int, Publication] = {}
        for name in names:
            entries = self._field(name, operation)
            if not entries.field.readers & reader:
                raise DeclarationError(
                    f"{self.name}: {operation} of {name!r}, which is read by {entries.field.readers_named}",
                    value=name,
                    remedy="declare the field with read_by='both'",
                )
            if levels.cheap:
                self._check_entries(entries, name, rows, live, reader, operation)
            for made in self._publications.of(entries.number[rows]):
                publications[made.number] = made
        return list(publications.values())

    def _check_entries(self, entries: Entries, name: str, rows: Ints, live: Slots, reader: int, operation: str) -> None:
        who, where, writer = self._by(operation), self._where(operation, name), self._writer(entries, rows)
        invariants.future_unwritten(rows, entries.number[rows] != 0, who, **where)
        invariants.future_generation(rows, entries.generation[rows], live.generations, writer, who, **where)
        invariants.future_consumed(rows, (entries.taken[rows] & reader) != 0, writer, who, **where)

    def _select(self, name: str, index: torch.Tensor) -> torch.Tensor:
        memory = self._memory_of(name)
        return self.runtime.launch(
            select_rows, memory, index, reads=(memory, index), name=f"{self.name}: gather {name}"
        )

    def _take(self, live: Slots, name: str, reader: int) -> None:
        self._entries[name].take(self._rows_of_entries(live.np), reader)

    # Checks

    def check(self, operation: str = "check") -> None:
        """Row 0 of each field is zero, and no entry outlived its owner. Reads device memory; not under capture.

        Raises:
            Violation: SLOT_ZERO_DIRTY, FUTURE_GENERATION.
        """
        self.runtime.check_owner(f"{self.name}: check")
        if self.runtime.checks_stand_aside():
            return
        for name in self._memory:
            bits = self._memory_of(name)[0].reshape(-1).view(torch.uint8)
            invariants.slot_zero_dirty(self.runtime.inspect(bits), **self._where(operation, name))
        self._guard.verify()

    # Helpers

    def _memory_of(self, field: str) -> torch.Tensor:
        """The entries of a field, for the current stream: they were made zero before it got there."""
        return self.runtime.acquire(self._memory[field], self._zeroed_on, self._zeroed, handed=self._handed[field])

    def _live(self, slots: Any, operation: str) -> Slots:
        """The rows of `slots` before the padding at their end."""
        if not isinstance(slots, Slots):
            self.slots.check_handles(slots, f"{self.name}: {operation}")  # says what is wrong with it
        zeros = int(np.count_nonzero(slots.np == 0))
        if zeros and not slots.np[len(slots) - zeros :].any():
            slots = slots.split([len(slots) - zeros, zeros])[0]
        return cast(Slots, slots)  # a zero elsewhere is for the pool to refuse

    def _rows_of_entries(self, slots: Ints) -> Ints:
        """Where the entries of slots are noted, int64[n]: a row each, so that no publish ever wraps around."""
        return slots

    def _field(self, name: object, operation: str) -> Entries:
        entries = self._entries.get(name) if isinstance(name, str) else None
        if entries is None:
            raise DeclarationError(
                f"{self.name}: {operation} of {name!r}, which is not declared",
                value=name,
                remedy=f"use one of: {', '.join(self._entries)}",
            )
        return entries

    def _writer(self, entries: Entries, rows: Ints) -> "functools.partial[str]":
        return functools.partial(_described, self._publications, entries, rows)

    def _by(self, operation: str) -> str:
        return f"{operation} in step {self.runtime.step} on stream {self.runtime.current_stream.name!r}"

    def _what(self, operation: str, field: str) -> str:
        return f"{self.name}: {operation} of {field!r}"

    def _refuse_capture(self, operation: str) -> None:
        if self.runtime.capturing:
            raise CaptureError(
                f"{self.name}: {operation} while the stream is captured: replays would pass the relay's books by",
                remedy="gather before the replay, into the graph's inputs, and stash its outputs behind it",
            )

    def _where(self, operation: str, field: str | None = None) -> Where:
        where: Where = {"object": self, "operation": operation, "step": self.runtime.step}
        if field is not None:
            where["column"] = field
        return where


def _described(publications: Publications, entries: Entries, rows: Ints, row: int) -> str:
    return publications.describe(int(entries.number[rows[row]]))
