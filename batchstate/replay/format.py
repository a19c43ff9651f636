"""The file of a recording: one line of JSON, then events, compressed. Nothing in it is executed.

An event is `HEAD`, then its body: a length and so much JSON, then the bytes of its arrays. In JSON a mapping with the
key `$` is a value of `SPECIAL`: a reference to the product of an earlier event, handles as slots with generations, an
array. A call of a step that says nothing new has no body: its head says all. Events and bodies are read one at a time,
when they are asked for, and each length is compared with the bytes that are there: a file from a stranger takes as much
memory as its events have bytes, and a word for each.
"""

import json
import math
import struct
import zlib
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
from attrs.validators import deep_iterable, instance_of

from batchstate._version import __version__
from batchstate.errors import RecordingError

__all__ = [
    "HEAD", "KINDS", "SPECIAL", "Device", "Event", "Events", "Finding", "Handles", "Host", "Opaque", "Part",
    "Recording", "Ref", "load", "save",
]  # fmt: skip

VERSION = 2
MOST_BYTES, MOST_EVENTS, MOST_TEXT, MOST_HEADER = 1 << 28, 1 << 21, 1 << 20, 1 << 20
HEAD = struct.Struct("<BBIIIII")
"""Kind, number of the stream, step of the runtime, own number, number of the target, of the step whose batch is the
first argument, length of the body; 0 for a target or a batch that the body names, if any."""
KINDS = ("begin", "define", "result", "same", "landed", "open", "add", "abort", "step", "note", "hook", "left")
"""Kinds of events besides calls of the library; from 16 on an event is a call of the method of that number. The product
of a call that was left out is the `same` as another one."""
FIRST_METHOD = 16
STATE = 255
"""The stream of calls that the recorder adds: they bring an object to the state that it had when a segment began."""
DTYPES = {np.dtype(code): np.dtype(code).name for code in "?bBhHiIqQefd"}
_HEADER = {"reason": str, "rank": int, "library": str, "level": str, "dropped": int}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}

_LENGTH = struct.Struct("<I")
_LENGTH_AT = HEAD.size - _LENGTH.size
_DAMAGED = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, struct.error, zlib.error
)  # fmt: skip
_number, _word = instance_of(int), instance_of(str)
_vector = attrs.validators.and_(instance_of(np.ndarray), lambda _self, _at, value: value.ndim == 1 or _refuse("rows"))


def _refuse(words: str) -> Any:
    raise ValueError(words)


@final
@attrs.frozen
class Ref:
    """The product of the event of this number."""

    number: int = attrs.field(validator=_number)


@final
@attrs.frozen
class Part:
    """An attribute of it, or one of several products, such as the batch of a step."""

    number: int = attrs.field(validator=_number)
    name: str = attrs.field(validator=_word)


@final
@attrs.frozen(eq=False)
class Handles:
    """Slots with their generations, int64[n] each, of the pool that the event `pool` defines."""

    pool: int = attrs.field(validator=_number)
    slots: npt.NDArray[np.int64] = attrs.field(validator=_vector)
    generations: npt.NDArray[np.int64] = attrs.field(validator=_vector)


@final
@attrs.frozen
class Device:
    """A tensor of the device, whose values nobody has seen."""

    dtype: str = attrs.field(validator=_word)
    shape: list[int] = attrs.field(validator=deep_iterable(_number, instance_of(list)))


@final
@attrs.frozen(eq=False)
class Host:
    """The host side of a mirrored value."""

    contract: str = attrs.field(validator=_word)
    values: npt.NDArray[Any] = attrs.field(validator=instance_of(np.ndarray))


@final
@attrs.frozen
class Opaque:
    """An object of the engine."""


def _same() -> Any:
    return ...


SPECIAL: Mapping[str, Callable[..., Any]] = {
    "r": Ref, "p": Part, "h": Handles, "D": Device, "H": Host, "o": Opaque, "e": _same,
}  # fmt: skip
"""Letter -> the class whose attributes follow it; `a`, an array, is read with its bytes."""
_LETTERS = {kind: letter for letter, kind in SPECIAL.items()}


