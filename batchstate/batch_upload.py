"""The one copy of a step: every column of a batch, table writes and derived arrays, packed together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import attrs
import numpy as np
import torch

from batchstate.device_side import Made
from batchstate.host_arrays import Array, as_array
from batchstate.runtime import PackedUpload, Runtime, torch_dtype
from batchstate.tables import TableWrite


@final
@attrs.define(eq=False)
class PackedBatch:
    """The device side of a batch's stacks, and of what its device columns need to be gathered.

    Attributes:
        upload: the copy.
        needs: column -> places in the copy of what `DeviceRows.arrays` asked for.
    """

    upload: PackedUpload
    needs: Mapping[str, Sequence[int]]
    _lanes: dict[int, tuple[torch.Tensor, ...]] = attrs.field(factory=dict, init=False)

    def column(self, stack: int, lane: int | None, dtype: "np.dtype[np.generic]") -> Made:
        """The device side of a column; views only, no launch."""
        if lane is None:
            tensor = self.upload.view(stack)
        else:
            lanes = self._lanes.get(stack)
            if lanes is None:
                lanes = self._lanes[stack] = self.upload.view(stack).unbind(0)
            tensor = lanes[lane].view(torch_dtype(dtype))
        return Made(tensor, self.upload.stream, self.upload.ready)

    def needed(self, column: str, runtime: Runtime) -> list[torch.Tensor]:
        """The device sides of what the column needs, safe on the current stream."""
        packed = self.upload
        return [runtime.acquire(packed.view(place), packed.stream, packed.ready) for place in self.needs[column]]


@final
@attrs.frozen(eq=False)
class Extras(Mapping[str, torch.Tensor]):
    """Derived arrays that rode in a batch's copy: name -> device tensor, safe on the stream that asks."""

    _runtime: Runtime
    _upload: PackedUpload | None
    _places: Mapping[str, int]

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        if self._upload is None:
            raise KeyError(name)
        return self._runtime.acquire(self._upload.view(place), self._upload.stream, self._upload.ready)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def pack(
    runtime: Runtime,
    stacks: Sequence[Array],
    needs: Mapping[str, Sequence[Array]],
    writes: Sequence[TableWrite],
    extras: Mapping[str, object],
) -> tuple[PackedBatch, Extras]:
    """Uploads everything in one copy, then launches one scatter for each table that is written.

    Args:
        runtime: the device.
        stacks: a batch's host stacks, or none if they crossed before.
        needs: column -> arrays that its gathering needs.
        writes: validated table writes; those of one table are joined.
        extras: name -> host array.
    """
    arrays: list[Array] = list(stacks)
    places: dict[str, list[int]] = {}
    for column, wanted in needs.items():
        places[column] = list(range(len(arrays), len(arrays) + len(wanted)))
        arrays += wanted
    joined = _joined(writes)
    first_write = len(arrays)
    for write in joined:
        arrays += (write.index, write.values)
    named: dict[str, int] = {}
    for name, values in extras.items():
        named[name] = len(arrays)
        arrays.append(as_array(values, f"extra {name!r}"))
    upload = runtime.upload(arrays)
    for i, write in enumerate(joined):
        write.table.apply(write, upload.view(first_write + 2 * i), upload.view(first_write + 2 * i + 1))
    return PackedBatch(upload, places), Extras(runtime, upload, named)


def _joined(writes: Sequence[TableWrite]) -> list[TableWrite]:
    if len(writes) < 2:
        return list(writes)
    by_table: dict[int, list[TableWrite]] = {}
    for write in writes:
        by_table.setdefault(id(write.table), []).append(write)
    return [
        same[0]
        if len(same) == 1
        else TableWrite(
            same[0].table, np.concatenate([one.index for one in same]), np.concatenate([one.values for one in same])
        )
        for same in by_table.values()
    ]
