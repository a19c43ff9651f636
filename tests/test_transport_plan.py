"""The plan of a transfer: every byte of every row goes where a byte-by-byte model puts it, or the plan is refused."""

import functools
import itertools
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate import invariants
from batchstate.errors import ArgumentError, BatchStateError, DtypeError, HandshakeError, ShapeError, ValueOverflowError
from batchstate.transport.engines.base import Copies
from batchstate.transport.plan import (
    KVLayout,
    check_chunk,
    check_fit,
    check_places,
    check_sources,
    chunked,
    coalesced,
    expand_pages,
    held_by,
    location_rows,
    owned_by,
    slice_between,
    sources_of,
)
from batchstate.violations import Code
from tests.doubles import refused

LAYERS = ("0.keys", "0.values", "1.keys")
HUGE = 2**40
fast = settings(max_examples=60, deadline=None)

Place = tuple[int, int]


def layout(**fields: Any) -> KVLayout:
    """A layout of pages of 4 tokens, 8 bytes each."""
    whole: dict[str, Any] = {"page_size": 4, "dtype": "float64", "layers": LAYERS, "item_bytes": 8}
    return KVLayout(**(whole | fields))


def rows(*five: tuple[int, int, int, int, int]) -> Copies:
    """Rows of (source region, source offset, target region, target offset, length)."""
    return Copies(*(list(column) for column in zip(*five, strict=True)))


def bytewise(copies: Copies) -> list[tuple[Place, Place]]:
    """The model: (target byte, source byte) of each byte that moves, sorted."""
    return sorted(
        ((target, there + byte), (source, here + byte))
        for source, here, target, there, length in zip(*(one.tolist() for one in copies.arrays()), strict=True)
        for byte in range(length)
    )


def move(copies: Copies, source: dict[int, bytearray], target: dict[int, bytearray]) -> None:
    """The model of an engine: moves row by row."""
    for here, start, there, place, length in zip(*(one.tolist() for one in copies.arrays()), strict=True):
        assert start >= 0
        assert start + length <= len(source[here])
        assert place >= 0
        assert place + length <= len(target[there])
        target[there][place : place + length] = source[here][start : start + length]


def complains(kind: type[BatchStateError], action: Any, *words: object) -> BatchStateError:
    """Runs `action`, which raises exactly `kind`, names `words` in the problem, and has a value and a remedy."""
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    assert all(str(word) in caught.value.problem for word in words), caught.value
    assert caught.value.value is not None
    assert caught.value.remedy in str(caught.value)
    assert caught.value.remedy
    return caught.value


# Layouts


def test_layout_survives_json_types() -> None:
    """A layout given numpy integers and a torch dtype is one of plain values, and comes back equal from its dict."""
    one = layout(item_bytes=np.int64(16), dtype=torch.bfloat16, heads=4, degree=2, rank=1, token_major=False)
    assert one.dtype == "bfloat16"
    assert KVLayout.from_dict(attrs.asdict(one)) == one
    assert type(one.item_bytes) is int
    assert (one.head_bytes, one.page_bytes) == (8, 64)


def test_layout_of_page_bytes() -> None:
    """The bytes of a page must divide by its tokens."""
    assert KVLayout.of_page_bytes(1024, 16, dtype="float16", layers=["k"], heads=2).item_bytes == 64
    complains(
        ArgumentError, lambda: KVLayout.of_page_bytes(1030, 16, dtype="float16", layers=("k",)), "1030 bytes", "16"
    )


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"page_size": 0}, ArgumentError, ["page_size is 0"]),
        ({"page_size": 4.0}, DtypeError, ["page_size is 4.0"]),
        ({"item_bytes": -8}, ArgumentError, ["item_bytes is -8"]),
        ({"item_bytes": True}, DtypeError, ["item_bytes is True"]),
        ({"layers": "0.keys"}, ArgumentError, ["0.keys"]),
        ({"layers": ()}, ArgumentError, ["()"]),
        ({"layers": ("k", "v", "k")}, ArgumentError, ["'k' is named 2 times"]),
        ({"dtype": ""}, DtypeError, ["''"]),
        ({"dtype": 8}, DtypeError, ["8"]),
        ({"rank": 2, "degree": 2, "heads": 2}, ArgumentError, ["rank of 0 to 1, got 2"]),
        ({"rank": -1}, ArgumentError, ["rank is -1"]),
        ({"degree": 3, "heads": 4}, ArgumentError, ["4 heads", "3 ranks"]),
        ({"degree": 6, "heads": 4}, ArgumentError, ["4 heads", "6 ranks"]),
        ({"heads": 3}, ArgumentError, ["item_bytes 8", "3 heads"]),
        ({"replicated": 1}, DtypeError, ["replicated is 1"]),
        ({"token_major": "yes"}, DtypeError, ["token_major is 'yes'"]),
    ],
)
def test_layout_refuses(fields: dict[str, Any], kind: type[BatchStateError], words: list[str]) -> None:
    """A layout that cannot be is refused, with the value and a remedy."""
    complains(kind, lambda: layout(**fields), *words)


