"""One side, or one column, is forgotten: the two sides of a value come apart."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import batchstate._rows
import batchstate.mirror
from batchstate._arrays import Array
from batchstate._rows import DeviceRows, HostRows
from batchstate._upload import BatchDevice, Extras
from batchstate.batch import Batch
from batchstate.mirror import Contract, MirroredTensor
from batchstate.runtime import PackedUpload, Runtime
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.tables import TableWrite
from batchstate.violations import Code


def _side_forgotten(patch: Patch, operations: tuple[str, ...], side: str) -> None:
    """Operations leave one side of a value as it was before; where the number of rows fell, its first rows stay."""

    def derived(
        self: MirroredTensor,
        host: Array | None,
        device: torch.Tensor | None,
        shape: tuple[int, ...],
        under_way: str,
        **kwargs: Any,
    ) -> MirroredTensor:
        bound = self.contract is Contract.UPPER_BOUND
        if under_way in operations and host is not None and device is not None and not bound:
            if side == "host":
                host = self._host_side()[: shape[0]].copy()
            else:
                device = self._device.tensor(self.runtime)[: shape[0]].clone()
        result: MirroredTensor = original(self, host, device, shape, under_way, **kwargs)
        return result

    original = patch(MirroredTensor, "_derived", derived)


@mutant(Code.MIRROR_EQUAL, machine="mirrored_tensor", origin="sglang #18647")
def filter_forgets_device(patch: Patch) -> None:
    """`filter` moves the rows of the host side alone: the device keeps the rows of requests that left."""
    _side_forgotten(patch, ("filter",), "device")


@mutant(Code.MIRROR_EQUAL, machine="overlap", origin="sglang #18647, vllm #43894", tool="race", seeded="e")
def merge_forgets_device(patch: Patch) -> None:
    """A filter or a merge in an engine that overlaps moves the host side alone, and forwards go on with other rows."""
    _side_forgotten(patch, ("filter", "cat"), "device")


@mutant(Code.MIRROR_EQUAL, machine="mirrored_tensor", origin="sglang #25944, sglang #26020")
def filter_forgets_host(patch: Patch) -> None:
    """`filter` moves the rows of the device side alone, and the host plans with the lengths of other requests."""
    _side_forgotten(patch, ("filter",), "host")


@mutant(Code.MIRROR_EQUAL, machine="mirrored_tensor", origin="sglang #25944, sglang #26020")
def advance_forgets_host(patch: Patch) -> None:
    """`+ n` adds on the device, and the host's copy is left to be reconciled somewhere else."""
    _side_forgotten(patch, ("+ n", "- n"), "host")


@mutant(Code.MIRROR_EQUAL, machine="mirrored_tensor", origin="sglang #10720, sglang #11196")
def advance_forgets_device(patch: Patch) -> None:
    """`+ n` adds on the host alone, as a caller does that was not told of the second side."""
    _side_forgotten(patch, ("+ n", "- n"), "device")


@mutant(Code.MIRROR_EQUAL, machine="mirrored_tensor", origin="vllm #49107")
def update_forgets_device(patch: Patch) -> None:
    """`update` writes the rows of the host side alone."""
    _side_forgotten(patch, ("update",), "device")


@mutant(Code.MIRROR_EQUAL, Code.MIRROR_BOUND, machine="mirrored_tensor", origin="vllm #48419, vllm #43894")
def merge_in_other_order(patch: Patch) -> None:
    """Merging puts the joining rows first on the device and last on the host."""

    def concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
        joined: torch.Tensor = original(list(parts)[::-1])
        return joined

    original = patch(batchstate.mirror, "concatenate", concatenate)


@mutant(Code.MIRROR_EQUAL, machine="batch", origin="sglang #15132, sglang #15227")
def upload_takes_older_stack(patch: Patch) -> None:
    """The upload of a batch sends the columns of the batch before it, if that had as many rows."""
    before: weakref.WeakKeyDictionary[Runtime, HostRows] = weakref.WeakKeyDictionary()

    def upload(self: BatchDevice, writes: Sequence[TableWrite], extras: Mapping[str, object]) -> Extras:
        mine = self.rows
        if not self.uploaded:
            older = before.get(self._runtime)
            if older is not None and [one.shape for one in older.stacks] == [one.shape for one in mine.stacks]:
                self.rows = older
            before[self._runtime] = mine
        try:
            derived: Extras = original(self, writes, extras)
        finally:
            self.rows = mine
        return derived

    original = patch(BatchDevice, "upload", upload)


@mutant(Code.MIRROR_EQUAL, machine="batch", origin="sglang #16925")
def column_narrowed_on_device(patch: Patch) -> None:
    """The device side of an int64 column is int32, where kernels read raw 64-bit words."""

    def shared(self: BatchDevice, name: str, packed: PackedUpload) -> torch.Tensor:
        made: torch.Tensor = original(self, name, packed)
        return made.int() if made.dtype is torch.int64 else made

    original = patch(BatchDevice, "_shared", shared)


