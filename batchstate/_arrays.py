"""Arguments as checked numpy arrays, integer arithmetic that never wraps silently, and the kernels of a batch.

Values of a caller become a checked numpy array on the host, or a typed error; nothing here reads a device. Arrays are
fastest; lists work. `subject` is the operation or the argument, for messages. A kernel is one function for
`Runtime.launch`. torch has few kernels for unsigned dtypes wider than a byte: moving and adding integers is the same on
signed bits, so those are viewed as signed. Floats of a byte, which are moved and never added, are viewed as bytes.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import (
    ArgumentError,
    ContractError,
    DeviceError,
    DtypeError,
    RowIndexError,
    ShapeError,
    ValueOverflowError,
    expected,
)
from batchstate.invariants import first_duplicate
from batchstate.runtime.memory import FLOAT8

if TYPE_CHECKING:
    from batchstate.mirror import MirroredTensor

# Arguments of public methods: arrays and CPU tensors of any dtype, which is checked at run time; elements of sequences
# by their types. `str` is none of them.
Integer: TypeAlias = "int | np.integer[Any]"
Number: TypeAlias = "float | np.number[Any] | np.bool_"
Vector: TypeAlias = "npt.NDArray[Any] | torch.Tensor | MirroredTensor"
Selection: TypeAlias = "Sequence[Integer | np.bool_] | Vector"
"""Rows: a mask, or indices."""
Amount: TypeAlias = "Integer | Sequence[Integer | np.bool_] | Vector"
"""Integers to add, or to grow to: one for all rows, or one per row."""
Values: TypeAlias = "Number | Sequence[Number] | Sequence[Sequence[Number]] | Vector"
"""Values of some rows: one for all, one per row, or rows of several numbers."""

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Rows = Ints
ColumnValues: TypeAlias = "Sequence[Any] | Vector"
"""Values that a column is built of: one entry per request."""

UNORDERED = str, bytes, Set, Mapping
"""Values that can be iterated, and are never one entry per request, per size or per buffer."""

MOST_ROWS = 2**31 - 1
"""Rows of one value."""
MOST_ELEMENTS = 2**58
"""Elements of one tensor: their bytes are still int64."""
LARGE = 8192
"""From this many rows on, a slice below half is copied, so that it does not keep its parent alive."""

INT64 = np.dtype(np.int64)
_BOOL = np.dtype(np.bool_)
_LIMITS = {
    np.dtype(f"{kind}{width}"): (int(np.iinfo(f"{kind}{width}").min), int(np.iinfo(f"{kind}{width}").max))
    for kind in "iu"
    for width in (1, 2, 4, 8)
}
_LARGEST = {np.dtype(f"f{width}"): float(np.finfo(f"f{width}").max) for width in (2, 4, 8)}
_SIGNED = dict.fromkeys(FLOAT8, torch.uint8) | {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def as_array(values: object, subject: str) -> Array:
    """`values` as a numpy array; shares memory where it can.

    A mirrored value gives its host side if that is exact and a plain number (`MirroredTensor.exact_numbers`). Raises
    `DeviceError` for an accelerator tensor, `ShapeError` for lists of unequal lengths, else `DtypeError`.
    """
    array: Array
    exact_numbers = getattr(values, "exact_numbers", None)
    if type(values) is np.ndarray:
        array = values
    elif exact_numbers is not None:
        array = exact_numbers(subject)
    elif isinstance(values, np.ma.MaskedArray):
        raise DtypeError(f"{subject}: a masked array", values.dtype, "fill or filter the masked elements")
    elif isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            problem = f"{subject}: expected host values, got a tensor on {values.device}"
            raise DeviceError(problem, str(values.device), "pass host values; `from_device` takes device tensors")
        try:
            array = values.detach().resolve_conj().resolve_neg().numpy()
        except TypeError:
            problem = f"{subject}: numpy has no {values.dtype}"
            raise DtypeError(problem, values.dtype, "convert the tensor first") from None
    else:
        try:
            array = np.asarray(values)
        except ValueError:
            raise ShapeError(f"{subject}: rows of unequal lengths", values, "pass equal rows") from None
    if array.dtype.kind not in "biuf":
        got = repr(values) if array.ndim == 0 else f"values of dtype {array.dtype}"
        remedy = "pass a list of numbers, a numpy array or a CPU tensor, with one per row"
        raise DtypeError(f"{subject}: expected numbers, got {got}", array.dtype, remedy)
    return array


def converted(values: object, dtype: np.dtype[Any], subject: str) -> Array:
    """A new array of `dtype` with the same values.

    Integers must fit, floats are rounded to a narrower float but never to integers: else `ValueOverflowError` and
    `DtypeError` are raised.
    """
    if isinstance(values, list | tuple) and dtype.kind in "iu":
        values = _integers(values, dtype, subject)
    array = as_array(values, subject)
    if array.dtype == dtype:
        return np.array(array, order="C")
    kind, target = array.dtype.kind, dtype.kind
    if (target == "b" and kind != "b") or (target in "iu" and kind == "f"):
        problem = f"{subject}: values of dtype {array.dtype} do not go into {dtype}"
        raise DtypeError(problem, array.dtype, f"convert to {dtype} where the loss is intended")
    if array.size and target != "b":
        least, most = array.item(array.argmin()), array.item(array.argmax())  # `argmax` is four times as fast as `max`
        if target in "iu":
            check_range(least, most, dtype, subject)
        elif not -_LARGEST[dtype] <= least <= most <= _LARGEST[dtype]:  # NaN fails it too
            with np.errstate(over="ignore"):
                result = array.astype(dtype, order="C")
            if not np.array_equal(np.isfinite(result), np.isfinite(array)):
                problem = f"{subject}: a finite value becomes infinite in {dtype}"
                raise ValueOverflowError(problem, array.max(), "use a wider dtype")
            return result
    return array.astype(dtype, order="C")


def carried(values: object, dtype: np.dtype[Any], bits_of: torch.dtype | None, subject: str) -> Array:
    """A new array of `dtype` with host values as they cross to the device: `converted`, or bits.

    `bits_of` is a dtype that numpy lacks, whose bits have to be given as integers of its size; else None.
    """
    if bits_of is None:
        return converted(values, dtype, subject)
    array = as_array(values, subject)
    if not array.size:
        return np.empty(array.shape, dtype=dtype)
    if array.dtype.kind not in "iu" or array.dtype.itemsize != dtype.itemsize:
        problem = f"{subject}: expected the bits of {bits_of} as {dtype}, got {array.dtype}: numpy has no {bits_of}"
        raise DtypeError(problem, array.dtype, f"pass tensor.view(torch.{dtype}).numpy(), or a device tensor")
    return np.array(array, order="C").view(dtype)


def padding_row(value: object, dtype: np.dtype[Any], bits_of: torch.dtype | None, subject: str) -> Array:
    """A number or a row for padded rows, by default zero, as `carried`; numbers also where numpy lacks the dtype."""
    if value is None:
        return np.zeros((), dtype)
    if bits_of is None:
        return converted(value, dtype, subject)
    numbers = torch.from_numpy(converted(value, np.dtype(np.float32), subject))
    moved = numbers.to(bits_of)
    if bool(((numbers.abs() > torch.finfo(bits_of).max) & (moved.float() != numbers)).any()):
        raise ValueOverflowError(f"{subject}: {value!r} does not go into {bits_of}", value, "use a wider dtype")
    return moved.view(getattr(torch, dtype.name)).numpy()


def _integers(values: list[Any] | tuple[Any, ...], dtype: np.dtype[Any], subject: str) -> object:
    """A list as integers where numpy, which looks for a dtype for all of it, would make floats or objects of them."""
    try:
        array = np.asarray(values)
    except ValueError:
        return values  # unequal rows: `as_array` says so
    if array.size == 0:
        return np.empty(array.shape, dtype=dtype)
    if array.dtype.kind not in "fO":
        return array
    flat = np.asarray(values, dtype=object).reshape(-1).tolist()
    if not all(isinstance(number, int | np.integer) and not isinstance(number, bool) for number in flat):
        return array
    check_range(min(map(int, flat)), max(map(int, flat)), dtype, subject)
    return np.array(flat, dtype=dtype).reshape(array.shape)


def check_range(least: int, most: int, dtype: np.dtype[Any], subject: str) -> None:
    """Raises `ValueOverflowError` if `dtype` cannot hold `least` or `most`."""
    floor, ceiling = _LIMITS[dtype]
    if least < floor or most > ceiling:
        value = least if least < floor else most
        problem = f"{subject}: {value} does not fit {dtype} ({floor} to {ceiling})"
        raise ValueOverflowError(problem, value, "use a wider dtype, or find out why the value is so large")


def count(value: SupportsIndex, subject: str, *, least: int = 0, most: int | None = None) -> int:
    """`value` as an int of at least `least`, and at most `most`; else `DtypeError` or `ArgumentError`."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise DtypeError(f"{subject} is {value!r}, expected an integer", value, "pass an integer") from None
    if number < least:
        raise ArgumentError(f"{subject} is {number}, expected >= {least}", number, f"pass {least} or more")
    if most is not None and number > most:
        raise ArgumentError(f"{subject} is {number}, expected <= {most}", number, f"pass {most} or less")
    return number


