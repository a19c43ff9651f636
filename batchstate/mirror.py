"""`MirroredTensor`: one per-request vector, on the host and on the device, as one immutable value.

Every operation returns a new value and acts on both sides: on the host side with numpy, at once; on the device side
with one launch, if the device side exists already, or else not before somebody uses it. Nothing here waits for the
device but `resolve`. Nothing that a launched kernel may still read is ever written in place.

`repr`, `len`, `sum`, `max` and comparisons use the host side.
"""

from collections.abc import Sequence
from typing import Self, SupportsIndex

import numpy as np
import torch

from batchstate import invariants, levels
from batchstate.contracts import Contract, combined, parse_contract
from batchstate.errors import ArgumentError, ContractError, DeclarationError, DeviceError, DtypeError, ShapeError
from batchstate.runtime import Runtime, numpy_dtype, torch_dtype
from batchstate.values.device_ops import add, concatenate, replace_rows, select_rows, signed_twin
from batchstate.values.device_side import DeviceSide
from batchstate.values.host_arrays import Array, Rows, converted, count, counts, kept_rows, natural_dtype, row_indices
from batchstate.values.integers import across, amounts, check_bound_can_move, negated, shifted
from batchstate.values.sides import TwoSides

__all__ = ["Contract", "MirroredTensor"]


