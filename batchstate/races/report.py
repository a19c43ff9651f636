"""A race report as plain values, which can be kept in a file, read by a tool and drawn.

The findings of a run as a file, for machines, and as the baseline of findings that a project has accepted.

Nothing here needs torch, and nothing refers to the process in which the race was found.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, final

import attrs

from batchstate.errors import ArgumentError
from batchstate.races.tracing.clocks import HOST

FORMAT = "batchstate race report 1"
"""First entry of a report in JSON; the number is raised when a reader has to know better."""


class RaceKind(StrEnum):
    """The order that is missing between two accesses."""

    READ_AFTER_WRITE = "read after write"
    WRITE_AFTER_READ = "write after read"
    WRITE_AFTER_WRITE = "write after write"
    STAGING_REFILLED = "staging refilled"
    """The host writes pinned memory that a copy to the device may still read."""
    HOST_READS_EARLY = "host reads early"
    """The host reads pinned memory before the copy from the device has run."""
    HOST_MEMORY_REUSED = "host memory reused"
    """A copy from the device writes pinned memory that another copy still uses."""
    FREED_IN_USE = "freed in use"
    """Memory that a stream may still use is given to another tensor."""
    UNWRITTEN_READ = "read of unwritten memory"
    """Fresh memory is read before any byte of it was written."""
    LEFTOVER_READ = "leftover read"
    """A value is read that an earlier owner of the row, or an earlier step, has left."""
    PROGRAMS_CLASH = "programs clash"
    """Two programs of one launch access one element, and at least one of them writes it."""


class EventKind(StrEnum):
    """Kinds of events on the timeline."""

    OPERATION = "operation"
    COPY_TO_DEVICE = "copy to device"
    COPY_TO_HOST = "copy to host"
    FENCE = "fence"
    WAIT = "wait"
    """A stream or the host waits for a fence."""
    HOST_ACCESS = "host access"
    ALLOCATION = "allocation"
    FREE = "free"


def printable(line: str) -> str:
    """A line with unprintable characters spelt out.

    Names and paths may hold escape sequences that would run in a terminal, and halves of characters that no file takes.
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)


def _strings(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise TypeError(f"{values!r} is not a list of strings")
    return tuple(values)


_is_str = attrs.validators.instance_of(str)
_is_int = attrs.validators.instance_of(int)
_is_str_or_none = attrs.validators.optional(_is_str)
_are_str = attrs.validators.deep_iterable(_is_str)


@final
@attrs.frozen
class Event:
    """One bar on one lane.

    Attributes:
        number: position in program order, from 1; a report has only the newest of a run.
        lane: name of a stream, or `HOST`.
        kind: of the event.
        name: operation (`index_select`), or a fence's name (`fence 12`).
        step: the runtime's step.
        site: source line, `path:line in function`.
        caller: source line outside the library that led there, or None where that is `site`.
        reads, writes: memory touched, for people: `tensor 7 int64[9, 4] rows 3, 5`.
        waits_for: number of the event that recorded the fence of a wait; None for all other kinds, and where the fence
            is too old to be in the report.
    """

    number: int = attrs.field(validator=_is_int)
    lane: str = attrs.field(validator=_is_str)
    kind: EventKind = attrs.field(converter=EventKind)
    name: str = attrs.field(validator=_is_str)
    step: int = attrs.field(validator=_is_int)
    site: str = attrs.field(validator=_is_str)
    caller: str | None = attrs.field(default=None, validator=_is_str_or_none)
    reads: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_are_str)
    writes: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_are_str)
    waits_for: int | None = attrs.field(default=None, validator=attrs.validators.optional(_is_int))


