"""A recording in words, and as one page for a browser: requests as lanes, with the slots and pages that they have.

Two rings of ranks that should have done the same are compared here too.
"""

import contextlib
import functools
import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, final

import numpy as np

from batchstate.errors import RecordingError
from batchstate.kv.pages import PagePool
from batchstate.pools import SlotPool
from batchstate.replay.format import Device, Event, Events, Handles, Host, Opaque, Part, Recording, Ref
from batchstate.replay.replayer import Replayer, replay

__all__ = ["Hands", "differ", "page", "text"]

_SHOWN, _LANES, _BARS = 8, 512, 256
_CHANGING = "SlotPool.", "PagePool.", "StepPlanner.", "PlannedStep.rollback"


def text(recording: Recording, *, last: int = 100, words: Mapping[int, str] = {}) -> str:
    """The last operations, one a line with the words for its event, and what was found behind them."""
    events, names = recording.events, _names(recording.events)
    operations = list(events.of("call", "add", "abort", "step", "hook", last=last))
    numbers = {event.number for _, event in operations if event.is_call}
    said = dict.fromkeys(numbers, "")
    for _, event in events.of("result", "left"):
        if event.number in said:
            words_for = "; slots {} leave" if event.kind == "left" else " -> {}"
            said[event.number] += words_for.format(_words(event.body, names))
    lines = [
        f"{len(events):,} events of rank {recording.rank}, written for {recording.reason} by batchstate "
        f"{recording.library} at {recording.level!r}, {recording.dropped:,} dropped; the last {len(operations)}:"
    ]
    for at, event in operations:
        outcome = said.get(event.number, "") + words.get(at, "")
        lines.append(f"  step {event.step if event.is_call else '-':<6} {_call(event, names)}{outcome}")
    lines.append(f"found: {recording.finding or 'nothing'}")
    return _printable("\n".join(lines))


def _printable(words: str) -> str:
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in words)


def _names(events: Events) -> dict[int, str]:
    """Names of objects, and of products that are the same as others."""
    names = dict[int, str]()
    for _, event in events.of("define", "same"):
        body = event.body
        named = isinstance(body, Mapping)
        names[event.number] = str(body.get("name") or body.get("is"))[:60] if named else _words(body, names)
    return names


def _call(event: Event, names: Mapping[int, str], shown: int | None = _SHOWN) -> str:
    body, said = event.body, functools.partial(_words, names=names, shown=shown)
    if event.is_call:
        target, args, kwargs = body
        name = f"{names.get(event.number, f'#{event.number}')} {said(target)}.{event.kind.partition('.')[2]}"
    elif event.kind == "hook" and isinstance(body, Mapping):
        args, kwargs = body.get("args"), body.get("kwargs")
        name = said(body.get("call"))[1:-1]
    else:
        return f"{event.kind} {said(body)}"
    parts = [said(value) for value in (args if isinstance(args, list) else ())]
    parts += [f"{name}={said(value)}" for name, value in (kwargs if isinstance(kwargs, dict) else {}).items()]
    return f"{name}({', '.join(parts)})"


def _words(value: Any, names: Mapping[int, str], shown: int | None = _SHOWN) -> str:
    if isinstance(value, Ref | Part):
        name, part = names.get(value.number, f"#{value.number}"), getattr(value, "name", "")[:20]
        return name if not part or name.endswith(f".{part}") else f"{name}.{part}"
    if isinstance(value, Handles):
        return f"slots {_numbers(value.slots, shown)}"
    if isinstance(value, Host):
        return f"{value.contract[:12]} {_numbers(value.values, shown)}"
    if isinstance(value, Device):
        return f"{value.dtype[:12]}{list(value.shape)} of the device"
    if isinstance(value, np.ndarray):
        return _numbers(value, shown)
    if isinstance(value, Mapping):
        parts = [f"{name}: {_words(part, names, shown)}" for name, part in list(value.items())[:shown]]
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list | tuple):
        parts = [_words(part, names, shown) for part in value[:shown]] + ["..."] * (len(value) > len(value[:shown]))
        return f"[{', '.join(parts)}]"
    return "object" if isinstance(value, Opaque) else "..." if value is ... else repr(value)[: shown and 60]


