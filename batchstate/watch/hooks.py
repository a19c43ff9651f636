"""Hooks round methods of other people's classes: put there once, taken away without a trace."""

import functools
import inspect
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Self, TypeAlias, final

import attrs

from batchstate import levels
from batchstate.errors import ArgumentError, BatchStateError, DeclarationError, closest
from batchstate.violations import Violation

__tracebackhide__ = True  # so that pytest shows the engine's frames

Hook: TypeAlias = str | Callable[..., Any] | tuple[Any, str]
OnViolation: TypeAlias = Literal["raise", "log"] | Callable[[BatchStateError], object]

_log = logging.getLogger("batchstate.watch")
_installing = threading.RLock()
_WATCHER = "_batchstate_watcher"


@final
class _Stop(BaseException):
    """Carries the error that `on_violation` raises out of a check: it is no failure of the declaration."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@attrs.frozen
class WatchCounters:
    """Figures of a watch up to now, for a log line or an exporter of metrics.

    Attributes:
        calls: calls of hooked methods.
        checked: of these, calls that were checked.
        samples: device sides copied for a comparison a step later.
        compared: checks of `watch` and `audit` in which values were compared: calls at `full` with both sides of a pair
            or with rows that moved, and samples that have arrived. 0 if there was nothing but lengths and dtypes.
        nested: calls left out inside another hooked call of the same object, where it may be half changed.
        skipped: samples left out because too many copies were under way.
        violations: found, by code.
    """

    calls: int
    checked: int
    samples: int
    compared: int
    nested: int
    skipped: int
    violations: Counter[str]

    def as_dict(self) -> dict[str, int]:
        """Metric -> value; violations as `violations_MIRROR_EQUAL`, and their sum as `violations`."""
        figures = attrs.asdict(self) | {"violations": self.violations.total()}
        return figures | {f"violations_{code}": number for code, number in sorted(self.violations.items())}


class Hooked:
    """Methods with hooks round them, until `stop` or the end of a `with` block.

    Attributes:
        name: of the class, for reports.
        active: whether the hooks do anything.
        every: every n-th call of each method is checked, the first among them.
        numbers: gives each call its number. Threads share it, as they do `pending`, without a lock.
        pending: an entry for each sample on its way, which each call looks for.
    """

    def __init__(self, name: str, on_violation: OnViolation, every: int) -> None:
        if isinstance(on_violation, str) and on_violation not in ("raise", "log"):
            problem = f"watch of {name}: expected on_violation 'raise', 'log' or a function, got {on_violation!r}"
            raise ArgumentError(problem, on_violation, "a function gets the violation; 'log' logs once for each place")
        if every < 1:
            problem = f"watch of {name}: expected every=1 or more, got {every!r}"
            raise ArgumentError(problem, every, "1 checks each call")
        self.name = name
        self._on_violation = on_violation
        self.every = every
        self.numbers = itertools.count(1)
        self._lock = threading.RLock()  # a finalizer that runs inside may call a hooked method
        self._figures = dict.fromkeys(("checked", "samples", "compared", "nested", "skipped"), 0)
        self._violations: Counter[str] = Counter()
        self._thread = threading.local()
        self._logged: set[tuple[Any, ...]] = set()
        self.pending: list[None] = []
        self.active = False
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __reduce__(self) -> str:
        raise DeclarationError(f"{self!r} cannot be copied or pickled", self.name, "call `watch` in the other process")

    def stop(self) -> None:
        """Takes the hooks away. A method that was wrapped again since keeps a hook that does nothing."""
        with _installing:
            self.active = False
            while self._undo:
                owner, name, hook, before = self._undo.pop()
                if vars(owner).get(name) is hook:
                    delattr(owner, name) if before is None else setattr(owner, name, before)  # None if inherited

    def install(
        self,
        owner: type,
        hooks: Mapping[tuple[Any, str], "Around"],
        records: Mapping[tuple[Any, str], Callable[..., object]] | None = None,
    ) -> None:
        """Puts hooks round methods, all or none; in front of those in `records` a function of their arguments."""
        levels.opened()
        with _installing:
            records = records or {}
            methods = [(where, name, _method(self.name, where, name)) for where, name in {**hooks, **records}]
            try:
                for where, name, method in methods:
                    hook = _wrapped(self, method, hooks.get((where, name)), records.get((where, name)))
                    before = vars(where).get(name)
                    setattr(where, name, hook)
                    self._undo.append((where, name, hook, before))
            except TypeError as error:
                self.stop()
                problem = f"watch of {self.name}: {error}"
                raise ArgumentError(problem, owner, "watch a class that is written in Python") from error
            self.active = True

    @property
    def counters(self) -> WatchCounters:
        """The figures up to now."""
        with self._lock:
            calls = int(repr(self.numbers)[len("count(") : -1]) - 1
            return WatchCounters(calls, **self._figures, violations=self._violations.copy())

    def count(self, figure: str, number: int = 1) -> None:
        """Adds to one of the counters."""
        with self._lock:
            self._figures[figure] += number

    def report(self, error: BatchStateError) -> None:
        """Raises the error, logs it, or hands it to the function in `on_violation`. For questions of `ask` alone."""
        if isinstance(error, Violation):
            identity: tuple[Any, ...] = (error.code.value, error.operation, error.column)
        else:
            identity = (type(error).__name__, str(error.value))
        with self._lock:
            self._violations[identity[0]] += 1
            new = identity not in self._logged
            self._logged.add(identity)
        if self._on_violation == "raise":
            raise _Stop(error)
        if self._on_violation == "log":
            if new:
                _log.error("%s", error)
            return
        try:
            self._on_violation(error)
        except Exception as own:
            raise _Stop(own) from None

    def ask(self, operation: str, question: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The answer of a question; None if a name or a function of the declaration failed.

        Raises:
            Violation, DeclarationError: with `on_violation="raise"`.
        """
        try:
            try:
                return question(*args, **options)
            except Exception as error:
                self.report(_misdeclared(self.name, operation, error))
        except _Stop as carrier:
            stop = carrier.error
        else:
            return None
        try:
            raise stop
        finally:
            del stop  # its traceback has this frame

    def enter(self, subject: object, *, moves: bool = True, inner: bool = False) -> bool | None:
        """Marks a checked call of this object in this thread, and says whether it is the outermost.

        None, and counted, for one inside another that is left out: all but those with `inner` in one without `moves`.
        """
        inside: dict[int, bool] = self._thread.__dict__.setdefault("inside", {})
        outermost = id(subject) not in inside
        if not outermost and (inside[id(subject)] or not inner):
            self.count("nested")
            return None
        inside[id(subject)] = moves
        return outermost

    def leave(self, subject: object, *, outermost: bool = True, checked: bool = True, compared: bool = False) -> None:
        """Ends what `enter` began, and counts it."""
        with self._lock:
            self._figures["checked"] += checked
            self._figures["compared"] += compared
        self._thread.inside[id(subject)] = False
        if outermost:
            del self._thread.inside[id(subject)]