class MirroredTensor(TwoSides):
    """A vector (rows first, any trailing shape) whose host and device side are kept together.

    Make one with `from_host`, `from_device` or `from_pair`. Subclasses in `batchstate.indices` carry an index space.

    Attributes:
        unit: index space of the values (`slot`, `page`, `token`, `host_token`), or None for plain numbers.
        runtime: the device it belongs to.
        contract: how the host side relates to the device side.
        dtype: of the elements.
        shape: rows first.
        name: for reports.
        version: a number that no other value of the runtime has; stamp derived metadata with it.
    """

    __slots__ = ()

    # Making

    @classmethod
    def from_host(
        cls,
        runtime: Runtime,
        values: object,
        *,
        dtype: torch.dtype | None = None,
        contract: str | Contract = Contract.EXACT,
        name: str = "",
    ) -> Self:
        """A value from host values, which are copied. The device side is uploaded at first use, in one copy.

        Args:
            runtime: the device.
            values: list, numpy array or CPU tensor; rows first.
            dtype: of the column; by default the dtype of an array or tensor; int64, float32 or bool for lists. Indices
                are int64.
            contract: `exact`, or `host_only` for values whose upload belongs to the stream that uses them.
            name: for reports.

        Raises:
            DtypeError: values do not go into `dtype`, or torch and numpy do not share it.
            ValueOverflowError: a value lies outside the range of `dtype`.
            ShapeError: no rows (a scalar).
            ContractError: `upper_bound` and `device_only` values need a device side of their own.
            Violation: UNIT_MISMATCH: `values` is a mirrored value of another index space.
        """
        wanted = parse_contract(contract)
        if wanted not in (Contract.EXACT, Contract.HOST_ONLY):
            raise ContractError(
                f"{cls.__name__}.from_host cannot make a {wanted.value} value",
                value=wanted.value,
                remedy="use `from_pair` for upper_bound, `from_device` for device_only",
            )
        what = name or cls.__name__
        if isinstance(values, MirroredTensor):
            if values.unit != cls.unit:
                invariants.unit_mismatch(str(cls.unit), str(values.unit), object=values, operation="from_host")
            values = values.exact_host(what)
        chosen = natural_dtype(values, what) if dtype is None else numpy_dtype(dtype)
        if cls.unit is not None and chosen != np.int64:
            if dtype is not None or chosen.kind not in "iu":
                raise DtypeError(f"{what}: {cls.unit}s of {chosen}", value=chosen, remedy="indices are int64")
            chosen = np.dtype(np.int64)
        torch_dtype(chosen)
        host = converted(values, chosen, what)
        if host.ndim == 0:
            raise ShapeError(f"{what}: a scalar has no rows", value=values, remedy="pass one row a request")
        return cls(runtime, host, None, dtype=torch_dtype(chosen), shape=host.shape, contract=wanted, name=name)

    @classmethod
    def from_device(cls, runtime: Runtime, tensor: torch.Tensor, *, name: str = "") -> Self:
        """A `device_only` value. `tensor` is taken over, not copied, and must not be written any more.

        Call it on the stream that made the tensor (inside `Runtime.use`): readers on other streams wait for that one.

        Raises:
            DeviceError: `tensor` lies on another device.
            ShapeError: no rows.
        """
        _check_on_device(runtime, tensor, name or cls.__name__)
        return cls(
            runtime,
            None,
            DeviceSide.of(tensor, runtime),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            contract=Contract.DEVICE_ONLY,
            name=name,
        )

    @classmethod
    def from_pair(
        cls,
        runtime: Runtime,
        host: object,
        device: torch.Tensor,
        *,
        contract: str | Contract = Contract.EXACT,
        name: str = "",
    ) -> Self:
        """A value from both sides. `host` is copied, `device` is taken over and must not be written any more.

        Call it on the stream that made `device` (inside `Runtime.use`): readers on other streams wait for that one.

        Raises:
            DeviceError: `device` lies on another device.
            ShapeError, DtypeError: the sides do not go together.
            ContractError: a contract without one of the sides.
            Violation: MIRROR_EQUAL or MIRROR_BOUND, at level `full`.
        """
        wanted = parse_contract(contract)
        what = name or cls.__name__
        if wanted not in (Contract.EXACT, Contract.UPPER_BOUND):
            raise ContractError(
                f"{what}: a {wanted.value} value is no pair",
                value=wanted.value,
                remedy="use `from_host` or `from_device`",
            )
        _check_on_device(runtime, device, what)
        array = converted(host, numpy_dtype(device.dtype), what)
        if array.shape != tuple(device.shape):
            raise ShapeError(
                f"{what}: host side {list(array.shape)}, device side {list(device.shape)}",
                value=array.shape,
                remedy="pass two sides of one shape",
            )
        value = cls(
            runtime,
            array,
            DeviceSide.of(device, runtime),
            dtype=device.dtype,
            shape=array.shape,
            contract=wanted,
            name=name,
        )
        value.check("from_pair")
        return value

    # Moving rows

    def filter(self, keep: object) -> Self:
        """The rows that `keep` names, in its order.

        Args:
            keep: boolean mask bool[n], or unique row indices as list or array.

        Raises:
            ShapeError: a mask of another length.
            DtypeError: neither booleans nor integers.
            RowIndexError: an index outside the value.
            ArgumentError: an index twice.
        """
        return self._taken(kept_rows(keep, len(self), self._what("filter")), "filter")

    def take(self, rows: object) -> Self:
        """The rows at `rows` (int[k]), which may repeat.

        Raises:
            ShapeError: a mask of another length.
            DtypeError: neither booleans nor integers.
            RowIndexError: an index outside the value; negative ones do not count from the end.
        """
        return self._taken(row_indices(rows, len(self), self._what("take")), "take")

    def _taken(self, rows: Rows, operation: str) -> Self:
        self.check(operation)
        host = None if self._host is None else self._host[rows]
        device = self._made_device()
        if device is not None:
            index = self.runtime.upload([rows]).view(0)
            device = self.runtime.launch(select_rows, device, index, reads=(device, index), name=operation)
        tags = tuple(tag[rows] for tag in self._tags)
        return self._derived(host, device, (len(rows), *self.shape[1:]), operation, tags=tags)

    def merge(self, other: Self) -> Self:
        """The rows of this value, then those of `other`; the weaker contract of the two.

        Raises:
            Violation: UNIT_MISMATCH.
            DtypeError, ShapeError, DeviceError: the two do not go together.
        """
        return self.cat([self, other])

    @classmethod
    def cat(cls, values: Sequence[Self]) -> Self:
        """The rows of all values in order; the weakest of their contracts. Raises what `merge` raises."""
        given: object = values
        if not isinstance(given, list | tuple) or not given or not isinstance(given[0], MirroredTensor):
            raise ArgumentError("cat of no values", value=given, remedy="pass a list of at least one value")
        first = values[0]
        for other in values[1:]:
            first._check_alike(other)
        origins = {value._origin for value in values if len(value)}
        if len(origins) > 1:
            raise ArgumentError(
                f"{first._what('merge')}: {first.unit}s of pools {sorted(origins)}",
                value=sorted(origins),
                remedy="keep one column for each pool",
            )
        for value in values:
            value.check("cat")
        contract = first.contract
        for other in values[1:]:
            contract = combined(contract, other.contract)
        host = None
        if contract is not Contract.DEVICE_ONLY:
            host = np.concatenate([value._host_side() for value in values])
        device = None
        if contract in (Contract.UPPER_BOUND, Contract.DEVICE_ONLY) or any(
            value._device.made is not None for value in values
        ):
            first.runtime._refuse_capture("a merge")  # its kernel would not run now, and its result would be kept
            parts = [value._device.tensor(first.runtime) for value in values]
            device = first.runtime.launch(concatenate, parts, reads=parts, name="cat")
        windows = tuple(dict.fromkeys(window for value in values for window in value._windows))
        rows = sum(len(value) for value in values)
        tags = tuple(np.concatenate(column) for column in zip(*(value._tags for value in values), strict=True))
        return first._derived(
            host,
            device,
            (rows, *first.shape[1:]),
            "cat",
            contract=contract,
            windows=windows,
            tags=tags,
            origin=max(origins, default=0),
        )

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive pieces of the given sizes, which sum to the number of rows. No copy, no launch.

        Raises:
            ArgumentError: a negative size, or a sum that differs.
        """
        self.check("split")
        what = self._what("split")
        lengths = counts(sizes, what)
        if sum(lengths) != len(self):
            raise ArgumentError(
                f"{what}: sizes {lengths} sum to {sum(lengths)}, not {len(self)}",
                value=lengths,
                remedy="cover every row",
            )
        pieces, start = [], 0
        made = self._made_device()
        for size in lengths:
            rows = slice(start, start + size)
            host = None if self._host is None else self._host[rows]
            device = None if made is None else made[rows]
            pieces.append(
                self._derived(
                    host, device, (size, *self.shape[1:]), "split", tags=tuple(tag[rows] for tag in self._tags)
                )
            )
            start += size
        return pieces

    def pad(self, to: SupportsIndex, value: object = None) -> Self:
        """The same rows, then rows of `value` (one number or one row; zero by default) up to `to` rows.

        Raises:
            ArgumentError: `to` is less than the number of rows, or a non-zero pad for indices (slot 0 is the padding).
            ShapeError, DtypeError, ValueOverflowError: `value` does not go into a row.
        """
        self.check("pad")
        what = self._what("pad")
        rows = count(to, f"{what}: rows", least=len(self))
        fill = self._pad_row(value, what)
        if self.unit is not None and fill.any():
            raise ArgumentError(f"{what}: padding {self.unit}s with {value}", value=value, remedy="pad indices with 0")
        padding = np.broadcast_to(fill, (rows - len(self), *self.shape[1:]))
        host = None if self._host is None else np.concatenate([self._host, padding])
        device = self._made_device()
        if device is not None:
            tail = self.runtime.upload([padding]).view(0)
            device = self.runtime.launch(concatenate, [device, tail], reads=(device, tail), name="pad")
        tags = tuple(np.concatenate([tag, np.zeros(rows - len(self), tag.dtype)]) for tag in self._tags)
        result = self._derived(host, device, (rows, *self.shape[1:]), "pad", tags=tags)
        if levels.cheap and host is not None:
            invariants.tail_stale(host[len(self) :], fill, len(self), **self._where("pad"))
        return result

    def _pad_row(self, value: object, what: str) -> Array:
        dtype = numpy_dtype(self.dtype)
        row = np.zeros((), dtype) if value is None else converted(value, dtype, what)
        if row.ndim and row.shape != self.shape[1:]:
            raise ShapeError(
                f"{what}: a pad of {list(row.shape)}", value=row.shape, remedy="pass one number or one row"
            )
        return row

    def update(self, rows: object, values: object) -> Self:
        """The same value with other values in some rows, on both sides.

        Args:
            rows: unique row indices int[k], or a mask bool[n].
            values: a number, or k rows.

        Raises:
            ShapeError: a mask of another length.
            DtypeError: neither booleans nor integers.
            RowIndexError: an index outside the value.
            ArgumentError: an index twice.
            ValueOverflowError: a value outside the range of the dtype.
        """
        self.check("update")
        what = self._what("update")
        index = kept_rows(rows, len(self), what)
        if isinstance(values, MirroredTensor):
            self._check_alike(values, "update")
            if values._tags and values._origin != self._origin and len(values):
                raise ArgumentError(
                    f"{what}: {self.unit}s of pool {values._origin} into those of pool {self._origin}",
                    value=values._origin,
                    remedy="keep one column for each pool",
                )
        new = converted(
            values.exact_host(what) if isinstance(values, MirroredTensor) else values, numpy_dtype(self.dtype), what
        )
        shape = (len(index), *self.shape[1:])
        if new.ndim and new.shape != shape:
            raise ShapeError(f"{what}: {list(new.shape)} for {list(shape)}", value=new.shape, remedy="one row each")
        new = np.broadcast_to(new, shape)
        host = None
        if self._host is not None:
            host = self._host.copy()
            host[index] = new
        device = self._made_device()
        if device is not None:
            packed = self.runtime.upload([index, new])
            places, updates = packed.view(0), packed.view(1)
            device = self.runtime.launch(
                replace_rows, device, places, updates, reads=(device, places, updates), name="update", operations=2
            )
        return self._derived(host, device, self.shape, "update", tags=self._updated_tags(index, values))

    def _updated_tags(self, rows: Rows, values: object) -> tuple[Array, ...]:
        if not self._tags:
            return ()
        if type(values) is not type(self):
            raise DtypeError(
                f"{self._what('update')}: {self.unit}s are replaced by {self.unit}s of a pool, not by numbers",
                value=values,
                remedy="pass what the pool handed out",
            )
        tags = tuple(tag.copy() for tag in self._tags)
        for tag, new in zip(tags, values._tags, strict=True):
            tag[rows] = new
        return tags

    # Arithmetic

    def __add__(self, n: object) -> Self:
        return self._added(n, 1)

    def __sub__(self, n: object) -> Self:
        return self._added(n, -1)

    def _added(self, n: object, sign: int) -> Self:
        operation = "+ n" if sign > 0 else "- n"
        what = self._what(operation)
        if self.dtype.is_floating_point or self.dtype is torch.bool:
            raise DtypeError(
                f"{what}: arithmetic on {self.dtype}; two processors round differently",
                value=self.dtype,
                remedy="compute it in one place and pass the result to `update`",
            )
        if self.unit is not None:
            raise DtypeError(
                f"{what}: arithmetic on {self.unit} indices", value=n, remedy="indices are moved, not computed"
            )
        self.check(operation)
        amount = amounts(n, len(self), what)
        if sign < 0:
            amount = negated(amount, what)
        if self.contract is Contract.UPPER_BOUND:
            check_bound_can_move(self.dtype, amount, what)
        host = None if self._host is None else shifted(self._host, across(amount, len(self.shape)), what)
        device = self._made_device()
        if device is not None:
            self.runtime._refuse_capture(f"`{operation}`")  # its kernel would not run now, and its result would be kept
            delta: torch.Tensor | int = int(amount) if amount.ndim == 0 else self._amounts_on_device(amount)
            device = self.runtime.launch(add, device, delta, reads=(device,), name=operation)
        return self._derived(host, device, self.shape, operation)

    def _amounts_on_device(self, amount: Rows) -> torch.Tensor:
        lanes = across(amount, len(self.shape)).astype(numpy_dtype(signed_twin(self.dtype)))
        return self.runtime.upload([lanes]).view(0)

    # The door

    def _check_alike(self, other: "MirroredTensor", operation: str = "merge") -> None:
        what = self._what(operation)
        if not isinstance(other, MirroredTensor):
            raise DeclarationError(
                f"{what}: {type(other).__name__} is no MirroredTensor", value=other, remedy="wrap it"
            )
        if self.unit != other.unit:
            invariants.unit_mismatch(str(self.unit), str(other.unit), **self._where(operation))
        if self.runtime is not other.runtime:
            raise DeviceError(
                f"{what}: {self!r} and {other!r} have two runtimes", value=other, remedy="use one runtime"
            )
        if self.dtype != other.dtype:
            raise DtypeError(f"{what}: {self.dtype} with {other.dtype}", value=other.dtype, remedy="use one dtype")
        if self.shape[1:] != other.shape[1:]:
            raise ShapeError(
                f"{what}: rows of {list(self.shape[1:])} with rows of {list(other.shape[1:])}",
                value=other.shape,
                remedy="rows must have one shape",
            )


def _check_on_device(runtime: Runtime, tensor: torch.Tensor, what: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{what}: {type(tensor).__name__} is no tensor", value=tensor, remedy="pass a device tensor")
    if tensor.device != runtime.device:
        raise DeviceError(
            f"{what}: a tensor on {tensor.device}, runtime on {runtime.device}",
            value=str(tensor.device),
            remedy="pass a tensor of the runtime's device",
        )
    if tensor.ndim == 0:
        raise ShapeError(f"{what}: a scalar has no rows", value=tuple(tensor.shape), remedy="pass one row a request")
