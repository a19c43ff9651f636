"""Bytes between workers: the schemas of all of them, messages about leases, and the tags of writes.

Text travels as JSON. A schema says the type, range and length of each field, and is checked before anything uses the
field. Endpoints, and the descriptions around them, have a MAC under the secret of their engine: one that was damaged,
or put together from several, reaches no engine. Messages are small, and safe to repeat, delay and reorder: each names
the instance that it is from and the one that it is for, so that none is ever taken for one of an earlier or later
instance of the same worker.
"""

import base64
import enum
import json
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, Self, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate._arrays import arange_per_row
from batchstate.errors import ArgumentError, BatchStateError, HandshakeError, ShapeError
from batchstate.transport.connection import mac_of

Ints = npt.NDArray[np.int64]

MOST_BYTES = 16 * 2**20
"""Most bytes of a description, an endpoint or a message."""
MOST_TOKENS = 2**26
"""Most tokens of a request."""
MOST_ATTEMPTS = 2**32 - 1
MOST_TEXT = 4096
"""Most characters of a string."""
LARGEST = 2**63 - 1

# Schemas

Check = Callable[[Any], Any]
"""Returns a value of a message as it is used, or raises ValueError."""


def unexpected(value: object, expected: str) -> ValueError:
    """The error of a value that is not what it has to be."""
    return ValueError(f"expected {expected}, got {value!r:.60}")


def number(least: int = 0, most: int = LARGEST) -> Check:
    """An integer from `least` to `most`."""

    def check(value: Any) -> int:
        if type(value) is int and least <= value <= most:
            return value
        raise unexpected(value, f"an integer of {least} to {most}")

    return check


def text(pattern: str = ".*") -> Check:
    """A string of at most `MOST_TEXT` characters that has a pattern."""
    whole = re.compile(pattern, re.DOTALL)

    def check(value: Any) -> str:
        if isinstance(value, str) and len(value) <= MOST_TEXT and whole.fullmatch(value):
            value.encode()  # half a surrogate cannot be printed
            return value
        raise unexpected(value, f"a string like {pattern!r}")

    return check


def binary(value: Any) -> bytes:
    """Bytes as base64."""
    if not isinstance(value, str):
        raise unexpected(value, "a string of base64")
    return base64.b64decode(value, validate=True)


def flag(value: Any) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    raise unexpected(value, "true or false")


def array(of: Check, most: int = LARGEST) -> Check:
    """A list of at most `most` elements."""

    def check(value: Any) -> list[Any]:
        if isinstance(value, list) and len(value) <= most:
            return [of(element) for element in value]
        raise unexpected(value, f"a list of at most {most} elements")

    return check


def row(*columns: Check) -> Check:
    """A list of exactly these elements."""

    def check(value: Any) -> tuple[Any, ...]:
        if isinstance(value, list) and len(value) == len(columns):
            return tuple([column(element) for column, element in zip(columns, value, strict=True)])
        raise unexpected(value, f"a list of {len(columns)} elements")

    return check