def _numbers(array: Any, shown: int | None = _SHOWN) -> str:
    flat = array.reshape(-1)
    words = ", ".join(map(str, flat[:shown].tolist()))
    return f"[{words}{f', ... {flat.size}' if flat.size > flat[:shown].size else ''}]"


@final
class Hands:
    """Where slots and pages change hands, by a replay. A file has no pages: these have the numbers of the replay.

    Attributes:
        lanes: pool, and slot or page -> bars: first and last event, and the slot. A shared page is shown once.
        words: event -> what was taken and given back.
        violated: the event of the call that brings the finding of the recording, or None.
    """

    def __init__(self, recording: Recording, progress: Callable[[int, int], None] | None = None) -> None:
        self.lanes: dict[tuple[str, int], list[list[int]]] = {}
        self.words: dict[int, str] = {}
        self.violated: int | None = None
        self._events, self._held, self._at = recording.events, dict[int, Any](), 0
        with contextlib.suppress(RecordingError):  # the lanes end there
            again = replay(recording, level="cheap", progress=progress, seen=self._look)
            if again.repeated and again.finding is not None:
                self.violated = self._at
                self.words[self._at] = f"{self.words.get(self._at, '')}; {again.finding.code} here"

    def _look(self, at: int, replayer: Replayer) -> None:
        """Behind a call: compares who has what with who had it."""
        self._at = at
        pools = replayer.objects.items() if self._events[at].kind.startswith(_CHANGING) else ()
        for number, pool in pools:
            if isinstance(pool, SlotPool | PagePool):
                slots = pool if isinstance(pool, SlotPool) else pool.slots
                names = replayer.names.get(slots.pool_id, np.arange(slots.capacity))[:, None]
                items, live = pool.page_table if isinstance(pool, PagePool) else names, slots.live_slots()
                now = np.zeros(pool.num_pages + 1 if isinstance(pool, PagePool) else pool.capacity, np.int64)
                now[items[live]] = names[live]
                now[0] = 0
                self._compare(at, pool.name, self._held.get(number, np.zeros_like(now)), now)
                self._held[number] = now

    def _compare(self, at: int, name: str, before: Any, now: Any) -> None:
        for item in (changed := np.flatnonzero(before != now)).tolist():
            bars = self.lanes.pop((name, item), [])
            if before[item]:
                bars[-1][1] = at
            if now[item]:
                bars.append([at, len(self._events), int(now[item])])
            self.lanes[name, item] = bars  # the last that changed is the last
        for side, verb in ((now, "taken"), (before, "given back")):
            if (items := changed[side[changed] != 0]).size:
                self.words[at] = f"{self.words.get(at, '')}; {name} {_numbers(items)} {verb}"


def requests(recording: Recording) -> dict[int, list[int]]:
    """Request of a recorded adapter -> the events from its arrival to its last token, or to the end of its client."""
    spans: dict[int, list[int]] = {}
    for at, event in recording.events.of("add", "abort", "note"):
        body = event.body
        if event.kind == "add" and isinstance(body, list) and body:
            spans[_number(body[0])] = [at, at]
        numbers = [body] if event.kind == "abort" else _array(body.get("numbers")) if isinstance(body, Mapping) else ()
        for number in map(_number, numbers):
            if number in spans:
                spans[number][1] = at
    return dict(sorted(spans.items()))


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | np.integer) else -1


def _array(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) and value.ndim == 1 else np.zeros(0, np.int64)


