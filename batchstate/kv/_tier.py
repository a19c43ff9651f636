"""The parts of `HiSparse`: what it knows about each request, and its copies of KV between device and host memory."""

import enum
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import numpy as np
import torch

from batchstate import invariants
from batchstate._allocator import Transaction, joined
from batchstate._arrays import Ints
from batchstate.errors import ArgumentError, DtypeError, ShapeError
from batchstate.kv.host_pool import HostKVPool, HostRanges
from batchstate.kv.pages import PagePool
from batchstate.pools import SlotListener, SlotPool
from batchstate.runtime.base import Fence, Runtime
from batchstate.runtime.memory import PackedUpload
from batchstate.runtime.streams import missing
from batchstate.violations import Where

Layers = Sequence[torch.Tensor]

_BEYOND = 2**62
"""End of a range that does not exist."""


class TierState(enum.IntEnum):
    """Where a request of the host tier is.

    OUTSIDE: not in the host tier; its KV is on the device. STAGED: its KV is being copied to the host. DIRECT: it has
    host locations, and a writer in another process fills them. READY: it decodes. FINISHED, ABORTED: it has left; the
    slot is free, or belongs to another request, which is OUTSIDE.
    """

    OUTSIDE = 0
    STAGED = 1
    DIRECT = 2
    READY = 3
    FINISHED = 4
    ABORTED = 5


IN_TIER = (TierState.STAGED, TierState.DIRECT, TierState.READY)
_NAMES = tuple(state.name for state in TierState)


@final
class KVCopier:
    """Launches copies of KV rows between the buffers `kv` of the device, one per layer, and those of the host pool.

    On the current stream: one gather and one scatter per layer, never a wait.
    """

    def __init__(self, pages: PagePool, host: HostKVPool, kv: Sequence[torch.Tensor]) -> None:
        self._runtime = host.runtime
        self._host = host
        self.kv = tuple(kv)
        self._last: dict[object, Fence] = {}  # stream -> fence after its last launch
        backed = [spec for spec in host.specs if not spec.on_device]
        if len(self.kv) != len(backed):
            problem = f"expected {len(backed)} device buffers, got {len(self.kv)}"
            raise ShapeError(problem, len(self.kv), "pass one for each layer that the host pool has in host memory")
        for spec, tensor in zip(backed, self.kv, strict=True):
            layer, wanted = spec.name, (pages.location_capacity, *spec.item_shape)
            if tensor.dtype is not spec.dtype:
                problem = f"layer {layer}: expected {spec.dtype}, as in the host tier, got {tensor.dtype}"
                remedy = "make the device buffer and that of the host pool with one dtype"
                raise DtypeError(problem, tensor.dtype, remedy)
            if tuple(tensor.shape) != wanted or tensor.device != self._runtime.device:
                problem = f"layer {layer}: {list(tensor.shape)} on {tensor.device}"
                raise ShapeError(problem, tuple(tensor.shape), f"pass {list(wanted)} on {self._runtime.device}")

    @property
    def fences(self) -> tuple[Fence, ...]:
        return tuple(self._last.values())

    def forget(self, complete: set[Fence]) -> None:
        if complete:
            self._last = {stream: fence for stream, fence in self._last.items() if fence not in complete}

    def indices(self, upload: PackedUpload) -> tuple[torch.Tensor, torch.Tensor]:
        """The two index arrays of `upload`, safe to use on the current stream."""
        return self._runtime.use_part_on_current_stream(upload, 0), self._runtime.use_part_on_current_stream(upload, 1)

    def to_host(self, source: torch.Tensor, target: torch.Tensor, name: str, guesses: bool = False) -> Fence:
        """Copies device locations int64[n] to host locations int64[n], all layers; returns the fence after it.

        With `guesses` some are perhaps of nobody: they come to nothing, and are copied again before anybody reads them.
        """
        Runtime.inspecting = guesses
        try:
            return self._copy(self.kv, source, self._host.backed, target, name)
        finally:
            Runtime.inspecting = False

    def to_device(self, source: torch.Tensor, target: torch.Tensor, name: str) -> Fence:
        """The other way."""
        return self._copy(self._host.backed, source, self.kv, target, name)

    def _copy(self, sources: Layers, source: torch.Tensor, targets: Layers, target: torch.Tensor, name: str) -> Fence:
        launch = self._runtime.launch
        self._runtime.refuse_capture(name)
        try:
            for here, there in zip(sources, targets, strict=True):
                reads, arguments = (here, source, target), (here, source, there, target)
                launch(_copy_rows, *arguments, reads=reads, writes=(there,), name=name, operations=2)
        finally:  # copies launched before an error are under way all the same
            copied = self._runtime.record()
            self._last[self._runtime.current_stream.key] = copied
        return copied


