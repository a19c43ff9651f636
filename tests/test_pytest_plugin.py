"""The pytest plugin: devices, levels and marks of an engine's tests, and what it says when one of them fails."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from batchstate import levels
from batchstate.cli import main
from batchstate.races import RaceReport, sim
from batchstate.races.render import race_html
from batchstate.testing.pytest._failures import file_name, violations_in
from batchstate.violations import Breach, Code, Violation

pytest_plugins = "pytester"

PLUGIN = "batchstate.testing.pytest.plugin"
ROOT = Path(__file__).parent.parent
DRAWN = (RaceReport, sim, race_html)  # imported here once: a run in this process drops its own imports at its end
with sim.SimRuntime() as warm:  # so is what torch imports when it first infers a shape
    warm.upload([np.zeros(1)]).view(0).add(1)

ENGINE = """
    import pytest
    import torch

    def step(rt, ordered):
        table = rt.device_zeros((9, 4), torch.int64)
        forward = rt.stream("forward")
        rt.wait(rt.record(), stream=forward)
        rt.next_step()
        with rt.use(forward):
            table[3].clone()
            done = rt.record()
        rt.next_step()
        if ordered:
            rt.wait(done)
        table[3] = 7
"""
RACY = """
    def test_step(batchstate_runtime):
        step(batchstate_runtime, ordered=False)
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs tests of an engine with the plugin, and no other that happens to be installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # also where batchstate is not installed
    monkeypatch.delenv(levels.ENVIRONMENT_VARIABLE, raising=False)

    def run(source: str, *args: str) -> pytest.RunResult:
        pytester.makepyfile(test_engine=textwrap.dedent(ENGINE) + textwrap.dedent(source))
        return pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", *args)

    return run


def section(result: pytest.RunResult) -> str:
    """The lines that the plugin added to a report."""
    lines = result.outlines
    begin = next((number for number, line in enumerate(lines) if line.strip("-") == " batchstate "), len(lines))
    rest = lines[begin + 1 :]
    end = next((number for number, line in enumerate(rest) if line.startswith(("____", "====", "----"))), len(rest))
    return "\n".join(rest[:end])


# What it costs those who do not use it


