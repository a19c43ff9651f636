"""Plain torch code that says `cuda`, on the simulated device: a race makes wrong values in some order of streams."""

# mypy: disable-error-code="no-untyped-call"

import contextlib
import io
import json
import subprocess
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import Event, Stream, current_stream, synchronize

from batchstate.cli import main
from batchstate.errors import ArgumentError
from batchstate.races.cuda import CudaSimRuntime, cuda_on_cpu, declared_kernel
from batchstate.races.sim import LATE, PORTFOLIO, DeviceFault
from tests.cuda_idioms import IDIOMS
from tests.race_cases import CASES, Case
from tests.race_cases.plain import PlainCuda
from tests.test_cuda_on_cpu import attributes, left_over

pytest_plugins = "pytester"

LAG = "lazy oldest random priority pct"
"""Schedulers under which a stream that has work may lag behind the host and behind newer streams."""

SHOWN = {
    "double_buffer_of_the_device_refilled_in_use": "newest random priority pct",
    "empty_gets_what_its_stream_has_freed": "priority pct",
    "event_recorded_twice": "lazy random priority pct",
    "gradients_reduced_by_another_stream": "lazy random priority pct",
    "graph_output_overwritten_by_the_next_replay": "oldest random priority pct",
    "graph_replayed_while_its_input_is_refilled": "lazy random priority pct",
    "kv_offload": "oldest random priority pct",
    "one_landing_for_two_steps": "random priority pct",
    "pipeline_of_two_streams": "newest random priority pct",
    "rows_of_two_requests": "random priority pct",
    "weights_loaded_on_the_default_stream": "priority pct",
    "a_safe_module_moved_and_run": "",
    "empty_that_is_not_filled": " ".join(PORTFOLIO),
}
"""Idiom -> schedulers under which its racy side comes to wrong values; `LAG` for all that are not named."""

NO_RACE = ("a_safe_module_moved_and_run",)
"""Idioms of which both sides are safe."""

DRAWS = ("random", "priority", "pct")
SEEDS = 12
"""Seeds of those, until one shows it."""

MOST = 60
"""Seeds for the micro-cases: two of them show in few orders."""


def values_of(result: Any) -> Any:
    """The numbers of a result, brought to the host when everything has run."""
    if isinstance(result, torch.Tensor):
        return result.tolist()
    return [values_of(one) for one in result] if isinstance(result, list | tuple) else result


def outcome(name: str, racy: bool, scheduler: str, seed: int = 0) -> str:
    """What an idiom comes to."""
    torch.default_generator.manual_seed(0)
    try:
        with cuda_on_cpu(f"sim:{scheduler}", seed=seed) as rt:
            result = IDIOMS[name][1](racy)
            synchronize()
            assert isinstance(rt, CudaSimRuntime)
            assert not rt.unmodelled
            return repr(values_of(result))
    except DeviceFault:
        return "a fault of the device"


@pytest.mark.parametrize("name", IDIOMS)
def test_which_orders_show_an_idiom(name: str) -> None:
    """The racy side has wrong values under the schedulers of the table, the safe side under none."""
    right = outcome(name, False, "eager")
    in_order = outcome(name, True, "eager") if name == "rows_of_two_requests" else right  # its sides differ in a row
    shown = []
    for scheduler in PORTFOLIO:
        seeds = range(SEEDS if scheduler in DRAWS else 1)
        assert outcome(name, False, scheduler) == right
        if any(outcome(name, True, scheduler, seed) != in_order for seed in seeds):
            shown.append(scheduler)
    assert " ".join(shown) == SHOWN.get(name, LAG)


def test_the_table_of_the_page() -> None:
    """How many idioms each scheduler shows, of those whose values depend on the order."""
    dependent = [name for name in IDIOMS if name not in ("empty_that_is_not_filled", "a_safe_module_moved_and_run")]
    shown = Counter(scheduler for name in dependent for scheduler in SHOWN.get(name, LAG).split())
    assert len(dependent) == 33
    assert shown == {"lazy": 25, "newest": 2, "oldest": 24, "random": 31, "priority": 33, "pct": 33}


