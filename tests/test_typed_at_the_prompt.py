"""Tutorials, README and the page of `watch` are typed at the prompt, where a line directly under a loop is an error."""

import re
from code import InteractiveConsole
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
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
    for line in code.splitlines():
        console.push(line)
    return re.findall(r"^\S*(?:Error|Violation|Race)\b.*", "".join(shown), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_survives_the_prompt(page: str) -> None:
    """Every line of a page is accepted at the prompt, in the order in which it stands there."""
    assert errors_of(typed((ROOT / page).read_text())) == []


def test_a_line_under_a_loop_is_found() -> None:
    """The test can fail: a line directly under a loop, and an error in the middle of a page."""
    page = "```python\nfor n in range(3):\n    pass\nprint(n)\n```\n```python\n>>> missing\n1\n```\n"
    assert [error.split(":")[0] for error in errors_of(typed(page))] == ["SyntaxError", "NameError"]
