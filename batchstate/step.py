"""`StepPlanner`: the steps of an engine, declared once: what follows from the declaration is not computed in each step.

    planner = StepPlanner(Running, pages=pages, relay=relay, ids="last_token", results=("last_token",))

    step = planner.plan(batch)                 # each request puts in one token; one copy, one scatter
    inputs = step.inputs()                     # at forward entry, on its stream
    step.publish(last_token=sampled)           # to the next step, and on the way to the host
    batch = step.batch
    ...
    step.results["last_token"].np              # a step later

A step is `Batch.advance`, `PagePool.advance`, `ForwardPlan.of`, `Batch.upload`, `FutureMap.resolve_forward_inputs`,
`publish` and `prefetch`, one after the other: so run prefills, mixed steps and speculation. A decode step, in which the
relay has the one token of each request, runs as one piece. Each invariant is then checked once for all parts, and
numbers go to staging memory through views that were made when these requests first came.
"""

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, cast, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import count as counted
from batchstate._origin import DerivedArrays, Origin, RowSet
from batchstate._relay import PublishedRows
from batchstate._rows import HostRows, RowState
from batchstate._upload import BatchDevice, Extras, extra_array, joined_writes
from batchstate.batch import Batch
from batchstate.columns import MirroredColumn
from batchstate.errors import ArgumentError, DeclarationError, one_of
from batchstate.forward.inputs import ForwardInputs, with_device
from batchstate.forward.plan import ForwardPlan
from batchstate.future_map import FutureMap, Prefetched
from batchstate.indices import Slots
from batchstate.kv.pages import PagePool
from batchstate.mirror import Contract, DeviceSide, ReadyTensor
from batchstate.runtime import PackedUpload
from batchstate.runtime.memory import ALIGNMENT, Place, StagingBlock, packed_places
from batchstate.tables import TableWrite
from batchstate.violations import Where

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_INT64, _INT32 = np.dtype(np.int64), np.dtype(np.int32)
_ONE = np.array(1)  # numpy takes as long to convert one number as to add 100 of them

_WIDE, _NARROW = 3, 2
"""Rows beside the columns in a decode step's copy: positions, slot mapping and indices of the table write, int64; and
KV lengths and values of the table write, int32."""


