"""Handmade race reports: one of an overlapped engine, one of every kind, and awkward ones."""

from typing import Any

from batchstate.races.report import Access, Event, EventKind, RaceKind, RaceReport
from batchstate.races.tracing.clocks import HOST

ENGINE = "/srv/engine/scheduler.py"
MODEL = "/srv/engine/model.py"


class Events:
    """Events in the order of the calls."""

    def __init__(self, number: int) -> None:
        self.made: list[Event] = []
        self._number = number

    def add(self, lane: str, kind: EventKind, name: str, step: int, site: str, **more: Any) -> Event:
        """The next event."""
        event = Event(self._number, lane, kind, name, step, site, **more)
        self._number += 1
        self.made.append(event)
        return event


def access(event: Event, does: str, rows: str) -> Access:
    """An event as one side of a race."""
    return Access(event.number, does, event.name, event.lane, event.step, event.site, event.caller, rows)


def report(**fields: Any) -> RaceReport:
    """A report; `events` may be given as they were collected."""
    if isinstance(fields["events"], Events):
        fields["events"] = fields["events"].made
    return RaceReport(**fields)


def overlapped_engine() -> RaceReport:
    """The forward of step 7 reads rows of `req_to_token`; the schedule of step 8 writes them without waiting for it."""
    table = "req_to_token int32[257, 4096]"
    kind = EventKind
    events = Events(375)
    forwards: list[Event] = []
    reads: list[Event] = []
    writes: list[Event] = []
    for step in (5, 6, 7, 8):
        rows = "rows 3, 5" if step > 6 else "rows 1, 2, 4"
        events.add(HOST, kind.HOST_ACCESS, "fill staging", step, f"{ENGINE}:88 in plan", writes=["staging 1"])
        if forwards and step != 8:
            fence = forwards[-1]
            events.add(
                "schedule", kind.WAIT, f"wait for {fence.name}", step, f"{ENGINE}:90 in plan", waits_for=fence.number
            )
        plan = f"{ENGINE}:91 in plan"
        events.add("schedule", kind.COPY_TO_DEVICE, "upload", step, plan, reads=["staging 1"], writes=["packed"])
        writes.append(
            events.add(
                "schedule",
                kind.OPERATION,
                "index_put_",
                step,
                "/opt/batchstate/tables.py:141 in write",
                caller=f"{ENGINE}:97 in write_tokens",
                reads=["packed"],
                writes=[f"{table} {rows}"],
            )
        )
        if step == 8:
            break
        uploaded = events.add("schedule", kind.FENCE, f"fence {2 * step}", step, f"{ENGINE}:99 in plan")
        events.add(
            "forward", kind.WAIT, f"wait for {uploaded.name}", step, f"{MODEL}:40 in run", waits_for=uploaded.number
        )
        source = f"{MODEL}:52 in gather_pages"
        reads.append(events.add("forward", kind.OPERATION, "index_select", step, source, reads=[f"{table} {rows}"]))
        events.add("forward", kind.OPERATION, "scaled_dot_product_attention", step, f"{MODEL}:61 in attend")
        events.add("forward", kind.OPERATION, "argmax", step, f"{MODEL}:70 in sample", writes=["tensor 21 int64[2]"])
        events.add("forward", kind.COPY_TO_HOST, "prefetch", step, f"{MODEL}:74 in sample", writes=["pinned 2"])
        if forwards:
            fence = forwards[-1]
            events.add(
                HOST, kind.WAIT, f"wait for {fence.name}", step, f"{ENGINE}:120 in results", waits_for=fence.number
            )
        forwards.append(events.add("forward", kind.FENCE, f"fence {2 * step + 1}", step, f"{MODEL}:75 in sample"))
    read, written = reads[-1], writes[-1]
    return report(
        kind=RaceKind.WRITE_AFTER_READ,
        problem="stream 'schedule' writes rows 3, 5 of `req_to_token` that stream 'forward' may still read",
        memory=f"{table}, allocated on 'schedule' at {ENGINE}:31 in make_tables",
        rows="rows 3, 5",
        first=access(read, "reads", f"rows 3, 5 of {table}"),
        second=access(written, "writes", f"rows 3, 5 of {table}"),
        missing=f"stream 'schedule' waits for no fence that stream 'forward' recorded after event {read.number}",
        suggestion=f"before the write, let `schedule` wait for the forward of step 7: {forwards[-1].name}, "
        "recorded at model.py:75",
        lanes=(HOST, "schedule", "forward"),
        events=events,
    )


