"""`ForwardInputs`: the device tensors that one forward takes, as its own view of the batch.

What the host planned crossed in the step's copy. At forward entry, on the forward's stream, the relay adds what only
the last forward knew: ids, and true lengths where the host has bounds. The view belongs to the forward, which may
change it; the batch, whose two sides stay what they are, never hears of it.
"""

from collections.abc import Callable
from typing import final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import put_rows
from batchstate._upload import Extras
from batchstate.errors import ArgumentError, ContractError, ShapeError
from batchstate.forward.plan import ForwardPlan
from batchstate.indices import Slots
from batchstate.mirror import DeviceSide
from batchstate.runtime import Runtime
from batchstate.tables import Table
from batchstate.violations import Where


@final
@attrs.frozen(eq=False)
class Sources:
    """Where a forward's inputs come from besides the plan. For the library.

    Attributes:
        runtime: the device.
        gather: takes entries of a relay field.
        ids: fields whose entries end to end are the ids of a request, `width` of them.
        lengths: field with the tokens in KV memory before this step, or None.
        req_to_token: [slot, position] -> token, or None.
    """

    runtime: Runtime
    gather: Callable[[Slots, str], torch.Tensor]
    ids: tuple[str, ...]
    width: int
    lengths: str | None
    req_to_token: Table | None

    def check(self, plan: ForwardPlan, uploaded: Extras, what: str) -> None:
        """Refuses a plan that these cannot serve; see `FutureMap.resolve_forward_inputs`."""
        missing = sorted(name for name, array in plan.extras.items() if uploaded.arrays.get(name) is not array)
        if missing:
            raise ArgumentError(
                f"{what}: {', '.join(missing)} of {plan!r} did not cross with this upload",
                value=missing,
                remedy="pass what `batch.upload(extras=plan.extras)` returned for this plan",
            )
        for row in plan.relay_rows[plan.query_lens[plan.relay_rows] != self.width].tolist():
            raise ShapeError(
                f"{what}: the request in row {row} puts in {plan.query_lens[row]} tokens, "
                f"and the relay has {self.width} for it in {', '.join(self.ids)}",
                value=int(plan.query_lens[row]),
                remedy="pass its ids to the plan, or name the fields that hold them all",
            )
        if plan.bounded and self.lengths is None:
            raise ContractError(
                f"{what}: {plan!r} has bounds of the lengths",
                value="upper_bound",
                remedy="name the field that was published with the true ones: lengths=...",
            )
        plan.check_pages()
        if self.req_to_token is not None:
            _check_table(self.req_to_token, plan, what)
        if plan.bounded and "slot_mapping" in plan.extras and self.req_to_token is None:
            raise ArgumentError(
                f"{what}: the slot mapping of bounded lengths needs a token table",
                value=None,
                remedy="pass req_to_token=, from which the device looks up where the KV really goes",
            )


def _check_table(table: Table, plan: ForwardPlan, what: str) -> None:
    """Refuses a table in which the places of the plan's tokens cannot be looked up."""
    rows = table.shape
    if (
        table.dtype.is_floating_point
        or len(rows) != 2
        or rows[1] < plan.max_kv_len
        or table.holds not in (None, "location")
    ):
        raise ArgumentError(
            f"{what}: {table!r} for requests of up to {plan.max_kv_len} tokens",
            value=table,
            remedy="pass the table of tokens by slot and position, as wide as a request may be long",
        )


