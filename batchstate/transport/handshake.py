"""What two workers tell each other before the first write, and what makes both of them refuse.

A `Description` crosses as bytes over a channel that the engine's user trusts: it holds the secret of the engine, and is
believed. Its MAC, under that secret, shows that it is whole. `check_peers` is symmetric: whatever one side refuses, the
other refuses too, so that no side is left waiting for a peer that has gone.
"""

import base64
from typing import Any, Self, final

import attrs

from batchstate.errors import ArgumentError, DtypeError, HandshakeError
from batchstate.transport.layout import KVLayout, check_fit
from batchstate.transport.wire import MOST_BYTES, Endpoint, binary, check_mac, parsed, record, sealed, text

MAGIC = "batchstate worker"
VERSION = 2


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
            HandshakeError: too large to be read, or without an endpoint.
        """
        fields = {
            "is": MAGIC,
            "version": VERSION,
            "worker": self.worker,
            "instance": self.instance,
            "layout": self.layout.as_dict(),
            "endpoint": base64.b64encode(self.endpoint).decode(),
        }
        data = sealed(fields, Endpoint.from_bytes(self.endpoint).secret)
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
                f"worker {fields['worker']!r} describes an impossible layout: {error.problem:.200}",
                value=error.value,
                remedy=f"on that worker: {error.remedy}",
            ) from error
        check_mac(value, Endpoint.from_bytes(fields["endpoint"]).secret)
        return cls(fields["worker"], fields["instance"], layout, fields["endpoint"])


def _version(value: Any) -> Any:
    if type(value) is not int or value != VERSION:
        raise HandshakeError(
            f"version is {VERSION} here, {value!r:.60} there",
            value=(VERSION, value),
            remedy="run the same version of batchstate on both workers",
        )
    return value


def _as_it_is(value: Any) -> Any:
    """Checked where it is used."""
    return value


_SCHEMA = record(
    MAGIC, version=_version, worker=text(".+"), instance=text(".+"), layout=_as_it_is, endpoint=binary, mac=text()
)


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
        endpoint = Endpoint.from_bytes(description.endpoint)
    except HandshakeError as error:
        raise HandshakeError(
            f"{description.worker}: {error.problem}", value=error.value, remedy=error.remedy
        ) from error
    if endpoint.instance != description.instance:
        raise HandshakeError(
            f"{description.worker} says that its instance is {description.instance}, its endpoint is of "
            f"{endpoint.instance}",
            value=(description.instance, endpoint.instance),
            remedy="after a restart, describe the worker anew: instance and endpoint of one engine",
        )
    return endpoint.engine
