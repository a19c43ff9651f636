"""MirroredTensor: what each operation does to both sides, and what it refuses."""

import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Code, Locations, MirroredTensor, Runtime, Slots, Violation, checks
from batchstate.errors import (
    ArgumentError,
    ContractError,
    DeviceError,
    DtypeError,
    OwnerThreadError,
    RowIndexError,
    ShapeError,
    SideMissingError,
    ValueOverflowError,
)
from batchstate.races.devices import open_device
from tests.doubles import forged, in_a_thread, refused
from tests.selfcheck.machines.mirrored_tensor import write_uncounted


def both(value: MirroredTensor) -> list:
    """The host side as a list, after showing that the device side holds the same."""
    device = value.runtime.inspect(value.device)
    assert device.dtype == value.np.dtype
    assert device.tolist() == value.np.tolist()
    return value.np.tolist()


@pytest.fixture(params=[False, True], ids=["device side not made", "device side made"])
def lens(rt: Runtime, request: pytest.FixtureRequest) -> MirroredTensor:
    """Four lengths, with and without a device side that exists already."""
    value = MirroredTensor.from_host(rt, [5, 6, 7, 8], name="seq_lens")
    if request.param:
        assert value.device.shape == (4,)
    return value


def test_amounts_and_values_in_other_forms(lens: MirroredTensor, full: None) -> None:
    """A mirrored value is added, a mask names rows, one value fills them; the machine shows all other operations."""
    assert both(lens + lens) == [10, 12, 14, 16]
    assert both(lens.pad(5, 9)) == [5, 6, 7, 8, 9]
    assert both(lens.update([True, False, False, True], 1)) == [1, 6, 7, 1]
    assert both(lens) == [5, 6, 7, 8]


def test_no_operation_waits_for_the_device(lens: MirroredTensor) -> None:
    """No operation and no reading of the host side is a forced sync."""
    value = (lens.filter([0, 2]).merge(lens) + 1).pad(8).update([0], [3]).take([0, 1])
    assert value.sum() == 11
    assert (value.max(), value.min(), len(value)) == (8, 3, 2)
    assert (value == 3).tolist() == [True, False]
    assert "seq_lens" in repr(value)
    assert lens.runtime.counters.forced_syncs == 0
    assert lens.runtime.counters.device_to_host_copies == 0


def test_cost_of_one_operation(rt: Runtime) -> None:
    """Once the device side exists, an operation is one launch and at most one upload; before, it is neither."""
    value = MirroredTensor.from_host(rt, [1, 2, 3])
    before = rt.counters.snapshot()
    (value.filter([0]).merge(value) + 1).pad(9)
    assert (rt.counters - before).host_to_device_copies == 0
    assert (rt.counters - before).device_operations == 0
    assert value.device.shape == (3,)
    costs: list[tuple[Callable[[], object], int, int]] = [
        (lambda: value.filter([0, 1]), 1, 1),
        (lambda: value.merge(value), 0, 1),
        (lambda: value + 1, 0, 1),
        (lambda: value + np.array([1, 2, 3]), 1, 1),
        (lambda: value.split([1, 2]), 0, 0),
        (lambda: value.pad(4), 1, 1),
        (lambda: value.update([0], [9]), 1, 2),
    ]
    for operation, copies, launches in costs:
        before = rt.counters.snapshot()
        operation()
        spent = rt.counters - before
        assert (spent.host_to_device_copies, spent.device_operations) == (copies, launches)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32])
@pytest.mark.parametrize("trailing", [(), (2,), (0,)])
def test_small_dtypes_and_trailing_shapes_move(rt: Runtime, dtype: torch.dtype, trailing: tuple, full: None) -> None:
    """Any shared dtype and any trailing shape is moved unchanged."""
    values = torch.arange(3 * int(np.prod(trailing, dtype=int))).reshape(3, *trailing).to(dtype)
    value = MirroredTensor.from_host(rt, values)
    assert value.device.dtype is dtype
    moved = value.filter([2, 0]).merge(value).take([0, 4, 1])
    assert both(moved) == values[[2, 2, 0]].tolist()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_integers_compute(rt: Runtime, dtype: torch.dtype, full: None) -> None:
    """Unsigned dtypes that torch cannot add are added all the same, up to their last value."""
    most = torch.iinfo(dtype).max
    value = MirroredTensor.from_host(rt, np.array([most - 3, 5], dtype=str(dtype)[6:]))
    assert value.device.dtype is dtype
    assert both(value + np.array([3, 1])) == [most, 6]
    assert both(value - 5) == [most - 8, 0]
    with pytest.raises(ValueOverflowError):
        value + 4
    with pytest.raises(ValueOverflowError):
        value - 6


