"""Every error that batchstate raises on purpose, one meaning each.

Each derives from `BatchStateError` and from the nearest builtin, so that a caller who knows only Python catches the
right thing. A message says what happened, shows the value that caused it, and says what to do; the same three are
fields, for tools. A broken invariant is a `batchstate.violations.Violation`, which derives from here too.

An operation that raises one of these has changed nothing. An interrupt (`KeyboardInterrupt`) in the middle of an
operation leaves a pool as it was, or with the operation done, or broken: then each later call raises `PoolBrokenError`.
"""

import difflib
from collections.abc import Iterable
from typing import Any


class BatchStateError(Exception):
    """Base of every error of this library.

    Attributes:
        problem: what happened, in one sentence.
        value: the value that caused it, or None.
        remedy: what the caller can do about it.
    """

    def __init__(self, problem: str, value: object = None, remedy: str = "") -> None:
        self.problem = problem
        self.value = value
        self.remedy = remedy
        super().__init__(problem)

    def __str__(self) -> str:
        return f"{self.problem}\n  remedy: {self.remedy}" if self.remedy else self.problem

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only fields do not survive the default reduction, and test runners pickle exceptions. Values and pools
        # belong to a runtime of this process: their names go instead.
        fields = {name: field if _is_plain(field) else repr(field) for name, field in self.__dict__.items()}
        return _rebuild, (type(self), self.args), fields


class ArgumentError(BatchStateError, ValueError):
    """An argument has a value that cannot be meant (a negative count, an unknown column, duplicate rows)."""


class ShapeError(BatchStateError, ValueError):
    """Shapes do not go together (a mask of another length, a trailing shape that differs)."""


class DtypeError(BatchStateError, TypeError):
    """A dtype is wrong for the operation: floats where integers are meant, or one side unlike the other."""


class RowIndexError(BatchStateError, IndexError):
    """A row index lies outside the value. Negative indices are never taken to count from the end."""


class ValueOverflowError(BatchStateError, OverflowError):
    """A value does not fit the dtype. Raised on the host before anything is launched."""


class DeclarationError(BatchStateError, TypeError):
    """A class or a field is declared wrongly, or used in a way in which it was not declared."""


class ContractError(BatchStateError, TypeError):
    """An operation would need a stronger contract than the value has (see `batchstate.mirror.Contract`)."""


class SideMissingError(BatchStateError, RuntimeError):
    """A side was read that is not there: the host side of a `device_only` value."""


class DeviceError(BatchStateError, ValueError):
    """Operands belong to different runtimes or devices, or a tensor lies on the wrong one."""


class OwnerThreadError(BatchStateError, RuntimeError):
    """A pool, table or runtime was used from a thread that does not own it."""


class PoolBrokenError(BatchStateError, RuntimeError):
    """An operation was interrupted while it changed a pool, which may be half changed; or it calls the pool itself."""


class CaptureError(BatchStateError, RuntimeError):
    """Something that CUDA-graph capture forbids was called while capturing."""


class RecordingError(BatchStateError, ValueError):
    """A file is no recording, is damaged, or comes from another version; or it cannot be replayed here."""


class HandshakeError(BatchStateError, ValueError):
    """Two peers do not fit together: another page size, dtype, instance, or an endpoint that is not ours.

    Raised before a byte has moved.
    """


class TransferError(BatchStateError, RuntimeError):
    """A transfer failed, or its peer is gone.

    Attributes:
        in_flight: whether bytes of it may still land: its memory must then not be reused before its writer has ended.
    """

    def __init__(self, problem: str, value: object = None, remedy: str = "", *, in_flight: bool = False) -> None:
        super().__init__(problem, value, remedy)
        self.in_flight = in_flight


