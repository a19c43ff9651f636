"""Every state machine under the race detector: the library as it is gets no report, and runs steps at once."""

from typing import final

import pytest

from batchstate.races import RaceRuntime
from batchstate.races.devices import open_device
from batchstate.testing import run_machine
from tests.selfcheck.machines import MACHINES
from tests.selfcheck.machines.host_tier import HostTierMachine

OVERLAPPED = {"engine", "future_map", "steps", "overlap", "host_tier"}
"""Machines that run forwards."""

WAITS = {"watched": {"index"}, "watched_rows": {"copy_"}}
"""Calls of torch that may wait: the classes that are watched are not of this library; they index with a list, and write
numbers one by one."""


UNSEEN = ("slot_pool", "strangers", "ranks", "plain_torch", "plain_torch_on_sim", "plain_torch_watched")
"""Machines without device memory, and those with runtimes of their own."""


@pytest.mark.parametrize("fences", ["race", "race:prompt"])
@pytest.mark.parametrize("name", list(MACHINES))
def test_machines_have_no_race(name: str, fences: str, device: str) -> None:
    """No access is unordered, whether fences are lazy or eager; lazy, machines with forwards have two in flight."""
    opened: list[RaceRuntime] = []

    def open_one() -> RaceRuntime:
        runtime = open_device(fences if device == "cpu" else f"{fences}:{device}")
        assert isinstance(runtime, RaceRuntime)
        opened.append(runtime)
        return runtime

    result = run_machine(MACHINES[name], examples=8, steps=20, seed=5, runtimes=open_one, level="cheap")
    assert result.failure is None, result.failure
    assert sum(runtime.accesses for runtime in opened) > 0 or name in UNSEEN
    assert not any(runtime.races for runtime in opened)
    waits = {call for runtime in opened for call in runtime.synchronised}
    assert waits <= WAITS.get(name, set()), "a machine waits inside torch"
    if fences == "race" and name in OVERLAPPED:
        assert max(runtime.in_flight_depth_max for runtime in opened) >= 2


@final
class Later:
    """A fence that is complete when it has been asked so many times, as of a device that gets on meanwhile."""

    def __init__(self, times: int) -> None:
        self.times = times

    def query(self) -> bool:
        self.times -= 1
        return self.times < 0

    def wait(self) -> None:
        self.times = 0


def test_host_tier_machine_reads_numbers_once() -> None:
    """Host locations become free whenever the device is asked: the machine compares numbers of one reading."""
    machine = HostTierMachine()
    machine.begin(2, 1, 1, 2, 8, 8, apart=False, fragmented=False)
    for times in range(8):
        (ranges,) = machine.host.take([1], [0])
        machine.host.free(ranges, after=Later(times))
        machine.check()
    machine.teardown()
