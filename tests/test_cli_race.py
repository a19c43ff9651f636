"""`batchstate race`: what it draws, where to, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchstate.cli import main
from batchstate.races.render import race_html, race_text, race_trace
from tests.race_reports import hostile, overlapped_engine


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A race report in a file."""
    path = tmp_path / "race-report.json"
    overlapped_engine().save(path)
    return path


def test_race_draws_in_the_terminal(saved: Path) -> None:
    """Without `--out` the picture goes to stdout, a hundred characters wide where nothing says another width."""
    done = subprocess.run(
        [sys.executable, "-m", "batchstate", "race", str(saved)],
        capture_output=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"PYTHONIOENCODING": "utf-8"},
    )
    assert done.stdout.decode() == race_text(overlapped_engine())
    assert not done.stderr


@pytest.mark.parametrize(("columns", "width"), [("20", 40), ("80", 80), ("400", 140)])
def test_race_is_as_wide_as_the_terminal(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    """The picture is as wide as `COLUMNS` says, terminal or not, between what can be read and what can be overseen."""
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["race", str(saved)]) == 0
    assert capsys.readouterr().out == race_text(overlapped_engine(), width)


def test_race_writes_what_the_suffix_says(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--out` writes a page, a trace or text, by the suffix in either case, and nothing to the terminal."""
    drawn = overlapped_engine()
    wanted = {
        "race.html": race_html(drawn),
        "race.HTM": race_html(drawn),
        "race.json": json.dumps(race_trace(drawn)) + "\n",
        "race.txt": race_text(drawn),
    }
    for name, content in wanted.items():
        path = saved.parent / name
        assert main(["race", str(saved), "--out", str(path)]) == 0
        assert path.read_text(encoding="utf-8") == content
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        ("race.svg", "none of the suffixes .html, .htm, .json, .txt"),
        ("race", "none of the suffixes"),
        ("nowhere/race.html", "cannot be written"),
    ],
)
def test_race_refuses_other_files(saved: Path, capsys: pytest.CaptureFixture[str], out: str, problem: str) -> None:
    """A suffix that means nothing, or a folder that is not there, is a mistake in the command line."""
    with pytest.raises(SystemExit, match="2"):
        main(["race", str(saved), "--out", str(saved.parent / out)])
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"no json", "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[]", "no race report"),
        (b'{"format": "another"}', "no race report"),
        (b'{"format": "batchstate race report 1"}', "a damaged race report"),
    ],
)
def test_race_refuses_other_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, problem: str
) -> None:
    """A file that holds no race report is an error with a remedy, and exit code 2."""
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    assert main(["race", str(path)]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert "remedy" in error


def test_race_refuses_a_report_that_does_not_hang_together(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report of which a part was cut away is as damaged as one that cannot be read."""
    values = json.loads(saved.read_text())
    values["events"] = values["events"][:5]
    saved.write_text(json.dumps(values))
    assert main(["race", str(saved), "--out", str(saved.parent / "race.html")]) == 2
    assert "the first access is event" in capsys.readouterr().err
    assert not (saved.parent / "race.html").exists()


def test_race_with_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    """A script in the place of a report, with arguments or without, is a `run` that was forgotten."""
    for arguments in ([], ["--steps", "3"]):
        with pytest.raises(SystemExit, match="2"):
            main(["race", "serve.py", *arguments])
        assert "did you mean `batchstate race run serve.py`?" in capsys.readouterr().err


def test_race_without_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there is an error that names it."""
    assert main(["race", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err


def test_race_imports_neither_torch_nor_hypothesis(saved: Path) -> None:
    """All pictures are drawn without the packages that take long to import."""
    code = (
        "import sys\n"
        "from batchstate.cli import main\n"
        "path = sys.argv[1]\n"
        "outs = [], ['--out', path + '.html'], ['--out', path + '.json'], ['--out', path + '.txt']\n"
        "codes = [main(['race', path, *out]) for out in outs]\n"
        "print(codes, [name for name in ('torch', 'hypothesis', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[0, 0, 0, 0] []\n")


def test_race_falls_back_to_ascii(saved: Path) -> None:
    """A terminal that takes ASCII alone gets a picture in ASCII, whatever names are in the report."""
    hostile().save(saved)
    done = subprocess.run(
        [sys.executable, "-m", "batchstate", "race", str(saved)],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert b"x missing edge" in done.stdout
    assert done.stdout.isascii()
