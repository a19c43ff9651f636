"""Deletes the statements of a method, one at a time, and asks who notices.

A deletion is *real* if the plain driver, without any check, ends with another state or not at all: what is never
reached, or sets what is set already, changes nothing that could be noticed.
"""

import ast
import inspect
import signal
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, final

import attrs

from benchmarks.adoption.state import plain

STATEMENTS = (ast.Assign, ast.AugAssign, ast.Expr, ast.Delete)


MOST_SECONDS = 300
"""CPU time of a call, beyond which a loop in it does not end."""


def _endless(*_: object) -> None:
    raise TimeoutError("it does not end")


@final
@attrs.frozen
class Deletion:
    """One statement, or one name of a list of names, that a method lacks.

    Attributes:
        owner: the class.
        method: its method.
        text: what is gone.
        function: the method without it.
    """

    owner: type
    method: str
    text: str
    function: Any = attrs.field(repr=False)


def deletions(owner: type, method: str, module: ModuleType) -> Iterator[Deletion]:
    """Each statement of a method that only does something, and each text of a list of texts, deleted."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    whole = ast.parse(source)
    count = sum(isinstance(node, STATEMENTS) and not _is_docstring(node) for node in ast.walk(whole))
    names = sum(len(_names(node)) for node in ast.walk(whole))
    for number in range(count + names):
        tree = ast.parse(source)
        text = _without_statement(tree, number) if number < count else _without_name(tree, number - count)
        nodes: dict[str, Any] = {}
        try:
            code = compile(ast.fix_missing_locations(tree), f"<{owner.__name__}.{method} without {text!r}>", "exec")
        except SyntaxError:  # a `nonlocal` whose name is gone
            continue
        exec(code, module.__dict__, nodes)
        yield Deletion(owner, method, text, nodes[method])


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _names(node: ast.AST) -> list[ast.expr]:
    if not isinstance(node, ast.List) or len(node.elts) < 2:
        return []
    return (
        node.elts if all(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in node.elts) else []
    )


def _without_statement(tree: ast.AST, number: int) -> str:
    left = number
    for parent in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(parent, field, None)
            if not isinstance(body, list):
                continue
            for at, node in enumerate(body):
                if isinstance(node, STATEMENTS) and not _is_docstring(node):
                    if not left:
                        body[at] = ast.copy_location(ast.Pass(), node)
                        return ast.unparse(node)
                    left -= 1
    raise LookupError(number)


def _without_name(tree: ast.AST, number: int) -> str:
    left = number
    for node in ast.walk(tree):
        names = _names(node)
        if left < len(names):
            return f"item {ast.unparse(names.pop(left))}"
        left -= len(names)
    raise LookupError(number)


def outcome(call: Callable[[], object]) -> str | None:
    """How a call failed, in one line; None if it did not. A loop that does not end fails after some CPU time."""
    before = signal.signal(signal.SIGVTALRM, _endless)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS, MOST_SECONDS)  # again: a check may catch the first
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return None


def in_place_of(deletion: Deletion, call: Callable[[], Any]) -> Any:
    """The result of `call` while the statement is missing."""
    whole = vars(deletion.owner)[deletion.method]  # a class method as it stands
    setattr(deletion.owner, deletion.method, deletion.function)
    try:
        return call()
    finally:
        setattr(deletion.owner, deletion.method, whole)


def accused(engine: Any, seeds: int, options: dict[str, Any]) -> str | None:
    """What is reported of histories of an engine under one of its declarations."""

    def watched() -> None:
        with engine.declare(**options) as declared:
            for seed in range(seeds):
                driven = engine.drive(seed)
                if driven is not None:  # a pool that nobody uses any more
                    declared.expect_idle(driven)

    return outcome(watched)


def judge(engine: Any, *, seeds: int = 12, fuzz: Callable[[], object] | None = None) -> list[dict[str, Any]]:
    """Deletes every statement of an engine's targets, and runs its driver without checks and under its declarations.

    Args:
        engine: one of the modules beside this one.
        seeds: histories of its driver.
        fuzz: raises what the fuzzer finds; asked of real deletions.
    """

    def states(seen: list[int]) -> list[int]:
        for seed in range(seeds // 2):
            engine.drive(seed, after_each=lambda batch: seen.append(hash(repr(plain(batch)))))
        return seen

    whole, rows = states([]), []
    if states([]) != whole:
        raise ValueError("the driver does not do the same twice")
    for options in engine.DECLARED.values():
        if (report := accused(engine, seeds, options)) is not None:
            raise ValueError(f"the engine as it is was accused: {report}")
    for owner, method, module in engine.TARGETS:
        for deletion in deletions(owner, method, module):
            if engine.endless(deletion.text):
                continue
            seen: list[int] = []
            crash = in_place_of(deletion, partial(outcome, partial(states, seen)))
            real = seen != whole
            row = {"class": owner.__name__, "method": method, "text": deletion.text, "real": real, "crash": crash}
            rows.append(row | {"silent": seen != whole[: len(seen)]})  # another state before it raised, if it did
            for way, options in engine.DECLARED.items():
                rows[-1][way] = in_place_of(deletion, partial(accused, engine, seeds, options)) if real else None
            rows[-1]["fuzz"] = in_place_of(deletion, partial(outcome, fuzz)) if real and fuzz is not None else None
    return rows
