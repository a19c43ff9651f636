"""A race as a trace, for the viewers in which engineers read their profiles."""

from typing import Any

from batchstate.races.render.layout import access_of, awaited, drawable, label, plain
from batchstate.races.report import Event, EventKind, RaceReport

_STEP, _LENGTH = 10, 8
"""Microseconds from one event to the next, and of one event: time is the order of the calls."""

_PROCESS = 1

_COLOURS = {EventKind.FENCE: "good", EventKind.WAIT: "good"}
"""Of the names that the viewers reserve; the two accesses are `terrible`, and all others as the viewer likes."""


def race_trace(report: RaceReport) -> dict[str, Any]:
    """The events of a race as a trace, which `chrome://tracing` and Perfetto open.

    It is the JSON object form of the "Trace Event Format". Each lane is a thread and each event a complete event on it,
    the two accesses in the category `race`. Flow events lead from a fence to what waits for it, and another, `missing
    edge`, from the first access to the second. Times are places in program order, not measured.

    Args:
        report: to draw.

    Returns:
        what `json.dump` takes.

    Raises:
        ArgumentError: the report does not hang together.
    """
    report = drawable(report)
    threads = {lane: index for index, lane in enumerate(report.lanes, 1)}
    known = {event.number: event for event in report.events}
    start = {event.number: index * _STEP for index, event in enumerate(report.events)}
    events = _names(report, threads)
    for event in report.events:
        events.append(_complete(report, event, start[event.number], threads[event.lane]))
    flows = [("race", "missing edge", report.first.event, report.second.event)]
    for event in report.events:
        fence = None if event.waits_for is None else known.get(event.waits_for)
        if fence is not None:
            flows.append(("order", fence.name, fence.number, event.number))
    for number, (category, name, begin, end) in enumerate(flows, 1):
        common = {"cat": category, "name": plain(name), "id": number, "pid": _PROCESS}
        # A flow belongs to the event that encloses its time on its thread.
        events.append({"ph": "s", "ts": start[begin] + _LENGTH // 2, "tid": threads[known[begin].lane], **common})
        events.append(
            {"ph": "f", "bp": "e", "ts": start[end] + _LENGTH // 2, "tid": threads[known[end].lane], **common}
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "problem": report.problem,
            "memory": report.memory,
            "both touch": report.rows,
            "missing": report.missing,
            "remedy": report.suggestion,
            "time": "order of the calls, not measured",
        },
    }


def _names(report: RaceReport, threads: dict[str, int]) -> list[dict[str, Any]]:
    def named(kind: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": args}

    events = [named("process_name", 0, name=f"race: {plain(report.problem)}")]
    for lane, thread in threads.items():
        events.append(named("thread_name", thread, name=plain(lane)))
        events.append(named("thread_sort_index", thread, sort_index=thread))
    return events


def _complete(report: RaceReport, event: Event, start: int, thread: int) -> dict[str, Any]:
    access = access_of(report, event)
    args: dict[str, Any] = {"event": event.number, "step": event.step, "source": event.site}
    if access is not None:
        which, side = access
        args["access"] = f"{which}: {side.does} {side.rows}"
    for name, value in (
        ("called from", event.caller),
        ("reads", list(event.reads)),
        ("writes", list(event.writes)),
        ("waits for", awaited(report, event)),
    ):
        if value:
            args[name] = value
    colour = "terrible" if access is not None else _COLOURS.get(event.kind)
    return {
        "ph": "X",
        "name": label(event),
        "cat": "race" if access is not None else event.kind.value,
        "ts": start,
        "dur": _LENGTH,
        "pid": _PROCESS,
        "tid": thread,
        **({"cname": colour} if colour else {}),
        "args": args,
    }
