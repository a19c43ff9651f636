"""Waits of planned steps over two and three streams: the detector names each that is left out, and nothing else.

Slack hides a wait that is missing. So the host waits for nothing but the results of the step before, if at all, and
there is memory for no more steps than it takes to hear that a forward two steps back has ended.
"""

import sys
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from batchstate import checks
from batchstate._step_memory import StepMemory
from batchstate.races import Race, RaceRuntime
from batchstate.step import PlannedStep
from tests.step_world import World, columns
from tests.worlds import LONGEST

STEPS, CHUNK = 200, 4


@attrs.frozen
class Streams:
    """Where a program runs: its plan on the first stream, its forward on `forwards` others in turn.

    With `aside` results go to the host over the relay's stream; with `side` another one reads the token table; `reads`
    says whether the host reads results, a step later, and `keeps` whether it keeps them; `most` requests run.
    """

    forwards: int = 1
    aside: bool = False
    side: bool = False
    fences: Any = "lazy"
    reads: bool = True
    most: int = 8
    keeps: bool = False


class Program:
    """Random steps: requests leave, others join with KV that is there or with a prompt, which goes in in chunks."""

    def __init__(self, rt: RaceRuntime, streams: Streams) -> None:
        self.rt, self.streams, self.rng = rt, streams, np.random.default_rng(1)
        self.kv = rt.device_zeros((1_000,), torch.int64, name="kv")
        self.at = rt.device_zeros((LONGEST,), torch.int64).add_(torch.arange(LONGEST))
        self.forwards, self.side = [rt.stream(f"forward {i}") for i in range(streams.forwards)], rt.stream("side")
        rt.synchronize()
        self.world = World.planned(rt, 3 * streams.most, pages=200, results=() if streams.aside else ("last",))
        self.batch, self.done, self.prompts = self.world.batch, rt.record(), list[list[int]]()
        self.before: Any = None  # the results of the step before
        self.kept = list[Any]()

    def step(self) -> None:
        """A step, and the results of the one before."""
        rt, rng, world, streams = self.rt, self.rng, self.world, self.streams
        rt.next_step()
        lens = self.batch.seq_lens.np
        keep = (lens < LONGEST - CHUNK) & (rng.random(lens.size) < 0.85)
        prompts = [ids for ids, stays in zip(self.prompts, keep, strict=True) if stays]  # what each has to put in
        joining = rng.integers(1, 8, rng.integers(not prompts, streams.most - len(prompts) + 1))
        options: dict[str, Any] = {"keep": keep, "after": self.done}
        if joining.size:
            prefilled = rng.random() < 0.5
            prompts += [[] if prefilled else list(range(n)) for n in joining.tolist()]
            options["joining"] = columns(joining, (joining if prefilled else 0 * joining).tolist())
            options["published"] = {"last": joining} if prefilled else None
        chunks: list[Any] = [prompt[:CHUNK] or None for prompt in prompts]
        queries, samples = [len(chunk or [0]) for chunk in chunks], [len(prompt) <= CHUNK for prompt in prompts]
        step: Any = world.planner.plan(self.batch, queries, prompt_ids=chunks, samples=samples, **options)
        with rt.use(self.forwards[rt.step % len(self.forwards)]):
            inputs, places = step.inputs(), self.rows(step.batch)
            if len(self.forwards) > 1:  # else its own order with the forward that writes next is enough
                world.table.read_until(rt.record())
            self.kv.index_copy_(0, inputs.slot_mapping, inputs.input_ids)
            read = torch.where(self.at < inputs.kv_lens[:, None], places, 0)
            self.kv.index_select(0, read.view(-1)).add(step.batch.seed.device.sum())
            if any(samples):
                step.publish(last=inputs.input_ids.index_select(0, inputs.last_token_indices) + 1)
            self.done = rt.record()
        with rt.use(self.side):
            if streams.side:
                self.rows(step.batch)
                world.table.read_until(rt.record())
        if self.before is not None and streams.reads:
            self.before.resolve()
        self.batch, self.before, self.prompts = step.batch, None, [prompt[CHUNK:] for prompt in prompts]
        if any(samples):
            self.before = world.relay.prefetch(step.sampled_slots, "last") if streams.aside else step.results
        if streams.keeps:
            self.kept.append(self.before)

    def rows(self, batch: Any) -> torch.Tensor:
        """Rows of the token table."""
        return self.world.table.device_for(batch.slots).index_select(0, batch.slots.device)