def test_layout_from_dict_refuses() -> None:
    """A dict with a field too few or too many, or another type, is refused."""
    fields = attrs.asdict(layout())
    complains(ArgumentError, lambda: KVLayout.from_dict(fields | {"colour": 1}), "colour")
    complains(ArgumentError, lambda: KVLayout.from_dict({"dtype": "float64"}), "dtype")
    complains(ArgumentError, lambda: KVLayout.from_dict([1]), "list")


def test_replicated_takes_any_degree() -> None:
    """A replicated token has no heads to share: any degree goes, whatever `heads` says."""
    assert layout(replicated=True, degree=3, rank=2, heads=4).head_bytes == 8


# Shards


def degrees(heads: int) -> list[int]:
    """The degrees up to 16 that so many heads allow."""
    return [degree for degree in range(1, 17) if heads % degree == 0 or degree % heads == 0]


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[KVLayout], list[KVLayout]]:
    """Every rank of a source group and of a target group that fit."""
    heads, replicated = draw(st.integers(1, 12)), draw(st.booleans())
    size = draw(st.integers(1, 3))
    fields = {"page_size": draw(st.sampled_from([1, 3, 16])), "heads": heads, "replicated": replicated}
    sides = []
    for _ in range(2):
        degree = draw(st.integers(1, 16) if replicated else st.sampled_from(degrees(heads)))
        local = 1 if replicated else max(1, heads // degree)
        sides.append([layout(**fields, item_bytes=local * size, rank=rank, degree=degree) for rank in range(degree)])
    return sides[0], sides[1]


@fast
@given(groups())
def test_source_ranks_cover_a_target_row_once(both: tuple[list[KVLayout], list[KVLayout]]) -> None:
    """Each byte of each target rank's row comes from exactly one source rank, and is the byte of the same head."""
    sources, targets = both
    for target in targets:
        writers, origin = [], {}
        for source in sources:
            check_fit(source, target)
            piece = slice_between(source, target)
            if piece is None:
                continue
            writers.append(source.rank)
            here, there, nbytes = piece
            assert 0 <= here <= source.item_bytes - nbytes
            for byte in range(nbytes):
                assert there + byte not in origin
                origin[there + byte] = source.held.first * source.head_bytes + here + byte
        begin = target.held.first * target.head_bytes
        assert origin == {byte: begin + byte for byte in range(target.item_bytes)}
        assert tuple(writers) == sources_of(target, len(sources))


def test_replicas_share_the_work() -> None:
    """Where source ranks hold the same heads, the targets are spread over them."""
    latent = [layout(replicated=True, rank=rank, degree=4) for rank in range(4)]
    assert [sources_of(one, 4) for one in latent] == [(0,), (1,), (2,), (3,)]
    assert [sources_of(one, 2) for one in latent] == [(0,), (0,), (1,), (1,)]
    assert [sources_of(one, 8) for one in latent] == [(0,), (2,), (4,), (6,)]


def test_every_stage_and_rank_of_a_source_is_needed_once() -> None:
    """Writers of 2 stages x 2 ranks hold each byte once; a group that lacks one, or has one too many, is refused."""
    names = ("0", "1", "2")
    stages = [names[:2], names[2:]]
    group = [
        (layout(heads=2, item_bytes=8, layers=names, stage=stage, rank=rank, degree=2),)
        for stage in stages
        for rank in range(2)
    ]
    whole = (layout(heads=2, item_bytes=16, layers=names),)
    check_sources(whole, tuple(group))
    check_sources((attrs.evolve(whole[0], stage=("0",)),), tuple(group[:2]))
    for wrong in (group[:3], group[1:], [*group, group[0]], [*group[:2], *group[:2]], []):
        complains(ArgumentError, lambda some=tuple(wrong): check_sources(whole, some), "layer", "writers of ranks")
    last = (attrs.evolve(whole[0], stage=("2",)),)
    complains(ArgumentError, lambda: check_sources(last, tuple(group)), "writer 0", "nothing to write")


def test_rows_of_the_layers_that_both_sides_have() -> None:
    """A stage writes its own layers into their regions, whatever their numbers; none of another stage's."""
    whole, stage = layout(), layout(stage=("0.values", "1.keys"))
    found = location_rows([1, 2], [5, 6], stage, whole, [7, 9], [20, 21, 22])
    assert found.source_regions.tolist() == [7, 7, 9, 9]
    assert found.target_regions.tolist() == [21, 21, 22, 22]
    assert not len(location_rows([1], [5], stage, layout(stage=("0.keys",)), [7, 9], [20]))
    complains(
        ArgumentError, lambda: location_rows([1], [5], stage, whole, [7, 8, 9], [20, 21, 22]), "source", "2 different"
    )


def test_uneven_source_degree_is_refused() -> None:
    """A source group that cannot share the heads evenly has no writers, but an error."""
    complains(ArgumentError, lambda: sources_of(layout(heads=4), 3), "4 heads", "3 ranks")
    assert held_by(5, 8, 2).first == 1


# Pages to tokens


@fast
@given(st.sampled_from([1, 2, 16, 64]), st.integers(0, 150), st.randoms(use_true_random=False))
def test_expands_pages(page_size: int, num_tokens: int, random: Any) -> None:
    """Token t of a request lies on its page t // page_size, at place t % page_size."""
    pages = random.sample(range(1, 1000), -(-num_tokens // page_size))
    pages[-1:] = [HUGE + page for page in pages[-1:]]
    tokens = expand_pages(pages, page_size, num_tokens)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [pages[t // page_size] * page_size + t % page_size for t in range(num_tokens)]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_expanding_never_clips(page_size: int) -> None:
    """A page too few or too many for the tokens is an error, never a shorter or longer answer."""
    for num_tokens in (0, 1, page_size, page_size + 1):
        fitting = -(-num_tokens // page_size)
        assert expand_pages(np.arange(1, fitting + 1, dtype=np.int32), page_size, num_tokens).size == num_tokens
        for pages in {fitting - 1, fitting + 1} - {-1}:
            complains(
                ArgumentError,
                lambda pages=pages, n=num_tokens: expand_pages(range(1, pages + 1), page_size, n),
                f"{num_tokens} tokens",
                f"{pages} pages",
            )


def test_expanding_refuses_bad_pages() -> None:
    """Padding, negative pages, pages beyond int64, and other types are refused."""
    assert refused(Code.SLOT_ZERO_ALLOCATED, lambda: expand_pages([3, 0], 4, 8)).row == 1
    assert refused(Code.SLOT_OUT_OF_RANGE, lambda: expand_pages([3, -1], 4, 8)).slot == -1
    refused(Code.SLOT_OUT_OF_RANGE, lambda: expand_pages([2**61], 4, 4))
    assert expand_pages([2**61 - 2], 4, 4)[-1] == 2**63 - 5
    complains(ValueOverflowError, lambda: expand_pages(np.array([2**63], dtype=np.uint64), 4, 4), 2**63)
    complains(DtypeError, lambda: expand_pages([1.5], 4, 4), "float64")
    complains(DtypeError, lambda: expand_pages([True], 4, 4), "bool")
    complains(ShapeError, lambda: expand_pages([[1]], 4, 4), "expected one dimension, got 2")
    complains(ArgumentError, lambda: expand_pages([1], 0, 4), "page_size is 0")
    complains(ArgumentError, lambda: expand_pages([1], 4, -1), "num_tokens is -1")
    assert expand_pages([1], 2**40, 2).tolist() == [HUGE, HUGE + 1]


# Chunks of a prompt


@fast
@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.sampled_from([1, 4, 16]), st.booleans())
def test_chunks_are_of_whole_pages(first: int, num_tokens: int, total: int, page_size: int, last: bool) -> None:
    """A chunk is taken exactly if it begins at a page, and ends at one, or with the prompt if it is the last."""
    end = first + num_tokens
    good = first % page_size == 0 and end <= total and (end == total if last else end % page_size == 0)
    if good:
        check_chunk(first, num_tokens, total, page_size, last)
    else:
        with pytest.raises(ArgumentError):
            check_chunk(first, num_tokens, total, page_size, last)


def test_chunk_errors_say_where() -> None:
    """Each refusal names the token that is wrong and what to do."""
    complains(ArgumentError, lambda: check_chunk(6, 2, 16, 4, False), "token 6", "page of 4")
    complains(ArgumentError, lambda: check_chunk(4, 3, 16, 4, False), "token 7", "not the last")
    complains(ArgumentError, lambda: check_chunk(4, 3, 7, 4, False), "token 7", "not the last")
    complains(ArgumentError, lambda: check_chunk(4, 4, 16, 4, True), "last chunk ends at token 8 of 16")
    complains(ArgumentError, lambda: check_chunk(4, 16, 16, 4, False), "token 20 of 16")
    complains(ArgumentError, lambda: check_chunk(-4, 4, 16, 4, False), "first is -4")


# Ownership


@fast
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), max_size=6),
    st.lists(st.integers(0, 60), max_size=8),
    st.sampled_from([0, HUGE]),
)
def test_only_owned_tokens_are_written(ranges: list[Place], tokens: list[int], shift: int) -> None:
    """Tokens are taken exactly if each lies in a range, in whatever order, and none comes twice; no ranges overlap."""
    owned = {token + shift for start, length in ranges for token in range(start, start + length)}
    targets = [token + shift for token in tokens]
    shifted = [(start + shift, length) for start, length in ranges]
    outside = [row for row, token in enumerate(targets) if token not in owned]
    if len(owned) < sum(length for _, length in ranges):
        complains(ArgumentError, lambda: owned_by(targets, shifted), "ranges")
    elif outside:
        assert refused(Code.TRANSFER_BOUNDS, lambda: owned_by(targets, shifted)).row == outside[0]
    elif len(set(targets)) < len(targets):
        complains(ArgumentError, lambda: owned_by(targets, shifted), "named twice")
    else:
        owned_by(targets, shifted)


def test_ranges_own_their_first_and_last_token() -> None:
    """The first and last token of each range are owned, the next one is not."""
    ranges = [[30, 1], [9, 10], [1, 2]]
    owned_by([9, 1, 18, 2, 14, 30], ranges)
    for token in (0, 3, 8, 19, 29, 31):
        refused(Code.TRANSFER_BOUNDS, functools.partial(owned_by, [9, token], ranges))


def test_ownership_refuses_bad_ranges() -> None:
    """Ranges that are empty, hold the padding, overflow, or have another shape are refused; no tokens need none."""
    owned_by([], [])
    owned_by([], np.empty((0, 2), dtype=np.int64))
    refused(Code.TRANSFER_BOUNDS, lambda: owned_by([1], []))
    complains(ArgumentError, lambda: owned_by([], [[0, 4]]), "[0, 4]")
    complains(ArgumentError, lambda: owned_by([], [[4, 0]]), "[4, 0]")
    complains(ArgumentError, lambda: owned_by([], [[2**63 - 1, 4]]), "4]")
    complains(ShapeError, lambda: owned_by([1], [1, 4]), "got [2]")
    complains(DtypeError, lambda: owned_by([1.0], [[1, 4]]), "float64")
    error = complains(ArgumentError, lambda: owned_by([5, 3, 5], [[1, 9]]), "location 5", "row 2")
    assert error.value == 5


# Rows


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[KVLayout], list[KVLayout], list[int], list[int]]:
    """Two groups of ranks, and the tokens of a request here and there; with adjacent ones."""
    sources, targets = draw(groups())
    size = draw(st.integers(0, 9))
    pool = st.permutations(range(1, 13))
    here, there = sorted(draw(pool)[:size]), draw(pool)[:size]
    return sources, targets, here, sorted(there) if draw(st.booleans()) else there


@fast
@given(transfers(), st.integers(1, 7), st.integers(1, 5))
def test_moved_bytes_are_those_of_the_request(
    case: tuple[list[KVLayout], list[KVLayout], list[int], list[int]], max_rows: int, max_bytes: int
) -> None:
    """All source ranks together, coalesced and in chunks, fill each target row and touch no other byte."""
    sources, targets, here, there = case
    regions = [7, 2, 5]

    def byte(token: int, head_byte: int, layer: int) -> int:
        return 1 + (token * 37 + head_byte * 11 + layer * 101) % 255

    def memory(one: KVLayout, written: list[int], origin: list[int]) -> dict[int, bytearray]:
        """Regions of 13 tokens that hold, at `written`, the bytes of `origin`; 0 elsewhere."""
        filled = {region: bytearray(13 * one.item_bytes) for region in regions}
        begin = one.held.first * one.head_bytes
        for layer, region in enumerate(regions):
            for token, named in zip(written, origin, strict=True):
                for place in range(one.item_bytes):
                    filled[region][token * one.item_bytes + place] = byte(named, begin + place, layer)
        return filled

    everywhere = list(range(13))
    for target in targets:
        found = memory(target, [], [])
        for source in sources:
            plan = location_rows(here, there, source, target, regions, regions)
            for piece in chunked(coalesced(plan), max_rows, max_bytes):
                assert len(piece) <= max_rows
                assert piece.nbytes <= max_bytes
                move(piece, memory(source, everywhere, everywhere), found)
        assert found == memory(target, there, here)


def test_rows_follow_the_regions() -> None:
    """Layer by layer, token by token; offsets are the token's place in the region of that layer on each side."""
    plan = location_rows([HUGE, 3], [1, 2], layout(), layout(), [4, 1, 9], [3, 2, 8])
    assert plan.source_regions.tolist() == [4, 4, 1, 1, 9, 9]
    assert plan.target_regions.tolist() == [3, 3, 2, 2, 8, 8]
    assert plan.source_offsets.tolist() == [HUGE * 8, 24] * 3
    assert plan.target_offsets.tolist() == [8, 16] * 3
    assert plan.lengths.tolist() == [8] * 6


def test_no_tokens_are_no_rows() -> None:
    """Neither no tokens nor a rank that writes nothing there is an error: the transfer has no rows."""
    assert len(location_rows([], [], layout(), layout(), [0, 1, 2], [0, 1, 2])) == 0
    heads = [layout(heads=2, degree=2, rank=rank) for rank in range(2)]
    assert len(location_rows([1], [1], heads[0], heads[1], [0, 1, 2], [0, 1, 2])) == 0


def test_rows_are_never_clipped() -> None:
    """More sources than targets, or fewer, is an error: nothing is sent in part."""
    for here, there in (([1, 2, 3], [1, 2]), ([1], [1, 2]), ([1], [])):
        complains(
            ShapeError,
            lambda here=here, there=there: location_rows(here, there, layout(), layout(), [0, 1, 2], [0, 1, 2]),
            f"{len(here)} source locations for {len(there)} target locations",
        )


def test_rows_refuse_what_does_not_fit() -> None:
    """Layouts that differ, pages that are not token-major, regions and locations out of range."""
    three = [0, 1, 2]
    complains(
        HandshakeError, lambda: location_rows([1], [1], layout(), layout(page_size=8), three, three), "page_size is 4"
    )
    mixed = layout(token_major=False)
    complains(ArgumentError, lambda: location_rows([1], [1], mixed, mixed, three, three), "not token-major")
    single = layout(token_major=False, page_size=1)
    assert len(location_rows([1], [1], single, single, three, three)) == 3
    complains(ArgumentError, lambda: location_rows([1], [1], layout(), layout(), [0, 1], three), "source", "[0, 1]")
    complains(
        ArgumentError, lambda: location_rows([1], [1], layout(), layout(), three, [0, 1, 1]), "target", "3 different"
    )
    complains(
        ArgumentError, lambda: location_rows([1], [1], layout(), layout(), three, [0, 1, -1]), "target region is -1"
    )
    refused(Code.SLOT_ZERO_ALLOCATED, lambda: location_rows([1], [0], layout(), layout(), three, three))
    refused(Code.SLOT_OUT_OF_RANGE, lambda: location_rows([-1], [1], layout(), layout(), three, three))
    refused(Code.SLOT_OUT_OF_RANGE, lambda: location_rows([2**61], [1], layout(), layout(), three, three))


# Fewer rows, and writes


@st.composite
def copies(draw: st.DrawFn) -> Copies:
    """Rows of 1 to 4 bytes on few places, so that many are adjacent on one side or on both; targets do not overlap."""
    shift = draw(st.sampled_from([0, HUGE]))
    found: list[tuple[int, int, int, int, int]] = []
    place = dict.fromkeys(range(2), shift)
    for _ in range(draw(st.integers(0, 14))):
        target, length = draw(st.integers(0, 1)), draw(st.integers(1, 4))
        follows = draw(st.booleans())
        previous = found[-1] if found and follows else None
        here = (previous[0], previous[1] + previous[4]) if previous else (draw(st.integers(0, 1)), shift)
        place[target] += draw(st.sampled_from([0, 0, 0, 2]))
        found.append((*here, target, place[target], length))
        place[target] += length
    return rows(*draw(st.permutations(found))) if found else Copies.empty()


@settings(max_examples=300, deadline=None)
@given(copies())
def test_coalescing_loses_nothing(plan: Copies) -> None:
    """The same bytes move; the rows are in the order of their targets, and no two of them could still be one."""
    fewer = coalesced(plan)
    assert bytewise(fewer) == bytewise(plan)
    ends = [(row[0], row[1] + row[4], row[2], row[3] + row[4]) for row in np.stack(fewer.arrays(), axis=1).tolist()]
    begins = [tuple(row[:4]) for row in np.stack(fewer.arrays(), axis=1).tolist()]
    assert not set(ends) & set(begins)
    assert [begin[2:] for begin in begins] == sorted(begin[2:] for begin in begins)
    assert np.array_equal(np.stack(coalesced(fewer).arrays()), np.stack(fewer.arrays()))


def test_coalescing_needs_both_sides() -> None:
    """Rows adjacent on one side only, or in another region, stay apart; a chain of any length becomes one row."""
    assert len(coalesced(rows((0, 0, 0, 0, 4), (0, 4, 0, 8, 4)))) == 2
    assert len(coalesced(rows((0, 0, 0, 0, 4), (0, 8, 0, 4, 4)))) == 2
    assert len(coalesced(rows((0, 0, 0, 0, 4), (1, 4, 0, 4, 4)))) == 2
    assert len(coalesced(rows((0, 0, 0, 0, 4), (0, 4, 1, 4, 4)))) == 2
    chain = Copies([0] * 999, np.arange(999)[::-1] * 4, [0] * 999, np.arange(999)[::-1] * 4, [4] * 999)
    assert [one.tolist() for one in coalesced(chain).arrays()] == [[0], [0], [0], [0], [3996]]
    assert len(coalesced(Copies.empty())) == 0


def test_coalescing_hides_no_overlap() -> None:
    """Two rows on one destination stay two, for the engine to refuse."""
    twice = coalesced(rows((0, 0, 0, 0, 4), (0, 0, 0, 0, 4), (0, 4, 0, 4, 4)))
    assert twice.nbytes == 12
    assert len(twice) == 2


@fast
@given(copies(), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 9)))
def test_chunks_hold_all_rows_in_order(plan: Copies, max_rows: int, max_bytes: int | None) -> None:
    """Chunks keep the limits, are full as far as these allow, and hold the same bytes in the same order."""
    chunks = chunked(plan, max_rows, max_bytes)
    assert all(len(one) <= max_rows for one in chunks)
    assert all(max_bytes is None or one.nbytes <= max_bytes for one in chunks)
    joined = Copies(*map(np.concatenate, zip(*(one.arrays() for one in chunks), strict=True)))
    assert bytewise(joined) == bytewise(plan)
    if max_bytes is None or not len(plan) or plan.lengths.max() <= max_bytes:
        assert np.array_equal(np.stack(joined.arrays()), np.stack(plan.arrays()))
    for one, following in itertools.pairwise(chunks):
        full = max_bytes is not None and one.nbytes + following.lengths[0] > max_bytes
        assert len(one) == max_rows or full


