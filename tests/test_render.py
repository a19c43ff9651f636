"""Pictures of a race: what the page, the text and the trace say, and that they say it of any report."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate.errors import ArgumentError
from batchstate.races.render import race_html, race_text, race_trace
from batchstate.races.render.html import sentence
from batchstate.races.render.layout import LIMIT, Gap, laid_out
from batchstate.races.render.style import DARK, LIGHT
from batchstate.races.render.text import short_label
from batchstate.races.report import EventKind, RaceKind, RaceReport
from batchstate.races.tracing.clocks import HOST
from tests.race_reports import (
    EVERY,
    Events,
    access,
    launched,
    long_run,
    many_lanes,
    many_steps,
    of_kind,
    overlapped_engine,
    report,
)

every = pytest.mark.parametrize("drawn", EVERY.values(), ids=EVERY)
VOID = {"meta", "br", "wbr"}
ON = {
    "page": ("ink", "muted", "race"),
    "surface": ("ink", "muted", "race", "order"),
    "bar": ("ink", "muted"),
    "tint": ("ink", "muted", "race"),
    "help": ("ink", "order"),
    "race": ("on-race",),
}
"""Background -> what is written on it."""


class Page(HTMLParser):
    """A page as its tags, and what stands in the rows of its table."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if "td" in self.open or "tbody" in self.open:
            self.rows[-1][-1:] = [self.rows[-1][-1] + data] if self.rows[-1] else []

    def having(self, attribute: str) -> list[str]:
        """All values of an attribute."""
        return [value for _, attrs in self.tags if (value := attrs.get(attribute)) is not None]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2 between two colours."""

    def luminance(colour: str) -> float:
        parts = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@every
def test_page_is_whole_and_needs_nothing(drawn: RaceReport) -> None:
    """Every tag is closed, every reference is to the page itself, and nothing is fetched or run."""
    page = race_html(drawn)
    parsed = Page(page)
    assert not parsed.open
    ids = parsed.having("id")
    assert len(ids) == len(set(ids))
    for attribute in ("popovertarget", "aria-labelledby"):
        assert set(parsed.having(attribute)) <= set(ids)
    assert all(link[0] == "#" and link[1:] in ids for link in parsed.having("href"))
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in parsed.tags}
    assert not parsed.having("src")
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    style = page[page.index("<style>") : page.index("</style>")]
    assert not re.search(r"url\(|@import|//", style)
    assert "default-src 'none'" in page


@every
def test_page_says_the_report_in_words(drawn: RaceReport) -> None:
    """What went wrong, both accesses, the missing edge and the suggestion stand on the page as text."""
    words = " ".join(" ".join(Page(race_html(drawn)).words).split()).replace(" ", "")
    said = RaceReport.from_dict(json.loads(json.dumps(drawn.as_dict())))
    for part in (said.memory, said.rows, said.missing[1:], said.suggestion[1:], said.problem[1:]):
        assert plain_words(part) in words
    for side in (said.first, said.second):
        for part in (side.operation, side.does, side.rows, side.site, side.caller or "", f"step {side.step}"):
            assert plain_words(part) in words


def plain_words(text: str) -> str:
    """A text as it stands on the page, without blanks, so that possible line breaks do not matter."""
    return "".join(text.replace("`", "").split()).replace("\x1b", "\\x1b").replace("\udc80", "\\udc80")


def test_page_has_headings_landmarks_and_names() -> None:
    """A reader who does not see the page has a language, landmarks, headings in order, and names for all regions."""
    parsed = Page(race_html(overlapped_engine()))
    tags = [tag for tag, _ in parsed.tags]
    assert dict(parsed.tags)["html"]["lang"] == "en"
    assert "width=device-width, initial-scale=1" in parsed.having("content")
    assert [tags.count(tag) for tag in ("header", "main", "footer", "h1", "table", "caption", "title")] == [1] * 7
    headings = [tag for tag in tags if tag in ("h1", "h2", "h3")]
    assert headings[0] == "h1"
    assert set(headings[1:6]) == {"h2"}
    for _, attributes in parsed.tags:
        if attributes.get("role") == "region":
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]
    assert all(attributes["scope"] in ("col", "row") for tag, attributes in parsed.tags if tag == "th")


@every
def test_table_lists_all_events(drawn: RaceReport) -> None:
    """The table has a row for every event, in program order, with what the picture shows and what it leaves out."""
    head, *rows = Page(race_html(drawn)).rows
    assert len(head) == 7
    assert len(rows) == len(drawn.events)
    for row, event in zip(rows, drawn.events, strict=True):
        assert row[0].split()[0] == f"#{event.number}"
        assert row[1] == str(event.step)
        assert plain_words(row[2]) == plain_words(event.lane)
        assert row[3] == event.kind
        assert plain_words(event.name) in plain_words(row[4])
        assert all(plain_words(memory) in plain_words(row[5]) for memory in (*event.reads, *event.writes))
        assert ("waits for" in row[5]) == (event.kind is EventKind.WAIT)
        assert plain_words(event.site) in plain_words(row[6])


@every
def test_picture_has_a_bar_for_every_event_it_shows(drawn: RaceReport) -> None:
    """Each event that is not left out is a button that opens its details; the two accesses are marked."""
    parsed = Page(race_html(drawn))
    shown = [event.number for event in laid_out(drawn).rows if not isinstance(event, Gap)]
    bars = [attributes for tag, attributes in parsed.tags if tag == "button" and "bar" in (attributes["class"] or "")]
    assert [bar["popovertarget"] for bar in bars] == [f"d{number}" for number in shown]
    marked = [bar["id"] for bar in bars if "race" in (bar["class"] or "")]
    assert marked == [f"b{drawn.first.event}", f"b{drawn.second.event}"]
    missing = [attributes for _, attributes in parsed.tags if "missing" in (attributes.get("class") or "").split()]
    assert [edge["data-edge"] for edge in missing] == [f"{drawn.first.event} {drawn.second.event}"]


def test_long_run_is_cut_to_what_matters() -> None:
    """A picture of a long run keeps both accesses, what is near, and fences of waits, and says what is left out."""
    drawn = long_run()
    layout = laid_out(drawn)
    shown = [event.number for event in layout.rows if not isinstance(event, Gap)]
    assert len(shown) <= LIMIT
    assert len(shown) + layout.left_out == len(drawn.events)
    assert sum(row.count for row in layout.rows if isinstance(row, Gap)) == layout.left_out
    assert {1, drawn.first.event, drawn.first.event + 1, drawn.second.event - 1, drawn.second.event} <= set(shown)
    page = race_html(drawn)
    assert f"Left out: {layout.left_out} of {len(drawn.events)} events" in page
    assert f"{layout.left_out} in all" in race_text(drawn)


@pytest.mark.parametrize(("scheme", "colours"), [("light", LIGHT), ("dark", DARK)])
def test_colours_have_contrast(scheme: str, colours: dict[str, str]) -> None:
    """Every text has 4.5 to 1 against what it stands on (WCAG AA), and every line 3 to 1, in both schemes."""
    assert scheme in race_html(overlapped_engine())
    for background, inks in ON.items():
        for ink in inks:
            assert contrast(colours[background], colours[ink]) >= 4.5, (background, ink)
    for line in ("race", "order"):
        assert contrast(colours["surface"], colours[line]) >= 3


def test_sheet_has_the_colours_of_both_schemes() -> None:
    """The colours that have contrast are those of the page."""
    page = race_html(overlapped_engine())
    light, dark = page.split("@media (prefers-color-scheme:dark)", 1)
    for colours, part in ((LIGHT, light), (DARK, dark)):
        assert all(f"--{name}:{value};" in part for name, value in colours.items())
    assert set(LIGHT) == set(DARK)
    rules = re.sub(r"--[\w-]+:#[0-9a-f]{6};", "", page[page.index("<style>") : page.index("</style>")])
    assert re.findall(r"#[0-9a-f]{3,8}\b", rules) == ["#0005"]  # a shadow; all else goes by name
    assert set(re.findall(r"var\(--([\w-]+)\)", rules)) <= {*LIGHT, *re.findall(r"--([\w-]+):", page)}


@every
@pytest.mark.parametrize("ascii", [False, True])
def test_text_keeps_its_width(drawn: RaceReport, ascii: bool) -> None:
    """No line is longer than the width; with `ascii` nothing else is in it; both accesses and the gap between are."""
    for width in (40, 44, 60, 80, 100, 160):
        text = race_text(drawn, width, ascii=ascii)
        assert max(map(len, text.splitlines())) <= width
        assert text.replace("\n", "").isprintable()
        assert text.isascii() or not ascii
        missing = "x missing" if ascii else "✗ missing"
        for wanted in ("[1]", "[2]", missing, "[1] first", "[2] second", "missing  ", "remedy  "):
            assert wanted in text, width
        text.encode("utf-8")


def test_text_of_a_small_race() -> None:
    """Lanes are columns, time runs down, an order that exists is drawn through, and the missing one is dashed."""
    drawn = of_kind(RaceKind.STAGING_REFILLED, between=1, before=1, after=0)
    assert race_text(drawn, 60).splitlines()[:13] == [
        "staging refilled: op_1 writes what op_0 reads",
        "",
        "          host             a                b",
        "step 1 #1 │                ◆ fence 1 ─────┐ │",
        "       #2 │                ■ mul_0        │ │",
        "       #3 │                │              └▶◇ wait 1",
        "       #4 │              ┌╌┼╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌[1] op_0 reads",
        "       #5 │              ╎ ■ mul_0          │",
        "          ✗ missing edge ╎ │                │",
        "       #6 [2] op_1 ◀╌╌╌╌╌┘ │                │",
        "",
        "◆ fence, ◇ wait; ──▶ order, ╌╌▶ missing order",
        "",
    ]


def test_text_names_what_launched_an_operation() -> None:
    """Lanes without an event are only named; names in the others are shortened to what tells them apart."""
    assert race_text(launched(), 80).splitlines()[3:17] == [
        "            schedule                forward                audit",
        "step 1  #95 ◆ fence 123 ──────────┐ │                      │",
        "        #96 │                     └▶◇ wait for fence 123   │",
        "        #97 │                       ■ index_select         │",
        "        #98 │                     ┌╌[1] index…ct (attend)  │",
        "        #99 │                     ╎ ■ D→H copy to host     │",
        "       #100 │                     ╎ ◆ fence 124            │",
        "       #101 │                     ╎ │                      ◆ fence 125",
        "       #102 ■ scaled_dot_p…ention ╎ │                      │",
        "            ✗ missing edge        ╎ │                      │",
        "       #103 [2] (marks: clear) ◀╌╌┘ │                      │",
        "",
        "◆ fence, ◇ wait; ──▶ order, ╌╌▶ missing order",
        "no events here on: host, default, copy 2",
    ]


@pytest.mark.parametrize("streams", [2, 3, 4, 5, 6])
def test_text_never_cuts_the_number_of_a_fence(streams: int) -> None:
    """However narrow the lanes, every fence and every wait has its whole number."""
    drawn = many_steps(streams)
    marks = {EventKind.FENCE: "◆", EventKind.WAIT: "◇"}
    numbers = [(marks[event.kind], event.name.split()[-1]) for event in drawn.events if event.kind in marks]
    for width in (*range(40, 101), 140):
        text = race_text(drawn, width).split("kind ")[0]
        for mark, number in numbers:
            assert re.search(rf"{mark} (wait for fence |wait |fence )?{number}\b", text), (number, text)


@pytest.mark.parametrize(
    ("kind", "name", "shown"),
    [
        (EventKind.WAIT, "wait for fence 12", {17: "wait for fence 12", 16: "wait 12", 7: "wait 12", 6: "12", 2: "12"}),
        (EventKind.WAIT, "fence 12", {14: "wait: fence 12", 13: "wait 12", 4: "12"}),
        (EventKind.WAIT, "wait for the_last_forward", {24: "wait the_last_forward", 16: "the_last_forward"}),
        (EventKind.FENCE, "fence 1234", {10: "fence 1234", 9: "1234"}),
        (EventKind.FENCE, "the_last_forward", {10: "the_la…ard"}),
        (EventKind.COPY_TO_HOST, "copy to host", {12: "copy to host", 11: "copy", 4: "copy"}),
        (EventKind.COPY_TO_HOST, "prefetch_tokens", {11: "prefetc…ens"}),
        (EventKind.OPERATION, "scaled_dot_product_attention", {16: "scaled_dot…ntion", 10: "scaled…ion"}),
        (
            EventKind.OPERATION,
            "index_fill_ (marks: clear)",
            {26: "index_fill_ (marks: clear)", 20: "ind…_ (marks: clear)", 19: "(marks: clear)", 13: "index_fill_"},
        ),
        (EventKind.OPERATION, "mul (write KV)", {13: "(write KV)", 9: "mul", 2: "m…"}),
        (EventKind.OPERATION, "scatter_ (req_to_token: write)", {19: "scatter_ (req_t…te)"}),
    ],
)
def test_labels_are_shortened_where_it_hurts_least(kind: EventKind, name: str, shown: dict[int, str]) -> None:
    """A fence keeps its number, an operation what launched it; other names keep both ends."""
    event = Events(1).add("a", kind, name, 1, "run.py:1")
    for room, wanted in shown.items():
        assert short_label(event, room) == wanted
    assert all(len(short_label(event, room)) <= room for room in range(1, 40))


def test_lanes_without_events_are_left_out_in_words() -> None:
    """No picture has a lane on which nothing is seen, and both say which; the trace has them all."""
    drawn = launched()
    layout = laid_out(drawn)
    assert layout.lanes == ("schedule", "forward", "audit")
    assert layout.idle == (HOST, "default", "copy 2")
    lanes = [attributes for _, attributes in Page(race_html(drawn)).tags if attributes.get("class") == "lane"]
    assert len(lanes) == 3
    assert "No events here on: host, default, copy 2." in race_html(drawn)
    for width in (40, 80):
        assert "no events here on: host, default, copy 2" in race_text(drawn, width)
    everywhere = attrs.evolve(many_steps(3), lanes=many_steps(3).lanes[1:])
    assert "no events here" not in (race_html(everywhere) + race_text(everywhere)).lower()


def test_page_sets_the_operations_of_its_sentences_as_code() -> None:
    """In the headline and the other sentences the ends of an operation's name can be seen."""
    page = race_html(launched())
    write, read = "<code>index_fill_ (marks: clear)</code>", "<code>index_select (attend)</code>"
    assert f"<h1>Nothing orders {write} on &#x27;schedule&#x27; after {read} on &#x27;forward&#x27;</h1>" in page
    assert f"never waits for {read} on stream" in page
    assert f"before {write}</p>" in page
    assert sentence("add adds to `add_` and an address", "add") == (
        "<code>add</code> adds to <code>add_</code> and an address"
    )


