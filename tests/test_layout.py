"""The layout of the package: each module has a layer, and imports point downward."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import batchstate
from tests.journeys import JOURNEYS, Journey, files_of

PACKAGE = Path(batchstate.__file__).parent

LAYERS: dict[str, tuple[str, ...]] = {
    "ground": (
        "batchstate",
        "_interpreted",
        "_lazy",
        "_source_lines",
        "_version",
        "errors",
        "nvtx",
        "levels",
        "violations",
        "invariants",
    ),
    "runtime": ("runtime",),
    "core": ("_core", "_cython"),
    "mirrored values": ("_arrays", "_origin", "mirror"),
    "pools": ("tables", "_launches", "_allocator", "pools", "hybrid"),
    "batches": ("columns", "_rows", "_column_inputs", "_upload", "batch", "static"),
    "KV memory": ("kv",),
    "forward inputs": ("_step_tokens", "forward"),
    "relay": ("_relay", "_relay_field", "_prefetched", "_graph_publish", "future_map"),
    "steps": ("_step_arguments", "_step_memory", "_planned_step", "step"),
    "transport": ("transport",),
    "watch": ("watch",),
    "races": ("races",),
    "testing": ("testing",),
    "replay": ("replay",),
    "commands": ("cli", "__main__"),
}
"""From the lowest to the highest: modules of the package, and folders with all that is in them."""

CORE = range(1, 10)
GROUND = ("ground", "runtime")
"""All that `watch` and `races` stand on: they serve engines that keep their own state."""

OUTSIDE = {
    "_arrays": ("transport", "testing"),
    "_interpreted": ("batchstate",),
    "_lazy": ("batchstate", "races", "replay", "testing"),
    "_source_lines": ("races",),
    "_version": ("replay",),
}
"""Private modules of the package that more than the core may import, and who may."""

_KV_TIER = ("kv.hisparse", "kv.host_pool", "kv._tier", "kv.last_location")
BUDGETS: dict[str, tuple[tuple[str, ...], int]] = {
    "ground": (LAYERS["ground"], 1_820),
    "runtime": (("runtime",), 1_744),
    "core": (LAYERS["core"], 2_839),
    "state, relay, steps, pages": (
        tuple(part for layer in list(LAYERS)[3:10] for part in LAYERS[layer]),
        12_892,
    ),
    "host tier": (_KV_TIER, 1_612),
    "transport": (("transport",), 5_220),
    "watch": (("watch",), 2_706),
    "races": (("races",), 10_340),
    "fuzz tools": (("testing",), 4_077),
    "replay": (("replay",), 2_301),
    "command line": (("cli", "__main__"), 775),
}
"""Part -> its modules or folders, and the lines it may have. A commit that raises a number says what it buys.

The core had 2,320 lines: 270 are for a draft in one call and for requests that the relay asks in the block of their
step, 185 for handles that the core makes and joins, and for one group behind a fence, 28 for page lists of attention
kernels. The state had 12,080: 320 are for forwards that use slots, tokens that are accepted, and places that ask whose
they are, 140 for values by bits, a row 0 that is scratch or lost, and arrays asked for their rows, 280 for lengths
that follow from what a step accepts, fields that may be stale, and publishes of a graph. The runtime had 1,640: 49 are
for float8, for views of pinned memory by size, for arrays that say of which dtype they are the bits, and for a stream
that is asked whether it has run. 150 lines of the state, 220 of transport (5,000 before) and 50 of the runtime are for
KV that lands in device pages, leases that are ranges of tokens, and ranks that compare what they hold; 40 of the state
are for a mark of what is written in each KV memory. 74 of the state are for the longest query and the most KV on the
host, bounds of padded sizes, and typed views of a step. 35 of the state are for rows that say whose they are, and for
memory of states, 5 for a refused read that changes nothing, 20 for steps behind one that never ran, 50 for taking a
step back. Fuzz tools had 2,700: 1,275 are the exact model, 288 of them docstrings and 35 a bound of a single step: the
oracle is the model a second time, for integers, so that no tensor says what is right; the shrinker knows of pages,
where that of Hypothesis stops early; states, windows and drafts have a place in cache and verifier. Races had 8,500:
760 are for operators that wait in the middle, for storages, pinned memory and numpy as torch uses them, for one format
of findings, and for values that an earlier owner or step has left; 335 are for pinned blocks and graphs as torch keeps
them, and for backward passes; 450 are for kernels of Triton: footprints of a launch, races between its programs, and
what its interpreter tells. The watch had 2,400: 560 are for values that requests say, rows without one, idle bounds,
what nothing declares, and page tables of engines; 60 are for what calls say of requests, and for host columns beside
it with `lag`; 10 are for moves inside another hooked call, and for what was never compared. 30 lines of the ground are
errors that users import from the package, and modules that need no import; 60 of the others are messages in the words
of a class that others wrote, calls that type checkers refuse, and `batchstate info`. The command line had 530: 189 are
`replay`, 25 of them a bound of the memory that a file takes; 31 are findings that are not the recorded ones, and
`replay show` as a command. Replay had 2,250: 41 are the device of a recording, slots that leave at a plan, and lanes
with numbers of calls and a mark, 10 are the waits of the host. 140 lines of the fuzz tools play and shrink histories
of recordings too; 10 of the watch tell a recording of hooked calls. 10 of the sum are for tokens before a step, which
were launched.
"""

MOST_LINES, MOST_FILES = 46_307, 164
BESIDE = {"tests/selfcheck": 13_299, "examples/traffic": 1_200}
"""Folder -> lines. 560 lines of the machines are models and strategies that used to be in the package; 600 are mutants
of owning, 290 a machine of watched rows that stay, and twelve mutants of it, 5 a mutant of a step that is dropped."""
OTHER_TESTS = 45_129
"""220 lines are mutants of memory that comes back and of lints, with their programs, and names of streams; 360 are
mutants of record and replay, recordings that take all memory, and rows that nobody declares; 60 are steps behind one
that never ran, and steps taken back, 10 sentences of the documentation, 14 a shrinker that joins requests, 81
recordings of other devices, and other findings than the recorded ones."""

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


def statements(node: ast.AST, *, inside: bool, types: bool) -> Iterator[ast.AST]:
    """Statements that run on import; with `inside` those of functions too, with `types` those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and not inside:
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING" and not types:
            for other in child.orelse:
                yield other
                yield from statements(other, inside=inside, types=types)
            continue
        yield child
        yield from statements(child, inside=inside, types=types)


