"""`python -m benchmarks.gpu`: its stages on a CPU, and that each of them finds what it is there to find."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from batchstate import StaticBuffers, checks
from batchstate.errors import CaptureError
from batchstate.races import Race
from batchstate.races.devices import open_device, window_of
from batchstate.runtime import CpuRuntime, open_runtime
from batchstate.runtime.memory import MappedMemory
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import child, runner
from benchmarks.gpu.outcome import STAGES, Notes, Outcome, Setting
from benchmarks.gpu.report import page, remark
from benchmarks.gpu.stages import capture, machine, profiler, race, rates, suite, sync
from benchmarks.gpu.steps import Serving
from examples.engine import serving
from tests import idiom_verdicts
from tests.race_cases import CASES
from tests.race_cases.tools import Says, Verdict
from tests.race_cases.verdicts import Column, Made, Table

ROOT = Path(__file__).parents[2]
QUICK = Setting("cpu", quick=True)


def ran(name: str) -> Outcome:
    """The outcome of a stage in this process, on a CPU, with small sizes."""
    return child.run_here(name, QUICK)


# The steps that the stages measure


@pytest.mark.parametrize("device", ["cpu", "race", "race:prompt", "sim:lazy", "sim:pct"])
def test_the_steps_have_no_race_and_the_right_tokens(device: str) -> None:
    """The measured program is one that a GPU may run: ordered, one step ahead, every token known to the host."""
    with window_of(open_device(device)) as runtime, checks("cheap"):
        serving = Serving(runtime, rows=12, churn=3)
        for _ in range(12):
            serving.step()
        serving.drain()
        assert serving.wrong_tokens == 0
        others = Serving(runtime, num_columns=2, rows=12, churn=3)
        buffers = others.buffers()
        for step in range(8):
            others.batch_step(writes=step % 2 == 0, buffers=buffers if step % 4 < 2 else None)


def test_a_wrong_token_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps compare what came with what must come."""
    serving = Serving(open_runtime("cpu"), rows=8, churn=2)
    serving.step()
    serving._tokens[3] += 1
    serving.drain()
    assert serving.wrong_tokens == 1


@pytest.mark.parametrize("own_stream", [True, False], ids=["one stream", "two streams"])
@pytest.mark.parametrize("device", ["race", "race:prompt", "sim:lazy", "sim:pct"])
def test_the_replays_have_no_race_and_the_right_values(device: str, own_stream: bool) -> None:
    """The program that a graph is replayed in is ordered, on one stream and on two."""
    with window_of(open_device(device)) as runtime, checks("cheap"):
        notes = Notes()
        capture._replayed(runtime, notes, "cheap", own_stream=own_stream, rows=6, steps=8)
        assert notes.problems == []


def test_buffers_written_under_a_running_graph_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fence of the replay before, the next step is written into what that one still reads."""
    monkeypatch.setattr(StaticBuffers, "read_until", lambda buffers, fence: None)
    with window_of(open_device("race")) as runtime, pytest.raises(Race, match="static buffers"):
        capture._replayed(runtime, Notes(), "cheap", own_stream=False, rows=6, steps=8)


# Stages as they are


@pytest.mark.parametrize("name", ["machine", "mapped", "sync", "profiler", "capture", "engine", "race"])
def test_a_stage_runs_on_a_cpu(name: str) -> None:
    """As far as it has a meaning there, and it says what it found in a line."""
    outcome = ran(name)
    assert outcome.state == "ok", outcome
    assert outcome.figures
    assert outcome.seconds > 0
    assert remark(name, outcome)
    json.dumps(attrs.asdict(outcome))


def test_every_stage_has_a_file_and_every_file_is_a_stage() -> None:
    """None is forgotten, and the files of the suite are there."""
    files = {path.stem for path in Path(suite.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == set(STAGES)
    for stage in STAGES.values():
        assert callable(importlib.import_module(stage.module).run)
    assert not [file for file in suite.FILES if not (ROOT / file).exists()]
    assert len(set(suite.FILES)) == len(suite.FILES)


# Each finds what it is there for


def test_a_stage_without_a_demand_has_failed() -> None:
    """A stage that cannot run here says so, unless something was wrong before."""
    assert Notes().outcome().state == "failed"
    assert Notes(not_run="needs CUDA").outcome() == Outcome("not run", "needs CUDA")
    assert Notes(not_run="needs CUDA", problems=["wrong"]).outcome().state == "failed"


def test_what_a_stage_raises_is_its_failure() -> None:
    """With its traceback, and without ending the command."""
    outcome = child.run_here("machine", Setting("nonsense"))
    assert outcome.state == "failed"
    assert "unknown device" in outcome.why
    assert "open_runtime" in outcome.figures["traceback"]


def test_a_hidden_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that asks the device for a number fails the stage."""
    step = Serving.step

    def asking(serving: Serving) -> None:
        step(serving)
        serving.batch.seq_lens.device.sum().item()

    monkeypatch.setattr(Serving, "step", asking)
    outcome = ran("sync")
    assert outcome.state == "failed"
    assert ".item()" in outcome.why


