r"""Who has what: the bookkeeping that slots, pages and states have in common.

    FREE --take--> LIVE --release--> FREE
                     \--release(after=fence)--> PENDING --fence complete--> FREE

Each index is in one state, said twice on purpose: once in an array of states and once by the list it stands in. Checks
compare the two, so that a bug in either is seen. Every operation costs O(indices that change), whatever the size.
"""

from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate.errors import PoolExhaustedError
from batchstate.ownership.fence_queue import FenceQueue
from batchstate.ownership.free_list import FreeIndices, FreeList
from batchstate.runtime import Fence, Runtime
from batchstate.violations import Code, Where

Ints = npt.NDArray[np.int64]

FREE, PENDING, LIVE, PADDING = 0, 1, 2, 3


@final
class Ledger:
    """Indices 1 to size + reserve. Index 0 is padding and is in no list.

    Not public: pools validate what callers pass and call this with int64 arrays of their own.

    Attributes:
        label: names the pool in reports.
        size: what can be taken ordinarily: indices 1 to size.
        reserve: further indices, up to size + reserve, which only `take(..., reserved=True)` hands out.
        capacity: rows that a table indexed by these needs: size + reserve + 1.
        live, pending: how many are taken, and how many wait for a fence.
        peak_live: the most that were ever taken at once.
        taken_total, freed_total: how many were ever taken and released.
    """

    def __init__(
        self,
        runtime: Runtime,
        size: int,
        *,
        reserve: int = 0,
        label: str,
        free_list: Callable[[int, int], FreeIndices] = FreeList,
    ) -> None:
        self.runtime = runtime
        self.label = label
        self.size = size
        self.reserve = reserve
        self.capacity = size + reserve + 1
        self.live = 0
        self.peak_live = 0
        self.taken_total = 0
        self.freed_total = 0
        self._ordinary = free_list(1, size)
        self._reserved = free_list(size + 1, size + reserve)
        self._waiting = FenceQueue()
        self._asking = False  # a fence that calls its own pool must not start a second round of questions
        # One state more than indices: see `_states_of`.
        self._states = np.full(self.capacity + 1, FREE, dtype=np.uint8)
        self._states[[0, -1]] = PADDING
        self._row_of = np.zeros(self.capacity, dtype=np.int32)  # scratch of `repeated` and `distinct`
        self._rows = np.arange(256, dtype=np.int32)

    def __repr__(self) -> str:
        return f"Ledger({self.label}: {self.free} free, {self.pending} pending, {self.live} live)"

    @property
    def states(self) -> npt.NDArray[np.uint8]:
        """The state of each index, uint8[capacity], as a view."""
        return self._states[: self.capacity]

    @property
    def free(self) -> int:
        """How many are free, the reserve included."""
        return self._ordinary.count + self._reserved.count

    @property
    def free_reserved(self) -> int:
        """How many of the free ones only a reserved take hands out."""
        return self._reserved.count

    @property
    def pending(self) -> int:
        """How many wait for a fence."""
        return self._waiting.count

    # Taking

    def check_available(self, n: int, *, reserved: bool = False) -> None:
        """Lets what is ready become free, and refuses if `n` cannot be taken. Whatever can fail in `take` fails here.

        Raises:
            PoolExhaustedError: fewer than `n` are free.
        """
        self.reap()
        free = self._ordinary.count + (self._reserved.count if reserved else 0)
        if n > free:
            pending = self._waiting.indices()
            usable = self.pending if reserved else int(np.count_nonzero(pending <= self.size))
            raise PoolExhaustedError(
                self.label,
                requested=n,
                free=free,
                pending=usable,
                size=self.size + (self.reserve if reserved else 0),
                free_reserved=0 if reserved else self._reserved.count,
            )

    def next_free(self, n: int) -> Ints:
        """What `take(n)` would hand out now, int64[n], a new array."""
        return self._next_free(n, 0)

    def take(self, n: int, operation: str, *, reserved: bool = False) -> Ints:
        """Takes `n`: of the reserve first if `reserved`, then of the ordinary ones. Asks no fence.

        The caller has shown by `check_available` that they are there.

        Returns:
            int64[n], a new array.

        Raises:
            Violation: SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE, SLOT_IN_FLIGHT, SLOT_SHARED, at `cheap`.
        """
        from_reserve = min(n, self._reserved.count) if reserved else 0
        indices = self._next_free(n - from_reserve, from_reserve)
        if levels.cheap:
            self._check_fresh(indices, self.capacity if reserved else self.size + 1, operation)
        self._pop_free(n - from_reserve, from_reserve)
        self._mark(indices, LIVE)
        self.live += n
        self.taken_total += n
        self.peak_live = max(self.peak_live, self.live)
        if levels.cheap:
            self.check_conservation(operation)
        return indices

    def _next_free(self, ordinary: int, reserved: int) -> Ints:
        if not reserved:
            return self._ordinary.top(ordinary)
        return np.concatenate([self._reserved.top(reserved), self._ordinary.top(ordinary)])

    def _pop_free(self, ordinary: int, reserved: int) -> None:
        self._ordinary.drop(ordinary)
        if reserved:
            self._reserved.drop(reserved)

    # Releasing

    def release(self, indices: Ints, after: Fence | None, operation: str) -> None:
        """Frees indices, at once or when `after` is complete. The caller has shown that they are live and unique.

        Raises:
            Violation: SLOT_CONSERVATION, SLOT_IN_FLIGHT, at `cheap`.
        """
        n = indices.size
        if not n:
            return
        if after is None:
            self._push_free(indices)
        else:
            self._defer(indices, after)
        self.live -= n
        self.freed_total += n
        if levels.cheap:
            if after is not None:
                invariants.slot_in_flight(indices, self._states_of(indices) != PENDING, **self._where(operation))
            self.check_conservation(operation)

    def reap(self) -> int:
        """Makes free what waits for a complete fence; says how many. Never waits, asks nothing under capture.

        What a fence raises comes through, and nothing has changed. Called by a fence that it asks, it does nothing.

        Raises:
            Violation: SLOT_IN_FLIGHT, SLOT_DOUBLE_FREE, SLOT_CONSERVATION, at `cheap`.
        """
        if not self._waiting.count or self._asking or self.runtime.capturing:
            return 0
        self._asking = True
        try:
            done = self._waiting.completed()
        finally:
            self._asking = False
        reaped = 0
        for fence, indices in done:  # runs no code but ours
            if levels.cheap:
                where = self._where("reap")
                if not fence.complete:
                    invariants.slot_in_flight(indices, np.ones(indices.size, dtype=np.bool_), **where)
                self._check_waited(indices, where)
            self._push_free(indices)
            reaped += indices.size
        if reaped and levels.cheap:
            self.check_conservation("reap")
        return reaped

    def _push_free(self, indices: Ints) -> None:
        self._mark(indices, FREE)
        if self.reserve:
            ordinary = indices <= self.size
            self._push_reserved(indices[~ordinary])
            indices = indices[ordinary]
        self._push_ordinary(indices)

    def _push_ordinary(self, indices: Ints) -> None:
        self._check_room(self._ordinary, indices.size)
        self._ordinary.push(indices)

    def _push_reserved(self, indices: Ints) -> None:
        self._check_room(self._reserved, indices.size)
        self._reserved.push(indices)

    def _defer(self, indices: Ints, fence: Fence) -> None:
        self._mark(indices, PENDING)
        self._waiting.defer(fence, indices)

    def _mark(self, indices: Ints, state: int) -> None:
        self._states[indices] = state

    # Asking

    def live_among(self, indices: Ints) -> npt.NDArray[np.bool_]:
        """Which of `indices` are live, bool[n]; those out of range are not."""
        live: npt.NDArray[np.bool_] = self._states_of(indices) == LIVE
        return live

    def live_indices(self) -> Ints:
        """All live ones in ascending order, int64[live]. Costs O(size)."""
        return np.flatnonzero(self._states[: self.capacity] == LIVE)

    def unowned(self) -> Ints:
        """All that stand in a free list or wait, int64[free + pending]; one that stands there twice comes twice."""
        return np.concatenate([self._ordinary.entries(), self._reserved.entries(), self._waiting.indices()])

    def repeated(self, indices: Ints) -> bool:
        """Whether an index (in range) stands in `indices` twice. O(n), no sort."""
        return indices.size > 1 and np.count_nonzero(self._last_row(indices)) != indices.size

    def distinct(self, indices: Ints) -> Ints:
        """Each of `indices` (in range) once. O(n), no sort."""
        return indices[self._last_row(indices)]

    def _last_row(self, indices: Ints) -> npt.NDArray[np.bool_]:
        """Whether each row is the last that names its index: of several writes to one place one remains."""
        if self._rows.size < indices.size:
            self._rows = np.arange(2 * indices.size, dtype=np.int32)
        rows = self._rows[: indices.size]
        self._row_of[indices] = rows
        last: npt.NDArray[np.bool_] = self._row_of[indices] == rows
        return last

    def _states_of(self, indices: Ints) -> npt.NDArray[np.uint8]:
        """The state of each; PADDING for what is out of range.

        Clipping sends negative numbers to index 0 and large ones to the state beyond the last index, both PADDING, so
        that one look-up judges range, padding and state.
        """
        return self._states.take(indices, mode="clip")

    # Checks

    def check_conservation(self, operation: str) -> None:
        """Free + pending + live = size + reserve, by three counts kept apart.

        Raises:
            Violation: SLOT_CONSERVATION.
        """
        free, pending, total = self._ordinary.count + self._reserved.count, self._waiting.count, self.capacity - 1
        if free + pending + self.live == total and self.live >= 0:  # the law's own test, without its report
            invariants.made[Code.SLOT_CONSERVATION] += 1
            return
        invariants.slot_conservation(free, pending, self.live, total, **self._where(operation))

    def expect_idle(self, operation: str) -> None:
        """Nothing is live.

        Raises:
            Violation: SLOT_CONSERVATION, naming some of what is.
        """
        self.reap()
        if self.live:
            invariants.slot_conservation(
                self.free,
                self.pending,
                0,
                self.size + self.reserve,
                leaked=self.live_indices(),
                **self._where(operation),
            )

    def verify(self, operation: str = "verify") -> None:
        """Every law of the ledger from scratch. Costs O(size).

        Raises:
            Violation: SLOT_CONSERVATION, SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE, SLOT_SHARED, SLOT_IN_FLIGHT.
        """
        where = self._where(operation)
        self.check_conservation(operation)
        live = self.live_indices()
        ordinary, reserved, waiting = self._ordinary.entries(), self._reserved.entries(), self._waiting.indices()
        for indices, end in ((ordinary, self.size + 1), (reserved, self.capacity), (waiting, self.capacity)):
            invariants.slot_out_of_range(indices, end, **where)
            invariants.slot_zero_allocated(indices, **where)
        free = np.concatenate([ordinary, reserved])
        states = self._states[free]
        invariants.slot_in_flight(free, states == PENDING, **where)
        everything = np.concatenate([live, free, waiting])
        if self.repeated(everything):
            invariants.slot_shared(everything, **where)
        self._check_waited(waiting, where)
        for part, end, size in ((ordinary, self.size + 1, self.size), (reserved, self.capacity, self.reserve)):
            states = self._states[end - size : end]
            held = [int(np.count_nonzero(states == state)) for state in (PENDING, LIVE)]
            invariants.slot_conservation(part.size, held[0], held[1], size, **where)

    def _check_fresh(self, indices: Ints, end: int, operation: str) -> None:
        """What is about to be handed out is nobody's."""
        invariants.made[Code.SLOT_IN_FLIGHT] += 1
        in_partition = not self.reserve or int(indices.max(initial=0)) < end
        is_free = in_partition and not np.count_nonzero(self._states_of(indices))
        if is_free and not (levels.full and self.repeated(indices)):
            return
        where = self._where(operation)
        invariants.slot_out_of_range(indices, end, **where)
        invariants.slot_zero_allocated(indices, **where)
        invariants.slot_in_flight(indices, self._states_of(indices) == PENDING, **where)
        invariants.slot_shared(np.concatenate([self.live_indices(), indices]), **where)

    def _check_waited(self, indices: Ints, where: Where) -> None:
        """What leaves the waiting room is what entered it."""
        invariants.slot_out_of_range(indices, self.capacity, **where)
        waited = self._states_of(indices) == PENDING
        if not waited.all() or self.repeated(indices):
            invariants.slot_double_free(indices, waited, **where)

    def _check_room(self, free_list: FreeIndices, n: int) -> None:
        """A free list never holds more than it can own."""
        if free_list.count + n > free_list.room:
            invariants.slot_conservation(free_list.count + n, 0, 0, free_list.room, **self._where("push"))

    def _where(self, operation: str) -> Where:
        return {"object": self.label, "operation": operation, "step": self.runtime.step}
