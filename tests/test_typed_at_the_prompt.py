"""Every page can be typed at Python's prompt: a line directly under a loop is an error there, as is a gap in a class.

This file needs the wheel with its extra `testing`, and the pages: a release runs it so.
"""

import re
import sys
from code import InteractiveConsole
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*/*.md"))]
TYPED = [str(page.relative_to(ROOT)) for page in PAGES if "```python\n" in page.read_text()]

_BLOCK = re.compile(r"(<!-- skip: next[^>]*-->)?\s*```python\n(.*?)```", re.DOTALL)


def typed(page: str) -> str:
    """The lines that a reader types: the code of each block, and an empty line wherever the prompt still says `...`."""
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
