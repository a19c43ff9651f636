"""The file of a recording: one line of JSON, then events of plain numbers, compressed. Nothing in it is executed.

An event is `<BBIIi`: its kind, the number of its stream, the step of the runtime, its own number, and the length of its
body; the body is one value. A value is a letter and what belongs to it: numbers, text, raw arrays of integers or floats
with their shape, lists and mappings of values, references to what an earlier event made, handles as slots with
generations. Each length is compared with the bytes that are left before anything is made of it, so that a file from a
stranger takes no more memory than a few times its size.
"""

import json
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate._version import __version__
from batchstate.errors import RecordingError

__all__ = [
    "DTYPES", "HEAD", "KINDS", "Device", "Event", "Finding", "Handles", "Host", "Opaque", "Part", "Recording", "Ref",
    "load", "save",
]  # fmt: skip

VERSION = 1
MOST_BYTES, MOST_DEPTH, MOST_HEADER = 1 << 30, 12, 1 << 20
HEAD = struct.Struct("<BBIII")
KINDS = ("begin", "define", "result", "raised", "landed", "open", "add", "abort", "step", "note")
"""Kinds of events that are no calls; from 16 on an event is a call of the method of that number."""
FIRST_METHOD = 16
DTYPES = tuple(map(np.dtype, ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")))

Ints = npt.NDArray[np.int64]


@final
@attrs.frozen
class Ref:
    """What the event of this number made."""

    number: int


@final
@attrs.frozen
class Part:
    """An attribute of what the event of this number made, such as the batch of a step."""

    number: int
    name: str


@final
@attrs.frozen(eq=False)
class Handles:
    """Slots with their generations, int64[n] each, of the pool that the event `pool` defines."""

    pool: int
    slots: Ints
    generations: Ints


@final
@attrs.frozen
class Device:
    """A tensor of the device, whose values nobody has seen."""

    dtype: str
    shape: tuple[int, ...]


@final
@attrs.frozen(eq=False)
class Host:
    """The host side of a mirrored value."""

    contract: str
    values: npt.NDArray[Any]


@final
@attrs.frozen
class Opaque:
    """An object of the engine."""


@final
@attrs.frozen
class Finding:
    """What was found: the code of a violation, or the name of another error, and where.

    Attributes:
        code, problem: of the violation or error.
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
        code = str(getattr(error, "code", type(error).__name__))
        words = str(getattr(error, "problem", "")) or (str(error).splitlines() or [""])[0]
        places: dict[str, Any] = {name: getattr(error, name, None) for name in ("operation", "column", "row", "slot")}
        named = getattr(error, "object", None)
        plain: dict[str, Any] = {
            name: value for name, value in places.items() if value is None or isinstance(value, str | int)
        }
        return cls(code, words, None if named is None else str(named).partition(",")[0], **plain)

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
        number: of the event; what it made is referred to by it.
        body: its value; of a call a tuple: target, arguments, keyword arguments.
        raw: its bytes in the file.
    """

    kind: str
    stream: int
    step: int
    number: int
    body: Any
    raw: memoryview = attrs.field(default=memoryview(b""), repr=False)

    @property
    def is_call(self) -> bool:
        """Whether it is the call of a method."""
        return "." in self.kind


@final
@attrs.frozen(eq=False)
class Recording:
    """A file as it was read.

    Attributes:
        events: in order.
        finding: what was found when it was written; None where nobody found anything.
        reason: why it was written.
        rank: of the process in its group.
        library: version that wrote it.
        level: of the checks.
        dropped: events that did not fit.
        methods: that its calls are of, by their codes.
    """

    events: Sequence[Event]
    finding: Finding | None = None
    reason: str = ""
    rank: int = 0
    library: str = __version__
    level: str = "cheap"
    dropped: int = 0
    methods: Sequence[str] = ()

    def save(self, path: Path, calls: Collection[int]) -> None:
        """Writes a recording with these calls alone."""
        kept = [event.raw for event in self.events if event.number in calls or not event.is_call]
        save(path, b"".join(kept), self.methods, finding=self.finding, reason=self.reason, level=self.level)


def save(path: Path, events: bytes, methods: Sequence[str], **header: Any) -> None:
    """Writes a file whole or not at all."""
    finding = header.pop("finding", None)
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
        RecordingError: no recording, one of another version, a damaged one, or one beyond 1 GiB.
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
        methods, finding = header["methods"], header["finding"]
        if not isinstance(methods, list) or len(methods) > 200 or not all(isinstance(name, str) for name in methods):
            raise _damaged(path, "its methods are no list of names")
        size = header["bytes"]
        if type(size) is not int or not 0 <= size <= MOST_BYTES or header["crc32"] != zlib.crc32(packed):
            raise _damaged(path, f"its {len(packed):,} bytes of events have another checksum than its first line says")
        unpack = zlib.decompressobj()
        events = unpack.decompress(packed, size + 1)  # never more than that, whatever the bytes say
        if len(events) != size or not unpack.eof:
            raise _damaged(path, f"{len(events):,} bytes of events or more, and its first line says {size:,}")
        if finding is not None:
            finding = Finding(**{name: _plain(value) for name, value in finding.items()})
        names = "reason", "rank", "library", "level", "dropped"
        known = {name: _plain(header[name]) for name in names if name in header}
        return Recording(list(_events(memoryview(events), methods)), finding, **known, methods=methods)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        struct.error,
        OverflowError,
        zlib.error,
    ) as error:
        if isinstance(error, RecordingError):
            raise
        raise _damaged(path, f"{type(error).__name__}: {str(error)[:80]}") from None


def _damaged(path: Path, problem: str) -> RecordingError:
    remedy = "copy the file again; a recording ends with the last byte that its first line counts"
    return RecordingError(f"{path}: no recording, or a damaged one: {problem}", str(path), remedy)


def _plain(value: Any) -> Any:
    if value is not None and not isinstance(value, str | int):
        raise ValueError(f"a field of its first line is a {type(value).__name__}")
    return value if not isinstance(value, str) else value[:2000]


def _events(data: memoryview, methods: Sequence[str]) -> Iterator[Event]:
    at, end = 0, len(data)
    while at < end:
        code, stream, step, number, length = HEAD.unpack_from(data, at)
        at += HEAD.size
        if length > end - at:
            raise ValueError(f"an event of {length} bytes, and {end - at} are left")
        kind = methods[code - FIRST_METHOD] if code >= FIRST_METHOD else KINDS[code]
        body, stop = _value(data[at : at + length], 0, 0)
        if stop != length:
            raise ValueError(f"an event has {length - stop} bytes behind its value")
        if code >= FIRST_METHOD and not (isinstance(body, tuple) and len(body) == 3):
            raise ValueError("a call is no target with arguments")
        yield Event(kind, stream, step, number, body, data[at - HEAD.size : at + length])
        at += length


_ONE = {b"N": None, b"T": True, b"F": False, b"e": ..., b"o": Opaque()}
_COUNT, _INT, _FLOAT = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")


def _value(data: memoryview, at: int, depth: int) -> tuple[Any, int]:
    """The value at a place of a body, and the place behind it."""
    letter = bytes(data[at : at + 1])
    at += 1
    if letter in _ONE:
        return _ONE[letter], at
    if depth > MOST_DEPTH:
        raise ValueError("values lie too deep in each other")
    read = _READERS.get(letter)
    if read is None:
        raise ValueError(f"no value begins with {letter!r}")
    return read(data, at, depth + 1)


def _count(data: memoryview, at: int, least: int) -> tuple[int, int]:
    """A number of things of `least` bytes each, which have to be there."""
    (number,) = _COUNT.unpack_from(data, at)
    if number * least > len(data) - at - 4:
        raise ValueError(f"{number} values, and {len(data) - at - 4} bytes are left")
    return number, at + 4


def _text(data: memoryview, at: int, depth: int) -> tuple[str, int]:
    length, at = _count(data, at, 1)
    return str(data[at : at + length], "utf-8"), at + length


def _list(data: memoryview, at: int, depth: int) -> tuple[list[Any], int]:
    number, at = _count(data, at, 1)
    values = []
    for _ in range(number):
        value, at = _value(data, at, depth)
        values.append(value)
    return values, at


def _tuple(data: memoryview, at: int, depth: int) -> tuple[tuple[Any, ...], int]:
    values, at = _list(data, at, depth)
    return tuple(values), at


def _dict(data: memoryview, at: int, depth: int) -> tuple[dict[str, Any], int]:
    number, at = _count(data, at, 5)
    values = {}
    for _ in range(number):
        name, at = _text(data, at, depth)
        values[name], at = _value(data, at, depth)
    return values, at


def _array(data: memoryview, at: int, depth: int) -> tuple[npt.NDArray[Any], int]:
    code, ndim = data[at], data[at + 1]
    dtype = DTYPES[code]
    if ndim > 8:
        raise ValueError(f"an array of {ndim} dimensions")
    shape = struct.unpack_from(f"<{ndim}I", data, at + 2)
    at += 2 + 4 * ndim
    size = 1
    for length in shape:
        size *= length
    stop = at + size * dtype.itemsize
    if stop > len(data):
        raise ValueError(f"an array of {size} values, and {len(data) - at} bytes are left")
    if dtype.kind == "b" and any(byte > 1 for byte in data[at:stop]):
        raise ValueError("a mask of other bytes than 0 and 1")
    return np.frombuffer(data[at:stop], dtype).reshape(shape), stop


def _handles(data: memoryview, at: int, depth: int) -> tuple[Handles, int]:
    (pool,) = _COUNT.unpack_from(data, at)
    number, at = _count(data, at + 4, 16)
    slots, generations = np.frombuffer(data[at : at + 16 * number], np.int64).reshape(2, number)
    return Handles(pool, slots, generations), at + 16 * number


def _ref(data: memoryview, at: int, depth: int) -> tuple[Ref, int]:
    return Ref(*_COUNT.unpack_from(data, at)), at + 4


def _part(data: memoryview, at: int, depth: int) -> tuple[Part, int]:
    name, stop = _text(data, at + 4, depth)
    return Part(_COUNT.unpack_from(data, at)[0], name), stop


def _device(data: memoryview, at: int, depth: int) -> tuple[Device, int]:
    dtype, at = _text(data, at, depth)
    shape, at = _value(data, at, depth)
    if not isinstance(shape, tuple) or not all(type(length) is int for length in shape):
        raise ValueError("a tensor without a shape")
    return Device(dtype, shape), at


def _malformed(problem: str) -> ValueError:
    return ValueError(problem)


def _host(data: memoryview, at: int, depth: int) -> tuple[Host, int]:
    contract, at = _text(data, at, depth)
    values, at = _value(data, at, depth)
    if not isinstance(values, np.ndarray):
        raise _malformed("a mirrored value without an array")
    return Host(contract, values), at


_READERS: dict[bytes, Callable[[memoryview, int, int], tuple[Any, int]]] = {
    b"i": lambda data, at, depth: (*_INT.unpack_from(data, at), at + 8),
    b"f": lambda data, at, depth: (*_FLOAT.unpack_from(data, at), at + 8),
    b"s": _text, b"l": _list, b"t": _tuple, b"d": _dict, b"a": _array, b"h": _handles, b"r": _ref, b"p": _part,
    b"D": _device, b"H": _host,
}  # fmt: skip
