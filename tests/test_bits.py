"""Columns and relay fields of a dtype that numpy lacks: moved like others, seeded from the host by bits."""

from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Batch, MirroredTensor, Runtime, Violation, checks, device_only, mirrored
from batchstate.errors import DtypeError, ShapeError
from batchstate.future_map import FutureMap, relay_field
from batchstate.pools import SlotPool
from batchstate.static import StaticBuffers

NUMBERS = [[0.5, -1.0], [2.0, 3.5], [256.0, -0.0]]


class Hidden(Batch):
    """A request's hidden states, which only the device knows."""

    seq_lens = mirrored(torch.int64)
    states = device_only(torch.bfloat16, shape=(2,), pad=[1.0, -2.0])


def bits(numbers: object) -> np.ndarray:
    """What a file or another process hands over."""
    return torch.tensor(numbers, dtype=torch.bfloat16).view(torch.int16).numpy()


@pytest.mark.parametrize("level", ["cheap", "full"])
@pytest.mark.parametrize("unsigned", [False, True])
def test_rows_seeded_by_bits_move_like_others(rt: Runtime, level: str, unsigned: bool) -> None:
    """Built from bits, merged with a device tensor, filtered, padded and updated, each row keeps its numbers."""
    with checks(level):
        given = bits(NUMBERS).view(np.uint16) if unsigned else bits(NUMBERS)
        seeded = Hidden.build(rt, seq_lens=[1, 2, 3], states=given)
        found = rt.upload([bits([[7.0, 8.0]])]).view(0).view(torch.bfloat16).clone()
        batch = seeded.merge(Hidden.build(rt, seq_lens=[4], states=found)).filter([3, 1, 2])
        batch = batch.update_device("states", [2], rt.upload([bits([[9.0, 9.5]])]).view(0).view(torch.bfloat16).clone())
        states = batch.pad(4).states.device
        assert states.dtype == torch.bfloat16
        assert states.tolist() == [[7.0, 8.0], NUMBERS[1], [9.0, 9.5], [1.0, -2.0]]
        graph = StaticBuffers(rt, Hidden, rows=5)
        batch.to_static(graph)
        assert graph["states"].dtype == torch.bfloat16
        assert graph["states"].tolist() == [*states.tolist(), [1.0, -2.0]]
        assert rt.counters.forced_syncs == 0


def test_values_of_their_own_pad_and_update(rt: Runtime) -> None:
    """A device-only value pads with numbers, and takes bits in some rows."""
    value = MirroredTensor.from_device(rt, rt.upload([bits(NUMBERS)]).view(0).view(torch.bfloat16).clone())
    assert value.pad(4, 0.5).update([0], bits([[4.0, 5.0]])).device.tolist() == [[4.0, 5.0], *NUMBERS[1:], [0.5, 0.5]]


@pytest.mark.parametrize("level", ["cheap", "full"])
def test_a_relay_is_seeded_by_bits(rt: Runtime, level: str) -> None:
    """What arrives with a prebuilt request goes to the next forward bit by bit."""
    with checks(level):
        pool = SlotPool(rt, 4)
        relay = FutureMap(pool, {"hidden": relay_field(torch.bfloat16, (2,))})
        slots = pool.take(3)
        relay.publish(slots, hidden=bits(NUMBERS))
        assert relay.gather(slots, "hidden").tolist() == NUMBERS


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
    """A column with a host side is refused: nothing could be planned with it."""
    with pytest.raises(DtypeError, match="bfloat16"):
        mirrored(torch.bfloat16)
    with pytest.raises(DtypeError, match="float8"):
        device_only(torch.float8_e4m3fn)


def test_a_write_into_hidden_states_is_found(rt: Runtime) -> None:
    """At `full` a column of bfloat16 is compared like any other, with its row."""
    with checks("full"):
        batch = Hidden.build(rt, seq_lens=[1, 2, 3], states=bits(NUMBERS))
        batch.states.device.data[1] = 4
        with pytest.raises(Violation) as caught:
            batch.filter([0, 1])
        assert (caught.value.column, caught.value.row) == ("states", 1)