def watch(rt: RaceRuntime, patches: pytest.MonkeyPatch, without: object = None) -> set[Any]:
    """Notes where streams wait: which one, and the two innermost functions that ask for it. Leaves some waits out."""
    right, seen = rt.wait, set()

    def wait(fence: Any, *, stream: Any = None) -> None:
        caller: Any = sys._getframe(1)
        name = (stream or rt.current_stream).name.rstrip(" 01")
        seen.add(site := (name, caller.f_back.f_code.co_name, caller.f_code.co_name))
        if site != without:
            right(fence, stream=stream)

    patches.setattr(rt, "wait", wait)
    return seen


TWO, THREE, HOST, USE = Streams(), Streams(aside=True), "relay: to the host", "use_on_current_stream"
QUICK = [attrs.evolve(streams, fences="eager", reads=False) for streams in (TWO, THREE)]
KEPT = [attrs.evolve(QUICK[1], keeps=True)]
"""Where nobody keeps the results, a fence behind their read is known to be complete when memory is used again."""
SIDE, OTHERS = [Streams(n, side=True) for n in (1, 2)], [Streams(2, most=n) for n in (2, 1)]

REFILLED: Any = [(StepMemory, "sent", property(lambda memory: None, lambda memory, sent: None))]
REUSED: Any = [(StepMemory, "others", property(lambda memory: {}, lambda memory, others: None))]
_send, _write = PlannedStep._send, PlannedStep._write_table


def _sent_with_the_table(step: PlannedStep, stream: Any) -> None:
    _send(step, stream)
    if step._memory.block.k:
        _write(step)


AT_THE_PLAN: Any = [(PlannedStep, "_send", _sent_with_the_table)]
AT_THE_PLAN += [(PlannedStep, "_write_table", lambda step: None)]

WAITS: dict[str, tuple[Any, str, list[Streams]]] = {
    # The wait that is left out, or other functions; the race: kind, streams, memory; the programs that show it.
    "the copy": (("forward", "inputs", USE), "read after write, default, forward, step", [TWO, THREE]),
    "the copy, a third": (("side", "tensor", USE), "read after write, default, side, step", SIDE),
    "memory refilled": (REFILLED, "staging refilled, default, host, staging", QUICK),
    "memory reused": (REUSED, "write after read, forward, default, step", QUICK),
    "a gather": (("forward", "gathering", "come_behind"), "read after write, default, forward, relay", [TWO, THREE]),
    "a publish": (("forward", "put", "come_behind"), f"write after read, {HOST}, forward, relay", [THREE, QUICK[1]]),
    "first values": (("default", "put", "come_behind"), f"write after read, {HOST}, default, relay", KEPT),
    "results": ((HOST, "_brought", "come_behind"), f"read after write, forward, {HOST}, relay", [THREE, QUICK[1]]),
    "table at the plan": (AT_THE_PLAN, "write after read, forward, default, req_to_token", [TWO, THREE]),
    "table read": (("side", "ordered", USE), "read after write, forward, side, req_to_token", SIDE),
    "table": (("forward", "scatter", "await_readers"), "write after read, side, forward, req_to_token", SIDE),
    "KV": (("forward", "wait_for_slots", "wait"), "read after write, forward, forward, kv", OTHERS),
}

IMPLIED = {(stream, name, USE) for stream in ("forward", HOST) for name in ("ordered", "tensor", "_memory_of")}
"""Waits for what lies before another thing that the stream waits for: the copy, or the publish of the forward."""


@pytest.mark.parametrize("streams", [TWO, THREE, *QUICK, OTHERS[0], Streams(2, aside=True, side=True)], ids=str)
def test_steps_are_clean(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing races, the host waits once a step at most, and each wait of a stream is one that is left out below."""
    with checks("off"), RaceRuntime(fences=streams.fences) as rt:
        program = Program(rt, streams)
        seen, before = watch(rt, monkeypatch), rt.counters.snapshot()
        for _ in range(STEPS):
            program.step()
    spent = rt.counters - before
    assert (rt.races, spent.forced_syncs, spent.fence_waits < STEPS) == ((), 0, True)
    assert len(program.world.planner._memories._all) <= 6  # type: ignore[union-attr]
    assert seen - IMPLIED <= {case[0] for case in WAITS.values() if isinstance(case[0], tuple)}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_that_is_left_out_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first race is between the two that the wait was to order."""
    wait, race, programs = WAITS[name]
    for streams in programs:
        with checks("off"), RaceRuntime(fences=streams.fences) as rt, monkeypatch.context() as patches:
            program = Program(rt, streams)
            watch(rt, patches, wait)
            for patch in wait if isinstance(wait, list) else []:
                patches.setattr(*patch)
            with pytest.raises(Race) as raised:  # noqa: PT012 - in one of them
                for _ in range(STEPS):
                    program.step()
        report = raised.value.report
        lanes = (access.lane.rstrip(" 01") for access in (report.first, report.second))
        assert ", ".join([report.kind, *lanes, report.memory.split()[0].rstrip(":")]) == race
