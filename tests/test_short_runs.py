"""One short run of each benchmark, example and GPU command; tests of their own lie beside them and run nightly."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchstate.races.devices import torch_device_of

Command = Callable[[list[str]], int]


def figures_of(command: Command, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The figures of a command that ends well."""
    file = tmp_path / "figures.json"
    assert command([*arguments, "--json", str(file)]) == 0
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def zeros(figures: dict[str, Any], *names: str) -> None:
    """Nothing that these figures count has happened."""
    assert [figures[name] for name in names] == [0] * len(names)


@pytest.fixture(autouse=True)
def contained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands set this for their process."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


@pytest.mark.parametrize("drafts", [0, 2])
def test_engine(tmp_path: Path, device: str, drafts: int) -> None:
    """The engine serves one step ahead, tight on pages, and each token is that of `model.generate`."""
    pytest.importorskip("transformers")
    from examples.engine.__main__ import main

    few = ["--requests", "8", "--scale", "16", "--drafts", str(drafts), "--num-pages", "14", "--seed", "3"]
    figures = figures_of(main, tmp_path, "--device", device, *few)
    zeros(figures, "mismatches", "violations", "leaks", "forced_syncs")
    assert (figures["requests"], figures["in_flight_depth_max"]) == (8, 2)
    assert figures["mirror_checks"] > 100
    assert (figures["accepted_drafts"] > 0) == (drafts > 0)


def test_exact(tmp_path: Path) -> None:
    """The example engine runs the exact model, and each text is the right one."""
    from examples.exact.__main__ import main

    figures = figures_of(main, tmp_path, "--engine", "example", "--requests", "30")
    zeros(figures, "differences")
    assert figures["engine"] == "example"
    assert figures["requests"] >= 30
    assert figures["histories"] > 0


def test_traffic(tmp_path: Path, device: str) -> None:
    """Requests come, are retracted and hang up; each token is generated once, and each slot and page is back."""
    from examples.traffic.__main__ import main

    some = ["--requests", "40", "--aborts", "0.2", "--num-pages", "1000", "--checks", "full"]
    figures = figures_of(main, tmp_path, "--device", device, *some)
    zeros(figures, "violations", "leaks", "forced_syncs")
    assert figures["finished"] + figures["aborted"] == 40
    assert figures["tokens"] == figures["tokens_delivered"]
    assert figures["retractions"] > 0
    assert figures["most_host_to_device_copies"] == figures["most_device_operations"] == 1


def test_disaggregated(tmp_path: Path, device: str) -> None:
    """Prefill in one process, decode in another, over TCP: each token is right, and nothing waits or leaks.

    KV comes into the host tier and into device pages.
    """
    from examples.disaggregated.__main__ import main

    arguments = ["--transport", "tcp", "--family", "plain", "--requests", "9", "--device", torch_device_of(device)]
    figures = figures_of(main, tmp_path, *arguments, "--landing", "mixed")
    assert 0 < figures["ordinary"] < figures["landed"] < figures["direct"]
    zeros(figures, "mismatches", "violations", "leaks", "forced_syncs", "device_to_host_copies", "quarantined")
    assert figures["direct"] + figures["staged"] == 9
    assert figures["transferred_bytes"] > 0


def test_transformers_batching(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' continuous batching with its state on batchstate gives the tokens of transformers alone."""
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    from examples.transformers_batching import comparison
    from examples.transformers_batching.__main__ import main

    monkeypatch.setattr(comparison, "TURN", 2)
    monkeypatch.setattr(comparison.compare, "__kwdefaults__", {"batch_size": 4, "steps": 8})
    figures = figures_of(main, tmp_path, "--requests", "6", "--device", device)
    zeros(figures, "mismatches", "violations")
    assert figures["requests"] == 6


def test_benchmarks(tmp_path: Path, device: str) -> None:
    """Rows and counts are reported; a step's counts are those that are asked for."""
    from benchmarks.__main__ import main

    only = ["--only", "growth with slots", "--only", "counts of a whole step, 2 columns"]
    report = figures_of(main, tmp_path, "--quick", "--device", device, *only)
    assert [row["work"].partition(",")[0] for row in report["rows"]]
    assert all(count["met"] for count in report["counts"] if count["limit"] is not None)


def test_gpu_command(tmp_path: Path) -> None:
    """A stage runs in a process of its own, as far as it has a meaning on a CPU; the page is made of its figures."""
    from benchmarks.gpu.__main__ import main

    report = figures_of(main, tmp_path, "--device", "cpu", "--quick", "--only", "sync")
    assert report["stages"]["sync"]["state"] == "ok"
    assert main(["--page", str(tmp_path / "figures.json")]) == 0


def test_plain_torch_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that imports nothing of the library is right; without its wait the race is found."""
    from batchstate.cli import main

    monkeypatch.setattr(sys, "argv", ["batchstate"])
    script = str(Path(__file__).parent.parent / "examples" / "plain_torch" / "pipeline.py")
    assert main(["race", "run", "--device", "race", script]) == 0
    assert main(["race", "run", "--device", "race", script, "--forget"]) == 1
