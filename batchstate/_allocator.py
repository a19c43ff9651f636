r"""The part that slots, pages and states have in common: `Allocator` over `_core.Indices`, and `Transaction`.

    FREE --take--> LIVE --release--> FREE
                     \--release(after=fence)--> PENDING --fence complete--> FREE

Each index is in one state, recorded twice on purpose: once in an array of states and once by the list it stands in.
Checks compare the two, so that a bug in either is found. Every operation costs O(indices that change), whatever the
size. All that is let go behind one fence is one group, of slots, states and pages, and comes back in one call.

Each operation of a pool goes in three phases. First it queries fences and reads its arguments: that is code of the
engine, which may call the pool itself. Then it checks everything, and runs no code of the engine. Then it changes the
pool, between `operation = ...` and `operation = None` of its transaction: one mark around the whole change. An error is
undone by the operation. An interrupt (`KeyboardInterrupt`, or whatever else a signal handler raises) is not: the mark
stays, and the pool refuses every later call. Outside of the mark nothing is half changed.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from threading import get_ident
from typing import Any, NoReturn, Protocol, SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate._arrays import Ints, count, read_only
from batchstate._core import STATES, Indices, Left, Requests, tally
from batchstate._launches import Launches
from batchstate._source_lines import Line, users_line
from batchstate.errors import (
    ArgumentError,
    DtypeError,
    PoolBrokenError,
    PoolExhaustedError,
    another_runtime,
    expected,
    unexplained,
)
from batchstate.invariants import times_checked
from batchstate.mirror import Handles, MirroredTensor, Slots, pools
from batchstate.runtime.agreement import QueriedFence
from batchstate.runtime.base import Fence, Runtime
from batchstate.violations import Code, Where

MOST_INDICES = 2**31 - 2  # of one pool: tables hold them in int32, and have a row more
MOST_TOKENS = 2**62  # of one pool: sums of two such numbers are still int64

_, FREE, PENDING, LIVE, RETIRED = STATES

_CONSERVATION, _IN_FLIGHT = Code.SLOT_CONSERVATION, Code.SLOT_IN_FLIGHT
DOUBLE_FREE = Code.SLOT_DOUBLE_FREE
STALE_HANDLE = Code.SLOT_STALE_HANDLE
_RELEASED, _DEFERRED = (_CONSERVATION,), (_CONSERVATION, _IN_FLIGHT)
_REAPED = Code.SLOT_OUT_OF_RANGE, DOUBLE_FREE, _IN_FLIGHT, _CONSERVATION


def size_of(value: SupportsIndex, subject: str, *, least: int = 0, most: int = MOST_INDICES) -> int:
    """`value` as an int from `least` to `most`. Else DtypeError, ArgumentError."""
    return count(value, subject, least=least, most=most)


@final
class Transaction:
    """The mark of a pool and of all that its slots own.

    Attributes:
        operation: name of the operation that changes the pool, or was interrupted in it; None while the pool is whole.
        undoing: whether indices released now count as never taken.
        groups: what was let go behind fences that are not complete, oldest first.
        launches: the forwards that use the slots; of a pool of slots alone.
    """

    launches: Launches
    __slots__ = ("_asking", "_owner", "_runtime", "groups", "label", "launches", "operation", "undoing")

    def __init__(self, runtime: Runtime, label: str) -> None:
        self._runtime = runtime
        self._owner = runtime.owner
        self.label = label
        self.operation: str | None = None
        self.undoing = False
        self.groups: list[Group] = []
        self._asking: Any = (False for _ in ())  # the generator that asks fences

    def enter(self, operation: str) -> None:
        """Begins a call of the pool, or refuses it: OwnerThreadError, PoolBrokenError."""
        if self.operation is not None or get_ident() != self._owner.ident:
            self._runtime.check_owner(operation)
            raise PoolBrokenError(
                f"{operation}: `{self.operation}` has not ended in {self.label}, which may be half changed",
                self.operation,
                "if it was interrupted or could not be undone, make the pool anew, and what is over it. If it is "
                "running, do not call the pool from a listener, a finalizer or a signal handler",
            )

    @contextmanager
    def changing(self, operation: str) -> Iterator[None]:
        """The mark, where the cost of a context does not matter: an error takes it away, an interrupt does not."""
        self.operation = operation
        try:
            yield
        except Exception:
            self.operation = None
            raise
        self.operation = None

    def watch(self, fence: Fence) -> QueriedFence:
        """A fence, and its answer from now on."""
        group, step = self._runtime.agreement, self._runtime.step
        return QueriedFence(fence, step) if group is None else group.watch(fence, step)

    def behind(self, fence: Fence) -> Left:
        """The group of all that is let go behind a fence."""
        for group in self.groups[-1:]:
            if group.fence.fence is fence and not group.fence.complete:
                return group.left
        group = Group(self.watch(fence), Left())
        self.groups.append(group)
        return group.left

    def reap(self) -> "Sequence[Group]":
        """Makes free what is behind complete fences, of all pools, and returns it. Never waits.

        Fences are code of the engine, and may call the pool: to be called before anything is checked. If one raises,
        nothing has changed. Called by a fence that it queries, it does nothing; nor does it under capture.
        """
        if not self.groups or self._runtime.capturing:
            return ()
        groups = tuple(self.groups)
        done = [*itertools.compress(groups, self.query([group.fence for group in groups]))]
        cheap = levels.cheap
        for group in done:
            if cheap and not group.fence.complete:
                group.refuse_in_flight("reap")
            tally(times_checked, _REAPED)
            self.operation = "reap"
            wrong = group.left.reap(cheap)
            if wrong < 0:
                self.groups.remove(group)
            self.operation = None
            if wrong != -1:
                group.refuse_reaped()
        return done

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
    """Free indices of an allocator, `count` of them, kept outside of the core in an order of their own.

    `top` and `entries` show the next `n` to be taken, and all, as new arrays; `drop` takes those of `top` away.
    """

    count: int

    def top(self, n: int) -> Ints: ...
    def drop(self, n: int) -> None: ...
    def push(self, indices: Ints) -> None: ...
    def entries(self) -> Ints: ...


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


def waiting_for(groups: Iterable[tuple[Ints, int]]) -> str:
    """Pending entries in a report, by the step in which they were freed: ` (3, 4 since step 7)`."""
    steps = [f"{', '.join(map(str, entries.tolist()))} since step {step}" for entries, step in groups]
    return f" ({'; '.join(steps[:4])}{'; ...' if len(steps) > 4 else ''})" if steps else ""


def joined(*fences: Fence | None) -> Fence | None:
    """One fence for those that are not None, each once; None without any."""
    behind = tuple({id(fence): fence for fence in fences if fence is not None}.values())
    return AllFences(behind) if len(behind) > 1 else (behind[0] if behind else None)


@final
@attrs.define(eq=False)
class Group:
    """All that was let go behind one fence."""

    fence: QueriedFence
    left: Left

    def parts(self) -> "list[tuple[HandlePool, Ints]]":
        """Pools, and the indices or pages of each, int64[n]. For reports: it looks for them among all pools."""
        parts = [(pool, self.left.of(pool.core)) for pool in pools.values()]
        return [(pool, numbers) for pool, numbers in parts if numbers.size]

    def refuse_in_flight(self, operation: str) -> None:
        """Raises SLOT_IN_FLIGHT for what is there."""
        behind = f"{self.fence.fence!r}, freed in step {self.fence.step}"
        for pool, numbers in self.parts():
            in_flight = np.ones(numbers.size, dtype=np.bool_)
            invariants.slot_in_flight(numbers, in_flight, behind=behind, **pool.where(operation))

    def refuse_reaped(self) -> NoReturn:
        """Raises what is wrong where the core finds its own numbers broken."""
        for pool, numbers in self.parts():
            pool.refuse_reaped(numbers)
        raise unexplained("a fence", "reap", repr(self.left))


_MOST_LINES = 12  # stack frames kept per take: the library's own, and some of the engine


@final
class TakenAt:
    """The lines that led to taking each index, innermost first, of takes at `full`. Ranks compare what is taken."""

    def __init__(self, runtime: Runtime) -> None:
        self.lines: dict[int, Sequence[Line]] = {}
        self._runtime = runtime

    @property
    def wanted(self) -> bool:
        """Whether `note` keeps or compares anything."""
        return levels.full or bool(self.lines) or self._runtime.agreement is not None

    def note(self, indices: Ints, *also: Ints) -> None:
        """The caller takes indices int64[n]; below `full` they have no lines any more. Ranks compare `also` too."""
        if self._runtime.agreement is not None:
            self._runtime.agreement.note(indices, *also)
        if not (levels.full or self.lines):
            return
        lines: list[Line] = []
        frame = sys._getframe(1) if levels.full else None
        while frame is not None and len(lines) < _MOST_LINES:
            lines.append(Line(frame.f_code, frame.f_lineno))
            frame = frame.f_back
        self.lines.update(dict.fromkeys(indices.tolist(), lines))

    def named(self, index: int) -> str:
        """A live index, with the line outside of the library where it was taken."""
        line = users_line(self.lines.get(index, ()))
        return str(index) if line is None else f"{index} (taken at {line})"


_pool_ids = itertools.count(1)


class HandlePool(Protocol):
    """A pool whose handles carry its id: of slots, or of pages.

    `refuse_reaped` raises what is wrong with indices or pages that a complete fence makes free, or with the counts.
    """

    runtime: Runtime
    transaction: Transaction
    name: str
    pool_id: int
    core: Any

    def where(self, operation: str) -> Where: ...
    def check_kept(self, handles: Any, operation: str) -> None: ...
    def refuse_reaped(self, numbers: Ints) -> None: ...


def new_pool_id(pool: HandlePool) -> int:
    pool_id = next(_pool_ids)
    pools[pool_id] = pool
    return pool_id


def check_of_pool(pool: HandlePool, handles: object, kind: type[Handles], operation: str, padded: bool = False) -> None:
    """Refuses handles that are not of this pool, nor with `padded` all padding."""
    if not isinstance(handles, kind):
        if isinstance(handles, MirroredTensor) and handles.unit is not None:
            invariants.unit_mismatch(str(kind.unit), str(handles.unit), **pool.where(operation))
        such = ", such as `batch.slots`" * (kind.unit == "slot")
        remedy = f"pass handles, as the pool returns them{such}; a number does not say whose {kind.unit} it is"
        raise expected(f"{pool.name}: {operation}", f"{kind.unit}s", handles, remedy, DtypeError)
    if levels.full:
        handles.check(operation)
    if handles._windows:
        handles._check_fresh("host")
    if handles._pool_id == pool.pool_id and handles.runtime is pool.runtime:
        return
    rows = handles._host_side()
    if handles.runtime is not pool.runtime:
        raise another_runtime(pool.name, handles)
    if np.count_nonzero(rows) if padded else rows.size:
        other = pools.get(handles._pool_id)
        whose = "no pool" if other is None else f"pool {other.name!r}"
        problem = f"{operation}: expected {kind.unit}s of pool {pool.name!r}, got {kind.unit}s of {whose}"
        remedy = f"use {kind.unit}s with the pool that returned them, and with the tables and pools made over it"
        raise ArgumentError(problem, handles, remedy)


@final
class Allocator:
    """Indices 1 to size + reserve, with the handles of those that have an owner. Index 0 is padding, and in no list.

    Pools validate arguments and call this with int64 arrays. Their operations set the mark of the transaction, but for
    `take`, which sets it when the core alone can still refuse, and `reap`, an operation of its own.

    A handle is good while its index is live and has the generation that the handle holds. So the order in which indices
    are reused does not matter: the last one freed may be the next one taken, and a handle kept too long is still found.

    Attributes:
        core: the numbers; those of them that have a property here are described in `SlotStats`.
        label: of the pool, in reports.
        name: of the pool, in messages.
        pool_id: which the handles carry. They may be of places, `per_index` for each index, as on a page.
        states: the state of each index, uint8[capacity].
        taken_at: what reports say of takes.
    """

    def __init__(
        self,
        runtime: Runtime,
        size: int,
        *,
        reserve: int = 0,
        label: str,
        transaction: Transaction,
        name: str = "",
        outside: FreeIndices | None = None,
        per_index: int = 1,
    ) -> None:
        self.runtime = runtime
        self._per_index = per_index
        self.transaction = transaction
        self.label, self.name = label, name
        self.core = Indices(size, reserve, outside is None)
        self.size, self.reserve, self.capacity = size, reserve, size + reserve + 1
        if runtime.agreement is not None:
            runtime.agreement.note_memory(f"reserve {reserve} of", size)
        self.states: npt.NDArray[np.uint8] = self.core.arrays["state"]
        self._rows: Ints = self.core.arrays["rows"]
        self._gens: Ints = self.core.arrays["gens"]
        self._outside = outside
        self.taken_at = TakenAt(runtime)
        self._generations_seen: Ints = np.zeros(self.capacity, dtype=np.int64)  # at the last `verify`
        self.pool_id = self.core.pool = new_pool_id(self)

    free_reserved = property(attrgetter("core.free_reserved"))
    pending = property(attrgetter("core.pending"))
    live = property(attrgetter("core.live"))
    retired = property(attrgetter("core.retired"))
    peak_live = property(attrgetter("core.peak_live"))
    taken_total = property(attrgetter("core.taken_total"))
    freed_total = property(attrgetter("core.freed_total"))
    takes = property(attrgetter("core.takes"))

    @property
    def free(self) -> int:
        return int(self.core.free + self.core.free_reserved)

    @property
    def _total(self) -> int:
        return int(self.capacity - 1 - self.core.retired)

    def pending_groups(self) -> list[tuple[QueriedFence, Ints]]:
        """The fences that indices are behind, each with these, oldest first. Queries nothing."""
        parts = [(group.fence, group.left.of(self.core)) for group in self.transaction.groups]
        return [(fence, indices) for fence, indices in parts if indices.size]

    # Taking

    def check_available(self, n: int, *, reserved: bool = False) -> None:
        """Refuses if `n` cannot be taken. Queries no fence: `reap` comes first."""
        free = self.core.free + (self.core.free_reserved if reserved else 0)
        if n > free:
            last = self.capacity - 1 if reserved else self.size
            retired = int(np.count_nonzero(self.states[1 : last + 1] == RETIRED))
            usable = [(fence.step, int(np.sum(indices <= last))) for fence, indices in self.pending_groups()]
            since = min((step for step, behind in usable if behind), default=None)
            raise PoolExhaustedError(
                self.label,
                requested=n,
                free=free,
                pending=sum(behind for _, behind in usable),
                size=last - retired,
                free_reserved=0 if reserved else self.core.free_reserved,
                pending_since=since,
                overdue=since is not None and self.runtime.step - since > self.runtime.steps_in_flight,
            )

    def next_handles(self, n: int, operation: str) -> tuple[Ints, Ints]:
        """The handles that `take(n)` would return now."""
        self.check_available(n)
        wrong = self.core.look(n, False, levels.cheap)
        if wrong >= 0:
            self._refuse_taken(wrong, self.size + 1, operation)
        return self._rows[:n].copy(), self._gens[:n].copy()

    def take(self, n: int, operation: str, *, reserved: bool = False) -> Requests:
        """Takes `n`, of the reserve first if `reserved`; their handles. Queries no fence."""
        transaction, outside = self.transaction, self._outside
        if n >= self.capacity or outside is not None:  # the number may be too large for the core
            self.check_available(n, reserved=reserved)
        if outside is not None:
            self._rows[:n] = outside.top(n)
        times_checked[_IN_FLIGHT] += 1
        transaction.operation = operation
        taken = self.core.take(n, reserved, levels.cheap)
        if type(taken) is int:
            transaction.operation = None
            self.check_available(n, reserved=reserved)
            self._refuse_taken(taken, self.capacity if reserved else self.size + 1, operation)
        if outside is not None:
            outside.drop(n)
        if levels.full or self.taken_at.lines or self.runtime.agreement is not None:  # `wanted`, without a call
            self.taken_at.note(taken.handles()[0])
        handles: Requests = taken
        return handles

    def _refuse_taken(self, wrong: int, end: int, operation: str) -> NoReturn:
        rows, generations, where = self._rows[: wrong + 1], self._gens[: wrong + 1], self.where(operation)
        invariants.slot_out_of_range(rows, end, **where)
        invariants.slot_zero_allocated(rows, **where)
        invariants.slot_in_flight(rows, self.states[rows] == PENDING, **where)
        invariants.slot_shared(np.concatenate([self.live_indices(), rows]), **where)
        invariants.slot_stale_handle(rows, self.of(rows) + 1, generations, **where)
        raise unexplained(self.label, operation, f"row {wrong}")

    # Releasing

    def release(self, handles: Requests, after: Fence | None, operation: str) -> None:
        """Frees live indices, each once, at once or when `after` is complete."""
        core = self.core
        if not handles.n:
            return
        if self.runtime.agreement is not None:
            self.runtime.agreement.note(handles.handles()[0])
        if after is None:
            wrong = core.release(handles, levels.cheap)
        else:
            wrong = self.transaction.behind(after).defer(core, handles, levels.cheap)
        if wrong != -1:
            self._refuse_released(handles.handles()[0], wrong, operation)
        if self.transaction.undoing:
            core.undone(handles.n)
        if levels.cheap:
            tally(times_checked, _RELEASED if after is None else _DEFERRED)
        if self._outside is not None:
            self._put_outside(self._outside, operation)

    def _put_outside(self, outside: FreeIndices, operation: str) -> None:
        outside.push(self.core.take_returned())
        if levels.cheap:
            self.check_conservation(operation)

    def _refuse_released(self, indices: Ints, wrong: int, operation: str) -> NoReturn:
        if wrong >= 0:
            self.refuse(indices, operation, wrong, freed_from=LIVE)
        if wrong < -2:
            invariants.slot_in_flight(indices, self.states[indices] != PENDING, **self.where(operation))
        self.check_conservation(operation)
        raise unexplained(self.label, operation, "the counts")

    def reap(self) -> int:
        """`Transaction.reap`; how many of these indices it has made free."""
        reaped = sum(group.left.freed(self.core) for group in self.transaction.reap())
        if reaped and self._outside is not None:
            self._put_outside(self._outside, "reap")
        return reaped

    def refuse_reaped(self, numbers: Ints) -> None:
        invariants.slot_double_free(numbers, self.states[numbers] == PENDING, **self.where("reap"))
        lost = self.core.deferred - sum(indices.size for _, indices in self.pending_groups())
        if lost:
            self.check_live(self.live - lost, "reap", problem=f"a fence has lost {lost} indices")
        self.check_conservation("reap")

    # Handles

    def of(self, rows: Ints) -> Ints:
        generations: Ints = self.core.arrays["generation"][rows]
        return generations

    def handles(self, rows: Ints) -> Slots:
        """Handles of the present owners of `rows`, int64[n]: for checks."""
        return Slots.of_pool(self.runtime, rows, self.of(rows), pool_id=self.pool_id, name=self.name)

    def check_kept(self, handles: Handles, operation: str) -> None:
        """Refuses handles of this pool that are not held still, but for rows of padding."""
        rows = handles._host_side()
        owned = rows.nonzero()[0]
        self.check_held(rows[owned] // self._per_index, handles.generations[owned], operation)

    def rows_of(self, slots: Slots, operation: str, *, unique: bool = False, padded: bool = False) -> Ints:
        """See `SlotPool.rows_of`."""
        self.check(slots, operation, unique, padded)
        return read_only(slots._host_side())

    def check(self, slots: Slots, operation: str, unique: bool = False, padded: bool = False) -> Requests:
        """The handles, which are live and of this pool; see `SlotPool.rows_of`."""
        check_of_pool(self, slots, Slots, operation, padded)
        handles = slots.requests
        times_checked[STALE_HANDLE] += 1
        wrong = self.core.first_not_held(handles, padded, unique)
        if wrong >= 0:
            rows, held = handles.handles()
            owned = np.count_nonzero(rows) if padded else rows.size
            self.refuse(rows[:owned], operation, wrong, held[:owned])
        return handles

    def check_held(self, rows: Ints, held: Ints, operation: str) -> None:
        """Refuses rows int64[n] that are not live, or not of the generations `held`."""
        times_checked[STALE_HANDLE] += 1
        wrong = self.core.first_not_held(Requests(rows, held))
        if wrong >= 0:
            self.refuse(rows, operation, wrong, held)

    def refuse(
        self, rows: Ints, operation: str, wrong: int, held: Ints | None = None, *, freed_from: int | None = None
    ) -> NoReturn:
        """Raises for rows int64[n] of which the core refuses one.

        Each has to be of the generation `held`, and in the state `freed_from`: otherwise it is freed twice.
        """
        where = self.where(operation)
        invariants.slot_out_of_range(rows, self.capacity, **where)
        invariants.slot_zero_allocated(rows, **where)
        if freed_from is not None:
            invariants.slot_double_free(rows, self.states[rows] == freed_from, **where)
        if held is not None:
            current = np.where(self.live_among(rows), self.of(rows), -1)
            invariants.slot_stale_handle(rows, held, current, **where)
            invariants.slot_shared(rows, **where)
        raise unexplained(self.label, operation, f"row {wrong}")

    # Queries

    def live_among(self, indices: Ints) -> npt.NDArray[np.bool_]:
        """Whether each of `indices`, which are in range, is live, bool[n]."""
        live: npt.NDArray[np.bool_] = self.states[indices] == LIVE
        return live

    def owners_of(self, rows: Ints) -> Ints:
        """The generation of each of `rows`, which are in range, int64[n]; 0 for one that nobody owns."""
        return self.of(rows) * self.live_among(rows)

    def live_indices(self) -> Ints:
        """In ascending order. Costs O(size)."""
        return np.flatnonzero(self.states == LIVE)

    # Checks

    def check_conservation(self, operation: str) -> None:
        """Checks that free + pending + live = size + reserve, by three counts kept apart: SLOT_CONSERVATION."""
        times_checked[_CONSERVATION] += 1
        outside, core = self._outside, self.core
        if core.whole() and (outside is None or outside.count == core.free):
            return
        free, where = self.free if outside is None else outside.count, self.where(operation)
        for pending in (self.pending, core.deferred):
            invariants.slot_conservation(free, pending, self.live, self._total, **where)
        raise unexplained(self.label, operation, "the counts")

    def expect_idle(self, operation: str) -> None:
        self.transaction.reap()
        if self.live:
            groups = ((indices, queried.step) for queried, indices in self.pending_groups())
            report: Any = {"leaked": self.live_indices(), "named": self.taken_at.named, "waits": waiting_for(groups)}
            self.check_live(0, operation, **report)

    def check_live(self, live: int, operation: str, **report: Any) -> None:
        """Checks that so many are live, as counted elsewhere: SLOT_CONSERVATION."""
        invariants.slot_conservation(self.free, self.pending, live, self._total, **report, **self.where(operation))

    def verify(self, operation: str = "verify") -> None:
        """Checks every invariant of the allocator from scratch, with numpy. Costs O(size)."""
        where, states, core, none = self.where(operation), self.states, self.core, np.empty(0, dtype=np.int64)
        self.check_conservation(operation)
        ordinary, reserved = core.arrays["stack"][: core.free], core.arrays["reserved"][: core.free_reserved]
        if self._outside is not None:
            ordinary, reserved = self._outside.entries(), none
        ordinary, reserved, live = ordinary.astype(np.int64), reserved.astype(np.int64), self.live_indices()
        pending = np.concatenate([none, *(indices for _, indices in self.pending_groups())])
        for indices, end in ((ordinary, self.size + 1), (reserved, self.capacity), (pending, self.capacity)):
            invariants.slot_out_of_range(indices, end, **where)
            invariants.slot_zero_allocated(indices, **where)
        free = np.concatenate([ordinary, reserved])
        invariants.slot_in_flight(free, states[free] == PENDING, **where)
        invariants.slot_shared(np.concatenate([live, free, pending]), **where)
        invariants.slot_double_free(pending, states[pending] == PENDING, **where)
        for part, end, size in ((ordinary, self.size + 1, self.size), (reserved, self.capacity, self.reserve)):
            counts = np.bincount(states[end - size : end], minlength=RETIRED + 1).tolist()
            invariants.slot_conservation(part.size, counts[PENDING], counts[LIVE], size - counts[RETIRED], **where)
        for alive in (live.size, self.live):
            invariants.slot_conservation(free.size, pending.size, alive, self._total, **where)
        generations: Ints = core.arrays["generation"]
        least = np.maximum(generations, self._generations_seen)
        invariants.slot_stale_handle(np.arange(self.capacity), least, generations, **where)
        self._generations_seen = generations.copy()

    def where(self, operation: str) -> Where:
        return {"object": self.label, "operation": operation, "step": self.runtime.step}


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

    def zero_memory(self) -> None:
        """Sets the device memory that slots or pages index to zero, after `on_clear`: its contents are lost."""

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        """Releases what the slots own, behind the same fence."""

    def check_conservation(self, live: int, operation: str) -> None:
        """Refuses if what is owned does not go with `live` slots. Costs O(1)."""

    def verify(self) -> None:
        """Checks every invariant of what the slots own from scratch."""