def test_a_window_that_finds_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage tries its own windows on a call that waits."""
    monkeypatch.setattr(sync, "_windows", lambda runtime, window: contextlib.nullcontext())
    outcome = ran("sync")
    assert outcome.state == "failed"
    assert "was not found under guard" in outcome.why


def test_torchs_mode_is_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the window is torch's own, also when something in it raises."""
    modes: list[object] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    runtime: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(RuntimeError, match="synchronizing"), sync._windows(runtime, "torch"):
        raise RuntimeError("called a synchronizing CUDA operation")
    assert modes == [0, "error", 0]


def test_an_operation_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more kernel in a step fails the stage, with the counts that it found."""
    step = Serving.batch_step

    def more(serving: Serving, **how: Any) -> None:
        step(serving, **how)
        serving.batch.seq_lens.device + 1

    monkeypatch.setattr(Serving, "batch_step", more)
    outcome = ran("profiler")
    assert outcome.state == "failed"
    assert "operations dispatched a step: 1.0, and not 0.0" in outcome.why


def trace(*events: tuple[str, str]) -> list[dict[str, str]]:
    """Events of a trace by kind and name."""
    return [{"cat": kind, "name": name, "ph": "X"} for kind, name in events]


def test_events_of_a_trace_are_counted() -> None:
    """Kernels, memsets, copies by direction and memory, calls by name; what else is there is left out."""
    counted = profiler.counts_of(
        trace(
            ("cpu_op", "aten::copy_"),
            ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"),
            ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"),
            ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)"),
            ("gpu_memcpy", "Memcpy DtoD (Device -> Device)"),
            ("kernel", "scatter"),
            ("gpu_memset", "Memset (Device)"),
            ("cuda_runtime", "cudaLaunchKernel"),
            ("cuda_runtime", "cudaEventRecordWithFlags"),
            ("cuda_runtime", "cudaLaunchKernel"),
        )
    )
    assert counted == {
        "kernels": 1,
        "memsets": 1,
        "copies": {"HtoD, pinned": 1, "HtoD, pageable": 1, "DtoH, pinned": 1, "DtoD": 1},
        "calls": {"cudaLaunchKernel": 2, "cudaEventRecordWithFlags": 1},
    }


@pytest.mark.parametrize(
    ("figures", "problem"),
    [
        ({"copies": {"HtoD, pinned": 1.0}, "kernels": 1.0, "memsets": 0.0}, None),
        ({"copies": {"HtoD, pinned": 2.0}, "kernels": 1.0, "memsets": 0.0}, "copies"),
        ({"copies": {"HtoD, pageable": 1.0}, "kernels": 1.0, "memsets": 0.0}, "copies"),
        ({"copies": {"HtoD, pinned": 1.0, "DtoD": 0.5}, "kernels": 1.0, "memsets": 0.0}, "copies"),
        ({"copies": {"HtoD, pinned": 1.0}, "kernels": 2.0, "memsets": 0.0}, "kernels"),
        ({"copies": {"HtoD, pinned": 1.0}, "kernels": 0.0, "memsets": 0.0}, "kernels"),
        ({"copies": {"HtoD, pinned": 1.0}, "kernels": 1.0, "memsets": 1.0}, "memsets"),
    ],
)
def test_what_a_step_may_be_on_cuda(figures: dict[str, Any], problem: str | None) -> None:
    """One copy from pinned memory and one kernel: anything more, less or else is a problem."""
    notes = Notes()
    profiler.demand(notes, "a step", figures, kernels=1.0)
    assert [problem in said for said in notes.problems if problem] == ([True] if problem else [])
    assert bool(notes.problems) == (problem is not None)


def test_a_copy_across_is_no_operation_of_the_device() -> None:
    """Uploads and downloads are counted as copies; a copy on one side is an operation."""
    here, there = torch.zeros(3), torch.zeros(3, device="meta")
    with profiler.Dispatched() as dispatched:
        there.copy_(here)
        here.to("meta", non_blocking=True, copy=True)
        here.copy_(here + 1)
        here.to(torch.int32)
        here[1:].view(2, 1)
        torch.empty(4)
    assert dict(dispatched.operations) == {"aten::add": 1, "aten::copy_": 1, "aten::_to_copy": 1}


def test_mapped_memory_that_is_two_memories_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy instead of a view: address, reads and writes all say so."""

    def copied(runtime: CpuRuntime, shape: tuple[int, ...], dtype: torch.dtype) -> MappedMemory:
        return MappedMemory(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))

    monkeypatch.setattr(CpuRuntime, "_mapped", copied)
    outcome = ran("mapped")
    assert outcome.state == "failed"
    for problem in (
        "address for kernels",
        "what a kernel reads",
        "what the host reads",
        "of the scatter",
        "of backups",
    ):
        assert problem in outcome.why