@pytest.mark.parametrize("name", [name for name in IDIOMS if name not in ("empty_that_is_not_filled", *NO_RACE)])
def test_an_order_for_each_race(name: str) -> None:
    """Where the stream of the first access is late, each racy idiom is wrong in one run, without a seed."""
    with cuda_on_cpu(on_race="collect") as rt:
        IDIOMS[name][1](True)
    in_order = outcome(name, True, "eager")
    assert any(outcome(name, True, f"{LATE}{race.first.lane}") != in_order for race in rt.races)
    assert all(outcome(name, False, f"{LATE}{race.first.lane}") == outcome(name, False, "eager") for race in rt.races)


PAIRS = sorted({case.pair for case in CASES.values()})


def case_values(case: Case, scheduler: str, seed: int = 0) -> Any:
    """What a micro-case comes to, said in plain torch; None where no value shows it."""
    torch.default_generator.manual_seed(0)
    try:
        with cuda_on_cpu(f"sim:{scheduler}", seed=seed) as rt:
            values = case.run(PlainCuda(rt))
            synchronize()
            return None if values is None else repr([one.tolist() for one in values])
    except (DeviceFault, IndexError):  # what a kernel makes of poison
        return "a fault of the device"


@pytest.mark.parametrize("pair", PAIRS)
def test_race_cases_in_plain_torch(pair: str) -> None:
    """The safe side of each pair has the right values under all schedulers, the racy one wrong ones under some."""
    safe, racy = CASES[f"{pair} (safe)"], CASES[f"{pair} (racy)"]
    right, in_order = case_values(safe, "eager"), case_values(racy, "eager")
    if right is None:
        return
    orders = [(name, seed) for seed in range(MOST) for name in PORTFOLIO if name in DRAWS or not seed]
    assert [name for name in PORTFOLIO if case_values(safe, name) != right] == []
    assert any(case_values(racy, name, seed) != in_order for name, seed in orders)


def test_how_many_cases_have_values() -> None:
    """All but three pairs, of which the detector alone can say something."""
    assert sum(case_values(CASES[f"{pair} (safe)"], "eager") is None for pair in PAIRS) == 3


@pytest.fixture
def window() -> Iterator[CudaSimRuntime]:
    """A window in which the device is as late as it can be."""
    with cuda_on_cpu("sim:lazy") as rt:
        assert isinstance(rt, CudaSimRuntime)
        yield rt


