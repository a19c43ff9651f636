"""A table of what each tool says of each micro-case, to be kept in a file: no machine has all the tools."""

import datetime
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import torch

from batchstate.races.sim import PORTFOLIO
from tests.race_cases import sanitizer, tools
from tests.race_cases.plain import PlainAccelerator
from tests.race_cases.registry import CASES, Case
from tests.race_cases.tools import Says, Verdict

FORMAT = "batchstate race cases 1"
"""First entry of the file; the number is raised when a reader has to know better."""

NOT_RUN = "not run"
SEEDS = 20
"""Runs of a case under each scheduler that draws."""

Progress = Callable[[int, int, str], None]


@final
@attrs.frozen
class Made:
    """How a column came about.

    Attributes:
        date: ISO.
        machine: it ran on, with its accelerator if that was used.
        torch: its version.
    """

    date: str
    machine: str
    torch: str

    @classmethod
    def here(cls, *, accelerator: bool) -> "Made":
        """Now, on this machine."""
        machine = f"{platform.system()} {platform.machine()}"
        if accelerator:
            machine += f", {torch.cuda.get_device_name()}"
        return cls(datetime.date.today().isoformat(), machine, torch.__version__)


@final
@attrs.frozen
class Column:
    """The verdicts of one tool.

    Attributes:
        made: how.
        verdicts: name of a case -> verdict.
    """

    made: Made
    verdicts: Mapping[str, Verdict]

    def text(self, case: Case) -> str:
        """The verdict on a case in words."""
        verdict = self.verdicts.get(case.name)
        return NOT_RUN if verdict is None else verdict.text(case.racy)

    def found(self, cases: Sequence[Case]) -> int:
        """Of some cases, in how many it says that the race is there that is."""
        return sum(self.verdicts[one.name].says is Says.RACE for one in cases if one.name in self.verdicts)


@final
@attrs.frozen
class Tool:
    """Who can fill a column.

    Attributes:
        title: for people.
        here: whether it can run on this machine.
        accelerator: whether it uses one.
        run: gives its verdicts.
    """

    title: str
    here: Callable[[], bool]
    accelerator: bool
    run: Callable[[Sequence[Case], Progress], dict[str, Verdict]]


def _each(verdict_on: Callable[[Case], Verdict]) -> Callable[[Sequence[Case], Progress], dict[str, Verdict]]:
    def run(cases: Sequence[Case], progress: Progress) -> dict[str, Verdict]:
        found = {}
        for number, case in enumerate(cases):
            progress(number, len(cases), case.name)
            found[case.name] = verdict_on(case)
        return found

    return run


def _sanitized(cases: Sequence[Case], progress: Progress) -> dict[str, Verdict]:
    progress(0, len(cases), "in a process of its own")
    return sanitizer.verdicts([case.name for case in cases])


def _accelerator() -> PlainAccelerator:
    return PlainAccelerator(torch.device("cuda"))


TOOLS = {
    "detector": Tool("race detector", lambda: True, False, _each(tools.by_detector)),
    "detector on CUDA": Tool(
        "race detector on CUDA",
        sanitizer.available,
        True,
        _each(lambda case: tools.by_detector(case, _accelerator)),
    ),
    "simulator": Tool(
        "simulated device",
        lambda: True,
        False,
        _each(lambda case: tools.by_simulator(case, tuple(PORTFOLIO), SEEDS)),
    ),
    "sanitizer": Tool("torch.cuda._sanitizer", sanitizer.available, True, _sanitized),
}
"""Name of a column -> the tool that fills it."""


@final
@attrs.frozen
class Table:
    """What is known of all cases.

    Attributes:
        columns: name out of `TOOLS` -> its column; a tool that never ran has none.
    """

    columns: Mapping[str, Column]

    def text(self, tool: str, case: Case) -> str:
        """A tool's verdict on a case in words."""
        column = self.columns.get(tool)
        return NOT_RUN if column is None else column.text(case)

    def summary(self) -> Iterator[tuple[str, str, str, str]]:
        """For each tool: its title, the races it finds, its false alarms, and how its column was made."""
        racy = [case for case in CASES.values() if case.racy]
        safe = [case for case in CASES.values() if not case.racy]
        for name, tool in TOOLS.items():
            column = self.columns.get(name)
            if column is None:
                yield tool.title, NOT_RUN, NOT_RUN, ""
            else:
                made = f"{column.made.date}, torch {column.made.torch}, {column.made.machine}"
                yield tool.title, f"{column.found(racy)} of {len(racy)}", f"{column.found(safe)} of {len(safe)}", made

    def without_those_of(self, other: "Table") -> "Table":
        """This table, with the columns of `other` that it has not."""
        return Table({**other.columns, **self.columns})

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        columns = {
            name: {
                "made": attrs.asdict(column.made),
                "verdicts": {case: [str(verdict.says), verdict.detail] for case, verdict in column.verdicts.items()},
            }
            for name, column in self.columns.items()
        }
        return {"format": FORMAT, "columns": columns}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Table":
        """The table that `as_dict` gave."""
        if values["format"] != FORMAT:
            raise ValueError(f"no table of verdicts: the format is {values['format']!r}")
        return cls(
            {
                name: Column(
                    Made(**column["made"]),
                    {case: Verdict(says, detail) for case, (says, detail) in column["verdicts"].items()},
                )
                for name, column in values["columns"].items()
            }
        )


def load(path: Path) -> Table:
    """Reads what `save` wrote; an empty table where there is no file."""
    return Table.from_dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Table({})


def save(table: Table, path: Path) -> None:
    """Writes a table as JSON."""
    path.write_text(json.dumps(table.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run_tools(names: Sequence[str] | None = None, progress: Progress = lambda *_: None) -> Table:
    """Runs all cases under the tools that can run here.

    Args:
        names: of tools; by default all.
        progress: told how many cases of how many a tool has run, and which comes next.
    """
    cases = list(CASES.values())
    columns = {}
    for name in TOOLS if names is None else names:
        tool = TOOLS[name]
        if tool.here():
            columns[name] = Column(Made.here(accelerator=tool.accelerator), tool.run(cases, progress))
    return Table(columns)
