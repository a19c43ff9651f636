"""Recordings: what is written, what comes again, and what damaged files do."""

import contextlib
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Batch, FutureMap, PagePool, SlotPool, StepPlanner, checks, mirrored, open_runtime, relay_field
from batchstate.batch import Batch as PlainBatch
from batchstate.cli import main
from batchstate.columns import slot_column
from batchstate.errors import ArgumentError, BatchStateError, RecordingError
from batchstate.pools import SlotPool as PlainPool
from batchstate.races.devices import open_device, window_of
from batchstate.replay import (
    Finding,
    Recording,
    Replay,
    format,
    load,
    record_operations,
    replay,
    replayer,
    show,
    shrunk_calls,
)
from batchstate.replay.engine import drive, history_of, recorded
from batchstate.replay.format import FIRST_METHOD, HEAD, KINDS, STATE, Ref, body_of, save
from batchstate.replay.recorder import METHODS
from batchstate.replay.written import test_of_calls as written_of_calls
from batchstate.replay.written import test_of_history as written_of_history
from batchstate.runtime import Runtime
from batchstate.step import PlannedStep
from batchstate.testing.exact import Arrival, History, Wave, reduced
from batchstate.violations import Code, Violation
from tests.selfcheck.mutants.diffs import Change, Diff
from tests.selfcheck.mutants.registry import Patch


class Rows(Batch):
    """Requests that decode."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    top_k = mirrored(torch.int32)


class World:
    """A small engine: steps in which requests leave and join, planned, run and read."""

    def __init__(self, *, size: int = 8, rank: int = 0, device: str = "cpu") -> None:
        self.runtime: Runtime = open_device(device)
        self.slots = SlotPool(self.runtime, size)
        table = self.slots.table("req_to_token", (256,), torch.int32, holds="location")
        self.pages = PagePool(self.runtime, self.slots, 128, 4, max_tokens_per_request=256, req_to_token=table)
        self.relay = FutureMap(self.slots, {"last": relay_field(torch.int64, read_by="both")})
        self.planner = StepPlanner(Rows, pages=self.pages, relay=self.relay, ids="last", results=("last",))
        self.batch = Rows.empty(self.runtime)
        self.rank, self.steps = rank, 0

    def step(self) -> PlannedStep:
        """One step: the oldest leaves at times, and one joins."""
        self.runtime.next_step()
        self.steps += 1
        keep = np.arange(len(self.batch)) >= (len(self.batch) == 4)
        joining = {"seq_lens": [0], "top_k": [self.steps]} if self.steps % 3 == 1 else None
        n = int(keep.sum())
        prompts = [None] * n + [[5, 6, 7]] * (joining is not None)
        queries = [1] * n + [3] * (joining is not None)
        after = self.runtime.record()
        step = self.planner.plan(
            self.batch, queries, keep=keep, joining=joining, after=after, prompt_ids=prompts if joining else None
        )
        step.inputs()
        step.publish(last=torch.arange(step.num_reqs))
        self.batch = step.batch  # type: ignore[assignment]
        assert step.results["last"].np.tolist() == list(range(step.num_reqs))
        return step

    def free_twice(self) -> None:
        """The bug: a slot that is freed and still in the batch."""
        self.pages.release_requests(self.batch.filter([1]).slots, after=self.runtime.record())
        self.planner.plan(self.batch)


def recorded_bug(folder: Path, steps: int = 7, **options: Any) -> Path:
    """The file of a violation behind so many steps."""
    with record_operations(folder, **options) as recorder:
        world = World()
        for _ in range(steps):
            world.step()
        with pytest.raises(Violation):
            world.free_twice()
    return recorder.files[0]


@pytest.fixture(scope="module")
def bug(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of the bug."""
    return recorded_bug(tmp_path_factory.mktemp("bug"))


def test_a_violation_comes_again(bug: Path) -> None:
    """A replay at full finds the code, object and row of the recording, and refuses no call before."""
    recording = load(bug)
    again = replay(recording)
    assert recording.finding is not None
    assert recording.finding.code == Code.SLOT_STALE_HANDLE
    assert again.repeated
    assert again.finding is not None
    assert again.finding.slot == recording.finding.slot
    assert again.refused == 0


@pytest.mark.parametrize("device", ["race", "sim"])
def test_a_violation_comes_again_under_a_tool(bug: Path, device: str) -> None:
    """A recording is replayed on the simulated device and under the race detector too."""
    assert replay(load(bug), device=device, level="cheap").repeated


def test_a_clean_run_stays_clean(tmp_path: Path) -> None:
    """The clean twin: what found nothing when it was recorded finds nothing at full."""
    with record_operations(tmp_path) as recorder:
        world = World()
        for _ in range(12):
            world.step()
        step = world.planner.plan(world.batch)
        step.inputs()
        world.batch = step.rollback(after=world.runtime.record())  # type: ignore[assignment]
        world.step()
        path = recorder.dump()
    assert path is not None
    again = replay(load(path))
    assert (again.finding, again.refused) == (None, 0)
    assert len(again.made) > 30


