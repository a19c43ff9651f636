"""`batchstate race run` and `pytest --cuda-on-cpu`: plain torch code, with no line of the library in it."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchstate import levels
from batchstate.cli import main
from batchstate.races.cuda import CudaRuntime
from batchstate.races.render import race_html
from batchstate.races.report import FINDINGS, load_reports

pytest_plugins = "pytester"

DRAWN = (CudaRuntime, race_html)  # imported here once: a run in this process drops its own imports at its end

PROGRAM = """
    import sys
    import torch

    def step(ordered):
        side = torch.cuda.Stream()
        table = torch.zeros(4, device="cuda")
        if ordered:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return table.clone()
"""

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a script; returns its name."""

    def write(source: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(source))
        return str(path)

    return write


def test_a_script_that_races(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1; reports on stderr, and in JSON kind, both lines, both streams, the missing edge and a line of torch."""
    name, out = script("print(sys.argv[1:])\nstep(ordered=False)\n"), tmp_path / "found.json"
    assert (
        main(["race", "run", "--json", str(out), name, "--steps", "3", "--", "--seed", "5", "--json", "its own"]) == 1
    )
    printed = capsys.readouterr()
    assert printed.out == "['--steps', '3', '--', '--seed', '5', '--json', 'its own']\n"  # all behind SCRIPT is its own
    assert "1 finding; 3 accesses checked, 0 waits inside of torch" in printed.err
    assert "step 0" not in printed.err
    found = json.loads(out.read_text())
    assert (found["format"], found["new"], found["error"]) == (FINDINGS, 1, None)
    (one,) = found["findings"]
    assert one["kind"] == "read after write"
    assert [one[side]["lane"] for side in ("first", "second")] == ["default", "side"]
    assert [one[side]["site"].rpartition("/")[2] for side in ("first", "second")] == [
        "program.py:7 in step",
        "program.py:11 in step",
    ]
    assert one["missing"] == "stream 'side' never waits for zeros on stream 'default'"
    assert one["suggestion"].startswith("`side.wait_stream(torch.cuda.default_stream())`")


def test_waits_are_said_to_hide_races(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0 without a race. Whatever the host waited for is in order, with a singular for one."""
    source = "torch.zeros(1, device='cuda')\n"
    assert main(["race", "run", script(source)]) == 0
    assert "0 findings; 1 access checked, 0 waits inside of torch\n" in capsys.readouterr().err
    assert main(["race", "run", script(source + "torch.zeros(1, device='cuda').item()\n")]) == 0
    assert ", 1 wait inside of torch, which can hide races:\n       1 of item at " in (out := capsys.readouterr().err)
    assert out.endswith("program.py:13 in <module>\n")


def test_accepted_findings_do_not_count(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of earlier findings is the baseline, also where lines have moved; new ones fail."""
    out = tmp_path / "accepted.json"
    assert main(["race", "run", "--json", str(out), script("step(ordered=False)")]) == 1
    moved = script("\n\n\nstep(ordered=False)")
    assert main(["race", "run", "--baseline", str(out), moved]) == 0
    assert "0 findings, 1 accepted" in capsys.readouterr().err
    more = script("step(ordered=False).add_(1)")
    assert main(["race", "run", "--baseline", str(out), more]) == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ZeroDivisionError('in the middle')", "it ended with ZeroDivisionError: in the middle"),
        ("sys.exit(3)", "it ended with 3"),
        ("torch.zeros(4).add_(1)", "nothing was done on a device of cuda"),
        ("def (", "it ended with SyntaxError"),
        ("torch.zeros(1, device='cuda:1')", "cuda:1 was not declared"),
        ("torch.cuda.current_blas_handle()", "no model of torch._C._cuda_getCurrentBlasHandle"),
    ],
)
def test_what_cannot_be_run_is_exit_2(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, said: str
) -> None:
    """And the reason is said, and stands in the JSON."""
    out = tmp_path / "found.json"
    assert main(["race", "run", "--json", str(out), script(source)]) == 2
    assert said in capsys.readouterr().err
    assert said in json.loads(out.read_text())["error"]


@pytest.mark.parametrize(
    ("end", "said"), [("SystemExit('dead')", "it ended with 'dead'"), ("KeyboardInterrupt", "it was interrupted")]
)
def test_an_engine_that_dies_keeps_its_findings(
    script: Script, capsys: pytest.CaptureFixture[str], end: str, said: str
) -> None:
    """Findings before an error, or before the Ctrl-C that ends a server, are printed."""
    assert main(["race", "run", script(f"step(ordered=False)\nraise {end}")]) == 2
    printed = capsys.readouterr()
    assert "missing    stream 'side' never waits" in printed.err
    assert said in printed.err


def test_threads_of_a_script_run_to_their_end(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that are still running where the script ends: Python waits for them too, but for daemons."""
    source = """
        import threading, time

        def late():
            time.sleep(0.3)
            step(ordered=False)

        step(ordered=True)
        threading.Thread(target=late).start()
    """
    assert main(["race", "run", script(source)]) == 1
    assert "clone on 'side'" in capsys.readouterr().err


def test_wrong_files_are_refused(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No script, and a baseline that is none: exit 2, before anything runs."""
    assert main(["race", "run", str(tmp_path / "none.py")]) == 2
    assert "this script does not exist" in capsys.readouterr().err
    (tmp_path / "other.json").write_text('{"format": "another"}')
    assert main(["race", "run", "--baseline", str(tmp_path / "other.json"), script("print('ran')")]) == 2
    printed = capsys.readouterr()
    assert "its format is 'another'" in printed.err
    assert printed.out == ""


def test_the_findings_of_a_run_are_read_again(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--report` draws them; `batchstate race` prints the file of `--json`, and draws it."""
    out, page = tmp_path / "found.json", tmp_path / "found.html"
    name = script("step(ordered=False).add_(1)")
    assert main(["race", "run", "--json", str(out), "--report", str(page), name]) == 1
    reports = load_reports(out)
    assert len(reports) == 2
    drawn = page.read_text()
    assert drawn.count("<iframe") == 2
    assert "2 findings; " in drawn
    assert main(["race", str(out)]) == 0
    assert capsys.readouterr().out == "\n\n".join(map(str, reports)) + "\n"
    assert main(["race", str(out), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text().count("<iframe") == 2


def test_waits_can_be_an_error(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """`--max-waits`: exit 1 beyond, and every line is printed; `--note-waits` tells those that are too wide."""
    lines = "\n".join("torch.zeros(1, device='cuda').item()" for _ in range(12))
    assert main(["race", "run", "--max-waits", "12", script(lines)]) == 0
    assert "and those of 2 more lines" in capsys.readouterr().err
    assert main(["race", "run", "--max-waits", "11", script(lines)]) == 1
    printed = capsys.readouterr().err
    assert printed.count("of item at") == 12
    assert printed.endswith("12 waits inside of torch, where --max-waits allows 11\n")
    wide = """
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            table = torch.zeros(4, device="cuda")
            other = torch.ones(4, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        table.clone()
    """
    assert main(["race", "run", "--note-waits", script(wide)]) == 0
    assert "it has to order zeros at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--device rase", "--device rase: there is none of this name\n  remedy: did you mean 'race'?"),
        ("--device cuda", "--device cuda: torch "),
        ("--device sim --max-waits 3", "--max-waits with --device sim"),
    ],
)
def test_errors_speak_of_options(script: Script, capsys: pytest.CaptureFixture[str], options: str, said: str) -> None:
    """Not of functions that a user of the command never called."""
    if torch.cuda.is_available() and options == "--device cuda":
        pytest.skip("there is a GPU")
    assert main(["race", "run", *options.split(), script("print('ran')")]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "cuda_on_cpu" not in printed.err
    assert printed.out == ""


def test_nobody_reads_the_output(script: Script) -> None:
    """`| head` ends the command without a word."""
    name = script("step(ordered=True)\nfor _ in range(100_000):\n    print('a line')")
    command = f"{sys.executable} -m batchstate race run {name} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout == "a line\n"
    assert done.stderr.endswith(f"{name}: its output was closed\n")
    assert "Traceback" not in done.stderr
    assert "BrokenPipeError" not in done.stderr


ENGINE_TESTS = (
    textwrap.dedent(PROGRAM)
    + """
def test_racy():
    try:
        step(ordered=False)
    except Exception:
        pass

def test_safe():
    step(ordered=True)
"""
)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs tests of an engine with the plugin, and no other that happens to be installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv(levels.ENVIRONMENT_VARIABLE, raising=False)

    def run(*args: str) -> pytest.RunResult:
        pytester.makepyfile(test_engine=ENGINE_TESTS)
        return pytester.runpytest_inprocess("-p", "batchstate.testing.pytest.plugin", "-p", "no:cacheprovider", *args)

    return run


def test_one_line_for_a_test_suite(run: Callable[..., Any], pytester: pytest.Pytester) -> None:
    """A test in which the code races fails, with the report; one that does not passes; torch is as it was."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    result = run("--batchstate-device", "race", "--cuda-on-cpu")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*1 race in code that says cuda*", "*missing *", "*wait_stream*", "*2 on race*"])
    assert (torch.cuda.get_device_name() if torch.cuda.is_available() else None) == name
    (path,) = (pytester.path / "race-reports").iterdir()
    assert main(["race", str(path), "--out", str(pytester.path / "race.html")]) == 0


def test_a_baseline_for_a_test_suite(run: Callable[..., Any], pytester: pytest.Pytester) -> None:
    """Findings in it fail no test."""
    program = pytester.makepyfile(program=ENGINE_TESTS + "\ntest_racy()\n")
    baseline = pytester.path / "accepted.json"
    assert main(["race", "run", "--json", str(baseline), str(program)]) == 1
    found = json.loads(baseline.read_text())
    for one in found["findings"]:
        for side in ("first", "second"):
            one[side]["site"] = "test_engine.py:1 in step"
    baseline.write_text(json.dumps(found))
    run("--batchstate-device", "race", "--cuda-on-cpu", "--batchstate-baseline", str(baseline)).assert_outcomes(
        passed=2
    )


def test_options_that_do_not_go_together(run: Callable[..., Any]) -> None:
    """The run ends at once."""
    result = run("--cuda-on-cpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--cuda-on-cpu needs --batchstate-device race*"])
    result = run("--batchstate-baseline", "x", "--batchstate-device", "race")
    result.stderr.fnmatch_lines(["*--batchstate-baseline needs --cuda-on-cpu*"])


@pytest.mark.parametrize(
    ("source", "key"),
    [
        (
            """
            torch.library.define("race_run_tests::gpuonly", "(Tensor x) -> Tensor")
            torch.ops.race_run_tests.gpuonly(torch.zeros(2, device="cuda"))
            """,
            "race_run_tests::gpuonly",
        ),
        (
            """
            import types
            triton = types.ModuleType("triton.backends.driver")
            exec("def launch():\\n    raise AssertionError('libcuda.so cannot found!')", vars(triton))
            triton.launch()
            """,
            "module.function_that_launches_it",
        ),
    ],
    ids=["operator", "triton"],
)
def test_a_kernel_that_cannot_run_here_has_a_remedy(
    script: Script, capsys: pytest.CaptureFixture[str], source: str, key: str
) -> None:
    """Exit 2; behind torch's or Triton's own error a line says what stands for the kernel."""
    assert main(["race", "run", script(textwrap.dedent(source))]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("remedy: ")
    assert f'cuda_on_cpu(stands_for={{"{key}": function}})' in last


@pytest.mark.parametrize(
    ("source", "said", "count"),
    [
        ("subprocess.run([sys.executable, '-S', '-c', ''])", "1 process was started that is not watched", 1),
        (
            "import warnings\nwarnings.simplefilter('ignore')\n"
            "for _ in range(2):\n    one = multiprocessing.get_context('fork').Process(target=int)\n"
            "    one.start(); one.join()",
            "2 processes were started that are not watched",
            2,
        ),
        ("", "", 0),
    ],
    ids=["subprocess", "fork", "none"],
)
def test_processes_of_a_script_are_counted(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, said: str, count: int
) -> None:
    """What runs in another process is not checked, and the summary and the JSON say so."""
    out, text = tmp_path / "found.json", f"import multiprocessing, subprocess\nstep(ordered=True)\n{source}\n"
    assert main(["race", "run", "--json", str(out), script(text)]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "not watched" in line] == [said] * bool(count)
    assert json.loads(out.read_text())["processes"] == count
