"""The base of state machines, and the session that they run in."""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ClassVar, final

import attrs
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, invariant

from batchstate import levels
from batchstate.errors import ArgumentError
from batchstate.levels import Level
from batchstate.races.devices import window_of
from batchstate.runtime import Runtime, open_runtime

__tracebackhide__ = True  # so that pytest shows the engine's frames

OpenRuntime = Callable[[], Runtime]
"""Opens the runtime of one example: this is where the race detector or a simulated device is chosen."""


@final
@attrs.define(eq=False)
class MachineSession:
    """One run of machines.

    Attributes:
        open_runtime: called once per example.
        level: level of the checks in each example.
        on_example: called after each example with the number run so far.
        examples: examples that ran to their end or failed. The first failure is the last one counted, since Hypothesis
            then shrinks it.
        steps: rules run in them.
        first_failure: number of the example that failed first, from 1, or None.
        first_error: its error, or None.
        reached: (machine, coverage target) -> times reached.
    """

    open_runtime: OpenRuntime
    level: Level = Level.FULL
    on_example: Callable[[int], None] | None = None
    examples: int = 0
    steps: int = 0
    first_failure: int | None = None
    first_error: Exception | None = None
    reached: Counter[tuple[str, str]] = attrs.field(factory=Counter)

    def end_example(self, steps: int, error: Exception | None) -> None:
        """Counts an example of `steps` rules, and the error that ended it."""
        if self.first_failure is None:
            self.examples += 1
            self.steps += steps
            if error is not None:
                self.first_failure, self.first_error = self.examples, error
            if self.on_example is not None:
                self.on_example(self.examples)


_current: ContextVar[MachineSession] = ContextVar("batchstate_session")


def current_session() -> MachineSession:
    """The session of the innermost `session` window; outside of one, a session of its own on the CPU."""
    session = _current.get(None)
    return MachineSession(open_runtime) if session is None else session


@contextlib.contextmanager
def session(
    runtimes: OpenRuntime = open_runtime,
    *,
    level: str | Level = Level.FULL,
    on_example: Callable[[int], None] | None = None,
) -> Iterator[MachineSession]:
    """A window in which every machine takes its runtimes from `runtimes` and counts into the session yielded."""
    token = _current.set(MachineSession(runtimes, Level(level), on_example))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


class DisagreementError(AssertionError):
    """The class and its model disagree, and no invariant of the library noticed."""


class Machine(RuleBasedStateMachine):
    """A state machine over a model. Subclasses call `open` in an `@initialize` rule and compare in `check`.

    Attributes:
        NAME: its name in reports.
        TARGETS: coverage targets: states that an ordinary number of examples must reach, or else a run without a
            failure proves little. Counted by `reached`.
        rt: the runtime of the example.
    """

    NAME: ClassVar[str] = ""
    TARGETS: ClassVar[tuple[str, ...]] = ()

    rt: Runtime

    def __init__(self) -> None:
        super().__init__()
        self.session = current_session()
        self._steps = 0
        self._windows = contextlib.ExitStack()

    def open(self) -> None:
        """Opens the runtime and sets the level of the checks, by default `full`, for the length of the example."""
        self._windows.enter_context(levels.checks(self.session.level))
        self.rt = self._windows.enter_context(window_of(self.open_runtime()))

    def open_runtime(self) -> Runtime:
        """The runtime of the example, from the factory of the run."""
        return self.session.open_runtime()

    def check(self) -> None:
        """Compares everything with the model and checks every invariant. Called after each rule."""

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Runs `check`."""
        self.check()
        self._steps += 1

    def teardown(self) -> None:
        """Closes the example and notes whether it failed."""
        error = sys.exc_info()[1]
        try:
            if error is None or (isinstance(error, Exception) and not isinstance(error, HypothesisException)):
                self.session.end_example(self._steps, error)  # else Hypothesis gave the example up
        finally:
            self._windows.close()

    def reached(self, target: str, when: bool = True) -> None:
        """Counts a coverage target.

        Raises:
            ArgumentError: `TARGETS` does not declare it.
        """
        if when:
            if target not in self.TARGETS:
                problem = f"machine {self.NAME!r} has no coverage target {target!r}"
                raise ArgumentError(problem, target, "declare it in `TARGETS`")
            self.session.reached[self.NAME, target] += 1