def shape_of(shape: Iterable[SupportsIndex] | int, subject: str, *, rows: int = 1) -> tuple[int, ...]:
    """`shape` as counts, of a tensor of so many rows."""
    if isinstance(shape, (int, *UNORDERED)):
        raise expected(subject, "a shape", shape, "pass a tuple of sizes, as `(4,)`", ShapeError)
    sizes = tuple(count(size, f"{subject}: shape") for size in shape)
    elements = math.prod(sizes) * rows
    if elements > MOST_ELEMENTS:
        raise ArgumentError(f"{subject}: {elements} elements in {rows} rows", sizes, "pass sizes that memory holds")
    return sizes


def slices_of(sizes: Iterable[SupportsIndex], num_rows: int, subject: str) -> list[slice]:
    """The rows of each of the pieces of some sizes. Raises `ArgumentError` unless they are all of `num_rows`."""
    lengths = [count(size, f"{subject}: size") for size in sizes]
    ends = list(itertools.accumulate(lengths, initial=0))
    if ends[-1] != num_rows:
        problem = f"{subject}: sizes {lengths} sum to {ends[-1]}, not {num_rows}"
        raise ArgumentError(problem, lengths, "cover every row")
    return list(map(slice, ends, ends[1:]))


def natural_dtype(values: object, subject: str) -> np.dtype[Any]:
    """The dtype of a column made from `values`: an array's own; int64, float32 or bool for a list."""
    if not isinstance(values, list | tuple):
        return as_array(values, subject).dtype
    array = as_array(_integers(values, INT64, subject), subject)
    names: dict[str, type[np.generic]] = {"f": np.float32, "b": np.bool_}
    return np.dtype(names.get(array.dtype.kind, np.int64))