def test_a_ring_begins_with_the_state(tmp_path: Path) -> None:
    """Where the ring has lost its beginning, a replay starts from the state that a segment begins with."""
    path = recorded_bug(tmp_path, 900, ring_bytes=2 << 14, segments=2)
    recording = load(path)
    first = next(event for event in recording.events if event.is_call)
    assert first.step > 300
    assert path.stat().st_size < 2 << 14
    assert replay(recording, level="cheap").repeated


def test_values_that_landed_are_published_again(tmp_path: Path) -> None:
    """A replay publishes what the host has read later."""
    with record_operations(tmp_path) as recorder:
        world = World()
        for _ in range(4):
            world.step()
        path = recorder.dump()
    _, seen = published(load(str(path)))
    assert seen == [[0], [0], [0], [0, 1]]


def test_nothing_is_left_behind() -> None:
    """Without a recording the methods are those of the classes."""
    before = PlainPool.take, PlainBatch.filter, StepPlanner.plan, PlannedStep.batch
    with record_operations("unused"):
        assert PlainPool.take is not before[0]
    assert (PlainPool.take, PlainBatch.filter, StepPlanner.plan, PlannedStep.batch) == before


def test_one_recording_at_a_time(tmp_path: Path) -> None:
    """A second recording, and a ring of no size, are refused."""
    with record_operations(tmp_path), pytest.raises(ArgumentError, match="under way"):
        record_operations(tmp_path)
    with pytest.raises(ArgumentError, match="segments"):
        record_operations(tmp_path, segments=1)


def test_a_step_costs_few_calls_and_bytes(tmp_path: Path) -> None:
    """A decode step of requests that stay writes 160 bytes, and for each row no more than the token that landed."""
    sizes = {}
    for requests in (1, 4):
        with record_operations(tmp_path) as recorder:
            world = World()
            taken = world.pages.take_requests([1] * requests)
            columns = {"seq_lens": [1] * requests, "top_k": [0] * requests}
            world.batch = Rows.build(world.runtime, slots=taken, **columns)
            world.relay.publish(taken, last=[1] * requests)
            counts = []
            for _ in range(4):
                before = len(recorder.events())
                step = world.planner.plan(world.batch)
                step.inputs()
                step.publish(last=torch.zeros(requests, dtype=torch.int64))
                world.batch = step.batch  # type: ignore[assignment]
                step.results.resolve()
                counts.append(len(recorder.events()) - before)
            syncs, copies = world.runtime.counters.forced_syncs, world.runtime.counters.host_to_device_copies
            assert (syncs, copies) == (0, 4 + 1)  # one a step, and what the first one goes on from
        sizes[requests] = counts[-1]
    assert sizes[1] <= 160
    assert sizes[4] == sizes[1] + 3 * 8


# Shrinking, and tests


def test_calls_shrink_to_those_that_matter(bug: Path, tmp_path: Path) -> None:
    """What is left is a take, what freed the slot, and the call that used it; the written test fails with it."""
    recording = load(bug)
    numbers = [event.number for event in recording.events if event.is_call]
    small = shrunk_calls(recording, numbers, level="cheap")
    assert len(small.smallest) <= 12
    target = tmp_path / "test_small.py"
    target.write_text(written_of_calls(recording, frozenset(small.smallest), "cheap", target, "cpu"))
    assert _outcome(target) == "failed"
    assert set(map(int, re.findall(r"#(\d+)", target.read_text()))) == set(small.smallest)  # no others are named


