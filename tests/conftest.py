"""Fixtures: one runtime a test, on the device that `--device` names."""

from collections.abc import Iterator

import pytest

from batchstate import levels
from batchstate.runtime import Runtime, open_runtime


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Name of the device under test."""
    return str(request.config.getoption("--device"))


@pytest.fixture
def rt(device: str) -> Runtime:
    """A fresh runtime of the device under test."""
    return open_runtime(device)


@pytest.fixture
def full() -> Iterator[None]:
    """Checks at level `full` for the length of a test."""
    with levels.checks("full"):
        yield
