"""What holds of transfers whatever goes wrong with them, and that the oracle sees it when one safety is missing."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from batchstate.errors import BatchStateError
from batchstate.transport.engines.base import Delivery, Status
from batchstate.transport.receiver import Ended, Lease, LeaseState, Receiver, Share
from batchstate.transport.sender import Closed, Sender, Sending, SendState, SourcesFree
from batchstate.transport.wire import Kind, Notice, Tag
from batchstate.transport.workers import Worker, Workers
from tests.transport_world import history

TRANSFERS = 10_000
MOST_HISTORIES = 250
Patch = Callable[[type, str, Any], None]


def test_no_byte_is_wrong_and_none_is_lost_in_ten_thousand_transfers() -> None:
    """Delay, unknown ends, duplicates, drops, reordering, aborts, kills and restarts: what is delivered is right, what
    is not granted stays as it is, memory is reused only when no writer can write it, and all of it comes back.
    """
    transfers, seed = 0, 0
    ends: Counter[LeaseState] = Counter()
    while transfers < TRANSFERS:
        try:
            world = history(seed)
        except Exception as error:
            error.add_note(f"in history({seed})")
            raise
        transfers += world.transfers
        ends.update(world.finished)
        seed += 1
    assert transfers >= TRANSFERS
    for state in (LeaseState.DELIVERED, LeaseState.FAILED, LeaseState.ABORTED):
        assert ends[state] > TRANSFERS // 20, ends


# Mutants: one safety is missing, and some history shows it


def messages_counted_not_ids(patch: Patch) -> None:
    """Each tag that arrives counts as another chunk."""

    def take(self: Share, tag: Tag) -> bool:
        self.chunks.add(len(self.chunks))
        self.total = self.total or tag.total
        return True

    patch(Share, "take", take)


def one_writer_is_enough(patch: Patch) -> None:
    """A lease counts as delivered when the first of its writers has delivered all."""
    patch(Lease, "complete", property(lambda self: any(share.complete for share in self.shares)))


def last_chunk_is_enough(patch: Patch) -> None:
    """A writer's share counts as complete when its last chunk has arrived."""
    patch(Share, "complete", property(lambda self: self.total > 0))


def ended_with_the_state(patch: Patch) -> None:
    """Memory is free of writers as soon as the state of its lease is final."""
    patch(Ended, "query", lambda self: self.lease.state is not LeaseState.WAITING)


def suspicion_ends_a_writer(patch: Patch) -> None:
    """A writer that is suspected to be gone counts as ended."""
    patch(
        Share,
        "ended",
        property(lambda self: self.complete or self.drained or self.worker.settled() or self.worker.lost is not None),
    )


def death_without_settling(patch: Patch) -> None:
    """What a writer has sent counts as gone at the moment of its death."""
    patch(Worker, "settled", lambda self: self.settles_in is not None)


def failure_is_not_sticky(patch: Patch) -> None:
    """What arrives late makes a failed or aborted lease a delivered one."""

    def become(self: Lease, state: LeaseState, reason: str = "") -> bool:
        changes = self.state is not state
        self.state, self.reason = state, reason
        return changes

    patch(Lease, "become", become)


def failed_share_means_drained(patch: Patch) -> None:
    """A writer that says that it has failed is taken to have drained."""
    original = Receiver.on_message

    def on_message(self: Receiver, message: bytes, from_worker: str) -> None:
        original(self, message.replace(b'"failed"', b'"drained"'), from_worker)

    patch(Receiver, "on_message", on_message)


def unknown_means_drained(patch: Patch) -> None:
    """A writer says DRAINED when none of its writes is pending, also when their end is unknown."""
    patch(
        Sender,
        "_drained",
        lambda self, sending: all(self._engine.poll(handle) is not Status.PENDING for handle in sending.handles),
    )


def drained_at_once(patch: Patch) -> None:
    """A writer says DRAINED as soon as it has stopped to begin writes."""
    patch(Sender, "_drained", lambda self, sending: True)


def abort_is_not_remembered(patch: Patch) -> None:
    """A writer forgets an abort that arrives before its grant, and starts what is given up."""

    def aborted(self: Sender, worker: Worker, notice: Notice) -> None:
        if (worker.instance, notice.serial) in self._live:
            original(self, worker, notice)
        else:
            self._say(worker, Kind.DRAINED, notice.serial)

    original = Sender._aborted
    patch(Sender, "_aborted", aborted)


