"""The core: compiled or interpreted, the same answers; which it is can be asked, chosen, and read in the log."""

import inspect
import logging
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import batchstate
from batchstate import Code, Runtime, SlotPool, _core, _interpreted
from batchstate._interpreted import CORE, ENVIRONMENT_VARIABLE
from tests.doubles import refused
from tests.interpreted import OURS, interpreted, interpreted_core, is_of_core, stale
from tests.selfcheck.mutants.diffs import changed

ROOT = Path(__file__).parents[1]
BUILT = _interpreted.binary() is not None
needs_binary = pytest.mark.skipif(not BUILT, reason="the core is not compiled here")


def python(code: str, setting: str | None) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that runs a line with the environment variable set so, or not at all."""
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)} | (
        {} if setting is None else {ENVIRONMENT_VARIABLE: setting}
    )
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("setting", "compiled"), [(None, BUILT), ("0", False), ("1", True)], ids=["unset", "0", "1"])
def test_which_core(setting: str | None, compiled: bool) -> None:
    """The binary if there is one; 0 takes the source instead, 1 refuses without a binary. Each needs numpy alone."""
    code = "import sys, batchstate; print(batchstate.compiled, {'attrs', 'torch'} & {*sys.modules})"
    done = python(code, setting)
    if setting == "1" and not BUILT:
        assert "ImportError: BATCHSTATE_COMPILED=1: expected a compiled core, got " in done.stderr
    else:
        assert done.stdout == f"{compiled} set()\n", done.stderr


def test_a_wrong_setting_is_an_error() -> None:
    """Another value than 0 and 1 is a typed error at the first name that needs the core; others do not."""
    done = python("import batchstate; batchstate.compiled", "no")
    assert "ArgumentError: environment variable BATCHSTATE_COMPILED: expected 0 or 1, got 'no'" in done.stderr
    assert python("import batchstate; batchstate.Code", "no").returncode == 0


def test_a_checkout_with_a_compiler_is_compiled() -> None:
    """`make setup` has compiled the core where it could, so that the tests are of what users get."""
    pytest.importorskip("Cython", reason="without Cython nothing is compiled")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or subprocess.run([compiler, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("no C compiler here")
    if os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        pytest.skip("the interpreted core was asked for")
    assert batchstate.compiled


@needs_binary
def test_a_stale_binary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A binary that is older than its source ends a test run before it begins, with the command that builds it."""
    for name, age in (("_core.py", 100), ("_core.abi3.so", 200)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(_interpreted, "SOURCE", tmp_path / "_core.py")
    assert "which is older than _core.py: run `make setup`" in (stale(tmp_path) or "")
    os.utime(tmp_path / "_core.abi3.so")
    assert stale(tmp_path) is None


@pytest.mark.parametrize(
    ("compiled", "setting", "remedy"), [(True, None, None), (False, None, _interpreted.REMEDY), (False, "0", "unset ")]
)
def test_an_interpreted_core_says_so_once(
    compiled: bool,
    setting: str | None,
    remedy: str | None,
    rt: Runtime,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first pool says in one line of the log that steps are slower and what helps; a compiled core says nothing."""
    monkeypatch.setattr(_interpreted, "told", False)
    monkeypatch.setattr(_core, "compiled", compiled)
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, setting)
    for _ in range(2):
        SlotPool(rt, 4)
    records = [record for record in caplog.records if record.name == "batchstate"]
    assert [record.levelno for record in records] == ([] if remedy is None else [logging.WARNING])
    assert all(f"interpreted, not compiled, and steps are slower: {remedy}" in record.message for record in records)


def indices(core: ModuleType) -> Any:
    """Indices 0 to 4, the first padding, the last free; generations are 10 to 14."""
    some = core.Indices(4)
    some.arrays["state"][1:4] = LIVE
    some.arrays["generation"][:] = np.arange(10, 15)
    return some


CORES = [pytest.param(_core, id="ours"), pytest.param(interpreted(), id="interpreted")]
FAR = 2**62
LIVE = _core.STATES[3]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    ("rows", "held", "first"),
    [
        ([], [], -1),
        ([1], [11], -1),
        ([3, 1, 2, 1], [13, 11, 12, 11], -1),
        ([1, 2, 3], [11, 11, 13], 1),
        ([1, 4], [11, 14], 1),
        ([0], [10], 0),
        ([2, 5], [12, 0], 1),
        ([9], [0], 0),
        ([1, -4], [11, 11], 1),
        ([FAR, 1], [11, 11], 0),
        ([-FAR], [11], 0),
    ],
)
def test_first_not_held(core: ModuleType, rows: list[int], held: list[int], first: int) -> None:
    """The first handle that is not live, not of the present owner, or of no slot; arrays may be read-only."""
    numbers, generations = np.array(rows, dtype=np.int64), np.array(held, dtype=np.int64)
    assert indices(core).first_not_held(core.Requests(numbers, generations)) == first
    numbers.setflags(write=False)
    generations.setflags(write=False)
    assert indices(core).first_not_held(core.Requests(numbers, generations)) == first


@pytest.mark.parametrize("core", CORES)
def test_padding_and_repeats(core: ModuleType) -> None:
    """Handles of padded rows may come last, where that is said, and a handle twice is refused, where that is said."""
    some, handles = indices(core), core.Requests(np.array([2, 1, 2, 0, 0]), np.array([12, 11, 12, 0, 0]))
    assert [some.first_not_held(handles, *flags) for flags in ((False,), (True,), (True, True))] == [3, -1, 2]
    assert some.first_not_held(core.Requests(np.array([1, 0, 2]), np.array([11, 0, 12])), True) == 1


@pytest.mark.parametrize("core", CORES)
def test_a_mistake_of_ours_is_an_exception(core: ModuleType) -> None:
    """Fewer generations than handles, or an index that is none, are an IndexError, not memory that is not ours."""
    some = indices(core)
    with pytest.raises(IndexError):
        some.first_not_held(core.Requests(np.array([1, 2]), np.array([11])))
    some.arrays["stack"][3] = 99
    with pytest.raises(IndexError):
        some.look(1, False, False)


def test_signatures_are_alike() -> None:
    """Both cores have the same public names, with the same parameters and docstrings."""
    for name, value in vars(interpreted()).items():
        if is_of_core(value) and not name.startswith("_"):
            ours = getattr(_core, name)
            functions = [key for key in vars(value) if inspect.isfunction(vars(value)[key]) and key != "__init__"]
            for member in functions:
                if "@cython.cfunc\n" in inspect.getsource(getattr(value, member)):  # a function of C
                    assert hasattr(ours, member) != _core.compiled, member
                    continue
                theirs, compiled = (inspect.signature(getattr(each, member)) for each in (value, ours))
                assert theirs.parameters == compiled.parameters, member  # that of a C function says not what it returns
                assert getattr(value, member).__doc__ == getattr(ours, member).__doc__


def references(core: ModuleType) -> list[str]:
    """Names, in modules and in classes of the library, that refer to a core or to something in it; base classes too."""
    inside = {id(value) for value in vars(core).values() if is_of_core(value)} | {id(core)}
    names = []
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] in OURS]:
        for name, value in vars(module).items():
            parts = [value, *vars(value).values(), *value.__mro__] if inspect.isclass(value) else [value]
            if (
                module is not core
                and id(value) not in inside - {id(core)}
                and any(id(part) in inside for part in parts)
            ):
                names.append(f"{module.__name__}.{name}")
    return names


@needs_binary
@pytest.mark.skipif(not _core.compiled, reason="the core runs interpreted")
def test_in_the_window_nothing_is_compiled() -> None:
    """A window with an interpreted core leaves no reference to the compiled one, and after it all are back."""
    ours = import_module(CORE)
    before = references(ours)
    with interpreted_core():
        assert not import_module(CORE).compiled
        assert references(ours) == []
        assert references(import_module(CORE)) == before
    assert references(ours) == before


def test_a_bug_in_the_core_is_switched_on(rt: Runtime) -> None:
    """A mutant changes the source of the core although it is compiled; after its window the core is whole."""
    with changed("_core:Indices.held", " and self.generation[slot] == gen", ""):
        pool = SlotPool(rt, 1)
        stale_handle = pool.take(1)
        pool.free(stale_handle, after=None)
        pool.take(1)
        pool.free(stale_handle, after=None)
    pool = SlotPool(rt, 1)
    stale_handle = pool.take(1)
    pool.free(stale_handle, after=None)
    pool.take(1)
    refused(Code.SLOT_STALE_HANDLE, lambda: pool.free(stale_handle, after=None))
