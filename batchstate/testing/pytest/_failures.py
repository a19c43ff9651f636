"""The pytest plugin's part of the report of a test that failed: the violation, and how to draw and repeat it."""

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchstate import levels
from batchstate.errors import ArgumentError
from batchstate.testing.pytest._runtimes import Opened, settings_of
from batchstate.violations import Code, Violation

if TYPE_CHECKING:
    from batchstate.races import RaceReport

FOLDER = "race-reports"
"""Default folder for reports of races, in the root folder of the tests."""

_TITLE = "batchstate"
_LONGEST_NAME = 80


def sections(
    item: pytest.Item, error: BaseException, opened: Sequence[Opened], shown: "list[RaceReport]"
) -> list[tuple[str, str]]:
    """The sections for a test that failed, as title and text.

    Args:
        item: the test.
        error: what it failed with.
        opened: its runtimes.
        shown: races of the same test that are in a section already; those that are added here come to them.

    Returns:
        one for each violation behind the error and each race that was caught; one for a simulated device, which is
        worth repeating; none for other tests.
    """
    texts = []
    for violation in violations_in(error):
        race = _race_of(violation)
        texts.append(_fields(violation) if race is None else _race(item, race, shown))
    caught = [race for runtime in opened for race in runtime.races if all(race is not other for other in shown)]
    in_cuda = any(runtime.accepted is not None for runtime in opened)
    note = "" if in_cuda else "this race was caught, and the test went on:\n\n"
    texts += [f"{note}{_race(item, race, shown)}" for race in caught]
    if not texts and any(runtime.scheduler for runtime in opened):
        texts.append("")
    ends = _lines(_how_it_ran(item, opened))
    titles = [_TITLE, *(f"{_TITLE} {number}" for number in range(2, len(texts) + 1))]
    return [(title, f"{text}\n{ends}".lstrip("\n")) for title, text in zip(titles, texts, strict=False)]


def violations_in(error: BaseException) -> Iterator[Violation]:
    """The violations in an error, in groups of errors and in their causes; none twice."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop(0)
        if id(error) in seen:
            continue
        seen.add(id(error))
        if isinstance(error, Violation):
            yield error
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is not None:
            waiting.append(before)


def _race_of(violation: Violation) -> "RaceReport | None":
    if violation.code is not Code.RACE:
        return None
    from batchstate.races.report import RaceReport

    report = getattr(violation, "report", None)  # a text where the race comes from another process
    return report if isinstance(report, RaceReport) else None


# Texts


def _fields(violation: Violation) -> str:
    return _lines(
        {name: text for name, value in violation.as_dict().items() if value is not None and (text := str(value))}
    )


def _race(item: pytest.Item, race: "RaceReport", shown: "list[RaceReport]") -> str:
    """The race in words, with its report and the command that draws it. Writes the report."""
    shown.append(race)
    try:
        path = _shown_path(item.config, _written(item, race, len(shown)))
    except OSError as error:
        where = {"report": f"not written: {error}"}
    else:
        where = {"report": path, "draw it": f"batchstate race {shlex.quote(path)} --out race.html"}
    return f"{race}\n\n{_lines(where)}"


def _how_it_ran(item: pytest.Item, opened: Sequence[Opened]) -> dict[str, str]:
    ran: dict[str, str] = {}
    if opened:
        ran["device"] = ", ".join(dict.fromkeys(runtime.device for runtime in opened))
    ran["checks"] = levels.current_checks().value
    orders = dict.fromkeys(f"{runtime.scheduler}, seed {runtime.seed}" for runtime in opened if runtime.scheduler)
    if orders:
        ran["scheduler"] = "; ".join(orders)
    within = item.nodeid.partition("::")[2]
    test = _shown_path(item.config, item.path) + (f"::{within}" if within else "")
    ran["repeat"] = f"pytest {shlex.quote(test)}{_options(item, opened)}"
    return ran


def _options(item: pytest.Item, opened: Sequence[Opened]) -> str:
    """The options that make the test run so again; a mark says the rest itself."""
    try:
        settings = settings_of(item)
    except ArgumentError:
        return ""
    options = []
    if opened and "device" not in settings.marked and settings.device != "cpu":
        options += ["--batchstate-device", settings.device]
    if "checks" not in settings.marked and (level := os.environ.get(levels.ENVIRONMENT_VARIABLE)):
        options += ["--batchstate-checks", level]
    options += ["--cuda-on-cpu"] * any(runtime.accepted is not None for runtime in opened)
    scheduled = [runtime.seed for runtime in opened if runtime.scheduler]
    if "seed" not in settings.marked and settings.seed in scheduled:
        options += ["--batchstate-seed", str(settings.seed)]
    return "".join(f" {shlex.quote(option)}" for option in options)


def _lines(fields: dict[str, str]) -> str:
    return "\n".join(f"{name:<11}{text}" for name, text in fields.items())


# Files


def file_name(nodeid: str, number: int = 1) -> str:
    """The name of the file for a test's report, good for every file system. No two tests have the same."""
    digest = hashlib.sha256(nodeid.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    words = re.sub(r"[^A-Za-z0-9_]+", "-", nodeid.replace(".py::", "-")).strip("-")
    more = "" if number == 1 else f"-{number}"
    return f"{words[-_LONGEST_NAME:].lstrip('-')}-{digest}{more}.json"


def _written(item: pytest.Item, race: "RaceReport", number: int) -> Path:
    config = item.config
    asked: str | None = config.getoption("batchstate_reports")
    folder = config.rootpath / FOLDER if asked is None else config.invocation_params.dir / asked
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(item.nodeid, number)
    whole = path.with_name(f".{path.name}.{os.getpid()}")  # two workers may write the same test's report
    race.save(whole)
    whole.replace(path)
    return path


def _shown_path(config: pytest.Config, path: Path) -> str:
    here = config.invocation_params.dir
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
