"""The runtimes that tests get from the pytest plugin, by their settings, and the checks at the end of a test.

Settings are those of marks, the command line, the environment and the project's ini file, nearest first.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, final

import attrs
import pytest

from batchstate import levels
from batchstate.errors import ArgumentError
from batchstate.levels import Level

if TYPE_CHECKING:
    from batchstate.races import RaceReport
    from batchstate.runtime import Runtime

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
        own: the settings that come from a mark of the test function itself.
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
        ArgumentError: a mark has an unknown argument, or a value that cannot be meant.
    """
    marked: dict[str, Any] = {}
    for mark in item.iter_markers(MARK):
        _check_mark(mark)
        marked = {**mark.kwargs, **marked}
    config = item.config
    chosen = {"device": chosen_device(config), "seed": config.getoption("batchstate_seed")}
    settings = {name: value for name, value in chosen.items() if value is not None} | marked
    own = {name for mark in item.own_markers if mark.name == MARK for name in mark.kwargs}
    if "checks" in settings:
        settings["checks"] = Level(settings["checks"])
    return Settings(**settings, marked=frozenset(marked), own=frozenset(own))


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
    return Level(text) if text else None


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
        raise ArgumentError(f"{called} has an argument without a name", mark.args[0], f"name it; there are {legal}")
    for name, value in mark.kwargs.items():
        if name not in _CHECKS:
            raise ArgumentError(f"{called} has no argument {name!r}", name, f"use {legal}")
        try:
            _CHECKS[name](value)
        except ArgumentError as error:
            raise ArgumentError(f"{called}: {error.problem}", value, error.remedy) from None


def _check_device(value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"device is {value!r}", value, "use 'cpu', 'cuda', 'race' or 'sim'")