def _outcome(path: Path) -> str:
    space: dict[str, object] = {"__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), space)
    test = next(value for name, value in space.items() if name.startswith("test_"))
    try:
        test()  # type: ignore[operator]
    except AssertionError:
        return "failed"
    return "passed"


def test_a_bug_of_the_library_is_mended(tmp_path: Path) -> None:
    """A test of calls passes once the library is right: here a release that leaves a slot live, and is put back."""
    from batchstate._allocator import Allocator

    before = Allocator.release

    def lost(self: Allocator, handles: object, after: object, operation: str) -> None:
        if operation != "free":
            before(self, handles, after, operation)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, record_operations(tmp_path) as recorder:
        patch.setattr(Allocator, "release", lost)
        pool = SlotPool(open_runtime("cpu"), 4)
        pool.free(pool.take(2), after=None)
        with pytest.raises(Violation):
            pool.expect_idle()
        recording = load(recorder.files[0])
        assert replay(recording).repeated
        numbers = frozenset(event.number for event in recording.events if event.is_call)
        target = tmp_path / "test_leak.py"
        target.write_text(written_of_calls(recording, numbers, "full", target, "cpu"))
        assert _outcome(target) == "failed"
    assert _outcome(target) == "passed"


def test_thousands_of_calls_are_left_out(tmp_path: Path) -> None:
    """A chain of batches that is left out hands the first one on, however long it is."""
    with record_operations(tmp_path) as recorder:
        world = World()
        for _ in range(4):
            world.step()
        for _ in range(1_200):
            world.batch = world.batch.filter(list(range(len(world.batch))))
        with pytest.raises(Violation):
            world.free_twice()
    recording = load(recorder.files[0])
    *filters, _ = [event.number for event in recording.events if event.kind == "Batch.filter"]
    assert replay(recording, level="cheap", without=filters).repeated


def test_shrinking_ends_at_ctrl_c_with_the_best(bug: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt ends a shrink with what has failed by then."""
    tries = [Replay(repeated=True, made=list(range(5))), Replay()]

    def replayed(*_: object, **options: object) -> Replay:
        if not tries:
            raise KeyboardInterrupt
        return tries.pop(0)

    monkeypatch.setattr(replayer, "replay", replayed)
    result = shrunk_calls(load(bug), range(10))
    assert result.interrupted
    assert (result.smallest, result.tries) == (list(range(5)), 3)


# Engines


def test_an_engine_is_served_again_and_shrunk(tmp_path: Path) -> None:
    """A bug of an engine's scheduler comes again from its recorded requests, and shrinks to one of them."""
    from examples.exact.bugs import Bug
    from examples.replay.bugs import traffic_abort_frees_twice as switch
    from examples.replay.traffic import TRAFFIC

    engine, bug = TRAFFIC, Bug("frees_twice", "traffic", "freed twice", "", switch)
    settings = {name: values[0] for name, values in engine.choices.items()}
    arrivals = [Arrival((((0,), 20),), 12, abort=5 if number == 3 else None) for number in range(12)]
    history = History(settings, tuple(Wave(tuple(arrivals[at : at + 2]), 1) for at in range(0, 12, 2)))
    with bug.planted(), record_operations(tmp_path) as recorder:
        finding = drive(recorded(engine), history)
    assert finding is not None
    assert finding.code == Code.SLOT_DOUBLE_FREE
    recording = load(recorder.files[0])
    own = history_of(recording, engine)
    assert own.waves[1] == history.waves[1]
    assert "<b>request 3</b>" in show.page(recording)
    with bug.planted():
        assert finding.repeats(drive(engine, own))
        small = reduced(engine, own, lambda other: finding.repeats(drive(engine, other)), seconds=20).smallest
        assert small.requests == 1
        target = tmp_path / "test_traffic.py"
        target.write_text(
            written_of_history(engine, small, finding, "from examples.replay.traffic import TRAFFIC as ENGINE")
        )
        assert _outcome(target) == "failed"
    assert _outcome(target) == "passed"
    assert drive(engine, small) is None


def test_requests_of_another_engine_are_refused(bug: Path) -> None:
    """A recording without requests cannot be served by an engine."""
    from examples.replay.traffic import TRAFFIC

    with pytest.raises(RecordingError, match="no requests"):
        history_of(load(bug), TRAFFIC)


# Ranks, pages, the command


def test_the_first_operation_that_differs_between_ranks_is_named(tmp_path: Path) -> None:
    """Of two ranks, one of which takes a request more, the operation is named; equal ranks have none."""
    files = []
    for rank, more in ((0, 0), (1, 0), (1, 1)):
        with record_operations(tmp_path, rank=rank) as recorder:
            world = World()
            for number in range(6):
                if number == 4 and more:
                    world.slots.take(1)
                world.step()
            files.append(str(recorder.dump()))
        files[-1] = str(Path(files[-1]).rename(tmp_path / f"{rank}-{more}.ops"))
    assert show.differ([load(files[0]), load(files[1])]) is None
    words = str(show.differ([load(files[0]), load(files[2])]))
    assert "rank 1, step" in words
    assert "slots.take(1)" in words
    assert main(["replay", files[0], files[2]]) == 1
    assert main(["replay", *files[:2]]) == 0


def test_the_command(bug: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`replay` says whether it came again, shrinks, and writes a test; `show` prints, and draws a page."""
    out = tmp_path / "test_out.py"
    assert main(["replay", str(bug), "--level", "cheap", "--shrink", "--test", str(out)]) == 1
    assert "came again: SLOT_STALE_HANDLE" in capsys.readouterr().out
    assert out.is_file()
    page = tmp_path / "page.html"
    assert main(["replay", "show", str(bug), "--last", "5"]) == 0
    assert "plan(" in capsys.readouterr().out
    assert main(["replay", "show", str(bug), "--html", str(page)]) == 0
    assert "<b>pages 1</b>" in page.read_text()
    assert "<script" not in page.read_text()
    assert "<u style='left:9" in page.read_text()
    number = load(bug).events[-1].number
    assert f"#{number} " in page.read_text().rpartition("; SLOT_STALE_HANDLE here")[0].splitlines()[-1]
    assert main(["replay", str(bug), "--engine", "examples.nobody:ENGINE"]) == 2


def recorded_on(device: str, folder: Path) -> Path:
    """The file of a release with `after=None` behind a forward that runs, and of steps behind it."""
    with record_operations(folder) as recorder:
        world = World(device=device)
        with window_of(world.runtime), contextlib.suppress(Violation):
            for _ in range(9):
                world.step()
            step = world.planner.plan(world.batch)
            step.inputs()
            step.publish(last=torch.zeros(step.num_reqs, dtype=torch.int64))
            world.batch = step.batch  # type: ignore[assignment]
            world.pages.release_requests(world.batch.filter([1]).slots, after=None)
            world.batch = world.batch.filter([0, 2])
            for _ in range(5):
                world.step()
        return recorder.files[0] if recorder.files else recorder.dump()  # type: ignore[return-value]


@pytest.mark.parametrize("device", ["race", "sim"])
def test_a_replay_runs_no_deeper_than_the_engine(device: str, tmp_path: Path) -> None:
    """Recordings have no waits of the host: a right engine stays right in a replay, and steps keep their numbers."""
    with record_operations(tmp_path) as recorder:
        world, before = World(device=device), None
        rt, relay, forward = world.runtime, world.relay, world.runtime.stream("forward")
        planner = StepPlanner(Rows, pages=world.pages, relay=relay, ids="last")
        batch: Any = Rows.build(rt, slots=world.slots.take(2), seq_lens=[0, 0], top_k=[1, 1])
        with window_of(rt):
            for number in range(6):
                rt.next_step()
                step = planner.plan(batch, 1 if number else 2, prompt_ids=None if number else [[1, 2]] * 2)
                with rt.use(forward):
                    step.inputs()
                    step.publish(last=torch.tensor([5, 6]))
                    asked = relay.prefetch(step.sampled_slots, "last")
                if before is not None:
                    before.resolve()
                batch, before = step.batch, asked
        path: Any = recorder.dump()
    steps = list[int]()
    answer = replay(load(path), seen=lambda _, replayer: steps.append(replayer._runtimes[0].step))
    assert (answer.finding, answer.refused, steps[-1]) == (None, 0, 6)


def test_results_of_a_step_are_taken_once(tmp_path: Path) -> None:
    """Those that `accept` has published go to the host with `publish`, which is a single call in a recording."""
    with record_operations(tmp_path) as recorder:
        world = World()
        fields = {name: relay_field(torch.int64, read_by="both") for name in ("last", "lens")}
        relay = FutureMap(world.slots, {**fields, "kept": relay_field(torch.int64, read_by="host")})
        told: dict[str, Any] = {"ids": "last", "lengths": "lens", "accepted": "kept", "results": ("kept", "lens")}
        planner = StepPlanner(Rows, pages=world.pages, relay=relay, **told)
        step = planner.plan(Rows.empty(world.runtime), joining={"seq_lens": [0], "top_k": [1]}, prompt_ids=[[5]])
        step.inputs()
        step.publish(last=step.accept(torch.tensor([1])))
        assert step.results["lens"].tolist() == [1]
        path: Any = recorder.dump()
    answer = replay(load(path))
    assert (answer.finding, answer.refused) == (None, 0)


def test_a_recording_knows_its_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A violation of the simulated device comes again there, and in the written test, without a word."""
    path, out = recorded_on("sim", tmp_path), tmp_path / "test_out.py"
    assert load(path).device == "sim"
    assert main(["replay", str(path), "--shrink", "--test", str(out)]) == 1
    assert "on sim; 0 others were refused\ncame again: SLOT_IN_FLIGHT" in capsys.readouterr().out
    assert "device=" not in out.read_text()
    assert _outcome(out) == "failed"
    assert main(["replay", str(path), "--device", "cpu", "--test", str(out)]) == 0
    assert "nothing was found, and no test is written" in capsys.readouterr().out


def test_another_finding_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recording in which nothing was found, and a tool finds something: it is said, shrunk, and tested there."""
    path, out = recorded_on("cpu", tmp_path), tmp_path / "test_out.py"
    (release,) = [event.number for _, event in load(path).events.of("PagePool.release_requests")]
    assert main(["replay", str(path)]) == 0
    assert main(["replay", str(path), "--device", "sim", "--shrink", "--test", str(out)]) == 1
    said = capsys.readouterr().out
    assert f"up to #{release}, at 'full' on sim; 0 others were refused\nfound another: SLOT_IN_FLIGHT" in said
    assert "device='sim'" in out.read_text()
    assert _outcome(out) == "failed"


def test_no_option_is_ignored(bug: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recording without calls, options of the other command, and a test of several ranks end with 2."""
    out = str(tmp_path / "test_out.py")
    with record_operations(tmp_path) as recorder:
        recorder.write("hook", {"call": "Hand.advance", "args": [1], "kwargs": {}})
        hooks = recorder.dump()
    assert main(["replay", str(hooks), "--test", out]) == 2
    assert "no call that can be made again" in capsys.readouterr().err
    assert main(["replay", str(bug), str(bug), "--test", out]) == 2
    for words, code in ((["--html", out], 2), (["show", "--test", out], 2), (["show", "--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            main(["replay", *words, *([str(bug)] if code else [])])
        assert ended.value.code == code
    assert "--html OUT.html" in capsys.readouterr().out


def test_objects_have_whole_names(tmp_path: Path) -> None:
    """A finding names an object without its counts or fields."""
    world = World()
    with record_operations(tmp_path) as recorder, pytest.raises(Violation):
        world.relay.gather(world.slots.take(1), "last")
    finding = load(recorder.files[0]).finding
    assert finding is not None
    assert finding.object == "FutureMap('relay')"


def test_a_variable_switches_it_on(tmp_path: Path) -> None:
    """With BATCHSTATE_RECORD any process that uses the library writes a file at a violation."""
    code = "from batchstate import *; p = SlotPool(open_runtime('cpu'), 2); s = p.take(1); p.free(s, after=None)\n"
    code += "try: p.free(s, after=None)\nexcept Violation: pass"
    environment = {**os.environ, "BATCHSTATE_RECORD": str(tmp_path / "made")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    (path,) = (tmp_path / "made").iterdir()
    assert replay(load(path)).repeated


def test_a_signal_writes_a_file(tmp_path: Path) -> None:
    """A signal writes what the ring has, and the process goes on."""
    with record_operations(tmp_path, signal=signal.SIGUSR1) as recorder:
        SlotPool(open_runtime("cpu"), 2).take(1)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert [load(path).reason for path in recorder.files] == ["signal"]


# Files that cannot be written, and files from strangers


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_an_engine_goes_on_without_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError
) -> None:
    """A full disk, or a folder that cannot be written, is one line in the log; no half file stays."""

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise error

    monkeypatch.setattr(Path, "write_bytes", full)
    with record_operations(tmp_path) as recorder, caplog.at_level(logging.ERROR):
        pool = SlotPool(open_runtime("cpu"), 4)
        slots = pool.take(1)
        pool.free(slots, after=None)
        for _ in range(3):
            with pytest.raises(Violation):
                pool.free(slots, after=None)
            assert recorder.dump() is None
        assert len(pool.take(4)) == 4
    assert len(caplog.records) == 1
    assert list(tmp_path.iterdir()) == []


def mutated(data: bytes, rng: random.Random) -> bytes:
    """With a few bytes changed, left out, doubled, or set to what lengths break at."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out) or 1)
        kind = rng.randrange(5)
        if kind == 0:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            out[at : at + rng.randint(1, 64)] = b""
        elif kind == 2:
            out[at:at] = out[at : at + rng.randint(1, 64)]
        elif kind == 3:
            out[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\0\0\1\0"))
        else:
            out[at : at + 8] = rng.choice((b"lltdlltd", b"a\7\4\xff\xff\xff\xff\xff", rng.randbytes(8)))
    return bytes(out)


def hostile(data: bytes, rng: random.Random) -> bytes:
    """A damaged file; two of three have a right checksum, so that their events are looked at."""
    line, _, packed = data.partition(b"\n")
    if rng.random() < 1 / 3:
        return mutated(data, rng)
    events = mutated(zlib.decompress(packed), rng)
    packed, header = zlib.compress(events), json.loads(line)
    header |= {"bytes": len(events), "crc32": zlib.crc32(packed)}
    if rng.random() < 0.2:
        name = rng.choice(list(header))
        header[name] = rng.choice([None, -1, 2**63, "x", [], {}, [[]], {"code": []}, True, 1.5])
    return json.dumps(header).encode() + b"\n" + packed


def survives(path: Path) -> str:
    """What came of a file: `loaded`, `refused`; any error that is not typed goes through."""
    try:
        recording = load(path)
    except RecordingError:
        return "refused"
    try:
        replay(recording, level="cheap", alike=lambda wanted, found: False)
        show.page(recording)
    except BatchStateError:
        return "refused"
    return "loaded"


@pytest.mark.parametrize(
    "files", [120, pytest.param(3_000, marks=pytest.mark.nightly)], ids=lambda number: f"{number} files"
)
def test_damaged_files_are_refused(bug: Path, tmp_path: Path, files: int) -> None:
    """Damaged and hostile files raise typed errors, run nothing, and take a bounded amount of memory."""
    data, rng, outcomes = bug.read_bytes(), random.Random(35), dict[str, int]()
    path = tmp_path / "hostile.ops"
    tracemalloc.start()
    try:
        for _ in range(files):
            path.write_bytes(hostile(data, rng))
            outcome = survives(path)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert outcomes["refused"] > files / 2
    assert peak < 64 << 20


def written(folder: Path, *events: tuple[str, object, int]) -> Path:
    """A file of such events, each a kind, a body, and a number."""
    with record_operations(folder, everything=True, ring_bytes=1 << 29) as recorder:
        for kind, body, number in events:
            recorder.write(kind, body, number=number)
        path = recorder.dump()
    assert path is not None
    return path


RUNTIME = "define", {"is": "Runtime", "steps_in_flight": 2}, 1


def pool_of(size: int, number: int) -> tuple[str, object, int]:
    """The definition of a pool of slots."""
    return "define", {"is": "SlotPool", "runtime": Ref(1), "size": size, "reserve": 0, "name": "slots"}, number


def handles(number: int) -> object:
    """So many handles of the pool that event 2 defines, as they are written."""
    return {"$": ["h", 2, np.arange(number), np.zeros(number, np.int64)]}


def test_many_events_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events without a body take a word each, and more than a replay reads are refused."""
    path, events = tmp_path / "many.ops", HEAD.pack(KINDS.index("step"), 0, 0, 0, 0, 0, 0) * 50_000
    save(path, events, [], finding=None)
    assert path.stat().st_size < 10_000
    tracemalloc.start()
    try:
        assert len(load(path).events) == 50_000
        assert tracemalloc.get_traced_memory()[1] < 3 * len(events)
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(format, "MOST_EVENTS", 49_999)
    with pytest.raises(RecordingError, match="more than 49,999 events"):
        load(path)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([RUNTIME, *(pool_of(1 << 20, number) for number in range(2, 42))], "values of 64 bytes, and .* are left"),
        ([("define", {**RUNTIME[1], "x": "x" * 1_000_000}, at) for at in range(40)], "64 bytes, and .* are left"),
        ([("result", handles(6 << 20), 3)], "6291456. values of 400 bytes"),
    ],
    ids=["pools", "runtimes", "handles"],
)
def test_all_objects_have_one_budget(events: list[tuple[str, object, int]], words: str, tmp_path: Path) -> None:
    """A pool of a million slots is made, and forty of them are refused; likewise other objects, and names of slots."""
    assert replay(load(written(tmp_path, RUNTIME, pool_of(1 << 20, 2)))).finding is None
    with pytest.raises(RecordingError, match=words):
        replay(load(written(tmp_path, *events)))


@pytest.mark.parametrize("left_out", ["StepPlanner.plan", "PlannedStep.inputs"])
def test_products_that_nobody_refers_to_are_let_go(left_out: str, tmp_path: Path) -> None:
    """A replay holds few steps at a time, which keep their memory; also where calls are left out."""
    with record_operations(tmp_path) as recorder:
        world = World()
        for _ in range(12):
            world.step()
        path = recorder.dump()
    recording, most = load(str(path)), list[int]()
    numbers = [event.number for _, event in recording.events.of(left_out)]

    def held(_: int, player: replayer.Replayer) -> None:
        most.append(sum(isinstance(made, PlannedStep) for made in player._products.values()))

    for without in ([], numbers[1::2], numbers[3:]):
        replay(recording, level="cheap", without=without, seen=held)
        assert max(most) <= 2


def test_the_command_takes_a_bounded_amount_of_memory(tmp_path: Path) -> None:
    """A batch that is merged with itself again and again ends in a typed error."""
    pytest.importorskip("resource")
    column = {"is": "MirroredColumn", "dtype": "int64", "shape": [], "pad": np.array(0), "contract": "exact"}
    kind = "define", {"is": "type", "name": "Ids", "columns": {"ids": column | {"holds": None}}}, 2
    events = bytes(load(written(tmp_path, RUNTIME, kind)).events[1].raw)
    events += bytes(load(written(tmp_path, RUNTIME, kind)).events[2].raw)
    bodies = ['[{"$":["r",2]},[{"$":["r",1]}],{"ids":[1,2,3,4]}]']
    bodies += [f'[{{"$":["r",{number}]}},[{{"$":["r",{number}]}}],{{}}]' for number in range(3, 40)]
    for number, body in enumerate(bodies, 3):
        raw, method = body_of(body, []), FIRST_METHOD + METHODS.index("Batch.build" if number == 3 else "Batch.merge")
        events += HEAD.pack(method, 0, 0, number, 0, 0, len(raw)) + raw
    path = tmp_path / "grows.ops"
    save(path, events, METHODS, finding=None)
    code = "import sys; from batchstate.cli.app import main, replay; replay.MOST_MEMORY = 1 << 30; sys.exit(main())"
    words = [sys.executable, "-c", code, "replay", str(path), "--level", "cheap"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, "takes more than 1 GiB" in ended.stderr) == (2, True), ended.stderr


def test_a_page_of_many_slots_ends(tmp_path: Path) -> None:
    """Slots that came or went last have a lane, out of a hundred thousand."""
    with record_operations(tmp_path) as recorder:
        pool = SlotPool(open_runtime("cpu"), 100_000)
        pool.free(pool.take(100_000).take([0]), after=None)
        path = recorder.dump()
    page = show.page(load(str(path)))
    assert page.count("<div class=lane>") == 512
    assert page.index("<b>slots 1</b>") < page.index("<b>slots 99490</b>")


@pytest.mark.parametrize("steps", [13, 900], ids=["whole", "ring"])
def test_lanes_are_those_of_the_engine(steps: int, tmp_path: Path) -> None:
    """A lane ends where its request leaves; whoever has a slot at the end has it in the page, and as many pages."""
    with record_operations(tmp_path, ring_bytes=2 << 14, segments=2) as recorder:
        world = World()
        for _ in range(steps):
            world.step()
        path = recorder.dump()
    recording = load(str(path))
    hands, end = show.Hands(recording), len(recording.events)
    (first, *_) = ends = [stop for bars in hands.lanes.values() for _, stop, _ in bars if stop < end]
    assert all("keep" in recording.events[stop].body[2] for stop in ends)
    assert "] given back" in hands.words[first]
    left = [(event.number, slot) for _, event in recording.events.of("left") for slot in event.body.tolist()]
    bars_of_slots = [bar for (name, _), bars in hands.lanes.items() if name == "slots" for bar in bars]
    assert sorted((recording.events[at].number, slot) for _, at, slot in bars_of_slots if at < end) == left
    assert f"; slots [{left[-1][1]}] leave" in show.text(recording)
    assert (hands.violated, "<u" in show.page(recording)) == (None, False)
    held = {lane: bars[-1][2] for lane, bars in hands.lanes.items() if bars[-1][1] == end}
    live = world.slots.live_slots().tolist()
    assert {item: slot for (name, item), slot in held.items() if name == "slots"} == dict(zip(live, live, strict=True))
    holders = [slot for (name, _), slot in held.items() if name == "pages"]
    assert [holders.count(slot) for slot in live] == np.count_nonzero(world.pages.page_table[live], axis=1).tolist()


def with_header(data: bytes, **changes: object) -> bytes:
    """The file with other fields in its first line."""
    line, _, packed = data.partition(b"\n")
    return json.dumps({**json.loads(line), **changes}).encode() + b"\n" + packed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: with_header(data, version=9), "format 9, and this library reads 2"),
        (lambda data: with_header(data, dropped="x"), "a field of its first line is a str"),
        (lambda data: data[:-7], "another checksum"),
        (lambda data: with_header(data, bytes=1 << 27), "bytes of events or more"),
        (lambda data: with_header(data, bytes=12), "bytes of events or more"),
        (lambda data: with_header(data, methods=["os.system"]), "damaged"),
        (lambda data: b"\x80\x04cos\nsystem\n", "does not begin"),
        (lambda data: b"", "does not begin"),
        (lambda data: b"{" * 5_000 + b"\n", "does not begin"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    bug: Path, tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    """A file of another version, one that was cut, one that would grow, and one that is something else."""
    path = tmp_path / "wrong.ops"
    path.write_bytes(change(bug.read_bytes()))
    with pytest.raises(RecordingError, match=words):
        load(path)


def test_calls_of_other_methods_are_refused(bug: Path, tmp_path: Path) -> None:
    """A file cannot name a method that is not recorded."""
    path, header = tmp_path / "calls.ops", json.loads(bug.read_bytes().partition(b"\n")[0])
    path.write_bytes(with_header(bug.read_bytes(), methods=["SlotPool.__reduce__"] * len(header["methods"])))
    with pytest.raises(RecordingError, match="__reduce__"):
        replay(load(path))


@pytest.mark.parametrize("answer", ["__import__('os').abort()", [3], None])
def test_a_file_puts_no_code_into_a_written_test(answer: Any, tmp_path: Path) -> None:
    """What a file says of a request stands in a written test as it is, so it has to be a number."""
    from examples.replay.traffic import TRAFFIC

    with record_operations(tmp_path) as recorder:
        recorder.write("open", {"settings": {}, "open": [], "texts": False})
        recorder.write("add", (0, [1, 3], answer, 0.0))
        path = recorder.dump()
    assert path is not None
    with pytest.raises(RecordingError, match="cannot serve: TypeError"):
        history_of(load(path), TRAFFIC)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"$": ["a", "int8", [999] * 1000]}, "an array of 1000 dimensions"),
        ({"call": 3, "args": 5, "kwargs": [1]}, None),
    ],
)
def test_wrong_bodies_are_refused_or_shown(body: Any, words: str | None, tmp_path: Path) -> None:
    """An array of many dimensions takes no time; a hooked call without arguments is shown."""
    with record_operations(tmp_path) as recorder:
        recorder.write("hook", body)
        path = recorder.dump()
    assert path is not None
    with contextlib.nullcontext() if words is None else pytest.raises(RecordingError, match=words):
        assert "(" in show.text(load(path))