class PoolExhaustedError(BatchStateError, RuntimeError):
    """A pool has fewer free entries than a call needs. Nothing was taken.

    Attributes:
        pool: kind and name of the pool.
        requested: entries that the call needs.
        free: entries free now.
        pending: entries that become free once their fences complete. When `free + pending >= requested`, waiting helps.
        size: entries that such a request can ever have, or None where that is not known.
        free_reserved: entries free now that only a reserved take hands out.
        pending_since: step of the runtime in which the oldest pending entry was freed, or None.
    """

    def __init__(
        self,
        pool: str,
        *,
        requested: int,
        free: int,
        pending: int,
        size: int | None = None,
        free_reserved: int = 0,
        pending_since: int | None = None,
        overdue: bool = False,
    ) -> None:
        self.pool, self.requested, self.free, self.pending = pool, requested, free, pending
        self.size, self.free_reserved, self.pending_since = size, free_reserved, pending_since
        problem = f"{pool}: {requested} requested, {free} free, {pending} pending on a fence"
        if pending_since is not None:
            problem += f" since step {pending_since}"
        if free_reserved:
            problem += f"; {free_reserved} more are free in the reserve, for `take(n, reserved=True)` alone"
        kind = pool.partition(" '")[0].rpartition(" ")[2]
        late = f"the oldest fence should be complete by now; see what it was recorded behind: `{kind}.pending()`"
        if size is not None and requested > size:
            remedy = f"this can never succeed: the pool has {size}; ask for fewer, or make the pool larger"
        elif free + pending < requested:
            remedy = "retract or finish requests, or enlarge the pool: plans take, then free" + f"; {late}" * overdue
        elif overdue:
            remedy = late
        else:
            remedy = "finish the steps in flight and ask again: the pending entries suffice"
        super().__init__(problem, value=requested, remedy=remedy)


_LONGEST = 40
"""Characters of a value in a message: a longer one hides the sentence around it."""


def shown(value: object) -> str:
    """A value in a message: its `repr` if that is plain and short, else its kind."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, kind = repr(value), type(value).__name__
    plain = value is None or isinstance(value, str | int | float | list | tuple | dict) or text.startswith("torch.")
    if plain and len(text) <= _LONGEST and "\n" not in text:
        return text
    return f"{'an' if kind.startswith((*'AEIOaeio', 'ndarray')) else 'a'} {kind}"


def expected(
    subject: str, wanted: object, got: object, remedy: str = "", kind: type[BatchStateError] = ArgumentError
) -> BatchStateError:
    """The error of another value than the wanted one: `subject: expected wanted, got got`."""
    return kind(f"{subject}: expected {wanted}, got {shown(got)}", got, remedy)


def unexplained(subject: str, operation: str, refused: object) -> BatchStateError:
    """The error where the core refuses something and no function of `invariants` says why: a bug of the library."""
    problem = f"{subject}: {operation}: the core refuses {refused}, and no invariant is broken there"
    return BatchStateError(problem, refused, "report it, with the call that raised it: it is a bug of the library")


def wrong_shape(subject: str, wanted: Iterable[int], got: Iterable[int], remedy: str) -> ShapeError:
    """The error of another shape than the wanted one."""
    return ShapeError(f"{subject}: expected shape {[*wanted]}, got {[*got]}", tuple(got), remedy)


def another_runtime(subject: str, value: object) -> DeviceError:
    """The error of a value that belongs to another runtime than the one it is used with."""
    return DeviceError(f"{subject}: {value!r} belongs to another runtime", value, "open one runtime for both")


def one_of(names: Iterable[str], got: object) -> str:
    """A remedy: the names that exist, after the one that `got` resembles."""
    names = tuple(names)
    return f"{closest(names, got)} use one of: {', '.join(names)}".lstrip()


def closest(names: Iterable[str], got: object) -> str:
    """A question for the name that `got` resembles most, or nothing."""
    matches = difflib.get_close_matches(got, names, n=1) if isinstance(got, str) else []
    return f"did you mean {matches[0]!r}?" if matches else ""


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _rebuild(cls: type[BatchStateError], args: tuple[Any, ...]) -> BatchStateError:
    error = cls.__new__(cls)
    error.args = args
    return error