@final
class _Requests:
    """The requests of consecutive decode steps, and what stays the same until one joins or leaves.

    Attributes:
        row_set: that of the batch.
        slots: handles; their device side is that of the first of these steps.
        rows, generations: theirs, int64[n].
        held_at: `changes` of the slot pool when they were last found live.
        known: their ids in the relay.
        query_start_loc, last_token_indices: on the device.
        first_element: int64[n], where the row of each begins in the flat `req_to_token`.
        ones, everyone: 1 for each, and 0 to n - 1.
        nbytes: of a step's copy.
        written: whether all tokens before this step's are.
        places: of the columns in the copy, one for each array of the batch's `Layout`.
    """

    __slots__ = (
        "_beside",
        "_num_groups",
        "_starts",
        "_views",
        "everyone",
        "first_element",
        "generations",
        "held_at",
        "known",
        "last_token_indices",
        "nbytes",
        "ones",
        "places",
        "query_start_loc",
        "row_set",
        "rows",
        "slots",
        "written",
    )

    known: PublishedRows
    query_start_loc: torch.Tensor
    last_token_indices: torch.Tensor

    def __init__(self, row_set: RowSet, slots: Slots, rows: Ints, host: HostRows, row_width: int) -> None:
        self.row_set, self.slots, self.rows, self.generations = row_set, slots, rows, slots.generations
        self.held_at = slots.held_at
        n = rows.size
        self.first_element = rows * row_width
        self.written = False
        self.ones, self.everyone = np.ones(n, dtype=np.int64), np.arange(n)
        self.places: list[Place] = []
        size = 0
        for group in host.groups:
            pitch = _pitch(n, group.dtype)
            self.places.append((size, group.dtype, (len(group), pitch)))
            size += len(group) * pitch * group.itemsize
        for wide in host.wide:
            self.places.append((size, wide.dtype, wide.shape))
            size += -(-wide.nbytes // ALIGNMENT) * ALIGNMENT
        self._num_groups = len(host.groups)
        self._starts = size, size + _WIDE * _pitch(n, _INT64) * _INT64.itemsize
        self.nbytes = self._starts[1] + _NARROW * _pitch(n, _INT32) * _INT32.itemsize
        self._views: dict[StagingBlock, list[Array]] = {}
        self._beside = [
            (dtype, (count, n), (_pitch(n, place), 1), at // place.itemsize)
            for at, dtype, place, count in (
                (self._starts[0], torch.int64, _INT64, _WIDE),
                (self._starts[1], torch.int32, _INT32, _NARROW),
            )
        ]

    def fill(self, block: StagingBlock, host: HostRows, beside: Sequence[Array]) -> None:
        """Writes the columns, and the rows int64[n] beside them, to where they go in `block`."""
        views = self._views.get(block)
        if views is None:
            n, memory = self.rows.size, block.bytes
            views = [_rows_at(memory, at, dtype, shape[0], n) for at, dtype, shape in self.places[: self._num_groups]]
            views.extend(_rows_at(memory, self._starts[0], _INT64, _WIDE, n))
            views.extend(_rows_at(memory, self._starts[1], _INT32, _NARROW, n))
            self._views[block] = views
        for view, values in zip(views, (*host.groups, *beside), strict=True):
            view[...] = values
        for wide, place in zip(host.wide, self.places[self._num_groups :], strict=True):
            block.write(wide, place[0])

    def beside(self, upload: PackedUpload) -> list[torch.Tensor]:
        """The rows beside the columns, on the device: [n] each. A write in place into one is none into a column."""
        memory = upload.buffer.data  # which begins where its storage does
        rows: list[torch.Tensor] = []
        for dtype, shape, strides, first in self._beside:
            rows += memory.view(dtype).as_strided(shape, strides, first).unbind(0)
        return rows


def _each_puts_in_one(n: int, query_lens: object, prompt_ids: Sequence[object] | None, samples: object) -> bool:
    """Whether each of `n` requests puts in the one token that the relay has for it, and samples."""
    if type(query_lens) is int:
        if query_lens != 1:
            return False
    elif not isinstance(query_lens, np.ndarray) or query_lens.shape != (n,) or np.count_nonzero(query_lens != 1):
        return False
    if prompt_ids is not None and (len(prompt_ids) != n or any(ids is not None for ids in prompt_ids)):
        return False
    return samples is None or (
        isinstance(samples, np.ndarray)
        and samples.dtype == np.bool_
        and samples.shape == (n,)
        and np.count_nonzero(samples) == n
    )


def _pitch(n: int, dtype: "np.dtype[Any]") -> int:
    """Elements from one row to the next: each begins at a multiple of `ALIGNMENT`."""
    return n + -n * dtype.itemsize % ALIGNMENT // dtype.itemsize


def _rows_at(memory: Array, start: int, dtype: "np.dtype[Any]", count: int, n: int) -> Array:
    """`count` rows of `n` numbers, from byte `start` on."""
    pitch = _pitch(n, dtype)
    rows: Array = memory[start : start + count * pitch * dtype.itemsize].view(dtype).reshape(count, pitch)[:, :n]
    return rows


@final
class PlannedStep:
    """A step that was planned and uploaded. Made by `StepPlanner.plan`.

    Attributes:
        batch: of this step: the lengths count the tokens that each request puts in.
        sent: the same as it went to the device, with padded rows if there are any.
        plan: what the host knows of the forward.
        extras: what was uploaded beside the columns, by name: arrays of the engine, and those of the plan if the step
            is not planned as one piece.
    """

    __slots__ = (
        "_beside",
        "_planner",
        "_requests",
        "_results",
        "_sampled",
        "_upload",
        "batch",
        "extras",
        "plan",
        "sent",
    )

    def __init__(
        self,
        planner: "StepPlanner",
        batch: Batch,
        sent: Batch,
        plan: ForwardPlan,
        extras: Extras,
        requests: _Requests | None = None,
        upload: PackedUpload | None = None,
        beside: Sequence[torch.Tensor] = (),
    ) -> None:
        """For the library."""
        self.batch, self.sent, self.plan, self.extras = batch, sent, plan, extras
        self._planner = planner
        self._requests, self._upload, self._beside = requests, upload, beside
        self._sampled = plan.sampled_slots  # from the inputs on with the device side that was uploaded with the step
        self._results: Prefetched | None = None

    def __repr__(self) -> str:
        return f"PlannedStep({self.plan!r})"

    def inputs(self) -> ForwardInputs:
        """The inputs of the forward, at its entry, on its stream; see `FutureMap.resolve_forward_inputs`.

        In a decode step `query_start_loc` and `last_token_indices` are memory that later steps read too.

        Raises:
            As `FutureMap.resolve_forward_inputs`.
        """
        inputs = self._planner._inputs(self)
        self._sampled = inputs.sampled_slots
        return inputs

    def publish(self, **values: object) -> None:
        """Makes what the forward has found known to the next step, and sends the results to the host.

        Args:
            **values: field -> value, one entry for each request that samples; see `FutureMap.publish`.

        Raises:
            As `FutureMap.publish` and `prefetch`.
        """
        self._results = self._planner._publish(self, values)

    @property
    def results(self) -> Prefetched:
        """The fields that the planner was declared with, on their way to the host; reading one waits for the copy.

        Raises:
            ArgumentError: nothing was published yet, or no results were declared.
        """
        if self._results is None:
            raise ArgumentError(
                f"{self!r} has no results",
                value=self,
                remedy="publish first, and name the fields that the host reads: StepPlanner(..., results=...)",
            )
        return self._results


@final
class StepPlanner:
    """Plans the steps of one batch class. Belongs to the runtime's thread.

    Args:
        batch: the batch class.
        pages: where the KV goes.
        relay: with the ids of the requests that decode.
        seq_lens: the column with the tokens of each request.
        ids: relay field, or fields, whose entries end to end are the tokens that a request puts in.
        lengths: relay field with the true lengths, where the host knows bounds.
        results: relay fields that go to the host as soon as they are published.
        window: as for `ForwardPlan.of`, as are the layouts.
        layouts: arrays of attention kernels.

    Raises:
        ArgumentError: not a batch class, page pool or relay, or not of the same slots.
        DeclarationError: no such column or field.
    """

    def __init__(
        self,
        batch: type[Batch],
        *,
        pages: PagePool,
        relay: FutureMap,
        seq_lens: str = "seq_lens",
        ids: str | Sequence[str],
        lengths: str | None = None,
        results: Sequence[str] = (),
        window: SupportsIndex | None = None,
        layouts: str | Sequence[str] = (),
    ) -> None:
        self._check_parts(batch, pages, relay)
        column = batch.columns().get(seq_lens)
        if not isinstance(column, MirroredColumn) or column.shape or batch._slot_column is None:
            raise DeclarationError(
                f"StepPlanner of {batch.__name__}: no slots, or no column {seq_lens!r} of one number per request",
                value=seq_lens,
                remedy="declare slot_column() and mirrored(torch.int64), and name the second: seq_lens=...",
            )
        self._runtime, self._pages, self._relay, self._slots = pages.runtime, pages, relay, pages.slots
        self._kind, self._slot_column, self._seq_lens = batch, batch._slot_column, seq_lens
        self._ids: tuple[str, ...] = (ids,) if isinstance(ids, str) else tuple(ids)
        self._lengths, self._results, self._layouts = lengths, tuple(results), layouts
        self._window = None if window is None else counted(window, "StepPlanner: window", least=1)
        fields = relay.fields
        for name in (*self._ids, *self._results, *(() if lengths is None else (lengths,))):
            if name not in fields:
                raise DeclarationError(
                    f"StepPlanner: field {name!r} is not declared",
                    value=name,
                    remedy=one_of(fields, name),
                )
        field = fields[self._ids[0]]
        self._in_one_piece = (
            len(self._ids) == 1
            and field.dtype == torch.int64
            and not field.shape
            and lengths is None
            and not layouts
            and column.dtype == torch.int64
            and pages.req_to_token is not None
            and pages.req_to_token.dtype == torch.int32
            and set(self._results) <= set(self._ids)
        )
        self._place, self._table = batch._layout.places[seq_lens], pages.req_to_token
        self._requests: _Requests | None = None  # of the last decode step
        self._most = min(self._slots.size, _MOST_IN_ONE_PIECE)
        self._make_constants()

    def __repr__(self) -> str:
        return f"StepPlanner({self._pages!r}, {self._relay!r})"

    def plan(
        self,
        batch: Batch,
        query_lens: object = 1,
        *,
        prompt_ids: Sequence[object] | None = None,
        samples: object = None,
        pad_rows: SupportsIndex | None = None,
        pad_tokens: SupportsIndex | None = None,
        writes: Sequence[TableWrite] = (),
        extras: Mapping[str, object] | None = None,
    ) -> PlannedStep:
        """Plans a step, and sends it to the device on the current stream: one copy, and a scatter for each table.

        Each request gets pages for the tokens that it puts in, and they count as committed.

        Args:
            batch: the requests, with their lengths before the step.
            query_lens: tokens that each puts in, as for `ForwardPlan.of`.
            prompt_ids: as for `ForwardPlan.of`.
            samples: as for `ForwardPlan.of`.
            pad_rows: rows of a captured graph: what is sent is padded as by `Batch.pad`.
            pad_tokens: as for `ForwardPlan.of`.
            writes: further table writes of the step, as for `Batch.upload`.
            extras: further arrays of the step, as for `Batch.upload`.

        Raises:
            ArgumentError: a batch of another class than the planner was declared for.
            CaptureError: the stream is being captured.
            As `PagePool.advance`, `Batch.advance`, `ForwardPlan.of` and `Batch.upload`. No token was committed.
        """
        self._slots.transaction.enter(_OPERATION)
        if self._runtime.capturing:
            self._runtime.refuse_capture("planning a step")
        if type(batch) is not self._kind:
            raise ArgumentError(
                f"StepPlanner: plan of {type(batch).__name__}, declared for {self._kind.__name__}",
                value=batch,
                remedy="make a planner for each batch class",
            )
        if writes:
            batch._check_writes(writes, _OPERATION)
        padded = pad_rows is not None or pad_tokens is not None
        if (
            self._in_one_piece
            and not padded
            and _each_puts_in_one(batch.num_reqs, query_lens, prompt_ids, samples)
            and self._decodes(batch, writes)
        ):
            return self._decode(batch, writes, extras)
        return self._composed(batch, query_lens, prompt_ids, samples, (pad_rows, pad_tokens), writes, extras)

    def _composed(
        self,
        batch: Batch,
        query_lens: object,
        prompt_ids: Sequence[object] | None,
        samples: object,
        padding: tuple[SupportsIndex | None, SupportsIndex | None],
        writes: Sequence[TableWrite],
        extras: Mapping[str, object] | None,
    ) -> PlannedStep:
        """Any step, from the parts."""
        pages = self._pages
        advanced = batch.advance(self._seq_lens, query_lens)
        slots, lens = self._handles(advanced), advanced[self._seq_lens]
        before = pages.committed(slots)
        if lens.contract is Contract.EXACT:
            pages.check_committed(slots.np, batch[self._seq_lens].np, _OPERATION)
        extension = pages.extend(slots, lens.np)
        rows, tokens = padding
        try:
            sent = advanced if rows is None else advanced.pad(rows)
            plan = ForwardPlan.of(
                self._handles(sent),
                sent[self._seq_lens],
                query_lens,
                prompt_ids=prompt_ids,
                samples=samples,
                pages=pages,
                window=self._window,
                pad_tokens=tokens,
                layouts=self._layouts,
            )
            if pages.req_to_token is not None:
                writes = (extension.entry(), *writes)
            uploaded = sent.upload(writes=writes, extras=plan.extras | dict(extras or {}))
        except BaseException:
            pages.truncate(slots, before)
            raise
        return PlannedStep(self, advanced, sent, plan, uploaded)

    def _make_constants(self) -> None:
        """Makes what is the same in every decode step: where the one token of each request begins, and is."""
        runtime, n = self._runtime, self._most
        with torch.inference_mode(False):  # else torch would not count what is written into them
            made = [
                runtime.launch(torch.arange, n, dtype=dtype, device=runtime.device, name="StepPlanner: constants")
                for n, dtype in ((n + 1, torch.int32), (n, torch.int64))
            ]
        stream, ready = runtime.current_stream, runtime.record()
        self._constants = [ReadyTensor(one, stream, ready, set()) for one in made]
        self._written = sum(one._version for one in made)

    def _handles(self, batch: Batch) -> Slots:
        return cast(Slots, batch[self._slot_column])

    # A decode step in one piece

    def _decodes(self, batch: Batch, writes: Sequence[TableWrite]) -> bool:
        """Whether a step that puts in one token of each request can be planned in one piece."""
        device = batch._state.device
        if device and (self._seq_lens in device or any(rows.as_it_is() is None for rows in device.values())):
            return False
        return (
            0 < batch.num_reqs == batch.num_rows <= self._most
            and not (batch._windows or (batch._exposed and batch._open_windows()))
            and not (writes and any(write.table is self._table for write in writes))
        )

    def _decode(self, batch: Batch, writes: Sequence[TableWrite], extras: Mapping[str, object] | None) -> PlannedStep:
        """A step in which each request puts in one token that the relay has."""
        runtime, pages = self._runtime, self._pages
        references = pages._references
        if references.allocator._queue.count or references._readers:
            pages.reap()
        num_reqs = batch._begin(_OPERATION)
        joined = joined_writes(runtime, writes) if writes else ()
        arrays = batch._checked_extras(extras, _OPERATION) if extras else {}
        state = batch._state
        requests = self._requests
        same = requests is not None and requests.row_set.number == batch._row_number
        if requests is None or not same:
            requests = self._requests_of(batch)
        elif requests.held_at != self._slots.changes or levels.full:  # something was taken or freed since
            self._slots.check_rows(requests.rows, requests.generations, _OPERATION)
            requests.held_at = self._slots.changes
        host, place, rows = state.host, self._place, requests.rows
        groups = list(host.groups)
        group = groups[place.array] = groups[place.array].copy()
        lens = group[place.member]
        start = lens.copy()
        pages.check_committed(rows, start, _OPERATION)
        pages.check_readable(rows, start, _OPERATION, window=self._window)
        lens += _ONE
        locations = pages.next_locations(rows, start, lens, _OPERATION)
        self._slots.transaction.operation = None  # the requests have grown; nothing is committed yet
        moved = HostRows(host.layout, groups, host.wide)
        upload, beside, uploaded = self._sent(requests, moved, (start, locations, lens), joined, arrays)
        pages.commit_rows(rows, lens)
        moved_state = RowState(moved, state.device, state.objects)
        device = BatchDevice.of_upload(runtime, moved_state, upload)
        advanced = batch._derived(_OPERATION, moved_state, num_reqs, windows={}, moved=False, device=device)
        if not same:
            self._give_device_side(requests, upload)
            self._requests = requests
        if levels.full:
            pages.verify()
        origin = Origin(_OPERATION, runtime.step, requests.row_set, pages.epochs, pages.epochs.last)
        plan = ForwardPlan(
            slots=requests.slots,
            num_reqs=num_reqs,
            num_tokens=num_reqs,
            num_padded_tokens=num_reqs,
            query_lens=requests.ones,
            seq_lens=lens,
            bounds=None,
            relay_rows=requests.everyone,
            relayed=requests.slots,
            sample_rows=requests.everyone,
            sampled_slots=requests.slots,
            extras=DerivedArrays({"slot_mapping": locations}, origin),
            origin=origin,
            shares=pages.shares.last,
            pages=pages,
        )
        return PlannedStep(self, advanced, advanced, plan, uploaded, requests, upload, beside)

    def _sent(
        self,
        requests: _Requests,
        host: HostRows,
        tokens: tuple[Ints, Ints, Ints],
        writes: Sequence[TableWrite],
        extras: Mapping[str, object],
    ) -> tuple[PackedUpload, list[torch.Tensor], Extras]:
        """One copy of the columns, of what the forward takes besides, and of what the engine adds; then the scatters.

        `tokens` are the positions of the tokens, their locations, and the lengths with them.
        """
        runtime, table = self._runtime, self._table
        start, locations, lens = tokens
        at = requests.first_element + start
        places, nbytes, named = requests.places, requests.nbytes, {}
        further: list[Array] = []
        if writes or extras:
            for write in writes:
                further += (write.index, write.values)
            for name, values in extras.items():
                named[name] = len(places) + len(further)
                further.append(extra_array(name, values))
            added, size = packed_places(further)
            places = [*places, *((nbytes + first, dtype, shape) for first, dtype, shape in added)]
            nbytes += size
        written = at, locations
        if table is not None:
            written = self._pages.whole_pages(at, start, locations, table.shape[1])
        more = written[0].size - at.size
        first_index = first_value = nbytes
        if more:
            first_value = first_index + _pitch(written[0].size, _INT64) * _INT64.itemsize
            nbytes = first_value + _pitch(written[0].size, _INT32) * _INT32.itemsize
        block = runtime.staging_block(nbytes)
        requests.fill(block, host, (start, locations, at, lens, locations))
        if more:
            block.write(written[0], first_index)
            block.write(written[1].astype(np.int32), first_value)
        for array, place in zip(further, places[len(requests.places) :], strict=True):
            block.write(array, place[0])
        upload = runtime.send(block, nbytes, places)
        beside = requests.beside(upload)
        if table is not None:
            index, values = beside[2], beside[4]
            if more:
                memory, size = upload.buffer.data, written[0].size
                index = memory.view(torch.int64).as_strided((size,), (1,), first_index // _INT64.itemsize)
                values = memory.view(torch.int32).as_strided((size,), (1,), first_value // _INT32.itemsize)
            table.scatter(index, values, *written, [(requests.rows, requests.generations)])
        for i, write in enumerate(writes):
            first = len(requests.places) + 2 * i
            write.table.apply(write, upload.view(first), upload.view(first + 1))
        return upload, beside, Extras(runtime, upload, named, dict(extras), row_set=requests.row_set)

    def _give_device_side(self, requests: _Requests, upload: PackedUpload) -> None:
        """The slots have crossed with the first step of these requests: later ones, and the relay, use them there."""
        place = self._kind._layout.places[self._slot_column]
        column = upload.group(place.array, place.dtype, requests.rows.size)[cast(int, place.member)]
        requests.slots = requests.known.live = with_device(
            requests.slots, DeviceSide(ReadyTensor.uploaded(column, upload))
        )

    def _requests_of(self, batch: Batch) -> _Requests:
        """What stays the same from now on, of requests that were not those of the step before."""
        handles = self._handles(batch)
        rows = self._slots.rows_of(handles, _OPERATION, unique=True).copy()
        width = 0 if self._table is None else self._table.shape[1]
        requests = _Requests(batch.row_set, handles, rows, batch._state.host, width)
        requests.known = self._relay.published_rows(self._ids[0], handles, rows, requests.generations)
        starts, last = (one.tensor for one in self._constants)
        requests.query_start_loc, requests.last_token_indices = starts[: rows.size + 1], last[: rows.size]
        return requests

    # What a step asks of its planner

    def _inputs(self, step: PlannedStep) -> ForwardInputs:
        requests, upload = step._requests, step._upload
        if requests is None or upload is None:
            return self._relay.resolve_forward_inputs(
                step.plan,
                step.extras,
                ids=self._ids,
                lengths=self._lengths,
                req_to_token=self._pages.req_to_token,
            )
        runtime, plan = self._runtime, step.plan
        plan.check(None, "inputs")
        plan.check_unused()
        runtime.use_on_current_stream(upload.buffer, upload.stream, upload.ready, synchronised=upload.synchronised)
        starts, last = self._constants
        if runtime.current_stream is not starts.stream:
            starts.on_current_stream(runtime)
            last.on_current_stream(runtime)
        if levels.cheap and starts.tensor._version + last.tensor._version != self._written:
            self._report_constants()
        ids, slots = self._relay.gather_again(requests.known, self._ids[0])
        plan._used = True
        positions, mapping, _, kv_lens, _ = step._beside
        inputs = ForwardInputs(
            plan=plan,
            slots=slots,
            sampled_slots=requests.slots,
            ids=ids,
            positions=positions,
            query_start_loc=requests.query_start_loc,
            kv_lens=kv_lens,
            last_token_indices=requests.last_token_indices,
            slot_mapping=mapping,
        )
        if levels.full:
            inputs.check(runtime)
        lens = plan.seq_lens
        begin = None if requests.written else lens - _ONE
        requests.written = self._pages.writes.launched(requests.rows, lens, begin)
        return inputs

    def _report_constants(self) -> None:
        """Reports once that a forward wrote into what all steps read, and makes it anew."""
        before, now = self._written, sum(one.tensor._version for one in self._constants)
        self._make_constants()
        self._requests = None
        where: Where = {
            "object": self,
            "operation": "inputs",
            "column": "query_start_loc, last_token_indices",
            "step": self._runtime.step,
        }
        invariants.mirror_foreign_write("device", before, now, **where)

    def _publish(self, step: PlannedStep, values: Mapping[str, object]) -> Prefetched | None:
        requests, relay = step._requests, self._relay
        name = self._ids[0]
        if requests is not None and len(values) == 1 and name in values:
            value = values[name]
            if (
                type(value) is torch.Tensor
                and value.dtype is torch.int64
                and value.shape == requests.rows.shape
                and value.device == self._runtime.device
                and value.layout is torch.strided
                and not value.requires_grad
            ):
                return relay.publish_again(requests.known, name, value, to_host=bool(self._results))
        slots = step._sampled
        relay.publish(slots, **values)
        return relay.prefetch(slots, *self._results) if self._results else None

    @staticmethod
    def _check_parts(batch: object, pages: object, relay: object) -> None:
        if not isinstance(batch, type) or not issubclass(batch, Batch):
            raise ArgumentError(f"StepPlanner of {batch!r}", value=batch, remedy="pass a class that declares columns")
        for value, kind in ((pages, PagePool), (relay, FutureMap)):
            if not isinstance(value, kind):
                raise ArgumentError(
                    f"StepPlanner: expected a {kind.__name__}, got {type(value).__name__}",
                    value=value,
                    remedy="pass pages and relay of the pool that the requests take their slots from",
                )
        if isinstance(pages, PagePool) and isinstance(relay, FutureMap) and pages.slots is not relay.slots:
            raise ArgumentError(
                f"StepPlanner: {pages!r} and {relay!r} are of two slot pools",
                value=relay.slots,
                remedy="make both over the pool that the requests take their slots from",
            )


_OPERATION = "plan"
_MOST_IN_ONE_PIECE = 8192
"""Requests of a decode step that is planned in one piece; one of more is composed of the parts."""
