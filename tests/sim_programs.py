"""Small programs on two streams, each with a twin that leaves out one thing that a device needs.

A program steps a few times with values that change, and returns what the host saw; `wanted` is what it should see.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from batchstate.races.sim import SimRuntime
from batchstate.runtime import Runtime
from tests.race_cases.plain import new_event

SEEDED = ("random", "priority", "pct")
"""Schedulers that draw."""

STEPS = 6
SIZE = 8


class Program(NamedTuple):
    """One of `PROGRAMS`.

    Attributes:
        run: of a runtime whose window is open, and whether it is the racy twin.
        wanted: what it returns if nothing goes wrong.
    """

    run: Callable[[SimRuntime, bool], list[int]]
    wanted: list[int]


def _host(rt: Runtime, tensor: torch.Tensor) -> int:
    """The first element, brought to the host as an engine does it."""
    return int(rt.download([tensor.contiguous()]).resolve()[0].reshape(-1)[0])


def handed_over(rt: SimRuntime, racy: bool) -> list[int]:
    """One stream computes, the other goes on with it. The twin forgets to wait."""
    one, two, seen = rt.stream("one"), rt.stream("two"), []
    with rt.use(one):
        counter = rt.device_zeros((SIZE,), torch.int64)
    for step in range(STEPS):
        rt.next_step()
        with rt.use(one):
            made = counter + step
            ready = rt.record()
        with rt.use(two):
            if not racy:
                rt.wait(ready)
            result = made * 3 + 1
            rt._keep_alive(made, two)
            seen.append(rt.download([result]))
    return [int(one.resolve()[0][0]) for one in seen]


def staged(rt: SimRuntime, racy: bool) -> list[int]:
    """One piece of pinned memory is filled again and again. The twin does so before the copy has read it."""
    source = rt.pinned((SIZE,), torch.int64)
    copied = new_event(rt)
    results = []
    for step in range(STEPS):
        rt.next_step()
        if step and not racy:
            copied.synchronize()
        source.fill_(step + 100)
        results.append(rt.device_empty((SIZE,), torch.int64).copy_(source, non_blocking=True))
        copied.record()
    return [_host(rt, one) for one in results]


def brought(rt: SimRuntime, racy: bool) -> list[int]:
    """Results come to the host. The twin does not wait for them."""
    seen = []
    value = rt.device_zeros((SIZE,), torch.int64)
    for _ in range(STEPS):
        rt.next_step()
        value.add_(7)
        result = value.to("cpu", non_blocking=True)
        done = rt.record()
        if not racy:
            done.wait()
        seen.append(int(result[0]))
    return seen


def given_back(rt: SimRuntime, racy: bool) -> list[int]:
    """One stream lets go of memory that the other still reads. The twin does not tell the allocator who reads it."""
    one, two, seen = rt.stream("one"), rt.stream("two"), []
    for step in range(STEPS):
        rt.next_step()
        with rt.use(one):
            made = torch.full((SIZE,), step + 10) + rt.device_zeros((SIZE,), torch.int64)
            ready = rt.record()
        with rt.use(two):
            rt.wait(ready)
            if not racy:
                rt._keep_alive(made, two)
            seen.append(made + 1)
        del made
        with rt.use(one):
            rt.device_empty((SIZE,), torch.int64).fill_(-step)
    with rt.use(two):
        return [_host(rt, one) for one in seen]


def read_first(rt: SimRuntime, racy: bool) -> list[int]:
    """A forward reads what the next step adds to in place. The twin adds without waiting for the reader."""
    one, two, seen = rt.stream("one"), rt.stream("two"), []
    with rt.use(one):
        lengths = rt.device_zeros((SIZE,), torch.int64)
    read = None
    for _ in range(STEPS):
        rt.next_step()
        with rt.use(one):
            if read is not None and not racy:
                rt.wait(read)
            lengths.add_(1)
            ready = rt.record()
        with rt.use(two):
            rt.wait(ready)
            seen.append(lengths * 2)
            read = rt.record()
    with rt.use(two):
        return [_host(rt, one) for one in seen]


def rewritten(rt: SimRuntime, racy: bool) -> list[int]:
    """Rows of a table are read by one stream and rewritten by another. The twin rewrites without waiting."""
    one, two, seen = rt.stream("one"), rt.stream("two"), []
    with rt.use(one):
        table = rt.device_zeros((4, SIZE), torch.int64)
    read = None
    for step in range(STEPS):
        rt.next_step()
        with rt.use(one):
            if read is not None and not racy:
                rt.wait(read)
            rows = torch.tensor([1, 2])
            table.index_copy_(0, rows, torch.full((2, SIZE), step + 50))
            ready = rt.record()
        with rt.use(two):
            rt.wait(ready)
            seen.append(table.index_select(0, torch.tensor([2])).sum(1))
            read = rt.record()
    with rt.use(two):
        return [_host(rt, one) for one in seen]


PROGRAMS: dict[str, Program] = {
    "missing wait": Program(handed_over, [3 * step + 1 for step in range(STEPS)]),
    "staging refilled": Program(staged, [step + 100 for step in range(STEPS)]),
    "early host read": Program(brought, [7 * (step + 1) for step in range(STEPS)]),
    "freed and reused": Program(given_back, [step + 11 for step in range(STEPS)]),
    "added to under a reader": Program(read_first, [2 * (step + 1) for step in range(STEPS)]),
    "written after a read": Program(rewritten, [SIZE * (step + 50) for step in range(STEPS)]),
}
"""Name of what the twin does wrong -> the program."""


def run(name: str, scheduler: str, seed: int, racy: bool) -> tuple[list[int], SimRuntime]:
    """What the host saw, and the runtime."""
    rt = SimRuntime(scheduler=scheduler, seed=seed)
    with rt:
        seen: Any = PROGRAMS[name].run(rt, racy)
    return seen, rt


def history(scheduler: str, seed: int) -> list[str]:
    """What ran in all programs, racy ones too, and what the host saw."""
    told = []
    for name in PROGRAMS:
        for racy in (False, True):
            seen, rt = run(name, scheduler, seed, racy)
            told += [f"{name} {racy}: {seen}", *rt.trace()]
    return told