def closed_leases_are_forgotten(patch: Patch) -> None:
    """A writer forgets leases that are over, and begins anew when their grant arrives again."""
    patch(Closed, "__contains__", lambda self, serial: False)


def late_abort_kills_nothing(patch: Patch) -> None:
    """A writer that is told to stop says that it has, and goes on."""

    def aborted(self: Sender, worker: Worker, notice: Notice) -> None:
        self._say(worker, Kind.DRAINED, notice.serial)

    patch(Sender, "_aborted", aborted)


def names_instead_of_instances(patch: Patch) -> None:
    """Messages count by the name of their worker: what the next instance says is taken for the last one's word."""

    def sender_of(self: Workers, message: Notice, name: str) -> Worker | None:
        return self._by_name.get(name)

    def share_of(self: Receiver, lease: Lease, instance: str) -> Share | None:
        names = {worker.instance: name for name, worker in self._workers._by_name.items()}
        return next((share for share in lease.shares if share.worker.name == names.get(instance)), None)

    patch(Workers, "sender_of", sender_of)
    patch(Receiver, "_share_of", share_of)


def tags_name_the_request_alone(patch: Patch) -> None:
    """What arrives late of one attempt counts for the next one of the same request."""
    arrive, retried = Receiver._arrive, Receiver.retry
    again: dict[tuple[str, int], int] = {}

    def retry(self: Receiver, lease: Lease, writers: Any = None) -> Lease:
        new = retried(self, lease, writers)
        again[self._engine.instance, lease.serial] = new.serial
        return new

    def arrived(self: Receiver, delivery: Delivery) -> None:
        tag = Tag.unpacked(delivery.tag)
        assert tag is not None
        while (tag.epoch, tag.serial) in again:
            tag = attrs.evolve(tag, serial=again[tag.epoch, tag.serial], attempt=tag.attempt + 1)
        arrive(self, Delivery(tag.packed(), delivery.instance))

    patch(Receiver, "retry", retry)
    patch(Receiver, "_arrive", arrived)


def sources_free_too_early(patch: Patch) -> None:
    """The source tokens of a sending that has failed count as free while its writes still read them."""
    patch(SourcesFree, "query", lambda self: self.sending.state is not SendState.OPEN)


def done_when_written(patch: Patch) -> None:
    """A sending counts as done when its writes have begun."""
    original = Sending.__dict__["become"]

    def look_at(self: Sender, sending: Sending) -> None:
        if sending.state is SendState.OPEN and sending.complete:
            original(sending, SendState.DONE)
            self._changed.append(sending)
            self._close(sending)
        else:
            look(self, sending)

    look = Sender._look_at
    patch(Sender, "_look_at", look_at)


def lost_memory(patch: Patch) -> None:
    """A writer never says that it has drained."""
    original = Sender._say

    def say(self: Sender, worker: Worker, kind: Kind, serial: int, reason: str = "") -> None:
        if kind is not Kind.DRAINED:
            original(self, worker, kind, serial, reason)

    patch(Sender, "_say", say)


MUTANTS = (
    messages_counted_not_ids,
    one_writer_is_enough,
    last_chunk_is_enough,
    ended_with_the_state,
    suspicion_ends_a_writer,
    death_without_settling,
    failure_is_not_sticky,
    failed_share_means_drained,
    unknown_means_drained,
    drained_at_once,
    abort_is_not_remembered,
    closed_leases_are_forgotten,
    late_abort_kills_nothing,
    names_instead_of_instances,
    tags_name_the_request_alone,
    sources_free_too_early,
    done_when_written,
    lost_memory,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_missing_safety_is_noticed(mutant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With one safety missing, some history ends in a broken promise."""
    mutant(monkeypatch.setattr)
    for seed in range(MOST_HISTORIES):
        try:
            history(seed)
        except (AssertionError, BatchStateError) as error:
            print(mutant.__name__, "in history", seed, ":", str(error).splitlines()[0][:150])
            return
    pytest.fail(f"{MOST_HISTORIES} histories have not noticed: {mutant.__doc__}")