# Mutants of the recorder and the replayer, and their clean twin


def published(recording: Recording) -> tuple[Replay, list[list[int]]]:
    """A replay, and the tokens that its steps publish."""
    seen: list[list[int]] = []
    before = PlannedStep.publish

    def publish(step: PlannedStep, **values: object) -> None:
        seen.append(values["last"].tolist())  # type: ignore[attr-defined]
        before(step, **values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedStep, "publish", publish)
        return replay(recording), seen


def trial_of_replays(folder: Path) -> set[str]:
    """What goes wrong with a whole recording, one of a ring that has lost its beginning, and a written one."""
    wrong, files, steps = set[str](), list[Path](), (12, 230)
    for number in steps:
        with record_operations(folder, ring_bytes=2 << 14, segments=2) as recorder:
            world = World(size=6)
            for _ in range(number):
                world.step()
            files.append(recorder.dump())  # type: ignore[arg-type]
    for name, path in zip(("whole", "ring"), files, strict=True):
        recording = load(path)
        again, seen = published(recording)
        calls = [event for event in recording.events if event.is_call and event.stream != STATE]
        wrong |= {f"{name}: {again.finding.code}"} if again.finding is not None else set()
        wrong |= {f"{name}: refused"} if again.refused else set()
        wrong |= {f"{name}: values"} if any(row != list(range(len(row))) for row in seen[:-1]) else set()
        wrong |= {f"{name}: lost"} if not seen or len(calls) < 30 else set()
    recording = load(recorded_bug(folder))
    made = replay(recording, level="cheap").made
    small = shrunk_calls(recording, made, level="cheap").smallest
    wrong |= {"small: long"} if len(small) > 8 else set()
    recording.save(folder / "small.ops", small)
    if not replay(load(folder / "small.ops"), alike=Finding.resembles).repeated:
        wrong.add("small: lost")
    return wrong


