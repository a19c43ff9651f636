"""Words of the package: names say what they hold, and sentences begin with their noun.

`python -m tests.test_words [PATH ...]` lists every place.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import batchstate

PACKAGE = Path(batchstate.__file__).parent

VAGUE = {"one", "found", "what", "known", "given", "place"}
"""Names that could hold anything."""

MOST_VAGUE, MOST_RELATIVE, MOST_RAISE_LINES = 20, 10, 100

RELATIVE = re.compile(r"(What|Which|Of)\b")
"""A sentence that begins with a relative clause instead of its subject."""

_BESIDE_PROSE = re.compile(r"```.*?```|^#[^\n]*|^\s*[-:>] ", re.DOTALL | re.MULTILINE)
"""Blocks of code, titles, and what an entry of a list begins with."""


def vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each binding of a vague name: assignments, loop targets and arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.lineno, node.arg


def relative_sentences(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each sentence of a docstring, and of each comment, that begins so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for text in filter(RELATIVE.match, sentences(node.value.value)):
                yield node.lineno, text.replace("\n", " ")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and RELATIVE.match(token.string.lstrip("#: ")):
            yield token.start[0], token.string


def sentences(text: str) -> list[str]:
    """The sentences of a docstring."""
    return re.split(r"(?<=[.:;])\s+|\n\s*\n", text.strip())


def raise_lines(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Line and length of each `raise` of several lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and (node.end_lineno or 0) > node.lineno:
            yield node.lineno, (node.end_lineno or 0) - node.lineno + 1


def parsed(paths: list[Path]) -> Iterator[tuple[Path, str, ast.AST]]:
    """Each Python file with its source and tree."""
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            source = file.read_text()
            yield file, source, ast.parse(source)


def test_names_say_what_they_hold() -> None:
    """Few names of the package are `one`, `found`, `what`, `known`, `given` or `place`."""
    assert sum(len(list(vague_names(tree))) for _, _, tree in parsed([PACKAGE])) < MOST_VAGUE


def test_sentences_begin_with_their_noun() -> None:
    """Few docstrings and comments of the package begin with What, Which or Of."""
    assert sum(len(list(relative_sentences(source, tree))) for _, source, tree in parsed([PACKAGE])) < MOST_RELATIVE


def test_sentences_of_pages_begin_with_their_noun() -> None:
    """No sentence of the documentation does; titles may, and measurements stay as they were written."""
    root = Path(__file__).parents[1]
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("docs/*/*.md")]
    text = {str(page): page.read_text() for page in pages if page.parent.name != "measurements"}
    text["planted"] = "# What it is\n\nOf two, one.\n```\nWhat?\n```\n- Which is it?\n"
    begun = [name for name in text for part in sentences(_BESIDE_PROSE.sub("\n\n", text[name])) if RELATIVE.match(part)]
    assert begun == ["planted"] * 2


def test_refusals_are_short() -> None:
    """A refusal is two lines: the `raise` statements of several lines have few lines together."""
    lines = sum(length for _, _, tree in parsed([PACKAGE]) for _, length in raise_lines(tree))
    assert lines <= MOST_RAISE_LINES


def main(arguments: list[str]) -> None:
    """Prints every place, and the totals."""
    totals = [0, 0, 0]
    for file, source, tree in parsed([Path(name) for name in arguments] or [PACKAGE]):
        for line, name in vague_names(tree):
            print(f"{file}:{line}: name {name}")
            totals[0] += 1
        for line, text in relative_sentences(source, tree):
            print(f"{file}:{line}: begins with a relative clause: {text[:90]}")
            totals[1] += 1
        for line, length in raise_lines(tree):
            print(f"{file}:{line}: raise of {length} lines")
            totals[2] += length
    print(f"vague names {totals[0]}, relative sentences {totals[1]}, lines of long raises {totals[2]}")


if __name__ == "__main__":
    main(sys.argv[1:])
