"""A recording in words, and as one page for a browser: requests as lanes, with the slots and pages that they have.

Two rings of ranks that should have done the same are compared here too.
"""

import contextlib
import html
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from batchstate.replay.format import Device, Event, Handles, Host, Opaque, Part, Recording, Ref

__all__ = ["differ", "lanes", "page", "text"]

_SHOWN, _LANES, _BARS = 8, 512, 256
_NO_SLOTS = np.zeros(0, np.int64)
_SAID = "add", "abort", "step", "hook"


def text(recording: Recording, *, last: int = 100) -> str:
    """The last operations, one a line, and what was found behind them."""
    names = _names(recording.events)
    operations = deque((event for event in recording.events if event.is_call or event.kind in _SAID), max(last, 0))
    lines = [
        f"{len(recording.events):,} events of rank {recording.rank}, written for {recording.reason} by batchstate "
        f"{recording.library} at {recording.level!r}, {recording.dropped:,} dropped; "
        f"the last {len(operations)}:"
    ]
    numbers = {event.number for event in operations}
    said_of = (event for event in recording.events if event.kind in ("result", "raised") and event.number in numbers)
    results = {event.number: event for event in said_of}
    for event in operations:
        said = results.get(event.number) if event.is_call else None
        outcome = (
            ""
            if said is None
            else f" -> {_words(said.body, names)}"
            if said.kind == "result"
            else f" raised {said.body}"
        )
        lines.append(f"  step {event.step:<6} {_call(event, names)}{outcome}")
    lines.append(f"found: {recording.finding}" if recording.finding is not None else "found: nothing")
    return _printable("\n".join(lines))


def _printable(words: str) -> str:
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in words)


def _names(events: Iterable[Event]) -> dict[int, str]:
    defined = [event for event in events if event.kind == "define" and isinstance(event.body, Mapping)]
    return {event.number: str(event.body.get("name") or event.body.get("is"))[:60] for event in defined}


def _call(event: Event, names: Mapping[int, str]) -> str:
    body = event.body
    if event.kind == "hook" and isinstance(body, Mapping):
        values, named = body.get("args"), body.get("kwargs")
        args = [_words(value, names) for value in (values if isinstance(values, list) else ())]
        args += [f"{name}={_words(value, names)}" for name, value in (named if isinstance(named, dict) else {}).items()]
        return f"{_words(body.get('call'), names)[1:-1]}({', '.join(args)})"
    if not event.is_call:
        return f"{event.kind} {_words(body, names)}"
    target, args, kwargs = body
    parts = [_words(value, names) for value in args]
    parts += [f"{name}={_words(value, names)}" for name, value in kwargs.items()]
    return f"#{event.number} {_words(target, names)}.{event.kind.partition('.')[2]}({', '.join(parts)})"


def _words(value: Any, names: Mapping[int, str]) -> str:
    if isinstance(value, Ref):
        return names.get(value.number, f"#{value.number}")
    if isinstance(value, Part):
        return f"#{value.number}.{value.name[:20]}"
    if isinstance(value, Handles):
        return f"slots {_numbers(value.slots)}"
    if isinstance(value, Host):
        return f"{value.contract[:12]} {_numbers(value.values)}"
    if isinstance(value, Device):
        return f"{value.dtype[:12]}{list(value.shape)} of the device"
    if isinstance(value, np.ndarray):
        return _numbers(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_words(part, names)}" for name, part in list(value.items())[:_SHOWN]) + "}"
    if isinstance(value, list | tuple):
        more = ", ..." if len(value) > _SHOWN else ""
        return "[" + ", ".join(_words(part, names) for part in value[:_SHOWN]) + more + "]"
    return "object" if isinstance(value, Opaque) else "..." if value is ... else repr(value)[:60]


def _numbers(array: Any) -> str:
    flat = array.reshape(-1)
    words = ", ".join(map(str, flat[:_SHOWN].tolist()))
    return f"[{words}{f', ... {flat.size}' if flat.size > _SHOWN else ''}]"


def lanes(recording: Recording) -> dict[int, list[tuple[int, int]]]:
    """Slot -> the events at which it was taken and left, as pairs; the number of events for one that is still taken.

    Of many slots those that came or went last.
    """
    changes, shown = list(_changes(recording.events)), set[int]()
    for _, _, slots in reversed(changes):
        shown.update(slots[: max(_LANES - len(shown), 0)].tolist())
    spans: dict[int, list[tuple[int, int]]] = {slot: [] for slot in sorted(shown)}
    since: dict[int, int] = {}
    for at, taken, slots in changes:
        for slot in slots.tolist():
            if slot in since:
                spans[slot].append((since.pop(slot), at))
            if taken and slot in shown:
                since[slot] = at
    for slot, at in since.items():
        spans[slot].append((at, len(recording.events)))
    return spans