def tagged(value: Any) -> dict[str, list[Any]]:
    """A value of a class in `SPECIAL`, for JSON."""
    return {"$": [_LETTERS[type(value)], *(getattr(value, field.name) for field in attrs.fields(type(value)))]}


@final
@attrs.frozen
class Finding:
    """A violation or another error, and where it was found.

    Attributes:
        code, problem: of the violation; else the name and the first line of the error.
        object: kind and name of the object, without its counts.
        operation, column, row, slot: as those of `Violation`.
    """

    code: str
    problem: str = ""
    object: str | None = None
    operation: str | None = None
    column: str | None = None
    row: int | None = None
    slot: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Finding":
        """From an error."""
        words = str(getattr(error, "problem", "")) or (str(error).splitlines() or [""])[0]
        named = getattr(error, "object", None)
        places: dict[str, Any] = {name: getattr(error, name, None) for name in ("operation", "column", "row", "slot")}
        plain: dict[str, Any] = {name: value for name, value in places.items() if isinstance(value, str | int)}
        code = str(getattr(error, "code", type(error).__name__))
        if named is not None:
            named = str(named).partition(",")[0]
            named += ")" * (named.count("(") - named.count(")"))
        return cls(code, words, named, **plain)

    def repeats(self, other: "Finding | None") -> bool:
        """Whether both have code, object and row in common."""
        return other is not None and (self.code, self.object, self.row) == (other.code, other.object, other.row)

    def resembles(self, other: "Finding") -> bool:
        """Whether code, object and operation are the same, as those of a shrunk recording are."""
        return (self.code, self.object, self.operation) == (other.code, other.object, other.operation)

    def __str__(self) -> str:
        places = ("object", "operation", "column", "row", "slot")
        where = [f"{name} {getattr(self, name)}" for name in places if getattr(self, name) is not None]
        return f"{self.code}: {self.problem}" + (f" ({', '.join(where)})" if where else "")


@final
@attrs.frozen(eq=False)
class Event:
    """One event.

    Attributes:
        kind: one of `KINDS`, or `class.method`.
        stream: number of the stream that was the current one.
        step: of the runtime.
        number: of the event, by which others refer to its product.
        raw: its bytes in the file.
    """

    kind: str
    stream: int
    step: int
    number: int
    raw: memoryview = attrs.field(repr=False)

    @property
    def is_call(self) -> bool:
        """Whether it is the call of a method."""
        return "." in self.kind

    @property
    def body(self) -> Any:
        """Its value, read anew each time; of a call its target, arguments, and keyword arguments.

        Raises:
            RecordingError: it is damaged.
        """
        *_, target, batch, length = HEAD.unpack_from(self.raw)
        try:
            value: Any = _value(self.raw[HEAD.size :]) if length else None
            if not self.is_call:
                return value
            if target:
                value = [Ref(target), [Part(batch, "batch")] if batch else [], {} if value is None else value]
            target, args, kwargs = value
            if isinstance(args, list) and isinstance(kwargs, dict):
                return target, args, kwargs
            raise ValueError("a call is no target with arguments")
        except _DAMAGED as error:
            problem = f"event {self.number}, {self.kind}, is damaged: {type(error).__name__}: {str(error)[:80]}"
            raise RecordingError(problem, self.number, "copy the file again") from None

    @property
    def source(self) -> Ref | Part | Opaque:
        """The batch that a call goes on from, which takes the place of its product where the call is left out."""
        target, args, _ = self.body
        before = args[0] if self.kind == "StepPlanner.plan" and args else target
        return before if isinstance(before, Ref | Part) and before.number < self.number else Opaque()


