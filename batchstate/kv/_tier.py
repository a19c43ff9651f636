"""Host tokens go with their slot: whoever frees a slot frees them, once, behind every fence that stands for them."""

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Unpack, final, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._allocator import AllFences
from batchstate.errors import ArgumentError, CaptureError, DtypeError, ShapeError
from batchstate.indices import Slots
from batchstate.kv import _page_state as length_words
from batchstate.kv.host_pool import HostKVPool, HostRuns
from batchstate.kv.pages import PagePool
from batchstate.pools import SlotListener
from batchstate.runtime import Fence, PackedUpload
from batchstate.violations import Where

# What the host tier knows of each slot: its state, its length, and which host token each position has.
#
#     positions   0 ............ backed ..... length ....... room
#                 in host memory |  not yet  |   to come    |
#     on device   the newest `hot_tokens` positions, from `hot_from` on
#
# Host bookkeeping only, vectorised over requests: no cost here grows with a context's length or a pool's size. It grows
# with the most runs that one request ever had: a pool that is fragmented badly once makes all look-ups somewhat slower.

Ints = npt.NDArray[np.int64]


class TierState(enum.IntEnum):
    """Where a request of the host tier is.

    OUTSIDE: not in the host tier; its KV is on the device, as without one. STAGED: its KV is being copied to the host.
    DIRECT: it has host tokens, and a writer in another process fills them. READY: it decodes. FINISHED, ABORTED: it has
    left; the slot is nobody's, or somebody else's who is OUTSIDE.
    """

    OUTSIDE = 0
    STAGED = 1
    DIRECT = 2
    READY = 3
    FINISHED = 4
    ABORTED = 5


IN_TIER = (TierState.STAGED, TierState.DIRECT, TierState.READY)
_BEYOND = 2**62
"""End of a run that is not there."""