def test_import_is_light() -> None:
    """Importing the plugin imports nothing else but the three packages that it lies in, and what lists their names."""
    code = f"import sys, pytest; before = set(sys.modules); import {PLUGIN}; print(sorted(set(sys.modules) - before))"
    environment = {name: value for name, value in os.environ.items() if name != "BATCHSTATE_COMPILED"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(
        ["batchstate", "batchstate._lazy", "batchstate.testing", "batchstate.testing.pytest", PLUGIN]
    )


@pytest.mark.parametrize("options", [(), ("--collect-only",), ("--batchstate-device=race", "--batchstate-seed=3")])
def test_a_run_without_it_stays_as_it_was(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """A run whose tests use nothing of it imports nothing for it, and failures say what they always said."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # also where batchstate is not installed
    pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            print([name for name in ("torch", "numpy", "hypothesis", "attrs", "attr") if name in sys.modules])
        """
    )
    pytester.makepyfile("def test_right(): pass\n\ndef test_wrong(): assert not 'so'\n")
    result = pytester.runpytest_subprocess("-p", PLUGIN, *options)
    assert result.outlines[-1] == "[]"
    assert all("batchstate" not in line for line in result.outlines if not line.startswith("plugins")) or options[1:]


def test_it_is_an_entry_point() -> None:
    """Where batchstate is installed, pytest finds the plugin by itself."""
    found = importlib.metadata.entry_points(group="pytest11", name="batchstate")
    if not found:
        pytest.skip("batchstate is not installed here")
    assert {entry.value for entry in found} == {PLUGIN}


# Options, ini file, marks


def test_header_says_what_was_asked_for(run: Run, pytester: pytest.Pytester) -> None:
    """The header has a line if an option or the ini file asks for something."""
    test = "def test_nothing(): pass"
    assert "batchstate:" not in str(run(test).stdout)
    run(test, "--batchstate-device=race", "--batchstate-checks=off").stdout.fnmatch_lines(
        "batchstate: device race, checks off"
    )
    pytester.makeini("[pytest]\nbatchstate_device = sim\nbatchstate_checks = full")
    run(test, "--batchstate-seed=0").stdout.fnmatch_lines("batchstate: device sim, checks full, seed 0")


def test_the_nearest_setting_holds(run: Run, pytester: pytest.Pytester) -> None:
    """A mark of the test counts before one of its module, that before the option, and that before the ini file."""
    show = """
    @pytest.fixture
    def shown(batchstate_runtime):
        rt = batchstate_runtime
        return type(rt).__name__, getattr(rt, "scheduler", None), getattr(rt, "seed", None), rt.steps_in_flight

    def test_module(shown):
        print("module", *shown)

    @pytest.mark.batchstate(device="sim:lazy")
    def test_own(shown):
        print("own", *shown)
    """
    result = run(show, "-s")
    result.stdout.fnmatch_lines(["*module CpuRuntime None None 2*", "*own SimRuntime lazy 0 2*"])
    pytester.makeini("[pytest]\nbatchstate_device = race")
    run(show, "-s").stdout.fnmatch_lines(["*module RaceRuntime None None 2*", "*own SimRuntime lazy 0 2*"])
    option = ("-s", "--batchstate-device=sim:pct", "--batchstate-seed=5")
    run(show, *option).stdout.fnmatch_lines(["*module SimRuntime pct 5 2*", "*own SimRuntime lazy 5 2*"])
    module = "\n    pytestmark = pytest.mark.batchstate(device='sim:random', seed=7, steps_in_flight=3)\n"
    run(module + show, *option).stdout.fnmatch_lines(["*module SimRuntime random 7 3*", "*own SimRuntime lazy 7 3*"])


LEVELS = """
    import os
    import subprocess
    import sys
    from batchstate import levels

    def test_level():
        code = "from batchstate import levels; print(levels.current_checks().value)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        print("level", levels.current_checks().value, done.stdout.strip())

    @pytest.mark.batchstate(checks="off")
    def test_own():
        print("own", levels.current_checks().value)
"""


def test_level_holds_in_every_test(run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The level asked for holds in all tests and the processes they start, and is gone with the run."""
    before = levels.current_checks()
    run(LEVELS, "-s", "--batchstate-checks=full").stdout.fnmatch_lines(["*level full full*", "*own off*"])
    assert levels.current_checks() is before
    assert levels.ENVIRONMENT_VARIABLE not in os.environ
    pytester.makeini("[pytest]\nbatchstate_checks = full")
    run(LEVELS, "-s").stdout.fnmatch_lines(["*level full full*", "*own off*"])
    monkeypatch.setenv(levels.ENVIRONMENT_VARIABLE, "cheap")
    with levels.checks("cheap"):
        run(LEVELS, "-s").stdout.fnmatch_lines(["*level cheap cheap*", "*own off*"])


def test_wrong_options_end_the_run_at_once(run: Run, pytester: pytest.Pytester) -> None:
    """A level that there is not is a usage error, which lists those that there are."""
    test = "def test_nothing(): pass"
    result = run(test, "--batchstate-checks=most")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("*--batchstate-checks: invalid choice: 'most'*")
    pytester.makeini("[pytest]\nbatchstate_checks = most")
    result = run(test)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("*batchstate: unknown level of checks 'most'*")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("'race'", "mark batchstate('race') has an argument without a name"),
        ("devise='race'", "mark batchstate(devise='race') has no argument 'devise'"),
        ("device=None", "mark batchstate(device=None): device is None"),
        ("checks='most'", "mark batchstate(checks='most'): unknown level of checks 'most'"),
        ("seed=True", "mark batchstate(seed=True): seed is True"),
        ("steps_in_flight=0", "mark batchstate(steps_in_flight=0): steps_in_flight is 0"),
        ("device='cdua'", "*unknown device 'cdua'"),
        ("device='sim:best'", "*'best'*"),
    ],
)
def test_wrong_marks_are_refused(run: Run, arguments: str, message: str) -> None:
    """A mark with an argument that is none, or a value that cannot be meant, is an error of its test."""
    result = run(
        f"@pytest.mark.batchstate({arguments})\ndef test_marked(batchstate_runtime): raise SystemExit('it ran')"
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(f"*{message.replace('[', '[[]')}*")


def test_devices_that_are_not_there(run: Run) -> None:
    """A mark for a device that is not there skips its test; an option that names it is an error of each."""
    test = "def test_device(batchstate_runtime): pass"
    for device in ("mtia", "race:mtia"):
        result = run(f"@pytest.mark.batchstate(device='{device}')\n{test}", "-rs")
        result.assert_outcomes(skipped=1)
        result.stdout.fnmatch_lines(f"SKIPPED*test_engine.py*: batchstate: there is no device '{device}' here")
    run(test, "--batchstate-device=mtia").assert_outcomes(errors=1)


# Runtimes


def test_runtimes_come_with_their_window(run: Run) -> None:
    """The fixture's runtime is watched in the test and closed behind it; the factory's in its `with`, of any scope."""
    run(
        """
        opened = []

        @pytest.fixture(scope="module")
        def shared(batchstate_open):
            with batchstate_open(device="race") as rt:
                yield rt

        def test_window(batchstate_runtime):
            opened.append(batchstate_runtime)
            assert batchstate_runtime._window is not None

        def test_closed():
            assert opened[0]._window is None

        def test_several(batchstate_open):
            with batchstate_open(steps_in_flight=3) as rt:
                assert rt.steps_in_flight == 3
            with batchstate_open(device="sim:lazy", seed=4) as rt:
                assert (rt.scheduler, rt.seed) == ("lazy", 4)

        @pytest.mark.xfail
        def test_racy(shared):
            try:
                step(shared, ordered=False)
            except Exception:
                pass

        @pytest.mark.batchstate(min_depth=1)
        def test_shared(shared):
            shared.synchronize()
            step(shared, ordered=True)
        """,
        "--batchstate-device=race",
    ).assert_outcomes(passed=4, xfailed=1)


def test_examples_of_hypothesis_have_runtimes_of_their_own(run: Run) -> None:
    """The factory may be used in a property: no health check objects, and each example is watched by itself."""
    pytest.importorskip("hypothesis")
    result = run(
        """
        from hypothesis import given, settings, strategies as st

        @settings(max_examples=5, deadline=None, database=None)
        @given(ordered=st.booleans())
        def test_property(batchstate_open, ordered):
            with batchstate_open() as rt:
                step(rt, ordered)
        """,
        "--batchstate-device=race",
    )
    result.assert_outcomes(failed=1)
    assert section(result).count("  first  ") == 1


def test_depth_is_demanded(run: Run) -> None:
    """A test that passes with too few steps in flight has failed, where the depth is known and up to the engine."""
    source = """
    @pytest.mark.batchstate(min_depth=2, steps_in_flight=3)
    def test_deep(batchstate_runtime):
        step(batchstate_runtime, ordered=True)

    @pytest.mark.batchstate(min_depth=2)
    def test_shallow(batchstate_open):
        with batchstate_open() as rt:
            for _ in range(3):
                rt.device_zeros((3,), torch.int64)
                rt.next_step()
                rt.synchronize()
    """
    message = ["*in 0 of ? steady steps, never more than ?, and the mark demands 2", "*Something*"]
    for device in ("race", "sim:lazy"):
        result = run(source, f"--batchstate-device={device}")
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(message)
    for device in ("cpu", "sim:eager"):
        run(source, f"--batchstate-device={device}").assert_outcomes(passed=2)


def test_depth_is_demanded_of_every_steady_step(run: Run) -> None:
    """One deep step among shallow ones does not satisfy the mark: the report says in how many the depth was reached."""
    source = """
    @pytest.mark.batchstate(min_depth=2, steps_in_flight=8)
    def test_loop(batchstate_runtime):
        rt, fences = batchstate_runtime, []
        for step in range(6):
            rt.next_step()
            rt.device_zeros((3,), torch.int64)
            fences.append(rt.record())
            if step in WAITS:
                fences[-1].wait()
    """
    for device in ("race", "sim:lazy"):
        run(source.replace("WAITS", "()"), f"--batchstate-device={device}").assert_outcomes(passed=1)
        result = run(source.replace("WAITS", "(1, 3)"), f"--batchstate-device={device}")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*2 steps were in flight at once in 3 of 5 steady steps, never more than 2*"])


def test_a_mark_without_effect_fails(run: Run) -> None:
    """A test that is marked for a device and opens no runtime has failed; one that only its module marks has not."""
    result = run(
        """
        pytestmark = pytest.mark.batchstate(device="race", min_depth=1)

        @pytest.mark.batchstate(device="race", checks="full")
        def test_own():
            pass

        @pytest.mark.batchstate(checks="full")
        def test_level():
            pass

        def test_helper():
            pass
        """
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines("the mark's device had no effect: the test opened no runtime")


def test_summary_says_what_ran_where(run: Run) -> None:
    """A run with a device says how much ran on it, and warns if nothing did."""
    run("def test_nothing(): pass", "--batchstate-device=race").stdout.fnmatch_lines(
        "no test opened a runtime, so --batchstate-device had no effect*"
    )
    source = """
    @pytest.mark.parametrize("times", [1, 2])
    def test_step(batchstate_runtime, times):
        step(batchstate_runtime, ordered=True)

    @pytest.mark.batchstate(device="cpu")
    def test_cpu(batchstate_runtime):
        pass
    """
    run(source, "--batchstate-device=race").stdout.fnmatch_lines(
        "runtimes of tests: 1 on cpu; 2 on race with at most 2 steps in flight"
    )
    assert "batchstate" not in str(run(source).stdout)


# Failures


def test_a_race_is_told_and_kept(run: Run, pytester: pytest.Pytester) -> None:
    """A test that a race fails shows the report, keeps it, and says how to draw it and to run the test again."""
    result = run(RACY, "--batchstate-device=race", "--batchstate-checks=full")
    result.assert_outcomes(failed=1)
    said = section(result)
    (path,) = (pytester.path / "race-reports").iterdir()
    shown = path.relative_to(pytester.path)
    report = RaceReport.load(path)
    assert said == (
        f"{report}\n\n"
        f"report     {shown}\n"
        f"draw it    batchstate race {shown} --out race.html\n"
        "device     race\n"
        "checks     full\n"
        "repeat     pytest test_engine.py::test_step --batchstate-device race --batchstate-checks full"
    )
    assert main(["race", str(path), "--out", str(pytester.path / "race.html")]) == 0
    assert (pytester.path / "race.html").read_text().lower().startswith("<!doctype html>")


def test_reports_go_where_they_are_sent(run: Run, pytester: pytest.Pytester) -> None:
    """`--batchstate-reports` names the folder, also for a run without terminal; one that cannot be is reported."""
    run(RACY, "--batchstate-device=race", "--batchstate-reports=out/races", "-p", "no:terminal")
    assert len(list((pytester.path / "out/races").iterdir())) == 1
    assert not (pytester.path / "race-reports").exists()
    (pytester.path / "file").write_text("in the way")
    result = run(RACY, "--batchstate-device=race", "--batchstate-reports=file")
    result.assert_outcomes(failed=1)
    assert "report     not written: " in section(result)


def test_reports_need_no_terminal(run: Run, pytester: pytest.Pytester) -> None:
    """A run without terminal, as in a worker of xdist, keeps its reports too."""
    assert run(RACY, "--batchstate-device=race", "-p", "no:terminal").ret == pytest.ExitCode.TESTS_FAILED
    assert len(list((pytester.path / "race-reports").iterdir())) == 1


def test_file_names_are_safe_and_distinct() -> None:
    """Whatever a test is called, its file has a name that every file system takes, and nobody else's."""
    nodes = [
        "tests/test_engine.py::test_step[race-2]",
        "tests/test_engine.py::test_step[race/2]",
        "tests/test_engine.py::TEST_STEP[race-2]",
        'test_a.py::test_b[<>:"/\\|?* é\n\udc80]',
        "test_a.py::test_b[" + "x" * 500 + "]",
        "test_a.py::test_b[" + "x" * 501 + "]",
        "",
    ]
    names = [file_name(node, number) for node in nodes for number in (1, 2)]
    assert file_name(nodes[0]).startswith("tests-test_engine-test_step-race-2-")
    assert len({name.lower() for name in names}) == len(names)
    for name in names:
        assert len(name) < 120
        assert re.fullmatch(r"[A-Za-z0-9_-]+\.json", name)


REFILLED = """
    def refill(rt):
        host = rt.pinned((4,), torch.int64)
        table = rt.device_zeros((4,), torch.int64)
        table.copy_(host, non_blocking=True)
        host.numpy()[0] = 1  # torch does not see it: found when the copy is known to be over
"""


def test_a_race_found_at_closing_fails_the_test(run: Run) -> None:
    """What only the end of the window shows is an error of the test; a test that has failed already gets no second."""
    result = run(
        REFILLED + "\n    def test_refill(batchstate_runtime):\n        refill(batchstate_runtime)\n",
        "--batchstate-device=race",
    )
    result.assert_outcomes(passed=1, errors=1)
    assert "the source of a copy may be refilled before the copy has run" in section(result)
    result = run(
        REFILLED + "\n    def test_refill(batchstate_runtime):\n        refill(batchstate_runtime)\n        assert 0\n",
        "--batchstate-device=race",
    )
    result.assert_outcomes(failed=1)


@pytest.mark.parametrize("fixture", ["batchstate_runtime", "batchstate_open"])
def test_a_race_that_somebody_catches_fails_the_test(run: Run, pytester: pytest.Pytester, fixture: str) -> None:
    """An engine that catches everything in its step loop does not hide a race, whether or not the test passes."""
    for ends in ("pass", "assert 0"):
        result = run(
            f"""
            def serve(rt):
                try:
                    step(rt, ordered=False)
                except Exception:
                    pass

            def test_serve({fixture}):
                if "{fixture}" == "batchstate_runtime":
                    serve({fixture})
                else:
                    with {fixture}() as rt:
                        serve(rt)
                {ends}
            """,
            "--batchstate-device=race",
        )
        result.assert_outcomes(failed=1)
        assert "this race was caught" in section(result)
        assert ("something caught a race" in str(result.stdout)) is (ends == "pass")


def broken(code: Code = Code.ROW_COUNT) -> Violation:
    """A violation."""
    return Violation(code, Breach("not so", expected=1, actual=2), remedy="do otherwise", where={"operation": "filter"})


def test_violations_are_found_wherever_they_are() -> None:
    """In groups, in groups of groups, as cause and as context; each once; not where it was meant to be hidden."""
    one, two, three, hidden = (broken() for _ in range(4))
    outer = ValueError("outer")
    outer.__cause__ = ExceptionGroup("all", [KeyError(), ExceptionGroup("more", [one, two])])
    two.__context__ = three
    three.__context__ = outer
    one.__context__ = hidden
    one.__suppress_context__ = True
    assert list(violations_in(outer)) == [one, two, three]
    assert list(violations_in(ValueError())) == []


def test_any_violation_is_explained(run: Run) -> None:
    """Fields of a violation are a table, whichever runtime it came from; of several, each has its own."""
    result = run(
        """
        from batchstate import SlotPool, open_runtime

        def test_double_free():
            pool = SlotPool(open_runtime("cpu"), 4, name="requests")
            slots = pool.take(1)
            pool.free(slots, after=None)
            found = []
            for _ in range(2):
                try:
                    pool.free(slots, after=None)
                except RuntimeError as error:
                    found.append(error)
            raise ExceptionGroup("all", found)
        """
    )
    result.assert_outcomes(failed=1)
    lines = section(result).splitlines()
    assert lines[0].startswith("code       SLOT_")
    assert lines[-2:] == ["checks     cheap", "repeat     pytest test_engine.py::test_double_free"]
    result.stdout.fnmatch_lines("*- batchstate 2 -*")


def test_a_simulated_run_says_how_to_repeat_it(run: Run) -> None:
    """Whatever fails on a simulated device, the report has scheduler and seed; nothing else is explained."""
    wrong = "def test_tokens(batchstate_runtime): assert 0"
    result = run(wrong, "--batchstate-device=sim:lazy", "--batchstate-seed=11")
    assert section(result).splitlines() == [
        "device     sim:lazy",
        "checks     cheap",
        "scheduler  lazy, seed 11",
        "repeat     pytest test_engine.py::test_tokens --batchstate-device sim:lazy --batchstate-seed 11",
    ]
    for device in ("race", "cpu"):
        assert not section(run(wrong, f"--batchstate-device={device}"))
    marked = f"@pytest.mark.batchstate(device='sim:lazy', seed=11, checks='full')\n{wrong}"
    assert section(run(marked)).splitlines()[1:] == [
        "checks     full",
        "scheduler  lazy, seed 11",
        "repeat     pytest test_engine.py::test_tokens",
    ]


def test_expected_failures_are_not_explained(run: Run, pytester: pytest.Pytester) -> None:
    """A test that is expected to fail leaves no report behind."""
    result = run(f"@pytest.mark.xfail\n{RACY.strip()}", "--batchstate-device=race", "-rx")
    result.assert_outcomes(xfailed=1)
    assert not (pytester.path / "race-reports").exists()


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_workers_keep_their_reports(run: Run, pytester: pytest.Pytester) -> None:
    """Under xdist each failing test has its report and its section, and the summary counts all workers."""
    test = 'import pytest\n@pytest.mark.parametrize("n", range(4))\ndef test_step(batchstate_runtime, n):'
    pytester.makepyfile(test_engine="")
    result = run(
        f"{test}\n    step(batchstate_runtime, ordered=n % 2)", "-p", "xdist", "-n2", "--batchstate-device=race"
    )
    result.assert_outcomes(passed=2, failed=2)
    reports = list((pytester.path / "race-reports").iterdir())
    assert [json.loads(Path(one).read_text())["kind"] for one in reports] == ["write after read"] * 2
    result.stdout.fnmatch_lines("runtimes of tests: 4 on race with at most 2 steps in flight")
