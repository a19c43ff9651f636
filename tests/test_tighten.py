"""`tighten`: the host learns better bounds, and the device never hears of it."""

from typing import Any

import attrs
import numpy as np
import pytest
import torch

from batchstate import Contract, MirroredTensor, Runtime, checks
from batchstate.batch import Batch
from batchstate.columns import device_only, host_list, mirrored
from batchstate.errors import (
    ArgumentError,
    BatchStateError,
    ContractError,
    DeclarationError,
    DtypeError,
    ShapeError,
    ValueOverflowError,
)
from batchstate.testing import LateRuntime
from batchstate.violations import Code
from tests.doubles import refused


class Running(Batch):
    """A bounded column, one that the device alone knows, and one of the host."""

    seq_lens = mirrored(torch.int64, contract="upper_bound")
    others = mirrored(torch.int64)
    tokens = device_only(torch.int64)
    requests = host_list()


def bounded(rt: Runtime, bounds: Any, true: Any, dtype: type = np.int64) -> MirroredTensor:
    """A value with bounds on the host and true numbers on the device."""
    device = rt.upload([np.array(true, dtype)]).view(0)
    return MirroredTensor.from_pair(rt, np.array(bounds, dtype), device, contract="upper_bound", name="seq_lens")


@pytest.fixture
def lens(rt: Runtime) -> MirroredTensor:
    """Bounds 8 of lengths 5, 6 and 7."""
    return bounded(rt, [8, 8, 8], [5, 6, 7])


@pytest.fixture
def batch(rt: Runtime, lens: MirroredTensor) -> Running:
    """Three requests with bounds."""
    tokens = rt.upload([np.array([1, 2, 3])]).view(0)
    return Running.build(rt, seq_lens=lens, others=[1, 2, 3], tokens=tokens, requests=["a", "b", "c"])


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@pytest.mark.parametrize("bound", [[5, 7, 8], np.array([5, 7, 8], np.int32), (5, 7, 8)])
def test_only_the_host_learns(rt: Runtime, lens: MirroredTensor, level: str, bound: Any) -> None:
    """A tightened value has the new bounds, the same device side, and the same contract; the old one keeps its own."""
    before = rt.counters.snapshot()
    with checks(level):
        tighter = lens.tighten(bound)
    assert (rt.counters - before).check_reads == (2 if level == "full" else 0)  # before and after
    assert attrs.evolve(rt.counters, check_reads=0) == before
    assert (tighter.np.tolist(), lens.np.tolist()) == ([5, 7, 8], [8, 8, 8])
    assert tighter.device is lens.device
    assert tighter.contract is Contract.UPPER_BOUND
    assert (tighter.name, tighter.dtype, tighter.shape) == ("seq_lens", torch.int64, (3,))
    assert tighter.version != lens.version
    assert (tighter + 1).np.tolist() == [6, 8, 9]
    assert rt.inspect((tighter + 1).device).tolist() == [6, 7, 8]
    assert tighter.resolve().np.tolist() == [5, 6, 7]


def test_bounds_are_copied(lens: MirroredTensor) -> None:
    """The caller's array may change afterwards, and a mirrored value serves too."""
    bound = np.array([5, 7, 8])
    tighter = lens.tighten(bound)
    bound[:] = 0
    assert tighter.np.tolist() == [5, 7, 8]
    assert lens.tighten(MirroredTensor.from_host(lens.runtime, [6, 6, 7])).np.tolist() == [6, 6, 7]


def test_nobody_waits() -> None:
    """Tightening neither waits for a device that lags nor puts one stream behind another."""
    rt = LateRuntime()
    with rt.use(rt.stream("forward")):
        lens = bounded(rt, [8, 8], [5, 6])
    before, pending = rt.counters.snapshot(), rt.pending()
    tighter = lens.tighten([6, 6])
    assert (rt.counters, rt.pending()) == (before, pending)
    assert tighter.tolist() == [6, 6]


@pytest.mark.parametrize(
    ("bound", "error", "match"),
    [
        ([8, 9, 8], ArgumentError, "the bound of row 1 would rise"),
        ([5, 6], ShapeError, r"expected shape \[3\], got \[2\]"),
        ([[5], [6], [7]], ShapeError, r"expected shape \[3\], got \[3, 1\]"),
        (5, ShapeError, r"expected shape \[3\], got \[\]"),
        ([5.0, 6.0, 7.0], DtypeError, "float64"),
        ([5, None, 7], DtypeError, "expected numbers"),
        ([5, 6, 2**63], ValueOverflowError, "does not fit int64"),
    ],
)
def test_refuses_bounds(
    rt: Runtime, lens: MirroredTensor, batch: Running, bound: Any, error: type[BatchStateError], match: str
) -> None:
    """A bound that rises, or does not go with the value, is a typed error at every level, and changes nothing."""
    before = rt.counters.snapshot()
    for level in ("off", "cheap", "full"):
        with checks(level):
            with pytest.raises(error, match=match):
                lens.tighten(bound)
            with pytest.raises(error, match=match):
                batch.tighten("seq_lens", bound)
    assert attrs.evolve(rt.counters, check_reads=0) == before
    assert lens.np.tolist() == batch.seq_lens.np.tolist() == [8, 8, 8]