REPLAY_MUTANTS = {
    "handles_are_believed": (
        "replay.replayer:Replayer._slots",
        "now = self._handles.get((handles.pool, slot, generation))",
        "now = slot, generation",
    ),
    "joiners_named_from_the_first_row": (
        "replay.replayer:Replayer._translate",
        "array[::-1].tolist()",
        "array.tolist()",
    ),
    "landed_values_are_not_published": (
        "replay.replayer:Replayer._made",
        "self._published(target, name, landed.get(name))",
        "self._published(target, name, None)",
    ),
    "state_is_given_again": (
        "replay.replayer:Replayer.define",
        "self._fresh.discard(number)\nif number in self.objects:",
        "if number in self.objects:",
    ),
    "batch_left_out_is_lost": (
        "replay.replayer:Replayer._product",
        "source = self._left_out[number]",
        "raise _Missing",
    ),
    "steps_of_a_lost_segment_are_kept": (
        "replay.recorder:Recorder._begin",
        "versions.clear()",
        "pass",
    ),
    "joiners_are_not_noted": (
        "replay.recorder:Recorder._planned_generally",
        'self.write("result", own, number=step._recorded)',
        "pass",
    ),
    "entries_are_not_noted": (
        "replay.objects:_entries",
        'yield "publish", (slots,), values, None',
        "pass",
    ),
    "lengths_are_not_noted": (
        "replay.objects:_pages_taken",
        'yield "commit", (owners, committed[rows]), {}, None',
        "pass",
    ),
    "landed_with_the_next_step": (
        "replay.recorder:Recorder._landing",
        "landed, 0, 0, number, 0, 0",
        "landed, 0, 0, number + 3, 0, 0",
    ),
}
"""Name -> function, a piece of it, and what stands there instead."""


