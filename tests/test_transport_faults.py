"""What holds of transfers whatever goes wrong with them, and what of it only the model of `transfers` can see."""

from contextlib import ExitStack

import pytest

from tests.selfcheck.machine import run_machine, stop_at_failure
from tests.selfcheck.machines import MACHINES
from tests.selfcheck.mutants.diffs import changed

TRANSFERS = MACHINES["transfers"]


def test_no_byte_is_wrong_and_none_is_lost() -> None:
    """Delay, unknown ends, duplicates, drops, reordering, aborts, kills and restarts: what is delivered is right, what
    is not granted stays as it is, memory is reused only when no writer can write it, and all of it comes back.
    """
    result = run_machine(TRANSFERS, examples=140, seed=2, level="cheap")
    assert result.failure is None, result.failure
    transfers = result.reached["a grant"]
    assert transfers >= 2_000
    for state in ("delivered", "failed", "aborted"):
        assert result.reached[f"a lease {state}"] > transfers // 20, result.reached


Diff = tuple[str, str, str]
MISSING: dict[str, tuple[str, list[Diff]]] = {
    "a lease counts as delivered when the first of its writers has delivered all": (
        "MODEL",
        [
            (
                "receiver:Lease.complete",
                "all(writer.complete for writer in self.writers)",
                "any(writer.complete for writer in self.writers)",
            )
        ],
    ),
    "what arrives late makes a failed or aborted lease a delivered one": (
        "MODEL",
        [("receiver:Lease.become", "if self.state is not LeaseState.WAITING:", "if self.state is state:")],
    ),
    "a writer forgets leases that are over, and begins anew when their grant arrives again": (
        "MODEL",
        [
            (
                "sender:Sender._take",
                "elif transfer is None and message.serial not in closed:",
                "elif transfer is None:",
            )
        ],
    ),
    "messages count by the name of their worker: the next instance speaks and is spoken to for the last": (
        "TRANSFER_LATE_WRITE",
        [
            (
                "workers:Session.on_message",
                "if heard.to != self._engine.instance or heard.sender in self._ended:\n    return\n"
                "worker = self._named(from_worker)\nif heard.sender != worker.instance:",
                "worker = self._named(from_worker)\nif False:",
            ),
            (
                "receiver:Receiver._take",
                "_writer_of(lease, notice.sender)",
                "next((one for one in lease.writers if one.worker.name == worker.name), None)",
            ),
        ],
    ),
    "source locations of a transfer that has failed count as free while its writes still read them": (
        "MODEL",
        [
            (
                "sender:SourcesFree.query",
                "return self.transfer.worker.ended or all(handle.drained for handle in self.transfer.handles)",
                "return True",
            )
        ],
    ),
    "a writer never says that it has drained": (
        "MODEL",
        [
            (
                "sender:Sender._say",
                "self.outbox.append((worker.name, packed(notice)))",
                "if kind is not Kind.DRAINED:\n    self.outbox.append((worker.name, packed(notice)))",
            )
        ],
    ),
}
"""Safeties, what shows that one is missing, and how the library is then. No invariant finds these by itself."""


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_safety_is_noticed(name: str) -> None:
    """With one safety missing, the model differs or the library refuses what is never asked of it."""
    by, diffs = MISSING[name]
    with ExitStack() as missing:
        for where, before, after in diffs:
            missing.enter_context(changed(f"transport.{where}", before, after))
        result = run_machine(TRANSFERS, derandomize=True, shrink=False, on_example=stop_at_failure)
    print(name, result.first_failure, result.code)
    assert result.code == by, result.failure
