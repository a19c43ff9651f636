"""`ForwardPlan`: the host's part of a forward's inputs, computed in numpy and carried by the step's one copy.

    plan = ForwardPlan.of(batch.slots, batch.seq_lens, query_lens, prompt_ids=ids, pages=pages)
    uploaded = batch.upload(writes=[extension.entry()], extras=plan.extras)
    inputs = relay.resolve_forward_inputs(plan, uploaded, ids="last_token")  # at forward entry, on its stream

Each request puts in its last `query_len` tokens, of `seq_len` that it has with them: a chunk of its prompt, one decoded
token, or that and drafts. Their ids come from the host (prompts) or from the relay (all others).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate._arrays import amounts, as_array, check_range, converted, count
from batchstate.errors import ArgumentError, ContractError, DeclarationError, DtypeError, ShapeError
from batchstate.indices import Slots
from batchstate.kv.pages import PagePool
from batchstate.mirror import Contract, MirroredTensor
from batchstate.violations import Where

# Requests of unequal lengths laid end to end: the arrays that variable-length attention kernels take.

Ints = npt.NDArray[np.int64]


@final
@attrs.frozen(eq=False)
class Ragged:
    """The tokens of one step, those of a request together, in order.

    Attributes:
        starts: int64[n + 1], where the tokens of each request begin, and their number.
        rows: int64[t], the request of each token.
        positions: int64[t], the position of each token in its request.
    """

    starts: Ints
    rows: Ints
    positions: Ints

    @classmethod
    def of(cls, seq_lens: Ints, query_lens: Ints) -> "Ragged":
        """The last `query_lens[i]` of the `seq_lens[i]` tokens of each request."""
        starts = np.zeros(len(query_lens) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=starts[1:])
        rows = np.repeat(np.arange(len(query_lens), dtype=np.int64), query_lens)
        first = seq_lens - query_lens - starts[:-1]
        return cls(starts, rows, np.arange(starts[-1], dtype=np.int64) + first[rows])


def padded(values: npt.NDArray[np.integer], size: int, fill: int, dtype: npt.DTypeLike) -> npt.NDArray[np.integer]:
    """`values` as `dtype`, then `fill` up to `size` elements."""
    result = np.full(size, fill, dtype=dtype)
    result[: len(values)] = values
    return result


# How attention kernels want to be told of the KV pages of each request.
#
# `flash_attention` is what FlashAttention's variable-length functions take for paged KV (`cu_seqlens_k`,
# `block_table`), `flashinfer` what the wrappers of flashinfer take in `plan` (`paged_kv_indptr`, `paged_kv_indices`,
# `paged_kv_last_page_len`). Both use int32. Padded rows have no pages.

Arrays = dict[str, npt.NDArray[np.int32]]


def flash_attention(pages: npt.NDArray[np.int32], kv_lens: Ints, page_size: int, num_rows: int) -> Arrays:
    """`kv_start_loc` int32[num_rows + 1] and `block_table` int32[num_rows, most pages of a request]."""
    counts = -(-kv_lens // page_size)
    most = int(counts.max(initial=0))
    table = np.zeros((num_rows, most), dtype=np.int32)
    table[: len(kv_lens)] = np.where(np.arange(most) < counts[:, None], pages[:, :most], 0)
    return {"kv_start_loc": _starts(kv_lens, num_rows), "block_table": table}


def flashinfer(pages: npt.NDArray[np.int32], kv_lens: Ints, page_size: int, num_rows: int) -> Arrays:
    """`kv_page_indptr` int32[num_rows + 1], `kv_page_indices` int32[pages], `kv_last_page_len` int32[num_rows]."""
    counts = -(-kv_lens // page_size)
    most = int(counts.max(initial=0))
    last = np.zeros(num_rows, dtype=np.int32)
    last[: len(kv_lens)] = kv_lens - np.maximum(counts - 1, 0) * page_size
    return {
        "kv_page_indptr": _starts(counts, num_rows),
        "kv_page_indices": pages[:, :most][np.arange(most) < counts[:, None]],
        "kv_last_page_len": last,
    }


def _starts(lengths: Ints, num_rows: int) -> npt.NDArray[np.int32]:
    starts = np.zeros(num_rows + 1, dtype=np.int32)
    check_range(0, int(lengths.sum()), starts.dtype, "ForwardPlan: tokens of all requests together")
    np.cumsum(lengths, out=starts[1 : len(lengths) + 1])
    starts[len(lengths) + 1 :] = starts[len(lengths)]
    return starts


LAYOUTS: dict[str, Callable[[npt.NDArray[np.int32], Ints, int, int], Arrays]] = {
    "flash_attention": flash_attention,
    "flashinfer": flashinfer,
}
"""Layout -> its function of `pages` int32[n, m], the pages of each live request, and `kv_lens` int64[n]."""


def check_layouts(layouts: object, what: str) -> tuple[str, ...]:
    """The names of layouts.

    Raises:
        DeclarationError: an unknown one.
    """
    names = (layouts,) if isinstance(layouts, str) else layouts
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name in LAYOUTS for name in names):
        raise DeclarationError(
            f"{what}: layouts {layouts!r}", value=layouts, remedy=f"use some of: {', '.join(LAYOUTS)}"
        )
    return tuple(names)


# What a forward plan is given, read and checked on the host.


def handles_of(slots: Slots, rows: Ints) -> Slots:
    """The handles in some rows, without a device side of their own."""
    if len(rows) == len(slots):
        return slots
    return Slots.of_pool(slots.runtime, slots.np[rows], slots.generations[rows], pool=slots.pool, name=slots.name)


def num_live(slots: Slots) -> int:
    """Rows before the padding at the end."""
    used = np.flatnonzero(slots.np)
    return int(used[-1]) + 1 if used.size else 0


def lengths(seq_lens: object, num_reqs: int, num_rows: int, what: str) -> tuple[Ints, MirroredTensor | None]:
    """Lengths int64[num_reqs], and the column if they are bounds."""
    if isinstance(seq_lens, MirroredTensor) and seq_lens.unit is None and seq_lens.contract is Contract.UPPER_BOUND:
        return per_request(seq_lens.np, num_reqs, num_rows, f"{what}: seq_lens"), seq_lens
    return per_request(as_array(seq_lens, f"{what}: seq_lens"), num_reqs, num_rows, f"{what}: seq_lens"), None


def per_request(numbers: object, num_reqs: int, num_rows: int, what: str) -> Ints:
    """One number a request, int64[num_reqs]; those of padded rows are dropped."""
    array = as_array(numbers, what)
    rows = num_rows if array.ndim == 1 and array.shape[0] == num_rows else num_reqs
    given = amounts(array, rows, what)
    return np.full(num_reqs, given, dtype=np.int64) if given.ndim == 0 else given[:num_reqs]


def check_queries(queries: Ints, lens: Ints, what: str) -> None:
    """Refuses a request that puts in more than it has, and lengths beyond what kernels count."""
    check_range(0, max(int(lens.max(initial=0)), int(queries.sum())), np.dtype(np.int32), f"{what}: tokens")
    wrong = np.flatnonzero((queries < 0) | (queries > lens))
    if wrong.size:
        row = int(wrong[0])
        raise ArgumentError(
            f"{what}: row {row} puts in {queries[row]} tokens of {lens[row]}",
            value=int(queries[row]),
            remedy="seq_lens counts the tokens of this step too; a request puts in 0 to seq_len of them",
        )


def known_ids(prompt_ids: object, queries: Ints, num_rows: int, what: str) -> list[Ints | None]:
    """The ids that the host knows, for each request; None where the relay has them."""
    num_reqs = len(queries)
    if prompt_ids is None:
        return [None] * num_reqs
    if isinstance(prompt_ids, list | tuple) and len(prompt_ids) == num_rows:
        prompt_ids = prompt_ids[:num_reqs]
    if not isinstance(prompt_ids, list | tuple) or len(prompt_ids) != num_reqs:
        size = len(prompt_ids) if isinstance(prompt_ids, list | tuple) else type(prompt_ids).__name__
        raise ShapeError(
            f"{what}: prompt_ids of {size} for {num_reqs} requests",
            value=size,
            remedy="pass a list with the ids of each request, and None for those that the relay feeds",
        )
    given: list[Ints | None] = []
    for row, ids in enumerate(prompt_ids):
        array = None if ids is None else converted(ids, np.dtype(np.int64), f"{what}: prompt_ids of row {row}")
        if array is not None and array.ndim != 1:
            raise ShapeError(
                f"{what}: prompt_ids of row {row} are {list(array.shape)}",
                value=array.shape,
                remedy="pass one dimension of ids; None where there are none",
            )
        if array is not None and len(array) != queries[row]:
            raise ShapeError(
                f"{what}: {len(array)} ids for the {queries[row]} tokens of row {row}",
                value=len(array),
                remedy="pass exactly the ids of this chunk",
            )
        given.append(array)
    return given


def checked_sample_rows(samples: object, queries: Ints, num_rows: int, what: str) -> Ints:
    """Rows that sample, int64[s]; each has a last token."""
    num_reqs = len(queries)
    mask = np.ones(num_reqs, dtype=np.bool_) if samples is None else as_array(samples, f"{what}: samples")
    if mask.shape == (num_rows,):
        mask = mask[:num_reqs]
    if mask.shape != (num_reqs,) or (mask.dtype != np.bool_ and mask.size):
        raise ShapeError(
            f"{what}: samples are {mask.dtype}{list(mask.shape)}", value=mask.shape, remedy="pass a mask bool[num_reqs]"
        )
    rows = np.flatnonzero(mask)
    without = rows[queries[rows] == 0]
    if without.size:
        raise ArgumentError(
            f"{what}: the request in row {without[0]} samples and puts in no token",
            value=int(without[0]),
            remedy="pass samples=query_lens > 0",
        )
    return rows


_STAND_IN = -1
"""Where no id is known yet while the host lays them out. The law of SENTINEL_ESCAPED sees to it that none crosses."""


@final
@attrs.define(eq=False, repr=False)
class ForwardPlan:
    """What the host knows of one forward. Made by `of`, used once by `FutureMap.resolve_forward_inputs`.

    Attributes:
        slots: the rows, padding included.
        num_reqs: requests.
        num_rows: requests and padded rows.
        num_tokens: tokens of the requests.
        num_padded_tokens: tokens and padding.
        query_lens: int64[num_reqs], tokens that each request puts in.
        seq_lens: int64[num_reqs], tokens that it has with them, or a bound.
        bounds: the column of which `seq_lens` holds bounds for the requests that the relay feeds; None where it is
            exact.
        max_query_len, max_kv_len: the most of both, or a bound.
        relay_rows: int64[r], requests whose ids come from the relay.
        relayed: their handles.
        sample_rows: int64[s], requests that sample.
        sampled_slots: their handles.
        prompt_ids: int64[num_padded_tokens], ids that the host knows and 0 elsewhere; None if it knows none.
        extras: name -> array, for `batch.upload(extras=...)`.
        step: of the runtime, when it was planned.
        pages: the pool that the KV of the requests lies in, or None.
    """

    slots: Slots
    num_reqs: int
    num_tokens: int
    num_padded_tokens: int
    query_lens: Ints
    seq_lens: Ints
    bounds: MirroredTensor | None
    relay_rows: Ints
    relayed: Slots
    sample_rows: Ints
    sampled_slots: Slots
    prompt_ids: Ints | None
    extras: Mapping[str, npt.NDArray[Any]]
    step: int
    pages: PagePool | None = None
    _used: bool = False

    def __repr__(self) -> str:
        return f"ForwardPlan({self.num_reqs} requests, {self.num_tokens} tokens, {len(self.relay_rows)} by the relay)"

    @property
    def num_rows(self) -> int:
        """Requests and padded rows."""
        return len(self.slots)

    @property
    def max_query_len(self) -> int:
        """The most tokens that a request puts in."""
        return int(self.query_lens.max(initial=0))

    @property
    def max_kv_len(self) -> int:
        """The most tokens that a request has, or a bound."""
        return int(self.seq_lens.max(initial=0))

    @classmethod
    def of(
        cls,
        slots: Slots,
        seq_lens: object,
        query_lens: object = 1,
        *,
        prompt_ids: Sequence[object] | None = None,
        samples: object = None,
        pages: PagePool | None = None,
        pad_tokens: SupportsIndex | None = None,
        layouts: str | Iterable[str] = (),
    ) -> "ForwardPlan":
        """Plans a forward.

        Args:
            slots: the requests of the batch, padded rows at the end: `batch.slots`, or `batch.pad(n).slots`.
            seq_lens: tokens that each has after this forward, int[n]: a mirrored column, exact or bounded, or an array.
                Values of padded rows are not looked at.
            query_lens: tokens that each puts in, one number or int[n].
            prompt_ids: for each request the ids that it puts in, int[query_len], or None where the relay has them. None
                for all: all ids come from the relay. A request that puts in none has none anywhere. Padded
                rows may have a place, which is not looked at.
            samples: mask bool[n] of the requests that sample; all by default. A chunk of a prompt that is not its last
                samples nothing.
            pages: where the KV goes; without it there is no `slot_mapping`.
            pad_tokens: tokens of a captured graph; padded ones have id 0, position 0 and token 0 of KV memory.
            layouts: `flash_attention` or `flashinfer`, for arrays that these take besides.

        Raises:
            ShapeError: not one number, mask or array of ids a request; ids that are not `query_len`.
            DtypeError: no integers, or no slots.
            ArgumentError: more tokens put in than there are, or than are allocated; fewer padded tokens than tokens; a
                request samples that puts in none.
            ValueOverflowError: lengths or tokens beyond int32, which kernels take.
            ContractError: `flashinfer` with bounds, whose page counts the host would have to know.
            DeclarationError: an unknown layout.
            Violation: SENTINEL_ESCAPED: a negative id; SLOT_ZERO_ALLOCATED: a padded row before a request.
        """
        what = "ForwardPlan"
        if not isinstance(slots, Slots):
            raise DtypeError(f"{what}: slots are {type(slots).__name__}", value=slots, remedy="pass `batch.slots`")
        names = check_layouts(layouts, what)
        if pages is not None and not isinstance(pages, PagePool):
            raise ArgumentError(f"{what}: pages are {type(pages).__name__}", value=pages, remedy="pass a PagePool")
        num_reqs = num_live(slots)
        where: Where = {"object": what, "operation": "plan", "step": slots.runtime.step}
        invariants.slot_zero_allocated(slots.np[:num_reqs], **where)
        lens, bounds = lengths(seq_lens, num_reqs, len(slots), what)
        queries = per_request(query_lens, num_reqs, len(slots), f"{what}: query_lens")
        check_queries(queries, lens, what)
        tokens = Ragged.of(lens, queries)
        num_tokens = int(tokens.starts[-1])
        padded_tokens = num_tokens if pad_tokens is None else count(pad_tokens, f"{what}: pad_tokens", least=num_tokens)
        check_range(0, padded_tokens, np.dtype(np.int32), f"{what}: pad_tokens")
        known = known_ids(prompt_ids, queries, len(slots), what)
        fed = queries > 0
        if prompt_ids is not None:
            fed &= np.fromiter((ids is None for ids in known), np.bool_, num_reqs)
        relay_rows = np.flatnonzero(fed)
        sample_rows = checked_sample_rows(samples, queries, len(slots), what)
        plan = cls(
            slots=slots,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_padded_tokens=padded_tokens,
            query_lens=queries,
            seq_lens=lens,
            bounds=bounds if len(relay_rows) else None,
            relay_rows=relay_rows,
            relayed=handles_of(slots, relay_rows),
            sample_rows=sample_rows,
            sampled_slots=slots if len(sample_rows) == num_reqs else handles_of(slots, sample_rows),
            prompt_ids=None,
            extras={},
            step=slots.runtime.step,
            pages=pages,
        )
        if any(ids is not None and len(ids) for ids in known):
            plan.prompt_ids = plan._laid_out(known, tokens, where)
        plan.extras = plan._arrays(tokens, names)
        return plan

    @property
    def bounded(self) -> bool:
        """Whether the host knows only bounds of the lengths of requests that the relay feeds."""
        return self.bounds is not None

    @property
    def direct(self) -> bool:
        """Whether the ids are the relay's entries end to end, row by row, with nothing between or behind."""
        queries = self.query_lens
        uniform = len(self.relay_rows) == self.num_reqs > 0 and bool((queries == queries[0]).all())
        padded_rows = self.num_rows > self.num_reqs
        return (
            uniform and self.num_rows * int(queries[0]) == self.num_padded_tokens and not (self.bounded and padded_rows)
        )

    def use(self) -> None:
        """Notes that the forward's inputs are made now.

        Raises:
            Violation: FUTURE_CONSUMED, at `cheap`: they were made before.
        """
        if levels.cheap and self.num_reqs:
            invariants.future_consumed(
                self.slots.np[: self.num_reqs],
                np.full(self.num_reqs, self._used),
                lambda row: f"the plan of step {self.step}",
                f"resolve_forward_inputs in step {self.slots.runtime.step}",
                object=self,
                operation="resolve_forward_inputs",
                step=self.slots.runtime.step,
            )
        self._used = True

    def check_pages(self) -> None:
        """Asks again, at `cheap`, whether the requests still have the pages that they were planned with.

        Raises:
            ArgumentError: some were taken back since.
        """
        if levels.cheap and self.pages is not None:
            self._check_allocated(self.pages)

    def places(self) -> Ints:
        """Where each token of each request lies, int64[num_reqs, max_kv_len]; 0 behind its tokens. For checks."""
        if self.pages is None:
            return np.zeros((self.num_reqs, 0), dtype=np.int64)
        size, positions = self.pages.page_size, np.arange(self.max_kv_len)
        places = self._pages_of(self.pages)[:, positions // size] * np.int64(size) + positions % size
        return np.where(positions < self.seq_lens[:, None], places, 0)

    def relay_tokens(self) -> Ints:
        """Places of the relay's ids among the tokens, int64, request by request."""
        starts = np.cumsum(self.query_lens) - self.query_lens
        return Ragged.of((starts + self.query_lens)[self.relay_rows], self.query_lens[self.relay_rows]).positions

    def _laid_out(self, known: Sequence[Ints | None], tokens: Ragged, where: Where) -> Ints:
        """The ids that the host knows, at their places; 0 where the relay puts in, and behind the tokens."""
        ids = np.full(self.num_padded_tokens, _STAND_IN, dtype=np.int64)
        ids[self.num_tokens :] = 0
        for row, one in enumerate(known):
            if one is not None:
                ids[tokens.starts[row] : tokens.starts[row + 1]] = one
        ids[self.relay_tokens()] = 0
        if levels.cheap:
            column: Where = {**where, "column": "input_ids"}
            invariants.sentinel_escaped(ids, **column)
        return ids

    def _arrays(self, tokens: Ragged, layouts: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        size, rows = self.num_padded_tokens, self.num_rows
        last = tokens.starts[1:] - 1
        arrays: dict[str, npt.NDArray[Any]] = {
            "positions": padded(tokens.positions, size, 0, np.int64),
            "query_start_loc": padded(tokens.starts, rows + 1, self.num_tokens, np.int32),
            "kv_lens": padded(self.seq_lens, rows, 0, np.int32),
        }
        if self.sampled_slots is self.slots:
            arrays["last_token_indices"] = padded(last, rows, 0, np.int64)
        else:
            arrays["last_token_indices"] = last[self.sample_rows]
            arrays["sample_slots"] = self.sampled_slots.np
        if self.pages is not None:
            table = self._pages_of(self.pages)
            arrays["slot_mapping"] = padded(_slot_mapping(tokens, table, self.pages.page_size), size, 0, np.int64)
            self._check_layouts(layouts)
            for name in layouts:
                arrays |= LAYOUTS[name](table, self.seq_lens, self.pages.page_size, rows)
        elif layouts:
            raise ArgumentError(
                f"ForwardPlan: layouts {list(layouts)} without pages", value=layouts, remedy="pass pages=PagePool"
            )
        if self.prompt_ids is None and not self.direct:
            arrays["input_ids"] = np.zeros(size, dtype=np.int64)  # where the relay puts in, and padding
        if len(self.relay_rows) and not self.direct:
            arrays["relay_slots"] = self.relayed.np
            arrays["relay_tokens"] = self.relay_tokens()
            if self.bounded:
                arrays["relay_rows"] = self.relay_rows
        return arrays

    def _check_layouts(self, layouts: Sequence[str]) -> None:
        if self.bounded and "flashinfer" in layouts:
            raise ContractError(
                "ForwardPlan: layout 'flashinfer' of bounded lengths",
                value="upper_bound",
                remedy="resolve the lengths first: flashinfer counts pages on the host; or use 'flash_attention'",
            )

    def _pages_of(self, pages: PagePool) -> npt.NDArray[np.int32]:
        """The pages of each request, int32[num_reqs, most pages of a request]."""
        self._check_allocated(pages)
        return pages.page_table[self.slots.np[: self.num_reqs]]

    def _check_allocated(self, pages: PagePool) -> None:
        live = self.slots if self.num_rows == self.num_reqs else handles_of(self.slots, np.arange(self.num_reqs))
        allocated = pages.allocated(live)
        short = np.flatnonzero(allocated < self.seq_lens)
        if short.size:
            row = int(short[0])
            raise ArgumentError(
                f"ForwardPlan: request in row {row} has {self.seq_lens[row]} tokens and pages for {allocated[row]}",
                value=int(self.seq_lens[row]),
                remedy="grow the pages first (`pages.extend` or `pages.advance`)",
            )


def _slot_mapping(tokens: Ragged, table: npt.NDArray[np.int32], page_size: int) -> Ints:
    """Where the KV of each token goes, int64[num_tokens]; `table` int32[num_reqs, m] has the pages of each request."""
    pages = table[tokens.rows, tokens.positions // page_size]
    mapping: Ints = pages * np.int64(page_size) + tokens.positions % page_size
    return mapping
