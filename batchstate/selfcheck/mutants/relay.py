"""What a forward leaves for the next step is read too early, twice, by somebody else, or written over unread.

All are found at level `cheap`: on the host, before anything is launched.
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from batchstate._relay import Entries, Ints, Publication, Publications, RelayLedger, StreamOrder
from batchstate._upload import Extras
from batchstate.forward import inputs as forward_inputs
from batchstate.forward.inputs import Sources
from batchstate.forward.plan import ForwardPlan
from batchstate.future_map import FutureMap, RelayGuard
from batchstate.indices import Slots
from batchstate.levels import Level
from batchstate.mirror import MirroredTensor
from batchstate.runtime import Fence, Stream
from batchstate.runtime.memory import Download
from batchstate.selfcheck.machines.future_map import Forwards, Request
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code

relay_mutant = partial(mutant, machine="future_map", level=Level.CHEAP)
late_mutant = partial(relay_mutant, only_on="cpu")
"""Found where a fence is late: always on a CPU, whose device the machine makes lag, and by luck on a quick device."""


# Order


@relay_mutant(Code.FUTURE_ORDER, origin="sglang #30435, sglang #30471")
def gather_before_publish(patch: Patch) -> None:
    """A forward gathers on its stream without waiting for the stream that published: `seq_lens` read unfenced."""
    patch(StreamOrder, "_await_publish", lambda self, made, stream: None)


@late_mutant(Code.FUTURE_ORDER, origin="sglang #30435, sglang #30471")
def one_event_for_two_publishers(patch: Patch) -> None:
    """There is one event, which seeding from another stream shares: the reader does not know whom it waits for."""
    events: WeakKeyDictionary[Publications, Fence] = WeakKeyDictionary()

    def add(self: Publications, by: str, stream: Stream, fence: Fence) -> Publication:
        found = events.setdefault(self, fence)
        if found.query():
            found = events[self] = fence
        made: Publication = original(self, by, stream, found)
        return made

    original = patch(Publications, "add", add)


@relay_mutant(Code.FUTURE_ORDER, origin="sglang #26376, sglang #26380")
def overwriting_passes_readers(patch: Patch) -> None:
    """The next publish does not wait for the copy to the host, which still reads the entries: write after read."""
    patch(StreamOrder, "_await_reads", lambda self, made, stream: set())


@late_mutant(Code.FUTURE_ORDER, origin="sglang #18744, sglang #18746")
def order_ends_with_the_entry(patch: Patch) -> None:
    """With a request's entries goes the knowledge who reads them still, and the slot's next owner writes at once."""

    def clear(self: Entries, rows: Ints) -> None:
        original(self, rows)
        self.wrote[rows] = 0

    original = patch(Entries, "clear", clear)


@late_mutant(Code.FUTURE_ORDER, origin="vllm #36013, vllm #51571")
def host_reads_before_copy(patch: Patch) -> None:
    """The host reads the buffer that a copy from the device lands in without waiting for the copy."""
    patch(Download, "_await_copy", lambda self: None)


@relay_mutant(Code.STAGING_REUSED, origin="vllm #51571, pytorch #68749")
def landing_buffer_reused(patch: Patch) -> None:
    """The buffer of a copy to the host is free when the copy has run, and not when its values were taken out."""

    def init(self: Download, staging: Any, block: Any, done: Fence, step: int, stream: object, *rest: Any) -> None:
        original(self, staging, block, done, step, stream, *rest)
        staging.release(block, done, step, stream)

    original = patch(Download, "__init__", init)


# Who wrote, and who has read


@relay_mutant(
    Code.FUTURE_UNREAD_OVERWRITTEN,
    Code.FUTURE_CONSUMED,
    origin="sglang-jax#1487, sglang-jax#1504, sglang-jax#1317, sglang #13713",
)
def relay_ring_wraps(patch: Patch) -> None:
    """Entries lie in a ring that is shorter than what is in flight, and a publish meets those that nobody has read."""
    patch(RelayLedger, "rows_of", lambda self, slots: slots % 2)


@relay_mutant(Code.FUTURE_GENERATION, origin="sglang #18744, sglang #18803")
def slot_keeps_entries(patch: Patch) -> None:
    """Entries of a request that leaves count as read and stay, and the slot's next owner starts from its token."""

    def clear(self: RelayGuard, rows: Ints) -> None:
        for entries in self._ledger.entries.values():
            entries.take(rows, entries.field.readers)

    patch(RelayGuard, "_clear", clear)


@relay_mutant(Code.FUTURE_CONSUMED, origin="sglang #25945")
def inputs_made_twice(patch: Patch) -> None:
    """Two readers resolve the same lazy ids: the second finds what the first has taken."""

    def ids(plan: ForwardPlan, uploaded: Extras, relayed: Slots, sources: Sources) -> torch.Tensor:
        if len(plan.relay_rows):
            sources.gather(relayed, sources.ids[0])
        made: torch.Tensor = original(plan, uploaded, relayed, sources)
        return made

    original = patch(forward_inputs, "_ids", ids)


