"""Fixtures of all tests, and the Python examples of README.md and docs/ as tests.

Every fenced `python` block of a page runs, top to bottom; the blocks of one page share their names, and `>>>` examples
are compared with their output. A block that must not run says so, in a comment that readers of the page do not see:

    <!-- skip: next "needs an engine" -->
"""

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from batchstate.runtime import Runtime
    from batchstate.testing import LateRuntime

# Before torch is imported. Tests and the processes that they start share the cores: threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from sybil import Sybil
    from sybil.parsers.myst import PythonCodeBlockParser, SkipParser
except ImportError:  # a machine where nothing can be installed still runs the tests
    collect_examples = None
else:
    collect_examples = Sybil(
        parsers=[PythonCodeBlockParser(), SkipParser()],
        patterns=["README.md", "docs/**/*.md"],
        excludes=["docs/_build/**"],
        path=str(Path(__file__).parent),
    ).pytest()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device`: where the tests put the device side."""
    parser.addoption("--device", default="cpu", help="device under test: cpu (default), cuda, cuda:1, race, sim")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a compiled core of another source than the one that is here, and have kernels of Triton interpreted."""
    from tests.interpreted import stale

    if config.getoption("--device") == "cpu":  # before Triton is imported, which torch does when it likes
        os.environ.setdefault("TRITON_INTERPRET", "1")

    if problem := stale(Path(__file__).parent / "batchstate"):
        raise pytest.UsageError(problem)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Name of the device under test."""
    return str(request.config.getoption("--device"))


@pytest.fixture
def rt(device: str) -> Iterator["Runtime"]:
    """A fresh runtime of the device under test, in its window."""
    from batchstate.races.devices import open_device, window_of

    with window_of(open_device(device)) as runtime:
        yield runtime


@pytest.fixture
def full() -> Iterator[None]:
    """Checks at level `full` for the length of a test."""
    from batchstate import levels

    with levels.checks("full"):
        yield


@pytest.fixture
def late() -> "LateRuntime":
    """A device of which the host knows nothing before it waits."""
    from batchstate.testing import LateRuntime

    return LateRuntime()


LONGEST = """
    mutants machines race_machines sim_schedulers transport_engines sim_engine transport_faults twins fuzz cuda_on_sim
    engine_machine watch interrupts overlap_machine short_runs pytest_plugin wheel twin_ops twin_hooks foreign_writes
    watch_cuda transformers_async
"""
"""Test files of five seconds and more. They run first, so that no process is left with one of them alone in the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let every second worker read the test files backwards: of two, each finds half of them compiled by the other."""
    worker = getattr(session.config, "workerinput", {}).get("workerid", "gw0")
    if int(worker.removeprefix("gw")) % 2 and session.config.args[:1] == ["tests"]:
        files = sorted(map(str, Path(__file__).parent.glob("tests/test_*.py")), reverse=True)
        session.config.args[:1] = files


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; all workers have one order."""
    places = {f"test_{name}.py": number for number, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: (places.get(item.path.name, len(places)), item.path.suffix == ".md", item.path))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave torch, transformers and the collected tests to no collection of garbage: each would go through them all."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave what the tests of a file have imported and kept to no collection in the next one."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say of a skipped example where it stands, not where in pytest it was skipped."""
    report = yield
    if item.path.suffix == ".md" and isinstance(report.longrepr, tuple):
        path, line, _ = item.location
        report.longrepr = (path, (line or 0) + 1, report.longrepr[2])
    return report


class UncheckedPage(pytest.File):
    """A page whose examples cannot run here: reported as skipped, so that nobody takes it for tested."""

    def collect(self) -> list[pytest.Item]:
        """Say why there is nothing to run."""
        pytest.skip("the examples of this page need sybil", allow_module_level=True)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the examples of a page."""
    if collect_examples is not None:
        page: pytest.Collector | None = collect_examples(file_path, parent)
        return page
    return UncheckedPage.from_parent(parent, path=file_path) if file_path.suffix == ".md" else None
