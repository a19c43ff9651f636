"""The base of the machines of the library: comparison with a model, and calls that they must see refused."""

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, final

import attrs
import numpy.typing as npt
import torch
from hypothesis import reject
from hypothesis.stateful import invariant

from batchstate import BatchStateError, Code, Violation, testing
from batchstate.runtime import CpuRuntime, Fence, Runtime, Stream
from batchstate.testing import DisagreementError, LateRuntime, MachineResult
from batchstate.testing.fences import LateFence
from batchstate.testing.machine import current_session

T = TypeVar("T")
Expected = type[BatchStateError] | Code

STALE = (Code.SLOT_STALE_HANDLE, Code.SLOT_DOUBLE_FREE)
"""One of these refuses a handle whose owner has left."""

_automatic: ContextVar[bool] = ContextVar("batchstate_automatic", default=False)


def run_machine(machine: type[testing.Machine], *, automatic: bool = False, **options: Any) -> MachineResult:
    """Runs a machine; see `batchstate.testing.run_machine`.

    An `automatic` run counts only errors of the library's own checks: the machine compares nothing with its model and
    calls neither `verify` nor `check`. An example that its rules cannot go on with is given up.
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
@attrs.frozen(eq=False)
class Misuse(ShownByRepr, Generic[T]):
    name: str  # the mistake in a few words
    expected: tuple[Expected, ...]  # one of these refuses it
    call: Callable[[T], object]
    applies: Callable[[T], bool] = lambda _: True  # whether it is a misuse of this object

    def __repr__(self) -> str:
        return f"<{self.name}>"


def misuses(*rows: tuple[Any, ...]) -> tuple[Misuse[Any], ...]:
    """A table of misuses; each row: name, expected error or a tuple of those, call, and where it applies."""
    return tuple(
        Misuse(name, expected if isinstance(expected, tuple) else (expected,), *how) for name, expected, *how in rows
    )


class Machine(testing.Machine):
    """A state machine over a model of a part of the library."""

    LAGS: ClassVar[bool] = False  # instead of a plain CPU runtime, whose fences are always complete, one that lags

    side: Stream  # a second one of the runtime

    @property
    def automatic(self) -> bool:
        return _automatic.get()

    def open(self) -> None:
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
        if not self.automatic:
            self.check()
        self._steps += 1

    def on(self, side: bool) -> contextlib.AbstractContextManager[None]:
        """A window on the second stream, or on the first."""
        return self.rt.use(self.side) if side else contextlib.nullcontext()

    def on_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """A device tensor of its own with these values."""
        return self.rt.upload([values]).view(0).clone()

    def refused(self, expected: Expected | tuple[Expected, ...], *calls: Callable[[], object]) -> None:
        """Each call has to be refused, with one of `expected`, and to change nothing."""
        for call in calls:
            self.refusal(expected, call)

    def refusal(self, expected: Expected | tuple[Expected, ...], call: Callable[[], object]) -> BatchStateError:
        """The error of a call that has to be refused."""
        reasons, before = expected if isinstance(expected, tuple) else (expected,), self.snapshot()
        try:
            call()
        except BatchStateError as error:
            if not _is_one_of(error, reasons):
                raise
            refusal = error
        else:
            names = ", ".join(reason.value if isinstance(reason, Code) else reason.__name__ for reason in reasons)
            disagree(f"accepted what should be refused with one of {names}")
        if not refusal.problem or not refusal.remedy:
            disagree(f"an error without a problem or a remedy: {refusal!r}")
        agree(before, self.snapshot(), "a refused call changed something")
        return refusal

    def refuses(self, misuse: Misuse[T], it: T) -> None:
        """A misuse, where it is one of `it`, is `refused`."""
        if misuse.applies(it):
            self.refused(misuse.expected, lambda: misuse.call(it))


def _is_one_of(error: BatchStateError, expected: tuple[Expected, ...]) -> bool:
    if isinstance(error, Violation):
        return error.code in expected
    return any(isinstance(one, type) and isinstance(error, one) for one in expected)