SIDES = {
    RaceKind.READ_AFTER_WRITE: (("a", EventKind.OPERATION, "writes"), ("b", EventKind.OPERATION, "reads")),
    RaceKind.WRITE_AFTER_READ: (("b", EventKind.OPERATION, "reads"), ("a", EventKind.OPERATION, "writes")),
    RaceKind.WRITE_AFTER_WRITE: (("a", EventKind.OPERATION, "writes"), ("b", EventKind.OPERATION, "writes")),
    RaceKind.STAGING_REFILLED: (("b", EventKind.COPY_TO_DEVICE, "reads"), (HOST, EventKind.HOST_ACCESS, "writes")),
    RaceKind.HOST_READS_EARLY: (("a", EventKind.COPY_TO_HOST, "writes"), (HOST, EventKind.HOST_ACCESS, "reads")),
    RaceKind.HOST_MEMORY_REUSED: (("a", EventKind.COPY_TO_DEVICE, "reads"), ("b", EventKind.COPY_TO_HOST, "writes")),
    RaceKind.FREED_IN_USE: (("b", EventKind.OPERATION, "reads"), (HOST, EventKind.FREE, "frees")),
    RaceKind.UNWRITTEN_READ: (("a", EventKind.ALLOCATION, "allocates"), ("a", EventKind.OPERATION, "reads")),
    RaceKind.LEFTOVER_READ: (("a", EventKind.OPERATION, "writes"), ("a", EventKind.OPERATION, "reads")),
    RaceKind.PROGRAMS_CLASH: (("a", EventKind.OPERATION, "writes"), ("a", EventKind.OPERATION, "reads")),
}
"""Kind -> lane, kind of event and what it does, of both accesses."""


