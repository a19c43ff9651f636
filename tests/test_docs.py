"""The documentation is true: links lead somewhere, and each mistake and each change has what shows it."""

import re
from pathlib import Path

import pytest

from batchstate import Code, errors
from batchstate.invariants import INVARIANTS
from batchstate.violations import Breach, Violation
from tests import api_page
from tests.selfcheck.mutants import MUTANTS
from tests.sglang_changes import BUSINESS, CHANGES, Point, fact

ROOT = Path(__file__).parent.parent

# Links

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/[!_]*/*.md")])
CODE = re.compile(r"^(`{3,}).*?^\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
MADE = ("docs/reference/api/", "docs/_build/")
"""Folders that `make docs` writes."""


def anchors(page: str) -> set[str]:
    """The anchors of a page, as GitHub and MyST make them of headings, and those that it names itself."""
    headings = re.findall(r"^#{1,6} (.+)$", re.sub(r"^(`{3,}).*?^\1", "", page, flags=re.DOTALL | re.MULTILINE), re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", page, re.MULTILINE))


def broken_links(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere."""
    broken = []
    for link in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if target.is_relative_to(ROOT) and str(target.relative_to(ROOT)).startswith(MADE):
            continue
        made = "{invariants}" in target.read_text() if target.suffix == ".md" and target.exists() else False
        if not target.exists() or (anchor and not made and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Files and anchors that a page links to exist; anchors of a page that is made from code are Sphinx's to check."""
    if str(page.relative_to(ROOT)).startswith(MADE):
        pytest.skip("written by `make docs`")
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    """The test can fail: a file that is missing, a heading that is missing; code and other sites are left alone."""
    text = "[a](docs/none.md) [b](README.md#none) [c](README.md#install) `[d](none)` [e](https://example.org/none)"
    assert broken_links(ROOT / "README.md", text) == ["docs/none.md", "README.md#none"]


def test_every_public_name_has_a_line() -> None:
    """The page of the API has the tables that `python -m tests.api_page` writes."""
    text = api_page.PAGE.read_text()
    assert text.partition(api_page.BEGIN)[2].partition(api_page.END)[0].strip() == api_page.table().strip()


# The page of mistakes: errors that exist, and codes that find the mutants beside them

MISTAKES = ROOT / "docs" / "reference" / "mistakes.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in MISTAKES.read_text().splitlines()
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


def test_the_page_of_errors_has_every_field() -> None:
    """Each error with fields of its own has a section with all of them, and no other."""
    breach = Breach("problem", expected=1, actual=2)
    samples: tuple[errors.BatchStateError, ...] = (
        errors.PoolExhaustedError("SlotPool 'slots'", requested=1, free=0, pending=0),
        errors.TransferError("problem"),
        Violation(Code.RACE, breach, remedy="remedy", where={}),
    )
    with_fields = {cls for cls in vars(errors).values() if isinstance(cls, type) and "__init__" in vars(cls)}
    assert {type(sample) for sample in samples} == with_fields - {errors.BatchStateError} | {Violation}
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    common = vars(errors.BatchStateError("problem")).keys()
    for sample in samples:
        section = page.split(f"## {type(sample).__name__}\n", 1)[1].split("\n## ", 1)[0]
        cells = re.findall(r"^\| (`.*?`) \|", section, flags=re.MULTILINE)
        assert set(re.findall(r"\w+", " ".join(cells))) - common == vars(sample).keys() - common


def test_the_page_is_long_enough_to_mean_something() -> None:
    """Rows were read, and no mutant stands twice."""
    mutants = re.findall(r"`(\w+)` \|$", MISTAKES.read_text(), flags=re.MULTILINE)
    assert len(mutants) == len(set(mutants)) >= 30


# The page of SGLang's five changes: points whose tests, machines and mutants exist

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
    text = (ROOT / "docs" / "reference" / "sglang-changes.md").read_text()
    for change in CHANGES:
        assert f"## {change}\n\n```{{sglang-points}} {change}\n```" in text


def test_references_that_lead_nowhere_are_found() -> None:
    """A test, machine or mutant that is gone or renamed makes the page fail."""
    for reference in ("test_pages.py::test_of_nothing", "machine nothing", "mutant nothing"):
        with pytest.raises(KeyError):
            fact(reference)
