"""The documentation is true: what it links to exists, what it says is so, and its pages can be typed."""

import re
import sys
from code import InteractiveConsole
from pathlib import Path
from unittest import mock

import pytest

from batchstate import Code, errors
from batchstate.cli import main
from batchstate.invariants import INVARIANTS
from tests.selfcheck.mutants import MUTANTS
from tests.sglang_changes import BUSINESS, CHANGES, Point, fact

# Tutorials, README and the page of `watch` at Python's prompt, where a line directly under a loop is an error

ROOT = Path(__file__).parent.parent
TYPED = [
    "README.md",
    "docs/how-to/watch-an-engine.md",
    *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/tutorial/*.md"))),
]

_BLOCK = re.compile(r"(<!-- skip: next[^>]*-->)?\s*```python\n(.*?)```", re.DOTALL)


def typed(page: str) -> str:
    """What a reader types: the code of each block, and an empty line wherever the prompt still says `...`."""
    lines: list[str] = []
    for skipped, block in _BLOCK.findall(page):
        if skipped:
            continue
        if ">>> " not in block:
            lines += [*block.splitlines(), ""]
            continue
        for line in block.splitlines():
            if line.startswith(("... ", ">>> ")):
                lines.append(line[4:])
            elif not lines or lines[-1]:
                lines.append("")
        lines.append("")
    return "\n".join(lines) + "\n"


def errors_of(code: str) -> list[str]:
    """The errors that the prompt shows; `test_wheel` types a page in a process of its own."""
    console, shown = InteractiveConsole(), list[str]()
    console.write = shown.append  # type: ignore[assignment, method-assign]
    with mock.patch.object(sys, "excepthook", sys.__excepthook__):  # torch.distributed puts its own there
        for line in code.splitlines():
            console.push(line)
    return re.findall(r"^\S*(?:Error|Violation|Race)\b.*", "".join(shown), re.MULTILINE)


@pytest.mark.parametrize("page", TYPED)
def test_a_page_survives_the_prompt(page: str) -> None:
    """Every line of a page is accepted at the prompt, in the order in which it stands there."""
    assert errors_of(typed((ROOT / page).read_text())) == []


def test_a_line_under_a_loop_is_found() -> None:
    """The test can fail: a line directly under a loop, and an error in the middle of a page."""
    page = "```python\nfor n in range(3):\n    pass\nprint(n)\n```\n```python\n>>> missing\n1\n```\n"
    assert [error.split(":")[0] for error in errors_of(typed(page))] == ["SyntaxError", "NameError"]


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


# Examples in plain torch: right in all orders of the streams; without a wait found, and wrong in one

EXAMPLES = sorted((ROOT / "examples" / "plain_torch").glob("*.py"))

PRINTED = {
    "double_buffer": [0.0, 8.0, 16.0, 24.0, 32.0, 40.0],
    "kv_offload": [4.0, 8.0, 12.0, 16.0],
    "pipeline": [0.0, 16.0, 32.0, 48.0],
    "prefetch": [0.0, 8.0, 16.0, 24.0],
}
"""What each prints."""

ORDERS = ("lazy", "newest", "oldest", "pct")


def printed(device: str, example: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and last line of a run."""
    code = main(["race", "run", "--device", device, str(example), *arguments])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    return code, lines[-1]


@pytest.mark.parametrize("example", EXAMPLES, ids=[one.stem for one in EXAMPLES])
def test_an_example(example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, and with `--forget`."""
    monkeypatch.setattr(sys, "argv", ["batchstate"])
    right = str(PRINTED[example.stem])
    assert printed("race", example, capsys=capsys) == (0, right)
    assert {printed(f"sim:{order}", example, capsys=capsys) for order in ORDERS} == {(0, right)}
    assert printed("race", example, "--forget", capsys=capsys)[0] == 1
    assert any(printed(f"sim:{order}", example, "--forget", capsys=capsys)[1] != right for order in ORDERS)
