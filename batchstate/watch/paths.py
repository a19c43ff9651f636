"""Reading declared names from objects that others wrote: paths, as `watch` tells, or functions of the batch."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, final

import numpy as np
import torch

from batchstate.errors import DeclarationError, closest

Get: TypeAlias = Callable[[Any], Any]
Name: TypeAlias = str | Get | tuple[str, Get]


@final
class Path:
    """Reads a path step by step: through dictionaries, by number, and past a part that is None."""

    def __init__(self, path: str) -> None:
        self._parts = path.split(".")
        self._steps: list[Get] = [attrgetter(path)] if _is_plain(path) else []

    def __call__(self, batch: Any) -> Any:
        """The value, by the steps of the last call while they lead to it."""
        if self._steps:
            try:
                value = batch
                for step in self._steps:
                    value = step(value)
                return value
            except (AttributeError, LookupError, TypeError):  # a part is None, or of another type than before
                pass
        steps: list[Get] = []
        for part in self._parts:
            if batch is None:
                return None
            if isinstance(batch, Mapping):
                steps.append(itemgetter(int(part) if part.isdigit() and part not in batch else part))
            else:
                steps.append(itemgetter(int(part)) if part.isdigit() else attrgetter(part))
            batch = steps[-1](batch)
        self._steps = steps
        return batch


@final
class Along:
    """Reads a column whose rows lie along another axis than the first."""

    def __init__(self, get: Get, axis: int) -> None:
        self._get, self._axis = get, axis

    def __call__(self, batch: Any) -> Any:
        """The value with its rows first; a view."""
        value = self._get(batch)
        if isinstance(value, torch.Tensor):
            return value.movedim(self._axis, 0)
        return value if value is None else np.moveaxis(np.asarray(value), self._axis, 0)


def _is_plain(path: str) -> bool:
    return all(part.isidentifier() for part in path.split("."))


def _reads(get: Get, path: str) -> bool:
    """Whether it reads the attributes of this path; a caller's `attrgetter` may read others."""
    return isinstance(get, Path) or (isinstance(get, attrgetter) and repr(get) == repr(attrgetter(path)))


def all_of(names: list[str]) -> Get | None:
    """Reads several attributes by one call; None if they are fewer than two, or one is more than an attribute."""
    return attrgetter(*names) if len(names) > 1 and all(map(_is_plain, names)) else None


def getter(name: Name) -> Get:
    """Reads a declared name from a batch. None where a part of its path is None."""
    if not isinstance(name, str):
        return name[1] if isinstance(name, tuple) else name
    if name.startswith("not "):
        inner = getter(name.removeprefix("not "))
        return lambda batch: not inner(batch)
    return attrgetter(name) if name.isidentifier() else Path(name)


def label_of(name: Name) -> str:
    """The name of a column in reports; a lambda has none of its own."""
    if isinstance(name, str):
        return name
    return name[0] if isinstance(name, tuple) else getattr(name, "__name__", "<lambda>")


@final
class Reader:
    """Reads columns: attributes by one call, as long as no part of a path is None, the others one by one."""

    def __init__(self, columns: Mapping[str, Get]) -> None:
        plain = [name for name, get in columns.items() if _is_plain(name) and _reads(get, name)]
        self._at_once = all_of(plain)
        if self._at_once is None:
            plain = []
        self._others = [(name, get) for name, get in columns.items() if name not in plain]
        self._plain = [(name, columns[name]) for name in plain]
        self.names = [*plain, *(name for name, _ in self._others)]

    def read(self, batch: Any) -> Sequence[Any]:
        """The value of each of `names`."""
        others, name = self._others, ""
        rest: list[Any] = []
        values: Sequence[Any] | None = None
        if self._at_once is not None:
            try:
                values = self._at_once(batch)
            except AttributeError:  # a part is None
                others = self._plain + others
            if not others:
                return values or ()
        try:
            for name, get in others:  # noqa: B007 - names the column that fails
                rest.append(get(batch))
        except Exception as error:
            raise failed(f"column {name!r}", error) from error
        return rest if values is None else [*values, *rest]


def failed(argument: str, error: Exception) -> DeclarationError:
    """The error of an argument of the declaration whose name or function failed."""
    meant = ""
    if isinstance(error, AttributeError) and error.name is not None:
        meant = closest(dir(error.obj), error.name)
    return DeclarationError(f"{argument}: {type(error).__name__}: {error}{'; ' * bool(meant)}{meant}", argument)