def test_a_graph_is_enqueued_when_it_is_replayed(window: CudaSimRuntime) -> None:
    """With its copies and its memory; capturing runs nothing, and each replay draws numbers of its own."""
    counter, host, out = torch.zeros(2, device="cuda"), torch.ones(2).pin_memory(), torch.zeros(2, pin_memory=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.copy_(host, non_blocking=True)
        doubled = counter * 2
        drawn = torch.rand(4, device="cuda")
        out.copy_(doubled, non_blocking=True)
        for waits in (lambda: doubled.sum().item(), lambda: doubled.nonzero(), lambda: doubled.cpu(), synchronize):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                waits()
    assert counter.tolist() == [0, 0]
    graph.replay()
    assert out.tolist() != [2, 2]
    synchronize()
    assert (doubled.tolist(), out.tolist()) == ([2, 2], [2, 2])
    first = drawn.tolist()
    host.fill_(5)
    graph.replay()
    assert (doubled.tolist(), out.tolist()) == ([10, 10], [10, 10])
    assert drawn.tolist() != first


@declared_kernel(reads=["source"], writes=["target"])
def foreign_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """A kernel that torch does not see."""
    target.numpy()[:] = source.numpy()


def test_a_declared_kernel_runs_late(window: CudaSimRuntime) -> None:
    """On its stream, with the values that are there by then; its return value is dropped."""
    total = declared_kernel(reads=["source"])(lambda source: float(source.sum()))
    assert total(torch.ones(4, device="cuda")) is None
    source, target, side = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda"), Stream()
    synchronize()
    with torch.cuda.stream(side):
        foreign_copy(source, target=target)
    source.fill_(7)
    current_stream().synchronize()
    assert target.tolist() == [0, 0, 0, 0]
    side.synchronize()
    assert target.tolist() == [7, 7, 7, 7]


def test_results_whose_shape_depends_on_values_wait(window: CudaSimRuntime) -> None:
    """As on a device; they lie on it, and copies of lists go there one by one."""
    numbers = torch.arange(6, device="cuda")
    found = numbers[numbers > 3]
    assert found.is_cuda
    assert numbers.nonzero().is_cuda
    assert window.waited_at
    other = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch._foreach_copy_([other], [torch.tensor([4, 5]).pin_memory()])
    assert (found - other).tolist() == [0, 0]
    assert not window.unmodelled


def test_events_and_streams_are_asked(window: CudaSimRuntime) -> None:
    """They are complete when what they stand for has run, which who polls comes to see."""
    side, out = Stream(), torch.zeros(4, device="cuda")
    synchronize()
    with torch.cuda.stream(side):
        out.fill_(1)
        done = Event()
        done.record()
    assert (done.query(), side.query(), current_stream().query()) == (False, False, True)
    while not side.query():
        pass
    assert done.query()
    assert out.tolist() == [1, 1, 1, 1]
    with torch.cuda.stream(side):
        out.fill_(2)
    assert (done.query(), side.query()) == (True, False)
    window.name_stream(side, "mine")
    side.synchronize()
    assert window.trace()[-1].partition(": ")[0].endswith(" mine")


def test_memory_is_given_back_behind_its_users(window: CudaSimRuntime) -> None:
    """Bytes that are alive are counted, and a block that a side stream was lent waits for it."""
    side, lent = Stream(), torch.ones(256, device="cuda")
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        doubled = lent * 2
        lent.record_stream(side)
    assert torch.cuda.memory_allocated() == 2048
    del lent
    kept = [torch.zeros(256, device="cuda") for _ in range(3)]
    assert torch.cuda.memory_allocated() == 1024 * 4
    synchronize()
    assert doubled.tolist() == [2] * 256
    assert len(kept) == 3


def test_threads_have_streams_of_their_own(window: CudaSimRuntime) -> None:
    """Four of them, whose work goes on in the order that each has given it."""
    seen: list[Any] = []

    def work(number: int) -> None:
        with torch.cuda.stream(Stream()) as mine:
            numbers = torch.zeros(4, device="cuda")
            for _ in range(50):
                numbers.add_(number)
            current_stream().synchronize()
            seen.append((number, numbers.tolist(), mine))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(one[:2] for one in seen) == [(number, [50 * number] * 4) for number in range(4)]


def test_a_backward_pass_and_a_module(window: CudaSimRuntime) -> None:
    """Right gradients under the latest device; a tensor that is not contiguous keeps its strides."""
    weights = torch.arange(6.0, device="cuda").reshape(2, 3).t().requires_grad_()
    (weights * weights).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[0, 6], [2, 8], [4, 10]]
    model = torch.nn.Linear(3, 2).to("cuda")
    assert torch.allclose(model(weights.detach().t()).cpu(), model.cpu()(torch.arange(6.0).reshape(2, 3)))


