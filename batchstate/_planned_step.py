"""`PlannedStep`, what `StepPlanner` makes; a decode step; its tokens and its copy; and what stays from step to step."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import Array, amounts, arange_per_row
from batchstate._origin import DerivedArrays, Origin, RowSet
from batchstate._relay import PublishedRows
from batchstate._rows import Layout, RowState
from batchstate._upload import Extras
from batchstate.batch import Batch
from batchstate.errors import ArgumentError
from batchstate.forward.inputs import ForwardInputs
from batchstate.forward.plan import STAND_IN, ForwardPlan, rows_that_sample
from batchstate.forward.token_array import TokenArray
from batchstate.invariants import times_checked
from batchstate.kv.pages import PagePool
from batchstate.mirror import MirroredTensor, Slots
from batchstate.nvtx import ranges
from batchstate.runtime.base import Runtime, Stream
from batchstate.runtime.memory import ALIGNMENT, PackedUpload, Place, ReadyTensor, StagingBlock
from batchstate.violations import Code, Where

if TYPE_CHECKING:
    from batchstate.future_map import FutureMap, Prefetched

Ints = npt.NDArray[np.int64]

Written = tuple[tuple[Ints, Ints], Ints, Ints]
"""Rows of a table and their owners' generations, and elements of the flat table with their values."""

OPERATION = "plan"
ZERO, ONE = np.array(0), np.array(1)  # numpy takes as long to convert one number as to add 100 of them

_DERIVED_STALE, _CONSUMED = Code.DERIVED_STALE, Code.FUTURE_CONSUMED

MOST_LAYOUTS = 256
"""Layouts that a planner keeps, by number of requests."""

INT64, INT32 = np.dtype(np.int64), np.dtype(np.int32)


def pitch(n: int, dtype: "np.dtype[Any]") -> int:
    """Elements from one row of `n` to the next: each begins at a multiple of `ALIGNMENT`."""
    return n + -n * dtype.itemsize % ALIGNMENT // dtype.itemsize


