"""`StepPlanner`: a step planned in one piece is what the parts, called one after the other, make of it."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate import (
    Batch,
    Code,
    ForwardPlan,
    FutureMap,
    PagePool,
    PoolExhaustedError,
    Runtime,
    SlotPool,
    StepPlanner,
    Violation,
    checks,
    device_only,
    mirrored,
    open_runtime,
    relay_field,
    slot_column,
)
from batchstate._planned_step import DecodeStep
from batchstate.errors import (
    ArgumentError,
    BatchStateError,
    CaptureError,
    DeclarationError,
    DeviceError,
    DtypeError,
    ShapeError,
)
from batchstate.invariants import times_checked
from batchstate.mirror import Slots
from batchstate.step import PlannedStep
from batchstate.testing.fences import LateRuntime
from benchmarks.steady_steps import Steady
from benchmarks.timing import no_collector
from tests.doubles import fake_accelerator, refused
from tests.selfcheck.machines.failures import PlantedError, failing
from tests.selfcheck.mutants.diffs import changed

LONGEST, PAGE_SIZE = 24, 4


class Running(Batch):
    """Columns of each width, packed and not."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    temperature = mirrored(torch.float32)
    seed = mirrored(torch.int32)
    greedy = mirrored(torch.bool)
    pair = mirrored(torch.int16, shape=(2,))


class RunningToo(Running):
    """Another declaration."""

    more = mirrored(torch.int64)


def columns(rows: Any, lens: list[int]) -> dict[str, Any]:
    """What requests that have the slots `rows`, or will have them, have besides."""
    n = len(lens)
    return {
        "seq_lens": np.array(lens, dtype=np.int64),
        "temperature": rows / np.float32(7),
        "seed": rows.tolist(),
        "greedy": rows % 2 == 0,
        "pair": np.arange(2 * n, dtype=np.int16).reshape(n, 2),
    }


@attrs.define(eq=False)
class World:
    """An engine's state. Its steps come from a planner, or from the parts alone."""

    rt: Runtime
    slots: SlotPool
    pages: PagePool
    relay: FutureMap
    planner: StepPlanner
    batch: Running
    in_one_piece: bool
    prompts: dict[tuple[int, int], list[int]] = attrs.field(factory=dict)  # of handles: what was not put in yet
    fails: tuple[object, str, int] | None = None  # a method of a part that fails in the plan of the next steps, when

    @classmethod
    def of(
        cls,
        rt: Runtime,
        size: int = 8,
        *,
        pages: int = 64,
        longest: int = LONGEST,
        in_one_piece: bool = True,
        **options: Any,
    ) -> "World":
        """No requests yet."""
        slots = SlotPool(rt, size)
        table = slots.table("req_to_token", (longest,), torch.int32, holds="location", host=True)
        pool = PagePool(rt, slots, pages, PAGE_SIZE, max_tokens_per_request=longest, req_to_token=table)
        fields = {"last": relay_field(torch.int64, read_by="both"), "logit": relay_field(torch.float32, read_by="host")}
        relay = FutureMap(slots, fields)
        options = {"ids": "last", "results": ("last",), **options}
        planner = StepPlanner(Running, pages=pool, relay=relay, **options)
        if not in_one_piece:
            planner._steps = None
        return cls(rt, slots, pool, relay, planner, Running.empty(rt), in_one_piece)

    def join(self, lens: list[int]) -> None:
        """Requests whose prompt is there, and the first token after it, 10 * slot."""
        slots = self.slots.take(len(lens))
        extension = self.pages.extend(slots, lens)
        self.pages.commit(slots, lens)
        self.relay.publish(slots, last=10 * slots.np)
        joining = self.built(slots, lens)
        joining.upload(writes=[extension.entry()])
        self.batch = self.batch.merge(joining) if len(self.batch) else joining

    def prompted(self, lens: list[int]) -> Running:
        """Requests whose prompts of so many tokens run in the next steps, three tokens in each."""
        slots = self.slots.take(len(lens))
        self.note_prompts(slots.np, slots.generations, lens)
        return self.built(slots, [0] * len(lens))

    def note_prompts(self, rows: Any, generations: Any, lens: list[int]) -> None:
        """The prompts of requests with these handles."""
        for slot, generation, n in zip(rows.tolist(), generations.tolist(), lens, strict=True):
            self.prompts[slot, generation] = [100 * slot + i for i in range(n)]

    def arrived(self, lens: list[int]) -> Running:
        """Requests that were prefilled elsewhere."""
        return self.built(self.pages.take_requests(lens), lens)

    def built(self, slots: Slots, lens: list[int]) -> Running:
        """A batch of these requests."""
        return Running.build(self.rt, slots=slots, **columns(slots.np, lens))

    def turn_over(
        self, gone: list[int], lens: list[int], prompted: bool = False, as_columns: bool = False
    ) -> tuple[PlannedStep, dict[str, Any]]:
        """A step before which requests leave and others come: as one plan, or by the parts one after the other."""
        keep = np.ones(len(self.batch), dtype=np.bool_)
        keep[gone] = False
        joining: Any
        if not self.in_one_piece:
            joining = self.prompted(lens) if prompted else self.arrived(lens)
            joining.upload(writes=[self.pages.entry(joining.slots)])
            if not prompted:
                self.relay.publish(joining.slots, last=10 * joining.slots.np)
            leaving, self.batch = self.batch.filter(~keep), self.batch.filter(keep).merge(joining)
            seen = self.step()
            self.pages.release_requests(leaving.slots, after=self.rt.record())
            return seen
        if as_columns:
            rows, generations = self.next_handles(len(lens))
            joining = columns(rows, [0] * len(lens) if prompted else lens)
            if prompted:
                self.note_prompts(rows, generations, lens)
        else:
            joining = self.prompted(lens) if prompted else self.arrived(lens)
            rows = joining.slots.np
        published = None if prompted else {"last": 10 * rows}
        after = self.rt.record() if gone else None
        return self.step(keep=keep, after=after, joining=joining, published=published)

    def next_handles(self, n: int) -> tuple[Any, Any]:
        """Numbers and generations of the slots that the next requests get."""
        _ = self.slots.stats  # which asks what is free by now
        return self.slots.next_handles(n)

    def tokens(self, keep: Any = None, joining: Any = None) -> dict[str, Any]:
        """What each of the requests that run puts in, as arguments of `plan`."""
        running = (self.batch if keep is None else self.batch.filter(keep))["slots"]
        parts: list[Any] = [(running.np, running.generations)]  # type: ignore[attr-defined]
        if isinstance(joining, dict):
            parts.append(self.next_handles(len(joining["seq_lens"])))
        elif joining is not None:
            parts.append((joining.slots.np, joining.slots.generations))
        handles = [handle for slots, held in parts for handle in zip(slots.tolist(), held.tolist(), strict=True)]
        chunks = [self.prompts.get(handle) for handle in handles]
        if not any(chunks):
            return {}
        for handle in handles:
            self.prompts[handle] = (self.prompts.get(handle) or [])[3:]
        return {
            "query_lens": np.array([len(chunk[:3]) if chunk else 1 for chunk in chunks]),
            "prompt_ids": [chunk[:3] if chunk else None for chunk in chunks],
            "samples": np.array([not chunk or len(chunk) <= 3 for chunk in chunks]),
        }

    def leave(self, rows: list[int]) -> None:
        """Some requests leave, with all that they have."""
        keep = np.ones(len(self.batch), dtype=np.bool_)
        keep[rows] = False
        self.pages.release_requests(self.batch.filter(~keep).slots, after=self.rt.record())
        self.batch = self.batch.filter(keep)

    def step(self, **options: Any) -> tuple[PlannedStep, dict[str, Any]]:
        """A step: what it gave to the forward, and what both sides of the engine's state are after it."""
        self.rt.next_step()
        tokens = self.tokens(options.get("keep"), options.get("joining"))
        with failing(*self.fails) if self.fails else contextlib.nullcontext():
            step = self.planner.plan(self.batch, **tokens, **options)
        inputs = step.inputs()
        if len(inputs.last_token_indices):
            step.publish(last=inputs.input_ids[inputs.last_token_indices] + 1)
        self.batch = step.batch  # type: ignore[assignment]
        read = self.rt.inspect
        seen: dict[str, Any] = {
            name: read(getattr(inputs, name)).tolist()
            for name in ("slots", "input_ids", "positions", "query_start_loc", "kv_lens", "last_token_indices")
        }
        assert inputs.slot_mapping is not None
        assert self.pages.req_to_token is not None
        seen["slot_mapping"] = read(inputs.slot_mapping).tolist()
        seen["table"] = read(self.pages.req_to_token.memory).tolist()
        seen["table on the host"] = np.asarray(self.pages.req_to_token.host_memory).tolist()
        for name in Running.columns():
            seen[f"{name}, host"], seen[f"{name}, device"] = (
                self.batch[name].np.tolist(),
                read(self.batch[name].device).tolist(),
            )
        seen["relay"] = [str(state) for state in self.relay.states(self.batch.slots, "last")]
        seen["committed"] = self.pages.committed(self.batch.slots).tolist()
        seen["plan"] = {
            name: np.asarray(getattr(step.plan, name)).tolist()
            for name in ("query_lens", "seq_lens", "relay_rows", "sample_rows", "num_tokens", "max_kv_len", "kv_starts")
        }
        return step, seen


