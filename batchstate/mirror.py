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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import (
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
    as_array,
    carried,
    check_bound_can_move,
    check_dense,
    concatenate,
    converted,
    count,
    joined_rows,
    kept_rows,
    natural_dtype,
    negated,
    padding_row,
    replace_rows,
    row_indices,
    select_rows,
    shifted,
    signed_twin,
    sizes_of,
)
from batchstate._host_values import HostValues
from batchstate._origin import RowSet, joined
from batchstate.errors import (
    ArgumentError,
    ContractError,
    DeviceError,
    DtypeError,
    ShapeError,
    SideMissingError,
    another_runtime,
    one_of,
    wrong_shape,
)
from batchstate.runtime.base import OfThisProcess, Runtime
from batchstate.runtime.memory import NUMPY_DTYPES, ReadyTensor, host_dtype, numpy_dtype, torch_dtype
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


_STRENGTH = {Contract.DEVICE_ONLY: 0, Contract.UPPER_BOUND: 1, Contract.EXACT: 2, Contract.HOST_ONLY: 3}


def weaker_contract(first: Contract, second: Contract) -> Contract:
    """The contract of a value made of rows of both. `host_only` is the strongest: an upload makes the value exact."""
    return first if _STRENGTH[first] <= _STRENGTH[second] else second


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
        source = self._source
        if type(source) is ReadyTensor:
            ready = source
        else:
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

    def written(self) -> bool:
        """Whether torch has counted a write in place since the tensor was made."""
        existing = self.existing
        return existing is not None and self.write_count is not None and write_count(existing) != self.write_count

    def check_count(self, where: Where) -> None:
        """Checks torch's count of writes in place.

        Raises:
            Violation: MIRROR_FOREIGN_WRITE.
        """
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
    if tensor.dtype not in NUMPY_DTYPES:
        tensor = tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int16)
    return runtime.inspect(tensor)


