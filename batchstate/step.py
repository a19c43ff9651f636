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
`publish` and `prefetch`. They run as one piece, in which each invariant is checked once for all parts; speculation,
padded steps and whatever else `StepPlanner` says are composed of these calls, one after the other. A decode step, in
which the relay has the one token of each request, is the piece at its shortest: numbers go to staging memory through
views that were made when these requests first came.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsIndex, cast, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import levels
from batchstate._allocator import STALE_HANDLE
from batchstate._arrays import Amount, Selection
from batchstate._arrays import count as counted
from batchstate._column_inputs import rows_from
from batchstate._origin import Origin
from batchstate._planned_step import (
    NAMES,
    ONE,
    OPERATION,
    Declared,
    DecodeStep,
    PlannedStep,
    StepRequests,
    StepsInOnePiece,
    StepTokens,
    Written,
    each_puts_in_one,
)
from batchstate._relay import HOST, Publication, PublishedRows
from batchstate._rows import GENERATION_SUFFIX, RowState
from batchstate._upload import NO_EXTRAS, Extras, extra_array, joined_writes
from batchstate.batch import Batch
from batchstate.columns import MirroredColumn
from batchstate.errors import ArgumentError, DeclarationError, another_runtime, one_of, shown
from batchstate.forward.plan import ForwardPlan, checked_layouts
from batchstate.forward.token_array import TokenArray
from batchstate.future_map import FutureMap
from batchstate.invariants import times_checked
from batchstate.kv.pages import PagePool
from batchstate.mirror import Contract, DeviceSide, Slots
from batchstate.nvtx import ranges
from batchstate.runtime.base import Fence, OfThisProcess, check_fence
from batchstate.runtime.memory import PackedUpload, ReadyTensor, packed_places
from batchstate.tables import Table, TableWrite

__all__ = ["PlannedStep", "StepPlanner"]

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

Held = tuple[Ints, Ints]
"""Slots and their generations, int64[n] each."""

TakenSlots = list[Held]
"""Slots that a plan takes for those that join: given back if it fails."""

Joining = Batch | Mapping[str, object]
"""A batch, or columns by name."""

_MOST_IN_ONE_PIECE = 8192
"""Requests of a step that is planned in one piece; one of more is composed of the parts."""


