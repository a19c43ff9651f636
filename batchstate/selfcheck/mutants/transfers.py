"""A transfer counts as over before it is, or writes where it must not: tags, ends, bounds."""

from typing import Any
from weakref import WeakKeyDictionary

import attrs

from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.transport.engines.base import Delivery
from batchstate.transport.receiver import Ended, Lease, LeaseState, Receiver, Share
from batchstate.transport.regions import Ints
from batchstate.transport.sender import Sender
from batchstate.transport.wire import Grant, Tag
from batchstate.transport.workers import Worker
from batchstate.violations import Code


@mutant(Code.MIRROR_EQUAL, Code.TRANSFER_LATE_WRITE, machine="transfers", origin="sglang #23020, sglang #24527")
def tags_counted_not_ids(patch: Patch) -> None:
    """Each tag that arrives counts as another chunk: one that comes twice stands for one that never came."""

    def take(self: Share, tag: Tag) -> bool:
        self.chunks.add(len(self.chunks))
        self.total = self.total or tag.total
        return True

    patch(Share, "take", take)


@mutant(Code.MIRROR_EQUAL, Code.TRANSFER_LATE_WRITE, machine="transfers", origin="sglang #23020, sglang #26427")
def last_chunk_is_enough(patch: Patch) -> None:
    """A request counts as delivered when its last chunk has arrived, in whatever order chunks arrive."""
    patch(Share, "complete", lambda self: self.total > 0)


@mutant(Code.MIRROR_EQUAL, Code.TRANSFER_LATE_WRITE, machine="transfers", origin="sglang #38961, sglang #27372")
def tags_name_the_request_alone(patch: Patch) -> None:
    """What arrives late of one attempt counts for the next one of the same request, whose memory is another."""
    later: WeakKeyDictionary[Receiver, dict[int, int]] = WeakKeyDictionary()

    def retry(self: Receiver, lease: Lease, writers: Any = None) -> Lease:
        new: Lease = retried(self, lease, writers)
        later.setdefault(self, {})[lease.serial] = new.serial
        return new

    def arrived(self: Receiver, delivery: Delivery) -> None:
        tag = Tag.unpacked(delivery.tag)
        again = later.get(self, {})
        while tag is not None and tag.serial in again:
            tag = attrs.evolve(tag, serial=again[tag.serial], attempt=tag.attempt + 1)
        arrive(self, delivery if tag is None else Delivery(tag.packed(), delivery.instance))

    retried = patch(Receiver, "retry", retry)
    arrive = patch(Receiver, "_arrive", arrived)


@mutant(Code.TRANSFER_BOUNDS, machine="transfers", origin="sglang #24527, sglang #14439")
def rows_beyond_the_grant(patch: Patch) -> None:
    """The writer counts the granted tokens from one place too far, and the last row is a stranger's."""

    def targets(self: Grant) -> Ints:
        given: Ints = original(self)
        return given + 1

    original = patch(Grant, "targets", targets)


@mutant(Code.TRANSFER_LATE_WRITE, Code.MIRROR_EQUAL, machine="transfers", origin="sglang #24527, sglang #35049")
def ended_with_the_state(patch: Patch) -> None:
    """Memory counts as free of writers as soon as its transfer has failed or was aborted."""
    patch(Ended, "query", lambda self: self.lease.state is not LeaseState.WAITING)


@mutant(Code.TRANSFER_LATE_WRITE, Code.MIRROR_EQUAL, machine="transfers", origin="sglang #35360, vllm #32255")
def drained_at_once(patch: Patch) -> None:
    """A writer says that nothing can land any more as soon as it has stopped to begin writes."""
    patch(Sender, "_drained", lambda self, sending: True)


@mutant(Code.TRANSFER_LATE_WRITE, Code.MIRROR_EQUAL, machine="transfers", origin="sglang #38961, sglang #27372")
def suspicion_ends_a_writer(patch: Patch) -> None:
    """A writer that has not been heard of counts as ended: time-out alone frees what it may still write."""

    def ended(self: Share) -> bool:
        return bool(original(self)) or self.worker.lost is not None

    original = patch(Share, "ended", ended)


@mutant(Code.TRANSFER_LATE_WRITE, Code.MIRROR_EQUAL, machine="transfers", origin="sglang #35049, vllm #32255")
def death_without_settling(patch: Patch) -> None:
    """What a writer has sent counts as gone at the moment of its death."""
    patch(Worker, "settled", lambda self: self.settles_in is not None)
