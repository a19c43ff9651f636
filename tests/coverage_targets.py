"""Runs a machine until it has reached all of its coverage targets."""

import pytest

from batchstate.testing import Machine, run_machine

EXAMPLES, ROUNDS = 20, 8
"""Examples of one round, each with a seed of its own, and most rounds: `tests.selfcheck fuzz` runs many more."""


WHILE_THE_DEVICE_IS_BUSY = {
    "future_map": {"fetched while the device was not there yet"},
    "overlap": {"waited for a step that held what was needed"},
    "host_tier": {"two steps in flight", "staged abort while the copy is under way"},
}
"""Targets that need a device which has not done its work when the host asks. `LateRuntime` is one; a GPU has done work
of a few rows long before, and reaches them by chance."""


def reach_all(machine: type[Machine], device: str, *, steps: int = 50) -> None:
    """Fails where the machine fails, or where a target is left after the last round."""
    missed = set(machine.TARGETS)
    if device not in ("cpu", "race", "sim"):
        missed -= WHILE_THE_DEVICE_IS_BUSY.get(machine.NAME, set())
    for seed in range(1, ROUNDS + 1):
        result = run_machine(machine, device=device, examples=EXAMPLES, steps=steps, seed=seed)
        assert result.failure is None, result.failure
        assert result.examples == EXAMPLES
        missed -= {target for target, times in result.reached.items() if times}
        if not missed:
            return
    pytest.fail(f"{machine.NAME} never reached: {sorted(missed)}")