@cache
def imports(module: str, *, inside: bool = False, types: bool = False) -> frozenset[str]:
    """The modules of the package that a module imports; see `statements`. Lazy names are for type checkers alone."""
    imported: set[str] = set()
    types = types and not ("lazy_names" in modules()[module].read_text() and modules()[module].name == "__init__.py")
    for node in statements(ast.parse(modules()[module].read_text()), inside=inside, types=types):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "batchstate":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            imported |= {name if name in modules() else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name.split(".")[0] == "batchstate"}
    return frozenset(imported)


def test_every_module_has_a_layer() -> None:
    """No module is in none or in two, and none of the table is gone."""
    parts = [part for layer in LAYERS.values() for part in layer]
    assert sorted(parts) == sorted({part_of(module) for module in modules()})


def test_imports_point_downward() -> None:
    """A module imports its own layer and lower ones, in its functions too; so no tool is imported by what it tests."""
    for module in modules():
        assert [name for name in imports(module, inside=True) if layer_of(name) > layer_of(module)] == [], module


@pytest.mark.parametrize("part", ["watch", "races"])
def test_tools_stand_on_ground_and_runtime(part: str) -> None:
    """Watching and race checking need nothing of the state, in functions and for type checkers neither."""
    allowed = {layer_of(LAYERS[name][0]) for name in GROUND} | {layer_of(part)}
    for module in modules():
        if part_of(module) == part:
            needs = imports(module, inside=True, types=True) - {"batchstate"}
            assert [name for name in needs if layer_of(name) not in allowed] == [], module


def test_the_core_stands_on_the_ground() -> None:
    """The compiled module imports numpy, its stand-in for Cython and the ground, and not torch."""
    needs = imports("batchstate._core", inside=True, types=True) | imports("batchstate._cython", inside=True)
    assert {layer_of(name) for name in needs - {"batchstate._cython"}} <= {layer_of(LAYERS["ground"][0])}
    code = "import sys, batchstate._core; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_no_circle() -> None:
    """No module imports itself through others; outside of the state, imports for type checkers count."""
    order = list(TopologicalSorter({module: imports(module) for module in modules()}).static_order())
    assert len(order) == len(modules())
    outside = [module for module in modules() if layer_of(module) not in range(2, 10)]
    graph = {
        module: imports(module, inside=True, types=True) & set(outside) - {module, "batchstate"} for module in outside
    }
    list(TopologicalSorter(graph).static_order())


def lines_of(file: Path) -> int:
    """Lines of a file, docstrings and blank lines counted."""
    return len(file.read_text().splitlines())


def belongs_to(module: str, parts: tuple[str, ...]) -> bool:
    """Whether a module is one of `parts`, or in a folder of them."""
    inner = module.removeprefix("batchstate.")
    return any(inner == part or inner.startswith(f"{part}.") for part in parts)


@pytest.mark.parametrize("part", BUDGETS)
def test_part_keeps_its_budget(part: str) -> None:
    """A part of the package has no more lines than its budget."""
    parts, budget = BUDGETS[part]
    others = _KV_TIER if part != "host tier" else ()
    files = [file for module, file in modules().items() if belongs_to(module, parts) and not belongs_to(module, others)]
    assert sum(map(lines_of, files)) <= budget


def test_package_keeps_its_budget() -> None:
    """Each module is in one budget, and the wheel has no more lines and files than `MOST_LINES`, `MOST_FILES`."""
    for module in modules():
        assert any(belongs_to(module, parts) for parts, _ in BUDGETS.values()), module
    assert sum(map(lines_of, modules().values())) <= MOST_LINES
    assert len(modules()) <= MOST_FILES


def test_checks_beside_the_package_keep_their_budgets() -> None:
    """Machines with mutants, traffic, and all other tests have no more lines than their budgets."""
    root = PACKAGE.parent
    for folder, budget in BESIDE.items():
        files = [file for file in (root / folder).rglob("*") if file.suffix in (".py", ".mutants")]
        assert sum(map(lines_of, files)) <= budget, folder
    others = [file for file in (root / "tests").rglob("*.py") if "selfcheck" not in file.parts]
    assert sum(map(lines_of, others)) <= OTHER_TESTS


def is_allowed(module: str, imported: str) -> bool:
    """Whether a module may import this one: `a.b._x` is for `a.b`, `_x` of the package for its core and `OUTSIDE`."""
    folder, _, last = imported.rpartition(".")
    if not last.startswith("_"):
        return True
    if folder == "batchstate":
        return layer_of(module) in CORE or part_of(module) in OUTSIDE.get(last, ())
    return module == folder or module.startswith(f"{folder}.")


def test_private_modules_stay_where_they_belong() -> None:
    """No module imports a private one of another part."""
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
