"""Ranks of one group: what counts as complete, and the same slots and admissions whatever each rank sees when."""

import hashlib
import random
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
import torch

from batchstate import HybridSlotPool, PagePool, PoolExhaustedError, SlotPool, Slots, StaticBuffers, open_runtime
from batchstate.errors import ArgumentError, OwnerThreadError
from batchstate.testing import ManualStream
from batchstate.violations import Code
from tests.doubles import in_a_thread, refused
from tests.selfcheck.machines.ranks import KINDS, Rank
from tests.step_world import Running, World, columns

STEPS = 1_500
"""10,000 take a minute; run by hand, they come to the same answers."""


def serve(connection: Connection, number: int, steps: int) -> None:
    """One decode rank: calls drawn alike on every rank, and a device that gets on as it likes."""
    calls, device = random.Random(1), random.Random(number)
    rank, came, admitted, alone = Rank.opened(6, 14, 60), 0, 0, 0
    everything = hashlib.sha256()
    for _ in range(steps):
        rank.runtime.complete(device.randint(0, 4))
        for stream, _, _ in list(rank.writers.values()):
            if device.random() < 0.3:
                stream.complete()
        deed = calls.random()
        try:
            if deed < 0.5:
                came += 1
                tokens = calls.randint(1, 7)
                rank.come(came, tokens, tokens + calls.randint(0, 6), calls.choice(KINDS[:2]))
            elif deed < 0.8 and rank.requests:
                rank.leave(calls.choice(sorted(rank.requests)))
        except PoolExhaustedError as error:
            everything.update(str(error).encode())
        report = rank.group.report()
        connection.send(report)
        other = connection.recv()
        alone += set(report[3:]) != set(other[3:])
        rank.group.agree([report, other])
        new = rank.admit()
        admitted += len(new)
        everything.update(repr((new, rank.state())).encode())
    connection.send((everything.hexdigest(), came, admitted, alone))


def test_two_ranks_have_the_same_slots_and_admissions() -> None:
    """Two processes, fences that complete at different times: after all steps every answer was the same."""
    context = get_context("forkserver")  # torch is imported only once
    context.set_forkserver_preload([__name__])
    pipe = context.Pipe()
    ends = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=_relayed, args=(ends[at][1], pipe[at], at, STEPS)) for at in range(2)]
    for process in processes:
        process.start()
    found = [ours.recv() if ours.poll(120) else None for ours, _ in ends]
    for process in processes:
        process.join(30)
        process.kill()
    assert found[0] is not None
    assert found[0] == found[1]
    _, came, admitted, alone = found[0]
    assert came > STEPS // 3
    assert admitted > STEPS // 20
    assert alone > STEPS // 2


def _relayed(result: Connection, peer: Connection, number: int, steps: int) -> None:
    """Runs a rank, whose last word goes to the test."""

    class Line:
        def send(self, value: object) -> None:
            (result if isinstance(value, tuple) else peer).send(value)

        def recv(self) -> object:
            return peer.recv()

    serve(Line(), number, steps)  # type: ignore[arg-type]


def test_nothing_is_free_before_all_ranks_agree() -> None:
    """Slots, states and pages behind a complete fence stay pending until every rank has reported it."""
    runtime = open_runtime("cpu")
    group = runtime.join_group(size=2)
    slots = HybridSlotPool(runtime, 4, states=4)
    pages = PagePool(runtime, slots, 8, 2, max_tokens_per_request=8)
    taken = slots.take(2)
    pages.extend(taken, 3)
    stream = ManualStream()
    pages.release_requests(taken, after=stream.record())
    early = group.report()
    stream.complete()
    report = group.report()
    assert len(report) > len(early)
    assert (slots.stats.pending, slots.reap(), pages.stats.free) == (2, 0, 4)
    refused(Code.RANKS_DIFFER, lambda: group.agree([report, [report[0], report[1], report[2] ^ 1, *report[3:]]]))
    assert group.agree([report, report[:3]]) == 0
    assert slots.reap() == 0
    report = group.report()
    assert group.agree([report, report]) == len(report) - 3
    assert (slots.reap(), slots.stats.free, slots.state_stats().free, pages.stats.free) == (2, 4, 4, 8)
    assert group.open == 0


class Decode:
    """A rank whose steps come from a planner; `pages` is what it measured that it has room for."""

    def __init__(self, pages: int = 40, graphs: tuple[int, ...] = (4, 8), longest: int = 24) -> None:
        self.runtime = open_runtime("cpu")
        self.group = self.runtime.join_group(size=2)
        self.world = World.planned(self.runtime, 8, pages=pages, longest=longest)
        self.graphs = {rows: StaticBuffers(self.runtime, Running, rows=rows) for rows in graphs}
        lens = [5, 6, 7]
        slots = self.world.joined(lens)
        rows = slots.np
        self.batch = Running.build(self.runtime, slots=slots, **columns(rows, lens))


class Slotted:
    """A rank with slots alone."""

    def __init__(self, size: int, reserve: int = 0, group: int = 2) -> None:
        self.runtime = open_runtime("cpu")
        self.group = self.runtime.join_group(size=group)
        self.slots = SlotPool(self.runtime, size, reserve=reserve)


Made = Callable[[], Decode | Slotted]


def _steps(**arguments: Any) -> Made:
    """Ranks that have planned a step."""

    def made() -> Decode:
        rank = Decode()
        rank.world.planner.plan(rank.batch, after=rank.runtime.record(), **{"query_lens": 1, **arguments})
        return rank

    return made


