"""The command line: what it prints, writes and returns."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import batchstate
from batchstate.cli import main, traffic
from batchstate.cli.app import COMMANDS
from examples.console import Row, Section, progress, show
from examples.traffic import EngineSettings, TrafficEngine
from tests.selfcheck.mutants import MUTANTS

FIGURES = {
    "requests",
    "tokens",
    "steps",
    "violations",
    "leaks",
    "host_us_per_step",
    "host_to_device_copies_per_step",
    "device_operations_per_step",
    "forced_syncs",
    "seconds",
}


def test_help_imports_neither_torch_nor_hypothesis() -> None:
    """Help answers at once: the heavy packages are imported only by the commands that run."""
    code = (
        "import sys, batchstate.cli\n"
        "try: batchstate.cli.main(['--help'])\n"
        "except SystemExit as done: code = done.code\n"
        "print(code, [name for name in ('torch', 'hypothesis', 'rich') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "traffic" in done.stdout
    assert done.stdout.endswith("0 []\n")


def test_module_runs_as_a_program() -> None:
    """`python -m batchstate` is the same program, and without a command says how it is used."""
    done = subprocess.run([sys.executable, "-m", "batchstate"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: batchstate" in done.stderr
    assert all(command.NAME in done.stderr for command in COMMANDS)


def test_a_misspelt_command_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is not a command, or not a machine, is answered with the one that it resembles."""
    assert main(["fuz"]) == 2
    assert "did you mean 'fuzz'?" in capsys.readouterr().err
    assert main(["fuzz", "page_pol"]) == 2
    assert "did you mean 'page_pool'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("fuzz --exmples 3", "did you mean '--examples'? `python -m tests.selfcheck fuzz --help`"),
        ("fuzz --examples ten", "expected an integer >= 1, got 'ten'"),
        ("race rn script.py", "did you mean 'race run'?"),
        ("race", "the following arguments are required: REPORT"),
        ("race run", "`batchstate race run --help`"),
        ("traffic --aborts 2", "expected a number from 0 to 1, got '2'"),
        ("mutants no_such", "`python -m tests.selfcheck mutants --list`"),
        ("fuzz --device gpu", "use 'cpu' or 'cuda'"),
        ("helpp", "unknown command 'helpp'"),
    ],
)
def test_a_mistake_at_the_prompt_is_answered(typed: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command, option or value ends with 2, what was expected, and what to type."""
    try:
        code: object = main(typed.split())
    except SystemExit as done:
        code = done.code
    shown = capsys.readouterr().err
    assert code == 2
    assert told in shown
    assert "remedy: " in shown


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of the general help fits 80 columns."""
    for typed, shown in (["help", "fuzz"], "usage: python -m tests.selfcheck fuzz"), (["help"], "begin with:"):
        with pytest.raises(SystemExit) as done:
            main(typed)
        assert done.value.code == 0
        printed = capsys.readouterr().out
        assert shown in printed
        assert max(map(len, printed.splitlines())) <= 80


def test_traffic_prints_a_table_and_writes_json(
    tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table ends a run in plain words; the JSON file has every figure; all well is 0."""
    path = tmp_path / "traffic.json"
    assert main(["traffic", "--requests", "20", "--seed", "3", "--device", device, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert set(figures) >= FIGURES
    assert set(figures["host_us_per_step"]) == {"median", "p99"}
    assert (figures["requests"], figures["violations"], figures["leaks"], figures["forced_syncs"]) == (20, 0, 0, 0)
    output = capsys.readouterr()
    assert "each exactly once" in output.out
    assert f"{figures['tokens']:,}" in output.out
    assert not output.err


def test_traffic_reads_a_trace(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--trace` serves the requests of a file, and `--requests` the first of them."""
    trace, path = tmp_path / "mine.csv", tmp_path / "traffic.json"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-01-01 00:00:00,100,7\n2024-01-01 00:00:01,50,5\n2024-01-01 00:00:02,9,9\n"
    )
    assert main(["traffic", "--trace", str(trace), "--requests", "2", "--device", device, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert (figures["requests"], figures["tokens"], figures["prefill_tokens"]) == (2, 12, 148)
    assert "mine.csv" in capsys.readouterr().out


def program(arguments: list[str], before: str = "", environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs the program in a process of its own, after some statements; its exit code and what it said on stderr."""
    code = f"import sys\n{before}\nfrom batchstate.cli import main\nsys.exit(main({arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    return done.returncode, done.stderr


def test_missing_hypothesis_is_one_message() -> None:
    """Where the extra `testing` is not installed, what needs it says which to install; what needs it not works."""
    before = """
sys.modules["hypothesis"] = None
from batchstate.cli import main
assert main(["fuzz"]) == 2
from batchstate.testing import LateRuntime, ManualFence, ManualStream, no_hidden_sync
LateRuntime()
try:
    from batchstate.testing import TwinSpec
    raise AssertionError("TwinSpec works")
except ImportError as missing:
    assert str(missing) == "batchstate.testing.TwinSpec needs hypothesis: pip install 'batchstate[testing]'", missing
"""
    code, error = program(["mutants"], before)
    assert code == 2
    assert error.splitlines() == [
        f"batchstate: `{command}` needs hypothesis: pip install 'batchstate[testing]'"
        for command in ("fuzz", "mutants")
    ]


def test_wrong_level_in_the_environment_is_one_message() -> None:
    """A typo in BATCHSTATE_CHECKS is told without a traceback, by help too."""
    code, error = program(["--help"], environment={"BATCHSTATE_CHECKS": "foo"})
    assert code == 2
    assert error.startswith("batchstate: environment variable BATCHSTATE_CHECKS: unknown level of checks 'foo'\n")
    assert "Traceback" not in error


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`batchstate --version` is the version of the package."""
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"batchstate {batchstate.__version__}\n"


SHORT_RUNS = {
    "fuzz": ["fuzz", "--examples", "1", "slot_pool"],
    "mutants": ["mutants", "filter_forgets_device", "--clean-examples", "1"],
    "traffic": ["traffic", "--requests", "3"],
}


@pytest.mark.parametrize("command", SHORT_RUNS)
def test_closed_streams_are_no_error(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was started without stdout and stderr does its work all the same, whichever command it is."""
    file = tmp_path / "figures.json"
    with monkeypatch.context() as closed:
        for stream in ("stdout", "stderr"):
            closed.setattr(sys, stream, None)
        code = main([*SHORT_RUNS[command], "--device", "cpu", "--json", str(file)])
    assert code == 0
    assert json.loads(file.read_text())


@pytest.mark.parametrize("command", SHORT_RUNS)
def test_file_that_cannot_be_written_does_not_lose_the_table(
    command: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is printed before the file is written, so a full disk costs only the file; the code is 2."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main([*SHORT_RUNS[command], "--device", device, "--json", str(tmp_path / "figures.json")]) == 2
    output = capsys.readouterr()
    assert "====" in output.out
    assert "No space left on device" in output.err


def test_fuzz_ends_with_a_verdict(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of the table says how many violations were found."""
    assert main(["fuzz", "--examples", "2", "--machine", "slot_pool", "--device", device]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["violations", "0", "in", "2", "examples"]


def test_list_of_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    """`mutants --list` shows each mutant with the invariants that find it, and runs none."""
    assert main(["mutants", "--list"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{len(MUTANTS)} mutants\n")
    assert all(name in output for name in MUTANTS)
    assert "MIRROR_EQUAL" in output


def test_named_mutant_is_quick(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A named mutant gets a few clean examples, not those of a whole run."""
    path = tmp_path / "figures.json"
    assert main(["mutants", "--name", "filter_forgets_device", "--device", device, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["clean_examples"] == 20


def test_default_of_pages_is_that_of_the_engine() -> None:
    """The help names the number of pages that the engine has."""
    assert EngineSettings().num_pages == traffic.NUM_PAGES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["mutants", "--name", "filter_forgets_devise"],
            "use filter_forgets_device.*`python -m tests.selfcheck mutants --list`",
        ),
        (["traffic", "--trace", "nowhere/trace.csv"], "^batchstate: nowhere/trace.csv: No such file or directory\n$"),
        (["traffic", "--trace", "bad.csv"], "line 2: ContextTokens is 'zero'.*remedy"),
        (["traffic", "--trace", "long.csv", "--num-pages", "6"], "--num-pages"),
        (["traffic", "--requests", "1", "--device", "abacus"], "'abacus'"),
    ],
    ids=["mutant", "file", "trace", "pages", "device"],
)
def test_an_error_is_one_message(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot be done gives what, where and the remedy in a few short lines, without a traceback, and 2."""
    monkeypatch.chdir(tmp_path)
    for name, context in (("bad.csv", "zero"), ("long.csv", "100")):
        Path(name).write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,{context},7\n")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert re.search(words, error, re.DOTALL)
    assert "Traceback" not in error
    assert max(map(len, error.splitlines())) < 200
    if "--num-pages" in arguments:  # the option that the message names makes room
        assert main([*arguments[:-1], "7", "--device", "cpu"]) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--requests", "0"],
        ["--requests", "many"],
        ["--seed", "-1"],
        ["--aborts", "2"],
        ["--aborts", "nan"],
        ["--checks", "some"],
        ["--json", "nowhere/at/all.json"],
        ["--json", "."],
    ],
)
def test_bad_option_is_refused_before_the_run(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A value that cannot be meant is refused by name, with 2, before any work is done."""
    with pytest.raises(SystemExit) as done:
        main(["traffic", *options])
    assert done.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_violation_is_printed_and_1(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken invariant ends the run with its report on stderr, is in the figures, and gives 1."""
    release = TrafficEngine.give_back

    def twice(engine: TrafficEngine, leaves: Any) -> Any:
        leaving = engine.batch.filter(leaves)
        requests = release(engine, leaves)
        engine.pages.release_requests(leaving.slots)
        return requests

    monkeypatch.setattr(TrafficEngine, "give_back", twice)
    path = tmp_path / "traffic.json"
    assert main(["traffic", "--requests", "3", "--device", device, "--json", str(path)]) == 1
    output = capsys.readouterr()
    assert json.loads(path.read_text())["violations"] == 1
    assert "SLOT_" in output.err
    assert "remedy" in output.err


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Where stderr is no terminal, short work prints nothing and long work a line now and then."""
    with progress("work", 10) as update:
        update(5, "halfway")
    assert capsys.readouterr().err == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.console.SECONDS_BETWEEN_LINES", 0.0)
        with progress("work", 10) as update:
            update(5, "halfway")
    assert capsys.readouterr().err == "work:  50 %  halfway\n"


def test_terminal_gets_a_bar_and_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal with `rich`, progress and tables are drawn by it, with the same words."""
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress("work", 10) as update:
        update(10, "all of it")
    show("Title", [Section("Group", [Row("requests", "12", "all"), Row("leaks", "3", "missing", True)])])
    output = capsys.readouterr()
    assert all(word in output.out for word in ("Title", "Group", "requests", "12", "leaks", "missing"))


def test_plain_table_marks_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal the table is aligned text, and an alarming figure has a mark."""
    show("Title", [Section("Group", [Row("requests", "12", "all"), Row("leaks", "3", "missing", True)])])
    assert capsys.readouterr().out.splitlines() == [
        "Title",
        "=====",
        "",
        "Group",
        "   requests  12  all",
        " ! leaks      3  missing",
    ]
