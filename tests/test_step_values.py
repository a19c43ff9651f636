"""Values of steps that somebody keeps stay, though memory is filled again; a refused plan leaves each byte."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate import PoolExhaustedError, Runtime, SlotPool, TokenArray, checks, open_runtime
from batchstate._step_memory import StepMemories
from batchstate.errors import BatchStateError
from batchstate.runtime.devices import CpuRuntime
from batchstate.testing.fences import LateRuntime
from tests.selfcheck.machines.failures import PlantedError, failing
from tests.step_world import Running, World, columns
from tests.worlds import LONGEST

# Values live


def turn(world: World, at: int) -> Any:
    """One step of three requests: one ends in some, and another comes, with a prompt or prefilled."""
    rt = world.rt
    rt.next_step()
    options: dict[str, Any] = {"extras": {"salt": np.arange(at, at + 4)}}
    longest, keep = int(world.batch.seq_lens.max()), [0, 1, 2]
    if at % 3 == 0 or longest >= LONGEST - 2:
        row = int(world.batch.seq_lens.np.argmax())
        keep = [i for i in range(len(world.batch)) if i != row]
        rows, _ = world.next_handles(1)
        options |= {"keep": keep, "after": rt.record(), "joining": columns(rows, [1 + at % 5])}
        options["published"] = {"last": [at]}
    if at % 4 == 1:
        world.relay.discard(world.batch.slots.filter([keep[1]]), "last")  # the host has its tokens
        options |= {"pad_rows": 5, "pad_tokens": 6, "query_lens": [1, 2, 1], "prompt_ids": [None, [7, at], None]}
        options["token_arrays"] = {"kinds": TokenArray([None, [1, 2], None], torch.int64, fill=9)}
    step = world.planner.plan(world.batch, **options)
    inputs = step.inputs()
    assert all(len(values) == 6 for values in inputs.arrays.values())  # as many as tokens with padded ones
    last = inputs.input_ids[inputs.last_token_indices[:3]] + 1
    step.publish(last=last if at % 5 else rt.inspect(last).tolist())
    world.batch = step.batch
    return step, inputs


INPUTS = ("slots", "input_ids", "positions", "query_start_loc", "kv_lens", "last_token_indices", "slot_mapping")

KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda step, inputs: step,
    "batch": lambda step, inputs: step.batch,
    "sent": lambda step, inputs: step.sent,
    "host column": lambda step, inputs: step.batch["temperature"].np,
    "slots on the host": lambda step, inputs: step.batch["slots"].np,
    "value": lambda step, inputs: step.batch["seq_lens"],
    "handles": lambda step, inputs: step.batch["slots"],
    "device column": lambda step, inputs: step.batch["seed"].device,
    "results": lambda step, inputs: step.results,
    "plan": lambda step, inputs: step.plan,
    "plan arrays": lambda step, inputs: step.plan.extras["slot_mapping"],
    "starts of the plan": lambda step, inputs: step.plan.extras["query_start_loc"],
    "lengths of the plan": lambda step, inputs: step.plan.seq_lens,
    "extras": lambda step, inputs: step.extras["salt"],
    "inputs": lambda step, inputs: inputs,
    "a slice": lambda step, inputs: inputs.positions[1:],
    "an alias by DLPack": lambda step, inputs: torch.utils.dlpack.from_dlpack(inputs.slot_mapping),
    "an array": lambda step, inputs: inputs.kv_lens.numpy() if type(step.batch.runtime) is CpuRuntime else 0,
    "the storage": lambda step, inputs: inputs.kv_lens.untyped_storage(),
    "a tensor of the storage": lambda step, inputs: inputs.kv_lens.new_empty(0).set_(inputs.kv_lens.untyped_storage()),
    **{name: lambda step, inputs, name=name: getattr(inputs, name) for name in INPUTS},  # type: ignore[misc]
}


def contents(rt: Runtime, value: Any) -> Any:
    """What a kept value says."""
    if isinstance(value, torch.Tensor):
        return rt.inspect(value).tolist()
    if isinstance(value, torch.UntypedStorage):
        return rt.inspect(torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)).tolist()
    if isinstance(value, np.ndarray | int):
        return value if isinstance(value, int) else value.tolist()
    if hasattr(value, "positions"):  # inputs
        return [contents(rt, getattr(value, name)) for name in INPUTS]
    if hasattr(value, "sent"):  # a step
        parts = value.batch, value.sent, value.plan, value.results, value.extras["salt"]
        return [contents(rt, part) for part in (*parts, np.array(value.rows), np.array(value.generations))]
    if hasattr(value, "to_dict"):  # a batch, both sides
        sides = {name: rt.inspect(value[name].device).tolist() for name in value.columns()}
        return {name: np.asarray(column).tolist() for name, column in value.to_dict().items()}, sides
    if hasattr(value, "extras"):  # a plan
        arrays = {name: array.tolist() for name, array in sorted(value.extras.items())}
        return arrays, value.query_lens.tolist(), value.seq_lens.tolist(), contents(rt, value.slots)
    if hasattr(value, "contract") and not hasattr(value, "generations"):
        return value.np.tolist(), rt.inspect(value.device).tolist()
    if hasattr(value, "generations"):
        return value.np.tolist(), value.generations.tolist(), rt.inspect(value.device).tolist()
    return value["last"].np.tolist()  # results


@pytest.mark.parametrize("kept", [*KEPT, "all"])
def test_kept_values_do_not_change(rt: Runtime, kept: str) -> None:
    """A value is what it was for as long as somebody has it, however many steps come after it."""
    steps, every = (1000, 37) if kept in ("all", "batch") else (150, 13)
    world = World.planned(rt, pages=96)
    world.join([3, 4, 5])
    values: list[tuple[str, Any, Any]] = []
    for at in range(steps):
        step, inputs = turn(world, at)
        if at % every == 0:
            for name in KEPT if kept == "all" else (kept,):
                value = KEPT[name](step, inputs)
                values.append((name, value, contents(rt, value)))
        else:
            step.results.resolve()
        del step, inputs
        if at % 29 == 0:
            for name, value, before in values:
                assert contents(rt, value) == before, name
    for name, value, before in values:
        assert contents(rt, value) == before, name
    world.relay.check()
    world.pages.verify()


def test_memory_waits_for_streams_that_use_it() -> None:
    """A step whose tensors nobody has any more is not planned over before another stream has run that reads them."""
    rt = LateRuntime(steps_in_flight=2)
    world = World.planned(rt, pages=96)
    world.join([3, 4, 5])
    planner: Any = world.planner
    other, own = rt.stream("other"), rt.current_stream
    used, first = [], 0
    for at in range(16):
        step, _ = turn(world, at)
        step.results.resolve()
        if at == 4:
            step.used_on(other)
            first = id(step._memory)
        used.append(id(step._memory))
        del step, _
        rt.complete(rt.pending(own), own)
        if at == 11:
            assert rt.pending(other), "a fence was recorded there"
            rt.complete(rt.pending(other), other)
    assert first not in used[5:12]
    assert first in used[12:]
    assert planner.made_for_holders == 0


def test_memory_waits_for_streams_whichever_stream_plans() -> None:
    """What is free for one stream, or was when it was asked earlier, is not by that free for another."""
    rt = LateRuntime(steps_in_flight=2)
    memories = StepMemories(SlotPool(rt, 8), Running._layout.core)
    own, other, side = rt.current_stream, rt.stream("other"), rt.stream("side")

    def fill(stream: Any, *others: Any) -> None:
        """A step that nobody keeps."""
        with rt.use(stream):
            upload = memories.take(64, stream).send(64, [], stream)
            upload.synchronised.update({other.key: other for other in others})
            rt.complete(1, stream)  # the copy, and nothing that comes behind it
            rt.record(stream)

    def free(stream: Any) -> bool:
        """Whether a step on this stream would get memory that there is."""
        with rt.use(stream):
            return any(memory.sent is None or memory.free(stream) for memory in memories._all)

    def ended(*streams: Any) -> None:
        for stream in streams:
            rt.complete(rt.pending(stream), stream)

    fill(other)
    assert not free(own), "a fence is recorded on the stream that planned there"
    ended(other)
    fill(other, side)
    assert len(memories._all) == 1
    rt.record(side)
    assert not free(own), "the fence is from before this step"
    ended(side, other)
    assert free(own)
    fill(other)
    rt.record(other)
    assert free(other), "its work comes behind what it was given before"
    assert not free(own), "and that of another stream does not"
    ended(other)
    assert free(own)


@pytest.mark.parametrize("late", [False, True])
def test_a_run_that_keeps_nothing_makes_no_memory(late: bool) -> None:
    """Steps in flight have memory of their own, and beyond these it is filled again; one that is held costs one."""
    rt = LateRuntime(steps_in_flight=2) if late else open_runtime("cpu")
    world = World.planned(rt, pages=96)
    world.join([3, 4, 5])
    before, fences = None, [rt.record()]
    for at in range(200):
        step, inputs = turn(world, at)
        if before is not None:
            before.results.resolve()
        before = step
        del step, inputs
        fences.append(rt.record())
        fences.pop(0).wait()
    del before
    planner: Any = world.planner
    assert planner.made_for_holders == 0
    held = []
    for at in range(200, 210):
        step, _ = turn(world, at)
        step.results.resolve()
        rt.record().wait()
        held.append(step.batch)
    assert planner.made_for_holders > 0


# Plans that are refused


def state(world: World) -> dict[str, bytes]:
    """All numbers of the cores."""
    arrays = {
        **{f"slots {name}": array for name, array in world.slots._allocator.core.arrays.items()},
        **{f"pages {name}": array for name, array in world.pages._rows.arrays.items()},
    }
    for field, entries in world.relay._entries.fields.items():
        arrays |= {f"{field} {name}": array for name, array in entries.arrays.items()}
    arrays["written"] = world.table._written
    seen = {"slots seen", "pages seen"}  # stamps of calls, which no number depends on
    return {name: np.asarray(array).tobytes() for name, array in arrays.items() if name not in seen}


WRONG = st.sampled_from(
    [
        {"query_lens": -1},
        {"query_lens": 2},
        {"query_lens": LONGEST},
        {"query_lens": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]},
        {"query_lens": "one"},
        {"samples": [True] * 9},
        {"samples": "no"},
        {"keep": [0, 0]},
        {"keep": [99]},
        {"keep": [True]},
        {"pad_rows": -1},
        {"pad_tokens": 0},
        {"prompt_ids": [[1, 2]] * 9},
        {"extras": {"positions": np.arange(3)}},
        {"extras": {"x": object()}},
        {"token_arrays": {"input_ids": TokenArray([[1]])}},
        {"published": {"last": [1]}},
        {"joining": {"seq_lens": [1]}},
        {"joining": columns(np.arange(2), [LONGEST + 1, 1])},
        {"joining": columns(np.arange(9), [1] * 9)},
        {"joining": columns(np.arange(1), [0])},
        {"joining": columns(np.arange(1), [4]), "published": {"last": [1, 2]}},
        {"joining": columns(np.arange(1), [4]), "published": {"nothing": [1]}},
        {"joining": columns(np.arange(1), [-4]), "published": {"last": [1]}},
        {"joining": columns(np.arange(4), [LONGEST - 1] * 4), "published": {"last": [1, 2, 3, 4]}},
        {"after": "no fence"},
        {"batch": None},
    ]
)
FAILS = st.sampled_from(["_copied_to_device", "launch", None, None, None])


@given(
    events=st.lists(st.tuples(st.sampled_from(["step", "join", "leave"]), WRONG, FAILS), min_size=1, max_size=10),
    level=st.sampled_from(["off", "cheap", "full"]),
)
@settings(max_examples=150, deadline=None)
def test_a_refused_plan_leaves_each_byte(events: list[tuple[str, dict[str, Any], str | None]], level: str) -> None:
    """Whatever the arguments, and whatever fails: the numbers of pools and relay are what they were."""
    with checks(level):
        world = World.planned(open_runtime("cpu"), pages=24)
        world.join([3, 6, 2])
        for event, wrong, fails in events:
            longest = int(world.batch.seq_lens.max()) if len(world.batch) else 0
            if event == "step" and 0 < longest < LONGEST:
                with_pages(world.step)
            elif event == "join" and len(world.batch) + 1 < world.slots.size:
                with_pages(lambda: world.join([2, 3][: world.slots.stats.free]))
            elif event == "leave" and len(world.batch) > 1:
                world.leave([0])
            world.slots.reap()
            world.pages.reap()
            options: dict[str, Any] = {"batch": world.batch, **wrong}
            if fails is not None:
                options = {"batch": world.batch, "joining": columns(np.arange(1), [4]), "published": {"last": [9]}}
            before = state(world)
            try:
                if fails is None:
                    world.batch = world.planner.plan(**options).batch
                else:
                    with failing(world.rt, fails, 1):
                        world.batch = world.planner.plan(**options).batch
            except (BatchStateError, PlantedError, TypeError, ValueError):
                after = state(world)
                writers = [name for name in after if name.endswith("last_writer")] if fails == "launch" else []
                assert [name for name in after if after[name] != before[name] and name not in writers] == []
            else:
                for row, _ in enumerate(world.batch.slots.np):  # it was planned: a step that is never launched
                    world.relay.discard(world.batch.slots.filter([row]), "last")
                world.pages.commit(world.batch.slots, world.batch.seq_lens.np)
                world.relay.publish(world.batch.slots, last=10 * world.batch.slots.np)


def with_pages(act: Callable[[], object]) -> None:
    """Runs it, where there are pages for it."""
    with contextlib.suppress(PoolExhaustedError):
        act()
