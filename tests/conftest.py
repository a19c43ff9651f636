"""Fixtures: one runtime per test, on the device that `--device` names."""

from collections.abc import Iterator
from typing import Any

import pytest

from batchstate import levels
from batchstate.races.devices import open_device, window_of
from batchstate.runtime import Runtime
from batchstate.testing.fences import LateRuntime


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Name of the device under test."""
    return str(request.config.getoption("--device"))


@pytest.fixture
def rt(device: str) -> Iterator[Runtime]:
    """A fresh runtime of the device under test, in its window."""
    with window_of(open_device(device)) as runtime:
        yield runtime


@pytest.fixture
def full() -> Iterator[None]:
    """Checks at level `full` for the length of a test."""
    with levels.checks("full"):
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
