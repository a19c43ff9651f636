"""What all pictures of a race say in the same words."""

import re

from batchstate.testing.race.report import HOST, Event, EventKind

_SITE = re.compile(r"(?:.*[/\\])?(?P<file>[^/\\]+:\d+)(?: in .*)?")

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


def short_site(site: str) -> str:
    """The file and the line, without folders and function, where the site has this form."""
    found = _SITE.fullmatch(plain(site))
    return found["file"] if found else plain(site)


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
