"""The switch that says how much is checked: off, cheap or full.

Parsed once from `BATCHSTATE_CHECKS`, changed with `set_checks`. The library asks `levels.cheap` and `levels.full`, two
module attributes, so that a check that is off costs one branch. The switch belongs to the process, not to a thread.

`cheap` (the default) never touches the device. `full` also reads device memory back and checksums host memory: it
synchronises, and says so in `Counters.check_reads` instead of `Counters.forced_syncs`.
"""

import contextlib
import enum
import importlib
import os
from collections.abc import Iterator
from typing import NoReturn

from batchstate.errors import ArgumentError, one_of

ENVIRONMENT_VARIABLE = "BATCHSTATE_CHECKS"


class Level(enum.Enum):
    """How much is checked."""

    OFF = "off"
    CHEAP = "cheap"
    FULL = "full"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ArgumentError(f"unknown level of checks {value!r}", value, one_of([level.value for level in cls], value))


cheap: bool = True
full: bool = False


def current_checks() -> Level:
    """The level in force."""
    return Level.FULL if full else Level.CHEAP if cheap else Level.OFF


def set_checks(level: str | Level) -> Level:
    """Sets the level for the whole process and returns the one before.

    Raises:
        ArgumentError: unknown level.
    """
    global cheap, full
    before, chosen = current_checks(), Level(level)
    cheap, full = chosen is not Level.OFF, chosen is Level.FULL
    return before


@contextlib.contextmanager
def checks(level: str | Level) -> Iterator[None]:
    """A window in which the level is another one."""
    before = set_checks(level)
    try:
        yield
    finally:
        set_checks(before)


tools: dict[str, str] = {"BATCHSTATE_RECORD": "batchstate.replay.recorder"}
"""Environment variable -> module of a tool that it switches on, which lies above all that it records."""


def opened() -> None:
    """The library begins to be used: a runtime opens, or a watch begins. Switches on the tools of the environment."""
    while tools:
        variable, module = tools.popitem()
        if value := os.environ.get(variable):
            importlib.import_module(module).switch_on(value)


try:
    set_checks(os.environ.get(ENVIRONMENT_VARIABLE, "cheap"))
except ArgumentError as error:
    problem = f"environment variable {ENVIRONMENT_VARIABLE}: {error.problem}"
    raise ArgumentError(problem, error.value, error.remedy) from None
