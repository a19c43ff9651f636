"""What an operation will return, before it runs: torch's own answer for tensors without memory, remembered."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

META = torch.device("meta")
MOST_KNOWN = 1 << 14
"""Answers that are remembered; then all are forgotten."""


class Made(NamedTuple):
    """A tensor that an operation makes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class UnknownError(Exception):
    """Torch cannot say what comes of an operation."""


@final
class Signature:
    """What the schema of an operation says of its results. Made once for each, by `Signature.of`.

    Attributes:
        metadata: though its schema does not say so, it reads shapes alone: it has no place on a stream.
        returned: for each result the argument that it is, by place or name, or None where it is a new tensor.
        written: arguments that it writes, by place or name.
    """

    _known: dict[Any, "Signature"] = {}  # noqa: RUF012 - one for the process: schemas do not change

    __slots__ = ("_draws", "_dropout", "metadata", "returned", "written")

    def __init__(self, func: Any) -> None:
        arguments, returns = func._schema.arguments, func._schema.returns
        self.metadata = func._schema.name in _METADATA
        self._draws = torch.Tag.nondeterministic_seeded in func.tags
        self._dropout = next((place for place, one in enumerate(arguments) if one.name == "dropout_p"), None)
        writes = {
            place: one.alias_info.before_set
            for place, one in enumerate(arguments)
            if one.alias_info is not None and one.alias_info.is_write
        }
        keys: dict[int, int | str] = {
            place: arguments[place].name if arguments[place].kwarg_only else place for place in writes
        }
        self.written = tuple(keys.values())
        self.returned: tuple[int | str | None, ...] = tuple(
            next((keys[place] for place in writes if one.alias_info.before_set == writes[place]), None)
            if one.alias_info is not None
            else None
            for one in returns
        )

    @classmethod
    def of(cls, func: Any) -> "Signature":
        """The signature of an overload."""
        found = cls._known.get(func)
        if found is None:
            found = cls._known[func] = cls(func)
        return found

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call draws random numbers. Attention does only where it is told to drop something."""
        if not self._draws or self._dropout is None:
            return self._draws
        return bool(kwargs.get("dropout_p", _at(args, self._dropout)))

    def writes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments that a call writes: tensors, or lists of them."""
        return [
            one
            for one in (kwargs.get(key) if isinstance(key, str) else _at(args, key) for key in self.written)
            if one is not None
        ]


_METADATA = frozenset(("aten::_fused_sdp_choice", "aten::_unsafe_view", "aten::is_same_size"))

_remembered: dict[Any, list[Any]] = {}


def results_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """One entry for each result: a `Made`, a list of them, or None for none and for an argument.

    Raises:
        UnknownError: torch cannot say, or refuses.
    """
    try:
        key = func, _key(args), tuple((name, _key(value)) for name, value in kwargs.items())
        known = _remembered.get(key)
    except (RuntimeError, TypeError):  # an argument without a key: a random generator, a sparse tensor
        return _inferred(func, args, kwargs)
    if known is None:
        known = _inferred(func, args, kwargs)
        if len(_remembered) >= MOST_KNOWN:
            _remembered.clear()
        _remembered[key] = known
    return known


def _inferred(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    named = {name: META if name == "device" else _meta(value) for name, value in kwargs.items()}
    try:
        result = func(*map(_meta, args), **named)
    except (RuntimeError, LookupError, ValueError, TypeError) as error:  # whatever torch refuses with
        raise UnknownError from error
    returned = Signature.of(func).returned
    if not returned:
        return []
    made: list[Any] = []
    for one, given in zip((result,) if len(returned) == 1 else result, returned, strict=True):
        if given is None:
            made.append(_made(one))
            continue
        argument = kwargs[given] if isinstance(given, str) else args[given]
        if isinstance(argument, torch.Tensor) and argument.shape != one.shape:
            raise UnknownError("an argument that would be resized")
        made.append(None)
    return made


def _made(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return Made(value.dtype, tuple(value.shape), value.stride())
    if isinstance(value, list | tuple):
        return [_made(one) for one in value]
    raise UnknownError("a result that is no plain tensor")


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, list | tuple):
        return type(value)(map(_meta, value))
    return value


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, torch.Generator):
        raise TypeError("a generator")
    return type(value), value


def _at(args: Sequence[Any], place: int) -> Any:
    return args[place] if place < len(args) else None
