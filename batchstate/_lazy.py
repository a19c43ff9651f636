"""Public names that are imported at their first use: three packages have them, in a table each."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], *, needs: str = "", extra: str = ""
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package that imports its public names at first use.

    Args:
        package: its `__name__`. A module with the name of something public would hide it.
        homes: module, relative to the package, -> its public names, with blanks between.
        needs: a distribution that some of the modules import.
        extra: the extra of this library that installs it.
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def imported(name: str) -> Any:
        if name not in modules:
            from batchstate.errors import closest  # only after a mistake: commands that import nothing start at once

            question = "" if name.startswith("_") else closest(modules, name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{question and '; '}{question}")
        root = package.partition(".")[0]
        importlib.import_module(f"{root}.levels")  # first: it refuses a wrong level in the environment
        try:
            home = importlib.import_module(f"{package}.{modules[name]}")
        except ModuleNotFoundError as error:
            if not needs or (error.name or "").partition(".")[0] != needs:
                raise
            problem = f"{package}.{name} needs {needs}: pip install '{root}[{extra}]'"
            raise ModuleNotFoundError(problem, name=needs) from None
        value = getattr(home, name)
        setattr(sys.modules[package], name, value)
        return value

    public = sorted(name for name in modules if not name.startswith("_"))
    return public, imported, lambda: sorted({*vars(sys.modules[package]), *modules})
