"""Which bytes go where: rows of registered memory on this side, and their places on the other."""

from typing import Self, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.errors import ShapeError

Ints = npt.NDArray[np.int64]


def _ints(values: object) -> Ints:
    return np.asarray(values, dtype=np.int64)


@final
@attrs.frozen(eq=False)
class Copies:
    """Row copies: `lengths[i]` bytes from `source_offsets[i]` of a local region to `target_offsets[i]` of a remote one.

    Offsets are into regions, not addresses, so that bounds and owners can be judged before anything is sent.

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