def test_rows_of_several_numbers(rt: Runtime) -> None:
    """Each number of a row is a bound of its own."""
    lens = bounded(rt, [[8, 8], [8, 8]], [[5, 6], [7, 8]])
    assert lens.tighten([[5, 8], [8, 8]]).tolist() == [[5, 8], [8, 8]]
    with pytest.raises(ArgumentError, match="row 1 would rise"):
        lens.tighten([[5, 8], [7, 9]])
    assert bounded(rt, [], []).tighten([]).tolist() == []


def test_only_bounds_are_tightened(rt: Runtime, lens: MirroredTensor) -> None:
    """Values of other contracts have nothing to tighten."""
    tensor = rt.upload([np.arange(3)]).view(0)
    for value in (
        MirroredTensor.from_host(rt, [8, 8, 8]),
        MirroredTensor.from_host(rt, [8, 8, 8], contract="host_only"),
        MirroredTensor.from_device(rt, tensor),
        lens.resolve(),
    ):
        with pytest.raises(ContractError, match="expected a bound, got"):
            value.tighten([5, 6, 7])


def test_a_bound_below_the_truth_is_found(rt: Runtime, lens: MirroredTensor, batch: Running, full: None) -> None:
    """At level `full` a bound that the device exceeds is refused, for a value and for a column."""
    violation = refused(Code.MIRROR_BOUND, lambda: lens.tighten([5, 5, 7]))
    assert (violation.row, violation.operation, violation.column) == (1, "tighten", "seq_lens")
    assert len(batch.seq_lens.device) == 3  # what is not there yet is compared when it is
    assert refused(Code.MIRROR_BOUND, lambda: batch.tighten("seq_lens", [5, 6, 6])).row == 2


def test_a_stale_window_holds(lens: MirroredTensor) -> None:
    """While a verification may change the lengths, the host's side is not read, nor tightened."""
    with lens.stale("host", reason="verifying"):
        refused(Code.MIRROR_STALE_READ, lambda: lens.tighten([5, 6, 7]))
    with lens.stale("device", reason="verifying"):
        tighter = lens.tighten([5, 6, 7])
        refused(Code.MIRROR_STALE_READ, lambda: tighter.device)
    assert len(tighter.device) == 3


def test_columns_are_tightened(rt: Runtime, batch: Running) -> None:
    """A batch tightens one column; the device side of it stays, whatever happens to the rows before and after."""
    batch = batch.filter([2, 0]).advance("seq_lens", 1)
    before = rt.counters.snapshot()
    tighter = batch.tighten("seq_lens", [8, 7])
    assert rt.counters == before
    assert (tighter.seq_lens.np.tolist(), batch.seq_lens.np.tolist()) == ([8, 7], [9, 9])
    assert tighter.requests == ("c", "a")
    after = tighter.advance("seq_lens", 2).filter([1])
    assert after.seq_lens.np.tolist() == [9]
    assert rt.inspect(after.seq_lens.device).tolist() == [8]
    assert rt.inspect(tighter.seq_lens.device).tolist() == [8, 6]
    with checks("full"):
        tighter.check()
        after.check()


def test_columns_that_have_no_bounds(batch: Running) -> None:
    """Exact, device-only and host columns, and those that are none, are refused."""
    for column, error in (
        ("others", ContractError),
        ("tokens", ContractError),
        ("requests", DeclarationError),
        ("nothing", DeclarationError),
    ):
        with pytest.raises(error):
            batch.tighten(column, [1, 2, 3])
    with pytest.raises(ArgumentError):
        batch.pad(4).tighten("seq_lens", [5, 6, 7, 0])


def test_a_bound_that_is_no_number_is_refused(rt: Runtime) -> None:
    """NaN is no lower than anything."""
    device = rt.upload([np.array([1.0, 2.0])]).view(0)
    value = MirroredTensor.from_pair(rt, [3.0, 4.0], device, contract="upper_bound")
    with pytest.raises(ArgumentError, match="row 0"):
        value.tighten([float("nan"), 4.0])