@mutant(Code.ROW_COUNT, machine="batch", origin="sglang #18647, vllm #49107")
def merge_forgets_column(patch: Patch) -> None:
    """A column that was added later takes no part in `merge`."""

    def merged(self: HostRows, other: HostRows) -> HostRows:
        rows: HostRows = original(self, other)
        if rows.wholes:
            return HostRows(rows.layout, rows.stacks, [*rows.wholes[:-1], self.wholes[-1]])
        return HostRows(rows.layout, [*rows.stacks[:-1], self.stacks[-1]], rows.wholes)

    original = patch(HostRows, "merged", merged)


@mutant(Code.ROW_COUNT, machine="batch", origin="sglang #18647")
def filter_forgets_device_column(patch: Patch) -> None:
    """A column that only the device knows (accepted lengths) is missed by `filter`."""
    patch(DeviceRows, "taken", lambda self, rows: self)


@mutant(Code.ROW_COUNT, machine="batch", origin="sglang #7585, sglang #7613")
def filter_forgets_objects(patch: Patch) -> None:
    """The requests themselves are not filtered, and sampling sees more of them than there are rows."""

    def with_(
        self: Batch, operation: str, rows: HostRows, device_rows: Any, objects: Any, num_reqs: int, **kwargs: Any
    ) -> Batch:
        kept = self._objects if num_reqs < self.num_reqs else objects
        batch: Batch = original(self, operation, rows, device_rows, kept, num_reqs, **kwargs)
        return batch

    original = patch(Batch, "_with", with_)


@mutant(Code.MIRROR_BOUND, Code.MIRROR_EQUAL, machine="batch", origin="vllm #48419, vllm #43894")
def merge_does_not_shift_index(patch: Patch) -> None:
    """After `merge` the joining rows still index their old buffer, and read other requests' values on the device."""

    def merged(self: DeviceRows, other: DeviceRows) -> DeviceRows:
        offset = sum(length for _, length in self.sources)
        unshifted = DeviceRows(other.sources, other.rows - offset, other.added)
        rows: DeviceRows = original(self, unshifted)
        return rows

    original = patch(DeviceRows, "merged", merged)


@mutant(Code.MIRROR_BOUND, machine="batch", origin="sglang #26128, sglang #13741")
def bound_exceeded(patch: Patch) -> None:
    """`advance` adds the drafted tokens too on the device, and the host's bound does not count them."""

    def advance(self: Batch, columns: str | list[str], n: object) -> Batch:
        batch: Batch = original(self, columns, n)
        drafted = np.array(8, dtype=np.int64)
        batch._device.device_rows = {
            name: rows.shifted(drafted) if name in columns and batch[name].contract is Contract.UPPER_BOUND else rows
            for name, rows in batch._device_rows.items()
        }
        batch._values.clear()
        return batch

    original = patch(Batch, "advance", advance)


@mutant(Code.MIRROR_BOUND, Code.MIRROR_EQUAL, machine="batch", origin="vllm #50432")
def gather_of_moved_rows(patch: Patch) -> None:
    """The gather of a device column reads rows that others have moved to meanwhile: the first ones, in order."""

    def select_rows(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        selected: torch.Tensor = original(source, rows.sort(descending=True).values)
        return selected

    original = patch(batchstate._rows, "select_rows", select_rows)


@mutant(Code.TAIL_STALE, machine="batch", origin="lmdeploy#4569, sglang #18647")
def pad_tail_not_reset(patch: Patch) -> None:
    """Padded rows keep what the buffer held in the step before instead of the pad value."""

    def padded(self: HostRows, count: int) -> HostRows:
        rows: HostRows = original(self, count)
        for by_row in (*(stack.T for stack in rows.stacks), *rows.wholes):
            live = len(by_row) - count
            if count and live:
                by_row[live:] = by_row[live - 1]
        return rows

    original = patch(HostRows, "padded", padded)


@mutant(Code.MIRROR_EQUAL, Code.MIRROR_BOUND, machine="mirrored_tensor", origin="lmdeploy#4569, vllm #42494")
def pad_tail_old_on_device(patch: Patch) -> None:
    """`pad` resets the tail of the host side, and the kernel reads the rows of the step before."""

    def derived(
        self: MirroredTensor,
        host: Array | None,
        device: torch.Tensor | None,
        shape: tuple[int, ...],
        operation: str,
        **kwargs: Any,
    ) -> MirroredTensor:
        rows = len(self)
        if operation == "pad" and device is not None and rows and shape[0] > rows:
            device = torch.cat([device[:rows], device[rows - 1 : rows].expand(shape[0] - rows, *shape[1:])])
        result: MirroredTensor = original(self, host, device, shape, operation, **kwargs)
        return result

    original = patch(MirroredTensor, "_derived", derived)
