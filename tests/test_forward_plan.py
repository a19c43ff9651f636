"""ForwardPlan: the host's arrays of a forward are those that a loop over requests and tokens would write."""

import functools
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchstate import Code, MirroredTensor, SlotPool, Slots, TokenArray, Violation, checks
from batchstate.errors import ArgumentError, ContractError, DeclarationError, DtypeError, ShapeError, ValueOverflowError
from batchstate.forward.plan import ForwardPlan, layout_arrays
from batchstate.mirror import HostLocations, Locations, Pages
from batchstate.races.devices import open_device
from batchstate.runtime import Runtime
from tests.doubles import refused
from tests.refusals import Expected, refuses
from tests.worlds import LONGEST, ForwardWorld

some = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@attrs.define(eq=False)
class Case:
    """One batch: lengths and chunks of each request, and padding."""

    seq_lens: list[int]
    query_lens: list[int]
    samples: list[bool]
    padded_rows: int
    padded_tokens: int
    page_size: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Batches of up to 5 requests, those that put in nothing among them."""
    seq_lens = draw(st.lists(st.integers(0, LONGEST), max_size=5))
    query_lens = [draw(st.integers(0, length)) for length in seq_lens]
    samples = [query > 0 and draw(st.booleans()) for query in query_lens]
    padding = st.integers(0, 3)
    return Case(seq_lens, query_lens, samples, draw(padding), draw(padding), draw(st.sampled_from([1, 2, 4, 16])))


def plan_of(case: Case, world: ForwardWorld, slots: Slots, **others: Any) -> ForwardPlan:
    """The plan of a case, all ids by the host: token p of request i has id 100 * i + p."""
    lengths = zip(case.seq_lens, case.query_lens, strict=True)
    ids = [[100 * row + p for p in range(length - query, length)] for row, (length, query) in enumerate(lengths)]
    return ForwardPlan.of(
        slots.pad(len(slots) + case.padded_rows),
        case.seq_lens,
        case.query_lens,
        prompt_ids=ids,
        samples=case.samples,
        pages=world.pages,
        pad_tokens=sum(case.query_lens) + case.padded_tokens,
        **others,
    )


@some
@given(cases())
def test_arrays_of_tokens_and_requests(device: str, case: Case) -> None:
    """Ids, positions, starts, lengths, last tokens and locations are those of a loop; padding is zero, starts go on."""
    world = ForwardWorld.of(open_device(device), page_size=case.page_size)
    slots = world.take(case.seq_lens)
    plan = plan_of(case, world, slots)
    ids, positions, locations, starts, last = [], [], [], [0], []
    for row, (length, query) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        for position in range(length - query, length):
            ids.append(100 * row + position)
            positions.append(position)
            locations.append(world.locations(int(slots.np[row]), [position])[0])
        starts.append(len(ids))
        if case.samples[row]:
            last.append(len(ids) - 1)
    behind = [0] * case.padded_tokens
    num_reqs, num_rows = len(slots), len(slots) + case.padded_rows
    everybody = all(case.samples)
    expected: dict[str, tuple[list[int], type]] = {
        "positions": (positions + behind, np.int64),
        "query_start_loc": (starts + [starts[-1]] * case.padded_rows, np.int32),
        "kv_lens": (case.seq_lens + [0] * case.padded_rows, np.int32),
        "last_token_indices": (last + [0] * case.padded_rows if everybody else last, np.int64),
        "slot_mapping": (locations + behind, np.int64),
    }
    for name, (values, dtype) in expected.items():
        assert plan.extras[name].tolist() == values, name
        assert plan.extras[name].dtype == dtype, name
    if ids:
        assert plan.prompt_ids is not None
        assert plan.prompt_ids.tolist() == ids + behind
    else:
        assert plan.prompt_ids is None
        assert plan.extras["input_ids"].tolist() == behind
    assert plan.sample_rows.tolist() == [row for row, does in enumerate(case.samples) if does]
    assert plan.sampled_slots.np.tolist() == plan.extras.get("sample_slots", plan.slots.np).tolist()
    assert ("sample_slots" in plan.extras) == (not everybody)
    assert (plan.num_reqs, plan.num_rows) == (num_reqs, num_rows)
    assert (plan.num_tokens, plan.num_padded_tokens) == (len(ids), len(ids) + case.padded_tokens)
    assert plan.max_query_len == max(case.query_lens, default=0)
    assert plan.max_kv_len == max(case.seq_lens, default=0)
    assert not len(plan.relay_rows)


@some
@given(cases())
def test_layout_of_flash_attention(device: str, case: Case) -> None:
    """`cu_seqlens_k` and `block_table` name the location of every token of every request, in int32."""
    world = ForwardWorld.of(open_device(device), page_size=case.page_size)
    slots = world.take(case.seq_lens)
    extras = plan_of(case, world, slots, layouts="flash_attention").extras
    starts, table, size = extras["kv_start_loc"], extras["block_table"], case.page_size
    num_rows = len(slots) + case.padded_rows
    assert starts.dtype == table.dtype == np.int32
    assert starts.shape == (num_rows + 1,)
    assert table.shape == (num_rows, max((-(-length // size) for length in case.seq_lens), default=0))
    for row in range(num_rows):
        length = int(starts[row + 1] - starts[row])
        assert length == (case.seq_lens[row] if row < len(slots) else 0)
        found = [int(table[row, p // size]) * size + p % size for p in range(length)]
        assert found == (world.locations(int(slots.np[row]), range(length)) if row < len(slots) else [])
        assert not table[row, -(-length // size) :].any()


@some
@given(cases())
def test_layout_of_flashinfer(device: str, case: Case) -> None:
    """`paged_kv_indptr`, `paged_kv_indices` and `paged_kv_last_page_len` name the location of every token, in int32."""
    world = ForwardWorld.of(open_device(device), page_size=case.page_size)
    slots = world.take(case.seq_lens)
    extras = plan_of(case, world, slots, layouts=["flashinfer"]).extras
    indptr, indices, last = (extras[f"kv_{name}"] for name in ("page_indptr", "page_indices", "last_page_len"))
    num_rows = len(slots) + case.padded_rows
    assert indptr.dtype == indices.dtype == last.dtype == np.int32
    assert (indptr.shape, last.shape, indices.size) == ((num_rows + 1,), (num_rows,), int(indptr[-1]))
    for row in range(num_rows):
        pages = indices[indptr[row] : indptr[row + 1]].tolist()
        length = (len(pages) - 1) * case.page_size + int(last[row]) if pages else 0
        assert length == (case.seq_lens[row] if row < len(slots) else 0)
        assert 1 <= last[row] <= case.page_size if pages else last[row] == 0
        found = [pages[p // case.page_size] * case.page_size + p % case.page_size for p in range(length)]
        assert found == (world.locations(int(slots.np[row]), range(length)) if row < len(slots) else [])


def test_both_layouts_at_once(rt: Runtime) -> None:
    """Layouts are named one by one or together; without any there are none, without pages no locations either."""
    world = ForwardWorld.of(rt)
    slots = world.take([5, 6])
    both = ForwardPlan.of(slots, [5, 6], pages=world.pages, layouts=("flashinfer", "flash_attention")).extras
    assert {"kv_start_loc", "block_table", "kv_page_indptr", "kv_page_indices", "kv_last_page_len"} < set(both)
    plain = ForwardPlan.of(slots, [5, 6]).extras
    assert set(plain) == {"positions", "query_start_loc", "kv_lens", "last_token_indices"}


def test_a_window_reads_what_is_left(rt: Runtime) -> None:
    """Without its window a plan over pages that were given back is refused; with it they are page 0 in page lists."""
    world = ForwardWorld.of(rt, page_size=4)
    slots = world.take([11, 3])
    world.pages.truncate(slots, first=[6, 0], after=None)
    table = world.pages.page_table[slots.np]
    for wide in (None, 8):
        with pytest.raises(Violation, match="PAGE_RELEASED"):
            ForwardPlan.of(slots, [11, 3], pages=world.pages, window=wide)
    for window, query_lens in ((7, 1), (6, [2, 0])):
        plan = ForwardPlan.of(
            slots,
            [11, 3],
            query_lens,
            pages=world.pages,
            window=window,
            samples=np.broadcast_to(query_lens, 2) > 0,
            layouts=("flash_attention", "flashinfer"),
        )
        assert plan.extras["block_table"].tolist() == [[0, *table[0, 1:3]], [table[1, 0], 0, 0]]
        assert plan.extras["kv_page_indices"].tolist() == [0, *table[0, 1:3], table[1, 0]]
    with pytest.raises(ArgumentError):
        ForwardPlan.of(slots, [11, 3], pages=world.pages, window=0)


@pytest.mark.parametrize("padded_rows", [0, 2])
def test_numbers_as_an_engine_has_them(rt: Runtime, padded_rows: int) -> None:
    """Lengths are a column, an array of requests or of rows; chunks are one number, or one a request or row."""
    slots = SlotPool(rt, 8).take(3)
    rows = slots.pad(3 + padded_rows)
    column = MirroredTensor.from_host(rt, [5, 6, 7]).pad(3 + padded_rows, 99)
    for lens in ([5, 6, 7], np.array([5, 6, 7], np.int32), column, column.np):
        for queries in (2, [2, 2, 2], np.array([2] * 3 + [9] * padded_rows), np.int32(2)):
            plan = ForwardPlan.of(rows, lens, queries)
            assert plan.extras["positions"].tolist() == [3, 4, 4, 5, 5, 6]
            assert plan.extras["kv_lens"].tolist() == [5, 6, 7] + [0] * padded_rows
            assert plan.seq_lens.tolist() == [5, 6, 7]
            assert plan.query_lens.tolist() == [2, 2, 2]
            assert not plan.bounded


def test_requests_of_the_relay(rt: Runtime) -> None:
    """None among the ids is a request that the relay feeds: its tokens are planned, and no id stands in for it."""
    slots = SlotPool(rt, 8).take(4)
    plan = ForwardPlan.of(slots, [5, 6, 7, 3], [2, 1, 1, 3], prompt_ids=[[1, 2], None, None, [7, 8, 9]], pad_tokens=9)
    assert plan.relay_rows.tolist() == [1, 2]
    assert plan.relayed.np.tolist() == slots.np[[1, 2]].tolist()
    assert plan.relayed.generations.tolist() == slots.generations[[1, 2]].tolist()
    assert plan.relay_tokens().tolist() == [2, 3]
    assert plan.extras["relay_tokens"].tolist() == [2, 3]
    assert plan.extras["relay_slots"].tolist() == slots.np[[1, 2]].tolist()
    assert plan.prompt_ids is not None
    assert plan.prompt_ids.tolist() == [1, 2, 0, 0, 7, 8, 9, 0, 0]
    assert not plan.direct
    assert repr(plan) == "ForwardPlan(4 requests, 7 tokens, 2 by the relay)"


@pytest.mark.parametrize(
    ("arguments", "direct"),
    [
        ({}, True),
        ({"query_lens": 3}, True),
        ({"pad_tokens": 3}, False),
        ({"query_lens": [1, 2]}, False),
        ({"prompt_ids": [None, [1]]}, False),
    ],
)
def test_plain_decodes_carry_no_ids(rt: Runtime, arguments: dict[str, Any], direct: bool) -> None:
    """Where the relay's entries are the ids, row by row, nothing else crosses for them."""
    plan = ForwardPlan.of(SlotPool(rt, 4).take(2), [5, 6], **{"query_lens": 1, **arguments})
    assert plan.direct == direct
    assert ("relay_tokens" in plan.extras) == (not direct)
    assert (plan.prompt_ids is None) == ("prompt_ids" not in arguments)