@relay_mutant(Code.FUTURE_CONSUMED, Code.FUTURE_UNWRITTEN, origin="sglang #18647, vllm #48419")
def stash_forgets_drafts(patch: Patch) -> None:
    """One of the fields is missing from the publish, and the next step verifies the drafts of the one before."""

    def publish(self: FutureMap, slots: Slots, /, **values: Any) -> None:
        if not isinstance(values.get("drafts"), torch.Tensor) or len(values) == 1:
            original(self, slots, **values)
        else:
            original(self, slots, **{name: value for name, value in values.items() if name != "drafts"})

    original = patch(FutureMap, "publish", publish)


@relay_mutant(Code.FUTURE_CONSUMED, origin="sglang #25945")
def prompt_installed_again(patch: Patch) -> None:
    """A snapshot that isolates a step puts back inputs that were used: the prompt before runs a second time."""
    before: WeakKeyDictionary[FutureMap, tuple[ForwardPlan, Extras]] = WeakKeyDictionary()

    def installed(self: Forwards, plan: ForwardPlan, uploaded: Extras) -> tuple[ForwardPlan, Extras]:
        last, crossed = before.get(self._relay, (plan, uploaded))
        before[self._relay] = plan, uploaded
        fits = np.array_equal(last.slots.np, plan.slots.np) and set(last.extras) <= set(plan.extras)
        here = fits and np.array_equal(last.slots.generations, plan.slots.generations)
        return (last, crossed) if here and not len(last.relay_rows) else (plan, uploaded)

    patch(Forwards, "installed", installed)


@relay_mutant(Code.FUTURE_UNREAD_OVERWRITTEN, origin="sglang #25945")
def lazy_ids_taken_for_a_prompt(patch: Patch) -> None:
    """In a step with prompts, ids that are None until they are resolved pass for ids: nobody asks the relay."""

    def of(cls: Any, slots: Slots, seq_lens: object, query_lens: Any = 1, **rest: Any) -> ForwardPlan:
        given = rest.get("prompt_ids")
        if given is not None and any(ids is not None for ids in given):
            counts = np.broadcast_to(query_lens, len(given))
            rest["prompt_ids"] = [[0] * int(n) if ids is None else ids for ids, n in zip(given, counts, strict=True)]
        made: ForwardPlan = original(cls, slots, seq_lens, query_lens, **rest)
        return made

    original = patch(ForwardPlan, "of", of)


@relay_mutant(Code.FUTURE_UNWRITTEN, origin="sglang #27258")
def seed_left_out_on_return(patch: Patch) -> None:
    """A request that comes back joins the running ones on a path of its own, which publishes nothing for it."""

    def publish(self: FutureMap, slots: Slots, /, **values: object) -> None:
        from_host = not any(isinstance(value, torch.Tensor | MirroredTensor) for value in values.values())
        if not from_host or not (slots.generations > 1).any():
            original(self, slots, **values)

    original = patch(FutureMap, "publish", publish)


# Who it is


@relay_mutant(Code.SENTINEL_ESCAPED, origin="vllm #40768, vllm #48245")
def stand_in_embedded(patch: Patch) -> None:
    """The place of one id from the relay is forgotten, and the -1 that stands there meanwhile goes to the embedding."""

    def relay_tokens(self: ForwardPlan) -> Ints:
        places: Ints = original(self)
        return places[:-1] if len(self.relay_rows) < self.num_reqs else places

    original = patch(ForwardPlan, "relay_tokens", relay_tokens)


@relay_mutant(Code.SENTINEL_ESCAPED, origin="vllm #40768")
def placeholder_sampled(patch: Patch) -> None:
    """A step that sampled nothing for a request leaves -1 as its token, and the output has it."""

    def publish(self: FutureMap, slots: Slots, /, **values: Any) -> None:
        if isinstance(values.get("token"), torch.Tensor):
            values["token"] = torch.full_like(values["token"], -1)
        original(self, slots, **values)

    original = patch(FutureMap, "publish", publish)


@relay_mutant(Code.SLOT_ZERO_ALLOCATED, origin="sglang #24243, sglang #35351")
def padded_rows_publish(patch: Patch) -> None:
    """Padded rows of a graph publish too, into the row that every padded row reads."""
    patch(FutureMap, "_live", lambda self, slots, operation: slots)


@relay_mutant(Code.SLOT_STALE_HANDLE, Code.FUTURE_GENERATION, origin="sglang #11970, sglang #11976, sglang #11981")
def retracted_request_publishes(patch: Patch) -> None:
    """A request that was retracted after the launch gets one more result, in a slot that may be another's by then."""

    def with_results(self: Forwards, sampled: list[Request], here: list[Request]) -> list[Request]:
        return list(sampled)

    patch(Forwards, "with_results", with_results)