def kept_rows(keep: object, num_rows: int, subject: str) -> Rows:
    """The rows that a filter keeps, in the order given: int64[k], each at most once.

    `keep` is a boolean mask bool[num_rows], or row indices. Raises `ArgumentError` (an index twice); else as
    `row_indices`.
    """
    if type(keep) is np.ndarray and keep.dtype is _BOOL and keep.shape == (num_rows,):  # as in a step of decoding
        return keep.nonzero()[0]
    array = as_array(keep, subject)
    rows = row_indices(array, num_rows, subject)
    if rows.size > 1 and array.dtype.kind != "b":  # a mask names no row twice
        seen = np.zeros(num_rows, dtype=np.bool_)
        seen[rows] = True
        if np.count_nonzero(seen) != rows.size:
            twice = rows[first_duplicate(rows)]
            remedy = "name each row once; integers are row indices, a mask has one boolean per row: [True, False, True]"
            raise ArgumentError(f"{subject}: row {twice} appears twice", int(twice), remedy)
    return rows


def row_indices(rows: object, num_rows: int, subject: str) -> Rows:
    """Row indices as int64[k], repeats allowed; a boolean mask bool[num_rows] is taken too.

    Raises `ShapeError` (not one-dimensional, or a mask of another length), `DtypeError` (neither booleans nor
    integers), `RowIndexError` (an index outside [0, num_rows); negative ones do not count from the end).
    """
    array = as_array(rows, subject)
    if array.ndim != 1:
        got = f"the number {array}" if array.ndim == 0 else f"an array of shape {list(array.shape)}"
        remedy = "pass a list of row indices, or a mask with one boolean per row"
        raise ShapeError(f"{subject}: expected rows or a mask, got {got}", array.shape, remedy)
    if array.dtype.kind == "b":
        if array.size != num_rows:
            problem = f"{subject}: a mask of {array.size} rows for {num_rows} rows"
            raise ShapeError(problem, array.size, "make the mask from this value, after all earlier filters")
        return array.nonzero()[0]
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{subject}: row indices of dtype {array.dtype}", array.dtype, "pass integers or booleans")
    index: Rows = np.ascontiguousarray(array, dtype=np.int64)  # as the core takes it
    if int(index.view(np.uint64).max()) >= num_rows:  # one look: as unsigned numbers, negative ones are the largest
        wrong, remedy = int(array.min()), f"rows do not count from the end; the last one is {num_rows - 1}"
        if wrong >= 0:
            wrong, remedy = int(array.max()), "use rows of this batch or value: each filter numbers them anew"
        problem = f"{subject}: row {wrong} is out of range, expected rows of 0 to {num_rows - 1}"
        raise RowIndexError(problem, wrong, remedy)
    return index


