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

from batchstate.errors import ArgumentError, BatchStateError, DtypeError, HandshakeError, ShapeError
from batchstate.transport.engines.base import Copies, Ints
from batchstate.transport.plan import (
    KVLayout,
    check_chunk,
    check_fit,
    check_places,
    check_sources,
    chunked,
    coalesced,
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


def table(copies: Copies) -> list[tuple[int, ...]]:
    """The same, of copies."""
    return [tuple(row) for row in np.stack(copies.arrays(), axis=1).tolist()]


def ints(values: Any, width: int = 1) -> Ints:
    """int64[n], or int64[n, 2]."""
    return np.array(values, dtype=np.int64).reshape((-1,) if width == 1 else (-1, width))


def planned(
    here: Any, there: Any, source: KVLayout, target: KVLayout, regions: Any = (0, 1, 2), to: Any = None
) -> Copies:
    """Rows of lists of locations, into the same regions."""
    return location_rows(ints(here), ints(there), source, target, regions, regions if to is None else to)


def owned(tokens: Any, ranges: Any) -> None:
    """Asks of lists."""
    owned_by(ints(tokens), ints(ranges, 2))


def bytewise(copies: Copies) -> list[tuple[Place, Place]]:
    """The model: (target byte, source byte) of each byte that moves, sorted."""
    return sorted(
        ((target, there + byte), (source, here + byte))
        for source, here, target, there, length in table(copies)
        for byte in range(length)
    )


def move(copies: Copies, source: dict[int, bytearray], target: dict[int, bytearray]) -> None:
    """The model of an engine: moves row by row."""
    for here, start, there, place, length in table(copies):
        assert 0 <= start <= len(source[here]) - length
        assert 0 <= place <= len(target[there]) - length
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
    assert KVLayout(**attrs.asdict(one)) == one
    assert type(one.item_bytes) is int
    assert one.head_bytes == 8
    assert layout(replicated=True, degree=3, rank=2, heads=4).head_bytes == 8  # no heads to share: any degree goes


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"page_size": 0}, ArgumentError, ["page_size is 0"]),
        ({"item_bytes": -8}, ArgumentError, ["item_bytes is -8"]),
        ({"layers": ()}, ArgumentError, ["()"]),
        ({"layers": ("k", "v", "k")}, ArgumentError, ["'k' is named 2 times"]),
        ({"dtype": ""}, DtypeError, ["''"]),
        ({"rank": 2, "degree": 2, "heads": 2}, ArgumentError, ["rank of 0 to 1, got 2"]),
        ({"rank": -1}, ArgumentError, ["rank is -1"]),
        ({"degree": 3, "heads": 4}, ArgumentError, ["4 heads", "3 ranks"]),
        ({"degree": 6, "heads": 4}, ArgumentError, ["4 heads", "6 ranks"]),
        ({"heads": 3}, ArgumentError, ["item_bytes 8", "3 heads"]),
        ({"stage": ("2.keys",)}, ArgumentError, ["a stage of", "2.keys"]),
        ({"stage": LAYERS[1::-1]}, ArgumentError, ["a stage of", "0.values"]),
    ],
)
def test_layout_refuses(fields: dict[str, Any], kind: type[BatchStateError], words: list[str]) -> None:
    """A layout that cannot be is refused, with the value and a remedy."""
    complains(kind, lambda: layout(**fields), *words)


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
        complains(ArgumentError, functools.partial(check_sources, whole, tuple(wrong)), "layer", "writers of ranks")
    last = (attrs.evolve(whole[0], stage=("2",)),)
    complains(ArgumentError, lambda: check_sources(last, tuple(group)), "writer 0", "nothing to write")


def test_rows_of_the_layers_that_both_sides_have() -> None:
    """A stage writes its own layers into their regions, whatever their numbers; none of another stage's."""
    whole, stage = layout(), layout(stage=("0.values", "1.keys"))
    found = planned([1, 2], [5, 6], stage, whole, [7, 9], [20, 21, 22])
    assert found.source_regions.tolist() == [7, 7, 9, 9]
    assert found.target_regions.tolist() == [21, 21, 22, 22]
    assert not len(planned([1], [5], stage, layout(stage=("0.keys",)), [7, 9], [20]))


