"""What a call that does not fit is told, and a name or an operation that is known from elsewhere.

Python refuses a call with other arguments before the function runs. What is called now and then, a constructor, a
function of a module, or a method that a step calls once, is wrapped, and the refusal is a `CallError`. Other methods
are not: a wrapper would be one more call. Python's own refusal begins with the `__qualname__` of the function, which
therefore says the signature.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

import attrs

from batchstate.errors import ArgumentError, CallError, DeviceError, one_of

T = TypeVar("T")

_MADE_BY = {
    "runtime": "`runtime` is what `open_runtime` returns",
    "slots": "`slots` is a SlotPool",
    "pages": "`pages` is a PagePool",
    "engine": "`engine` is what `open_engine` returns",
    "num_rows": "`num_rows` is the name of what has the number of requests, or a function of the batch",
}
_KINDS = {"runtime": "Runtime", "slots": "SlotPool", "pages": "PagePool", "engine": "Engine"}
"""Parameters of constructors by name: the class of what belongs there."""

_MEANT = {
    # a method, or a class: what an unknown argument `key` of it means
    "FutureMap": "give fields as a mapping: FutureMap(pool, {{{key!r}: relay_field(torch.int64)}})",
    "update": "for a whole column, batch.replace({key}=...); for some rows, batch.update({key!r}, rows, values)",
    "advance": "name the column: batch.advance({key!r}, {value})",
}
_SYNONYMS = {"watch": {"columns": "rows", "twins": "pairs", "methods": "after", "hooks": "after", "keys": "key"}}
"""Arguments by other words than their own, which they do not resemble."""
_EXAMPLES = {
    "watch": "watch(Engine, num_rows='num_reqs', after=['step'], pairs=[('seq_lens_cpu', 'seq_lens')])",
    "Twin": "Twin('seq_lens_cpu', 'seq_lens'), the names of both attributes",
}
_INSTANCES = {
    "Batch": "batch",
    "MirroredTensor": "value",
    "Runtime": "runtime",
    "SlotPool": "pool",
    "PagePool": "pages",
}
_LONGEST = 40


def shown(value: object) -> str:
    """A value in an error: as it is written if that is short, or else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if _is_plain(value) else _a(type(value))


def _is_plain(value: object) -> bool:
    text = repr(value)
    plain = value is None or isinstance(value, str | int | float | list | tuple | dict) or text.startswith("torch.")
    return plain and len(text) <= _LONGEST and "\n" not in text


def _a(kind: type) -> str:
    name = kind.__name__
    return name if kind is bytes else f"{'an' if name[0] in 'AEIOaeio' or name == 'ndarray' else 'a'} {name}"


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


