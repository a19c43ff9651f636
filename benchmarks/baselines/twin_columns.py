"""Baseline: one tensor per side and column, kept alike by hand, as engines without mirrored values do.

Each operation visits every column twice. An index crosses to the device once an operation, and what joins is on the
device already: as favourable to this way as an engine can have it.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


@final
@attrs.frozen
class HostKind:
    """The kind of a column's host side: a CPU tensor, or a numpy array, which is faster at this size.

    Attributes:
        name: for reports.
        make: from an array, without a copy; for columns and for the index of rows.
        cat: rows of both.
    """

    name: str
    make: Callable[[Array], Any]
    cat: Callable[[tuple[Any, Any]], Any]


TENSORS = HostKind("one tensor per side and column", torch.from_numpy, torch.cat)
ARRAYS = HostKind("one array and one tensor per column", np.asarray, np.concatenate)


@final
@attrs.define(eq=False)
class TwinColumns:
    """Columns by name, twice.

    Attributes:
        kind: what the host side is.
        place: where the device side is.
        host, device: the two sides of each column, [rows].
    """

    kind: HostKind
    place: torch.device
    host: dict[str, Any]
    device: dict[str, torch.Tensor]

    @classmethod
    def of(cls, columns: Mapping[str, Array], kind: HostKind, place: torch.device) -> "TwinColumns":
        """Both sides of host values; two memories also where the device is the CPU."""
        host = {name: kind.make(values.copy()) for name, values in columns.items()}
        device = {name: torch.from_numpy(values.copy()).to(place) for name, values in columns.items()}
        return cls(kind, place, host, device)

    def filter(self, keep: npt.NDArray[np.bool_]) -> None:
        """Keeps the rows that the mask names."""
        index = np.flatnonzero(keep)
        host_index = self.kind.make(index)
        device_index = torch.from_numpy(index).to(self.place, non_blocking=True)
        for name, values in self.host.items():
            self.host[name] = values[host_index]
        for name, values in self.device.items():
            self.device[name] = values[device_index]

    def merge(self, other: "TwinColumns") -> None:
        """Appends the rows of `other`."""
        cat = self.kind.cat
        for name, values in self.host.items():
            self.host[name] = cat((values, other.host[name]))
        for name, values in self.device.items():
            self.device[name] = torch.cat((values, other.device[name]))

    def advance(self, column: str, n: int) -> None:
        """Adds `n` to each row of one column; not in place, since a launched forward may read it."""
        self.host[column] = self.host[column] + n
        self.device[column] = self.device[column] + n

    def copied(self) -> "TwinColumns":
        """Another batch of the same columns, so that a step can be repeated from here. The columns are shared."""
        return TwinColumns(self.kind, self.place, dict(self.host), dict(self.device))