_STYLE = """body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;
color:#1b1f24;background:#fff}
h1{font-size:1.3rem}pre{background:#f4f6f8;padding:1rem;overflow:auto;font-size:12px}
.lane{display:flex;height:1.3rem;align-items:center}.lane b{width:6rem;font-weight:400}
.bar{position:relative;flex:1;height:100%;background:#f4f6f8}
.bar i{position:absolute;top:2px;bottom:2px;border-radius:2px;min-width:2px;border-left:1px solid #fff8}
.bad{color:#a4262c}.bar u{position:absolute;top:0;bottom:0;border-left:2px solid #a4262c}
@media(prefers-color-scheme:dark){body{color:#dfe3e8;background:#16191d}pre,.bar{background:#22272e}}"""


def page(recording: Recording, *, last: int = 100, progress: Callable[[int, int], None] | None = None) -> str:
    """One page of HTML, without a script: requests, slots and pages as lanes, and the operations."""
    hands, end = Hands(recording, progress), len(recording.events)
    finding = "nothing was found" if recording.finding is None else str(recording.finding)
    mark = "" if hands.violated is None else f"<u style='left:{100 * hands.violated / end:.2f}%'></u>"
    lanes = [(f"request {number}", [[*span, number]]) for number, span in requests(recording).items()][-_LANES:]
    for pool in dict.fromkeys(name for name, _ in hands.lanes):
        latest = [(item, bars) for (name, item), bars in hands.lanes.items() if name == pool][-_LANES:]
        lanes += [(f"{pool} {item}", bars) for item, bars in sorted(latest)]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(finding[:80])}</title><style>{_STYLE}</style>"
        f"<h1 class=bad>{html.escape(_printable(finding))}</h1>"
        f"<p>{end:,} events from left to right. A bar of a slot is a request that had it; a bar of a page has the "
        "colour of its slot. Pages have the numbers of a replay. Calls are numbered as below; a red line is at that of "
        "the violation.</p>"
        f"{''.join(_lane(name, bars, recording.events, mark) for name, bars in lanes)}"
        f"<h2>Operations</h2><pre>{html.escape(text(recording, last=last, words=hands.words))}</pre></html>"
    )


def _lane(name: str, bars: Sequence[Sequence[int]], events: Events, mark: str) -> str:
    name, end = html.escape(_printable(name)), len(events)
    titles = [
        f"#{number} to {'the end' if stop == end else f'#{events[stop].number}'}: {holder}" if number else name
        for number, stop, holder in ((events[start].number, *rest) for start, *rest in bars[-_BARS:])
    ]  # events of requests have no number
    drawn = "".join(
        f"<i style='left:{100 * start / end:.2f}%;width:{100 * (stop - start) / end:.2f}%;"
        f"background:hsl({47 * holder % 360} 45% 50%)' title='{title}'></i>"
        for title, (start, stop, holder) in zip(titles, bars[-_BARS:], strict=True)
    )
    return f"<div class=lane><b>{name}</b><div class=bar>{drawn}{mark}</div></div>"


def differ(recordings: Sequence[Recording]) -> str | None:
    """The first operation that differs between ranks, in words; None where all did the same.

    Compared are calls with their arguments, in order; values of the device and objects of the engine are not.
    """
    for number, calls in enumerate(zip_longest(*map(_calls, recordings), fillvalue=(None, None)), 1):
        if len({exact for _, exact in calls}) > 1:
            words = [f"operation {number} differs:"]
            for recording, (event, _) in zip(recordings, calls, strict=True):
                said = "nothing more" if event is None else _call(event, _names(recording.events)).partition(" ")[2]
                words.append(f"  rank {recording.rank}, step {'-' if event is None else event.step}: {said}")
            return _printable("\n".join(words))
    return None


def _calls(recording: Recording) -> Iterator[tuple[Event, Any]]:
    """Each call, with all its words; events have their order for a number."""
    numbered = enumerate(recording.events.of("call", "define", "same"))
    names = {event.number: f"#{order}" for order, (_, event) in numbered}
    for _, event in recording.events.of("call"):
        yield event, _call(event, names, shown=None)
