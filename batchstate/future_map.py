"""`FutureMap`: carries what only a forward knows to the next step and to the host, and no thread waits for the device.

A relay is device memory with one entry a slot for each declared field. Forward N publishes into it, on its stream;
forward N + 1 gathers from it, on its stream; the host asks for rows at launch, and reads them when it needs them::

    publish   lengths as soon as they are certain, tokens and drafts after sampling; from the host, what a request
              that arrives prebuilt or comes back starts from
    gather    on the device, into the next forward
    prefetch  to the host, over a private stream, only the rows asked for; `resolve` waits for them

An entry is unwritten, published or consumed. Each publish has its own fence, and a reader on another stream waits for
the fences of those publishes whose entries it reads. Reading an entry too early, twice or as another request, and
overwriting one unread, is reported at level `cheap`, on the host, before anything is launched.
"""

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import carried, check_dense, movable, padding_row, select_rows, shape_of
from batchstate._core import Entries, Requests
from batchstate._graph_publish import GraphPublish, put_unpadded
from batchstate._prefetched import LiveSlots, Prefetched, Publishing, Source, check_accepted, unpadded
from batchstate._relay import DEVICE, HOST, READERS, EntryState, Numbers, RelayEntries, Use
from batchstate._relay_field import RelayField, relay_field
from batchstate._upload import Extras
from batchstate.errors import (
    ArgumentError,
    CaptureError,
    ContractError,
    DeclarationError,
    DeviceError,
    DtypeError,
    ShapeError,
    another_runtime,
    expected,
    one_of,
)
from batchstate.forward.inputs import ForwardInputs, check_uploaded, end_to_end
from batchstate.forward.plan import ForwardPlan
from batchstate.mirror import MirroredTensor, Slots
from batchstate.nvtx import ranges
from batchstate.pools import SlotPool
from batchstate.runtime.base import Download, OfThisProcess, Stream
from batchstate.runtime.memory import NUMPY_DTYPES, host_dtype
from batchstate.tables import Table

__all__ = ["EntryState", "FutureMap", "GraphPublish", "Prefetched", "RelayField", "relay_field"]

Array = npt.NDArray[Any]

_MOST_IN_RECORD = 256
"""Bytes of the largest entry that lies in a record with others. Larger ones, such as hidden states, lie by themselves:
there a copy of the values into one piece costs more than a launch."""


_ON_DEVICE = torch.Tensor, MirroredTensor


class Run(NamedTuple):
    """Fields that lie side by side, their name in reports, and their memory [capacity, ...], in a dtype that moves."""

    names: tuple[str, ...]
    label: str
    memory: torch.Tensor


class Together(NamedTuple):
    """Fields that are published together: their entries, and the runs in which they are written."""

    entries: list[Entries]
    runs: list[Run]


