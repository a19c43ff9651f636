"""The state machines fail nowhere, and reach every state that gives this meaning."""

import pytest

from batchstate.errors import ArgumentError
from batchstate.levels import Level, current_checks
from batchstate.races.devices import open_device
from batchstate.runtime import CpuRuntime, Runtime
from batchstate.testing import LateRuntime, run_machine
from tests.coverage_targets import reach_all
from tests.selfcheck.machine import Machine
from tests.selfcheck.machines import MACHINES
from tests.selfcheck.machines.pools import SlotPoolMachine


@pytest.mark.parametrize("name", list(MACHINES))
def test_coverage_targets_are_reached(name: str, device: str) -> None:
    """A machine fails nowhere, and reaches each of its coverage targets within an ordinary number of examples."""
    reach_all(MACHINES[name], device)


def test_every_machine_has_a_name_and_targets() -> None:
    """The registry holds each machine under its own name, and none could be asleep, without coverage targets."""
    assert {machine.NAME: machine for machine in MACHINES.values()} == MACHINES
    assert all(machine.TARGETS for machine in MACHINES.values())


def test_machines_check_at_full_and_restore_the_level() -> None:
    """A machine checks at level full, or at that of its run, and leaves the level of the process as it found it."""
    seen: list[Level] = []

    class Watching(SlotPoolMachine):
        def check(self) -> None:
            seen.append(current_checks())

    before = current_checks()
    assert run_machine(Watching, examples=2, steps=3).failure is None
    assert set(seen) == {Level.FULL}
    seen.clear()
    assert run_machine(Watching, examples=2, steps=3, level="cheap").failure is None
    assert set(seen) == {Level.CHEAP}
    assert current_checks() is before
    with pytest.raises(ArgumentError, match="unknown level of checks 'half'"):
        run_machine(Watching, level="half")


def test_relay_is_silent_at_cheap(device: str) -> None:
    """The relay machine finds nothing either at the level at which its mutants are found, and reads nothing there."""
    opened: list[Runtime] = []

    def open_late() -> Runtime:
        opened.append(LateRuntime() if device == "cpu" else open_device(device))
        return opened[-1]

    result = run_machine(MACHINES["future_map"], device=device, examples=60, seed=1, level="cheap", runtimes=open_late)
    assert result.failure is None, result.failure
    assert sum(one.counters.check_reads for one in opened) == 0


@pytest.mark.parametrize(("name", "length"), [("future_map", 20), ("host_tier", 10), ("overlap", 10)])
def test_machines_that_look_for_late_work_lag(name: str, length: int) -> None:
    """On a plain CPU runtime they take one that lags instead, and they keep any other that they are given."""

    class Watched(CpuRuntime):
        pass

    seen: set[type[Runtime]] = set()

    def open_and_look(machine: Machine) -> None:
        MACHINES[name].open(machine)
        seen.add(type(machine.rt))

    watching = type("Watching", (MACHINES[name],), {"open": open_and_look})
    assert run_machine(watching, examples=2, steps=3).failure is None
    assert seen == {LateRuntime}
    assert run_machine(watching, examples=length, steps=length, runtimes=Watched, level="cheap").failure is None
    assert seen == {LateRuntime, Watched}


def test_runtimes_come_from_the_session() -> None:
    """Every example opens its runtime through the factory of the run, so that other runtimes can take its place."""
    opened: list[Runtime] = []

    class Watched(CpuRuntime):
        pass

    def open_watched() -> Runtime:
        opened.append(Watched())
        return opened[-1]

    result = run_machine(MACHINES["slot_pool"], examples=5, steps=5, runtimes=open_watched)
    assert result.failure is None
    assert len(opened) >= 5


def test_undeclared_states_are_refused() -> None:
    """A state that is not declared would never be missed, so it cannot be counted."""
    with pytest.raises(ArgumentError, match="declare it in `TARGETS`"):
        SlotPoolMachine().reached("something nice")
