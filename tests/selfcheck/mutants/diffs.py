"""Mutants written as small diffs of the library's own source, in the `.mutants` files beside this module.

A file has the mutants of one part of the library. `## group: ...` begins a group, and says what its mutants have in
common; other lines that begin with `#` are comments. Each mutant is a paragraph:

    [name] CODE CODE | machine | origin | level=cheap tool=race
    What goes wrong, in a sentence.
    ? Why no check that runs by itself can find it.
    @ kv.pages:PagePool.grow
    - the text that is there
    + the text of the mutant

The last part of the first line is optional, and so is the line with `?`: see `Mutant.unseen`. As in any diff, a line
that begins with a space stays, and `-` without `+` is a statement left out. Several lines in a row are one piece of
source; indentation is relative to its first line. A mutant may have several `@` blocks, one per function, and a block
several pieces: the next one begins behind a `+`. A piece must be in the function exactly once. A function may be a
property's getter, a class method, a method of a class with slots, or a closure; its signature cannot change.

While a mutant is switched on, the function has another code object. So every module that imported the function has the
bug, the library needs no seam for it, and a mutant whose line was moved or rewritten fails with its file and function.
"""

import __future__

import ast
import contextlib
import difflib
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import resources
from types import CodeType, FunctionType
from typing import Any, final

import attrs

from batchstate import Code, Level
from batchstate.errors import DeclarationError
from tests.interpreted import interpreted_core
from tests.selfcheck.mutants.registry import GROUPS, Mutant, Patch, Switch, register

_HEAD = re.compile(
    r"\[(?P<name>\w+)\] (?P<codes>[A-Z_ ]+?) \| (?P<machine>\w+) \| (?P<origin>[^|]+?)(?: \| (?P<more>.+))?"
)

OTHERS = ("tests", "examples", "transformers", "minisgl", "nanovllm")
"""Packages outside of `batchstate` whose functions a diff may change."""


@final
@attrs.frozen
class Change:
    """The pieces of source that are replaced in one function."""

    where: str  # `module:qualified.name`; the module is one of `batchstate`, or of `OTHERS`
    pieces: tuple[tuple[str, str], ...]  # (before, after)

    def function(self) -> FunctionType:
        """The function that is changed, without its decorators."""
        module, _, path = self.where.partition(":")
        named = module if module.partition(".")[0] in OTHERS else f"batchstate.{module}"
        try:
            attribute: Any = importlib.import_module(named)
            for name in path.split("."):
                attribute = inspect.getattr_static(attribute, name)
        except (ImportError, AttributeError):
            raise _refused(f"{self.where} does not exist", self.where) from None
        return _undecorated(attribute, self.where)

    def code(self) -> tuple[CodeType, list[int]]:
        """The compiled function of the mutant, and the lines of its file in which it differs."""
        function = self.function()
        where = f"{function.__code__.co_filename}, {self.where.partition(':')[2]}"
        lines, first = inspect.getsourcelines(function)
        source = original = textwrap.dedent("".join(lines))
        for before, after in self.pieces:
            source = _replaced(source, before, after, where)
        try:
            definition, unchanged = (ast.parse(text).body[0] for text in (source, original))
        except SyntaxError as error:
            raise _refused(f"{where}: the changed source does not compile: {error}", source) from None
        if not isinstance(definition, ast.FunctionDef) or not isinstance(unchanged, ast.FunctionDef):
            raise _refused(f"{where}: expected a function", source)
        if ast.dump(definition.args) != ast.dump(unchanged.args):
            raise _refused(f"{where}: the signature changes, and callers keep the old one", source)
        definition.decorator_list = []
        code = _compiled(definition, function, first)
        if code.co_freevars != function.__code__.co_freevars:
            free = f"{function.__code__.co_freevars} of enclosing functions, got {code.co_freevars}"
            raise _refused(f"{where}: expected variables {free}", code.co_freevars)
        parts = difflib.SequenceMatcher(None, original.split("\n"), source.split("\n")).get_opcodes()
        ranges = [range(begin, max(end, begin + 1)) for tag, *_, begin, end in parts if tag != "equal"]
        return code.replace(co_qualname=function.__code__.co_qualname), [first + at for each in ranges for at in each]


def _undecorated(attribute: Any, where: str) -> FunctionType:
    """The function inside a property, class method or decorator of this library."""
    while not isinstance(attribute, FunctionType) or hasattr(attribute, "__wrapped__"):
        if isinstance(attribute, property):
            attribute = attribute.fget
        elif hasattr(attribute, "__wrapped__"):
            attribute = attribute.__wrapped__
        else:
            raise _refused(f"{where}: expected a function, got a {type(attribute).__name__}", attribute)
    return attribute


def _replaced(source: str, before: str, after: str, where: str) -> str:
    """The source with one piece replaced; the piece takes the indentation of the line that it begins on."""
    pattern = r"\n[ \t]*".join(re.escape(line.strip()) for line in before.split("\n"))
    matches = list(re.finditer(pattern, source))
    if len(matches) != 1:
        raise _refused(f"{where}: expected this piece once, found it {len(matches)} times: {before!r}", before)
    start, stop = matches[0].span()
    line = source[source.rfind("\n", 0, start) + 1 : start]
    indent = line[: len(line) - len(line.lstrip())]
    return source[:start] + after.replace("\n", f"\n{indent}") + source[stop:]


