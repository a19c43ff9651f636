"""What is known to lie before what, and what is kept of accesses: both against models that keep everything."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate.races import RaceRuntime
from batchstate.races.detector import Log
from batchstate.races.history import KEPT
from batchstate.races.tracing.clocks import Clocks
from batchstate.races.tracing.regions import ByteRegion, union
from batchstate.runtime import Fence, Stream

STREAMS = 3
steps = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), st.integers(0, STREAMS - 1), st.just(0)),
        st.tuples(st.just("record"), st.integers(0, STREAMS - 1), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, 5)),
        st.tuples(st.just("host waits"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("host"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


def test_a_new_stream_knows_what_the_host_knows() -> None:
    """Whatever it runs was launched by the host."""
    clocks = Clocks()
    old = clocks.add("old")
    number = clocks.happens(old)
    clocks.host_joins(old.seen)
    late = clocks.add("late")
    assert not late.knows(old.number, number)
    clocks.happens(late)
    assert late.knows(old.number, number)


# What is kept of accesses


small = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=3).map(
    lambda some: union((lo, lo + length) for lo, length in some)
)


@given(
    st.lists(st.tuples(small, small, st.integers(0, 12), st.booleans()), min_size=1, max_size=150), st.integers(0, 3)
)
@settings(max_examples=60, deadline=None)
def test_a_log_answers_as_if_it_kept_everything(
    program: list[tuple[ByteRegion, ByteRegion, int, bool]], hurry: int
) -> None:
    """The newest access beyond what is known that shares a byte; the host may know that older ones are over."""
    log = Log()
    every: list[tuple[int, ByteRegion]] = []
    over = 0
    for number, (region, asked, lag, waits) in enumerate(program * 3, start=1):
        log.add(number, region, over)
        every.append((number, region))
        if waits and hurry:
            over = max(over, number - lag * hurry)
        known = max(over, number - lag * 4)
        found = log.conflict(asked, known)
        wanted = next((event for event, one in reversed(every) if event > known and one.overlaps(asked)), None)
        assert (None if found is None else found[0]) == wanted
        assert log.newest() == number


def test_places_that_are_never_touched_again_are_kept() -> None:
    """However many there are: a later access may conflict with any of them."""
    log = Log()
    for number in range(1, 3_001):
        log.add(number, ByteRegion(number * 8, number * 8 + 8), 0)
    assert len(log) == 3_000
    found = log.conflict(ByteRegion(17 * 8, 17 * 8 + 4), 0)
    assert found is not None
    assert found[0] == 17


# What it costs


class Counted:
    """How often regions were held against each other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        overlaps, covers = ByteRegion.overlaps, ByteRegion.covers

        def counted_overlaps(region: ByteRegion, other: ByteRegion) -> bool:
            self.count += 1
            return overlaps(region, other)

        def counted_covers(region: ByteRegion, other: ByteRegion) -> bool:
            self.count += 1
            return covers(region, other)

        monkeypatch.setattr(ByteRegion, "overlaps", counted_overlaps)
        monkeypatch.setattr(ByteRegion, "covers", counted_covers)


def relayed(rounds: int, *, waits: bool) -> tuple[float, int]:
    """Two streams pass one table to and fro: comparisons of streams for each access, and accesses kept at the end."""
    with RaceRuntime() as rt:
        table = rt.device_zeros((64, 4), torch.int64)
        rt.synchronize()
        left, right = rt.stream("left"), rt.stream("right")
        fences: list[Fence] = []
        for number in range(rounds):
            for stream, other in ((left, right), (right, left)):
                with rt.use(stream):
                    table[number % 60 : number % 60 + 4].add_(1)
                    fences.append(rt.record())
                rt.wait(fences[-1], stream=other)
            if waits:
                fences[-1].wait()
        known = rt._tracer.allocations.of(table)
        assert known is not None
        kept = sum(len(log) for logs in (known.reads, known.writes) for log in logs.values())
        return rt.comparisons / rt.accesses, kept


@pytest.mark.parametrize("waits", [True, False])
def test_an_access_costs_the_same_in_a_long_run(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Ten times as long: as many comparisons for each access, and as much that is kept."""
    counted = Counted(monkeypatch)
    short, kept_short = relayed(250, waits=waits)
    regions_short, counted.count = counted.count, 0
    long, kept_long = relayed(2_500, waits=waits)
    regions_long = counted.count
    assert long == pytest.approx(short, rel=0.05)
    assert kept_long <= kept_short + 150
    assert regions_long <= 20 * regions_short


def unordered(rounds: int) -> None:
    """Two streams that nothing orders write rows of one table, each its own."""
    with RaceRuntime() as rt:
        table = rt.device_zeros((2 * rounds, 4), torch.int64)
        rt.synchronize()
        streams: list[Stream] = [rt.stream("left"), rt.stream("right")]
        for number in range(rounds):
            for side, stream in enumerate(streams):
                with rt.use(stream):
                    table[2 * number + side].fill_(1)


def test_streams_that_are_never_ordered_cost_little_more_in_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every access stays one that a later one may conflict with, and yet they are not all gone through each time."""
    counted = Counted(monkeypatch)
    unordered(250)
    short, counted.count = counted.count, 0
    unordered(2_500)
    assert counted.count < 10 * short * 1.5


def test_memory_is_bounded_over_a_long_run() -> None:
    """Ten thousand operations: what is kept is what lives and what is in flight."""
    with RaceRuntime() as rt:
        table = rt.device_zeros((64, 4), torch.int64)
        rt.synchronize()
        left, right = rt.stream("left"), rt.stream("right")
        staged = rt.pinned((4,), torch.int64)
        sizes = []
        for number in range(1, 2_001):
            rt.next_step()
            with rt.use(left):
                numbers = rt.upload([np.array([number % 64, 3])])
                table.index_fill_(0, numbers.view(0), number)
                written = rt.record()
            with rt.use(right):
                rt.wait(written)
                total = table.sum(0)
                staged.copy_(total, non_blocking=True)
                read = rt.record()
            rt.wait(read, stream=left)
            read.wait()
            assert staged.sum().item() >= 0
            if number in (1_000, 2_000):
                known = rt._tracer.allocations.of(table)
                assert known is not None
                logs = sum(len(log) for some in (known.reads, known.writes) for log in some.values())
                history, allocations = len(rt._detector.history._entries), len(rt._tracer.allocations)
                waiting = len(rt._tracer.host_memory._sources) + len(rt._tracer.host_memory._landings)
                sizes.append((allocations, logs, len(rt._in_flight._ends), waiting, len(rt._streams)))
                assert history <= KEPT
        assert rt._detector.clocks.now > 20_000
        first, second = np.array(sizes)
        assert (second <= first + 70).all()
        assert second[0] < 40
