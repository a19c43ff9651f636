"""`ForwardPlan`: the host's part of a forward's inputs, computed in numpy and uploaded in the step's one copy.

One call makes the plan of a step::

    plan = ForwardPlan.of(batch.slots, batch.seq_lens, query_lens, prompt_ids=ids, pages=pages)
    uploaded = batch.upload(writes=[extension.entry()], extras=plan.extras)
    inputs = relay.resolve_forward_inputs(plan, uploaded, ids="last_token")  # at forward entry, on its stream

Each request puts in its last `query_len` tokens, of `seq_len` that it has with them: a chunk of its prompt, one decoded
token, or that and drafts. Their ids come from the host (prompts) or from the relay (all others). `slot_mapping` is
vLLM's name for the locations in KV memory that a forward writes (SGLang: `out_cache_loc`); everywhere else a slot is
the row of a request.
"""

import json
import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import Array, Ints, amounts, arange_per_row, as_array, check_range, count
from batchstate._origin import DerivedArrays, Origin, RowSet
from batchstate._step_tokens import StepTokens
from batchstate._upload import Extras, packed_step
from batchstate.errors import ArgumentError, ContractError, DeclarationError, one_of
from batchstate.forward.token_array import TokenArray
from batchstate.invariants import times_checked
from batchstate.kv.last_location import LastLocation
from batchstate.kv.pages import NO_PAGES, PagePool
from batchstate.mirror import Contract, DeviceSide, MirroredTensor, Slots
from batchstate.nvtx import ranges
from batchstate.pools import SlotPool
from batchstate.runtime.base import Runtime
from batchstate.runtime.memory import ReadyTensor, bits_dtype, dtype_of_bits
from batchstate.tables import TableWrite
from batchstate.violations import Code, Where

Index = npt.NDArray[np.integer]
Arrays = dict[str, npt.NDArray[np.int32]]

_PLAN = "ForwardPlan"
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_IDS = "input_ids"
NO_END = np.iinfo(np.int64).max

LAYOUTS = ("flash_attention", "flashinfer")
_INDICES = ("input_ids", "positions", "slot_mapping", "last_token_indices")
"""Arrays that are int64 unless they are named in `int32`."""

_HEADER = ("num_tokens", "num_padded_tokens", "has_ids", "deferred")
_NUMBERS = ("query_lens", "seq_lens", "relay_rows", "sample_rows", "kv_offset", "kv_window")
"""Attributes of a plan that travel to other ranks by name."""

_MAGIC = b"batchstate plan 2\n"
"""Before a checksum of the rest, a header in one line, and the arrays that it lists."""

_STAND_IN = -1
"""Where no id is known yet while the host lays them out. The check of SENTINEL_ESCAPED lets none be uploaded."""


def _starts(lengths: Ints, num_rows: int) -> npt.NDArray[np.int32]:
    """Where ranges of so many elements begin, laid end to end, and where the last ends, int32[num_rows + 1]."""
    ends, n = lengths.cumsum(), len(lengths)
    total = int(ends[-1]) if n else 0
    check_range(0, total, _INT32, f"{_PLAN}: tokens of all requests together")
    starts = np.zeros(num_rows + 1, dtype=np.int32)
    starts[1 : n + 1] = ends
    starts[n + 1 :] = total
    return starts


