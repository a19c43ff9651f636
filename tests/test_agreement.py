"""Ranks of one group: what counts as complete, and the same slots and admissions whatever each rank sees when."""

import hashlib
import random
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from batchstate import HybridSlotPool, PagePool, PoolExhaustedError, SlotPool, open_runtime
from batchstate.errors import ArgumentError
from batchstate.testing import ManualStream
from batchstate.violations import Code
from tests.doubles import refused
from tests.selfcheck.machines.ranks import Rank

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
                rank.come(came, tokens, tokens + calls.randint(0, 6), calls.random() < 0.5)
            elif deed < 0.8 and rank.requests:
                rank.leave(calls.choice(sorted(rank.requests)))
        except PoolExhaustedError as error:
            everything.update(str(error).encode())
        report = rank.group.report()
        connection.send(report)
        other = connection.recv()
        alone += set(report[2:]) != set(other[2:])
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
    group = runtime.join_group()
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
    refused(Code.RANKS_DIFFER, lambda: group.agree([report, [report[0], report[1] ^ 1, *report[2:]]]))
    assert group.agree([report, report[:2]]) == 0
    assert slots.reap() == 0
    report = group.report()
    assert group.agree([report, report]) == len(report) - 2
    assert (slots.reap(), slots.stats.free, slots.state_stats().free, pages.stats.free) == (2, 4, 4, 8)
    assert group.open == 0


def test_an_engine_decides_by_what_is_agreed() -> None:
    """A fence of the engine's own, as `Lease.delivered`, is complete where every rank has reported it."""
    runtime = open_runtime("cpu")
    group = runtime.join_group()
    stream = ManualStream()
    arrived = group.watch(stream.record())
    stream.complete()
    assert not arrived.complete
    report = group.report()
    group.agree([report, report])
    assert arrived.complete


def test_reports_are_numbers() -> None:
    """Those of an `all_gather` are tensors; a report that is cut, or has no integers, is refused."""
    runtime = open_runtime("cpu")
    group = runtime.join_group()
    stream = ManualStream()
    arrived = group.watch(stream.record())
    stream.complete()
    report: Any = group.report()
    with pytest.raises(ArgumentError, match="expected whole reports"):
        group.agree([report, report[:1]])
    for wrong in map(str, report), map(float, report):
        with pytest.raises(TypeError):
            group.agree([report, [*wrong]])
    assert not arrived.complete
    assert group.agree(list(torch.tensor([report, report]))) == 1
    assert arrived.complete


def test_a_group_is_joined_first_and_once() -> None:
    """A runtime joins before its first step, and once; only whole exchanges are counted."""
    runtime = open_runtime("cpu")
    group = runtime.join_group()
    with pytest.raises(ArgumentError, match="is in a group"):
        runtime.join_group()
    late = open_runtime("cpu")
    late.next_step()
    with pytest.raises(ArgumentError, match="has begun"):
        late.join_group()
    SlotPool(runtime, 2).take(1)
    report = group.report()
    for wrong in ([], [[0, 0]]):
        with pytest.raises(ArgumentError):
            group.agree(wrong)
    assert group.agree([report]) == 0
