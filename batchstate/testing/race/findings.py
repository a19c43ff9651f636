"""What a run has found, as a file: for machines, and as the baseline of findings that a project has accepted.

Nothing here needs torch.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchstate.errors import ArgumentError
from batchstate.testing.race.report import Access, RaceReport

FORMAT = "batchstate race findings 1"
"""First entry of a file of findings; the number is raised when a reader has to know better."""

Identity = tuple[str, ...]


def findings(races: Sequence[RaceReport], accepted: frozenset[Identity] = frozenset()) -> list[dict[str, Any]]:
    """The findings as plain values: kind, both accesses with line and stream, the missing edge, and what adds it."""
    return [
        {
            "kind": str(race.kind),
            "problem": race.problem,
            "memory": race.memory,
            "rows": race.rows,
            "first": _side(race.first),
            "second": _side(race.second),
            "missing": race.missing,
            "remedy": race.suggestion,
            "accepted": identity(race) in accepted,
        }
        for race in races
    ]


def _side(access: Access) -> dict[str, Any]:
    return {
        "does": access.does,
        "operation": access.operation,
        "stream": access.lane,
        "line": access.caller or access.site,
    }


def identity(race: RaceReport) -> Identity:
    """What a finding is known by when lines have moved: its kind, and files, functions, operations and streams."""
    return _identity(str(race.kind), _side(race.first), _side(race.second))


def _identity(kind: str, *sides: Mapping[str, Any]) -> Identity:
    found = [kind]
    for side in sides:
        found += [re.sub(r":\d+ in ", " in ", side["line"]), side["operation"], side["stream"]]
    return tuple(found)


def accepted_in(path: Path) -> frozenset[Identity]:
    """The findings of a file that `batchstate race run --json` has written.

    Raises:
        ArgumentError: it holds something else.
        OSError: it cannot be read.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}")
        return frozenset(_identity(one["kind"], one["first"], one["second"]) for one in values["findings"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArgumentError(
            f"{path}: no file of findings: {error}",
            value=str(path),
            remedy="pass a file that `batchstate race run --json` has written",
        ) from None
