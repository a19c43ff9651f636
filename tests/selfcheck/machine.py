"""The base of the machines of the library: comparison with a model, and calls that they must see refused."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, final

import attrs
import numpy.typing as npt
import torch
from hypothesis import reject
from hypothesis.stateful import invariant

from batchstate import testing
from batchstate.errors import BatchStateError
from batchstate.runtime import CpuRuntime, Fence, Runtime, Stream
from batchstate.testing import DisagreementError, LateRuntime
from batchstate.testing.fences import LateFence
from batchstate.testing.machine import current_session
from batchstate.testing.runner import MachineResult
from batchstate.violations import Code, Violation

T = TypeVar("T")
Expected = type[BatchStateError] | Code

_automatic: ContextVar[bool] = ContextVar("batchstate_automatic", default=False)


def run_machine(machine: type[testing.Machine], *, automatic: bool = False, **options: Any) -> MachineResult:
    """Runs a machine; see `batchstate.testing.run_machine`.

    Args:
        machine: the class.
        automatic: count only errors of the library's own checks: the machine compares nothing with its model and calls
            neither `verify` nor `check`. An example that its rules cannot go on with is given up.
        **options: the other arguments.
    """
    token = _automatic.set(automatic)
    try:
        return testing.run_machine(machine, **options)
    finally:
        _automatic.reset(token)


class _StoppedError(BaseException):
    """Ends a run."""


def stop_at_failure(number: int) -> None:
    """As `on_example`, ends a run at its first failure. Hypothesis would run the example once more, to print it."""
    if current_session().first_failure is not None:
        raise _StoppedError


def ask(question: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Asks a question of the machine's own: `verify`, `check`, an invariant of its model. Not in an automatic run."""
    if not _automatic.get():
        question(*args, **kwargs)


def disagree(message: str) -> NoReturn:
    """Reports that the library and the model disagree. An automatic run gives the example up instead."""
    if _automatic.get():
        reject()
    raise DisagreementError(message)


def agree(expected: object, actual: object, what: str, *of: object) -> None:
    """Compares the model's value with the library's; `what` they are `of` which objects, for the message."""
    if expected != actual and not _automatic.get():
        raise DisagreementError(f"{_of(what, of)}\n  model    {expected!r}\n  library  {actual!r}")


def agree_on(expected: npt.NDArray[Any], actual: npt.NDArray[Any], what: str, *of: object) -> None:
    """Compares two arrays, dtype and shape included, bit by bit; see `agree`."""
    same = expected.dtype == actual.dtype and expected.shape == actual.shape and expected.tobytes() == actual.tobytes()
    if not same and not _automatic.get():
        raise DisagreementError(
            f"{_of(what, of)}\n  model    {expected.dtype} {expected.tolist()}\n"
            f"  library  {actual.dtype} {actual.tolist()}"
        )


def _of(what: str, of: tuple[object, ...]) -> str:
    return " of ".join([what, *map(repr, of)])


def is_behind(after: Fence, before: Fence) -> bool:
    """Whether a host that waits for `after` has waited for `before`, as streams and waits order them. Never waits."""
    if before.query() or after is before:
        return True
    if not isinstance(after, LateFence):
        return False
    return any(before is fence or before in fence._foreign for fence in after._runtime._before(after._seen))


class ShownByRepr:
    """Hypothesis prints it by its `repr`; it would list the fields of an attrs class."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@final
@attrs.define
class Refusal:
    """The error that refused a call; None until then."""

    error: BatchStateError | None = None


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
    """A table of misuses; each row: name, expected error or a tuple of those, call, and where it applies."""
    return tuple(
        Misuse(name, expected if isinstance(expected, tuple) else (expected,), *how) for name, expected, *how in rows
    )


class Machine(testing.Machine):
    """A state machine over a model of a part of the library.

    Attributes:
        LAGS: a plain CPU runtime, whose fences are always complete, is replaced by one that lags.
        side: a second stream of the runtime.
    """

    LAGS: ClassVar[bool] = False

    side: Stream

    @property
    def automatic(self) -> bool:
        """Whether the run is automatic; see `run_machine`."""
        return _automatic.get()

    def open(self) -> None:
        """Opens the runtime and a second stream."""
        super().open()
        self.side = self.rt.stream("side")

    def open_runtime(self) -> Runtime:
        """The runtime of the example, or a late one instead."""
        opened = super().open_runtime()
        if self.LAGS and type(opened) is CpuRuntime:
            return LateRuntime(steps_in_flight=opened.steps_in_flight)
        return opened

    def snapshot(self) -> object:
        """All state that a refused call must leave unchanged, to be compared with `==`; not what changes by itself."""
        return None

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Runs `check`, but in automatic runs."""
        if not self.automatic:
            self.check()
        self._steps += 1

    def on(self, side: bool) -> contextlib.AbstractContextManager[None]:
        """A window on the second stream, or on the first."""
        return self.rt.use(self.side) if side else contextlib.nullcontext()

    def on_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """A device tensor of its own with these values."""
        return self.rt.upload([values]).view(0).clone()

    @contextlib.contextmanager
    def refused(self, *expected: Expected) -> Iterator[Refusal]:
        """A window around a call that has to be refused with one of `expected` and to change nothing."""
        before, refusal = self.snapshot(), Refusal()
        try:
            yield refusal
        except BatchStateError as error:
            if not _is_one_of(error, expected):
                raise
            refusal.error = error
            if not error.problem or not error.remedy:
                disagree(f"an error without a problem or a remedy: {error!r}")
        else:
            names = ", ".join(one.value if isinstance(one, Code) else one.__name__ for one in expected)
            disagree(f"accepted what should be refused with one of {names}")
        agree(before, self.snapshot(), "a refused call changed something")

    def refuses(self, misuse: Misuse[T], it: T) -> None:
        """A misuse, where it is one of `it`, is `refused`."""
        if misuse.applies(it):
            with self.refused(*misuse.expected):
                misuse.call(it)


def _is_one_of(error: BatchStateError, expected: tuple[Expected, ...]) -> bool:
    if isinstance(error, Violation):
        return error.code in expected
    return any(isinstance(one, type) and isinstance(error, one) for one in expected)
