"""The host tokens of one request: few runs, with an owner and a generation."""

import operator
from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.errors import ArgumentError
from batchstate.ownership.extent_list import spread
from batchstate.ownership.table_write import read_only

Ints = npt.NDArray[np.int64]


@final
@attrs.frozen(eq=False)
class HostRuns:
    """Consecutive host tokens for consecutive positions of a request. Made by `HostTokenPool.take`.

    Attributes:
        pool: identity of the pool.
        owner: whom they were taken for: a slot, or any number the caller chose.
        generation: another one for each that the pool ever made.
        starts: int64[r], first host token of each run, read-only.
        lengths: int64[r], tokens of each run, whole pages, read-only.
    """

    pool: int
    owner: int
    generation: int
    starts: Ints = attrs.field(converter=read_only)
    lengths: Ints = attrs.field(converter=read_only)

    def __repr__(self) -> str:
        return (
            f"HostRuns({len(self)} tokens in {self.starts.size} runs, owner {self.owner}, generation {self.generation})"
        )

    def __len__(self) -> int:
        return int(self.lengths.sum())

    @property
    def table(self) -> Ints:
        """int64[r, 2]: start and length of each run, as a grant to a writer says it."""
        return np.stack([self.starts, self.lengths], axis=1)

    def tokens(self, first: int = 0, count: int | None = None) -> Ints:
        """Host tokens of the positions `first` to `first + count - 1`, int64[count]; by default to the end.

        Raises:
            ArgumentError: positions that the runs do not have.
        """
        room = len(self)
        begin = operator.index(first)
        stop = room if count is None else begin + operator.index(count)
        if not 0 <= begin <= stop <= room:
            raise ArgumentError(
                f"positions {first} to {stop} (exclusive) of {self!r}",
                value=(first, stop),
                remedy="stay inside the runs",
            )
        return spread(self.starts, self.lengths)[begin:stop]
