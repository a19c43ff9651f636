"""Who gets on, on the simulated device: right programs stay right, racy ones go wrong, and a seed says which way."""

import itertools
from collections.abc import Sequence

import pytest

from batchstate.errors import ArgumentError
from batchstate.races import DeviceFault, SimRuntime
from batchstate.races.sim import PORTFOLIO
from batchstate.races.sim.device import DeviceStream, Scheduler
from batchstate.testing import run_machine
from tests.selfcheck.machines import MACHINES
from tests.sim_programs import PROGRAMS, SEEDED, history, run

FOUND_BY = {
    "missing wait": {"lazy", "newest"},
    "staging refilled": {"lazy", "oldest"},
    "early host read": {"lazy", "oldest"},
    "freed and reused": {"lazy", "newest", "oldest"},
    "added to under a reader": {"oldest"},
    "written after a read": {"oldest"},
}
"""What a twin does wrong -> the schedulers without a seed under which it goes wrong."""

REUSING = {"missing wait", "freed and reused", "written after a read"}
"""Programs whose memory goes to others, without which nothing would show what a free breaks."""

OVERLAPPING = {*REUSING, "added to under a reader"}
"""Programs with steps in flight, without which nothing would show a missing wait."""

STREAMS = [DeviceStream(number, name) for number, name in enumerate(("default", "one", "two"))]


def choices(scheduler: Scheduler, ready: Sequence[int], needed: int | None = None) -> int | None:
    """What a scheduler chooses, by number."""
    chosen = scheduler([STREAMS[at] for at in ready], None if needed is None else STREAMS[needed])
    return None if chosen is None else chosen.number


def goes_wrong(name: str, scheduler: str, seed: int) -> bool:
    """Whether the racy twin computes something else, or fails."""
    try:
        return run(name, scheduler, seed, True)[0] != PROGRAMS[name].wanted
    except DeviceFault:
        return True


# Programs


@pytest.mark.parametrize("scheduler", PORTFOLIO)
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_are_right_in_any_order(name: str, scheduler: str) -> None:
    """Whichever stream runs; nothing waits but what says so, nothing is left, and memory is used again."""
    for seed in range(6 if scheduler in SEEDED else 1):
        seen, rt = run(name, scheduler, seed, False)
        assert seen == PROGRAMS[name].wanted, f"seed {seed}"
        assert not rt.synchronised
        assert not rt.unmodelled
        assert rt.pending() == 0
        assert rt.reused > 4 or name not in REUSING
        assert rt.in_flight_depth_max >= 3 or scheduler != "lazy" or name not in OVERLAPPING


@pytest.mark.parametrize("name", PROGRAMS)
def test_racy_programs_go_wrong(name: str) -> None:
    """Under the orders that show it, and never where everything runs at once."""
    found = {scheduler for scheduler in PORTFOLIO if scheduler not in SEEDED and goes_wrong(name, scheduler, 0)}
    assert found == FOUND_BY[name]


@pytest.mark.parametrize("scheduler", SEEDED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_seeded_orders_find_each_race(name: str, scheduler: str) -> None:
    """In a few of twenty runs at least, each of them short."""
    assert sum(goes_wrong(name, scheduler, seed) for seed in range(20)) >= 3


# Schedulers


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


# The same seed, the same run


@pytest.mark.parametrize("scheduler", PORTFOLIO)
def test_a_seed_gives_the_same_run(scheduler: str) -> None:
    """Every choice comes from it; another seed makes others, where there are any to make."""
    first = history(scheduler, 3)
    assert history(scheduler, 3) == first
    assert (history(scheduler, 4) != first) == (scheduler in SEEDED)


# The library


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