def test_no_rows_are_one_chunk() -> None:
    """A transfer without rows is one write without rows: its tag still arrives."""
    assert [len(one) for one in chunked(Copies.empty(), 8)] == [0]
    assert [len(one) for one in chunked(Copies.empty(), 8, 8)] == [0]


def test_long_rows_are_cut() -> None:
    """A row longer than a write may be goes in pieces, each behind the other on both sides."""
    pieces = chunked(rows((1, HUGE, 2, 5, 10)), 8, 4)
    assert [one.source_offsets.tolist() for one in pieces] == [[HUGE], [HUGE + 4], [HUGE + 8]]
    assert [one.target_offsets.tolist() for one in pieces] == [[5], [9], [13]]
    assert [one.lengths.tolist() for one in pieces] == [[4], [4], [2]]


def test_empty_rows_are_refused() -> None:
    """A row of no bytes, or of fewer, is a mistake in the plan, and cannot hide in another row."""
    bad = rows((0, 0, 0, 0, 10), (0, 10, 0, 10, -5))
    complains(ArgumentError, lambda: coalesced(bad), "row 1", "got -5")
    complains(ArgumentError, lambda: chunked(attrs.evolve(bad, lengths=[0, 1]), 4), "row 0", "got 0")
    complains(ArgumentError, lambda: chunked(rows((0, 0, 0, 0, 4)), 0), "max_rows is 0")
    complains(ArgumentError, lambda: chunked(rows((0, 0, 0, 0, 4)), 4, 0), "max_bytes is 0")