def test_what_cannot_be_meant_is_refused() -> None:
    """Devices and schedulers that are none; torch is as it was, also after an error."""
    before = attributes()
    for device in ("cuda", "race:cuda", "simulated", ""):
        with pytest.raises(ArgumentError, match="cuda_on_cpu of device"):
            cuda_on_cpu(device)
    with pytest.raises(ArgumentError, match="unknown scheduler 'eger'"):
        cuda_on_cpu("sim:eger")
    with pytest.raises(ZeroDivisionError), cuda_on_cpu("sim:lazy"):
        torch.zeros(4, device="cuda").fill_(1 // 0)
    assert left_over(before) == []


SCRIPT = """
    import sys
    import torch

    side, table = torch.cuda.Stream(), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        table.fill_(1)
    if "ordered" in sys.argv:
        torch.cuda.current_stream().wait_stream(side)
    print(int(table.sum()))
    assert "fails" not in sys.argv
"""


def in_this_process(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Runs what a process would run."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command[3:])
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def test_a_script_is_compared_in_all_orders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 1 with the first line that differs, or for races that no line shows; 2 for a script that fails in order."""
    monkeypatch.setattr(subprocess, "run", in_this_process)
    script, out = tmp_path / "program.py", tmp_path / "orders.json"
    script.write_text(textwrap.dedent(SCRIPT))
    assert main(["race", "run", "--device", "sim", "--json", str(out), str(script)]) == 1
    printed = capsys.readouterr().err
    assert "sim:lazy: expected '4', got '0'" in printed
    assert "4 of 8 orders of the streams, 1 of them for the races that the detector reports, give another" in printed
    orders = {one["device"]: one["difference"] for one in json.loads(out.read_text())["orders"]}
    assert {name for name, difference in orders.items() if difference} == {
        "sim:lazy",
        "sim:oldest",
        "sim:pct",
        "sim:late=side",
    }
    assert main(["race", "run", "--device", "sim", str(script), "ordered"]) == 0
    assert "0 of 7 orders" in capsys.readouterr().err
    assert main(["race", "run", "--device", "sim", str(script), "fails"]) == 2
    assert "AssertionError" in capsys.readouterr().err
    script.write_text(textwrap.dedent(SCRIPT).replace("print(", "str("))
    assert main(["race", "run", "--device", "sim", str(script)]) == 1
    assert "the script has races all the same" in capsys.readouterr().err


def test_each_order_has_a_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no run finds what another has left in a module."""
    monkeypatch.setattr("batchstate.races.sim.PORTFOLIO", {name: PORTFOLIO[name] for name in ("eager", "lazy")})
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(SCRIPT))
    assert main(["race", "run", "--device", "sim", str(script)]) == 1
    assert "2 of 3 orders" in capsys.readouterr().err


def test_a_script_in_one_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0 where it comes to its end, and 1 where its own check fails."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(SCRIPT))
    assert main(["race", "run", "--device", "sim:lazy", str(script)]) == 0
    assert capsys.readouterr().out == "0\n"
    assert main(["race", "run", "--device", "sim:lazy", "--seed", "3", str(script), "fails"]) == 1
    assert "it ended with AssertionError" in capsys.readouterr().err
    assert main(["race", "run", "--device", "sim", "--baseline", "x", str(script)]) == 2
    assert "--baseline with --device sim" in capsys.readouterr().err


def test_a_test_suite_in_one_order(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pytest --batchstate-device sim:lazy --cuda-on-cpu`: a test fails where its values are wrong."""
    pytester.makepyfile("""
        import torch

        def total(ordered):
            side, table = torch.cuda.Stream(), torch.zeros(4, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                table.fill_(1)
            if ordered:
                torch.cuda.current_stream().wait_stream(side)
            return int(table.sum())

        def test_races():
            assert total(ordered=False) == 4

        def test_is_ordered():
            assert total(ordered=True) == 4
    """)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    plugins = ("-p", "batchstate.testing.pytest.plugin", "-p", "no:cacheprovider")
    result = pytester.runpytest(*plugins, "--batchstate-device", "sim:lazy", "--cuda-on-cpu")
    result.assert_outcomes(passed=1, failed=1)