def _changes(events: Iterable[Event]) -> Iterator[tuple[int, bool, Any]]:
    """The events at which slots were taken, or left: freed, or not kept by a plan. Other batches are not followed."""
    rows = dict[int, Any]()  # of a batch that a plan may go on from
    for at, event in enumerate(events):
        if event.kind == "result" and isinstance(event.body, Handles):
            yield at, True, event.body.slots
            if event.number in rows:
                rows[event.number] = np.append(rows[event.number], event.body.slots)
        elif event.kind in ("SlotPool.free", "SlotPool.release_requests", "PagePool.release_requests"):
            yield from ((at, False, value.slots) for value in event.body[1] if isinstance(value, Handles))
        elif event.kind == "Batch.build":
            handles = [value.slots for value in event.body[2].values() if isinstance(value, Handles)]
            rows[event.number] = np.concatenate([_NO_SLOTS, *handles])
        elif event.kind == "StepPlanner.plan":
            _, args, options = event.body
            sources = [value.number for value in (*args, options.get("joining")) if isinstance(value, Ref | Part)]
            batches = [rows.pop(number, _NO_SLOTS) for number in sources]
            if "keep" in options and batches:
                stays = np.zeros(len(batches[0]), bool)
                with contextlib.suppress(IndexError, ValueError):  # of a batch that was not followed
                    stays[np.array(options["keep"])] = True
                    yield at, False, batches[0][~stays]
                batches[0] = batches[0][stays]
            rows[event.number] = np.concatenate([*batches, _NO_SLOTS])


def requests(recording: Recording) -> dict[int, list[tuple[int, int]]]:
    """Request of a recorded adapter -> the events from its arrival to its last token, or to the end of its client."""
    spans: dict[int, list[int]] = {}
    for at, event in enumerate(recording.events):
        body = event.body if event.kind in ("add", "abort", "note") else None
        if event.kind == "add" and isinstance(body, list) and body:
            spans[_number(body[0])] = [at, at]
        numbers = [body] if event.kind == "abort" else _array(body.get("numbers")) if isinstance(body, Mapping) else ()
        for number in map(_number, numbers):
            if number in spans:
                spans[number][1] = at
    return {number: [(start, stop)] for number, (start, stop) in sorted(spans.items())}


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | np.integer) else -1


def _array(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) and value.ndim == 1 else np.zeros(0, np.int64)


_STYLE = """body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;
color:#1b1f24;background:#fff}
h1{font-size:1.3rem}pre{background:#f4f6f8;padding:1rem;overflow:auto;font-size:12px}
.lane{display:flex;height:1.3rem;align-items:center}.lane b{width:6rem;font-weight:400}
.bar{position:relative;flex:1;height:100%;background:#f4f6f8}
.bar i{position:absolute;top:2px;bottom:2px;background:#3b6ea8;border-radius:2px;min-width:2px}
.bar i:nth-child(even){background:#7aa6d6}.bad{color:#a4262c}
@media(prefers-color-scheme:dark){body{color:#dfe3e8;background:#16191d}pre,.bar{background:#22272e}}"""


def page(recording: Recording, *, last: int = 100) -> str:
    """One page of HTML, without a script: slots as lanes, each bar a request that had it, and the operations."""
    events, rows = max(len(recording.events), 1), list(_rows(recording))
    finding = "nothing was found" if recording.finding is None else str(recording.finding)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(finding[:80])}</title><style>{_STYLE}</style>"
        f"<h1 class=bad>{html.escape(_printable(finding))}</h1>"
        f"<p>{events:,} events from left to right; a bar is a request that had the slot, the next one came later.</p>"
        f"{''.join(rows)}<h2>Operations</h2><pre>{html.escape(text(recording, last=last))}</pre></html>"
    )


def _rows(recording: Recording) -> Iterator[str]:
    events = max(len(recording.events), 1)
    named = [(f"request {number}", spans) for number, spans in requests(recording).items()][-_LANES:]
    for name, spans in [*named, *((f"slot {slot}", spans) for slot, spans in lanes(recording).items())]:
        bars = "".join(
            f"<i style='left:{100 * start / events:.2f}%;width:{100 * (stop - start) / events:.2f}%' "
            f"title='events {start} to {stop}'></i>"
            for start, stop in spans[-_BARS:]
        )
        yield f"<div class=lane><b>{name}</b><div class=bar>{bars}</div></div>"


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
    """Each call, with a value that compares by its content."""
    order = dict[int, int]()
    for event in recording.events:
        if event.is_call or event.kind == "define":
            order[event.number] = len(order)
        if event.is_call:
            yield event, (event.kind, _exact(event.body, order))


def _exact(value: Any, order: Mapping[int, int]) -> Any:
    """A value that compares by content; references by the order of the events that they refer to."""
    if isinstance(value, Ref | Part):
        return type(value).__name__, order.get(value.number), getattr(value, "name", None)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Handles):
        return value.slots.tobytes(), value.generations.tobytes()
    if isinstance(value, Host):
        return value.contract, _exact(value.values, order)
    if isinstance(value, Mapping):
        return tuple((name, _exact(part, order)) for name, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(_exact(part, order) for part in value)
    return repr(value)
