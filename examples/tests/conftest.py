"""Models of the example engine."""

from typing import Any

import pytest


@pytest.fixture
def model(device: str) -> Any:
    """The random llama of the example engine."""
    from examples.tests.engine_cases import model_of

    return model_of("llama", device)


@pytest.fixture
def lagging_model() -> Any:
    """The random llama on the CPU, for `late`."""
    from examples.tests.engine_cases import model_of

    return model_of("llama", "cpu")
