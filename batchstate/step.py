"""`StepPlanner`: the steps of an engine, declared once: what follows from the declaration is not computed in each step.

An engine makes one planner, and asks it for each step::

    planner = StepPlanner(Running, pages=pages, relay=relay, ids="last_token", results=("last_token",))

    step = planner.plan(batch)  # each request puts in one token; one copy, one scatter
    inputs = step.inputs()  # at forward entry, on its stream
    step.publish(last_token=sampled)  # to the next step, and on the way to the host
    batch = step.batch
    ...
    step.results["last_token"].np  # a step later

A step is `Batch.advance`, `PagePool.advance`, `ForwardPlan.of`, `Batch.upload`, `FutureMap.resolve_forward_inputs`,
`publish` and `prefetch`, one after the other: so run prefills, mixed steps and speculation. A decode step, in which the
relay has the one token of each request, runs as one piece. Each invariant is then checked once for all parts, and
numbers go to staging memory through views that were made when these requests first came.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex, cast, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import Amount, Selection, arange_per_row, kept_rows
from batchstate._arrays import count as counted
from batchstate._origin import DerivedArrays, Origin, RowSet
from batchstate._relay import PublishedRows
from batchstate._rows import GENERATION_SUFFIX, RowState
from batchstate._step_layout import StepLayout
from batchstate._upload import BatchDevice, Extras, extra_array, joined_writes
from batchstate.batch import Batch
from batchstate.columns import MirroredColumn
from batchstate.errors import ArgumentError, DeclarationError, one_of
from batchstate.forward.inputs import ForwardInputs
from batchstate.forward.plan import ForwardPlan
from batchstate.forward.token_array import TokenArray
from batchstate.future_map import FutureMap, Prefetched
from batchstate.indices import Slots
from batchstate.kv.pages import PagePool
from batchstate.mirror import Contract, DeviceSide, ReadyTensor
from batchstate.runtime import Fence, PackedUpload
from batchstate.runtime.memory import packed_places
from batchstate.tables import Table, TableWrite
from batchstate.violations import Where

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_Written = tuple[tuple[Ints, Ints], Ints, Ints]
"""Rows of a table and their owners' generations, and elements of the flat table with their values."""

_ONE = np.array(1)  # numpy takes as long to convert one number as to add 100 of them


