"""The build with the checks deleted lacks every check that has a level, and is otherwise the package."""

import ast
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import batchstate
from batchstate import traffic
from batchstate.levels import checks
from benchmarks.builds.deleted_checks import LEVELS, without_checks
from benchmarks.builds.unchecked import Build, second_build, stripped, unchecked_build

PACKAGE = Path(batchstate.__file__).parent


@pytest.fixture(scope="module")
def unchecked() -> Build:
    """The build without checks."""
    return unchecked_build()


def deleted(tmp_path: Path, source: str) -> str:
    """A module of one package, without its checks."""
    tmp_path.joinpath("module.py").write_text(dedent(source))
    return ast.unparse(without_checks(tmp_path)[tmp_path / "module.py"])


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("if levels.cheap:\n    a()\nb()", "b()"),
        ("if levels.full:\n    a()\nelif levels.cheap:\n    b()\nelse:\n    c()", "c()"),
        ("if not levels.cheap:\n    a()", "a()"),
        ("if x and levels.cheap:\n    a()\nb()", "b()"),
        ("if len(x) and levels.cheap and y():\n    a()\nb()", "b()"),
        ("if y() and levels.cheap:\n    a()", "if y() and False:\n    a()"),
        ("if x and not (levels.full and y()):\n    a()", "if x:\n    a()"),
        ("if levels.cheap or x:\n    a()", "if x:\n    a()"),
        ("if not levels.cheap or y():\n    a()", "a()"),
        ("a = b() if levels.full and c else None", "a = None"),
        ("with a:\n    if levels.cheap:\n        b()", "with a:\n    pass"),
        ("def f(self):\n    if not levels.cheap:\n        return\n    a()", "def f(self):\n    return"),
        (
            "def f():\n    if not levels.full:\n        return\n    yield 1",  # still a generator
            "def f():\n    return\n    yield 1",
        ),
    ],
)
def test_a_level_is_false_and_what_follows_from_it_goes(tmp_path: Path, source: str, wanted: str) -> None:
    """Branches on a level go, whatever else is in their test, unless asking the rest may do something."""
    assert deleted(tmp_path, source) == wanted


def test_calls_of_functions_that_only_checked_go_too(tmp_path: Path) -> None:
    """Also where only a call of such a function was left, and where a check hands its object through."""
    found = deleted(
        tmp_path,
        """
        class A:
            def check(self):
                if levels.cheap:
                    ask()
            def checks(self, what):
                '''Asks all.'''
                self.check()
            def checked(self):
                if levels.full:
                    self.checks('x')
                return self
            def work(self):
                self.checks(f'{self}')
                self.checks(do())
                self.hook()
                return A().checked()
            def hook(self):
                pass
        """,
    )
    work = found[found.index("def work") : found.index("def hook")]
    assert [line.strip() for line in work.splitlines()[1:] if line.strip()] == [
        "self.checks(do())",
        "self.hook()",
        "return A()",
    ]


def test_a_call_stays_if_another_function_of_its_name_does_something(tmp_path: Path) -> None:
    """Names are all that is known of a method; in doubt a call stays."""
    found = deleted(
        tmp_path,
        """
        class A:
            def check(self):
                if levels.cheap:
                    ask()
        class B:
            def check(self):
                self.done = True
        def work(a):
            a.check()
        """,
    )
    assert found.endswith("a.check()")


def test_nothing_of_the_build_asks_a_level() -> None:
    """In the sources as they are there are dozens of places that ask."""

    def asked(trees: list[ast.Module]) -> int:
        return sum(
            isinstance(node, ast.Attribute) and node.attr in LEVELS and ast.unparse(node.value) == "levels"
            for tree in trees
            for node in ast.walk(tree)
        )

    assert asked([ast.parse(file.read_text()) for file in stripped()]) > 40
    assert asked(list(stripped().values())) == 0