def write_count(tensor: torch.Tensor) -> int | None:
    """Torch's count of writes in place to the tensor's memory; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


@final
@attrs.define(eq=False)
class StaleWindow:
    """A window in which one side of a value is knowingly old. Values derived inside share it: closing it frees all.

    Attributes:
        side: `host` or `device`.
        reason: shown in the report of a read.
        open: whether reading is refused.
    """

    side: str
    reason: str
    open: bool = True

    def __attrs_post_init__(self) -> None:
        if self.side not in ("host", "device"):
            raise ArgumentError(f"unknown side {self.side!r}", self.side, "use 'host' or 'device'")
        if not self.reason:
            raise ArgumentError("a stale window without a reason", self.reason, "say what makes it stale")


def stale_reasons(windows: tuple[StaleWindow, ...], side: str) -> tuple[str, ...]:
    """Why `side` may not be read now; empty when it may."""
    return tuple(window.reason for window in windows if window.open and window.side == side)


@final
class Rare:
    """State that few values have.

    Attributes:
        windows: stale windows, some of them closed by now.
        host_tensor: the host side as a tensor that was handed out.
        contents: of the host side when the value was made, for checks at `full`.
    """

    __slots__ = ("contents", "host_tensor", "windows")

    def __init__(self, windows: tuple[StaleWindow, ...] = (), contents: Array | None = None) -> None:
        self.windows = windows
        self.host_tensor: torch.Tensor | None = None
        self.contents = contents


class MirroredTensor(HostValues, OfThisProcess):
    """A vector (rows first, any trailing shape) whose host and device side are kept together.

    Make one with `from_host`, `from_device` or `from_pair`. Subclasses below carry an index space.

    Attributes:
        unit: index space of the values (`slot`, `page`, `location`, `host_location`), or None for plain numbers.
        runtime: the device it belongs to.
        contract: how the host side relates to the device side.
        dtype: of the elements.
        shape: rows first.
        name: for reports.
        version: a number that no other value of the runtime has; stamp derived metadata with it.
    """

    unit: ClassVar[str | None] = None
    _space: ClassVar[int] = 0  # of handles, a number for each index space

    __slots__ = (
        "__weakref__",
        "_exposed",
        "_generations",
        "_host",
        "_plain",
        "_pool_id",
        "_rare",
        "_row_set",
        "_side",
        "contract",
        "dtype",
        "name",
        "runtime",
        "shape",
        "version",
    )

    def __init__(
        self,
        runtime: Runtime,
        host: Array | None = None,
        device: DeviceSide | Callable[[], DeviceSide] | None = None,
        *,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        contract: Contract = Contract.EXACT,
        name: str = "",
        windows: tuple[StaleWindow, ...] = (),
        generations: Array | None = None,
        pool_id: int = 0,
        row_set: RowSet | None = None,
        exposed: "list[MirroredTensor] | None" = None,
    ) -> None:
        """For the library. `host` becomes the property of the value; without `device` it is uploaded at first use.

        `device` may be a function that makes the device side at its first use.
        `generations` int64[n] of slots move with the rows of the value; `pool_id` names the pool that made its indices.
        `row_set` is the requests that the rows belong to, if known.
        The value adds itself to `exposed` once its host side can be written from outside, or may be stale.
        """
        self.runtime = runtime
        self.dtype = dtype
        self.shape = shape
        self.contract = contract
        self.name = name
        self.version = runtime.new_version()
        self._host = host
        self._side = device
        if generations is None and self._space:
            generations = np.zeros(shape[0], dtype=np.int64)
        self._generations = generations
        self._pool_id = pool_id
        self._row_set = row_set
        self._rare: Rare | None = None
        self._exposed = exposed
        # Of handles with nothing but a host side of their own, which many requests have: pool and space.
        self._plain = 4 * pool_id + self._space if pool_id and device is None and contract is Contract.EXACT else 0
        if windows or levels.full:
            self._plain = 0
            self._rare = Rare(windows, None if host is None or not levels.full else host.copy())

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
            dtype: by default that of an array or tensor; int64, float32 or bool for lists. Indices are int64.
            contract: `exact`, or `host_only` for values whose upload belongs to the stream that uses them.
            name: for reports.

        Raises:
            DtypeError: values do not go into `dtype`, or torch and numpy do not share it.
            ValueOverflowError: a value lies outside the range of `dtype`.
            ShapeError: no rows (a scalar).
            ContractError: `upper_bound` and `device_only` values need a device side of their own.
            Violation: UNIT_MISMATCH: `values` is a mirrored value of another index space.
        """
        wanted = Contract(contract)
        if wanted not in (Contract.EXACT, Contract.HOST_ONLY):
            problem = f"{cls.__name__}.from_host cannot make a {wanted.value} value"
            raise ContractError(problem, wanted.value, "use `from_pair` for upper_bound, `from_device` for device_only")
        subject = name or cls.__name__
        if isinstance(values, MirroredTensor):
            if values.unit != cls.unit:
                invariants.unit_mismatch(str(cls.unit), str(values.unit), object=values, operation="from_host")
            values = values.exact_host(subject)
        chosen = natural_dtype(values, subject) if dtype is None else numpy_dtype(dtype)
        if cls.unit is not None and chosen != np.int64:
            if dtype is not None or chosen.kind not in "iu":
                raise DtypeError(f"{subject}: expected int64 {cls.unit}s, got {chosen}", chosen, "pass int64")
            chosen = np.dtype(np.int64)
        torch_dtype(chosen)
        host = converted(values, chosen, subject)
        if host.ndim == 0:
            raise ShapeError(f"{subject}: a scalar has no rows", values, "pass one row per request")
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
        value = cls(
            runtime,
            None,
            DeviceSide(ReadyTensor.made_now(tensor, runtime)),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            contract=Contract.DEVICE_ONLY,
            name=name,
        )
        if levels.full:
            value.check("from_device")
        return value

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
        wanted = Contract(contract)
        subject = name or cls.__name__
        if wanted not in (Contract.EXACT, Contract.UPPER_BOUND):
            problem = f"{subject}: expected exact or upper_bound for a pair, got {wanted.value}"
            raise ContractError(problem, wanted.value, "use `from_host` or `from_device`")
        _check_on_device(runtime, device, subject)
        array = converted(host, numpy_dtype(device.dtype), subject)
        if array.shape != tuple(device.shape):
            problem = f"{subject}: host side {list(array.shape)}, device side {list(device.shape)}"
            raise ShapeError(problem, array.shape, "pass two sides of one shape")
        value = cls(
            runtime,
            array,
            DeviceSide(ReadyTensor.made_now(device, runtime)),
            dtype=device.dtype,
            shape=array.shape,
            contract=wanted,
            name=name,
        )
        value.check("from_pair")
        return value

    # Sides

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def np(self) -> Array:
        """The host side as a read-only array.

        Raises:
            SideMissingError: a `device_only` value.
            Violation: MIRROR_STALE_READ inside a stale window of the host side.
        """
        self._check_fresh("host")
        view = self._host_side().view()
        view.setflags(write=False)  # half the time that `flags.writeable = False` takes
        return view

    @property
    def host(self) -> torch.Tensor:
        """The host side as a CPU tensor, to be read only. Raises what `np` raises."""
        self._check_fresh("host")
        rare = self._with_rare()
        if rare.host_tensor is None:
            rare.host_tensor = torch.from_numpy(self._host_side())
        return rare.host_tensor

    def _with_rare(self) -> Rare:
        """Its rare state, made now if there is none, for what a batch that has the value must know."""
        self._plain = 0
        self._rare = self._rare or Rare()
        if self._exposed is not None:
            self._exposed.append(self)
            self._exposed = None  # once is enough, and a list that its members know would be a cycle
        return self._rare

    @property
    def _windows(self) -> tuple[StaleWindow, ...]:
        return () if self._rare is None else self._rare.windows

    @property
    def device(self) -> torch.Tensor:
        """The device side, to be read only, safe to use on the current stream. Uploaded if it is not there yet.

        Raises:
            Violation: MIRROR_STALE_READ inside a stale window of the device side.
        """
        self._check_fresh("device")
        return self._own_device()

    @property
    def _device(self) -> DeviceSide:
        """The device side, made at its first use: many values are read on the host alone."""
        side = self._side
        if type(side) is not DeviceSide:
            made = DeviceSide(functools.partial(_uploaded, self.runtime, self._host)) if side is None else side()
            side = self._side = made
        return side

    def _existing(self) -> torch.Tensor | None:
        """The device side if it exists already; see `DeviceSide.existing`."""
        return self._side.existing if type(self._side) is DeviceSide else None

    def _own_device(self) -> torch.Tensor:
        self._plain = 0
        return self._device.tensor(self.runtime)

    @property
    def device_side(self) -> DeviceSide:
        """The device side, which may not exist yet. For the library: batches and relays take it over."""
        self._check_fresh("device")
        self._plain = 0
        return self._device

    @property
    def row_set(self) -> RowSet | None:
        """The requests that the rows belong to, if known. For the library."""
        return self._row_set

    def aligned(self, slots: "MirroredTensor") -> Array:
        """The host side with one row for each of `slots`, in their order: rows go by handle. Others are left out.

        Args:
            slots: handles, as `batch.slots`.

        Raises:
            ArgumentError: `slots` are not handles, or it is not known to which requests the rows belong.
            Violation: DERIVED_STALE: a request has no row here.
        """
        own, wanted = self.row_set, slots.row_set if slots.unit == "slot" else None
        if wanted is None or own is None:
            problem = f"{self._subject('aligned')}: expected rows of requests and handles, got {self!r} and {slots!r}"
            remedy = "pass the slots of a batch; columns and results of a relay know whose their rows are"
            raise ArgumentError(problem, slots, remedy)
        values, rows = self.np, own.rows_of(wanted, self.label, **self._where("aligned"))
        return values if rows is None else values[rows]

    def exact_numbers(self, subject: str) -> Array:
        """The host side as plain exact numbers: amounts, rows to keep, values of another column.

        Raises:
            ContractError: the host side is a bound, or there is none.
            Violation: UNIT_MISMATCH: indices; MIRROR_STALE_READ.
        """
        if self.unit is not None:
            invariants.unit_mismatch("plain numbers", self.unit, **self._where(subject))
        return self.exact_host(subject)

    def exact_host(self, subject: str) -> Array:
        """The host side if it is exact, of any index space. Raises what `exact_numbers` raises, but UNIT_MISMATCH."""
        if self.contract not in (Contract.EXACT, Contract.HOST_ONLY):
            raise ContractError(f"{subject}: {self!r} has no exact host side", self.contract.value, "resolve it first")
        if levels.full:
            self.check(subject)
        return self.np

    @property
    def open_windows(self) -> tuple[StaleWindow, ...]:
        """The stale windows that are open now; values derived from this one inherit them."""
        return () if self._rare is None else tuple(window for window in self._rare.windows if window.open)

    def _host_side(self) -> Array:
        if self._host is None:
            remedy = "call `resolve()`, which waits for the device, or plan with a bound"
            raise SideMissingError(f"{self!r} has no host side", self.contract.value, remedy)
        return self._host

    def _check_fresh(self, side: str) -> None:
        if self._rare is not None and self._rare.windows:
            invariants.mirror_stale_read(side, stale_reasons(self._rare.windows, side), **self._where("read"))

    @contextlib.contextmanager
    def stale(self, side: str, *, reason: str) -> Iterator[None]:
        """A window in which `side` (`host` or `device`) is knowingly old; reading it raises, in derived values too.

        Raises:
            ArgumentError: unknown side, or no reason given.
        """
        window, rare = StaleWindow(side, reason), self._with_rare()
        rare.windows = (*rare.windows, window)
        try:
            yield
        finally:
            window.open = False
            rare.windows = self.open_windows

    # Moving rows

    def filter(self, keep: "Selection") -> Self:
        """The rows that `keep` names, in its order.

        Args:
            keep: boolean mask bool[n], or unique row indices as list or array.

        Raises:
            ArgumentError: an index twice. Else as `take`.
        """
        return self._taken(kept_rows(keep, len(self), self._subject("filter")), "filter")

    def take(self, rows: "Selection") -> Self:
        """The rows at `rows` (int[k], which may repeat, or a mask bool[n]).

        Raises:
            ShapeError: a mask of another length.
            DtypeError: neither booleans nor integers.
            RowIndexError: an index outside the value; negative ones do not count from the end.
        """
        return self._taken(row_indices(rows, len(self), self._subject("take")), "take")

    def _taken(self, rows: Rows, operation: str) -> Self:
        self.check(operation)
        host = None if self._host is None else self._host[rows]
        device = self._device_if_needed()
        if device is not None:
            index = self.runtime.upload([rows]).view(0)
            device = self.runtime.launch(select_rows, device, index, reads=(device, index), name=operation)
        generations = None if self._generations is None else self._generations[rows]
        shape, row_set = (len(rows), *self.shape[1:]), self._rows_taken(rows)
        return self._derived(host, device, shape, operation, generations=generations, row_set=row_set)

    def _rows_taken(self, rows: Rows | slice) -> RowSet | None:
        """The requests of some rows; None for slots, whose rows name their requests."""
        return None if self._row_set is None or self._generations is not None else self._row_set.taken(rows)

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
        if not values:
            raise ArgumentError("cat of no values", values, "pass a list of at least one value")
        first = values[0]
        if first._plain and not levels.full and [value._plain for value in values].count(first._plain) == len(values):
            # Handles of one pool, with a host side alone: there is nothing to check or to weaken.
            indices = joined_rows([value._host for value in values])
            generations = joined_rows([value._generations for value in values])
            return first._derived(indices, None, indices.shape, "cat", generations=generations, row_set=None)
        for other in values[1:]:
            first._check_alike(other)
        pools = {value._pool_id for value in values if len(value)}
        if len(pools) > 1:
            problem = f"{first._subject('merge')}: {first.unit}s of pools {sorted(pools)}"
            raise ArgumentError(problem, sorted(pools), "keep one column for each pool")
        for value in values:
            value.check("cat")
        contract = functools.reduce(weaker_contract, [value.contract for value in values])
        host = device = None
        if contract is not Contract.DEVICE_ONLY:
            host = np.concatenate([value._host_side() for value in values])
        exist = any(value._existing() is not None for value in values)
        if exist or contract in (Contract.UPPER_BOUND, Contract.DEVICE_ONLY):
            first.runtime.refuse_capture("a merge")  # its kernel would not run now, and its result would be kept
            parts = [value._own_device() for value in values]
            device = first.runtime.launch(concatenate, parts, reads=parts, name="cat")
        windows = tuple(dict.fromkeys(window for value in values for window in value._windows))
        numbers = [value._generations for value in values if value._generations is not None]
        return first._derived(
            host,
            device,
            (sum(map(len, values)), *first.shape[1:]),
            "cat",
            contract=contract,
            windows=windows,
            generations=np.concatenate(numbers) if numbers else None,
            pool_id=max(pools, default=first._pool_id),
            row_set=None if numbers else joined([value._row_set for value in values]),
        )

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive pieces of the given sizes, which sum to the number of rows. No copy, no launch.

        The exception is a piece with less than half of the rows of a large value, which must not keep the whole alive.

        Raises:
            ArgumentError: a negative size, or a sum that differs.
        """
        self.check("split")
        pieces, start = [], 0
        lengths, whole = sizes_of(sizes, len(self), self._subject("split")), self._device_if_needed()
        for size in lengths:
            rows = slice(start, start + size)
            host = None if self._host is None else self._host[rows]
            device = None if whole is None else whole[rows]
            generations = None if self._generations is None else self._generations[rows]
            if len(self) >= LARGE and 2 * size < len(self):
                host = None if host is None else host.copy()
                generations = None if generations is None else generations.copy()
                if device is not None and self.contract in (Contract.EXACT, Contract.HOST_ONLY):
                    device = None  # uploaded anew where it is used
                elif device is not None:
                    device = self.runtime.launch(torch.clone, device, reads=(device,), name="split")
            shape, row_set = (size, *self.shape[1:]), self._rows_taken(rows)
            pieces.append(self._derived(host, device, shape, "split", generations=generations, row_set=row_set))
            start += size
        return pieces

    def pad(self, to: SupportsIndex, value: object = None) -> Self:
        """The same rows, then rows of `value` (one number or one row; zero by default) up to `to` rows.

        Raises:
            ArgumentError: `to` is less than the number of rows, or a non-zero pad for indices (slot 0 is the padding).
            ShapeError, DtypeError, ValueOverflowError: `value` does not go into a row.
        """
        self.check("pad")
        subject = self._subject("pad")
        rows = count(to, f"{subject}: rows", least=len(self), most=MOST_ROWS)
        fill = padding_row(value, *host_dtype(self.dtype), subject)
        if fill.ndim and fill.shape != self.shape[1:]:
            raise ShapeError(f"{subject}: a pad of {list(fill.shape)}", fill.shape, "pass one number or one row")
        if self.unit is not None and fill.any():
            raise ArgumentError(f"{subject}: padding {self.unit}s with {value}", value, "pad indices with 0")
        padding = np.broadcast_to(fill, (rows - len(self), *self.shape[1:]))
        host = None if self._host is None else np.concatenate([self._host, padding])
        device = self._device_if_needed()
        if device is not None:
            tail = self.runtime.upload([padding]).view(0)
            device = self.runtime.launch(concatenate, [device, tail], reads=(device, tail), name="pad")
        generations = None
        if self._generations is not None:
            generations = np.concatenate([self._generations, np.zeros(rows - len(self), np.int64)])
        shape = (rows, *self.shape[1:])
        result = self._derived(host, device, shape, "pad", generations=generations, row_set=self._row_set)
        if levels.cheap and host is not None:
            invariants.tail_stale(host[len(self) :], fill, len(self), **self._where("pad"))
        return result

    def update(self, rows: "Selection", values: "Values") -> Self:
        """The same value with other values in some rows, on both sides.

        Args:
            rows: unique row indices int[k], or a mask bool[n].
            values: a number, or k rows.

        Raises:
            ValueOverflowError: a value outside the range of the dtype. Else as `filter`.
        """
        self.check("update")
        subject = self._subject("update")
        index = kept_rows(rows, len(self), subject)
        numbers: object = values
        if isinstance(values, MirroredTensor):
            self._check_alike(values, "update")
            if values._generations is not None and values._pool_id != self._pool_id and len(values):
                problem = f"{subject}: {self.unit}s of pool {values._pool_id} into those of pool {self._pool_id}"
                raise ArgumentError(problem, values._pool_id, "keep one column for each pool")
            numbers = values.exact_host(subject)
        if self._generations is not None and type(values) is not type(self):
            problem = f"{subject}: {self.unit}s are replaced by {self.unit}s of a pool, not by numbers"
            raise DtypeError(problem, values, "pass what `pool.take` returned")
        new = carried(numbers, *host_dtype(self.dtype), subject)
        shape = (len(index), *self.shape[1:])
        if new.ndim and new.shape != shape:
            raise wrong_shape(subject, shape, new.shape, "pass one row of values for each row, or one for all")
        new = np.broadcast_to(new, shape)
        host = None
        if self._host is not None:
            host = self._host.copy()
            host[index] = new
        device = self._device_if_needed()
        if device is not None:
            packed = self.runtime.upload([index, new])
            operands = device, packed.view(0), packed.view(1)
            device = self.runtime.launch(replace_rows, *operands, reads=operands, name="update", operations=2)
        generations: Any = None
        row_set = self._row_set
        if self._generations is not None and isinstance(values, MirroredTensor):
            generations, row_set = self._generations.copy(), None
            generations[index] = values._generations
        return self._derived(host, device, self.shape, "update", generations=generations, row_set=row_set)

    # Arithmetic

    def __add__(self, n: "Amount") -> Self:
        return self._added(n, 1)

    __radd__ = __add__

    def __sub__(self, n: "Amount") -> Self:
        return self._added(n, -1)

    def _added(self, n: object, sign: int) -> Self:
        operation = "+ n" if sign > 0 else "- n"
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
        if sign < 0:
            amount = negated(amount, subject)
        if self.contract is Contract.UPPER_BOUND:
            check_bound_can_move(self._host_side(), amount, subject)
        host = None if self._host is None else shifted(self._host, across(amount, len(self.shape)), subject)
        device = self._device_if_needed()
        if device is not None:
            self.runtime.refuse_capture(f"`{operation}`")  # its kernel would not run now, and its result would be kept
            delta: torch.Tensor | int = int(amount) if amount.ndim == 0 else 0
            if amount.ndim:
                shaped = across(amount, len(self.shape)).astype(numpy_dtype(signed_twin(self.dtype)))
                delta = self.runtime.upload([shaped]).view(0)
            device = self.runtime.launch(add, device, delta, reads=(device,), name=operation)
        return self._derived(host, device, self.shape, operation, row_set=self._row_set)

    # Contracts

    def weaken(self, contract: str | Contract) -> Self:
        """The same value under a contract that promises less: a bound before speculation, say.

        Raises:
            ContractError: `contract` promises more than the present one; only `resolve` strengthens.
        """
        wanted = Contract(contract)
        if wanted is Contract.UPPER_BOUND and self.unit is not None:
            problem = f"{self!r} holds {self.unit}s, which have no bound"
            raise ContractError(problem, wanted.value, "bounds are for lengths and counts")
        if weaker_contract(wanted, self.contract) is not wanted or wanted is Contract.HOST_ONLY:
            problem = f"{self!r}: the contract {self.contract.value!r} cannot become {wanted.value!r}"
            remedy = "only `resolve()` strengthens a contract, and it waits for the device"
            raise ContractError(problem, wanted.value, remedy)
        if levels.full:
            self.check("weaken")
        host = None if wanted is Contract.DEVICE_ONLY else self._host
        device = self._own_device() if wanted is not Contract.EXACT else self._device_if_needed()
        return self._derived(host, device, self.shape, "weaken", contract=wanted, row_set=self._row_set)

    def tighten(self, bound: object) -> Self:
        """The same bounded value with lower bounds on the host. Its device side is not touched.

        Args:
            bound: numbers of the value's shape, none above the present bounds: those that results of earlier steps
                prove. Rows of a mirrored value go by handle, if both values know the requests of their rows.

        Raises:
            ContractError: the value is not a bound.
            ShapeError, DtypeError, ValueOverflowError: `bound` does not go with the value.
            ArgumentError: a bound that rises; `+ n` moves both sides.
            Violation: DERIVED_STALE: `bound` has no row for a request; MIRROR_BOUND, at `full`, if the device side is
                there already: it holds more.
        """
        subject = self._subject("tighten")
        if self.contract is not Contract.UPPER_BOUND:
            problem = f"{subject}: expected a bound, got {self!r}"
            raise ContractError(problem, self.contract.value, "use `update`, which changes exact values on both sides")
        if levels.full:
            self.check("tighten")
        host = converted(lined_up(bound, self.row_set, subject), numpy_dtype(self.dtype), subject)
        if host.shape != self.shape:
            raise wrong_shape(subject, self.shape, host.shape, "pass one bound for each value")
        higher = np.argwhere(~(host <= self.np))  # of any trailing shape, and of no rows too
        if higher.size:
            problem = f"{subject}: the bound of row {higher[0][0]} would rise"
            raise ArgumentError(problem, int(higher[0][0]), "pass bounds that are at most the present ones")
        value = self._derived(host, self._device, self.shape, "tighten", row_set=self._row_set)
        if not levels.full:
            value.check("tighten")
        return value

    def resolve(self) -> Self:
        """The same value as `exact`, its host side read back from the device. Waits: one forced sync."""
        self.check("resolve")
        if self.contract in (Contract.EXACT, Contract.HOST_ONLY):
            return self
        device = self._device.tensor(self.runtime)
        if self.dtype not in NUMPY_DTYPES:
            raise DtypeError(f"{self!r}: numpy has no {self.dtype}", self.dtype, "convert it on the device")
        host, row_set = self.runtime.read_back(device), self._row_set
        return self._derived(host, device, self.shape, "resolve", contract=Contract.EXACT, row_set=row_set)

    def __repr__(self) -> str:
        values = "" if self._host is None else f": {_shown(self._host)}"
        return f"{self.label}{values}"

    @property
    def label(self) -> str:
        """Type, name, dtype and shape: the value in a report."""
        kind = NUMPY_DTYPES[self.dtype].name if self.dtype in NUMPY_DTYPES else str(self.dtype)
        label = f" {self.name!r}" if self.name else ""
        return f"{type(self).__name__}{label} {kind}{list(self.shape)} {self.contract.value} on {self.runtime.device}"

    # Checks

    def check(self, operation: str = "check") -> None:
        """Checks every invariant of this value that applies at the present level.

        `cheap` compares torch's counts of writes in place; `full` also compares each side with its first contents, the
        two sides, and their memory.

        Raises:
            Violation: MIRROR_FOREIGN_WRITE, MIRROR_ALIASED, MIRROR_EQUAL, MIRROR_BOUND.
        """
        if not levels.cheap:
            return
        where = self._where(operation)
        if levels.full:
            self._check_fully(where)  # first: it says which row
        if type(self._side) is DeviceSide:
            self._side.check_count(where)
        tensor = None if self._rare is None else self._rare.host_tensor
        if tensor is not None and not tensor.is_inference():
            invariants.mirror_foreign_write("host", 0, tensor._version, **where)

    def _check_fully(self, where: Where) -> None:
        host, device = self._host, self._existing()
        if host is not None and self._rare is not None and self._rare.contents is not None:
            invariants.mirror_foreign_write("host", self._rare.contents, host, **where)
        if device is None or self.open_windows or self.runtime.checks_suspended():
            return  # nothing to compare with, or knowingly different
        if host is not None and device.device.type == "cpu":
            start = host.__array_interface__["data"][0]
            invariants.mirror_aliased(
                (start, start + host.nbytes), (device.data_ptr(), device.data_ptr() + device.nbytes), **where
            )
        before, now = self._device.rows(self.runtime)
        exact = host is not None and self.contract is not Contract.UPPER_BOUND
        if not exact or self._device.written():
            invariants.mirror_foreign_write("device", host if exact and host is not None else before, now, **where)
        if host is not None:
            invariant = invariants.mirror_equal if exact else invariants.mirror_bound
            invariant(host, now, **where)

    # Helpers

    def _device_if_needed(self) -> torch.Tensor | None:
        """The device side, safe on the current stream, if it exists or cannot be made of the host side; else None."""
        of_its_own = self.contract in (Contract.UPPER_BOUND, Contract.DEVICE_ONLY)  # such as a batch gathers late
        return self._device.tensor(self.runtime) if of_its_own or self._existing() is not None else None

    def _derived(
        self,
        host: Array | None,
        device: torch.Tensor | DeviceSide | None,
        shape: tuple[int, ...],
        operation: str,
        *,
        row_set: RowSet | None,
        contract: Contract | None = None,
        windows: tuple[StaleWindow, ...] | None = None,
        generations: Array | None = None,
        pool_id: int | None = None,
    ) -> Self:
        if isinstance(device, torch.Tensor):
            device = DeviceSide(ReadyTensor.made_now(device, self.runtime))
        value = type(self).__new__(type(self))  # a call of the class packs its keywords twice: 0.2 of 0.6 us
        MirroredTensor.__init__(
            value,
            self.runtime,
            host,
            device,
            dtype=self.dtype,
            shape=shape,
            contract=self.contract if contract is None else contract,
            name=self.name,
            windows=self._windows if windows is None else windows,
            generations=self._generations if generations is None else generations,
            pool_id=self._pool_id if pool_id is None else pool_id,
            row_set=row_set,
        )
        if levels.full:
            value.check(operation)
        return value

    def _subject(self, operation: str) -> str:
        return f"{self.name or type(self).__name__}: {operation}"

    def _where(self, operation: str) -> Where:
        return {"object": self, "operation": operation, "column": self.name, "step": self.runtime.step}

    def _check_alike(self, other: "MirroredTensor", operation: str = "merge") -> None:
        subject = self._subject(operation)
        if self.unit != other.unit:
            invariants.unit_mismatch(str(self.unit), str(other.unit), **self._where(operation))
        if self.runtime is not other.runtime:
            raise another_runtime(subject, other)
        if self.dtype != other.dtype:
            raise DtypeError(f"{subject}: expected {self.dtype}, got {other.dtype}", other.dtype, "convert one first")
        if self.shape[1:] != other.shape[1:]:
            raise wrong_shape(f"{subject}: rows", self.shape[1:], other.shape[1:], "pass rows of one shape")


def lined_up(values: object, wanted: RowSet | None, subject: str) -> object:
    """Exact numbers in the order of the requests `wanted`; unchanged if the requests of `values` are not known.

    Raises:
        Violation: DERIVED_STALE: a request has no row among the values.
    """
    if not isinstance(values, MirroredTensor) or wanted is None or values.row_set is None:
        return values
    numbers = values.exact_numbers(subject)
    rows = values.row_set.rows_of(wanted, values.label, operation=subject, step=values.runtime.step)
    return numbers if rows is None else numbers[rows]


def numbers_of(values: object, slots: MirroredTensor, wanted: RowSet, subject: str) -> Array:
    """Exact numbers of the requests `slots`, row by row, in the order of the requests `wanted`.

    Raises:
        ShapeError: not one row for each of `slots`.
        ArgumentError: `slots` are not handles.
        Violation: DERIVED_STALE: a request of `wanted` is not among `slots`.
    """
    handles = slots.row_set if slots.unit == "slot" else None
    if handles is None:
        raise ArgumentError(f"{subject}: slots are {slots!r}", slots, "pass handles, as `batch.slots`")
    numbers = as_array(lined_up(values, handles, subject), subject)
    if numbers.shape[:1] != (len(slots),):
        raise wrong_shape(subject, (len(slots), *numbers.shape[1:]), numbers.shape, "pass one row for each slot")
    rows = handles.rows_of(wanted, subject, operation=subject, step=slots.runtime.step)
    return numbers if rows is None else numbers[rows]


def _check_on_device(runtime: Runtime, tensor: torch.Tensor, subject: str) -> None:
    if tensor.device != runtime.device:
        problem = f"{subject}: a tensor on {tensor.device}, runtime on {runtime.device}"
        raise DeviceError(problem, str(tensor.device), "pass a tensor of the runtime's device")
    check_dense(tensor, subject)
    if tensor.ndim == 0:
        raise ShapeError(f"{subject}: a scalar has no rows", tuple(tensor.shape), "pass one row per request")


def _uploaded(runtime: Runtime, host: Array | None) -> ReadyTensor:
    """Uploads a host side alone. It takes the array and not the value: a cycle would keep memory alive."""
    packed = runtime.upload([] if host is None else [host])
    return ReadyTensor.uploaded(packed.view(0), packed)


def _shown(values: Array) -> str:
    """The values as a line of text; of many, the first and the last."""
    text = np.array2string(values, separator=", ", threshold=8, edgeitems=3, max_line_width=10_000)
    return " ".join(text.split()).replace("[ ", "[")


# Index spaces: to a type checker their types differ, at run time `unit` goes with them and public functions compare it.
# All are int64 vectors, and index 0 of each is padding.


class Handles(MirroredTensor):
    """Numbers of an index space with the generation of each: they name their owner, and go stale with it.

    Pools make them. The generations go wherever the rows go; padded rows are index 0, generation 0. Handles without
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
        """For pools: takes over both arrays, int64[n]. `pool_id` is that of the pool, `device` their device side."""
        handles = cls.__new__(cls)  # as `_derived`
        MirroredTensor.__init__(
            handles,
            runtime,
            numbers,
            device,
            dtype=torch.int64,
            shape=numbers.shape,
            contract=contract,
            name=name,
            generations=generations,
            pool_id=pool_id,
        )
        return handles

    @classmethod
    def from_host(
        cls,
        runtime: Runtime,
        values: object,
        *,
        dtype: torch.dtype | None = None,
        contract: str | Contract = Contract.EXACT,
        name: str = "",
        generations: object = None,
        pool_id: int = 0,
    ) -> Self:
        """Handles from numbers, for tools that rebuild state. `generations` int64[n] defaults to 0: nothing live's.

        Raises:
            ShapeError: not one generation per number. Else as `MirroredTensor.from_host`.
        """
        plain = super().from_host(runtime, values, dtype=dtype, contract=contract, name=name or cls.__name__)
        numbers = plain.np.copy()
        own = converted(
            plain.generations if generations is None else generations, np.dtype(np.int64), "generations"
        ).copy()
        if own.shape != numbers.shape or numbers.ndim != 1:
            raise wrong_shape("generations", (numbers.size,), own.shape, f"pass one generation for each {cls.unit}")
        return cls.of_pool(runtime, numbers, own, pool_id=pool_id, contract=plain.contract, name=name)

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


