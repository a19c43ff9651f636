"""A request leaves by an exit that gives back too much, too little, or too early.

These mutants are in the scheduler of the engine machine: what an engine can get wrong around the library.
"""

import numpy as np
import numpy.typing as npt

from batchstate.selfcheck.machines.engine import Request, Scheduler
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code

Leaves = npt.NDArray[np.bool_]


@mutant(Code.SLOT_DOUBLE_FREE, machine="engine", origin="sglang #12224, sglang #6888")
def two_exits_free(patch: Patch) -> None:
    """Finishing a request frees what it has, and so does the abort that arrives at the same time."""

    def give_back(self: Scheduler, leaves: Leaves) -> tuple[Request, ...]:
        leaving = self.batch.filter(leaves)
        requests: tuple[Request, ...] = original(self, leaves)
        self.pages.release_requests(leaving.slots, after=self.steps.last)
        return requests

    original = patch(Scheduler, "_give_back", give_back)


@mutant(Code.SLOT_STALE_HANDLE, machine="engine", origin="sglang #11970, sglang #11976, sglang #11981")
def retracted_row_gives_one_more_result(patch: Patch) -> None:
    """A row that left is planned once more, from the batch that was launched last."""

    def lacking(self: Scheduler) -> int:
        if self.launched is not None:
            self.pages.allocated(self.launched.slots)
        pages: int = original(self)
        return pages

    original = patch(Scheduler, "_lacking", lacking)


@mutant(Code.SLOT_CONSERVATION, machine="engine", origin="sglang #10871")
def pages_freed_without_row(patch: Patch) -> None:
    """A request that leaves gives its pages back and keeps its row, until there is none for the next."""

    def give_back(self: Scheduler, leaves: Leaves) -> tuple[Request, ...]:
        leaving = self.batch.filter(leaves)
        self.pages.release(leaving.slots, after=self.steps.last)
        self.batch = self.batch.filter(~leaves)
        return leaving.requests

    patch(Scheduler, "_give_back", give_back)


@mutant(Code.SLOT_CONSERVATION, machine="engine", origin="sglang #21652, sglang #27372")
def abort_gives_nothing_back(patch: Patch) -> None:
    """The path of an aborted request drops it from the batch and frees nothing."""

    def leave(self: Scheduler) -> None:
        self.batch = self.batch.filter([request.state != "aborted" for request in self.batch.requests])
        original(self)

    original = patch(Scheduler, "_leave", leave)


@mutant(Code.SLOT_IN_FLIGHT, machine="engine", origin="sglang #18744, sglang #24527, sglang #29352")
def free_without_fence(patch: Patch) -> None:
    """Rows and pages are freed when the request ends, without the fence of the step that still reads them."""

    def give_back(self: Scheduler, leaves: Leaves) -> tuple[Request, ...]:
        leaving = self.batch.filter(leaves)
        self.pages.release_requests(leaving.slots)
        self.batch = self.batch.filter(~leaves)
        return leaving.requests

    patch(Scheduler, "_give_back", give_back)
