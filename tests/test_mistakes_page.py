"""The page of mistakes says what answers: errors that exist, and codes that find the mutants beside them."""

import re
from pathlib import Path

import pytest

from batchstate import Code, errors
from batchstate.invariants import INVARIANTS
from batchstate.selfcheck.mutants import MUTANTS

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "mistakes.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| mistake", "| ---"))
]
LEVELS = ("always", "cheap", "full", "test")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[3].strip("`") or row[0])
def test_each_row_is_true(row: list[str]) -> None:
    """The error exists, or the code answers at that level at the latest and finds the mutant."""
    _, answer, level, mutant = row
    name = answer.strip("`")
    if not mutant:
        assert issubclass(getattr(errors, name), errors.BatchStateError)
        return
    code = Code(name)
    assert code in MUTANTS[mutant.strip("`")].killed_by
    asked = INVARIANTS[code].level if code in INVARIANTS else "test"
    assert LEVELS.index(asked) <= LEVELS.index({"tool": "test"}.get(level, level))


def test_the_page_is_long_enough_to_mean_something() -> None:
    """Rows were read, and no mutant stands twice."""
    mutants = re.findall(r"`(\w+)` \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(mutants) == len(set(mutants)) >= 30
