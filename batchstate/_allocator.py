r"""Who has what: the bookkeeping that slots, pages and states have in common.

    FREE --take--> LIVE --release--> FREE
                     \--release(after=fence)--> PENDING --fence complete--> FREE

Each index is in one state, said twice on purpose: once in an array of states and once by the list it stands in. Checks
compare the two, so that a bug in either is seen. Every operation costs O(indices that change), whatever the size.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Protocol, SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate._arrays import count
from batchstate.errors import ArgumentError, DeviceError, DtypeError, PoolExhaustedError
from batchstate.indices import Slots
from batchstate.invariants import times_checked
from batchstate.mirror import MirroredTensor
from batchstate.runtime import Fence, Runtime
from batchstate.violations import Code, Where

# Sizes of pools, checked at the door: what the arrays of the books can count.

MOST_INDICES = 2**31 - 2
"""Entries of one pool: tables hold them in int32, and each has a row more than there are entries."""

MOST_TOKENS = 2**62
"""Tokens of one pool: sums of two such numbers are still int64."""


def size_of(value: SupportsIndex, what: str, *, least: int = 0, most: int = MOST_INDICES) -> int:
    """`value` as an int from `least` to `most`.

    Raises:
        DtypeError: no integer.
        ArgumentError: too small or too large.
    """
    number = count(value, what, least=least)
    if number > most:
        raise ArgumentError(f"{what} is {number}", value=number, remedy=f"pass {most} or less")
    return number


# A stack of free indices: the last ones freed are the first ones handed out.
#
# It grows downwards in its memory, so that what is taken or pushed together is one slice, in the order in which it
# goes.

Ints = npt.NDArray[np.int64]


class FreeIndices(Protocol):
    """Free indices of a ledger, in an order of their own."""

    count: int
    room: int

    def top(self, n: int) -> Ints:
        """The next `n` to be handed out, in that order, as a new array. They stay free."""
        ...

    def drop(self, n: int) -> None:
        """Takes away what `top(n)` shows."""
        ...

    def push(self, indices: Ints) -> None:
        """Makes `indices` free."""
        ...

    def entries(self) -> Ints:
        """All free indices, as a new array."""
        ...


@final
class FreeList:
    """Free ones among the indices `first` to `last`. At first all are free, the lowest on top.

    Attributes:
        count: how many are free.
        room: how many there can be.
    """

    def __init__(self, first: int, last: int) -> None:
        self._stack = np.arange(first, last + 1, dtype=np.int64)
        self.count = len(self._stack)
        self.room = last - first + 1

    def __repr__(self) -> str:
        return f"FreeList({self.count} of {self.room})"

    def top(self, n: int) -> Ints:
        """The next `n` to be handed out, in that order, as a new array. They stay on the stack."""
        at = self.room - self.count
        return self._stack[at : at + n].copy()

    def drop(self, n: int) -> None:
        """Takes the next `n` off the stack."""
        self.count -= n

    def push(self, indices: Ints) -> None:
        """Puts copies of `indices` on the stack so that `top` gives them in the same order."""
        at = self.room - self.count
        self._stack[at - indices.size : at] = indices
        self.count += indices.size

    def entries(self) -> Ints:
        """All free indices, as a new array."""
        return self._stack[self.room - self.count :].copy()


# Indices that become free when a fence completes: the one waiting room of slots, pages and states.
#
# The queue owns what waits in it: it copies on entry, so that nothing a caller does later reaches it. It asks fences
# and never waits for one. A fence is code of the engine's: it may raise, or call the pool that asks it. So all are
# asked before anything moves, and one that has said yes is not asked again.


@final
@attrs.frozen(eq=False)
class AllFences:
    """Complete when each of `fences` is."""

    fences: tuple[Fence, ...]

    def query(self) -> bool:
        """Whether all are complete. Never waits."""
        return all(fence.query() for fence in self.fences)

    def wait(self) -> None:
        """Blocks the host until all are complete."""
        for fence in self.fences:
            fence.wait()


@final
@attrs.define(eq=False)
class AskedFence:
    """A fence and its answer. Completion is final: once it was seen, `fence` is not asked again.

    Attributes:
        fence: whom to ask.
        complete: whether it has said so.
    """

    fence: Fence
    complete: bool = attrs.field(default=False, init=False)

    def query(self) -> bool:
        """Whether it is complete. Never waits."""
        if not self.complete:
            self.complete = bool(self.fence.query())
        return self.complete

    def wait(self) -> None:
        """Blocks the host until it is complete."""
        self.fence.wait()


@final
@attrs.define(eq=False)
class FenceQueue:
    """Groups of indices, each behind its fence. Groups leave in any order, as their fences complete.

    Attributes:
        count: indices that wait.
    """

    count: int = attrs.field(default=0, init=False)
    _groups: list[tuple[AskedFence, list[Ints]]] = attrs.field(factory=list, init=False)

    def __repr__(self) -> str:
        return f"FenceQueue({self.count} behind {len(self._groups)} fences)"

    def defer(self, fence: Fence, indices: Ints) -> None:
        """Keeps a copy of `indices` until `fence` is complete."""
        mine = self._own(indices)
        if self._groups and self._groups[-1][0].fence is fence:  # one query for all that one step frees
            self._groups[-1][1].append(mine)
        else:
            self._groups.append((AskedFence(fence), [mine]))
        self.count += mine.size

    def completed(self) -> list[tuple[AskedFence, Ints]]:
        """Removes and returns the groups whose fences are complete, oldest first.

        Asks each fence once, and only then removes anything: an error of a fence leaves all as it was.
        """
        answers = [(group, self._complete(group[0])) for group in tuple(self._groups)]
        ready = [group for group, complete in answers if complete]
        if not ready:
            return []
        done = [(fence, parts[0] if len(parts) == 1 else np.concatenate(parts)) for fence, parts in ready]
        gone = {id(group) for group in ready}
        self._groups = [group for group in self._groups if id(group) not in gone]
        self.count -= sum(indices.size for _, indices in done)
        return done

    def indices(self) -> Ints:
        """Everything that waits, int64[count]."""
        parts = [part for _, group in self._groups for part in group]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _own(self, indices: Ints) -> Ints:
        return indices.copy()

    def _complete(self, fence: AskedFence) -> bool:
        return fence.query()


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
        self._total = size + reserve
        self.live = 0
        self.peak_live = 0
        self.taken_total = 0
        self.freed_total = 0
        self._ordinary = free_list(1, size)
        self._reserved = free_list(size + 1, size + reserve)
        self._waiting = FenceQueue()
        self._asking = False  # a fence that calls its own pool must not start a second round of questions
        # Twice as many states as indices, so that those behind the last, and negative ones, which count from the end,
        # fall on padding (memory that nothing touches costs nothing). See `all_are` and `_states_of`.
        self._states = np.zeros(2 * self.capacity + 1, dtype=np.uint8)
        self._states[1 : self.capacity] = FREE
        self._row_of = np.zeros(self.capacity, dtype=np.int32)  # scratch of `repeated` and `distinct`
        self._rows = np.arange(256, dtype=np.int32)

    def __repr__(self) -> str:
        return f"Allocator({self.label}: {self.free} free, {self.pending} pending, {self.live} live)"

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
        if self._waiting.count:
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
        return self._ordinary.top(n)

    def take(self, n: int, operation: str, *, reserved: bool = False) -> Ints:
        """Takes `n`: of the reserve first if `reserved`, then of the ordinary ones. Asks no fence.

        The caller has shown by `check_available` that they are there.

        Returns:
            int64[n], a new array.

        Raises:
            Violation: SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE, SLOT_IN_FLIGHT, SLOT_SHARED, at `cheap`.
        """
        ordinary, from_reserve = n, 0
        if reserved:
            from_reserve = min(n, self._reserved.count)
            ordinary = n - from_reserve
        indices = self._ordinary.top(ordinary)
        if from_reserve:
            indices = np.concatenate([self._reserved.top(from_reserve), indices])
        if levels.cheap:
            self._check_fresh(indices, reserved, operation)
        self._ordinary.drop(ordinary)
        if from_reserve:
            self._reserved.drop(from_reserve)
        self._states[indices] = LIVE_MARK
        self.taken_total += n
        self.live = live = self.live + n
        if live > self.peak_live:
            self.peak_live = live
        return indices

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
                times_checked[IN_FLIGHT] += 1
                if not self.all_are(indices, PENDING_BYTE):
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
        self._states[indices] = FREE_MARK
        if self.reserve:
            ordinary = indices <= self.size
            self._push_reserved(indices[~ordinary])
            indices = indices[ordinary]
        self._push(self._ordinary, indices)

    def _push_reserved(self, indices: Ints) -> None:
        self._push(self._reserved, indices)

    def _push(self, free_list: FreeIndices, indices: Ints) -> None:
        """A free list never holds more than it can own."""
        if free_list.count + indices.size > free_list.room:
            count = free_list.count + indices.size
            invariants.slot_conservation(count, 0, 0, free_list.room, **self._where("push"))
        free_list.push(indices)

    def _defer(self, indices: Ints, fence: Fence) -> None:
        self._states[indices] = PENDING_MARK
        self._waiting.defer(fence, indices)

    # Asking

    def live_among(self, indices: Ints) -> npt.NDArray[np.bool_]:
        """Which of `indices` are live, bool[n]; those out of range are not."""
        live: npt.NDArray[np.bool_] = self._states_of(indices) == LIVE
        return live

    def all_are(self, indices: Ints, state: bytes) -> bool:
        """Whether each of `indices` is in this state, one of the `_BYTE`s. O(n), the fastest way to ask.

        Those behind the last are in none. Negative ones are in none down to -capacity, where placeholders are; still
        lower ones, which no free list can hold, are found at `full`.
        """
        try:  # bytes are compared in a fraction of the time in which numpy compares two arrays and counts
            return self._states[indices].tobytes() == state * indices.size
        except IndexError:
            return False

    def live_indices(self) -> Ints:
        """All live ones in ascending order, int64[live]. Costs O(size)."""
        return np.flatnonzero(self._states[: self.capacity] == LIVE)

    def unowned(self) -> Ints:
        """All that stand in a free list or wait, int64[free + pending]; one that stands there twice comes twice."""
        return np.concatenate([self._ordinary.entries(), self._reserved.entries(), self._waiting.indices()])

    def repeated(self, indices: Ints) -> bool:
        """Whether an index (in range) stands in `indices` twice. O(n), no sort."""
        return indices.size > 1 and not self._named_once(indices)

    def distinct(self, indices: Ints) -> Ints:
        """Each of `indices` (in range) once. O(n), no sort."""
        rows, last = self._last_rows(indices)
        distinct: Ints = indices[last == rows]
        return distinct

    def _named_once(self, indices: Ints) -> bool:
        rows, last = self._last_rows(indices)
        return last.tobytes() == rows.tobytes()

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
        judges range, padding and state.
        """
        return self._states.take(indices, mode="clip")

    # Checks

    def check_conservation(self, operation: str) -> None:
        """Free + pending + live = size + reserve, by three counts kept apart.

        Raises:
            Violation: SLOT_CONSERVATION.
        """
        free, pending, live = self._ordinary.count + self._reserved.count, self._waiting.count, self.live
        if free + pending + live == self._total and free >= 0 and live >= 0:  # the law's own test, without its report
            times_checked[CONSERVATION] += 1
            return
        invariants.slot_conservation(free, pending, live, self._total, **self._where(operation))

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
        invariants.slot_conservation(free.size, waiting.size, live.size, self._total, **where)
        invariants.slot_conservation(free.size, waiting.size, self.live, self._total, **where)

    def _check_fresh(self, indices: Ints, reserved: bool, operation: str) -> None:
        """What is about to be handed out is nobody's."""
        times_checked[IN_FLIGHT] += 1
        if (
            self.all_are(indices, FREE_BYTE)
            and (not self.reserve or reserved or int(indices.max(initial=0)) <= self.size)
            and not (levels.full and (self.repeated(indices) or int(indices.min(initial=1)) < 1))
        ):
            return
        where, end = self._where(operation), self.capacity if reserved else self.size + 1
        invariants.slot_out_of_range(indices, end, **where)
        invariants.slot_zero_allocated(indices, **where)
        invariants.slot_in_flight(indices, self._states_of(indices) == PENDING, **where)
        invariants.slot_shared(np.concatenate([self.live_indices(), indices]), **where)

    def _check_waited(self, indices: Ints, where: Where) -> None:
        """What leaves the waiting room is what entered it."""
        times_checked[OUT_OF_RANGE] += 1
        times_checked[DOUBLE_FREE] += 1
        if self.all_are(indices, PENDING_BYTE) and not self.repeated(indices):  # the laws' own tests
            return
        invariants.slot_out_of_range(indices, self.capacity, **where)
        invariants.slot_double_free(indices, self._states_of(indices) == PENDING, **where)

    def _where(self, operation: str) -> Where:
        return {"object": self.label, "operation": operation, "step": self.runtime.step}


