"""`PlannedStep`, what `StepPlanner` makes: its rows, the inputs of its forward, and what that finds."""

from typing import Any, final

import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import Array, Ints, read_only
from batchstate._core import tally
from batchstate._origin import DerivedArrays, Origin
from batchstate._prefetched import Prefetched
from batchstate._relay import DEVICE, Numbers
from batchstate._rows import RowState
from batchstate._step_arguments import NO_FURTHER, TAKEN, Declared, Further
from batchstate._step_memory import StepMemory
from batchstate._step_tokens import StepTokens
from batchstate._upload import NO_EXTRAS, Extras
from batchstate.batch import Batch, Windows
from batchstate.errors import ArgumentError, ContractError, unexplained
from batchstate.forward.inputs import ARRAYS, ForwardInputs, put_in_of
from batchstate.forward.plan import ForwardPlan
from batchstate.invariants import times_checked
from batchstate.mirror import DeviceSide, Slots
from batchstate.nvtx import ranges
from batchstate.runtime.base import Fence, Stream
from batchstate.runtime.memory import ALIGNMENT, Place, ReadyTensor
from batchstate.violations import Code

OPERATION, INPUTS = "plan", "inputs"
STALE_HANDLE = Code.SLOT_STALE_HANDLE
NO_ROWS: Ints = np.zeros(0, dtype=np.int64)
NO_PLACES: dict[str, int] = {}
NOTHING: list[Place] = []


