"""What holds of transfers whatever goes wrong with them, and that the oracle sees it when one safety is missing."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from batchstate.errors import BatchStateError
from batchstate.selfcheck.mutants.diffs import changed
from batchstate.transport.receiver import LeaseState
from tests.transport_world import histories, history

HISTORIES = 250
"""Each missing safety shows within the first 20 of them. `python -m tests.transport_world` goes on at any seed."""


def test_no_byte_is_wrong_and_none_is_lost() -> None:
    """Delay, unknown ends, duplicates, drops, reordering, aborts, kills and restarts: what is delivered is right, what
    is not granted stays as it is, memory is reused only when no writer can write it, and all of it comes back.
    """
    transfers, ends = histories(0, HISTORIES)
    assert transfers >= 2_000
    for state in (LeaseState.DELIVERED, LeaseState.FAILED, LeaseState.ABORTED):
        assert ends[state] > transfers // 20, ends


# One safety is missing, and some history shows it, as the machine `transfers` does of the mutants that are registered

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
            "sender:Sender.on_message",
            "if transfer is None:\n    closed.add(said.serial)",
            "if transfer is None:\n    pass",
        )
    ],
    "a writer forgets leases that are over, and begins anew when their grant arrives again": [
        ("sender:Sender.on_message", "elif transfer is None and said.serial not in closed:", "elif transfer is None:")
    ],
    "a writer that is told to stop says that it has, and goes on": [
        (
            "sender:Sender.on_message",
            "elif transfer.become(TransferState.ABORTED, said.reason):\n    self._changed.append(transfer)",
            "else:\n    self._say(worker, Kind.DRAINED, said.serial)",
        )
    ],
    "messages count by the name of their worker: the next instance speaks and is spoken to for the last": [
        (
            "workers:Session._heard",
            "if heard.to != self._engine.instance or heard.sender in self._ended:\n    return None\n"
            "worker = self._named(name)\nif heard.sender != worker.instance:",
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
    with ExitStack() as stack:
        for where, before, after in MISSING[name]:
            stack.enter_context(changed(f"transport.{where}", before, after))
        yield


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_safety_is_noticed(name: str) -> None:
    """With one safety missing, some history ends in a broken promise."""
    with missing(name):
        for seed in range(HISTORIES):
            try:
                history(seed)
            except (AssertionError, BatchStateError) as error:
                print(name, "in history", seed, ":", str(error).splitlines()[0][:150])
                return
    pytest.fail(f"{HISTORIES} histories have not noticed: {name}")
