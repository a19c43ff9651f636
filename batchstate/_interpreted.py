"""A core that runs interpreted: how it is asked for, and the line in the log that says so.

`BATCHSTATE_COMPILED=0` takes the source of the core though a binary lies beside it: for debuggers and coverage.
`BATCHSTATE_COMPILED=1` takes the binary or refuses: for those who serve. Unset, it is the binary if there is one.
"""

import importlib.machinery
import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ENVIRONMENT_VARIABLE = "BATCHSTATE_COMPILED"
CORE = "batchstate._core"
SOURCE = Path(__file__).with_name("_core.py")
REMEDY = "install a C compiler and then batchstate again, or a wheel for this platform"

told = False
"""Whether this process has said that its core runs interpreted."""

_log = logging.getLogger("batchstate")


class Finder:
    """Finds the core as the environment variable says. Asked for the core alone, when it is first imported."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The source of the core, or None, with which Python looks on.

        Raises:
            ArgumentError: the variable is neither 0 nor 1.
            ImportError: the variable is 1, and there is no binary.
        """
        setting = os.environ.get(ENVIRONMENT_VARIABLE)
        if name != CORE or setting is None:
            return None
        if setting == "0":
            return source_spec()
        if setting != "1":
            from batchstate.errors import ArgumentError

            problem = f"environment variable {ENVIRONMENT_VARIABLE}: expected 0 or 1, got {setting!r}"
            raise ArgumentError(problem, setting, "use 1 or 0")
        if binary() is None:
            raise ImportError(f"{ENVIRONMENT_VARIABLE}=1: expected a compiled core, got {SOURCE}; {REMEDY}", name=CORE)
        return None


def source_spec() -> importlib.machinery.ModuleSpec | None:
    """For a core that runs interpreted."""
    return importlib.util.spec_from_file_location(CORE, SOURCE)


def binary() -> Path | None:
    """The compiled core, which lies beside its source; None where it was not compiled."""
    files = (SOURCE.with_name(f"_core{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((file for file in files if file.exists()), None)


def tell() -> None:
    """Says in the log that the core runs interpreted and how that ends: once in a process."""
    global told
    if not told:
        told = True
        remedy = f"unset {ENVIRONMENT_VARIABLE}" if os.environ.get(ENVIRONMENT_VARIABLE) == "0" else REMEDY
        _log.warning("the core of batchstate runs interpreted, not compiled, and steps are slower: %s", remedy)
