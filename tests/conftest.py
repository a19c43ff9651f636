"""Fixtures: one runtime per test, on the device that `--device` names, and one run of each state machine."""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from batchstate import levels
from batchstate.runtime import Runtime
from batchstate.testing.devices import open_device, window_of
from batchstate.testing.fences import LateRuntime
from benchmarks.timing import one_thread

if TYPE_CHECKING:
    from batchstate.testing import MachineResult

MACHINE_EXAMPLES = {
    "mirrored_tensor": 100,
    "batch": 80,
    "slot_pool": 60,
    "page_pool": 80,
    "hybrid": 60,
    "engine": 30,
    "future_map": 120,
    "overlap": 35,
    "host_tier": 60,
    "transfers": 40,
    "strangers": 30,
}
"""The ordinary number of examples: enough for every coverage target, and for a suite that is run often."""


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Name of the device under test."""
    return str(request.config.getoption("--device"))


@pytest.fixture
def rt(device: str) -> Iterator[Runtime]:
    """A fresh runtime of the device under test, in its window."""
    with window_of(open_device(device)) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def machine_run(pytestconfig: pytest.Config) -> "Callable[[str], MachineResult]":
    """Runs a state machine on the device under test, at level `full`; the result is shared by all tests."""
    from batchstate.selfcheck.machines import MACHINES
    from batchstate.testing import run_machine

    @functools.cache
    def run(name: str) -> "MachineResult":
        device = str(pytestconfig.getoption("--device"))
        return run_machine(MACHINES[name], device=device, examples=MACHINE_EXAMPLES[name], seed=1)

    return run


@pytest.fixture
def full() -> Iterator[None]:
    """Checks at level `full` for the length of a test."""
    with levels.checks("full"):
        yield


@pytest.fixture
def single_thread() -> Iterator[None]:
    """One CPU thread for torch: the matrices of the example engine are too small for more."""
    with one_thread():
        yield


@pytest.fixture
def model(device: str) -> Any:
    """The random llama of the example engine."""
    from tests.engine_cases import model_of

    return model_of("llama", device)


@pytest.fixture
def late() -> LateRuntime:
    """A device of which the host knows nothing before it waits."""
    return LateRuntime()


@pytest.fixture
def lagging_model() -> Any:
    """The random llama on the CPU, for `late`."""
    from tests.engine_cases import model_of

    return model_of("llama", "cpu")
