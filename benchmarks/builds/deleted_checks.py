"""Deletes the checks of a package from its sources, as if they had never been written.

Three steps. `levels.cheap` and `levels.full` are False, so a branch on them goes, or stays for good. What follows a
`return` goes. Then a function may be left with nothing to do; calls of it go as well, unless another function of that
name still does something, and that may empty the function which made them. The validation of arguments stays: it
asks no level.
"""

import ast
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import final

Sources = dict[Path, ast.Module]
"""Parsed modules, by file."""

LEVELS = ("cheap", "full")
TOOLS = {"testing", "selfcheck"}
"""The parts of the package that no engine imports. They are left as they are, and what they call does not count."""

_HARMLESS_CALLS = ("len",)
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def without_checks(package: Path) -> Sources:
    """The modules of a package, without its checks."""
    files = [file for file in sorted(package.rglob("*.py")) if TOOLS.isdisjoint(file.relative_to(package).parts)]
    folder = _Folder()
    sources = {file: folder.visit(ast.parse(file.read_bytes(), str(file))) for file in files}
    functions = [node for tree in sources.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls = _CallsGone(set(), set(), folder.touched)
    while True:
        nothing = _all_such(functions, calls.touched, _does_nothing)
        itself = _all_such(functions, calls.touched, _returns_itself)
        if nothing == calls.nothing and itself == calls.itself:
            return sources
        calls = _CallsGone(nothing, itself, calls.touched)
        for tree in sources.values():
            calls.visit(tree)


def _all_such(
    functions: Sequence[ast.FunctionDef], names: set[str], holds: Callable[[ast.FunctionDef], bool]
) -> set[str]:
    """Those of the names of which it holds for every function."""
    return {name for name in names if all(holds(function) for function in functions if function.name == name)}


def _statements(function: ast.FunctionDef) -> list[ast.stmt]:
    body = function.body
    return body[1:] if ast.get_docstring(function, clean=False) is not None else body


def _does_nothing(function: ast.FunctionDef) -> bool:
    return not function.decorator_list and all(
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Return) and (one.value is None or _is_constant(one.value, None)))
        or (isinstance(one, ast.Expr) and _is_constant(one.value, ...))
        for one in _statements(function)
    )


def _returns_itself(function: ast.FunctionDef) -> bool:
    match function.args.args, _statements(function):
        case [first, *_], [ast.Return(value=ast.Name(id=name))]:
            return not function.decorator_list and first.arg == "self" == name
    return False


def _is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _harmless(node: ast.expr) -> bool:
    """Whether it makes no difference that the expression is not evaluated."""
    return not any(
        isinstance(one, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr)
        or (isinstance(one, ast.Call) and not (isinstance(one.func, ast.Name) and one.func.id in _HARMLESS_CALLS))
        for one in ast.walk(node)
    )


def _truth(test: ast.expr) -> bool | None:
    """What a test comes to, or None where that depends."""
    match test:
        case ast.Constant(value=value):
            return bool(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _truth(operand)
            return None if inner is None else not inner
        case ast.BoolOp(op=op, values=values):
            decides = isinstance(op, ast.Or)
            for i, one in enumerate(values):
                if _truth(one) is decides and all(_harmless(earlier) for earlier in values[:i]):
                    return decides
            return not decides if all(_truth(one) is (not decides) for one in values) else None
    return None


class _Cleaner(ast.NodeTransformer):
    """Keeps bodies legal while statements go.

    Attributes:
        touched: names of the functions in which something went.
    """

    def __init__(self, touched: Collection[str] = ()) -> None:
        self.touched = set(touched)
        self._changes = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before = self._changes
        self.generic_visit(node)
        if self._changes > before:
            self.touched.add(node.name)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                statements[:] = _reachable(statements)
                if name == "body" and not statements and not isinstance(node, ast.Module):
                    statements.append(ast.Pass())
        return node


def _reachable(statements: list[ast.stmt]) -> list[ast.stmt]:
    for i, one in enumerate(statements):
        if isinstance(one, _ENDS):
            rest = statements[i + 1 :]
            # A function is a generator because of any `yield` in it, reached or not.
            yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for later in rest for node in ast.walk(later))
            return statements if yields else statements[: i + 1]
    return statements


@final
class _Folder(_Cleaner):
    """Replaces the levels, and takes out what follows from them."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "levels" and node.attr in LEVELS:
            self._changes += 1
            return ast.copy_location(ast.Constant(False), node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        node.test = self._test(node.test)
        truth = _truth(node.test)
        if truth is not None:
            kept = node.body if truth else node.orelse
            return [stmt for one in kept for stmt in _as_list(self.visit(one))]
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = self._test(node.test)
        truth = _truth(node.test)
        if truth is not None:
            kept: ast.AST = self.visit(node.body if truth else node.orelse)
            return kept
        return self.generic_visit(node)

    def _test(self, test: ast.expr) -> ast.expr:
        test = self.visit(test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test.operand = self._test(test.operand)
        if isinstance(test, ast.BoolOp) and _truth(test) is None:
            neutral = isinstance(test.op, ast.And)
            values = [one for one in map(self._test, test.values) if _truth(one) is not neutral]
            return values[0] if len(values) == 1 else ast.copy_location(ast.BoolOp(test.op, values), test)
        return test


@final
class _CallsGone(_Cleaner):
    """Takes out calls of functions that do nothing, and leaves the object where a method only returns it."""

    def __init__(self, nothing: set[str], itself: set[str], touched: Collection[str]) -> None:
        super().__init__(touched)
        self.nothing, self.itself = nothing, itself

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        call = node.value
        if (
            isinstance(call, ast.Call)
            and _called(call) in self.nothing
            and all(map(_harmless, [call.func, *_given(call)]))
        ):
            self._changes += 1
            return None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in self.itself and all(map(_harmless, _given(node))):
            self._changes += 1
            return node.func.value
        return node


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _as_list(visited: ast.AST | list[ast.stmt] | None) -> list[ast.stmt]:
    if visited is None:
        return []
    return visited if isinstance(visited, list) else [visited]  # type: ignore[list-item]