def read_only(array: Array) -> Array:
    """A read-only view of `array`."""
    view = array.view()
    view.setflags(write=False)  # half the time that `flags.writeable = False` takes
    return view


def arange_per_row(starts: Rows, lengths: Rows) -> Rows:
    """`arange(start, start + length)` for each row, one row after the other, int64[sum of lengths]."""
    if starts.size == 1:
        return np.arange(starts[0], starts[0] + lengths[0], dtype=np.int64)
    ends: Rows = lengths.cumsum()
    total = int(ends[-1]) if ends.size else 0
    values: Rows = (starts - (ends - lengths)).repeat(lengths)
    values += np.arange(total, dtype=np.int64)
    return values


def ranges_of(indices: Rows) -> tuple[Rows, Rows]:
    """The ranges of consecutive indices, in the order given: starts and lengths, int64[k] each."""
    if not indices.size:
        return indices, indices
    firsts = np.concatenate([[0], np.flatnonzero(np.diff(indices) != 1) + 1])
    return indices[firsts], np.diff(firsts, append=indices.size)


def replaced(values: Array, rows: Rows, new: Array) -> Array:
    """A copy of `values`, with `new` at `rows`."""
    copy = values.copy()
    copy[rows] = new
    return copy


def amounts(n: object, num_rows: int, subject: str) -> Rows:
    """The amounts added to each row: int64[] for one number, int64[num_rows] for one per row."""
    if type(n) is int:  # as in a decode step
        if not -(2**63) <= n < 2**63:
            check_range(n, n, INT64, subject)
        return np.array(n, dtype=np.int64)
    array = as_array(n, subject)
    if array.dtype.kind not in "iu" and array.size:
        raise DtypeError(f"{subject}: expected integers, got {array.dtype}", array.dtype, "pass integers")
    if array.ndim and array.shape != (num_rows,):
        problem = f"{subject}: expected one number, or one for each of {num_rows} rows, got an array of shape "
        raise ShapeError(f"{problem}{list(array.shape)}", array.shape, "pass one for all rows, or one per row")
    if array.size and array.dtype.kind == "u":  # every signed dtype goes into int64
        check_range(0, int(array.max()), INT64, subject)
    return array.astype(np.int64)


def across(amount: Rows, ndim: int) -> Rows:
    """`amount` shaped so that it broadcasts over the trailing shape of a column of `ndim` dimensions."""
    return amount.reshape(-1, *([1] * (ndim - 1))) if amount.ndim else amount