def _copy_rows(source: torch.Tensor, from_rows: torch.Tensor, target: torch.Tensor, to_rows: torch.Tensor) -> None:
    if source.is_floating_point() and source.itemsize == 1:  # torch has no `index_copy_` of 8-bit floats
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    target.index_copy_(0, to_rows, source.index_select(0, from_rows))


@final
class TierRequests(SlotListener):
    """The host tier's state of the request of each slot; a listener of the slot pool that frees it with the slot.

        positions   0 ............ backed ..... length ....... max_tokens
                    in host memory |  not yet  |   to come    |
        on device   the newest `hot_tokens` positions, from `hot_from` on

    State on the host alone, vectorised over requests: no cost here grows with a context's length or a pool's size. It
    grows with the most ranges that one request ever had: one badly fragmented request makes all look-ups slower.

    Attributes:
        states: uint8[capacity], `TierState`.
        length: int64[capacity], tokens of the request, or a bound of them.
        backed: int64[capacity], tokens whose KV is in host memory for good, or was sent there.
        hot_from: int64[capacity], first position whose KV the device may have.
        held: int64[capacity], tokens that the device pages have been given.
        max_tokens: int64[capacity], host locations of the request.
        ranges: the host ranges of each slot in the tier.
        fences: for each slot that is STAGED, the copy that stages it.
        planned: slots of the plan whose backup is not launched yet, int64[n].
        releasing: slots that the host tier itself releases now, int64[n].
        transaction: the mark of the host tier itself. Slots and pages have theirs.
    """

    def __init__(self, host: HostKVPool, slots: SlotPool, copier: KVCopier) -> None:
        self.transaction = Transaction(host.runtime, "the host tier")
        self._slots = slots
        self._complete: set[Fence] = set()  # those that answered so when they were queried last
        self._host = host
        self._copier = copier
        capacity = slots.capacity
        self.states = np.full(capacity, TierState.OUTSIDE, dtype=np.uint8)
        self._numbers = np.zeros((5, capacity), dtype=np.int64)
        self.length, self.backed, self.hot_from, self.held, self.max_tokens = self._numbers
        self.ranges: dict[int, HostRanges] = {}
        self.fences: dict[int, Fence] = {}
        self.planned: Ints = np.empty(0, dtype=np.int64)
        self.releasing: Ints = self.planned
        self._ranges: Ints = np.empty((4, capacity, 0), dtype=np.int64)
        self._widen(1)

    # Entering, leaving, locations

    def enter(self, slot: int, ranges: HostRanges, state: TierState, length: int) -> None:
        self.ranges[slot] = ranges
        self._host.keep(ranges, self)
        self.states[slot] = state
        self._numbers[:, slot] = length, length, 0, length if state == TierState.STAGED else 0, len(ranges)
        starts, lengths, width = ranges.starts, ranges.lengths, ranges.starts.size
        if width > self._ranges.shape[2]:
            self._widen(width)
        ends = np.cumsum(lengths)
        self._forget_ranges(slot)
        self._ranges[:, slot, :width] = ends, starts - (ends - lengths), starts, starts + lengths

    def leave(self, slot: int, after: Fence | None) -> None:
        """Frees the host locations of a slot behind a fence and clears its row, but for the state."""
        ranges = self.ranges.pop(slot)
        finished = self.states[slot] == TierState.READY
        self.states[slot] = TierState.FINISHED if finished else TierState.ABORTED
        self._numbers[:, slot] = 0
        self._forget_ranges(slot)
        self._host.free(ranges, after=after, keeper=self)
        self.fences.pop(slot, None)

    def _widen(self, width: int) -> None:
        """Makes room for more ranges: the position after each, location - position, first location, location after.

        A range that does not exist ends beyond all positions.
        """
        before = self._ranges
        have = before.shape[2]
        self._ranges = np.zeros((4, before.shape[1], max(width, 2 * have)), dtype=np.int64)
        self._ranges[0] = _BEYOND
        self._ranges[:, :, :have] = before

    def _forget_ranges(self, slot: int) -> None:
        self._ranges[0, slot], self._ranges[1:, slot] = _BEYOND, 0

    def _nth_range(self, slots: Ints, positions: Ints) -> Ints:
        nth: Ints = (self._ranges[0, slots] <= positions[:, None]).sum(axis=1)
        return nth

    def locations(self, slots: Ints, positions: Ints) -> Ints:
        """The host location of one position of each slot, int64[n]; both int64[n], positions below `max_tokens`."""
        locations: Ints = self._ranges[1, slots, self._nth_range(slots, positions)] + positions
        return locations

    def bounds(self, slots: Ints, positions: Ints) -> Ints:
        """The range that has one position of each slot: from, to (exclusive), int64[2, n]."""
        bounds: Ints = self._ranges[2:, slots, self._nth_range(slots, positions)]
        return bounds

    def first_locations(self, slots: Ints, counts: Ints) -> Ints:
        """The host locations of the first `counts` positions of each slot, one slot after the other."""
        parts = [self.ranges[slot].locations(0, n) for slot, n in zip(slots.tolist(), counts.tolist(), strict=True)]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    # The slot pool's events

    def check_take(self, n: int) -> None:
        self.transaction.enter("take of slots")

    def on_take(self, rows: Ints) -> None:
        """Forgets the requests that were on the slots before."""
        self.states[rows] = TierState.OUTSIDE
        self.releasing = rows[:0]

    def before_free(self, rows: Ints) -> None:
        self.query_fences(rows.tolist())

    def query_fences(self, slots: Iterable[int]) -> None:
        """Queries the fences that `fence_of` names for slots; they are code of the engine. Asks none under capture."""
        fences = [] if self._host.runtime.capturing else self._fences_of(slots)
        answers = self._slots.transaction.query(fences)
        self._complete = {fence for fence, complete in zip(fences, answers, strict=True) if complete}
        self._copier.forget(self._complete)

    def check_free(self, rows: Ints, operation: str) -> None:
        """Refuses slots of a plan whose backup is not launched yet, and slots whose pages are being copied.

        Such a backup would write memory of another request by then, and such a copy reads device pages that the fence
        of the free may not cover.
        """
        self.transaction.enter(f"{operation} of slots")
        planned = rows[np.isin(rows, self.planned)] if self.planned.size else self.planned
        if planned.size:
            problem = f"{operation} of slot {planned[0]}, which is in a plan whose backup was not launched"
            raise ArgumentError(problem, int(planned[0]), "call `back_up` with the plan first, then let the request go")
        if np.array_equal(rows, self.releasing):
            return
        staged = rows[self.states[rows] == TierState.STAGED]
        copying = [slot for slot in staged.tolist() if self.fences[slot] not in self._complete]
        if copying:
            allowed = (TierState.READY, TierState.DIRECT, TierState.OUTSIDE)
            self.check_state(np.array(copying, dtype=np.int64), allowed, operation)

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        for slot in rows.tolist():
            if slot in self.ranges:
                self.leave(slot, self.fence_of([slot], after))

    def check_pages(self, rows: Ints, operation: str) -> None:
        """Refuses to release device pages that are the hot buffer of a request, or are being copied: TIER_STATE."""
        if self.ranges and not np.array_equal(rows, self.releasing):
            self.check_state(rows, (TierState.OUTSIDE,), f"{operation} of pages")

    def fence_of(self, slots: Iterable[int], after: Fence | None) -> Fence | None:
        """The fence before memory of these slots is used again, by the last `query_fences`; None for nothing."""
        return joined(after, *(fence for fence in self._fences_of(slots) if fence not in self._complete))

    def _fences_of(self, slots: Iterable[int]) -> list[Fence]:
        """The fences after all copies, and those of these slots, each once."""
        own = (self.fences[slot] for slot in slots if slot in self.fences)
        return list(dict.fromkeys((*self._copier.fences, *own)))

    @contextmanager
    def releases(self, rows: Ints) -> Iterator[None]:
        """A window in which the host tier itself releases slots int64[n], or their pages."""
        self.releasing = rows
        try:
            yield
        finally:
            self.releasing = rows[:0]

    # Checks

    def check_state(self, rows: Ints, allowed: tuple[TierState, ...], operation: str) -> None:
        invariants.tier_state(rows, self.states[rows], allowed, _NAMES, **self._where(operation))

    def check_arrived(self, rows: Ints, lengths: Ints, operation: str) -> None:
        """Refuses (TIER_STATE) requests that are not DIRECT, or whose writer has not delivered all reserved tokens."""
        lacks = np.zeros_like(rows)
        for at, ranges in enumerate(map(self.ranges.get, rows.tolist())):
            if ranges is not None and ranges.writer is not None:
                lacks[at] = missing(ranges.writer, int(lengths[at]))
        where = self._where(operation)
        invariants.tier_state(rows, self.states[rows], (TierState.DIRECT,), _NAMES, missing=lacks, **where)

    def verify(self) -> None:
        """Checks from scratch that the host locations in use are those that slots of the tier own, each once."""
        self.transaction.enter("verify of the host tier")
        self._host.verify()
        where = self._where("verify")
        staged = np.flatnonzero(self.states == TierState.STAGED).tolist()
        copied = np.array([slot for slot in staged if slot not in self.fences], dtype=np.int64)
        self.check_state(copied, (TierState.READY,), "verify")
        held = 0
        for slot, ranges in self.ranges.items():
            self._host.check_held(ranges, "verify")
            held += len(ranges)
            positions = np.arange(len(ranges), dtype=np.int64)
            named = self.locations(np.full(positions.size, slot, dtype=np.int64), positions)
            invariants.mirror_equal(ranges.locations(), named, **where)
            owner = self._host.owner_of(ranges.starts[:1])
            invariants.slot_stale_handle(np.array([slot]), np.array([ranges.owner]), owner, **where)
        stats = self._host.stats
        owners = np.fromiter(self.ranges, dtype=np.int64)
        orphans = owners[~self._slots.is_live(owners)]
        if orphans.size:
            live = stats.live - sum(len(self.ranges[slot]) for slot in orphans.tolist())
            invariants.slot_conservation(stats.free, stats.pending, live, stats.size, leaked=orphans, **where)
        if held > stats.live:  # the pool's users outside of the tier count what they took
            invariants.slot_conservation(stats.free, stats.pending, held, stats.size, **where)
        most = int(self.max_tokens.max(initial=0))
        invariants.length_order(self.backed, self.length, most, **where)
        invariants.length_order(self.length, self.max_tokens, most, **where)

    def _where(self, operation: str) -> Where:
        return {"object": "the host tier", "operation": operation, "step": self._host.runtime.step}