def of_kind(kind: RaceKind, *, between: int = 3, before: int = 4, after: int = 1) -> RaceReport:
    """A small report of a kind, with as many other events before, between and after its accesses."""
    events = Events(1)

    def work(count: int) -> None:
        for index in range(count):
            step = 1 + len(events.made) // 40
            events.add("ab"[index % 2], EventKind.OPERATION, f"mul_{index}", step, f"run.py:{index} in step")

    fence = events.add("a", EventKind.FENCE, "fence 1", 1, "run.py:7 in step")
    work(before)
    events.add("b", EventKind.WAIT, "fence 1", 1 + before // 40, "run.py:8 in step", waits_for=fence.number)
    sides = []
    for number, (lane, what, does) in enumerate(SIDES[kind]):
        event = events.add(lane, what, f"op_{number}", 1 + len(events.made) // 40, f"run.py:{20 + number} in step")
        sides.append(access(event, does, "rows 1, 2"))
        work(after if number else between)
    return report(
        kind=kind,
        problem=f"{kind}: op_1 {sides[1].does} what op_0 {sides[0].does}",
        memory="tensor 3 int64[9]",
        rows="rows 1, 2",
        first=sides[0],
        second=sides[1],
        missing="nothing waits for op_0",
        suggestion="wait for it with `wait(fence)`",
        lanes=(HOST, "a", "b"),
        events=events,
    )


def long_run() -> RaceReport:
    """Three hundred events, most of them between the two accesses."""
    return of_kind(RaceKind.WRITE_AFTER_WRITE, between=200, before=90, after=6)


def many_lanes(count: int) -> RaceReport:
    """A report with as many streams, each of which waits for the one before; the race is between the outermost."""
    names = [f"stream_{index}" for index in range(count)]
    events = Events(98)
    first = events.add(names[0], EventKind.OPERATION, "index_copy_", 1, "run.py:1 in step")
    fence = None
    for name in names:
        if fence is not None:
            events.add(name, EventKind.WAIT, fence.name, 1, "run.py:2 in step", waits_for=fence.number)
        events.add(name, EventKind.OPERATION, "add_", 1, "run.py:3 in step")
        fence = events.add(name, EventKind.FENCE, f"fence {name}", 1, "run.py:4 in step")
    events.add(HOST, EventKind.WAIT, "fence stream_1", 1, "run.py:5 in step", waits_for=events.made[5].number)
    second = events.add(names[-1], EventKind.OPERATION, "index_select", 1, "run.py:6 in step")
    return report(
        kind=RaceKind.READ_AFTER_WRITE,
        problem="the last stream reads what the first writes",
        memory="tensor 3 int64[9]",
        rows="all rows",
        first=access(first, "writes", "all rows"),
        second=access(second, "reads", "all rows"),
        missing="the last stream does not wait for the first",
        suggestion="let it wait",
        lanes=(HOST, *names),
        events=events,
    )


MARKS = "marks int64[3, 2]"
TOKENS = "relay: token int64[4]"


def launched() -> RaceReport:
    """Operations that say what launched them, on two of six lanes; the copies and the host have no event at all."""
    kind, engine = EventKind, "/srv/engine/my_engine.py"
    events = Events(95)

    def work(lane: str, name: str, line: int, **more: Any) -> Event:
        return events.add(lane, kind.OPERATION, name, 1, f"{engine}:{line} in step", **more)

    ready = events.add("schedule", kind.FENCE, "fence 123", 1, f"{engine}:100 in step")
    events.add("forward", kind.WAIT, "wait for fence 123", 1, f"{engine}:101 in step", waits_for=ready.number)
    work("forward", "index_select (relay: gather token)", 102, reads=[TOKENS], writes=["upload 34 uint8[256]"])
    first = work("forward", "index_select (attend)", 104, reads=[f"{MARKS} rows 0, 1"])
    events.add("forward", kind.COPY_TO_HOST, "copy to host", 1, f"{engine}:1105 in step", reads=[TOKENS])
    events.add("forward", kind.FENCE, "fence 124", 1, f"{engine}:106 in step")
    events.add("audit", kind.FENCE, "fence 125", 1, f"{engine}:107 in step")
    work("schedule", "scaled_dot_product_attention", 108)
    second = work("schedule", "index_fill_ (marks: clear)", 110, writes=[f"{MARKS} row 1"])
    return report(
        kind=RaceKind.WRITE_AFTER_READ,
        problem=f"nothing orders {second.name} on 'schedule' after {first.name} on 'forward'",
        memory=f"{MARKS}, allocated on 'default' at {engine}:20 in make",
        rows="row 1",
        first=access(first, "reads", f"row 1 of {MARKS}"),
        second=access(second, "writes", f"row 1 of {MARKS}"),
        missing=f"stream 'schedule' never waits for {first.name} on stream 'forward'",
        suggestion=f"wait for fence 124 on stream 'schedule' before {second.name}",
        lanes=(HOST, "default", "copy 2", "schedule", "forward", "audit"),
        events=events,
    )


def many_steps(streams: int) -> RaceReport:
    """All streams work, with names as long as in `launched`; the host has no event."""
    names = [f"stream_{index}" for index in range(streams)]
    events = Events(101)
    fence = None
    for line, name in enumerate(names, 1001):
        site = f"/srv/engine/my_engine.py:{line} in step"
        if fence is not None:
            events.add(name, EventKind.WAIT, f"wait for {fence.name}", 1, site, waits_for=fence.number)
        events.add(name, EventKind.OPERATION, "index_fill_ (marks: clear)", 1, site, writes=[MARKS])
        events.add(name, EventKind.COPY_TO_DEVICE, "copy to device", 1, site, writes=["upload 34 uint8[256]"])
        fence = events.add(name, EventKind.FENCE, f"fence {events.made[-1].number + 1}", 1, site)
    works = [event for event in events.made if event.kind is EventKind.OPERATION]
    return report(
        kind=RaceKind.WRITE_AFTER_WRITE,
        problem="two streams write the same marks",
        memory=MARKS,
        rows="all rows",
        first=access(works[0], "writes", f"all rows of {MARKS}"),
        second=access(works[-1], "writes", f"all rows of {MARKS}"),
        missing="the last stream does not wait for the first",
        suggestion="let it wait",
        lanes=(HOST, *names),
        events=events,
    )


HOSTILE = "<script>alert(\"1\")</script> & 'x' \x1b[31m \udc80 \n https://example.org/a.js </style> %s"
"""A name as no engine should have it."""


def hostile() -> RaceReport:
    """A report in which every text is one that markup, a terminal or a file would stumble over."""
    events = Events(1)
    sides = []
    for lane in (HOSTILE, "b" * 90):
        event = events.add(
            lane,
            EventKind.OPERATION,
            HOSTILE + "x" * 90,
            1,
            "/very/long" * 30 + HOSTILE,
            caller=HOSTILE,
            reads=[HOSTILE],
            writes=["y" * 300],
        )
        sides.append(access(event, HOSTILE, HOSTILE))
    return report(
        kind=RaceKind.READ_AFTER_WRITE,
        problem=HOSTILE,
        memory=HOSTILE,
        rows="z" * 300,
        first=sides[0],
        second=sides[1],
        missing=HOSTILE,
        suggestion=HOSTILE + " `<b>`",
        lanes=(HOST, HOSTILE, "b" * 90),
        events=events,
    )


EVERY = {
    "overlapped engine": overlapped_engine(),
    **{kind.value: of_kind(kind) for kind in RaceKind},
    "long run": long_run(),
    "eight streams": many_lanes(8),
    "hostile": hostile(),
    "launched": launched(),
    "six streams": many_steps(6),
    "side by side": of_kind(RaceKind.FREED_IN_USE, between=0, before=0, after=0),
}
"""Name -> a report."""