def test_a_long_prompt_is_planned_without_a_loop() -> None:
    """A million rows, of tokens in two runs, become two rows a layer."""
    tokens = np.concatenate([np.arange(200_000) + 1, np.arange(200_000) + HUGE])
    plan = location_rows(tokens, tokens, layout(), layout(), [0, 1, 2], [0, 1, 2])
    fewer = coalesced(plan)
    assert len(plan) == 1_200_000
    assert len(fewer) == 6
    assert fewer.nbytes == plan.nbytes
    assert len(chunked(plan, 1024)) == -(-len(plan) // 1024)


def test_the_invariant_of_bounds_was_asked() -> None:
    """Ownership is checked by the invariant that engines use."""
    before = invariants.times_checked[Code.TRANSFER_BOUNDS]
    owned_by([1], [[1, 1]])
    assert invariants.times_checked[Code.TRANSFER_BOUNDS] == before + 1


def test_ranks_are_computed_not_searched() -> None:
    """The sources of a rank are those that write to it, also where a search among all ranks would not end."""
    for heads, degree, source_degree in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)):
        if max(heads, degree) % min(heads, degree) or max(heads, source_degree) % min(heads, source_degree):
            continue
        for rank in range(degree):
            target = layout(heads=heads, degree=degree, rank=rank, item_bytes=8 * max(1, heads // degree))
            sources = [
                layout(heads=heads, degree=source_degree, rank=one, item_bytes=8 * max(1, heads // source_degree))
                for one in range(source_degree)
            ]
            writers = tuple(one.rank for one in sources if slice_between(one, target) is not None)
            assert sources_of(target, source_degree) == writers
    assert sources_of(layout(heads=1), 2 * 10**9) == (0,)


# Places


def test_rows_go_to_the_layer_and_heads_they_come_from() -> None:
    """Between any two ranks and stages a plan passes; with another layer, or another rank's heads, it does not."""
    stages = [LAYERS, LAYERS[:1], LAYERS[1:]]
    for degrees, stage in itertools.product(itertools.product((1, 2, 4), repeat=2), stages):
        for ranks in itertools.product(*map(range, degrees)):
            source, target = (
                layout(heads=4, item_bytes=32 // degree, rank=rank, degree=degree, stage=of)
                for rank, degree, of in zip(ranks, degrees, (stage, LAYERS), strict=True)
            )
            here, there = range(len(stage)), range(10, 13)
            names = dict(zip(here, stage, strict=True)), dict(zip(there, LAYERS, strict=True))
            copies = location_rows([3, 5], [8, 1], source, target, here, there)
            check_places(copies, source, target, *names)
            if not len(copies):
                continue
            others = attrs.evolve(copies, target_regions=10 + (copies.target_regions - 9) % 3)
            refused(Code.TRANSFER_BOUNDS, functools.partial(check_places, others, source, target, *names))
            moved = attrs.evolve(copies, source_offsets=copies.source_offsets + 8)
            if source.degree < 4:
                refused(Code.TRANSFER_BOUNDS, functools.partial(check_places, moved, source, target, *names))
