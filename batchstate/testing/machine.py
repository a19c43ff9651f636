"""The base of state machines, the session that they run in, and calls that they must see refused."""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, final

import attrs
import numpy.typing as npt
import torch
from hypothesis import reject
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, invariant

from batchstate import levels
from batchstate.errors import ArgumentError, BatchStateError
from batchstate.levels import Level
from batchstate.races.devices import window_of
from batchstate.runtime import CpuRuntime, Runtime, Stream, open_runtime
from batchstate.testing.fences import LateRuntime
from batchstate.violations import Code, Violation

T = TypeVar("T")

OpenRuntime = Callable[[], Runtime]
"""Opens the runtime of one example: this is where the race detector or a simulated device is chosen."""


@final
@attrs.define(eq=False)
class MachineSession:
    """One run of machines.

    Attributes:
        open_runtime: called once per example.
        level: level of the checks in each example.
        examples: examples that ran to their end or failed. The first failure is the last one counted, since Hypothesis
            then shrinks it.
        steps: rules run in them.
        first_failure: number of the example that failed first, from 1, or None.
        first_error: what it ended with, or None.
        reached: (machine, coverage target) -> times reached.
        on_example: called after each example with the number run so far.
        automatic: whether only what the library checks by itself counts; see `run_machine`.
    """

    open_runtime: OpenRuntime
    level: Level = Level.FULL
    examples: int = 0
    steps: int = 0
    first_failure: int | None = None
    first_error: Exception | None = None
    reached: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    on_example: Callable[[int], None] | None = None
    automatic: bool = False

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
    found = _current.get(None)
    return MachineSession(open_runtime) if found is None else found


@contextlib.contextmanager
def session(
    runtimes: OpenRuntime = open_runtime,
    *,
    level: str | Level = Level.FULL,
    on_example: Callable[[int], None] | None = None,
    automatic: bool = False,
) -> Iterator[MachineSession]:
    """A window in which every machine takes its runtimes from `runtimes` and counts into the session yielded.

    Raises:
        ArgumentError: unknown `level`.
    """
    token = _current.set(MachineSession(runtimes, Level(level), on_example=on_example, automatic=automatic))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


Expected = type[BatchStateError] | Code


@final
@attrs.define
class Refusal:
    """The error that refused a call; None until then."""

    error: BatchStateError | None = None


class ShownByRepr:
    """Hypothesis prints it by its `repr`; it would list the fields of an attrs class."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


class DisagreementError(AssertionError):
    """The library and its model disagree, and no invariant of the library noticed."""


def ask(question: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Asks what only a machine asks: `verify`, `check`, an invariant about its model. Not in an automatic run."""
    if not current_session().automatic:
        question(*args, **kwargs)


def disagree(message: str) -> NoReturn:
    """Reports that the library and the model disagree. An automatic run gives the example up instead.

    Raises:
        DisagreementError: unless the run is automatic.
    """
    if current_session().automatic:
        reject()
    raise DisagreementError(message)


def agree(expected: object, actual: object, what: str, *of: object) -> None:
    """Compares what the model says with what the library says.

    Args:
        expected: what the model says.
        actual: what the library says.
        what: they are.
        *of: whose; put into the message, and so into words, only where they differ.

    Raises:
        DisagreementError: they differ; the message shows both.
    """
    if expected != actual and not current_session().automatic:
        raise DisagreementError(f"{_of(what, of)}\n  model    {expected!r}\n  library  {actual!r}")


def agree_on(expected: npt.NDArray[Any], actual: npt.NDArray[Any], what: str, *of: object) -> None:
    """Compares two arrays, dtype and shape included, bit by bit; see `agree`.

    Raises:
        DisagreementError: they differ; the message shows both.
    """
    same = expected.dtype == actual.dtype and expected.shape == actual.shape and expected.tobytes() == actual.tobytes()
    if not same and not current_session().automatic:
        raise DisagreementError(
            f"{_of(what, of)}\n  model    {expected.dtype} {expected.tolist()}\n"
            f"  library  {actual.dtype} {actual.tolist()}"
        )


def _of(what: str, of: tuple[object, ...]) -> str:
    return " of ".join([what, *map(repr, of)])


