"""Whether a report hangs together, asked before it is drawn: its file may have been edited or cut."""

import attrs

from batchstate.errors import ArgumentError
from batchstate.testing.race.report import Access, Event, EventKind, RaceReport


def drawable(report: RaceReport) -> RaceReport:
    """The report, with both accesses among its events: the first may have been too old to be kept.

    Raises:
        ArgumentError: a value has another type, an event is on no lane, or an access is not among the events.
    """
    sentences = (report.problem, report.memory, report.rows, report.missing, report.suggestion)
    _all("text", str, (*sentences, *report.lanes))
    for access in (report.first, report.second):
        _all("number", int, (access.event, access.step))
        _all("text", str, (access.does, access.operation, access.lane, access.site, access.caller or "", access.rows))
    newest = 0
    for event in report.events:
        _all("number", int, (event.number, event.step, event.waits_for or 0))
        _all("text", str, (event.lane, event.name, event.site, event.caller or "", *event.reads, *event.writes))
        if event.lane not in report.lanes:
            raise _damaged(f"event {event.number} is on the lane {event.lane!r}, which is none of {report.lanes}")
        if event.number <= newest:
            raise _damaged(f"event {event.number} stands after event {newest}")
        if event.waits_for is not None and event.waits_for >= event.number:
            raise _damaged(f"event {event.number} waits for event {event.waits_for}, which is not before it")
        newest = event.number
    if report.events and report.first.event < report.events[0].number and report.first.lane in report.lanes:
        report = attrs.evolve(report, events=(_event_of(report.first), *report.events))
    lanes = {event.number: event.lane for event in report.events}
    for name, access in (("first", report.first), ("second", report.second)):
        if lanes.get(access.event) != access.lane:
            raise _damaged(f"the {name} access is event {access.event} on {access.lane!r}, and there is none such")
    if report.first.event >= report.second.event:
        raise _damaged(f"the first access is event {report.first.event}, the second {report.second.event}")
    return report


def _event_of(access: Access) -> Event:
    return Event(
        access.event, access.lane, EventKind.OPERATION, access.operation, access.step, access.site, access.caller
    )


def _all(what: str, kind: type, values: tuple[object, ...]) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise _damaged(f"{value!r} stands where a {what} belongs")


def _damaged(problem: str) -> ArgumentError:
    return ArgumentError(
        f"a damaged race report: {problem}", value=problem, remedy="save it again with `RaceReport.save`"
    )
