"""Schedulers of the simulated device: their choices, and machines of the library under each."""

import itertools
from collections.abc import Sequence

import pytest

from batchstate.errors import ArgumentError
from batchstate.races import SimRuntime
from batchstate.races.sim import PORTFOLIO
from batchstate.races.sim.device import DeviceStream, Scheduler
from batchstate.testing import run_machine
from tests.race_cases.tools import SEEDED, simulated
from tests.selfcheck.machines import MACHINES

STREAMS = [DeviceStream(number, name) for number, name in enumerate(("default", "one", "two"))]


def choices(scheduler: Scheduler, ready: Sequence[int], needed: int | None = None) -> int | None:
    """What a scheduler chooses, by number."""
    chosen = scheduler([STREAMS[at] for at in ready], None if needed is None else STREAMS[needed])
    return None if chosen is None else chosen.number


def test_an_unknown_scheduler_is_refused() -> None:
    """And all that there are are named."""
    with pytest.raises(ArgumentError, match="unknown scheduler 'fair'") as caught:
        SimRuntime(scheduler="fair")
    assert all(name in caught.value.remedy for name in PORTFOLIO)
    assert SimRuntime().scheduler == "random"


CHOICES: dict[str, list[tuple[list[int], int | None, int | None]]] = {
    "eager": [([1, 2], None, 1)],
    "lazy": [
        ([1, 2], None, None),
        ([1, 2], 2, 2),
    ],
    "newest": [
        ([0], None, 0),
        ([0, 2], None, 2),
        ([0, 1], None, None),  # also while the newest has nothing to do
        ([0, 1], 0, 0),
    ],
    "oldest": [
        ([1, 2], None, 1),
        ([2], None, None),
        ([2], 2, 2),
    ],
}
"""Scheduler -> what happens one after the other: ready streams, the needed one, and the one it chooses."""


@pytest.mark.parametrize("name", CHOICES)
def test_schedulers_without_a_seed_have_one_choice(name: str) -> None:
    """Eager runs the oldest, lazy what the host waits for; newest and oldest let the others, or the newest, lag."""
    scheduler = PORTFOLIO[name](0)
    chosen = [choices(scheduler, ready, needed) for ready, needed, _ in CHOICES[name]]
    assert chosen == [one for *_, one in CHOICES[name]]


def test_priorities_are_kept() -> None:
    """A stream lags or does not, from first to last; over some seeds each stream does either."""
    runs = set()
    for seed in range(40):
        priority = PORTFOLIO["priority"](seed)
        lags = [{choices(priority, [at]) is None for _ in range(30)} for at in range(3)]
        assert all(len(one) == 1 for one in lags)
        runs.add(tuple(one.pop() for one in lags))
    assert len(runs) == 8


def test_priorities_change_now_and_then() -> None:
    """Whichever runs falls behind the others, the host as well."""
    for seed in range(5):
        pct = PORTFOLIO["pct"](seed)
        chosen = [choices(pct, [0, 1, 2]) for _ in range(2_000)]
        assert set(chosen) == {None, 0, 1, 2}
        changes = sum(one != other for one, other in itertools.pairwise(chosen))
        assert 10 < changes < 200


def test_random_lags_for_a_while_and_hurries_for_a_while() -> None:
    """Even odds at every operation would let nothing lag for long."""
    pace = PORTFOLIO["random"](0)
    waits = [choices(pace, [0, 1]) is None for _ in range(3_000)]
    parts = [sum(waits[at : at + 20]) for at in range(0, len(waits), 20)]
    assert min(parts) <= 2
    assert max(parts) == 20


def test_random_runs_what_the_host_waits_for() -> None:
    """Or any other: never nothing, and what is needed more often than by chance."""
    pace = PORTFOLIO["random"](0)
    chosen = [choices(pace, [0, 1], 1) for _ in range(3_000)]
    assert set(chosen) == {0, 1}
    assert chosen.count(1) > 2_000


@pytest.mark.parametrize("scheduler", PORTFOLIO)
def test_a_seed_gives_the_same_run(scheduler: str) -> None:
    """Every choice comes from it; another seed makes others, if there are any to make."""
    first = simulated(scheduler, 3)
    assert simulated(scheduler, 3) == first
    assert (simulated(scheduler, 4) != first) == (scheduler in SEEDED)


@pytest.mark.parametrize("name", MACHINES)
def test_machines_find_nothing(name: str) -> None:
    """The library's own machines, under each scheduler: whichever stream lags, what the host reads is right."""
    for number, scheduler in enumerate(PORTFOLIO):
        made: list[SimRuntime] = []

        def opened(scheduler: str = scheduler, seed: int = number, made: list[SimRuntime] = made) -> SimRuntime:
            made.append(SimRuntime(scheduler=scheduler, seed=seed))
            return made[-1]

        result = run_machine(MACHINES[name], examples=2, steps=15, seed=number, runtimes=opened, level="cheap")
        assert result.failure is None, f"{scheduler}: {result.failure}"
        assert not any(one.unmodelled or one.synchronised for one in made)


@pytest.mark.parametrize("scheduler", ["lazy", "pct"])
def test_checks_at_full_put_nothing_in_order(scheduler: str) -> None:
    """Checks that read device memory see what is right while the device lags, and it goes on lagging."""
    made: list[SimRuntime] = []

    def opened() -> SimRuntime:
        made.append(SimRuntime(scheduler=scheduler, seed=2))
        return made[-1]

    result = run_machine(MACHINES["overlap"], examples=3, steps=15, seed=1, runtimes=opened, level="full")
    assert result.failure is None, result.failure
    assert sum(one.counters.check_reads for one in made) > 100
    assert max(one.in_flight_depth_max for one in made) >= 2