def shifted(values: Array, amount: Rows, subject: str) -> Array:
    """`values + amount` in the dtype of integers `values` [n, ...], as a new array; `amount` is int64 that broadcasts.

    Raises `ValueOverflowError` (a sum lies outside the dtype).
    """
    floor, ceiling = _LIMITS[values.dtype]
    down, up = (amount.item(amount.argmin()), amount.item(amount.argmax())) if amount.size else (0, 0)
    if values.size and (
        (down < 0 and values.item(values.argmin()) + down < floor)
        or (up > 0 and values.item(values.argmax()) + up > ceiling)
    ):
        # The extremes need not be in one row: look at each row with Python's integers, which do not wrap.
        exact = values.astype(object) + np.broadcast_to(amount, values.shape).astype(object)
        wrong = np.asarray((exact < floor) | (exact > ceiling), dtype=np.bool_)
        if wrong.any():
            at = np.unravel_index(int(np.argmax(wrong)), values.shape)
            problem = f"{subject}: row {at[0]} would become {exact[at]}, outside {values.dtype} ({floor} to {ceiling})"
            raise ValueOverflowError(problem, exact[at], "use a wider dtype, or find out why the value is so large")
    # The cast of a negative amount to an unsigned dtype wraps, and so does the sum; for arrays numpy says nothing.
    result: Array = values + amount.astype(values.dtype)
    return result


def check_bound_can_move(values: Array, amount: Rows, subject: str) -> None:
    """Refuses to add a negative `amount` to bounds whose device side, which is smaller, could wrap.

    A bounded length or count is at least zero, and so is the device side. A signed bound may be lowered as far as half
    of the least value of its dtype. Raises `ContractError` (a negative amount and an unsigned dtype, or a bound that
    becomes too low).
    """
    down = int(amount.min()) if amount.size and values.size else 0
    if down >= 0:
        return
    floor = _LIMITS[values.dtype][0] // 2
    if floor == 0 or int(values.min()) + down < floor:
        problem = f"{subject}: {down} added to a bound of {values.dtype}, whose device side may be smaller and wrap"
        remedy = "resolve it first, or declare the column signed" if floor == 0 else "resolve it first"
        raise ContractError(problem, down, remedy)


def check_dense(tensor: torch.Tensor, subject: str) -> None:
    """Refuses tensors without elements of their own, such as sparse ones, with a `DtypeError`."""
    if tensor.layout is not torch.strided:
        raise DtypeError(f"{subject}: a tensor of layout {tensor.layout}", str(tensor.layout), "pass a dense tensor")


def check_rows(buffers: Iterable[torch.Tensor], counts: Sequence[int], device: torch.device, subject: str) -> None:
    """Refuses memory on another device, and memory that has none of these counts of rows."""
    for buffer in buffers:
        if buffer.device != device:
            raise DeviceError(f"{subject} of a tensor on {buffer.device}", buffer.device, f"pass memory on {device}")
        if not buffer.ndim or len(buffer) not in counts:
            remedy = "pass " + " or ".join(f"[{count}, ...]" for count in counts)
            raise ShapeError(f"{subject} of shape {list(buffer.shape)}", tuple(buffer.shape), remedy)


def signed_twin(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose kernels move `dtype`: another of the same width where `dtype` has none of its own."""
    return _SIGNED.get(dtype, dtype)


def of_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that crossed as the bits of `dtype`, viewed as `dtype`."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype whose rows torch moves."""
    return tensor.view(signed_twin(tensor.dtype)) if tensor.dtype in _SIGNED else tensor


def select_rows(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`source[rows]`; rows int64[k]. One kernel."""
    if source.dtype in _SIGNED:
        return torch.index_select(movable(source), 0, rows).view(source.dtype)
    return torch.index_select(source, 0, rows)


def concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All rows of `parts`. One kernel."""
    dtype = parts[0].dtype
    return torch.cat([movable(of_dtype(part, dtype)) for part in parts]).view(dtype)


def replace_rows(source: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`source` with `values` at `rows`, in new memory. Two kernels: a copy and a scatter."""
    values = of_dtype(values, source.dtype)
    return torch.index_copy(movable(source), 0, rows, movable(values)).view(source.dtype)


def put_rows(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """`values` into `target` at `rows` int64[k], in place. One kernel."""
    values = of_dtype(values, target.dtype)
    if target.dtype in _SIGNED:
        target, values = movable(target), movable(values)
    target.index_copy_(0, rows, values)


def add(source: torch.Tensor, amount: torch.Tensor | int) -> torch.Tensor:
    """`source + amount`, in new memory; the caller has shown that it fits. One kernel."""
    return torch.add(movable(source), amount).view(source.dtype)
