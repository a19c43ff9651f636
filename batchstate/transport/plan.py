"""The bytes that a transfer moves: between ranks of any degree, from locations to few and large rows, and to writes.

Each byte of a target row is written by exactly one source rank. Where several ranks hold the same heads, the targets
that need them are spread over those ranks. A pipeline stage holds some of the layers; the memory of a lease is written
by ranks of all stages together.

Plain numpy on the host, int64 throughout, at most one sort of the rows. Lengths are never adjusted to each other: a
difference is refused, so that no token is left out in silence.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, final

import attrs
import numpy as np
import torch

from batchstate import invariants
from batchstate._arrays import UNORDERED, count
from batchstate.errors import ArgumentError, DtypeError, HandshakeError, ShapeError, expected
from batchstate.transport.engines.base import Copies, Ints
from batchstate.transport.wire import LARGEST, check_ranges
from batchstate.violations import Where

MOST_RANKS = 65_536
"""Most ranks of a group, as a message numbers them."""
_MOST = {"rank": MOST_RANKS - 1, "degree": MOST_RANKS, "page_size": 2**31, "item_bytes": 2**31, "heads": 2**31}
_DTYPES = {
    name: str(dtype).removeprefix("torch.") for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)
}


# Ranks and their layouts


@final
@attrs.frozen
class Held:
    """The heads of a token that a rank holds: so many from the first on, as rank `replica` of `replicas` with them."""

    first: int
    heads: int
    replica: int
    replicas: int


def held_by(rank: int, degree: int, heads: int) -> Held:
    """The heads of rank `rank` of `degree`: consecutive ones, and one when there are more ranks than heads.

    ArgumentError: the heads cannot be shared evenly by so many ranks, or the rank is outside.
    """
    if heads % degree and degree % heads:
        problem = f"{heads} heads cannot be shared evenly by {degree} ranks"
        raise ArgumentError(problem, degree, "use a degree that divides the number of KV heads, or a multiple of it")
    if not 0 <= rank < degree:
        raise ArgumentError(f"expected a rank of 0 to {degree - 1}, got {rank}", rank, "number the ranks from 0")
    local, replicas = max(1, heads // degree), max(1, degree // heads)
    return Held(rank // replicas * local, local, rank % replicas, replicas)


def _dtype(value: str | torch.dtype) -> str:
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise DtypeError(f"expected a dtype, got {value!r:.80}", value, "pass the name of a torch dtype, as 'bfloat16'")
    return _DTYPES[name]


def _layers(value: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    names: Sequence[Any] = value
    if isinstance(value, UNORDERED) or not all(name and isinstance(name, str) for name in names):
        raise expected("KVLayout: layers", "a list of names", value, "name each buffer, as the peer does")
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
        token_major: whether the tokens of a page lie one after the other. Otherwise, as where a page has all its keys
            and then all their scales, only whole pages are sent, between ranks that hold the same heads of a token. The
            host tier copies tokens: give it such a buffer with `KVBuffer(on_device=True)`.
        stage: names of the buffers that this rank's pipeline stage holds, in the order of `layers` and of the
            registered regions; all of them by default.
        per_request: whether a request has one row, as a recurrent state, in place of one per token.

    Raises:
        ArgumentError: a number out of its range, heads that cannot be shared by `degree` ranks, bytes that cannot be
            shared by the heads, a layer twice or without a name, or a stage of other layers.
        DtypeError: no dtype of torch, a number that is no integer, or a flag that is no bool.
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
                raise expected(f"KVLayout: {name}", "True or False", getattr(self, name), "pass a bool", DtypeError)
        held = self.held
        if self.item_bytes % held.heads:
            problem = f"item_bytes {self.item_bytes} cannot be shared by the {held.heads} heads of a rank"
            remedy = "pass the bytes that one token has in one buffer on this rank, and the heads of all ranks"
            raise ArgumentError(problem, self.item_bytes, remedy)

    @property
    def held(self) -> Held:
        """The heads of this rank. A replicated token counts as one head that every rank holds."""
        return held_by(self.rank, self.degree, 1 if self.replicated else self.heads)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one buffer; of all of it where it is replicated."""
        return self.item_bytes // self.held.heads

    @property
    def unit(self) -> int:
        """Tokens that go in one piece at the least: 1, or those of a page that cannot be split."""
        return 1 if self.token_major or self.per_request else self.page_size


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
        HandshakeError: they differ in page size, dtype, replication, heads, order, bytes a head, or layers; or in the
            heads of a rank, where pages cannot be split.
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
        both = [f"{side.item_bytes} at degree {side.degree} ({side.head_bytes} a head)" for side in (ours, theirs)]
        remedy = "use one head size and dtype; `item_bytes` are those of one token in one buffer on one rank"
        raise HandshakeError(f"item_bytes is {both[0]} here, {both[1]} there", both, remedy)
    if ours.unit > 1 and ours.held.heads != theirs.held.heads:
        heads = ours.held.heads, theirs.held.heads
        problem = f"a rank holds {heads[0]} heads here, {heads[1]} there, of pages that are not token-major"
        raise HandshakeError(problem, heads, "use one degree on both workers, or keep KV token-major")
    if ours.layers != theirs.layers:
        layers = ours.layers, theirs.layers
        at = next(at for at, pair in enumerate(itertools.zip_longest(*layers)) if pair[0] != pair[1])
        both = [repr(names[at]) if at < len(names) else "missing" for names in layers]
        problem = f"layers: {len(layers[0])} here, {len(layers[1])} there; number {at} is"
        remedy = "load the same layers on both workers, and list their buffers in the same order"
        raise HandshakeError(f"{problem} {both[0]} here, {both[1]} there", layers, remedy)


