"""A window in which the core runs interpreted in a process that has it compiled, for mutants and for tracing.

Everything in the library that refers to the compiled core by a name of a module refers to the interpreted one
meanwhile, and so do the columns of batch classes. Pools and batches that were made before keep the core they have.
"""

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from batchstate import _interpreted
from batchstate._interpreted import CORE, ENVIRONMENT_VARIABLE

OURS = ("batchstate", "benchmarks", "examples", "tests")


@functools.cache
def interpreted() -> ModuleType:
    """The core, run from its source: one for the whole process."""
    spec = _interpreted.source_spec()
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type] # the file is there
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def is_of_core(value: object) -> bool:
    """Whether a class or a function stands in a core; functions of C are no names of a compiled one."""
    return getattr(value, "__module__", None) == CORE


def swap(before: ModuleType, after: ModuleType) -> None:
    """Makes every name of a module that refers to one core, or to something in it, refer to the other."""
    other = {id(value): vars(after).get(name) for name, value in vars(before).items() if is_of_core(value)}
    other = {number: value for number, value in other.items() if value is not None} | {id(before): after}
    sys.modules[CORE] = after
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] in OURS]:
        if module is not before:
            for name, value in list(vars(module).items()):
                if id(value) in other:
                    setattr(module, name, other[id(value)])
    batches: Any = sys.modules.get("batchstate.batch")
    kinds = [] if batches is None else [batches.Batch]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
        kind._layout.__init__(kind._layout.columns)


@contextlib.contextmanager
def interpreted_core() -> Iterator[None]:
    """The window. It changes nothing where the core is interpreted anyway."""
    core = importlib.import_module(CORE)
    if not core.compiled:
        yield
        return
    told, _interpreted.told = _interpreted.told, True  # the line in the log is for users
    swap(core, interpreted())
    try:
        yield
    finally:
        swap(interpreted(), core)
        _interpreted.told = told


def stale(package: Path) -> str | None:
    """Says so if the binary of a checkout, which is in use, is older than its source."""
    binary, source = _interpreted.binary(), _interpreted.SOURCE
    if binary is None or source.parent != package or os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        return None
    if binary.stat().st_mtime >= source.stat().st_mtime:
        return None
    remedy = f"run `make setup`, or `python setup.py build_ext --inplace`, or set {ENVIRONMENT_VARIABLE}=0"
    return f"expected a compiled core of this source, got {binary}, which is older than {source.name}: {remedy}"