class Machine(RuleBasedStateMachine):
    """A state machine over a model. Subclasses call `open` in an `@initialize` rule and compare in `check`.

    Attributes:
        NAME: its name in reports.
        TARGETS: coverage targets: states that an ordinary number of examples must reach, or else a run without a
            failure proves little. Counted by `reached`.
        LAGS: a plain CPU runtime, whose fences are always complete, is replaced by one that lags.
        rt: the runtime of the example.
        side: a second stream of it.
    """

    NAME: ClassVar[str] = ""
    TARGETS: ClassVar[tuple[str, ...]] = ()
    LAGS: ClassVar[bool] = False

    rt: Runtime
    side: Stream

    def __init__(self) -> None:
        super().__init__()
        self.session = current_session()
        self._steps = 0
        self._windows = contextlib.ExitStack()

    def open(self) -> None:
        """Opens the runtime and sets the level of the checks, by default `full`, for the length of the example."""
        self._windows.enter_context(levels.checks(self.session.level))
        self.rt = self._windows.enter_context(window_of(self.open_runtime()))
        self.side = self.rt.stream("side")

    def open_runtime(self) -> Runtime:
        """The runtime of the example, from the factory of the run."""
        opened = self.session.open_runtime()
        if self.LAGS and type(opened) is CpuRuntime:
            return LateRuntime(steps_in_flight=opened.steps_in_flight)
        return opened

    def check(self) -> None:
        """Compares everything with the model and checks every invariant. Called after each rule."""

    def snapshot(self) -> object:
        """All state that a refused call must leave unchanged, to be compared with `==`."""
        return None

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Runs `check`."""
        if not self.session.automatic:
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

    # For rules

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

    def on(self, side: bool) -> contextlib.AbstractContextManager[None]:
        """A window on the second stream, or on the first."""
        return self.rt.use(self.side) if side else contextlib.nullcontext()

    def on_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """A device tensor of its own with these values."""
        return self.rt.upload([values]).view(0).clone()

    @contextlib.contextmanager
    def refused(self, *expected: Expected) -> Iterator["Refusal"]:
        """A window around a call that has to be refused with one of `expected` and to change nothing.

        Yields:
            a `Refusal`, which holds the error afterwards.

        Raises:
            DisagreementError: the call was accepted, or the refused call left something changed.
        """
        # On the simulated device time stands still meanwhile: what completes by itself was not changed by the call.
        held = getattr(type(self.rt), "held", None)
        with contextlib.nullcontext() if held is None else held(self.rt):
            before = self.snapshot()
            refusal = Refusal()
            try:
                yield refusal
            except BatchStateError as error:
                if not _is_one_of(error, expected):
                    raise
                refusal.error = error
                if not error.problem or not error.remedy:
                    disagree(f"an error without a problem or a remedy: {error!r}")
            else:
                disagree(f"accepted what should be refused with one of {_names(expected)}")
            agree(before, self.snapshot(), "a refused call changed something")

    def refuses(self, misuse: "Misuse[T]", it: T) -> None:
        """A misuse, where it is one of `it`, is `refused`."""
        if misuse.applies(it):
            with self.refused(*misuse.expected):
                misuse.call(it)


def _is_one_of(error: BatchStateError, expected: tuple[Expected, ...]) -> bool:
    if isinstance(error, Violation):
        return error.code in expected
    return any(isinstance(one, type) and isinstance(error, one) for one in expected)


def _names(expected: tuple[Expected, ...]) -> str:
    return ", ".join(one.value if isinstance(one, Code) else one.__name__ for one in expected)


@final
@attrs.frozen(eq=False)
class Misuse(ShownByRepr, Generic[T]):
    """One way to misuse a `T`.

    Attributes:
        name: what is wrong, in a few words.
        expected: error types and codes of invariants, one of which must refuse it.
        call: makes the call.
        applies: whether it is a misuse of this object.
    """

    name: str
    expected: tuple[Expected, ...]
    call: Callable[[T], object] = attrs.field(repr=False)
    applies: Callable[[T], bool] = attrs.field(default=lambda _: True, repr=False)

    def __repr__(self) -> str:
        return f"<{self.name}>"


def misuses(*rows: tuple[Any, ...]) -> tuple[Misuse[Any], ...]:
    """A table of misuses.

    Args:
        *rows: name, expected error or a tuple of those, call, and where it is one, as in `Misuse`.
    """
    return tuple(
        Misuse(name, expected if isinstance(expected, tuple) else (expected,), *how) for name, expected, *how in rows
    )