def slice_between(source: KVLayout, target: KVLayout) -> tuple[int, int, int] | None:
    """The bytes that the source's rank writes into a row of the target's rank, or None; the layouts fit (`check_fit`).

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
    """The ranks of a source group of `source_degree` that write into the target's rank, in order: of each stage."""
    heads = 1 if target.replicated else target.heads
    held = target.held
    source = held_by(0, source_degree, heads)
    first, end = held.first // source.heads, -(-(held.first + held.heads) // source.heads)
    replica = held.replica * source.replicas // held.replicas
    return tuple(group * source.replicas + replica for group in range(first, end))


Layouts = tuple[KVLayout, ...]
"""One layout of a worker for each kind of buffer, in the same order on both sides."""


def buffers_of(layouts: Layouts) -> tuple[tuple[str, KVLayout], ...]:
    """Name and layout of each buffer that a worker has, in the order of its regions."""
    return tuple((layer, layout) for layout in layouts for layer in layout.stage)


_ALL_WRITERS = "name each worker that `plan.sources_of` names, once, of every stage"


@functools.lru_cache(256)
def check_sources(target: Layouts, sources: tuple[Layouts, ...]) -> None:
    """Refuses source ranks that do not write each byte of a target's rank exactly once, or write nothing.

    ArgumentError: a layer is missing, or written by other ranks than `sources_of` names.
    """
    useful: set[int] = set()
    for kind, layout in enumerate(target):
        for layer in layout.stage:
            holders = [at for at, source in enumerate(sources) if layer in source[kind].stage]
            writers = [at for at in holders if slice_between(sources[at][kind], layout) is not None]
            useful.update(writers)
            degrees = {sources[at][kind].degree for at in holders}
            ranks = sorted(sources[at][kind].rank for at in writers)
            needed = [sources_of(layout, degree) for degree in degrees]
            if len(degrees) != 1 or tuple(ranks) != needed[0]:
                wanted = f"{sorted(degrees)}; needed are {needed or 'some'}"
                raise ArgumentError(f"layer {layer!r}: writers of ranks {ranks} of {wanted}", ranks, _ALL_WRITERS)
    if len(useful) < len(sources):
        idle = next(at for at in range(len(sources)) if at not in useful)
        layout = sources[idle][0]
        which = f"writer {idle}, rank {layout.rank} of {layout.degree} with {list(layout.stage)}"
        raise ArgumentError(f"{which}, has nothing to write", idle, _ALL_WRITERS)


# Rows


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
    begin = count(first, "first")
    end = begin + num_tokens
    if begin % page_size:
        problem = f"a chunk begins at token {begin}, inside a page of {page_size}"
        raise ArgumentError(problem, begin, f"begin at {begin - begin % page_size}, and end the chunk before it there")
    if end > total or (last and end != total):
        problem = f"a {'last ' if last else ''}chunk ends at token {end} of {total}"
        raise ArgumentError(problem, end, "end the last chunk where the prompt ends, and send no chunk after it")
    if not last and end % page_size:
        problem = f"a chunk that is not the last ends at token {end}, inside a page of {page_size}"
        raise ArgumentError(problem, end, f"end it at {end - end % page_size}; only the last chunk may end in a page")


def owned_by(locations: Ints, ranges: Ints) -> None:
    """Refuses target locations that a lease does not own, or that are named twice.

    Args:
        locations: int64[n], where rows are to be written.
        ranges: int64[r, 2], start and length of each range that the lease owns.

    Raises:
        Violation: TRANSFER_BOUNDS: a location outside all ranges.
        ShapeError, ArgumentError: a location twice, or ranges that `check_ranges` refuses.
    """
    starts, ends = check_ranges(ranges, 0)
    if not starts.size:
        starts = ends = np.zeros(1, dtype=np.int64)
    order = np.argsort(locations)
    ascending = locations[order]  # looked up several times as fast as numbers in no order
    which = np.empty_like(order)
    which[order] = np.maximum(np.searchsorted(starts, ascending, side="right") - 1, 0)
    where: Where = {"operation": "owned_by", "object": "the lease"}
    one_each = np.ones_like(locations)
    invariants.transfer_bounds(locations, one_each, starts[which], ends[which], what="locations", **where)
    copy = invariants.first_duplicate(locations) if (ascending[1:] == ascending[:-1]).any() else None
    if copy is not None:
        problem = f"target location {locations[copy]} is named twice, the second time in row {copy}"
        raise ArgumentError(problem, int(locations[copy]), "write each target location once")