def test_replays_are_right(tmp_path: Path) -> None:
    """The clean twin of the mutants below: nothing goes wrong."""
    assert trial_of_replays(tmp_path) == set()


@pytest.mark.parametrize("name", REPLAY_MUTANTS)
def test_a_mutant_of_record_or_replay_is_seen(tmp_path: Path, name: str) -> None:
    """A recorder or replayer with a bug breaks an invariant, refuses calls, or publishes other values."""
    where, before, after = REPLAY_MUTANTS[name]
    with contextlib.ExitStack() as undo:
        Diff((Change(where, ((before, after),)),))(Patch(undo))
        assert trial_of_replays(tmp_path) != set()


class Hand:
    """An engine's own batch."""

    def __init__(self) -> None:
        self.lens = np.array([3, 4])
        self.device = torch.tensor([3, 4])

    def advance(self, by: int) -> None:
        """Each request is longer; the device side is forgotten once."""
        self.lens = self.lens + by
        if by < 3:
            self.device = self.device + by


def test_hooked_methods_of_a_watched_engine_are_events(tmp_path: Path) -> None:
    """The file of a violation in a watched engine says which of its methods were called, and with what."""
    from batchstate.watch import watch

    watched = watch(Hand, num_rows=lambda hand: len(hand.lens), pairs=[("lens", "device")], after=["advance"])
    with record_operations(tmp_path) as recorder, checks("full"), watched:
        hand = Hand()
        hand.advance(1)
        hand.advance(by=2)
        with pytest.raises(Violation):
            hand.advance(3)
    recording = load(recorder.files[0])
    hooked = [event.body for event in recording.events if event.kind == "hook"]
    assert [body["call"] for body in hooked] == ["Hand.advance"] * 3
    assert [(body["args"], body["kwargs"]) for body in hooked] == [([1], {}), ([], {"by": 2}), ([3], {})]
    assert "Hand.advance(by=2)" in show.text(recording)