@ranges("publish", "gather", "prefetch", "resolve", "resolve_forward_inputs")
@final
class FutureMap(OfThisProcess):
    """A relay over the slots of one pool. Belongs to the runtime's thread.

    Args:
        slots: the pool; entries end when their slot is freed.
        fields: name -> `relay_field(...)`.
        name: for reports.
    """

    def __init__(self, slots: SlotPool, fields: Mapping[str, RelayField], *, name: str = "relay") -> None:
        self.slots = slots
        self.runtime = slots.runtime
        self.name = name
        self._fields = dict(fields)
        self._published = dict(fields)  # but for those that steps publish by `accept`
        if not fields:
            remedy = "pass a mapping, such as {'last_token': relay_field(torch.int64)}"
            raise DeclarationError(f"{name}: expected fields by name, got none", fields, remedy)
        capacity, entries = slots.capacity, {}
        for field, declared in self._fields.items():
            shape_of(declared.shape, f"{name}: {field}", rows=capacity)
            readers = declared.readers if declared.stale is None else 0  # none takes an entry that may be stale
            entries[field] = Entries(field, readers, declared.must_read, capacity)
        self._record: torch.Tensor  # uint8[rows, nbytes], the entries of all small fields, if there are several
        self._places: dict[str, slice] = {}  # of these in it
        self._rows = self._allocated(capacity + 1)  # and one for padded rows of graphs, which nobody reads
        with torch.inference_mode(False):  # a view made in inference mode can be written there alone
            self._memory = {field: memory[:capacity] for field, memory in self._rows.items()}
            apart = [memory for field, memory in self._memory.items() if field not in self._places]
            for memory in [self._record[:capacity], *apart] if self._places else apart:
                self.runtime.own_rows(memory, slots.owners_of)
        self._source = Source(self.runtime, self._fields, repr(self), slots.pool_id)
        self._entries = RelayEntries(self.runtime, entries, slots.is_live, label=self._source.label)
        self._transaction = slots.transaction
        self.replaying = False  # for `GraphPublish`
        self._together: dict[tuple[str, ...], Together] = {}
        self._private = self.runtime.stream(f"{name}: to the host")
        slots.add_listener(self._entries)
        weakref.finalize(self, slots.remove_listener, self._entries).atexit = False
        self._zeroed_on, self._zeroed = self.runtime.current_stream, self.runtime.record()
        record = dict[object, Stream]()  # one allocation for all in it
        self._synchronised = {field: record if field in self._places else {} for field in self._fields}

    def __repr__(self) -> str:
        return f"FutureMap({self.name!r}, {', '.join(self._fields)})"

    def _allocated(self, rows: int) -> dict[str, torch.Tensor]:
        """The memory of each field [rows, *shape]. Entries of small ones lie side by side in a record per slot."""
        small = {name: field for name, field in self._fields.items() if 0 < field.nbytes <= _MOST_IN_RECORD}
        memory = {}
        if len(small) > 1:
            end = 0
            for name in sorted(small, key=lambda name: -small[name].dtype.itemsize):  # so that each is aligned
                self._places[name] = slice(end, end + small[name].nbytes)
                end += small[name].nbytes
            width = end + -end % max(field.dtype.itemsize for field in small.values())
            named = f"{self.name}: {', '.join(self._places)}"
            self._record = record = self.runtime.device_zeros((rows, width), torch.uint8, name=named)
            with torch.inference_mode(False):
                for name, part in self._places.items():
                    memory[name] = record[:, part].view(small[name].dtype).view(rows, *small[name].shape)
        for name, field in self._fields.items():
            if name not in memory:
                shape = rows, *field.shape
                memory[name] = self.runtime.device_zeros(shape, field.dtype, name=f"{self.name}: {name}")
        return memory

    @property
    def fields(self) -> Mapping[str, RelayField]:
        """The declarations by name."""
        return dict(self._fields)

    def states(self, slots: Slots, field: str) -> list[EntryState]:
        """The states of the entries of some requests."""
        self._check_call((field,), "states", launches=False)
        return self._entries.states(self._live(slots, "states")[0].np, field)

    # Writing

    def publish(self, slots: Slots, /, **values: object) -> None:
        """Makes values known to the next forward and to the host, on the current stream: two launches, one fence.

        So it is for any number of fields that lie side by side, as small ones of one element size do in the order of
        their declaration, larger elements first; others go by themselves, with a launch each.

        Publish what is certain early, such as lengths right after verification, in a call of its own: readers on other
        streams wait for this publish, and for nothing that the forward does behind it. Values that the host has, for
        requests that arrive prebuilt or come back, are uploaded in one copy, and count as read by the host.

        Args:
            slots: the requests; live handles, each once. Padded rows at the end are left out.
            **values: field -> device tensor `[n, *shape]`, made on the current stream, or a mirrored value, whose
                device side is published; or host values, as a list or an array `[n, *shape]`.

        Raises:
            DeclarationError: device values of a field that follows from what steps accept; see `PlannedStep.accept`.
            Violation: SENTINEL_ESCAPED: a negative host value in a field that has none. FUTURE_UNREAD_OVERWRITTEN,
                FUTURE_ORDER, DERIVED_STALE (a mirrored value whose rows are of other requests), at `cheap`. Nothing was
                published.
        """
        self._check_call(values, "publish")
        requests = self._live(slots, "publish")[1]
        self.publish_for(LiveSlots(slots, requests.n), requests, self.runtime.current_stream, values, ())

    def publish_for(
        self,
        publishing: Publishing,
        requests: Requests,
        stream: Stream,
        values: Mapping[str, object],
        results: Sequence[str],
    ) -> Prefetched | None:
        """`publish` for live requests on `stream`, the current one, and `prefetch` of `results`: for `StepPlanner`.

        Values at hand go straight to the host.
        """
        n, device = requests.n, self.runtime.device
        tensors: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor | MirroredTensor] = {}
        host: dict[str, Array] = {}
        for name, value in values.items():
            field = self._published.get(name)
            if field is None:
                self._check_call((name,), "publish")
                field = self._derived(name, value, publishing)
            if (
                type(value) is torch.Tensor
                and value.dtype is field.dtype
                and value.shape == (n, *field.shape)
                and value.device == device
                and value.is_contiguous()
                and not value.requires_grad
            ):
                tensors[name] = value
            elif isinstance(value, _ON_DEVICE):
                self._check_device_values(name, value, (n, publishing.num_rows), publishing.handles)
                others[name] = value
            else:
                host[name] = self.host_values(name, value, (n, publishing.num_rows))
        if not values:
            raise DeclarationError(f"{self.name}: publish of no field", None, f"name one of: {', '.join(self._fields)}")
        together = self.together(tuple(values))
        numbers = self._entries.check_overwrite(requests, together.entries, stream)
        if not n:
            return self._brought(publishing.handles(), tuple(results), stream) if results else None
        if others:
            tensors |= {name: _live_rows(value, n) for name, value in others.items()}
        if host:
            packed = self.runtime.upload([requests.handles()[0], *host.values()])
            at = packed.view(0)
            tensors |= {name: packed.view(i) for i, name in enumerate(host, 1)}
        else:
            at = publishing.index(stream)
        sent = [tensors[name] for name in results if name in tensors]
        whole = len(sent) == len(results) > 0
        to_host = (*host, *results) if whole else host
        publish, download = self.put(requests, stream, at, together, tensors, numbers, to_host, sent if whole else ())
        if levels.full:
            self.check("publish")
        if download is None:
            return self._brought(publishing.handles(), tuple(results), stream) if results else None
        return Prefetched(self._source, results, n, publishing.handles, download, (publish,))

    def publish_in_graph(self, index: torch.Tensor, /, **values: torch.Tensor) -> GraphPublish:
        """Makes a publish part of a graph, where that is captured: a launch for each field.

        The `replay` of the result notes what a publish notes. Rows of slot 0 are padding. Outside of
        a capture, in a run that warms up, nothing is written, but for the `replay` of a device without graphs, which is
        the function that calls this.

        Args:
            index: slots, int64[rows], at a fixed address: such as the column of `StaticBuffers`.
            **values: field -> device tensor `[rows, *shape]`, made in the graph.

        Raises as `publish` for values that do not go into their fields.
        """
        self._check_call(values, "publish_in_graph", launches=False)
        rows = index.shape[0]
        for name, value in values.items():
            if name not in self._published:
                self._derived(name, value, None)
            self._check_device_values(name, value, (rows, rows), None)
        if self.runtime.capturing or self.replaying:
            for name, value in values.items():
                memory, label = self._rows[name], f"{self.name}: {name}"
                arguments = memory, index, value.detach()
                self.runtime.launch(
                    put_unpadded, *arguments, reads=arguments[1:], writes=(memory,), name=label, operations=3
                )
        return GraphPublish(self, tuple(values), index)

    def host_values(self, name: str, value: object, num_rows: tuple[int, int]) -> Array:
        """Checked values of a field for its live rows, as they cross. An array may be the caller's own.

        `num_rows` are the live rows, and all rows; the values may be as many as either.
        """
        field, subject = self._fields[name], f"{self.name}: publish of {name!r}"
        if field.ragged and isinstance(value, list | tuple) and all(isinstance(row, list | tuple) for row in value):
            value = [[*row, *[-1] * (field.shape[0] - len(row))] for row in value]
        if type(value) is not np.ndarray or value.dtype is not NUMPY_DTYPES.get(field.dtype):
            value = carried(value, *host_dtype(field.dtype), subject)
            if value.shape == (0,) and num_rows[0] == 0:
                value = np.empty((0, *field.shape), value.dtype)  # an empty list knows no shape of a row
        _check_shape(value.shape, field, num_rows, subject)
        array: Array = value[: num_rows[0]]
        if field.non_negative and not field.ragged:
            invariants.sentinel_escaped(array.reshape(-1), **self._entries.where("publish", name))
        return array

    def together(self, names: tuple[str, ...]) -> Together:
        """Fields with their entries, in runs that lie side by side in the record: those not in it are runs of one."""
        together = self._together.get(names)
        if together is None:
            parts: list[list[str]] = []
            end = -1
            for place, name in sorted((self._places.get(name, slice(-2, -3)).start, name) for name in names):
                if place != end or len(names) < 3:  # two launches take no longer than one and a copy into one piece
                    parts.append([])
                parts[-1].append(name)
                end = self._places[name].stop if name in self._places else -1
            entries, runs = [self._entries.fields[name] for name in names], [self._run(tuple(part)) for part in parts]
            together = self._together[names] = Together(entries, runs)
        return together

    def _run(self, names: tuple[str, ...]) -> Run:
        with torch.inference_mode(False):  # it is kept, and used outside of that mode too
            memory = movable(self._memory[names[0]] if len(names) == 1 else self._part_of_record(names))
        return Run(names, f"{self.name}: {', '.join(names)}", memory)

    def put(
        self,
        requests: Requests,
        stream: Stream,
        index: torch.Tensor,
        together: Together,
        values: Mapping[str, torch.Tensor],
        numbers: Numbers | None,
        to_host: Collection[str] = (),
        sent: Sequence[torch.Tensor] = (),
        then: str | None = None,
    ) -> tuple[Use, Download | None]:
        """Launches and notes a checked publish on `stream`, the current one, for which all tensors are safe.

        `index` has the slots, and `numbers` is what `RelayEntries.check_overwrite` returned. The host has, or gets by
        this, the values of the fields `to_host`; `sent` are those that go there behind the publish.
        """
        runtime, entries, transaction = self.runtime, self._entries, self._transaction
        written: list[str] = []
        if numbers is not None:
            entries.come_behind(numbers, stream, "publish", to_write=True)
        transaction.operation = "publish"
        try:
            for names, label, memory in together.runs:
                if stream is not self._zeroed_on:
                    self._memory_of(names[0], stream)
                part = values[names[0]]
                if len(names) > 1:
                    parts = [values[name] for name in names]
                    part = runtime.launch(_as_record, parts, reads=parts, name=label)
                elif part.dtype is not memory.dtype:  # bits that crossed as integers
                    part = part.view(memory.dtype)
                reads, writes = (index, part), (memory,)
                runtime.launch(memory.index_copy_, 0, *reads, reads=reads, writes=writes, name=label)
                written += names
            # On this stream, where what is published may be written over later; one fence is behind both.
            download = runtime.download(sent, name=self.name, stream=stream) if sent else None
            fence = runtime.record(stream) if download is None else download.done
            publish = entries.publish(requests, together.entries, fence, stream, to_host)
            transaction.launches.ended(stream, fence)
        except Exception:
            if written:  # a device takes no launch back
                entries.mark_failed(requests, written, runtime.record(stream), stream)
            transaction.operation = None
            raise
        transaction.operation = then
        return publish, download

    def discard(self, slots: Slots, *fields: str) -> None:
        """Makes entries unwritten that no reader wants any more; all fields by default. Touches no device memory."""
        self._check_call(fields, "discard", launches=False)
        rows = self._live(slots, "discard")[0].np
        self._transaction.operation = "discard"
        self._entries.clear(rows, fields or self._fields)
        self._transaction.operation = None

    # Reading

    def gather(self, slots: Slots, field: str) -> torch.Tensor:
        """Takes the entries of some requests into a forward, on the current stream: one launch, no copy, no wait.

        Padded rows at the end of the live handles `slots` read the zeros of slot 0. Returns a new tensor `[n, *shape]`.

        Raises:
            Violation: FUTURE_UNWRITTEN, FUTURE_GENERATION, FUTURE_CONSUMED, FUTURE_ORDER at `cheap`, SENTINEL_ESCAPED
                at `full`. Nothing was taken.
        """
        fields = (field,)
        self._check_call(fields, "gather", DEVICE)
        live, requests = self._live(slots, "gather")
        stream = self.runtime.current_stream
        self._fill_in(live, fields)
        numbers = self._entries.check_read(requests, fields, DEVICE, stream, "gather")
        values = self._gathered(numbers, fields, slots, stream)
        self._entries.take(requests, fields, DEVICE)
        return values

    def _fill_in(self, slots: Slots, fields: Sequence[str]) -> None:
        """Publishes the value of a field that may be stale for those requests that have no entry of their own."""
        for name in fields:
            field = self._fields[name]
            if field.stale is not None:
                there = self._entries.fields[name].arrays["generation"][slots.np] == slots.generations
                if not there.all():
                    row = padding_row(field.stale, *host_dtype(field.dtype), self.name)
                    missing = slots.filter(~there)
                    self.publish(missing, **{name: np.full((len(missing), *field.shape), row)})

    def _gathered(self, numbers: Numbers | None, fields: Sequence[str], slots: Slots, stream: Stream) -> torch.Tensor:
        """Launches and notes a gather of checked entries on `stream`, the current one."""
        self.gathering(fields, numbers, stream)
        values = self.selected(fields, slots.device)
        self.check_gathered(fields, values)
        return values

    def check_gathered(self, fields: Sequence[str], values: torch.Tensor) -> None:
        """Asks, at `full`, the values of these fields, which lie end to end. For `StepPlanner`."""
        if levels.full and not self.runtime.checks_suspended():
            widths = [math.prod(self._fields[field].shape) for field in fields]
            parts = [values] if len(fields) == 1 else torch.split(values, widths, dim=1)
            for field, part in zip(fields, parts, strict=True):
                if self._fields[field].non_negative and not self._fields[field].ragged:
                    where = self._entries.where("gather", field)
                    invariants.sentinel_escaped(self.runtime.inspect(part).reshape(-1), **where)

    def gathering(self, names: Sequence[str], numbers: Numbers | None, stream: Stream) -> None:
        """Before entries of these publishes are gathered on `stream`, the current one: it comes behind them.

        Notes the read: a later writer on another stream waits for what the stream has by then. For `StepPlanner`.
        """
        entries = self._entries
        if numbers is not None:
            entries.come_behind(numbers, stream, "gather")
        if stream is not self._zeroed_on:
            for name in names:
                self._memory_of(name, stream)
        entries.note_read(numbers, stream)

    def flat_ids(self, fields: Sequence[str]) -> tuple[torch.Tensor, int, list[int]] | None:
        """Fields of one dtype as one vector: entry i of field f of slot s is its element `s * width + offsets[f] + i`.

        None where they lie apart. For `StepPlanner`, which makes it safe on its stream by `_memory_of`.
        """
        dtype, places = self._fields[fields[0]].dtype, self._places
        if len(fields) == 1 and fields[0] not in places:
            return self._memory[fields[0]].view(-1), math.prod(self._fields[fields[0]].shape), [0]
        if not all(field in places and self._fields[field].dtype == dtype for field in fields):
            return None
        record = self._record.view(dtype)
        return record.view(-1), record.shape[1], [places[field].start // dtype.itemsize for field in fields]

    def prefetch(self, slots: Slots, *fields: str) -> Prefetched:
        """Starts to bring entries to the host, in one copy over the relay's private stream. Does not wait.

        Call it right behind the publish, on its stream, which takes the entries out as they are now: no later publish
        waits for that. On another stream the private one takes them out, and what overwrites them waits. Padded rows
        at the end of the live handles `slots` are left out. Raises as `gather`.
        """
        last, current = self._entries.last, self.runtime.current_stream
        return self._brought(slots, fields, current if last and last.stream == current else self._private)

    def _brought(self, slots: Slots, fields: tuple[str, ...], stream: Stream) -> Prefetched:
        """Takes entries out on `stream`, and copies them to the host on the private one."""
        self._check_call(fields, "prefetch", HOST)
        if not fields or len(set(fields)) < len(fields):
            problem = f"{self.name}: prefetch of {fields}"
            raise DeclarationError(problem, fields, "name each field once, and at least one")
        live, requests = self._live(slots, "prefetch")
        entries, runtime = self._entries, self.runtime
        others = [name for name in fields if self._fields[name].stale is None]
        if len(others) < len(fields):
            entries.check_read(requests, others, HOST, stream, "prefetch")  # before anything is published
            self._fill_in(live, fields)
        numbers = entries.check_read(requests, fields, HOST, stream, "prefetch")
        with runtime.use(stream):
            index = slots.device if requests.n == len(slots) else slots.device[: requests.n]
            entries.come_behind(numbers, stream, "prefetch")
            tensors, parts = self._select(fields, index, torch.uint8)
            read = runtime.record(stream)
            entries.note_read(numbers, stream, read)
        with runtime.use(self._private):
            for tensor in tensors:
                runtime.use_on_current_stream(tensor, stream, read, current=self._private)
            download = runtime.download(tensors, name=self.name)
        self._transaction.operation = "prefetch"
        entries.take(requests, fields, HOST)
        self._transaction.operation = None
        arguments = lambda: live, download, entries.published(numbers), (stream, read), tensors, parts
        return Prefetched(self._source, fields, requests.n, *arguments)

    def resolve(self, slots: Slots, field: str) -> MirroredTensor:
        """One field as an exact value, both sides from one read of the relay. Waits for its publish and its copy."""
        return self._brought(slots, (field,), self._private)[field]

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

        Ids of prompts are uploaded here, on the current stream; all others come from the relay, and so do the true
        lengths where the host has bounds: positions, KV lengths and slot mapping are set right in the forward's view.

        Args:
            plan: the host's part. It is used once.
            uploaded: returned by `batch.upload(extras=plan.extras)`.
            ids: the field, or fields, whose entries end to end are the tokens that a request puts in, such as the last
                token and drafts. None where the plan has no ids, or the host knows all of them.
            lengths: the field with the tokens in KV memory before this step; needed where the plan has bounds. Name it
                in every step of an engine that publishes it: where the host knows them, its entries are taken unread.
            req_to_token: [slot, position] -> token; needed where the plan has bounds and a slot mapping.

        Raises:
            ShapeError: a request puts in another number of tokens than its entries have.
            ContractError: bounds, and no field with the true lengths.
            Violation: DERIVED_STALE, at `cheap`: a plan of other rows than those of the upload, or of pages that have
                changed since; PAGE_OWNER: a page that it writes has got further holders; FUTURE_CONSUMED: the plan was
                used before. Else as `gather`, for all requests of the plan. Device values (MIRROR_BOUND, MIRROR_EQUAL,
                SENTINEL_ESCAPED at `full`) are checked after they were taken.
        """
        operation = "resolve_forward_inputs"
        names = (ids,) if isinstance(ids, str) else tuple(ids)
        read = names if lengths is None else (*names, lengths)
        self._check_call(read, operation)
        if len(set(read)) < len(read):
            raise DeclarationError(f"{self.name}: inputs from fields {read}", read, "name each field once")
        width = self._check_inputs(plan, names, lengths, req_to_token)
        self._live(plan.slots, operation)
        check_uploaded(plan, uploaded, self.name)
        relayed, gather = Requests(plan.relayed.np, plan.relayed.generations), None
        if relayed.n:
            self._check_call(read, operation, DEVICE)
            stream, fields = self.runtime.current_stream, read if plan.bounded else names
            numbers = self._entries.check_read(relayed, fields, DEVICE, stream, operation)
            self._entries.check_read(relayed, read[len(fields) :], DEVICE, stream, operation)
            gather = partial(self._gathered, numbers, stream=stream)
        inputs = ForwardInputs.resolve(plan, uploaded, gather, names, width, lengths, req_to_token)
        if lengths is not None and not plan.bounded:
            self.check_known_lengths(plan, lengths)
        self._transaction.operation = operation
        self._entries.take(relayed, read, DEVICE)  # lengths too where the host knows them: so entries end alike
        plan.use()
        self._transaction.operation = None
        return inputs

    def _check_inputs(
        self, plan: ForwardPlan, ids: Sequence[str], lengths: str | None, req_to_token: Table | None
    ) -> int:
        """Refuses what does not serve a plan; the most tokens of each request that the relay feeds."""
        least, widths = self.id_widths(ids, plan.id_dtype)
        if lengths is not None:
            self.check_lengths_field(lengths)
        if plan.has_ids and plan.relay_rows.size and not ids:
            remedy = "name the fields that hold them (ids=...); or pass the ids of all requests to the plan"
            raise DeclarationError(f"{self.name}: {plan!r}, and no field for their ids", plan, remedy)
        if ids and not plan.has_ids:
            problem = f"{self.name}: ids from {', '.join(ids)} for {plan!r}, which has none"
            raise DeclarationError(problem, ids, "leave `ids` out, or make the plan with has_ids=True")
        queries, most = plan.query_lens[plan.relay_rows], sum(widths)
        if not ids and queries.size:  # true lengths alone, each of as many tokens more
            least = most = int(queries[0])
        wrong = np.flatnonzero((queries > most) | (queries < least))
        if wrong.size:
            row, query = plan.relay_rows[wrong[0]], int(queries[wrong[0]])
            problem = f"{self.name}: the request in row {row} puts in {query} tokens, and the relay has"
            has = f"{least} to {most}" if least < most else f"{most}"
            remedy = "pass its ids to the plan, or name the fields that hold them all"
            raise ShapeError(f"{problem} {has} for it in {', '.join(ids) or lengths}", query, remedy)
        if plan.bounded and lengths is None:
            remedy = "name the field that was published with the true ones: lengths=..."
            raise ContractError(f"{self.name}: {plan!r} has bounds of the lengths", "upper_bound", remedy)
        table, columns = req_to_token, int(plan.kv_ends.max(initial=0))
        fits = table is None or (
            table.space is self.slots
            and not table.dtype.is_floating_point
            and len(table.shape) == 2
            and table.shape[1] >= columns
            and table.holds in (None, "location")
        )
        if not fits or (table is None and plan.bounded and "slot_mapping" in plan.extras):
            problem = f"{self.name}: bounds and a slot mapping need the token table, by slot of {self.slots.name!r}"
            remedy = "pass req_to_token=, as wide as a request may be long"
            raise ArgumentError(f"{problem} and position of up to {columns} tokens, got {table!r}", table, remedy)
        return most

    # For `StepPlanner`, besides `publish_for`, `put`, `gathering`, `check_gathered` and `flat_ids`

    def _derived(self, name: str, value: object, publishing: Publishing | None) -> RelayField:
        """A field that follows from what steps accept: the host may publish that of requests that arrive."""
        if isinstance(value, _ON_DEVICE) or not isinstance(publishing, LiveSlots):
            problem = f"{self.name}: publish of {name!r}, which follows from the tokens that a step accepts"
            raise DeclarationError(problem, name, "pass these to `PlannedStep.accept`; it returns the lengths")
        return self._fields[name]

    def put_accepted(
        self,
        publishing: Publishing,
        requests: Requests,
        names: tuple[str, str],
        tokens: torch.Tensor,
        before: torch.Tensor,
        put_in: Array,
    ) -> torch.Tensor:
        """Publishes tokens accepted, and the lengths that follow, which it returns; see `PlannedStep.accept`.

        `before` int32[2, s] has the tokens before the step, and those put in, which are `put_in` int64[s] on the host.
        """
        runtime, stream = self.runtime, self.runtime.current_stream
        field, lengths = names
        self._check_device_values(field, tokens, (requests.n, publishing.num_rows), publishing.handles)
        tokens = _live_rows(tokens, requests.n)
        if levels.full:
            check_accepted(runtime.inspect(tokens), put_in, **self._entries.where("accept", field))
        together = self.together(names)
        numbers = self._entries.check_overwrite(requests, together.entries, stream)
        arguments = before, tokens, self._fields[lengths].dtype
        true: torch.Tensor = runtime.launch(
            _lengths, *arguments, reads=arguments[:2], name="true lengths", operations=4
        )
        if requests.n:
            values = {field: tokens, lengths: true}
            self.put(requests, stream, publishing.index(stream), together, values, numbers)
        return true

    def id_widths(self, names: Sequence[str], dtype: torch.dtype) -> tuple[int, list[int]]:
        """The fewest ids of a request in these fields of ids of `dtype`, and the most in each."""
        for name in names:
            _check_numbers("ids", name, self._fields[name], (dtype,), 1, self.name)
        widths = [math.prod(self._fields[name].shape) for name in names]
        ragged = [name for name in names if self._fields[name].ragged]
        if ragged and ragged != [*names[-1:]]:
            problem = f"{self.name}: inputs from fields {names}, of which {', '.join(ragged)} is ragged"
            remedy = "name one ragged field, and name it last: the ids of a request are in one sequence"
            raise DeclarationError(problem, names, remedy)
        return sum(widths[:-1] if ragged else widths), widths

    def check_lengths_field(self, name: str) -> None:
        """Refuses a field whose entries cannot be lengths."""
        _check_numbers("lengths", name, self._fields[name], (torch.int64, torch.int32), 0, self.name)

    def first_values(self, values: Mapping[str, object], n: int) -> dict[str, Array]:
        """Checked host values of n requests that join."""
        self._check_call(values, "publish")
        first = {}
        for name, value in values.items():
            if isinstance(value, _ON_DEVICE):
                problem = f"{self.name}: {name!r} from the device, with the copy of a step"
                raise ArgumentError(problem, name, "publish what a forward has made with `publish`")
            first[name] = self.host_values(name, value, (n, n))
        return first

    def check_known_lengths(self, plan: ForwardPlan, lengths: str) -> None:
        """MIRROR_EQUAL, at `full`: the last forward published other lengths than those that the host has."""
        relayed = plan.relayed
        if levels.full and len(relayed) and not self.runtime.checks_suspended():
            before = (plan.seq_lens - plan.query_lens)[plan.relay_rows]
            index, operation = self.runtime.upload([relayed.np]).view(0), "resolve_forward_inputs"
            stream, requests = self.runtime.current_stream, Requests(relayed.np, relayed.generations)
            numbers = self._entries.check_read(requests, (lengths,), DEVICE, stream, operation)
            self._entries.come_behind(numbers, stream, operation)
            true = self.runtime.inspect(self._memory_of(lengths).index_select(0, index))
            invariants.mirror_equal(before.astype(true.dtype), true, **self._entries.where(operation, lengths))

    # Checks

    def check(self, operation: str = "check") -> None:
        """Row 0 of each field is zero, and no entry outlived its owner: SLOT_ZERO_DIRTY, FUTURE_GENERATION.

        Reads device memory; not under capture.
        """
        self._transaction.enter(f"{self.name}: check")
        if self.runtime.checks_suspended():
            return
        for name in self._memory:
            bits = self._memory_of(name)[0].reshape(-1).view(torch.uint8)
            invariants.slot_zero_dirty(self.runtime.inspect(bits), **self._entries.where(operation, name))
        self._entries.verify()

    def _check_call(self, fields: Iterable[str], operation: str, reader: int = 0, *, launches: bool = True) -> None:
        """Refuses fields not declared, or not for `reader`, and launches that a graph would repeat unnoticed."""
        if launches and self.runtime.capturing:
            raise CaptureError(
                f"{self.name}: {operation} while the stream is captured: replays would bypass the relay's bookkeeping",
                remedy="gather before the replay, into the graph's inputs; publish after it, or `publish_in_graph`",
            )
        for name in fields:
            field = self._fields.get(name)
            if field is None:
                problem = f"{self.name}: {operation} of {name!r}, which is not declared"
                raise DeclarationError(problem, name, one_of(self._fields, name))
            if reader & ~field.readers:
                problem = f"{self.name}: {operation} of {name!r}, which is read by {READERS[field.readers]}"
                raise DeclarationError(problem, name, "declare the field with read_by='both'")

    def _check_device_values(
        self,
        name: str,
        value: torch.Tensor | MirroredTensor,
        num_rows: tuple[int, int],
        handles: Callable[[], Slots] | None,
    ) -> None:
        """Refuses values that do not go into a field. Does not touch the device: a mirrored value may have none yet."""
        subject, field, device = f"{self.name}: publish of {name!r}", self._fields[name], self.runtime.device
        if isinstance(value, MirroredTensor):
            if value.row_set is not None and handles is not None:
                handles().row_set.check_same(value.row_set, value, **self._entries.where("publish", name))
            if value.runtime is not self.runtime:
                raise another_runtime(subject, value)
            _ = value.device_side  # refuses one that is knowingly old
            if levels.full:
                value.check("publish")
        elif not isinstance(value, torch.Tensor):
            raise expected(subject, f"a tensor on {device}", value, "make it a tensor in the forward", DtypeError)
        elif value.device != device:
            problem = f"{subject}: expected a tensor on {device}, got one on {value.device}"
            remedy = "pass a tensor of the runtime's device, or host values as a list or an array"
            raise DeviceError(problem, str(value.device), remedy)
        else:
            check_dense(value, subject)
        if value.dtype != field.dtype:
            raise expected(subject, field.dtype, value.dtype, "convert it in the forward", DtypeError)
        _check_shape(tuple(value.shape), field, num_rows, subject)

    def _live(self, slots: Slots, operation: str) -> tuple[Slots, Requests]:
        """The rows before the padding at the end, each a live handle and named once."""
        live = unpadded(slots) if type(slots) is Slots else slots  # which the pool refuses
        rows = self.slots.rows_of(live, f"{self.name}: {operation}", unique=True)  # refuses a zero elsewhere
        return live, Requests(rows, live.generations)

    # Device memory

    def _memory_of(self, field: str, stream: Stream | None = None) -> torch.Tensor:
        """The entries of a field, safe on the current `stream`: it comes behind the kernel that zeroed them."""
        memory, synchronised = self._memory[field], self._synchronised[field]
        if stream is self._zeroed_on:
            return memory
        return self.runtime.use_on_current_stream(
            memory, self._zeroed_on, self._zeroed, synchronised=synchronised, current=stream
        )

    def _part_of_record(self, fields: Sequence[str]) -> torch.Tensor:
        """The bytes [rows, nbytes] of the record from the first of these fields to the last, as `_memory_of`."""
        self._memory_of(fields[0])
        places = [self._places[field] for field in fields]
        return self._record[:, min(part.start for part in places) : max(part.stop for part in places)]

    def _taken(self, memory: torch.Tensor, index: torch.Tensor, fields: Sequence[str]) -> torch.Tensor:
        label = f"{self.name}: gather {', '.join(fields)}"
        return self.runtime.launch(select_rows, memory, index, reads=(memory, index), name=label)

    def _select(
        self, fields: Sequence[str], index: torch.Tensor, dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], list[slice] | None]:
        """The entries of fields: a tensor each; if all are in the record one of `dtype`, and where each lies in it."""
        if len(fields) == 1 or not all(field in self._places for field in fields):
            return [self._taken(self._memory_of(field), index, (field,)) for field in fields], None
        places, size = [self._places[field] for field in fields], dtype.itemsize
        first = min(part.start for part in places)
        rows = self._taken(self._part_of_record(fields).view(dtype), index, fields)
        return [rows], [slice((part.start - first) // size, (part.stop - first) // size) for part in places]

    def selected(self, fields: Sequence[str], index: torch.Tensor) -> torch.Tensor:
        """The entries of fields of one dtype, of several end to end for each request, [n, width]."""
        if len(fields) == 1:
            return self._taken(self._memory_of(fields[0]), index, fields)
        tensors, parts = self._select(fields, index, self._fields[fields[0]].dtype)
        if parts is not None:
            ends = [0, *(part.stop for part in parts)]
            if ends == [*(part.start for part in parts), tensors[0].shape[1]]:  # in this order, and nothing between
                return tensors[0]
            tensors = [tensors[0][:, part] for part in parts]
        return self.runtime.launch(end_to_end, tensors, reads=tensors, name="ids of requests")


def _as_record(parts: list[torch.Tensor]) -> torch.Tensor:
    """The bytes of values [n, *shape], those of one request behind each other, uint8[n, nbytes]. One kernel."""
    sizes = [(part.shape[0], math.prod(part.shape[1:])) for part in parts]
    # Not by a view: torch keeps the stride of a single element, whatever it is, and no byte view takes it.
    rows = [part.contiguous().as_strided(size, (size[1], 1)) for part, size in zip(parts, sizes, strict=True)]
    return end_to_end([part.view(torch.uint8) for part in rows])


def _lengths(before: torch.Tensor, accepted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (before[0] + torch.minimum(accepted.clamp(min=0), before[1])).to(dtype)


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


def _check_numbers(
    kind: str, name: str, field: RelayField, dtypes: tuple[torch.dtype, ...], ndim: int, relay: str
) -> None:
    """Refuses a field whose entries cannot be ids or lengths."""
    subject = f"{relay}: {kind} from field {name!r}"
    if field.dtype not in dtypes:
        remedy = f"declare it {' or '.join(map(str, dtypes))}; ids are as ForwardPlan.of(..., int32=...) says"
        raise DtypeError(f"{subject} of {field.dtype}", field.dtype, remedy)
    if len(field.shape) > ndim:
        remedy = f"the {kind} of a request are {'one number, or one row of them' if ndim else 'one number'}"
        raise DeclarationError(f"{subject} of {list(field.shape)}", field.shape, remedy)
    if field.stale is not None:
        raise DeclarationError(
            f"{subject}, which may be stale", field.stale, f"declare a field of their own for {kind}"
        )
