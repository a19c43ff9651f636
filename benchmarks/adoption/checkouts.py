"""Engines that are on no package index, or whose packages import models and kernels: opened module by module.

Checkouts lie below the folder that `BATCHSTATE_PEERS` names, each under the name of its repository.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.adoption.placeholders import AnyBase, blank, stand_in
from benchmarks.peers.installed import PeerError


def opened(name: str) -> Any:
    """A package whose modules can be imported, without its own `__init__`."""
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"no module {name!r}; `make peers` makes an environment that has it")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        vars(module)["__getattr__"] = _class_named
    return sys.modules[name]


def _class_named(name: str) -> type[AnyBase]:
    """A class that the package's `__init__` imports; a module of it is imported by itself."""
    if not name[0].isupper():
        raise AttributeError(name)
    return AnyBase


def module_of(name: str, *, checkout: str = "", packages: Iterable[str] = (), without: Iterable[str] = ()) -> Any:
    """A module of an engine as it is.

    Args:
        name: the module.
        checkout: the folder below `BATCHSTATE_PEERS` from which the engine is imported; empty if it is installed.
        packages: packages that are opened without their own `__init__`.
        without: modules that are compiled or generated; stand-ins take their place.

    Raises:
        PeerError: the engine is not there.
    """
    stand_in()
    if checkout:
        folder = os.environ.get("BATCHSTATE_PEERS")
        if folder is None or not Path(folder, checkout).is_dir():
            raise PeerError(f"no checkout {checkout!r} below BATCHSTATE_PEERS, {folder!r}")
        if str(Path(folder, checkout)) not in sys.path:
            sys.path.append(str(Path(folder, checkout)))
    try:
        for package in packages:
            opened(package)
        for absent in without:
            blank(absent)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise PeerError(f"{name}: {error}") from error
