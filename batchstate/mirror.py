"""`MirroredTensor`: one per-request vector, on the host and on the device, as one immutable value.

Every operation returns a new value and acts on both sides: on the host side with numpy, at once; on the device side
with one launch if the device side exists already, else at its first use. Nothing here waits for the device but
`resolve`. Memory that a launched kernel may still read is never written in place.

`repr`, `len`, `sum`, `max` and comparisons use the host side. Each index space is a type of its own: slots, pages, and
locations of tokens in device or host KV memory.
"""

import contextlib
import enum
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex, Unpack, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import (
    INT64,
    LARGE,
    MOST_ROWS,
    Amount,
    Array,
    Rows,
    Selection,
    Values,
    across,
    add,
    amounts,
    carried,
    check_bound_can_move,
    check_dense,
    check_range,
    concatenate,
    converted,
    count,
    kept_rows,
    natural_dtype,
    padding_row,
    replace_rows,
    replaced,
    row_indices,
    select_rows,
    shifted,
    signed_twin,
    slices_of,
)
from batchstate._core import Requests
from batchstate._origin import RowSet, joined
from batchstate.errors import (
    ArgumentError,
    ContractError,
    DeviceError,
    DtypeError,
    ShapeError,
    SideMissingError,
    another_runtime,
    expected,
    one_of,
    wrong_shape,
)
from batchstate.runtime.base import Fence, OfThisProcess, Runtime
from batchstate.runtime.memory import NUMPY_DTYPES, ReadyTensor, as_on_host, host_dtype, numpy_dtype, torch_dtype
from batchstate.violations import Where

__all__ = ["Contract", "MirroredTensor"]


class Contract(enum.Enum):
    """The relation between the two sides of a value, element by element."""

    EXACT = "exact"
    """host == device."""
    UPPER_BOUND = "upper_bound"
    """host >= device: the host knows a bound until the exact value is resolved."""
    DEVICE_ONLY = "device_only"
    """Without a host side; reading it raises."""
    HOST_ONLY = "host_only"
    """Not uploaded yet; uploaded once, on the stream that first uses it."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        legal = [contract.value for contract in cls]
        raise ArgumentError(f"unknown contract {value!r}", value, one_of(legal, value))


_BY_STRENGTH = [Contract.DEVICE_ONLY, Contract.UPPER_BOUND, Contract.EXACT, Contract.HOST_ONLY]
_NUMBERS, _SAME = torch.int64, Contract.EXACT
_EXACT = _BY_STRENGTH[2:]
"""Contracts with an exact host side, of which the device side can be made."""


def weaker_contract(*contracts: Contract) -> Contract:
    """The contract of a value made of rows of all. `host_only` is the strongest: an upload makes the value exact."""
    return min(contracts, key=_BY_STRENGTH.index)


@final
class DeviceSide:
    """The device side of a value, which is made once, at its first use, and is safe on each stream that uses it.

    Attributes:
        write_count: `write_count` of the tensor when it was made, or None.
        contents: its rows when it was made, or when a check first read it, for later checks at `full`; else None.
        gathered_from: gives the rows that a column of a batch is gathered from; else None.
    """

    __slots__ = ("_source", "contents", "gathered_from", "write_count")

    def __init__(
        self,
        source: ReadyTensor | Callable[[], ReadyTensor],
        contents: Array | None = None,
        *,
        gathered_from: Callable[[], object] | None = None,
    ) -> None:
        self._source = source
        self.contents = contents
        self.gathered_from = gathered_from
        self.write_count = write_count(source.tensor) if type(source) is ReadyTensor else None

    @property
    def existing(self) -> torch.Tensor | None:
        """The tensor if it exists already; for checks, which put it in no order with a stream."""
        source = self._source
        return source.tensor if isinstance(source, ReadyTensor) else None

    def tensor(self, runtime: Runtime) -> torch.Tensor:
        """The tensor, safe on the current stream; it is made now if it does not exist."""
        ready = self._source
        if type(ready) is not ReadyTensor:
            ready = self.ready()
            if levels.full and not runtime.checks_suspended():
                self.contents = rows_of(runtime, ready.on_current_stream(runtime))
        # Not by `on_current_stream`: forwards read columns here, one by one.
        return runtime.use_on_current_stream(ready.tensor, ready.stream, ready.ready, synchronised=ready.synchronised)

    def ready(self) -> ReadyTensor:
        """The tensor, and the stream and fence that made it; it is made now if it does not exist."""
        source = self._source
        if not isinstance(source, ReadyTensor):
            source = self._source = source()
            self.write_count = write_count(source.tensor)
        return source

    def check_count(self, where: Where) -> None:
        """Checks torch's count of writes in place. Raises MIRROR_FOREIGN_WRITE."""
        existing, before = self.existing, self.write_count
        if existing is not None and before is not None:
            invariants.mirror_foreign_write("device", before, write_count(existing) or 0, **where)

    def rows(self, runtime: Runtime) -> tuple[Array, Array]:
        """The rows of the existing tensor: when a check first read them, and now. Reads device memory back."""
        now = rows_of(runtime, self.tensor(runtime))
        if self.contents is None:
            self.contents = now
        return self.contents, now


