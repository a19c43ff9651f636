"""The pytest plugin: an engine's tests on a device by name, and what broke, in the report of the test that fails.

It is loaded in every test run of an environment that has batchstate, so it imports nothing but pytest until a test uses
batchstate. `batchstate_runtime` and `batchstate_open` are its fixtures, `batchstate` is its mark.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from batchstate.races import RaceReport
    from batchstate.runtime import Runtime
    from batchstate.testing.pytest._runtimes import Openings, Settings

MARK = "batchstate"

_RAN = "batchstate_ran"
_MARK_HELP = (
    "batchstate(device=..., checks=..., steps_in_flight=..., seed=..., min_depth=...): settings of the runtime that a "
    "test gets from `batchstate_runtime` or `batchstate_open`; min_depth is how many steps have to be in flight at once"
)
_DEVICE_HELP = "device of `batchstate_runtime`: cpu, cuda, cuda:1, race, race:cuda, sim or sim:NAME"
_CHECKS_HELP = "level of batchstate's checks in all tests: off, cheap or full"


class _UnderWay:
    """The test that is running.

    Attributes:
        item: it, or None between tests.
        failed: whether something has ended it early.
        openings: the runtimes that tests were given; None until one asks.
        shown: races that are in a report already, by identity.
    """

    __slots__ = ("failed", "item", "openings", "shown")

    def __init__(self) -> None:
        self.openings: Openings | None = None
        self.item: pytest.Item | None = None
        self.begin()

    def begin(self) -> None:
        """The test begins, perhaps once more."""
        self.failed = False
        self.shown: list[RaceReport] = []
        if self.openings is not None:
            self.openings.begin_test()


class _EndedEarlyError(Exception):
    """The test has failed, so its runtime is closed without further checks."""


_under_way = pytest.StashKey[_UnderWay]()


# Options


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the options, and what a project may set for itself."""
    group = parser.getgroup("batchstate")
    group.addoption("--batchstate-device", metavar="DEVICE", help=f"{_DEVICE_HELP} (default: cpu)")
    group.addoption(
        "--batchstate-checks", choices=("off", "cheap", "full"), help=f"{_CHECKS_HELP} (default: as the process has it)"
    )
    group.addoption("--batchstate-seed", metavar="N", type=int, help="seed of the simulated device (default: 0)")
    group.addoption(
        "--batchstate-reports",
        metavar="DIR",
        help="folder that reports of races are written to, as JSON (default: race-reports in the root folder)",
    )
    group.addoption(
        "--cuda-on-cpu",
        action="store_true",
        help="with --batchstate-device race or sim:NAME: code that says cuda runs on this CPU, in a window of "
        "`cuda_on_cpu` for each test; a test fails if it races, or fails in the order that sim picks",
    )
    group.addoption(
        "--batchstate-baseline",
        metavar="FILE",
        help="with --cuda-on-cpu: findings that are accepted, a file that `batchstate race run --json` has written",
    )
    parser.addini("batchstate_device", _DEVICE_HELP, default="")
    parser.addini("batchstate_checks", _CHECKS_HELP, default="")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark, and sets the level of checks if an option names it."""
    config.addinivalue_line("markers", _MARK_HELP)
    config.stash[_under_way] = _UnderWay()
    if config.getoption("cuda_on_cpu") and str(_asked(config, "device")).partition(":")[0] not in ("race", "sim"):
        raise pytest.UsageError("batchstate: --cuda-on-cpu needs --batchstate-device race, race:prompt or sim:NAME")
    if config.getoption("cuda_on_cpu"):
        from batchstate.races.devices import interpret_kernels

        interpret_kernels()
    if config.getoption("batchstate_baseline") and not config.getoption("cuda_on_cpu"):
        raise pytest.UsageError("batchstate: --batchstate-baseline needs --cuda-on-cpu")
    if config.getoption("batchstate_checks") or config.getini("batchstate_checks"):
        from batchstate.errors import ArgumentError

        try:
            from batchstate.testing.pytest._runtimes import chosen_level, level_in_force

            level = chosen_level(config)
        except ArgumentError as error:
            raise pytest.UsageError(f"batchstate: {error}") from None
        if level is not None:
            windows = contextlib.ExitStack()
            windows.enter_context(level_in_force(level))
            config.add_cleanup(windows.close)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Says which options are set, if any."""
    names = ("device", "checks", "seed", "reports")
    options = [f"{name} {value}" for name in names if (value := _asked(config, name)) is not None]
    return f"batchstate: {', '.join(options)}" if options else None


def _asked(config: pytest.Config, name: str) -> object:
    value = config.getoption(f"batchstate_{name}")
    if value is None and name in ("device", "checks"):
        value = config.getini(f"batchstate_{name}") or None
    return value


# Fixtures


@pytest.fixture(scope="session")
def batchstate_open(pytestconfig: pytest.Config) -> "Callable[..., contextlib.AbstractContextManager[Runtime]]":
    """Opens runtimes with settings of their own, for a `with`: takes device, steps_in_flight and seed.

    The defaults are those of mark and options. For fixtures of any scope, for a test that needs several runtimes, and
    for Hypothesis, where each example needs its own.
    """
    return _openings(pytestconfig.stash[_under_way]).open


