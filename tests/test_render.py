"""The page of a race: its words, its picture and its table, of any report."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from unittest import mock

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate.errors import ArgumentError
from batchstate.races.render import layout as layouts
from batchstate.races.render import race_html
from batchstate.races.render.html import sentence
from batchstate.races.render.layout import LIMIT, Gap, laid_out
from batchstate.races.render.style import DARK, LIGHT
from batchstate.races.report import EventKind, RaceKind, RaceReport
from batchstate.races.tracing.clocks import HOST
from tests.race_reports import (
    EVERY,
    Events,
    access,
    launched,
    long_run,
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
    assert f"Left out: {layout.left_out} of {len(drawn.events)} events" in race_html(drawn)


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


def test_lanes_without_events_are_left_out_in_words() -> None:
    """The picture has no lane without an event, and says which."""
    drawn = launched()
    layout = laid_out(drawn)
    assert layout.lanes == ("schedule", "forward", "audit")
    assert layout.idle == (HOST, "default", "copy 2")
    lanes = [attributes for _, attributes in Page(race_html(drawn)).tags if attributes.get("class") == "lane"]
    assert len(lanes) == 3
    assert "No events here on: host, default, copy 2." in race_html(drawn)
    everywhere = attrs.evolve(many_steps(3), lanes=many_steps(3).lanes[1:])
    assert "No events here" not in race_html(everywhere)


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
def test_damaged_report_is_refused(damage: str) -> None:
    """A report that does not hang together is an error that says what is wrong."""
    values = json.loads(json.dumps(of_kind(RaceKind.WRITE_AFTER_READ).as_dict()))
    DAMAGE[damage](values)
    with pytest.raises(ArgumentError, match="a damaged race report"):
        race_html(RaceReport.from_dict(values))


def test_wait_for_an_old_fence_says_so() -> None:
    """A wait whose fence is too old to be in the report is drawn without an arrow, and says why."""
    drawn = of_kind(RaceKind.WRITE_AFTER_WRITE)
    drawn = attrs.evolve(drawn, events=drawn.events[1:])
    assert "waits for a fence older than this report" in race_html(drawn)
    assert len(laid_out(drawn).routes) == 1


def test_access_too_old_to_be_kept_is_drawn_all_the_same() -> None:
    """Where the event of the first access is older than all in the report, a bar stands for it, above all others."""
    drawn = of_kind(RaceKind.WRITE_AFTER_WRITE)
    drawn = attrs.evolve(drawn, events=[event for event in drawn.events if event.number > drawn.first.event])
    page = Page(race_html(drawn))
    assert len(page.rows) == len(drawn.events) + 2
    assert page.rows[1][0] == f"#{drawn.first.event} first"


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
    """Whatever ran, the picture is whole, and no two arrows lie on each other in a gutter."""
    with mock.patch.object(layouts, "LIMIT", limit):
        layout = laid_out(drawn)
    assert len(layout.rows) - sum(isinstance(row, Gap) for row in layout.rows) <= limit
    assert [route.missing for route in layout.routes].count(True) == 1
    for index, one in enumerate(layout.routes):
        assert one.top < one.bottom
        assert one.track < layout.tracks[one.gutter]
        for other in layout.routes[:index]:
            apart = one.bottom < other.top or other.bottom < one.top
            assert apart or (one.gutter, one.track) != (other.gutter, other.track)
    assert not Page(race_html(drawn)).open
