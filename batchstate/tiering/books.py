"""What the host tier knows of each slot: its state, its length, and which host token each position has.

    positions   0 ............ backed ..... length ....... room
                in host memory |  not yet  |   to come    |
    on device   the newest `hot_tokens` positions, from `hot_from` on

Host bookkeeping only, vectorised over requests: no cost here grows with a context's length or a pool's size. It grows
with the most runs that one request ever had: a pool that is fragmented badly once makes all look-ups somewhat slower.
"""

import enum
from typing import Any, final

import numpy as np
import numpy.typing as npt

from batchstate.ownership.host_runs import HostRuns

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
