"""`ForwardInputs`: the device tensors that one forward takes, as its own view of the batch.

The host's plan was uploaded in the step's copy. At forward entry, on the forward's stream, the relay adds the values
that only the last forward knew: ids, and true lengths where the host has bounds. The view belongs to the forward, which
may change it; the two sides of the batch stay what they are.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol, final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import put_rows, select_rows
from batchstate._upload import Extras
from batchstate.errors import ArgumentError, ContractError, DeclarationError, ShapeError
from batchstate.forward.plan import NO_END, ForwardPlan, handles_of
from batchstate.mirror import DeviceSide, Slots
from batchstate.runtime.base import Runtime
from batchstate.tables import Table
from batchstate.violations import Where


@final
@attrs.frozen(eq=False)
class Sources:
    """Where a forward's inputs come from besides the plan.

    Attributes:
        runtime: the device.
        gather: takes entries of relay fields; of several, end to end for each request, [n, width].
        ids: fields whose entries end to end are the ids of a request.
        width: tokens of each request that the relay feeds; the most, where the last field is ragged.
        lengths: field with the tokens in KV memory before this step, or None.
        req_to_token: [slot, position] -> token, or None.
        least: the fewest tokens of such a request.
    """

    runtime: Runtime
    gather: Callable[..., torch.Tensor]
    ids: tuple[str, ...]
    width: int
    lengths: str | None
    req_to_token: Table | None
    least: int = 0

    def check(self, plan: ForwardPlan, uploaded: Extras, subject: str) -> None:
        """Refuses a plan that these cannot serve; see `FutureMap.resolve_forward_inputs`."""
        plan.check(uploaded.row_set, "resolve_forward_inputs")
        missing = sorted(name for name, array in plan.extras.items() if uploaded.arrays.get(name) is not array)
        if missing:
            problem = f"{subject}: {', '.join(missing)} of {plan!r} were not uploaded with this batch"
            raise ArgumentError(problem, missing, "pass what `batch.upload(extras=plan.extras)` returned for this plan")
        if plan.has_ids and len(plan.relay_rows) and not self.ids:
            remedy = "name the fields that hold them (ids=...); or pass the ids of all requests to the plan"
            raise DeclarationError(f"{subject}: {plan!r}, and no field for their ids", plan, remedy)
        if not plan.has_ids and self.ids:
            problem = f"{subject}: ids from {', '.join(self.ids)} for {plan!r}, which has none"
            raise DeclarationError(problem, self.ids, "leave `ids` out, or make the plan with has_ids=True")
        queries = plan.query_lens[plan.relay_rows]
        for row in plan.relay_rows[(queries > self.width) | (queries < (self.least or self.width))].tolist():
            query, fields = int(plan.query_lens[row]), ", ".join(self.ids) or self.lengths
            remedy = "pass its ids to the plan, or name the fields that hold them all"
            has = f"{self.least} to {self.width}" if self.least < self.width else f"{self.width}"
            problem = f"{subject}: the request in row {row} puts in {query} tokens, and the relay has {has} for it in"
            raise ShapeError(f"{problem} {fields}", query, remedy)
        if plan.bounded and self.lengths is None:
            remedy = "name the field that was published with the true ones: lengths=..."
            raise ContractError(f"{subject}: {plan!r} has bounds of the lengths", "upper_bound", remedy)
        table, width = self.req_to_token, int(plan.kv_ends.max(initial=0))
        if table is not None and (
            table.dtype.is_floating_point
            or len(table.shape) != 2
            or table.shape[1] < width
            or table.holds not in (None, "location")
        ):
            remedy = "pass the table of locations by slot and position, as wide as a request may be long"
            raise ArgumentError(f"{subject}: {table!r} for requests of up to {width} tokens", table, remedy)
        if plan.bounded and "slot_mapping" in plan.extras and self.req_to_token is None:
            remedy = "pass req_to_token=, from which the device looks up where the KV really goes"
            raise ArgumentError(f"{subject}: the slot mapping of bounded lengths needs a token table", None, remedy)

    def put_in(self, plan: ForwardPlan) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Indices of the numbers that requests put in, of `width` each, int64[tokens], and counts, int64[requests].

        None where each puts in all. Else one copy.
        """
        queries = plan.query_lens[plan.relay_rows]
        if not queries.size or not np.count_nonzero(queries != self.width):
            return None
        if plan.direct:  # padded rows too
            queries = np.full(plan.num_rows, queries[0])
        ends = np.cumsum(queries)
        first = np.arange(queries.size) * self.width - (ends - queries)
        packed = self.runtime.upload([np.arange(ends[-1]) + np.repeat(first, queries), queries])
        return packed.view(0), packed.view(1)


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


