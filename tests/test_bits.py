"""Values of a dtype that numpy lacks, bfloat16 or float8: moved like others, seeded from the host by bits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import (
    Batch,
    Code,
    ForwardPlan,
    MirroredTensor,
    PagePool,
    Runtime,
    TokenArray,
    Violation,
    checks,
    device_only,
    mirrored,
    slot_column,
)
from batchstate.errors import DtypeError, ShapeError, ValueOverflowError
from batchstate.forward.token_array import values_of
from batchstate.future_map import FutureMap, relay_field
from batchstate.pools import SlotPool
from batchstate.runtime.memory import BITS, numpy_dtype
from batchstate.static import StaticBuffers
from batchstate.step import StepPlanner
from tests.doubles import refused

NUMBERS = [[0.5, -1.0], [2.0, 3.5], [128.0, -0.0]]

LEVELS = pytest.mark.parametrize("level", ["cheap", "full"])
DTYPES = pytest.mark.parametrize("dtype", BITS, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Hidden(Batch):
    """A request's hidden states, which only the device knows."""

    seq_lens = mirrored(torch.int64)
    states = device_only(torch.bfloat16, shape=(2,), pad=[1.0, -2.0])


def bits(numbers: object, dtype: torch.dtype = torch.bfloat16) -> np.ndarray:
    """What a file or another process hands over."""
    return torch.tensor(numbers).to(dtype).view(BITS[dtype]).numpy()


def on_device(rt: Runtime, numbers: object, dtype: torch.dtype) -> torch.Tensor:
    """What a forward leaves."""
    return rt.upload([bits(numbers, dtype)]).view(0).view(dtype).clone()


@LEVELS
@DTYPES
@pytest.mark.parametrize("signed", [False, True])
def test_rows_seeded_by_bits_move_like_others(rt: Runtime, level: str, dtype: torch.dtype, signed: bool) -> None:
    """Built from bits, merged with a device tensor, filtered, padded and updated, each row keeps its numbers."""

    class States(Batch):
        seq_lens = mirrored(torch.int64)
        states = device_only(dtype, shape=(2,), pad=[1.0, -2.0])

    with checks(level):
        given = bits(NUMBERS, dtype)
        seeded = States.build(rt, seq_lens=[1, 2, 3], states=given.view(f"{'i' if signed else 'u'}{given.itemsize}"))
        batch = seeded.merge(States.build(rt, seq_lens=[4], states=on_device(rt, [[7.0, 8.0]], dtype)))
        batch = batch.filter([3, 1, 2]).update_device("states", [2], on_device(rt, [[10.0, 12.0]], dtype))
        states = batch.pad(4).states.device
        graph = StaticBuffers(rt, States, rows=5)
        batch.to_static(graph)
        assert rt.counters.forced_syncs == 0
        assert states.dtype == graph["states"].dtype == dtype
        assert states.float().tolist() == [[7.0, 8.0], NUMBERS[1], [10.0, 12.0], [1.0, -2.0]]
        assert graph["states"].float().tolist() == [*states.float().tolist(), [1.0, -2.0]]
        with pytest.raises(DtypeError, match=f"column 'states' holds {dtype}"):
            batch.advance("states")


@DTYPES
def test_values_of_their_own_pad_and_update(rt: Runtime, dtype: torch.dtype) -> None:
    """A device-only value pads with numbers, and takes bits in some rows; nothing is added to it."""
    value = MirroredTensor.from_device(rt, on_device(rt, NUMBERS, dtype))
    padded = value.pad(4, 0.5).update([0], bits([[4.0, 5.0]], dtype))
    assert padded.device.float().tolist() == [[4.0, 5.0], *NUMBERS[1:], [0.5, 0.5]]
    with pytest.raises(DtypeError, match=f"arithmetic on {dtype}"):
        value + 1
    with pytest.raises(ValueOverflowError, match=f"does not go into {dtype}"):
        value.pad(4, 3.4e38 if dtype == torch.bfloat16 else 1e6)


@LEVELS
@DTYPES
def test_a_relay_is_seeded_by_bits(rt: Runtime, level: str, dtype: torch.dtype) -> None:
    """What arrives with a prebuilt request, or from a forward, goes to the next forward bit by bit."""
    with checks(level):
        pool = SlotPool(rt, 4)
        relay = FutureMap(pool, {"hidden": relay_field(dtype, (2,))})
        slots = pool.take(4)
        relay.publish(slots.take([0, 1, 2]), hidden=bits(NUMBERS, dtype))
        relay.publish(slots.take([3]), hidden=on_device(rt, [[10.0, 12.0]], dtype))
        found = relay.gather(slots, "hidden")
        assert found.dtype == dtype
        assert found.float().tolist() == [*NUMBERS, [10.0, 12.0]]
    with pytest.raises(DtypeError, match=f"numpy has no dtype {dtype}"):
        relay_field(dtype, read_by="host")


