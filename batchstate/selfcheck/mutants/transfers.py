"""A transfer counts as over before it is, or writes where it must not: tags, ends, bounds."""

from typing import Any
from weakref import WeakKeyDictionary

import attrs

from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.transport.engines.base import Delivery
from batchstate.transport.receiver import Lease, Receiver
from batchstate.transport.wire import Tag
from batchstate.violations import Code


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