def rows_of(runtime: Runtime, tensor: torch.Tensor) -> Array:
    """The rows of a device tensor, for a check; a dtype that numpy lacks comes as integers of its size."""
    return runtime.inspect(tensor if tensor.dtype in NUMPY_DTYPES else as_on_host(tensor))


def write_count(tensor: torch.Tensor) -> int | None:
    """Torch's count of writes in place to the tensor's memory; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


@final
@attrs.define(eq=False)
class StaleWindow:
    """A window in which one side of a value is knowingly old. Values derived inside share it: closing it frees all."""

    side: str
    reason: str
    open: bool = True


def check_fresh(windows: Sequence[StaleWindow], side: str, **where: Unpack[Where]) -> None:
    """Refuses to read a side inside an open window of it. Raises MIRROR_STALE_READ."""
    reasons = tuple(window.reason for window in windows if window.open and window.side == side)
    invariants.mirror_stale_read(side, reasons, **where)


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, object], Any]:
    """The method that compares the host side with host values, element by element."""

    def compared(self: "MirroredTensor", other: object) -> Any:
        if isinstance(other, torch.Tensor):  # numpy would leave it to Python, which compares identities
            raise DeviceError("comparison with a tensor", tuple(other.shape), "compare `value.device` with it")
        try:
            return compare(self.np, other.np if isinstance(other, MirroredTensor) else other)
        except ValueError:
            raise ShapeError(f"comparison of shape {list(self.shape)}", other, "pass one number, or as many") from None

    return compared


@attrs.define(eq=False, repr=False)
class MirroredTensor(OfThisProcess):
    """A vector (rows first, any trailing shape) whose host and device side are kept together.

    Made by `from_host`, `from_device` and `from_pair`. Subclasses below carry an index space.

    Attributes:
        unit: index space of the values (`slot`, `page`, `location`, `host_location`), or None for plain numbers.
        runtime: the device it belongs to.
        contract: how the host side relates to the device side.
        dtype: of the elements.
        shape: rows first.
        name: for reports.
        version: a number that no other value or batch of the runtime has; stamp derived metadata with it.
    """

    unit: ClassVar[str | None] = None

    runtime: Runtime
    _array: Array | None  # the host side, once it is there
    _side: DeviceSide | Callable[[], DeviceSide] | None  # made of the host side, or by a function, at first use
    dtype: torch.dtype
    shape: tuple[int, ...]
    contract: Contract = Contract.EXACT
    name: str = ""
    _windows: tuple[StaleWindow, ...] = ()  # some of them closed by now
    # Generations of handles, int64[n], which move with the rows; once they are there.
    _gens: Array | None = attrs.field(default=None, alias="generations")
    _pool_id: int = 0  # of the pool that made the indices
    _row_set: RowSet | None = None  # the requests that the rows belong to, if known
    # Values of a batch whose host side can be written from outside, or may be stale. They add themselves.
    _exposed: "list[MirroredTensor] | None" = None
    # The host side when it was handed out as a tensor or when a check first read it, for later checks at `full`.
    _contents: Array | None = None
    _host_tensor: torch.Tensor | None = None  # once it was handed out
    _plain: Requests | None = None  # of handles that are used on the host alone: as the core takes them
    version: int = attrs.field(init=False, factory=itertools.count(-1, -1).__next__)  # batches have positive ones

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
        """A value from a list, numpy array or CPU tensor, rows first, which is copied. It is uploaded at first use.

        `dtype` is by default that of an array or tensor; int64, float32 or bool for lists. Indices are int64.
        `contract` is `exact`, or `host_only` for values whose upload belongs to the stream that uses them.

        Raises:
            DtypeError, ValueOverflowError: values do not go into `dtype`, or torch and numpy do not share it.
            ShapeError: a scalar has no rows.
            ContractError: `upper_bound` and `device_only` values need a device side of their own.
            Violation: UNIT_MISMATCH: `values` is a mirrored value of another index space.
        """
        wanted = Contract(contract)
        if wanted not in _EXACT:
            problem = f"{cls.__name__}.from_host cannot make a {wanted.value} value"
            raise ContractError(problem, wanted.value, "use `from_pair` for upper_bound, `from_device` for device_only")
        subject = name or cls.__name__
        if isinstance(values, MirroredTensor):
            if values.unit != cls.unit:
                invariants.unit_mismatch(str(cls.unit), str(values.unit), object=values, operation="from_host")
            values = values.exact_host(subject)
        chosen = natural_dtype(values, subject) if dtype is None else numpy_dtype(dtype)
        if cls.unit is not None and chosen != INT64:
            if dtype is not None or chosen.kind not in "iu":
                raise DtypeError(f"{subject}: expected int64 {cls.unit}s, got {chosen}", chosen, "pass int64")
            chosen = INT64
        return cls._of_sides(runtime, converted(values, chosen, subject), None, wanted, name, "from_host")

    @classmethod
    def from_device(cls, runtime: Runtime, tensor: torch.Tensor, *, name: str = "") -> Self:
        """A `device_only` value. `tensor` is taken over, not copied, and must not be written any more.

        Call it on the stream that made the tensor (inside `Runtime.use`): readers on other streams wait for that one.
        Raises `DeviceError` if `tensor` lies on another device, `ShapeError` for a scalar.
        """
        _check_on_device(runtime, tensor, name or cls.__name__)
        return cls._of_sides(runtime, None, tensor, Contract.DEVICE_ONLY, name, "from_device")

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
        Raises `DeviceError` (`device` lies on another device), `ShapeError`, `DtypeError` (the sides do not go
        together), `ContractError` (a contract without one of the sides), MIRROR_EQUAL or MIRROR_BOUND, at level `full`.
        """
        wanted, subject = Contract(contract), name or cls.__name__
        if wanted not in (Contract.EXACT, Contract.UPPER_BOUND):
            raise expected(subject, "exact or upper_bound", wanted.value, "use the other constructors", ContractError)
        _check_on_device(runtime, device, subject)
        array = converted(host, numpy_dtype(device.dtype), subject)
        if array.shape != tuple(device.shape):
            raise wrong_shape(subject, device.shape, array.shape, "pass two sides of one shape")
        return cls._of_sides(runtime, array, device, wanted, name, "from_pair")

    @classmethod
    def _of_sides(
        cls, runtime: Runtime, host: Array | None, device: torch.Tensor | None, contract: Contract, name: str, call: str
    ) -> Self:
        side = None if device is None else DeviceSide(ReadyTensor.made_now(device, runtime))
        dtype = torch_dtype(host.dtype) if device is None else device.dtype  # type: ignore[union-attr]
        shape: tuple[int, ...] = tuple((device if host is None else host).shape)  # type: ignore[union-attr]
        handles = issubclass(cls, Handles)
        if not shape or (handles and len(shape) > 1):
            problem = f"{name or cls.__name__}: expected {'a vector' if handles else 'rows'}, got shape {list(shape)}"
            raise ShapeError(problem, shape, "pass one row per request")
        generations = np.zeros(shape, dtype=np.int64) if handles else None
        value = cls(runtime, host, side, dtype, shape, contract, name, generations=generations)
        value.check(call)
        return value

    # The host side

    @property
    def np(self) -> Array:
        """The host side as a read-only array.

        Raises `SideMissingError` (a `device_only` value), MIRROR_STALE_READ inside a stale window of the host side.
        """
        self._check_fresh("host")
        view = self._host_side().view()  # not by `read_only`: forwards and plans read columns here, one by one
        view.setflags(write=False)
        return view

    @property
    def host(self) -> torch.Tensor:
        """The host side as a CPU tensor, to be read only. Raises what `np` raises."""
        self._check_fresh("host")
        if self._host_tensor is None:
            self._host_tensor = torch.from_numpy(self._host_side())
            self._plain = None
            self._expose()
            if levels.full and self._contents is None:
                self._contents = self._host_side().copy()
        return self._host_tensor

    @property
    def _host(self) -> Array | None:
        """The host side, or None. The core makes handles, and their arrays are made when they are first read."""
        if self._array is None and self._plain is not None:
            self._array, self._gens = self._plain.handles()
        return self._array

    @property
    def _generations(self) -> Array | None:
        if self._gens is None and self._plain is not None:
            self._array, self._gens = self._plain.handles()
        return self._gens

    def _host_side(self) -> Array:
        host = self._array if self._array is not None else self._host
        if host is None:
            remedy = "call `resolve()`, which waits for the device, or plan with a bound"
            raise SideMissingError(f"{self!r} has no host side", self.contract.value, remedy)
        return host

    def _alone(self) -> Requests | None:
        """Exact handles of a pool that are used on the host alone, as the core takes them; None for other values."""
        used = self._side is not None or self._host_tensor is not None or self._windows
        if self._plain is None and self._gens is not None and self.contract is Contract.EXACT and not used:
            self._plain = Requests(self._array, self._gens, self._pool_id)
        return self._plain

    def _expose(self) -> None:
        """Tells the batch that has the value, once; a list that its members know would be a cycle."""
        if self._exposed is not None:
            self._exposed.append(self)
            self._exposed = None

    def __len__(self) -> int:
        return self.shape[0]

    def sum(self) -> Any:
        """Sum of the host side (of the bounds, under `upper_bound`), as a Python number; integers never wrap."""
        values = self.np
        if values.dtype.kind in "iu" and values.size:
            largest = max(int(values.max()), -int(values.min()))
            if largest * values.size >= 2**63:
                return sum(values.reshape(-1).tolist())
        return values.sum().item()

    def max(self) -> Any:
        """Maximum of the host side, as a Python number. Raises `ArgumentError` if there are no rows."""
        return self._not_empty("max").max().item()

    def min(self) -> Any:
        """Minimum of the host side, as a Python number. Raises `ArgumentError` if there are no rows."""
        return self._not_empty("min").min().item()

    def _not_empty(self, operation: str) -> Array:
        values = self.np
        if not values.size:
            raise ArgumentError(f"{operation} of {self!r}", values.shape, "ask `len(value)` before")
        return values

    def tolist(self) -> list[Any]:
        """The host side as Python numbers."""
        values: list[Any] = self.np.tolist()
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.np, dtype=dtype) if copy or dtype is not None else self.np

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __contains__(self, value: object) -> bool:
        return value in self.tolist()

    __eq__ = _comparison(operator.eq)
    __ne__ = _comparison(operator.ne)
    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        problem = f"the truth value of {self!r} is ambiguous"
        raise ArgumentError(problem, self.shape, "use `len(value) > 0`, or `.any()`/`.all()` of a comparison")

    def exact_numbers(self, subject: str) -> Array:
        """The host side as plain exact numbers: amounts, rows, values of another column. Indices are UNIT_MISMATCH."""
        if self.unit is not None:
            invariants.unit_mismatch("plain numbers", self.unit, **self._where(subject))
        return self.exact_host(subject)

    def exact_host(self, subject: str) -> Array:
        """The host side of any index space, if it is exact: a bound is a `ContractError`."""
        if self.contract not in _EXACT:
            raise ContractError(f"{subject}: {self!r} has no exact host side", self.contract.value, "resolve it first")
        if levels.full:
            self.check(subject)
        return self.np

    # The device side

    @property
    def device(self) -> torch.Tensor:
        """The device side, to be read only, safe on the current stream; uploaded if it is not there yet.

        Raises MIRROR_STALE_READ inside a stale window of the device side.
        """
        self._check_fresh("device")
        return self._own_device()

    @property
    def device_side(self) -> DeviceSide:
        """The device side, which may not exist yet. For the library: batches and relays take it over."""
        self._check_fresh("device")
        return self._device

    @property
    def _device(self) -> DeviceSide:
        """The device side, made at its first use: many values are read on the host alone."""
        side = self._side
        if type(side) is not DeviceSide:
            made = DeviceSide(functools.partial(_uploaded, self.runtime, self._host)) if side is None else side()
            side, self._plain = made, None
            self._side = side
        return side

    def _own_device(self) -> torch.Tensor:
        return self._device.tensor(self.runtime)

    def _existing(self) -> torch.Tensor | None:
        return self._side.existing if type(self._side) is DeviceSide else None

    def _device_if_needed(self) -> torch.Tensor | None:
        """The device side, safe on the current stream, if it exists or cannot be made of the host side; else None."""
        return self._own_device() if self.contract not in _EXACT or self._existing() is not None else None

    def _launched(
        self, operation: str, kernel: Callable[..., torch.Tensor], *arrays: Array, operations: int = 1
    ) -> torch.Tensor | None:
        """The device side after an operation, if it is needed: `kernel` gets it and the device sides of `arrays`."""
        device = self._device_if_needed()
        if device is None:
            return None
        operands = [device]
        if arrays:
            packed = self.runtime.upload(arrays)
            operands += [packed.view(i) for i in range(len(arrays))]
        else:
            self.runtime.refuse_capture(f"`{operation}`")  # its kernel would not run now, and its result would be kept
        return self.runtime.launch(kernel, *operands, reads=operands, name=operation, operations=operations)

    # Rows of requests, and windows

    @property
    def row_set(self) -> RowSet | None:
        """The requests that the rows belong to, if known. For the library."""
        return self._row_set

    def aligned(self, slots: "MirroredTensor") -> Array:
        """The host side with one row for each of `slots`, in their order: rows go by handle. Others are left out.

        Raises `ArgumentError` if `slots` are not handles, as `batch.slots`, or it is not known to which requests the
        rows belong, and DERIVED_STALE if a request has no row here.
        """
        own, wanted = self.row_set, slots.row_set if slots.unit == "slot" else None
        if wanted is None or own is None:
            remedy = "columns and results of a relay know whose their rows are; pass the slots of a batch"
            raise ArgumentError(f"{self!r}: rows of requests are not known, or not of {slots!r}", slots, remedy)
        return own.in_order_of(wanted, self.np, self.label, **self._where("aligned"))

    @contextlib.contextmanager
    def stale(self, side: str, *, reason: str) -> Iterator[None]:
        """A window in which `side` (`host` or `device`) is knowingly old; reading it raises, in derived values too."""
        if side not in ("host", "device"):
            raise ArgumentError(f"unknown side {side!r}", side, "use 'host' or 'device'")
        if not reason:
            raise ArgumentError("a stale window without a reason", reason, "say what makes it stale")
        window = StaleWindow(side, reason)
        self._array, self._gens, self._plain = self._host, self._generations, None
        self._windows = (*self._windows, window)
        self._expose()
        try:
            yield
        finally:
            window.open = False
            self._windows = self.open_windows

    @property
    def open_windows(self) -> tuple[StaleWindow, ...]:
        """The stale windows that are open now; values derived from this one inherit them."""
        return tuple(window for window in self._windows if window.open) if self._windows else ()

    def _check_fresh(self, side: str) -> None:
        if self._windows:
            check_fresh(self._windows, side, **self._where("read"))

    # Moving rows

    def filter(self, keep: "Selection") -> Self:
        """The rows that `keep` names, in its order: a mask bool[n], or unique row indices as list or array.

        Raises `ArgumentError` for an index twice, else as `take`.
        """
        rows = kept_rows(keep, len(self), self._subject("filter"))
        self.check("filter")
        return self._taken(rows, "filter")

    def take(self, rows: "Selection") -> Self:
        """The rows at `rows` (int[k], which may repeat, or a mask bool[n]).

        Raises `ShapeError` (a mask of another length), `DtypeError` (neither booleans nor integers), `RowIndexError`
        (an index outside the value; negative ones do not count from the end).
        """
        rows = row_indices(rows, len(self), self._subject("take"))
        self.check("take")
        return self._taken(rows, "take")

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive pieces of the given sizes, which sum to the number of rows. No copy, no launch.

        The exception is a piece with less than half of the rows of a large value, which must not keep the whole alive.
        Raises `ArgumentError` for a negative size, or a sum that differs.
        """
        self.check("split")
        pieces = []
        for rows in slices_of(sizes, len(self), self._subject("split")):
            copied = len(self) >= LARGE and 2 * (rows.stop - rows.start) < len(self)
            pieces.append(self._taken(np.arange(rows.start, rows.stop) if copied else rows, "split"))
        return pieces

    def _taken(self, rows: Rows | slice, operation: str) -> Self:
        host = None if self._host is None else self._host[rows]
        if isinstance(rows, slice):
            device = self._device_if_needed()
            device = None if device is None else device[rows]
        else:
            device = self._launched(operation, select_rows, rows)
        if self._generations is not None:
            return self._derived(operation, host, device, None, generations=self._generations[rows])
        return self._derived(operation, host, device, None if self._row_set is None else self._row_set.taken(rows))

    def merge(self, other: Self) -> Self:
        """The rows of this value, then those of `other`; the weaker contract of the two.

        Raises UNIT_MISMATCH, `DtypeError`, `ShapeError`, `DeviceError` (the two do not go together), `ArgumentError`
        (indices of two pools).
        """
        return self.cat([self, other])

    @classmethod
    def cat(cls, values: Sequence[Self]) -> Self:
        """The rows of all values in order; the weakest of their contracts. Raises what `merge` raises."""
        if not values:
            raise ArgumentError("cat of no values", values, "pass a list of at least one value")
        first = values[0]
        if first._pool_id and not levels.full:  # handles of many requests: nothing to check or to weaken
            handles = Requests.joined([value._plain for value in values])
            if handles is None:
                handles = Requests.joined([value._alone() for value in values])
            if handles is not None:
                return cls.of_core(first.runtime, handles, first.name)  # type: ignore[attr-defined, no-any-return]
        pool_id = first._check_alike(values[1:], "merge")
        for value in values:
            value.check("cat")
        contract = weaker_contract(*(value.contract for value in values))
        device, host = None, None
        if contract is not Contract.DEVICE_ONLY:
            host = np.concatenate([value._host_side() for value in values])
        if contract not in _EXACT or any(value._existing() is not None for value in values):
            first.runtime.refuse_capture("`cat`")
            parts = [value._own_device() for value in values]
            device = first.runtime.launch(concatenate, parts, reads=parts, name="cat")
        numbers = [value._generations for value in values if value._generations is not None]
        row_set = None if numbers else joined([value._row_set for value in values])
        generations = np.concatenate(numbers) if numbers else None
        windows = tuple(dict.fromkeys(window for value in values for window in value._windows))
        result = first._derived(
            "cat", host, device, row_set, contract=contract, windows=windows, generations=generations
        )
        result._pool_id = pool_id
        return result

    def pad(self, to: SupportsIndex, value: object = None) -> Self:
        """The same rows, then rows of `value` (one number or one row; zero by default) up to `to` rows.

        Raises `ArgumentError` (`to` is less than the number of rows, or a non-zero pad for indices (slot 0 is the
        padding)), `ShapeError`, `DtypeError`, `ValueOverflowError` (`value` does not go into a row).
        """
        self.check("pad")
        subject = self._subject("pad")
        more = count(to, f"{subject}: rows", least=len(self), most=MOST_ROWS) - len(self)
        fill = padding_row(value, *host_dtype(self.dtype), subject)
        if fill.ndim and fill.shape != self.shape[1:]:
            raise wrong_shape(f"{subject}: a pad", self.shape[1:], fill.shape, "pass one number or one row")
        if self.unit is not None and fill.any():
            raise ArgumentError(f"{subject}: padding {self.unit}s with {value}", value, "pad indices with 0")
        padding = np.broadcast_to(fill, (more, *self.shape[1:]))
        host, generations = (
            None if rows is None else np.concatenate([rows, padding]) for rows in (self._host, self._generations)
        )
        device = self._launched("pad", lambda rows, tail: concatenate([rows, tail]), padding)
        result = self._derived("pad", host, device, self._row_set, generations=generations)
        if levels.cheap and host is not None:
            invariants.tail_stale(host[len(self) :], fill, len(self), **self._where("pad"))
        return result

    # Changing values

    def update(self, rows: "Selection", values: "Values") -> Self:
        """The same value with other values in some rows, on both sides.

        `rows` are unique row indices int[k], or a mask bool[n]; `values` a number, or k rows. Raises
        `ValueOverflowError` (a value outside the range of the dtype); else as `filter` and `merge`.
        """
        self.check("update")
        subject = self._subject("update")
        index = kept_rows(rows, len(self), subject)
        numbers: object = values
        theirs, generations, row_set = None, self._generations, self._row_set
        if isinstance(values, MirroredTensor):
            self._check_alike([values], "update")
            numbers, theirs = values.exact_host(subject), values._generations
        if generations is not None and theirs is None:
            raise expected(subject, f"{self.unit}s of a pool", values, "pass what `pool.take` returned", DtypeError)
        new = carried(numbers, *host_dtype(self.dtype), subject)
        shape = (len(index), *self.shape[1:])
        if new.ndim and new.shape != shape:
            raise wrong_shape(subject, shape, new.shape, "pass one row of values for each row, or one for all")
        if generations is not None and theirs is not None:
            generations, row_set = replaced(generations, index, theirs), None
        new = np.broadcast_to(new, shape)
        host = None if self._host is None else replaced(self._host, index, new)
        device = self._launched("update", replace_rows, index, new, operations=2)
        return self._derived("update", host, device, row_set, generations=generations)

    def __add__(self, n: "Amount") -> Self:
        return self._added(n, "+ n")

    __radd__ = __add__

    def __sub__(self, n: "Amount") -> Self:
        return self._added(n, "- n")

    def _added(self, n: object, operation: str) -> Self:
        subject = self._subject(operation)
        if self.dtype.is_floating_point or self.dtype is torch.bool:
            problem = f"{subject}: arithmetic on {self.dtype}; two processors round differently"
            raise DtypeError(problem, self.dtype, "compute it in one place and pass the result to `update`")
        if self.unit is not None:
            raise DtypeError(f"{subject}: arithmetic on {self.unit} indices", n, "indices are moved, not computed")
        self.check(operation)
        amount = amounts(n, len(self), subject)
        if isinstance(n, MirroredTensor) and n.row_set is not None and self._row_set is not None:
            self._row_set.check_same(n.row_set, n, **self._where(operation))
        if operation == "- n":
            check_range(0, -int(amount.min(initial=0)), INT64, subject)  # the least int64 has no negative
            amount = np.negative(amount)
        if self.contract is Contract.UPPER_BOUND:
            check_bound_can_move(self._host_side(), amount, subject)
        shaped = across(amount, len(self.shape))
        host = None if self._host is None else shifted(self._host, shaped, subject)
        arrays = [shaped.astype(numpy_dtype(signed_twin(self.dtype)))] if amount.ndim else []
        kernel = add if arrays else functools.partial(add, amount=int(amount))
        device = self._launched(operation, kernel, *arrays)
        return self._derived(operation, host, device, self._row_set)

    # Contracts

    def weaken(self, contract: str | Contract) -> Self:
        """The same value under a contract that promises less: a bound before speculation, say.

        Raises `ContractError` if `contract` promises more than the present one; only `resolve` strengthens.
        """
        wanted = Contract(contract)
        if wanted is Contract.UPPER_BOUND and self.unit is not None:
            raise ContractError(f"{self!r}: {self.unit}s have no bound", wanted.value, "lengths and counts have bounds")
        if weaker_contract(wanted, self.contract) is not wanted or wanted is Contract.HOST_ONLY:
            remedy = "only `resolve()` strengthens a contract, and it waits for the device"
            raise ContractError(f"{self!r} cannot become {wanted.value!r}", wanted.value, remedy)
        self.check("weaken")
        host = None if wanted is Contract.DEVICE_ONLY else self._host
        return self._derived("weaken", host, self._device, self._row_set, contract=wanted)

    def tighten(self, bound: object) -> Self:
        """The same bounded value with lower bounds on the host. Its device side is not touched.

        Args:
            bound: numbers of the value's shape, none above the present bounds: those that results of earlier steps
                prove. Rows of a mirrored value go by handle, if both values know the requests of their rows.

        Raises:
            ContractError: the value is not a bound.
            ShapeError, DtypeError, ValueOverflowError: `bound` does not go with the value.
            ArgumentError: a bound that rises; `+ n` moves both sides.
            Violation: DERIVED_STALE: no row for a request; MIRROR_BOUND, at `full`: the device side holds more.
        """
        subject = self._subject("tighten")
        if self.contract is not Contract.UPPER_BOUND:
            raise ContractError(f"{subject}: expected a bound, got {self!r}", self.contract.value, "use `update`")
        self.check("tighten")
        host = converted(lined_up(bound, self.row_set, subject), numpy_dtype(self.dtype), subject)
        if host.shape != self.shape:
            raise wrong_shape(subject, self.shape, host.shape, "pass one bound for each value")
        higher = np.argwhere(~(host <= self.np))  # of any trailing shape, and of no rows too
        if higher.size:
            row = int(higher[0][0])
            raise ArgumentError(f"{subject}: the bound of row {row} would rise", row, "pass none above the present")
        return self._derived("tighten", host, self._device, self._row_set)

    def resolve(self) -> Self:
        """The same value as `exact`, its host side read back from the device. Waits: one forced sync."""
        self.check("resolve")
        if self.contract in _EXACT:
            return self
        device = self._own_device()
        if self.dtype not in NUMPY_DTYPES:
            raise DtypeError(f"{self!r}: numpy has no {self.dtype}", self.dtype, "convert it on the device")
        host = self.runtime.read_back(device)
        return self._derived("resolve", host, device, self._row_set, contract=Contract.EXACT)

    # Checks

    def check(self, operation: str = "check") -> None:
        """Checks every invariant of this value that applies at the present level.

        `cheap` compares torch's counts of writes in place; `full` also compares each side with its first contents, the
        two sides, and their memory. Raises MIRROR_FOREIGN_WRITE, MIRROR_ALIASED, MIRROR_EQUAL, MIRROR_BOUND.
        """
        if not levels.cheap:
            return
        where = self._where(operation)
        if levels.full:
            self._check_fully(where)  # first: it says which row
        if type(self._side) is DeviceSide:
            self._side.check_count(where)
        tensor = self._host_tensor
        if tensor is not None and not tensor.is_inference():
            invariants.mirror_foreign_write("host", 0, tensor._version, **where)

    def _check_fully(self, where: Where) -> None:
        host, device = self._host, self._existing()
        if host is not None:
            if self._contents is None:
                self._contents = host.copy()
            invariants.mirror_foreign_write("host", self._contents, host, **where)
        if device is None or self.open_windows or self.runtime.checks_suspended():
            return  # nothing to compare with, or knowingly different
        if host is not None and device.device.type == "cpu":
            start, other = host.__array_interface__["data"][0], device.data_ptr()
            invariants.mirror_aliased((start, start + host.nbytes), (other, other + device.nbytes), **where)
        side = self._device
        before, now = side.rows(self.runtime)
        exact = host if self.contract is not Contract.UPPER_BOUND else None
        if exact is None or write_count(device) != side.write_count:
            invariants.mirror_foreign_write("device", before if exact is None else exact, now, **where)
        if host is not None:
            invariant = invariants.mirror_bound if exact is None else invariants.mirror_equal
            invariant(host, now, **where)

    # Helpers

    def _derived(
        self,
        operation: str,
        host: Array | None,
        device: torch.Tensor | DeviceSide | None,
        row_set: RowSet | None,
        *,
        contract: Contract | None = None,
        windows: tuple[StaleWindow, ...] = (),
        generations: Array | None = None,
    ) -> Self:
        """The result of an operation, checked; what is not given is as in this value."""
        shape = self.shape if host is None else host.shape
        if isinstance(device, torch.Tensor):
            shape = tuple(device.shape)
            device = DeviceSide(ReadyTensor.made_now(device, self.runtime))
        value = type(self).__new__(type(self))  # as a call of the class, which packs its arguments twice
        contract, windows = contract or self.contract, windows or self._windows
        generations = self._generations if generations is None else generations
        rest = self.name, windows, generations, self._pool_id, row_set
        MirroredTensor.__init__(value, self.runtime, host, device, self.dtype, shape, contract, *rest)
        if levels.full:
            value.check(operation)
        return value

    def _check_alike(self, others: "Sequence[MirroredTensor]", operation: str) -> int:
        """The pool of the rows of this value and of others. Refuses others that do not go with it."""
        subject = self._subject(operation)
        for other in others:
            if self.unit != other.unit:
                invariants.unit_mismatch(str(self.unit), str(other.unit), **self._where(operation))
            if self.runtime is not other.runtime:
                raise another_runtime(subject, other)
            if self.dtype != other.dtype:
                raise expected(subject, self.dtype, other.dtype, "convert one first", DtypeError)
            if self.shape[1:] != other.shape[1:]:
                raise wrong_shape(f"{subject}: rows", self.shape[1:], other.shape[1:], "pass rows of one shape")
        pools = sorted({value._pool_id for value in (self, *others) if len(value)})
        if len(pools) > 1:
            names = ", ".join(f"pool {pool}" for pool in pools)
            raise ArgumentError(f"{subject}: {self.unit}s of pools: {names}", pools, "keep one column for each pool")
        return pools[0] if pools else self._pool_id

    def _subject(self, operation: str) -> str:
        return f"{self.name or type(self).__name__}: {operation}"

    def _where(self, operation: str) -> Where:
        return {"object": self, "operation": operation, "column": self.name, "step": self.runtime.step}

    @property
    def label(self) -> str:
        """Type, name, dtype and shape: the value in a report."""
        kind = NUMPY_DTYPES[self.dtype].name if self.dtype in NUMPY_DTYPES else str(self.dtype)
        label = f" {self.name!r}" if self.name else ""
        return f"{type(self).__name__}{label} {kind}{list(self.shape)} {self.contract.value} on {self.runtime.device}"

    def __repr__(self) -> str:
        if self._host is None:
            return self.label
        text = np.array2string(self._host, separator=", ", threshold=8, edgeitems=3, max_line_width=10_000)
        return f"{self.label}: {' '.join(text.split()).replace('[ ', '[')}"


def lined_up(values: object, wanted: RowSet | None, subject: str) -> object:
    """Exact numbers in the order of the requests `wanted`; unchanged if the requests of `values` are not known.

    Raises DERIVED_STALE if a request has no row among the values.
    """
    if not isinstance(values, MirroredTensor) or wanted is None or values.row_set is None:
        return values
    numbers, step = values.exact_numbers(subject), values.runtime.step
    return values.row_set.in_order_of(wanted, numbers, values.label, operation=subject, step=step)


def _check_on_device(runtime: Runtime, tensor: torch.Tensor, subject: str) -> None:
    if tensor.device != runtime.device:
        problem = f"{subject}: a tensor on {tensor.device}, runtime on {runtime.device}"
        raise DeviceError(problem, str(tensor.device), "pass a tensor of the runtime's device")
    check_dense(tensor, subject)


def _uploaded(runtime: Runtime, host: Array | None) -> ReadyTensor:
    """Uploads a host side alone. It takes the array and not the value: a cycle would keep memory alive."""
    packed = runtime.upload([] if host is None else [host])
    return ReadyTensor.uploaded(packed.view(0), packed)


# Index spaces: to a type checker their types differ, at run time `unit` goes with them and public functions compare it.
# All are int64 vectors, and index 0 of each is padding.


class Handles(MirroredTensor):
    """Numbers of an index space with the generation of each: they name their owner, and go stale with it.

    Made by pools. The generations go wherever the rows go; padded rows are index 0, generation 0. Handles without
    generations have generation 0, which nothing live has.
    """

    __slots__ = ()

    @classmethod
    def of_pool(
        cls,
        runtime: Runtime,
        numbers: npt.NDArray[np.int64],
        generations: npt.NDArray[np.int64],
        *,
        pool_id: int,
        contract: Contract = Contract.EXACT,
        name: str = "",
        device: DeviceSide | None = None,
    ) -> Self:
        """For pools, and tools that rebuild state: takes over both arrays, int64[n]. `pool_id` is that of the pool.

        `device` is their device side.
        """
        handles, shape = cls.__new__(cls), numbers.shape  # as `_derived`
        MirroredTensor.__init__(
            handles, runtime, numbers, device, torch.int64, shape, contract, name, (), generations, pool_id
        )
        return handles

    @classmethod
    def of_core(cls, runtime: Runtime, handles: Requests, name: str) -> Self:
        """For pools: those that the core has made."""
        value = cls.__new__(cls)  # as `_derived`
        MirroredTensor.__init__(
            value, runtime, None, None, _NUMBERS, (handles.n,), _SAME, name, (), None, handles.pool, plain=handles
        )
        return value

    @property
    def generations(self) -> npt.NDArray[np.int64]:
        """The generation of each handle, int64[n], read-only."""
        generations: npt.NDArray[np.int64] = self._generations  # type: ignore[assignment]
        generations.setflags(write=False)  # here, since few handles are asked for them
        return generations

    @property
    def pool_id(self) -> int:
        """Id of the pool that made the handles; 0 when none did."""
        return self._pool_id

    def check_kept(self, operation: str) -> None:
        """Refuses, at `cheap`, handles of which a number has lost its owner; padded rows are nobody's.

        Raises:
            Violation: SLOT_STALE_HANDLE.
        """
        pool = pools.get(self._pool_id) if levels.cheap else None
        if pool is not None:
            pool.check_kept(self, operation)


pools: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""The pool of each id that handles carry: see `HandlePool`."""


