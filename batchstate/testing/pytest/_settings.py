"""What holds for a test: its marks, the command line, the environment and the project's ini file, nearest first."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, final

import attrs
import pytest

from batchstate import levels
from batchstate.errors import ArgumentError
from batchstate.levels import Level, parse_level

MARK = "batchstate"


@final
@attrs.frozen
class Settings:
    """The settings of one test.

    Attributes:
        device: of its runtime, as `open_device` names it.
        checks: level that its marks ask for; None leaves it as it is.
        steps_in_flight: see `Runtime`.
        seed: of the simulator's scheduler.
        min_depth: steps that have to be in flight at once, or None.
        marked: the settings that come from marks.
        own: those of them that come from a mark of the test function itself.
    """

    device: str = "cpu"
    checks: Level | None = None
    steps_in_flight: int = 2
    seed: int = 0
    min_depth: int | None = None
    marked: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()


def settings_of(item: pytest.Item) -> Settings:
    """The settings of a test.

    Raises:
        ArgumentError: a mark has an argument that is none, or a value that cannot be meant.
    """
    marked: dict[str, Any] = {}
    for mark in item.iter_markers(MARK):
        _check_mark(mark)
        marked = {**mark.kwargs, **marked}
    config = item.config
    chosen = {"device": chosen_device(config), "seed": config.getoption("batchstate_seed")}
    given = {name: value for name, value in chosen.items() if value is not None} | marked
    own = {name for mark in item.own_markers if mark.name == MARK for name in mark.kwargs}
    if "checks" in given:
        given["checks"] = Level(given["checks"])
    return Settings(**given, marked=frozenset(marked), own=frozenset(own))


def chosen_device(config: pytest.Config) -> str | None:
    """The device that the command line or else the ini file names, or None."""
    name: str | None = config.getoption("batchstate_device") or config.getini("batchstate_device") or None
    return name


def chosen_level(config: pytest.Config) -> Level | None:
    """The level that the command line asks for, or else the ini file; None where the environment does, or neither.

    Raises:
        ArgumentError: the ini file names none.
    """
    text = config.getoption("batchstate_checks")
    if text is None and levels.ENVIRONMENT_VARIABLE not in os.environ:
        text = config.getini("batchstate_checks")
    return parse_level(text) if text else None


@contextlib.contextmanager
def level_in_force(level: Level) -> Iterator[None]:
    """A window in which a level holds in this process and in those that it starts."""
    before = os.environ.get(levels.ENVIRONMENT_VARIABLE)
    os.environ[levels.ENVIRONMENT_VARIABLE] = level.value
    try:
        with levels.checks(level):
            yield
    finally:
        if before is None:
            os.environ.pop(levels.ENVIRONMENT_VARIABLE, None)
        else:
            os.environ[levels.ENVIRONMENT_VARIABLE] = before


def _check_mark(mark: pytest.Mark) -> None:
    shown = ", ".join([*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())])
    called, legal = f"mark {MARK}({shown})", ", ".join(_CHECKS)
    if mark.args:
        raise ArgumentError(
            f"{called} has an argument without a name", value=mark.args[0], remedy=f"name it; there are {legal}"
        )
    for name, value in mark.kwargs.items():
        if name not in _CHECKS:
            raise ArgumentError(f"{called} has no argument {name!r}", value=name, remedy=f"use {legal}")
        try:
            _CHECKS[name](value)
        except ArgumentError as error:
            raise ArgumentError(f"{called}: {error.problem}", value=value, remedy=error.remedy) from None


def _check_device(value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"device is {value!r}", value=value, remedy="use 'cpu', 'cuda', 'race' or 'sim'")


def _whole(name: str, least: int) -> Callable[[object], None]:
    def check(value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ArgumentError(f"{name} is {value!r}", value=value, remedy=f"pass a whole number from {least} on")

    return check


_CHECKS: dict[str, Callable[[Any], object]] = {
    "device": _check_device,
    "checks": parse_level,
    "steps_in_flight": _whole("steps_in_flight", 1),
    "seed": _whole("seed", 0),
    "min_depth": _whole("min_depth", 1),
}
"""Argument of the mark -> what refuses a value that cannot be meant."""