def location_rows(
    source_locations: Ints,
    target_locations: Ints,
    source_layout: KVLayout,
    target_layout: KVLayout,
    source_regions: Sequence[int],
    target_regions: Sequence[int],
) -> Copies:
    """The rows that the source's rank writes into the target's rank, layer by layer; the layouts fit (`check_fit`).

    Args:
        source_locations: int64[n], locations here.
        target_locations: int64[n], where each goes.
        source_layout: of this rank.
        target_layout: of the rank that is written to.
        source_regions: index of the region of each layer here, in the order of `stage`.
        target_regions: the same there.

    Returns:
        A row per layer that both have and location, or page that cannot be split, in that order; none if this rank
        writes nothing to that one.

    Raises:
        ArgumentError: locations that are not whole pages, on a side where these cannot be split.
        ShapeError: not as many targets as sources. Nothing is clipped.
        Violation: SLOT_ZERO_ALLOCATED: location 0, which is padding; SLOT_OUT_OF_RANGE: a negative one, or one whose
            bytes int64 cannot count.
    """
    ours, theirs = source_locations, target_locations
    if ours.size != theirs.size:
        problem = f"{ours.size} source locations for {theirs.size} target locations"
        remedy = "name one target for each source; a part of a request is a chunk of its own"
        raise ShapeError(problem, (ours.size, theirs.size), remedy)
    for indices, layout, name in ((ours, source_layout, "source"), (theirs, target_layout, "target")):
        invariants.slot_out_of_range(indices, LARGEST // layout.item_bytes, operation=f"{name} locations")
        invariants.slot_zero_allocated(indices, operation=f"{name} locations")
    if (unit := source_layout.unit) > 1:
        ours, theirs = first_of_pages(ours, unit, "source"), first_of_pages(theirs, unit, "target")
    here, there = np.array(source_regions, dtype=np.int64), np.array(target_regions, dtype=np.int64)
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
        np.full(ours.size * layers, nbytes * unit, dtype=np.int64),
    )


def first_of_pages(locations: Ints, page_size: int, side: str) -> Ints:
    """The first of each page of locations int64[n]: whole pages, each in order; the last may end early.

    ArgumentError: they are not.
    """
    first, within = locations[::page_size], np.arange(locations.size) % page_size
    wrong = (locations != np.repeat(first, page_size)[: locations.size] + within) | (locations % page_size != within)
    if wrong.any():
        row = int(wrong.argmax())
        problem = f"{side} location {locations[row]} in row {row} is not where its page of {page_size} has it"
        remedy = "send whole pages where memory is not token-major: page size and layout are those of the pool"
        raise ArgumentError(problem, int(locations[row]), remedy)
    return first


def check_places(
    copies: Copies,
    source: KVLayout,
    target: KVLayout,
    source_names: Mapping[int, str],
    target_names: Mapping[int, str],
    suffix: str,
    **where: Unpack[Where],
) -> None:
    """TRANSFER_BOUNDS: rows do not go to the place in a token's KV that they come from: its layer, and its heads.

    No row is longer than a token's, or than a page that is not token-major; the names are the layers of the regions on
    each side, by their index, the target's with a `suffix` where they are in the memory that was granted.
    """
    if not len(copies):
        return
    places = []
    for layout, names, behind, regions, offsets in (
        (source, source_names, "", copies.source_regions, copies.source_offsets),
        (target, target_names, suffix, copies.target_regions, copies.target_offsets),
    ):
        numbers = {layer + behind: number for number, layer in enumerate(layout.layers)}
        present, which = np.unique(regions, return_inverse=True)
        layers = np.array([numbers.get(names[region], -1) for region in present.tolist()])[which]
        head_bytes, unit_bytes = layout.head_bytes * layout.unit, layout.item_bytes * layout.unit
        token_bytes = head_bytes * (1 if layout.replicated else layout.heads)
        places.append(layers * token_bytes + layout.held.first * head_bytes + offsets % unit_bytes)
    begin, end = places[0], places[0] + copies.lengths
    invariants.transfer_bounds(places[1], copies.lengths, begin, end, what="bytes of a token's KV", **where)
    if source.unit > 1:
        page_bytes = np.full(len(copies), source.unit * source.item_bytes)
        first = begin - copies.source_offsets % page_bytes
        invariants.transfer_bounds(first, page_bytes, begin, end, what="bytes of a page that goes as a whole", **where)


def coalesced(copies: Copies) -> Copies:
    """The same bytes in fewer rows: rows that are adjacent on both sides become one. In the order of their targets."""
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


def chunked(copies: Copies, max_rows: int) -> list[Copies]:
    """The same rows, in order, in writes of at most `max_rows`. No rows make one write: its tag still has to arrive."""
    return [copies.rows(slice(begin, begin + max_rows)) for begin in range(0, max(len(copies), 1), max_rows)]
