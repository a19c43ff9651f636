"""Host tokens go with their slot: whoever frees a slot frees them, once, behind every fence that stands for them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol, final, runtime_checkable

import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate.errors import ArgumentError
from batchstate.host_tokens import HostTokenPool
from batchstate.ownership.fence_queue import AllFences
from batchstate.runtime import Fence
from batchstate.tiering.books import TierBooks, TierState
from batchstate.tiering.moves import Moves
from batchstate.violations import Where

Ints = npt.NDArray[np.int64]


@runtime_checkable
class Writer(Fence, Protocol):
    """A fence that also knows what has arrived, as `Lease.ended` does."""

    def arrived(self) -> int:
        """How many tokens a request may count on."""
        ...


@final
class TierGuard:
    """The companion of a slot pool whose slots may own host tokens.

    Args:
        host: the pool of them.
        is_live: which of some slots int64[n] are live, bool[n].
        books: who has which.
        moves: copies of KV between host and device memory.

    Attributes:
        holds: for each slot, fences of its own besides that of the engine's last forward: the copy that stages it, the
            writer that may still write into its host tokens.
        planned: slots of the plan whose backup is yet to be launched, int64[n].
        leaving: whether the free under way is the host tier's own, behind every fence that stands for its slots.
    """

    def __init__(
        self, host: HostTokenPool, is_live: Callable[[Ints], npt.NDArray[np.bool_]], books: TierBooks, moves: Moves
    ) -> None:
        self._host = host
        self._is_live = is_live
        self._books = books
        self._moves = moves
        self.holds: dict[int, Fence] = {}
        self.leaving = False
        self.planned: Ints = np.empty(0, dtype=np.int64)

    def __repr__(self) -> str:
        return f"TierGuard({self._books!r})"

    def check_take(self, n: int) -> None:
        """Nothing is needed: a request enters the host tier later, or never."""

    def taken(self, rows: Ints) -> None:
        """Whoever was on the slots before is forgotten."""
        self._books.states[rows] = TierState.OUTSIDE

    def check_free(self, rows: Ints, operation: str) -> None:
        """Refuses slots whose KV is being copied out of device pages, which the fence of a free may not cover.

        And those of a plan whose backup is yet to be launched: it would write what is somebody else's by then.

        Raises:
            Violation: TIER_STATE.
            ArgumentError: a slot is in the open plan.
        """
        planned = rows[np.isin(rows, self.planned)] if self.planned.size else self.planned
        if planned.size:
            raise ArgumentError(
                f"{operation} of slot {planned[0]}, which is in a plan whose backup was not launched",
                value=int(planned[0]),
                remedy="call `back_up` with the plan first, then let the request go",
            )
        if self.leaving:
            return
        staged = rows[self._books.states[rows] == TierState.STAGED]
        copying = [slot for slot in staged.tolist() if not self._complete(self.holds[slot])]
        if copying:
            allowed = (TierState.READY, TierState.DIRECT, TierState.OUTSIDE)
            self.check_state(np.array(copying, dtype=np.int64), allowed, operation)

    def freed(self, rows: Ints, after: Fence | None) -> None:
        """Frees the host tokens of the slots."""
        for slot in rows.tolist():
            if slot in self._books.runs:
                self.give_back(slot, self.fence_of([slot], after))

    def give_back(self, slot: int, after: Fence | None) -> None:
        """Frees the host tokens of a slot behind a fence, and forgets the slot."""
        self._host.free(self._books.leave(slot), after=after, keeper=self)
        self.holds.pop(slot, None)

    def check_pages(self, rows: Ints, operation: str) -> None:
        """Refuses to have device pages released that are the hot buffer of a request, or are being copied out.

        Raises:
            Violation: TIER_STATE.
        """
        if not self.leaving and self._books.runs:
            self.check_state(rows, (TierState.OUTSIDE,), f"{operation} of pages")

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """A window in which what is released is the host tier's own doing, behind every fence that stands for it."""
        before, self.leaving = self.leaving, True
        try:
            yield
        finally:
            self.leaving = before

    def fence_of(self, slots: list[int], after: Fence | None) -> Fence | None:
        """All that has to be complete before memory of these slots is anybody's; None where nothing is open."""
        own = (*self._moves.last, *(self.holds[slot] for slot in slots if slot in self.holds))
        still = tuple(fence for fence in dict.fromkeys(own) if not self._complete(fence))
        if after is not None:
            still = (after, *still)
        return AllFences(still) if len(still) > 1 else (still[0] if still else None)

    def _complete(self, fence: Fence) -> bool:
        """Whether it is known to be; under capture no fence may be asked."""
        return not self._host.runtime.capturing and fence.query()

    def check_state(self, rows: Ints, allowed: tuple[TierState, ...], operation: str) -> None:
        """Refuses requests in other states.

        Raises:
            Violation: TIER_STATE.
        """
        names = tuple(state.name for state in TierState)
        invariants.tier_state(rows, self._books.states[rows], allowed, names, **self._where(operation))

    def check_arrived(self, rows: Ints, lengths: Ints, operation: str) -> None:
        """Refuses requests that their writer has not delivered: whole, and as many tokens as were reserved for it.

        Raises:
            Violation: TIER_STATE.
        """
        names = tuple(state.name for state in TierState)
        missing = np.array(
            [self._missing(row, length) for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)],
            dtype=np.int64,
        )
        states = self._books.states[rows]
        invariants.tier_state(rows, states, (TierState.DIRECT,), names, missing=missing, **self._where(operation))

    def _missing(self, row: int, length: int) -> int:
        writer = self.holds.get(row)
        if writer is None:
            return 0
        if isinstance(writer, Writer):
            return length - writer.arrived()
        return 0 if writer.query() else length

    def check_conservation(self, live: int, operation: str) -> None:
        """Host tokens are counted on their own, by their ledger."""

    def verify(self) -> None:
        """Every law of the host tokens from scratch: they are those that slots of the tier own, each once.

        Raises:
            Violation: TIER_STATE, MIRROR_EQUAL, SLOT_CONSERVATION, LENGTH_ORDER, SLOT_STALE_HANDLE, and see
                `HostTokenPool.verify`.
        """
        self._host.verify()
        books, where = self._books, self._where("verify")
        copied = [slot for slot in np.flatnonzero(books.states == TierState.STAGED).tolist() if slot not in self.holds]
        self.check_state(np.array(copied, dtype=np.int64), (TierState.READY,), "verify")
        pages = 0
        for slot, runs in books.runs.items():
            self._host.check_held(runs, "verify")
            pages += len(runs) // self._host.page_size
            everywhere = np.arange(len(runs), dtype=np.int64)
            places = books.host_tokens(np.full(everywhere.size, slot, dtype=np.int64), everywhere)
            invariants.mirror_equal(runs.tokens(), places, **where)
            invariants.slot_stale_handle(
                np.array([slot]), np.array([runs.owner]), self._host.owner_of(runs.starts[:1]), **where
            )
        stats = self._host.stats
        owners = np.fromiter(books.runs, dtype=np.int64, count=len(books.runs))
        orphans = owners[~self._is_live(owners)]
        if orphans.size:
            lost = sum(len(books.runs[slot]) for slot in orphans.tolist())
            invariants.slot_conservation(
                stats.free, stats.pending, stats.live - lost, stats.size, leaked=orphans, **where
            )
        held = pages * self._host.page_size
        if held > stats.live:  # tokens that others took from the pool are theirs to count
            invariants.slot_conservation(stats.free, stats.pending, held, stats.size, **where)
        invariants.length_order(books.backed, books.length, int(books.room.max(initial=0)), **where)
        invariants.length_order(books.length, books.room, int(books.room.max(initial=0)), **where)

    def _where(self, operation: str) -> Where:
        return {"object": "the host tier", "operation": operation, "step": self._host.runtime.step}
