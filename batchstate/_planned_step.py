"""`PlannedStep`, what `StepPlanner` makes: its rows, the inputs of its forward, and what that finds."""

from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import levels
from batchstate._arrays import Array, read_only
from batchstate._origin import DerivedArrays, Origin
from batchstate._rows import RowState
from batchstate._step_arguments import Declared, Further
from batchstate._step_memory import StepMemory
from batchstate._step_tokens import StepTokens
from batchstate._upload import NO_EXTRAS, Extras
from batchstate.batch import Batch, Windows
from batchstate.errors import ArgumentError, ContractError, unexplained
from batchstate.forward.inputs import ForwardInputs, put_in_of
from batchstate.forward.plan import ForwardPlan
from batchstate.invariants import times_checked
from batchstate.mirror import DeviceSide, Slots
from batchstate.nvtx import ranges
from batchstate.pools import SlotPool
from batchstate.runtime.base import Stream
from batchstate.runtime.memory import ALIGNMENT, PackedUpload, Place, ReadyTensor
from batchstate.violations import Code

if TYPE_CHECKING:
    from batchstate.future_map import Prefetched

Ints = npt.NDArray[np.int64]

OPERATION, INPUTS = "plan", "inputs"
NO_ROWS: Ints = np.zeros(0, dtype=np.int64)
NO_HANDLES = NO_ROWS, NO_ROWS
NO_ARRAYS: dict[str, torch.Tensor] = {}


@final
class Sampled:
    """The requests of a step that sample: it refers to the memory of the step, and not to the step.

    Attributes:
        rows, generations: their slots, int64[s].
        num_rows: s, or with padded rows where all requests sample.
    """

    __slots__ = ("_memory", "_pool", "_upload", "_wide", "generations", "num_rows", "rows")

    def __init__(
        self, pool: SlotPool, memory: StepMemory, wide: torch.Tensor, upload: PackedUpload, num_reqs: int
    ) -> None:
        block = memory.block
        self._pool, self._memory, self._wide, self._upload = pool, memory, wide, upload
        self.rows: Ints = memory.numbers(block.sampled, block.s)
        self.num_rows = block.n if block.s == num_reqs else block.s
        self.generations: Ints = memory.numbers(block.gens, block.s)
        if block.s < num_reqs:
            self.generations = memory.numbers(block.gens, num_reqs)[memory.numbers(block.rows, block.s)]

    def index(self, stream: Stream) -> torch.Tensor:
        """The slots on the device, which no forward was given; safe on `stream`, the current one."""
        upload, block = self._upload, self._memory.block
        self._pool.runtime.use_on_current_stream(
            upload.buffer, upload.stream, upload.ready, synchronised=upload.synchronised, current=stream
        )
        return self._wide[block.sampled : block.sampled + block.s]

    def handles(self, *, padded: bool = False) -> Slots:
        """Their handles."""
        block, rows, generations = self._memory.block, self.rows, self.generations
        if padded and self.num_rows > block.s:
            rows = self._memory.numbers(block.sampled, self.num_rows)
            generations = self._memory.numbers(block.gens, self.num_rows)
        side = DeviceSide(ReadyTensor.uploaded(self._wide[block.sampled :][: len(rows)], self._upload))
        pool = self._pool
        return Slots.of_pool(pool.runtime, rows, generations, pool_id=pool.pool_id, name=pool.name, device=side)


