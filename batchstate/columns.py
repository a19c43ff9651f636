"""What a batch class declares: its columns, each one descriptor, in the style of attrs.

A declaration is all a column needs to take part in every operation. On the class the name is the declaration
(`Decode.seq_lens.dtype`); on a batch it is the column's value (`batch.seq_lens.np`).
"""

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np
import torch

from batchstate.contracts import Contract, parse_contract
from batchstate.errors import DeclarationError
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.runtime import numpy_dtype
from batchstate.values.host_arrays import Array, converted, count

T = TypeVar("T")
Self_ = TypeVar("Self_")


class ColumnValues(Protocol):
    """What a declaration asks of the batch that it is read from."""

    def __getitem__(self, column: str) -> MirroredTensor:
        """The value of a tensor column."""
        ...

    def objects(self, column: str) -> tuple[Any, ...]:
        """The objects of a host column."""
        ...


class Column:
    """One declared column.

    Attributes:
        name: its name in the class.
    """

    name: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        if self.name and self.name != name:
            raise DeclarationError(
                f"one declaration is used as {self.name!r} and as {name!r}",
                value=name,
                remedy="declare each column anew",
            )
        self.name = name

    def __set__(self, instance: object, value: object) -> None:
        raise DeclarationError(
            f"column {self.name!r} of a batch was assigned to",
            value=type(value).__name__,
            remedy=f"batches are immutable: batch = batch.evolve({self.name}=...)",
        )


class TensorColumn(Column):
    """A column of numbers.

    Attributes:
        dtype: of the elements.
        shape: of one row.
        pad: value of padded rows, as an array of `shape`.
        contract: the weakest contract that the column takes.
        unit: index space of the values.
        counted: whether it holds integers that can be added to: no indices.
    """

    value_type: type[MirroredTensor] = MirroredTensor

    def __init__(self, dtype: torch.dtype, shape: Iterable[int], pad: object, contract: Contract) -> None:
        self.dtype = dtype
        self.np_dtype = numpy_dtype(dtype)
        self.shape = tuple(count(size, "shape") for size in shape)
        self.contract = contract
        self.counted = self.np_dtype.kind in "iu" and self.unit is None
        self.pad: Array = np.broadcast_to(
            np.zeros((), self.np_dtype) if pad is None else converted(pad, self.np_dtype, "pad"), self.shape
        )

    @property
    def unit(self) -> str | None:
        """Index space of the values, or None."""
        return self.value_type.unit

    @overload
    def __get__(self: Self_, instance: None, owner: type) -> Self_: ...
    @overload
    def __get__(self, instance: "ColumnValues", owner: type) -> MirroredTensor: ...
    def __get__(self, instance: "ColumnValues | None", owner: type) -> Any:
        return self if instance is None else instance[self.name]


class MirroredColumn(TensorColumn):
    """Both sides, moved in the batch's one copy."""


class SlotColumn(MirroredColumn):
    """The batch's slots with their generations. Padded rows point at slot 0."""

    value_type = Slots

    def __init__(self) -> None:
        super().__init__(torch.int64, (), 0, Contract.EXACT)

    @overload
    def __get__(self: Self_, instance: None, owner: type) -> Self_: ...
    @overload
    def __get__(self, instance: "ColumnValues", owner: type) -> Slots: ...
    def __get__(self, instance: "ColumnValues | None", owner: type) -> Any:
        return super().__get__(instance, owner)


class DeviceColumn(TensorColumn):
    """The device side alone; its rows are gathered when somebody reads them."""


class HostColumn(Column, Generic[T]):
    """Python objects, one a request; a tuple on the batch. Padded rows have none."""

    @overload
    def __get__(self, instance: None, owner: type) -> "HostColumn[T]": ...
    @overload
    def __get__(self, instance: "ColumnValues", owner: type) -> tuple[T, ...]: ...
    def __get__(self, instance: "ColumnValues | None", owner: type) -> Any:
        return self if instance is None else instance.objects(self.name)


def mirrored(
    dtype: torch.dtype, *, shape: Iterable[int] = (), pad: object = None, contract: str | Contract = Contract.EXACT
) -> MirroredColumn:
    """Declares a column with both sides.

    Args:
        dtype: one that torch and numpy share.
        shape: of one row.
        pad: value of padded rows; zero by default.
        contract: `exact`, or `upper_bound` for a column whose host side may become a bound.

    Raises:
        DtypeError, ValueOverflowError: numpy lacks the dtype, or `pad` does not go into it.
        DeclarationError: another contract.
    """
    weakest = parse_contract(contract)
    if weakest not in (Contract.EXACT, Contract.UPPER_BOUND):
        raise DeclarationError(
            f"a mirrored column cannot be {weakest.value}",
            value=weakest.value,
            remedy="use `device_only(...)` or `host_list()`; uploads of a batch are deferred as they are",
        )
    return MirroredColumn(dtype, shape, pad, weakest)


def slot_column() -> SlotColumn:
    """Declares the column of request slots: int64, with generations."""
    return SlotColumn()


def device_only(dtype: torch.dtype, *, shape: Iterable[int] = (), pad: object = None) -> DeviceColumn:
    """Declares a column without a host side. Arguments and errors as `mirrored`."""
    return DeviceColumn(dtype, shape, pad, Contract.DEVICE_ONLY)


@overload
def host_list() -> HostColumn[Any]: ...
@overload
def host_list(kind: type[T]) -> HostColumn[T]: ...
def host_list(kind: type[Any] = object) -> HostColumn[Any]:
    """Declares a column of Python objects, such as the requests themselves.

    Args:
        kind: their class, for type checkers alone: `requests = host_list(Request)`.
    """
    return HostColumn()
