"""`StepPlanner`: the steps of an engine, declared once, and planned in one loop over requests.

An engine makes one planner, and asks it for each step::

    planner = StepPlanner(Running, pages=pages, relay=relay, ids="last_token", results=("last_token",))

    step = planner.plan(batch)  # each request puts in one token; one copy
    inputs = step.inputs()  # at forward entry, on its stream
    step.publish(last_token=sampled)  # to the next step, and on the way to the host
    batch = step.batch
    ...
    step.results["last_token"].np  # a step later

`plan` reads its arguments and asks fences, which may run code of the engine; then `_core.StepBlock` looks at each row
and writes the step into memory that nobody reads yet; then the copy is launched; then slots, pages and lengths change,
which cannot fail. So a plan that is refused, or whose copy fails, has changed nothing. Decode steps, prompts, mixed and
padded steps, drafts, requests that leave and join: all go this way.
"""

from collections.abc import Collection, Mapping, Sequence
from types import EllipsisType
from typing import Any, NoReturn, SupportsIndex, final

import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import MOST_ROWS, Amount, Array, Ints, Selection, arange_per_row
from batchstate._arrays import count as counted
from batchstate._column_inputs import rows_from
from batchstate._core import Requests, tally
from batchstate._origin import RowSet
from batchstate._planned_step import OPERATION, PlannedStep
from batchstate._rows import RowState, not_counted
from batchstate._step_arguments import NO_FURTHER, Declared, Further, Joined
from batchstate._step_memory import StepMemories, StepMemory
from batchstate._step_tokens import ONE_EACH, StepTokens
from batchstate._upload import append_needs, extra_array, joined_writes
from batchstate.batch import NO_WINDOWS, Batch
from batchstate.columns import MirroredColumn
from batchstate.errors import (
    ArgumentError,
    DeclarationError,
    ShapeError,
    another_runtime,
    expected,
    one_of,
    shown,
    unexplained,
)
from batchstate.forward.plan import checked_layouts, layout_arrays
from batchstate.forward.token_array import TokenArray
from batchstate.future_map import FutureMap
from batchstate.invariants import times_checked
from batchstate.kv.pages import NO_PAGES, PagePool
from batchstate.mirror import MirroredTensor
from batchstate.nvtx import ranges
from batchstate.runtime.base import Fence, OfThisProcess, Stream, check_fence
from batchstate.tables import TableWrite
from batchstate.violations import Code, Where

__all__ = ["PlannedStep", "StepPlanner"]


Joining = Batch | Mapping[str, object]
"""A batch, or columns by name."""


NO_ARRAYS: dict[str, Array] = {}

_ALWAYS = Code.SLOT_STALE_HANDLE, Code.LENGTH_ORDER
_AT_CHEAP = (*_ALWAYS, Code.SLOT_IN_FLIGHT)
_LOOKED_AT = _ALWAYS, _AT_CHEAP, (*_AT_CHEAP, Code.DERIVED_STALE)
"""The invariants that a draft asks, by its level."""

_NAMES = {"positions", "query_start_loc", "kv_lens", "slot_mapping", "last_token_indices", "input_ids", "sample_slots"}
"""Names of the arrays of a step: extras of an engine have others."""


