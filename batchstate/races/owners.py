"""Whose value is read: elements that an earlier owner of a row, or an earlier step, has left.

A value may be well ordered and still be another's: a slot, a page or a buffer has a new owner, and nobody has written
it since. Nothing is compared by value, so integers and zeros count as any other number. Pools declare their rows.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import ArgumentError
from batchstate.races.history import Entry
from batchstate.races.tracing.regions import ByteRegion, of_pieces
from batchstate.runtime.base import Owners

Ints = npt.NDArray[np.int64]

AskedOwners = Callable[[], "Mapping[int, Hashable] | npt.NDArray[Any]"]
"""Row -> its owner. An array has one entry for each row, and 0 for nobody."""

Valid = Callable[[], "int | Mapping[int, int]"]
"""The elements of a read that count: the first so many rows, or row -> the first so many of its elements."""

_NOBODY = 0


class Leftover(NamedTuple):
    """Elements that are read for one and were written for another, by one event of a stream; both in words."""

    region: ByteRegion
    event: int
    stream: int
    left: str
    wanted: str


@final
class Declared:
    """Memory with owners: of each of its units, for whom and by which event it was written last.

    A unit is an element, or a row, which counts as written once any of it is.

    Args:
        tensor: rows first.
        owners: see `Runtime.own_rows`; None where `give` or `ask` tells them, who then have names.
        by: word for their numbers.
        valid: the elements that count, see `Valid`; without it a read of all units counts for nothing.
        rows: whether rows are the units, each of which lies in one piece.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        owners: Owners | None = None,
        *,
        by: str = "",
        valid: Valid | None = None,
        rows: bool = False,
    ) -> None:
        self.rows = len(tensor)
        self._by, self._valid = by, valid
        self._width = 1 if rows else tensor.numel() // max(self.rows, 1)
        size = tensor.element_size()
        self._size, self._stride = (tensor[0].nbytes, int(tensor.stride(0)) * size) if rows else (size, size)
        self._start = int(tensor.storage_offset()) * size
        self._of_row = np.zeros(self.rows, np.int64)
        self._owners: Owners = self._of_row.__getitem__ if owners is None else owners
        self._numbers: dict[Hashable, int] = {None: _NOBODY}
        units = self.rows * self._width
        self._written_for = np.zeros(units, np.int64)
        self._event = np.zeros(units, np.int64)
        self._stream = np.zeros(units, np.int16)

    def ask(self, owner: AskedOwners) -> None:
        """Owners are asked before each access."""

        def owners(rows: Ints) -> Ints:
            now = owner()
            if isinstance(now, np.ndarray):
                self._of_row[:] = [self._number(who) if who else _NOBODY for who in now.tolist()]
            else:
                self._of_row[:] = _NOBODY
                for row, who in now.items():
                    self._of_row[row] = self._number(who)
            numbers: Ints = self._of_row[rows]
            return numbers

        self._owners = owners

    def give(self, rows: Any, who: Hashable) -> None:
        """Rows belong to `who` from now on; None for nobody.

        Raises:
            ArgumentError: there is no such row.
        """
        chosen = np.asarray(rows, np.int64).reshape(-1)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.rows:
            raise ArgumentError(f"rows {chosen.tolist()} of {self.rows}", rows, "name rows of the tensor")
        self._of_row[chosen] = self._number(who)

    def _number(self, who: Hashable) -> int:
        return self._numbers.setdefault(who, len(self._numbers))

    def _units(self, region: ByteRegion) -> Ints:
        """The units of which a region has some bytes, in order."""
        exact = region.exact()
        if exact is None:
            return np.zeros(0, np.int64)
        starts, ends = exact.bounds()
        first = np.clip((starts - self._start - self._size) // self._stride + 1, 0, len(self._event))
        last = np.clip(-(-(ends - self._start) // self._stride), 0, len(self._event))
        counts = np.maximum(last - first, 0)
        units: Ints = np.arange(counts.sum()) + np.repeat(first - (counts.cumsum() - counts), counts)
        return units[np.diff(units, prepend=-1) > 0]

    def wrote(self, entry: Entry, region: ByteRegion) -> None:
        """An event has written some bytes."""
        at = self._units(region)
        self._written_for[at] = self._owners(at // self._width)
        self._event[at], self._stream[at] = entry.number, entry.stream.number

    def leftover(self, region: ByteRegion) -> Leftover | None:
        """The first unit that is read and that somebody else has left, or None."""
        at = self._units(region)
        if self._valid is not None:
            at = at[self._counts(at, self._valid())]
        elif len(at) == len(self._event):
            return None
        own, then = self._owners(at // self._width), self._written_for[at]
        wrong = (own != _NOBODY) & (then != _NOBODY) & (own != then)
        if not wrong.any():
            return None
        first = int(np.argmax(wrong))
        event = int(self._event[at[first]])
        shared = at[wrong & (self._event[at] == event)]
        kept = of_pieces(shared * self._stride + self._start, self._size) or region
        left, wanted = self._name(int(then[first])), self._name(int(own[first]))
        return Leftover(kept, event, int(self._stream[at[first]]), left, wanted)

    def _name(self, number: int) -> str:
        return f"{self._by} {number}" if self._by else repr([*self._numbers][number])

    def _counts(self, at: Ints, valid: "int | Mapping[int, int]") -> npt.NDArray[np.bool_]:
        rows = at // self._width
        if not isinstance(valid, Mapping):
            return rows < valid
        lengths = np.zeros(self.rows, np.int64)
        for row, length in valid.items():
            lengths[row] = length
        inside: npt.NDArray[np.bool_] = at % self._width < lengths[rows]
        return inside