@ranges("inputs", "publish")
@final
class PlannedStep:
    """A step that was planned and sent. Made by `StepPlanner.plan`.

    Attributes:
        num_reqs: requests.
        extras: what the engine sent with it, by name.
    """

    # Until they are asked for.
    _rows: Ints | None = None
    _batch: Batch | None = None
    _sent: Batch | None = None
    _plan: ForwardPlan | None = None
    _results: Prefetched | None = None
    _before: ReadyTensor | None = None
    _accepted = False
    _over = ""  # why it is: it has published, or was taken back
    _used = False
    _places = NO_PLACES
    extras = NO_EXTRAS

    def __init__(
        self,
        declared: Declared,
        kind: type[Batch],
        memory: StepMemory,
        moved: RowState,
        tokens: StepTokens,
        num_reqs: int,
        further: Further,
        windows: Windows,
    ) -> None:
        """For the library. The rows of `moved` lie in the memory, but for those of columns on the device alone."""
        self._declared, self._memory, self._moved = declared, memory, moved
        self._kind: Any = kind
        self._tokens, self._further, self._windows, self.num_reqs = tokens, further, windows, num_reqs
        self._step = declared.runtime.step

    def __repr__(self) -> str:
        return f"PlannedStep({self.plan!r})"

    # Sending, for `StepPlanner`

    def _send(self, stream: Stream) -> None:
        """Copies the step to the device on `stream`, the current one, with what goes along; then writes tables."""
        memory, further = self._memory, self._further
        if (group := self._declared.runtime.agreement) is not None:
            group.note(self.rows, memory.small_numbers(memory.block.kv_lens, memory.block.n))
        if further is NO_FURTHER:
            self._upload = memory.send(memory.block.end, NOTHING, stream)
            return
        places: list[Place] = []
        end = memory.block.end
        if further.arrays:
            self._places = {}
            for name, array in further.arrays.items():
                self._places[name] = len(places)
                places.append((end, array.dtype, array.shape))
                memory.staging.write(array, end)
                end += array.nbytes + ALIGNMENT - 1 & -ALIGNMENT
        self._upload = memory.send(end, places, stream)
        if further.named:
            at = {name: self._places[name] for name in further.named}
            runtime = self._declared.runtime
            self.extras = Extras(runtime, self._upload, at, further.named, row_set=self.sent.row_set)
        if further.needs:
            self.sent.device_side.gather_many()
        for i, write in enumerate(further.writes):
            write.table.launch_checked(write, self._crossed(f"index {i}"), self._crossed(f"values {i}"))

    def _crossed(self, name: str) -> torch.Tensor:
        """An array that went along, to be used on the stream of the copy."""
        return self._memory.part(self._upload.places[self._places[name]])

    @property
    def slots(self) -> torch.Tensor:
        """The slots on the device, int64[num_rows]."""
        return self._memory.slots(0, self._memory.block.n)

    # Rows

    @property
    def rows(self) -> Ints:
        """The slots, int64[num_reqs], read-only in the memory of the step."""
        if self._rows is None:
            block = self._memory.block
            self._rows = self._memory.numbers(block.start(block.columns.slots) >> 3, self.num_reqs)
            self._rows.setflags(write=False)
        return self._rows

    @property
    def generations(self) -> Ints:
        """Their generations, likewise."""
        generations = self._memory.numbers(self._memory.block.gens, self.num_reqs)
        generations.setflags(write=False)
        return generations

    @property
    def query_lens(self) -> Ints:
        """Tokens that each request puts in, int64[num_reqs]."""
        return self._tokens.each(self.num_reqs)

    @property
    def max_kv_len(self) -> int:
        """The most tokens that a request has with those of the step, or a bound."""
        block = self._memory.block
        return int(self._memory.small_numbers(block.kv_lens, block.n).max(initial=0))

    @property
    def batch(self) -> Batch:
        """The requests: their lengths count the tokens that each puts in."""
        batch = self._batch
        if batch is None:
            batch, num_reqs = self.sent, self.num_reqs
            if batch.num_rows > num_reqs:
                batch = self._made(batch._state.first(num_reqs))
            self._batch = batch
            declared, block = self._declared, self._memory.block
            if declared.accepted is not None and block.fed and declared.seq_lens not in self._moved.device:
                batch._guesses = block.t - block.h > block.fed
        return batch

    @property
    def sent(self) -> Batch:
        """The same as it went to the device, with padded rows if there are any."""
        batch = self._sent
        if batch is None:
            moved, memory, upload = self._moved, self._memory, self._upload
            state = RowState(moved.layout, memory.block, moved.device, moved.objects)
            self._sent = batch = self._made(state, memory)
            batch._crossed = upload
            for name, places in self._further.needs.items():
                batch.device_side.note_needs(name, upload, places)
        return batch

    def _made(self, state: RowState, lease: StepMemory | None = None) -> Batch:
        declared, kind = self._declared, self._kind
        batch: Batch = kind(
            declared.runtime, state, self.num_reqs, state.block.n, declared.pool_id, self._windows, None, lease
        )
        return batch

    # The host's part

    @property
    def plan(self) -> ForwardPlan:
        """The host's part of the inputs, made when it is first asked for."""
        if self._plan is None:
            self._plan = self._planned()
        return self._plan

    def _planned(self) -> ForwardPlan:
        declared, block, n, memory = self._declared, self._memory.block, self.num_reqs, self._memory
        pages, batch = declared.pages, self.sent
        state = batch._state
        slots = Slots.of_pool(
            pages.runtime,
            memory.numbers(block.start(block.columns.slots) >> 3, block.n),
            memory.numbers(block.gens, block.n),
            pool_id=pages.slots.pool_id,
            name=pages.slots.name,
            device=DeviceSide(ReadyTensor.uploaded(self.slots, self._upload)),
        )
        queries = self._tokens.each(n)
        lens = state.column(declared.seq_lens)[:n].astype(np.int64)
        sampling, fed = self._tokens.sampling(n), self._tokens.fed(n) if block.fed else NO_ROWS
        offset = None if declared.kv_offset is None else state.column(declared.kv_offset)[:n].astype(np.int64)
        bounds = batch[declared.seq_lens] if declared.seq_lens in state.device and fed.size else None
        num_rows, everyone = block.n, sampling.size == n
        arrays: dict[str, Array] = {
            "positions": memory.numbers(block.positions, block.padded),
            "query_start_loc": memory.small_numbers(block.starts, num_rows + 1),
            "kv_lens": memory.small_numbers(block.kv_lens, num_rows),
            "last_token_indices": memory.numbers(block.last, num_rows if everyone else block.s),
            "slot_mapping": memory.numbers(block.mapping, block.padded),
        }
        if not everyone:
            arrays["sample_slots"] = memory.numbers(block.sampled, block.s)
        tokens = dict(self._further.token_arrays)
        if declared.has_ids and (block.h or fed.size < n):
            dtype = np.int32 if "input_ids" in declared.int32 else np.int64
            arrays["input_ids"] = laid = np.zeros(block.padded, dtype=dtype)
            if block.h and self._tokens.told is not None:
                laid[: block.t][np.repeat(self._tokens.told, queries) == 1] = self._tokens.ids
                tokens["input_ids"] = laid
        further = self._further
        own = further.arrays.keys() - further.named.keys() - further.token_arrays.keys()
        arrays |= {name: further.arrays[name] for name in own if name.isidentifier()} | tokens
        origin = Origin(OPERATION, self._step, slots.row_set, pages.epochs, block.epoch)
        plan = ForwardPlan(
            slots=slots,
            num_tokens=block.t,
            num_padded_tokens=block.padded,
            query_lens=read_only(queries),
            seq_lens=read_only(lens),
            bounds=bounds,
            exact=declared.seq_lens not in state.device,
            relay_rows=read_only(fed),
            sample_rows=read_only(sampling),
            origin=origin,
            pages=pages,
            kv_offset=offset,
            has_ids=declared.has_ids,
            int32=declared.int32,
            token_arrays=tokens,
            deferred=False,
            reach=declared.window,
            shares=block.share,
            used=self._used,
        )
        if fed.size and not plan.direct:
            arrays["relay_slots"], arrays["relay_tokens"] = plan.relayed.np.copy(), plan.relay_tokens()
            if plan.bounded:
                arrays["relay_rows"] = fed
        plan.extras = DerivedArrays({name: read_only(array) for name, array in arrays.items()}, origin)
        return plan

    # The forward

    def inputs(self) -> ForwardInputs:
        """The inputs of the forward, at its entry, on its stream: one gather of ids. Writes the token table.

        Raises:
            CaptureError: the stream is being captured.
            Violation: SLOT_STALE_HANDLE: a request has left since; at `cheap` DERIVED_STALE: its pages have changed;
                PAGE_UNWRITTEN: a forward before this one never ran; PAGE_OWNER: a page that it writes has got further
                holders; FUTURE_CONSUMED: the inputs were taken before. FUTURE_UNWRITTEN, FUTURE_GENERATION,
                FUTURE_CONSUMED and FUTURE_ORDER of the relay's entries.
        """
        declared, memory, upload, moved = self._declared, self._memory, self._upload, self._moved
        block, pages, relay, runtime = memory.block, declared.pages, declared.relay, declared.runtime
        transaction, fed, full = declared.transaction, block.fed > 0 and declared.relay is not None, levels.full
        stream = runtime.stream_for(INPUTS)
        if transaction.operation is not None:
            transaction.enter(INPUTS)
        bounded = block.fed > 0 and declared.seq_lens in moved.device
        if bounded and declared.lengths is None:
            problem = f"{self!r} has bounds of the lengths, and the planner no field of true ones"
            raise ContractError(problem, "upper_bound", "name the field: StepPlanner(..., lengths=...)")
        if full:
            self.sent._check_unwritten(INPUTS)
        numbers: Numbers | None = None if relay is None or stream is relay._entries.only else set()
        rule = block.running(declared.rules, pages.epochs.last, pages.shares.last, levels.cheap, numbers)
        if rule is not None or block.changed or self._used:
            self._check_running(rule)
        if levels.cheap:
            tally(times_checked, declared.asked if fed else TAKEN)
        if fed and relay is not None:
            relay.gathering(declared.read, numbers, stream)
        if stream is not upload.stream:
            runtime.use_on_current_stream(
                upload.buffer, upload.stream, upload.ready, synchronised=upload.synchronised, current=stream
            )
        if block.k:
            self._write_table()
        source, positions, starts, kv_lens, last, mapping, _ = memory.views()
        ids = self._gathered_ids(source) if declared.has_ids else None
        inputs = ForwardInputs(self, ids, positions, starts, kv_lens, last, mapping)
        if self._places:
            places, tokens = self._places, self._further.token_arrays
            names = ARRAYS.intersection(places) - self._further.named.keys() | tokens.keys()
            inputs.put({name: memory.part(upload.places[places[name]]) for name in names}, tokens)
        if full and fed and relay is not None and len(declared.ids) == 1 and ids is not None:
            relay.check_gathered(declared.ids, ids)  # several lie mixed: see `inputs.check`
        if declared.lengths is not None:
            self._take_lengths(inputs, stream, bounded)
        if full:
            inputs.check(runtime)
        if not pages.writes.only(stream):
            pages.writes.note(self.rows, stream)
        number = transaction.launches.begin(stream, upload.ready)
        transaction.operation = INPUTS
        block.launched(declared.rules, number)
        transaction.operation = None
        self._used = True
        if self._plan is not None:
            self._plan.use()
        return inputs

    def _check_running(self, rule: object) -> None:
        """Asks in words what `StepBlock.running` found, or whether the inputs were taken before."""
        block, declared, pages = self._memory.block, self._declared, self._declared.pages
        if rule == "held":
            pages.slots.check_rows(self.rows, self.generations, INPUTS)
            raise unexplained("StepPlanner", INPUTS, f"row {block.row}, by the rule {rule!r}")
        self.plan.check(None, INPUTS)
        if self._used and levels.cheap:
            self.plan.check_unused(INPUTS)
        if rule == "read" and declared.relay is not None:
            declared.relay._entries.refuse_read(block.those_fed(), declared.read[block.value], DEVICE, "gather")
        at = np.arange(self.num_reqs) == block.row
        if rule == "unwritten":
            launched = pages._rows.arrays["launched"][self.rows]
            invariants.page_unwritten(np.where(at, block.value, 0), launched, **pages._where(INPUTS))
        if rule is not None:
            pages.check_committed(self.rows, np.where(at, block.value, pages._committed(self.rows)), INPUTS)
            raise unexplained("StepPlanner", INPUTS, f"row {block.row}, by the rule {rule!r}")

    def _write_table(self) -> None:
        """The places of pages that begin, and of requests that have none there yet, into the token table."""
        block, memory, table = self._memory.block, self._memory, self._declared.pages.req_to_token
        if table is None:
            return
        index, places = memory.table_views()
        at: Ints = NO_ROWS
        values: Array = NO_ROWS
        if table.host_memory is not None:
            at, values = memory.numbers(block.elements, block.k), memory.small_numbers(block.places, block.k)
        table.scatter(index, places, at, values, ())
        block.table_written(self._declared.rules)
        if table._changes is not None:
            table._changes.note(self.rows, "a write", self._declared.runtime.step)

    def _gathered_ids(self, source: torch.Tensor) -> torch.Tensor:
        """The ids of all tokens: those of the relay, and those of the host where it has any.

        A token has an id on one side, and 0 on the other. The whole relay is not read: others may write to theirs.
        """
        declared, block, runtime = self._declared, self._memory.block, self._declared.runtime
        flat: Any = declared.flat
        host: torch.Tensor | None = None
        if block.h or not block.fed:
            host = self._memory.wide[block.ids : block.ids + block.padded]
            if not block.fed:
                return host.to(torch.int32) if "input_ids" in declared.int32 else host
        ids: torch.Tensor = runtime.launch(flat.index_select, 0, source, reads=(flat, source), name="ids of the step")
        if host is not None:
            runtime.launch(ids.add_, host, reads=(ids, host), writes=(ids,), name="ids of the host")
        return ids

    def _correct_lengths(self, inputs: ForwardInputs) -> None:
        """The true lengths from the relay, where the host has bounds."""
        declared, n, block, runtime = self._declared, self.num_reqs, self._memory.block, self._declared.runtime
        relay: Any = declared.relay
        queries = self._tokens.each(n)[self._tokens.fed(n)]
        most = declared.places.size if declared.has_ids else int(queries[0])
        direct = self._tokens.direct(n, block.n, block.padded)
        slots = self._memory.slots(0, n) if direct else self._crossed("relay_slots")
        lengths, put_in = relay.selected((declared.lengths,), slots), put_in_of(runtime, queries, most)
        table, pool = declared.pages.req_to_token, declared.pages.slots
        fed = Slots.of_pool(runtime, *block.those_fed().handles(), pool_id=pool.pool_id, name=pool.name)
        memory = None if table is None else table.device_for(fed)
        extras = Extras(runtime, self._upload, self._places)
        inputs.correct_lengths(runtime, extras, lengths, slots, most, memory, put_in, direct=direct)

    def _take_lengths(self, inputs: ForwardInputs, stream: Stream, bounded: bool) -> None:
        """Keeps what `accept` starts from, before the forward may write into its inputs."""
        declared, block = self._declared, self._memory.block
        relay: Any = declared.relay
        if bounded:
            self._correct_lengths(inputs)
        elif block.fed and levels.full:
            relay.check_known_lengths(self.plan, declared.lengths)
        reads, n = (inputs.kv_lens, inputs.query_start_loc, inputs.last_token_indices), self.num_reqs
        before = declared.runtime.launch(
            _put_in, *reads, n if block.s == n else None, reads=reads, name="lengths before the step", operations=4
        )
        self._before = ReadyTensor(before, stream, declared.runtime.record(stream), {})

    def used_on(self, stream: Stream) -> None:
        """Says that work on another stream uses tensors of the step, in place of torch's `record_stream`.

        Streams on which `inputs`, `publish` or a column's `device` were asked are noted by themselves. The memory of
        the step is not used again before `stream` has run what it was given by the time that nobody has the tensors.
        """
        self._upload.synchronised[stream.key] = stream

    @property
    def sampled_slots(self) -> Slots:
        """Handles of the requests that sample, and of padded rows where all do."""
        return self._memory.handles(padded=True)

    # Results

    def publish(self, **values: object) -> None:
        """Makes the forward's values known to the next step, and sends the results to the host.

        Args:
            **values: field -> value, one entry for each request that samples; see `FutureMap.publish`, and `prefetch`.
        """
        declared = self._declared
        relay = declared.relay
        if relay is None:
            raise ArgumentError("StepPlanner: publish without a relay", None, "declare the planner with one: relay=...")
        memory, transaction = self._memory, declared.transaction
        stream = declared.runtime.stream_for("publish")
        if transaction.operation is not None:
            transaction.enter("publish")
        requests = memory.block.those_sampling()
        if requests.n and not self._used:
            remedy = "call `inputs` at forward entry: it writes the token table, and takes what the relay has"
            raise ArgumentError(f"{self!r}: publish, and its inputs were never taken", self, remedy)
        times_checked[STALE_HANDLE] += 1
        if declared.slots.first_not_held(requests) >= 0:
            declared.pages.slots.check_rows(*requests.handles(), "publish")
        if declared.accepted is not None and requests.n and not self._accepted:
            raise ArgumentError(f"{self!r}: publish, and nothing is accepted", self, "call `accept` before")
        self._results = results = relay.publish_for(memory, requests, stream, values, declared.results)
        self._over = "has published"
        if declared.accepted is not None and results is not None:
            results.counting = declared.accepted, self._put_in

    def rollback(self, *, after: Fence | None) -> Batch:
        """Takes the step back, whose forward failed or never ran; its requests, with the lengths before it.

        Those that joined stay; those that left, with it or since, are gone. Pages that it took are released, and
        entries that its inputs took are there again. Of several steps the last is taken back first.

        Args:
            after: a fence behind the last forward of its requests, this one's if it was launched; as for `truncate`.

        Raises:
            ArgumentError: the step has published or accepted, or was taken back; a later one has tokens of a request.
            Violation: PAGE_OWNER: tokens of the step are shared or cached. Else as `PagePool.truncate`. Nothing has
                changed.
        """
        declared, pages, relay = self._declared, self._declared.pages, self._declared.relay
        if self._over or self._accepted:
            remedy = "it ran: `publish`, if it has not, and take rejected tokens back by `PagePool.truncate`"
            raise ArgumentError(f"{self!r}: rollback, and it {self._over or 'has accepted'}", self, remedy)
        here = pages.slots._allocator.owners_of(self.rows) == self.generations
        queries, rows = self._tokens.each(self.num_reqs)[here], self.rows[here]
        batch = self.batch.filter(here).advance(declared.seq_lens, -queries)
        batch._guesses = False
        before = batch._state.column(declared.seq_lens).astype(np.int64)
        offset = 0 if declared.kv_offset is None else batch._state.column(declared.kv_offset)
        before, ends = (np.where(lens > 0, lens + offset, 0) for lens in (before, before + queries))
        committed = pages._committed(rows)
        for row in np.flatnonzero(committed > ends)[:1].tolist():
            problem = f"{self!r}: rollback to {before[row]} tokens in row {row}, of which a later step has put in more"
            raise ArgumentError(problem, int(committed[row]), "take back the last step first")
        columns = np.arange(pages.page_table.shape[1])
        own = (columns >= before[:, None] // pages.page_size) & (queries > 0)[:, None]
        pages.check_unshared(pages.page_table[rows][own].astype(np.int64), "rollback")
        slots: Any = batch[str(batch._slot_column)]
        pages.truncate(slots, np.minimum(before, committed), after=after)
        if self._used and relay is not None:
            relay._entries.give_back(self._memory.block.those_fed(), declared.read, DEVICE)
        self._used, self._before = False, None  # what it would publish is refused
        self._over = "was taken back"
        return batch

    def accept(self, tokens: torch.Tensor) -> torch.Tensor:
        """Says how many tokens of the step each request keeps, and publishes that and its length, which follows.

        Call it as soon as drafts are verified, before `publish`: readers on other streams wait for this publish alone.

        Args:
            tokens: of each that samples (or of `sampled_slots`), [s] in the dtype of the field `accepted`, made on the
                current stream: from 0 to what it puts in. With drafts 1 + those that were right, of a prompt all.

        Returns the true lengths, [s] in the dtype of the field `lengths`: those before the step, and what was accepted,
        at least 0 and at most what was put in: a length never leaves the pages of the step.

        Raises:
            ArgumentError: a planner without `lengths`, or `inputs` were not taken.
            Violation: LENGTH_ORDER: a request keeps fewer than 0 or more than it put in: here at `full`, and at `cheap`
                when the results land. Else as `FutureMap.publish`. Nothing was published.
        """
        declared, memory, runtime = self._declared, self._memory, self._declared.runtime
        relay, before, names = declared.relay, self._before, (declared.accepted, declared.lengths)
        if relay is None or before is None:
            remedy = "declare StepPlanner(lengths=..., accepted=...), and call `inputs` first, at forward entry"
            raise ArgumentError(f"{self!r}: accept without lengths to start from", self, remedy)
        declared.transaction.enter("accept")
        runtime.stream_for("accept")
        requests = memory.block.those_sampling()
        declared.pages.slots.check_rows(*requests.handles(), "accept")
        start: Any = before.on_current_stream(runtime)
        true = relay.put_accepted(memory, requests, names, tokens, start, self._put_in())  # type: ignore[arg-type]
        self._accepted = True
        return true

    def _put_in(self) -> Ints:
        """Tokens that each request put in of those that sample, int64[s]."""
        return self._tokens.each(self.num_reqs)[self._tokens.sampling(self.num_reqs)]

    @property
    def results(self) -> Prefetched:
        """The fields that the planner was declared with, on their way to the host; reading one waits for the copy.

        Raises:
            ArgumentError: nothing was published yet, or no results were declared.
        """
        if self._results is None:
            remedy = "publish first, and name the fields that the host reads: StepPlanner(..., results=...)"
            raise ArgumentError(f"{self!r} has no results", self, remedy)
        return self._results


def _put_in(kv_lens: torch.Tensor, starts: torch.Tensor, last: torch.Tensor, everyone: int | None) -> torch.Tensor:
    """Tokens before the step, and those put in, of each request that samples, int32[2, s]."""
    queries = starts.diff()
    before = kv_lens - queries
    if everyone is not None:
        return torch.stack([before[:everyone], queries[:everyone]])
    rows = torch.searchsorted(starts[1:], last.to(starts.dtype), right=True)  # the first that ends behind its token
    return torch.stack([before, queries]).index_select(1, rows)