@final
class TierBooks:
    """The rows of all slots, padding included.

    Attributes:
        states: uint8[capacity], `TierState`.
        length: int64[capacity], tokens of the request.
        backed: int64[capacity], of how many the KV is in host memory, or was sent there.
        hot_from: int64[capacity], first position of which the device may have the KV.
        room: int64[capacity], tokens that its runs hold.
        runs: the runs of each slot in the tier.
    """

    def __init__(self, capacity: int) -> None:
        self.states = np.full(capacity, TierState.OUTSIDE, dtype=np.uint8)
        self.length = np.zeros(capacity, dtype=np.int64)
        self.backed = np.zeros(capacity, dtype=np.int64)
        self.hot_from = np.zeros(capacity, dtype=np.int64)
        self.room = np.zeros(capacity, dtype=np.int64)
        self.runs: dict[int, HostRuns] = {}
        self._ends = np.full((capacity, 1), _BEYOND, dtype=np.int64)  # position behind each run
        self._shift = np.zeros((capacity, 1), dtype=np.int64)  # host token - position, in each run
        self._first = np.zeros((capacity, 1), dtype=np.int64)  # host token of each run
        self._stop = np.zeros((capacity, 1), dtype=np.int64)  # host token behind each run

    def __repr__(self) -> str:
        return f"TierBooks({len(self.runs)} requests)"

    def enter(self, slot: int, runs: HostRuns, state: TierState, length: int) -> None:
        """A request gets its host tokens."""
        self.runs[slot] = runs
        self.states[slot] = state
        self.length[slot] = length
        self.backed[slot] = length
        self.hot_from[slot] = 0
        self.room[slot] = len(runs)
        self._widen(runs.starts.size)
        ends = np.cumsum(runs.lengths)
        self._ends[slot] = _BEYOND
        self._ends[slot, : ends.size] = ends
        self._shift[slot, : ends.size] = runs.starts - (ends - runs.lengths)
        self._first[slot, : ends.size] = runs.starts
        self._stop[slot, : ends.size] = runs.starts + runs.lengths

    def leave(self, slot: int) -> HostRuns:
        """A request gives them up, and its row is as if nobody had been there, but for the state."""
        runs = self.runs.pop(slot)
        finished = self.states[slot] == TierState.READY
        self.states[slot] = TierState.FINISHED if finished else TierState.ABORTED
        for row in (self.length, self.backed, self.hot_from, self.room):
            row[slot] = 0
        self._ends[slot] = _BEYOND
        for table in (self._shift, self._first, self._stop):
            table[slot] = 0
        return runs

    def host_tokens(self, slots: Ints, positions: Ints) -> Ints:
        """The host token of one position of each slot, int64[n]; both int64[n], positions below `room`."""
        run = (self._ends[slots] <= positions[:, None]).sum(axis=1)
        tokens: Ints = self._shift[slots, run] + positions
        return tokens

    def bounds(self, slots: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """The run that has one position of each slot: from, to (exclusive), int64[n] each."""
        run = (self._ends[slots] <= positions[:, None]).sum(axis=1)
        return self._first[slots, run], self._stop[slots, run]

    def _widen(self, width: int) -> None:
        have = self._ends.shape[1]
        if width > have:
            more: Any = ((0, 0), (0, max(width, 2 * have) - have))
            self._ends = np.pad(self._ends, more, constant_values=_BEYOND)
            self._shift, self._first, self._stop = (np.pad(one, more) for one in (self._shift, self._first, self._stop))


# KV rows on their way between device pages and host tokens: one gather and one scatter a layer, never a wait.


@final
class Moves:
    """Launches copies on the current stream.

    Args:
        pages: index the device buffers.
        host: the host buffers.
        kv: the device buffers.

    Raises:
        ShapeError, DtypeError: the buffers do not go together.

    Attributes:
        kv: the device buffers, one a layer.
    """

    def __init__(self, pages: PagePool, host: HostKVPool, kv: Sequence[torch.Tensor]) -> None:
        self._runtime = host.runtime
        self._host = host
        self.kv = tuple(kv)
        self._last: dict[object, Fence] = {}  # stream -> behind its last launch
        wanted = (pages.location_capacity, *host.item_shape)
        if len(self.kv) != len(host.layers):
            raise ShapeError(
                f"{len(self.kv)} device buffers for {len(host.layers)} layers",
                value=len(self.kv),
                remedy="pass one for each layer of the host pool",
            )
        for layer, tensor in zip(host.layers, self.kv, strict=True):
            if tensor.dtype is not host.dtype:
                raise DtypeError(
                    f"layer {layer}: {tensor.dtype} on the device, {host.dtype} in the host tier",
                    value=tensor.dtype,
                    remedy="use one dtype",
                )
            if tuple(tensor.shape) != wanted or tensor.device != self._runtime.device:
                raise ShapeError(
                    f"layer {layer}: {list(tensor.shape)} on {tensor.device}",
                    value=tuple(tensor.shape),
                    remedy=f"pass {list(wanted)} on {self._runtime.device}",
                )

    def __repr__(self) -> str:
        return f"Moves({len(self.kv)} layers)"

    @property
    def last(self) -> tuple[Fence, ...]:
        """Behind all launches: one fence a stream that copied."""
        return tuple(self._last.values())

    def uploaded(self, sources: Ints, targets: Ints) -> PackedUpload:
        """Both index arrays on their way to the device, in one copy on the current stream."""
        return self._runtime.upload([sources, targets])

    def indices(self, upload: PackedUpload) -> tuple[torch.Tensor, torch.Tensor]:
        """What `uploaded` sends, safe to use on the current stream."""
        return self._runtime.use_part_on_current_stream(upload, 0), self._runtime.use_part_on_current_stream(upload, 1)

    def to_host(self, source: torch.Tensor, target: torch.Tensor, name: str) -> Fence:
        """Copies device tokens int64[n] to host tokens int64[n], all layers; the fence behind it."""
        return self._copy(self.kv, source, self._host.buffers, target, name)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, name: str) -> Fence:
        """Copies host tokens int64[n] to device tokens int64[n], all layers; the fence behind it."""
        return self._copy(self._host.buffers, source, self.kv, target, name)

    def _copy(
        self,
        sources: Sequence[torch.Tensor],
        source: torch.Tensor,
        targets: Sequence[torch.Tensor],
        target: torch.Tensor,
        name: str,
    ) -> Fence:
        if self._runtime.capturing:
            raise CaptureError(f"{name} while the stream is captured", remedy="move KV outside of the capture")
        try:
            for from_buffer, to_buffer in zip(sources, targets, strict=True):
                self._runtime.launch(
                    _copy_rows,
                    from_buffer,
                    source,
                    to_buffer,
                    target,
                    reads=(from_buffer, source, target),
                    writes=(to_buffer,),
                    name=name,
                    operations=2,
                )
        finally:  # what was launched before an error is under way all the same
            copied = self._runtime.record()
            self._last[self._runtime.current_stream.key] = copied
        return copied


def _copy_rows(source: torch.Tensor, from_rows: torch.Tensor, target: torch.Tensor, to_rows: torch.Tensor) -> None:
    target.index_copy_(0, to_rows, source.index_select(0, from_rows))


# The hot buffers: which device token has, or takes, the KV of a position, and whether it agrees with host memory.