def test_floats_are_moved_never_computed(rt: Runtime, full: None) -> None:
    """A float column moves with all its bits, NaN included, and refuses arithmetic."""
    value = MirroredTensor.from_host(rt, [0.5, float("nan"), -0.0])
    assert value.device.dtype is torch.float32
    value.filter([1, 2]).merge(value).pad(7, 1.5).check()
    with pytest.raises(DtypeError, match="two processors round differently"):
        value + 1


# The sides are two memories


@pytest.mark.parametrize("side", ["host", "device"])
def test_a_write_into_one_side_is_reported(rt: Runtime, side: str, full: None) -> None:
    """However a value came about, a write into the memory of one side breaks a law at `full`, and spares the other."""
    base, host = MirroredTensor.from_host(rt, [1, 2, 3, 4]), torch.tensor([1, 2, 3, 4])
    assert len(base.device) == 4
    for value in (
        MirroredTensor.from_host(rt, host),
        MirroredTensor.from_host(rt, host.numpy(), contract="host_only"),
        MirroredTensor.from_pair(rt, host, host.to(rt.device)),
        Slots.from_host(rt, [1, 2]),
        base.filter([0, 1]).take([0, 0]).merge(base),
        base + 1,
        base.split([2, 2])[1].pad(6).update([1], [5]),
        MirroredTensor.from_host(rt, [1, 2]).weaken("upper_bound"),
        base.weaken("upper_bound").resolve(),
    ):
        other = getattr(value, "device" if side == "host" else "host").tolist()
        value.check()
        write_uncounted(value, side, 0)
        with pytest.raises(Violation) as caught:
            value.check()
        assert caught.value.code in (Code.MIRROR_EQUAL, Code.MIRROR_BOUND, Code.MIRROR_FOREIGN_WRITE)
        assert getattr(value, "_own_device" if side == "host" else "_host_side")().tolist() == other


def test_views_that_negate_or_conjugate(rt: Runtime) -> None:
    """A tensor whose numbers are not those of its memory is read as it is."""
    assert MirroredTensor.from_host(rt, torch.tensor([1 + 2j]).conj().imag).np.tolist() == [-2]


def test_the_caller_keeps_its_own_memory(rt: Runtime, full: None) -> None:
    """What the caller does with the array afterwards does not reach the value."""
    array = np.array([1, 2, 3])
    host_tensor = torch.tensor([1, 2, 3])
    values = [MirroredTensor.from_host(rt, array), MirroredTensor.from_host(rt, host_tensor)]
    array[:] = 9
    host_tensor[:] = 9
    assert [both(value) for value in values] == [[1, 2, 3], [1, 2, 3]]


def test_a_pair_that_aliases_is_reported(rt: Runtime, full: None) -> None:
    """A host side that lies in the device side's memory is found, although both always agree."""
    if rt.device.type != "cpu":
        pytest.skip("host and device memory cannot alias on an accelerator")
    value = MirroredTensor.from_host(rt, [1, 2, 3])
    value._array = value.device.numpy()
    value._contents = None
    refused(Code.MIRROR_ALIASED, lambda: value.check())


def test_writes_through_handed_out_tensors_are_seen_at_cheap(rt: Runtime) -> None:
    """Torch's version counters show a write in place without touching the device."""
    with checks("cheap"):
        for side in ("host", "device"):
            value = MirroredTensor.from_host(rt, [1, 2, 3], name="lens")
            getattr(value, side).add_(1)
            reads = rt.counters.check_reads
            violation = refused(Code.MIRROR_FOREIGN_WRITE, functools.partial(value.filter, [0]))
            assert f"the {side} side" in str(violation)
            assert rt.counters.check_reads == reads


def test_the_array_is_read_only(rt: Runtime) -> None:
    """Numpy itself refuses a write to what `np` hands out."""
    with pytest.raises(ValueError, match="read-only"):
        MirroredTensor.from_host(rt, [1]).np[0] = 2


# Contracts


def bound(rt: Runtime) -> MirroredTensor:
    """Host 5, 5, 5 over device 3, 4, 5."""
    device = torch.tensor([3, 4, 5]).to(rt.device)
    return MirroredTensor.from_pair(rt, [5, 5, 5], device, contract="upper_bound")


