"""The results of an operation before it runs: torch's own answer for tensors without memory, remembered."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch

from batchstate.races.tracing.operations import Operation

META = torch.device("meta")
MOST_REMEMBERED = 1 << 14
"""Answers that are remembered; then all are forgotten."""


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""Up to 2.11 torch predicts float32 for its second result, the log-sum-exp; for float64 operands it is float64."""


_OTHERS = ("_embedding_bag", "quantize_per_")
"""Prefixes of operations for which torch predicts another shape or dtype than they return on a CPU."""

_TRIED = ("_native_batch_norm", "native_batch_norm")
"""The same, of operations whose results have the shapes of a run on zeros."""


class NewTensor(NamedTuple):
    """A tensor that an operation makes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Self:
        """A tensor of the same dtype, shape and strides."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())


class UnknownError(Exception):
    """Torch cannot predict the results of an operation."""


_remembered: dict[Any, list[Any]] = {}


def results_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """One entry for each result: a `NewTensor`, a list of them, or None for none and for an argument.

    Raises:
        UnknownError: torch cannot predict them, or refuses.
    """
    try:
        key = func, _key(args), tuple((name, _key(value)) for name, value in kwargs.items())
        results = _remembered.get(key)
    except (RuntimeError, TypeError):  # an argument without a key: a random generator, a sparse tensor
        return _inferred(func, args, kwargs)
    if results is None:
        results = _inferred(func, args, kwargs)
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = results
    return results


def _inferred(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    operation = Operation.of(func)
    like = _zeros if operation.name.startswith(_TRIED) else _meta
    named = {name: META if name == "device" else like(value) for name, value in kwargs.items()}
    try:
        result = func(*map(like, args), **named)
    except (RuntimeError, LookupError, ValueError, TypeError) as error:  # torch refuses with any of these
        raise UnknownError from error
    if operation.name.startswith(_OTHERS):
        raise UnknownError("results that are others on a CPU")
    returned = operation.returned
    if not returned:
        return []
    new: list[Any] = []
    for part, key in zip((result,) if len(returned) == 1 else result, returned, strict=True):
        if key is None:
            new.append(_new(part))
            continue
        argument = kwargs[key] if isinstance(key, str) else args[key]
        if isinstance(argument, torch.Tensor) and argument.shape != part.shape:
            raise UnknownError("an argument that would be resized")
        new.append(None)
    if operation.name == _ATTENTION:
        new[1] = new[1]._replace(dtype=torch.float64 if args[0].dtype is torch.float64 else torch.float32)
    return new


def shapes_of(operation: Operation, result: Any) -> list[Any]:
    """The same of a result that is there: for operations whose shapes depend on values."""
    parts = (result,) if len(operation.returned) == 1 else result
    return [_new(part) if key is None else None for part, key in zip(parts, operation.returned, strict=True)]


def _new(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return NewTensor.like(value)
    if isinstance(value, list | tuple):
        return list(map(_new, value))
    raise UnknownError("a result that is not a plain tensor")


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, list | tuple):
        return type(value)(map(_meta, value))
    return value


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, torch.Generator):
        raise TypeError("a generator")
    return type(value), value
