"""The page of SGLang's five changes is made of points whose tests, machines and mutants exist."""

from pathlib import Path

import pytest

from tests.sglang_changes import BUSINESS, CHANGES, Point, fact

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "sglang-changes.md"
POINTS = [point for points in CHANGES.values() for point in points]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.point)
def test_each_point_is_shown(point: Point) -> None:
    """What shows a point exists and says what it shows; a point left to engines says why."""
    assert point.point
    assert point.shown
    for reference in point.shown:
        assert len(fact(reference).removeprefix(BUSINESS)) > 10


def test_each_change_is_on_the_page() -> None:
    """The page has a table for each change, under its heading."""
    text = PAGE.read_text()
    for change in CHANGES:
        assert f"## {change}\n\n```{{sglang-points}} {change}\n```" in text


def test_references_that_lead_nowhere_are_found() -> None:
    """A test, machine or mutant that is gone or renamed makes the page fail."""
    for reference in ("test_pages.py::test_of_nothing", "machine nothing", "mutant nothing"):
        with pytest.raises(KeyError):
            fact(reference)