def test_a_broken_bound_is_reported(rt: Runtime, full: None) -> None:
    """A device side above its bound is a violation that names the row."""
    device = torch.tensor([5, 6]).to(rt.device)
    pair = functools.partial(MirroredTensor.from_pair, rt, [5, 5], device, contract="upper_bound")
    assert refused(Code.MIRROR_BOUND, pair).row == 1


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        ("exact", "exact", "exact"),
        ("exact", "upper_bound", "upper_bound"),
        ("upper_bound", "exact", "upper_bound"),
        ("upper_bound", "device_only", "device_only"),
        ("host_only", "host_only", "host_only"),
        ("host_only", "exact", "exact"),
        ("host_only", "device_only", "device_only"),
    ],
)
def test_a_merge_has_the_weaker_contract(rt: Runtime, first: str, second: str, merged: str, full: None) -> None:
    """Merging never strengthens a contract."""
    made = {
        "exact": MirroredTensor.from_host(rt, [1, 2]),
        "host_only": MirroredTensor.from_host(rt, [1, 2], contract="host_only"),
        "upper_bound": bound(rt),
        "device_only": MirroredTensor.from_device(rt, torch.tensor([8, 9]).to(rt.device)),
    }
    value = made[first].merge(made[second])
    assert value.contract.value == merged
    assert len(value.device) == len(made[first]) + len(made[second])


def test_a_missing_side_raises(rt: Runtime) -> None:
    """A `device_only` value has no numbers on the host, and says what to do."""
    value = MirroredTensor.from_device(rt, torch.tensor([1, 2]).to(rt.device), name="sampled")
    for read in (lambda: value.np, lambda: value.host, lambda: value.max(), lambda: value == 1):
        with pytest.raises(SideMissingError, match="resolve"):
            read()
    assert rt.inspect((value + 1).filter([1]).device).tolist() == [3]


def test_host_only_values_are_uploaded_once_where_they_are_used(rt: Runtime) -> None:
    """A `host_only` value crosses at its first use and not again."""
    value = MirroredTensor.from_host(rt, [1, 2, 3], contract="host_only")
    assert rt.counters.host_to_device_copies == 0
    assert value.device is value.device
    assert rt.counters.host_to_device_copies == 1


# Stale windows


def test_a_stale_side_cannot_be_read(rt: Runtime) -> None:
    """Inside the window reading that side raises, here and in what was derived; afterwards it does not."""
    value = MirroredTensor.from_host(rt, [1, 2, 3], name="seq_lens")
    with value.stale("host", reason="verification changes the lengths"):
        derived = value.filter([0, 1])
        assert value.device.shape == (3,)
        for read in (lambda: value.np, lambda: derived.host, lambda: derived.sum()):
            with pytest.raises(Violation, match="verification changes the lengths") as caught:
                read()
            assert caught.value.code is Code.MIRROR_STALE_READ
        with value.stale("device", reason="not written yet"), pytest.raises(Violation, match="not written yet"):
            value.device  # noqa: B018
        assert len(value.device) == 3
    assert value.np.tolist() == [1, 2, 3]
    assert derived.np.tolist() == [1, 2]


# Bad input


@pytest.mark.parametrize(
    ("keep", "error"),
    [
        ([0, 0], ArgumentError),
        ([0, 4], RowIndexError),
        ([-1], RowIndexError),
        ([0.0, 1.0], DtypeError),
        ([True, False], ShapeError),
        ([[0, 1]], ShapeError),
        (np.arange(5), RowIndexError),
        (0, ShapeError),
    ],
)
def test_bad_keep_lists(lens: MirroredTensor, keep: Any, error: type[Exception]) -> None:
    """A keep list that cannot be meant raises a typed error, launches nothing and changes nothing."""
    before = lens.runtime.counters.snapshot()
    with pytest.raises(error, match="seq_lens: filter"):
        lens.filter(keep)
    assert lens.runtime.counters == before
    assert lens.np.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("keep", [[], np.array([], dtype=np.int64), np.zeros(4, dtype=bool), ()])
def test_empty_keep_lists(lens: MirroredTensor, keep: Any, full: None) -> None:
    """An empty keep list gives a value of no rows, which all operations take."""
    value = lens.filter(keep)
    assert both(value) == []
    assert both((value + 1).merge(value).pad(0).take([])) == []
    assert both(value.merge(lens)) == [5, 6, 7, 8]
    with pytest.raises(ArgumentError, match="max of"):
        value.max()