@LEVELS
@DTYPES
@pytest.mark.parametrize("host", [False, True])
def test_a_table_is_written_by_bits(rt: Runtime, level: str, dtype: torch.dtype, host: bool) -> None:
    """Rows and elements, cleared, gathered, read on the host and adopted; a view of an engine's memory is found."""
    with checks(level):
        pool = SlotPool(rt, 4)
        slots, table = pool.take(3), pool.table("scales", (2,), dtype, host=host)
        table.write(slots, None, bits(NUMBERS, dtype))
        Slotted.build(rt, slots=slots).upload(writes=[table.entry(slots.take([1]), [1], bits([5.0], dtype))])
        kept = table.gather(slots)
        assert kept.device.dtype == table.memory.dtype == dtype
        assert kept.device.float().tolist() == [NUMBERS[0], [2.0, 5.0], NUMBERS[2]]
        if host:
            assert table.host_for(slots).tolist() == bits([NUMBERS[0], [2.0, 5.0], NUMBERS[2]], dtype).tolist()
        table.clear(slots.take([2]))
        refused(Code.DERIVED_STALE, lambda: kept.device)
        assert table.device_for(slots)[3].float().tolist() == [0.0, 0.0]
        table.check()
        tensor = rt.device_zeros((5, 2), dtype)
        tensor[0] = 1.0
        refused(Code.SLOT_ZERO_DIRTY, lambda: pool.adopt(tensor, "theirs", host=host))
        tensor.zero_()
        tensor[1] = 7.0
        theirs = pool.adopt(tensor, "theirs", host=host)
        assert theirs.host_memory is None or theirs.host_memory[1].tolist() == bits([7.0, 7.0], dtype).tolist()
        for wrong in (NUMBERS, [[1, 2]] * 3, np.zeros((3, 2), np.float64)):
            with pytest.raises(DtypeError, match=f"expected the bits of {dtype}"):
                table.write(slots, None, wrong)
        table.memory[0, 1] = 2.0
        refused(Code.SLOT_ZERO_DIRTY, table.check)


class Slotted(Batch):
    """Requests alone."""

    slots = slot_column()


class Running(Batch):
    """Requests that take steps."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


@LEVELS
@DTYPES
@pytest.mark.parametrize("deferred", [True, False])
def test_values_of_tokens_cross_by_bits(rt: Runtime, level: str, dtype: torch.dtype, deferred: bool) -> None:
    """At forward entry, in the step's copy, to fixed addresses, on another rank, and in a planned step."""
    pool = SlotPool(rt, 4)
    req_to_token = pool.table("req_to_token", (8,), torch.int32, holds="location")
    pages = PagePool(rt, pool, 8, 4, max_tokens_per_request=8, req_to_token=req_to_token)
    relay = FutureMap(pool, {"token": relay_field(torch.int64)})
    weights = TokenArray([bits([0.5, -1.0], dtype), None], dtype, fill=2.0)
    pairs = TokenArray([None, bits([[3.5, -0.0]], dtype)], dtype, shape=(2,))
    named = {"weights": weights, "pairs": pairs}

    def look(arrays: Any, padded: int) -> None:
        assert arrays["weights"].dtype == arrays["pairs"].dtype == dtype
        assert arrays["weights"].float().tolist() == [0.5, -1.0, *[2.0] * (1 + padded)]
        assert arrays["pairs"].view(BITS[dtype]).tolist() == bits(
            [[0.0, 0.0], [0.0, 0.0], [3.5, -0.0], *[[0.0, 0.0]] * padded], dtype
        ).tolist()  # fmt: skip

    with checks(level):
        slots = pool.take(2)
        prompts = [[1, 2], [3]]
        extension = pages.extend(slots, [2, 1])
        batch = Running.build(rt, slots=slots, seq_lens=[2, 1])

        def plan() -> ForwardPlan:
            return ForwardPlan.of(
                batch.pad(3).slots,
                [2, 1],
                [2, 1],
                prompt_ids=prompts,
                pages=pages,
                pad_tokens=5,
                token_arrays=named,
                deferred=deferred,
            )

        there = plan()
        sent = there.upload(extras=there.extras, writes=[extension.entry()])
        look(relay.resolve_forward_inputs(there, sent, ids="token").arrays, 2)
        elsewhere = ForwardPlan.from_bytes(plan().to_bytes(), pool, pages=pages)
        assert elsewhere.token_arrays["weights"].tobytes() == there.token_arrays["weights"].tobytes()
        look(relay.resolve_forward_inputs(elsewhere, elsewhere.upload(), ids="token").arrays, 2)
        fixed = plan()
        buffers = StaticBuffers(rt, Running, rows=3, extras=fixed.extras)
        look(relay.resolve_forward_inputs(fixed, batch.to_static(buffers, extras=fixed.extras), ids="token").arrays, 2)
        assert deferred or buffers["weights"].dtype == dtype
        pages.release_requests(slots, after=None)
        planner = StepPlanner(Running, pages=pages, relay=relay, ids="token", seq_lens="seq_lens")
        joining = Running.build(rt, slots=pool.take(2), seq_lens=[0, 0])
        step = planner.plan(joining, query_lens=[2, 1], prompt_ids=prompts, token_arrays=named)
        look(step.inputs().arrays, 0)


