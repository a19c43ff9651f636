"""What a call that does not fit is told, and a name or an operation that is known from elsewhere.

Python refuses a call with other arguments before the function runs. What is called now and then, a constructor or a
function of a module, is wrapped, and the refusal is a `CallError`. A method of each step is not: a wrapper would be one
more call. Python's own refusal begins with the `__qualname__` of the function, which therefore says the signature.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import attrs

from batchstate.errors import ArgumentError, CallError, closest, one_of

T = TypeVar("T")

_MADE_BY = {
    "runtime": "`runtime` is what `open_runtime` returns",
    "slots": "`slots` is a SlotPool",
    "pages": "`pages` is a PagePool",
    "engine": "`engine` is what `open_engine` returns",
}
_LONGEST = 40


def shown(value: object) -> str:
    """A value in an error: as it is written if that is short, or else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    plain = value is None or isinstance(value, str | int | float | list | tuple | dict) or "torch." in text
    return text if plain and len(text) <= _LONGEST and "\n" not in text else _a(type(value))


def _a(kind: type) -> str:
    name = kind.__name__
    return name if kind is bytes else f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def check_kind(value: object, kind: type, what: str, remedy: str) -> None:
    """Refuses what is not of a class.

    Raises:
        ArgumentError: it is something else.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{what}: expected {_a(kind)}, got {shown(value)}", value=value, remedy=remedy)


# Calls


def shows_signature(target: T) -> T:
    """A decorator of public classes and functions: a call that does not fit says what was expected."""
    if isinstance(target, type):
        if isinstance(init := vars(target).get("__init__"), FunctionType):
            target.__init__ = _wrapped(init, target.__name__)  # type: ignore[misc]
        return methods_show_signature()(target)
    function: Any = target
    wrapped: Any = _wrapped(function, function.__name__)
    return wrapped  # type: ignore[no-any-return]


def methods_show_signature(**instead: str) -> Callable[[T], T]:
    """A decorator of classes: only methods, those in `instead` with these words. For what is made in each step."""

    def decorate(cls: T) -> T:
        for name, method in vars(cls).items():
            function = inspect.unwrap(getattr(method, "__func__", method))
            if isinstance(function, FunctionType) and (name in instead or not name.startswith("_")):
                plain = f"{cls.__name__}.{name}"  # type: ignore[attr-defined]
                expected = instead.get(name) or _signature(plain, function, not isinstance(method, staticmethod))
                function.__qualname__ = f"expected {expected}, got another call: {plain}"
        return cls

    return decorate


class _Default:
    """Stands for a default that is too long to be shown."""

    def __repr__(self) -> str:
        return "..."


def _signature(name: str, function: Callable[..., Any], skipped: int) -> str:
    """A signature without types, and without its first parameters."""
    parameters = []
    for one in [*inspect.signature(function).parameters.values()][skipped:]:
        plain = one.default in (one.empty, None, ()) or isinstance(one.default, bool | int | float | str)
        parameters.append(one.replace(annotation=one.empty, default=one.default if plain else _Default()))
    return f"{name}{inspect.Signature(parameters)}"


def _wrapped(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            try:
                inspect.signature(function).bind(*args, **kwargs)
            except TypeError:
                raise _refused(function, name, args, kwargs) from None
            raise  # of the function itself

    return call


def _refused(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallError:
    """The error of a call that does not fit."""
    skipped = int(function.__name__ == "__init__")
    parameters = [*inspect.signature(function).parameters.values()][skipped:]
    args = args[skipped:]
    written = ", ".join([*map(shown, args), *(f"{key}={shown(value)}" for key, value in kwargs.items())])
    names = [one.name for one in parameters]
    unknown = [key for key in kwargs if key not in names]
    places = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    needed = [one.name for one in parameters if one.default is one.empty]
    missing = [key for key in needed if key not in kwargs and key not in places[: len(args)]]
    if unknown:
        told = [one_of(names, unknown[0])]
    elif len(args) > len(places):
        by_name = ", ".join(f"{key}=..." for key in names if key not in places)
        told = [f"give {len(places) or 'none'} by position" + (f", the others by name: {by_name}" if by_name else "")]
    else:
        told = [f"give {' and '.join(f'`{key}`' for key in missing)} too"] if missing else ["give each argument once"]
    return CallError(
        f"expected {_signature(name, function, skipped)}, got {name}({written})",
        value=written,
        remedy="; ".join([*told, *(text for key, text in _MADE_BY.items() if key in needed and not unknown)]),
    )


# Names and operations


def attribute(instance: object, name: str, instead: Mapping[str, str], otherwise: str = "") -> Any:
    """What a `__getattr__` answers: Python's own error, with what to write instead if that is known.

    An error inside of a property of that name stays as it was raised.

    Args:
        instance: whose attribute is asked for.
        name: of the attribute.
        instead: name -> what to write instead.
        otherwise: what else there is.

    Raises:
        AttributeError: the object has no such attribute; `hasattr` works.
    """
    try:
        return object.__getattribute__(instance, name)
    except AttributeError as error:
        if name.startswith("_") or hasattr(type(instance), name):
            raise
        told = instead.get(name)
        if told is None:
            told = closest([one for one in dir(type(instance)) if one[0] != "_"], name) or otherwise
        if not told:
            raise
        raise AttributeError(f"{error}; {told}", name=name, obj=instance) from None


class Guided:
    """Base of objects that are neither lists nor functions, and say so: `len`, `[...]`, `in` and unknown names."""

    __slots__ = ()

    _INSTEAD: ClassVar[Mapping[str, str]] = {}  # attribute -> what to write instead
    _guide: ClassVar[str] = ""  # what has its numbers and entries

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Says what this library calls it."""
            return attribute(self, name, self._INSTEAD)

        def __bool__(self) -> bool:
            return True

        def __len__(self) -> NoReturn:
            self._refuse("has no length")

        def __iter__(self) -> NoReturn:
            self._refuse("cannot be iterated")

        def __contains__(self, entry: object) -> NoReturn:
            self._refuse("cannot be searched with `in`")

        def __getitem__(self, index: object) -> NoReturn:
            self._refuse("has no [...]")

        def __setitem__(self, index: object, value: object) -> NoReturn:
            self._refuse("has no [...] = ...")

        def _refuse(self, problem: str) -> NoReturn:
            name = type(self).__name__
            raise CallError(f"{name} {problem}", value=self, remedy=self._guide)


class Numbers(Guided):
    """Base of statistics, which are read by name."""

    __slots__ = ()

    if not TYPE_CHECKING:

        @property
        def _guide(self) -> str:
            return f"read an attribute: {', '.join(one.name for one in attrs.fields(type(self)))}"

        def __call__(self) -> NoReturn:
            self._refuse("is not a function")