def test_a_wrong_token_of_the_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage compares with the reference."""
    monkeypatch.setattr(serving, "generate", lambda model, prompts, limits, eos_token_ids: [[-1]] * len(prompts))
    outcome = ran("engine")
    assert outcome.state == "failed"
    assert "plain, checks full: mismatches: 6, and not 0" in outcome.why


def test_a_detector_that_errs_and_a_sanitizer_that_sees_nothing_are_found() -> None:
    """A wrong verdict or an error of the detector fails the stage; so does a sanitizer without one finding."""
    right = {name: Verdict(Says.RACE if case.racy else Says.NONE) for name, case in CASES.items()}
    first, second, *_ = right
    wrong = {**right, first: Verdict(Says.NONE if CASES[first].racy else Says.RACE), second: Verdict(Says.ERROR)}
    made = Made("2026-01-01", "a machine", "2.11")
    notes = Notes()
    race._detector(notes, "detector on CUDA", Column(made, wrong))
    assert any("wrong about" in said for said in notes.problems)
    assert any("failed in 1 cases" in said for said in notes.problems)
    for verdicts, problems in ((right, 0), (dict.fromkeys(right, Verdict(Says.NONE)), 1)):
        notes = Notes()
        race._sanitizer(notes, Table({"sanitizer": Column(made, verdicts)}))
        assert len(notes.problems) == problems
        assert notes.figures["sanitizer"]["races"] == sum(case.racy for case in CASES.values())


def test_a_watch_that_errs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong verdict of `watch_cuda` on an idiom fails the stage."""
    right = dict.fromkeys(idiom_verdicts.TOOLS["watched"], Verdict(Says.NONE))
    table = Table({"watched": Column(Made("2026-01-01", "a machine", "2.11"), right)})
    monkeypatch.setattr(idiom_verdicts, "table", lambda: table)
    notes = Notes()
    race._idioms(notes)
    assert any("watch_cuda is wrong about" in said for said in notes.problems)
    assert "watched: right about 36 of 70 idioms" in notes.figures["idioms"]["said"]