def _compiled(definition: ast.FunctionDef, function: FunctionType, first: int) -> CodeType:
    """The code of a function whose free variables are those of `function`."""
    ast.increment_lineno(definition, first - 1)
    names = [ast.Name(name, ast.Store()) for name in function.__code__.co_freevars]
    cells: list[ast.stmt] = [ast.Assign([name], ast.Constant(None)) for name in names]
    no_arguments = ast.arguments([], [], None, [], [], None, [])
    outer = ast.FunctionDef("_outer", no_arguments, [*cells, definition], [], None)
    tree = ast.fix_missing_locations(ast.Module([outer], []))
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    compiled = compile(tree, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    (around,) = (constant for constant in compiled.co_consts if isinstance(constant, CodeType))
    codes = [constant for constant in around.co_consts if isinstance(constant, CodeType)]
    return next(code for code in codes if code.co_name == definition.name)


def _refused(problem: str, value: object) -> DeclarationError:
    return DeclarationError(problem, value, "bring the mutant in line with the source of the library")


@final
@attrs.frozen
class Diff:
    """The changes of one mutant, each of another function: the switch of a `Mutant`."""

    changes: tuple[Change, ...]

    def __attrs_post_init__(self) -> None:
        functions = [change.where for change in self.changes]
        if len(set(functions)) < len(functions):
            raise _refused(f"expected one block per function, got {', '.join(functions)}", functions)

    def __call__(self, patch: Patch) -> None:
        """Gives each function the code of the mutant, until the window of `patch` closes."""
        for change, (code, lines) in [(change, change.code()) for change in self.changes]:
            function = change.function()
            patch.undo(setattr, function, "__code__", function.__code__)
            function.__code__ = code
            patch.lines[change.where] = code, lines


def read(family: str) -> None:
    """Registers the groups and mutants of `<family>.mutants`."""
    group = title = ""
    text = resources.files(__package__).joinpath(f"{family}.mutants").read_text(encoding="utf-8")
    for paragraph in re.split(r"\n{2,}", text.strip()):
        if paragraph.startswith("## "):
            group, _, title = paragraph.removeprefix("## ").partition(": ")
        elif not paragraph.startswith("#"):
            _register(paragraph.split("\n"), group, f"{family}.mutants")
            GROUPS[group] = title


def _register(lines: list[str], group: str, file: str) -> None:
    if len(lines) < 4:
        raise _refused(f"{file}: malformed: {lines[0]!r}", lines[0])
    unseen = lines.pop(2).removeprefix("? ") if lines[2].startswith("? ") else None
    switch = Diff(tuple(changes(lines[2:], file)))
    register_headed(lines[0], file, switch, mechanism=lines[1], group=group, unseen=unseen)


def register_headed(line: str, file: str, switch: Switch, **fields: Any) -> Mutant:
    """Registers a mutant whose paragraph begins with this line."""
    head = _HEAD.fullmatch(line)
    if head is None:
        raise _refused(f"{file}: malformed: {line!r}", line)
    more: dict[str, Any] = dict(part.split("=", 1) for part in (head["more"] or "").split())
    if not more.keys() <= {"level", "only_on", "tool", "seeded"}:
        raise _refused(f"{file}: {head['name']} has {sorted(more)}", sorted(more))
    codes, level = tuple(Code(code) for code in head["codes"].split()), Level(more.pop("level", Level.FULL))
    named = {name: head[name] for name in ("name", "origin", "machine")}
    return register(Mutant(killed_by=codes, level=level, switch=switch, **named, **more, **fields))


def mutant(head: str, group: str) -> Callable[[Switch], Mutant]:
    """Registers the function below as a mutant, whose name it has and whose sentence is its docstring."""

    def registered(switch: Switch) -> Mutant:
        mechanism = " ".join((switch.__doc__ or "").split())
        return register_headed(f"[{switch.__name__}] {head}", "with_state", switch, mechanism=mechanism, group=group)

    return registered


def changes(lines: list[str], file: str) -> Iterator[Change]:
    """The changes of a paragraph, without its head."""
    where, pieces, last = "", list[tuple[list[str], list[str]]](), "@"
    for line in [*lines, "@ "]:
        mark, text = line[:1], line[2:]
        if mark == "@":
            if where:
                yield Change(where, tuple(("\n".join(old), "\n".join(new or ["pass"])) for old, new in pieces))
            where, pieces = text, []
        elif mark in ("-", "+", " "):
            if last == "@" or (last == "+" and mark != "+" and pieces[-1][0]):
                pieces.append(([], []))
            for side, other in enumerate("+-"):
                if mark != other:
                    pieces[-1][side].append(text)
        else:
            raise _refused(f"{file}: expected a line with '@', '-', '+' or a space, got {line!r}", line)
        last = mark


@contextlib.contextmanager
def changed(where: str, before: str, after: str) -> Iterator[None]:
    """A window where a piece of the library is another, for tests; see `Change`. One of the core is interpreted."""
    window = interpreted_core() if where.startswith("_core:") else contextlib.nullcontext()
    with window, contextlib.ExitStack() as undo:
        Diff((Change(where, ((before, after),)),))(Patch(undo))
        yield
