"""Every link inside the documentation leads to a file that exists, and to a heading in it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