@pytest.mark.parametrize(
    ("operation", "error", "message"),
    [
        (lambda v: v.split([1, 2]), ArgumentError, "sum to 3"),
        (lambda v: v.pad(5, 1.5), DtypeError, "float64"),
        (lambda v: v.pad(5, 2**70), DtypeError, str(2**70)),
        (lambda v: v.update([0, 0], [1, 2]), ArgumentError, "twice"),
        (lambda v: v.update([0], [1.5]), DtypeError, "float64"),
        (lambda v: v + 1.5, DtypeError, "float64"),
        (lambda v: v + np.array([1, 2]), ShapeError, r"\[2\]"),
        (lambda v: v + 2**63, ValueOverflowError, "9223372036854775808"),
        (lambda v: v + (2**63 - 1), ValueOverflowError, "row 0"),
        (lambda v: v.cat([]), ArgumentError, "no values"),
        (lambda v: bool(v), ArgumentError, "ambiguous"),
        (lambda v: v - (-(2**63)), ValueOverflowError, "9223372036854775808"),
        (lambda v: v.pad(5, [7, 8]), ShapeError, "pad"),
        (lambda v: v.merge(MirroredTensor.from_host(v.runtime, [1], dtype=torch.int32)), DtypeError, "int32"),
        (lambda v: v.merge(MirroredTensor.from_host(v.runtime, [[1, 2]])), ShapeError, r"\[2\]"),
        (lambda v: v.merge(MirroredTensor.from_host(open_device(v.runtime.device.type), [1])), DeviceError, "another"),
        (lambda v: v.merge(Slots.from_host(v.runtime, [1])), Code.UNIT_MISMATCH, ""),
        (lambda v: Slots.from_host(v.runtime, [1]).merge(v), Code.UNIT_MISMATCH, ""),
        (lambda v: Locations.from_host(v.runtime, Slots.from_host(v.runtime, [1])), Code.UNIT_MISMATCH, ""),
        (lambda v: Slots.from_host(v.runtime, [1]) + 1, DtypeError, "arithmetic on slot"),
        (lambda v: v.stale("host", reason="").__enter__(), ArgumentError, "reason"),
        (lambda v: v.stale("cpu", reason="x").__enter__(), ArgumentError, "'cpu'"),
    ],
)
def test_bad_arguments(lens: MirroredTensor, operation: Any, error: Code | type[Exception], message: str) -> None:
    """Every other bad argument raises a typed error that names the value."""
    if isinstance(error, Code):
        refused(error, lambda: operation(lens))
    else:
        with pytest.raises(error, match=message):
            operation(lens)
    assert both(lens) == [5, 6, 7, 8]


TOO_LARGE = np.array([2**63 + 5], dtype=np.uint64)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda rt: MirroredTensor.from_host(rt, [-1], dtype=torch.uint8), ValueOverflowError),
        (lambda rt: MirroredTensor.from_host(rt, [1.5], dtype=torch.int64), DtypeError),
        (lambda rt: MirroredTensor.from_host(rt, [1e300], dtype=torch.float32), ValueOverflowError),
        (lambda rt: MirroredTensor.from_host(rt, [1], dtype=torch.bfloat16), DtypeError),
        (lambda rt: MirroredTensor.from_host(rt, torch.ones(1, dtype=torch.bfloat16)), DtypeError),
        (lambda rt: MirroredTensor.from_host(rt, [1], contract="sometimes"), ArgumentError),
        (lambda rt: MirroredTensor.from_pair(rt, [1.5], torch.ones(1, dtype=torch.int64).to(rt.device)), DtypeError),
        (
            lambda rt: MirroredTensor.from_pair(rt, [1], torch.ones(1).to(rt.device), contract="host_only"),
            ContractError,
        ),
        (lambda rt: MirroredTensor.from_host(rt, np.ma.array([1, 2], mask=[False, True])), DtypeError),
        (lambda rt: MirroredTensor.from_host(rt, [2**63, -1]), ValueOverflowError),
        *((functools.partial(kind.from_host, values=[1.5]), DtypeError) for kind in (Slots, Locations)),
        *(
            (functools.partial(kind.from_host, values=[1], dtype=torch.int32), DtypeError)
            for kind in (Slots, Locations)
        ),
        *((functools.partial(kind.from_host, values=TOO_LARGE), ValueOverflowError) for kind in (Slots, Locations)),
        (lambda rt: MirroredTensor.from_device(rt, torch.tensor(1).to(rt.device)), ShapeError),
        (lambda rt: MirroredTensor.from_device(rt, torch.ones(1, device="meta")), DeviceError),
    ],
)
def test_bad_constructions(rt: Runtime, make: object, error: type[Exception]) -> None:
    """A value that cannot be made raises a typed error before anything is uploaded."""
    with pytest.raises(error):
        make(rt)  # type: ignore[operator]
    assert rt.counters.host_to_device_copies == 0