@final
class Events(Sequence[Event]):
    """The events of a file, each made when it is asked for.

    Raises:
        ValueError: an event that ends behind the last byte, or of no kind; too many.
    """

    def __init__(self, data: bytes, methods: Sequence[str]) -> None:
        self._data, starts, at = memoryview(data), array("I"), 0
        self._kinds = dict(enumerate(KINDS)) | dict(enumerate(methods, FIRST_METHOD))
        while at < len(data) and len(starts) < MOST_EVENTS:
            if data[at] not in self._kinds:
                raise ValueError(f"an event of kind {data[at]}")
            starts.append(at)
            at += HEAD.size + _LENGTH.unpack_from(data, at + _LENGTH_AT)[0]
        if at != len(data):
            raise ValueError(f"more than {MOST_EVENTS:,} events, or one that ends behind the last byte")
        self._starts = np.frombuffer(starts, np.uint32)
        self._codes = np.frombuffer(data, np.uint8)[self._starts]

    def __len__(self) -> int:
        return len(self._starts)

    def of(self, *kinds: str, last: int = MOST_EVENTS) -> Iterator[tuple[int, Event]]:
        """The last events of these kinds, each with its place; `call` are all calls."""
        codes = [code for code, kind in self._kinds.items() if kind in kinds or ("." in kind and "call" in kinds)]
        places = np.flatnonzero(np.isin(self._codes, codes))
        return ((at, self[at]) for at in places[max(len(places) - last, 0) :].tolist())

    def __getitem__(self, index: Any) -> Any:
        start = self._starts[index]
        code, stream, step, number, *_, length = HEAD.unpack_from(self._data, start)
        raw = self._data[start : start + HEAD.size + length]
        return Event(self._kinds[code], stream, step, number, raw)


@final
@attrs.frozen(eq=False)
class Recording:
    """A file as it was read.

    Attributes:
        events: in order.
        finding: of the violation or error that it was written at, or None.
        reason: why it was written.
        rank: of the process in its group.
        library: version that wrote it.
        level: of the checks.
        dropped: events that did not fit.
        methods: that its calls are of, by their codes.
    """

    events: Events
    finding: Finding | None = None
    reason: str = ""
    rank: int = 0
    library: str = __version__
    level: str = "cheap"
    dropped: int = 0
    methods: Sequence[str] = ()

    @property
    def device(self) -> str:
        """The tool that it was made under, `race` or `sim`, by which it is replayed; `cpu` for any other device."""
        bodies = (event.body for _, event in self.events.of("define"))
        tools = (body.get("device") for body in bodies if isinstance(body, dict) and body.get("is") == "Runtime")
        tool = next(tools, None)
        return str(tool) if tool in ("race", "sim") else "cpu"

    def save(self, path: Path, calls: Collection[int]) -> None:
        """Writes a recording with these calls alone, and without those of others that they do not refer to."""
        kept, wanted = list[bytes](), set(calls)
        for event in reversed(self.events):
            if event.number not in wanted and (event.is_call or event.kind in ("result", "landed", "same", "left")):
                continue
            raw = bytes(event.raw)
            if event.kind == "same" or (event.is_call and event.number in calls):
                wanted.update(referred(event.body))
            elif event.is_call:
                wanted.update(referred(event.source))
                body = body_of(json.dumps(tagged(event.source)), [])
                raw = HEAD.pack(KINDS.index("same"), 0, event.step, event.number, 0, 0, len(body)) + body
            kept.append(raw)
        events = b"".join(reversed(kept))
        save(path, events, self.methods, finding=self.finding, reason=self.reason, level=self.level)


def referred(value: Any) -> Iterator[int]:
    """The numbers of events that a value refers to."""
    if isinstance(value, Ref | Part):
        yield value.number
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from referred(part)