@ranges("inputs", "publish")
@final
class PlannedStep:
    """A step that was planned and sent. Made by `StepPlanner.plan`.

    Attributes:
        num_reqs: requests.
        rows, generations: their slots, int64[n], in the memory of the step.
        extras: what the engine sent with it, by name.
    """

    __slots__ = (
        "_batch",
        "_buffer",
        "_declared",
        "_further",
        "_kind",
        "_memory",
        "_narrow",
        "_origin",
        "_places",
        "_plan",
        "_pool_id",
        "_results",
        "_sampled",
        "_sent",
        "_state",
        "_tokens",
        "_upload",
        "_used",
        "_wide",
        "_windows",
        "extras",
        "generations",
        "num_reqs",
        "rows",
    )

    def __init__(
        self,
        declared: Declared,
        kind: type[Batch],
        memory: StepMemory,
        state: RowState,
        tokens: StepTokens,
        num_reqs: int,
        further: Further,
        windows: Windows,
    ) -> None:
        block, pages = memory.block, declared.pages
        self._declared, self._kind, self._memory, self._state = declared, kind, memory, state
        self._tokens, self._further, self._windows, self.num_reqs = tokens, further, windows, num_reqs
        self.rows = memory.numbers(block.start(block.columns.slots) >> 3, num_reqs)
        self.generations = memory.numbers(block.gens, num_reqs)
        self.rows.setflags(write=False)
        self.generations.setflags(write=False)
        self._batch: Batch | None = None
        self._sent: Batch | None = None
        self._plan: ForwardPlan | None = None
        self._results: Prefetched | None = None
        self._used = False
        self._origin = pages.epochs.last, pages.shares.last, pages.runtime.step
        self._places: dict[str, int] = {}
        self.extras = NO_EXTRAS

    def __repr__(self) -> str:
        return f"PlannedStep({self.plan!r})"

    # Sending, for `StepPlanner`

    def _send(self) -> None:
        """Copies the step to the device, with what goes along; then writes the engine's tables."""
        memory, further, runtime = self._memory, self._further, self._declared.pages.runtime
        end, places = memory.block.end, list[Place]()
        for name, array in further.arrays.items():
            self._places[name] = len(places)
            places.append((end, array.dtype, array.shape))
            memory.staging.write(array, end)
            end += array.nbytes + ALIGNMENT - 1 & -ALIGNMENT
        stream = runtime.current_stream
        buffer, memory.copied = runtime.copied(memory.staging, end, stream)
        self._upload = upload = PackedUpload(buffer, stream, memory.copied, places)
        self._buffer, data = buffer, buffer.data  # with a count of its own: a forward may write into its inputs
        self._wide, self._narrow = data.view(torch.int64), data.view(torch.int32)
        self._sampled = Sampled(self._declared.pages.slots, memory, self._wide, upload, self.num_reqs)
        if further.named:
            at = {name: self._places[name] for name in further.named}
            self.extras = Extras(runtime, upload, at, further.named, row_set=self.sent.row_set)
        for i, write in enumerate(further.writes):
            write.table.launch_checked(write, self._crossed(f"index {i}"), self._crossed(f"values {i}"))

    def _crossed(self, name: str) -> torch.Tensor:
        """An array that went along, to be used on the stream of the copy."""
        return self._upload.shared(self._places[name])

    def _slots_of(self, start: int, stop: int) -> torch.Tensor:
        """The slots of some rows on the device, likewise. A write into them counts as one into the columns."""
        at = self._memory.block.start(self._memory.block.columns.slots) >> 3
        return self._buffer.view(torch.int64)[at + start : at + stop]

    @property
    def slots(self) -> torch.Tensor:
        """The slots on the device, int64[num_rows]."""
        return self._slots_of(0, self._memory.block.n)

    # Batches

    @property
    def batch(self) -> Batch:
        """The requests: their lengths count the tokens that each puts in."""
        if self._batch is None:
            padded = self._memory.block.n > self.num_reqs
            self._batch = self._made(self._state.first(self.num_reqs)) if padded else self.sent
        return self._batch

    @property
    def sent(self) -> Batch:
        """The same as it went to the device, with padded rows if there are any."""
        if self._sent is None:
            self._sent = batch = self._made(self._state)
            batch.lease = self._memory
            batch._crossed = self._upload
            for name, places in self._further.needs.items():
                batch.device_side.note_needs(name, self._upload, places)
        return self._sent

    def _made(self, state: RowState) -> Batch:
        pool, runtime = self._declared.pages.slots, self._declared.pages.runtime
        return self._kind(runtime, state, self.num_reqs, state.block.n, pool.pool_id, self._windows)

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
        slots = Slots.of_pool(
            pages.runtime,
            memory.numbers(block.start(block.columns.slots) >> 3, block.n),
            memory.numbers(block.gens, block.n),
            pool_id=pages.slots.pool_id,
            name=pages.slots.name,
            device=DeviceSide(ReadyTensor.uploaded(self._slots_of(0, block.n), self._upload)),
        )
        queries = self._tokens.each(n)
        lens = self._state.column(declared.seq_lens)[:n].astype(np.int64)
        sampling, fed = self._tokens.sampling(n), self._tokens.fed(n) if block.fed else NO_ROWS
        epoch, shares, step = self._origin
        offset = None if declared.kv_offset is None else self._state.column(declared.kv_offset)[:n].astype(np.int64)
        bounds = batch[declared.seq_lens] if declared.seq_lens in self._state.device and fed.size else None
        num_rows, everyone = block.n, sampling.size == n
        arrays: dict[str, Array] = {
            "positions": memory.numbers(block.positions, block.padded),
            "query_start_loc": memory.narrow(block.starts, num_rows + 1),
            "kv_lens": memory.narrow(block.kv_lens, num_rows),
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
        origin = Origin(OPERATION, step, slots.row_set, pages.epochs, epoch)
        plan = ForwardPlan(
            slots=slots,
            num_tokens=block.t,
            num_padded_tokens=block.padded,
            query_lens=read_only(queries),
            seq_lens=read_only(lens),
            bounds=bounds,
            exact=declared.seq_lens not in self._state.device,
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
            shares=shares,
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
            Violation: SLOT_STALE_HANDLE: a request has left since; DERIVED_STALE, at `cheap`: its pages have changed;
                PAGE_OWNER: a page that the step writes has got further holders; FUTURE_CONSUMED: the inputs were taken
                before. FUTURE_UNWRITTEN, FUTURE_GENERATION, FUTURE_CONSUMED and FUTURE_ORDER of the relay's entries.
        """
        declared, block, upload = self._declared, self._memory.block, self._upload
        pages, relay = declared.pages, declared.relay
        runtime = pages.runtime
        pages.slots.transaction.enter(INPUTS)
        if runtime.capturing:
            runtime.refuse_capture("taking the inputs of a step")
        if levels.full:
            self.sent._check_unwritten(INPUTS)
        self._check_running()
        stream = runtime.current_stream
        fed, numbers = NO_HANDLES, None
        if block.fed and relay is not None:
            fed = self._fed()
            numbers = relay.gathering(*fed, declared.read, stream)
        runtime.use_on_current_stream(
            upload.buffer, upload.stream, upload.ready, synchronised=upload.synchronised, current=stream
        )
        if block.k:
            self._write_table()
        ids = self._gathered_ids() if declared.has_ids else None
        inputs = ForwardInputs(self, ids, self._token_arrays() if self._further.token_arrays else NO_ARRAYS)
        if numbers is not None and relay is not None and ids is not None:
            names = declared.ids if len(declared.ids) == 1 else ()  # of several they lie mixed: see `inputs.check`
            relay.gathered(numbers, stream, names, ids)
        if self._bounded:
            self._correct_lengths(inputs)
        elif levels.full and declared.lengths is not None and relay is not None and fed[0].size:
            relay.check_known_lengths(self.plan, declared.lengths)
        if levels.full:
            inputs.check(runtime)
        if relay is not None and fed[0].size:
            relay.take_entries(fed[0], declared.read)
        pages.writes.note(self.rows, stream)
        block.launched(pages._rows, self._declared.table_width)
        self._used = True
        if self._plan is not None:
            self._plan.use()
        return inputs

    @property
    def _bounded(self) -> bool:
        """Whether the host knows only bounds of the lengths of requests that the relay feeds."""
        return self._memory.block.fed > 0 and self._declared.seq_lens in self._state.device

    def _check_running(self) -> None:
        """The requests are there, with the pages that they were planned with, and the inputs were not taken before."""
        declared, block = self._declared, self._memory.block
        pages = declared.pages
        slots = pages.slots
        rule = block.running(slots._allocator.core, pages._rows, levels.cheap)
        if rule == "held":
            slots.check_rows(self.rows, self.generations, INPUTS)
            raise unexplained("StepPlanner", INPUTS, f"row {block.row}, by the rule {rule!r}")
        epoch, shares, _ = self._origin
        if rule is not None or (levels.cheap and (pages.epochs.last != epoch or pages.shares.last != shares)):
            self.plan.check(None, INPUTS)
            if rule is not None:
                pages.check_committed(self.rows[block.row :][:1], np.array([block.value]), INPUTS)
                raise unexplained("StepPlanner", INPUTS, f"row {block.row}, by the rule {rule!r}")
        elif levels.cheap:
            times_checked[Code.SLOT_STALE_HANDLE] += 1
            times_checked[Code.DERIVED_STALE] += 1
            times_checked[Code.FUTURE_CONSUMED] += 1
        if self._used and levels.cheap:
            self.plan.check_unused()

    def _fed(self) -> tuple[Ints, Ints]:
        """Slots and generations of the requests whose ids the relay has."""
        if self._memory.block.fed == self.num_reqs:
            return self.rows, self.generations
        fed = self._tokens.fed(self.num_reqs)
        return self.rows[fed], self.generations[fed]

    def _write_table(self) -> None:
        """The places of pages that begin, and of requests that have none there yet, into the token table."""
        block, memory, table = self._memory.block, self._memory, self._declared.pages.req_to_token
        if table is None:
            return
        index, places = self._wide[block.elements :][: block.k], self._narrow[block.places :][: block.k]
        at, values = memory.numbers(block.elements, block.k), memory.narrow(block.places, block.k)
        there = self._state.column(self._declared.seq_lens)[: self.num_reqs] > 0
        owners = [(self.rows[there], self.generations[there])]
        table.scatter(index, places, at, values, owners)

    def _gathered_ids(self) -> torch.Tensor:
        """The ids of all tokens: those of the relay, and those of the host where it has any.

        A token has an id on one side, and 0 on the other. The whole relay is not read: others may write to theirs.
        """
        declared, block, runtime = self._declared, self._memory.block, self._declared.pages.runtime
        flat: Any = declared.flat
        host: torch.Tensor | None = None
        if block.h or not block.fed:
            host = self._wide[block.ids : block.ids + block.padded]
            if not block.fed:
                return host.to(torch.int32) if "input_ids" in declared.int32 else host
        source = self._wide[block.source : block.source + block.padded]
        ids: torch.Tensor = runtime.launch(flat.index_select, 0, source, reads=(flat, source), name="ids of the step")
        if host is not None:
            runtime.launch(ids.add_, host, reads=(ids, host), writes=(ids,), name="ids of the host")
        return ids

    def _token_arrays(self) -> dict[str, torch.Tensor]:
        return {name: self._upload.view(self._places[name]) for name in self._further.token_arrays}

    def _correct_lengths(self, inputs: ForwardInputs) -> None:
        """The true lengths from the relay, where the host has bounds."""
        declared, plan = self._declared, self.plan
        relay = declared.relay
        if declared.lengths is None or relay is None:
            problem = f"{self!r} has bounds of the lengths, and the planner no field of true ones"
            raise ContractError(problem, "upper_bound", "name the field: StepPlanner(..., lengths=...)")
        n = self.num_reqs
        most = declared.places.size if declared.has_ids else int(plan.query_lens[plan.relay_rows[0]])
        slots = self._slots_of(0, n) if plan.direct else self._crossed("relay_slots")
        lengths = relay.selected(declared.lengths, slots)
        extras, table = self._extras_of_bounds(), declared.pages.req_to_token
        inputs.correct_lengths(extras, lengths, slots, most, table, put_in_of(plan, most))

    def _extras_of_bounds(self) -> Extras:
        names = [name for name in self._places if name.startswith("relay_")]
        places = {name: self._places[name] for name in names}
        return Extras(self._declared.pages.runtime, self._upload, places, dict.fromkeys(names))

    @property
    def sampled_slots(self) -> Slots:
        """Handles of the requests that sample, and of padded rows where all do."""
        return self._sampled.handles(padded=True)

    def tensor(self, name: str) -> torch.Tensor | None:
        """An array of the forward, by its name in `ForwardInputs`."""
        if name in self._places:
            return self._upload.view(self._places[name])  # the forward may write into it
        block, n = self._memory.block, self._memory.block.n
        if name == "positions":
            return self._wide[block.positions : block.positions + block.padded]
        if name == "slot_mapping":
            return self._wide[block.mapping : block.mapping + block.padded]
        if name == "last_token_indices":
            return self._wide[block.last : block.last + (n if block.s == self.num_reqs else block.s)]
        if name == "query_start_loc":
            return self._narrow[block.starts : block.starts + n + 1]
        return self._narrow[block.kv_lens : block.kv_lens + n] if name == "kv_lens" else None

    # What it found

    def publish(self, **values: object) -> None:
        """Makes the forward's values known to the next step, and sends the results to the host.

        Args:
            **values: field -> value, one entry for each request that samples; see `FutureMap.publish`, and `prefetch`.
        """
        relay = self._declared.relay
        if relay is None:
            raise ArgumentError("StepPlanner: publish without a relay", None, "declare the planner with one: relay=...")
        declared, sampled = self._declared, self._sampled
        slots, runtime = declared.pages.slots, declared.pages.runtime
        slots.transaction.enter("publish")
        if runtime.capturing:
            runtime.refuse_capture("publishing what a step has found")
        slots.check_rows(sampled.rows, sampled.generations, "publish")
        self._results = relay.publish_rows(
            sampled.rows,
            sampled.generations,
            sampled.num_rows,
            runtime.current_stream,
            sampled.index,
            values,
            declared.results,
            sampled.handles,
        )

    @property
    def results(self) -> "Prefetched":
        """The fields that the planner was declared with, on their way to the host; reading one waits for the copy.

        Raises:
            ArgumentError: nothing was published yet, or no results were declared.
        """
        if self._results is None:
            remedy = "publish first, and name the fields that the host reads: StepPlanner(..., results=...)"
            raise ArgumentError(f"{self!r} has no results", self, remedy)
        return self._results
