"""What two workers tell each other before the first write, and what makes both of them refuse.

A `Description` crosses as bytes over a channel that the engine's user trusts: it holds the secret of the engine, and is
believed. Its MAC, under that secret, shows that it is whole. `check_peers` is symmetric: whatever one side refuses, the
other refuses too, so that no side is left waiting for a peer that has gone.
"""

import base64
from typing import Any, Self, final

import attrs

from batchstate._guidance import check_kind, shows_signature
from batchstate.errors import ArgumentError, DtypeError, HandshakeError
from batchstate.transport.layout import KVLayout, Layouts, check_fit
from batchstate.transport.wire import MOST_BYTES, Endpoint, array, binary, check_mac, parsed, record, sealed, text

MAGIC = "batchstate worker"
VERSION = 3
MOST_LAYOUTS = 64


def _layouts(value: object) -> Layouts:
    layouts = (value,) if isinstance(value, KVLayout) else tuple(value) if isinstance(value, list | tuple) else ()
    if not 0 < len(layouts) <= MOST_LAYOUTS or not all(isinstance(one, KVLayout) for one in layouts):
        raise ArgumentError(
            f"expected layouts, got {value!r:.80}", value=value, remedy="pass one KVLayout or a list of them"
        )
    if len({(one.rank, one.degree) for one in layouts}) > 1:
        raise ArgumentError(
            f"layouts of ranks {[(one.rank, one.degree) for one in layouts]}",
            value=[one.rank for one in layouts],
            remedy="give each layout of a worker the rank and the degree of that worker",
        )
    names = [layer for one in layouts for layer in one.layers]
    if len(set(names)) < len(names) or not any(one.stage for one in layouts):
        raise ArgumentError(
            f"layouts of the layers {names[:12]}",
            value=names,
            remedy="name each buffer once in all layouts together, at least one of them in the worker's stage",
        )
    return layouts


def _is_bytes(_: object, __: object, endpoint: bytes) -> None:
    check_kind(endpoint, bytes, "Description: endpoint", "pass what `Engine.endpoint()` returned")


@shows_signature
@final
@attrs.frozen
class Description:
    """One worker, as it describes itself to a peer.

    Attributes:
        worker: its name, for reports.
        instance: nonce of its engine; another one after each start.
        layouts: of its KV: one, or several for buffers that differ in bytes of a row, dtype, heads or kind of row,
            in the same order on both sides.
        endpoint: what `Engine.endpoint` returned.
    """

    worker: str
    instance: str
    layouts: Layouts = attrs.field(converter=_layouts)
    endpoint: bytes = attrs.field(repr=False, validator=_is_bytes)

    @property
    def layout(self) -> KVLayout:
        """The first, whose rank, degree and page size are those of the worker."""
        return self.layouts[0]

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
            "layouts": [one.as_dict() for one in self.layouts],
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
            layouts = _layouts([KVLayout.from_dict(one) for one in fields["layouts"]])
        except (ArgumentError, DtypeError) as error:
            raise HandshakeError(
                f"worker {fields['worker']!r} describes an impossible layout: {error.problem:.200}",
                value=error.value,
                remedy=f"on that worker: {error.remedy}",
            ) from error
        check_mac(value, Endpoint.from_bytes(fields["endpoint"]).secret)
        return cls(fields["worker"], fields["instance"], layouts, fields["endpoint"])


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
    MAGIC,
    version=_version,
    worker=text(".+"),
    instance=text(".+"),
    layouts=array(_as_it_is, MOST_LAYOUTS),
    endpoint=binary,
    mac=text(),
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
    if len(ours.layouts) != len(theirs.layouts):
        raise HandshakeError(
            f"layouts: {len(ours.layouts)} here, {len(theirs.layouts)} there",
            value=(len(ours.layouts), len(theirs.layouts)),
            remedy="describe the same kinds of buffers on both workers, in the same order",
        )
    for here, there in zip(ours.layouts, theirs.layouts, strict=True):
        check_fit(here, there)


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
