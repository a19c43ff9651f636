"""What a mutant is, how it is switched on, and the list of them all."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, final

import attrs

from batchstate.errors import DeclarationError
from batchstate.levels import Level
from batchstate.violations import Code


@final
@attrs.define(eq=False)
class Patch:
    """Replaces attributes of classes and modules until the window around it closes."""

    _undo: contextlib.ExitStack

    def undo(self, call: Callable[..., Any], *args: Any) -> None:
        """Calls `call(*args)` when the window closes."""
        self._undo.callback(call, *args)

    def __call__(self, owner: type | ModuleType, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces `owner.name`, which must exist, and returns what was there.

        Methods are given and returned as plain functions, `self` or `cls` first; whether the attribute is a property
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
        found: Callable[..., Any] = original
        return found


Switch = Callable[[Patch], None]


@final
@attrs.frozen
class Mutant:
    """A real bug, in our own code, that can be switched on.

    Attributes:
        name: what goes wrong, in a few words.
        origin: public threads in which an engine had it.
        mechanism: what goes wrong, in a sentence.
        killed_by: the invariants of which one must fire. Anything else that fails is no kill.
        machine: the state machine of `batchstate.testing.runner.MACHINES` that must find it.
        level: of the checks that must find it.
        group: the kind of bug, which is the module it stands in.
        only_on: the type of device that can have the bug; None for all.
        tool: what its machine runs on to find it: `race`, `race:prompt`, or None for the device itself.
        planted: letter of the bug in the list of those that a race checker has to find, or None.
    """

    name: str
    origin: str
    mechanism: str
    killed_by: tuple[Code, ...]
    machine: str
    level: Level
    group: str
    only_on: str | None
    tool: str | None
    planted: str | None
    _switch: Switch = attrs.field(repr=False)

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        """A window in which the library has the bug. Not for a process that does anything else meanwhile."""
        with contextlib.ExitStack() as undo:
            self._switch(Patch(undo))
            yield

    def exists_on(self, device: str) -> bool:
        """Whether a device of this name (`cpu`, `cuda:1`) can have the bug."""
        return self.only_on in (None, device.partition(":")[0])

    def runs_on(self, device: str) -> str:
        """Where its machine runs, for a hunt on `device`: there, or under the tool that finds it there."""
        if self.tool is None:
            return device
        return self.tool if device == "cpu" else f"{self.tool}:{device}"


MUTANTS: dict[str, Mutant] = {}
"""Every mutant by name. Filled by the modules of this package when they are imported."""


def mutant(
    *killed_by: Code,
    machine: str,
    origin: str,
    level: Level = Level.FULL,
    only_on: str | None = None,
    tool: str | None = None,
    planted: str | None = None,
) -> Callable[[Switch], Mutant]:
    """Registers the function below as a mutant: its name is the mutant's, its docstring the mechanism.

    Args:
        *killed_by: see `Mutant`.
        machine: see `Mutant`.
        origin: see `Mutant`.
        level: see `Mutant`.
        only_on: see `Mutant`.
        tool: see `Mutant`.
        planted: see `Mutant`.
    """

    def found(switch: Switch) -> Mutant:
        return register(
            Mutant(
                name=switch.__name__,
                origin=origin,
                mechanism=" ".join((switch.__doc__ or "").split()),
                killed_by=killed_by,
                machine=machine,
                level=level,
                group=switch.__module__.rpartition(".")[2],
                only_on=only_on,
                tool=tool,
                planted=planted,
                switch=switch,
            )
        )

    return found


def register(mutant: Mutant) -> Mutant:
    """Lists a mutant.

    Raises:
        DeclarationError: another mutant has its name.
    """
    if mutant.name in MUTANTS:
        raise DeclarationError(f"two mutants are named {mutant.name!r}", value=mutant.name, remedy="rename one")
    MUTANTS[mutant.name] = mutant
    return mutant