def _events(values: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(values)


@final
@attrs.frozen
class Access:
    """One side of a race.

    Attributes:
        event: number of its event.
        does: `reads`, `writes`, `frees` or `allocates`.
        operation: that does it.
        lane: on which stream, or `HOST`.
        step: the runtime's step.
        site, caller: see `Event`.
        rows: the part of the memory that it touches.
    """

    event: int = attrs.field(validator=_is_int)
    does: str = attrs.field(validator=_is_str)
    operation: str = attrs.field(validator=_is_str)
    lane: str = attrs.field(validator=_is_str)
    step: int = attrs.field(validator=_is_int)
    site: str = attrs.field(validator=_is_str)
    caller: str | None = attrs.field(validator=_is_str_or_none)
    rows: str = attrs.field(validator=_is_str)

    def __str__(self) -> str:
        return self.words(steps=True)

    def words(self, *, steps: bool) -> str:
        """The access for people; `steps` says whether the run has any."""
        came = f"\n{'':13}called from {self.caller}" if self.caller else ""
        where = "the host" if self.lane == HOST else f"stream {self.lane!r}"
        step = f", step {self.step}" * steps
        return f"{self.operation} {self.does} {self.rows} on {where}{step}\n{'':13}at {self.site}{came}"


@final
@attrs.frozen
class RaceReport:
    """Two accesses, at least one of them a write, that nothing orders.

    Attributes:
        kind: of the race.
        problem: the kind and both operations, in a sentence.
        memory: that both touch: `tensor 7 int64[9, 4], allocated on 'forward' at table.py:40 in make`.
        rows: the part of it that both touch.
        first, second: the accesses, in program order.
        missing: the missing edge, in a sentence.
        suggestion: how to add it, and where.
        lanes: `HOST` first, then the streams in the order in which they were made.
        events: the newest before the race, in program order; both accesses are among them, unless the first is too old.
    """

    kind: RaceKind = attrs.field(converter=RaceKind)
    problem: str = attrs.field(validator=_is_str)
    memory: str = attrs.field(validator=_is_str)
    rows: str = attrs.field(validator=_is_str)
    first: Access
    second: Access
    missing: str = attrs.field(validator=_is_str)
    suggestion: str = attrs.field(validator=_is_str)
    lanes: tuple[str, ...] = attrs.field(converter=_strings, validator=_are_str)
    events: tuple[Event, ...] = attrs.field(converter=_events, repr=False)

    def __str__(self) -> str:
        lines = [
            self.problem,
            f"  {'memory':<10} {self.memory}",
            f"  {'both touch':<10} {self.rows}",
            f"  {'first':<10} {self.first.words(steps=self.has_steps)}",
            f"  {'second':<10} {self.second.words(steps=self.has_steps)}",
            f"  {'missing':<10} {self.missing}",
            f"  {'remedy':<10} {self.suggestion}",
        ]
        return "\n".join(printable(line) for line in "\n".join(lines).split("\n"))

    @property
    def has_steps(self) -> bool:
        """Whether the code told its steps: plain torch has none, and then all is step 0."""
        return bool(self.first.step or self.second.step or any(event.step for event in self.events))

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {"format": FORMAT, **attrs.asdict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """The report that `as_dict` gave.

        Raises:
            ArgumentError: something else.
        """
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            got = values.get("format") if isinstance(values, Mapping) else type(values).__name__
            problem = f"no race report: the format is {got!r}"
            raise ArgumentError(problem, got, f"pass a file that a race report was saved to (format {FORMAT!r})")
        try:
            fields = {name: value for name, value in values.items() if name not in ("format", "accepted")}
            fields["first"], fields["second"] = Access(**values["first"]), Access(**values["second"])
            fields["events"] = [Event(**event) for event in values["events"]]
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            problem = f"a damaged race report: {error}"
            raise ArgumentError(problem, str(error), "save it again with `RaceReport.save`") from None

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads the file of a report.

        Raises:
            ArgumentError: the file holds no race report.
            OSError: it cannot be read.
        """
        return cls.from_dict(_read(path))


def _read(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        problem = f"{path}: no JSON: {error}"
        raise ArgumentError(problem, str(path), "pass a file that a race report was saved to") from None


FINDINGS = "batchstate race findings 2"
"""First entry of a file of findings; the number is raised when a reader has to know better."""

Identity = tuple[str, ...]


def findings(races: Sequence[RaceReport], accepted: frozenset[Identity] = frozenset()) -> list[dict[str, Any]]:
    """The findings as plain values: each is its report, with whether the baseline has it."""
    return [{**race.as_dict(), "accepted": identity(race) in accepted} for race in races]


def load_reports(path: str | Path) -> list[RaceReport]:
    """The reports of a file: those of a run (`batchstate race run --json`), or the one that was saved there.

    Raises:
        ArgumentError: the file holds neither.
        OSError: it cannot be read.
    """
    values = _read(path)
    if not isinstance(values, Mapping) or values.get("format") != FINDINGS:
        return [RaceReport.from_dict(values)]
    return [RaceReport.from_dict(finding) for finding in values.get("findings", ())]


def identity(race: RaceReport) -> Identity:
    """A key of a finding that survives moved lines, and a run from another folder.

    It has the kind, and names of files, functions, operations and streams.
    """
    return _identity(str(race.kind), attrs.asdict(race.first), attrs.asdict(race.second))


def _identity(kind: str, *sides: Mapping[str, Any]) -> Identity:
    parts = [kind]
    for side in sides:
        parts += [re.sub(r"^.*/|:\d+(?= in )", "", side["caller"] or side["site"]), side["operation"], side["lane"]]
    return tuple(parts)


def accepted_in(path: Path) -> frozenset[Identity]:
    """The findings of a file that `batchstate race run --json` has written.

    Raises:
        ArgumentError: it holds something else.
        OSError: it cannot be read.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FINDINGS:
            raise ValueError(f"its format is {values['format']!r}")
        return frozenset(
            _identity(finding["kind"], finding["first"], finding["second"]) for finding in values["findings"]
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"{path}: no file of findings: {error}"
        raise ArgumentError(problem, str(path), "pass a file that `batchstate race run --json` has written") from None
