"""`ForwardPlan`: the host's part of a forward's inputs, computed in numpy and uploaded in the step's one copy.

One call makes the plan of a step::

    plan = ForwardPlan.of(batch.slots, batch.seq_lens, query_lens, prompt_ids=ids, pages=pages)
    uploaded = batch.upload(writes=[extension.entry()], extras=plan.extras)
    inputs = relay.resolve_forward_inputs(plan, uploaded, ids="last_token")  # at forward entry, on its stream

Each request puts in its last `query_len` tokens, of `seq_len` that it has with them: a chunk of its prompt, one decoded
token, or that and drafts. Their ids come from the host (prompts) or from the relay (all others); a rank of a pipeline
that takes hidden states has none. Further values of single tokens (`TokenArray`) go the same way as the ids. The KV of
each token has a location: an offset into a page of its request. `slot_mapping` is vLLM's name for the locations that a
forward writes (SGLang: `out_cache_loc`); everywhere else a slot is the row of a request.
"""

import json
import math
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import Array, amounts, arange_per_row, as_array, check_range, count
from batchstate._origin import DerivedArrays, Origin, RowSet
from batchstate._upload import Extras, packed_step
from batchstate.errors import ArgumentError, ContractError, DeclarationError, ShapeError, one_of
from batchstate.forward.token_array import TokenArray
from batchstate.invariants import times_checked
from batchstate.kv.last_location import LastLocation
from batchstate.kv.pages import PagePool
from batchstate.mirror import Contract, DeviceSide, MirroredTensor, Slots
from batchstate.nvtx import ranges
from batchstate.pools import SlotPool
from batchstate.runtime.base import Runtime
from batchstate.runtime.memory import NUMPY_DTYPES, ReadyTensor
from batchstate.tables import TableWrite
from batchstate.violations import Code, Where

Ints = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[np.int32]]

_PLAN = "ForwardPlan"
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_IDS = "input_ids"
NO_END = np.iinfo(np.int64).max

_SENT = ("query_lens", "seq_lens", "relay_rows", "sample_rows", "kv_offset", "kv_window")
"""Attributes of a plan that travel to other ranks by name, beside its slots and arrays."""

_INDICES = ("input_ids", "positions", "slot_mapping", "last_token_indices")
"""Arrays that are int64 unless they are named in `int32`."""

STAND_IN = -1
"""Where no id is known yet while the host lays them out. The check of SENTINEL_ESCAPED lets none be uploaded."""

_MAGIC = b"batchstate plan 1\n"
_SIZES = struct.Struct("<III")  # bytes of the header, checksum of the header, checksum of the arrays
_DTYPES = {str(dtype): dtype for dtype in NUMPY_DTYPES.values()}
_FIELDS = {
    "num_tokens": int,
    "num_padded_tokens": int,
    "bounded": bool,
    "exact": bool,
    "reach": int,
    "has_ids": bool,
    "deferred": bool,
    "int32": list,
}
_REQUIRED = {"slots", "generations", "query_lens", "seq_lens", "relay_rows", "sample_rows"}
_REQUIRED |= {"extra positions", "extra query_start_loc", "extra kv_lens", "extra last_token_indices"}
_REMEDY = "pass what `ForwardPlan.to_bytes` returned, whole, from a rank with the same version of the library"


