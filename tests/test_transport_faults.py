"""What holds of transfers whatever goes wrong with them, and that the oracle sees it when one safety is missing."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from batchstate.errors import BatchStateError
from batchstate.selfcheck.mutants import MUTANTS
from batchstate.selfcheck.mutants.diffs import changed
from batchstate.transport.receiver import LeaseState
from tests.transport_world import history

TRANSFERS = 10_000
MOST_HISTORIES = 250


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

REFUSED = ("rows_beyond_the_grant", "granted_without_being_kept")
REGISTERED = [name for name, one in MUTANTS.items() if one.machine == "transfers" and name not in REFUSED]
"""Those that the machine finds too, but for calls that are refused before a byte moves: no history makes them."""

Diff = tuple[str, str, str]
MISSING: dict[str, list[Diff]] = {
    "a lease counts as delivered when the first of its writers has delivered all": [
        (
            "receiver:Lease.complete",
            "all(writer.complete for writer in self.writers)",
            "any(writer.complete for writer in self.writers)",
        )
    ],
    "what arrives late makes a failed or aborted lease a delivered one": [
        ("receiver:Lease.become", "if self.state is not LeaseState.WAITING:", "if self.state is state:")
    ],
    "a writer that says that it has failed is taken to have drained": [
        ("receiver:Receiver.on_message", "writer.drained |= notice.kind is Kind.DRAINED", "writer.drained = True")
    ],
    "a writer says DRAINED when none of its writes is pending, also when their end is unknown": [
        (
            "sender:Sender._follow",
            "if not under_way:",
            "if all(handle.status is not Status.PENDING for handle in transfer.handles):",
        )
    ],
    "a writer forgets an abort that arrives before its grant, and starts what is given up": [
        (
            "sender:Sender._aborted",
            "self._closed.setdefault(worker.instance, Closed()).add(notice.serial)",
            "pass",
        )
    ],
    "a writer forgets leases that are over, and begins anew when their grant arrives again": [
        ("sender:Closed.__contains__", "return serial in self._serials", "return False")
    ],
    "a writer that is told to stop says that it has, and goes on": [
        (
            "sender:Sender._aborted",
            "elif transfer.become(TransferState.ABORTED, notice.reason):\n    self._changed.append(transfer)",
            "else:\n    self._say(worker, Kind.DRAINED, notice.serial)",
        )
    ],
    "messages count by the name of their worker: the next instance speaks and is spoken to for the last": [
        (
            "workers:Session._author",
            "if message.to != self._engine.instance or message.sender in self._ended:\n    return None\n"
            "worker = self._named(name)\nif message.sender != worker.instance:",
            "worker = self._named(name)\nif False:",
        ),
        (
            "receiver:Receiver.on_message",
            "_writer_of(lease, notice.sender)",
            "next((one for one in lease.writers if one.worker.name == from_worker), None)",
        ),
    ],
    "source locations of a transfer that has failed count as free while its writes still read them": [
        (
            "sender:SourcesFree.query",
            "return self.transfer.worker.ended or all(handle.drained for handle in self.transfer.handles)",
            "return True",
        )
    ],
    "a transfer counts as done when its writes have begun": [
        (
            "sender:Sender._follow",
            "if transfer.complete and all(handle.status is Status.DONE for handle in transfer.handles):",
            "if transfer.complete:",
        )
    ],
    "a writer never says that it has drained": [
        (
            "sender:Sender._say",
            "self.outbox.append((worker.name, packed(notice)))",
            "if kind is not Kind.DRAINED:\n    self.outbox.append((worker.name, packed(notice)))",
        )
    ],
}


@contextmanager
def missing(name: str) -> Iterator[None]:
    """A window in which one safety is missing."""
    if name in REGISTERED:
        with MUTANTS[name].switched_on():
            yield
        return
    with ExitStack() as stack:
        for where, before, after in MISSING[name]:
            stack.enter_context(changed(f"transport.{where}", before, after))
        yield


@pytest.mark.parametrize("name", [*REGISTERED, *MISSING])
def test_a_missing_safety_is_noticed(name: str) -> None:
    """With one safety missing, some history ends in a broken promise."""
    with missing(name):
        for seed in range(MOST_HISTORIES):
            try:
                history(seed)
            except (AssertionError, BatchStateError) as error:
                print(name, "in history", seed, ":", str(error).splitlines()[0][:150])
                return
    pytest.fail(f"{MOST_HISTORIES} histories have not noticed: {name}")