def test_a_graph_is_captured_and_what_may_not_be_in_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the graph is torch's; the library has to refuse a copy while it is captured."""
    done: list[str] = []

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    @contextlib.contextmanager
    def capturing(graph: Graph, **_: Any) -> Iterator[None]:
        done.append("begin")
        yield
        done.append("end")

    def refused() -> None:
        raise CaptureError("no", remedy="none")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    runtime: Any = SimpleNamespace(device=torch.device("cuda"))
    replay, was_refused = capture._captured(runtime, lambda: done.append("body"), refused)
    replay()
    assert was_refused
    assert not capture._captured(runtime, lambda: None, lambda: None)[1]
    assert done[:4] == ["begin", "body", "end", "replay"]


@pytest.mark.parametrize("xdist", [False, True])
def test_processes_share_the_suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, xdist: bool) -> None:
    """All tests of the files are run once, dealt out by file, or one by one where pytest-xdist is there."""
    if xdist:
        pytest.importorskip("xdist")
    else:
        monkeypatch.setattr(suite, "find_spec", lambda name: None)
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--device')\n")
    for name in ("one", "two"):
        (tmp_path / "tests" / f"test_{name}.py").write_text(f"def test_{name}(): pass\n")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "FILES", ("tests/test_one.py", "tests/test_two.py"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3))
    started: list[list[str]] = []
    popen = subprocess.Popen

    def noted(command: list[str], **options: Any) -> Any:
        started.append(command)
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", noted)
    suite.run(Setting("cpu", seconds=120.0), notes := Notes())
    assert notes.problems == []
    assert notes.figures["processes"] == 2
    assert [("-n" in command) for command in started] == ([True] if xdist else [False, False])
    assert sum(command.count("tests/test_one.py") for command in started) == 1
    assert (notes.figures["passed"], notes.figures["tests"], notes.figures["left out"]) == (2, 2, [])


def test_failures_of_the_suite_are_told(tmp_path: Path) -> None:
    """Names and messages of what failed, and what was skipped and why, out of pytest's own report."""
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1">'
        '<testcase classname="tests.test_a" name="test_one"/>'
        '<testcase classname="tests.test_a" name="test_two"><failure message="boom">a trace</failure></testcase>'
        '<testcase classname="tests.test_a" name="test_three"><error message="no fixture">b</error></testcase>'
        '<testcase classname="tests.test_a" name="test_four"><skipped message="needs a GPU">c</skipped></testcase>'
        "</testsuite></testsuites>",
        encoding="utf-8",
    )
    notes = Notes()
    suite._read(notes, [report])
    assert notes.figures["passed"] == 1
    assert notes.figures["failed"] == ["tests.test_a::test_two", "tests.test_a::test_three"]
    assert notes.figures["first failures"][0]["said"] == "boom\na trace"
    assert notes.figures["why skipped"] == {"needs a GPU": 1}
    assert notes.outcome().state == "failed"
    nothing = Notes()
    suite._read(nothing, [])
    assert nothing.problems == ["no test passed"]


def test_rows_beyond_what_is_asked_for_are_named() -> None:
    """A target missed is a figure; no row at all, or a count beyond its limit, is a failure."""
    row: dict[str, Any] = {"work": "a", "ours_us": 1.0, "baseline": "b", "baseline_us": 4.0, "ratio": 4.0}
    rows = [{**row, "target": 5}, {**row, "work": "c", "limit": 1.1}, {**row, "target": 2}, row]
    notes = Notes()
    rates._rows(notes, {"rows": rows})
    assert notes.figures["missed"] == ["a: 4.00", "c: 4.00"]
    assert not rates.missed({**row, "ratio": None, "target": 5})
    assert notes.outcome().state == "ok"
    counts = [{"work": "a step", "counted": "forced_syncs", "count": 1, "limit": 0, "met": False}]
    for report, why in (({"rows": []}, "no row"), ({"rows": rows, "counts": counts}, "a step: forced_syncs")):
        rates._rows(bad := Notes(), report)
        assert why in bad.outcome().why