def _openings(under_way: _UnderWay) -> "Openings":
    from batchstate.testing.pytest._runtimes import Openings

    if under_way.openings is None:
        under_way.openings = Openings(lambda: _settings_under_way(under_way))
    return under_way.openings


@pytest.fixture
def batchstate_runtime(
    batchstate_open: "Callable[..., contextlib.AbstractContextManager[Runtime]]", pytestconfig: pytest.Config
) -> "Iterator[Runtime]":
    """A fresh runtime of the device that mark, options or ini file name, in its window; a CPU by default."""
    under_way = pytestconfig.stash[_under_way]
    with contextlib.suppress(_EndedEarlyError), batchstate_open() as runtime:
        yield runtime
        if under_way.failed:
            raise _EndedEarlyError


def _settings_under_way(under_way: _UnderWay) -> "Settings":
    from batchstate.testing.pytest._runtimes import Settings, settings_of

    return Settings() if under_way.item is None else settings_of(under_way.item)


# Each test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keeps in mind which test is running, and has its level of checks in force."""
    under_way = item.config.stash[_under_way]
    under_way.item = item
    try:
        with _level_of(item), _cuda_of(item.config):
            return (yield)
    finally:
        under_way.item = None


def _cuda_of(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    if not config.getoption("cuda_on_cpu"):
        return contextlib.nullcontext()
    device, baseline = str(_asked(config, "device")), config.getoption("batchstate_baseline")
    seed = config.getoption("batchstate_seed") or 0
    return _openings(config.stash[_under_way]).cuda_window(device, seed, baseline)


def _level_of(item: pytest.Item) -> contextlib.AbstractContextManager[None]:
    if item.get_closest_marker(MARK) is not None:
        from batchstate.errors import ArgumentError
        from batchstate.testing.pytest._runtimes import level_in_force, settings_of

        with contextlib.suppress(ArgumentError):  # what is wrong with a mark is said when the test is set up
            checks = settings_of(item).checks
            if checks is not None:
                return level_in_force(checks)
    return contextlib.nullcontext()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuses a mark that is wrong, and skips a test whose mark names a device that is not there."""
    item.config.stash[_under_way].begin()
    if item.get_closest_marker(MARK) is None:
        return
    from batchstate.errors import ArgumentError
    from batchstate.testing.pytest._runtimes import settings_of

    try:
        settings = settings_of(item)
    except ArgumentError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    if "device" in settings.marked:
        from batchstate.testing.pytest._runtimes import is_there

        if not is_there(settings.device):
            item.add_marker(pytest.mark.skip(reason=f"batchstate: there is no device {settings.device!r} here"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fails a test that has passed and proves less than it seems to."""
    yield
    openings = item.config.stash[_under_way].openings
    if openings is not None:
        openings.end_test()
    if item.get_closest_marker(MARK) is not None or (openings is not None and openings.of_test):
        from batchstate.testing.pytest._runtimes import check_passed, settings_of

        check_passed(settings_of(item), [] if openings is None else openings.of_test)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the sections of a violation to the report of the test that it failed."""
    report = yield
    under_way = item.config.stash[_under_way]
    opened = [] if under_way.openings is None else under_way.openings.of_test
    if call.excinfo is not None:
        under_way.failed = True
        if report.failed and (opened or "batchstate.violations" in sys.modules):
            from batchstate.testing.pytest._failures import sections

            report.sections += sections(item, call.excinfo.value, opened, under_way.shown)
    if opened and report.when == "teardown":
        vars(report)[_RAN] = {
            runtime.device: runtime.depth or 0 for runtime in opened
        }  # xdist carries it to the summary too
    return report


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter", config: pytest.Config) -> None:
    """Says how much ran where, if a device was asked for: a run in which nothing did proves nothing."""
    if _asked(config, "device") is None:
        return
    reports = [report for several in terminalreporter.stats.values() for report in several]
    tests: Counter[str] = Counter()
    depths: Counter[str] = Counter()
    for report in reports:
        for device, depth in getattr(report, _RAN, {}).items():
            tests[device] += 1
            depths[device] = max(depths[device], depth)
    if tests:
        shown = [
            f"{tests[device]} on {device}" + (f" with at most {depths[device]} steps in flight" * bool(depths[device]))
            for device in sorted(tests)
        ]
        terminalreporter.section("batchstate")
        terminalreporter.write_line(f"runtimes of tests: {'; '.join(shown)}")
    elif config.getoption("batchstate_device") and any(isinstance(report, pytest.TestReport) for report in reports):
        terminalreporter.section("batchstate", yellow=True)
        terminalreporter.write_line(
            "no test opened a runtime, so --batchstate-device had no effect: let tests take batchstate_runtime; "
            "or, for plain torch code that says cuda, add --cuda-on-cpu",
            yellow=True,
        )
