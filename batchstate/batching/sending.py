"""How a batch goes to the device: in one copy, to new memory or to addresses that stay."""

from collections.abc import Mapping, Sequence

import torch

from batchstate import invariants, levels
from batchstate.batching.judged import JudgedRecord
from batchstate.batching.static import StaticMemory
from batchstate.batching.upload import Extras, named_arrays
from batchstate.errors import ArgumentError, DeclarationError
from batchstate.tables import TableWrite
from batchstate.values.stale import reasons


class SendableRecord(JudgedRecord):
    """A batch that can be sent."""

    __slots__ = ()

    def on_device(self, *columns: str) -> dict[str, torch.Tensor]:
        """The device sides of some columns, to be read only, safe on the current stream: what a forward asks for.

        The same tensors as `batch[name].device`, for all columns in one call, which is several times as fast.

        Args:
            *columns: names of mirrored and device-only columns; all of them by default.

        Raises:
            DeclarationError: no such column, or one of Python objects.
            Violation: MIRROR_STALE_READ.
        """
        names = columns or self._tensor_columns
        for name in columns:
            if not isinstance(name, str):
                raise DeclarationError(
                    f"{type(self).__name__}.on_device: {name!r} names no column",
                    value=name,
                    remedy="pass names one by one: batch.on_device('slots', 'seq_lens')",
                )
            self._tensor_column(name, f"{type(self).__name__}.on_device: column {name!r}")
        for name, windows in self._open_windows().items():
            if name in names:
                invariants.mirror_stale_read("device", reasons(windows, "device"), **self._where("on_device", name))
        return self._device.columns(names)

    def upload(self, *, writes: Sequence[TableWrite] = (), extras: Mapping[str, object] | None = None) -> Extras:
        """Sends the step to the device on the current stream: one copy, then one scatter for each table written.

        All columns ride in the copy, unless this batch was uploaded before. The host does not wait.

        Args:
            writes: table writes, from `Table.entry` or `Extension.entry`.
            extras: derived host arrays (positions, `query_start_loc`, ...) by name.

        Returns:
            the device tensors of `extras`.

        Raises:
            CaptureError: the stream is being captured.
            DtypeError: an extra that torch and numpy do not share.
            Violation: MIRROR_FOREIGN_WRITE, MIRROR_STALE_READ of a host side, and at `full` those of `check`.
        """
        self._check_writes(writes, "upload")
        if levels.cheap:
            self._check_read_columns("upload")
        device = self._device
        first = not device.uploaded
        if first:
            self._check_host_is_fresh("upload")
        derived = device.upload(writes, self._checked_extras(extras, "upload"))
        if first and levels.full:
            self.check("upload")
        return derived

    def to_static(
        self,
        buffers: StaticMemory,
        *,
        writes: Sequence[TableWrite] = (),
        extras: Mapping[str, object] | None = None,
    ) -> Extras:
        """Sends the step to the fixed addresses of `StaticBuffers`, on the current stream, in one copy.

        The batch is padded to the rows of the buffers. What an earlier step left there is overwritten: replay a graph
        that reads it on the same stream before, or declare it with `buffers.read_until`. The batch's own device side is
        not made, and stays what it is if it was. The host does not wait.

        Args:
            buffers: of this batch class, with at least as many rows.
            writes: as for `upload`.
            extras: as for `upload`; those that the buffers were made with, of the same dtypes and shapes.

        Returns:
            the device tensors of `extras`, which are those of the buffers.

        Raises:
            ArgumentError: no buffers; more rows than they have; other extras than they were made with.
            ShapeError, DtypeError: an extra of another shape or dtype.
            DeclarationError, DeviceError: buffers of another batch class, or of another runtime.
            CaptureError: the stream is being captured: fill the buffers before, or between replays.
            Violation: MIRROR_FOREIGN_WRITE, MIRROR_STALE_READ; at `full` MIRROR_EQUAL, MIRROR_BOUND, TAIL_STALE.
        """
        if not isinstance(buffers, StaticMemory):
            raise ArgumentError(
                f"{type(self).__name__}.to_static: {type(buffers).__name__} has no fixed addresses",
                value=buffers,
                remedy="pass StaticBuffers",
            )
        self._check_writes(writes, "to_static")
        if levels.cheap:
            self._check_read_columns("to_static")
        self._check_host_is_fresh("to_static")
        return buffers.receive(self, writes, self._checked_extras(extras, "to_static"))

    def _check_host_is_fresh(self, operation: str) -> None:
        """What is sent is read from the host: not inside a window in which that side is knowingly old."""
        for name, windows in self._open_windows().items():
            if name not in self._device_rows:
                invariants.mirror_stale_read("host", reasons(windows, "host"), **self._where(operation, name))

    def _check_writes(self, writes: object, operation: str) -> None:
        if type(writes) is tuple and not writes:
            return
        if not isinstance(writes, list | tuple) or not all(isinstance(one, TableWrite) for one in writes):
            raise ArgumentError(
                f"{type(self).__name__}.{operation}: writes are {writes!r}",
                value=writes,
                remedy="pass a list of what `Table.entry` or `Extension.entry` returned",
            )

    def _checked_extras(self, extras: Mapping[str, object] | None, operation: str) -> Mapping[str, object]:
        return {} if extras is None else named_arrays(extras, f"{type(self).__name__}.{operation}")
