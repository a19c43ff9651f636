"""What a mirrored value is: two sides, a contract between them, and the laws that judge both.

What can be done with one is `batchstate.mirror`.
"""

import contextlib
import functools
import zlib
from collections.abc import Iterator
from typing import ClassVar, NoReturn, Self

import numpy as np
import torch

from batchstate import invariants, levels
from batchstate.contracts import Contract, parse_contract, weaker_or_equal
from batchstate.errors import ArgumentError, ContractError, DeviceError, DtypeError, ShapeError, SideMissingError
from batchstate.runtime import NUMPY_DTYPES, Runtime, numpy_dtype
from batchstate.values.device_side import DeviceSide, Made, version_mark
from batchstate.values.host_arrays import Array, converted
from batchstate.values.host_numbers import HostNumbers
from batchstate.values.stale import StaleWindow, reasons
from batchstate.violations import Where


class TwoSides(HostNumbers):
    """A host side and a device side, either of which may not be there yet.

    Attributes:
        unit: index space of the values (`slot`, `page`, `token`, `host_token`), or None for plain numbers.
        runtime: the device it belongs to.
        contract: how the host side relates to the device side.
        dtype: of the elements.
        shape: rows first.
        name: for reports.
        version: a number that no other value of the runtime has; stamp derived metadata with it.
    """

    unit: ClassVar[str | None] = None

    __slots__ = (
        "__weakref__",
        "_checksum",
        "_device",
        "_host",
        "_host_tensor",
        "_origin",
        "_tags",
        "_watchers",
        "_windows",
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
        host: Array | None,
        device: DeviceSide | None,
        *,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        contract: Contract,
        name: str = "",
        windows: tuple[StaleWindow, ...] = (),
        tags: tuple[Array, ...] = (),
        origin: int = 0,
        watchers: "list[TwoSides] | None" = None,
    ) -> None:
        """For the library. `host` becomes the property of the value; without `device` it is uploaded at first use.

        `tags` are host arrays whose rows go wherever the rows of the value go, `origin` the pool that made its indices.
        The value adds itself to `watchers` once its host side can be written by others, or may be old.
        """
        self.runtime = runtime
        self.dtype = dtype
        self.shape = shape
        self.contract = contract
        self.name = name
        self.version = runtime.new_version()
        self._host = host
        self._host_tensor: torch.Tensor | None = None
        self._device = DeviceSide(functools.partial(_uploaded, runtime, host)) if device is None else device
        self._windows = windows
        self._tags = tags
        self._origin = origin
        self._watchers = watchers
        self._checksum = _checksum(host) if levels.full and host is not None else None

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
        view.flags.writeable = False
        return view

    @property
    def host(self) -> torch.Tensor:
        """The host side as a CPU tensor, to be read only. Raises what `np` raises."""
        self._check_fresh("host")
        if self._host_tensor is None:
            self._host_tensor = torch.from_numpy(self._host_side())
            self._be_watched()
        return self._host_tensor

    def _be_watched(self) -> None:
        if self._watchers is not None:
            self._watchers.append(self)
            self._watchers = None  # once is enough, and a list that its members know would be a cycle

    @property
    def device(self) -> torch.Tensor:
        """The device side, to be read only, safe to use on the current stream. Uploaded if it is not there yet.

        Raises:
            Violation: MIRROR_STALE_READ inside a stale window of the device side.
        """
        self._check_fresh("device")
        return self._device.tensor(self.runtime)

    @property
    def device_side(self) -> DeviceSide:
        """The device side as it may not exist yet. For the library: batches and relays take it over as it is."""
        self._check_fresh("device")
        return self._device

    def exact_numbers(self, what: str) -> Array:
        """The host side, for whoever takes plain numbers as exact: amounts, rows to keep, values of another column.

        Raises:
            ContractError: the host side is a bound, or there is none.
            Violation: UNIT_MISMATCH: indices; MIRROR_STALE_READ.
        """
        if self.unit is not None:
            invariants.unit_mismatch("plain numbers", self.unit, **self._where(what))
        return self.exact_host(what)

    def exact_host(self, what: str) -> Array:
        """The host side if it is exact, whatever its unit. Raises what `exact_numbers` raises, but UNIT_MISMATCH."""
        if self.contract not in (Contract.EXACT, Contract.HOST_ONLY):
            raise ContractError(
                f"{what}: {self!r} has no exact host side", value=self.contract.value, remedy="resolve it first"
            )
        return self.np

    @property
    def open_windows(self) -> tuple[StaleWindow, ...]:
        """The stale windows that are open now; what is derived from the value inherits them."""
        return tuple(window for window in self._windows if window.open) if self._windows else ()

    def _host_side(self) -> Array:
        if self._host is None:
            raise SideMissingError(
                f"{self!r} has no host side",
                value=self.contract.value,
                remedy="call `resolve()`, which waits for the device, or plan with a bound",
            )
        return self._host

    def _check_fresh(self, side: str) -> None:
        if self._windows:
            invariants.mirror_stale_read(side, reasons(self._windows, side), **self._where("read"))

    @contextlib.contextmanager
    def stale(self, side: str, *, reason: str) -> Iterator[None]:
        """A window in which `side` (`host` or `device`) is knowingly old; reading it raises, in derived values too.

        Raises:
            ArgumentError: unknown side, or no reason given.
        """
        window = StaleWindow(side, reason)
        self._windows = (*self._windows, window)
        self._be_watched()
        try:
            yield
        finally:
            window.open = False
            self._windows = tuple(one for one in self._windows if one.open)

    # Contracts

    def weaken(self, contract: str | Contract) -> Self:
        """The same value under a contract that promises less: a bound before speculation, say.

        Raises:
            ContractError: `contract` promises more than the present one; only `resolve` strengthens.
        """
        wanted = parse_contract(contract)
        if wanted is Contract.UPPER_BOUND and self.unit is not None:
            raise ContractError(
                f"{self!r} holds {self.unit}s, of which there is no bound",
                value=wanted.value,
                remedy="bounds are for lengths and counts",
            )
        if not weaker_or_equal(wanted, self.contract) or wanted is Contract.HOST_ONLY:
            raise ContractError(
                f"{self!r} is {self.contract.value} and does not become {wanted.value}",
                value=wanted.value,
                remedy="only `resolve()` strengthens a contract, and it waits for the device",
            )
        host = None if wanted is Contract.DEVICE_ONLY else self._host
        device = self._device.tensor(self.runtime) if wanted is not Contract.EXACT else self._made_device()
        return self._derived(host, device, self.shape, "weaken", contract=wanted)

    def tighten(self, bound: object) -> Self:
        """The same bounded value with lower bounds on the host. Its device side is not touched.

        Args:
            bound: numbers of the value's shape, none above the present bounds: what results of earlier steps prove.

        Raises:
            ContractError: a value that is no bound.
            ShapeError, DtypeError, ValueOverflowError: `bound` does not go with the value.
            ArgumentError: a bound that rises; `+ n` moves both sides.
            Violation: MIRROR_BOUND, at `full`, if the device side is there already: it holds more.
        """
        what = f"{self.name or type(self).__name__}: tighten"
        if self.contract is not Contract.UPPER_BOUND:
            raise ContractError(
                f"{what}: {self!r} is {self.contract.value}",
                value=self.contract.value,
                remedy="only a bound can be tightened; `update` changes exact values on both sides",
            )
        host = converted(bound, numpy_dtype(self.dtype), what)
        if host.shape != self.shape:
            raise ShapeError(f"{what}: {list(host.shape)} for {list(self.shape)}", value=host.shape, remedy="one each")
        higher = np.argwhere(~(host <= self.np))  # of any trailing shape, and of no rows too
        if higher.size:
            raise ArgumentError(
                f"{what}: the bound of row {higher[0][0]} would rise",
                value=int(higher[0][0]),
                remedy="pass bounds that are at most the present ones",
            )
        value = type(self)(
            self.runtime,
            host,
            self._device,
            dtype=self.dtype,
            shape=self.shape,
            contract=self.contract,
            name=self.name,
            windows=self._windows,
            tags=self._tags,
            origin=self._origin,
        )
        value.check("tighten")
        return value

    def resolve(self) -> Self:
        """The same value as `exact`, its host side read back from the device. Waits: one forced sync."""
        self.check("resolve")
        if self.contract in (Contract.EXACT, Contract.HOST_ONLY):
            return self
        device = self._device.tensor(self.runtime)
        if self.dtype not in NUMPY_DTYPES:
            raise DtypeError(
                f"{self!r}: numpy has no {self.dtype}", value=self.dtype, remedy="convert it on the device"
            )
        return self._derived(self.runtime.read_back(device), device, self.shape, "resolve", contract=Contract.EXACT)

    def __copy__(self) -> Self:
        return self  # immutable

    def __deepcopy__(self, memo: object) -> Self:
        return self  # immutable, and of this runtime

    def __reduce__(self) -> NoReturn:
        raise DeviceError(
            f"{self!r} cannot be pickled: it belongs to a runtime of this process",
            value=self.name,
            remedy="send `.np`, and make a value from it on the other side",
        )

    def __repr__(self) -> str:
        kind = numpy_dtype(self.dtype).name if self.dtype in NUMPY_DTYPES else str(self.dtype)
        label = f" {self.name!r}" if self.name else ""
        return f"{type(self).__name__}{label} {kind}{list(self.shape)} {self.contract.value} on {self.runtime.device}"

    # Checks

    def check(self, operation: str = "check") -> None:
        """Judges this value by every law that applies at the level in force.

        `cheap` compares torch's version counters; `full` also compares the two sides, their memory, and a checksum.

        Raises:
            Violation: MIRROR_FOREIGN_WRITE, MIRROR_ALIASED, MIRROR_EQUAL, MIRROR_BOUND.
        """
        if not levels.cheap:
            return
        device, mark = self._device.made, self._device.mark
        if device is not None and mark is not None:
            invariants.mirror_foreign_write("device", mark, version_mark(device) or 0, **self._where(operation))
        if self._host_tensor is not None and not self._host_tensor.is_inference():
            invariants.mirror_foreign_write("host", 0, self._host_tensor._version, **self._where(operation))
        if levels.full and not self.runtime.checks_stand_aside():
            self._check_fully(device, self._where(operation))

    def _check_fully(self, device: torch.Tensor | None, where: Where) -> None:
        if self._host is None:
            return
        if self._checksum is not None:
            invariants.mirror_foreign_write("host", self._checksum, _checksum(self._host), **where)
        if device is None or self.open_windows:
            return  # nothing to compare with, or declared not to agree
        if device.device.type == "cpu":
            start = self._host.__array_interface__["data"][0]
            invariants.mirror_aliased(
                (start, start + self._host.nbytes), (device.data_ptr(), device.data_ptr() + device.nbytes), **where
            )
        law = invariants.mirror_bound if self.contract is Contract.UPPER_BOUND else invariants.mirror_equal
        law(self._host, self.runtime.inspect(self._device.tensor(self.runtime)), **where)

    # Helpers

    def _made_device(self) -> torch.Tensor | None:
        """The device side, safe on the current stream, if it exists already or the host side could not make it."""
        of_its_own = self.contract in (Contract.UPPER_BOUND, Contract.DEVICE_ONLY)  # such as a batch gathers late
        return self._device.tensor(self.runtime) if of_its_own or self._device.made is not None else None

    def _derived(
        self,
        host: Array | None,
        device: torch.Tensor | None,
        shape: tuple[int, ...],
        operation: str,
        *,
        contract: Contract | None = None,
        windows: tuple[StaleWindow, ...] | None = None,
        tags: tuple[Array, ...] | None = None,
        origin: int | None = None,
    ) -> Self:
        value = type(self)(
            self.runtime,
            host,
            None if device is None else DeviceSide.of(device, self.runtime),
            dtype=self.dtype,
            shape=shape,
            contract=self.contract if contract is None else contract,
            name=self.name,
            windows=self._windows if windows is None else windows,
            tags=self._tags if tags is None else tags,
            origin=self._origin if origin is None else origin,
        )
        if levels.full:
            value.check(operation)
        return value

    def _what(self, operation: str) -> str:
        return f"{self.name or type(self).__name__}: {operation}"

    def _where(self, operation: str) -> Where:
        return {"object": self, "operation": operation, "column": self.name, "step": self.runtime.step}


def _uploaded(runtime: Runtime, host: Array | None) -> Made:
    """Uploads a host side alone. It knows the array and not the value: a cycle would keep memory alive."""
    packed = runtime.upload([] if host is None else [host])
    return Made(packed.view(0), packed.stream, packed.ready, packed.handed)


def _checksum(values: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(values).tobytes())