@ranges("plan")
@final
class StepPlanner(OfThisProcess):
    """Plans the steps of one batch class. Belongs to the runtime's thread.

    Args:
        batch: the batch class.
        pages: where the KV goes.
        relay: with the ids of the requests that decode; None where the host knows all ids, or the forwards take none.
        seq_lens: the column with the tokens of each request, int64 or int32.
        ids: relay field, or fields, whose entries end to end are the tokens that a request puts in.
        lengths: relay field with the true lengths, where the host knows bounds. They follow from what is accepted.
        accepted: relay field, one of the results, with the tokens of a step that a request keeps: `PlannedStep.accept`
            publishes both. Name both or none.
        results: relay fields that go to the host as soon as they are published.
        has_ids, int32: as for `ForwardPlan.of`.
        kv_offset: the column with the tokens of an encoder that a request has in its pages before its prompt. The step
            that puts in its first tokens takes the pages of both.
        window: as for `ForwardPlan.of`, as are the layouts.
        layouts: arrays of attention kernels.

    Attributes:
        made_for_holders: memories of steps that were made because batches or arrays of old steps were held.

    Raises:
        ArgumentError: page pool and relay are of two slot pools.
        DeclarationError: no such column or field; fields of ids that lie apart.
        DtypeError: ids of another dtype than `int32` says.
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
        accepted: str | None = None,
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
        for option, name in (("seq_lens", seq_lens), ("kv_offset", kv_offset)):
            if name is not None:
                _check_counts(batch, name, option)
        self._runtime, self._pages, self._slots = pages.runtime, pages, pages.slots
        self._kind, self._layout = batch, batch._layout
        names = (ids,) if isinstance(ids, str) else tuple(ids)
        reach = None if window is None else counted(window, "StepPlanner: window", least=1)
        self._layouts = checked_layouts(layouts, int32, "StepPlanner")
        fields = {} if relay is None else relay.fields
        for name in (*names, *results, lengths, accepted):
            if name is not None and name not in fields:
                raise DeclarationError(f"StepPlanner: field {name!r} is not declared", name, one_of(fields, name))
        if (lengths is None) != (accepted is None) or (accepted is not None and accepted not in results):
            problem = f"StepPlanner: lengths={lengths!r} and accepted={accepted!r}, with results {', '.join(results)}"
            remedy = "name the field that `accept` puts lengths in, and one of the results for the tokens accepted"
            raise DeclarationError(problem, accepted, remedy)
        taken = names if has_ids else ()
        flags = has_ids, frozenset(int32), reach
        self._transaction = pages.slots.transaction
        columns = self._layout.index
        self._declared = Declared(
            pages, relay, columns, seq_lens, kv_offset, taken, lengths, accepted, tuple(results), *flags
        )
        self._memories = StepMemories(pages.slots, self._layout.core)
        self._usual = self._usual_rows = 0  # bytes of the last step, and the most rows for which they are enough
        # Whether nothing crosses but the arrays of the core, and what the engine adds to a step.
        self._plain = not (self._layouts or int32 or self._layout.on_device)

    def __repr__(self) -> str:
        relay = self._declared.relay
        return f"StepPlanner({self._pages!r}, {'no relay' if relay is None else relay!r})"

    @property
    def made_for_holders(self) -> int:
        """How many memories were made because others were held."""
        return self._memories.made_for_holders

    def plan(
        self,
        batch: Batch,
        query_lens: "Amount" = 1,
        *,
        keep: "Selection | None" = None,
        joining: Joining | None = None,
        after: Fence | EllipsisType | None = ...,
        published: Mapping[str, object] | None = None,
        prompt_ids: Sequence[object] | None = None,
        samples: object = None,
        pad_rows: SupportsIndex | None = None,
        pad_tokens: SupportsIndex | None = None,
        writes: Sequence[TableWrite] = (),
        extras: Mapping[str, object] | None = None,
        token_arrays: Mapping[str, TokenArray] | None = None,
    ) -> PlannedStep:
        """Plans a step, and sends it to the device on the current stream in one copy.

        Some requests may leave before, with all that they have, and others join. Each that runs gets pages for the
        tokens that it puts in, and they count as committed. `PlannedStep.inputs` writes the token table: the rows of
        requests that join too.

        Args:
            batch: the requests, with their lengths before the step.
            keep: those that stay, as for `Batch.filter`; all by default. The others are released once the step is sent,
                as by `SlotPool.release_requests`, and what they had can be taken from the next step on.
            joining: requests that come after those: column -> values, as for `Batch.build`, one row each. Without
                slots among them, the step takes slots, and pages for the tokens of the column of lengths, whose KV is
                there, as `PagePool.take_requests`: 0 of one with a prompt. Or a batch, as for `Batch.merge`.
            after: the forward-done fence of the last forward of those that leave; None where none of them is in a
                forward any more. To be named if any leave.
            published: relay field -> host values, one entry for each request that joins: the values that its first step
                starts from, if no forward here has published them. They cross in the same copy.
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
            As `PagePool.advance`, `Batch.advance`, `Batch.build`, `ForwardPlan.of` and `Batch.upload`. Nothing has
            changed.
        """
        # The arguments, which may run code of the engine.
        slots, runtime, declared = self._slots, self._runtime, self._declared
        transaction = self._transaction
        stream = runtime.stream_for(OPERATION)
        if transaction.operation is not None:
            transaction.enter(OPERATION)
        if after is not None and after is not ...:
            check_fence(after, f"{slots.name}: {OPERATION}")
        n = num_reqs = self._begin(batch)
        index = joined = None
        if keep is not None and (index := batch._kept(keep, num_reqs, f"StepPlanner.{OPERATION}")) is not None:
            n = index.size
        kept = n
        if joining is not None:
            joined = self._joined(joining)
            n += joined.num_reqs
        num_rows = n if pad_rows is None else counted(pad_rows, "StepPlanner: pad_rows", least=n, most=MOST_ROWS)
        padded = -1 if pad_tokens is None else counted(pad_tokens, "StepPlanner: pad_tokens", most=MOST_ROWS)
        tokens = ONE_EACH
        if type(query_lens) is not int or query_lens != 1 or prompt_ids is not None or samples is not None:
            tokens = StepTokens.of(n, num_rows, query_lens, prompt_ids, samples, declared.id_dtype)
        first = NO_ARRAYS if published is None else self._first(published, joined)
        further = NO_FURTHER if self._plain and not first else Further()
        if extras or writes or token_arrays:
            further = Further()
            self._add_arguments(further, batch, tokens.each(n), padded, extras, writes, token_arrays)
        for name, array in first.items():
            further.arrays[f"published {name}"] = array

        # Fences, which may too. Behind them nothing of the engine runs.
        if transaction.groups or slots.before_take:
            slots.query_fences()
        leaving = None
        if index is not None and kept < num_reqs:
            if after is ...:
                remedy = "pass after=, the fence of their last forward, or None where it is known to have ended"
                raise ArgumentError(f"StepPlanner: plan: {num_reqs - kept} requests leave, and no fence", after, remedy)
            rows, generations = batch._state.block.others(index)
            leaving = rows, Requests(rows, generations)
            if joined is not None and joined.pool_id is not None:
                _check_apart(rows, joined.state.column(str(self._layout.slots)))
            slots.check_leaving(*leaving, after, f"{OPERATION}, of those that leave")
        takes = joined.num_reqs if joined is not None and joined.pool_id is None else 0
        if takes:
            slots.check_take(takes)

        windows = batch._open_windows() if batch._exposed or batch._windows else NO_WINDOWS
        # A draft of the step, in memory that nobody reads, and its copy.
        memory, state = self._drafted(batch, index, joined, takes, tokens, n, num_rows, padded, further, stream)
        step = PlannedStep(declared, self._kind, memory, state, tokens, n, further, windows)
        if tokens is not ONE_EACH and isinstance(query_lens, MirroredTensor) and query_lens.row_set is not None:
            rows = RowSet(0, (step.rows, step.generations), slots.pool_id)
            rows.check_same(query_lens.row_set, query_lens, object="StepPlanner", operation=OPERATION)
        relay, numbers = declared.relay, None
        if relay is not None and first:
            joins, entries = memory.block.those_joining(n - kept), relay.together(tuple(first)).entries
            numbers = relay._entries.check_overwrite(joins, entries, stream)
        step._send(stream)
        if levels.full:
            step.sent.check(OPERATION)
        if relay is not None and first:
            values = {name: step._crossed(f"published {name}") for name in first}
            joins, together = memory.block.those_joining(n - kept), relay.together(tuple(first))
            relay.put(joins, stream, memory.slots(kept, n), together, values, numbers, first, then=OPERATION)

        # The changes, which cannot fail.
        transaction.operation = OPERATION
        if memory.block.new is not None:
            self._pages._holders.note(memory.block.new)
        bounded = declared.seq_lens in state.device
        memory.block.commit(declared.rules, self._pages.epochs.last, self._pages.shares.last, bounded)
        if takes:
            slots.note_taken(step.rows[kept:])
        # Under the same mark: a step that has been taken, and whose leavers stay, is a leak.
        if leaving is not None and after is not ...:
            slots.release_rows(*leaving, after, OPERATION)
        transaction.operation = None
        if memory.block.new_pages:
            self._pages._holders.check_whole(OPERATION)
        if levels.full:
            self._pages.verify()
            if relay is not None and first:
                relay.check("publish")
        return step

    def _begin(self, batch: Batch) -> int:
        """Checks the batch that a step follows on; the number of its requests."""
        if type(batch) is not self._kind:
            problem = f"StepPlanner: plan: expected a batch of {self._kind.__name__}, got {shown(batch)}"
            remedy = f"pass what `{self._kind.__name__}.build` returned; each batch class has a planner of its own"
            raise ArgumentError(problem, batch, remedy)
        if batch.runtime is not self._runtime:
            raise another_runtime("StepPlanner", batch)
        num_reqs = batch._begin(OPERATION)
        if batch._guesses:
            name = self._declared.seq_lens
            remedy = f"replace {name} by bounds: `MirroredTensor.from_pair` of its numbers and what `accept` returned"
            problem = f"StepPlanner: plan: {name} of {batch!r} count guesses that the step before may have rejected"
            raise ArgumentError(problem, batch, remedy)
        if batch._exposed or batch._windows:
            batch._check_host_is_fresh(OPERATION)
        if num_reqs and batch._pool_id != self._slots.pool_id:
            self._slots.rows_of(batch[str(self._layout.slots)], OPERATION)  # type: ignore[arg-type]
        return num_reqs

    def _joined(self, joining: Joining) -> Joined:
        """The rows of those that join, checked."""
        subject, own = f"StepPlanner: {OPERATION}: joining", self._slots.pool_id
        if isinstance(joining, dict | Mapping):  # an abstract class alone would be asked by a call of Python
            slots = str(self._layout.slots)
            if len(joining) != len(self._kind._columns) - 1 or slots in joining:
                self._kind._check_none_missing(joining, subject, but=slots)
            state, num_reqs, pool_id = rows_from(self._layout, joining, self._runtime, subject)
        else:
            if type(joining) is not self._kind:
                remedy = "pass a batch of the same class, or columns by name"
                raise expected(OPERATION, f"another {self._kind.__name__}", joining, remedy, DeclarationError)
            if joining.runtime is not self._runtime:
                raise another_runtime(OPERATION, joining)
            num_reqs = joining._begin(OPERATION)
            joining._check_host_is_fresh(OPERATION)
            state, pool_id = joining._state, joining._pool_id
        if pool_id not in (None, own) and num_reqs:
            problem = f"{subject}: expected slots of pool {own}, got slots of pool {pool_id}"
            raise ArgumentError(problem, pool_id, "take the slots of all requests of a batch from one pool")
        return Joined(state, num_reqs, pool_id)

    def _first(self, published: Mapping[str, object], joined: Joined | None) -> dict[str, Array]:
        """The values that those who join start from, checked."""
        declared = self._declared
        relay = declared.relay
        if joined is None or relay is None:
            problem, remedy = "plan with published=, and none joins", "pass joining= with those that are published"
            if relay is None:
                problem, remedy = "plan with published= and no relay", "declare the planner with one: relay=..."
            raise ArgumentError(f"StepPlanner: {problem}", published, remedy)
        values = relay.first_values(published, joined.num_reqs)
        if declared.lengths in values and declared.seq_lens not in joined.state.device:
            there, first = joined.state.column(declared.seq_lens)[: joined.num_reqs], values[declared.lengths]
            for row in np.flatnonzero(there != first)[:1].tolist():
                problem = f"StepPlanner: published {declared.lengths!r} of row {row} of those that join"
                raise expected(problem, f"{there[row]}, its length", int(first[row]), "publish what the column has")
        return values

    def _add_arguments(
        self,
        further: Further,
        batch: Batch,
        queries: Ints,
        padded: int,
        extras: Mapping[str, object] | None,
        writes: Sequence[TableWrite],
        token_arrays: Mapping[str, TokenArray] | None,
    ) -> None:
        """Arrays of the engine that cross with the step, whose requests put in `queries` tokens int64[n].

        `padded` are the tokens with padded ones, or -1 for no padding.
        """
        for name, values in batch._checked_extras(extras, OPERATION).items() if extras else ():
            further.arrays[name], further.named[name] = extra_array(name, values), values
        for i, write in enumerate(joined_writes(self._runtime, writes) if writes else ()):
            further.writes.append(write)
            further.arrays |= {f"index {i}": write.index, f"values {i}": write.values}
        queries = np.maximum(queries, 0)
        size = int(queries.sum())
        if padded >= 0:
            size = counted(padded, "StepPlanner: pad_tokens", least=size)
        for name, array in (token_arrays or {}).items():
            if name == "input_ids":
                problem = f"StepPlanner: token_arrays are {token_arrays!r}"
                raise DeclarationError(problem, name, "pass ids as `prompt_ids`")
            where: Where = {"object": "StepPlanner", "operation": OPERATION, "column": name}
            laid = array.laid(queries, queries.size, size, where)
            further.token_arrays[name] = further.arrays[name] = laid
        _check_names(_NAMES.intersection(further.arrays) | (further.named.keys() & further.token_arrays))

    def _drafted(
        self,
        batch: Batch,
        index: Ints | None,
        joined: Joined | None,
        takes: int,
        tokens: StepTokens,
        n: int,
        num_rows: int,
        padded: int,
        further: Further,
        stream: Stream,
    ) -> tuple[StepMemory, RowState]:
        """The step, written into memory that nobody reads, and its rows: each was looked at, and nothing changed."""
        declared, cheap = self._declared, levels.cheap
        moved = was = batch._state
        if was.device or was.objects or joined is not None:
            moved = was.moved(index, None if joined is None else joined.state)
        exact, bounds = True, -1
        if moved.device:
            exact = declared.seq_lens not in moved.device
            if not exact:
                bounds = self._bounds(moved, tokens, n)
            moved.pad_device(num_rows - n)
            self._add_needs(further, moved)
        rules, other, checks = declared.rules, None if joined is None else joined.state.block, cheap + (cheap and exact)
        numbers, told, samples, ids = tokens.numbers, tokens.told, tokens.samples, tokens.ids
        own, pads, nbytes = was.block, self._layout.pads, self._usual
        if num_rows > self._usual_rows:
            nbytes = max(nbytes, self._layout.nbytes(num_rows))
        extra = further.nbytes
        nbytes += extra
        while True:
            memory = self._memories.take(nbytes, stream)
            block = memory.block
            rows = own, index, other, pads, num_rows, takes
            rule = block.draft(rules, *rows, numbers, told, samples, checks, bounds, padded, ids)
            if rule is not None:
                self._refuse(str(rule), moved.on(block), tokens, n, takes)
            nbytes = block.need
            if nbytes <= memory.size:
                if padded >= 0:
                    counted(padded, "StepPlanner: pad_tokens", least=block.t)
                if not self._plain:
                    self._add_derived(further, moved.on(block), tokens, n, num_rows, exact)
                    extra = further.nbytes
                nbytes += extra
                if nbytes <= memory.size:
                    break
        self._usual, self._usual_rows = block.need, num_rows  # not before: memory of that size can be had
        tally(times_checked, _LOOKED_AT[checks])
        if declared.int32:
            starts = {"positions": block.positions, "slot_mapping": block.mapping, "last_token_indices": block.last}
            for name in declared.int32 & starts.keys():
                array = further.arrays[name]
                array[...] = memory.numbers(starts[name], array.size)
        return memory, moved

    def _bounds(self, moved: RowState, tokens: StepTokens, n: int) -> int:
        """Moves the device side of bounded lengths on; tokens of each request whose true length comes without ids."""
        declared = self._declared
        rows = moved.device[declared.seq_lens].shifted(tokens.each(n))
        moved.device = {**moved.device, declared.seq_lens: rows}
        if declared.has_ids:
            return -1
        fed = tokens.fed(n)
        return int(tokens.each(n)[fed[0]]) if fed.size else -1

    def _add_needs(self, further: Further, state: RowState) -> None:
        """Arrays by which the device gathers columns that it has alone."""
        arrays: list[Array] = []
        for name, rows in append_needs(arrays, state).items():
            start = len(further.arrays)
            for i in rows:
                further.arrays[f"{name}: need {i}"] = arrays[i]
            further.needs[name] = range(start, len(further.arrays))

    def _add_derived(
        self,
        further: Further,
        state: RowState,
        tokens: StepTokens,
        n: int,
        num_rows: int,
        exact: bool,
    ) -> None:
        """Arrays that only some planners send: layouts of attention kernels, narrow indices, what bounds need."""
        declared, arrays = self._declared, further.arrays
        block: Any = state.block
        sampling = num_rows if block.s == n else block.s
        sizes = {"positions": block.padded, "slot_mapping": block.padded, "last_token_indices": sampling}
        for name in declared.int32 & sizes.keys():
            arrays[name] = np.zeros(sizes[name], dtype=np.int32)
        rows = state.column(str(self._layout.slots))[:n]
        offset = None if declared.kv_offset is None else state.column(declared.kv_offset)[:n].astype(np.int64)
        if self._layouts:
            lens = state.column(declared.seq_lens)[:n].astype(np.int64)  # with those of the step
            new, bounded = NO_PAGES if block.new is None else block.new, block.fed > 0 and not exact
            there = n - block.takes
            laid = layout_arrays(self._layouts, self._pages, rows, lens, num_rows, offset, bounded, there, new)
            _check_names(laid.keys() & (further.named.keys() | further.token_arrays.keys()))
            arrays |= laid
        if exact:
            return
        queries, fed = tokens.each(n), tokens.fed(n)
        if fed.size and not tokens.direct(n, num_rows, block.padded):
            starts = np.append(0, queries.cumsum())
            arrays["relay_slots"] = rows[fed]
            arrays["relay_rows"] = fed
            arrays["relay_tokens"] = arange_per_row(starts[fed], queries[fed])
        if fed.size and offset is not None:
            arrays["relay_kv_offset"] = offset[fed]

    def _refuse(self, rule: str, state: RowState, tokens: StepTokens, n: int, takes: int) -> NoReturn:
        """Raises for a rule that a row breaks: the invariants have the words."""
        block: Any = state.block
        slots, pages, declared, row = self._slots, self._pages, self._declared, block.row
        allocator, there = slots._allocator, n - takes
        rows, generations = state.column(str(self._layout.slots))[:n].copy(), state.generations[:n].copy()
        queries = tokens.each(n)
        starts = state.column(declared.seq_lens)[:n].astype(np.int64)
        begins, ends = starts, starts + queries
        if declared.kv_offset is not None:
            offset = state.column(declared.kv_offset)[:n].astype(np.int64)
            begins, ends = (np.where(lens > 0, lens + offset, 0) for lens in (begins, ends))
        if rule == "held":
            allocator.check_held(rows[:there], generations[:there], OPERATION)
        elif rule == "once":
            invariants.slot_shared(rows[:there], **allocator.where(OPERATION))
        elif rule == "slots":
            allocator.check_available(takes)
        elif rule == "free slot":
            allocator.next_handles(takes, OPERATION)
        elif rule == "negative":
            pages._check_lengths(starts, starts + queries, OPERATION)
        elif rule == "length":
            pages._check_lengths(begins, ends, OPERATION)
        elif rule == "shrinks":
            pages._check_lengths(pages._committed(rows[:there]), ends[:there], OPERATION)
        elif rule == "derived":
            pages.check_committed(rows[:there], begins[:there], OPERATION)
        elif rule == "owner":
            pages.check_unshared(np.array([block.value]), OPERATION)
        elif rule == "released":
            pages.check_readable(rows[:there], starts[:there], OPERATION, window=declared.window)
        elif rule == "begun":
            problem = f"StepPlanner: row {row} joins with {block.value} tokens and puts in prompt ids behind them"
            remedy = "pass 0, the length before the step; or, if the KV is there, slots of `pages.take_requests` too"
            raise ArgumentError(problem, int(block.value), remedy)
        elif rule == "samples":
            problem = f"StepPlanner: the request in row {row} samples and puts in no token"
            raise ArgumentError(problem, row, "pass samples=query_lens > 0")
        elif rule == "fed":
            raise self._unfed(row, block.value)
        else:
            pages._holders.explain_free(block.new_pages, OPERATION)
        raise unexplained("StepPlanner", OPERATION, f"row {row}, by the rule {rule!r}")

    def _unfed(self, row: int, query: int) -> Exception:
        """The error for a request whose ids neither the host nor the relay has."""
        declared, most = self._declared, self._declared.places.size
        if declared.flat is None:
            problem = f"StepPlanner: row {row} puts in {query} tokens, and no field of a relay has their ids"
            return ArgumentError(problem, query, "pass their ids: prompt_ids=...; or declare the field that has them")
        has = f"{declared.least} to {most}" if declared.least < most else f"{most}"
        problem = f"StepPlanner: the request in row {row} puts in {query} tokens, and the relay has {has} for it in"
        remedy = "pass its ids to the plan, or name the fields that hold them all"
        return ShapeError(f"{problem} {', '.join(declared.ids)}", query, remedy)


def _check_names(used: Collection[str]) -> None:
    if used:
        problem = f"StepPlanner: plan with extras or token arrays named {', '.join(sorted(used))}"
        raise DeclarationError(problem, sorted(used), "rename them: arrays that the planner sends have these names")


def _check_apart(leaving: Ints, joining: Ints) -> None:
    """Refuses requests that leave and join in one plan: their slots would be freed while they run."""
    both = set(leaving.tolist()).intersection(joining.tolist())
    if both:
        problem = f"StepPlanner: plan with requests that leave and join, in slots {sorted(both)}"
        remedy = "a request that stays is kept: name its row in keep=, and pass in joining= those that are new"
        raise ArgumentError(problem, sorted(both), remedy)


def _check_counts(batch: type[Batch], name: str, option: str) -> None:
    """Refuses a column that is not one count per request, or a batch without slots."""
    column = batch.columns().get(name)
    counts = isinstance(column, MirroredColumn) and not column.shape and column.dtype in (torch.int64, torch.int32)
    if not counts or batch._slot_column is None:
        problem = f"StepPlanner of {batch.__name__}: no slots, or no column {name!r} of one number per request"
        remedy = f"declare slot_column() and mirrored(torch.int64), and name the second: {option}=..."
        raise DeclarationError(problem, name, remedy)
    if option == "seq_lens" and not batch._layout.tensors[name].counted:
        raise not_counted(batch._layout, name, f"StepPlanner: column {name!r}")