@final
class _Requests:
    """The requests of consecutive decode steps, and what stays the same until one joins or leaves.

    Attributes:
        layout: of the copies, and what follows from the number of requests alone.
        row_set: that of the batch.
        slots: handles; their device side is that of the first of these steps, and they are made when it has crossed.
        rows, generations: their numbers, int64[n].
        held_at: `changes` of the slot pool when they were last found live.
        known: their ids in the relay.
        row_width: elements of a row of `req_to_token`.
        first_element: int64[n], where the row of each begins in it, flat.
        written: whether all tokens before this step's are.
        steps: taken so far, one behind the other with nothing between.
        state: of the batch after the last of these.
        epoch: of the pages then.
        locations: of the tokens of that step, int64[n]: one further on goes the next token, but where a page begins.
        longest: tokens of the longest before the second of them.
        phases: int64[n], steps from the second one to that in which a page begins, less whole pages.
        begins: whether a page begins for any, by phase.
    """

    __slots__ = (
        "begins",
        "epoch",
        "first_element",
        "generations",
        "held_at",
        "known",
        "layout",
        "locations",
        "longest",
        "phases",
        "row_set",
        "row_width",
        "rows",
        "slots",
        "state",
        "steps",
        "written",
    )

    slots: Slots
    known: PublishedRows
    locations: Ints
    longest: int
    phases: Ints
    begins: list[bool]

    def __init__(self, layout: StepLayout, row_set: RowSet, rows: Ints, generations: Ints, row_width: int) -> None:
        self.layout, self.row_set, self.rows, self.generations = layout, row_set, rows, generations
        self.held_at = -1
        self.row_width, self.first_element = row_width, rows * row_width
        self.written = False
        self.steps, self.epoch = 0, -1
        self.state: RowState | None = None

    def places(self, pages: PagePool, start: Ints, totals: Ints) -> tuple[Ints, _Written | None]:
        """Where the next token of each goes, int64[n], and what is written into the token table, if anything.

        From the second step on each page is written as a whole: at once what is left of those that began before, then
        each that begins. `start` are the lengths, `totals` those after.
        """
        owners = self.rows, self.generations
        rows, size, steps = self.rows, pages.page_size, self.steps
        if steps < 2:
            pages.check_totals(totals, _OPERATION)
            locations = pages.next_locations(rows, start, _OPERATION)
            at = self.first_element + start
            if not steps:
                return locations, (owners, *pages.whole_pages(at, start, locations, self.row_width))
            self.phases = -start % size
            self.begins = np.bincount(self.phases, minlength=size).astype(np.bool_).tolist()
            self.longest = int(start.max())
            begun: Ints = self.layout.everyone
        else:
            pages.check_totals(totals, _OPERATION, self.longest + steps)
            if pages._references.shared:  # asks of each page who else has it
                locations = pages.next_locations(rows, start, _OPERATION)
            else:
                locations = self.locations + _ONE
            phase = (steps - 1) % size
            if not self.begins[phase]:
                return locations, None
            begun = (self.phases == phase).nonzero()[0]
            rows, start = rows[begun], start[begun]
            owners = rows, self.generations[begun]
            locations[begun] = pages.next_locations(rows, start, _OPERATION)
            at = self.first_element[begun] + start
        left = np.minimum(size - start % size, self.row_width - start)
        return locations, (owners, arange_per_row(at, left), arange_per_row(locations[begun], left))


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
        relay: with the ids of the requests that decode; None where the host knows all ids, or the forwards take none.
        seq_lens: the column with the tokens of each request.
        ids: relay field, or fields, whose entries end to end are the tokens that a request puts in.
        lengths: relay field with the true lengths, where the host knows bounds.
        results: relay fields that go to the host as soon as they are published.
        has_ids, int32: as for `ForwardPlan.of`.
        kv_offset: the column with the tokens of an encoder that a request has in its pages before its prompt.
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
        relay: FutureMap | None = None,
        seq_lens: str = "seq_lens",
        ids: str | Sequence[str] = (),
        lengths: str | None = None,
        results: Sequence[str] = (),
        has_ids: bool = True,
        int32: Collection[str] = (),
        kv_offset: str | None = None,
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
        offset = None if kv_offset is None else batch.columns().get(kv_offset)
        if kv_offset is not None and (not isinstance(offset, MirroredColumn) or offset.shape):
            raise DeclarationError(
                f"StepPlanner of {batch.__name__}: no column {kv_offset!r} of one number per request",
                value=kv_offset,
                remedy="declare mirrored(torch.int64), and name it: kv_offset=...",
            )
        self._runtime, self._pages, self._slots = pages.runtime, pages, pages.slots
        self._relay, self._alone = cast(FutureMap, relay), relay is None
        self._has_ids, self._int32, self._kv_offset = has_ids, tuple(int32), kv_offset
        self._kind, self._slot_column, self._seq_lens = batch, batch._slot_column, seq_lens
        self._ids: tuple[str, ...] = (ids,) if isinstance(ids, str) else tuple(ids)
        self._lengths, self._results, self._layouts = lengths, tuple(results), layouts
        self._window = None if window is None else counted(window, "StepPlanner: window", least=1)
        fields = {} if relay is None else relay.fields
        for name in (*self._ids, *self._results, *(() if lengths is None else (lengths,))):
            if name not in fields:
                raise DeclarationError(
                    f"StepPlanner: field {name!r} is not declared",
                    value=name,
                    remedy=one_of(fields, name),
                )
        field = fields[self._ids[0]] if self._ids else None
        self._in_one_piece = (
            len(self._ids) == 1
            and has_ids
            and not self._int32
            and kv_offset is None
            and field is not None
            and field.dtype == torch.int64
            and not field.shape
            and lengths is None
            and not layouts
            and column.dtype == torch.int64
            and pages.req_to_token is not None
            and pages.req_to_token.dtype == torch.int32
            and set(self._results) <= set(self._ids)
        )
        self._place, self._table = batch._layout.places[seq_lens], cast(Table, pages.req_to_token)
        self._requests: _Requests | None = None  # of the last decode step
        self._most = min(self._slots.size, _MOST_IN_ONE_PIECE)
        self._make_constants()

    def __repr__(self) -> str:
        return f"StepPlanner({self._pages!r}, {'no relay' if self._alone else self._relay!r})"

    def plan(
        self,
        batch: Batch,
        query_lens: "Amount" = 1,
        *,
        keep: "Selection | None" = None,
        joining: Batch | None = None,
        after: Fence | None = None,
        published: Mapping[str, object] | None = None,
        prompt_ids: Sequence[object] | None = None,
        samples: object = None,
        pad_rows: SupportsIndex | None = None,
        pad_tokens: SupportsIndex | None = None,
        writes: Sequence[TableWrite] = (),
        extras: Mapping[str, object] | None = None,
        token_arrays: Mapping[str, TokenArray] | None = None,
    ) -> PlannedStep:
        """Plans a step, and sends it to the device on the current stream: one copy, and a scatter for each table.

        Some requests may leave before, with all that they have, and others join. Each that runs gets pages for the
        tokens that it puts in, and they count as committed. Of those that join with tokens of which no row of the token
        table was written, as after `PagePool.take_requests`, the step writes the rows too.

        Args:
            batch: the requests, with their lengths before the step.
            keep: those that stay, as for `Batch.filter`; all by default. The others are released once the step is sent,
                as by `SlotPool.release_requests`, and what they had can be taken from the next step on.
            joining: requests that come after those, as for `Batch.merge`.
            after: the forward-done fence of the last forward of those that leave.
            published: relay field -> host values, one entry for each request that joins: what its first step starts
                from, if no forward here has published that. They cross in the same copy.
            query_lens: tokens that each puts in, as for `ForwardPlan.of`.
            prompt_ids: as for `ForwardPlan.of`.
            samples: as for `ForwardPlan.of`.
            pad_rows: rows of a captured graph: what is sent is padded as by `Batch.pad`.
            pad_tokens: as for `ForwardPlan.of`.
            writes: further table writes of the step, as for `Batch.upload`.
            extras: further arrays of the step, as for `Batch.upload`.
            token_arrays: as for `ForwardPlan.of`.

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
        if levels.full:
            batch._check_unwritten(_OPERATION)
        leaving: Ints | None = None
        arrived = 0 if joining is None else joining.num_reqs
        own = keep is not None or joining is not None
        if own:
            batch, leaving = self._turned_over(batch, keep, joining, after)
        if published is not None and self._alone:
            raise ArgumentError(
                "StepPlanner: plan with published= and no relay",
                value=published,
                remedy="declare the planner with one: relay=...",
            )
        if joining is None if published is not None else after is not None and leaving is None:
            raise ArgumentError(
                "StepPlanner: plan with published= or after=, and none joins or leaves",
                value=after if published is None else published,
                remedy="pass joining= with the requests that are published, keep= with those that stay",
            )
        if (
            self._in_one_piece
            and pad_rows is None
            and pad_tokens is None
            and not token_arrays
            and _each_puts_in_one(batch.num_reqs, query_lens, prompt_ids, samples)
            and self._decodes(batch)
        ):
            release = None if leaving is None else partial(self._slots.release_rows, leaving, after, _OPERATION)
            return self._decode(batch, writes, extras, published, arrived, own and not levels.full, release)
        padding = pad_rows, pad_tokens
        joined = None if joining is None else self._handles(joining)
        entries = None
        if published is not None and joined is not None:
            rows = self._slots.rows_of(joined, _OPERATION, unique=True)
            entries = self._relay.packed(rows, joined.generations, published)
            entries.launch_alone()
        try:
            step = self._composed(batch, query_lens, prompt_ids, samples, padding, writes, extras, token_arrays, joined)
        except BaseException:
            if entries is not None:
                entries.take_back()
            raise
        if leaving is not None:
            self._slots.release_rows(leaving, after, _OPERATION)
        return step

    def _turned_over(
        self, batch: Batch, keep: "Selection | None", joining: Batch | None, after: Fence | None
    ) -> tuple[Batch, Ints | None]:
        """The batch that runs, and the slots of those that leave, checked and not released yet."""
        leaving: Ints | None = None
        if keep is not None:
            index = kept_rows(keep, batch.num_reqs, f"StepPlanner: {_OPERATION}")
            stays = np.zeros(batch.num_reqs, dtype=np.bool_)
            stays[index] = True
            rows = (~stays).nonzero()[0]
            if rows.size:
                if batch._pool_id != self._slots.pool_id:
                    self._slots.rows_of(self._handles(batch), _OPERATION)  # refuses them
                numbers, generations = self._numbers(batch)
                leaving = numbers[rows]
                self._slots.check_leaving(leaving, generations[rows], after, _OPERATION)
        return batch.next_batch(keep=keep, joining=joining), leaving

    def _numbers(self, batch: Batch) -> tuple[Ints, Ints]:
        """Slots and generations, int64[n]."""
        column = batch._state.column
        return column(self._slot_column), column(self._slot_column + GENERATION_SUFFIX)

    def _composed(
        self,
        batch: Batch,
        query_lens: "Amount",
        prompt_ids: Sequence[object] | None,
        samples: object,
        padding: tuple[SupportsIndex | None, SupportsIndex | None],
        writes: Sequence[TableWrite],
        extras: Mapping[str, object] | None,
        token_arrays: Mapping[str, TokenArray] | None,
        joined: Slots | None,
    ) -> PlannedStep:
        """Any step, from the parts. The requests `joined` are the last ones."""
        pages = self._pages
        advanced = batch.advance(self._seq_lens, query_lens)
        slots, lens = self._handles(advanced), advanced[self._seq_lens]
        before = pages.committed(slots)
        held, totals = batch[self._seq_lens].np, lens.np
        if self._kv_offset is not None:  # with its first token a request has those of its encoder
            offset = batch[self._kv_offset].np.astype(np.int64)
            held, totals = np.where(held > 0, held + offset, 0), np.where(totals > 0, totals + offset, 0)
        if lens.contract is Contract.EXACT:
            pages.check_committed(slots.np, held, _OPERATION)
        extension = pages.extend(slots, totals)
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
                kv_offset=None if self._kv_offset is None else sent[self._kv_offset],
                token_arrays=token_arrays,
                has_ids=self._has_ids,
                int32=self._int32,
                window=self._window,
                pad_tokens=tokens,
                layouts=self._layouts,
            )
            if pages.req_to_token is not None:
                writes = (extension.entry(), *writes)
                if joined is not None:
                    new = self._without_token_row(joined.np, joined.generations)
                    writes = (pages.entry(joined.filter(new)), *writes) if new.size else writes
            uploaded = sent.upload(writes=writes, extras=plan.extras | dict(extras or {}))
        except BaseException:
            pages.truncate(slots, before)
            raise
        return PlannedStep(self, advanced, sent, plan, uploaded)

    def _without_token_row(self, rows: Ints, generations: Ints) -> Ints:
        """Which of some requests have tokens that no step here has put into the token table, int64[k]."""
        missing: Ints = (~self._table.written_for(rows, generations) & self._pages.have_tokens(rows)).nonzero()[0]
        return missing

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
        self._layouts_by_size: dict[int, StepLayout] = {}
        self._written = sum(one._version for one in made)

    def _handles(self, batch: Batch) -> Slots:
        return cast(Slots, batch[self._slot_column])

    # A decode step in one piece

    def _decodes(self, batch: Batch) -> bool:
        """Whether a step that puts in one token of each request can be planned in one piece."""
        device = batch._state.device
        if device and (self._seq_lens in device or any(rows.as_it_is() is None for rows in device.values())):
            return False
        return (
            0 < batch.num_reqs == batch.num_rows <= self._most
            and not batch._windows
            and not (batch._exposed and batch._open_windows())
        )

    def _decode(
        self,
        batch: Batch,
        writes: Sequence[TableWrite],
        extras: Mapping[str, object] | None,
        published: Mapping[str, object] | None,
        arrived: int,
        own: bool,
        release: Callable[[], None] | None,
    ) -> PlannedStep:
        """A step in which each request puts in one token that the relay has.

        The last `arrived` requests have joined with it, and `published` is for them. A batch of its `own` was made for
        the step, which no caller has seen: its lengths are moved where they are. `release` lets others leave, once the
        step is sent.
        """
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
        place, rows, entries, moved = self._place, requests.rows, None, state
        if published is not None:
            at = rows.size - arrived
            entries = self._relay.packed(rows[at:], requests.generations[at:], published)
        if not own:
            groups = list(state.groups)
            groups[place.group] = groups[place.group].copy()
            moved = RowState(state.layout, groups, state.device, state.objects)
        lens = moved.groups[place.group][place.member]
        start = lens.copy()
        pages.check_committed(rows, start, _OPERATION)
        pages.check_readable(rows, start, _OPERATION, window=self._window)
        lens += _ONE
        if requests.state is not state or requests.epoch != pages.epochs.last:
            requests.steps = 0
        locations, written = requests.places(pages, start, lens)
        self._slots.transaction.operation = None  # the requests have grown; nothing is committed yet
        values = entries.arrays if entries is not None else ()
        tokens = start, locations, lens
        upload, beside, uploaded, crossed = self._sent(
            requests, moved, tokens, written, joined, arrays, values, arrived
        )
        slots = requests.slots if same else self._uploaded_slots(requests, upload)
        if entries is not None:
            entries.launch(slots.device[rows.size - arrived :], crossed)
        pages.commit_rows(rows, lens)
        if release is not None:
            release()  # before the plan notes when pages last changed, so that it need not look whose
        requests.state, requests.epoch, requests.locations = moved, pages.epochs.last, locations
        requests.steps += 1
        device = BatchDevice.of_upload(runtime, moved, upload)
        if own:
            advanced, batch._device = batch, device
        else:
            advanced = batch._derived(_OPERATION, moved, num_reqs, windows={}, moved=False, device=device)
        if not same:
            requests.slots = requests.known.live = slots
            self._requests = requests
        if levels.full:
            pages.verify()
        locations.setflags(write=False)  # from which the next step goes on
        origin = Origin(_OPERATION, runtime.step, requests.row_set, pages.epochs, pages.epochs.last)
        plan = ForwardPlan(
            slots=requests.slots,
            num_reqs=num_reqs,
            num_tokens=num_reqs,
            num_padded_tokens=num_reqs,
            query_lens=requests.layout.ones,
            seq_lens=lens,
            bounds=None,
            relay_rows=requests.layout.everyone,
            relayed=requests.slots,
            sample_rows=requests.layout.everyone,
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
        state: RowState,
        tokens: tuple[Ints, Ints, Ints],
        written: _Written | None,
        writes: Sequence[TableWrite],
        extras: Mapping[str, object],
        values: Sequence[Array],
        arrived: int,
    ) -> tuple[PackedUpload, Sequence[torch.Tensor], Extras, list[torch.Tensor]]:
        """One copy of the columns, of what the forward takes besides, and of what is added; then the table's scatters.

        `tokens` are the positions of the tokens, their locations, and the lengths with them; `written` is for the token
        table. The last `arrived` requests have joined, and `values` are theirs. Returns these last.
        """
        runtime, table, layout = self._runtime, self._table, requests.layout
        further: list[Array] = []
        scattered = None
        if written is not None:
            owner, index, places_written = written
            owners = [owner]
            if arrived:
                rows, generations = requests.rows[-arrived:], requests.generations[-arrived:]
                new = self._without_token_row(rows, generations)
                if new.size:
                    there = self._pages.token_rows(rows[new], requests.row_width)
                    index, places_written = (np.concatenate(pair) for pair in zip(written[1:], there, strict=True))
            own = [write for write in writes if write.table is table] if writes else ()  # one at most: they are joined
            if own:
                writes = [write for write in writes if write.table is not table]
                index = np.concatenate((index, own[0].index))
                places_written = np.concatenate((places_written, own[0].values))
                owners += [(one.np, one.generations) for one in own[0].owners]
            scattered = index, places_written, owners
            further += (index, places_written.astype(np.int32))
        base = layout.num_places
        first_write = base + len(further) if further else base
        for write in writes:
            further += (write.index, write.values)
        first_value = base + len(further)
        further += values
        named = {}
        for name in extras:
            named[name] = base + len(further)
            further.append(extra_array(name, extras[name]))
        places, nbytes = layout.places, layout.nbytes
        if further:
            added, size = packed_places(further)
            places = [*places, *((nbytes + first, dtype, shape) for first, dtype, shape in added)]
            nbytes += size
        block = runtime.staging_block(nbytes)
        layout.fill(block, state.groups, tokens)
        for array, place in zip(further, places[base:], strict=True):
            block.write(array, place[0])
        upload = runtime.send(block, nbytes, places)
        beside = layout.beside(upload)
        if scattered is not None:
            table.scatter(upload.shared(base), upload.shared(base + 1), *scattered)
        for i, write in enumerate(writes):
            write.table.launch_checked(
                write, upload.shared(first_write + 2 * i), upload.shared(first_write + 2 * i + 1)
            )
        crossed = [upload.shared(first_value + i) for i, _ in enumerate(values)]
        return upload, beside, Extras(runtime, upload, named, dict(extras), row_set=requests.row_set), crossed

    def _uploaded_slots(self, requests: _Requests, upload: PackedUpload) -> Slots:
        """The slots have crossed with the first step of these requests: later ones, and the relay, use them there."""
        place = self._kind._layout.places[self._slot_column]
        column = upload.row(place.group, place.member, place.dtype, requests.rows.size)
        return Slots(
            self._runtime,
            requests.rows,
            DeviceSide(ReadyTensor.uploaded(column, upload)),
            dtype=torch.int64,
            shape=requests.rows.shape,
            contract=Contract.EXACT,
            name=self._slots.name,
            generations=requests.generations,
            pool_id=self._slots.pool_id,
        )

    def _requests_of(self, batch: Batch) -> _Requests:
        """What stays the same from now on, of requests that were not those of the step before."""
        rows, generations = self._numbers(batch)
        if batch._pool_id == self._slots.pool_id and levels.cheap:  # then operations of batches refuse a slot twice
            self._slots.check_rows(rows, generations, _OPERATION)
        else:
            self._slots.rows_of(self._handles(batch), _OPERATION, unique=True)
        n = rows.size
        layout = self._layouts_by_size.get(n)
        if layout is None:
            if len(self._layouts_by_size) >= _MOST_LAYOUTS:
                self._layouts_by_size.clear()
            starts, last = (one.tensor for one in self._constants)
            layout = self._layouts_by_size[n] = StepLayout(n, self._kind._layout, starts[: n + 1], last[:n])
        requests = _Requests(layout, batch.row_set, rows, generations, self._table.shape[1])
        requests.held_at = self._slots.changes
        requests.known = self._relay.published_rows(self._ids[0], rows, generations)
        return requests

    # What a step asks of its planner

    def _inputs(self, step: PlannedStep) -> ForwardInputs:
        requests, upload = step._requests, step._upload
        if levels.full:
            step.sent._check_unwritten("inputs")
        if self._alone:
            return ForwardInputs.of(step.plan, step.extras)
        if requests is None or upload is None:
            return self._relay.resolve_forward_inputs(
                step.plan,
                step.extras,
                ids=self._ids if self._has_ids else (),
                lengths=self._lengths,
                req_to_token=self._pages.req_to_token,
            )
        runtime, plan = self._runtime, step.plan
        plan.check(None, "inputs")
        plan.check_unused()
        starts, last = self._constants
        stream = runtime.current_stream
        if stream is not upload.stream:
            runtime.use_on_current_stream(upload.buffer, upload.stream, upload.ready, synchronised=upload.synchronised)
        if stream is not starts.stream:
            starts.on_current_stream(runtime)
            last.on_current_stream(runtime)
        if levels.cheap and starts.tensor._version + last.tensor._version != self._written:
            self._report_constants()
        ids, slots = self._relay.gather_again(requests.known, self._ids[0], stream)
        plan._used = True
        positions, mapping, kv_lens = step._beside
        inputs = ForwardInputs(
            plan=plan,
            slots=slots,
            sampled_slots=requests.slots,
            ids=ids,
            positions=positions,
            query_start_loc=requests.layout.query_start_loc,
            kv_lens=kv_lens,
            last_token_indices=requests.layout.last_token_indices,
            slot_mapping=mapping,
        )
        lens = plan.seq_lens
        if levels.full:
            ends = np.arange(lens.size + 1)
            sent = {"positions": lens - 1, "kv_lens": lens, "query_start_loc": ends, "last_token_indices": ends[:-1]}
            inputs.check(runtime, sent)
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
        if self._alone:
            raise ArgumentError(
                "StepPlanner: publish without a relay", value=None, remedy="declare the planner with one: relay=..."
            )
        name = self._ids[0] if self._ids else ""
        if requests is not None and len(values) == 1:
            value = values.get(name)
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
            if not isinstance(value, kind) and (kind is PagePool or value is not None):
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
_MOST_LAYOUTS = 256
"""Numbers of requests of which a planner remembers the layout."""
_MOST_IN_ONE_PIECE = 8192
"""Requests of a decode step that is planned in one piece; one of more is composed of the parts."""