def test_uneven_source_degree_is_refused() -> None:
    """A source group that cannot share the heads evenly has no writers, but an error."""
    complains(ArgumentError, lambda: sources_of(layout(heads=4), 3), "4 heads", "3 ranks")
    assert held_by(5, 8, 2).first == 1


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
    kept = {token + shift for start, length in ranges for token in range(start, start + length)}
    targets = [token + shift for token in tokens]
    shifted = [(start + shift, length) for start, length in ranges]
    outside = [row for row, token in enumerate(targets) if token not in kept]
    if len(kept) < sum(length for _, length in ranges):
        complains(ArgumentError, lambda: owned(targets, shifted), "ranges")
    elif outside:
        assert refused(Code.TRANSFER_BOUNDS, lambda: owned(targets, shifted)).row == outside[0]
    elif len(set(targets)) < len(targets):
        complains(ArgumentError, lambda: owned(targets, shifted), "named twice")
    else:
        owned(targets, shifted)


def test_ranges_own_their_first_and_last_token() -> None:
    """The first and last token of each range are owned, the next one is not; no tokens need no range."""
    ranges = [[30, 1], [9, 10], [1, 2]]
    owned([9, 1, 18, 2, 14, 30], ranges)
    for token in (0, 3, 8, 19, 29, 31):
        refused(Code.TRANSFER_BOUNDS, functools.partial(owned, [9, token], ranges))
    owned([], [])
    refused(Code.TRANSFER_BOUNDS, lambda: owned([1], []))