@ranges("plan")
@final
class StepPlanner(OfThisProcess):
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
        ArgumentError: page pool and relay are of two slot pools.
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
        if relay is not None and pages.slots is not relay.slots:
            problem = f"StepPlanner: {pages!r} and {relay!r} are of two slot pools"
            raise ArgumentError(problem, relay.slots, "make both over the pool that the requests take their slots from")
        column = batch.columns().get(seq_lens)
        if not isinstance(column, MirroredColumn) or column.shape or batch._slot_column is None:
            problem = f"StepPlanner of {batch.__name__}: no slots, or no column {seq_lens!r} of one number per request"
            remedy = "declare slot_column() and mirrored(torch.int64), and name the second: seq_lens=..."
            raise DeclarationError(problem, seq_lens, remedy)
        offset = column if kv_offset is None else batch.columns().get(kv_offset)
        if not isinstance(offset, MirroredColumn) or offset.shape:
            problem = f"StepPlanner of {batch.__name__}: no column {kv_offset!r} of one number per request"
            raise DeclarationError(problem, kv_offset, "declare mirrored(torch.int64), and name it: kv_offset=...")
        self._runtime, self._pages, self._slots = pages.runtime, pages, pages.slots
        self._relay = relay
        self._has_ids, self._int32, self._kv_offset = has_ids, tuple(int32), kv_offset
        self._kind, self._slot_column, self._seq_lens = batch, batch._slot_column, seq_lens
        names = (ids,) if isinstance(ids, str) else tuple(ids)
        reach = None if window is None else counted(window, "StepPlanner: window", least=1)
        self._declared = Declared(pages, relay, names, lengths, tuple(results), has_ids, reach)
        self._layouts = checked_layouts(layouts, int32, "StepPlanner")
        fields = {} if relay is None else relay.fields
        for name in (*names, *results, *(() if lengths is None else (lengths,))):
            if name not in fields:
                raise DeclarationError(f"StepPlanner: field {name!r} is not declared", name, one_of(fields, name))
        field = fields[names[0]] if len(names) == 1 else None
        in_one_piece = (
            (relay is None or (has_ids and field is not None and field.dtype == torch.int64 and not field.shape))
            and not self._int32
            and kv_offset is None
            and lengths is None
            and not layouts
            and column.dtype == torch.int64
            and column.counted  # else `advance` refuses it
            and pages.req_to_token is not None
            and pages.req_to_token.dtype == torch.int32
            and set(results) <= set(names)
        )
        self._table = cast(Table, pages.req_to_token)  # None without one: no step is planned in one piece then
        lens = batch._layout.places[seq_lens]
        self._lens_at = lens.group, lens.member
        self._most = min(self._slots.size, _MOST_IN_ONE_PIECE)
        self._steps = StepsInOnePiece(pages.runtime, self._most) if in_one_piece else None

    def __repr__(self) -> str:
        return f"StepPlanner({self._pages!r}, {'no relay' if self._relay is None else self._relay!r})"

    def plan(
        self,
        batch: Batch,
        query_lens: "Amount" = 1,
        *,
        keep: "Selection | None" = None,
        joining: Joining | None = None,
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
        tokens that it puts in, and they count as committed. If a request joins with tokens and no row of the token
        table, as after `PagePool.take_requests`, the step writes the row too.

        Args:
            batch: the requests, with their lengths before the step.
            keep: those that stay, as for `Batch.filter`; all by default. The others are released once the step is sent,
                as by `SlotPool.release_requests`, and what they had can be taken from the next step on.
            joining: requests that come after those: column -> values, as for `Batch.build`, one row each. Without
                slots among them, the step takes slots, and pages for the tokens of the column of lengths, whose KV is
                there, as `PagePool.take_requests`; `step.batch` has the slots. Or a batch, as for `Batch.merge`. States
                of a `HybridSlotPool` are written in a copy of their own.
            after: the forward-done fence of the last forward of those that leave, if any do.
            published: relay field -> host values, one entry for each request that joins: the values that its first step
                starts from, if no forward here has published them. They cross in the same copy, or in one of their own
                where the step is not planned as one piece.
            query_lens: tokens that each puts in, as for `ForwardPlan.of`.
            prompt_ids: as for `ForwardPlan.of`.
            samples: as for `ForwardPlan.of`.
            pad_rows: rows of a captured graph: the batch is sent padded as by `Batch.pad`.
            pad_tokens: as for `ForwardPlan.of`.
            writes: further table writes of the step, as for `Batch.upload`.
            extras: further arrays of the step, as for `Batch.upload`.
            token_arrays: as for `ForwardPlan.of`.

        Raises:
            ArgumentError: a batch of another class than the planner was declared for.
            DeviceError: a batch of another runtime.
            CaptureError: the stream is being captured.
            PoolExhaustedError: too few slots or pages are free for those that join, or pages for those that run.
            Violation: SLOT_STALE_HANDLE: a request has left, or an argument or a fence released it when it was read.
            As `PagePool.advance`, `Batch.advance`, `Batch.build`, `ForwardPlan.of` and `Batch.upload`. No token was
            committed, and slots and pages that were taken are given back.
        """
        self._slots.transaction.enter(OPERATION)
        if self._runtime.capturing:
            self._runtime.refuse_capture("planning a step")
        if type(batch) is not self._kind:
            problem = f"StepPlanner: plan: expected a batch of {self._kind.__name__}, got {shown(batch)}"
            remedy = f"pass what `{self._kind.__name__}.build` returned; each batch class has a planner of its own"
            raise ArgumentError(problem, batch, remedy)
        if batch.runtime is not self._runtime:
            raise another_runtime("StepPlanner", batch)

        if levels.full:
            batch._check_unwritten(OPERATION)
        if published is not None and (joining is None or self._relay is None):
            problem, remedy = "plan with published=, and none joins", "pass joining= with those that are published"
            if self._relay is None:
                problem, remedy = "plan with published= and no relay", "declare the planner with one: relay=..."
            raise ArgumentError(f"StepPlanner: {problem}", published, remedy)
        if after is not None:  # also where none leaves: else the first that does would show it
            check_fence(after, "StepPlanner: plan")
        pads = pad_rows, pad_tokens
        taken: TakenSlots = []
        try:
            leaving: Held | None = None
            frees: int | None = None
            source, arrived, live = batch, 0, False
            if keep is not None or joining is not None:
                live, frees = self._are_live(batch), self._slots.frees
                batch, leaving, arrived = self._turned_over(batch, keep, joining, after, live, taken)
                live = live and (bool(taken) or not arrived)  # those with slots of a caller are looked at
            steps, n, tokens, decodes = self._steps, batch.num_reqs, None, False
            if steps is not None and pads == (None, None) and not token_arrays and self._fits(batch):
                fed = 0 if self._relay is None else 1
                decodes = (fed == 1 or not self._has_ids) and each_puts_in_one(n, query_lens, prompt_ids, samples)
                if not decodes:
                    tokens = StepTokens.of(n, query_lens, prompt_ids, samples, has_ids=self._has_ids, fed=fed)
            if steps is not None and (decodes or tokens is not None):
                return self._piece(
                    steps, batch, tokens, writes, extras, published, arrived, leaving, after, source, live, frees, taken
                )
            writes = tuple(writes)  # one alone is refused here, before the relay is written
            joined = None if joining is None else self._handles(batch).filter(np.arange(n - arrived, n))
            entries = None
            if self._relay is not None and published is not None and joined is not None:
                rows = self._slots.rows_of(joined, OPERATION, unique=True)
                entries = self._relay.packed(rows, joined.generations, published)
                entries.launch_alone()
            try:
                step = self._composed(
                    batch, query_lens, prompt_ids, samples, pads, writes, extras, token_arrays, joined, leaving, frees
                )
            except BaseException:
                if entries is not None and self._slots.transaction.operation is None:  # else a part was interrupted
                    entries.take_back()
                raise
            del taken[:]
            if leaving is not None:
                self._slots.release_rows(leaving[0], after, OPERATION)
            return step
        except BaseException:
            for slots, generations in taken:
                self._slots.give_back(slots, generations, OPERATION)
            raise

    def _turned_over(
        self,
        batch: Batch,
        keep: "Selection | None",
        joining: Joining | None,
        after: Fence | None,
        live: bool,
        taken: TakenSlots,
    ) -> tuple[Batch, Held | None, int]:
        """The batch that runs, the handles of those that leave, checked and not released yet, and how many join.

        It is the same batch where no row moves. `live` says that its requests are known to be.
        """
        leaving: Held | None = None
        num_reqs = batch._begin(OPERATION)
        index = None if keep is None else batch._kept(keep, num_reqs, f"StepPlanner.{OPERATION}")
        if index is not None:
            stays = np.zeros(batch.num_reqs, dtype=np.bool_)
            stays[index] = True
            rows = (~stays).nonzero()[0]
            if rows.size:
                if batch._pool_id != self._slots.pool_id:
                    self._slots.rows_of(self._handles(batch), OPERATION)  # refuses them
                numbers, generations = self._numbers(batch)
                leaving = numbers[rows], generations[rows]
                self._slots.check_leaving(*leaving, after, OPERATION, live=live)
        if index is None and joining is None:
            return batch, None, 0
        if isinstance(joining, Mapping):
            new, arrived = self._joined(batch, index, joining, leaving, taken)
            return new, leaving, arrived
        state, num_reqs = batch._turned_over(index, num_reqs, joining, OPERATION)
        if leaving is not None and joining is not None:
            _check_apart(leaving[0], joining._state.column(self._slot_column))
        arrived = 0 if joining is None else joining.num_reqs
        return batch._derived(OPERATION, state, num_reqs, joined=joining), leaving, arrived

    def _joined(
        self, batch: Batch, index: Ints | None, joining: Mapping[str, object], leaving: Held | None, taken: TakenSlots
    ) -> tuple[Batch, int]:
        """The requests at `index`, all without one, and those of the columns `joining`; and how many these are.

        Those that have no slots get them here, and their pages, and are added to `taken`.
        """
        subject, name = f"StepPlanner: {OPERATION}: joining", self._slot_column
        if len(joining) != len(self._kind._columns) - 1 or name in joining:
            self._kind._check_none_missing(joining, subject, but=name)
        kept = np.arange(batch.num_reqs) if index is None else index
        first = kept.size
        state, arrived, pool_id = rows_from(self._kind._layout, joining, self._runtime, subject, (batch._state, kept))
        slots, generations = state.column(name), state.column(name + GENERATION_SUFFIX)
        takes: Held | None = None
        if pool_id is None:
            self._pages.query_fences()
            takes = slots[first:], generations[first:] = self._slots.next_handles(arrived)
            pool_id = self._slots.pool_id
        elif leaving is not None:
            _check_apart(leaving[0], slots[first:])
        if first and arrived and batch._pool_id != pool_id:
            problem = f"{subject}: expected slots of pool {pool_id}, got slots of pool {batch._pool_id}"
            raise ArgumentError(problem, pool_id, "take the slots of all requests of a batch from one pool")
        new = batch._derived(OPERATION, state, first + arrived, pool_id=pool_id if arrived else batch._pool_id)
        if levels.cheap or takes is None:
            new._check_slots(OPERATION)
        if takes is not None:
            lens = state.column(self._seq_lens)[first:].astype(np.int64)
            if self._kv_offset is not None:
                lens = np.where(lens > 0, lens + state.column(self._kv_offset)[first:], 0)
            taken.append(takes)
            self._pages.take_rows(lens, OPERATION)
        return new, arrived

    def _are_live(self, batch: Batch) -> bool:
        """Whether its requests were found live by the step before, and no slot was freed since."""
        before = None if self._steps is None or levels.full else self._steps.requests
        return before is not None and before.row_set.number == batch._row_number and before.held_at == self._slots.frees

    def _numbers(self, batch: Batch) -> Held:
        column = batch._state.column
        return column(self._slot_column), column(self._slot_column + GENERATION_SUFFIX)

    def _composed(
        self,
        batch: Batch,
        query_lens: "Amount",
        prompt_ids: Sequence[object] | None,
        samples: object,
        pads: tuple[SupportsIndex | None, SupportsIndex | None],
        writes: Sequence[TableWrite],
        extras: Mapping[str, object] | None,
        token_arrays: Mapping[str, TokenArray] | None,
        joined: Slots | None,
        leaving: Held | None,
        frees: int | None,
    ) -> PlannedStep:
        """Any step, from the parts. The requests `joined` are the last ones; for the others see `_piece`."""
        pages = self._pages
        advanced = batch.advance(self._seq_lens, query_lens)
        slots, lens = self._handles(advanced), advanced[self._seq_lens]
        before = pages.committed(slots)
        held, totals = batch[self._seq_lens].np, lens.np
        if self._kv_offset is not None:  # with its first token a request has those of its encoder
            offset = batch[self._kv_offset].np.astype(np.int64)
            held, totals = np.where(held > 0, held + offset, 0), np.where(totals > 0, totals + offset, 0)
        if lens.contract is Contract.EXACT:
            pages.check_committed(slots.np, held, OPERATION)
        rows, tokens = pads
        try:
            extension = pages.extend(slots, totals)
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
                deferred=False,
                int32=self._int32,
                window=self._declared.window,
                pad_tokens=tokens,
                layouts=self._layouts,
            )
            if pages.req_to_token is not None:
                writes = (extension.entry(), *writes)
                if joined is not None:
                    new = self._without_token_row(joined.np, joined.generations)
                    writes = (pages.entry(joined.filter(new)), *writes) if new.size else writes
            uploaded = sent.upload(writes=writes, extras=plan.extras | dict(extras or {}))
            if frees is not None and self._slots.frees != frees:
                self._look_again(advanced, leaving)
        except BaseException:
            if self._slots.transaction.operation is None:  # else a part was interrupted
                grown = pages.committed_lengths[slots.np] != before
                grown &= self._slots.held_among(slots.np, slots.generations)  # the arguments may have released some
                if np.count_nonzero(grown):
                    pages.truncate(slots.filter(grown), before[grown])
            raise
        return PlannedStep(self._declared, advanced, sent, plan, uploaded)

    def _without_token_row(self, rows: Ints, generations: Ints) -> Ints:
        """The requests that have tokens which no step here has put into the token table, int64[k]."""
        missing: Ints = (~self._table.written_for(rows, generations) & self._pages.have_tokens(rows)).nonzero()[0]
        return missing

    def _look_again(self, batch: Batch, leaving: Held | None) -> None:
        """Refuses requests that code of the engine has released while it was run for the arguments of the plan."""
        for handles in (self._numbers(batch), leaving):
            if handles is not None:
                self._slots.check_rows(*handles, OPERATION)

    def _handles(self, batch: Batch) -> Slots:
        return cast(Slots, batch[self._slot_column])

    # A step in one piece

    def _fits(self, batch: Batch) -> bool:
        """Whether a step of the batch can be planned in one piece."""
        device = batch._state.device
        if device and (self._seq_lens in device or any(rows.as_it_is() is None for rows in device.values())):
            return False
        return (
            0 < batch.num_reqs == batch.num_rows <= self._most
            and not batch._windows
            and not (batch._exposed and batch._open_windows())
        )

    def _piece(
        self,
        steps: StepsInOnePiece,
        batch: Batch,
        tokens: StepTokens | None,
        writes: Sequence[TableWrite],
        extras: Mapping[str, object] | None,
        published: Mapping[str, object] | None,
        arrived: int,
        leaving: Held | None,
        after: Fence | None,
        source: Batch,
        live: bool,
        frees: int | None,
        taken: TakenSlots,
    ) -> PlannedStep:
        """A step in which each request puts in the one token that the relay has, or `tokens`.

        The last `arrived` requests have joined with it, and `published` is for them. Those `leaving` do so behind
        `after`, once the step is sent. `source` is the caller's batch; another one was made for the step, and its
        lengths are moved where they are. `live` says that all are known to be, and `frees` is the pool's count when
        that and those that leave were looked at.
        """
        runtime, pages, own = self._runtime, self._pages, batch is not source and not levels.full
        references = pages._references
        if references.allocator._queue.count or references._readers:
            pages.reap()
        batch._begin(OPERATION)
        joined = joined_writes(runtime, writes) if writes else ()
        arrays: dict[str, Array] = {}
        for name, value in batch._checked_extras(extras, OPERATION).items() if extras else ():
            arrays[name] = extra_array(name, value)
        if tokens is not None and not NAMES.isdisjoint(arrays):
            used = sorted(NAMES.intersection(arrays))
            remedy = "rename them: the arrays that the planner sends to the forward have these names"
            raise DeclarationError(f"StepPlanner: plan with extras named {', '.join(used)}", used, remedy)
        state = batch._state
        requests = before = steps.requests
        same = requests is not None and requests.row_set.number == batch._row_number
        stayed = None
        if tokens is None and not same and before is not None and before.row_set.number == source._row_number:
            stayed = self._entries_of_those_that_stay(before, published, arrived)
        if requests is None or not same:
            requests = self._requests_of(steps, batch, live=live)
        elif requests.held_at != self._slots.frees or levels.full:  # something was freed since
            self._slots.check_rows(requests.rows, requests.generations, OPERATION)
            requests.held_at = self._slots.frees
        group, member = self._lens_at
        rows, entries, moved = requests.rows, None, state
        if published is not None and self._relay is not None:
            at = rows.size - arrived
            entries = self._relay.packed(rows[at:], requests.generations[at:], published)
        if frees is not None and self._slots.frees != frees:
            self._look_again(batch, leaving)
        if not own:
            groups = list(state.groups)
            groups[group] = groups[group].copy()
            moved = RowState(state.layout, groups, state.device, state.objects)
        lens = moved.groups[group][member]
        start = lens.copy() if own else state.groups[group][member]
        pages.check_committed(rows, start, OPERATION)
        columns = moved.groups
        crossed: Sequence[torch.Tensor] = ()
        beside: tuple[Ints, ...] = ()
        planned: dict[str, Array] = {}
        arrived_elsewhere = arrived  # whose rows of the token table are looked at
        values = entries.arrays if entries is not None else ()
        if tokens is None:
            pages.check_readable(rows, start, OPERATION, window=self._declared.window)
            lens += ONE
            if requests.state is not state or requests.epoch != pages.epochs.last:
                requests.steps = 0
            if requests.steps:
                locations, written = requests.places(pages, start, lens)
            else:
                if taken:
                    arrived_elsewhere = 0
                whole = before is not None and before.ended_with(source._state, pages) and not arrived_elsewhere
                locations, written = requests.first_places(pages, start, lens, arrived - arrived_elsewhere, whole)
            beside = start, locations, lens
        else:
            fed = tokens.counts > 0
            pages.check_readable(rows[fed], start[fed], OPERATION, window=self._declared.window)
            lens += tokens.counts
            positions, locations, written = requests.places_of_all(pages, start, lens, tokens.counts)
            planned = tokens.arrays(rows, positions, locations, lens)
        self._slots.transaction.operation = None  # the requests have grown; nothing is committed yet
        first: Publication | None = None
        try:
            if written is None and not (joined or arrays or entries or planned):
                upload, uploaded = requests.layout.send(runtime, columns, beside), NO_EXTRAS
            else:
                upload, uploaded, crossed = self._sent(
                    requests, columns, beside, planned, written, joined, arrays, values, arrived_elsewhere
                )
            if same and tokens is None:
                slots, index = requests.slots, None
            else:
                slots, index = self._uploaded_slots(requests, upload)
            if own:
                advanced, batch._device, batch._crossed = batch, None, upload
            else:
                advanced = batch._sent(moved, upload, OPERATION)  # at `full` it is compared, before it is committed
            if entries is not None:  # some join
                index = slots.device if index is None else index
                first = entries.launch(index[rows.size - arrived :], crossed)
            if first is not None and written is not None:
                self._table.note_fence(first.fence)  # which is behind the scatter of the table too
        except BaseException:
            if self._slots.transaction.operation is None:  # else a part was interrupted
                pages.truncate(self._handles(batch), start)
            raise
        self._slots.transaction.operation = OPERATION
        del taken[:]
        pages.commit_rows(rows, lens)
        if leaving is not None:  # before the plan notes when pages last changed, so that it need not look whose
            self._slots.release_rows(leaving[0], after, OPERATION)
        self._slots.transaction.operation = None
        if not same and tokens is None:  # so that the next step need not look
            self._slots.check_rows(rows, requests.generations, OPERATION)
            requests.held_at = self._slots.frees
        if tokens is not None or not same:
            _ = advanced.device_side  # made before a forward can write into the slots, which are a part of the copy
        if tokens is None:
            requests.state, requests.epoch, requests.locations = moved, pages.epochs.last, locations
            requests.steps += 1
            if not same:
                requests.slots = slots
                if requests.published is not None:
                    requests.published.live = slots
                    if stayed is not None and (first is not None) == (arrived > 0):
                        publications = stayed.publications if rows.size > arrived else []
                        requests.published.noted([*publications, first] if first else publications, stayed.taken)
                steps.requests = requests
        if levels.full:
            pages.verify()
        if tokens is None:
            return DecodeStep(self._declared, steps, requests, state, advanced, uploaded, upload, lens, locations)
        origin = Origin(OPERATION, runtime.step, requests.row_set, pages.epochs, pages.epochs.last)
        plan = tokens.plan(slots, lens, planned, origin, self._declared, pages.shares.last)
        return PlannedStep(self._declared, advanced, advanced, plan, uploaded, checked=True)

    def _entries_of_those_that_stay(
        self, before: StepRequests, published: Mapping[str, object] | None, arrived: int
    ) -> PublishedRows | None:
        """The record of the entries of the step before, if none has changed: then they are not read again."""
        kept = before.published
        if kept is None or not kept.unchanged:
            return None
        ids = self._declared.ids[0]
        if arrived and (published is None or ids not in published or kept.taken != HOST):
            return None
        return kept

    def _sent(
        self,
        requests: StepRequests,
        columns: Sequence[Array],
        beside: Sequence[Ints],
        planned: dict[str, Array],
        written: Written | None,
        writes: Sequence[TableWrite],
        extras: Mapping[str, Array],
        values: Sequence[Array],
        arrived: int,
    ) -> tuple[PackedUpload, Extras, list[torch.Tensor]]:
        """One copy of the columns, the arrays of the forward and all that is added; then the table's scatters.

        `beside` are the arrays of the forward that the layout has places for, `planned` the others. `written` is for
        the token table; the last `arrived` requests may have rows of it already or not. `values` are returned last.
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
                    if planned:  # a request that puts in nothing does not own it yet
                        owners.append((rows[new], generations[new]))
            own = [write for write in writes if write.table is table] if writes else ()  # one at most: they are joined
            if own:
                writes = [write for write in writes if write.table is not table]
                index = np.concatenate((index, own[0].index))
                places_written = np.concatenate((places_written, own[0].values))
                owners += [(slots.np, slots.generations) for slots in own[0].owners]
            scattered = index, places_written, owners
            further += (index, places_written.astype(np.int32))
        base = layout.num_places
        first_write = base + len(further) if further else base
        for write in writes:
            further += (write.index, write.values)
        first_value = base + len(further)
        further += values
        named = {}
        for name, array in (*extras.items(), *planned.items()):
            named[name] = base + len(further)
            further.append(array)
        places, nbytes = layout.places, layout.nbytes if beside else layout.columns_nbytes
        if further:
            added, nbytes = packed_places(further, nbytes)
            places = places + added
        block = runtime.staging_block(nbytes)
        layout.fill(block, columns, beside)
        for array, (start, *_) in zip(further, places[base:], strict=True):
            block.write(array, start)
        upload = runtime.send(block, nbytes, places)
        if scattered is not None:
            table.scatter(upload.shared(base), upload.shared(base + 1), *scattered, fenced=not values)
        for i, write in enumerate(writes):
            at = first_write + 2 * i
            write.table.launch_checked(write, upload.shared(at), upload.shared(at + 1))
        crossed = [upload.shared(first_value + i) for i, _ in enumerate(values)]
        uploaded = NO_EXTRAS
        if named:
            uploaded = Extras(runtime, upload, named, {**extras, **planned}, row_set=requests.row_set)
        return upload, uploaded, crossed

    def _uploaded_slots(self, requests: StepRequests, upload: PackedUpload) -> tuple[Slots, torch.Tensor]:
        """The slots that have crossed with the first step of these requests: later steps, and the relay, use them."""
        slot = self._kind._layout.places[self._slot_column]
        column = upload.row(slot.group, slot.member, slot.dtype, requests.rows.size)
        slots = Slots.of_pool(
            self._runtime,
            requests.rows,
            requests.generations,
            pool_id=self._slots.pool_id,
            name=self._slots.name,
            device=DeviceSide(ReadyTensor.uploaded(column, upload)),
        )
        return slots, column

    def _requests_of(self, steps: StepsInOnePiece, batch: Batch, *, live: bool) -> StepRequests:
        """A record of requests other than those of the step before; `live` if they are known to be."""
        rows, generations = self._numbers(batch)
        if live:
            times_checked[STALE_HANDLE] += 1
        elif batch._pool_id == self._slots.pool_id and levels.cheap:  # then operations of batches refuse a slot twice
            self._slots.check_rows(rows, generations, OPERATION)
        else:
            self._slots.rows_of(self._handles(batch), OPERATION, unique=True)
        layout, width = steps.layout(rows.size, self._kind._layout), self._table.shape[1]
        kept = self._declared.published_rows(rows, generations)
        return StepRequests(layout, batch.row_set, rows, generations, self._slots.frees, kept, width, rows * width)


def _check_apart(leaving: Ints, joining: Ints) -> None:
    """Refuses requests that leave and join in one plan: their slots would be freed while they run."""
    both = set(leaving.tolist()).intersection(joining.tolist())
    if both:
        problem = f"StepPlanner: plan with requests that leave and join, in slots {sorted(both)}"
        remedy = "a request that stays is kept: name its row in keep=, and pass in joining= those that are new"
        raise ArgumentError(problem, sorted(both), remedy)
