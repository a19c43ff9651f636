"""Whether an engine is there to be measured: what it raises while it is imported or set up is why it is not."""

import contextlib
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.comparisons import Absent, Comparison


class PeerError(Exception):
    """An engine is not installed, or does not run here, or is of a version that these benchmarks do not know."""


def peer(distribution: str, module: str) -> Any:
    """A module of an engine.

    Raises:
        PeerError: it is not installed, or its import fails, with whatever its import raised.
    """
    if version_of(distribution) is None:
        raise PeerError(f"no distribution {distribution!r}")
    with theirs(f"{module} of {distribution} {version_of(distribution)}"):
        return importlib.import_module(module)


def version_of(distribution: str) -> str | None:
    """The version that is installed, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def named(engine: str, distribution: str, part: str = "") -> str:
    """An engine with its version, if it is there, and which part of it."""
    versioned = " ".join(filter(None, (engine, version_of(distribution))))
    return f"{versioned}: {part}" if part else versioned


@contextlib.contextmanager
def theirs(part: str) -> Iterator[None]:
    """A window in which only an engine's code runs, and may warn.

    Raises:
        PeerError: it raised something.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # engines raise anything where a driver or a kernel is missing
        said = str(error).strip().partition("\n")[0]
        raise PeerError(f"{part}: {type(error).__name__}: {said}") from error


def or_absent(task: str, way: str, baseline: str, make: Callable[[], Comparison]) -> Comparison | Absent:
    """A comparison with an engine, or why there is none. Errors of this project's own code are raised."""
    try:
        return make()
    except PeerError as error:
        return Absent(task, way, baseline, str(error))
