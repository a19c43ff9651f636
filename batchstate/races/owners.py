"""Whose value is read: elements that an earlier owner of a row, or an earlier step, has left.

A value may be well ordered and still be another's: a slot, a page or a buffer has a new owner, and nobody has written
it since. Nothing is compared by value, so integers and zeros count as any other number. An engine declares its own
tensors: which rows have an owner, or which buffers are written anew in each step.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Self, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import ArgumentError
from batchstate.races.history import Entry
from batchstate.races.tracing.regions import ByteRegion
from batchstate.runtime.base import Owners

Ints = npt.NDArray[np.int64]

AskedOwners = Callable[[], "Mapping[int, Hashable] | npt.NDArray[Any]"]
"""Row -> its owner. An array has one entry for each row, and 0 for nobody."""

Valid = Callable[[], "int | Mapping[int, int]"]
"""The elements of a read that count: the first so many rows, or row -> the first so many of its elements."""

_NOBODY = 0


@final
@attrs.frozen
class Leftover:
    """An element that is read for one and was written for another.

    Attributes:
        region: all such elements of the read with the same writer.
        event: that wrote it.
        stream: of the event, by number.
        left: words for who has left it.
        wanted: words for whom it is read.
    """

    region: ByteRegion
    event: int
    stream: int
    left: str
    wanted: str


@final
class Declared:
    """Memory with owners: of each of its units, for whom, in which step and by which event it was written last.

    A unit is an element, or a row, which counts as written once any of it is.

    Args:
        tensor: rows first.
        fresh: whether a unit counts for the step that wrote it alone.
        valid: the elements that count, see `Valid`; without it a read of all units counts for nothing.
        rows: whether rows are the units, each of which lies in one piece.
    """

    def __init__(
        self, tensor: torch.Tensor, *, fresh: bool = False, valid: Valid | None = None, rows: bool = False
    ) -> None:
        self.rows = len(tensor)
        self._fresh, self._valid = fresh, valid
        self._width = 1 if rows else tensor.numel() // max(self.rows, 1)
        size = tensor.element_size()
        self._size, self._stride = (tensor[0].nbytes, int(tensor.stride(0)) * size) if rows else (size, size)
        self._start = int(tensor.storage_offset()) * size
        self.owners: Owners = lambda rows: self._of_row[rows]
        self._by = ""
        self._names: list[Hashable] = [None]
        self._numbers: dict[Hashable, int] = {None: _NOBODY}
        self._of_row = np.zeros(self.rows, np.int64)
        units = self.rows * self._width
        self._written_for = np.zeros(units, np.int64)
        self._step = np.full(units, -1, np.int64)
        self._event = np.zeros(units, np.int64)
        self._stream = np.zeros(units, np.int16)

    @classmethod
    def by_element(
        cls, tensor: torch.Tensor, owner: AskedOwners | None = None, *, fresh: bool = False, valid: Valid | None = None
    ) -> Self:
        """A tensor that an engine declares. `owner` is asked before each access; None where `give` tells owners.

        Raises:
            ArgumentError: the tensor is not contiguous, or has no rows.
        """
        if not tensor.ndim or not tensor.is_contiguous():
            problem = f"owners of a tensor {list(tensor.shape)} with strides {list(tensor.stride())}"
            raise ArgumentError(problem, tuple(tensor.shape), "declare a contiguous tensor with one row per owner")
        declared = cls(tensor, fresh=fresh, valid=valid)
        if owner is not None:
            declared.owners = partial(declared._asked, owner)
        return declared

    @classmethod
    def by_row(cls, memory: torch.Tensor, owners: Owners, by_step: bool) -> Self:
        """Memory of a pool, see `Runtime.own_rows`. What each step writes anew counts in reads of all of it, too."""
        rows = len(memory)
        declared = cls(memory, valid=(lambda: rows) if by_step else None, rows=True)
        declared.owners, declared._by = owners, "step" if by_step else "generation"
        return declared

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
        number = self._numbers.setdefault(who, len(self._names))
        if number == len(self._names):
            self._names.append(who)
        return number

    def _asked(self, owner: AskedOwners, rows: Ints) -> Ints:
        owners = owner()
        if isinstance(owners, np.ndarray):
            self._of_row[:] = [self._number(who) if who else _NOBODY for who in owners.tolist()]
        else:
            self._of_row[:] = _NOBODY
            for row, who in owners.items():
                self._of_row[row] = self._number(who)
        numbers: Ints = self._of_row[rows]
        return numbers

    def _units(self, region: ByteRegion) -> Ints:
        """The units of which a region has some bytes, in order."""
        exact = region.exact()
        if exact is None:
            return np.zeros(0, np.int64)
        starts, ends = exact.bounds()
        first = np.clip((starts - self._start - self._size) // self._stride + 1, 0, len(self._event))
        last = np.clip(-(-(ends - self._start) // self._stride), 0, len(self._event))
        counts = np.maximum(last - first, 0)
        units = np.arange(counts.sum()) + np.repeat(first - (counts.cumsum() - counts), counts)
        return units[np.diff(units, prepend=-1) > 0]

    def wrote(self, entry: Entry, region: ByteRegion) -> None:
        """An event has written some bytes."""
        at = self._units(region)
        self._written_for[at] = self.owners(at // self._width)
        self._step[at], self._event[at], self._stream[at] = entry.step, entry.number, entry.stream.number

    def leftover(self, entry: Entry, region: ByteRegion) -> Leftover | None:
        """The first unit that an event reads and that somebody else has left, or None."""
        at = self._units(region)
        if self._valid is not None:
            at = at[self._counts(at, self._valid())]
        elif len(at) == len(self._event):
            return None
        own, then = self.owners(at // self._width), self._written_for[at]
        others = (own != _NOBODY) & (then != _NOBODY) & (own != then)
        wrong = others | (self._fresh & (self._step[at] >= 0) & (self._step[at] < entry.step))
        if not wrong.any():
            return None
        which = int(np.argmax(wrong))
        first = at[which]
        event = int(self._event[first])
        shared = at[wrong & (self._event[at] == event)]
        apart = np.flatnonzero(np.diff(shared) > 1) + 1
        starts = shared[np.concatenate(([0], apart))] * self._stride + self._start
        ends = shared[np.concatenate((apart - 1, [len(shared) - 1]))] * self._stride + self._size + self._start
        whole = int(starts[0]), int(ends[-1])
        kept = ByteRegion(*whole) if len(starts) == 1 else ByteRegion(*whole, starts, ends)
        if others[which]:
            words = self._name(int(then[which])), self._name(int(own[which]))
        else:
            words = f"step {self._step[first]}", f"step {entry.step}"
        return Leftover(kept, event, int(self._stream[first]), *words)

    def _name(self, number: int) -> str:
        return repr(self._names[number]) if number < len(self._names) else f"{self._by} {number}"

    def _counts(self, at: Ints, valid: "int | Mapping[int, int]") -> npt.NDArray[np.bool_]:
        rows = at // self._width
        if not isinstance(valid, Mapping):
            return rows < valid
        lengths = np.zeros(self.rows, np.int64)
        for row, length in valid.items():
            lengths[row] = length
        inside: npt.NDArray[np.bool_] = at % self._width < lengths[rows]
        return inside
