"""Interesting states: what a machine has to get into, or else its silence proves nothing."""

from collections import Counter
from typing import final

import attrs

from batchstate.errors import ArgumentError

STATES: dict[str, tuple[str, ...]] = {
    "mirrored_tensor": (
        "moved before the device side was made",
        "moved after the device side was made",
        "merge of exact with bound",
        "merge of host_only with exact",
        "merge with device_only",
        "a row taken twice",
        "an empty value",
        "a bound resolved",
        "read on a second stream",
        "overflow refused",
        "handles moved with their generations",
        "read in a stale window refused",
        "write from outside found",
    ),
    "batch": (
        "merge of exact with bound",
        "a bound made exact again",
        "a bounded column read on the device",
        "padded rows read on the device",
        "a request in both batches refused",
        "overflow refused",
        "table writes of one table joined",
        "packed and single ways compared",
        "fewer requests in a graph than before",
        "leave, join and advance at once",
    ),
    "slot_pool": (
        "two steps in flight",
        "a slot used again after its fence",
        "taken while another slot is pending",
        "freed behind step N while N+1 is in flight",
        "exhausted while pending would suffice",
        "exhausted for good",
        "the reserve used",
        "double free refused",
        "handle of a slot used again refused",
        "write through a stale handle refused",
    ),
    "page_pool": (
        "two steps in flight",
        "a page held by three",
        "a prefix shared from a lease",
        "begun on pages taken before",
        "a write into a shared page refused",
        "a request too long refused",
        "allocated first and committed later",
        "tokens taken back",
        "exhausted while pending would suffice",
        "exhausted for good",
        "released behind step N while N+1 is in flight",
        "retraction",
    ),
    "hybrid": (
        "two steps in flight",
        "a state used again after its fence",
        "states exhausted while slots are free",
        "exhausted while pending would suffice",
        "the reserve used",
        "the mapping written by the caller",
        "double free refused",
    ),
    "engine": (
        "two steps in flight",
        "retraction",
        "waited for a step that held what was needed",
        "slots free behind step N while N+1 is in flight",
        "abort with a step in flight",
        "a shared prefix",
        "a page held by two",
    ),
    "future_map": (
        "overwriting unread refused",
        "read before the publish refused",
        "read a second time refused",
        "handle of a slot used again refused",
        "a slot used by another request",
        "left with an entry unread",
        "left between launch and results",
        "padded rows",
        "read on another stream than the publish",
        "fetched while the device was not there yet",
        "fetched after its slot was freed",
        "fetched after its entry was overwritten",
        "a forward of prompts alone",
        "a forward of decodes alone",
        "a forward of prompts and decodes",
        "drafts put in",
        "bounded lengths set right",
        "padded to a graph's size",
        "a plan used twice refused",
    ),
    "overlap": (
        "two steps in flight",
        "left while a step uses the row",
        "joined while a step is in flight",
        "a slot used again while a step is in flight",
        "a prebuilt request in a used slot",
        "a prebuilt request on used pages",
        "prebuilt KV handed to the forward",
        "a retracted request came back",
        "waited for a step that held what was needed",
        "tokens taken back while a step writes them",
        "a row rewritten while a step reads it",
        "a row written on two streams",
        "a row cleared on another stream",
        "nudged from another stream",
        "inputs gathered by hand",
        "a forward of prompts and decodes",
        "looked at while a step is in flight",
        "results read out of order",
        "results that nobody reads",
    ),
    "host_tier": (
        "two steps in flight",
        "requests outside beside some inside",
        "a request in several runs",
        "a short request loaded",
        "a long request admitted",
        "read from the host",
        "grown by a page",
        "the ring went round",
        "a request without room refused",
        "host tokens exhausted",
        "device pages exhausted",
        "staged abort while the copy is under way",
        "direct abort before the writer has ended",
        "a late write into memory of nobody",
        "a writer that ends after its request",
        "host tokens used again after their writer",
    ),
    "transfers": (
        "a lease delivered",
        "a lease failed",
        "a lease aborted",
        "another attempt",
        "a tag twice",
        "a late tag",
        "a write refused",
        "freed before it has ended",
        "freed while its writer may still write",
        "the writer died while it wrote",
        "host tokens exhausted",
    ),
    "twins": (
        "rows left",
        "rows in another order",
        "batches merged",
        "a batch advanced",
        "an empty batch",
    ),
}
"""Machine -> the states that its ordinary number of examples must reach."""


@final
@attrs.define(eq=False)
class Reach:
    """How often each state was reached.

    Attributes:
        counts: (machine, state) -> times.
    """

    counts: Counter[tuple[str, str]] = attrs.field(factory=Counter)

    def count(self, machine: str, state: str) -> None:
        """Counts a state once.

        Raises:
            ArgumentError: the state is not declared in `STATES`.
        """
        if state not in STATES.get(machine, ()):
            raise ArgumentError(
                f"machine {machine!r} has no state {state!r}", value=state, remedy="declare it in `reach.STATES`"
            )
        self.counts[machine, state] += 1

    def of(self, machine: str) -> dict[str, int]:
        """Times each state of a machine was reached, in the order of declaration; 0 for those that were not."""
        return {state: self.counts[machine, state] for state in STATES.get(machine, ())}
