"""The declarations of a batch class: its columns, each one descriptor, in the style of attrs.

A declaration is all a column needs to take part in every operation. On the class the name is the declaration
(`Decode.seq_lens.dtype`); on a batch it is the column's value (`batch.seq_lens.np`). A class may also have methods that
read columns; attributes that would be lost in silence are refused.
"""

import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Never, TypeVar, get_origin, overload

import numpy as np
import torch

from batchstate._arrays import Array, padding_row, shape_of
from batchstate.errors import DeclarationError, ShapeError
from batchstate.mirror import Contract, MirroredTensor, Slots, index_type
from batchstate.runtime.base import Runtime
from batchstate.runtime.memory import host_dtype, numpy_dtype

if TYPE_CHECKING:
    from batchstate.batch import Batch

T = TypeVar("T")
Self_ = TypeVar("Self_")


class Column:
    """One declared column; `name` is its name in the class."""

    name: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        if self.name and self.name != name:
            raise DeclarationError(f"one declaration for {self.name!r} and {name!r}", name, "declare each column anew")
        self.name = name

    def __set__(self, instance: object, value: Never) -> None:  # so that type checkers refuse it too
        remedy = f"a batch is immutable: batch = batch.replace({self.name}=...)"
        raise DeclarationError(f"cannot assign to column {self.name!r} of a batch", type(value).__name__, remedy)


class TensorColumn(Column):
    """A column of numbers.

    Attributes:
        dtype: of the elements.
        shape: of one row.
        pad: value of padded rows, as an array of `shape`.
        contract: the weakest contract that the column takes.
        holds: index space of the values, where the column was declared with one.
        np_dtype: of the values on the host.
        bits_of: `dtype`, if the host has only the bits of its values; else None.
        takes_any: whether any value of the dtype is one of the column: it holds no indices, and its kind refuses none.
        counted: whether the values can be computed: a column of integers that takes any.
    """

    value_type: type[MirroredTensor] = MirroredTensor
    declared_by = "mirrored"

    def __init__(
        self, dtype: torch.dtype, shape: Iterable[int], pad: object, contract: Contract, holds: str | None = None
    ) -> None:
        self.dtype = dtype
        self.holds = holds
        if holds is not None:
            _check_holds(numpy_dtype(dtype), pad, contract, holds)
            self.value_type = index_type(holds)
        self.np_dtype, self.bits_of = host_dtype(dtype)
        self.shape = shape_of(shape, "a column")
        self.contract = contract
        self.takes_any = self.unit is None and type(self).check_values is TensorColumn.check_values
        self.counted = self.takes_any and self.np_dtype.kind in "iu" and self.bits_of is None
        row = padding_row(pad, self.np_dtype, self.bits_of, "pad")
        if row.shape not in ((), self.shape):
            problem = f"a pad of {list(row.shape)} for rows of {list(self.shape)}"
            raise ShapeError(problem, pad, "pass one number or one row")
        self.pad: Array = np.broadcast_to(row, self.shape)

    def __repr__(self) -> str:
        shown = {
            f"shape={self.shape}": self.shape != (),
            f"pad={self.pad.tolist()}": bool(self.pad.any()),
            f"contract={self.contract.value!r}": self.contract is Contract.UPPER_BOUND,
            f"holds={self.holds!r}": self.holds is not None,
        }
        options = ", ".join([str(self.dtype), *(option for option, differs in shown.items() if differs)])
        return f"{self.name} = {self.declared_by}({options})".lstrip(" =")

    @property
    def unit(self) -> str | None:
        """Index space of the values, or None for plain numbers."""
        return self.value_type.unit

    def check_values(self, values: Array, runtime: Runtime, label: str) -> None:
        """Rejects values of the right dtype and shape that this kind of column does not allow. A kind overrides it.

        Called for all host values that a caller gives, any number of rows `[n, *shape]` or one row, not to be written;
        at `full` also for the contents of a device-only column. `label` is operation and column, for messages. Indices
        are checked by `Runtime.check_indices`.
        """
        if self.holds is not None:
            runtime.check_indices(values, self.holds, object=label, column=self.name, step=runtime.step)

    @overload
    def __get__(self: Self_, instance: None, owner: type) -> Self_: ...
    @overload
    def __get__(self, instance: "Batch", owner: type) -> MirroredTensor: ...
    def __get__(self, instance: "Batch | None", owner: type) -> Any:
        return self if instance is None else instance[self.name]


class MirroredColumn(TensorColumn):
    """Both sides, moved in the batch's one copy."""


class SlotColumn(MirroredColumn):
    """The batch's slots with their generations. Padded rows point at slot 0."""

    value_type = Slots

    def __init__(self) -> None:
        super().__init__(torch.int64, (), 0, Contract.EXACT)

    def __repr__(self) -> str:
        return f"{self.name} = slot_column()".lstrip(" =")

    if TYPE_CHECKING:

        @overload
        def __get__(self: Self_, instance: None, owner: type) -> Self_: ...
        @overload
        def __get__(self, instance: "Batch", owner: type) -> Slots: ...
        def __get__(self, instance: "Batch | None", owner: type) -> Any: ...