def test_the_machine_says_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own tool; where that is missing, None rather than a guess."""
    properties = SimpleNamespace(total_memory=139 << 30, multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    said = SimpleNamespace(stdout="580.159.04\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: said)
    facts = machine._cuda(torch.device("cuda:0"))
    assert (facts["driver"], facts["gpu_memory_gib"], facts["compute_capability"]) == ("580.159.04", 139.0, "9.0")
    monkeypatch.setattr(machine, "Path", lambda name: Path("/nowhere") / str(name).lstrip("/"))
    said.stdout = ""
    assert machine._driver() is None


def test_a_page_names_the_build_of_torch() -> None:
    """Its own version does; the one that its distribution is registered under may not."""
    figures: dict[str, Any] = {"device_name": "a GPU", "cores": 16, "torch": "2.11.0+cu130"}
    figures["packages"] = {"torch": "2.11.0", "numpy": "2.5.2", "nixl": None}
    stages = {"machine": attrs.asdict(Outcome("ok", figures=figures))}
    lines = page({"stages": stages, "device": "cuda:0", "date": "2026-11-23", "commit": "11dd8b8"}).splitlines()
    assert "| torch | 2.11.0+cu130 |" in lines
    assert "| numpy | 2.5.2 |" in lines
    assert not any("nixl" in line for line in lines)


# The command


def test_the_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Machine, date, commit, from a process of its own as each stage; and then a page."""
    file = tmp_path / "gpu.json"
    assert command.main(["--device", "cpu", "--quick", "--only", "machine", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert list(report["stages"]) == ["machine"]
    assert report["stages"]["machine"]["figures"]["torch"] == torch.__version__
    assert report["date"].startswith("20")
    assert report["commit"]
    capsys.readouterr()
    assert command.main(["--page", str(file)]) == 0
    markdown = capsys.readouterr().out
    assert f"| torch | {torch.__version__} |" in markdown


def test_a_stage_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hears nothing is killed, and has failed."""
    monkeypatch.setattr(runner, "GRACE", 0.1)
    outcome = runner.run_child("machine", Setting("cpu", seconds=0.1))
    assert outcome.state == "failed"
    assert outcome.why == "not done within 0 seconds"


def test_what_a_stage_found_before_its_time_was_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hears that it has to end says how far it came."""

    def slow(setting: Setting, notes: Notes) -> None:
        notes.require(True, "")
        notes.figures["steps"] = 3
        child._end()

    monkeypatch.setattr(machine, "run", slow)
    outcome = child.run_here("machine", Setting("cpu", seconds=20))
    assert (outcome.state, outcome.why) == ("failed", "not done within 20 seconds")
    assert outcome.figures["steps"] == 3


def test_a_child_that_is_late_is_asked_to_end_first() -> None:
    """By a signal, after which it has time to write; what comes back is its exit code."""
    program = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, process_group=0)
    assert process.stdout is not None
    process.stdout.read(1)  # it listens now
    assert runner._waited(process, 0.01) == 7
    runner._kill(process)
    process.stdout.close()


def test_one_failure_ends_no_other_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stage has its say, the file is written after each, and the exit code is 1."""
    file = tmp_path / "gpu.json"
    seen: list[int] = []

    def one(name: str, setting: Setting) -> Outcome:
        seen.append(len(json.loads(file.read_text())["stages"]) if file.exists() else 0)
        if name == "sync":
            return Outcome("failed", "the host waited", {"printed": "..."})
        return Outcome("not run", "needs CUDA")

    monkeypatch.setattr(runner, "run_child", one)
    assert command.main(["--device", "cpu", "--json", str(file)]) == 1
    assert seen == list(range(len(STAGES)))
    report = json.loads(file.read_text())
    assert [name for name, outcome in report["stages"].items() if outcome["state"] == "failed"] == ["sync"]
    output = capsys.readouterr()
    assert "the host waited" in output.out
    assert "mapped: not run: needs CUDA" in output.err
    markdown = page(report)
    assert "the host waited" in markdown
    assert all(f"| {name} |" in markdown for name in STAGES)


def test_stages_for_which_no_time_is_left_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what they would have said, so the command cannot say that all is well."""
    monkeypatch.setattr(runner, "run_child", lambda name, setting: Outcome("ok"))
    outcomes = runner.run_all(["machine", "sync"], "cpu", quick=True, budget=0.5, done=lambda *_: None)
    assert {outcome.state for outcome in outcomes.values()} == {"failed"}


def test_without_the_device_nothing_else_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage says why, and the others that it said so."""
    monkeypatch.setattr(runner, "run_child", lambda name, setting: Outcome("failed", "no such device"))
    outcomes = runner.run_all(list(STAGES), "cuda", quick=True, budget=100, done=lambda *_: None)
    assert outcomes["machine"].why == "no such device"
    assert {outcome.why for name, outcome in outcomes.items() if name != "machine"} == {
        "the device cannot be used: see stage 'machine'"
    }


def test_the_commit_comes_from_git_or_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the files without git is told which commit it is, or says that it does not know."""

    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.delenv("BATCHSTATE_COMMIT", raising=False)
    assert command._commit() == "unknown"
    monkeypatch.setenv("BATCHSTATE_COMMIT", "abc")
    assert command._commit() == "abc"


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--budget", "0"], ["--budget", "soon"]])
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    """An argument that cannot be meant exits with 2."""
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2


def test_a_page_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, and without a traceback."""
    file = tmp_path / "other.json"
    file.write_text("{}")
    assert command.main(["--page", str(file)]) == 2
    assert "is not a file of this command" in capsys.readouterr().err


def test_figures_of_every_stage_have_a_line_and_a_page() -> None:
    """Figures of CUDA alone too: kernels and copies of the profiler, the sanitizer, the rows, the tests."""
    step = {"dispatched": 1.0, "kernels": 1.0, "memsets": 0.0, "copies": {"HtoD, pinned": 1.0}, "calls": {}}
    row = {"work": "a|b", "ours_us": 1.0, "baseline": "c", "baseline_us": 4.0, "ratio": 4.0, "target": 5}
    absent = {**row, "baseline": "vLLM", "ours_us": None, "baseline_us": None, "ratio": None, "note": "not installed"}
    sanitizer = {"races found": 3, "races": 108, "false alarms": [], "errors": []}
    totals = {"passed": 9, "failures": 0, "errors": 0, "skipped": 1, "processes": 4, "left out": ["tests/test_x.py"]}
    figures: dict[str, dict[str, Any]] = {
        "profiler": {"steps profiled": 4, "40 columns, a table written": step},
        "race": {"cases": 216, "sanitizer": sanitizer, "fuzz": {"rules": 200}},
        "rates": {"rows": [row, absent], "missed": ["a|b: 4.00"], "left out": ["transfers"]},
        "suite": totals,
        "capture": {"off": {"replays": 12}},
    }
    outcomes = {name: Outcome("ok", "", stage, 1.0) for name, stage in figures.items()}
    assert "1 kernel, 1 copy a step" in remark("profiler", outcomes["profiler"])
    assert "finds 3 of 108 races" in remark("race", outcomes["race"])
    report = {"device": "cuda", "date": "2026-01-02T03:04:05", "commit": "abc"}
    markdown = page({**report, "stages": {name: attrs.asdict(outcome) for name, outcome in outcomes.items()}})
    assert "# cuda, 2026-01-02" in markdown
    assert "| a\\|b | 1.0 | c | 4.0 | 4.00 | at least 5 |" in markdown
    assert "| a\\|b |  | vLLM |  | not installed | at least 5 |" in markdown
    assert "| 40 columns, a table written | 1 | 1.0 | 1 HtoD, pinned |" in markdown
    assert "`tests/test_x.py`" in markdown