@final
class HotBuffers:
    """The device's part of the requests of a host tier: position p lies in row p % size of its buffer.

    Args:
        pages: that the buffers are made of.
        host: what they are a window of.
        books: lengths and states.
        moves: the device memory itself.
        size: tokens of a buffer.
    """

    def __init__(self, pages: PagePool, host: HostKVPool, books: TierBooks, moves: Moves, size: int) -> None:
        self._pages = pages
        self._host = host
        self._books = books
        self._moves = moves
        self._size = size

    def __repr__(self) -> str:
        return f"HotBuffers({self._size} tokens each)"

    def tokens(self, rows: Ints, positions: Ints, **where: Unpack[Where]) -> Ints:
        """The device token of one position of each row, int64[n].

        Raises:
            Violation: SLOT_ZERO_ALLOCATED, at `cheap`: a position that has no page.
        """
        page = self.pages_of(rows, positions)
        if levels.cheap and page.size and int(page.min()) == 0:
            invariants.slot_zero_allocated(page, **where)
        size = self._pages.page_size
        tokens: Ints = page * size + positions % self._size % size
        return tokens

    def pages_of(self, rows: Ints, positions: Ints) -> Ints:
        """The page of one position of each row, int64[n]; 0 for none."""
        column = positions % self._size // self._pages.page_size
        return self._pages.page_table[rows, column].astype(np.int64)

    def check_step(self, slots: Slots, rows: Ints, length: Ints, **where: Unpack[Where]) -> None:
        """Refuses lengths that are not those of the last step and one token each, or that go beyond what was reserved.

        Raises:
            Violation: LENGTH_ORDER; MIRROR_EQUAL, at `cheap`: pages that somebody else has moved.
            ArgumentError: another number of new tokens.
        """
        before, room = self._books.length[rows], self._books.room[rows]
        invariants.length_order(length, room, int(room.max(initial=0)), explain=length_words.outgrown, **where)
        wrong = length != before + 1
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ArgumentError(
                f"slot {rows[row]} has {length[row]} tokens with the new one, and had {before[row]}",
                value=int(length[row]),
                remedy="map one new token a step; each request once a step",
            )
        if levels.cheap:
            invariants.mirror_equal(np.minimum(before, self._size), self._pages.committed(slots), **where)

    def check_backed(self, rows: Ints, owed: int, **where: Unpack[Where]) -> None:
        """What is backed up equals what is hot, but for the `owed` newest tokens. Reads device memory.

        Raises:
            Violation: MIRROR_EQUAL.
        """
        books, inspect = self._books, self._host.runtime.inspect
        first = np.maximum(books.hot_from[rows], books.length[rows] - self._size)
        counts = np.maximum(books.backed[rows] - owed - first, 0)
        at, positions = np.repeat(rows, counts), np.repeat(first, counts) + within(counts)
        tokens, kept = self.tokens(at, positions, **where), books.host_tokens(at, positions)
        for device, host in zip(self._moves.kv, self._host.buffers, strict=True):
            invariants.mirror_equal(inspect(device)[tokens], inspect(host)[kept], **where)

    def verify(self, owed: int, **where: Unpack[Where]) -> None:
        """Every request has the pages that its length says, and hot rows that equal host memory.

        Raises:
            Violation: MIRROR_EQUAL.
        """
        books = self._books
        everyone = np.flatnonzero((books.states == TierState.READY) | (books.states == TierState.STAGED))
        length = books.length[everyone]
        ready = books.states[everyone] == TierState.READY
        hot = np.where(ready, np.minimum(length, self._size), length)
        invariants.mirror_equal(hot, self._pages.committed_lengths[everyone], **where)
        self.check_backed(everyone[ready], owed, **where)


def within(lengths: Ints) -> Ints:
    """0 .. n-1 for each n of `lengths`, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if ends.size else 0, dtype=np.int64) - np.repeat(ends - lengths, lengths)


@runtime_checkable
class Writer(Fence, Protocol):
    """A fence that also knows what has arrived, as `Lease.ended` does."""

    def arrived(self) -> int:
        """How many tokens a request may count on."""
        ...


@final
class TierGuard(SlotListener):
    """The listener of a slot pool whose slots may own host tokens.

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
        self, host: HostKVPool, is_live: Callable[[Ints], npt.NDArray[np.bool_]], books: TierBooks, moves: Moves
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

    def on_take(self, rows: Ints) -> None:
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

    def on_free(self, rows: Ints, after: Fence | None) -> None:
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

    def verify(self) -> None:
        """Every law of the host tokens from scratch: they are those that slots of the tier own, each once.

        Raises:
            Violation: TIER_STATE, MIRROR_EQUAL, SLOT_CONSERVATION, LENGTH_ORDER, SLOT_STALE_HANDLE, and see
                `HostKVPool.verify`.
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