def _misdeclared(name: str, operation: str, error: Exception) -> DeclarationError:
    """The error of a name or function of a declaration that failed; `Declaration` knows which argument it was."""
    problem, value = f"{type(error).__name__}: {error}", str(error)
    if isinstance(error, DeclarationError):
        problem, value = error.problem, str(error.value)
    remedy = "correct the declaration, or the batch lacks what it has to have here"
    misdeclared = DeclarationError(f"watch of {name}, {operation}: {problem}", value, remedy)
    misdeclared.__cause__ = error.__cause__ or error
    return misdeclared


Around: TypeAlias = Callable[[int, bool, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs a method and checks before and after: number of the call, whether a check is due, the function, arguments."""


def _method(watched: str, owner: Any, name: str) -> Any:
    try:
        method = inspect.getattr_static(owner, name)
    except AttributeError:
        methods = [other for other in dir(owner) if other[0] != "_" and callable(getattr(owner, other, None))]
        near = [other for other in methods if other.startswith(name[:4])]
        remedy = closest(methods, name) or (f"it has {', '.join(near[:5])}" if near else "name one of its methods")
        raise ArgumentError(f"watch of {watched}: {owner.__name__} has no method {name!r}", name, remedy) from None
    function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
    if getattr(function, _WATCHER, None) is not None and name not in vars(owner):
        # The base is watched: objects of the subclass are checked by its own declaration.
        whole: Any = vars(function)["__wrapped__"]
        return type(method)(whole) if isinstance(method, classmethod | staticmethod) else whole
    if not callable(function) or isinstance(function, type | property):
        problem = f"watch of {watched}: {owner.__name__}.{name} is a {type(method).__name__}, not a method"
        raise ArgumentError(problem, name, "name a method")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        problem = f"watch of {watched}: {owner.__name__}.{name} returns before it has run (a coroutine or generator)"
        raise ArgumentError(problem, name, "name the plain method that it calls")
    return method


def _wrapped(hooked: Hooked, method: Any, around: Around | None, record: Callable[..., object] | None) -> Any:
    """A method with a hook; its arguments are recorded in each call, whatever `every` says."""
    function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
    number_of, every = hooked.numbers.__next__, hooked.every
    turn, first = itertools.count(1).__next__, 1 % every  # a count of its own: methods are called in turn

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if levels.cheap and hooked.active:
            if record is not None:
                hooked.ask(f"before {function.__name__}", record, *args, **kwargs)
            if around is not None:
                number, due = number_of(), turn() % every == first
                if due or hooked.pending:
                    return around(number, due, function, args, kwargs)
        return function(*args, **kwargs)

    setattr(watched, _WATCHER, hooked)
    return type(method)(watched) if isinstance(method, classmethod | staticmethod) else watched


def hooks_of(name: str, owner: type, hooks: Collection[Hook], argument: str) -> list[tuple[Any, str]]:
    """Hooks as (class, method)."""
    methods: list[tuple[Any, str]] = []
    for hook in hooks:
        if isinstance(hook, str):
            methods.append((owner, hook))
        elif isinstance(hook, tuple):
            methods.append(hook)
        elif getattr(owner, hook.__name__, None) == hook:
            methods.append((owner, hook.__name__))
        else:
            problem = f"watch of {name}: expected in `{argument}` the name of a method, got {hook!r}"
            raise ArgumentError(problem, hook, "name a method of the class, or pass (class or module, 'name')")
    return methods