def flash_attention(pages: npt.NDArray[np.int32], kv_lens: Ints, page_size: int, num_rows: int) -> Arrays:
    """Arguments of FlashAttention's variable-length functions for paged KV, int32; padded rows have no pages.

    `kv_start_loc` [num_rows + 1] (`cu_seqlens_k`) and `block_table` [num_rows, most pages of a request].
    """
    counts = -(-kv_lens // page_size)
    most = int(counts.max(initial=0))
    table = np.zeros((num_rows, most), dtype=np.int32)
    table[: len(kv_lens)] = np.where(np.arange(most) < counts[:, None], pages[:, :most], 0)
    return {"kv_start_loc": _starts(kv_lens, num_rows), "block_table": table}


def flashinfer(pages: npt.NDArray[np.int32], kv_lens: Ints, page_size: int, num_rows: int) -> Arrays:
    """Arguments of `plan` of flashinfer's wrappers, int32; padded rows have no pages.

    `kv_page_indptr` [num_rows + 1], `kv_page_indices` [pages] and `kv_last_page_len` [num_rows] (`paged_kv_*`).
    """
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
    check_range(0, int(lengths.sum()), starts.dtype, f"{_PLAN}: tokens of all requests together")
    np.cumsum(lengths, out=starts[1 : len(lengths) + 1])
    starts[len(lengths) + 1 :] = starts[len(lengths)]
    return starts


LAYOUTS: dict[str, Callable[[npt.NDArray[np.int32], Ints, int, int], Arrays]] = {
    "flash_attention": flash_attention,
    "flashinfer": flashinfer,
}
"""Layout -> its function of `pages` int32[n, m], the pages of each live request, and `kv_lens` int64[n]."""


def layout_arrays(
    layouts: Sequence[str],
    table: npt.NDArray[np.int32],
    kv_lens: Ints,
    page_size: int,
    num_rows: int,
    offset: Ints | None,
    bounded: bool,
) -> Arrays:
    """The arrays of some layouts. `table` are the pages of each request, which begin `offset` tokens before position 0.

    Raises:
        ContractError: `flashinfer` with `bounded` lengths.
        ArgumentError: an offset that does not fill whole pages.
    """
    if bounded and "flashinfer" in layouts:
        problem = f"{_PLAN}: expected exact lengths for layout 'flashinfer', got bounds"
        remedy = "resolve the lengths first: flashinfer counts pages on the host; or use 'flash_attention'"
        raise ContractError(problem, "upper_bound", remedy)
    if offset is not None:
        first, rest = np.divmod(offset, page_size)
        if rest.any():
            row = int(np.flatnonzero(rest)[0])
            problem = f"{_PLAN}: row {row} has a kv_offset of {rest[row]} tokens over {first[row]} pages of {page_size}"
            remedy = "page lists begin with a page: let the offset fill whole pages, or plan without layouts"
            raise ArgumentError(problem, int(rest[row]), remedy)
        columns = np.minimum(np.arange(table.shape[1]) + first[:, None], table.shape[1] - 1)
        table = np.take_along_axis(table, columns, axis=1)
    arrays: Arrays = {}
    for name in layouts:
        arrays |= LAYOUTS[name](table, kv_lens, page_size, num_rows)
    return arrays


def checked_layouts(layouts: str | Iterable[str], int32: Collection[str], subject: str) -> tuple[str, ...]:
    """The names of layouts.

    Raises:
        DeclarationError: an unknown layout, or array of indices.
    """
    names = (layouts,) if isinstance(layouts, str) else tuple(layouts)
    for argument, asked, allowed in (("layouts", names, LAYOUTS), ("int32", int32, _INDICES)):
        for name in asked:
            if name not in allowed:
                raise DeclarationError(f"{subject}: unknown name {name!r} in {argument}", name, one_of(allowed, name))
    return names


@ranges("of", "upload")
@final
@attrs.define(eq=False, repr=False)
class ForwardPlan:
    """The host's part of one forward. Made by `of`, used once by `FutureMap.resolve_forward_inputs`.

    Attributes:
        slots: the rows, padding included.
        num_reqs: requests.
        num_tokens: tokens of the requests.
        num_padded_tokens: tokens and padding.
        query_lens: int64[num_reqs], tokens that each request puts in.
        seq_lens: int64[num_reqs], tokens that it has with them, or a bound.
        bounded: whether the host knows only bounds of the lengths of requests that the relay feeds.
        bounds: the column that holds them; None where the lengths are exact, or another rank has the column.
        relay_rows: int64[r], requests whose ids come from the relay.
        relayed: their handles.
        sample_rows: int64[s], requests that sample.
        sampled_slots: their handles.
        has_ids: whether the forward takes ids.
        int32: the arrays of indices that are int32.
        token_arrays: name -> array [num_padded_tokens, ...], values of single tokens; `input_ids` among them if the
            host knows any, 0 where it does not.
        deferred: whether these are uploaded at forward entry, and not with the extras.
        extras: name -> array, for `batch.upload(extras=...)`.
        origin: the rows and pages that it was made of; it is refused once they have changed.
        pages: the pool that the KV of the requests lies in, or None.
        kv_offset: int64[num_reqs], tokens in the pages before the first position, or None.
        kv_window: int64[num_reqs], tokens that the pages hold at the most: in the host tier position p lies where
            p - kv_window did; None where no request is in the tier.
    """

    slots: Slots
    num_tokens: int
    num_padded_tokens: int
    query_lens: Ints
    seq_lens: Ints
    bounds: MirroredTensor | None
    relay_rows: Ints
    sample_rows: Ints
    origin: Origin
    extras: dict[str, npt.NDArray[Any]] = attrs.field(factory=dict)
    pages: PagePool | None = None
    kv_offset: Ints | None = None
    kv_window: Ints | None = None
    has_ids: bool = True
    int32: frozenset[str] = frozenset()
    token_arrays: dict[str, Array] = attrs.field(factory=dict)
    deferred: bool = True
    bounded: bool = False
    _exact: bool = True
    _reach: int | None = None
    _shares: int = 0
    _used: bool = False
    num_reqs: int = attrs.field(init=False)
    relayed: Slots = attrs.field(init=False)
    sampled_slots: Slots = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        slots, self.num_reqs = self.slots, len(self.query_lens)
        self.relayed = handles_of(slots, self.relay_rows)
        everyone = len(self.sample_rows) == self.num_reqs
        self.sampled_slots = slots if everyone else handles_of(slots, self.sample_rows)

    def __repr__(self) -> str:
        return f"ForwardPlan({self.num_reqs} requests, {self.num_tokens} tokens, {len(self.relay_rows)} by the relay)"

    @property
    def step(self) -> int:
        """The runtime's step when it was planned."""
        return self.origin.step

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
        kv_offset: object = None,
        tier: LastLocation | None = None,
        window: SupportsIndex | None = None,
        pad_tokens: SupportsIndex | None = None,
        layouts: str | Iterable[str] = (),
        token_arrays: Mapping[str, TokenArray] | None = None,
        has_ids: bool = True,
        deferred: bool = True,
        int32: Collection[str] = (),
    ) -> "ForwardPlan":
        """Plans a forward.

        Args:
            slots: the requests of the batch, padded rows at the end: `batch.slots`, or `batch.pad(n).slots`.
            seq_lens: tokens that each has after this forward, int[n]: a mirrored column, exact or bounded, or an array.
                At least 0, and 0 only where the request puts in none. Values of padded rows are ignored.
            query_lens: tokens that each puts in, one number or int[n].
            prompt_ids: for each request the ids that it puts in, int[query_len], or None where the relay has them. None
                for all: all ids come from the relay. A request that puts in none has none anywhere. Padded
                rows may have an entry, which is ignored.
            samples: mask bool[n] of the requests that sample; all by default. A chunk of a prompt that is not its last
                samples nothing.
            pages: where the KV goes; without it there is no `slot_mapping`.
            kv_offset: tokens that each request has in its pages before its first position, one number or int[n]: those
                of an encoder. `seq_lens` and positions do not count them. The forward that puts in position 0 writes
                them too. With layouts they fill whole pages.
            tier: returned by `HiSparse.map_last_location` for the requests of the host tier in this step. The other
                requests have all their KV in their pages.
            window: positions that each token reads, its own included; None for all before it. Pages that were given
                back in front are checked against it. It is counted from the bound where lengths are bounded.
            pad_tokens: tokens of a captured graph; padded ones have id 0, position 0 and token 0 of KV memory.
            layouts: `flash_attention` or `flashinfer`, for arrays that these take besides.
            token_arrays: name -> further values of tokens, which become `inputs.arrays`.
            has_ids: False for a rank of a pipeline that takes hidden states. `prompt_ids` then says, as on the first
                rank, which requests the relay feeds; nothing is laid out for ids, and none are taken.
            deferred: whether ids of prompts and token arrays are uploaded at forward entry, on its stream; else they
                are among the extras, in the step's copy.
            int32: which of `input_ids`, `positions`, `slot_mapping` and `last_token_indices` kernels take as int32.

        Raises:
            ShapeError: not one number, mask or array of ids a request; ids that are not `query_len`.
            DtypeError: no integers.
            ArgumentError: more tokens put in than there are, or than are allocated; fewer padded tokens than tokens; a
                request samples that puts in none.
            ValueOverflowError: lengths or tokens beyond int32, which kernels take.
            ContractError: `flashinfer` with bounds, whose page counts the host would have to know; requests of the
                host tier with layouts, whose kernels do not read host memory.
            DeclarationError: an unknown layout, or array of indices; a token array with a name that is taken.
            Violation: UNIT_MISMATCH: pages or locations as slots; DERIVED_STALE, at `cheap`: slots and lengths of two
                sets of rows, or exact lengths that are not those that the pages were given; SENTINEL_ESCAPED: a
                negative id; SLOT_ZERO_ALLOCATED: a padded row before a request; PAGE_RELEASED: a token reads what was
                given back.
        """
        int32 = frozenset(int32)
        names = checked_layouts(layouts, int32, _PLAN)
        named = {} if token_arrays is None else token_arrays
        if _IDS in named:
            raise DeclarationError(f"{_PLAN}: token_arrays are {named!r}", named, "pass ids as `prompt_ids`")
        num_rows, used = len(slots), np.flatnonzero(slots.np)
        num_reqs = int(used[-1]) + 1 if used.size else 0  # behind them lie padded rows
        where: Where = {"object": _PLAN, "operation": "plan", "step": slots.runtime.step}
        if slots.unit != Slots.unit:
            invariants.unit_mismatch(str(Slots.unit), str(slots.unit), **where)
        invariants.slot_zero_allocated(slots.np[:num_reqs], **where)
        row_set = slots.row_set
        for numbers in (seq_lens, query_lens):
            if isinstance(numbers, MirroredTensor) and numbers.row_set is not None:
                row_set.check_same(numbers.row_set, numbers, **where)
        lens, bounds = _lengths(seq_lens, num_reqs, num_rows)
        queries = _per_request(query_lens, num_reqs, num_rows, f"{_PLAN}: query_lens")
        _check_queries(queries, lens)
        starts, positions = _offsets(queries), arange_per_row(lens - queries, queries)
        num_tokens = int(starts[-1])
        reach = None if window is None else count(window, f"{_PLAN}: window", least=1)
        subject = f"{_PLAN}: pad_tokens"
        padded_tokens = num_tokens if pad_tokens is None else count(pad_tokens, subject, least=num_tokens)
        check_range(0, padded_tokens, _INT32, subject)
        id_dtype = torch.int32 if _IDS in int32 else torch.int64
        prompts = None if prompt_ids is None else TokenArray(prompt_ids, id_dtype, fill=STAND_IN, non_negative=True)
        ids = [] if prompts is None else prompts.values(queries, num_rows, f"{_PLAN}: prompt_ids")
        values = {name: array.values(queries, num_rows, f"{_PLAN}: {name}") for name, array in named.items()}
        fed = queries > 0
        if prompts is not None:
            fed &= np.array([row is None for row in ids], dtype=np.bool_)
        if not has_ids and bounds is None:
            fed[:] = False
        relay_rows = np.flatnonzero(fed)
        sample_rows = rows_that_sample(samples, queries, num_rows)
        offset = None if kv_offset is None else _per_request(kv_offset, num_reqs, num_rows, f"{_PLAN}: kv_offset")
        if offset is not None and (pages is None or np.count_nonzero(offset < 0)):
            least = int(offset.min(initial=0))
            problem = f"{_PLAN}: expected a kv_offset of 0 or more and a PagePool, got {least} and {pages!r}"
            remedy = "pass pages=, the pool that holds the tokens of the encoder, and how many there are"
            raise ArgumentError(problem, least, remedy)
        window = None
        if tier is not None:
            window = _window(tier, row_set, lens, queries, where)
            if pages is None or offset is not None or names:
                remedy = "pass pages; attention of the host tier reads `hot_from` and its tables"
                raise ContractError(f"{_PLAN}: {tier!r} without pages, or with kv_offset or layouts", tier, remedy)
        plan = cls(
            slots=slots,
            num_tokens=num_tokens,
            num_padded_tokens=padded_tokens,
            query_lens=queries,
            seq_lens=lens,
            bounds=bounds if len(relay_rows) else None,
            bounded=bounds is not None and len(relay_rows) > 0,
            exact=bounds is None,
            reach=reach,
            relay_rows=relay_rows,
            sample_rows=sample_rows,
            has_ids=has_ids,
            int32=int32,
            deferred=deferred,
            kv_offset=offset,
            kv_window=window,
            **_origin_of(slots, pages),
        )
        if pages is not None:
            plan._check_lengths(pages)
        if has_ids and prompts is not None and any(row is not None and len(row) for row in ids):
            laid = prompts.laid_out(ids, starts, padded_tokens)
            laid[num_tokens:] = laid[plan.relay_tokens()] = 0
            prompts.check(laid, {**where, "column": _IDS})
            plan.token_arrays[_IDS] = laid
        for name, array in named.items():
            plan.token_arrays[name] = laid = array.laid_out(values[name], starts, padded_tokens)
            array.check(laid, {**where, "column": name})
        arrays = plan._arrays(starts, positions, names)
        if tier is not None:
            hot_from = np.zeros(num_rows, dtype=np.int64)
            at = _tier_rows(tier, row_set, where)
            hot_from[at] = tier.hot_from[: at.size]
            backups = {name: extra.copy() for name, extra in tier.extras.items() if name.startswith("backup_")}
            arrays |= {"hot_from": hot_from, **backups}
        plan.extras = DerivedArrays(arrays, plan.origin)
        return plan

    @property
    def prompt_ids(self) -> Array | None:
        """Ids that the host knows, [num_padded_tokens], 0 elsewhere; None if it knows none."""
        return self.token_arrays.get(_IDS)

    @property
    def id_dtype(self) -> torch.dtype:
        """The dtype of the ids."""
        return torch.int32 if _IDS in self.int32 else torch.int64

    def upload(self, *, writes: Sequence[TableWrite] = (), extras: Mapping[str, object] | None = None) -> Extras:
        """Sends the plan to the device on the current stream in one copy, for an engine that has no batch class.

        Args:
            writes: table writes, as for `Batch.upload`.
            extras: further host arrays by name.

        Returns:
            the device tensors of the extras.

        Raises:
            As `Batch.upload`, and SLOT_SHARED, at `cheap`: a request stands in two rows.
        """
        runtime, slots = self.slots.runtime, self.slots.np
        runtime.check_owner(f"{_PLAN}.upload")
        self.check(None, "upload")
        if self.pages is not None:
            self.pages.slots.rows_of(self.slots, "upload", unique=True, padded=True)
        elif levels.cheap:
            invariants.slot_shared(slots, object=self, operation="upload", step=runtime.step)
        upload, uploaded, scatter = packed_step(runtime, [slots], writes, self.extras | dict(extras or {}))
        if scatter is not None:
            scatter()
        uploaded.row_set = self.slots.row_set
        uploaded.slots = slots, DeviceSide(ReadyTensor.uploaded(upload.view(0), upload))
        return uploaded

    def kv_index(self, rows: Ints | slice, positions: Ints) -> Ints:
        """Where in its request's pages a position lies, in tokens, int64[t]; `rows` of the requests, int64[t]."""
        if self.kv_offset is not None:
            positions = positions + self.kv_offset[rows]
        return positions if self.kv_window is None else positions % self.kv_window[rows]

    @property
    def kv_ends(self) -> Ints:
        """Tokens that the pages hold of each request with this forward, or a bound, int64[num_reqs]."""
        ends = self.seq_lens
        if self.kv_offset is not None:  # with its first token a request has those of its encoder
            ends = np.where(ends > 0, ends + self.kv_offset, 0)
        return ends if self.kv_window is None else np.minimum(ends, self.kv_window)

    @property
    def kv_starts(self) -> Ints:
        """Tokens that they held before, int64[num_reqs]; an encoder's are new with position 0."""
        starts = self.seq_lens - self.query_lens
        if self.kv_offset is not None:
            starts = np.where(starts == 0, 0, starts + self.kv_offset)
        return starts if self.kv_window is None else np.minimum(starts, self.kv_window)

    def to_bytes(self) -> bytes:
        """The plan for other ranks of its group, which have the same slots and pages: see `from_bytes`."""
        header = {name: getattr(self, name) for name in _FIELDS if name not in ("exact", "reach")}
        header |= {"exact": self._exact, "reach": self._reach or 0, "int32": sorted(self.int32)}
        numbers: dict[str, Array] = {"slots": self.slots.np, "generations": self.slots.generations}
        numbers |= {name: getattr(self, name) for name in _SENT if getattr(self, name) is not None}
        values = {f"token {name}": array for name, array in self.token_arrays.items()}
        extras = {f"extra {name}": array for name, array in self.extras.items()}
        return _packed(header, numbers | values | extras)

    @classmethod
    def from_bytes(cls, data: bytes, owner: SlotPool | Runtime, *, pages: PagePool | None = None) -> "ForwardPlan":
        """A plan that another rank has made, for this one: nothing is planned again.

        Args:
            data: returned by `to_bytes` there.
            owner: the slot pool of this rank, which was given the same calls as the other's: then a relay over it has
                the ids that are not known. Or a runtime, where the ranks share no slots: then a forward takes its
                inputs by `ForwardInputs.of` alone.
            pages: the page pool of this rank, if it has one that was given the same calls.

        Raises:
            ArgumentError: bytes that are not a plan, or were changed on the way; pages of other slots, or with fewer
                tokens than the plan.
            Violation: SLOT_STALE_HANDLE, SLOT_OUT_OF_RANGE: the ranks have come to different requests;
                DERIVED_STALE, at `cheap`: to different lengths.
        """
        pool = owner if isinstance(owner, SlotPool) else None
        if pages is not None and pages.slots is not pool:
            problem = f"{_PLAN}.from_bytes: expected pages over {owner!r}, got {pages!r}"
            raise ArgumentError(problem, pages, "pass pages of its slots")
        header, arrays = _unpacked(bytes(data))  # a frame or shared memory is a memoryview
        runtime = owner.runtime if isinstance(owner, SlotPool) else owner
        numbers, generations = arrays.pop("slots"), arrays.pop("generations")
        sent: dict[str, Any] = {name: arrays.pop(name, None) for name in _SENT}
        pool_id = 0 if pool is None else pool.pool_id
        slots = Slots.of_pool(runtime, numbers, generations, pool_id=pool_id, name="slots")
        if pool is not None:
            pool.rows_of(slots, "from_bytes", padded=True)
        values = {name[len("token ") :]: array for name, array in arrays.items() if name.startswith("token ")}
        extras = {name[len("extra ") :]: array for name, array in arrays.items() if name.startswith("extra ")}
        header |= {"int32": frozenset(header["int32"]), "reach": header["reach"] or None}
        plan = cls(slots=slots, bounds=None, token_arrays=values, **header, **sent, **_origin_of(slots, pages))
        if not plan.deferred:
            extras |= values  # the same arrays, by which the upload is known
        plan.extras = DerivedArrays(extras, plan.origin)
        if pages is not None:
            plan._check_lengths(pages)
        return plan

    @property
    def direct(self) -> bool:
        """Whether the ids are the relay's entries end to end, row by row, with nothing between or behind."""
        queries = self.query_lens
        uniform = len(self.relay_rows) == self.num_reqs > 0 and bool((queries == queries[0]).all())
        padded_rows = self.num_rows > self.num_reqs
        return (
            uniform and self.num_rows * int(queries[0]) == self.num_padded_tokens and not (self.bounded and padded_rows)
        )

    def check_unused(self) -> None:
        """Refuses to resolve the forward's inputs a second time: FUTURE_CONSUMED, at `cheap`."""
        if levels.cheap and self.num_reqs:
            if not self._used:
                times_checked[Code.FUTURE_CONSUMED] += 1
                return
            operation, step, rows = "resolve_forward_inputs", self.slots.runtime.step, self.slots.np[: self.num_reqs]
            where: Where = {"object": self, "operation": operation, "step": step}
            used = np.ones(rows.size, dtype=np.bool_)
            writer, reader = f"the plan of step {self.step}", f"{operation} in step {step}"
            invariants.future_consumed(rows, used, lambda row: writer, reader, **where)

    def use(self) -> None:
        """Notes that the forward's inputs are resolved."""
        self._used = True

    def check(self, row_set: RowSet | None, operation: str) -> None:
        """Refuses the plan, at `cheap`, for other rows than its own, and once their pages have changed. O(rows).

        Raises:
            Violation: DERIVED_STALE; PAGE_OWNER: a page that it writes has got further holders since.
        """
        where: Where = {"object": self, "operation": operation, "step": self.slots.runtime.step}
        if row_set is not None:
            self.origin.check_rows(row_set, **where)
        self.origin.check(**where)
        pages = self.pages
        if levels.cheap and pages is not None and pages.shares.last != self._shares:
            shared = np.repeat(pages.shares.since(self.slots.np[: self.num_reqs], self._shares), self.query_lens)
            written = self.extras["slot_mapping"][: self.num_tokens][shared] // pages.page_size
            pages.check_unshared(written, operation)

    def note_written(self) -> None:
        """Notes that the forward begins on the current stream, and writes the tokens that its requests put in."""
        if self.pages is not None:
            rows, ends = self.slots.np[: self.num_reqs], self.kv_ends
            if self.bounded:
                ends = np.minimum(ends, self.pages.committed_lengths[rows])
            self.pages.writes.launched(rows, ends, self.kv_starts)

    def locations_at(self, positions: Ints) -> Ints:
        """Where the pages have the KV of tokens at the positions int64[num_tokens], int64[num_tokens]. For checks."""
        if self.pages is None:
            return np.zeros_like(positions)
        rows = self._rows_of_tokens()
        index = self.kv_index(rows, positions)
        return _locations(self._page_table(self.pages), rows, index, self.pages.page_size)

    def _rows_of_tokens(self) -> Ints:
        """The row of each token's request, int64[num_tokens]."""
        return np.arange(self.num_reqs, dtype=np.int64).repeat(self.query_lens)

    def relay_tokens(self) -> Ints:
        """Indices of the relay's ids among the tokens, int64, request by request."""
        queries = self.query_lens[self.relay_rows]
        first = _offsets(self.query_lens)[self.relay_rows] - _offsets(queries)[:-1]
        return np.arange(queries.sum(), dtype=np.int64) + np.repeat(first, queries)

    def _arrays(self, starts: Ints, positions: Ints, layouts: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """The extras, from the positions int64[t] of tokens and the starts int64[n + 1] of requests."""
        size, num_rows = self.num_padded_tokens, self.num_rows
        last = starts[1:] - 1
        arrays: dict[str, npt.NDArray[Any]] = {
            "positions": self._indices("positions", positions, size),
            "query_start_loc": _padded(starts, num_rows + 1, self.num_tokens, np.int32),
            "kv_lens": _padded(self.seq_lens, num_rows, 0, np.int32),
        }
        if self.sampled_slots is self.slots:
            arrays["last_token_indices"] = self._indices("last_token_indices", last, num_rows)
        else:
            sampled = last[self.sample_rows]
            arrays["last_token_indices"] = self._indices("last_token_indices", sampled, len(sampled))
            arrays["sample_slots"] = self.sampled_slots.np.copy()  # an engine may make a tensor of each
        if self.pages is not None:
            page_size = self.pages.page_size
            if self.kv_offset is None and self.kv_window is None:
                slots, begins = self.slots.np[: self.num_reqs], self.seq_lens - self.query_lens
                mapping = self.pages.locations_of(slots, begins, self.query_lens, positions)
            else:
                table, rows = self._page_table(self.pages), self._rows_of_tokens()
                mapping = _locations(table, rows, self.kv_index(rows, positions), page_size)
            arrays["slot_mapping"] = self._indices("slot_mapping", mapping, size)
            if layouts:
                table, offset = self._page_table(self.pages), self.kv_offset
                arrays |= layout_arrays(layouts, table, self.seq_lens, page_size, num_rows, offset, self.bounded)
        elif layouts:
            raise ArgumentError(f"{_PLAN}: layouts {list(layouts)} need pages", layouts, "pass pages=, the PagePool")
        taken = sorted(({*arrays, *_INDICES} - {_IDS}) & self.token_arrays.keys())
        if taken:
            problem = f"{_PLAN}: token arrays {taken} have names that the plan uses itself"
            raise DeclarationError(problem, taken, "rename them")
        if not self.deferred:
            arrays |= self.token_arrays
        if self.has_ids and self.prompt_ids is None and not self.direct:
            arrays[_IDS] = self._indices(_IDS, np.zeros(0, np.int64), size)  # where the relay puts in, and padding
        if len(self.relay_rows) and not self.direct:
            arrays["relay_slots"] = self.relayed.np.copy()
            arrays["relay_tokens"] = self.relay_tokens()
            if self.bounded:
                arrays["relay_rows"] = self.relay_rows
        if self.bounded and self.pages is not None:
            for name, numbers in (("relay_kv_offset", self.kv_offset), ("relay_kv_window", self.kv_window)):
                if numbers is not None:
                    arrays[name] = numbers[self.relay_rows]
        return arrays

    def _indices(self, name: str, values: Ints, size: int) -> npt.NDArray[np.integer]:
        """`values` in the dtype of an array of indices, then 0 up to `size` elements."""
        narrow = name in self.int32
        if narrow:
            check_range(0, int(values.max(initial=0)), _INT32, f"{_PLAN}: {name}")
        return _padded(values, size, 0, _INT32 if narrow else _INT64)

    def _page_table(self, pages: PagePool) -> npt.NDArray[np.int32]:
        """The pages of each request, int32[num_reqs, most pages of a request]."""
        return pages.page_table[self.slots.np[: self.num_reqs]]

    def _check_lengths(self, pages: PagePool) -> None:
        """Each request has pages for what it reads; an exact length is the one that the pages were given."""
        live = self.slots if self.num_rows == self.num_reqs else handles_of(self.slots, np.arange(self.num_reqs))
        allocated, ends = pages.allocated(live), self.kv_ends
        short = np.flatnonzero(allocated < ends)
        if short.size:
            row = int(short[0])
            problem = f"{_PLAN}: request in row {row} has {ends[row]} tokens and pages for {allocated[row]}"
            raise ArgumentError(problem, int(ends[row]), "grow the pages first (`pages.extend` or `pages.advance`)")
        fed = self.query_lens > 0
        pages.check_readable(live.np[fed], self.kv_starts[fed], "plan", window=self._reach)
        if self._exact and levels.cheap:
            outside = slice(None) if self.kv_window is None else self.kv_window == NO_END  # the tier checks its own
            pages.check_committed(live.np[outside], ends[outside], "plan")


def _origin_of(slots: Slots, pages: PagePool | None) -> dict[str, Any]:
    """The arguments of a plan made now that say of what it is derived."""
    read, last, shares = (None, 0, 0) if pages is None else (pages.epochs, pages.epochs.last, pages.shares.last)
    origin = Origin("plan", slots.runtime.step, slots.row_set, read, last)
    return {"origin": origin, "pages": pages, "shares": shares}


# Arguments


def handles_of(slots: Slots, rows: Ints) -> Slots:
    """The handles in some rows, without a device side of their own."""
    if len(rows) == len(slots):
        return slots
    return Slots.of_pool(slots.runtime, slots.np[rows], slots.generations[rows], pool_id=slots.pool_id, name=slots.name)


def _lengths(seq_lens: object, num_reqs: int, num_rows: int) -> tuple[Ints, MirroredTensor | None]:
    """Lengths int64[num_reqs], and the column if they are bounds."""
    subject = f"{_PLAN}: seq_lens"
    if isinstance(seq_lens, MirroredTensor) and seq_lens.unit is None and seq_lens.contract is Contract.UPPER_BOUND:
        return _per_request(seq_lens.np, num_reqs, num_rows, subject), seq_lens
    return _per_request(seq_lens, num_reqs, num_rows, subject), None


def _per_request(numbers: object, num_reqs: int, num_rows: int, subject: str) -> Ints:
    """One number per request, int64[num_reqs]; those of padded rows are dropped."""
    array = as_array(numbers, subject)
    rows = num_rows if array.ndim == 1 and array.shape[0] == num_rows else num_reqs
    counts = amounts(array, rows, subject)
    return np.full(num_reqs, counts, dtype=np.int64) if counts.ndim == 0 else counts[:num_reqs]


def _live(tier: LastLocation) -> Slots:
    """The requests of a step of the host tier, without padding."""
    return tier.slots.split([n := int(np.count_nonzero(tier.slots.np)), len(tier.slots) - n])[0]


def _tier_rows(tier: LastLocation, row_set: RowSet, where: Where) -> Ints:
    """The rows of these requests in a plan, int64[n]."""
    rows = row_set.rows_of(_live(tier).row_set, repr(tier), **where)
    return np.arange(np.count_nonzero(tier.slots.np)) if rows is None else rows


def _window(tier: LastLocation, row_set: RowSet, lens: Ints, queries: Ints, where: Where) -> Ints:
    """Tokens of each request that its pages hold at the most, int64[num_reqs]; `NO_END` outside of the tier."""
    window = np.full(len(lens), NO_END, dtype=np.int64)
    rows, mapped = _tier_rows(tier, row_set, where), np.flatnonzero(tier.owners.np)
    window[rows] = tier.hot_tokens
    counts = np.bincount(tier.owners.np[mapped], minlength=int(tier.slots.np.max(initial=0)) + 1)[_live(tier).np]
    ends = tier.positions[mapped][np.cumsum(counts) - 1] + 1
    wrong = rows[(lens[rows] != ends) | (queries[rows] != counts)]
    if wrong.size:
        row, length = int(wrong[0]), int(lens[wrong[0]])
        problem = f"{_PLAN}: row {row} puts in {queries[row]} tokens up to length {length}, but {tier!r} mapped others"
        raise ArgumentError(problem, length, "give `map_last_location` the same lengths and tokens, in the same step")
    return window


def _check_queries(queries: Ints, lens: Ints) -> None:
    """Refuses a request that puts in more than it has, and lengths beyond what kernels count."""
    check_range(0, max(int(lens.max(initial=0)), int(queries.sum())), _INT32, f"{_PLAN}: tokens")
    wrong = np.flatnonzero((queries < 0) | (queries > lens))
    if wrong.size:
        row = int(wrong[0])
        problem = f"{_PLAN}: row {row}: expected 0 <= query_lens <= seq_lens, got {queries[row]} and {lens[row]}"
        raise ArgumentError(problem, int(queries[row]), "let seq_lens count the tokens of this step too")


def rows_that_sample(samples: object, queries: Ints, num_rows: int) -> Ints:
    """Rows that sample, int64[s]; each has a last token."""
    num_reqs = len(queries)
    mask = np.ones(num_reqs, dtype=np.bool_) if samples is None else as_array(samples, f"{_PLAN}: samples")
    if mask.shape == (num_rows,):
        mask = mask[:num_reqs]
    if mask.shape != (num_reqs,) or (mask.dtype != np.bool_ and mask.size):
        problem = f"{_PLAN}: samples: expected bool[{num_reqs}], got {mask.dtype}{list(mask.shape)}"
        raise ShapeError(problem, mask.shape, "pass a mask, one boolean per request")
    rows = np.flatnonzero(mask)
    without = rows[queries[rows] == 0]
    if without.size:
        problem = f"{_PLAN}: the request in row {without[0]} samples and puts in no token"
        raise ArgumentError(problem, int(without[0]), "pass samples=query_lens > 0")
    return rows


# Requests of unequal lengths laid end to end


def _offsets(lengths: Ints) -> Ints:
    """Where each range begins, and where the last ends: int64[n + 1]."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _padded(values: npt.NDArray[np.integer], size: int, fill: int, dtype: npt.DTypeLike) -> npt.NDArray[np.integer]:
    """`values` as `dtype`, then `fill` up to `size` elements."""
    if len(values) == size and values.dtype == dtype:
        return values
    result = np.full(size, fill, dtype=dtype)
    result[: len(values)] = values
    return result


def _locations(pages: npt.NDArray[np.int32], rows: Ints, positions: Ints, page_size: int) -> Ints:
    """Where the KV at `positions` of the requests in `rows` lies, int64; `pages` int32[num_reqs, m] of each request."""
    columns = positions // page_size  # a remainder would cost as much as all that follows
    locations: Ints = (pages[rows, columns] - columns) * page_size + positions
    return locations


# Plans as bytes, for other ranks


def _packed(header: Mapping[str, object], arrays: Mapping[str, Array]) -> bytes:
    """The header with a checksum, then the arrays, each with its name, dtype and shape."""
    listed = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": listed}).encode()
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return _MAGIC + _SIZES.pack(len(text), zlib.crc32(text), zlib.crc32(body)) + text + body


def _unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The header and the arrays, each in memory of its own.

    Raises:
        ArgumentError: bytes that `_packed` did not make.
    """
    start = len(_MAGIC) + _SIZES.size
    if len(data) < start or not data.startswith(_MAGIC):
        raise _damaged("no plan of this version")
    size, of_text, of_body = _SIZES.unpack_from(data, len(_MAGIC))
    text, body = data[start : start + size], data[start + size :]
    if len(text) < size or zlib.crc32(text) != of_text or zlib.crc32(body) != of_body:
        raise _damaged("a plan that was cut or changed on the way")
    arrays: dict[str, Array] = {}
    at = 0
    try:
        header: dict[str, Any] = json.loads(text)
        for name, dtype, shape in header.pop("arrays"):
            kind = _DTYPES[dtype]
            nbytes = math.prod(shape) * kind.itemsize
            arrays[name] = np.frombuffer(body[at : at + nbytes], dtype=kind).reshape(shape).copy()
            at += nbytes
        _check(header, arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(f"a plan that does not agree with itself ({error})") from None
    return header, arrays


def _check(header: dict[str, Any], arrays: dict[str, Array]) -> None:
    """Refuses a header with other fields, and arrays of other lengths than the header says, with Python's errors."""
    if {name: type(value) for name, value in header.items()} != _FIELDS:
        raise ValueError(f"a header of {header!r:.200}")
    if missing := _REQUIRED - arrays.keys():
        raise ValueError(f"no {sorted(missing)}")
    rows, requests, tokens = len(arrays["slots"]), len(arrays["query_lens"]), header["num_padded_tokens"]
    lengths = {"slots": rows, "generations": rows, "extra kv_lens": rows, "extra query_start_loc": rows + 1}
    lengths |= dict.fromkeys(("query_lens", "seq_lens", "kv_offset", "kv_window"), requests)
    lengths |= dict.fromkeys(("extra positions", "extra slot_mapping", "extra input_ids"), tokens)
    lengths |= dict.fromkeys((name for name in arrays if name.startswith("token ")), tokens)
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != lengths.get(name, len(array)):
            raise ValueError(f"{name} has shape {list(array.shape)}")
    for name in ("relay_rows", "sample_rows"):
        if arrays[name].size and not 0 <= arrays[name].min() <= arrays[name].max() < requests:
            raise ValueError(f"{name} beyond {requests} requests")
    if not requests <= rows or not int(arrays["query_lens"].sum()) == header["num_tokens"] <= tokens:
        raise ValueError(f"{header['num_tokens']} tokens")


def _damaged(problem: str) -> ArgumentError:
    return ArgumentError(f"{_PLAN}.from_bytes: {problem}", problem, _REMEDY)
