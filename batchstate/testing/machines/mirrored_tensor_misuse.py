"""Ways to misuse a `MirroredTensor`."""

import operator

import numpy as np
import torch

from batchstate.contracts import Contract
from batchstate.errors import (
    ArgumentError,
    ContractError,
    DeclarationError,
    DeviceError,
    DtypeError,
    RowIndexError,
    ShapeError,
    SideMissingError,
    ValueOverflowError,
)
from batchstate.mirror import MirroredTensor
from batchstate.runtime import numpy_dtype
from batchstate.testing.misuse import Misuse


def _has_rows(value: MirroredTensor) -> bool:
    return len(value) > 0


def _computes(value: MirroredTensor) -> bool:
    return numpy_dtype(value.dtype).kind in "iu" and value.unit is None


def _other_runtime(value: MirroredTensor) -> MirroredTensor:
    runtime = type(value.runtime)
    fresh = runtime() if value.runtime.device.type == "cpu" else runtime(value.runtime.device)  # type: ignore[call-arg]
    return type(value).from_host(fresh, np.zeros(value.shape, numpy_dtype(value.dtype)))


MISUSES: tuple[Misuse[MirroredTensor], ...] = (
    Misuse("a mask too long", (ShapeError,), lambda one: one.filter(np.ones(len(one) + 1, np.bool_))),
    Misuse("a row kept twice", (ArgumentError,), lambda one: one.filter([0, 0]), _has_rows),
    Misuse("more rows kept than there are", (ArgumentError,), lambda one: one.filter([0] * (len(one) + 1)), _has_rows),
    Misuse("a negative row kept", (RowIndexError,), lambda one: one.filter([-1])),
    Misuse("a row beyond the last taken", (RowIndexError,), lambda one: one.take([len(one)])),
    Misuse("half a row taken", (DtypeError,), lambda one: one.take([0.5])),
    Misuse("rows by name", (DtypeError,), lambda one: one.filter(["first"])),
    Misuse("a rectangle of rows", (ShapeError,), lambda one: one.filter(np.zeros((1, 1), np.int64))),
    Misuse("merge with a list", (DeclarationError,), lambda one: one.merge([1])),  # type: ignore[arg-type]
    Misuse("merge of two runtimes", (DeviceError,), lambda one: one.merge(_other_runtime(one))),
    Misuse("cat of nothing", (ArgumentError,), lambda one: type(one).cat([])),
    Misuse("split into too much", (ArgumentError,), lambda one: one.split([len(one), 1])),
    Misuse("split into a negative piece", (ArgumentError,), lambda one: one.split([-1, len(one) + 1])),
    Misuse("pad to fewer rows", (ArgumentError,), lambda one: one.pad(len(one) - 1)),
    Misuse("pad to half a row", (DtypeError,), lambda one: one.pad(0.5)),  # type: ignore[arg-type]
    Misuse("pad indices with 1", (ArgumentError,), lambda one: one.pad(len(one), 1), lambda one: one.unit is not None),
    Misuse("update beyond the last row", (RowIndexError,), lambda one: one.update([len(one)], 0)),
    Misuse(
        "update with too many values",
        (ShapeError,),
        lambda one: one.update([0], [0, 0]),
        lambda one: _has_rows(one) and one.unit != "slot" and one.dtype is not torch.bool,
    ),
    Misuse("update with half a number", (DtypeError,), lambda one: one.update([], 0.5), _computes),
    Misuse(
        "update beyond the dtype",
        (ValueOverflowError,),
        lambda one: one.update([], 2**63),
        lambda one: one.dtype is torch.int64,
    ),
    Misuse("add a float", (DtypeError,), lambda one: operator.add(one, 0.5)),
    Misuse("add True", (DtypeError,), lambda one: operator.add(one, True)),
    Misuse("add too many amounts", (ShapeError, DtypeError), lambda one: one + np.ones(len(one) + 1, np.int64)),
    Misuse("add 2**63", (ValueOverflowError, DtypeError), lambda one: one + 2**63),
    Misuse(
        "read the host side of device_only",
        (SideMissingError,),
        lambda one: one.np,
        lambda one: one.contract is Contract.DEVICE_ONLY,
    ),
    Misuse("the truth of a vector", (ArgumentError, SideMissingError), bool),
    Misuse(
        "the largest of nothing", (ArgumentError, SideMissingError), lambda one: one.max(), lambda one: not one.shape[0]
    ),
    Misuse("weaken to something unknown", (ArgumentError,), lambda one: one.weaken("roughly")),
    Misuse(
        "strengthen a bound",
        (ContractError,),
        lambda one: one.weaken("exact"),
        lambda one: one.contract is Contract.UPPER_BOUND,
    ),
    Misuse(
        "a pair of two shapes",
        (ShapeError,),
        lambda one: MirroredTensor.from_pair(one.runtime, [1], one.runtime.device_zeros((2,), torch.int64)),
    ),
    Misuse("a scalar", (ShapeError,), lambda one: type(one).from_host(one.runtime, 1)),
    Misuse(
        "a bound without a device side",
        (ContractError,),
        lambda one: MirroredTensor.from_host(one.runtime, [1], contract="upper_bound"),
    ),
    Misuse("text as numbers", (DtypeError,), lambda one: MirroredTensor.from_host(one.runtime, ["1"])),
    Misuse("rows of unequal lengths", (ShapeError,), lambda one: MirroredTensor.from_host(one.runtime, [[1], [1, 2]])),
    Misuse(
        "a number too large",
        (ValueOverflowError,),
        lambda one: MirroredTensor.from_host(one.runtime, [300], dtype=torch.int8),
    ),
)
