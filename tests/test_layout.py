"""The layout of the package: each module has a layer, and imports point downward."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import batchstate
from tests.journeys import JOURNEYS, Journey, files_of

PACKAGE = Path(batchstate.__file__).parent

LAYERS: dict[str, tuple[str, ...]] = {
    "invariants": (
        "batchstate",
        "_lazy",
        "_source_lines",
        "_version",
        "errors",
        "_guidance",
        "nvtx",
        "levels",
        "violations",
        "invariants",
    ),
    "runtime": ("runtime",),
    "mirrored values": ("_arrays", "_origin", "_host_values", "mirror"),
    "pools": ("tables", "_allocator", "pools", "hybrid"),
    "batches": ("columns", "_rows", "_column_inputs", "_upload", "batch", "static"),
    "KV memory": ("kv",),
    "forward inputs": ("forward",),
    "relay": ("_relay", "future_map"),
    "steps": ("_planned_step", "step"),
    "watch": ("watch",),
    "transport": ("transport",),
    "traffic": ("traffic",),
    "testing": ("testing",),
    "self-check": ("selfcheck",),
    "commands": ("cli", "__main__"),
}
"""From the lowest to the highest: modules of the package, and folders with all that is in them."""

CORE = range(1, 9)
OUTSIDE = {
    "_arrays": ("transport", "testing"),
    "_guidance": ("levels", "watch", "transport", "testing"),
    "_lazy": ("batchstate", "testing"),
    "_source_lines": ("testing",),
}
"""Private modules of the package that more than the core may import, and who may."""

MOST_FLOORS = 12


def part_of(module: str) -> str:
    """The module or folder of `LAYERS` that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def layer_of(module: str) -> int:
    """The number of its layer."""
    return next(number for number, parts in enumerate(LAYERS.values()) if part_of(module) in parts)


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by name."""
    files = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def statements(node: ast.AST, *, inside: bool) -> Iterator[ast.AST]:
    """What runs when a module is imported, and with `inside` what functions run; nothing for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and not inside:
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from statements(other, inside=inside)
            continue
        yield child
        yield from statements(child, inside=inside)


@cache
def imports(module: str, *, inside: bool = False) -> frozenset[str]:
    """The modules of the package that a module imports; with `inside`, those too that its functions import."""
    found = set()
    for node in statements(ast.parse(modules()[module].read_text()), inside=inside):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "batchstate":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules() else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "batchstate"}
    return frozenset(found)


def test_every_module_has_a_layer() -> None:
    """No module is in none or in two, and none of the table is gone."""
    parts = [part for layer in LAYERS.values() for part in layer]
    assert sorted(parts) == sorted({part_of(module) for module in modules()})


def test_imports_point_downward() -> None:
    """A module imports its own layer and lower ones, in its functions too; so no tool is imported by what it tests."""
    for module in modules():
        assert [name for name in imports(module, inside=True) if layer_of(name) > layer_of(module)] == [], module


def test_no_circle() -> None:
    """No module imports itself through others."""
    order = list(TopologicalSorter({module: imports(module) for module in modules()}).static_order())
    assert len(order) == len(modules())


def is_allowed(module: str, imported: str) -> bool:
    """Whether a module may import this one: `a.b._x` is for `a.b`, `_x` of the package for its core and `OUTSIDE`."""
    folder, _, last = imported.rpartition(".")
    if not last.startswith("_") or part_of(module) == "selfcheck":
        return True
    if folder == "batchstate":
        return layer_of(module) in CORE or part_of(module) in OUTSIDE.get(last, ())
    return module == folder or module.startswith(f"{folder}.")


def test_private_modules_stay_where_they_belong() -> None:
    """No module imports a private one of another part; the library's checks of itself may."""
    for module in modules():
        assert [name for name in imports(module, inside=True) if not is_allowed(module, name)] == [], module


def test_floors() -> None:
    """The longest chain of imports in the library itself is short enough to be read from top to bottom."""
    floors: dict[str, int] = {}
    for module in TopologicalSorter({module: imports(module) for module in modules()}).static_order():
        floors[module] = 1 + max((floors[name] for name in imports(module) if name != "batchstate"), default=0)
    core = {module: number for module, number in floors.items() if layer_of(module) <= layer_of("batchstate.transport")}
    assert max(core.values()) <= MOST_FLOORS


@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda journey: journey.__name__)
def test_journeys_are_short(journey: Journey) -> None:
    """A value crosses no more files than are listed for its journey."""
    assert len(files_of(journey)) <= JOURNEYS[journey]