def _graph(rows: int, keep: Any = None) -> Made:
    """Ranks that have filled the inputs of a graph."""

    def made() -> Decode:
        rank = Decode()
        (rank.batch if keep is None else rank.batch.filter(keep)).to_static(rank.graphs[rows])
        return rank

    return made


def _pages(change: Callable[[PagePool, Slots], object]) -> Made:
    """Ranks that have changed lengths inside of pages."""

    def made() -> Decode:
        rank = Decode()
        change(rank.world.pages, cast(Slots, rank.batch["slots"]))
        return rank

    return made


@pytest.mark.parametrize(
    ("differs", "rank", "other"),
    [
        ("pools or graphs of other sizes", lambda: Decode(), lambda: Decode(pages=41)),
        ("pools or graphs of other sizes", lambda: Decode(), lambda: Decode(graphs=(4, 16))),
        ("pools or graphs of other sizes", partial(Slotted, 4), partial(Slotted, 3, reserve=1)),
        ("pools or graphs of other sizes", partial(Slotted, 4), partial(Slotted, 4, group=3)),
        ("pools or graphs of other sizes", lambda: Decode(), lambda: Decode(longest=20)),
        ("used other", _steps(), _steps(keep=[0, 2])),
        ("used other", _steps(), _steps(keep=[1, 0, 2])),
        ("used other", _steps(), _steps(query_lens=[1, 2, 1], prompt_ids=[None, [7, 8], None])),
        ("used other", _steps(), _steps(pad_rows=4)),
        ("used other", _graph(4), _graph(8)),
        ("used other", _graph(4), _graph(4, keep=[0, 1])),
        ("used other", _pages(lambda pages, slots: pages.advance(slots)), _pages(lambda pages, slots: None)),
        ("used other", _pages(lambda pages, slots: pages.hold(slots.take([1]), 4)), _pages(lambda pages, slots: None)),
        (
            "used other",
            _pages(lambda pages, slots: pages.truncate(slots, [5, 6, 7], after=None)),
            _pages(lambda pages, slots: pages.truncate(slots, [5, 5, 7], after=None)),
        ),
        (
            "used other",
            _pages(lambda pages, slots: pages.commit(slots, [5, 7, 8])),
            _pages(lambda pages, slots: pages.commit(slots, [5, 6, 8])),
        ),
    ],
)
def test_ranks_compare_what_they_hold(differs: str, rank: Made, other: Made) -> None:
    """Capacities, graphs, rows, and lengths inside a page: a difference is seen in the next exchange; none without."""
    alike, unlike = (rank().group, rank().group), (rank().group, other().group)
    reports = [group.report() for group in alike]
    assert [group.agree(reports) for group in alike] == [len(reports[0]) - 3] * 2
    reports = [group.report() for group in unlike]
    for group in [group for group in unlike if group.size == 2]:
        assert differs in str(refused(Code.RANKS_DIFFER, partial(group.agree, reports)))


def test_an_engine_decides_by_what_is_agreed() -> None:
    """A fence of the engine's own, as `Lease.delivered`, is complete where every rank has reported it."""
    runtime = open_runtime("cpu")
    group = runtime.join_group(size=2)
    stream = ManualStream()
    arrived = group.watch(stream.record())
    stream.complete()
    assert not arrived.complete
    report = group.report()
    group.agree([report, report])
    assert arrived.complete


def test_an_agreement_belongs_to_its_thread() -> None:
    """Neither a report nor an exchange nor a fence of another thread is taken."""
    runtime = open_runtime("cpu")
    group = runtime.join_group(size=1)
    report = group.report()
    calls = (group.report, lambda: group.agree([report]), lambda: group.watch(runtime.record()))
    for call in calls:
        assert isinstance(in_a_thread(call), OwnerThreadError)
    assert group.agree([report]) == 0


def test_reports_are_numbers() -> None:
    """Those of an `all_gather` are tensors; a report that is cut, or has no integers, is refused."""
    runtime = open_runtime("cpu")
    group = runtime.join_group(size=2)
    stream = ManualStream()
    arrived = group.watch(stream.record())
    stream.complete()
    report: Any = group.report()
    with pytest.raises(ArgumentError, match="expected 2 whole reports"):
        group.agree([report, report[:2]])
    for wrong in map(str, report), map(float, report):
        with pytest.raises(TypeError):
            group.agree([report, [*wrong]])
    assert not arrived.complete
    assert group.agree(list(torch.tensor([report, report]))) == 1
    assert arrived.complete


def test_a_group_is_joined_first_and_once() -> None:
    """A runtime joins before its first step and its pools, and once; only exchanges of all ranks are counted."""
    runtime = open_runtime("cpu")
    group = runtime.join_group(size=2)
    with pytest.raises(ArgumentError, match="is in a group"):
        runtime.join_group(size=2)
    late = open_runtime("cpu")
    late.next_step()
    with pytest.raises(ArgumentError, match="has begun"):
        late.join_group(size=2)
    used = open_runtime("cpu")
    SlotPool(used, 2)
    with pytest.raises(ArgumentError, match="has pools already, of slot"):
        used.join_group(size=2)
    SlotPool(runtime, 2).take(1)
    report = group.report()
    for wrong in ([], [[0, 0, 0]], [report], [report] * 3):
        with pytest.raises(ArgumentError):
            group.agree(wrong)
    assert group.agree([report, report]) == 0
    for size in (0, True):
        with pytest.raises(ArgumentError, match="expected a size of 1 or more"):
            open_runtime("cpu").join_group(size=size)