def test_a_prefetch_that_failed_is_waited_for() -> None:
    """It has read on the relay's stream before its copy failed: the next publish of these requests waits for that."""
    world = World.of(open_runtime("cpu"), results=())
    world.relay._entries.fields["last"].must_read = False
    rt, waited = world.rt, []
    world.join([3, 5])
    for _ in range(3):
        world.step()
    with failing(rt, "download", 1), pytest.raises(PlantedError):
        world.relay.prefetch(world.batch.slots, "last")
    real = rt.wait

    def wait(fence: Any, **options: Any) -> None:
        waited.append(fence)
        real(fence, **options)

    rt.wait = wait  # type: ignore[method-assign]
    world.planner.plan(world.batch).publish(last=torch.tensor([1, 2]))
    (publication,) = world.relay._entries.publications_of(world.batch.slots.np, "last")
    assert len(waited) == 1
    assert not publication.reads


def in_one_piece(step: PlannedStep) -> bool:
    """Whether a step was planned in one piece, and not composed of the parts."""
    return step._checked


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.lists(st.integers(1, 9), min_size=1, max_size=3)),
        st.tuples(st.just("prompts"), st.lists(st.integers(1, 8), min_size=1, max_size=2)),
        st.tuples(st.just("leave"), st.lists(st.integers(0, 7), min_size=1, max_size=2, unique=True)),
        st.tuples(st.just("reorder"), st.integers(0, 99)),
        st.tuples(st.just("replace"), st.floats(0, 1, width=32)),
        st.tuples(
            st.just("turn over"),
            st.tuples(
                st.lists(st.integers(0, 7), max_size=2, unique=True),
                st.lists(st.integers(1, 9), max_size=2),
                st.booleans(),
                st.booleans(),
            ),
        ),
        st.tuples(st.just("step"), st.just(None)),
        st.tuples(st.just("step"), st.just(None)),
    ),
    max_size=14,
)


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@given(events=EVENTS)
@settings(max_examples=60, deadline=None)
def test_in_one_piece_as_by_the_parts(level: str, events: list[tuple[str, Any]]) -> None:
    """After any history, a step in one piece leaves what the parts leave, and hands the same to the forward."""
    with checks(level):
        worlds = [World.of(open_runtime("cpu"), in_one_piece=one) for one in (True, False)]
        results: list[list[Any]] = [[], []]
        for event, value in events:
            seen = []
            for world, found in zip(worlds, results, strict=True):
                n = len(world.batch)
                longest = int(world.batch.seq_lens.max()) if n else 0
                if event == "join" and n + len(value) <= world.slots.size:
                    world.join(value)
                elif event == "prompts" and n + len(value) <= world.slots.size:
                    world.batch = world.batch.merge(world.prompted(value))
                elif event == "leave":
                    world.leave([row for row in value if row < n])
                elif event == "reorder":
                    world.batch = world.batch.filter(np.random.default_rng(value).permutation(n))
                elif event == "replace" and n:
                    world.batch = world.batch.replace(temperature=np.full(n, value, np.float32))
                elif event == "turn over" and value[1] and n + len(value[1]) <= world.slots.size and longest < LONGEST:
                    step, one = world.turn_over([row for row in value[0] if row < n], *value[1:])
                    assert in_one_piece(step) == world.in_one_piece
                    found.append(step.results["last"].np.tolist() if step.plan.sample_rows.size else None)
                    seen.append(one)
                elif event == "step" and n and longest < LONGEST:
                    step, one = world.step()
                    assert in_one_piece(step) == world.in_one_piece
                    found.append(step.results["last"].np.tolist() if step.plan.sample_rows.size else None)
                    seen.append(one)
            if seen:
                assert seen[0] == seen[1]
        assert results[0] == results[1]
        for world in worlds:
            world.pages.verify()
            world.slots.verify()
            world.relay.check()


def test_on_a_device_that_lags(device: str) -> None:
    """Two steps ahead of the device and over two streams, each token is right, and the results are waited for once."""
    if device != "cpu":
        pytest.skip("the lagging device is a stand-in for one with streams")
    rt = LateRuntime(steps_in_flight=2)
    world = World.of(rt)
    world.join([3, 4, 5])
    rt.synchronize()
    schedule, forward = rt.stream("schedule"), rt.stream("forward")
    tokens, steps = [], []
    with rt.use(schedule):
        for _ in range(6):
            rt.next_step()
            step = world.planner.plan(world.batch)
            with rt.use(forward):
                inputs = step.inputs()
                step.publish(last=rt.launch(torch.add, inputs.input_ids, 1, reads=(inputs.input_ids,)))
            world.batch = step.batch  # type: ignore[assignment]
            steps.append(step)
            if len(steps) > 1:
                tokens.append(steps[-2].results["last"].np.tolist())
    assert tokens == [[10 * slot + k for slot in (1, 2, 3)] for k in range(1, 6)]


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_a_step_is_one_copy_a_gather_and_a_scatter_of_ids_and_a_scatter_where_pages_begin(
    rt: Runtime, level: str
) -> None:
    """One copy to the device and one back, no wait; the table is written in the first two steps, and page by page."""
    with checks(level):
        world = World.of(rt)
        world.join([3] * 8)
        for n in range(8):
            before = rt.counters.snapshot()
            rt.next_step()
            step = world.planner.plan(world.batch)
            inputs = step.inputs()
            step.publish(last=inputs.input_ids)
            spent = rt.counters - before
            world.batch = step.batch  # type: ignore[assignment]
            written = n < 2 or (3 + n) % PAGE_SIZE == 0
            assert (spent.host_to_device_copies, spent.device_to_host_copies) == (1, 1)
            assert spent.device_operations == 2 + written
            assert spent.forced_syncs == spent.fence_waits == 0
            assert spent.device_allocations == 1
            if n > 1 and rt.device.type == "cpu":
                assert spent.staging_allocations == 0
            step.results.resolve()


