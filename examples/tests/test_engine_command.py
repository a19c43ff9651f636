"""`python -m examples.engine`: what it prints, writes and returns."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from examples.engine import serving
from examples.engine.__main__ import main
from examples.engine.batch import RunningBatch, Step
from examples.engine.forward import Forward
from examples.engine.model import Model
from examples.engine.reference import generate

FIGURES = {
    "mode",
    "model",
    "device",
    "requests",
    "tokens",
    "mismatches",
    "violations",
    "leaks",
    "forced_syncs",
    "in_flight_depth_max",
    "mirror_checks",
    "host_us_per_step",
    "retractions",
    "accepted_drafts",
    "prebuilt",
}
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def contained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the command for its process do not outlive a test."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


def figures_of(path: Path, device: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Runs the command on a few requests; its figures."""
    file = path / "figures.json"
    assert main(["--device", device, "--scale", "16", "--json", str(file), *arguments]) == code
    figures: dict[str, Any] = json.loads(file.read_text())
    assert set(figures) >= FIGURES
    return figures


def test_command_prints_a_table_and_writes_json(
    tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table says in plain words that every token is right; the file has every figure; all well is 0."""
    figures = figures_of(tmp_path, device, "--requests", "12")
    assert figures["mode"] == "overlapped, mixed"
    assert (figures["requests"], figures["in_flight_depth_max"]) == (12, 2)
    assert [figures[name] for name in ("mismatches", "violations", "leaks", "forced_syncs")] == [0, 0, 0, 0]
    assert figures["prebuilt"] > 0
    assert figures["mirror_checks"] > 100
    assert figures["host_us_per_step"] > 0
    output = capsys.readouterr()
    assert "every token equals that of model.generate" in output.out
    assert f"{figures['tokens']:,}" in output.out
    assert not output.err


@pytest.mark.parametrize(
    ("arguments", "mode", "depth"),
    [
        (["--mode", "synchronous"], "synchronous, mixed", 1),
        (["--mode", "synchronous", "--no-mixed", "--drafts", "2"], "synchronous, speculative", 1),
        (["--drafts", "3", "--family", "qwen3"], "overlapped, mixed, speculative", 2),
        (["--no-mixed", "--checks", "cheap", "--prebuilt", "0"], "overlapped", 2),
        (["--num-pages", "14", "--seed", "3"], "overlapped, mixed", 2),
    ],
)
def test_modes_are_chosen(
    tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str], arguments: list[str], mode: str, depth: int
) -> None:
    """Each mode is named in the figures and in the title, and serves without a fault."""
    figures = figures_of(tmp_path, device, "--requests", "8", *arguments)
    assert (figures["mode"], figures["in_flight_depth_max"]) == (mode, depth)
    assert (figures["accepted_drafts"] > 0) == ("speculative" in mode)
    assert figures["prebuilt"] == 0 or "--prebuilt" not in arguments
    assert f"on {device}, {mode}\n" in capsys.readouterr().out


def test_trace_gives_the_lengths(tmp_path: Path, device: str) -> None:
    """`--trace` serves requests of the lengths in a file, and `--requests` the first of them."""
    trace = tmp_path / "mine.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-01-01 00:00:00,100,7\n2024-01-01 00:00:01,50,5\n2024-01-01 00:00:02,9,9\n"
    )
    figures = figures_of(tmp_path, device, "--trace", str(trace), "--requests", "2", "--scale", "1")
    assert (figures["requests"], figures["tokens"]) == (2, 12)


def test_checkpoint_is_loaded(tmp_path: Path, device: str) -> None:
    """`--model` serves a checkpoint from its folder, with its own EOS tokens, and calls it by the folder's name."""
    folder = tmp_path / "mine"
    model = Model.random("qwen3", device=device, seed=5)
    whole = generate(model, [[1, 2, 3]], [8], eos_token_ids=())
    model.lm.generation_config.eos_token_id = sorted({*range(0, 256, 8), whole[0][4]})
    model.lm.save_pretrained(str(folder))
    arguments = ["--requests", "8", "--drafts", "2", "--scale", "8"]
    figures = figures_of(tmp_path, device, "--model", str(folder), *arguments)
    assert (figures["model"], figures["mismatches"]) == ("mine", 0)
    random = figures_of(tmp_path, device, *arguments)
    assert figures["tokens"] < random["tokens"], "no answer ended with EOS"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "expected an integer >= 1, got '0'"),
        (["--mode", "sideways"], "choose from"),
        (["--drafts", "-1"], "expected an integer >= 0, got '-1'"),
        (["--prebuilt", "2"], "expected a number from 0 to 1, got '2'"),
        (["--model", "nowhere"], "'nowhere' is not a folder with a checkpoint"),
        (["--json", "nowhere/figures.json"], "cannot be written"),
        (["--dtype", "int8"], "choose from"),
    ],
)
def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """An argument that cannot be meant exits with 2, and says which and why."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "nonsense"], "unknown device 'nonsense'"),
        (["--trace", "nowhere.csv"], "nowhere.csv: No such file"),
        (["--num-pages", "1", "--drafts", "200"], "at most"),
    ],
)
def test_bad_values_are_refused(
    capsys: pytest.CaptureFixture[str], device: str, arguments: list[str], message: str
) -> None:
    """A value that proves wrong later returns 2, with one message and no traceback."""
    assert main(["--device", device, "--requests", "1", *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith("examples.engine: ")
    assert not output.out


def test_wrong_tokens_return_1(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One request with one other token is enough."""

    def one_other(*args: Any, **kwargs: Any) -> list[list[int]]:
        answers = generate(*args, **kwargs)
        answers[3][-1] ^= 1
        return answers

    monkeypatch.setattr(serving, "generate", one_other)
    figures = figures_of(tmp_path, device, "--requests", "5", code=1)
    assert (figures["mismatches"], figures["violations"]) == (1, 0)
    assert "from model.generate" in capsys.readouterr().out


def test_violations_return_1(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A forward that writes into the batch is found, and the report of it ends the run."""
    run = Forward.run

    def writing(forward: Forward, step: Step) -> RunningBatch:
        batch = run(forward, step)
        step.batch.seq_lens.device.add_(1)
        return batch

    monkeypatch.setattr(Forward, "run", writing)
    figures = figures_of(tmp_path, device, "--requests", "5", code=1)
    assert (figures["violations"], figures["mismatches"]) == (1, 0)
    assert "MIRROR_" in figures["broken"]
    assert figures["broken"] in capsys.readouterr().err


def test_module_runs_as_a_program(tmp_path: Path, device: str) -> None:
    """`python -m examples.engine` is the same, and warns of nothing: without transformers it serves the plain model."""
    file = tmp_path / "figures.json"
    program = "import runpy, sys; sys.modules['transformers'] = None; runpy.run_module(sys.argv.pop(1), {}, '__main__')"
    command = [sys.executable, "-W", "error", "-c", program, "examples.engine", "--requests", "12", "--scale", "16"]
    done = subprocess.run(
        [*command, "--device", device, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "12 requests of plain" in done.stdout
    assert json.loads(file.read_text())["mismatches"] == 0
