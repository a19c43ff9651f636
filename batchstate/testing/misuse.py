"""Calls that cannot be meant, each with the errors that may refuse it."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

import attrs

from batchstate.testing.machine import Expected

T = TypeVar("T")


@final
@attrs.frozen(eq=False)
class Misuse(Generic[T]):
    """One way to misuse a `T`.

    Attributes:
        name: what is wrong, in a few words.
        expected: error types, and codes of invariants, one of which must refuse it.
        call: does it.
        applies: whether it is a misuse of this object.
    """

    name: str
    expected: tuple[Expected, ...]
    call: Callable[[T], object] = attrs.field(repr=False)
    applies: Callable[[T], bool] = attrs.field(default=lambda _: True, repr=False)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would list the fields
