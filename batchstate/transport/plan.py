"""Which rows a transfer moves: from pages to locations, to bytes in regions, to few and large rows, to writes.

Plain numpy on the host, int64 throughout, at most one sort of the rows. Lengths are never adjusted to each other: what
does not go together is refused, so that no token is left out in silence.
"""

from collections.abc import Mapping, Sequence
from typing import SupportsIndex, Unpack

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate._arrays import as_array, converted, count
from batchstate.errors import ArgumentError, DtypeError, ShapeError
from batchstate.transport.layout import KVLayout, check_fit, slice_between
from batchstate.transport.regions import Copies, Ints
from batchstate.violations import Where

_LARGEST = 2**63 - 1


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
        raise ArgumentError(
            f"{total} tokens do not end on the last of {indices.size} pages of {size}",
            value=total,
            remedy="pass exactly the pages that hold the tokens, and the number of tokens",
        )
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
        raise ArgumentError(
            f"a chunk begins at token {begin}, inside a page of {size}",
            value=begin,
            remedy=f"begin at {begin - begin % size}, and end the chunk before it there",
        )
    if end > whole or (last and end != whole):
        raise ArgumentError(
            f"a {'last ' if last else ''}chunk ends at token {end} of {whole}",
            value=end,
            remedy="end the last chunk where the prompt ends, and send no chunk after it",
        )
    if not last and end % size:
        raise ArgumentError(
            f"a chunk that is not the last ends at token {end}, inside a page of {size}",
            value=end,
            remedy=f"end it at {end - end % size}; only the last chunk may end inside a page",
        )


def owned_by(locs: npt.ArrayLike, ranges: npt.ArrayLike) -> None:
    """Refuses target locations that a lease does not own, or that are named twice.

    Args:
        locs: integer[n], where rows are to be written.
        ranges: integer[r, 2], what the lease owns: start and length of each range.

    Raises:
        Violation: TRANSFER_BOUNDS: a location outside all ranges.
        ArgumentError: a location twice, or a range that is empty or holds location 0.
        ShapeError, DtypeError: arrays of another shape or dtype.
    """
    wanted, owned = indices_of(locs, "locations"), converted(ranges, np.dtype(np.int64), "ranges")
    if owned.shape != (0,) and owned.shape[1:] != (2,):
        raise ShapeError(
            f"ranges of shape {owned.shape}", value=owned.shape, remedy="pass start and length of each range"
        )
    starts, lengths = owned.reshape(-1, 2).T.copy()  # a column in one piece: much faster below
    wrong = (starts < 1) | (lengths < 1) | (lengths > _LARGEST - starts)
    if wrong.any():
        start, length = owned[int(wrong.argmax())].tolist()
        raise ArgumentError(
            f"a range of {length} locations from {start} on",
            value=(start, length),
            remedy="pass ranges of at least one location; location 0 is padding",
        )
    in_order = np.argsort(starts)
    starts, ends = starts[in_order], (starts + lengths)[in_order]
    ends = np.maximum.accumulate(ends)  # those so far: ranges may lie inside others
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
        raise ArgumentError(
            f"target location {wanted[copy]} is named twice, the second time in row {copy}",
            value=int(wanted[copy]),
            remedy="write each target location once",
        )


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
    source_layout.check_splits()
    ours, theirs = indices_of(source_locs, "source locations"), indices_of(target_locs, "target locations")
    if ours.size != theirs.size:
        raise ShapeError(
            f"{ours.size} source locations for {theirs.size} target locations",
            value=(ours.size, theirs.size),
            remedy="name one target for each source; a part of a request is a chunk of its own",
        )
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
    layers = here.size
    return Copies(
        np.repeat(here, ours.size),
        np.tile(ours * source_layout.item_bytes + piece.source_offset, layers),
        np.repeat(there, ours.size),
        np.tile(theirs * target_layout.item_bytes + piece.target_offset, layers),
        np.full(ours.size * layers, piece.nbytes, dtype=np.int64),
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
        raise DtypeError(
            f"{what}: booleans", value="bool", remedy="pass indices; `np.flatnonzero` makes them of a mask"
        )
    if indices.ndim != 1:
        raise ShapeError(
            f"{what}: {indices.ndim} dimensions", value=indices.shape, remedy="pass a one-dimensional array"
        )
    return indices


def _check_indices(indices: Ints, scale: int, what: str) -> None:
    """Refuses padding, negative indices, and those that int64 cannot hold times `scale`."""
    invariants.slot_out_of_range(indices, _LARGEST // scale, operation=what)
    invariants.slot_zero_allocated(indices, operation=what)


def _region_per_layer(regions: Sequence[SupportsIndex], layout: KVLayout, side: str) -> Ints:
    indices = [count(region, f"{side} region") for region in regions]
    if len(indices) != len(layout.stage) or len(set(indices)) != len(indices):
        raise ArgumentError(
            f"{side} regions {indices} for {len(layout.stage)} layers",
            value=indices,
            remedy="pass the index of one region for each layer, no two the same",
        )
    return np.array(indices, dtype=np.int64)


def _check_lengths(copies: Copies) -> None:
    if len(copies) and int(copies.lengths.min()) < 1:
        row = int(copies.lengths.argmin())
        raise ArgumentError(
            f"row {row} has {copies.lengths[row]} bytes", value=int(copies.lengths[row]), remedy="leave empty rows out"
        )
