"""How one step of the overlap machine is run: an engine of another kind each time."""

import math
from typing import Any, final

import attrs
from hypothesis import strategies as st

READINGS = ("salts", "columns", "ages", "tokens", "marks")
"""What a forward reads at its entry, each handed over from the stream of the schedule in a way of its own."""


@final
@attrs.frozen(repr=False)
class Choices:
    """How a step is run.

    Attributes:
        first: which of `READINGS` the forward begins with: what comes first is covered by no other wait.
        nudged: another stream seeds numbers for this forward.
        tries: each request writes KV behind its last token, and its tokens beyond are taken back at once.
        by_hand: a forward of decodes gathers its inputs itself, and looks places up in the token table.
        own_handles: results are asked for by handles that hold no memory of the step.
        unread: results are left unread a while.
        watched: another stream looks at what crossed with the step.
        clears_aside: rows of requests that leave are cleared on another stream.
    """

    first: int = 0
    nudged: bool = False
    tries: bool = False
    by_hand: bool = False
    own_handles: bool = False
    unread: bool = False
    watched: bool = False
    clears_aside: bool = False

    def __repr__(self) -> str:
        changed = [one.name for one in attrs.fields(Choices) if getattr(self, one.name) != one.default]
        return f"Choices({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def readings(self) -> tuple[str, ...]:
        """`READINGS` in the order of this step."""
        return READINGS[self.first :] + READINGS[: self.first]

    @classmethod
    def numbered(cls, number: int) -> "Choices":
        """The way of that number; 0 is the plainest."""
        digits = []
        for options in _OPTIONS:
            number, digit = divmod(number, options)
            digits.append(digit)
        first, nudged, by_hand, own_handles, clears_aside, unread, tries, watched = digits
        return cls(
            first=first,
            nudged=bool(nudged),
            tries=tries == _SELDOM - 1,
            by_hand=bool(by_hand),
            own_handles=bool(own_handles),
            unread=bool(unread),
            watched=watched == _SELDOM - 1,
            clears_aside=bool(clears_aside),
        )


_SELDOM = 4
_OPTIONS = (len(READINGS), 2, 2, 2, 2, 2, _SELDOM, _SELDOM)
_ALL = math.prod(_OPTIONS)

CHOICES = st.integers(0, _ALL - 1).map(Choices.numbered)
"""One number each: drawing many is what makes examples slow, and their programs long."""
