"""`ForwardInputs`: the device tensors that one forward takes, as its own view of the batch.

The host's plan was uploaded in the step's copy. At forward entry, on the forward's stream, the relay adds the values
that only the last forward knew: ids, and true lengths where the host has bounds. The view belongs to the forward, which
may change it; the two sides of the batch stay what they are.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import Array, Ints, arange_per_row, put_rows, select_rows
from batchstate._upload import Extras
from batchstate.errors import ArgumentError
from batchstate.forward.plan import NO_END, ForwardPlan, handles_of
from batchstate.mirror import DeviceSide, Slots, pools, rows_of
from batchstate.runtime.base import Runtime
from batchstate.runtime.memory import dtype_of_bits
from batchstate.tables import Table
from batchstate.violations import Where

Gather = Callable[..., torch.Tensor]
"""Gathers entries of relay fields, by names and handles; of several, end to end for each request, [n, width]."""

PutIn = tuple[torch.Tensor, torch.Tensor]
"""Indices of the numbers that requests put in, of as many for each, int64[tokens], and counts, int64[requests]."""


class InputSource(Protocol):
    """Where the tensors of a forward are, safe on its stream: a planned step, or an upload."""

    @property
    def plan(self) -> ForwardPlan:
        """The plan of the forward."""

    @property
    def slots(self) -> torch.Tensor:
        """The slot of each row, int64[rows]."""

    @property
    def sampled_slots(self) -> Slots:
        """The slots of the requests that sample."""

    @property
    def query_lens(self) -> Ints:
        """Tokens that each request puts in, int64[num_reqs]."""

    @property
    def max_kv_len(self) -> int:
        """The most tokens that a request has, or a bound."""


@final
@attrs.frozen(eq=False)
class Uploaded:
    """The slots of a plan that was uploaded by itself."""

    plan: ForwardPlan
    slots: torch.Tensor
    sampled_slots: Slots
    query_lens: Ints

    @property
    def max_kv_len(self) -> int:
        """That of the plan."""
        return self.plan.max_kv_len


@final
class ForwardInputs:
    """One forward's inputs on the device: of `PlannedStep.inputs`, `FutureMap.resolve_forward_inputs`, or `of`.

    Views of the step's copy. The plan says which of the int64 tensors are int32.

    Attributes:
        positions: int64[num_padded_tokens].
        query_start_loc: int32[num_rows + 1], where the tokens of each request begin (`cu_seqlens_q`, flashinfer's
            `qo_indptr`).
        kv_lens: int32[num_rows], tokens of each request with those of this step (`seqused_k`, `cache_seqlens`).
        last_token_indices: int64[s], the last token of each request that samples; int64[num_rows] where all do.
        slot_mapping: int64[num_padded_tokens], where the KV of each token goes, or None without pages.
        kv_start_loc, block_table: `cu_seqlens_k` int32[num_rows + 1] and int32[num_rows, most pages of a request], of
            the layout `flash_attention`, for its variable-length functions; else None.
        kv_page_indptr, kv_page_indices, kv_last_page_len: flashinfer's `paged_kv_*` int32[num_rows + 1], [pages] and
            [num_rows], of the layout `flashinfer`, for `plan` of its wrappers; else None.
        arrays: name -> [num_padded_tokens, ...], the plan's token arrays.
    """

    kv_start_loc: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    kv_page_indptr: torch.Tensor | None = None
    kv_page_indices: torch.Tensor | None = None
    kv_last_page_len: torch.Tensor | None = None
    arrays: Mapping[str, torch.Tensor] = MappingProxyType({})

    def __init__(
        self,
        source: InputSource,
        ids: torch.Tensor | None,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        kv_lens: torch.Tensor,
        last_token_indices: torch.Tensor,
        slot_mapping: torch.Tensor | None,
    ) -> None:
        """For the library."""
        self._source, self._ids = source, ids
        self.positions, self.query_start_loc, self.kv_lens = positions, query_start_loc, kv_lens
        self.last_token_indices, self.slot_mapping = last_token_indices, slot_mapping

    def put(self, tensors: Mapping[str, torch.Tensor], token_arrays: Mapping[str, Array]) -> None:
        """For the library: further arrays of the plan, and others in place of those that are there."""
        for name in ARRAYS.intersection(tensors):
            setattr(self, name, tensors[name])
        arrays = {name: (tensors[name], dtype_of_bits(array.dtype)) for name, array in token_arrays.items()}
        self.arrays = {name: tensor if of is None else tensor.view(of) for name, (tensor, of) in arrays.items()}

    def __repr__(self) -> str:
        return f"ForwardInputs({self.plan!r})"

    @property
    def plan(self) -> ForwardPlan:
        """The host's part. A planned step makes it when it is first asked for, in about the time of a step."""
        return self._source.plan

    @property
    def sampled_slots(self) -> Slots:
        """Handles of the requests that sample, for `publish`."""
        return self._source.sampled_slots

    @property
    def slots(self) -> torch.Tensor:
        """int64[num_rows]; 0 for padded rows."""
        return self._source.slots

    @property
    def query_lens(self) -> Ints:
        """Tokens that each request puts in, int64[num_reqs], on the host."""
        return self._source.query_lens

    @property
    def max_query_len(self) -> int:
        """The most of these (`max_seqlen_q`)."""
        return int(self.query_lens.max(initial=0))

    @property
    def max_kv_len(self) -> int:
        """The most tokens that a request has with those of this step, or a bound (`max_seqlen_k`)."""
        return self._source.max_kv_len

    @property
    def input_ids(self) -> torch.Tensor:
        """int64[num_padded_tokens].

        Raises:
            ArgumentError: the forward has no ids.
        """
        if self._ids is None:
            remedy = "plan with has_ids=True where the forward takes ids; a later rank takes hidden states"
            raise ArgumentError(f"input_ids of {self.plan!r}, which has none", self.plan, remedy)
        return self._ids

    @classmethod
    def of(cls, plan: ForwardPlan, uploaded: Extras) -> "ForwardInputs":
        """The inputs of a forward of which the host knows everything, at its entry, on its stream.

        Args:
            plan: one in which no request waits for ids or lengths of the step before. It is used once.
            uploaded: returned by `batch.upload(extras=plan.extras)`, or by `plan.upload()`.

        Raises as `FutureMap.resolve_forward_inputs`; ArgumentError: the relay has ids or lengths of a request.
        """
        plan.slots.runtime.check_owner("ForwardInputs.of")
        if len(plan.relay_rows):
            remedy = "pass ids of all requests to the plan, or call `FutureMap.resolve_forward_inputs`"
            raise ArgumentError(f"ForwardInputs of {plan!r}: row {plan.relay_rows[0]} waits for a relay", plan, remedy)
        check_uploaded(plan, uploaded, "ForwardInputs")
        inputs = cls.resolve(plan, uploaded)
        plan.use()
        return inputs

    @classmethod
    def resolve(
        cls,
        plan: ForwardPlan,
        uploaded: Extras,
        gather: Gather | None = None,
        ids: Sequence[str] = (),
        width: int = 0,
        lengths: str | None = None,
        req_to_token: Table | None = None,
    ) -> "ForwardInputs":
        """For the library: the inputs of a plan that was checked, on the current stream.

        `gather` has up to `width` entries of each request that waits for them: its `ids`, and its `lengths`.
        """
        plan.check_unused()
        runtime, slots = plan.slots.runtime, plan.slots
        if uploaded.slots is not None and np.array_equal(uploaded.slots[0], slots.np):
            slots = _with_device(slots, uploaded.slots[1])  # at fixed addresses
        sampled = slots
        if plan.sampled_slots is not plan.slots:
            sampled = _with_device(plan.sampled_slots, uploaded.side("sample_slots"))
        arrays: dict[str, torch.Tensor] = {}
        put_in = None
        if gather is not None and plan.has_ids:
            queries = plan.query_lens[plan.relay_rows]  # and of padded rows where all put in the same
            put_in = put_in_of(runtime, np.full(plan.num_rows, queries[0]) if plan.direct else queries, width)
        if plan.deferred and plan.token_arrays:
            deferred = runtime.upload(list(plan.token_arrays.values()))
            arrays = {name: deferred.view(i) for i, name in enumerate(plan.token_arrays)}
        elif plan.token_arrays:
            arrays = {name: uploaded[name] for name in plan.token_arrays}
        tensors = uploaded.several([name for name in plan.extras if name not in plan.token_arrays])
        known = arrays.pop("input_ids", tensors.get("input_ids"))
        relayed = slots
        if gather is not None and not plan.direct:
            relayed = _with_device(plan.relayed, uploaded.side("relay_slots"))
        if gather is not None and plan.has_ids:
            taken = gather(ids, relayed).reshape(-1)
            if put_in is not None:
                taken = _some(runtime.launch, taken, put_in)
            if known is None:
                known = taken
            else:
                _put(runtime.launch, known, tensors["relay_tokens"], taken, "ids from the relay")
        positions, starts, kv_lens, last = (tensors[name] for name in _ALWAYS)
        source = Uploaded(plan, slots.device, sampled, plan.query_lens)
        mapping = tensors.get("slot_mapping")
        inputs = cls(source, known if plan.has_ids else None, positions, starts, kv_lens, last, mapping)
        inputs.put({**tensors, **arrays}, {name: plan.token_arrays[name] for name in arrays})
        if gather is not None and plan.bounded and lengths is not None:
            true = gather((lengths,), relayed)
            memory = None if mapping is None or req_to_token is None else req_to_token.device_for(plan.relayed)
            inputs.correct_lengths(runtime, uploaded, true, relayed.device, width, memory, put_in, direct=plan.direct)
        if levels.full:
            inputs.check(runtime)
        rows = slots.np[: plan.num_reqs]
        if plan.pages is not None:
            ends = plan.kv_ends
            if plan.bounded:
                ends = np.minimum(ends, plan.pages.committed_lengths[rows])
            plan.pages.writes.launched(rows, ends, plan.kv_starts)
            guessed = plan.relay_rows[plan.query_lens[plan.relay_rows] > 1]
            if guessed.size and not plan.bounded:
                plan.pages.guess(rows[guessed], plan.kv_starts[guessed] + 1)
        pool = pools.get(plan.slots.pool_id)
        if pool is not None and not runtime.capturing:
            launches = pool.transaction.launches
            launches.used[rows] = launches.begin(runtime.current_stream, uploaded.copied)
        return inputs

    def check(self, runtime: Runtime) -> None:
        """Nothing was written since it was sent, and the token table agrees with the pages.

        Also no id is a placeholder, and the KV of each token goes to where its position lies. Reads device memory.
        """
        plan = self.plan
        if runtime.checks_suspended():
            return
        corrected = _CORRECTED if plan.bounded else ("input_ids",)  # the others are as they were sent
        for name, sent in plan.extras.items():
            ours = name in ARRAYS and name not in corrected
            tensor = getattr(self, name) if ours else None
            if tensor is not None:
                device = runtime.inspect(tensor)
                invariants.mirror_equal(sent.astype(device.dtype), device, **self._where(name))
        self._check_locations(runtime)
        if plan.pages is not None:
            plan.pages.check_kv("resolve_forward_inputs")
        if plan.pages is not None and self.slot_mapping is not None and plan.num_tokens:
            positions = runtime.inspect(self.positions)[: plan.num_tokens].astype(np.int64)
            mapping = runtime.inspect(self.slot_mapping)[: plan.num_tokens].astype(np.int64)
            invariants.mirror_equal(plan.locations_at(positions), mapping, **self._where("slot_mapping"))
        for name, array in self.arrays.items():
            invariants.mirror_equal(plan.token_arrays[name], rows_of(runtime, array), **self._where(name))
        if self._ids is not None:
            ids = runtime.inspect(self._ids)
            invariants.sentinel_escaped(ids, **self._where("input_ids"))
            if plan.prompt_ids is not None:
                wanted, fed = plan.prompt_ids.copy(), plan.relay_tokens()
                wanted[fed] = ids[fed]
                invariants.mirror_equal(wanted, ids, **self._where("input_ids"))

    def _where(self, column: str) -> Where:
        step = self.plan.slots.runtime.step
        return {"object": self.plan, "operation": "resolve_forward_inputs", "column": column, "step": step}

    def correct_lengths(
        self,
        runtime: Runtime,
        uploaded: Extras,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        width: int,
        table: torch.Tensor | None,
        put_in: PutIn | None,
        *,
        direct: bool,
    ) -> None:
        """For the library: sets positions, KV lengths and slot mapping of requests of which the host knows a bound.

        `lengths` are those before this step; `direct`: the requests are all rows, and put in as many tokens each.
        Changes tensors that were uploaded for this forward alone.
        """
        launch, mapping = runtime.launch, self.slot_mapping
        if mapping is not None and table is None:
            remedy = "give the PagePool its token table: req_to_token=..."
            raise ArgumentError(f"{self.plan!r} has bounds of the lengths, and no token table", self.plan, remedy)
        if levels.full:
            self._check_bounds(lengths)
        positions, dtype = lengths, self.positions.dtype
        if width > 1 or lengths.dtype != dtype:
            positions = launch(_positions, lengths, width, dtype, reads=(lengths,), name="true positions", operations=2)
        true = {"positions": positions}
        if mapping is not None and table is not None:
            names = "relay_kv_offset", "relay_kv_window"
            moved = [uploaded[name] if name in uploaded else None for name in names]  # noqa: SIM401 - a costly KeyError
            reads = (table, positions, slots, *(tensor for tensor in moved if tensor is not None))
            arguments = (table, slots, positions, width, mapping.dtype, *moved, put_in is not None)
            true["slot_mapping"] = launch(_looked_up, *arguments, reads=reads, name="true slot mapping", operations=2)
        added: torch.Tensor | int = width
        if put_in is not None:
            added, true = put_in[1], {name: _some(launch, numbers, put_in) for name, numbers in true.items()}
        lens = self.kv_lens if direct else torch.empty_like(lengths, dtype=self.kv_lens.dtype)
        launch(torch.add, lengths, added, out=lens, reads=(lengths,), writes=(lens,), name="true KV lengths")
        if direct:  # all rows and nothing else: the true ones replace what was planned
            for name, numbers in true.items():
                setattr(self, name, numbers)
        else:
            tokens = uploaded["relay_tokens"]
            _put(launch, self.kv_lens, uploaded["relay_rows"], lens, "correct bounds")
            for name, numbers in true.items():
                _put(launch, getattr(self, name), tokens, numbers, "correct bounds")
        if self.kv_start_loc is not None:
            starts, lens = self.kv_start_loc, self.kv_lens
            launch(_ends, starts, lens, reads=(lens,), writes=(starts,), name="true KV starts")

    def _check_locations(self, runtime: Runtime) -> None:
        """The token table agrees with the pages about each token, and about pages that begin: all entries crossed."""
        plan, pages = self.plan, self.plan.pages
        if pages is None or pages.req_to_token is None or not plan.num_reqs:
            return
        table, size = pages.req_to_token, pages.page_size
        ends = plan.kv_ends
        there = ends.nonzero()[0]  # one that waits for its first token has no row
        running = handles_of(plan.slots, there)
        index = self.slots[: plan.num_reqs] if there.size == plan.num_reqs else running.device
        rows = table.device_for(running).index_select(0, index)
        begun = (ends - 1) % size < ends - plan.kv_starts
        if plan.kv_window is not None:  # the host tier writes row by row
            begun &= plan.kv_window == NO_END
        ends = np.where(begun, -(-ends // size) * size, ends)
        positions = np.arange(min(int(ends.max(initial=0)), table.shape[1]))
        written = np.zeros((plan.num_reqs, positions.size), dtype=np.int64)
        written[there] = runtime.inspect(rows)[:, : positions.size]
        held = pages.page_table[plan.slots.np[: plan.num_reqs]].astype(np.int64)
        expected = held[:, positions // size] * size + positions % size
        first = pages.first_positions(plan.slots.split([plan.num_reqs, len(plan.slots) - plan.num_reqs])[0])
        checked = (positions < ends[:, None]) & (positions >= first[:, None])
        where: Where = {**self._where("tokens of the pages"), "object": table}
        invariants.mirror_equal(np.where(checked, expected, 0), np.where(checked, written, 0), **where)

    def _check_bounds(self, lengths: torch.Tensor) -> None:
        """No length exceeds its bound, by which pages were allocated; the column's device side has the true ones."""
        plan, runtime = self.plan, self.plan.slots.runtime
        if runtime.checks_suspended():
            return
        rows, where = plan.relay_rows, self._where("kv_lens")
        true = runtime.inspect(lengths)[: rows.size].astype(np.int64) + plan.query_lens[rows]
        invariants.mirror_bound(plan.seq_lens[rows], true, **where)
        if plan.bounds is not None and not plan.bounds.open_windows:
            column = runtime.inspect(plan.bounds.device)
            invariants.mirror_equal(column[rows].astype(true.dtype), true, **where)


_ALWAYS = "positions", "query_start_loc", "kv_lens", "last_token_indices"
ARRAYS = frozenset(
    {
        *("positions", "query_start_loc", "kv_lens", "last_token_indices", "slot_mapping", "kv_start_loc"),
        *("block_table", "kv_page_indptr", "kv_page_indices", "kv_last_page_len"),
    }
)

_CORRECTED = ("input_ids", "positions", "kv_lens", "slot_mapping", "kv_start_loc")
"""Tensors that the device sets right where the host knows bounds; ids of requests come from the relay in any case."""


def check_uploaded(plan: ForwardPlan, uploaded: Extras, subject: str) -> None:
    """Refuses the upload of another plan or of other rows, and a plan whose pages have changed since."""
    plan.check(uploaded.row_set, "resolve_forward_inputs")
    missing = sorted(name for name, array in plan.extras.items() if uploaded.arrays.get(name) is not array)
    if missing:
        problem = f"{subject}: {', '.join(missing)} of {plan!r} were not uploaded with this batch"
        raise ArgumentError(problem, missing, "pass what `batch.upload(extras=plan.extras)` returned for this plan")


def put_in_of(runtime: Runtime, queries: Ints, width: int) -> PutIn | None:
    """Indices and counts of the numbers that requests put in, `width` at most; None where each puts in all. A copy."""
    if not np.count_nonzero(queries != width):
        return None
    index = arange_per_row(np.arange(queries.size) * width, queries)
    packed = runtime.upload([index, queries])
    return packed.view(0), packed.view(1)


def _with_device(handles: Slots, side: DeviceSide) -> Slots:
    """The same handles with another device side."""
    return handles._derived("inputs", handles._host_side(), side, handles._row_set)


def _some(launch: Gather, numbers: torch.Tensor, put_in: PutIn) -> torch.Tensor:
    return launch(select_rows, numbers, put_in[0], reads=(numbers, put_in[0]), name="ids put in")


def _put(launch: Gather, target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, name: str) -> None:
    launch(put_rows, target, rows, values, reads=(rows, values), writes=(target,), name=name)


def end_to_end(parts: list[torch.Tensor]) -> torch.Tensor:
    """Values [n] and [n, k] of each request, one behind the other, [n, width]. One kernel."""
    return torch.cat([part.reshape(part.shape[0], -1) for part in parts], dim=1)


def _positions(lengths: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """dtype[n * width]: the positions of the next `width` tokens of each request."""
    return (lengths[:, None] + torch.arange(width, device=lengths.device)).reshape(-1).to(dtype)


def _looked_up(
    table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    width: int,
    dtype: torch.dtype,
    offset: torch.Tensor | None,
    window: torch.Tensor | None,
    fewer: bool,
) -> torch.Tensor:
    """dtype[n * width]: the table's element for each position, `width` per request, as by `ForwardPlan.locations_at`.

    With `fewer` a request may put in fewer, and the others lie anywhere in its row.
    """
    columns = positions.view(-1, width)
    if offset is not None:
        columns = columns + offset[:, None]
    if window is not None:
        columns = columns % window[:, None]
    if fewer:
        columns = columns.clamp(max=table.shape[1] - 1)
    return table[slots[:, None], columns].reshape(-1).to(dtype)


def _ends(starts: torch.Tensor, lengths: torch.Tensor) -> None:
    """`starts[1:]` = running sums of `lengths`, in place."""
    torch.cumsum(lengths, 0, dtype=starts.dtype, out=starts[1:])
