"""What the machines of one run share: where their runtimes come from, and what the run counts."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import final

import attrs

from batchstate.levels import Level, parse_level
from batchstate.runtime import Runtime, open_runtime
from batchstate.testing.reach import Reach

OpenRuntime = Callable[[], Runtime]
"""Makes the runtime of one example. Race detectors and simulated devices come in here."""


@final
@attrs.define(eq=False)
class Session:
    """One run of machines.

    Attributes:
        open_runtime: called once an example.
        level: of the checks in each example.
        examples: examples that ran to their end or failed; the first failure is the last one counted, since Hypothesis
            then shrinks it.
        steps: rules run in them.
        first_failure: number of the example that failed first, from 1, or None.
        reach: how often each interesting state was reached.
        on_example: called after each example with the number run so far.
    """

    open_runtime: OpenRuntime
    level: Level = Level.FULL
    examples: int = 0
    steps: int = 0
    first_failure: int | None = None
    reach: Reach = attrs.field(factory=Reach)
    on_example: Callable[[int], None] | None = None

    def end_example(self, steps: int, *, failed: bool) -> None:
        """An example of `steps` rules is over."""
        if self.first_failure is None:
            self.examples += 1
            self.steps += steps
            if failed:
                self.first_failure = self.examples
            if self.on_example is not None:
                self.on_example(self.examples)


_current: ContextVar[Session] = ContextVar("batchstate_session")


def current_session() -> Session:
    """The session of the innermost `session` window; outside of one, a session of its own on the CPU."""
    found = _current.get(None)
    return Session(open_runtime) if found is None else found


@contextlib.contextmanager
def session(
    runtimes: OpenRuntime = open_runtime,
    *,
    level: str | Level = Level.FULL,
    on_example: Callable[[int], None] | None = None,
) -> Iterator[Session]:
    """A window in which every machine takes its runtimes from `runtimes` and counts into the session yielded.

    Raises:
        ArgumentError: `level` is none.
    """
    token = _current.set(Session(runtimes, parse_level(level), on_example=on_example))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