def methods_show_signature(*once: str, **instead: str) -> Callable[[T], T]:
    """A decorator of classes: methods alone, those in `instead` with these words. Those in `once` are wrapped."""

    def decorate(cls: T) -> T:
        for name, method in [*vars(cls).items()]:
            function = inspect.unwrap(getattr(method, "__func__", method))
            if not isinstance(function, FunctionType) or (name.startswith("_") and name not in instead):
                continue
            plain = f"{cls.__name__}.{name}"  # type: ignore[attr-defined]
            if name in once:
                wrapped: Any = _wrapped(getattr(method, "__func__", method), plain)
                setattr(cls, name, classmethod(wrapped) if isinstance(method, classmethod) else wrapped)
            elif not function.__qualname__.startswith("expected "):
                expected = instead.get(name) or _signature(plain, function, not isinstance(method, staticmethod))
                function.__qualname__ = f"expected {expected}; Python says of this call: {plain}"
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
    makes = function.__name__ == "__init__"
    skipped = int(makes or "." in name)
    columns: Any = ()
    if "." in name and args:  # a method: of the class that was used
        columns = getattr(args[0], "_columns", ()) if function.__name__ == "build" else ()
        name = f"{(args[0] if isinstance(args[0], type) else type(args[0])).__name__}.{function.__name__}"
        bases = [] if isinstance(args[0], type) else [one.__name__ for one in type(args[0]).__mro__]
        of = next((_INSTANCES[one] for one in bases if one in _INSTANCES), None)
    else:
        of = None
    to_write = name if of is None else f"{of}.{function.__name__}"
    parameters = [*inspect.signature(function).parameters.values()][skipped:]
    args = args[skipped:]
    written = _call(name, [*map(shown, args)], {key: shown(value) for key, value in kwargs.items()})
    names = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    unknown = [key for key in kwargs if key not in names]
    places = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one.name for one in parameters if one.default is one.empty and one.name in names]
    missing = [key for key in needed if key not in kwargs and key not in places[: len(args)]]
    problem = f"expected {_signature(name, function, skipped)}, got {written}"
    by_name = [key for key in names if key not in places]
    made_by = [text for key, text in _MADE_BY.items() if key in missing and (makes or key not in _KINDS)]
    swapped = _swapped(places, args) if makes or places[:1] == ["runtime"] else None
    if swapped is not None:
        key, value = swapped
        problem = f"{name}: `{key}` is {shown(value)}, expected a {_KINDS[key]}"
        at = places.index(key)
        rest = [_KINDS_REVERSED.get(type(one).__name__) or shown(one) for one in args[at:]]
        others = {
            one: shown(kwargs[one]) if one in kwargs else "..." for one in by_name if one in kwargs or one in needed
        }
        told = [f"put `{key}` before it: {_call(to_write, [*places[:at], key, *rest], others)}"]
    elif unknown and (meant := _MEANT.get(name) or _MEANT.get(function.__name__)):
        told = [meant.format(key=unknown[0], value=shown(kwargs[unknown[0]]))]
    elif unknown:
        meant_by = _SYNONYMS.get(name, {}).get(unknown[0], unknown[0])
        told = [one_of(names, meant_by) if names else "leave the arguments out"]
    elif len(args) > len(places) and by_name:
        first = [shown(one) if _is_plain(one) else key for one, key in zip(args, places, strict=False)]
        if by_name[0] in kwargs or (not first and not isinstance(args[0], list)):
            rest_by_name = dict.fromkeys(by_name[:3], "...")
        else:
            rest_by_name = {
                key: shown(one) if _is_plain(one) else "..."
                for one, key in zip(args[len(places) :], by_name, strict=False)
            }
        told = [f"give {_listed(list(rest_by_name))} by name: {_call(to_write, first, rest_by_name)}"]
    elif len(args) > len(places):
        told = [
            f"it takes {len(places)} argument{'s' * (len(places) != 1)}"
            if places
            else f"it takes no arguments: {name}()"
        ]
    elif missing:
        given = [shown(one) if _is_plain(one) else key for one, key in zip(args, places, strict=False)]
        rest = [key for key in missing if key in places]
        fields = dict.fromkeys([*(key for key in missing if key in by_name), *columns], "...")
        example = _EXAMPLES.get(name) or _call(to_write, given + rest, fields)
        told = [f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing: {example}"]
    else:
        told = ["give each argument once"]
    return CallError(
        problem, value=written, remedy="; ".join([*told, *(made_by if not unknown and swapped is None else ())])
    )


_KINDS_REVERSED = {kind: name for name, kind in _KINDS.items()}


def _swapped(places: list[str], args: tuple[Any, ...]) -> tuple[str, Any] | None:
    """The first argument of another kind than its place takes, and that place."""
    for key, value in zip(places, args, strict=False):
        if key in _KINDS and _KINDS[key] not in (one.__name__ for one in type(value).__mro__):
            return key, value
    return None


def _call(name: str, args: list[str], kwargs: Mapping[str, str]) -> str:
    return f"{name}({', '.join([*args, *(f'{key}={value}' for key, value in kwargs.items())])})"


def _listed(names: list[str]) -> str:
    """Names in a sentence."""
    quoted = [f"`{name}`" for name in names]
    return " and ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))


# Names and operations


class Elsewhere:
    """A name that a class does not have and that is known from elsewhere: its AttributeError says what to write here.

    One for each such name, where a `__getattr__` would do for all: in Python 3.11 that makes each attribute of each
    instance several times as slow to read. Of other names Python itself says which they resemble.
    """

    __slots__ = ("_instead", "_name")

    def __init__(self, name: str, instead: str) -> None:
        self._name = name
        self._instead = instead

    def __get__(self, instance: object, owner: type) -> NoReturn:
        kind = f"type object {owner.__name__!r}" if instance is None else f"{owner.__name__!r} object"
        problem = f"{kind} has no attribute {self._name!r}; {self._instead}"
        raise AttributeError(problem, name=self._name, obj=owner if instance is None else instance)


def point_elsewhere(cls: type, instead: Mapping[str, str]) -> None:
    """Gives a class the names known from elsewhere, but those that it has."""
    for name, told in instead.items():
        if not any(name in vars(one) for one in cls.__mro__):
            setattr(cls, name, Elsewhere(name, told))


def own_names(cls: type) -> list[str]:
    """What `dir(cls)` says, without names from elsewhere."""
    return [name for name in type.__dir__(cls) if not isinstance(inspect.getattr_static(cls, name, None), Elsewhere)]


class Guided:
    """Base of objects that are neither lists nor functions, and say so: `len`, `[...]`, `in` and unknown names."""

    __slots__ = ()

    _INSTEAD: ClassVar[Mapping[str, str]] = {}  # attribute -> what to write instead
    _guide: ClassVar[str] = ""  # what has its numbers and entries

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        point_elsewhere(cls, cls._INSTEAD)

    def __dir__(self) -> list[str]:
        return [*own_names(type(self)), *getattr(self, "__dict__", ())]

    if not TYPE_CHECKING:

        def __bool__(self) -> bool:
            return True

        def __len__(self) -> NoReturn:
            self._refuse("has no length")

        def __contains__(self, entry: object) -> NoReturn:
            self._refuse("cannot be searched with `in`")

        def __getitem__(self, index: object) -> NoReturn:  # Python's iteration asks for entry 0
            self._refuse("cannot be indexed or iterated")

        def __setitem__(self, index: object, value: object) -> NoReturn:
            self._refuse("cannot be assigned to")

        def _refuse(self, problem: str) -> NoReturn:
            name = type(self).__name__
            raise CallError(f"{name} {problem}", value=self, remedy=self._guide)


class OfThisProcess:
    """Base of immutable values of a runtime: a copy is the value itself, and another process cannot have it."""

    __slots__ = ()

    _to_send: ClassVar[str] = ""  # what to send instead

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        problem = f"{self!r} cannot be pickled: it belongs to a runtime of this process"
        raise DeviceError(problem, value=type(self).__name__, remedy=self._to_send)


class Numbers(Guided):
    """Base of statistics, which are read by name."""

    __slots__ = ()

    if not TYPE_CHECKING:

        @property
        def _guide(self) -> str:
            return f"read an attribute: {', '.join(one.name for one in attrs.fields(type(self)))}"

        def __call__(self) -> NoReturn:
            self._refuse("is not a function")