def test_ownership_refuses_bad_ranges() -> None:
    """Ranges that are empty, hold the padding, overflow, or have another shape are refused."""
    for bad in ([0, 4], [4, 0], [2**63 - 1, 4]):
        complains(ArgumentError, functools.partial(owned, [], [bad]), str(bad))
    complains(ShapeError, lambda: owned_by(ints([1]), ints([1, 4])), "got [2]")
    assert complains(ArgumentError, lambda: owned([5, 3, 5], [[1, 9]]), "location 5", "row 2").value == 5


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
@given(transfers(), st.integers(1, 7))
def test_moved_bytes_are_those_of_the_request(
    case: tuple[list[KVLayout], list[KVLayout], list[int], list[int]], max_rows: int
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
            for piece in chunked(coalesced(planned(here, there, source, target, regions)), max_rows):
                assert len(piece) <= max_rows
                move(piece, memory(source, everywhere, everywhere), found)
        assert found == memory(target, there, here)


def test_rows_follow_the_regions() -> None:
    """Layer by layer, token by token; offsets are the token's place in the region of that layer on each side."""
    plan = planned([HUGE, 3], [1, 2], layout(), layout(), [4, 1, 9], [3, 2, 8])
    assert plan.source_regions.tolist() == [4, 4, 1, 1, 9, 9]
    assert plan.target_regions.tolist() == [3, 3, 2, 2, 8, 8]
    assert plan.source_offsets.tolist() == [HUGE * 8, 24] * 3
    assert plan.target_offsets.tolist() == [8, 16] * 3
    assert plan.lengths.tolist() == [8] * 6


def test_no_tokens_are_no_rows() -> None:
    """Neither no tokens nor a rank that writes nothing there is an error: the transfer has no rows."""
    assert len(planned([], [], layout(), layout())) == 0
    heads = [layout(heads=2, degree=2, rank=rank) for rank in range(2)]
    assert len(planned([1], [1], heads[0], heads[1])) == 0


def test_rows_are_never_clipped() -> None:
    """More sources than targets, or fewer, is an error: nothing is sent in part."""
    for here, there in (([1, 2, 3], [1, 2]), ([1], [1, 2]), ([1], [])):
        words = f"{len(here)} source locations for {len(there)} target locations"
        complains(ShapeError, functools.partial(planned, here, there, layout(), layout()), words)


def test_rows_refuse_what_does_not_fit() -> None:
    """Locations out of range."""
    refused(Code.SLOT_ZERO_ALLOCATED, lambda: planned([1], [0], layout(), layout()))
    refused(Code.SLOT_OUT_OF_RANGE, lambda: planned([-1], [1], layout(), layout()))
    refused(Code.SLOT_OUT_OF_RANGE, lambda: planned([2**61], [1], layout(), layout()))


def test_pages_that_cannot_be_split_go_as_a_whole() -> None:
    """Where tokens of a page do not lie one after the other its bytes are one row, also of one that ends early."""
    mixed = layout(token_major=False)
    whole = planned([8, 9, 10, 11, 4, 5], [12, 13, 14, 15, 20, 21], mixed, mixed, (0,))
    assert table(whole) == [(0, 8 * 8, 0, 12 * 8, 32), (0, 4 * 8, 0, 20 * 8, 32)]
    wrong = {
        "source location 9 in row 0": ([9, 10, 11], [12, 13, 14]),
        "source location 10 in row 1": ([8, 10], [12, 13]),
        "source location 5 in row 4": ([8, 9, 10, 11, 5], [12, 13, 14, 15, 20]),
        "target location 14 in row 0": ([8, 9], [14, 15]),
        "target location 13 in row 0": ([8, 9], [13, 12]),
    }
    for words, (here, there) in wrong.items():
        complains(ArgumentError, functools.partial(planned, here, there, mixed, mixed), words, "its page of 4")
    refused(Code.SLOT_ZERO_ALLOCATED, lambda: planned([8, 9], [0, 1], mixed, mixed))
    halves = [layout(token_major=False, heads=4, degree=2, rank=rank) for rank in range(2)]
    assert len(planned([8], [12], halves[0], halves[0], (0,))) == 1
    assert len(planned([8], [12], halves[0], halves[1], (0,))) == 0
    split = layout(token_major=False, heads=4, item_bytes=16)
    complains(HandshakeError, lambda: check_fit(halves[0], split), "2 heads here, 4 there", "not token-major")
    check_fit(halves[0], halves[1])


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
    ends = {(source, here + length, target, there + length) for source, here, target, there, length in table(fewer)}
    begins = [row[:4] for row in table(fewer)]
    assert not ends & set(begins)
    assert [begin[2:] for begin in begins] == sorted(begin[2:] for begin in begins)
    assert table(coalesced(fewer)) == table(fewer)


def test_a_chain_becomes_one_row() -> None:
    """Rows adjacent on both sides become one, however many they are and in whatever order."""
    chain = Copies([0] * 999, np.arange(999)[::-1] * 4, [0] * 999, np.arange(999)[::-1] * 4, [4] * 999)
    assert table(coalesced(chain)) == [(0, 0, 0, 0, 3996)]


def test_coalescing_hides_no_overlap() -> None:
    """Two rows on one destination stay two, for the engine to refuse."""
    twice = coalesced(rows((0, 0, 0, 0, 4), (0, 0, 0, 0, 4), (0, 4, 0, 4, 4)))
    assert twice.nbytes == 12
    assert len(twice) == 2


@fast
@given(copies(), st.integers(1, 5))
def test_chunks_hold_all_rows_in_order(plan: Copies, max_rows: int) -> None:
    """Chunks keep the limit, are full but for the last, and hold the same rows in order; no rows are one chunk."""
    chunks = chunked(plan, max_rows)
    assert [row for one in chunks for row in table(one)] == table(plan)
    assert all(len(one) == max_rows for one in chunks[:-1])
    assert len(chunks) == max(1, -(-len(plan) // max_rows))


@fast
@given(copies(), st.integers(1, 9))
def test_long_rows_are_cut(plan: Copies, most: int) -> None:
    """A row longer than a message goes in pieces, each behind the other on both sides."""
    pieces = plan.cut(most)
    assert bytewise(pieces) == bytewise(plan)
    assert pieces.lengths.max(initial=0) <= most
    assert len(pieces) == sum(-(-length // most) for length in plan.lengths.tolist())


def test_a_long_prompt_is_planned_without_a_loop() -> None:
    """A million rows, of tokens in two runs, become two rows a layer."""
    tokens = np.concatenate([np.arange(200_000) + 1, np.arange(200_000) + HUGE])
    plan = planned(tokens, tokens, layout(), layout())
    fewer = coalesced(plan)
    assert len(plan) == 1_200_000
    assert len(fewer) == 6
    assert fewer.nbytes == plan.nbytes
    assert len(chunked(plan, 1024)) == -(-len(plan) // 1024)


def test_ranks_are_computed_not_searched() -> None:
    """The sources of a rank are known at once, also where a search among all ranks would not end."""
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
            copies = planned([3, 5], [8, 1], source, target, here, there)
            check_places(copies, source, target, *names, "")
            if not len(copies):
                continue
            others = attrs.evolve(copies, target_regions=10 + (copies.target_regions - 9) % 3)
            refused(Code.TRANSFER_BOUNDS, functools.partial(check_places, others, source, target, *names, ""))
            refused(Code.TRANSFER_BOUNDS, functools.partial(check_places, copies, source, target, *names, " elsewhere"))
            moved = attrs.evolve(copies, source_offsets=copies.source_offsets + 8)
            if source.degree < 4:
                refused(Code.TRANSFER_BOUNDS, functools.partial(check_places, moved, source, target, *names, ""))
