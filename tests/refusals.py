"""Tables of refusals: each refused call is a row of what is raised, a piece of its message, and the call."""

from collections.abc import Callable

import pytest

from batchstate.errors import BatchStateError
from batchstate.violations import Code, Violation

Expected = type[BatchStateError] | Code
"""The type of the error, or the code of the invariant that is broken."""


def refuses(expected: Expected, words: str, call: Callable[[], object]) -> None:
    """Runs `call`, which has to be refused in these words (a pattern)."""
    with pytest.raises(BatchStateError, match=words) as caught:
        call()
    error = caught.value
    assert (error.code if isinstance(error, Violation) else type(error)) is expected
