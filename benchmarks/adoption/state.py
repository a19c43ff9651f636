"""The state of an engine's object as plain values, to tell whether two runs ended alike."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

DEEPEST = 6


def plain(value: Any, depth: int = 0) -> Any:
    """Attributes, entries and numbers of a value, without times and addresses; else the name of its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
        return str(value.dtype), value.tolist()
    if depth > DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    fields = getattr(value, "__dict__", None)
    if fields is None or callable(value):
        return type(value).__name__
    return {name: plain(item, depth + 1) for name, item in fields.items() if not _differs(name)}


def _differs(name: str) -> bool:
    return "time" in name or name.endswith("_ptrs")