@final
@attrs.define(eq=False, repr=False)
class ForwardInputs:
    """One forward's inputs on the device. Made by `FutureMap.resolve_forward_inputs`.

    Attributes:
        plan: what the host knows of it.
        slots: int64[num_rows]; 0 for padded rows.
        sampled_slots: handles of the requests that sample, for `publish`.
        input_ids, positions: int64[num_padded_tokens].
        query_start_loc: int32[num_rows + 1], where the tokens of each request begin (FlashAttention's `cu_seqlens_q`,
            flashinfer's `qo_indptr`).
        kv_lens: int32[num_rows], tokens of each request with those of this step (`seqused_k`, `cache_seqlens`).
        last_token_indices: int64[s], the last token of each request that samples; int64[num_rows] where all do.
        slot_mapping: int64[num_padded_tokens], where the KV of each token goes, or None without pages.
        kv_start_loc, block_table: `cu_seqlens_k` int32[num_rows + 1] and int32[num_rows, m], or None.
        kv_page_indptr, kv_page_indices, kv_last_page_len: flashinfer's `paged_kv_*`, or None.
    """

    plan: ForwardPlan
    slots: torch.Tensor
    sampled_slots: Slots
    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    kv_lens: torch.Tensor
    last_token_indices: torch.Tensor
    slot_mapping: torch.Tensor | None = None
    kv_start_loc: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    kv_page_indptr: torch.Tensor | None = None
    kv_page_indices: torch.Tensor | None = None
    kv_last_page_len: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"ForwardInputs({self.plan!r})"

    @classmethod
    def made(cls, plan: ForwardPlan, uploaded: Extras, sources: Sources) -> "ForwardInputs":
        """For the library: the inputs of a checked plan, on the current stream."""
        plan.use()
        runtime = sources.runtime
        slots = _of_the_batch(plan.slots, uploaded)
        relayed = slots if plan.direct else _on_device(plan.relayed, uploaded, "relay_slots")
        ids = _ids(plan, uploaded, relayed, sources)
        inputs = cls(
            plan=plan,
            slots=slots.device,
            sampled_slots=slots
            if plan.sampled_slots is plan.slots
            else _on_device(plan.sampled_slots, uploaded, "sample_slots"),
            input_ids=ids,
            **{name: uploaded[name] for name in _TENSORS if name in plan.extras},
        )
        if plan.bounded and sources.lengths is not None:
            inputs._set_right(uploaded, sources.gather(relayed, sources.lengths), relayed.device, sources)
        if levels.full and not runtime.checks_suspended():
            inputs._check_places(runtime)
            invariants.sentinel_escaped(
                runtime.inspect(inputs.input_ids),
                object=plan,
                operation="resolve_forward_inputs",
                column="input_ids",
                step=runtime.step,
            )
        return inputs

    def _set_right(self, uploaded: Extras, lengths: torch.Tensor, slots: torch.Tensor, sources: Sources) -> None:
        """Positions, KV lengths and slot mapping of requests of which the host knows a bound; `lengths` are before.

        Changes tensors that crossed for this forward alone.
        """
        launch, width = sources.runtime.launch, sources.width
        if levels.full and not sources.runtime.checks_suspended():
            self._check_bounds(lengths, sources)
        positions = lengths
        if width > 1 or lengths.dtype != torch.int64:
            positions = launch(_positions, lengths, width, reads=(lengths,), name="true positions", operations=2)
        mapping = None
        if self.slot_mapping is not None and sources.req_to_token is not None:
            table, reads = sources.req_to_token.device, (positions, slots)
            mapping = launch(
                _looked_up,
                table,
                slots,
                positions,
                width,
                reads=(table, *reads),
                name="true slot mapping",
                operations=2,
            )
        if self.plan.direct:  # all rows and nothing else: the true ones take the places of what was planned
            lens = self.kv_lens
            launch(_with_query, lengths, width, lens, reads=(lengths,), writes=(lens,), name="true KV lengths")
            self.positions, self.slot_mapping = positions, mapping
        else:
            lens = torch.empty_like(lengths, dtype=self.kv_lens.dtype)
            launch(_with_query, lengths, width, lens, reads=(lengths,), writes=(lens,), name="true KV lengths")
            self._put(self.kv_lens, lens, uploaded["relay_rows"], launch)
            self._put(self.positions, positions, uploaded["relay_tokens"], launch)
            if self.slot_mapping is not None and mapping is not None:
                self._put(self.slot_mapping, mapping, uploaded["relay_tokens"], launch)
        if self.kv_start_loc is not None:
            starts, lens = self.kv_start_loc, self.kv_lens
            launch(_ends, starts, lens, reads=(lens,), writes=(starts,), name="true KV starts")

    @staticmethod
    def _put(target: torch.Tensor, values: torch.Tensor, places: torch.Tensor, launch: Callable[..., None]) -> None:
        launch(put_rows, target, places, values, reads=(places, values), writes=(target,), name="set right")

    def _check_places(self, runtime: Runtime) -> None:
        """The token table says of each token what the pages say: every `extension.entry()` has crossed."""
        pages = self.plan.pages
        if pages is None or pages.req_to_token is None or not self.plan.num_reqs:
            return
        table, expected = pages.req_to_token, self.plan.places()
        rows = table.device.index_select(0, self.slots[: self.plan.num_reqs])
        found = runtime.inspect(rows)[:, : expected.shape[1]].astype(expected.dtype)
        invariants.mirror_equal(
            expected,
            np.where(np.arange(expected.shape[1]) < self.plan.seq_lens[:, None], found, 0),
            object=table,
            operation="resolve_forward_inputs",
            column="tokens of the pages",
            step=runtime.step,
        )

    def _check_bounds(self, lengths: torch.Tensor, sources: Sources) -> None:
        """The host's bounds are bounds, by which pages were allocated, and the column's device side is the truth."""
        plan, runtime = self.plan, sources.runtime
        before = runtime.inspect(lengths)[: len(plan.relay_rows)]
        rows = plan.relay_rows
        where: Where = {
            "object": plan,
            "operation": "resolve_forward_inputs",
            "column": "kv_lens",
            "step": runtime.step,
        }
        true = before.astype(plan.seq_lens.dtype) + sources.width
        invariants.mirror_bound(plan.seq_lens[rows], true, **where)
        if plan.bounds is not None and not plan.bounds.open_windows:
            column = runtime.inspect(plan.bounds.device)
            invariants.mirror_equal(column[rows].astype(true.dtype), true, **where)