class _Asking(Handles):
    """Handles that ask their pool whenever a side is read: what was made of them would name another's memory.

    Each read raises SLOT_STALE_HANDLE, at `cheap`, once a number has lost its owner.
    """

    __slots__ = ()

    def _check_fresh(self, side: str) -> None:
        self.check_kept(side)
        super()._check_fresh(side)


class Slots(Handles):
    """Rows of requests in every slot-indexed table. Made by `SlotPool.take`; padded rows are slot 0."""

    unit: ClassVar[str | None] = "slot"
    __slots__ = ()

    @property
    def requests(self) -> Requests:
        """The same for the core. For the library."""
        return self._plain or self._alone() or Requests(self._host_side(), self._gens, self._pool_id)

    @property
    def row_set(self) -> RowSet:
        """The requests of the rows, which slots name themselves. For the library."""
        if self._row_set is None:
            self._row_set = RowSet(0, (self._host_side(), self.generations), self._pool_id)
        return self._row_set


class Pages(_Asking):
    """KV pages. Made by `PagePool.pages_of` and by leases. Page 0 is padding.

    They are refused (SLOT_STALE_HANDLE, at `cheap`) wherever a side is read once a page has another owner, or none.
    """

    unit: ClassVar[str | None] = "page"
    __slots__ = ()