@DTYPES
def test_bits_of_tokens_are_not_numbers(dtype: torch.dtype) -> None:
    """Numbers are refused, and so is a check for negative ones, which bits would misread."""
    with pytest.raises(DtypeError, match=f"row 0: expected the bits of {dtype}"):
        values_of([[0.5]], dtype, (), np.array([1]), 1, "weights")
    with pytest.raises(ShapeError, match="row 0: 2 values for its 1 tokens"):
        values_of([bits([0.5, 1.0], dtype)], dtype, (), np.array([1]), 1, "weights")
    with pytest.raises(DtypeError, match=f"numpy has no dtype {dtype}"):
        TokenArray(None, dtype, non_negative=True)
    with pytest.raises(ValueOverflowError):
        TokenArray(None, dtype, fill=3.4e38)


@pytest.mark.parametrize("wrong", [NUMBERS, [[1, 2]] * 3, np.zeros((3, 2), np.float16), np.zeros((3, 2), np.int8)])
def test_numbers_are_no_bits(rt: Runtime, wrong: Any) -> None:
    """Host values that are not the bits are refused, with the way to get them, and nothing is published."""
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, {"hidden": relay_field(torch.bfloat16, (2,))})
    slots = pool.take(3)
    before = rt.counters.snapshot()
    for call in (
        lambda: Hidden.build(rt, seq_lens=[1, 2, 3], states=wrong),
        lambda: relay.publish(slots, hidden=wrong),
    ):
        with pytest.raises(DtypeError, match=r"the bits of torch\.bfloat16 as int16") as caught:
            call()
        assert "tensor.view(torch.int16).numpy()" in str(caught.value)
    with pytest.raises(ShapeError):
        relay.publish(slots, hidden=bits(NUMBERS)[:2])
    assert (rt.counters, relay.states(slots, "hidden")) == (before, ["unwritten"] * 3)


def test_both_sides_need_a_shared_dtype() -> None:
    """A column with a host side is refused: nothing could be planned with it; so is a dtype without a zero."""
    calls: tuple[Callable[[], object], ...] = (
        lambda: mirrored(torch.bfloat16),
        lambda: mirrored(torch.float8_e4m3fn),
        lambda: device_only(torch.float8_e8m0fnu),
        lambda: relay_field(torch.float8_e8m0fnu),
        lambda: TokenArray(None, torch.complex64),
        lambda: numpy_dtype(torch.float8_e5m2),
    )
    for call in calls:
        with pytest.raises(DtypeError, match=r"bfloat16|float8|complex64"):
            call()


@DTYPES
def test_a_write_into_hidden_states_is_found(rt: Runtime, dtype: torch.dtype) -> None:
    """At `full` a column is compared like any other, with its row."""

    class States(Batch):
        seq_lens = mirrored(torch.int64)
        states = device_only(dtype, shape=(2,))

    with checks("full"):
        batch = States.build(rt, seq_lens=[1, 2, 3], states=bits(NUMBERS, dtype))
        batch.states.device.data[1] = 4
        with pytest.raises(Violation) as caught:
            batch.filter([0, 1])
        assert (caught.value.column, caught.value.row) == ("states", 1)
