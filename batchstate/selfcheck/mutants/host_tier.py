"""KV in host memory is lost, freed or read where it is not: states, backups, writers in other processes."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch

from batchstate.indices import HostLocations, Locations, Slots
from batchstate.kv._tier import Ints, Moves, TierBooks, TierGuard, TierState
from batchstate.kv.hisparse import HiSparse, LastLocation, host_only
from batchstate.kv.host_pool import ExtentList, HostKVPool, HostRuns, runs_of
from batchstate.kv.pages import Extension
from batchstate.runtime import Fence
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code

# Index spaces


@mutant(Code.UNIT_MISMATCH, machine="host_tier", origin="sglang #31482, sglang #31901")
def host_places_for_device_places(patch: Patch) -> None:
    """The backup reads the device's buffer at the places that the host's buffer has, and the other way round."""

    def back_up(self: HiSparse, location: LastLocation, uploaded: Mapping[str, torch.Tensor] | None = None) -> None:
        if len(location.backup_from):
            swapped: Any = (location.backup_to, location.backup_from)
            location.backup_from, location.backup_to = swapped
        original(self, location, uploaded)

    original = patch(HiSparse, "back_up", back_up)


@mutant(Code.MIRROR_EQUAL, Code.TRANSFER_BOUNDS, machine="host_tier", origin="sglang #24527, sglang #26427")
def first_run_for_all(patch: Patch) -> None:
    """A place is computed as if the host tokens of a request lay in one run: behind its end others have theirs."""

    def host_tokens(self: TierBooks, slots: Ints, positions: Ints) -> Ints:
        tokens: Ints = self._shift[slots, 0] + positions
        return tokens

    patch(TierBooks, "host_tokens", host_tokens)


@mutant(Code.LENGTH_ORDER, machine="host_tier", origin="sglang #24039, sglang #14439")
def device_pages_for_host_pages(patch: Patch) -> None:
    """Host pages are counted by the page size of the device: a request gets fewer tokens than it asked for."""

    def enter(self: HiSparse, rows: Ints, length: Ints, room: Ints, *rest: Any) -> list[HostRuns]:
        pages = -(-room // self.pages.page_size)
        runs: list[HostRuns] = original(self, rows, length, pages * self.host.page_size, *rest)
        return runs

    original = patch(HiSparse, "_enter", enter)


@mutant(Code.MIRROR_EQUAL, Code.SLOT_ZERO_ALLOCATED, machine="host_tier", origin="sglang #22453")
def hot_buffer_of_another_pool(patch: Patch) -> None:
    """Admission counts the hot buffer by what the host pool has in a page, and the device has too little of it."""

    def admit_direct(self: HiSparse, slots: Slots) -> Extension:
        before, self.hot_tokens = self.hot_tokens, max(1, min(self.hot_tokens, self.host.page_size))
        try:
            hot: Extension = original(self, slots)
        finally:
            self.hot_tokens = before
        return hot

    original = patch(HiSparse, "admit_direct", admit_direct)


@mutant(Code.SLOT_ZERO_ALLOCATED, machine="host_tier", origin="sglang #23635, vllm #43810")
def padding_is_handed_out(patch: Patch) -> None:
    """Host page 0, which padded rows read and write, is handed out like any other."""
    patch(HostKVPool, "_extents", lambda self, first, last: ExtentList(first - 1, last - 1))


# States


@mutant(Code.MIRROR_EQUAL, machine="host_tier", origin="sglang #27258")
def decodes_without_admission(patch: Patch) -> None:
    """One path moves requests that have arrived to those that decode, and forgets to admit them: no hot buffer."""

    def admit_direct(self: HiSparse, slots: Slots) -> Extension:
        rows = self.slots.rows_of(slots, "admit_direct", unique=True)
        self._guard.check_state(rows, (TierState.DIRECT,), "admit_direct")
        self._books.states[rows] = TierState.READY
        return self.pages.extend(slots, 0)

    patch(HiSparse, "admit_direct", admit_direct)


@mutant(Code.TIER_STATE, machine="host_tier", origin="sglang #22453, sglang #21591")
def staging_flag_never_cleared(patch: Patch) -> None:
    """The copy is over, another field is written than the one that says so, and the request waits for ever."""

    def settle(self: HiSparse, slots: Slots, copied: Fence) -> int:
        settled: int = original(self, slots, copied)
        self._books.states[slots.np] = TierState.STAGED
        return settled

    original = patch(HiSparse, "_settle", settle)


@mutant(Code.SLOT_IN_FLIGHT, machine="host_tier", origin="sglang #21591, sglang #29352")
def settles_before_the_copy(patch: Patch) -> None:
    """Staged requests count as copied when the next step begins, and their pages go while the copy still reads them."""

    def settle(self: HiSparse) -> int:
        settled = sum(self._settle(slots, fence) for slots, fence in self._staging)
        self._staging = []
        return settled

    patch(HiSparse, "settle", settle)


# Backups


@mutant(Code.MIRROR_EQUAL, machine="host_tier", origin="sglang #26425, sglang #31482")
def backup_skipped(patch: Patch) -> None:
    """The token of the last step is never copied out, and its place in the ring is used again."""

    def to_host(self: Moves, source: torch.Tensor, target: torch.Tensor, name: str) -> Fence:
        nothing = slice(0, 0) if "back up" in name else slice(None)
        fence: Fence = original(self, source[nothing], target[nothing], name)
        return fence

    original = patch(Moves, "to_host", to_host)


@mutant(Code.MIRROR_EQUAL, machine="host_tier", origin="sglang #26427, sglang #31482")
def backup_off_by_one(patch: Patch) -> None:
    """The token of the last step is copied out to the place of the one before."""

    def map_last_location(self: HiSparse, slots: Slots, seq_lens: object) -> LastLocation:
        location: LastLocation = original(self, slots, seq_lens)
        if len(location.backup_to) == len(slots):
            places = self._books.host_tokens(slots.np, np.maximum(location.positions - 2, 0))
            location.backup_to = host_only(HostLocations, self.runtime, places)
        return location

    original = patch(HiSparse, "map_last_location", map_last_location)


@mutant(Code.MIRROR_EQUAL, machine="host_tier", origin="sglang #30435, sglang-jax #1504")
def backup_a_step_late(patch: Patch) -> None:
    """Tokens are copied out a step later than planned, when their rows of the ring may be those of newer ones."""
    planned: WeakKeyDictionary[HiSparse, tuple[Locations, HostLocations]] = WeakKeyDictionary()

    def back_up(self: HiSparse, location: LastLocation, uploaded: object = None) -> None:
        if not location.launched and location is self._open:
            mine = location.backup_from, location.backup_to
            nothing = location.backup_from.take([]), location.backup_to.take([])
            location.backup_from, location.backup_to = planned.get(self, nothing)
            planned[self] = mine
        original(self, location)

    original = patch(HiSparse, "back_up", back_up)


# Leaving


@mutant(Code.SLOT_CONSERVATION, machine="host_tier", origin="sglang #12224, sglang #27789")
def freed_by_length(patch: Patch) -> None:
    """A request that leaves gives back the host tokens that it has used, and not those that it was given."""

    def free(self: HostKVPool, runs: Any, *, after: Fence | None = None, keeper: object = None) -> None:
        if not isinstance(runs, HostRuns):
            original(self, runs, after=after, keeper=keeper)
            return
        used = tokens_in_use.pop(runs.generation, len(runs))
        pages = runs.tokens()[:: self.page_size][: -(-used // self.page_size)] // self.page_size
        starts, lengths = runs_of(pages)
        part = attrs.evolve(runs, starts=starts * self.page_size, lengths=lengths * self.page_size)
        original(self, part, after=after, keeper=keeper)

    def leave(self: TierBooks, slot: int) -> HostRuns:
        tokens_in_use[self.runs[slot].generation] = int(self.length[slot])
        runs: HostRuns = left(self, slot)
        return runs

    tokens_in_use: dict[int, int] = {}
    original = patch(HostKVPool, "free", free)
    left = patch(TierBooks, "leave", leave)


@mutant(Code.TRANSFER_LATE_WRITE, machine="host_tier", origin="sglang #24527, sglang #27372, sglang #35049")
def freed_under_the_writer(patch: Patch) -> None:
    """Host tokens of an aborted request are free at once, while the prefill worker still writes into them."""

    def fence_of(self: TierGuard, slots: list[int], after: Fence | None) -> Fence | None:
        fence: Fence | None = original(self, [], after)
        return fence

    original = patch(TierGuard, "fence_of", fence_of)


@mutant(Code.TRANSFER_LATE_WRITE, machine="host_tier", origin="sglang #35360, sglang #38961, vllm #32255")
def freed_by_time_out(patch: Patch) -> None:
    """Host tokens in quarantine are freed after a while, whether or not their writer has ended."""

    def fence_of(self: TierGuard, slots: list[int], after: Fence | None) -> Fence | None:
        fence: Fence | None = original(self, slots, after)
        return None if fence is None else _Impatient(fence)

    original = patch(TierGuard, "fence_of", fence_of)


@attrs.define(eq=False)
class _Impatient:
    """A fence that is taken for complete when it was asked a few times."""

    fence: Fence
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 3 or self.fence.query()

    def wait(self) -> None:
        self.fence.wait()


@mutant(Code.SLOT_CONSERVATION, machine="host_tier", origin="sglang #21652, sglang #23496")
def abort_forgets_the_host(patch: Patch) -> None:
    """A request that leaves gives back slot and device pages, and its host tokens stay taken."""
    patch(TierGuard, "freed", lambda self, rows, after: None)


@mutant(Code.SLOT_DOUBLE_FREE, machine="host_tier", origin="sglang #12224, sglang #6888")
def two_exits_free_the_host(patch: Patch) -> None:
    """Finishing frees the host tokens, and so does the way on which every slot leaves."""

    def finish(self: HiSparse, slots: Slots, *, after: Fence | None = None) -> None:
        for slot in slots.np.tolist() if self.ready(slots).all() else ():
            self.host.free(self._books.runs[slot], after=after, keeper=self._guard)
        original(self, slots, after=after)

    original = patch(HiSparse, "finish", finish)


@mutant(Code.SLOT_STALE_HANDLE, machine="host_tier", origin="sglang #34876, sglang #24527")
def run_keeps_its_generation(patch: Patch) -> None:
    """Host tokens that change hands keep their generation: what the last owner kept opens them still."""
    patch(HostKVPool, "_next_generation", lambda self: max(self._newest, 1))
