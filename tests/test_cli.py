"""The command line: what it prints, writes and returns."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchstate.cli import main
from batchstate.cli.progress import progress
from batchstate.cli.tables import Row, Section, show
from batchstate.traffic import Engine

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


def test_missing_file_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there gives one readable line and 2."""
    assert main(["traffic", "--trace", "nowhere/trace.csv"]) == 2
    assert capsys.readouterr().err == "batchstate: nowhere/trace.csv: No such file or directory\n"


def test_library_error_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad trace gives what, where and the remedy, without a traceback, and 2."""
    trace = tmp_path / "bad.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,zero,7\n")
    assert main(["traffic", "--trace", str(trace)]) == 2
    error = capsys.readouterr().err
    assert "line 2: ContextTokens is 'zero'" in error
    assert "remedy" in error
    assert "Traceback" not in error


def test_unknown_device_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    """A device that torch does not know gives a message and 2."""
    assert main(["traffic", "--requests", "1", "--device", "abacus"]) == 2
    assert "'abacus'" in capsys.readouterr().err


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
    release = Engine._give_back

    def twice(engine: Engine, leaves: Any) -> Any:
        leaving = engine.batch.filter(leaves)
        requests = release(engine, leaves)
        engine.pages.release_requests(leaving.slots)
        return requests

    monkeypatch.setattr(Engine, "_give_back", twice)
    path = tmp_path / "traffic.json"
    assert main(["traffic", "--requests", "3", "--device", device, "--json", str(path)]) == 1
    output = capsys.readouterr()
    assert json.loads(path.read_text())["violations"] == 1
    assert "SLOT_" in output.err
    assert "remedy" in output.err


def test_progress_is_silent_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    """Where stderr is no terminal, short work prints nothing and long work a line now and then."""
    with progress("work", 10) as update:
        update(5, "halfway")
    assert capsys.readouterr().err == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchstate.cli.progress.SECONDS_BETWEEN_LINES", 0.0)
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
