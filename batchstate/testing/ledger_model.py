"""What a pool of indices has to do, as two plain collections: who is live, and who waits for which fences."""

from collections.abc import Iterable
from typing import final

import attrs

from batchstate.errors import PoolExhaustedError
from batchstate.testing.fences import ManualFence
from batchstate.testing.machine import DisagreementError, agree


@final
@attrs.define
class LedgerModel:
    """Indices 1 to size + reserve.

    Attributes:
        size, reserve: how many, ordinarily and beyond.
        live: those that are somebody's.
        pending: index -> the fences that must be complete before it is free.
    """

    size: int
    reserve: int = 0
    live: set[int] = attrs.field(factory=set)
    pending: dict[int, tuple[ManualFence, ...]] = attrs.field(factory=dict)

    @property
    def total(self) -> int:
        """Indices in all."""
        return self.size + self.reserve

    @property
    def free(self) -> int:
        """How many are nobody's."""
        return self.total - len(self.live) - len(self.pending)

    @property
    def free_reserved(self) -> int:
        """How many of those lie in the reserve."""
        return self.reserve - sum(index > self.size for index in (*self.live, *self.pending))

    def reap(self) -> None:
        """What waits for complete fences alone becomes free."""
        self.pending = {
            index: fences for index, fences in self.pending.items() if not all(fence.query() for fence in fences)
        }

    def takes(self, n: int, *, reserved: bool = False) -> bool:
        """Whether `n` can be taken, once what is ready is free."""
        self.reap()
        return n <= self.free - (0 if reserved else self.free_reserved)

    def waiting_helps(self, n: int, *, reserved: bool = False) -> bool:
        """Whether `n` can be taken after all fences."""
        held = sum(reserved or index <= self.size for index in self.live)
        return n <= (self.total if reserved else self.size) - held

    def check_refusal(self, error: PoolExhaustedError, n: int, *, reserved: bool = False) -> None:
        """Compares the numbers of an error with those of the model.

        Raises:
            DisagreementError: they differ.
        """
        free = self.free - (0 if reserved else self.free_reserved)
        pending = sum(reserved or index <= self.size for index in self.pending)
        agree((n, free, pending), (error.requested, error.free, error.pending), "requested, free, pending")

    def take(self, indices: Iterable[int], *, reserved: bool = False) -> None:
        """These were handed out.

        Raises:
            DisagreementError: one of them was not free, or lies outside.
        """
        self.reap()
        last = self.total if reserved else self.size
        for index in indices:
            if not 1 <= index <= last:
                raise DisagreementError(f"index {index} was handed out of 1 to {last}")
            if index in self.live or index in self.pending:
                state = "live" if index in self.live else f"pending behind {self.pending[index]}"
                raise DisagreementError(f"index {index} was handed out although it is {state}")
            self.live.add(index)

    def release(self, indices: Iterable[int], *fences: ManualFence | None) -> None:
        """These were freed, behind the fences that are not None."""
        wanted = tuple(fence for fence in fences if fence is not None)
        for index in indices:
            self.live.remove(index)
            if wanted:
                self.pending[index] = wanted
        self.reap()