class DeviceColumn(TensorColumn):
    """The device side alone; its rows are gathered when they are read."""

    declared_by = "device_only"


class HostColumn(Column, Generic[T]):
    """Python objects, one per request; a tuple on the batch. Padded rows have none."""

    def __repr__(self) -> str:
        return f"{self.name} = host_list()".lstrip(" =")

    @overload
    def __get__(self, instance: None, owner: type) -> "HostColumn[T]": ...
    @overload
    def __get__(self, instance: "Batch", owner: type) -> tuple[T, ...]: ...
    def __get__(self, instance: "Batch | None", owner: type) -> Any:
        return self if instance is None else instance.objects(self.name)


def _check_holds(dtype: "np.dtype[Any]", pad: object, contract: Contract, holds: str) -> None:
    """Refuses a column of indices that could not be one."""
    wrong = {
        f"dtype {dtype}": dtype.kind not in "iu",
        "bounds, which index nothing": contract is Contract.UPPER_BOUND,
        f"pad={pad!r}": pad is not None and bool(np.any(np.asarray(pad) != 0)),
        f"holds={holds!r}": holds in ("", Slots.unit),
    }
    for option in (option for option, refused in wrong.items() if refused):
        remedy = "declare exact integers, padded with 0, the padding of every index space; slots are `slot_column()`"
        raise DeclarationError(f"a column of {holds} indices with {option}", option, remedy)


def mirrored(
    dtype: torch.dtype,
    *,
    shape: Iterable[int] = (),
    pad: object = None,
    contract: str | Contract = Contract.EXACT,
    holds: str | None = None,
) -> MirroredColumn:
    """Declares a column with both sides.

    `dtype` is one that torch and numpy share, `shape` that of one row, `pad` the value of padded rows, by default zero.
    `contract` is `exact`, or `upper_bound` for a column whose host side may become a bound. `holds` is the index space
    of the values, if they are indices: `location`, `page`, `host_location`, `state`, or one of your own
    (`Runtime.declare_indices`). They are then exact integers, 0 or more and below its capacity, 0 in padded rows, and
    not computed.

    Raises:
        DtypeError, ValueOverflowError: numpy lacks the dtype, or `pad` does not go into it.
        DeclarationError: another contract, or no indices.
    """
    numpy_dtype(dtype)  # refuses a dtype that numpy lacks
    weakest = Contract(contract)
    if weakest not in (Contract.EXACT, Contract.UPPER_BOUND):
        remedy = "use `device_only(...)` or `host_list()`; uploads of a batch are deferred as they are"
        raise DeclarationError(f"a mirrored column cannot be {weakest.value}", weakest.value, remedy)
    return MirroredColumn(dtype, shape, pad, weakest, holds)


def slot_column() -> SlotColumn:
    """Declares the column of request slots: int64, with generations."""
    return SlotColumn()


def device_only(
    dtype: torch.dtype, *, shape: Iterable[int] = (), pad: object = None, holds: str | None = None
) -> DeviceColumn:
    """Declares a column without a host side. Arguments and errors as `mirrored`; indices are checked at `full`."""
    return DeviceColumn(dtype, shape, pad, Contract.DEVICE_ONLY, holds)


@overload
def host_list() -> HostColumn[Any]: ...
@overload
def host_list(kind: type[T]) -> HostColumn[T]: ...
def host_list(kind: type[Any] = object) -> HostColumn[Any]:
    """Declares a column of Python objects, such as the requests. `kind` is their class, for type checkers alone."""
    return HostColumn()


def declared_columns(cls: type, reserved: frozenset[str]) -> dict[str, Column]:
    """The columns of a batch class under construction, those of all its bases first, in the order of declaration.

    Raises `DeclarationError` for a name that hides one of every batch (`reserved`) or another column, and for a column
    without its call.
    """
    columns: dict[str, Column] = {}
    hides = "hides a column, or what every batch has"
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, Column) and name not in reserved and name.isidentifier():
                columns[name] = value
            elif isinstance(value, Column) or name in columns:
                raise _refused(base, name, hides, "choose another name, or declare the column anew")
    for name, value in vars(cls).items():
        if name in ("__init__", "__new__") or (name in reserved and not name.startswith("__")):
            raise _refused(cls, name, hides, "a subclass declares columns and may add methods; it overrides none")
        without_call = isinstance(value, types.FunctionType) and value.__module__ == Column.__module__
        if isinstance(value, torch.dtype) or without_call:
            raise _refused(cls, name, f"is {value!r}, which declares nothing", _DECLARE)
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        if name not in vars(cls) and annotation is not ClassVar and get_origin(annotation) is not ClassVar:
            raise _refused(cls, name, "is annotated and not declared", _DECLARE)
    slots = [name for name, column in columns.items() if isinstance(column, SlotColumn)]
    if len(slots) > 1:
        raise DeclarationError(f"{cls.__name__} declares {len(slots)} slot columns", slots, "a request has one slot")
    return columns


_DECLARE = "write NAME = mirrored(dtype), device_only(dtype), slot_column() or host_list()"


def _refused(cls: type, name: str, problem: str, remedy: str) -> DeclarationError:
    return DeclarationError(f"{cls.__name__}.{name} {problem}", name, remedy)