def _whole(name: str, least: int) -> Callable[[object], None]:
    def check(value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ArgumentError(f"{name} is {value!r}", value, f"pass a whole number from {least} on")

    return check


_CHECKS: dict[str, Callable[[Any], object]] = {
    "device": _check_device,
    "checks": Level,
    "steps_in_flight": _whole("steps_in_flight", 1),
    "seed": _whole("seed", 0),
    "min_depth": _whole("min_depth", 1),
}
"""Argument of the mark -> function that refuses a value that cannot be meant."""


_LATEST = "lazy"
"""The scheduler under which the depth is the engine's own doing; all others let the device get on as they please."""


@final
@attrs.define(eq=False)
class Opened:
    """A runtime of a test."""

    device: str  # as `open_device` takes it
    seed: int  # of the scheduler
    runtime: "Runtime | None"  # None once it is closed
    scheduler: str | None = None  # of a simulated device; None for all others
    accepted: "frozenset[tuple[str, ...]] | None" = None  # findings of a window of `cuda_on_cpu`; None for a runtime
    _races: "tuple[RaceReport, ...]" = ()
    _before: int = 0
    _depths: "list[int] | None" = None

    @property
    def races(self) -> "tuple[RaceReport, ...]":
        """Reports of the races that it has found since the test began, raised or not."""
        self._look()
        return self._races[self._before :]

    @property
    def depth(self) -> int | None:
        """The most steps in flight at once; None for devices that do not count them."""
        return None if self.depths is None else max(self.depths, default=0)

    @property
    def depths(self) -> "list[int] | None":
        """The same of each step with work, oldest first."""
        self._look()
        return self._depths

    def begin_test(self) -> None:
        """Another test begins, to which the races so far do not belong."""
        self._look()
        self._before = len(self._races)

    def close(self) -> None:
        """Lets go of the runtime, and keeps its races and depths."""
        self._look()
        self.runtime = None

    def _look(self) -> None:
        if self.runtime is None:
            return
        self._races = tuple(getattr(self.runtime, "races", ()))
        if self.accepted:
            from batchstate.races.report import identity

            self._races = tuple(race for race in self._races if identity(race) not in self.accepted)
        self._depths = getattr(self.runtime, "in_flight_depths", None)


@final
@attrs.define(eq=False)
class Openings:
    """Opens runtimes for tests.

    Attributes:
        of_test: the runtimes of the test under way, those that it found open among them.
    """

    _settings: Callable[[], Settings]
    of_test: list[Opened] = attrs.field(factory=list)
    _now: list[Opened] = attrs.field(factory=list)

    def begin_test(self) -> None:
        """A test begins. It may use runtimes that a fixture of a module or a session has opened."""
        self.of_test = list(self._now)
        for opened in self.of_test:
            opened.begin_test()

    def end_test(self) -> None:
        """A test is over: copies that its code has under way in a window of `cuda_on_cpu` are too."""
        for opened in self.of_test:
            if opened.accepted is not None:
                opened.runtime.wait_for_everything()  # type: ignore[union-attr]

    @contextlib.contextmanager
    def cuda_window(self, device: str, seed: int, baseline: str | None) -> Iterator[None]:
        """A window of `cuda_on_cpu` for one test, its fixtures included.

        Args:
            device: as `cuda_on_cpu` takes it.
            seed: of the scheduler of a simulated device.
            baseline: file of findings that are accepted, or None.
        """
        from pathlib import Path

        from batchstate.races.cuda import cuda_on_cpu
        from batchstate.races.report import accepted_in

        accepted = frozenset() if baseline is None else accepted_in(Path(baseline))
        with cuda_on_cpu(device, on_race="collect", seed=seed) as runtime:
            opened = Opened(device, seed, runtime, getattr(runtime, "scheduler", None), accepted)
            self._now.append(opened)
            try:
                yield
            finally:
                self._now.remove(opened)
                opened.close()

    @contextlib.contextmanager
    def open(
        self, *, device: str | None = None, steps_in_flight: int | None = None, seed: int | None = None
    ) -> "Iterator[Runtime]":
        """A runtime in its window; by default with the test's settings."""
        from batchstate.races.devices import open_device, window_of

        settings = self._settings()
        device = settings.device if device is None else device
        seed = settings.seed if seed is None else seed
        steps_in_flight = settings.steps_in_flight if steps_in_flight is None else steps_in_flight
        runtime = open_device(device, steps_in_flight=steps_in_flight, seed=seed)
        opened = Opened(device, seed, runtime, getattr(runtime, "scheduler", None))
        self.of_test.append(opened)
        self._now.append(opened)
        try:
            with window_of(runtime):
                yield runtime
        finally:
            self._now.remove(opened)
            opened.close()


def is_there(device: str) -> bool:
    """Whether a device exists on this machine. An unknown name counts: opening it says what is wrong."""
    import torch

    from batchstate.races.devices import torch_device_of

    try:
        wanted = torch.device(torch_device_of(device))
        module = torch.get_device_module(wanted)
    except RuntimeError:
        return True
    return wanted.type == "cpu" or (bool(module.is_available()) and (wanted.index or 0) < module.device_count())


def check_passed(settings: Settings, opened: list[Opened]) -> None:
    """Fails a test that has come to its end, where that proves less than it seems to.

    Raises:
        Failed: it caught a race, was not as deep as its mark demands, or has a mark without an effect.
    """
    of_cuda = [race.problem for runtime in opened if runtime.accepted is not None for race in runtime.races]
    races = of_cuda or [race.problem for runtime in opened for race in runtime.races]
    several = len(races) > 1
    if of_cuda:
        problem = f"{len(races)} race{'s' * several} in code that says cuda"
        _fail(problem, *races, "remedy: repair what races, or accept it with --batchstate-baseline")
    if races:
        problem = f"something caught {'races that were' if several else 'a race that was'} raised in this test"
        _fail(problem, *races, "remedy: repair what races; a test that is meant to race opens a `RaceRuntime` itself")
    idle = sorted(settings.own - {"checks"})
    if idle and not opened:
        problem = f"the mark's {', '.join(idle)} had no effect: the test opened no runtime"
        _fail(problem, "remedy: let the test or its fixtures take `batchstate_runtime` or `batchstate_open`")
    counted = [runtime.depths for runtime in opened if runtime.scheduler in (None, _LATEST)]
    depths_of = [depths for depths in counted if depths is not None]
    if settings.min_depth is None or not depths_of:
        return
    wanted = settings.min_depth
    steady = [depth for depths in depths_of for depth in depths[wanted - 1 :]]
    deep = sum(depth >= wanted for depth in steady)
    if not steady or deep < len(steady):
        most = max((depth for depths in depths_of for depth in depths), default=0)
        _fail(
            f"{wanted} steps were in flight at once in {deep} of {len(steady)} steady steps, never more than {most}, "
            f"and the mark demands {wanted}",
            "Something waits for the device in a step, or `next_step` is not called once per step. Behind a host",
            "that waits, everything is in order, and no race can be found.",
            "remedy: run ahead as in production; `no_hidden_sync` finds what waits",
        )


def _fail(problem: str, *lines: str) -> NoReturn:
    pytest.fail("\n  ".join([problem, *lines]), pytrace=False)