@final
@attrs.frozen(eq=False)
class Uploaded:
    """The slots of a plan that was uploaded by itself."""

    plan: ForwardPlan
    slots: torch.Tensor
    sampled_slots: Slots


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
        kv_start_loc, block_table: `cu_seqlens_k` int32[num_rows + 1] and int32[num_rows, m], of the layout
            `flash_attention`; else None.
        kv_page_indptr, kv_page_indices, kv_last_page_len: flashinfer's `paged_kv_*`, of the layout `flashinfer`; else
            None.
        arrays: name -> [num_padded_tokens, ...], the plan's token arrays.
    """

    __slots__ = (
        "_ids",
        "_source",
        "arrays",
        "block_table",
        "kv_last_page_len",
        "kv_lens",
        "kv_page_indices",
        "kv_page_indptr",
        "kv_start_loc",
        "last_token_indices",
        "positions",
        "query_start_loc",
        "slot_mapping",
    )

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
        self.kv_start_loc: torch.Tensor | None = None
        self.block_table: torch.Tensor | None = None
        self.kv_page_indptr: torch.Tensor | None = None
        self.kv_page_indices: torch.Tensor | None = None
        self.kv_last_page_len: torch.Tensor | None = None
        self.arrays: Mapping[str, torch.Tensor] = NO_ARRAYS

    def put(self, tensors: Mapping[str, torch.Tensor], token_arrays: Collection[str]) -> None:
        """For the library: further arrays of the plan, and others in place of those that are there."""
        for name in _ARRAYS.intersection(tensors):
            setattr(self, name, tensors[name])
        self.arrays = {name: tensors[name] for name in token_arrays}

    def __repr__(self) -> str:
        return f"ForwardInputs({self.plan!r})"

    @property
    def plan(self) -> ForwardPlan:
        """The host's part: it says what the host knows of the forward."""
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
        """The inputs of a forward of which the host knows everything: no relay takes part.

        Call it at forward entry, on its stream.

        Args:
            plan: one in which no request waits for ids or lengths of the step before. It is used once.
            uploaded: returned by `batch.upload(extras=plan.extras)`, or by `plan.upload()`.

        Raises:
            ArgumentError: another plan's upload; a request whose ids or lengths the relay has.
            Violation: as `FutureMap.resolve_forward_inputs`.
        """
        runtime = plan.slots.runtime
        runtime.check_owner("ForwardInputs.of")
        if len(plan.relay_rows):
            remedy = "pass ids of all requests to the plan, or call `FutureMap.resolve_forward_inputs`"
            raise ArgumentError(f"ForwardInputs of {plan!r}: row {plan.relay_rows[0]} waits for a relay", plan, remedy)
        sources = Sources(runtime, lambda slots, *fields: slots.device, (), 0, None, None)
        sources.check(plan, uploaded, "ForwardInputs")
        plan.check_unused()
        inputs = cls.resolve(plan, uploaded, sources)
        plan.use()
        return inputs

    @classmethod
    def resolve(cls, plan: ForwardPlan, uploaded: Extras, sources: Sources) -> "ForwardInputs":
        """The inputs of a checked plan, on the current stream."""
        runtime, slots, relayed, sampled = sources.runtime, plan.slots, plan.relayed, plan.sampled_slots
        if uploaded.slots is not None and np.array_equal(uploaded.slots[0], slots.np):
            slots = with_device(slots, uploaded.slots[1])  # at fixed addresses
        relayed = slots if plan.direct else _uploaded_handles(relayed, uploaded, "relay_slots")
        put_in = sources.put_in(plan) if plan.has_ids else None
        arrays: dict[str, torch.Tensor] = {}
        if plan.deferred and plan.token_arrays:
            deferred = runtime.upload(list(plan.token_arrays.values()))
            arrays = {name: deferred.view(i) for i, name in enumerate(plan.token_arrays)}
        elif plan.token_arrays:
            arrays = {name: uploaded[name] for name in plan.token_arrays}
        host_ids = arrays.pop("input_ids", None)
        if host_ids is None and "input_ids" in plan.extras:
            host_ids = uploaded["input_ids"]
        sampled = slots if sampled is plan.slots else _uploaded_handles(sampled, uploaded, "sample_slots")
        source = Uploaded(plan, slots.device, sampled)
        tensors = uploaded.several([name for name in plan.extras if name not in plan.token_arrays])
        ids = _ids(plan, uploaded, host_ids, relayed, sources, put_in) if plan.has_ids else None
        positions, starts, kv_lens, last = (tensors[name] for name in _ALWAYS)
        inputs = cls(source, ids, positions, starts, kv_lens, last, tensors.get("slot_mapping"))
        inputs.put({**tensors, **arrays}, arrays)
        if plan.bounded and sources.lengths is not None:
            lengths = sources.gather(relayed, sources.lengths)
            inputs.correct_lengths(uploaded, lengths, relayed.device, sources, put_in)
        if levels.full:
            inputs.check(runtime)
        plan.note_written()
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
            ours = name in _ARRAYS and name not in corrected
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
            invariants.mirror_equal(plan.token_arrays[name], runtime.inspect(array), **self._where(name))
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
        uploaded: Extras,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        sources: Sources,
        put_in: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """For the library: sets positions, KV lengths and slot mapping of requests of which the host knows a bound.

        `lengths` are those before this step. Changes tensors that were uploaded for this forward alone.
        """
        launch, width, direct = sources.runtime.launch, sources.width, self.plan.direct
        if levels.full and not sources.runtime.checks_suspended():
            self._check_bounds(lengths, sources)
        positions, dtype = lengths, self.positions.dtype
        if width > 1 or lengths.dtype != dtype:
            positions = launch(_positions, lengths, width, dtype, reads=(lengths,), name="true positions", operations=2)
        mapping = None
        if self.slot_mapping is not None and sources.req_to_token is not None:
            table = sources.req_to_token.device_for(self.plan.relayed)
            names = "relay_kv_offset", "relay_kv_window"
            moved = tuple(uploaded[name] if name in self.plan.extras else None for name in names)
            reads = (table, positions, slots, *(tensor for tensor in moved if tensor is not None))
            arguments = (table, slots, positions, width, self.slot_mapping.dtype, *moved, put_in is not None)
            mapping = launch(_looked_up, *arguments, reads=reads, name="true slot mapping", operations=2)
        added: torch.Tensor | int = width
        if put_in is not None:
            added = put_in[1]
            positions = _some(launch, positions, put_in[0])
            mapping = None if mapping is None else _some(launch, mapping, put_in[0])
        lens = self.kv_lens if direct else torch.empty_like(lengths, dtype=self.kv_lens.dtype)
        launch(torch.add, lengths, added, out=lens, reads=(lengths,), writes=(lens,), name="true KV lengths")
        if direct:  # all rows and nothing else: the true ones replace what was planned
            self.positions, self.slot_mapping = positions, mapping
        else:
            tokens = uploaded["relay_tokens"]
            corrections = [(self.kv_lens, uploaded["relay_rows"], lens), (self.positions, tokens, positions)]
            if self.slot_mapping is not None and mapping is not None:
                corrections.append((self.slot_mapping, tokens, mapping))
            for target, rows, true in corrections:
                launch(put_rows, target, rows, true, reads=(rows, true), writes=(target,), name="correct bounds")
        if self.kv_start_loc is not None:
            starts, lens = self.kv_start_loc, self.kv_lens
            launch(_ends, starts, lens, reads=(lens,), writes=(starts,), name="true KV starts")

    def _check_locations(self, runtime: Runtime) -> None:
        """The token table agrees with the pages about each token, and about the rest of each page that begins.

        So every `extension.entry()` was uploaded.
        """
        plan = self.plan
        pages = plan.pages
        if pages is None or pages.req_to_token is None or not plan.num_reqs:
            return
        table, size = pages.req_to_token, pages.page_size
        ends = plan.kv_ends
        running = handles_of(plan.slots, ends.nonzero()[0])  # one that waits for its first token has no row
        rows = table.device_for(running).index_select(0, self.slots[: plan.num_reqs])
        begun = (ends - 1) % size < ends - plan.kv_starts
        if plan.kv_window is not None:  # the host tier writes row by row
            begun &= plan.kv_window == NO_END
        ends = np.where(begun, -(-ends // size) * size, ends)
        positions = np.arange(min(int(ends.max(initial=0)), table.shape[1]))
        written = runtime.inspect(rows)[:, : positions.size].astype(np.int64)
        held = pages.page_table[plan.slots.np[: plan.num_reqs]].astype(np.int64)
        expected = held[:, positions // size] * size + positions % size
        first = pages.first_positions(plan.slots.split([plan.num_reqs, len(plan.slots) - plan.num_reqs])[0])
        there = (positions < ends[:, None]) & (positions >= first[:, None])
        where: Where = {**self._where("tokens of the pages"), "object": table}
        invariants.mirror_equal(np.where(there, expected, 0), np.where(there, written, 0), **where)

    def _check_bounds(self, lengths: torch.Tensor, sources: Sources) -> None:
        """No length exceeds its bound, by which pages were allocated; the column's device side has the true ones."""
        plan, runtime = self.plan, sources.runtime
        before = runtime.inspect(lengths)[: len(plan.relay_rows)]
        rows = plan.relay_rows
        where = self._where("kv_lens")
        true = before.astype(plan.seq_lens.dtype) + plan.query_lens[rows]
        invariants.mirror_bound(plan.seq_lens[rows], true, **where)
        if plan.bounds is not None and not plan.bounds.open_windows:
            column = runtime.inspect(plan.bounds.device)
            invariants.mirror_equal(column[rows].astype(true.dtype), true, **where)


NO_ARRAYS: Mapping[str, torch.Tensor] = {}

_ALWAYS = "positions", "query_start_loc", "kv_lens", "last_token_indices"
_ARRAYS = frozenset(ForwardInputs.__slots__) - {"_ids", "_source", "arrays"}

_CORRECTED = ("input_ids", "positions", "kv_lens", "slot_mapping", "kv_start_loc")
"""Tensors that the device sets right where the host knows bounds; ids of requests come from the relay in any case."""


def _uploaded_handles(handles: Slots, uploaded: Extras, name: str) -> Slots:
    """The handles, with the device side that was uploaded with the step."""
    return with_device(handles, uploaded.side(name)) if name in uploaded else handles


def with_device(handles: Slots, side: DeviceSide) -> Slots:
    """The same handles with another device side."""
    return Slots(
        handles.runtime,
        handles.np,
        side,
        dtype=handles.dtype,
        shape=handles.shape,
        contract=handles.contract,
        name=handles.name,
        generations=handles.generations,
        pool_id=handles.pool_id,
    )


def _ids(
    plan: ForwardPlan,
    uploaded: Extras,
    host_ids: torch.Tensor | None,
    relayed: Slots,
    sources: Sources,
    put_in: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """The ids of all tokens, from the host, from the relay, or from both."""
    launch = sources.runtime.launch
    if host_ids is not None and not len(plan.relay_rows):
        return host_ids
    ids = sources.gather(relayed, *sources.ids).reshape(-1)
    if put_in is not None:
        ids = _some(launch, ids, put_in[0])
    if host_ids is None:
        return ids
    tokens = uploaded["relay_tokens"]
    launch(put_rows, host_ids, tokens, ids, reads=(tokens, ids), writes=(host_ids,), name="ids from the relay")
    return host_ids


def _some(launch: Callable[..., torch.Tensor], numbers: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The numbers that requests put in, of as many for each."""
    return launch(select_rows, numbers, index, reads=(numbers, index), name="ids put in")


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
    """dtype[n * width]: the table's element for each position, `width` per request, as by `ForwardPlan.kv_index`.

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