def record(magic: str | None = None, **fields: Check) -> Check:
    """An object of exactly these fields; and one more, `is`, where a `magic` says what it is."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or (magic is not None and value.get("is") != magic):
            raise unexpected(value, f"an object that says that it is {magic!r}" if magic else "an object")
        checked = {}
        for name, field in fields.items():
            if name not in value:
                raise unexpected(sorted(value), f"a field {name!r}")
            try:
                checked[name] = field(value[name])
            except ValueError as error:
                if isinstance(error, BatchStateError):
                    raise
                raise ValueError(f"{name}: {error}") from error
        if len(value) > len(fields) + (magic is not None):
            raise unexpected(sorted(value), f"no fields but {', '.join(fields)}")
        return checked

    return check


def parsed(data: bytes, schema: Check, noun: str, error: type[ArgumentError | HandshakeError], remedy: str) -> Any:
    """The value in JSON bytes from another process.

    Args:
        data: the bytes.
        schema: checks the value.
        noun: names it in the error.
        error: raised where the data is too long, not JSON, or does not have the schema. Errors of this library that
            the schema raises go through.
        remedy: of that error.
    """
    try:
        data = bytes(data)  # zmq and shared memory give a memoryview
        if len(data) > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES} bytes, got {len(data)}")
        return schema(json.loads(data.decode(), object_pairs_hook=_distinct, parse_constant=_no_number))
    except (ValueError, RecursionError) as problem:
        if isinstance(problem, BatchStateError):
            raise
        raise error(f"expected {noun}, got {data[:60]!r:.80}: {problem!s:.200}", data[:60], remedy) from problem


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"a field is there twice: {sorted(name for name, _ in pairs)!r:.60}")
    return fields


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Fields with a MAC


def sealed(fields: Mapping[str, Any], secret: bytes) -> bytes:
    """Fields with their MAC, as JSON."""
    return json.dumps({**fields, "mac": _mac(fields, secret)}).encode()


def check_mac(fields: Mapping[str, Any], secret: bytes) -> None:
    """HandshakeError: the MAC of these fields is not that of this secret."""
    rest = {name: value for name, value in fields.items() if name != "mac"}
    if not invariants.peer_unknown.holds(_mac(rest, secret).encode(), fields["mac"].encode()):
        remedy = "pass what the other side's `introduce()` or `endpoint()` returned, as it is"
        raise HandshakeError("the MAC does not fit: damaged on its way, or not made by the engine itself", None, remedy)


def _mac(fields: Mapping[str, Any], secret: bytes) -> str:
    return mac_of(secret, b"batchstate 1 fields", json.dumps(fields, sort_keys=True).encode()).hex()


# Tags: fixed size, so that any engine carries them

_LAYOUT = struct.Struct(">4s8sQIHII")
_TAG = b"bs1:"


@final
@attrs.frozen
class Tag:
    """Names one chunk of one writer's rows for one lease. No two writes ever have the same.

    Attributes:
        epoch: nonce of the receiving engine, 16 hex digits.
        serial: of the lease; a retry is another lease.
        attempt: number of the attempt of its request, from 1 on.
        writer: index of the writer among those of the lease.
        chunk: 0, 1, ... for each writer.
        total: how many chunks the writer writes, on the last of them; 0 on the others.
    """

    epoch: str
    serial: int
    attempt: int
    writer: int
    chunk: int
    total: int = 0

    def packed(self) -> bytes:
        """As an engine takes it, 34 bytes."""
        epoch = bytes.fromhex(self.epoch)
        return _LAYOUT.pack(_TAG, epoch, self.serial, self.attempt, self.writer, self.chunk, self.total)

    @classmethod
    def unpacked(cls, packed: bytes) -> Self | None:
        """The tag in these bytes, or None where they are not a tag of this library."""
        if len(packed) != _LAYOUT.size or not packed.startswith(_TAG):
            return None
        _, epoch, *numbers = _LAYOUT.unpack(packed)
        tag = cls(epoch.hex(), *numbers)
        return tag if tag.total in (0, tag.chunk + 1) else None


# Messages about leases

HOST, DEVICE = "host_location", "location"
"""Index spaces of memory that is granted: that of a host pool, and of device pages."""
MAGIC = "batchstate lease 4"


class Kind(enum.StrEnum):
    """GRANT and ABORT go from receiver to writer; FAILED and DRAINED from writer to receiver."""

    GRANT = "grant"
    ABORT = "abort"
    FAILED = "failed"
    DRAINED = "drained"


@final
@attrs.frozen
class Notice:
    """ABORT: write no more. FAILED: not all of it will come. DRAINED: nothing of it can land any more.

    From instance `sender` to instance `to`, about lease `serial`, with a reason in words.
    """

    kind: Kind
    sender: str
    to: str
    serial: int
    reason: str = ""


@final
@attrs.frozen(eq=False)
class Grant:
    """Leave to write KV of one request into the receiver's memory: tokens `first` to `first + num_tokens - 1`.

    From the receiver's instance `sender` to the writer's instance `to`; `serial`, `attempt`, `writer` as in a `Tag`.

    Attributes:
        holds: the receiver's memory that the ranges index: HOST or DEVICE.
        ranges: int64[r, 2], start and length of the locations that the tokens take, in order; the last may be longer.
        state_row: row that its states take in buffers with one row per request; 0 for none.
    """

    sender: str
    to: str
    serial: int
    attempt: int
    request: str
    writer: int
    first: int
    num_tokens: int
    holds: str
    ranges: Ints = attrs.field(repr=False)
    state_row: int = 0
    kind: Kind = attrs.field(default=Kind.GRANT, repr=False)

    @property
    def targets(self) -> Ints:
        """int64[num_tokens], the location of each token."""
        ends = np.minimum(self.ranges[:, 1].cumsum(), self.num_tokens)
        lengths = ends.copy()
        lengths[1:] -= ends[:-1]
        return arange_per_row(self.ranges[:, 0], lengths)


_ADDRESSED: dict[str, Check] = {"kind": Kind, "sender": text(), "to": text(), "serial": number()}
_NOTICE = record(MAGIC, **_ADDRESSED, reason=text())
_GRANT = record(
    MAGIC,
    **_ADDRESSED,
    attempt=number(0, MOST_ATTEMPTS),
    request=text(),
    writer=number(0, 2**16 - 1),
    first=number(0, MOST_TOKENS),
    holds=text(f"{HOST}|{DEVICE}"),
    num_tokens=number(0, MOST_TOKENS),
    ranges=array(row(number(1), number(1))),
    state_row=number(),
)


def _message(value: Any) -> Grant | Notice:
    if not isinstance(value, dict) or value.get("kind") != Kind.GRANT:
        return Notice(**_NOTICE(value))
    fields = _GRANT(value)
    fields["ranges"] = np.array(fields["ranges"], dtype=np.int64).reshape(-1, 2)
    check_ranges(fields["ranges"], fields["num_tokens"])
    return Grant(**fields)


def packed(message: Grant | Notice) -> bytes:
    """The bytes of a message. ArgumentError: too long; more ranges than a message holds."""
    fields = {"is": MAGIC} | attrs.asdict(message, recurse=False)
    if isinstance(message, Notice):
        fields["reason"] = message.reason[:MOST_TEXT]
    data = json.dumps(fields, default=np.ndarray.tolist).encode()
    if len(data) > MOST_BYTES:
        problem = f"expected a message of at most {MOST_BYTES} bytes, got {len(data)}"
        raise ArgumentError(problem, len(data), "grant memory in fewer and longer ranges")
    return data


def unpacked(data: bytes) -> Grant | Notice:
    """The message in these bytes. ArgumentError: too long, truncated, foreign, or a field out of its range."""
    remedy = "pass what the other side's outbox held"
    message: Grant | Notice = parsed(data, _message, "a message about a lease", ArgumentError, remedy)
    return message


def check_ranges(ranges: Ints, num_tokens: int) -> tuple[Ints, Ints]:
    """Refuses ranges that do not hold a request: int64[r, 2], each of at least one token, none shared, enough in all.

    Returns:
        where each begins and ends (exclusive), in ascending order, int64[r] each.

    Raises:
        ShapeError, ArgumentError: they do not.
    """
    if ranges.ndim != 2 or ranges.shape[1] != 2:
        problem = f"expected ranges of shape [r, 2], got {[*ranges.shape]}"
        raise ShapeError(problem, ranges.shape, "pass start and length of each range")
    starts, lengths = ranges[np.argsort(ranges[:, 0])].T.copy()  # a column in one piece: much faster below
    wrong = (starts < 1) | (lengths < 1) | (lengths > LARGEST - starts)
    ends = starts + np.where(wrong, 0, lengths)
    wrong[1:] |= starts[1:] < ends[:-1]
    if wrong.any() or int(lengths.sum()) < num_tokens:
        remedy = "pass start and length of ranges that do not overlap and hold the request; location 0 is padding"
        raise ArgumentError(f"ranges {ranges[:4].tolist()} for {num_tokens} tokens", num_tokens, remedy)
    return starts, ends