class Slots(Handles):
    """Rows of requests in every slot-indexed table. Made by `SlotPool.take`; padded rows are slot 0."""

    unit: ClassVar[str | None] = "slot"
    _space: ClassVar[int] = 1
    __slots__ = ()

    @property
    def row_set(self) -> RowSet:
        """The requests of the rows, which slots name themselves. For the library."""
        if self._row_set is None:
            self._row_set = RowSet(0, (self._host_side(), self.generations), self._pool_id)
        return self._row_set


class Pages(Handles):
    """KV pages. Made by `PagePool.pages_of` and by leases. Page 0 is padding."""

    unit: ClassVar[str | None] = "page"
    _space: ClassVar[int] = 2
    __slots__ = ()


class Locations(Handles):
    """Places of tokens in device KV memory, each with the generation of its page. Those of page 0 are padding."""

    unit: ClassVar[str | None] = "location"
    _space: ClassVar[int] = 3
    __slots__ = ()


@functools.cache
def index_type(holds: str) -> type[MirroredTensor]:
    """The type of plain indices of one space, without generations: those of a column that was declared with `holds=`.

    Args:
        holds: `page`, `location`, `host_location`, `state`, or an index space of the engine's own.
    """
    return type(f"{holds.title()}Indices", (MirroredTensor,), {"unit": holds, "__slots__": (), "__module__": __name__})


class HostLocations(MirroredTensor):
    """Places of tokens in the host tier's KV memory. Place 0 is padding."""

    unit: ClassVar[str | None] = "host_location"
    __slots__ = ()
