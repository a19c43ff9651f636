"""What two workers say about a lease while its rows travel another way: small, and safe to repeat, delay and reorder.

Each message names the instance that it is from and the one that it is for, so that none is ever taken for one of an
earlier or later instance of the same worker. What arrives is checked field by field before anything uses it.
"""

import enum
import itertools
import json
import struct
from typing import Any, Self, final

import attrs
import numpy as np

from batchstate.errors import ArgumentError
from batchstate.transport.regions import Ints

# The tag of one write: whose it is, and how many there are. Fixed size, so that any engine carries it.

_LAYOUT = struct.Struct(">8sQIHII")
_MAGIC = b"bs1:"


@final
@attrs.frozen
class Tag:
    """Names one chunk of what one writer writes for one lease. No two writes ever have the same.

    Attributes:
        epoch: nonce of the receiving engine, 16 hex digits.
        serial: of the lease; a retry is another lease.
        attempt: which attempt of its request the lease is, from 1 on.
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
        fields = (bytes.fromhex(self.epoch), self.serial, self.attempt, self.writer, self.chunk, self.total)
        return _MAGIC + _LAYOUT.pack(*fields)

    @classmethod
    def unpacked(cls, packed: bytes) -> Self | None:
        """The tag in these bytes, or None where they are none of this library."""
        if len(packed) != len(_MAGIC) + _LAYOUT.size or not packed.startswith(_MAGIC):
            return None
        epoch, *numbers = _LAYOUT.unpack(packed[len(_MAGIC) :])
        tag = cls(epoch.hex(), *numbers)
        return tag if tag.total in (0, tag.chunk + 1) else None


MAGIC = "batchstate lease 1"
MOST_BYTES = 16 * 2**20
MOST_TOKENS = 2**26
"""Most tokens of a request."""
MOST_ATTEMPTS = 2**32 - 1
_LARGEST = 2**63 - 1
_BOUNDS = {"serial": 2**63, "attempt": MOST_ATTEMPTS + 1, "writer": 2**16, "num_tokens": MOST_TOKENS + 1}


class Kind(enum.StrEnum):
    """What is said. GRANT and ABORT go from receiver to writer; FAILED and DRAINED from writer to receiver."""

    GRANT = "grant"
    ABORT = "abort"
    FAILED = "failed"
    DRAINED = "drained"


@final
@attrs.frozen
class Notice:
    """ABORT: write no more. FAILED: not all of it will come. DRAINED: nothing of it can land any more.

    Attributes:
        kind: any but GRANT.
        sender: instance that says it.
        to: instance that it is for.
        serial: of the lease.
        reason: in words, or empty.
    """

    kind: Kind
    sender: str
    to: str
    serial: int
    reason: str = ""


@final
@attrs.frozen(eq=False)
class Grant:
    """Leave to write the KV of one request into the receiver's host tokens.

    Attributes:
        sender: instance of the receiver.
        to: instance of the writer.
        serial: of the lease.
        attempt: which attempt of the request it is.
        request: name of the request.
        writer: index of the writer among those of the lease.
        num_tokens: tokens of the request.
        runs: int64[r, 2], start and length of the host tokens that it takes, in order; the last may be longer.
    """

    sender: str
    to: str
    serial: int
    attempt: int
    request: str
    writer: int
    num_tokens: int
    runs: Ints = attrs.field(repr=False)

    @property
    def targets(self) -> Ints:
        """int64[num_tokens], the host token of each token of the request."""
        starts = self.runs[:, 0]
        ends = np.minimum(np.cumsum(self.runs[:, 1]), self.num_tokens)
        before = np.concatenate(([0], ends[:-1])) if ends.size else ends
        return np.repeat(starts - before, ends - before) + np.arange(self.num_tokens, dtype=np.int64)


def packed(message: Grant | Notice) -> bytes:
    """As it travels.

    Raises:
        ArgumentError: too long; more runs than a message holds.
    """
    fields: dict[str, Any] = {"is": MAGIC, "kind": Kind.GRANT} | {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in attrs.asdict(message, recurse=False).items()
    }
    data = json.dumps(fields).encode()
    if len(data) > MOST_BYTES:
        raise ArgumentError(
            f"a message of {len(data)} bytes", value=len(data), remedy="grant memory in fewer and longer runs"
        )
    return data


def unpacked(data: object) -> Grant | Notice:
    """The message in these bytes.

    Raises:
        ArgumentError: too long, truncated, not of this library, or a field that cannot be meant.
    """
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) > MOST_BYTES:
        raise _malformed(repr(data)[:60], "no bytes, or too many")
    try:
        fields = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise _malformed(bytes(data)[:60], "it is no JSON") from error
    if not isinstance(fields, dict) or fields.pop("is", None) != MAGIC:
        raise _malformed(bytes(data)[:60], f"it does not say that it is {MAGIC!r}")
    return _grant(fields) if fields.get("kind") == Kind.GRANT else _notice(fields)


def check_runs(runs: Ints, num_tokens: int) -> None:
    """Refuses runs that do not hold a request: int64[r, 2], each of at least one token, none shared, enough in all.

    Raises:
        ArgumentError: they do not.
    """
    if runs.ndim != 2 or runs.shape[1] != 2:
        raise ArgumentError(f"runs of shape {runs.shape}", value=runs.shape, remedy="pass start and length of each run")
    pairs = runs.tolist()
    wrong = [pair for pair in pairs if pair[0] < 1 or pair[1] < 1 or pair[0] > _LARGEST - pair[1]]
    pairs.sort()
    shared = [pair for before, pair in itertools.pairwise(pairs) if before[0] + before[1] > pair[0]]
    if wrong or shared or sum(length for _, length in pairs) < num_tokens:
        raise ArgumentError(
            f"runs {(wrong or shared or pairs)[:4]} for {num_tokens} tokens",
            value=num_tokens,
            remedy="pass start and length of runs that do not overlap and hold the request; token 0 is nobody's",
        )


def _notice(fields: dict[str, Any]) -> Notice:
    _check_fields(fields, Notice)
    try:
        kind = Kind(fields["kind"])
    except ValueError as error:
        raise _malformed(fields["kind"], "unknown kind") from error
    return Notice(kind, fields["sender"], fields["to"], fields["serial"], fields["reason"])


def _grant(fields: dict[str, Any]) -> Grant:
    _check_fields(fields, Grant)
    fields.pop("kind")
    listed = fields.pop("runs")
    if not isinstance(listed, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(one) is int and 0 < one <= _LARGEST for one in pair)
        for pair in listed
    ):
        raise _malformed(str(listed)[:60], "runs are pairs of start and length")
    runs = np.array(listed, dtype=np.int64).reshape(-1, 2)
    check_runs(runs, fields["num_tokens"])
    return Grant(runs=runs, **fields)


def _check_fields(fields: dict[str, Any], kind: type[Grant | Notice]) -> None:
    types = {one.name: one.type for one in attrs.fields(kind)} | {"kind": str}
    if set(fields) != set(types):
        raise _malformed(sorted(map(str, fields))[:12], "fields are missing or unknown")
    for name, value in fields.items():
        if types[name] is int:
            right = type(value) is int and 0 <= value < _BOUNDS[name]
        else:
            right = name == "runs" or isinstance(value, str)
        if not right:
            raise _malformed(f"{name} = {value!r}"[:60], "a field of another type, or out of range")


def _malformed(shown: object, reason: str) -> ArgumentError:
    return ArgumentError(
        f"{shown!r} is no message about a lease: {reason}", value=shown, remedy="pass what the other side's outbox held"
    )
