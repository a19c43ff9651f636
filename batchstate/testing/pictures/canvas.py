"""A sheet of characters on which lanes and arrows are drawn, and the characters for them."""

from typing import final

import attrs


@final
@attrs.frozen
class Pens:
    """Characters to draw with.

    Attributes:
        life: a lane where nothing happens.
        across, down, dashed_across, dashed_down: pieces of an arrow that is there, and of one that is missing.
        crossing: of two arrows, or of an arrow and a lane.
        fork: where one arrow turns down and another goes on.
        right_then_down, left_then_down, down_then_right, down_then_left: corners.
        to_right, to_left: tips.
        work, fence, wait, missing: marks before a name.
        becomes: from one memory to another.
        cut: ends a text that was too long.
    """

    life: str
    across: str
    down: str
    dashed_across: str
    dashed_down: str
    crossing: str
    fork: str
    right_then_down: str
    left_then_down: str
    down_then_right: str
    down_then_left: str
    to_right: str
    to_left: str
    work: str
    fence: str
    wait: str
    missing: str
    becomes: str
    cut: str


LINES = Pens(*"│─│╌╎┼┬┐┌└┘▶◀■◆◇✗→…")
ASCII = Pens(*"|-|.:++..``><=*ox>~")


class Canvas:
    """Rows of characters, all of one length.

    Args:
        rows: how many there are.
        width: characters in each.
        pens: to draw with.
    """

    def __init__(self, rows: int, width: int, pens: Pens) -> None:
        self._cells = [[" "] * width for _ in range(rows)]
        self._pens = pens

    def write(self, row: int, column: int, text: str) -> None:
        """Puts a text over what is there."""
        self._cells[row][column : column + len(text)] = text

    def across(self, row: int, columns: range, pen: str) -> None:
        """Draws to the right, through whatever comes down."""
        pens = self._pens
        for column in columns:
            found = self._cells[row][column]
            if found in (pens.right_then_down, pens.left_then_down, pens.fork):
                self._cells[row][column] = pens.fork
            else:
                upright = found in (pens.life, pens.down, pens.dashed_down)
                self._cells[row][column] = pens.crossing if upright else pen

    def turn_down(self, row: int, column: int, pen: str) -> None:
        """Draws a corner at the top of an arrow."""
        pens = self._pens
        flat = self._cells[row][column] in (pens.across, pens.dashed_across, pens.fork)
        self._cells[row][column] = pens.fork if flat else pen

    def down(self, rows: range, column: int, pen: str) -> None:
        """Draws downwards, through whatever goes across."""
        flat = (self._pens.across, self._pens.dashed_across)
        for row in rows:
            self._cells[row][column] = self._pens.crossing if self._cells[row][column] in flat else pen

    def lines(self) -> list[str]:
        """The rows, without blanks at their ends."""
        return ["".join(row).rstrip() for row in self._cells]
