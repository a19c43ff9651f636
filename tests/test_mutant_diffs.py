"""Mutants written as diffs: they change what they name, fail where they no longer fit, and leave nothing behind."""

import contextlib
import importlib.util
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from batchstate.errors import DeclarationError
from tests.interpreted import interpreted_core
from tests.selfcheck.mutants import MUTANTS
from tests.selfcheck.mutants.diffs import Change, Diff, changed, changes, read
from tests.selfcheck.mutants.registry import Patch

SAMPLE = """
import contextlib
import attrs


def plain(n, step=1):
    total = n + step
    return total


def around(offset):
    def shifted(n):
        return n + offset

    return shifted


shifted = around(10)


@contextlib.contextmanager
def window():
    yield "inside"


class Base:
    def greet(self):
        return "base"


@attrs.define
class Slotted(Base):
    value: int = 3

    @property
    def double(self):
        return self.value * 2

    @classmethod
    def named(cls, n):
        return cls(n)

    @staticmethod
    def half(n):
        return n // 2

    def greet(self):
        return super().greet() + " and more"
"""


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that stands in for one of the library."""
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    spec = importlib.util.spec_from_file_location("batchstate.sample", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "batchstate.sample", module)
    spec.loader.exec_module(module)
    return module


def diffs() -> dict[str, Diff]:
    """The mutants that are diffs."""
    return {name: mutant._switch for name, mutant in MUTANTS.items() if isinstance(mutant._switch, Diff)}


def test_every_diff_applies() -> None:
    """Every piece of every mutant is in its function exactly once, and what replaces it compiles and differs."""
    assert len(diffs()) > 50
    broken = {}
    with interpreted_core():
        for name, diff in diffs().items():
            for change in diff.changes:
                try:
                    assert change.code()[0] != change.function().__code__
                except (AssertionError, DeclarationError) as error:
                    broken[name] = str(error)
    assert not broken


@pytest.mark.parametrize(
    ("where", "before", "after", "call", "result"),
    [
        ("plain", "n + step", "n - step", lambda m: m.plain(5), (6, 4)),
        ("plain", "total = n + step\nreturn total", "return n * 100", lambda m: m.plain(5), (6, 500)),
        ("shifted", "n + offset", "n - offset", lambda m: m.shifted(5), (15, -5)),
        ("Slotted.double", "* 2", "* 5", lambda m: m.Slotted().double, (6, 15)),
        ("Slotted.named", "cls(n)", "cls(n + 1)", lambda m: m.Slotted.named(1).value, (1, 2)),
        ("Slotted.half", "// 2", "// 4", lambda m: m.Slotted.half(8), (4, 2)),
        ("Slotted.greet", '" and more"', '"!"', lambda m: m.Slotted().greet(), ("base and more", "base!")),
        ("Base.greet", '"base"', '"root"', lambda m: m.Slotted().greet(), ("base and more", "root and more")),
        ("window", '"inside"', '"other"', lambda m: m.window().__enter__(), ("inside", "other")),
    ],
    ids=["function", "two lines", "closure", "property", "classmethod", "staticmethod", "super", "base", "decorated"],
)
def test_kinds_of_functions(
    sample: ModuleType, where: str, before: str, after: str, call: Callable[[Any], object], result: tuple
) -> None:
    """Functions of every kind have the bug inside the window, wherever imported, and not after it."""
    assert call(sample) == result[0]
    with pytest.raises(RuntimeError, match="in between"), changed(f"sample:{where}", before, after):  # noqa: PT012
        assert call(sample) == result[1]
        raise RuntimeError("in between")
    assert call(sample) == result[0]


@pytest.mark.parametrize(
    ("where", "before", "after", "problem"),
    [
        (
            "sample:plain",
            "n * step",
            "0",
            r"sample\.py, plain: expected this piece once, found it 0 times: 'n",
        ),
        ("sample:plain", "total", "0", r"sample\.py, plain: expected this piece once, found it 2 times: 'total'"),
        ("sample:Slotted.double", "* 3", "", r"sample\.py, Slotted\.double: expected this piece once"),
        ("sample:plain", "n + step", "n +", r"sample\.py, plain: the changed source does not compile"),
        ("sample:plain", "step=1", "step=2", r"sample\.py, plain: the signature changes"),
        ("sample:shifted", "n + offset", "n", r"shifted: expected variables \('offset',\) of enclosing functions"),
        ("sample:absent", "n", "m", "sample:absent does not exist"),
        ("absent:plain", "n", "m", "absent:plain does not exist"),
        ("sample:Slotted", "value", "other", "sample:Slotted: expected a function, got a type"),
    ],
)
def test_changes_that_do_not_fit(sample: ModuleType, where: str, before: str, after: str, problem: str) -> None:
    """A change that no longer fits the source names file and function, and nothing of the mutant is applied."""
    code = sample.plain.__code__
    fits = Change("sample:plain", (("n + step", "n"),))
    with pytest.raises(DeclarationError, match=problem), changed(where, before, after):
        pass
    diff = Diff((*([] if where == fits.where else [fits]), Change(where, ((before, after),))))
    with pytest.raises(DeclarationError, match=problem):
        diff(None)  # type: ignore[arg-type] # fails before it patches anything
    assert sample.plain.__code__ is code


def test_one_block_per_function() -> None:
    """Two blocks that change one function would undo each other."""
    change = Change("sample:plain", (("n", "m"),))
    with pytest.raises(DeclarationError, match="expected one block per function"):
        Diff((change, change))


def test_lines_that_stay_or_go(sample: ModuleType) -> None:
    """As in a diff, a line with a space stays, and one that nothing replaces is left out; only the others differ."""
    stays, goes = ["  total = n + step", "+ total *= 2"], "- return self.value * 2"
    lines = ["@ sample:plain", *stays, "@ sample:Slotted.double", goes]
    assert sample.plain(5) == 6
    with contextlib.ExitStack() as undo:
        patch = Patch(undo)
        Diff(tuple(changes(lines, "made")))(patch)
        assert (sample.plain(5), sample.Slotted().double) == (12, None)
    there = SAMPLE.split("\n")
    begins = [1 + there.index("    return total")], [1 + there.index("        return self.value * 2")]
    assert tuple(lines for _, lines in patch.lines.values()) == begins


@pytest.mark.parametrize(
    ("paragraph", "problem"),
    [
        ("[a] RACE overlap sglang #1\nWhy.\n@ pools:SlotPool.take\n- a\n+ b", "malformed"),
        ("[a] RACE | overlap | sglang #1", "malformed"),
        ("[a] RACE | overlap | sglang #1 | speed=high\nWhy.\n@ pools:SlotPool.take\n- a\n+ b", r"a has \['speed'\]"),
        ("[a] RACE | overlap | sglang #1\nWhy.\n@ pools:SlotPool.take\n? a", "expected a line with '@', '-', '\\+' or"),
    ],
    ids=["head", "short", "option", "mark"],
)
def test_malformed_files(paragraph: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A malformed paragraph is refused when its file is read."""
    (tmp_path / "made.mutants").write_text(textwrap.dedent(f"## made: Title.\n\n{paragraph}\n"))
    monkeypatch.setattr("tests.selfcheck.mutants.diffs.resources.files", lambda package: tmp_path)
    with pytest.raises(DeclarationError, match=problem):
        read("made")
    assert "a" not in MUTANTS


def test_the_example_of_the_guide_is_a_mutant() -> None:
    """The paragraph that CONTRIBUTING.md shows stands in the registry as it is."""
    root = Path(__file__).parents[1]
    example = (root / "CONTRIBUTING.md").read_text().split("```text\n[", 1)[1].split("\n```", 1)[0]
    assert f"[{example}\n" in (root / "tests/selfcheck/mutants/pools.mutants").read_text()