def test_bounds_are_bounds(rt: Runtime) -> None:
    """Bounded lengths make a bounded plan, unless the host knows all ids; the bounds are planned with."""
    slots = SlotPool(rt, 4).take(2)
    true = rt.upload([np.array([4, 5])]).view(0)
    bounds = MirroredTensor.from_pair(rt, [6, 8], true, contract="upper_bound")
    plan = ForwardPlan.of(slots, bounds, prompt_ids=[None, [7]])
    assert plan.bounded
    assert (plan.seq_lens.tolist(), plan.max_kv_len) == ([6, 8], 8)
    assert plan.extras["relay_rows"].tolist() == [0]
    assert not ForwardPlan.of(slots, bounds, prompt_ids=[[6], [7]]).bounded
    refuses(DtypeError, "got a MirroredTensor", lambda: ForwardPlan.of(slots, bounds, prompt_ids=bounds))  # type: ignore[arg-type]


def with_types(rows: Any, **named: Any) -> dict[str, Any]:
    """An array of token types."""
    return {"token_arrays": {"types": TokenArray(rows, **named)}}


ONE_EACH = "expected one number, or one for each of 3"
WRONG: dict[str, tuple[Expected, str, dict[str, Any]]] = {
    "lengths for others": (ShapeError, f"seq_lens: {ONE_EACH}", {"seq_lens": [5, 6]}),
    "lengths in two dimensions": (ShapeError, r"got an array of shape \[3, 1\]", {"seq_lens": [[5], [6], [7]]}),
    "fractions": (DtypeError, "seq_lens: expected integers, got float64", {"seq_lens": [5.0, 6.0, 7.0]}),
    "chunks for others": (ShapeError, f"query_lens: {ONE_EACH}", {"query_lens": [1, 1, 1, 1]}),
    "booleans for chunks": (DtypeError, "query_lens: expected integers, got bool", {"query_lens": [True, True, True]}),
    "more in than there is": (ArgumentError, "row 1: .* got 7 and 6", {"query_lens": [1, 7, 1]}),
    "less than nothing in": (ArgumentError, "row 2: .* got -1 and 7", {"query_lens": [1, 1, -1]}),
    "a negative length": (ArgumentError, "row 0: .* got 0 and -5", {"seq_lens": [-5, 6, 7], "query_lens": 0}),
    "lengths beyond int32": (ValueOverflowError, "2147483648 does not fit int32", {"seq_lens": [5, 2**31, 7]}),
    "together beyond int32": (
        ValueOverflowError,
        "tokens: 3221225472 does not fit int32",
        {"seq_lens": [2**30] * 3, "query_lens": 2**30},
    ),
    "fewer padded tokens than tokens": (ArgumentError, "pad_tokens is 2", {"pad_tokens": 2}),
    "half a padded token": (DtypeError, "pad_tokens is 3.5", {"pad_tokens": 3.5}),
    "padded tokens beyond int32": (ValueOverflowError, "pad_tokens", {"pad_tokens": 2**31 + 10}),
    "ids for others": (ShapeError, "prompt_ids of 2 for 3 requests", {"prompt_ids": [None, [1]]}),
    "ids end to end": (ShapeError, "a list of 1, got the number 1", {"prompt_ids": np.array([1, 2, 3])}),
    "ids in a set": (DtypeError, "prompt_ids: expected a list, got a set", {"prompt_ids": {(1,), (2,), (3,)}}),
    "ids by request": (
        DtypeError,
        "prompt_ids: expected a list, got {",
        {"prompt_ids": {"a": [1], "b": [2], "c": [3]}},
    ),
    "ids that are too many": (ShapeError, "row 1: 2 values for its 1 tokens", {"prompt_ids": [None, [1, 2], None]}),
    "ids that are missing": (ShapeError, "row 0: 0 values for its 1 tokens", {"prompt_ids": [[], None, None]}),
    "None among ids": (DtypeError, "of row 0", {"prompt_ids": [[1, None], None, None], "query_lens": [2, 1, 1]}),
    "fractional ids": (DtypeError, "prompt_ids of row 0", {"prompt_ids": [[1.5], None, None]}),
    "ids beyond int32": (ValueOverflowError, "row 0", {"int32": ["input_ids"], "prompt_ids": [[2**31], None, None]}),
    "int32 of another array": (DeclarationError, "'kv_lens' in int32", {"int32": ["kv_lens"]}),
    "samples for others": (ShapeError, r"samples: expected bool\[3\], got bool\[2\]", {"samples": [True, False]}),
    "samples by number": (ShapeError, r"samples: expected bool\[3\], got int64\[3\]", {"samples": [0, 1, 1]}),
    "a sample of no token": (ArgumentError, "row 0 samples and puts in no token", {"query_lens": [0, 1, 1]}),
    "an unknown layout": (DeclarationError, "use one of: flash_attention, flashinfer", {"layouts": "paged"}),
    "a layout without pages": (ArgumentError, "need pages", {"layouts": "flashinfer"}),
    "ids as a token array": (DeclarationError, "prompt_ids", {"token_arrays": {"input_ids": TokenArray(None)}}),
    "a name that is taken": (DeclarationError, "positions", {"token_arrays": {"positions": TokenArray(None)}}),
    "a name of a layout": (DeclarationError, "kv_lens", {"token_arrays": {"kv_lens": TokenArray(None)}}),
    "types for others": (ShapeError, "types of 1 for 3", with_types([[1]])),
    "too many types": (ShapeError, "row 1: 2 values", with_types([None, [1, 2], None])),
    "types of another shape": (
        ShapeError,
        r"expected a list of 1, got shape \[1, 1\]",
        with_types([None, [[1]], None]),
    ),
    "types without a shape": (ShapeError, r"list of 1 values \[2\]", with_types([[1], None, None], shape=(2,))),
    "fractional types": (DtypeError, "types of row 0", with_types([[0.5], None, None])),
    "types too large": (ValueOverflowError, "row 0", with_types([[300], None, None], dtype=torch.uint8)),
    "padding before a request": (Code.SLOT_ZERO_ALLOCATED, "index 0", {"slots": [2, 0, 1], "seq_lens": [5, 6, 7]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_arguments(rt: Runtime, name: str) -> None:
    """Arguments that do not go together are typed errors, on the host alone."""
    expected, words, wrong = WRONG[name]
    slots = SlotPool(rt, 4).take(3)
    if "slots" in wrong:
        slots = slots.take([0, 1]).pad(3).take(wrong["slots"])
    before = rt.counters.snapshot()
    options = {"seq_lens": [5, 6, 7], **{key: value for key, value in wrong.items() if key != "slots"}}
    refuses(expected, words, lambda: ForwardPlan.of(slots, **options))
    assert rt.counters == before


def test_placeholders_are_reported_with_their_token(rt: Runtime) -> None:
    """The token among all, and the array: ids of a prompt, or another one that is declared non-negative."""
    slots = SlotPool(rt, 4).take(2)
    pairs = TokenArray([None, [[3, -1]]], shape=(2,), non_negative=True)
    for column, options in (
        ("input_ids", {"query_lens": [2, 1], "prompt_ids": [[3, -1], None]}),
        ("pairs", {"token_arrays": {"pairs": pairs}}),
    ):
        violation = refused(Code.SENTINEL_ESCAPED, functools.partial(ForwardPlan.of, slots, [5, 6], **options))
        assert (violation.row, violation.column) == (1, column)
    nothing = {"pairs": TokenArray(None, shape=(2,), non_negative=True)}
    assert ForwardPlan.of(slots.take([]), [], token_arrays=nothing).token_arrays["pairs"].shape == (0, 2)


@pytest.mark.parametrize("kind", [Pages, Locations, HostLocations])
def test_rows_are_slots(rt: Runtime, kind: Any) -> None:
    """Numbers of another index space are no rows of requests."""
    wrong = kind.from_host(rt, [1, 2])
    refuses(Code.UNIT_MISMATCH, "'slot' is meant", lambda: ForwardPlan.of(wrong, [5, 6], prompt_ids=[[1], [2]]))


def test_names_of_int32_are_read_once(rt: Runtime) -> None:
    """Names from a generator count as those in a list."""
    names: Any = (name for name in ["positions"])
    plan = ForwardPlan.of(SlotPool(rt, 4).take(1), [5], int32=names)
    assert plan.extras["positions"].dtype == np.int32


def test_refuses_tokens_without_pages(rt: Runtime) -> None:
    """Tokens have their pages before they are planned: no location is made up."""
    world = ForwardWorld.of(rt)
    slots = world.take([5, 6])
    world.pages.grow(slots, 8)
    with pytest.raises(ArgumentError, match="row 1 has 9 tokens and pages for 8"):
        ForwardPlan.of(slots, [8, 9], pages=world.pages)
    others = ForwardWorld.of(rt)
    with pytest.raises(ArgumentError, match="expected slots of pool"):
        ForwardPlan.of(others.take([5]), [5], pages=world.pages)


def test_refuses_bounds_for_flashinfer(rt: Runtime) -> None:
    """The layout of flashinfer counts pages on the host, which bounds do not tell."""
    world = ForwardWorld.of(rt)
    slots = world.take([5, 6])
    bounds = MirroredTensor.from_pair(rt, [5, 6], rt.upload([np.array([4, 5])]).view(0), contract="upper_bound")
    with pytest.raises(ContractError, match="flashinfer"):
        ForwardPlan.of(slots, bounds, pages=world.pages, layouts="flashinfer")
    ForwardPlan.of(slots, bounds, pages=world.pages, prompt_ids=[[1], [2]], layouts="flashinfer")
    device_only = MirroredTensor.from_device(rt, rt.upload([np.array([4, 5])]).view(0))
    with pytest.raises(ContractError, match="no exact host side"):
        ForwardPlan.of(slots, device_only)
    with pytest.raises(ContractError, match="no exact host side"):
        ForwardPlan.of(slots, [5, 6], bounds)


def test_kv_beyond_int32_is_no_start(rt: Runtime) -> None:
    """The running sum of lengths, which FlashAttention takes as int32, never wraps around."""
    pages: Any = SimpleNamespace(page_size=2**29)
    with pytest.raises(ValueOverflowError, match="3221225472 does not fit int32"):
        layout_arrays(("flash_attention",), pages, np.arange(3), np.array([2**30] * 3), 3, None, False, 3)


def test_plans_at_every_level(rt: Runtime) -> None:
    """What is planned does not depend on the checks, and planning never touches the device."""
    slots = SlotPool(rt, 4).take(2)
    before = rt.counters.snapshot()
    plans = []
    for level in ("off", "cheap", "full"):
        with checks(level):
            plans.append(ForwardPlan.of(slots, [5, 6], [2, 1], prompt_ids=[[3, 4], None]))
    assert rt.counters == before
    first, *others = [{name: array.tolist() for name, array in plan.extras.items()} for plan in plans]
    assert all(one == first for one in others)
