"""Public names that are imported at their first use: three packages have them, in a table each."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], *, modules: str = "", needs: str = "", extra: str = ""
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package that imports its public names at first use.

    Args:
        package: its `__name__`. A module with the name of something public would hide it.
        homes: module, relative to the package, -> its public names, with blanks between.
        modules: modules of the package that are there without an import of their own, with blanks between.
        needs: a distribution that some of the modules import.
        extra: the extra of this library that installs it.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    inner = modules.split()

    def imported(name: str) -> Any:
        if name in inner:
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            from batchstate.errors import closest  # only after a mistake: commands that import nothing start at once

            question = "" if name.startswith("_") else closest([*home_of, *inner], name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{question and '; '}{question}")
        root = package.partition(".")[0]
        importlib.import_module(f"{root}.levels")  # first: it refuses a wrong level in the environment
        try:
            home = importlib.import_module(f"{package}.{home_of[name]}")
        except ModuleNotFoundError as error:
            if not needs or (error.name or "").partition(".")[0] != needs:
                raise
            problem = f"{package}.{name} needs {needs}: pip install '{root}[{extra}]'"
            raise ModuleNotFoundError(problem, name=needs) from None
        value = getattr(home, name)
        setattr(sys.modules[package], name, value)
        return value

    public = sorted(name for name in home_of if not name.startswith("_"))
    return public, imported, lambda: sorted({*vars(sys.modules[package]), *home_of, *inner})