# Handles: whose slot a number is. The generation of a slot rises when it is taken and never falls.
#
# A handle is good while its slot is live and has the generation that the handle holds. So the order in which slots are
# reused does not matter: the last one freed may be the next one taken, and a handle kept too long is still found out.

ONE = np.array(1)  # numpy takes as long to convert one number as to add 100 of them
DOUBLE_FREE, STALE_HANDLE = Code.SLOT_DOUBLE_FREE, Code.SLOT_STALE_HANDLE

_identities = itertools.count(1)
_books: "weakref.WeakValueDictionary[int, Generations]" = weakref.WeakValueDictionary()


@final
class Generations:
    """The generations of one pool's slots.

    Attributes:
        identity: number of the pool that its handles carry.
        name: of the pool.
    """

    def __init__(self, runtime: Runtime, ledger: Allocator, *, name: str) -> None:
        self.identity = next(_identities)
        self.name = name
        self._runtime = runtime
        self._ledger = ledger
        self._generations = np.zeros(ledger.capacity, dtype=np.int64)
        self._seen = self._generations.copy()  # at the last `verify`
        _books[self.identity] = self

    def __repr__(self) -> str:
        return f"Generations({self.name!r}, pool {self.identity})"

    def new_handles(self, rows: Ints) -> Slots:
        """New handles for slots that were just taken: takes over `rows`, int64[n].

        Raises:
            Violation: SLOT_STALE_HANDLE, at `cheap`: a generation did not rise.
        """
        before = self._generations[rows]
        generations = self._raise_generations(rows, before)
        if levels.cheap and (generations > before).tobytes() != b"\1" * rows.size:
            # A generation that stands still would make the handles of the former owner valid again.
            invariants.slot_stale_handle(rows, before + 1, generations, **self._where("take"))
        return Slots.of_pool(self._runtime, rows, generations, pool=self.identity, name=self.name)

    def rows_of(self, slots: Slots, operation: str, *, unique: bool = False) -> Ints:
        """The numbers of handles of this pool that are all good, int64[n], read-only; see `SlotPool.rows_of`."""
        rows, held = self._read(slots, operation)
        times_checked[STALE_HANDLE] += 1
        if not self._all_held(rows, held):
            where = self._where(operation)
            invariants.slot_out_of_range(rows, self._ledger.capacity, **where)
            invariants.slot_zero_allocated(rows, **where)
            current = np.where(self._ledger.live_among(rows), self._generations[rows], -1)
            invariants.slot_stale_handle(rows, held, current, **where)
        if unique and self._ledger.repeated(rows):
            invariants.slot_shared(rows, **self._where(operation))
        return rows

    def rows_to_free(self, slots: Slots, operation: str) -> Ints:
        """The same for handles that are about to be freed: dead and repeated ones are SLOT_DOUBLE_FREE."""
        rows, held = self._read(slots, operation)
        times_checked[DOUBLE_FREE] += 1
        if not self._all_held(rows, held) or self._ledger.repeated(rows):
            where = self._where(operation)
            invariants.slot_out_of_range(rows, self._ledger.capacity, **where)
            invariants.slot_zero_allocated(rows, **where)
            invariants.slot_double_free(rows, self._ledger.live_among(rows), **where)
            invariants.slot_stale_handle(rows, held, self._generations[rows], **where)
        return rows

    def verify(self) -> None:
        """No generation fell since the last time.

        Raises:
            Violation: SLOT_STALE_HANDLE.
        """
        everyone = np.arange(self._generations.size, dtype=np.int64)
        least = np.maximum(self._generations, self._seen)
        invariants.slot_stale_handle(everyone, least, self._generations, **self._where("verify"))
        self._seen = self._generations.copy()

    def _read(self, slots: object, operation: str) -> tuple[Ints, Ints]:
        """Numbers and generations of slots that this pool handed out; both int64[n]."""
        if not isinstance(slots, Slots):
            if isinstance(slots, MirroredTensor):
                invariants.unit_mismatch("slot", str(slots.unit), **self._where(operation))
            raise DtypeError(
                f"{self.name}: {operation} of {type(slots).__name__}",
                value=slots,
                remedy="pass the handles that `take` returned; a number does not say whose slot it is",
            )
        rows: Ints = slots.np
        if slots.runtime is not self._runtime:
            raise DeviceError(f"{self.name}: {slots!r} has another runtime", value=slots, remedy="use one runtime")
        if slots.pool != self.identity and rows.size:
            other = _books.get(slots.pool)
            raise ArgumentError(
                f"{operation}: slots of {'no pool' if other is None else f'pool {other.name!r}'} "
                f"given to pool {self.name!r}",
                value=slots,
                remedy="use slots with the pool that handed them out, and with the pages and tables made over it",
            )
        return rows, slots.generations

    def _all_held(self, rows: Ints, held: Ints) -> bool:
        """Whether each handle is live and of its slot's present owner: the fast form of four laws, O(n).

        What lies outside is in no state, or beyond the generations, which are half as many.
        """
        try:
            return self._ledger.all_are(rows, LIVE_BYTE) and self._generations[rows].tobytes() == held.tobytes()
        except IndexError:
            return False

    def _raise_generations(self, rows: Ints, before: Ints) -> Ints:
        generations: Ints = before + ONE
        self._generations[rows] = generations
        return generations

    def _where(self, operation: str) -> Where:
        return {"object": self._ledger.label, "operation": operation, "step": self._runtime.step}
