"""Which bytes a transfer moves: between ranks of any degree, from pages to locations, to few and large rows, to writes.

Each byte of a target row is written by exactly one source rank. Where several ranks hold the same heads, the targets
that need them are spread over those ranks. A pipeline stage holds some of the layers; what a lease is granted for is
written by ranks of all stages together.

Plain numpy on the host, int64 throughout, at most one sort of the rows. Lengths are never adjusted to each other: what
does not go together is refused, so that no token is left out in silence.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self, SupportsIndex, Unpack, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants
from batchstate._arrays import as_array, converted, count
from batchstate.errors import ArgumentError, DtypeError, HandshakeError, ShapeError
from batchstate.transport.engines.base import Copies, Ints
from batchstate.transport.wire import LARGEST, check_ranges
from batchstate.violations import Where

MOST_RANKS = 65_536
"""Most ranks of a group, as a message numbers them."""
_MOST = {"rank": MOST_RANKS - 1, "degree": MOST_RANKS, "page_size": 2**31, "item_bytes": 2**31, "heads": 2**31}
_DTYPES = {name: str(one).removeprefix("torch.") for name, one in vars(torch).items() if isinstance(one, torch.dtype)}


# Ranks and their layouts


@final
@attrs.frozen
class Held:
    """Which of a token's heads a rank holds.

    Attributes:
        first: the first head.
        heads: how many, from there on.
        replica: number of this rank among those that hold the same heads.
        replicas: how many ranks hold the same heads.
    """

    first: int
    heads: int
    replica: int
    replicas: int


def held_by(rank: int, degree: int, heads: int) -> Held:
    """Which heads rank `rank` of `degree` holds: consecutive ones, and one when there are more ranks than heads.

    Raises:
        ArgumentError: the heads cannot be shared evenly by so many ranks, or the rank is outside.
    """
    if heads % degree and degree % heads:
        problem = f"{heads} heads cannot be shared evenly by {degree} ranks"
        raise ArgumentError(problem, degree, "use a degree that divides the number of KV heads, or a multiple of it")
    if not 0 <= rank < degree:
        raise ArgumentError(f"expected a rank of 0 to {degree - 1}, got {rank}", rank, "number the ranks from 0")
    local, replicas = max(1, heads // degree), max(1, degree // heads)
    return Held(rank // replicas * local, local, rank % replicas, replicas)


def _dtype(value: object) -> str:
    name = str(value).removeprefix("torch.")
    if not isinstance(value, str | torch.dtype) or name not in _DTYPES:
        problem = f"expected a dtype, got {value!r}"[:80]
        raise DtypeError(problem, value, "pass the name of a torch dtype, such as 'bfloat16'")
    return _DTYPES[name]


def _layers(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) and one for one in value):
        raise ArgumentError(f"expected layers, got {value!r}", value, "pass a tuple of names, one per buffer")
    return tuple(value)


@final
@attrs.frozen
class KVLayout:
    """How one rank keeps the KV of a token, in buffers that are alike.

    A token has one row in each buffer: its heads one after the other, each of the same bytes. Row `t` of a buffer
    begins at byte `t * item_bytes` of its region. Buffers with other rows have a layout of their own.

    Attributes:
        page_size: tokens per page.
        dtype: torch's name of the elements' type, as "float64".
        layers: names of the buffers of all pipeline stages together, the same on both sides.
        item_bytes: bytes that one token has in one buffer on this rank.
        rank: of the tensor-parallel group.
        degree: ranks in the group. Each holds heads / degree of a token's heads, or, when there are more ranks than
            heads, one of them.
        heads: KV heads of a token on all ranks together.
        replicated: whether every rank holds all of a token (MLA).
        token_major: whether the tokens of a page lie one after the other. Otherwise a page cannot be split into tokens.
        stage: names of the buffers that this rank's pipeline stage holds, in the order of `layers` and of the
            registered regions; all of them by default.
        per_request: whether a request has one row, as a recurrent state, in place of one per token.

    Raises:
        ArgumentError: a number out of its range, heads that cannot be shared by `degree` ranks, bytes that cannot be
            shared by the heads, or a stage of other layers.
        DtypeError: a value of another type than stated.
    """

    page_size: int
    dtype: str = attrs.field(converter=_dtype)
    layers: tuple[str, ...] = attrs.field(converter=_layers)
    item_bytes: int
    rank: int = 0
    degree: int = 1
    heads: int = 1
    replicated: bool = False
    token_major: bool = True
    stage: tuple[str, ...] = attrs.field(
        default=attrs.Factory(lambda self: self.layers, takes_self=True), converter=_layers
    )
    per_request: bool = False

    def __attrs_post_init__(self) -> None:
        name, times = Counter(self.layers).most_common(1)[0] if self.layers else ("", 0)
        if times != 1:
            problem = f"of layers {self.layers} {name!r} is named {times} times"
            raise ArgumentError(problem, name, "name each buffer once")
        ours = set(self.stage)
        if self.stage != tuple(layer for layer in self.layers if layer in ours):
            problem = f"a stage of {list(self.stage)} of the layers {list(self.layers)}"
            raise ArgumentError(problem, self.stage, "name some of the layers, in their order, each once")
        for name in ("page_size", "item_bytes", "rank", "degree", "heads"):
            number = count(getattr(self, name), name, least=0 if name == "rank" else 1, most=_MOST[name])
            object.__setattr__(self, name, number)  # JSON takes no numpy integers
        for name in ("replicated", "token_major", "per_request"):
            if type(getattr(self, name)) is not bool:
                value = getattr(self, name)
                raise DtypeError(f"{name} is {value!r}", value, "pass True or False")
        held = self.held
        if self.item_bytes % held.heads:
            problem = f"item_bytes {self.item_bytes} cannot be shared by the {held.heads} heads of a rank"
            remedy = "pass the bytes that one token has in one buffer on this rank, and the heads of all ranks"
            raise ArgumentError(problem, self.item_bytes, remedy)

    @classmethod
    def of_page_bytes(cls, page_bytes: int, page_size: int, *, dtype: str, layers: Sequence[str], **rest: Any) -> Self:
        """The layout of buffers of which only the bytes of a page are known.

        Args:
            page_bytes: bytes that one page has in one buffer on this rank.
            page_size: tokens per page.
            dtype: see the class.
            layers: see the class.
            rest: the other attributes.

        Raises:
            ArgumentError: `page_bytes` is not a multiple of `page_size`. Else as the class.
        """
        size, nbytes = count(page_size, "page_size", least=1), count(page_bytes, "page_bytes", least=1)
        if nbytes % size:
            remedy = "register buffers that hold KV alone; keep scales and headers of a page in buffers of their own"
            raise ArgumentError(f"a page of {nbytes} bytes does not divide by its {size} tokens", nbytes, remedy)
        return cls(size, dtype, layers, nbytes // size, **rest)

    @property
    def held(self) -> Held:
        """Which heads this rank holds. A replicated token counts as one head that every rank holds."""
        return held_by(self.rank, self.degree, 1 if self.replicated else self.heads)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one buffer; of all of it where it is replicated."""
        return self.item_bytes // self.held.heads

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one buffer on this rank."""
        return self.page_size * self.item_bytes

    @classmethod
    def from_dict(cls, fields: object) -> Self:
        """The layout of which these are the fields: what `attrs.asdict` gives, also once it was JSON.

        Raises:
            ArgumentError: fields are missing or unknown. Else as the class.
        """
        names = {one.name for one in attrs.fields(cls)}
        if not isinstance(fields, Mapping) or set(fields) != names:
            found = sorted(map(str, fields)) if isinstance(fields, Mapping) else type(fields).__name__
            raise ArgumentError(f"expected a layout, got {found}", found, f"pass {', '.join(sorted(names))}")
        return cls(**fields)


_SAME = (
    ("dtype", "keep KV in one dtype on both workers"),
    ("replicated", "run the same model, and the same attention, on both workers"),
    ("heads", "run the same model on both workers; `heads` are those of all ranks together"),
    ("token_major", "keep KV in the same order on both workers"),
    ("per_request", "run the same model on both workers"),
)


def check_fit(ours: KVLayout, theirs: KVLayout) -> None:
    """Refuses two layouts between which no KV can go. Both sides refuse the same pairs.

    Ranks, degrees and stages may differ. So may page sizes where one is 1, and pages can be split into tokens.

    Raises:
        HandshakeError: they differ in page size, dtype, replication, heads, order, bytes a head, or layers.
    """
    pages = ours.page_size, theirs.page_size
    if pages[0] != pages[1] and not (min(pages) == 1 and ours.token_major and theirs.token_major):
        remedy = "start both workers with one page size, or keep KV token-major in host pages of 1 token"
        raise HandshakeError(f"page_size is {pages[0]} here, {pages[1]} there", pages, remedy)
    for name, remedy in _SAME:
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            raise HandshakeError(f"{name} is {here} here, {there} there", (here, there), remedy)
    if ours.head_bytes != theirs.head_bytes:
        problem = f"item_bytes is {_bytes(ours)} here, {_bytes(theirs)} there"
        remedy = "use one head size and dtype; `item_bytes` are those of one token in one buffer on one rank"
        raise HandshakeError(problem, (ours.item_bytes, theirs.item_bytes), remedy)
    if ours.layers != theirs.layers:
        both = max(len(ours.layers), len(theirs.layers))
        at = next(at for at in range(both) if ours.layers[at : at + 1] != theirs.layers[at : at + 1])
        raise HandshakeError(
            f"layers: {len(ours.layers)} here, {len(theirs.layers)} there; "
            f"number {at} is {_named(ours, at)} here, {_named(theirs, at)} there",
            (ours.layers, theirs.layers),
            "load the same layers on both workers, and list their buffers in the same order",
        )


def _bytes(layout: KVLayout) -> str:
    return f"{layout.item_bytes} at degree {layout.degree} ({layout.head_bytes} a head)"


def _named(layout: KVLayout, at: int) -> str:
    return repr(layout.layers[at]) if at < len(layout.layers) else "missing"


def slice_between(source: KVLayout, target: KVLayout) -> tuple[int, int, int] | None:
    """What the source's rank writes into a row of the target's rank, or None if it writes nothing there.

    The layouts fit (`check_fit`).

    Returns:
        consecutive bytes, in each buffer the same: where they begin in the source's row and in the target's, how many.
    """
    ours, theirs = source.held, target.held
    first = max(ours.first, theirs.first)
    heads = min(ours.first + ours.heads, theirs.first + theirs.heads) - first
    if heads < 1 or ours.replica != theirs.replica * ours.replicas // theirs.replicas:
        return None
    size = target.head_bytes
    return (first - ours.first) * size, (first - theirs.first) * size, heads * size


def sources_of(target: KVLayout, source_degree: int) -> tuple[int, ...]:
    """The ranks of a source group of `source_degree` that write into the target's rank, in order: of each stage.

    Raises:
        ArgumentError: the heads cannot be shared evenly by so many ranks.
    """
    heads = 1 if target.replicated else target.heads
    held = target.held
    source = held_by(0, source_degree, heads)
    first, end = held.first // source.heads, -(-(held.first + held.heads) // source.heads)
    replica = held.replica * source.replicas // held.replicas
    return tuple(group * source.replicas + replica for group in range(first, end))


Layouts = tuple[KVLayout, ...]
"""Of one worker: one layout for each kind of buffer, in the same order on both sides."""


def buffers_of(layouts: Layouts) -> tuple[tuple[str, KVLayout], ...]:
    """Name and layout of each buffer that a worker has, in the order of its regions."""
    return tuple((layer, one) for one in layouts for layer in one.stage)


@functools.lru_cache(256)
def check_sources(target: Layouts, sources: tuple[Layouts, ...]) -> None:
    """Refuses source ranks that do not write each byte of a target's rank exactly once, or write nothing.

    Raises:
        ArgumentError: a layer is missing, or written by other ranks than `sources_of` names.
    """
    useful: set[int] = set()
    for kind, layout in enumerate(target):
        for layer in layout.stage:
            holders = [at for at, one in enumerate(sources) if layer in one[kind].stage]
            writers = [at for at in holders if slice_between(sources[at][kind], layout) is not None]
            useful.update(writers)
            degrees = {sources[at][kind].degree for at in holders}
            ranks = sorted(sources[at][kind].rank for at in writers)
            needed = [sources_of(layout, degree) for degree in degrees]
            if len(degrees) != 1 or tuple(ranks) != needed[0]:
                raise ArgumentError(
                    f"layer {layer!r}: writers of ranks {ranks} of {sorted(degrees)}; needed are {needed or 'some'}",
                    ranks,
                    "name each worker that `plan.sources_of` names, once, of every stage",
                )
    if len(useful) < len(sources):
        idle = next(at for at in range(len(sources)) if at not in useful)
        one = sources[idle][0]
        problem = f"writer {idle}, rank {one.rank} of {one.degree} with {list(one.stage)}, has nothing to write"
        raise ArgumentError(problem, idle, "name each worker that `plan.sources_of` names, once, of every stage")


# Rows


def expand_pages(pages: npt.ArrayLike, page_size: int, num_tokens: int) -> Ints:
    """The locations on `pages`, in order: page * page_size + 0 .. page_size - 1.

    Args:
        pages: integer[p], in the order of the request; 1 or more each.
        page_size: tokens per page.
        num_tokens: how many tokens; only the last page may be used in part.

    Returns:
        int64[num_tokens].

    Raises:
        ArgumentError: `num_tokens` does not end on the last page.
        Violation: SLOT_ZERO_ALLOCATED: page 0, which is padding; SLOT_OUT_OF_RANGE: a negative page, or one whose
            locations int64 cannot count.
        ShapeError, DtypeError: not one-dimensional integers.
    """
    size, total = count(page_size, "page_size", least=1), count(num_tokens, "num_tokens")
    indices = indices_of(pages, "pages")
    if -(-total // size) != indices.size:
        problem = f"{total} tokens do not end on the last of {indices.size} pages of {size}"
        raise ArgumentError(problem, total, "pass exactly the pages that hold the tokens, and the number of tokens")
    _check_indices(indices, size, "pages")
    if size == 1:
        return indices.copy()
    offsets = np.arange(min(size, total), dtype=np.int64)
    return (indices[:, None] * size + offsets).reshape(-1)[:total]


def check_chunk(first: int, num_tokens: int, total: int, page_size: int, last: bool) -> None:
    """Refuses a chunk of a prompt that is not made of whole pages; only the last chunk may end inside one.

    Args:
        first: position of the chunk's first token.
        num_tokens: tokens of the chunk; 0 is fine.
        total: tokens of the prompt.
        page_size: tokens per page.
        last: whether it is the last chunk: it ends where the prompt ends.

    Raises:
        ArgumentError: it begins or ends inside a page, ends behind the prompt, or is the last and ends before its end.
    """
    size, whole = count(page_size, "page_size", least=1), count(total, "total")
    begin = count(first, "first")
    end = begin + count(num_tokens, "num_tokens")
    if begin % size:
        problem = f"a chunk begins at token {begin}, inside a page of {size}"
        raise ArgumentError(problem, begin, f"begin at {begin - begin % size}, and end the chunk before it there")
    if end > whole or (last and end != whole):
        problem = f"a {'last ' if last else ''}chunk ends at token {end} of {whole}"
        raise ArgumentError(problem, end, "end the last chunk where the prompt ends, and send no chunk after it")
    if not last and end % size:
        problem = f"a chunk that is not the last ends at token {end}, inside a page of {size}"
        raise ArgumentError(problem, end, f"end it at {end - end % size}; only the last chunk may end inside a page")


def owned_by(locs: npt.ArrayLike, ranges: npt.ArrayLike) -> None:
    """Refuses target locations that a lease does not own, or that are named twice.

    Args:
        locs: integer[n], where rows are to be written.
        ranges: integer[r, 2], what the lease owns: start and length of each range.

    Raises:
        Violation: TRANSFER_BOUNDS: a location outside all ranges.
        ArgumentError: a location twice, or ranges that `check_ranges` refuses.
        ShapeError, DtypeError: arrays of another shape or dtype.
    """
    wanted, owned = indices_of(locs, "locations"), converted(ranges, np.dtype(np.int64), "ranges")
    starts, ends = check_ranges(owned if owned.size else owned.reshape(-1, 2), 0)
    if not starts.size:
        starts = ends = np.zeros(1, dtype=np.int64)
    order = np.argsort(wanted)
    ascending = wanted[order]  # looked up several times as fast as numbers in no order
    which = np.empty_like(order)
    which[order] = np.maximum(np.searchsorted(starts, ascending, side="right") - 1, 0)
    invariants.transfer_bounds(
        wanted,
        np.ones_like(wanted),
        starts[which],
        ends[which],
        what="locations",
        operation="owned_by",
        object="the lease",
    )
    copy = invariants.first_duplicate(wanted) if (ascending[1:] == ascending[:-1]).any() else None
    if copy is not None:
        problem = f"target location {wanted[copy]} is named twice, the second time in row {copy}"
        raise ArgumentError(problem, int(wanted[copy]), "write each target location once")


def location_rows(
    source_locs: npt.ArrayLike,
    target_locs: npt.ArrayLike,
    source_layout: KVLayout,
    target_layout: KVLayout,
    source_regions: Sequence[SupportsIndex],
    target_regions: Sequence[SupportsIndex],
) -> Copies:
    """What the source's rank writes into the target's rank for these locations, layer by layer.

    Args:
        source_locs: integer[n], locations here.
        target_locs: integer[n], where each goes.
        source_layout: of this rank.
        target_layout: of the rank that is written to.
        source_regions: index of the region of each layer here, in the order of `stage`.
        target_regions: the same there.

    Returns:
        A row per layer that both have and location, in that order; none if this rank writes nothing to that one.

    Raises:
        HandshakeError: the layouts do not fit.
        ArgumentError: pages that cannot be split into tokens, or not one region per layer.
        ShapeError: not as many targets as sources. Nothing is clipped.
        Violation: SLOT_ZERO_ALLOCATED: location 0, which is padding; SLOT_OUT_OF_RANGE: a negative one, or one whose
            bytes int64 cannot count.
        DtypeError: not integers.
    """
    check_fit(source_layout, target_layout)
    if not source_layout.token_major and source_layout.page_size > 1:
        problem = f"pages of {source_layout.page_size} tokens that are not token-major cannot be split into tokens"
        remedy = "keep KV token-major, [page, token, head, ...], or use pages of one token"
        raise ArgumentError(problem, source_layout.page_size, remedy)
    ours, theirs = indices_of(source_locs, "source locations"), indices_of(target_locs, "target locations")
    if ours.size != theirs.size:
        problem = f"{ours.size} source locations for {theirs.size} target locations"
        remedy = "name one target for each source; a part of a request is a chunk of its own"
        raise ShapeError(problem, (ours.size, theirs.size), remedy)
    _check_indices(ours, source_layout.item_bytes, "source locations")
    _check_indices(theirs, target_layout.item_bytes, "target locations")
    here = _region_per_layer(source_regions, source_layout, "source")
    there = _region_per_layer(target_regions, target_layout, "target")
    if source_layout.stage != target_layout.stage:
        both = [layer for layer in source_layout.stage if layer in target_layout.stage]
        here = here[[source_layout.stage.index(layer) for layer in both]]
        there = there[[target_layout.stage.index(layer) for layer in both]]
    piece = slice_between(source_layout, target_layout)
    if piece is None or not ours.size or not here.size:
        return Copies.empty()
    layers, (from_byte, to_byte, nbytes) = here.size, piece
    return Copies(
        np.repeat(here, ours.size),
        np.tile(ours * source_layout.item_bytes + from_byte, layers),
        np.repeat(there, ours.size),
        np.tile(theirs * target_layout.item_bytes + to_byte, layers),
        np.full(ours.size * layers, nbytes, dtype=np.int64),
    )


def check_places(
    copies: Copies,
    source: KVLayout,
    target: KVLayout,
    source_names: Mapping[int, str],
    target_names: Mapping[int, str],
    **where: Unpack[Where],
) -> None:
    """Refuses rows that do not go to the place in a token's KV that they come from: its layer, and its heads.

    Args:
        copies: rows between two ranks, none longer than a token's.
        source: layout of the rank that is read.
        target: layout of the rank that is written to.
        source_names: layer of each region here, by its index.
        target_names: the same there.

    Raises:
        Violation: TRANSFER_BOUNDS.
    """
    if not len(copies):
        return
    places = []
    for layout, names, regions, offsets in (
        (source, source_names, copies.source_regions, copies.source_offsets),
        (target, target_names, copies.target_regions, copies.target_offsets),
    ):
        present, which = np.unique(regions, return_inverse=True)
        layers = np.array([layout.layers.index(names[region]) for region in present.tolist()])[which]
        token_bytes = layout.head_bytes * (1 if layout.replicated else layout.heads)
        places.append(layers * token_bytes + layout.held.first * layout.head_bytes + offsets % layout.item_bytes)
    begin, end = places[0], places[0] + copies.lengths
    invariants.transfer_bounds(places[1], copies.lengths, begin, end, what="bytes of a token's KV", **where)


def coalesced(copies: Copies) -> Copies:
    """The same bytes in fewer rows: rows that are adjacent on both sides become one. In the order of their targets.

    Raises:
        ArgumentError: an empty row.
    """
    _check_lengths(copies)
    if len(copies) < 2:
        return copies
    regions, offsets = copies.target_regions, copies.target_offsets
    if (regions == regions[0]).all():  # one layer
        if not (offsets[1:] >= offsets[:-1]).all():
            copies = copies.rows(np.argsort(offsets, kind="stable"))
    elif not ((regions[1:] > regions[:-1]) | ((regions[1:] == regions[:-1]) & (offsets[1:] >= offsets[:-1]))).all():
        copies = copies.rows(np.lexsort((offsets, regions)))
    joins = copies.source_regions[1:] == copies.source_regions[:-1]
    joins &= copies.target_regions[1:] == copies.target_regions[:-1]
    joins &= copies.source_offsets[1:] - copies.source_offsets[:-1] == copies.lengths[:-1]
    joins &= copies.target_offsets[1:] - copies.target_offsets[:-1] == copies.lengths[:-1]
    if not joins.any():
        return copies
    begins = np.flatnonzero(np.concatenate(([True], ~joins)))
    return attrs.evolve(copies.rows(begins), lengths=np.add.reduceat(copies.lengths, begins))


def chunked(copies: Copies, max_rows: int, max_bytes: int | None = None) -> list[Copies]:
    """The same rows, in order, in as many writes as an engine needs.

    Args:
        copies: the rows. None of them makes one write without rows: its tag still has to arrive.
        max_rows: most rows of a write (`Capabilities.max_rows`).
        max_bytes: most bytes of a write, or None. A row that is longer is cut.

    Raises:
        ArgumentError: an empty row, or a limit below 1.
    """
    most = count(max_rows, "max_rows", least=1)
    _check_lengths(copies)
    if not len(copies):
        return [copies]
    if max_bytes is None:
        return [copies.rows(slice(begin, begin + most)) for begin in range(0, len(copies), most)]
    capacity = count(max_bytes, "max_bytes", least=1)
    copies = copies.cut(capacity)
    ends = np.cumsum(copies.lengths)
    chunks, begin, sent = [], 0, 0
    while begin < len(copies):
        end = min(begin + most, int(np.searchsorted(ends, sent + capacity, side="right")))
        chunks.append(copies.rows(slice(begin, end)))
        begin, sent = end, int(ends[end - 1])
    return chunks


def indices_of(values: npt.ArrayLike, what: str) -> Ints:
    """`values` as int64[n], not to be changed."""
    if type(values) is np.ndarray and values.dtype == np.int64 and values.ndim == 1:
        return values
    if isinstance(values, range):
        values = list(values)  # numpy would make floats of an empty one
    indices = converted(values, np.dtype(np.int64), what)
    if as_array(values, what).dtype.kind == "b":
        raise DtypeError(f"{what}: expected integers, got booleans", "bool", "pass np.flatnonzero(mask)")
    if indices.ndim != 1:
        problem = f"{what}: expected one dimension, got {indices.ndim}"
        raise ShapeError(problem, indices.shape, "pass a one-dimensional array")
    return indices


def _check_indices(indices: Ints, scale: int, what: str) -> None:
    """Refuses padding, negative indices, and those that int64 cannot hold times `scale`."""
    invariants.slot_out_of_range(indices, LARGEST // scale, operation=what)
    invariants.slot_zero_allocated(indices, operation=what)


def _region_per_layer(regions: Sequence[SupportsIndex], layout: KVLayout, side: str) -> Ints:
    indices = [count(region, f"{side} region") for region in regions]
    if len(indices) != len(layout.stage) or len(set(indices)) != len(indices):
        problem = f"expected {len(layout.stage)} different {side} regions, one per layer, got {indices}"
        raise ArgumentError(problem, indices, "pass the index of one region for each layer")
    return np.array(indices, dtype=np.int64)


def _check_lengths(copies: Copies) -> None:
    if len(copies) and int(copies.lengths.min()) < 1:
        row = int(copies.lengths.argmin())
        problem = f"row {row}: expected at least 1 byte, got {copies.lengths[row]}"
        raise ArgumentError(problem, int(copies.lengths[row]), "leave empty rows out")