def test_a_token_table_that_was_written_token_by_token_is_filled_to_the_end_of_each_page(rt: Runtime) -> None:
    """Steps that write whole pages miss no token of a page that began before them, after tokens went back too."""
    world = World.of(rt)
    slots, lens = world.slots.take(3), [5, 8, 2]
    owners = slots.np.repeat(lens)
    extension = world.pages.extend(slots, lens)
    table = world.pages.req_to_token
    assert table is not None
    world.relay.publish(slots, last=slots.np)
    world.batch = world.built(slots, lens)
    world.batch.upload(writes=[table.entry_of(owners, extension.positions, extension.locations.np, slots)])
    for k in range(9):
        if k == 5:  # a token goes back, and comes again
            world.pages.truncate(world.batch.slots, world.batch.seq_lens.np - 1)
            world.batch = world.batch.advance("seq_lens", -1)
        step = world.planner.plan(world.batch)
        step.publish(last=step.inputs().input_ids)
        world.batch = step.batch  # type: ignore[assignment]
        for slot, length in zip(slots.np, world.batch.seq_lens.np, strict=True):
            places = np.arange(length)
            held = world.pages.page_table[slot][places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
            assert rt.inspect(table.memory)[slot][:length].tolist() == held.tolist()


def test_what_a_step_publishes_on_another_stream_comes_behind_reads_and_publishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A publish waits for the gather of another stream, and, where nothing was gathered between, for the publish."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    rt, _ = fake_accelerator(monkeypatch)
    world = World.of(rt)
    world.join([3, 4])
    one, two = rt.stream("one"), rt.stream("two")
    fences: list[Any] = []
    record = rt._fence_behind

    def recorded(stream: Any) -> Any:
        fences.append(record(stream))
        return fences[-1]

    monkeypatch.setattr(rt, "_fence_behind", recorded)

    def run(stream: Any, act: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
        """The events that the stream waits for, and those that are recorded."""
        waited, recorded = len(stream.native.waited), len(fences)
        with rt.use(stream):
            act()
        return stream.native.waited[waited:], [fence.event for fence in fences[recorded:]]

    ids = torch.tensor([1, 2])
    for _ in range(3):
        step = world.planner.plan(world.batch)
        _, events = run(one, step.inputs)
        assert not [event for event in events if event.stream is one.native], "a writer that waits records it"
        waited, events = run(two, lambda step=step: step.publish(last=ids))  # type: ignore[misc]
        gathered, published = events
        assert (gathered.stream, published.stream) == (one.native, two.native)
        assert gathered in waited
        for stream in (one, two):
            world.relay.discard(step.batch["slots"], "last")  # type: ignore[arg-type]
            waited, events = run(stream, lambda step=step: step.publish(last=ids))  # type: ignore[misc]
            assert waited[:1] == [published]
            published = events[-1]
        world.batch = step.batch  # type: ignore[assignment]


def test_what_a_plan_shares_with_its_step_is_read_only(rt: Runtime) -> None:
    """The plan of a decode step is one object, made when it is asked for; its lengths and places cannot be written."""
    world = World.of(rt)
    world.join([3, 4])
    for asked_before in (True, False):
        step = world.planner.plan(world.batch)
        plan = step.plan if asked_before else None
        inputs = step.inputs()
        assert inputs.plan is step.plan
        assert plan in (None, step.plan)
        shared = step.plan.query_lens, step.plan.relay_rows, step.plan.sample_rows  # also with later steps
        for array in (*shared, step.plan.seq_lens, step.plan.extras["slot_mapping"]):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
        refused(Code.FUTURE_CONSUMED, step.inputs)
        step.publish(last=inputs.input_ids)
        world.batch = step.batch  # type: ignore[assignment]


MOST_CALLS = 130
MOST_CALLS_MIXED = 683


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_python_calls_of_a_steady_step(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many for one request as for 256, and not more than are declared here, in a process without test tools."""
    monkeypatch.setattr(Runtime, "remember_memory", False)
    with checks(level):
        counts = [_calls_of_a_step(n) for n in (1, 256)]
    assert counts[0] == counts[1]
    assert counts[0] <= MOST_CALLS


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_python_calls_of_a_mixed_step(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in which one puts in a chunk of its prompt takes as many calls among 256 that decode as among 8."""
    monkeypatch.setattr(Runtime, "remember_memory", False)
    with checks(level):
        counts = [_calls_of_a_step(n, chunks=True) for n in (8, 256)]
    assert counts[0] == counts[1]
    assert counts[0] <= MOST_CALLS_MIXED


def _calls_of_a_step(n: int, *, chunks: bool = False) -> int:
    rt = open_runtime("cpu")
    world = World.of(rt, n + chunks, pages=8 * n)
    world.join([5] * n)  # in the last three steps no page begins, and what stays was made before them
    tokens: dict[str, Any] = {}
    if chunks:
        world.batch = world.batch.merge(world.prompted([LONGEST]))
        queries = np.ones(n + 1, dtype=np.int64)
        queries[n] = 2
        tokens = {"query_lens": queries, "prompt_ids": [None] * n + [[7, 8]], "samples": queries == 1}
    calls, counts = 0, []

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = None
    with no_collector():
        for left in reversed(range(11)):
            calls = 0
            sys.setprofile(count)
            try:
                rt.next_step()
                step = world.planner.plan(world.batch, **tokens)
                inputs = step.inputs()
                step.publish(last=inputs.input_ids[:n])
                if before is not None:
                    before.results.resolve()
            finally:
                sys.setprofile(None)
            world.batch = step.batch  # type: ignore[assignment]
            before = step
            if left < 3:
                counts.append(calls)
    return min(counts)  # one of three takes staging memory back, if no check does that in each


def test_what_is_broken_is_reported_as_by_the_parts(rt: Runtime) -> None:
    """Stale handles, a plan used twice, ids that are missing or unread: the same codes."""
    for in_one_piece in (True, False):
        world = World.of(rt, in_one_piece=in_one_piece)
        world.join([3, 4])
        world.step()
        gone = world.batch
        world.leave([0])
        with pytest.raises(Violation) as caught:
            world.planner.plan(gone)
        assert caught.value.code is Code.SLOT_STALE_HANDLE
        world.step()

        step = world.planner.plan(world.batch)
        step.inputs()
        refused(Code.FUTURE_CONSUMED, step.inputs)
        later = world.planner.plan(step.batch)
        with pytest.raises(Violation) as caught:  # nothing was published for it
            later.inputs()
        assert caught.value.code is Code.FUTURE_CONSUMED
        step.publish(last=torch.zeros(1, dtype=torch.int64, device=rt.device))
        with pytest.raises(Violation) as caught:
            step.publish(last=torch.zeros(1, dtype=torch.int64, device=rt.device))
        assert caught.value.code is Code.FUTURE_UNREAD_OVERWRITTEN


def test_a_plan_is_refused_once_its_pages_have_changed(rt: Runtime) -> None:
    """Tokens taken back behind a planned step, and lengths that are not those of the pages, are DERIVED_STALE."""
    for in_one_piece in (True, False):
        world = World.of(rt, in_one_piece=in_one_piece)
        world.join([3, 4])
        step = world.planner.plan(world.batch)
        world.pages.truncate(world.batch.slots, [3, 4])
        refused(Code.DERIVED_STALE, step.inputs)
        world.batch = world.batch.replace(seq_lens=[3, 3])
        with pytest.raises(Violation) as caught:
            world.planner.plan(world.batch)
        assert caught.value.code is Code.DERIVED_STALE
        assert world.pages.committed(world.batch.slots).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("arguments", "in_one_piece"),
    [
        ({"query_lens": np.ones(2, np.int64), "prompt_ids": [None, None], "samples": np.ones(2, np.bool_)}, True),
        ({"query_lens": [1, 1]}, False),
        ({"samples": np.array([True, False])}, False),
        ({"pad_rows": 4, "pad_tokens": 4}, False),
    ],
)
def test_what_is_a_decode_step(rt: Runtime, arguments: dict[str, Any], in_one_piece: bool) -> None:
    """Arrays that say so make a decode step too; all others are composed, and requests get the same ids."""
    world = World.of(rt)
    world.join([3, 4])
    step = world.planner.plan(world.batch, **arguments)
    assert isinstance(step, DecodeStep) == in_one_piece
    inputs = step.inputs()
    assert rt.inspect(inputs.input_ids)[:2].tolist() == [10, 20]
    assert (len(step.batch), step.sent.num_rows) == (2, arguments.get("pad_rows", 2))


@pytest.mark.parametrize(
    "arguments",
    [
        {"query_lens": np.ones(3, np.int64)},
        {"prompt_ids": [None]},
        {"samples": np.ones(1, np.bool_)},
        {"pad_rows": 1},
        {"pad_tokens": 1},
        {"query_lens": "one"},
        {"query_lens": -1},
    ],
)
def test_arguments_that_do_not_go_with_the_batch(rt: Runtime, arguments: dict[str, Any]) -> None:
    """Refused by a typed error, and no token is committed."""
    world = World.of(rt)
    world.join([3, 4])
    with pytest.raises(BatchStateError):
        world.planner.plan(world.batch, **arguments)
    assert world.pages.committed(world.batch.slots).tolist() == [3, 4]


def test_pages_run_out(rt: Runtime) -> None:
    """A step that needs a page more than there are commits nothing, and succeeds once there is one."""
    world = World.of(rt, pages=2)
    world.join([PAGE_SIZE, PAGE_SIZE])
    with pytest.raises(PoolExhaustedError):
        world.planner.plan(world.batch)
    assert world.pages.committed(world.batch.slots).tolist() == [PAGE_SIZE, PAGE_SIZE]
    world.leave([0])
    world.step()
    assert world.batch.seq_lens.np.tolist() == [PAGE_SIZE + 1]


def test_pages_behind_a_fence_that_completes(device: str) -> None:
    """A step finds the pages that a fence has made free since the last call."""
    if device != "cpu":
        pytest.skip("the lagging device is a stand-in for one with streams")
    rt = LateRuntime(steps_in_flight=4)
    world = World.of(rt, pages=2)
    world.join([PAGE_SIZE, 2])
    world.leave([1])
    with pytest.raises(PoolExhaustedError):
        world.planner.plan(world.batch)
    rt.complete(100)
    world.planner.plan(world.batch)


def test_the_longest_request(rt: Runtime) -> None:
    """A token more than a request may have is refused before anything changes."""
    world = World.of(rt)
    world.join([LONGEST])
    refused(Code.LENGTH_ORDER, lambda: world.planner.plan(world.batch))
    assert world.pages.committed(world.batch.slots).tolist() == [LONGEST]


@pytest.mark.parametrize("left", [None, 2])
def test_a_row_of_the_token_table_may_end_within_a_page(rt: Runtime, left: int | None) -> None:
    """A page that begins there is written to the end of the row, and not into the next one, also where one leaves."""
    world = World.of(rt, longest=LONGEST - 2)
    world.join([LONGEST - 6, 5, 3])
    assert world.batch.slots.np.tolist() == [1, 2, 3]
    for k in range(4):
        world.step(**{"keep": [0, 1], "after": rt.record()} if k == left else {})
        check_rows_of_the_table(world)


def test_several_fields_are_published_together(rt: Runtime) -> None:
    """A field that only the host reads goes there beside the ids."""
    world = World.of(rt, results=("last", "logit"))
    world.join([3, 4])
    for k in range(3):
        step = world.planner.plan(world.batch)
        inputs = step.inputs()
        step.publish(last=inputs.input_ids + 1, logit=torch.full((2,), float(k), device=rt.device))
        world.batch = step.batch  # type: ignore[assignment]
        assert step.results["last"].np.tolist() == [11 + k, 21 + k]
        assert step.results["logit"].np.tolist() == [k, k]


def test_device_columns_extras_and_table_writes(rt: Runtime) -> None:
    """Columns on the device alone, arrays and writes of the engine go with a decode step in one piece, in one copy."""

    class Hidden(Batch):
        slots = slot_column()
        seq_lens = mirrored(torch.int64)
        state = device_only(torch.float32, shape=(2,))

    slots = SlotPool(rt, 4)
    table = slots.table("req_to_token", (LONGEST,), torch.int32, holds="location")
    marks = slots.table("marks", (), torch.int64)
    pages = PagePool(rt, slots, 16, PAGE_SIZE, max_tokens_per_request=LONGEST, req_to_token=table)
    relay = FutureMap(slots, {"last": relay_field(torch.int64, read_by="both")})
    planner = StepPlanner(Hidden, pages=pages, relay=relay, ids="last", results=("last",))
    taken = slots.take(2)
    state = rt.upload([np.arange(4, dtype=np.float32).reshape(2, 2)]).view(0)
    extension = pages.extend(taken, [3, 3])
    batch = Hidden.build(rt, slots=taken, seq_lens=[3, 3], state=state)
    batch.upload(writes=[extension.entry()])
    relay.publish(taken, last=[5, 6])
    for k in range(1, 4):
        before = rt.counters.snapshot()
        write = marks.entry(batch.slots, None, [k, 10 * k])
        step = planner.plan(batch, writes=[write], extras={"salt": np.array([k])})
        assert isinstance(step, DecodeStep)
        inputs = step.inputs()
        spent = rt.counters - before
        assert (spent.host_to_device_copies, spent.device_operations) == (1, 3)  # two scatters and a gather
        assert rt.inspect(step.extras["salt"]).tolist() == [k]
        assert rt.inspect(marks.memory)[[1, 2]].tolist() == [k, 10 * k]
        state = step.batch["state"].device + 1
        step.publish(last=inputs.input_ids + 1)
        batch = step.batch.replace(state=state)  # type: ignore[assignment]
    assert rt.inspect(batch["state"].device).tolist() == [[3, 4], [5, 6]]
    before = rt.counters.snapshot()
    planner.plan(batch, writes=[table.entry(batch.slots, [LONGEST - 1] * 2, [1, 2])])
    assert (rt.counters - before).device_operations == 1, "a further write to the token table goes with the step's own"
    assert rt.inspect(table.memory)[[1, 2], -1].tolist() == [1, 2]


def test_full_compares_the_copy_of_the_step(rt: Runtime) -> None:
    """At `full` what crossed with a step is compared with its columns, and is what reading a column gives."""
    world = World.of(rt)
    world.join([3, 4])
    world.step()
    with checks("full"):
        before = rt.counters.snapshot()
        step = world.planner.plan(world.batch)
        assert step.batch["seed"].device.tolist() == [1, 2]
        assert (rt.counters - before).host_to_device_copies == 1
        wrong = changed(
            "step:StepPlanner._piece",
            "columns = moved.groups",
            "columns = [one[:, rows * 0] for one in moved.groups]",
        )
        with wrong, pytest.raises(Violation) as caught:
            world.planner.plan(step.batch, keep=[0, 1], joining=world.arrived([2]), published={"last": [5]})
        assert (caught.value.code, caught.value.row) == (Code.MIRROR_EQUAL, 1)
        assert world.pages.committed(world.batch.slots).tolist() == [5, 6]  # of the last step: nothing is half done
        world.pages.verify()


def test_columns_written_from_outside_are_noticed(rt: Runtime) -> None:
    """A write into a column's device side is reported by the next step; one into an input of the forward is its own."""
    world = World.of(rt)
    world.join([3, 4])
    step = world.planner.plan(world.batch)
    inputs = step.inputs()
    inputs.positions.add_(1)
    inputs.kv_lens.add_(1)
    step.publish(last=inputs.input_ids)
    world.planner.plan(step.batch).inputs()
    step.batch["temperature"].device.add_(1)
    refused(Code.MIRROR_FOREIGN_WRITE, lambda: world.planner.plan(step.batch))


MISTAKES: dict[str, tuple[dict[str, Any], type[BatchStateError]]] = {
    "no such column": ({"seq_lens": "lens"}, DeclarationError),
    "a column of pairs": ({"seq_lens": "pair"}, DeclarationError),
    "no such field": ({"ids": "tokens"}, DeclarationError),
    "no such result": ({"results": ("tokens",)}, DeclarationError),
    "no such lengths": ({"lengths": "tokens"}, DeclarationError),
    "no pages": ({"pages": None}, ArgumentError),
    "no relay": ({"relay": 3}, ArgumentError),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_declaration(rt: Runtime, mistake: str) -> None:
    """Each is refused by a typed error when the planner is made."""
    changed, error = MISTAKES[mistake]
    world = World.of(rt)
    with pytest.raises(error):
        StepPlanner(Running, **{"pages": world.pages, "relay": world.relay, "ids": "last", **changed})


def test_parts_of_two_pools(rt: Runtime) -> None:
    """Pages and relay of two slot pools, and a class that is no batch, are refused; results need a publish."""
    world, other = World.of(rt), World.of(rt)
    with pytest.raises(ArgumentError):
        StepPlanner(Running, pages=world.pages, relay=other.relay, ids="last")
    with pytest.raises(ArgumentError):
        StepPlanner(int, pages=world.pages, relay=world.relay, ids="last")  # type: ignore[arg-type]
    world.join([3])
    with pytest.raises(ArgumentError):
        _ = world.planner.plan(world.batch).results
    for wrong in (None, RunningToo.empty(rt)):
        with pytest.raises(ArgumentError):
            world.planner.plan(wrong)  # type: ignore[arg-type]


def test_a_failed_upload_commits_nothing(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools are whole after it, and the same step succeeds later."""
    world = World.of(rt)
    world.join([PAGE_SIZE, 3])  # one of them needs a page
    world.step()

    def fails(*arguments: Any, **named: Any) -> None:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(type(rt), "send", fails)
        with pytest.raises(MemoryError):
            world.planner.plan(world.batch)
    world.pages.verify()
    world.slots.verify()
    assert world.pages.committed(world.batch.slots).tolist() == [PAGE_SIZE + 1, 4]
    _, seen = world.step()
    assert seen["kv_lens"] == [PAGE_SIZE + 2, 5]


@pytest.mark.parametrize("mixed", [False, True])
def test_each_invariant_is_asked_once(rt: Runtime, mixed: bool) -> None:
    """What the parts check in a step is checked in one piece too, and not once for each part."""
    asked: dict[bool, dict[Code, int]] = {}
    for in_one_piece in (True, False):
        with checks("cheap"):
            world = World.of(rt, in_one_piece=in_one_piece)
            world.join([5, 6, 7])
            if mixed:
                world.batch = world.batch.merge(world.prompted([9]))
            before: dict[Code, int] = {}
            for _ in range(3):
                before = dict(times_checked)
                rt.next_step()
                step = world.planner.plan(world.batch, **world.tokens())
                inputs = step.inputs()
                step.publish(last=inputs.input_ids[inputs.last_token_indices])
                step.results.resolve()
                world.batch = step.batch  # type: ignore[assignment]
            asked[in_one_piece] = {code: times - before[code] for code, times in times_checked.items()}
    parts = {code for code, times in asked[False].items() if times}
    piece = {code for code, times in asked[True].items() if times}
    # Asked by torch's count of writes, in one look; of handles, of which slot 0 is none; and of handles when these
    # requests first came, and after their pool took or freed.
    lost = {Code.MIRROR_FOREIGN_WRITE, Code.SLOT_ZERO_ALLOCATED}
    assert parts - piece == (lost if mixed else lost | {Code.SLOT_STALE_HANDLE})
    assert sum(asked[True].values()) < sum(asked[False].values()) / (1.5 if mixed else 2)


def test_extras_with_names_of_the_planner(rt: Runtime) -> None:
    """An extra array is not named like one that a mixed step sends to the forward: it is refused before anything."""
    world = World.of(rt)
    world.join([3])
    world.batch = world.batch.merge(world.prompted([4]))
    with pytest.raises(DeclarationError, match="positions"):
        world.planner.plan(world.batch, **world.tokens(), extras={"positions": np.arange(3)})
    assert world.pages.committed(world.batch.slots).tolist() == [3, 0]


def test_no_step_is_planned_while_a_graph_is_captured(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything changes, and the step is planned once the capture is over."""
    world = World.of(rt)
    world.join([PAGE_SIZE, 3])
    world.step()
    allocated = world.pages.allocated(world.batch.slots).tolist()
    before = rt.counters.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(type(rt), "capturing", property(lambda runtime: True))
        with pytest.raises(CaptureError):
            world.planner.plan(world.batch)
    assert (rt.counters - before).host_to_device_copies == 0
    assert world.pages.allocated(world.batch.slots).tolist() == allocated
    world.step()


def test_a_mask_that_keeps_all_changes_nothing_of_the_batch_given(rt: Runtime) -> None:
    """The lengths move on in the batch of the step alone: that of the step before stays what it was."""
    world = World.of(rt)
    world.join([3, 5])
    before = world.batch
    step, _ = world.step(keep=np.ones(2, dtype=np.bool_))
    assert before.seq_lens.np.tolist() == [3, 5]
    assert step.batch["seq_lens"].np.tolist() == [4, 6]


@pytest.mark.parametrize("joining", [5, [1], "a"])
def test_what_joins_has_to_be_a_batch(rt: Runtime, joining: Any) -> None:
    """Anything else is refused with a typed error, and no slot is released."""
    world = World.of(rt)
    world.join([3, 5])
    with pytest.raises(DeclarationError, match="expected another Running"):
        world.planner.plan(world.batch, keep=[0], joining=joining)
    assert world.slots.stats.live == 2


@pytest.mark.parametrize("in_one_piece", [True, False])
@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_requests_join_as_columns(rt: Runtime, in_one_piece: bool, level: str) -> None:
    """The step takes slots and pages, and is the one in which a batch of the same requests joins."""
    seen, first = [], {"last": [70, 80]}
    with checks(level):
        for as_columns in (True, False):
            world = World.of(rt, in_one_piece=in_one_piece)
            world.join([3, 5, 2])
            world.step()
            keep, lens = np.array([True, False, True]), [6, 4]
            joining: Any = columns(np.arange(2), lens)
            if not as_columns:
                joining = Running.build(rt, slots=world.pages.take_requests(lens), **joining)
            step = world.planner.plan(world.batch, keep=keep, joining=joining, after=rt.record(), published=first)
            inputs = step.inputs()
            step.publish(last=inputs.input_ids + 1)
            table = world.pages.req_to_token
            assert table is not None
            arrays = inputs.input_ids, inputs.positions, inputs.kv_lens, table.memory
            seen.append(
                (
                    {name: column.tolist() for name, column in step.batch.to_dict().items()},  # type: ignore[union-attr]
                    [rt.inspect(array).tolist() for array in arrays],
                    (world.slots.stats.live, world.pages.stats.live),
                    step.results["last"].np.tolist(),
                )
            )
            world.slots.verify()
    assert seen[0] == seen[1]


def test_a_request_that_joins_may_have_its_slot(rt: Runtime) -> None:
    """One that begins with shared pages takes it before; slots of another pool, or that leave, are refused."""
    world = World.of(rt)
    world.join([4, 5])
    slots = world.slots.take(1)
    source: Any = world.batch.filter([0])["slots"]
    world.pages.share(source, slots, 4)
    step = world.planner.plan(
        world.batch, joining={"slots": slots, **columns(np.arange(1), [4])}, published={"last": [7]}
    )
    assert step.inputs().input_ids.tolist() == [10, 20, 7]
    assert step.batch["slots"].np[-1] == slots.np[0]
    for other in (SlotPool(rt, 3).take(1), step.batch.filter([0])["slots"]):
        with pytest.raises(ArgumentError, match=r"of pools|leave and join"):
            world.planner.plan(step.batch, keep=[1, 2], joining={"slots": other, **columns(np.arange(1), [4])})
    assert world.slots.stats.live == 3


@given(
    seed=st.integers(0, 2**32),
    level=st.sampled_from(["off", "cheap", "full"]),
    mixed=st.booleans(),
    in_one_piece=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_turn_overs_that_fail_are_taken_back(seed: int, level: str, mixed: bool, in_one_piece: bool) -> None:
    """Copies, launches and fences that fail leave all as it was, and the step that is planned again is right."""
    rng = np.random.default_rng(seed)
    with checks(level):
        worlds = [World.of(open_runtime("cpu"), in_one_piece=True) for _ in range(2)]
        for world in worlds:
            world.join([3, 6, 2, 7])
            if not in_one_piece:
                world.planner._steps = None
        failed, twin = worlds
        for _ in range(6):
            gone = rng.permutation(len(twin.batch))[: rng.integers(0, 3)].tolist()
            lens = rng.integers(1, 9, size=rng.integers(0, 3)).tolist()
            prompted = mixed and bool(rng.integers(2))
            if len(twin.batch) == len(gone) or len(twin.batch) + len(lens) > twin.slots.size:
                continue
            if int(twin.batch.seq_lens.max()) >= LONGEST - 1:
                break
            prompts, seen = dict(failed.prompts), []
            before = state_of(failed)
            failed.fails = (
                (failed.rt, "_copied_to_device", 1),
                (failed.rt, "launch", 1),
                (failed.rt, "launch", 2),
                (failed.pages, "query_fences", 1),
            )[rng.integers(4)]
            try:
                seen.append(failed.turn_over(gone, lens, prompted, as_columns=True)[1])
            except PlantedError:
                failed.prompts = prompts
                assert state_of(failed) == before
            failed.fails = None
            if not seen:
                seen.append(failed.turn_over(gone, lens, prompted, as_columns=True)[1])
            seen.append(twin.turn_over(gone, lens, prompted)[1])
            for one in seen:  # others of the free pages may have come
                for name in ("slot_mapping", "table", "table on the host", "slots, device", "slots"):
                    one.pop(name, None)
            assert seen[0] == seen[1]
            for world in worlds:
                check_rows_of_the_table(world)
                world.slots.verify()
                world.relay.check()


def state_of(world: World) -> object:
    """What a plan that fails leaves as it was."""
    slots, pages = world.slots.stats, world.pages.stats
    states = world.relay.states(world.batch["slots"], "last")  # type: ignore[arg-type]
    lens = world.pages.committed_lengths.tolist()
    return slots.free, slots.pending, slots.live, pages, lens, states, world.batch.to_dict()["seq_lens"].tolist()  # type: ignore[union-attr]


def check_rows_of_the_table(world: World) -> None:
    """Each row of the token table says where the tokens of its request lie."""
    slots: Any = world.batch["slots"]
    memory = world.rt.inspect(world.pages.req_to_token.memory)  # type: ignore[union-attr]
    for i, n in enumerate(world.batch["seq_lens"].np.tolist()):
        one = slots.filter([i])
        table = world.pages._table
        row = int(one.np[0])
        wanted = table.locations_at(np.full(n, row), np.arange(n))
        assert memory[row, :n].tolist() == wanted.tolist()


@pytest.mark.parametrize("in_one_piece", [True, False])
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"seq_lens": None}, DeclarationError),  # none
        ({"seq_lens": [3, 4, 5]}, ShapeError),
        ({"greedy": [0.5, 1.0]}, DtypeError),
        ({"further": [1, 2]}, DeclarationError),
        ({"slots": [1, 2]}, DtypeError),
        ({"seq_lens": [3, LONGEST + 1]}, Violation),
        ({"seq_lens": [LONGEST - 1, LONGEST - 1]}, PoolExhaustedError),
        ({"published": 3}, ArgumentError),
        ({"published": {"last": [1]}}, ShapeError),
        ({"published": {"other": [1, 2]}}, DeclarationError),
        ({"extras": {"x": object()}}, BatchStateError),
    ],
)
def test_columns_that_do_not_join_change_nothing(
    rt: Runtime, in_one_piece: bool, given: dict[str, Any], error: type[Exception]
) -> None:
    """Nothing is taken, released or published: the same call without the mistake goes through."""
    world = World.of(rt, pages=10, in_one_piece=in_one_piece)
    world.join([3, 5])

    def state() -> object:
        slots, pages = world.slots.stats, world.pages.stats
        return slots.free, slots.pending, slots.live, pages, world.pages.committed_lengths.tolist()

    before, keep = state(), [1]
    options: dict[str, Any] = {"published": {"last": [7, 8]}, "after": rt.record()}
    joining = columns(np.arange(2), [3, 4])
    for name, value in given.items():
        (options if name in ("published", "extras") else joining)[name] = value
    joining = {name: value for name, value in joining.items() if value is not None}
    with pytest.raises(error):
        world.planner.plan(world.batch, keep=keep, joining=joining, **options)
    assert state() == before
    world.slots.verify()
    first = {"last": [7, 8]}
    step = world.planner.plan(world.batch, keep=keep, joining=columns(np.arange(2), [3, 4]), published=first)
    assert step.inputs().input_ids.tolist() == [20, 7, 8]


def test_requests_leave_and_join_in_one_copy(rt: Runtime) -> None:
    """Columns, token rows, first ids and the step itself cross together: two scatters more than none, no wait."""
    world = World.of(rt)
    world.join([3] * 4)
    world.step()
    for gone in ([0], [1, 3]):
        joining = world.arrived([5, 6][: len(gone)])
        keep = np.ones(4, dtype=np.bool_)
        keep[gone] = False
        before = rt.counters.snapshot()
        step = world.planner.plan(
            world.batch,
            keep=keep,
            joining=joining,
            after=rt.record(),
            published={"last": 10 * joining.slots.np},
            writes=[world.pages.entry(joining.slots)],
        )
        inputs = step.inputs()
        spent = rt.counters - before
        assert (spent.host_to_device_copies, spent.device_operations, spent.forced_syncs) == (1, 3, 0)
        step.publish(last=inputs.input_ids + 1)
        world.batch = step.batch  # type: ignore[assignment]
        assert world.batch.seq_lens.np[-1] == joining.seq_lens.np[-1] + 1
        assert world.slots.stats.live == 4


@pytest.mark.parametrize("published", [None, {"logit": [1.0]}])
def test_a_request_that_joins_without_its_first_token_is_noticed(rt: Runtime, published: dict[str, Any] | None) -> None:
    """Entries of those that stay are not read again; one that joins has to have one, whatever else it has."""
    world = World.of(rt)
    world.join([3, 4])
    world.step()
    joining = world.arrived([5])
    keep = np.array([False, True])
    step = world.planner.plan(world.batch, keep=keep, joining=joining, after=rt.record(), published=published)
    violation = refused(Code.FUTURE_UNWRITTEN, step.inputs)
    assert (violation.slot, violation.row) == (int(joining.slots.np[0]), 1)


def test_what_happens_to_those_that_stay_between_two_steps_is_noticed(rt: Runtime) -> None:
    """An entry that was discarded, or taken, since the step before is none for the step in which others join."""
    for code, act in ((Code.FUTURE_UNWRITTEN, "discard"), (Code.FUTURE_CONSUMED, "gather")):
        world = World.of(rt)
        world.join([3, 4])
        world.step()
        getattr(world.relay, act)(world.batch.filter([1]).slots, "last")
        joining = world.arrived([5])
        first = {"last": 10 * joining.slots.np}
        keep = np.array([False, True])
        step = world.planner.plan(world.batch, keep=keep, joining=joining, after=rt.record(), published=first)
        assert refused(code, step.inputs).row == 0


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_a_turn_over_that_fails_changes_nothing(rt: Runtime, in_one_piece: bool, monkeypatch: Any) -> None:
    """Handles that are stale, a relay field that is none, and a copy that fails: all are where they were."""
    world = World.of(rt, in_one_piece=in_one_piece)
    world.join([3, 4])
    world.step()
    joining = world.arrived([2])
    keep = np.array([False, True])

    def plan(**options: Any) -> None:
        world.planner.plan(world.batch, **{"keep": keep, "joining": joining, "published": {"last": [7]}, **options})

    def fails(*arguments: Any, **named: Any) -> None:
        raise MemoryError("planted")

    wrong: list[dict[str, Any]] = [
        {"after": 3},
        {"published": {"tokens": [1]}},
        {"joining": None},
        {"keep": [0, 5]},
        {"published": None, "keep": None, "joining": None, "after": 3},
        {"joining": RunningToo.empty(rt)},
    ]
    for options in wrong:
        with pytest.raises(BatchStateError):
            plan(**options)
    with monkeypatch.context() as patch:
        patch.setattr(type(rt), "send", fails)
        with pytest.raises(MemoryError):
            plan()
    world.pages.verify()
    world.slots.verify()
    assert world.pages.committed(world.batch.slots).tolist() == [4, 5]
    assert world.pages.committed(joining.slots).tolist() == [2]
    plan()
    assert world.slots.stats.live == 2
    refused(Code.SLOT_DOUBLE_FREE, lambda: world.planner.plan(world.batch, keep=keep))


def test_requests_arrive_with_pages(rt: Runtime) -> None:
    """Slots and pages of many are taken together or not at all, and their token rows are what `extend` would write."""
    world = World.of(rt, pages=4)
    for lens in ([5, 9, 1], [LONGEST + 1]):
        with pytest.raises((PoolExhaustedError, Violation)):
            world.pages.take_requests(lens)
        assert (world.slots.stats.live, world.pages.stats.live) == (0, 0)
    slots = world.pages.take_requests([5, 0, 8])
    assert world.pages.committed(slots).tolist() == [5, 0, 8]
    assert world.pages.locations(slots.split([2, 1])[1], 0, 8).np.tolist() == [12, 13, 14, 15, 16, 17, 18, 19]
    table = world.pages.req_to_token
    assert table is not None
    world.pages.entry(slots).launch()
    rows = rt.inspect(table.memory)[slots.np]
    assert rows[0, :8].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert rows[1].tolist() == [0] * LONGEST
    assert rows[2, :8].tolist() == [12, 13, 14, 15, 16, 17, 18, 19]
    narrow = world.slots.table("narrow", (8,), torch.int64, holds="location")
    with checks("full"):
        world.pages.entry(slots, narrow).launch()
    assert rt.inspect(narrow.memory)[slots.np].tolist() == rows[:, :8].tolist()
    too_narrow = world.slots.table("too narrow", (7,), torch.int64, holds="location")
    with pytest.raises(BatchStateError):
        world.pages.entry(slots, too_narrow)
    with pytest.raises(BatchStateError):
        world.pages.take_requests(3)
    world.pages.release_requests(slots)
    world.slots.expect_idle()


def test_handles_of_many_are_joined_at_once(rt: Runtime) -> None:
    """As merging them one by one, whatever they are, in a few calls for each."""
    pool, other = SlotPool(rt, 300), SlotPool(rt, 3)
    parts = [pool.take(n % 3) for n in range(256)]
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        joined = type(parts[0]).cat(parts)
    finally:
        sys.setprofile(None)
    assert joined.np.tolist() == [slot for part in parts for slot in part.np.tolist()]
    assert joined.generations.tolist() == [1] * len(joined)
    pool.check_handles(joined, "test")
    assert calls < 5 * len(parts)
    assert parts[1].device.tolist() == parts[1].np.tolist()  # it has a device side from here on
    assert type(joined).cat(parts).device.tolist() == joined.np.tolist()
    with pytest.raises(ArgumentError):
        type(joined).cat([joined, other.take(1)])


def test_joined_handles_are_checked_once_a_side_was_read(rt: Runtime) -> None:
    """A handle whose device side, host tensor or window somebody has is checked before it is joined with others."""
    pool = SlotPool(rt, 8)

    def parts() -> list[Slots]:
        return [pool.take(1), pool.take(1)]

    with checks("cheap"):
        for side in ("device", "host", "device_side"):
            first, second = parts()
            theirs = getattr(second, side)
            joined = Slots.cat([first, second])
            assert joined.device.tolist() == [*first.np.tolist(), *second.np.tolist()]
            (theirs.tensor(rt) if side == "device_side" else theirs).add_(1)
            with pytest.raises(Violation, match="MIRROR_FOREIGN_WRITE"):
                Slots.cat([first, second])
            pool.free(first)
        first, second = parts()
        with second.stale("host", reason="being resolved"):
            joined = Slots.cat([first, second])
            with pytest.raises(Violation, match="MIRROR_STALE_READ"):
                _ = joined.np


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_rows_of_requests_that_arrive_are_written_with_the_step(rt: Runtime, in_one_piece: bool) -> None:
    """No caller has to name them, and a caller that has written or names them does no harm."""
    world = World.of(rt, in_one_piece=in_one_piece)
    world.join([3])
    table = world.pages.req_to_token
    assert table is not None
    for named in ("by the step", "before it", "with it"):
        joining = world.arrived([6])
        entry = world.pages.entry(joining.slots)
        if named == "before it":
            entry.launch()
        with checks("full"):
            world.step(joining=joining, published={"last": [7]}, writes=[entry] if named == "with it" else [])
        row = rt.inspect(table.memory)[joining.slots.np[0], :7]
        assert row.tolist() == world.pages.locations(joining.slots, 0, 7).np.tolist()


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_whole_steps_in_inference_mode(rt: Runtime, every: int, level: str) -> None:
    """As engines run them: all of each step in torch's inference mode, or of some, with requests that stay or not."""
    for churn in (0, 2):
        with checks(level):
            steady = Steady(rt, 8, churn)
            for step in range(11):
                with torch.inference_mode(step % every == 0):
                    steady.step()
            assert max(steady.step().ids.tolist()) == (4 if churn else 12)


@pytest.mark.parametrize("at", [1, 2])
def test_slots_written_by_a_forward_are_noticed_in_any_step(at: int) -> None:
    """The slots of a decode step are those of the next ones too: nothing is read or published by what was written."""
    with open_runtime("cpu") as rt:
        world = World.of(rt)
        world.join([3, 4])
        for _ in range(at):
            world.step()
        step = world.planner.plan(world.batch)
        inputs = step.inputs()
        inputs.slots.fill_(1)
        with pytest.raises(Violation) as caught:
            step.publish(last=inputs.input_ids + 1)
        assert (caught.value.code, caught.value.column) == (Code.MIRROR_FOREIGN_WRITE, "slots")
        again = world.planner.plan(step.batch)  # sends them again
        world.relay.publish(world.batch.slots, last=[7, 8])
        assert again.inputs().slots.tolist() == [1, 2]


@pytest.mark.parametrize("in_one_piece", [True, False])
@pytest.mark.parametrize("dropped", [0, 1, 3])
def test_tokens_of_a_step_that_was_never_launched_are_not_written(dropped: int, in_one_piece: bool) -> None:
    """A step that was planned and whose forward never ran leaves a gap: a prefix over it cannot be held."""
    with open_runtime("cpu") as rt:
        world = World.of(rt, in_one_piece=in_one_piece)
        world.join([3, 4])
        for turn in range(5):
            if turn != dropped:
                world.step()
                continue
            rt.next_step()
            world.batch = world.planner.plan(world.batch).batch  # type: ignore[assignment]
        refused(Code.PAGE_UNWRITTEN, lambda: world.pages.hold(world.batch.filter([0]).slots, 8))


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_what_a_step_finds_is_published_for_its_own_requests_alone(rt: Runtime, in_one_piece: bool) -> None:
    """A request that has left since the step was planned has no entry, and the one that has its slot keeps its own."""
    for level in ("off", "cheap"):
        with checks(level):
            world = World.of(rt, in_one_piece=in_one_piece)
            world.join([3, 4])
            step = world.planner.plan(world.batch)
            ids = step.inputs().input_ids + 1
            world.pages.release_requests(world.batch.filter([0]).slots)
            refused(Code.SLOT_STALE_HANDLE, lambda step=step, ids=ids: step.publish(last=ids))  # type: ignore[misc]
            later = world.slots.take(1)
            world.relay.publish(later, last=[70])
            refused(Code.SLOT_STALE_HANDLE, lambda step=step, ids=ids: step.publish(last=ids))  # type: ignore[misc]
            assert rt.inspect(world.relay.gather(later, "last")).tolist() == [70]


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_no_inputs_for_requests_that_left(rt: Runtime, in_one_piece: bool) -> None:
    """At any level, as by the parts."""
    with checks("off"):
        world = World.of(rt, in_one_piece=in_one_piece)
        world.join([3, 4])
        step = world.planner.plan(world.batch)
        world.pages.release_requests(world.batch.filter([0]).slots)
        refused(Code.SLOT_STALE_HANDLE, step.inputs)


def test_a_batch_of_another_runtime_is_refused() -> None:
    """Also one whose rows have the same number there, as after the same calls."""
    with open_runtime("cpu") as one, open_runtime("cpu") as other:
        worlds = [World.of(rt) for rt in (one, other)]
        for world in worlds:
            world.join([3, 4])
            world.step()
        with pytest.raises(DeviceError):
            worlds[0].planner.plan(worlds[1].batch)


@pytest.mark.parametrize("has_ids", [True, False])
def test_another_rank_has_the_inputs_of_a_planned_step(rt: Runtime, has_ids: bool) -> None:
    """The plan of a step in one piece says what the plan of the parts does, and travels as that does."""
    for chunks in (False, True):
        found = []
        for in_one_piece in (True, False):
            ranks = [World.of(rt, in_one_piece=in_one_piece) for _ in range(2)]
            for world in ranks:
                world.join([3, 4])
            first, other = ranks
            options: dict[str, Any] = {"relay": first.relay, "ids": "last"} if has_ids else {"has_ids": False}
            planner = StepPlanner(Running, pages=first.pages, window=4, **options)
            if not in_one_piece:
                planner._steps = None
            plan = planner.plan(first.batch, 0 if chunks else 1, samples=np.full(2, not chunks)).plan
            other.pages.advance(other.batch.slots, 0 if chunks else 1)
            theirs = ForwardPlan.from_bytes(plan.to_bytes(), other.slots, pages=other.pages)
            names = "has_ids", "deferred", "int32", "relay_rows", "sample_rows", "query_lens", "seq_lens", "_reach"
            found.append([np.asarray(getattr(theirs, name)).tolist() for name in names])
            inputs = other.relay.resolve_forward_inputs(theirs, theirs.upload(), ids="last" if has_ids else ())
            for name in ("slots", "positions", "query_start_loc", "kv_lens", "last_token_indices", "slot_mapping"):
                tensor = getattr(inputs, name)
                found[-1].append([str(tensor.dtype), *rt.inspect(tensor).tolist()])
            if has_ids:
                found[-1].append(rt.inspect(inputs.input_ids).tolist())
        assert found[0] == found[1]


@pytest.mark.parametrize("query_lens", [np.ones(2), np.ones(2, np.bool_), np.array([1, 1], object)])
def test_counts_of_tokens_are_integers_in_a_decode_step_too(rt: Runtime, query_lens: Any) -> None:
    """Whatever number an array holds, one of floats, booleans or objects is refused."""
    world = World.of(rt)
    world.join([3, 4])
    with pytest.raises(DtypeError):
        world.planner.plan(world.batch, query_lens)


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_a_request_does_not_leave_and_join_at_once(rt: Runtime, in_one_piece: bool) -> None:
    """Its slot would be freed and given to another, while it runs. Nothing has changed after the refusal."""
    world = World.of(rt, in_one_piece=in_one_piece)
    world.join([3, 4])
    world.step()
    before, live = world.batch, world.slots.stats.live
    with pytest.raises(ArgumentError, match=r"leave and join, in slots \[1\]"):
        world.planner.plan(before, keep=[1], joining=before.filter([0]))
    assert world.slots.stats.live == live
    world.step()


def test_a_fence_for_those_that_leave_where_none_does(rt: Runtime) -> None:
    """An engine passes it in each step; what is not a fence is refused nevertheless."""
    world = World.of(rt)
    world.join([3, 4])
    for keep in (None, np.ones(2, np.bool_)):
        with pytest.raises(ArgumentError, match="fence"):
            world.planner.plan(world.batch, keep=keep, after=3)  # type: ignore[arg-type]
        world.step(keep=keep, after=rt.record())
    assert world.batch.seq_lens.np.tolist() == [5, 6]


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_the_row_of_a_request_that_arrives_and_pauses_is_written(rt: Runtime, in_one_piece: bool) -> None:
    """It is sent with the step in which the request joins, and the request is its owner from then on."""
    world = World.of(rt, in_one_piece=in_one_piece)
    world.join([3])
    joining = world.arrived([6]).merge(world.prompted([4]))
    samples = np.array([True, False, False])
    step = world.planner.plan(world.batch, [1, 0, 0], prompt_ids=[None] * 3, samples=samples, joining=joining)
    table = world.pages.req_to_token
    assert table is not None
    assert table.written(step.batch["slots"]).tolist() == [True, True, False]  # type: ignore[arg-type]
    with checks("full"):  # which reads the rows of those that have tokens
        step.inputs()


def test_a_page_that_was_begun_elsewhere_is_written_when_others_join(rt: Runtime) -> None:
    """An engine that writes its rows token by token leaves the rest of a page out: the step that comes next has it."""
    world = World.of(rt)
    world.join([3, 4])
    world.step()
    slots: Any = world.batch["slots"]
    table: Any = world.pages.req_to_token
    extension = world.pages.extend(slots, [5, 6])  # the first begins a page
    world.pages.commit(slots, [5, 6])
    table.write(slots.filter([0]), [4], extension.locations.np[:1])
    world.batch = world.batch.replace(seq_lens=[5, 6])
    for _ in range(2):
        rows, _generations = world.next_handles(1)
        world.step(keep=[0, 1], joining=columns(rows, [2]), published={"last": [7]}, after=rt.record())
        check_rows_of_the_table(world)


def test_a_row_is_written_by_the_step_after_one_that_failed(rt: Runtime) -> None:
    """The second step writes the rest of each page: if its copy fails, the next one has the place of its token too."""
    world = World.of(rt)
    world.join([4, 5])
    slots: Any = world.batch["slots"]
    table: Any = world.pages.req_to_token
    extension = world.pages.extend(slots, [5, 6])
    world.pages.commit(slots, [5, 6])
    table.write(slots, extension.positions, extension.locations.np)  # not the rest of the page that the first begins
    world.batch = world.batch.replace(seq_lens=[5, 6])
    world.step()
    with failing(rt, "_copied_to_device", 1), pytest.raises(PlantedError):
        world.planner.plan(world.batch)
    rows, _generations = world.next_handles(1)
    world.step(joining=columns(rows, [3]), published={"last": [7]})
    check_rows_of_the_table(world)


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_a_plan_that_is_refused_counts_in_no_statistics(rt: Runtime, in_one_piece: bool) -> None:
    """Slots that it took before the pages ran out were never taken, for who reads the pool's numbers."""
    world = World.of(rt, pages=6, in_one_piece=in_one_piece)
    world.join([4, 4])
    world.step()
    before = world.slots.stats
    with pytest.raises(PoolExhaustedError, match="pages"):
        world.planner.plan(world.batch, joining=columns(np.arange(2), [4, 4]), published={"last": [1, 2]})
    assert world.slots.stats == before
    world.step(joining=columns(np.arange(1), [4]), published={"last": [1]})
    after = world.slots.stats
    assert (after.taken_total, after.freed_total, after.peak_live) == (3, 0, 3)


@attrs.define(eq=False)
class Meddling:
    """A fence, or values, of an engine that releases requests as soon as they are asked."""

    world: World
    row: int
    values: list[int] = attrs.field(factory=list)

    def act(self) -> None:
        if self.row >= 0:
            slots: Any = self.world.batch["slots"]
            row, self.row = self.row, -1
            self.world.pages.release_requests(slots.filter([row]))

    def query(self) -> bool:
        self.act()
        return True

    def wait(self) -> None:
        raise AssertionError("the host waited")

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.act()
        return np.array(self.values, dtype=dtype or np.int64)


@pytest.mark.parametrize("in_one_piece", [True, False])
@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("asked", ["fence", "prompt_ids", "extras", "published", "joining"])
def test_a_plan_whose_arguments_release_requests_is_refused(
    rt: Runtime, asked: str, row: int, level: str, in_one_piece: bool
) -> None:
    """Whoever it releases, that runs or leaves, is released once, and the pools stay whole."""
    with checks(level):
        world = World.of(rt, in_one_piece=in_one_piece)
        world.join([3, 4, 5])
        world.step()
        meddling = Meddling(world, row, [7])
        joining = columns(np.arange(1), [3])
        options: dict[str, Any] = {"published": {"last": [7]}}
        if asked == "fence":
            world.slots.free(world.slots.take(1), after=meddling)
        elif asked == "joining":
            joining["seed"] = meddling
        elif asked == "prompt_ids":
            joining, options = columns(np.arange(1), [0]), {"prompt_ids": [None, None, meddling]}
        else:
            options[asked] = {"last" if asked == "published" else "x": meddling}
        with pytest.raises(Violation):
            world.planner.plan(world.batch, keep=[0, 2], joining=joining, after=rt.record(), **options)
        assert meddling.row == -1
        assert world.slots.stats.live == 2
        world.slots.verify()
        world.pages.verify()


def test_parts_that_are_interrupted_are_taken_back(rt: Runtime) -> None:
    """An interrupt that comes as soon as the pages have grown leaves the lengths as they were."""
    world = World.of(rt, in_one_piece=False)
    world.join([3, 4])
    before, real = state_of(world), world.pages.extend

    def extend(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    world.pages.extend = extend  # type: ignore[assignment, method-assign]
    with pytest.raises(KeyboardInterrupt):
        world.planner.plan(world.batch, joining=columns(np.arange(1), [2]), published={"last": [7]})
    world.pages.extend = real  # type: ignore[method-assign]
    assert state_of(world) == before
    world.step()
    check_rows_of_the_table(world)
