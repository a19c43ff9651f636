"""A mutant, the patch that switches it on, and the list of all mutants."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any, final

import attrs

from batchstate import Code, Level
from batchstate.errors import DeclarationError
from tests.interpreted import interpreted_core


@final
@attrs.define(eq=False)
class Patch:
    """Replaces attributes of classes and modules until the window around it closes.

    Attributes:
        lines: of each function that is a diff by now, its code and the lines that differ.
    """

    _undo: contextlib.ExitStack
    lines: dict[str, tuple[CodeType, list[int]]] = attrs.field(factory=dict, init=False)

    def undo(self, call: Callable[..., Any], *args: Any) -> None:
        """Calls `call(*args)` when the window closes."""
        self._undo.callback(call, *args)

    def __call__(self, owner: type | ModuleType, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces `owner.name`, which must exist, and returns what was there.

        Methods are passed and returned as plain functions, `self` or `cls` first; whether the attribute is a property
        or a class method stays as it was.
        """
        before = inspect.getattr_static(owner, name)
        original: Any = before
        after: Any = replacement
        if isinstance(before, property):
            original, after = before.fget, property(replacement)
        elif isinstance(before, classmethod | staticmethod):
            original, after = before.__func__, type(before)(replacement)
        if name in vars(owner):
            self._undo.callback(setattr, owner, name, before)
        else:  # inherited: what the base has comes to light again
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, after)
        return original


Switch = Callable[[Patch], None]


@final
@attrs.frozen
class Mutant:
    """A real bug, in our own code, that can be switched on."""

    name: str
    origin: str  # public threads in which an engine had the bug
    mechanism: str  # the failure in a sentence
    killed_by: tuple[Code, ...]  # the invariants of which one must fire: any other failure does not count
    machine: str  # the machine of `MACHINES` that must find it
    group: str
    _switch: Switch = attrs.field(repr=False)
    level: Level = Level.FULL  # of the checks that must find it
    only_on: str | None = None  # type of the device that can have the bug; None for all
    tool: str | None = None  # its machine runs on `race` or `race:prompt`; None for the device itself
    seeded: str | None = None  # its letter in the list of races that a race detector has to find
    unseen: str | None = None
    """Why no check that runs by itself can find it, so that its machine calls `verify` and compares with its model."""

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[Patch]:
        """A window with the bug, and the core interpreted: a binary has no lines. Not beside anything else."""
        with interpreted_core(), contextlib.ExitStack() as undo:
            patch = Patch(undo)
            self._switch(patch)
            yield patch

    def exists_on(self, device: str) -> bool:
        """Whether a device of this name (`cpu`, `cuda:1`) can have the bug."""
        return self.only_on in (None, device.partition(":")[0])

    def runs_on(self, device: str) -> str:
        """The device or tool that its machine runs on when mutants are run on `device`."""
        if self.tool is None:
            return device
        return self.tool if device == "cpu" else f"{self.tool}:{device}"


MUTANTS: dict[str, Mutant] = {}
"""Mutants by name, filled when this package is imported."""

GROUPS: dict[str, str] = {}
"""The kinds of bugs: name of the group -> what its mutants have in common."""


def register(mutant: Mutant) -> Mutant:
    """Lists a mutant, whose name no other has."""
    if mutant.name in MUTANTS:
        raise DeclarationError(f"two mutants are named {mutant.name!r}", mutant.name, "rename one")
    MUTANTS[mutant.name] = mutant
    return mutant
