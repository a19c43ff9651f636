r"""The bookkeeping that slots, pages and states have in common: `Allocator`, `Generations` and `Transaction`.

    FREE --take--> LIVE --release--> FREE
                     \--release(after=fence)--> PENDING --fence complete--> FREE

Each index is in one state, recorded twice on purpose: once in an array of states and once by the list it stands in.
Checks compare the two, so that a bug in either is found. Every operation costs O(indices that change), whatever the
size.

Each operation of a pool goes in three phases. First it queries fences and reads its arguments: that is code of the
engine, which may call the pool itself. Then it checks everything, and runs no code of the engine. Then it changes the
pool, between `operation = ...` and `operation = None` of its transaction: one mark around the whole change, set by the
operation of the pool (or by `Allocator.take`, where taking is its first change). An error is undone by the operation.
An interrupt (`KeyboardInterrupt`, or whatever else a signal handler raises) is not: the mark stays, and the pool
refuses every later call. Outside of the mark nothing is half changed.
"""

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, SupportsIndex, TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate._arrays import count
from batchstate._source_lines import Line, users_line
from batchstate.errors import ArgumentError, DtypeError, PoolBrokenError, PoolExhaustedError, another_runtime, expected
from batchstate.invariants import times_checked
from batchstate.mirror import Handles, MirroredTensor, Slots
from batchstate.runtime.agreement import QueriedFence
from batchstate.runtime.base import Fence, Runtime
from batchstate.violations import Code, Where

Ints = npt.NDArray[np.int64]

MOST_INDICES = 2**31 - 2
"""Entries of one pool: tables hold them in int32, and each has a row more than there are entries."""

MOST_TOKENS = 2**62
"""Tokens of one pool: sums of two such numbers are still int64."""

_MOST_LINES = 12
"""Stack frames kept per take: the library's own, and some of the engine."""


def size_of(value: SupportsIndex, subject: str, *, least: int = 0, most: int = MOST_INDICES) -> int:
    """`value` as an int from `least` to `most`. Else DtypeError, ArgumentError."""
    return count(value, subject, least=least, most=most)


