"""Directives that write reference pages from the code itself, so that the two cannot drift apart.

    {invariant-table}         every invariant in one table
    {invariants}              each with its level, remedy, real bugs and mutants, in a section with an anchor
    {command-options} MODULE COMMAND  the options of a command of that module's `main`; COMMAND where it has several
    {attributes} MODULE:NAME  the attributes that the docstring of a class lists, with their types
    {error-classes}           the error classes, with the builtin that each derives from
    {race-cases} FILE         every race case, with what each tool said of it; FILE holds that, beside the page
    {public-names}            the names of `batchstate` itself, each with a line and a link
    {sglang-points} CHANGE    the points of one of SGLang's changes, and the tests that show them

Each makes Markdown and hands it to the parser of the page.
"""

import argparse
import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar
from unittest import mock

import attrs
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

REPOSITORIES = {
    "sglang": "sgl-project/sglang",
    "sglang-jax": "sgl-project/sglang-jax",
    "mini-sglang": "sgl-project/mini-sglang",
    "vllm": "vllm-project/vllm",
    "vllm-ascend": "vllm-project/vllm-ascend",
    "lmdeploy": "InternLM/lmdeploy",
    "TRT-LLM": "NVIDIA/TensorRT-LLM",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "pytorch": "pytorch/pytorch",
}
"""Short name -> repository of the public threads that invariants and mutants refer to."""

CHECKED = {
    "always": "at every level, of the arguments of a call",
    "cheap": "at `cheap` and `full`",
    "full": "at `full`",
    "test": "by test tools only",
}


def thread_links(text: str) -> str:
    """`sglang #123` and `lmdeploy#4569` as links; anything else as it is."""

    def link(thread: re.Match[str]) -> str:
        repository = REPOSITORIES.get(thread["name"])
        return f"[{thread[0]}](https://github.com/{repository}/issues/{thread['number']})" if repository else thread[0]

    return re.sub(r"(?P<name>[A-Za-z][\w-]*) ?#(?P<number>\d+)", link, text)


def one_line(text: str | None) -> str:
    """A docstring as one line."""
    return " ".join((text or "").split())


def paragraphs(documented: object) -> list[str]:
    """The paragraphs of a docstring, a line each."""
    return [one_line(part) for part in re.split(r"\n\s*\n", inspect.getdoc(documented) or "")]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table."""
    cells = [list(head)]
    lines = [cells[0], ["---"] * len(cells[0]), *(list(row) for row in rows)]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]


class FromCode(SphinxDirective):
    """A directive that parses the Markdown it makes."""

    has_content: ClassVar[bool] = False

    def markdown(self) -> list[str]:
        """The lines."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Sphinx calls this."""
        self.env.note_dependency(__file__)
        return self.parse_text_to_nodes("\n".join(self.markdown()) + "\n", allow_section_headings=True)


class InvariantTable(FromCode):
    """Every invariant in a line."""

    def markdown(self) -> list[str]:
        """One row a code."""
        from batchstate.invariants import INVARIANTS

        rows = []
        for code, invariant in INVARIANTS.items():
            name = f"[`{code.value}`](#{code.value})"
            rows.append((name, f"`{invariant.level}`", paragraphs(invariant.question)[0]))
        return table(("code", "level", "what holds"), rows)


class Invariants(FromCode):
    """Every invariant, in the order of the code."""

    def markdown(self) -> list[str]:
        """A section for each code."""
        from batchstate.invariants import INVARIANTS

        mutants = mutants_by_code()
        lines: list[str] = []
        for code, invariant in INVARIANTS.items():
            lines += [f"({code.value})=", "", f"## {code.value}", ""]
            for paragraph in paragraphs(invariant.question):
                lines += [paragraph, ""]
            lines += [f"**Checked:** {CHECKED[invariant.level]}.", "", f"**Remedy:** {invariant.remedy}.", ""]
            lines += [f"**Real bugs of this kind:** {thread_links(', '.join(invariant.origins))}.", ""]
            if not mutants:
                lines += ["**Mutants:** not listed; this build could not import `batchstate.testing`.", ""]
                continue
            lines += ["**Mutants that fire it:**", ""]
            lines += [*mutants.get(code.value, ["- none yet"]), ""]
        return lines


def mutants_by_code() -> dict[str, list[str]]:
    """Code -> a list item for each mutant that fires it; empty where hypothesis is missing."""
    try:
        registered = importlib.import_module("tests.selfcheck.mutants").MUTANTS
    except ImportError:
        return {}
    items: dict[str, list[str]] = {}
    for mutant in registered.values():
        for code in mutant.killed_by:
            items.setdefault(code.value, []).append(
                f"- `{mutant.name}`: {mutant.mechanism} ({thread_links(mutant.origin)})"
            )
    return items


class CommandOptions(FromCode):
    """The options of one command, from its own parser."""

    required_arguments = 1
    optional_arguments = 1
    final_argument_whitespace = True

    def markdown(self) -> list[str]:
        """Its summary and options."""
        parser = parser_of(*self.arguments)
        rows = []
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            shown = ", ".join(action.option_strings)
            if not action.option_strings:
                shown = str(action.metavar or action.dest)
            elif action.nargs != 0:
                value = action.metavar or "{" + ",".join(map(str, action.choices or (action.dest.upper(),))) + "}"
                shown += f" {value}"
            rows.append((f"`{shown}`", one_line((action.help or "") % {**vars(action), "prog": parser.prog})))
        summary = parser.description or ""
        return [f"{summary[:1].upper()}{summary[1:]}.", "", *table(("option", "meaning"), rows)]