def test_text_without_room_for_lanes_is_a_list() -> None:
    """Where lanes would have a few characters each, every event has a line, with its lane."""
    text = race_text(many_lanes(8), 80)
    assert "  #98 [1] index_copy_ writes all rows on stream_0\n" in text
    assert "missing edge, from [1] to [2]" in text
    assert "#102 ■ add_ on stream_1\n" in text
    text = race_text(many_steps(6), 80)
    assert "  #121 [2] index_fill_ (marks: clear) writes all rows of marks int6… on stream_5\n" in text


def test_text_refuses_a_width_for_nothing() -> None:
    """A width in which nothing can be read is an error."""
    with pytest.raises(ArgumentError, match="39 characters are too few"):
        race_text(overlapped_engine(), 39)


@every
def test_trace_has_the_shape_of_the_format(drawn: RaceReport) -> None:
    """A thread for each lane, a complete event for each event, and a flow for each edge, which lies within its ends."""
    trace = json.loads(json.dumps(race_trace(drawn)))
    events: list[dict[str, Any]] = trace["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(threads) == len(drawn.lanes)
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert sorted(order, key=order.__getitem__) == list(threads)
    assert threads[1] == HOST
    bars = [event for event in events if event["ph"] == "X"]
    assert [bar["args"]["event"] for bar in bars] == [event.number for event in drawn.events]
    assert [bar["ts"] for bar in bars] == sorted({bar["ts"] for bar in bars})
    marked = [bar for bar in bars if bar["cat"] == "race"]
    assert [bar["args"]["event"] for bar in marked] == [drawn.first.event, drawn.second.event]
    assert {bar["cname"] for bar in marked} == {"terrible"}
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    waits = [event for event in drawn.events if event.waits_for is not None]
    assert len(starts) == len(ends) == len(waits) + 1
    for number, start in starts.items():
        end = ends[number]
        assert (start["cat"], start["name"], end["bp"]) == (end["cat"], end["name"], "e")
        for point in (start, end):
            around = [bar for bar in bars if bar["tid"] == point["tid"] and 0 < point["ts"] - bar["ts"] < bar["dur"]]
            assert len(around) == 1
    assert [flow["name"] for flow in starts.values() if flow["cat"] == "race"] == ["missing edge"]


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "events missing": lambda values: values.update(events=values["events"][:3]),
    "a lane that is not there": lambda values: values["events"][0].update(lane="nobody"),
    "an event twice": lambda values: values["events"].insert(0, values["events"][0]),
    "a number that is text": lambda values: values["events"][2].update(number="3"),
    "a text that is a list": lambda values: values.update(problem=["a", "b"]),
    "a wait for a later event": lambda values: values["events"][1].update(waits_for=9),
    "accesses turned round": lambda values: values.update(first=values["second"], second=values["first"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("draw", [race_html, race_text, race_trace])
def test_damaged_report_is_refused(damage: str, draw: Any) -> None:
    """A report that does not hang together is an error that says what is wrong, whatever draws it."""
    values = json.loads(json.dumps(of_kind(RaceKind.WRITE_AFTER_READ).as_dict()))
    DAMAGE[damage](values)
    with pytest.raises(ArgumentError, match="a damaged race report"):
        draw(RaceReport.from_dict(values))


def test_wait_for_an_old_fence_says_so() -> None:
    """A wait whose fence is too old to be in the report is drawn without an arrow, and says why."""
    drawn = of_kind(RaceKind.WRITE_AFTER_WRITE)
    drawn = attrs.evolve(drawn, events=drawn.events[1:])
    assert "waits for a fence older than this report" in race_html(drawn)
    assert len(laid_out(drawn).routes) == 1
    assert len([event for event in race_trace(drawn)["traceEvents"] if event["ph"] == "s"]) == 1


def test_access_too_old_to_be_kept_is_drawn_all_the_same() -> None:
    """Where the event of the first access is older than all in the report, a bar stands for it, above all others."""
    drawn = of_kind(RaceKind.WRITE_AFTER_WRITE)
    drawn = attrs.evolve(drawn, events=[event for event in drawn.events if event.number > drawn.first.event])
    page = Page(race_html(drawn))
    assert len(page.rows) == len(drawn.events) + 2
    assert page.rows[1][0] == f"#{drawn.first.event} first"
    assert "missing edge" in race_text(drawn)
    bars = [event for event in race_trace(drawn)["traceEvents"] if event["ph"] == "X"]
    assert [bar["args"]["event"] for bar in bars if bar["cat"] == "race"] == [drawn.first.event, drawn.second.event]


@st.composite
def runs(draw: st.DrawFn) -> RaceReport:
    """Any run: events on any lanes, waits for any earlier fence, and any two of them as the accesses."""
    lanes = [HOST, *"abcd"[: draw(st.integers(1, 4))]]
    events = Events(draw(st.sampled_from([1, 99_990])))
    fences: list[int] = []
    for lane, kind in draw(st.lists(st.tuples(st.sampled_from(lanes), st.sampled_from(EventKind)), min_size=2)):
        waits = draw(st.sampled_from(fences)) if fences and kind is EventKind.WAIT else None
        made = events.add(lane, kind, f"{kind} name", 1, "run.py:1", waits_for=waits)
        fences += [made.number] if kind is EventKind.FENCE else []
    second = draw(st.integers(1, len(events.made) - 1))
    first = draw(st.integers(0, second - 1))
    return report(
        kind=RaceKind.WRITE_AFTER_WRITE,
        problem="p",
        memory="m",
        rows="r",
        first=access(events.made[first], "writes", "r"),
        second=access(events.made[second], "writes", "r"),
        missing="m",
        suggestion="s",
        lanes=lanes,
        events=events,
    )


@settings(deadline=None, max_examples=60)
@given(runs(), st.integers(2, 30))
def test_any_run_can_be_drawn(drawn: RaceReport, limit: int) -> None:
    """Whatever ran, the pictures are whole, and no two arrows lie on each other in a gutter."""
    layout = laid_out(drawn, limit)
    assert len(layout.rows) - sum(isinstance(row, Gap) for row in layout.rows) <= limit
    assert [route.missing for route in layout.routes].count(True) == 1
    for index, one in enumerate(layout.routes):
        assert one.top < one.bottom
        assert one.track < layout.tracks[one.gutter]
        for other in layout.routes[:index]:
            apart = one.bottom < other.top or other.bottom < one.top
            assert apart or (one.gutter, one.track) != (other.gutter, other.track)
    assert not Page(race_html(drawn)).open
    for width in (40, 100):
        assert max(map(len, race_text(drawn, width).splitlines())) <= width
    race_trace(drawn)