@final
class Transaction:
    """The mark of a pool and of all that its slots own; a few attributes, to be quick.

    Attributes:
        operation: name of the operation that changes the pool, or was interrupted in it; None while the pool is whole.
        undoing: whether indices released now count as never taken.
        label: of the pool, for reports.
    """

    __slots__ = ("_asking", "_last", "_owner", "_runtime", "label", "operation", "undoing")

    def __init__(self, runtime: Runtime, label: str) -> None:
        self._runtime = runtime
        self._owner = runtime.owner
        self.label = label
        self.operation: str | None = None
        self.undoing = False
        self._asking: Any = (False for _ in ())  # the generator that asks fences
        self._last: QueriedFence | None = None

    def enter(self, operation: str) -> None:
        """Begins a call of the pool, or refuses it: OwnerThreadError, PoolBrokenError."""
        if self.operation is not None or get_ident() != self._owner.ident:
            self._refuse(operation)

    def changing(self, operation: str) -> Self:
        """The mark as a context, where its two calls more do not matter: an error takes it away, an interrupt not."""
        self.operation = operation
        return self

    def __enter__(self) -> None:
        """The mark is set already: an interrupt on the way here must find it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self.operation = None

    def _refuse(self, asked: str) -> NoReturn:
        self._runtime.check_owner(asked)
        raise PoolBrokenError(
            f"{asked}: `{self.operation}` has not ended in {self.label}, which may be half changed",
            self.operation,
            "if it was interrupted or could not be undone, make the pool anew, and what is over it. If it "
            "is running, do not call the pool from a listener, a finalizer or a signal handler",
        )

    def watch(self, fence: Fence) -> QueriedFence:
        """The answer of a fence behind which something is freed now: one for all that a step frees behind it."""
        last, runtime = self._last, self._runtime
        if last is None or last.fence is not fence or last.complete or last.step != runtime.step:
            group, step = runtime.agreement, runtime.step
            last = self._last = QueriedFence(fence, step) if group is None else group.watch(fence, step)
        return last

    def query(self, fences: Sequence[Fence | QueriedFence]) -> list[bool]:
        """Whether each fence is complete, or, in a group of ranks, agreed to be. Never waits.

        A fence is code of the engine: it may raise, and may call the pool. While it does nothing is complete, so that
        no fence is queried by its own query. The flag for that is `gi_running`, which the interpreter keeps: one that
        is reset in `finally` can be left set by an interrupt, and would hide every later completion.
        """
        if self._runtime.agreement is not None:  # an answer of this rank alone does not count
            return [isinstance(fence, QueriedFence) and fence.complete for fence in fences]
        if self._asking.gi_running:
            return [False] * len(fences)
        self._asking = (bool(fence.query()) for fence in fences)
        return list(self._asking)


class FreeIndices(Protocol):
    """Free indices of an allocator, in an order of their own."""

    count: int
    capacity: int

    def top(self, n: int) -> Ints:
        """The next `n` to be taken, in that order, as a new array. They stay free."""

    def drop(self, n: int) -> None:
        """Takes away the indices that `top(n)` shows."""

    def push(self, indices: Ints) -> None:
        """Makes `indices` free."""

    def entries(self) -> Ints:
        """All free indices, as a new array."""


Free = TypeVar("Free", bound=FreeIndices)


@final
class FreeList:
    """Free ones among the indices `first` to `last`, as a stack: the last freed are the first taken.

    At first all are free, the lowest on top. The stack grows downwards in its memory, so that indices taken or pushed
    together are one slice, in order.
    """

    def __init__(self, first: int, last: int) -> None:
        self._stack = np.arange(first, last + 1, dtype=np.int64)
        self.count = self.capacity = len(self._stack)

    def top(self, n: int) -> Ints:
        at = self.capacity - self.count
        return self._stack[at : at + n].copy()

    def drop(self, n: int) -> None:
        self.count -= n

    def push(self, indices: Ints) -> None:
        """Puts copies of `indices` on the stack so that `top` gives them in the same order."""
        at = self.capacity - self.count
        self._stack[at - indices.size : at] = indices
        self.count += indices.size

    def entries(self) -> Ints:
        return self._stack[self.capacity - self.count :].copy()


@final
@attrs.frozen(eq=False)
class AllFences:
    """Complete when each of `fences` is."""

    fences: tuple[Fence, ...]

    def query(self) -> bool:
        return all(fence.query() for fence in self.fences)

    def wait(self) -> None:
        for fence in self.fences:
            fence.wait()


def joined(*fences: Fence | None) -> Fence | None:
    """One fence for those that are not None, each once; None without any."""
    behind = tuple({id(fence): fence for fence in fences if fence is not None}.values())
    return AllFences(behind) if len(behind) > 1 else (behind[0] if behind else None)


@final
@attrs.define(eq=False)
class PendingQueue:
    """Groups of indices, each behind its fence. Groups leave in any order, as their fences complete.

    The queue copies the arrays that enter, so that nothing a caller does later reaches it. It queries fences and never
    waits for one. All are queried before anything moves, and a complete one is not queried again.
    """

    count: int = attrs.field(default=0, init=False)
    _groups: list[tuple[QueriedFence, list[Ints]]] = attrs.field(factory=list, init=False)

    def defer(self, fence: QueriedFence, indices: Ints) -> None:
        """Keeps a copy of `indices` until `fence` is complete, or agreed to be."""
        copy = indices.copy()
        if self._groups and self._groups[-1][0].fence is fence.fence:
            self._groups[-1][1].append(copy)
        else:
            self._groups.append((fence, [copy]))
        self.count += copy.size

    def completed(self, transaction: Transaction) -> list[tuple[QueriedFence, Ints]]:
        """The groups whose fences are complete, oldest first. Queries each fence once; they stay in the queue."""
        fences, groups = zip(*self._groups, strict=True)
        answers = transaction.query(fences)
        return [
            (fence, parts[0] if len(parts) == 1 else np.concatenate(parts))
            for fence, parts, complete in zip(fences, groups, answers, strict=True)
            if complete
        ]

    def remove(self, done: Sequence[tuple[QueriedFence, Ints]]) -> None:
        """Removes groups that `completed` has returned."""
        if len(done) == len(self._groups):
            self._groups = []
        else:
            gone = {id(fence) for fence, _ in done}
            self._groups = [group for group in self._groups if id(group[0]) not in gone]
        for _, indices in done:
            self.count -= indices.size

    def withdraw(self, indices: Ints) -> list[tuple[QueriedFence, Ints]]:
        """Takes `indices` out of the queue; returns the fences that they were behind, with those behind each."""
        withdrawn = []
        for fence, parts in self._groups:
            for at, part in enumerate(parts):
                hits = np.isin(part, indices)
                if np.count_nonzero(hits):
                    parts[at] = part[~hits]
                    withdrawn.append((fence, part[hits]))
        self.count -= sum(part.size for _, part in withdrawn)
        return withdrawn

    def groups(self) -> list[tuple[QueriedFence, Ints]]:
        """The fences with something behind them, and what it is, oldest first. Queries nothing."""
        return [(fence, some) for fence, parts in self._groups if (some := np.concatenate(parts)).size]

    def indices(self) -> Ints:
        """Everything in the queue, int64[count]."""
        parts = [part for _, group in self._groups for part in group]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


PADDING, FREE, PENDING, LIVE = 0, 1, 2, 3
FREE_BYTE, PENDING_BYTE, LIVE_BYTE = (bytes([state]) for state in (FREE, PENDING, LIVE))
# States as they are written. As arrays: numpy takes as long to convert one number as to write 100 of them.
FREE_MARK, PENDING_MARK, LIVE_MARK = (np.array(state, dtype=np.uint8) for state in (FREE, PENDING, LIVE))

# Members of an enumeration that the hot path counts by, found once.
CONSERVATION, IN_FLIGHT = Code.SLOT_CONSERVATION, Code.SLOT_IN_FLIGHT
OUT_OF_RANGE, DOUBLE_FREE = Code.SLOT_OUT_OF_RANGE, Code.SLOT_DOUBLE_FREE


@final
class Allocator:
    """Indices 1 to size + reserve. Index 0 is padding and is in no list.

    Not public: pools validate arguments and call this with int64 arrays of their own. Their operations set the mark of
    the transaction, but for `take`, which sets it once it has checked, and `reap`, which is an operation of its own.

    Attributes:
        transaction: shared by all that one slot owns.
        label: names the pool in reports.
        size: indices 1 to size can be taken ordinarily.
        reserve: further indices, up to size + reserve, which only `take(..., reserved=True)` returns.
        capacity: rows that a table indexed by these needs: size + reserve + 1.
        live, pending: how many are taken, and how many are behind a fence.
        peak_live: the most that were ever taken at once.
        taken_total, freed_total: how many were ever taken and released, but for takes that were undone.
        frees: how many were ever released, of these takes too.
        takes: calls of `take` for at least one.
    """

    def __init__(
        self,
        runtime: Runtime,
        size: int,
        *,
        reserve: int = 0,
        label: str,
        transaction: Transaction,
        free_list: Callable[[int, int], FreeIndices] = FreeList,
    ) -> None:
        self.runtime = runtime
        self.transaction = transaction
        self.label = label
        self.size = size
        self.reserve = reserve
        self.capacity = size + reserve + 1
        self._total = size + reserve
        self.live = 0
        self.peak_live = self._peak_before = 0  # of the last take
        self.taken_total = 0
        self.frees = 0
        self.takes = 0
        self.freed_total = 0
        self._ordinary = free_list(1, size)
        self._reserved = free_list(size + 1, size + reserve)
        self._queue = PendingQueue()
        self._taken_at: dict[int, Sequence[Line]] = {}  # at `full`
        # Twice as many states as indices, so that those after the last, and negative ones, which count from the end,
        # fall on padding (memory that is not touched costs nothing). See `all_are` and `_states_of`.
        self._states = np.zeros(2 * self.capacity + 1, dtype=np.uint8)
        self._states[1 : self.capacity] = FREE
        self._row_of = np.zeros(self.capacity, dtype=np.int32)  # scratch of `repeated` and `distinct`
        self._rows = np.arange(256, dtype=np.int32)

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
        """How many of the free ones only a reserved take returns."""
        return self._reserved.count

    @property
    def pending(self) -> int:
        """How many are behind a fence."""
        return self._queue.count

    def pending_groups(self) -> list[tuple[QueriedFence, Ints]]:
        """The fences that indices are behind, each with these, oldest first."""
        return self._queue.groups()

    # Taking

    def check_available(self, n: int, *, reserved: bool = False) -> None:
        """Refuses (PoolExhaustedError) if `n` cannot be taken. Queries no fence: `reap` comes first."""
        free = self._ordinary.count + (self._reserved.count if reserved else 0)
        if n > free:
            last = self.size + (self.reserve if reserved else 0)
            usable = [(queried.step, int(np.sum(indices <= last))) for queried, indices in self._queue.groups()]
            since = min((step for step, behind in usable if behind), default=None)
            raise PoolExhaustedError(
                self.label,
                requested=n,
                free=free,
                pending=sum(behind for _, behind in usable),
                size=last,
                free_reserved=0 if reserved else self._reserved.count,
                pending_since=since,
                overdue=since is not None and self.runtime.step - since > self.runtime.steps_in_flight,
            )

    def next_free(self, n: int) -> Ints:
        """The indices that `take(n)` would return now, int64[n], a new array."""
        return self._ordinary.top(n)

    def take(self, n: int, operation: str, *, reserved: bool = False) -> Ints:
        """Takes `n`, int64[n]: of the reserve first if `reserved`, then of the ordinary ones. Queries no fence.

        Raises:
            PoolExhaustedError: fewer are free.
            Violation: SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE, SLOT_IN_FLIGHT, SLOT_SHARED, at `cheap`.
        """
        ordinary, from_reserve = n, 0
        if reserved:
            from_reserve = min(n, self._reserved.count)
            ordinary = n - from_reserve
        if ordinary > self._ordinary.count:
            self.check_available(n, reserved=reserved)
        indices = self._ordinary.top(ordinary)
        if from_reserve:
            indices = np.concatenate([self._reserved.top(from_reserve), indices])
        if levels.cheap:
            self._check_fresh(indices, reserved, operation)
        self.transaction.operation = operation
        self._ordinary.drop(ordinary)
        if from_reserve:
            self._reserved.drop(from_reserve)
        self._states[indices] = LIVE_MARK
        if levels.full or self._taken_at:
            self._note_lines(indices)
        if self.runtime.agreement is not None:
            self.runtime.agreement.note(indices)
        self.taken_total += n
        self.takes += n > 0
        self._peak_before = self.peak_live
        self.live = live = self.live + n
        if live > self.peak_live:
            self.peak_live = live
        return indices

    def revive(self, indices: Ints) -> list[tuple[QueriedFence, Ints]]:
        """Makes unowned indices live that were taken from the free list, or withdraws them if they are pending.

        Returns:
            the fences that pending ones were behind, with those behind each.
        """
        fences = self._queue.withdraw(indices) if self._queue.count else []
        self._states[indices] = LIVE_MARK
        if levels.full or self._taken_at:
            self._note_lines(indices)
        if self.runtime.agreement is not None:
            self.runtime.agreement.note(indices)
        self.taken_total += indices.size
        self.live += indices.size
        self.peak_live = max(self.peak_live, self.live)
        return fences

    def replace_free_list(self, make: Callable[[FreeIndices], Free]) -> Free:
        """Has the ordinary free ones kept by another list, which takes them over, and returns it."""
        self._ordinary = made = make(self._ordinary)
        return made

    def _note_lines(self, indices: Ints) -> None:
        """Remembers, at `full`, the lines that led to taking `indices`, innermost first."""
        lines: list[Line] = []
        frame = sys._getframe(2) if levels.full else None
        while frame is not None and len(lines) < _MOST_LINES:
            lines.append(Line(frame.f_code, frame.f_lineno))
            frame = frame.f_back
        self._taken_at.update(dict.fromkeys(indices.tolist(), lines))

    def _named(self, index: int) -> str:
        """A live index, with the line where it was taken, if that is known."""
        line = users_line(self._taken_at.get(index, ()))
        return str(index) if line is None else f"{index} (taken at {line})"

    # Releasing

    def release(self, indices: Ints, after: Fence | None, operation: str) -> None:
        """Frees indices, at once or when `after` is complete. The caller has shown that they are live and unique.

        Raises:
            Violation: SLOT_CONSERVATION, SLOT_IN_FLIGHT, at `cheap`.
        """
        n = indices.size
        if not n:
            return
        if self.runtime.agreement is not None:
            self.runtime.agreement.note(indices)
        if after is None:
            self._push_free(indices)
        else:
            self._states[indices] = PENDING_MARK
            self._queue.defer(self.transaction.watch(after), indices)
        self.live -= n
        self.frees += n
        if self.transaction.undoing:
            self.taken_total -= n
            self.takes -= 1
            self.peak_live = self._peak_before
        else:
            self.freed_total += n
        if levels.cheap:
            if after is not None:
                times_checked[IN_FLIGHT] += 1
                if not self.all_are(indices, PENDING_BYTE):
                    invariants.slot_in_flight(indices, self._states_of(indices) != PENDING, **self.where(operation))
            self.check_conservation(operation)

    def check_none_pending(self, operation: str) -> None:
        """Refuses (SLOT_IN_FLIGHT) if indices are behind a fence that was not complete in the last `reap`; names it."""
        for fence, indices in self._queue.groups():
            in_flight, behind = np.ones(indices.size, dtype=np.bool_), f"{fence.fence!r}, freed in step {fence.step}"
            invariants.slot_in_flight(indices, in_flight, behind=behind, **self.where(operation))

    def sort_free(self) -> None:
        """Makes the free ones come in ascending order again. Costs O(size)."""
        for free_list in (self._ordinary, self._reserved):
            indices = np.sort(free_list.entries())
            free_list.drop(indices.size)
            free_list.push(indices)

    def reap(self) -> int:
        """Makes free the indices behind complete fences; says how many. Never waits, queries nothing under capture.

        If a fence raises, the error comes through, and nothing has changed. Called by a fence that it queries, it does
        nothing.

        Raises:
            Violation: SLOT_IN_FLIGHT, SLOT_DOUBLE_FREE, SLOT_CONSERVATION, at `cheap`.
        """
        if not self._queue.count or self.runtime.capturing:
            return 0
        done = self._queue.completed(self.transaction)
        if not done:
            return 0
        if levels.cheap:
            for fence, indices in done:
                if not fence.complete:
                    in_flight = np.ones(indices.size, dtype=np.bool_)
                    invariants.slot_in_flight(indices, in_flight, **self.where("reap"))
                self._check_reaped(indices, "reap")
        self.transaction.operation = "reap"
        self._queue.remove(done)
        reaped = 0
        for _, indices in done:
            self._push_free(indices)
            reaped += indices.size
        self.transaction.operation = None
        if levels.cheap:
            self.check_conservation("reap")
        return reaped

    def _push_free(self, indices: Ints) -> None:
        self._states[indices] = FREE_MARK
        if self.reserve:
            ordinary = indices <= self.size
            self._push(self._reserved, indices[~ordinary])
            indices = indices[ordinary]
        self._push(self._ordinary, indices)

    def _push(self, free_list: FreeIndices, indices: Ints) -> None:
        count = free_list.count + indices.size
        if count > free_list.capacity:
            invariants.slot_conservation(count, 0, 0, free_list.capacity, **self.where("push"))
        free_list.push(indices)

    # Queries

    def live_among(self, indices: Ints) -> npt.NDArray[np.bool_]:
        """Whether each of `indices` is live, bool[n]; those out of range are not."""
        live: npt.NDArray[np.bool_] = self._states_of(indices) == LIVE
        return live

    def all_are(self, indices: Ints, state: bytes) -> bool:
        """Whether each of `indices` is in this state, one of the `_BYTE`s. O(n), the fastest way to ask.

        Those after the last are in none. Negative ones are in none down to -capacity, where placeholders are; still
        lower ones, which no free list can hold, are found at `full`.
        """
        try:  # bytes are compared in a fraction of the time in which numpy compares two arrays and counts
            if indices.size == 1:
                return self._states.item(indices.item()) == state[0]
            return self._states[indices].tobytes() == state * indices.size
        except IndexError:
            return False

    def live_indices(self) -> Ints:
        """All live ones in ascending order, int64[live]. Costs O(size)."""
        return np.flatnonzero(self._states[: self.capacity] == LIVE)

    def unowned(self) -> Ints:
        """All free and pending ones, int64[free + pending]; duplicates are kept."""
        return np.concatenate([self._ordinary.entries(), self._reserved.entries(), self._queue.indices()])

    def repeated(self, indices: Ints) -> bool:
        """Whether an index (in range) stands in `indices` twice. O(n), no sort."""
        if indices.size < 2:
            return False
        rows, last = self._last_rows(indices)
        return last.tobytes() != rows.tobytes()

    def distinct(self, indices: Ints) -> Ints:
        """Each of `indices` (in range) once. O(n), no sort."""
        rows, last = self._last_rows(indices)
        distinct: Ints = indices[last == rows]
        return distinct

    def _last_rows(self, indices: Ints) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """All rows, and for each the last that names its index: of several writes to one place one remains."""
        if self._rows.size < indices.size:
            self._rows = np.arange(2 * indices.size, dtype=np.int32)
        rows = self._rows[: indices.size]
        self._row_of[indices] = rows
        return rows, self._row_of[indices]

    def _states_of(self, indices: Ints) -> npt.NDArray[np.uint8]:
        """The state of each; PADDING for what is out of range.

        Clipping sends negative numbers to index 0 and large ones to the last state, both PADDING, so that one look-up
        answers for range, padding and state.
        """
        return self._states.take(indices, mode="clip")

    # Checks

    def check_conservation(self, operation: str) -> None:
        """Checks that free + pending + live = size + reserve, by three counts kept apart: SLOT_CONSERVATION."""
        free, pending, live = self._ordinary.count + self._reserved.count, self._queue.count, self.live
        # `slot_conservation.holds` takes 0.7 us more, of the 9 us that a take and a free take.
        if free + pending + live == self._total and free >= 0 and live >= 0:
            times_checked[CONSERVATION] += 1
            return
        invariants.slot_conservation(free, pending, live, self._total, **self.where(operation))

    def expect_idle(self, operation: str) -> None:
        """Checks that nothing is live: SLOT_CONSERVATION, naming some indices that are."""
        self.reap()
        if self.live:
            self.check_live(0, operation, leaked=self.live_indices(), named=self._named)

    def check_live(self, live: int, operation: str, **report: Any) -> None:
        """Checks that so many are live, as counted elsewhere: SLOT_CONSERVATION; see there for `report`."""
        invariants.slot_conservation(self.free, self.pending, live, self._total, **report, **self.where(operation))

    def verify(self, operation: str = "verify") -> None:
        """Checks every invariant of the allocator from scratch. Costs O(size).

        Raises:
            Violation: SLOT_CONSERVATION, SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE, SLOT_SHARED, SLOT_IN_FLIGHT.
        """
        where = self.where(operation)
        self.check_conservation(operation)
        live = self.live_indices()
        ordinary, reserved, pending = self._ordinary.entries(), self._reserved.entries(), self._queue.indices()
        for indices, end in ((ordinary, self.size + 1), (reserved, self.capacity), (pending, self.capacity)):
            invariants.slot_out_of_range(indices, end, **where)
            invariants.slot_zero_allocated(indices, **where)
        free = np.concatenate([ordinary, reserved])
        states = self._states[free]
        invariants.slot_in_flight(free, states == PENDING, **where)
        everything = np.concatenate([live, free, pending])
        if self.repeated(everything):
            invariants.slot_shared(everything, **where)
        self._check_reaped(pending, operation)
        for part, end, size in ((ordinary, self.size + 1, self.size), (reserved, self.capacity, self.reserve)):
            states = self._states[end - size : end]
            held = [int(np.count_nonzero(states == state)) for state in (PENDING, LIVE)]
            invariants.slot_conservation(part.size, held[0], held[1], size, **where)
        invariants.slot_conservation(free.size, pending.size, live.size, self._total, **where)
        invariants.slot_conservation(free.size, pending.size, self.live, self._total, **where)

    def _check_fresh(self, indices: Ints, reserved: bool, operation: str) -> None:
        """Checks that indices about to be taken are free."""
        times_checked[IN_FLIGHT] += 1
        if (
            self.all_are(indices, FREE_BYTE)
            and (not self.reserve or reserved or int(indices.max(initial=0)) <= self.size)
            and not (levels.full and (self.repeated(indices) or int(indices.min(initial=1)) < 1))
        ):
            return
        where, end = self.where(operation), self.capacity if reserved else self.size + 1
        invariants.slot_out_of_range(indices, end, **where)
        invariants.slot_zero_allocated(indices, **where)
        invariants.slot_in_flight(indices, self._states_of(indices) == PENDING, **where)
        invariants.slot_shared(np.concatenate([self.live_indices(), indices]), **where)

    def _check_reaped(self, indices: Ints, operation: str) -> None:
        """Checks that indices that leave the queue are those that entered it."""
        times_checked[OUT_OF_RANGE] += 1
        times_checked[DOUBLE_FREE] += 1
        if self.all_are(indices, PENDING_BYTE) and not self.repeated(indices):  # the fast form of both
            return
        where = self.where(operation)
        invariants.slot_out_of_range(indices, self.capacity, **where)
        invariants.slot_double_free(indices, self._states_of(indices) == PENDING, **where)

    def where(self, operation: str) -> Where:
        """For reports of invariants."""
        return {"object": self.label, "operation": operation, "step": self.runtime.step}


ONE = np.array(1)  # numpy takes as long to convert one number as to add 100 of them
DOUBLE_FREE, STALE_HANDLE = Code.SLOT_DOUBLE_FREE, Code.SLOT_STALE_HANDLE

_pool_ids = itertools.count(1)
_pools: "weakref.WeakValueDictionary[int, Generations]" = weakref.WeakValueDictionary()


@final
class Generations:
    """The generations of one pool's slots or pages. The generation of one rises when it is taken and never falls.

    A handle is good while its slot is live and has the generation that the handle holds. So the order in which slots
    are reused does not matter: the last one freed may be the next one taken, and a handle kept too long is still found.
    """

    def __init__(self, runtime: Runtime, allocator: Allocator, *, name: str) -> None:
        self.pool_id = next(_pool_ids)
        self.name = name
        self._runtime = runtime
        self._allocator = allocator
        self._generations = np.zeros(allocator.capacity, dtype=np.int64)
        self._seen = self._generations.copy()  # at the last `verify`
        _pools[self.pool_id] = self

    def new_handles(self, rows: Ints) -> Slots:
        """New handles for slots that were just taken: takes over `rows`, int64[n]. Raises as `rise`."""
        slots = Slots.of_pool(self._runtime, rows, self.rise(rows), pool_id=self.pool_id, name=self.name)
        slots.held_at = self._allocator.frees
        return slots

    def rise(self, rows: Ints) -> Ints:
        """Raises the generations of `rows`, which were just taken, and returns them, int64[n].

        SLOT_STALE_HANDLE, at `cheap`: a generation did not rise.
        """
        before = self._generations[rows]
        generations: Ints = before + ONE
        self._generations[rows] = generations
        if levels.cheap and (
            generations.item() <= before.item() if rows.size == 1 else 1 in (generations <= before).tobytes()
        ):
            # A generation that stands still would make the handles of the former owner valid again.
            invariants.slot_stale_handle(rows, before + 1, generations, **self._allocator.where("take"))
        return generations

    @property
    def frees(self) -> int:
        """How many indices were ever freed: while it stays, every handle that was live is live."""
        return self._allocator.frees

    def of(self, rows: Ints) -> Ints:
        """The present generations of `rows`, int64[n]."""
        return self._generations[rows]

    @staticmethod
    def of_pool(pool_id: int) -> "Generations | None":
        """Those of the pool with this id; None for 0 and for a pool that is gone."""
        return _pools.get(pool_id)

    def rows_of(self, slots: Slots, operation: str, *, unique: bool = False, padded: bool = False) -> Ints:
        """The numbers of handles of this pool that are all good, int64[n], read-only; see `SlotPool.rows_of`."""
        numbers, held = self.numbers_of(slots, Slots, operation, padded=padded)
        rows = numbers.view()
        rows.setflags(write=False)
        frees = self._allocator.frees
        if slots.held_at == frees and not levels.full:
            times_checked[STALE_HANDLE] += 1
        elif padded and rows.size and not rows[-1]:
            owned = np.count_nonzero(rows)
            self.check_held(rows[:owned], held[:owned], operation)
        else:
            self.check_held(rows, held, operation)
            slots.held_at = frees
        if unique and self._allocator.repeated(rows):
            invariants.slot_shared(rows, **self._allocator.where(operation))
        return rows

    def check_held(self, rows: Ints, held: Ints, operation: str) -> None:
        """Refuses rows int64[n] if one is not live, or not of the generation `held`."""
        times_checked[STALE_HANDLE] += 1
        if not self.all_held(rows, held):
            where = self._allocator.where(operation)
            invariants.slot_out_of_range(rows, self._allocator.capacity, **where)
            invariants.slot_zero_allocated(rows, **where)
            current = np.where(self._allocator.live_among(rows), self._generations[rows], -1)
            invariants.slot_stale_handle(rows, held, current, **where)

    def check_to_free(self, rows: Ints, held: Ints, operation: str) -> None:
        """The same for slots that are about to be freed: dead and repeated ones are SLOT_DOUBLE_FREE."""
        times_checked[DOUBLE_FREE] += 1
        if not self.all_held(rows, held) or (rows.size > 1 and self._allocator.repeated(rows)):
            where = self._allocator.where(operation)
            invariants.slot_out_of_range(rows, self._allocator.capacity, **where)
            invariants.slot_zero_allocated(rows, **where)
            invariants.slot_double_free(rows, self._allocator.live_among(rows), **where)
            invariants.slot_stale_handle(rows, held, self._generations[rows], **where)

    def handles(self, rows: Ints) -> Slots:
        """Handles of the present owners of `rows`, int64[n], which are live: for checks."""
        return Slots.of_pool(self._runtime, rows, self._generations[rows], pool_id=self.pool_id, name=self.name)

    def verify(self) -> None:
        """Checks that no generation fell since the last time: SLOT_STALE_HANDLE."""
        everyone = np.arange(self._generations.size, dtype=np.int64)
        least = np.maximum(self._generations, self._seen)
        invariants.slot_stale_handle(everyone, least, self._generations, **self._allocator.where("verify"))
        self._seen = self._generations.copy()

    def numbers_of(
        self, slots: object, kind: type[Handles], operation: str, *, padded: bool = False
    ) -> tuple[Ints, Ints]:
        """The arrays of handles that are of this pool, or with `padded` all padding: numbers, generations."""
        if not isinstance(slots, kind):
            if isinstance(slots, MirroredTensor) and slots.unit is not None:
                invariants.unit_mismatch(str(kind.unit), str(slots.unit), **self._allocator.where(operation))
            remedy = f"pass handles, as the pool returns them; a number does not say whose {kind.unit} it is"
            raise expected(f"{self.name}: {operation}", f"{kind.unit}s", slots, remedy, DtypeError)
        if levels.full:
            slots.check(operation)
        if slots._windows:
            slots._check_fresh("host")
        rows: Ints = slots._host_side()
        if slots.runtime is not self._runtime:
            raise another_runtime(self.name, slots)
        if slots._pool_id != self.pool_id and (np.count_nonzero(rows) if padded else rows.size):
            other = _pools.get(slots.pool_id)
            whose = "no pool" if other is None else f"pool {other.name!r}"
            problem = f"{operation}: expected {kind.unit}s of pool {self.name!r}, got {kind.unit}s of {whose}"
            remedy = f"use {kind.unit}s with the pool that returned them, and with the tables and pools made over it"
            raise ArgumentError(problem, slots, remedy)
        return rows, slots._generations  # type: ignore[return-value]

    def all_held(self, rows: Ints, held: Ints) -> bool:
        """Whether each handle is live and of its slot's present owner: the fast form of four invariants, O(n).

        Rows outside are in no state, or beyond the generations, which are half as many.
        """
        try:
            return self._allocator.all_are(rows, LIVE_BYTE) and self._generations[rows].tobytes() == held.tobytes()
        except IndexError:
            return False


class SlotListener:
    """Takes part in every take and free of a `SlotPool`, for memory or states that a slot owns besides.

    The pool first calls `before_take` or `before_free` of all its listeners, then `check_take`, `check_free` or
    `check_release`, and changes nothing if one raises. Each method here does nothing; a subclass overrides those it
    needs. Only the first two may run code of the engine, such as fences; while `on_take`, `on_free` or `on_clear` runs,
    the pool refuses calls; in `check_conservation` and `verify` its numbers can be read. `SlotPool.clear` frees all
    live slots, and then calls `on_clear`.
    """

    def before_take(self) -> None:
        """Queries fences that decide what is free."""

    def before_free(self, rows: Ints) -> None:
        """Queries fences that decide whether slots may be freed: numbers that have not been checked yet, int64[n]."""

    def check_take(self, n: int) -> None:
        """Refuses if what `n` slots need is not there. Changes nothing."""

    def on_take(self, rows: Ints) -> None:
        """Gives the slots `rows` int64[n] what they need. On an error it has changed nothing."""

    def check_free(self, rows: Ints, operation: str) -> None:
        """Refuses if the slots may not be freed now. Changes nothing."""

    def check_release(self, rows: Ints, operation: str) -> None:
        """Refuses if the slots may not be freed now, with all that they own. Changes nothing."""
        self.check_free(rows, operation)

    def check_clear(self, operation: str) -> None:
        """Refuses if something is behind a fence that is not complete. Changes nothing."""

    def on_clear(self) -> None:
        """Begins anew. No slot is live, and nothing is pending."""

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        """Releases what the slots own, behind the same fence."""

    def check_conservation(self, live: int, operation: str) -> None:
        """Refuses if what is owned does not go with `live` slots. Costs O(1)."""

    def verify(self) -> None:
        """Checks every invariant of what the slots own from scratch."""