def layout_arrays(
    layouts: Sequence[str],
    pages: PagePool,
    rows: Ints,
    kv_lens: Ints,
    num_rows: int,
    offset: Ints | None,
    bounded: bool,
    there: int,
    new: Ints = NO_PAGES,
) -> Arrays:
    """The arrays of some layouts, for slots int64[n] with `kv_lens` int64[n] tokens; padded rows have no pages.

    Their pages begin `offset` tokens before position 0. `new` and `there` as for `PagePool.page_lists`. `ForwardInputs`
    has the shapes. Raises `ContractError` for `flashinfer` with `bounded` lengths, `ArgumentError` if an offset fills
    no whole pages.
    """
    if bounded and "flashinfer" in layouts:
        problem = f"{_PLAN}: expected exact lengths for layout 'flashinfer', got bounds"
        remedy = "resolve the lengths first: flashinfer counts pages on the host; or use 'flash_attention'"
        raise ContractError(problem, "upper_bound", remedy)
    firsts, size, n = None, pages.page_size, len(kv_lens)
    if offset is not None:
        firsts, rest = np.divmod(offset, size)
        if rest.any():
            row = int(np.flatnonzero(rest)[0])
            problem = f"{_PLAN}: row {row} has a kv_offset of {rest[row]} tokens over {firsts[row]} pages of {size}"
            remedy = "page lists begin with a page: let the offset fill whole pages, or plan without layouts"
            raise ArgumentError(problem, int(rest[row]), remedy)
    arrays: Arrays = {"kv_start_loc": _starts(kv_lens, num_rows)} if "flash_attention" in layouts else {}
    counts = -(-kv_lens // size)
    lists = pages.page_lists(rows, there, counts, firsts, new, num_rows)
    if "flash_attention" in layouts:
        arrays["block_table"] = lists
    if "flashinfer" in layouts:
        last = np.zeros(num_rows, dtype=np.int32)
        last[:n] = kv_lens - np.maximum(counts - 1, 0) * size
        indices = lists[:n][np.arange(lists.shape[1]) < counts[:, None]]
        arrays |= {"kv_page_indptr": _starts(counts, num_rows), "kv_page_indices": indices, "kv_last_page_len": last}
    return arrays


def checked_layouts(layouts: str | Iterable[str], int32: Collection[str], subject: str) -> tuple[str, ...]:
    """The names of layouts. Raises `DeclarationError` for an unknown one, or an unknown array of indices."""
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
        num_reqs, num_tokens: requests, and their tokens.
        num_padded_tokens: tokens and padding.
        query_lens: int64[num_reqs], tokens that each request puts in.
        seq_lens: int64[num_reqs], tokens that it has with them, or a bound.
        bounded: whether the host knows only bounds of the lengths of requests that the relay feeds.
        bounds: the column that holds bounds; None where the lengths are exact, or another rank has the column.
        relay_rows, relayed: int64[r], requests whose ids come from the relay, and their handles.
        direct: whether the ids are the relay's entries end to end, row by row, with nothing between or behind.
        sample_rows, sampled_slots: int64[s], requests that sample, and their handles.
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
    _exact: bool = True
    _reach: int | None = None
    _shares: int = 0
    _used: bool = False
    num_reqs: int = attrs.field(init=False)
    bounded: bool = attrs.field(init=False)
    relayed: Slots = attrs.field(init=False)
    sampled_slots: Slots = attrs.field(init=False)
    direct: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.num_reqs = len(self.query_lens)
        self.bounded = not self._exact and self.relay_rows.size > 0
        self.relayed = handles_of(self.slots, self.relay_rows)
        everyone = len(self.sample_rows) == self.num_reqs
        self.sampled_slots = self.slots if everyone else handles_of(self.slots, self.sample_rows)
        queries = self.query_lens
        self.direct = (
            self.relay_rows.size == self.num_reqs > 0
            and self.num_rows * int(queries[0]) == self.num_padded_tokens
            and bool((queries == queries[0]).all())
            and not (self.bounded and self.num_rows > self.num_reqs)
        )

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
            slots: the requests of the batch, padded rows at the end: `batch.slots`, or `batch.pad(n).slots`. Other
                arguments may have entries for padded rows, which are ignored.
            seq_lens: tokens that each has after this forward, int[n]: a mirrored column, exact or bounded, or an array.
                At least 0, and 0 only where the request puts in none.
            query_lens: tokens that each puts in, one number or int[n].
            prompt_ids: for each request the ids that it puts in, int[query_len], or None where the relay has them. None
                for all: all ids come from the relay. A request that puts in none has none anywhere.
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
            ArgumentError: more tokens put in than there are, or than are allocated; fewer padded tokens than tokens; a
                request samples that puts in none.
            ValueOverflowError: lengths or tokens beyond int32, which kernels take.
            ContractError: `flashinfer` with bounds, whose page counts the host would have to know; requests of the
                host tier with layouts, whose kernels do not read host memory.
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
        num_rows, rows = len(slots), np.flatnonzero(slots.np)
        num_reqs = int(rows[-1]) + 1 if rows.size else 0  # behind them lie padded rows
        where: Where = {"object": _PLAN, "operation": "plan", "step": slots.runtime.step}
        if slots.unit != Slots.unit:
            invariants.unit_mismatch(str(Slots.unit), str(slots.unit), **where)
        invariants.slot_zero_allocated(slots.np[:num_reqs], **where)
        for numbers in (seq_lens, query_lens):
            if isinstance(numbers, MirroredTensor) and numbers.row_set is not None:
                slots.row_set.check_same(numbers.row_set, numbers, **where)
        bounds = None
        if isinstance(seq_lens, MirroredTensor) and seq_lens.unit is None and seq_lens.contract is Contract.UPPER_BOUND:
            bounds, seq_lens = seq_lens, seq_lens.np
        lens = _per_request(seq_lens, num_reqs, num_rows, "seq_lens")
        queries = _per_request(query_lens, num_reqs, num_rows, "query_lens")
        num_tokens = int(queries.sum())
        check_range(0, max(int(lens.max(initial=0)), num_tokens), _INT32, f"{_PLAN}: tokens")
        wrong = np.flatnonzero((queries < 0) | (queries > lens))
        if wrong.size:
            row = int(wrong[0])
            problem = f"{_PLAN}: row {row}: expected 0 <= query_lens <= seq_lens, got {queries[row]} and {lens[row]}"
            raise ArgumentError(problem, int(queries[row]), "let seq_lens count the tokens of this step too")
        reach = None if window is None else count(window, f"{_PLAN}: window", least=1)
        subject = f"{_PLAN}: pad_tokens"
        padded_tokens = num_tokens if pad_tokens is None else count(pad_tokens, subject, least=num_tokens)
        check_range(0, padded_tokens, _INT32, subject)
        id_dtype = torch.int32 if _IDS in int32 else torch.int64
        tokens = StepTokens.of_each(queries, num_rows, prompt_ids, samples, id_dtype, _PLAN)
        sampling = tokens.sampling(num_reqs)
        for row in sampling[queries[sampling] == 0][:1].tolist():
            problem = f"{_PLAN}: the request in row {row} samples and puts in no token"
            raise ArgumentError(problem, row, "pass samples=query_lens > 0")
        fed = tokens.fed(num_reqs) if has_ids or bounds is not None else np.zeros(0, dtype=np.int64)
        offset = None if kv_offset is None else _per_request(kv_offset, num_reqs, num_rows, "kv_offset")
        if offset is not None and (pages is None or np.count_nonzero(offset < 0)):
            least = int(offset.min(initial=0))
            problem = f"{_PLAN}: expected a kv_offset of 0 or more and a PagePool, got {least} and {pages!r}"
            remedy = "pass pages=, the pool that holds the tokens of the encoder, and how many there are"
            raise ArgumentError(problem, least, remedy)
        plan = cls(
            slots=slots,
            num_tokens=num_tokens,
            num_padded_tokens=padded_tokens,
            query_lens=queries,
            seq_lens=lens,
            bounds=bounds if fed.size else None,
            exact=bounds is None,
            reach=reach,
            relay_rows=fed,
            sample_rows=sampling,
            has_ids=has_ids,
            int32=int32,
            deferred=deferred,
            kv_offset=offset,
            **_origin_of(slots, pages),
        )
        of_tier = {}
        if tier is not None:
            if pages is None or offset is not None or names:
                remedy = "pass pages; attention of the host tier reads `hot_from` and its tables"
                raise ContractError(f"{_PLAN}: {tier!r} without pages, or with kv_offset or layouts", tier, remedy)
            of_tier = plan._join_tier(tier, where)
        if pages is not None:
            plan._check_lengths(pages)
        if has_ids and tokens.ids is not None and tokens.ids.size:
            laid = np.full(padded_tokens, _STAND_IN, dtype=_INT32 if _IDS in int32 else _INT64)
            laid[:num_tokens][np.repeat(tokens.told == 1, queries)] = tokens.ids
            laid[num_tokens:] = laid[plan.relay_tokens()] = 0
            if levels.cheap:
                of_ids: Where = {**where, "column": _IDS}
                invariants.sentinel_escaped(laid, **of_ids)
            plan.token_arrays[_IDS] = laid
        for name, array in named.items():
            plan.token_arrays[name] = array.laid(queries, num_rows, padded_tokens, {**where, "column": name})
        plan.extras = DerivedArrays(plan._arrays(names) | of_tier, plan.origin)
        return plan

    def _join_tier(self, tier: LastLocation, where: Where) -> dict[str, Array]:
        """Notes the requests of the host tier among the rows; the arrays that their attention takes."""
        n = int(np.count_nonzero(tier.slots.np))
        live = tier.slots.split([n, len(tier.slots) - n])[0]
        rows = self.slots.row_set.rows_of(live.row_set, repr(tier), **where)
        rows = np.arange(n) if rows is None else rows
        self.kv_window = np.full(self.num_reqs, NO_END, dtype=np.int64)
        self.kv_window[rows] = tier.hot_tokens
        mapped = np.flatnonzero(tier.owners.np)
        counts = np.bincount(tier.owners.np[mapped], minlength=int(live.np.max(initial=0)) + 1)[live.np]
        ends = tier.positions[mapped][np.cumsum(counts) - 1] + 1
        wrong = rows[(self.seq_lens[rows] != ends) | (self.query_lens[rows] != counts)]
        if wrong.size:
            row, query, length = int(wrong[0]), self.query_lens[wrong[0]], int(self.seq_lens[wrong[0]])
            problem = f"{_PLAN}: row {row} puts in {query} tokens up to length {length}, but {tier!r} mapped others"
            remedy = "give `map_last_location` the same lengths and tokens, in the same step"
            raise ArgumentError(problem, length, remedy)
        hot_from = np.zeros(self.num_rows, dtype=np.int64)
        hot_from[rows] = tier.hot_from[:n]
        backups = {name: extra.copy() for name, extra in tier.extras.items() if name.startswith("backup_")}
        return {"hot_from": hot_from, **backups}

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

        Writes, further extras, results and errors are as for `Batch.upload`; SLOT_SHARED, at `cheap`: a request stands
        in two rows.
        """
        runtime, slots = self.slots.runtime, self.slots.np
        runtime.check_owner(f"{_PLAN}.upload")
        self.check(None, "upload")
        if self.pages is not None:
            self.pages.slots.rows_of(self.slots, "upload", unique=True, padded=True)
        elif levels.cheap:
            invariants.slot_shared(slots, object=self, operation="upload", step=runtime.step)
        upload, uploaded = packed_step(runtime, [slots], writes, self.extras | dict(extras or {}))
        uploaded.row_set = self.slots.row_set
        uploaded.slots = slots, DeviceSide(ReadyTensor.uploaded(upload.view(0), upload))
        return uploaded

    def _held(self, lens: Ints) -> Ints:
        """Tokens that the pages hold of requests with so many; with its first token a request has an encoder's."""
        if self.kv_offset is not None:
            lens = np.where(lens > 0, lens + self.kv_offset, 0)
        return lens if self.kv_window is None else np.minimum(lens, self.kv_window)

    @property
    def kv_ends(self) -> Ints:
        """Tokens that the pages hold of each request with this forward, or a bound, int64[num_reqs]."""
        return self._held(self.seq_lens)

    @property
    def kv_starts(self) -> Ints:
        """Tokens that they held before, int64[num_reqs]."""
        return self._held(self.seq_lens - self.query_lens)

    def to_bytes(self) -> bytes:
        """The plan for other ranks of its group, which have the same slots and pages: see `from_bytes`."""
        header: dict[str, object] = {name: getattr(self, name) for name in _HEADER}
        header |= {"exact": self._exact, "reach": self._reach, "int32": sorted(self.int32)}
        numbers = {name: array for name in _NUMBERS if (array := getattr(self, name)) is not None}
        numbers |= {"slots": self.slots.np, "generations": self.slots.generations}
        sent = [(0, numbers), (1, self.token_arrays), (2, self.extras)]
        arrays = [(group, name, array) for group, named in sent for name, array in named.items()]
        header["arrays"] = [
            (group, name, str(dtype_of_bits(array.dtype) or array.dtype), array.shape) for group, name, array in arrays
        ]
        data = json.dumps(header).encode() + b"\n" + b"".join(array.tobytes() for _, _, array in arrays)
        return _MAGIC + zlib.crc32(data).to_bytes(4) + data

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
        data, start = bytes(data), len(_MAGIC) + 4  # a frame or shared memory is a memoryview
        if data[:start] != _MAGIC + zlib.crc32(data[start:]).to_bytes(4):
            remedy = "pass what `to_bytes` returned, whole, from a rank with the same version of the library"
            raise ArgumentError(f"{_PLAN}.from_bytes: no plan, or changed on the way", len(data), remedy)
        text, body = data[start:].split(b"\n", 1)
        header, at = json.loads(text), 0
        groups: list[dict[str, Any]] = [{}, {}, {}]
        for group, name, dtype, shape in header.pop("arrays"):
            bits_of = dtype.removeprefix("torch.")
            dtype = np.dtype(dtype) if bits_of == dtype else bits_dtype(getattr(torch, bits_of))
            array = np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape)
            groups[group][name], at = array.copy(), at + array.nbytes
        numbers, values, extras = groups
        runtime, pool_id = (owner.runtime, owner.pool_id) if isinstance(owner, SlotPool) else (owner, 0)
        rows, generations = numbers.pop("slots"), numbers.pop("generations")
        slots = Slots.of_pool(runtime, rows, generations, pool_id=pool_id, name="slots")
        if pool is not None:
            pool.rows_of(slots, "from_bytes", padded=True)
        header["int32"] = frozenset(header["int32"])
        plan = cls(slots=slots, bounds=None, token_arrays=values, **header, **numbers, **_origin_of(slots, pages))
        if not plan.deferred:
            extras |= values  # the same arrays, by which the upload is known
        plan.extras = DerivedArrays(extras, plan.origin)
        if pages is not None:
            plan._check_lengths(pages)
        return plan

    def check_unused(self, operation: str = "resolve_forward_inputs") -> None:
        """Refuses to resolve the forward's inputs a second time: FUTURE_CONSUMED, at `cheap`."""
        if not self._used:
            times_checked[Code.FUTURE_CONSUMED] += levels.cheap
        elif levels.cheap:
            step, rows = self.slots.runtime.step, self.slots.np[: self.num_reqs]
            where: Where = {"object": self, "operation": operation, "step": step}
            writer, reader = f"the plan of step {self.step}", f"{operation} in step {step}"
            invariants.future_consumed(rows, np.ones(rows.size, dtype=np.bool_), lambda row: writer, reader, **where)

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
            written = self.extras["slot_mapping"][: self.num_tokens][shared].astype(np.int64) // pages.page_size
            pages.check_unshared(written, operation)

    def locations_at(self, positions: Ints) -> Ints:
        """Where the pages have the KV of the requests' tokens at positions int64[num_tokens], int64[num_tokens]."""
        pages, queries = self.pages, self.query_lens
        if pages is None:
            return np.zeros_like(positions)
        index = positions if self.kv_offset is None else positions + self.kv_offset.repeat(queries)
        if self.kv_window is not None:
            index = index % self.kv_window.repeat(queries)
        rows = self.slots.np[: self.num_reqs].repeat(queries)
        columns = index // pages.page_size  # a remainder would cost as much as all that follows
        locations: Ints = (pages.page_table[rows, columns] - columns) * pages.page_size + index
        return locations

    def relay_tokens(self) -> Ints:
        """Indices of the relay's ids among the tokens, int64, request by request."""
        queries, rows = self.query_lens, self.relay_rows
        return arange_per_row((queries.cumsum() - queries)[rows], queries[rows])

    def _arrays(self, layouts: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """The extras."""
        size, num_rows, pages, queries = self.num_padded_tokens, self.num_rows, self.pages, self.query_lens
        slots, begins, offset = self.slots.np[: self.num_reqs], self.seq_lens - queries, self.kv_offset
        if pages is not None and offset is None and self.kv_window is None:
            positions, mapping = pages.lay(slots, begins, queries, "plan")
        else:
            positions = arange_per_row(begins, queries)
            mapping = self.locations_at(positions)
        starts, everyone = _starts(queries, num_rows), self.sampled_slots is self.slots
        last = starts[1 : self.num_reqs + 1] - 1
        if not everyone:
            last = last[self.sample_rows]
        arrays: dict[str, npt.NDArray[Any]] = {
            "positions": self._padded("positions", positions, size),
            "query_start_loc": starts,
            "kv_lens": self._padded("kv_lens", self.seq_lens, num_rows),
            "last_token_indices": self._padded("last_token_indices", last, num_rows if everyone else last.size),
        }
        if not everyone:
            arrays["sample_slots"] = self.sampled_slots.np.copy()  # an engine may make a tensor of each
        if pages is not None:
            arrays["slot_mapping"] = self._padded("slot_mapping", mapping, size)
            if layouts:
                arrays |= layout_arrays(
                    layouts, pages, slots, self.seq_lens, num_rows, offset, self.bounded, len(slots)
                )
        elif layouts:
            raise ArgumentError(f"{_PLAN}: layouts {list(layouts)} need pages", layouts, "pass pages=, the PagePool")
        taken = sorted(({*arrays, *_INDICES} - {_IDS}) & self.token_arrays.keys())
        if taken:
            problem = f"{_PLAN}: token arrays {taken} have names that the plan uses itself"
            raise DeclarationError(problem, taken, "rename them")
        if not self.deferred:
            arrays |= self.token_arrays
        if self.has_ids and self.prompt_ids is None and not self.direct:
            arrays[_IDS] = self._padded(_IDS, np.zeros(0, np.int64), size)  # where the relay puts in, and padding
        if len(self.relay_rows) and not self.direct:
            arrays["relay_slots"] = self.relayed.np.copy()
            arrays["relay_tokens"] = self.relay_tokens()
            if self.bounded:
                arrays["relay_rows"] = self.relay_rows
        if self.bounded and pages is not None:
            for name, numbers in (("relay_kv_offset", offset), ("relay_kv_window", self.kv_window)):
                if numbers is not None:
                    arrays[name] = numbers[self.relay_rows]
        return arrays

    def _padded(self, name: str, values: Index, size: int) -> Index:
        """`values` in the dtype of an array, then 0 up to `size` elements."""
        dtype = _INT64 if name in _INDICES and name not in self.int32 else _INT32
        if name in self.int32:
            check_range(0, int(values.max(initial=0)), dtype, f"{_PLAN}: {name}")
        if len(values) == size and values.dtype == dtype:
            return values
        result = np.zeros(size, dtype=dtype)
        result[: len(values)] = values
        return result

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


def handles_of(slots: Slots, rows: Ints) -> Slots:
    """The handles in some rows, without a device side of their own."""
    if len(rows) == len(slots):
        return slots
    return Slots.of_pool(slots.runtime, slots.np[rows], slots.generations[rows], pool_id=slots.pool_id, name=slots.name)


def _per_request(numbers: object, num_reqs: int, num_rows: int, name: str) -> Ints:
    """One number per request, int64[num_reqs]; those of padded rows are dropped."""
    subject = f"{_PLAN}: {name}"
    array = as_array(numbers, subject)
    rows = num_rows if array.ndim == 1 and array.shape[0] == num_rows else num_reqs
    counts = amounts(array, rows, subject)
    return np.full(num_reqs, counts, dtype=np.int64) if counts.ndim == 0 else counts[:num_reqs]