_TENSORS = tuple(
    one.name for one in attrs.fields(ForwardInputs) if one.name not in ("plan", "slots", "sampled_slots", "input_ids")
)


def _on_device(handles: Slots, uploaded: Extras, name: str) -> Slots:
    """The handles, their device side among what crossed with the step."""
    return _with_device(handles, uploaded.side(name)) if name in uploaded else handles


def _of_the_batch(handles: Slots, uploaded: Extras) -> Slots:
    """The handles of all rows. If they have crossed to fixed addresses, they need not cross again."""
    if uploaded.slots is None:
        return handles
    numbers, side = uploaded.slots
    return _with_device(handles, side) if np.array_equal(numbers, handles.np) else handles


def _with_device(handles: Slots, side: DeviceSide) -> Slots:
    return Slots(
        handles.runtime,
        handles.np,
        side,
        dtype=handles.dtype,
        shape=handles.shape,
        contract=handles.contract,
        name=handles.name,
        generations=handles.generations,
        pool_id=handles.pool,
    )


def _ids(plan: ForwardPlan, uploaded: Extras, relayed: Slots, sources: Sources) -> torch.Tensor:
    """The ids of all tokens, from the host, from the relay, or from both."""
    launch = sources.runtime.launch
    known = uploaded["input_ids"] if "input_ids" in plan.extras else None
    if plan.prompt_ids is not None:
        known = sources.runtime.upload([plan.prompt_ids]).view(0)
    if known is not None and not len(plan.relay_rows):
        return known
    parts = [sources.gather(relayed, name) for name in sources.ids]
    ids = parts[0].reshape(-1)
    if len(parts) > 1:
        ids = launch(_end_to_end, parts, reads=parts, name="ids of requests")
    if known is None:
        return ids
    places = uploaded["relay_tokens"]
    launch(put_rows, known, places, ids, reads=(places, ids), writes=(known,), name="ids from the relay")
    return known


def _end_to_end(parts: list[torch.Tensor]) -> torch.Tensor:
    """Entries [n] and [n, k] of each request, one behind the other. One kernel."""
    return torch.cat([part.reshape(part.shape[0], -1) for part in parts], dim=1).reshape(-1)


def _with_query(lengths: torch.Tensor, width: int, result: torch.Tensor) -> None:
    """Lengths after a step, into `result` of any integer dtype. One kernel."""
    torch.add(lengths, width, out=result)


def _positions(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """int64[n * width]: the positions of the next `width` tokens of each request."""
    return (lengths[:, None] + torch.arange(width, device=lengths.device)).reshape(-1).to(torch.int64)


def _looked_up(table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """int64[n * width]: the table's element for each position, `width` of them a request."""
    return table[slots[:, None], positions.view(-1, width)].reshape(-1).to(torch.int64)


def _ends(starts: torch.Tensor, lengths: torch.Tensor) -> None:
    """`starts[1:]` = running sums of `lengths`, in place."""
    torch.cumsum(lengths, 0, dtype=starts.dtype, out=starts[1:])