def save(path: Path, events: bytes, methods: Sequence[str], *, finding: Finding | None, **header: Any) -> None:
    """Writes a file whole or not at all."""
    packed = zlib.compress(events, 1)
    line = {
        "format": "batchstate recording", "version": VERSION, "library": __version__, "methods": list(methods),
        "finding": None if finding is None else attrs.asdict(finding), **header,
        "bytes": len(events), "crc32": zlib.crc32(packed),
    }  # fmt: skip
    beside = path.with_suffix(".part")
    try:
        beside.write_bytes(json.dumps(line).encode() + b"\n" + packed)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def load(path: str | Path) -> Recording:
    """Reads a file, which may come from a stranger.

    Raises:
        RecordingError: no recording, one of another version, a damaged one, or one beyond 256 MiB or 2,097,152 events.
        OSError: it cannot be read.
    """
    path = Path(path)
    if path.stat().st_size > MOST_BYTES:
        raise _damaged(path, f"{path.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    line, _, packed = path.read_bytes().partition(b"\n")
    try:
        header = json.loads(line) if len(line) <= MOST_HEADER and line.startswith(b"{") else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != "batchstate recording":
        raise _damaged(path, "it does not begin as a recording does")
    if header.get("version") != VERSION:
        problem = f"{path}: a recording of format {str(header.get('version'))[:20]}, and this library reads {VERSION}"
        remedy = f"replay it with the library that wrote it: {str(header.get('library'))[:40]}"
        raise RecordingError(problem, header.get("version"), remedy)
    try:
        methods, finding, size = header["methods"], header["finding"], header["bytes"]
        if not isinstance(methods, list) or len(methods) > 200 or not all(isinstance(name, str) for name in methods):
            raise _damaged(path, "its methods are no list of names")
        if type(size) is not int or not 0 <= size <= MOST_BYTES or header["crc32"] != zlib.crc32(packed):
            raise _damaged(path, f"its {len(packed):,} bytes of events have another checksum than its first line says")
        unpack = zlib.decompressobj()
        events = unpack.decompress(packed, size + 1)  # never more than that, whatever the bytes say
        if len(events) != size or not unpack.eof:
            raise _damaged(path, f"{len(events):,} bytes of events or more, and its first line says {size:,}")
        if finding is not None:
            finding = Finding(**{name: _plain(value) for name, value in finding.items()})
        plain = {name: _plain(header[name], kind) for name, kind in _HEADER.items() if name in header}
        return Recording(Events(events, methods), finding, **plain, methods=methods)
    except RecordingError:
        raise
    except _DAMAGED as error:
        raise _damaged(path, f"{type(error).__name__}: {str(error)[:80]}") from None


def _damaged(path: Path, problem: str) -> RecordingError:
    remedy = "copy the file again; a recording ends with the last byte that its first line counts"
    return RecordingError(f"{path}: no recording, or a damaged one: {problem}", str(path), remedy)


def _plain(value: Any, kind: Any = str | int | None) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a field of its first line is a {type(value).__name__}")
    return value if not isinstance(value, str) else value[:2000]


def body_of(text: str, arrays: Sequence[bytes]) -> bytes:
    """A body: JSON, and the bytes of its arrays in their order."""
    raw = text.encode()
    return b"".join((_LENGTH.pack(len(raw)), raw, *arrays))


def _value(data: memoryview) -> Any:
    """The value of a body."""
    (length,) = _LENGTH.unpack_from(data)
    at = 4 + length
    if length > MOST_TEXT or at > len(data):
        raise ValueError(f"{length} bytes of text, and {len(data) - 4} are left")

    def special(mapping: dict[str, Any]) -> Any:
        nonlocal at
        if "$" not in mapping:
            return mapping
        letter, *fields = mapping["$"]
        if letter != "a":
            return SPECIAL[letter](*fields)
        dtype, shape = _BY_NAME[fields[0]], fields[1]
        if len(shape) > 8:
            raise ValueError(f"an array of {len(shape)} dimensions")
        size = math.prod(map(_at_least_none, shape)) * dtype.itemsize
        if size > len(data) - at:
            raise ValueError(f"an array of {shape}, and {len(data) - at} bytes are left")
        raw, at = data[at : at + size], at + size
        array = np.frombuffer(raw, np.uint8 if dtype.kind == "b" else dtype).reshape(shape)
        return array.astype(bool) if dtype.kind == "b" else array

    value = json.loads(str(data[4 : 4 + length], "utf-8"), object_hook=special)
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes behind its value")
    return value


def _at_least_none(number: Any) -> int:
    return number if type(number) is int and number >= 0 else _refuse("a length")