@final
class StepLayout:
    """Places and views for the steps of `n` requests: of the columns, and of the arrays beside them in a decode step.

    Attributes:
        places: of the columns in the copy, one for each array of the batch's `Layout`.
        num_places: how many.
        columns_nbytes: of these.
        nbytes: of the copy of a decode step.
        ones, everyone: int64[n], 1 for each, and 0 to n - 1.
        query_start_loc, last_token_indices: on the device, int32[n + 1] and int64[n].
    """

    def __init__(self, n: int, layout: Layout, query_start_loc: torch.Tensor, last_token_indices: torch.Tensor) -> None:
        self._n = n
        self.ones, self.everyone = np.ones(n, dtype=np.int64), np.arange(n)
        for shared in (self.ones, self.everyone):  # by all steps of so many requests, whose plans hand them out
            shared.setflags(write=False)
        self.query_start_loc, self.last_token_indices = query_start_loc, last_token_indices
        self.places: list[Place] = []
        size = 0
        for pad in layout.pads:
            shape = (len(pad), pitch(n, pad.dtype)) if pad.ndim == 2 else (1, n, *pad.shape[2:])
            self.places.append((size, pad.dtype, shape))
            size += -(-int(np.prod(shape)) * pad.itemsize // ALIGNMENT) * ALIGNMENT
        self.num_places, self.columns_nbytes = len(self.places), size
        self._beside: list[slice] = []  # of positions and slot mapping, int64, and KV lengths, int32, in elements
        for dtype in (INT64, INT64, INT32):
            first = size // dtype.itemsize
            self._beside.append(slice(first, first + n))
            size += pitch(n, dtype) * dtype.itemsize
        self.nbytes = size
        self._views: dict[StagingBlock, list[Array]] = {}

    def send(self, runtime: Runtime, groups: Sequence[Array], beside: Sequence[Array]) -> PackedUpload:
        block = runtime.staging_block(self.nbytes)
        self.fill(block, groups, beside)
        return runtime.send(block, self.nbytes, self.places)

    def fill(self, block: StagingBlock, groups: Sequence[Array], beside: Sequence[Array]) -> None:
        """Writes the columns, and positions, slot mapping and KV lengths beside them or nothing, into `block`."""
        views = self._views.get(block)
        if views is None:
            memory = block.bytes
            views = [np.ndarray(shape, dtype, memory, start)[:, : self._n] for start, dtype, shape in self.places]
            (positions, mapping, lens), wide = self._beside, memory.view(INT64)
            views += (wide[positions], wide[mapping], memory.view(INT32)[lens])
            self._views[block] = views
        for view, values in zip(views, (*groups, *beside), strict=False):
            view[...] = values

    def beside(self, upload: PackedUpload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions, slot mapping and KV lengths on the device, [n] each. A write into one is none into a column."""
        memory = upload.buffer.data  # which begins where its storage does
        wide, (positions, mapping, lens) = memory.view(torch.int64), self._beside
        return wide[positions], wide[mapping], memory.view(torch.int32)[lens]


_PLANNER, _IDS = "StepPlanner", "input_ids"

NAMES = {"positions", "query_start_loc", "kv_lens", "slot_mapping", "last_token_indices", _IDS}
NAMES |= {"sample_slots", "relay_slots", "relay_tokens"}
"""Names of the arrays of `StepTokens.arrays`."""


def each_puts_in_one(n: int, query_lens: object, prompt_ids: Sequence[object] | None, samples: object) -> bool:
    """Whether each of `n` requests puts in the one token that the relay has for it, and samples."""
    if type(query_lens) is int:
        if query_lens != 1:
            return False
    elif (
        not isinstance(query_lens, np.ndarray)
        or query_lens.dtype.kind not in "iu"
        or query_lens.shape != (n,)
        or np.count_nonzero(query_lens != 1)
    ):
        return False
    if prompt_ids is not None and (len(prompt_ids) != n or [1 for ids in prompt_ids if ids is not None]):
        return False
    return samples is None or (
        isinstance(samples, np.ndarray)
        and samples.dtype == np.bool_
        and samples.shape == (n,)
        and np.count_nonzero(samples) == n
    )


@final
@attrs.frozen(eq=False)
class StepTokens:
    """The tokens of a step, of n requests.

    Attributes:
        counts: int64[n], tokens that each puts in.
        starts: int64[n + 1], where those of each begin, and where the last end.
        relay_rows: int64[r], requests whose token the relay has.
        sample_rows: int64[s], requests that sample.
        ids: int64[t], those that the host knows, 0 elsewhere; None where all come from the relay, or none are taken.
        from_host: whether the host knows any.
    """

    counts: Ints
    starts: Ints
    relay_rows: Ints
    sample_rows: Ints
    ids: Array | None
    from_host: bool

    @classmethod
    def of(
        cls, n: int, query_lens: object, prompt_ids: Sequence[object] | None, samples: object, has_ids: bool, fed: int
    ) -> "StepTokens | None":
        """From the arguments of a plan; None where only the parts serve them, or refuse them.

        `n` are the requests, and `fed` the tokens that the relay has of each; the others, and errors, are as for
        `ForwardPlan.of`.
        """
        if isinstance(query_lens, MirroredTensor):
            return None
        counts = amounts(query_lens, n, f"{_PLANNER}: query_lens")
        if not counts.ndim:
            counts = counts.repeat(n)
        if 1 in (counts < 0).tobytes():
            return None
        prompts = None if prompt_ids is None else TokenArray(prompt_ids, torch.int64, fill=STAND_IN, non_negative=True)
        rows = [] if prompts is None else prompts.values(counts, n, f"{_PLANNER}: prompt_ids")
        relayed = counts > 0
        if prompts is not None:
            relayed &= np.array([ids is None for ids in rows], dtype=np.bool_)
        relay_rows = relayed.nonzero()[0] if has_ids else np.zeros(0, dtype=np.int64)
        if 1 in (counts[relay_rows] != fed).tobytes():
            return None
        sample_rows = rows_that_sample(samples, counts, n)
        starts = np.zeros(n + 1, dtype=np.int64)
        counts.cumsum(out=starts[1:])
        ids, from_host = None, False
        if has_ids and relay_rows.size < n:
            from_host = int(starts[-1]) > relay_rows.size  # these put in one token each
            if prompts is not None and from_host:
                ids = prompts.laid_out(rows, starts, int(starts[-1]))
                ids[starts[relay_rows]] = 0
                prompts.check(ids, {"object": _PLANNER, "operation": "plan", "column": _IDS})
            else:
                ids = np.zeros(int(starts[-1]), dtype=np.int64)
        return cls(counts, starts, relay_rows, sample_rows, ids, from_host)

    def arrays(self, rows: Ints, positions: Ints, locations: Ints, lens: Ints) -> dict[str, Array]:
        """Inputs of the forward by name, from the slots int64[n], the places of tokens int64[t], and all lengths."""
        starts, sampling, relayed = self.starts, self.sample_rows, self.relay_rows
        arrays: dict[str, Array] = {
            "positions": positions,
            "query_start_loc": starts.astype(np.int32),
            "kv_lens": lens.astype(np.int32),
            "slot_mapping": locations,
        }
        last = starts[1:] - 1
        if sampling.size == rows.size:
            arrays["last_token_indices"] = last
        else:
            arrays["last_token_indices"], arrays["sample_slots"] = last[sampling], rows[sampling]
        if self.ids is not None:
            arrays[_IDS] = self.ids
            if relayed.size:
                arrays["relay_slots"], arrays["relay_tokens"] = rows[relayed], starts[relayed]
        return arrays

    def plan(
        self,
        slots: Slots,
        lens: Ints,
        arrays: dict[str, Array],
        origin: Origin,
        declared: "Declared",
        shares: int,
        *,
        used: bool = False,
    ) -> ForwardPlan:
        """The plan of the forward; `arrays` are those of `arrays`, and `slots` have crossed with them."""
        for shared in (lens, arrays["slot_mapping"]):  # with the batch, and with the step after this one
            shared.setflags(write=False)
        t = int(self.starts[-1])
        return ForwardPlan(
            slots=slots,
            num_tokens=t,
            num_padded_tokens=t,
            query_lens=self.counts,
            seq_lens=lens,
            bounds=None,
            relay_rows=self.relay_rows,
            sample_rows=self.sample_rows,
            extras=DerivedArrays(arrays, origin),
            origin=origin,
            pages=declared.pages,
            has_ids=declared.has_ids,
            token_arrays={_IDS: arrays[_IDS]} if self.from_host else {},
            deferred=False,
            reach=declared.window,
            shares=shares,
            used=used,
        )


@final
@attrs.frozen(eq=False)
class Declared:
    """The part of a planner's declaration that its steps need; see `StepPlanner`."""

    pages: PagePool
    relay: "FutureMap | None"
    ids: tuple[str, ...]
    lengths: str | None
    results: tuple[str, ...]
    has_ids: bool
    window: int | None

    def published_rows(self, rows: Ints, generations: Ints) -> PublishedRows | None:
        """The record of the ids of some requests in the relay; None without a relay."""
        return None if self.relay is None else self.relay.published_rows(self.ids[0], rows, generations)

    def publish(
        self, slots: Slots, values: Mapping[str, object], kept: PublishedRows | None = None
    ) -> "Prefetched | None":
        """Publishes, and sends the results to the host; `kept` is the record of the ids of these requests."""
        if self.relay is None:
            raise ArgumentError("StepPlanner: publish without a relay", None, "declare the planner with one: relay=...")
        value = values[self.ids[0]] if kept is not None and [*values] == [self.ids[0]] else None
        if (
            kept is not None
            and type(value) is torch.Tensor
            and value.dtype is torch.int64
            and value.shape == kept.rows.shape
            and value.device == self.relay.runtime.device
            and value.layout is torch.strided
            and not value.requires_grad
        ):
            return self.relay.publish_again(kept, self.ids[0], value, bool(self.results))
        self.relay.publish(slots, **values)
        return self.relay.prefetch(slots, *self.results) if self.results else None


@ranges("inputs", "publish")
class PlannedStep:
    """A step that was planned and uploaded. Made by `StepPlanner.plan`.

    Attributes:
        batch: of this step: the lengths count the tokens that each request puts in.
        sent: the same as it went to the device, with padded rows if there are any.
        extras: what was uploaded beside the columns, by name: arrays of the engine, and those of the plan if the step
            is not planned as one piece.
    """

    __slots__ = ("_checked", "_declared", "_plan", "_results", "_sampled", "batch", "extras", "sent")

    def __init__(
        self, declared: Declared, batch: Batch, sent: Batch, plan: ForwardPlan, extras: Extras, *, checked: bool = False
    ) -> None:
        self._checked = checked  # then only what may have changed since the plan is checked once more
        self.batch, self.sent, self.extras = batch, sent, extras
        self._declared = declared
        self._plan: ForwardPlan | None = plan
        self._sampled = plan.sampled_slots  # from the inputs on with the device side that was uploaded with the step
        self._results: Prefetched | None = None

    def __repr__(self) -> str:
        return f"PlannedStep({self.plan!r})"

    @property
    def plan(self) -> ForwardPlan:
        """The host's part of the inputs."""
        return cast(ForwardPlan, self._plan)

    def inputs(self) -> ForwardInputs:
        """The inputs of the forward, at its entry, on its stream; see `FutureMap.resolve_forward_inputs`.

        In a decode step `slots`, `query_start_loc` and `last_token_indices` are memory that later steps read too.
        """
        declared = self._declared
        if levels.full:
            self.sent._check_unwritten("inputs")
        if declared.relay is None:
            inputs = ForwardInputs.of(self.plan, self.extras)
        elif self._checked:
            inputs = declared.relay.resolve_checked(self.plan, self.extras, declared.ids)
        else:
            inputs = declared.relay.resolve_forward_inputs(
                self.plan,
                self.extras,
                ids=declared.ids if declared.has_ids else (),
                lengths=declared.lengths,
                req_to_token=declared.pages.req_to_token,
            )
        self._sampled = inputs.sampled_slots
        return inputs

    def publish(self, **values: object) -> None:
        """Makes the forward's values known to the next step, and sends the results to the host.

        Args:
            **values: field -> value, one entry for each request that samples; see `FutureMap.publish`, and `prefetch`.
        """
        declared, sampled, kept = self._declared, self._sampled, None
        if self._checked and len(sampled):
            kept = declared.published_rows(sampled.np, sampled.generations)
        if kept is not None:
            kept.live = sampled
        self._results = declared.publish(sampled, values, kept)

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


@final
class StepsInOnePiece:
    """The state that all steps of one planner share which are planned in one piece.

    Attributes:
        requests: those of the last decode step, or None.
        starts, last: where the one token of each request begins, and is; on the device, int32[most + 1], int64[most].
        stream: that may read these: the one that made them, and then the one that has asked last.
        writes: torch's count of writes into them when they were made.
    """

    def __init__(self, runtime: Runtime, most: int) -> None:
        self._runtime = runtime
        self.requests: StepRequests | None = None
        self._most = most
        self._make_constants()

    def _make_constants(self) -> None:
        runtime, n = self._runtime, self._most
        with torch.inference_mode(False):  # else torch would not count what is written into them
            made = [
                runtime.launch(torch.arange, n, dtype=dtype, device=runtime.device, name="StepPlanner: constants")
                for n, dtype in ((n + 1, torch.int32), (n, torch.int64))
            ]
        self.stream, ready = runtime.current_stream, runtime.record()
        self._constants = [ReadyTensor(constant, self.stream, ready, set()) for constant in made]
        self._layouts: dict[int, StepLayout] = {}
        self.starts, self.last = made
        self.writes = self.starts._version + self.last._version

    def layout(self, n: int, columns: Layout) -> StepLayout:
        layout = self._layouts.get(n)
        if layout is None:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[n] = StepLayout(n, columns, self.starts[: n + 1], self.last[:n])
        return layout

    def constants_on(self, stream: Stream) -> None:
        """Makes the constants safe on the current `stream`.

        MIRROR_FOREIGN_WRITE, at `cheap`: a forward wrote into them. They are made anew, and it is reported once.
        """
        if stream is not self.stream:
            for constant in self._constants:
                constant.on_current_stream(self._runtime)
            if not self._runtime.capturing:  # under which nothing is waited for
                self.stream = stream
        if levels.cheap and self.starts._version + self.last._version != self.writes:
            before, now = self.writes, self.starts._version + self.last._version
            self._make_constants()
            self._refuse_write("query_start_loc, last_token_indices", "inputs", before, now)

    def slots_were_written(self, slots: torch.Tensor, operation: str) -> None:
        """MIRROR_FOREIGN_WRITE: a forward wrote into the slots that later steps of the same requests read.

        The next step sends them again.
        """
        self._refuse_write("slots", operation, 0, slots._version)

    def _refuse_write(self, column: str, operation: str, before: int, now: int) -> None:
        self.requests = None
        where: Where = {"object": _PLANNER, "operation": operation, "column": column, "step": self._runtime.step}
        invariants.mirror_foreign_write("device", before, now, **where)


@final
@attrs.define(eq=False)
class StepRequests:
    """The requests of consecutive steps, and the state that stays the same until one joins or leaves.

    Attributes:
        layout: of the copies, and all that follows from the number of requests alone.
        row_set: that of the batch.
        slots: handles; their device side is that of the first of these steps, and they are made when it has crossed.
        rows, generations: their numbers, int64[n].
        held_at: `frees` of the slot pool when they were last found live.
        published: the record of their ids in the relay, if there is one.
        row_width: elements of a row of `req_to_token`.
        first_element: int64[n], where the row of each begins in it, flat.
        launched: state of the batch after the last step that was launched, if all tokens up to it are written.
        steps: taken so far, one behind the other with nothing between.
        state: of the batch after the last of these.
        epoch: of the pages then.
        locations: of the tokens of that step, int64[n]: one further on goes the next token, but where a page begins.
        longest: tokens of the longest before the second of them.
        phases: int64[n], the steps taken before that in which a page begins, less whole pages.
        begins: whether a page begins for any, by phase.
    """

    layout: StepLayout
    row_set: RowSet
    rows: Ints
    generations: Ints
    held_at: int
    published: PublishedRows | None
    row_width: int
    first_element: Ints
    launched: RowState | None = attrs.field(default=None, init=False)
    steps: int = attrs.field(default=0, init=False)
    state: RowState | None = attrs.field(default=None, init=False)
    epoch: int = attrs.field(default=-1, init=False)
    slots: Slots = attrs.field(init=False)
    locations: Ints = attrs.field(init=False)
    longest: int = attrs.field(init=False)
    phases: Ints = attrs.field(init=False)
    begins: list[bool] = attrs.field(init=False)

    def places_of_all(self, pages: PagePool, start: Ints, totals: Ints, counts: Ints) -> tuple[Ints, Ints, Written]:
        """Positions and locations of the next `counts` tokens of each, int64[t], and the writes into the token table.

        `start` are the lengths, `totals` those after.
        """
        self.steps = 0
        positions, locations = pages.further_locations(self.rows, start, totals, OPERATION)
        at = self.first_element.repeat(counts) + positions
        got = counts > 0
        written = pages.whole_pages(at, positions, locations, self.row_width, counts)
        return positions, locations, ((self.rows[got], self.generations[got]), *written)

    def places(self, pages: PagePool, start: Ints, totals: Ints) -> tuple[Ints, Written | None]:
        """Where the next token of each goes, int64[n], and the writes into the token table: pages that begin.

        From the second step on. `start` are the lengths, `totals` those after.
        """
        size, steps = pages.page_size, self.steps
        if steps == 1:
            self.phases = (ONE - start) % size
            self.begins = np.bincount(self.phases, minlength=size).astype(np.bool_).tolist()
            self.longest = int(start.max())
        pages.check_totals(totals, OPERATION, self.longest + steps)
        if pages._references.shared:  # asks of each page who else has it
            locations = pages.next_locations(self.rows, start, OPERATION)
        else:
            locations = self.locations + ONE
        phase = steps % size
        if not self.begins[phase]:
            return locations, None
        begun = (self.phases == phase).nonzero()[0]
        rows, start = self.rows[begun], start[begun]
        locations[begun] = pages.next_locations(rows, start, OPERATION)
        at = self.first_element[begun] + start
        written = self._to_the_page_end(at, start, locations[begun], size, begin=True)
        return locations, ((rows, self.generations[begun]), *written)

    def ended_with(self, state: RowState, pages: PagePool) -> bool:
        """Whether the last step made this state: then the token table has the last page of each to its end."""
        return self.state is state and self.epoch == pages.epochs.last

    def first_places(
        self, pages: PagePool, start: Ints, totals: Ints, arrived: int, whole: bool
    ) -> tuple[Ints, Written | None]:
        """As `places`, in the first step. The last `arrived` are new to the token table, with all their tokens.

        `whole` says whether it has the last page of each of the others to its end; else what is left of it is written.
        """
        pages.check_totals(totals, OPERATION)
        locations = pages.next_locations(self.rows, start, OPERATION)
        stay, size = self.rows.size - arrived, pages.page_size
        written = pages.token_rows(self.rows[stay:], self.row_width) if arrived else None
        start = start[:stay]
        rewritten = (start % size == ZERO).nonzero()[0] if whole else self.layout.everyone[:stay]
        if rewritten.size:
            start = start[rewritten]
            at = self.first_element[rewritten] + start
            more = self._to_the_page_end(at, start, locations[rewritten], size, begin=whole)
            if written is None:
                written = more
            else:
                written = np.concatenate((more[0], written[0])), np.concatenate((more[1], written[1]))
        return locations, None if written is None else ((self.rows, self.generations), *written)

    def _to_the_page_end(self, at: Ints, start: Ints, locations: Ints, size: int, *, begin: bool) -> tuple[Ints, Ints]:
        """Elements of the flat token table and locations, from those of one token each to the end of its page.

        `begin` says that each of these tokens is the first of its page.
        """
        if begin and start.item(start.argmax()) + size <= self.row_width:
            page = np.arange(size)
            return (at[:, None] + page).reshape(-1), (locations[:, None] + page).reshape(-1)
        left = np.minimum(size - start % size, self.row_width - start)
        elements = arange_per_row(at, left)
        return elements, elements + (locations - at).repeat(left)


@final
class DecodeStep(PlannedStep):
    """A decode step that was planned in one piece. Its `ForwardPlan` is made when it is asked for."""

    __slots__ = ("_before", "_changes", "_lens", "_locations", "_requests", "_step", "_steps", "_upload", "_used")

    def __init__(
        self,
        declared: Declared,
        steps: StepsInOnePiece,
        requests: StepRequests,
        before: RowState,
        batch: Batch,
        extras: Extras,
        upload: PackedUpload,
        lens: Ints,
        locations: Ints,
    ) -> None:
        self._declared, self._steps, self._requests, self._upload = declared, steps, requests, upload
        self._before, self.batch, self.sent = before, batch, batch
        self.extras = extras
        self._lens, self._locations = lens, locations
        pages = declared.pages
        self._changes, self._step = (pages.epochs.last, pages.shares.last), batch.runtime.step
        self._plan = self._results = None
        self._used, self._checked, self._sampled = False, True, requests.slots

    @property
    def plan(self) -> ForwardPlan:
        """Made when it is first asked for."""
        if self._plan is None:
            requests, declared, lens = self._requests, self._declared, self._lens
            (changed, shared), everyone = self._changes, requests.layout.everyone
            relayed = everyone if declared.has_ids else everyone[:0]
            tokens = StepTokens(requests.layout.ones, np.arange(lens.size + 1), relayed, everyone, None, False)
            arrays = tokens.arrays(requests.rows, lens - ONE, self._locations, lens)
            origin = Origin(OPERATION, self._step, requests.row_set, declared.pages.epochs, changed)
            self._plan = tokens.plan(requests.slots, lens, arrays, origin, declared, shared, used=self._used)
        return self._plan

    def inputs(self) -> ForwardInputs:
        steps, requests, upload, lens = self._steps, self._requests, self._upload, self._lens
        pages = self._declared.pages
        runtime = pages.runtime
        if levels.full:
            self.sent._check_unwritten("inputs")
        if self._plan is None and not self._used and (pages.epochs.last, pages.shares.last) == self._changes:
            times_checked[_DERIVED_STALE] += levels.cheap
            times_checked[_CONSUMED] += levels.cheap
        else:
            pages.slots.check_rows(requests.rows, requests.generations, "inputs")
            self.plan.check(None, "inputs")
            self.plan.check_unused()
        stream = runtime.current_stream
        if stream is not upload.stream:
            runtime.use_on_current_stream(upload.buffer, upload.stream, upload.ready, synchronised=upload.synchronised)
        if stream is not steps.stream or (levels.cheap and steps.starts._version + steps.last._version != steps.writes):
            steps.constants_on(stream)
        kept, relay, ids = requests.published, self._declared.relay, None
        if kept is None or relay is None:
            slots = requests.slots.device
        else:
            if levels.cheap and kept.counted is not None and kept.counted._version:
                steps.slots_were_written(kept.counted, "inputs")
            ids, slots = relay.gather_again(kept, self._declared.ids[0], stream)
        self._used = True
        if self._plan is not None:
            self._plan.use()
        layout = requests.layout
        positions, mapping, kv_lens = layout.beside(upload)
        inputs = ForwardInputs(
            lambda: self.plan,
            slots,
            requests.slots,
            positions,
            layout.query_start_loc,
            kv_lens,
            layout.last_token_indices,
            mapping,
            ids=ids,
        )
        if levels.full:
            inputs.check(runtime)
        begin = None if requests.launched is self._before else lens - ONE
        requests.launched = self.batch._state if pages.writes.launched(requests.rows, lens, begin, stream) else None
        return inputs

    def publish(self, **values: object) -> None:
        kept = self._requests.published
        if levels.cheap and kept is not None and kept.counted is not None and kept.counted._version:
            self._steps.slots_were_written(kept.counted, "publish")
        self._results = self._declared.publish(self._sampled, values, kept)
