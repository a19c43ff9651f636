"""Fixtures: one runtime a test, on the device that `--device` names."""

from collections.abc import Iterator

import pytest

from batchstate import levels
from batchstate.runtime import Runtime
from batchstate.testing.devices import open_device, window_of


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
