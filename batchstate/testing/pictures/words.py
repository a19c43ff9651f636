"""What all pictures of a race say in the same words."""

import re

from batchstate.testing.race.report import HOST, Event, EventKind

_SITE = re.compile(r"(?:.*[/\\])?(?P<file>[^/\\]+)(?P<line>:\d+)(?: in .*)?")
_LAUNCHED = re.compile(r"(?P<operation>.+?) (?P<launch>\(.+\))")
_WAIT = re.compile(r"wait:? (?P<less>(?:for )?(?:fence )?)(?P<fence>.+)")
_COPY = re.compile(r"copy (?P<less>to (?:device|host))")

TAGS = {
    EventKind.COPY_TO_DEVICE: "H→D",
    EventKind.COPY_TO_HOST: "D→H",
    EventKind.ALLOCATION: "alloc",
    EventKind.FREE: "free",
}
"""Said before the name of an event whose name alone does not tell its kind."""


def plain(text: str) -> str:
    """A text of user code on one line, with whatever cannot be printed spelt out.

    Names and paths may hold escape sequences that would run in a terminal, and halves of characters that no file takes.
    """
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)


def label(event: Event) -> str:
    """What stands on an event's bar."""
    name = plain(event.name)
    if event.kind is EventKind.WAIT and not name.startswith("wait"):
        return f"wait: {name}"
    return name


def where(lane: str) -> str:
    """A lane in a sentence."""
    return "the host" if lane == HOST else f"stream '{plain(lane)}'"


def short_site(site: str) -> tuple[str, str]:
    """The file without its folders, and the line with a colon before it; no line where the site has another form."""
    found = _SITE.fullmatch(plain(site))
    return (found["file"], found["line"]) if found else (plain(site), "")


def launched(event: Event) -> tuple[str, str]:
    """An event's label as an operation and, in parentheses, what launched it: `("index_fill_", "(marks: clear)")`.

    The latter is empty where the label says nothing of the kind.
    """
    found = None if event.kind in (EventKind.FENCE, EventKind.WAIT) else _LAUNCHED.fullmatch(label(event))
    return (found["operation"], found["launch"]) if found else (label(event), "")


def dispensable(event: Event) -> tuple[str, str, str]:
    """An event's label in three parts, of which the mark or the tag beside it tells the middle one as well.

    It is empty where all of the label is needed: `("wait", "for fence", "12")`, `("copy", "to device", "")`.
    """
    name = label(event)
    waits = _WAIT.fullmatch(name) if event.kind is EventKind.WAIT else None
    if waits is not None:
        return "wait", waits["less"].strip(), waits["fence"]
    copies = _COPY.fullmatch(name) if event.kind in TAGS else None
    return ("copy", copies["less"], "") if copies is not None else (name, "", "")


def nothing_on(lanes: tuple[str, ...]) -> str:
    """Which lanes a picture leaves out, or nothing where it has them all."""
    return f"no events here on: {', '.join(map(plain, lanes))}" if lanes else ""


def awaited(event: Event, known: frozenset[int]) -> str:
    """What a wait waits for, or nothing for other kinds.

    Args:
        event: that may be a wait.
        known: numbers of the events in the report.
    """
    if event.kind is not EventKind.WAIT:
        return ""
    if event.waits_for is None or event.waits_for not in known:
        return "a fence older than this report"
    return f"#{event.waits_for}"
