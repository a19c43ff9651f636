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
from batchstate.transport.layout import KVLayout, check_fit
from batchstate.transport.wire import MOST_BYTES, binary, parsed, parsed_endpoint, record, text

MAGIC = "batchstate worker"
VERSION = 1


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
        if len(data) > MOST_BYTES:
            raise HandshakeError(
                f"a description of {len(data)} bytes",
                value=len(data),
                remedy=f"register fewer regions: a description has at most {MOST_BYTES} bytes",
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """A description that came from a peer.

        Raises:
            HandshakeError: too large, truncated, malformed, damaged, of another version, or with an impossible layout.
        """
        remedy = "pass what the other side's `Description.to_bytes()` returned, all of it"
        found: Self = parsed(data, cls._checked, "a description of a worker", HandshakeError, remedy)
        return found

    @classmethod
    def _checked(cls, value: Any) -> Self:
        fields = _SCHEMA(value)
        try:
            layout = KVLayout.from_dict(fields["layout"])
        except (ArgumentError, DtypeError) as error:
            raise HandshakeError(
                f"worker {fields['worker']!r} describes an impossible layout: {error.problem}",
                value=error.value,
                remedy=f"on that worker: {error.remedy}",
            ) from error
        if type(fields["sum"]) is not int or fields["sum"] != _sum(value):
            raise HandshakeError(
                f"the description of worker {fields['worker'][:40]!r} was damaged on its way: its sum does not fit",
                value=fields["worker"],
                remedy="pass what the other side's `Description.to_bytes()` returned, as it is",
            )
        return cls(fields["worker"], fields["instance"], layout, fields["endpoint"])


def _version(value: Any) -> Any:
    if type(value) is not int or value != VERSION:
        raise HandshakeError(
            f"version is {VERSION} here, {value!r} there",
            value=(VERSION, value),
            remedy="run the same version of batchstate on both workers",
        )
    return value


def _as_it_is(value: Any) -> Any:
    """Checked where it is used."""
    return value


_SCHEMA = record(
    MAGIC, version=_version, worker=text(".+"), instance=text(".+"), layout=_as_it_is, endpoint=binary, sum=_as_it_is
)


def _sum(fields: dict[str, Any]) -> int:
    """CRC-32 of all fields but itself."""
    rest = {name: value for name, value in fields.items() if name != "sum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


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