def test_another_thread_may_read_but_not_launch(rt: Runtime) -> None:
    """Values may be read anywhere; what would use the device from a second thread is a typed error."""
    value = MirroredTensor.from_host(rt, [1, 2, 3])
    made = value + 0
    assert len(made.device) == 3
    assert in_a_thread(lambda: value.np.tolist()) is None
    assert isinstance(in_a_thread(lambda: made.filter([0])), OwnerThreadError)


def test_versions_tell_values_apart(rt: Runtime) -> None:
    """No two values of a runtime share a version, so that metadata of an older one is recognised."""
    value = MirroredTensor.from_host(rt, [1, 2, 3])
    versions = [
        value.version,
        (value + 0).version,
        value.filter([0]).version,
        *(v.version for v in value.split([1, 2])),
    ]
    assert len(set(versions)) == len(versions)


def test_inference_mode(rt: Runtime, full: None) -> None:
    """Values work under torch's inference mode, where tensors count no versions."""
    with torch.inference_mode():
        value = MirroredTensor.from_host(rt, [1, 2, 3])
        assert both((value + 1).filter([0, 2]).merge(value)) == [2, 4, 1, 2, 3]
    assert both(value.filter([1])) == [2]


def test_memory_goes_back_with_the_last_user(rt: Runtime) -> None:
    """A dropped value is gone at once, whether or not its device side was made: it is in no reference cycle."""
    gc.disable()
    try:
        for read in (False, True):
            value = MirroredTensor.from_host(rt, [1, 2, 3])
            if read:
                value.device  # noqa: B018
            gone = weakref.ref(value)
            del value
            assert gone() is None
    finally:
        gc.enable()


def test_errors_about_values_survive_pickling(rt: Runtime) -> None:
    """An error that shows a value crosses a process boundary with the value's name."""
    with pytest.raises(DtypeError) as caught:
        Slots.from_host(rt, [1]) + MirroredTensor.from_host(rt, [1])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert "MirroredTensor" in copy.value


def test_integers_are_exact_to_the_last_bit(rt: Runtime) -> None:
    """Lists of large integers do not become floats, sums do not wrap, and narrower indices become int64."""
    assert both(MirroredTensor.from_host(rt, [2**63, 1], dtype=torch.uint64)) == [2**63, 1]
    assert MirroredTensor.from_host(rt, [2**62] * 4).sum() == 2**64
    assert MirroredTensor.from_host(rt, [0, 1, 2]).tolist() == [0, 1, 2]
    for kind in (Slots, Locations):
        assert kind.from_host(rt, np.array([5], dtype=np.int32)).dtype is torch.int64


def test_slots_of_two_pools_never_mix(rt: Runtime) -> None:
    """Rows of one pool's slots cannot be replaced by another pool's: the handle would name a slot of the wrong one."""
    mine = forged(Slots, rt, [1, 2], [1, 1], 1)
    theirs = forged(Slots, rt, [1], [1], 2)
    with pytest.raises(ArgumentError, match="pool 2"):
        mine.update([0], theirs)
    with pytest.raises(ArgumentError, match="pools"):
        mine.merge(theirs)
    assert mine.update([0], forged(Slots, rt, [3], [4], 1)).generations.tolist() == [4, 1]
    paired = Slots.from_pair(rt, [1], torch.tensor([1]).to(rt.device))
    assert paired.generations.tolist() == [0]


def test_a_bound_of_unsigned_numbers_is_not_lowered(rt: Runtime) -> None:
    """The device side of an unsigned bound could wrap below zero, which the host cannot know."""
    device = torch.tensor([3], dtype=torch.uint8).to(rt.device)
    value = MirroredTensor.from_pair(rt, [200], device, contract="upper_bound")
    with pytest.raises(ContractError, match="smaller"):
        value - 5
    assert rt.inspect((value + 5).device).tolist() == [8]