def test_builds_are_packages_of_their_own(unchecked: Build) -> None:
    """No module of a build is one of the package, or refers to one."""
    for build in (unchecked, second_build()):
        steps = build.module("benchmarks.decode_steps")
        assert steps.Batch.__module__ == f"batchstate_{build.suffix}.batch"
        assert steps.Batch is not batchstate.Batch
        assert build.module("batchstate").SlotPool is build.module("batchstate.pools").SlotPool  # found by a string
        mine = [module for name, module in sys.modules.items() if name.split(".")[0] == f"batchstate_{build.suffix}"]
        assert len(mine) > 20
        ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "batchstate"}
        for module in mine:
            strangers = [name for name, value in vars(module).items() if _belongs(value, ours)]
            assert not strangers, f"{module.__name__}: {strangers}"


def test_the_cache_of_byte_code_stays_as_it_is(unchecked: Build) -> None:
    """What a fresh process would read from the cache is the package, not a build of it."""
    unchecked.module("batchstate.batch")
    file = str(PACKAGE / "batch.py")
    cached = SourceFileLoader("batchstate.batch", file).get_code("batchstate.batch")
    assert cached == compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    assert cached != unchecked.code(Path(file))


def _belongs(value: object, modules: dict[str, ModuleType]) -> bool:
    if isinstance(value, ModuleType):
        return value in modules.values()
    return isinstance(value, type) and value.__module__ in modules


def test_a_name_that_a_build_lacks_is_not_found(unchecked: Build) -> None:
    """A module that is not in the package is not in a build; other packages are not renamed."""
    with pytest.raises(ModuleNotFoundError, match=r"batchstate_unchecked\.nothing"):
        unchecked.module("batchstate.nothing")
    assert unchecked.module("numpy") is np


def violate_mirror(package: ModuleType) -> None:
    """A device side is written in place, behind the back of its host side."""
    lens = package.MirroredTensor.from_host(package.open_runtime("cpu"), np.arange(4))
    lens.device.add_(1)
    lens.check("before the forward")


def violate_slots(package: ModuleType) -> None:
    """Two rows of a batch have one slot."""
    runtime = package.open_runtime("cpu")
    pool = package.SlotPool(runtime, 4)
    kind: Any = type("Shared", (package.Batch,), {"slots": package.slot_column()})
    batch = kind.build(runtime, slots=pool.take(2))
    batch.merge(batch)


@pytest.mark.parametrize("violate", [violate_mirror, violate_slots])
@pytest.mark.parametrize("level", ["cheap", "full"])
def test_what_a_check_finds_the_build_does_not(unchecked: Build, violate: Any, level: str) -> None:
    """The package raises; the build without checks does not, though its level is the same; a mere copy does."""
    with checks(level), pytest.raises(batchstate.Violation):
        violate(batchstate)
    for build, raises in ((unchecked, False), (second_build(), True)):
        package = build.module("batchstate")
        with package.checks(level):
            if raises:
                with pytest.raises(package.Violation):
                    violate(package)
            else:
                violate(package)


def test_misuse_is_an_error_without_checks_too(unchecked: Build) -> None:
    """The validation of arguments has no level, and stays: a slot freed twice."""
    package = unchecked.module("batchstate")
    pool = package.SlotPool(package.open_runtime("cpu"), 4)
    slots = pool.take(2)
    pool.free(slots)
    with pytest.raises(package.Violation, match="SLOT_"):
        pool.free(slots)


def test_nothing_but_checks_differs(unchecked: Build) -> None:
    """The same traffic through both builds: each figure is the same but times and invariants checked."""
    reports = {}
    for name, package in (("checked", traffic), ("unchecked", unchecked.module("examples.traffic"))):
        report = package.run_traffic(package.fitted_workload(60, 1), device="cpu", checks="full", aborts=0.1)
        assert report.clean
        reports[name] = report.as_dict()
    asked = {name: report.pop("laws_asked") for name, report in reports.items()}
    assert asked["unchecked"] < asked["checked"] / 4
    for report in reports.values():
        del report["seconds"], report["host_us_per_step"]
    assert reports["unchecked"] == reports["checked"]