class Locations(_Asking):
    """Places of tokens in device KV memory, each with the generation of its page. Those of page 0 are padding.

    Refused as `Pages`.
    """

    unit: ClassVar[str | None] = "location"
    __slots__ = ()

    def keep(self, until: Fence, operation: str) -> None:
        """Keeps their pages from others before a fence, whoever lets go of them. For the library."""
        pool = pools.get(self._pool_id)
        if pool is not None:
            pool.keep(self, until, operation)


class NewLocations(Locations):
    """Places of tokens that may not be written or accepted yet: of an `Extension`, or of `PagePool.writing`.

    `Sender.send` refuses them.
    """

    __slots__ = ()


class HostLocations(_Asking):
    """Places of tokens in the host tier's KV memory, as `HiSparse.host_locations` has them. Place 0 is padding.

    Refused as `Pages`.
    """

    unit: ClassVar[str | None] = "host_location"
    __slots__ = ()


class StateRow(_Asking):
    """States of requests, as `HybridSlotPool.state_rows` makes them. State 0 is padding. Refused as `Pages`."""

    unit: ClassVar[str | None] = "state"
    __slots__ = ()


@functools.cache
def state_type(kind: str) -> type[StateRow]:
    """The type of states of one kind, which is their index space."""
    name = f"{kind.title()}Row"
    return StateRow if kind == StateRow.unit else type(name, (StateRow,), {"unit": kind, "__slots__": ()})


@functools.cache
def index_type(holds: str) -> type[MirroredTensor]:
    """The type of plain indices of a space, without generations: those of a column declared with `holds=`."""
    return type(f"{holds.title()}Indices", (MirroredTensor,), {"unit": holds, "__slots__": (), "__module__": __name__})
