"""`batchstate`: help, version and exit codes; `batchstate race`: the report in words and as a page, and refusals."""

import errno
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import batchstate
from batchstate.cli import main
from batchstate.cli.app import COMMANDS, exit_code
from batchstate.errors import ArgumentError
from batchstate.races.render import race_html
from batchstate.violations import Breach, Code, Violation
from tests.race_reports import hostile, overlapped_engine

VIOLATION = Violation(Code.RACE, Breach("two accesses", expected="an order", actual="none"), remedy="wait", where={})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A race report in a file."""
    path = tmp_path / "race-report.json"
    overlapped_engine().save(path)
    return path


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m batchstate` in a process of its own."""
    command = [sys.executable, "-m", "batchstate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_help_and_reports_import_neither_torch_nor_hypothesis(saved: Path) -> None:
    """Help answers at once, and reports are printed and drawn without the packages that take long to import."""
    code = (
        "import sys, batchstate.cli\n"
        "path = sys.argv[1]\n"
        "codes = [batchstate.cli.main(['race', path, *out]) for out in ([], ['--out', path + '.html'])]\n"
        "try: batchstate.cli.main(['--help'])\n"
        "except SystemExit as done: codes.append(done.code)\n"
        "print(codes, [name for name in ('torch', 'hypothesis', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=True)
    assert "usage: batchstate" in done.stdout
    assert done.stdout.endswith("[0, 0, 0] []\n")


def test_module_runs_as_a_program() -> None:
    """`python -m batchstate` is the same program; without a command it prints its help, and exits with 2."""
    done = program()
    assert done.returncode == 2
    assert "usage: batchstate" in done.stderr
    assert all(command.NAME in done.stderr for command in COMMANDS)


def test_wrong_level_in_the_environment_is_one_message() -> None:
    """A typo in BATCHSTATE_CHECKS is told by the command that imports the checks."""
    done = program("race", "run", __file__, BATCHSTATE_CHECKS="foo")
    assert done.returncode == 2
    assert done.stderr.startswith("batchstate: environment variable BATCHSTATE_CHECKS: unknown level of checks 'foo'\n")


@pytest.mark.parametrize(
    ("typed", "code", "told"),
    [
        ("--version", 0, f"batchstate {batchstate.__version__}, from {Path(batchstate.__file__).parent}\n"),
        ("--help", 0, "begin with:\n  batchstate race run YOUR_SCRIPT.py"),
        ("race --help", 0, "--out FILE"),
        ("race run --help", 0, "--baseline FILE"),
        ("race", 2, "the following arguments are required: REPORT"),
        ("race run", 2, "the following arguments are required: SCRIPT\n"),
        ("fuzz", 2, "invalid choice: 'fuzz'"),
        ("race serve.py", 2, "did you mean `batchstate race run serve.py`?"),
        ("race report.json --out race.svg", 2, "'race.svg' has none of the suffixes .html, .htm"),
        ("race report.json --out nowhere/race.html", 2, "'nowhere/race.html' cannot be written"),
        ("race run --seed x script.py", 2, "invalid int value: 'x'"),
    ],
)
def test_what_is_typed_is_answered(typed: str, code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Help and version end with 0; a wrong command, option or value with 2 and a message about it."""
    with pytest.raises(SystemExit) as done:
        main(typed.split())
    assert done.value.code == code
    printed = capsys.readouterr()
    assert told in (printed.err if code else printed.out)
    assert typed != "--help" or max(map(len, printed.out.splitlines())) <= 80


def test_info_says_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """A line each for the library with its core, Python, torch and devices."""
    assert main(["info"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    core = "compiled" if batchstate.compiled else "interpreted"
    assert lines["batchstate"] == f"{batchstate.__version__}, core {core}"
    assert lines["torch"] == importlib.metadata.version("torch")
    assert {"python", "cuda", "devices", "checks"} <= lines.keys()


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (VIOLATION, 1, "RACE: two accesses"),
        (ArgumentError("a number of -1", -1, "pass 1"), 2, "a number of -1\n  remedy: pass 1"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "none.json"), 2, "none.json: No such file"),
        (OSError("the disk is full"), 2, "the disk is full"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_are_messages_and_exit_codes(
    error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 for a violation, 2 for work that could not be done, 130 for an interrupt; no traceback."""

    def run() -> int:
        raise error

    assert exit_code("program", run) == code
    assert capsys.readouterr().err.startswith(f"program: {told}")


def test_race_prints_the_report(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without `--out` the words of the report go to stdout."""
    assert main(["race", str(saved)]) == 0
    assert capsys.readouterr().out == f"{overlapped_engine()}\n"


@pytest.mark.parametrize("name", ["race.html", "race.HTM"])
def test_race_draws_a_page(saved: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--out` writes a page, and nothing to the terminal."""
    path = saved.parent / name
    assert main(["race", str(saved), "--out", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == race_html(overlapped_engine())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        (b"no json", "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[]", "no race report"),
        (b'{"format": "another"}', "no race report"),
        (b'{"format": "batchstate race report 1"}', "a damaged race report"),
    ],
)
def test_race_refuses_other_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, problem: str
) -> None:
    """A file that holds no race report, or that is not there, is an error, and exit code 2."""
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["race", str(path)]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert "remedy" in error or content is None


def test_race_refuses_a_report_that_does_not_hang_together(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report that lost some of its events is as damaged as one that cannot be read."""
    values = json.loads(saved.read_text())
    values["events"] = values["events"][:5]
    saved.write_text(json.dumps(values))
    assert main(["race", str(saved), "--out", str(saved.parent / "race.html")]) == 2
    assert "the first access is event" in capsys.readouterr().err
    assert not (saved.parent / "race.html").exists()


def test_race_prints_any_name(saved: Path) -> None:
    """A terminal gets no escape sequence of a name in a report, and an ASCII one gets ASCII."""
    hostile().save(saved)
    done = program("race", str(saved), PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert "\\x1b[31m" in done.stdout
