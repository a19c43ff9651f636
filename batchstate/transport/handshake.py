"""What two workers tell each other before the first write, and what makes both of them refuse.

A `Description` crosses as bytes over whatever channel the engine's user has. `check_peers` is symmetric: whatever one
side refuses, the other refuses too, so that no side is left waiting for a peer that has gone.
"""

import base64
import json
import zlib
from typing import Any, Self, final

import attrs

from batchstate.errors import ArgumentError, DtypeError, HandshakeError
from batchstate.transport.engines.base import parsed_endpoint
from batchstate.transport.layout import KVLayout, check_fit

MAGIC = "batchstate worker"
VERSION = 1
MOST_BYTES = 16 * 2**20
"""Most bytes of a description. Endpoints have a few hundred bytes for each region."""

_FIELDS = {"is", "version", "worker", "instance", "layout", "endpoint", "sum"}


@final
@attrs.frozen
class Description:
    """One worker, as it describes itself to a peer.

    Attributes:
        worker: its name, for reports.
        instance: nonce of its engine; another one after each start.
        layout: of its KV.
        endpoint: what `Engine.endpoint` returned.
    """

    worker: str
    instance: str
    layout: KVLayout
    endpoint: bytes = attrs.field(repr=False)

    def to_bytes(self) -> bytes:
        """What `from_bytes` reads.

        Raises:
            HandshakeError: too large to be read.
        """
        fields = {
            "is": MAGIC,
            "version": VERSION,
            "worker": self.worker,
            "instance": self.instance,
            "layout": self.layout.as_dict(),
            "endpoint": base64.b64encode(self.endpoint).decode(),
        }
        data = json.dumps(fields | {"sum": _sum(fields)}).encode()
        _check_size(data)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """A description that came from a peer.

        Raises:
            HandshakeError: too large, truncated, malformed, damaged, of another version, or a layout that cannot be.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise _malformed(repr(data)[:60], f"{type(data).__name__} instead of bytes")
        data = bytes(data)
        _check_size(data)
        fields = _parsed(data)
        try:
            layout = KVLayout.from_dict(fields["layout"])
            endpoint = base64.b64decode(fields["endpoint"], validate=True)
        except (ArgumentError, DtypeError) as error:
            raise HandshakeError(
                f"worker {fields['worker']!r} describes a layout that cannot be: {error.problem}",
                value=error.value,
                remedy=f"on that worker: {error.remedy}",
            ) from error
        except ValueError as error:
            raise _malformed(fields["endpoint"][:60], f"its endpoint is no base64 ({error})") from error
        if type(fields["sum"]) is not int or fields["sum"] != _sum(fields):
            raise HandshakeError(
                f"the description of worker {fields['worker'][:40]!r} was damaged on its way: its sum does not fit",
                value=fields["worker"],
                remedy="pass what the other side's `Description.to_bytes()` returned, as it is",
            )
        return cls(fields["worker"], fields["instance"], layout, endpoint)


def check_peers(ours: Description, theirs: Description) -> None:
    """Refuses a peer that this worker cannot exchange KV with. To be asked on both sides, before anything is written.

    Raises:
        HandshakeError: the peer is this very instance, one side's endpoint is of another instance than it says, the
            engines differ, or the layouts do not fit (`layout.check_fit`).
    """
    if ours.instance == theirs.instance:
        raise HandshakeError(
            f"instance is {ours.instance} here ({ours.worker}), {theirs.instance} there ({theirs.worker}): the same",
            value=(ours.instance, theirs.instance),
            remedy="exchange descriptions between two workers, each with an engine of its own",
        )
    engines = [_engine_of(one) for one in (ours, theirs)]
    if engines[0] != engines[1]:
        raise HandshakeError(
            f"engine is {engines[0]} here, {engines[1]} there",
            value=tuple(engines),
            remedy="open the same engine on both workers",
        )
    check_fit(ours.layout, theirs.layout)


def _engine_of(description: Description) -> str:
    """The engine's name, once the endpoint is known to be the instance's."""
    try:
        engine, instance, *_ = parsed_endpoint(description.endpoint)
    except HandshakeError as error:
        raise HandshakeError(
            f"{description.worker}: {error.problem}", value=error.value, remedy=error.remedy
        ) from error
    if instance != description.instance:
        raise HandshakeError(
            f"{description.worker} says that its instance is {description.instance}, its endpoint is of {instance}",
            value=(description.instance, instance),
            remedy="after a restart, describe the worker anew: instance and endpoint of one engine",
        )
    return engine


def _sum(fields: dict[str, Any]) -> int:
    """CRC-32 of all fields but itself."""
    rest = {name: value for name, value in fields.items() if name != "sum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _check_size(data: bytes) -> None:
    if len(data) > MOST_BYTES:
        raise HandshakeError(
            f"a description of {len(data)} bytes",
            value=len(data),
            remedy=f"register fewer regions: a description has at most {MOST_BYTES} bytes",
        )


def _parsed(data: bytes) -> dict[str, Any]:
    """The fields of a description of this version, those that are text checked to be text."""
    try:
        fields = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise _malformed(data[:60], str(error)[:100]) from error
    if not isinstance(fields, dict) or fields.get("is") != MAGIC:
        raise _malformed(data[:60], f"it does not say that it is a {MAGIC!r}")
    if type(fields.get("version")) is not int or fields["version"] != VERSION:
        raise HandshakeError(
            f"version is {VERSION} here, {fields.get('version')!r} there",
            value=(VERSION, fields.get("version")),
            remedy="run the same version of batchstate on both workers",
        )
    if set(fields) != _FIELDS:
        raise _malformed(data[:60], f"fields {sorted(set(fields) ^ _FIELDS)} are missing or unknown")
    wrong = [name for name in ("worker", "instance", "endpoint") if not isinstance(fields[name], str)]
    if wrong or not fields["worker"] or not fields["instance"]:
        raise _malformed(data[:60], f"{wrong[0] if wrong else 'worker or instance'} is no text, or empty")
    return fields


def _malformed(start: object, reason: str) -> HandshakeError:
    return HandshakeError(
        f"{start!r} is no description of a worker: {reason}",
        value=start,
        remedy="pass what the other side's `Description.to_bytes()` returned, all of it",
    )