class ParserMadeError(Exception):
    """Ends a command when its parser is made, which it has."""


def parser_of(module: str, command: str = "") -> argparse.ArgumentParser:
    """The parser by which `main` of a module reads the arguments of one of its commands."""

    def ends(parser: argparse.ArgumentParser, *_: object) -> None:
        raise ParserMadeError(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", ends):
        try:
            importlib.import_module(module).main(["command"])
        except ParserMadeError as made:
            parser: argparse.ArgumentParser = made.args[0]
    if command:
        (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = subparsers.choices[command]
    return parser


class Attributes(FromCode):
    """What the `Attributes:` section of a docstring says, as a table."""

    required_arguments = 1

    def markdown(self) -> list[str]:
        """One row an attribute."""
        module, _, name = self.arguments[0].partition(":")
        cls = getattr(importlib.import_module(module), name)
        types = {field.name: field.type for field in attrs.fields(cls)} if attrs.has(cls) else {}
        rows = []
        for names, meaning in documented_attributes(cls.__doc__ or ""):
            kinds = {type_name(types[name]) for name in names if name in types}
            rows.append((", ".join(f"`{name}`" for name in names), ", ".join(sorted(kinds)), meaning))
        return table(("key", "type", "meaning"), rows)


def documented_attributes(doc: str) -> list[tuple[list[str], str]]:
    """The `Attributes:` section: names that share a line, and their meaning."""
    _, _, section = inspect.cleandoc(doc).partition("Attributes:\n")
    entries: list[tuple[list[str], str]] = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        entry = re.match(r"    ([\w, ]+): (.*)", line)
        if entry:
            entries.append(([name.strip() for name in entry[1].split(",")], entry[2]))
        elif line.strip() and entries:
            entries[-1] = (entries[-1][0], f"{entries[-1][1]} {line.strip()}")
    return entries


def type_name(kind: object) -> str:
    """A type as a reader knows it."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


class ErrorClasses(FromCode):
    """Every error class and what it derives from."""

    def markdown(self) -> list[str]:
        """One row a class."""
        from batchstate import errors, violations

        classes = [cls for cls in vars(errors).values() if inspect.isclass(cls) and cls.__module__ == errors.__name__]
        rows = []
        for cls in [*classes, violations.Violation]:
            builtins = [base.__name__ for base in cls.__mro__[1:] if base.__module__ == "builtins"]
            nearest = next(
                (name for name in builtins if name not in ("Exception", "BaseException", "object")), "Exception"
            )
            rows.append((f"`{cls.__name__}`", f"`{nearest}`", paragraphs(cls)[0]))
        return table(("class", "also a", "raised when"), rows)


class RaceCases(FromCode):
    """Every race case, and what each tool said of it."""

    required_arguments = 1

    def markdown(self) -> list[str]:
        """A table of the tools, and one of the cases of each group."""
        from tests.race_cases import CASES, GROUPS, verdicts

        path = Path(self.env.relfn2path(self.arguments[0])[1])
        self.env.note_dependency(str(path))
        said = verdicts.load(path)
        tools = [name for name in verdicts.TOOLS if name != "detector on CUDA" or name in said.columns]
        lines = table(("tool", "races found", "false alarms", "run"), said.summary())
        for group, title in GROUPS.items():
            lines += ["", f"### {title}", ""]
            rows = []
            for case in CASES.values():
                if case.group != group:
                    continue
                name = f"**{case.pair}**: {case.about}" if case.racy else ""
                is_racy = f"{case.kind}: {case.shows}" if case.racy else f"safe: {case.shows}"
                rows.append((name, is_racy, *(said.text(tool, case) for tool in tools)))
            lines += table(("pair", "program", *(verdicts.TOOLS[tool].title for tool in tools)), rows)
        return lines


class PublicNames(FromCode):
    """The names that `batchstate` exports."""

    def markdown(self) -> list[str]:
        """One row a name."""
        from tests.api_page import names_of

        linked = (
            (f"`{name}`" if page == "batchstate" else f"{{py:obj}}`{name} <{page}.{name}>`", sentence)
            for name, page, sentence in names_of("batchstate")
        )
        return table(("name", "meaning"), linked)


class SGLangPoints(FromCode):
    """The points of one of SGLang's changes, with what shows each."""

    required_arguments = 1
    final_argument_whitespace = True

    def markdown(self) -> list[str]:
        """One row a point."""
        from tests import sglang_changes

        self.env.note_dependency(sglang_changes.__file__)
        points = sglang_changes.CHANGES[self.arguments[0]]
        rows = ((point.point, point.sglang, " · ".join(map(sglang_changes.fact, point.shown))) for point in points)
        return table(("point", "SGLang", "shown here"), rows)


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_directive("invariant-table", InvariantTable)
    app.add_directive("invariants", Invariants)
    app.add_directive("command-options", CommandOptions)
    app.add_directive("attributes", Attributes)
    app.add_directive("error-classes", ErrorClasses)
    app.add_directive("race-cases", RaceCases)
    app.add_directive("public-names", PublicNames)
    app.add_directive("sglang-points", SGLangPoints)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
