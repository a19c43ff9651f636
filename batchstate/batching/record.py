"""What a batch is: declared columns and packed rows.

The laws that judge one are `batchstate.batching.judged`, how it goes to the device is `batchstate.batching.sending`,
and what else can be done with it `batchstate.batch`.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, Self

from batchstate.batching.declaration import declared_columns
from batchstate.batching.device_rows import DeviceRows
from batchstate.batching.host_rows import GENERATION_SUFFIX, HostRows, Layout
from batchstate.batching.moving import Parts
from batchstate.batching.upload import BatchDevice
from batchstate.columns import Column, MirroredColumn, SlotColumn, TensorColumn
from batchstate.contracts import Contract
from batchstate.errors import DeclarationError, DeviceError
from batchstate.mirror import MirroredTensor
from batchstate.runtime import Runtime
from batchstate.values.device_side import DeviceSide
from batchstate.values.host_arrays import Array
from batchstate.values.sides import TwoSides
from batchstate.values.stale import StaleWindow
from batchstate.violations import Where

Windows = Mapping[str, tuple[StaleWindow, ...]]

NO_WINDOWS: Windows = MappingProxyType({})


class BatchType(type):
    """Makes batch classes without a `__dict__`: an attribute that is no column cannot be carried beside a batch."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> "BatchType":
        """The class, its instances without room for more."""
        namespace.setdefault("__slots__", ())
        return super().__new__(cls, name, bases, namespace, **kwargs)


class BatchRecord(metaclass=BatchType):
    """The state of a declared batch.

    Attributes:
        runtime: the device.
        num_reqs: requests; `len(batch)` too.
        num_rows: rows of each column, `num_reqs` and padding.
        version: a number that no other value of the runtime has; stamp derived metadata with it.
    """

    __slots__ = (
        "__weakref__",
        "_carried",
        "_crossing",
        "_objects",
        "_pool",
        "_rows",
        "_values",
        "_watched",
        "_windows",
        "num_reqs",
        "num_rows",
        "runtime",
        "version",
    )

    _columns: ClassVar[Mapping[str, Column]] = {}
    _layout: ClassVar[Layout] = Layout.of([])
    _slot_column: ClassVar[str | None] = None
    _tensor_columns: ClassVar[tuple[str, ...]] = ()
    _reserved: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        declared = declared_columns(cls, cls._reserved)
        cls._columns = declared
        cls._layout = Layout.of([one for one in declared.values() if isinstance(one, MirroredColumn)])
        cls._tensor_columns = tuple(name for name, one in declared.items() if isinstance(one, TensorColumn))
        cls._slot_column = next((name for name, one in declared.items() if isinstance(one, SlotColumn)), None)

    def __init__(
        self,
        runtime: Runtime,
        rows: HostRows,
        device_rows: Mapping[str, DeviceRows],
        objects: Mapping[str, Array],
        num_reqs: int,
        num_rows: int,
        pool: int,
        windows: Windows = NO_WINDOWS,
    ) -> None:
        """For the library; use `build` or `empty`."""
        self.runtime = runtime
        self.num_reqs = num_reqs
        self.num_rows = num_rows
        self.version = runtime.new_version()
        self._rows = rows
        self._carried = device_rows  # what it was born with; once there is a device side, that side knows better
        self._crossing: BatchDevice | None = None
        self._objects = objects
        self._pool = pool
        self._windows = windows
        self._values: dict[str, Any] = {}
        self._watched: list[TwoSides] = []  # values that somebody may write into, or that have stale windows

    def __copy__(self) -> Self:
        return self  # immutable

    def __deepcopy__(self, memo: object) -> Self:
        return self  # immutable, and of this runtime

    def __reduce__(self) -> NoReturn:
        raise DeviceError(
            f"{self!r} cannot be pickled: it belongs to a runtime of this process",
            value=type(self).__name__,
            remedy="send the columns' `.np`, and build a batch on the other side",
        )

    # Reading

    @classmethod
    def columns(cls) -> Mapping[str, Column]:
        """The declarations by name, in order."""
        return dict(cls._columns)

    def __len__(self) -> int:
        return self.num_reqs

    def __getitem__(self, column: str) -> MirroredTensor:
        """The value of a mirrored or device-only column.

        Raises:
            DeclarationError: no such column, or one of Python objects.
        """
        value = self._values.get(column)
        if value is None:
            declared = self._columns.get(column)
            if not isinstance(declared, TensorColumn):
                raise DeclarationError(
                    f"{type(self).__name__} has no tensor column {column!r}",
                    value=column,
                    remedy=f"use one of: {', '.join(self._columns)}",
                )
            value = self._values[column] = self._value(declared)
        return value

    def _value(self, column: TensorColumn) -> MirroredTensor:
        name = column.name
        mirrored = isinstance(column, MirroredColumn)
        contract = Contract.EXACT
        if name in self._device_rows:
            contract = Contract.UPPER_BOUND if mirrored else Contract.DEVICE_ONLY
        tags: tuple[Array, ...] = ()
        if name == self._slot_column:
            tags = (self._rows.column(name + GENERATION_SUFFIX),)
        return column.value_type(
            self.runtime,
            self._rows.column(name) if mirrored else None,
            DeviceSide(functools.partial(self._device.column, name)),
            dtype=column.dtype,
            shape=(self.num_rows, *column.shape),
            contract=contract,
            name=name,
            windows=self._windows.get(name, ()),
            tags=tags,
            origin=self._pool if tags else 0,
            watchers=self._watched,
        )

    def _open_windows(self) -> Windows:
        """Column -> its stale windows that are open: batches derived now inherit them."""
        if not self._watched and not self._windows:
            return NO_WINDOWS
        found = dict(self._windows)
        for value in self._watched:
            if value.open_windows:
                found[value.name] = value.open_windows
        return found or NO_WINDOWS

    @property
    def _device(self) -> BatchDevice:
        """The device side; most batches of a step pass without one."""
        if self._crossing is None:
            self._crossing = BatchDevice(self.runtime, self._columns, self._rows, self._carried)
        return self._crossing

    @property
    def _parts(self) -> Parts:
        return self._rows, self._device_rows, self._objects

    @property
    def _device_rows(self) -> Mapping[str, DeviceRows]:
        return self._carried if self._crossing is None else self._crossing.device_rows

    def objects(self, column: str) -> tuple[Any, ...]:
        """The Python objects of a host column, one a request.

        Raises:
            DeclarationError: no such column.
        """
        if column not in self._objects:
            raise DeclarationError(
                f"{type(self).__name__} has no host column {column!r}",
                value=column,
                remedy=f"use one of: {', '.join(self._objects)}",
            )
        return tuple(self._objects[column].tolist())

    # Helpers

    def _tensor_column(self, name: str, what: str) -> TensorColumn:
        column = self._columns.get(name)
        if not isinstance(column, TensorColumn):
            raise DeclarationError(
                f"{what} is no tensor column", value=name, remedy=f"use one of: {', '.join(self._columns)}"
            )
        return column

    def _where(self, operation: str, column: str | None = None) -> Where:
        where: Where = {"object": self, "operation": operation, "step": self.runtime.step}
        if column is not None:
            where["column"] = column
        return where

    def __repr__(self) -> str:
        padding = f" padded to {self.num_rows}" if self.num_rows != self.num_reqs else ""
        return (
            f"{type(self).__name__}({self.num_reqs} requests{padding}, {len(self._columns)} columns) "
            f"on {self.runtime.device}"
        )
