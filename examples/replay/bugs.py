"""Bugs in the example engines that break an invariant, beside those of `examples.exact`."""

from typing import Any

import numpy as np

from examples.exact.bugs import Bug, around, bug, bugs
from tests.selfcheck.mutants.registry import Patch

bugs()  # those of `examples.exact` first: their list is made once
_TRAFFIC = "examples.traffic.engine:TrafficEngine"
_SCHEDULER = "examples.traffic.scheduler:BatchScheduler"


@bug("traffic", "freed twice")
def traffic_abort_frees_twice(patch: Patch) -> None:
    """The client of a running request hangs up, and its slot is freed at once and again when it leaves."""

    @around(patch, f"{_TRAFFIC}.abort")
    def abort(original: Any, self: Any, request: Any) -> None:
        running = request in self.batch.requests
        original(self, request)
        if running:
            row = list(self.batch.requests).index(request)
            self.pages.release_requests(self.batch.filter([row]).slots, after=self.last_step)


@bug("traffic", "row kept")
def traffic_retracted_stays(patch: Patch) -> None:
    """A request that gives its pages back stays in the batch."""

    @around(patch, f"{_SCHEDULER}._retract")
    def retract(original: Any, self: Any, fit: int) -> None:
        batch = self.batch
        original(self, fit)
        self.batch = batch


@bug("traffic", "length wrong")
def traffic_length_after_retraction(patch: Patch) -> None:
    """Behind a retraction the oldest request counts a token twice."""

    @around(patch, f"{_SCHEDULER}._retract")
    def retract(original: Any, self: Any, fit: int) -> None:
        original(self, fit)
        if len(self.batch):
            more = np.zeros(len(self.batch), np.int64)
            more[0] = 1
            self.batch = self.batch.advance("seq_lens", more)


@bug("traffic", "pages kept")
def traffic_pages_kept(patch: Patch) -> None:
    """Of requests that leave together with others only the slots are freed."""

    @around(patch, f"{_SCHEDULER}.give_back")
    def give_back(original: Any, self: Any, leaves: Any) -> Any:
        if np.count_nonzero(leaves) > 2:
            self.slots.free(self.batch.filter(leaves).slots, after=self.last_step)
        return original(self, leaves)


@bug("traffic", "leak")
def traffic_leak_of_aborted(patch: Patch) -> None:
    """A request whose client hangs up before its eighth token leaves the batch, and nothing is given back."""

    @around(patch, f"{_TRAFFIC}.leave")
    def leave(original: Any, self: Any) -> None:
        batch, hung_up = self.batch, self._hung_up
        filling = batch.seq_lens.np < batch.prefill_lens.np + 8
        lost = [row for row, request in enumerate(batch.requests) if request in hung_up and filling[row]]
        if lost:
            for row in lost:
                batch.requests[row].done = True
                hung_up.discard(batch.requests[row])
            self.batch = batch.filter([row for row in range(len(batch)) if row not in lost])
        original(self)


@bug("example", "relay not written")
def example_resumed_unpublished(patch: Patch) -> None:
    """A request that is resumed goes on from a relay entry that nobody has written."""

    @around(patch, "examples.engine.scheduler:Scheduler.arrived")
    def arrived(original: Any, self: Any, batch: Any, joined: Any) -> None:
        original(self, batch, [request for request in joined if request.prebuilt or not request.output])


@bug("example", "freed early")
def example_abort_frees_at_once(patch: Patch) -> None:
    """The client of a running request hangs up, and its slot is freed while the batch still has it."""

    @around(patch, "examples.engine.engine:Engine.abort")
    def abort(original: Any, self: Any, number: int) -> None:
        scheduler, request = self.scheduler, self._requests[number]
        original(self, number)
        if request in scheduler.batch.requests:
            row = list(scheduler.batch.requests).index(request)
            scheduler.slots.release_requests(scheduler.batch.filter([row]).slots, after=scheduler.last_step)


@bug("example", "taken twice")
def example_inputs_again(patch: Patch) -> None:
    """A step of four requests that all decode takes its inputs a second time."""

    @around(patch, "examples.engine.forward:Forward.run")
    def run(original: Any, self: Any, step: Any) -> Any:
        if len(step.sampling) == 4 == step.plan.num_tokens:
            with self._runtime.use(self.stream):
                step.planned.inputs()
        return original(self, step)


TWENTY = (
    "traffic_abort_frees_twice", "traffic_retracted_stays", "traffic_length_after_retraction", "traffic_pages_kept",
    "traffic_leak_of_aborted", "example_resumed_unpublished", "example_abort_frees_at_once", "example_inputs_again",
    "example_position_in_chunk", "example_first_token_again",
    "transformers_hash_without_parent", "transformers_prefix_too_long", "transformers_position_after_chunk",
    "transformers_evicted_hash_kept", "transformers_row_not_written",
    "mini_sglang_prefix_too_long", "mini_sglang_tail_freed", "mini_sglang_slot_twice", "mini_sglang_tokens_swapped",
    "mini_sglang_stale_row",
)  # fmt: skip


def twenty() -> list[Bug]:
    """The bugs of this example: half in our own engines, half in those of others."""
    named = {bug.name: bug for bug in bugs()}
    return [named[name] for name in TWENTY]
