"""Which bytes go where: rows of registered memory on this side, and their places on the other."""

from collections.abc import Iterable, Sequence
from typing import Self, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate._arrays import arange_per_row
from batchstate.errors import ArgumentError, ShapeError

Memory = torch.Tensor | npt.NDArray[np.uint8]


@final
@attrs.frozen(eq=False)
class Region:
    """A contiguous piece of memory.

    Attributes:
        index: what `Copies` calls it.
        name: what it is, the same word on both sides, as "layer 3 keys".
        address: of its first byte, in this process.
        nbytes: how long.
        memory: what keeps it alive.
        device: torch's type of device that it lies on.
    """

    index: int
    name: str
    address: int
    nbytes: int
    memory: Memory = attrs.field(repr=False)
    device: str = "cpu"


@final
@attrs.frozen
class RemoteRegion:
    """A region of a peer, as its endpoint describes it."""

    index: int
    name: str
    address: int
    nbytes: int


def described(index: int, memory: Memory, name: str, others: Iterable[Region]) -> Region:
    """The region of a piece of memory, which none of `others` overlaps.

    Raises:
        ArgumentError: no memory, not contiguous, empty, or it overlaps a registered region.
    """
    if isinstance(memory, torch.Tensor):
        contiguous, address, nbytes = memory.is_contiguous(), memory.data_ptr(), memory.numel() * memory.element_size()
        device = memory.device.type
    elif isinstance(memory, np.ndarray):
        contiguous, address, nbytes = memory.flags.c_contiguous, memory.ctypes.data, memory.nbytes
        device = "cpu"
    else:
        raise ArgumentError(
            f"{name}: expected a tensor or an array, got {type(memory).__name__}", value=memory, remedy="pass a tensor"
        )
    if not contiguous or not nbytes:
        raise ArgumentError(
            f"region {name!r}: {nbytes} bytes, {'' if contiguous else 'not '}contiguous",
            value=name,
            remedy="register contiguous memory of at least one byte",
        )
    for other in others:
        if address < other.address + other.nbytes and other.address < address + nbytes:
            raise ArgumentError(
                f"region {name!r} overlaps region {other.name!r}, which is registered",
                value=name,
                remedy="register each piece of memory once",
            )
    return Region(index, str(name), address, nbytes, memory, device)


Ints = npt.NDArray[np.int64]


def _ints(values: object) -> Ints:
    return np.asarray(values, dtype=np.int64)


@final
@attrs.frozen(eq=False)
class Copies:
    """Row copies: `lengths[i]` bytes from `source_offsets[i]` of a local region to `target_offsets[i]` of a remote one.

    Offsets are into regions, not addresses, so that bounds and owners can be checked before anything is sent.

    Attributes:
        source_regions: int64[n], index of the local region.
        source_offsets: int64[n], in bytes.
        target_regions: int64[n], index of the peer's region.
        target_offsets: int64[n], in bytes.
        lengths: int64[n], in bytes.
    """

    source_regions: Ints = attrs.field(converter=_ints)
    source_offsets: Ints = attrs.field(converter=_ints)
    target_regions: Ints = attrs.field(converter=_ints)
    target_offsets: Ints = attrs.field(converter=_ints)
    lengths: Ints = attrs.field(converter=_ints)

    def __attrs_post_init__(self) -> None:
        shapes = {one.shape for one in self.arrays()}
        if len(shapes) != 1 or self.lengths.ndim != 1:
            raise ShapeError(
                f"copies of {[one.shape for one in self.arrays()]}", value=shapes, remedy="pass five int64[n] of one n"
            )

    def __repr__(self) -> str:
        return f"Copies({len(self)} rows, {self.nbytes} bytes)"

    def __len__(self) -> int:
        return self.lengths.size

    @classmethod
    def empty(cls) -> Self:
        """No rows: a transfer that only delivers its tag."""
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, none, none, none)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, at least one, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate(column) for column in zip(*(one.arrays() for one in parts), strict=True)))

    @property
    def nbytes(self) -> int:
        """How many bytes in all."""
        return int(self.lengths.sum())

    def arrays(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """The five arrays, in the order of the attributes."""
        return (self.source_regions, self.source_offsets, self.target_regions, self.target_offsets, self.lengths)

    def rows(self, keep: npt.NDArray[np.int64] | slice) -> Self:
        """Some of the rows, in the order given."""
        return type(self)(*(one[keep] for one in self.arrays()))

    def cut(self, most: int) -> Self:
        """The same bytes, in order, in rows of at most `most` bytes."""
        if self.lengths.max(initial=0) <= most:
            return self
        pieces = -(-self.lengths // most)
        found = self.rows(np.repeat(np.arange(len(self), dtype=np.int64), pieces))
        skipped = arange_per_row(np.zeros_like(pieces), pieces) * most
        return attrs.evolve(
            found,
            source_offsets=found.source_offsets + skipped,
            target_offsets=found.target_offsets + skipped,
            lengths=np.minimum(found.lengths - skipped, most),
        )
