"""The protocol of a transfer engine, and all of it that does not depend on how bytes travel.

    engine.register(memory, name)              once, for each piece of memory
    peer = engine.connect(other's endpoint())  once, on each side that writes
    handle = engine.write(peer, copies, tag)   on the writing side: returns at once
    engine.poll(handle)                        PENDING, then DONE, FAILED or UNKNOWN for good
    engine.completions()                       on the other side: the tags whose data is there

All checks that are possible before a byte moves are made here, the same for every engine: regions, bounds, overlaps,
tags, endpoints. `Copies` are rows of registered memory on this side, and their places on the other. An engine adds the
methods marked abstract.
"""

import abc
import base64
import enum
import importlib
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants
from batchstate._arrays import arange_per_row, count
from batchstate.errors import ArgumentError, HandshakeError, OwnerThreadError, ShapeError, TransferError, one_of
from batchstate.transport.connection import LEAST_SECRET, new_secret
from batchstate.transport.wire import (
    LARGEST,
    MOST_TEXT,
    Check,
    array,
    binary,
    check_mac,
    number,
    parsed,
    record,
    row,
    sealed,
    text,
    unexpected,
)
from batchstate.violations import Violation

Ints = npt.NDArray[np.int64]

MOST_REGIONS = 65_536
MOST_TAG_BYTES = 128
REMEMBERED_TAGS = 65_536
"""So many of the last tags are remembered, to refuse one that is used twice."""
_NOTHING_SENT = (ArgumentError, TransferError, Violation)


# Memory, and which bytes of it go where

Memory = torch.Tensor | npt.NDArray[np.uint8]


@final
@attrs.frozen(eq=False)
class Region:
    """A contiguous piece of memory of this process.

    Attributes:
        index: its number in `Copies`.
        name: the same word on both sides, as "layer 3 keys".
        address: of its first byte.
        nbytes: its length.
        memory: kept alive.
        device: torch's type of device that it lies on.
    """

    index: int
    name: str
    address: int
    nbytes: int
    memory: Memory = attrs.field(repr=False)
    device: str = "cpu"


@final
@attrs.frozen
class RemoteRegion:
    """A region of a peer, as its endpoint describes it."""

    index: int
    name: str
    address: int
    nbytes: int


def described(index: int, memory: Memory, name: str, others: Iterable[Region]) -> Region:
    """The region of a piece of memory. ArgumentError: not contiguous, empty, or one of `others` overlaps it."""
    if isinstance(memory, torch.Tensor):
        contiguous, address, nbytes = memory.is_contiguous(), memory.data_ptr(), memory.numel() * memory.element_size()
        device = memory.device.type
    else:
        contiguous, address, nbytes = memory.flags.c_contiguous, memory.ctypes.data, memory.nbytes
        device = "cpu"
    if not contiguous or not nbytes:
        problem = f"region {name!r}: {nbytes} bytes, {'' if contiguous else 'not '}contiguous"
        raise ArgumentError(problem, name, "register contiguous memory of at least one byte")
    for other in others:
        if address < other.address + other.nbytes and other.address < address + nbytes:
            problem = f"region {name!r} overlaps region {other.name!r}, which is registered"
            raise ArgumentError(problem, name, "register each piece of memory once")
    return Region(index, str(name), address, nbytes, memory, device)


def _ints(values: object) -> Ints:
    return np.asarray(values, dtype=np.int64)


@final
@attrs.frozen(eq=False)
class Copies:
    """Row copies: `lengths[i]` bytes from `source_offsets[i]` of a local region to `target_offsets[i]` of a remote one.

    Offsets are into regions, not addresses, so that bounds and owners can be checked before anything is sent.

    Attributes:
        source_regions: int64[n], index of the local region.
        source_offsets: int64[n], in bytes.
        target_regions: int64[n], index of the peer's region.
        target_offsets: int64[n], in bytes.
        lengths: int64[n], in bytes.
    """

    source_regions: Ints = attrs.field(converter=_ints)
    source_offsets: Ints = attrs.field(converter=_ints)
    target_regions: Ints = attrs.field(converter=_ints)
    target_offsets: Ints = attrs.field(converter=_ints)
    lengths: Ints = attrs.field(converter=_ints)

    def __attrs_post_init__(self) -> None:
        shapes = [array.shape for array in self.arrays()]
        if len(set(shapes)) != 1 or self.lengths.ndim != 1:
            problem = f"Copies: expected five arrays of one length, got shapes {shapes}"
            raise ShapeError(problem, shapes, "pass int64[n] for each")

    def __repr__(self) -> str:
        return f"Copies({len(self)} rows, {self.nbytes} bytes)"

    def __len__(self) -> int:
        return self.lengths.size

    @classmethod
    def empty(cls) -> Self:
        """No rows: a transfer that only delivers its tag."""
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, none, none, none)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, at least one, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate(column) for column in zip(*(part.arrays() for part in parts), strict=True)))

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.lengths.sum())

    def arrays(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """The five arrays, in the order of the attributes."""
        return (self.source_regions, self.source_offsets, self.target_regions, self.target_offsets, self.lengths)

    def rows(self, keep: npt.NDArray[np.int64] | slice) -> Self:
        """Some of the rows, in the order given."""
        return type(self)(*(array[keep] for array in self.arrays()))

    def cut(self, most: int) -> Self:
        """The same bytes, in order, in rows of at most `most` bytes."""
        if self.lengths.max(initial=0) <= most:
            return self
        pieces = -(-self.lengths // most)
        rows = self.rows(np.repeat(np.arange(len(self), dtype=np.int64), pieces))
        skipped = arange_per_row(np.zeros_like(pieces), pieces) * most
        return attrs.evolve(
            rows,
            source_offsets=rows.source_offsets + skipped,
            target_offsets=rows.target_offsets + skipped,
            lengths=np.minimum(rows.lengths - skipped, most),
        )


# Writes


class Status(enum.Enum):
    """Where a write is.

    PENDING: under way. DONE: all of it has landed. FAILED: it failed, and no byte of it can still land.
    UNKNOWN: it failed, and bytes may still land; see `Engine.drain`.
    """

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"


@final
@attrs.frozen
class Capabilities:
    """Whether the peer takes no part in a write, and the most rows of one write."""

    one_sided: bool
    max_rows: int


@final
@attrs.frozen
class Delivery:
    """A tag that has arrived behind its data, and the nonce of the engine that wrote both."""

    tag: bytes
    instance: str


@final
@attrs.define(eq=False)
class Peer:
    """Another engine that this one can write to. Made by `connect`.

    Attributes:
        instance: its nonce; another one after each start.
        regions: its memory by index, as it was when its endpoint was made.
        native: of the engine.
        lost: why it is gone, or None. An engine may notice only in a write.
    """

    instance: str
    regions: dict[int, RemoteRegion] = attrs.field(repr=False)
    secret: bytes = attrs.field(default=b"", repr=False)
    native: Any = attrs.field(default=None, repr=False)
    lost: str | None = None

    def check_lost(self) -> None:
        """TransferError: the peer is gone."""
        if self.lost is not None:
            problem = f"peer {self.instance} is gone: {self.lost}"
            raise TransferError(problem, self.instance, "connect to its next instance")


@final
@attrs.define(eq=False)
class Handle:
    """One write under way. Made by `write`.

    Attributes:
        status: the last answer of `poll`; final once it is not PENDING.
        drained: whether no byte of it can still land.
        reason: why it failed.
        native: of the engine.
    """

    peer: Peer
    tag: bytes
    nbytes: int
    status: Status = Status.PENDING
    drained: bool = False
    reason: str = ""
    native: Any = attrs.field(default=None, repr=False)


# Endpoints: how to reach an engine, opaque to the caller that carries it

ENDPOINT = "batchstate endpoint 2"
nonce = text("[0-9a-f]{16}")
"""The number of an engine, as `secrets.token_hex(8)` makes it."""


@final
@attrs.frozen
class Endpoint:
    """How to reach an engine: its name and nonce, the secret of its callers, its regions by index, and its own part."""

    engine: str
    instance: str
    secret: bytes = attrs.field(repr=False)
    regions: dict[int, RemoteRegion] = attrs.field(repr=False)
    native: bytes = attrs.field(repr=False)

    def to_bytes(self) -> bytes:
        """For `from_bytes` of a peer."""
        fields = {
            "is": ENDPOINT,
            "engine": self.engine,
            "instance": self.instance,
            "secret": base64.b64encode(self.secret).decode(),
            "regions": [attrs.astuple(region) for region in self.regions.values()],
            "native": base64.b64encode(self.native).decode(),
        }
        return sealed(fields, self.secret)

    @classmethod
    def from_bytes(cls, endpoint: bytes) -> Self:
        """An endpoint that came from a peer. HandshakeError: not one of this library, or damaged."""
        whole: Self = parsed_native(endpoint, cls._checked, "an endpoint")
        return whole

    @classmethod
    def _checked(cls, value: Any) -> Self:
        fields = _ENDPOINT(value)
        check_mac(value, fields["secret"])
        regions = {region.index: region for region in fields["regions"]}
        if len(regions) != len(fields["regions"]):
            raise ValueError("regions: an index is there twice")
        return cls(fields["engine"], fields["instance"], fields["secret"], regions, fields["native"])


def _remote_region(value: Any) -> RemoteRegion:
    region = RemoteRegion(*_REGION(value))
    if region.address + region.nbytes > LARGEST:
        raise unexpected(value, "memory that ends below 2**63")
    return region


def _secret(value: Any) -> bytes:
    secret = binary(value)
    if len(secret) < LEAST_SECRET:
        raise ValueError(f"expected a secret of at least {LEAST_SECRET} bytes, got {len(secret)}")
    return secret


_REGION = row(number(), text(), number(), number())
_ENDPOINT = record(
    ENDPOINT,
    engine=text(),
    instance=nonce,
    secret=_secret,
    regions=array(_remote_region, MOST_REGIONS),
    native=binary,
    mac=text(),
)


def parsed_native(endpoint: bytes, schema: Check, noun: str) -> Any:
    """The value in (an engine's own part of) an endpoint. HandshakeError: it does not have the schema."""
    return parsed(endpoint, schema, noun, HandshakeError, "pass what the other side's `endpoint()` returned")


class Engine(abc.ABC):
    """One way of writing into another process's memory. Belongs to the thread that made it.

    Attributes:
        name: of the way; peers must have the same.
        instance: nonce of this engine: another one for each that was ever made.
        capabilities: what it can do.
    """

    name: str
    capabilities: Capabilities

    def __init__(self) -> None:
        self.instance = secrets.token_hex(8)
        self._secret = new_secret()
        self._thread = threading.get_ident()
        self._regions: dict[int, Region] = {}
        self._peers: dict[str, Peer] = {}
        self._open: dict[bytes, Handle] = {}
        self._used: dict[bytes, None] = {}  # tags, the oldest first
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.instance}, {len(self._regions)} regions, {len(self._open)} writes open)"

    # The part of each engine

    @abc.abstractmethod
    def _register(self, region: Region) -> None:
        """Makes memory readable and writable by the engine."""

    @abc.abstractmethod
    def _endpoint(self) -> bytes:
        """This engine's own part of its endpoint."""

    @abc.abstractmethod
    def _connect(self, peer: Peer, endpoint: bytes) -> None:
        """Reaches a peer, and sets its `native`."""

    @abc.abstractmethod
    def _write(self, handle: Handle, copies: Copies, sources: Ints, targets: Ints) -> None:
        """Starts a write, or queues it. Sets the handle's `native` before.

        An ArgumentError, TransferError or Violation says that nothing was sent, and nothing will be. After any other
        error the write is UNKNOWN, unless `native` is not set.

        Args:
            handle: the write.
            copies: its rows, checked; maybe none, and the tag is delivered all the same.
            sources: int64[n], addresses here.
            targets: int64[n], addresses there.
        """

    @abc.abstractmethod
    def _poll(self, handle: Handle) -> Status:
        """The status of a pending write now. Never waits."""

    @abc.abstractmethod
    def _drained(self, handle: Handle) -> bool:
        """Whether no byte of a write that ended as UNKNOWN can still land. Never waits."""

    @abc.abstractmethod
    def _completions(self) -> list[Delivery]:
        """The tags that have arrived since the last time, each behind its data. Never waits."""

    @abc.abstractmethod
    def _disconnect(self, peer: Peer) -> None:
        """Lets a peer go that is gone, or no longer wanted."""

    @abc.abstractmethod
    def _close(self) -> None:
        """Lets everything go."""

    # Memory

    def register(self, memory: Memory, name: str = "") -> Region:
        """Makes memory readable and writable by the engine; peers learn of it by the next `endpoint()`.

        Args:
            memory: a contiguous tensor or array. It is kept alive as long as the engine is open.
            name: for reports and for peers.

        Raises:
            ArgumentError: not contiguous, empty, or it overlaps a registered region.
        """
        self.check_owner("register")
        name = name or f"region {len(self._regions)}"
        count(len(name), "characters of the region's name", most=MOST_TEXT)
        region = described(len(self._regions), memory, name, self._regions.values())
        self._register(region)
        self._regions[region.index] = region
        return region

    # Peers

    def endpoint(self) -> bytes:
        """Opaque bytes for a peer's `connect`, to be made anew when memory was registered since.

        They hold the secret that callers have to prove: pass them over a channel that strangers neither read nor write.
        """
        self.check_owner("endpoint")
        regions = {at: RemoteRegion(at, our.name, our.address, our.nbytes) for at, our in self._regions.items()}
        return Endpoint(self.name, self.instance, self._secret, regions, self._endpoint()).to_bytes()

    def connect(self, endpoint: bytes) -> Peer:
        """Reaches another engine of the same kind.

        Raises:
            HandshakeError: not an endpoint of this library, damaged, or one of another engine, of this very engine, or
                of one that is connected; or the two do not know the same secret.
            TransferError: it cannot be reached.
        """
        self.check_owner("connect")
        theirs = Endpoint.from_bytes(endpoint)
        instance = theirs.instance
        if theirs.engine != self.name:
            problem = f"the peer speaks {theirs.engine}, this engine {self.name}"
            raise HandshakeError(problem, theirs.engine, "open the same on both sides")
        if instance == self.instance or instance in self._peers:
            state = "this engine's own" if instance == self.instance else "connected already"
            remedy = "connect once to each other engine; after a restart, to its new endpoint"
            raise HandshakeError(f"the endpoint of instance {instance} is {state}", instance, remedy)
        peer = Peer(instance, theirs.regions, theirs.secret)
        self._connect(peer, theirs.native)
        self._peers[instance] = peer
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Lets a peer go. Writes to it that are open end as they will; no new one begins."""
        self.check_owner("disconnect")
        if self._peers.get(peer.instance) is peer:
            self._disconnect(peer)
            del self._peers[peer.instance]
            peer.lost = peer.lost or "disconnected"

    # Transfers

    def write(self, peer: Peer, copies: Copies, tag: bytes) -> Handle:
        """Starts to write rows into a peer's memory, and behind them its tag. Returns at once.

        Args:
            peer: what `connect` returned.
            copies: the rows; none is fine, the tag arrives all the same. The memory they are read from must stay as it
                is until the handle is DONE, or drained.
            tag: 1 to 128 bytes that no other write of this engine has.

        Raises:
            Violation: TRANSFER_BOUNDS: rows outside the registered regions of either side.
            ArgumentError: an unknown region, destinations that overlap, more rows than the engine takes, a tag that was
                used, a peer of another engine. Nothing was sent.
            TransferError: the peer is gone. Nothing was sent.

        After any other error, as an interrupt, the write may have begun: see `begun`.
        """
        self.check_owner("write")
        if self._peers.get(peer.instance) is not peer:
            raise ArgumentError(f"expected a peer of {self!r}, got {peer!r}", peer, "connect to it first")
        peer.check_lost()
        if type(tag) is not bytes or not 0 < len(tag) <= MOST_TAG_BYTES:
            raise ArgumentError(f"a tag is 1 to {MOST_TAG_BYTES} bytes, got {tag!r}", tag, "pass a shorter one")
        if tag in self._used or tag in self._open:
            raise ArgumentError(f"tag {tag!r} was used before", tag, "give each write, also a retry, a new tag")
        sources, targets = self._addresses(peer, copies)
        self._open[tag] = handle = Handle(peer, tag, copies.nbytes)
        try:
            self._write(handle, copies, sources, targets)
        except BaseException as error:
            if handle.native is None or isinstance(error, _NOTHING_SENT):
                del self._open[tag]
            else:  # bytes may be under way
                handle.status, handle.reason = Status.UNKNOWN, f"interrupted while it began: {error!r}"
            raise
        self._used[tag] = None
        if len(self._used) > REMEMBERED_TAGS:
            del self._used[next(iter(self._used))]
        return handle

    def begun(self, tag: bytes) -> Handle | None:
        """The write of this tag, if it has not ended: for one whose `write` was interrupted."""
        self.check_owner("begun")
        return self._open.get(tag)

    def poll(self, handle: Handle) -> Status:
        """The status of a write, final once it is not PENDING. Never waits."""
        self.check_owner("poll")
        if handle.status is Status.PENDING:
            handle.status = self._poll(handle)
            if handle.status in (Status.DONE, Status.FAILED):
                self._end(handle)
        return handle.status

    def drain(self, handle: Handle) -> bool:
        """Whether no byte of the write can still land, nor its source be read. To be asked again until it says so."""
        if self.poll(handle) is Status.UNKNOWN and not handle.drained and self._drained(handle):
            self._end(handle)
        return handle.drained

    def completions(self) -> list[Delivery]:
        """Tags whose data has landed here since the last call, in any order. Never waits."""
        self.check_owner("completions")
        return self._completions()

    def close(self) -> None:
        """Lets everything go; twice is fine. Writes that are open have no known end."""
        if not self._closed:
            self.check_owner("close")
            self._closed = True
            self._close()

    # Checks

    def check_owner(self, operation: str) -> None:
        """OwnerThreadError: not the engine's thread. TransferError: it is closed. For sessions too."""
        if threading.get_ident() != self._thread:
            problem = f"{operation} of {self!r} was called from thread {threading.current_thread().name!r}"
            raise OwnerThreadError(problem, threading.current_thread().name, "make one engine per thread")
        if self._closed:
            raise TransferError(f"{operation} of {self!r}, which is closed", operation, "open a new one")

    def _end(self, handle: Handle) -> None:
        handle.drained = True
        self._open.pop(handle.tag, None)

    def _addresses(self, peer: Peer, copies: Copies) -> tuple[Ints, Ints]:
        """Address of each row here and there, int64[n]; refuses rows outside, too many, and that overlap there."""
        if len(copies) > self.capabilities.max_rows:
            problem = f"expected at most {self.capabilities.max_rows} rows in one write of {self.name}"
            raise ArgumentError(f"{problem}, got {len(copies)}", len(copies), "cut it with `transport.plan.chunked`")
        lengths = copies.lengths
        sources = self._inside(self._regions, copies.source_regions, copies.source_offsets, lengths, "source")
        targets = self._inside(peer.regions, copies.target_regions, copies.target_offsets, lengths, "target")
        ends = targets + lengths
        if (targets[1:] >= ends[:-1]).all():  # in order, as the plan makes them: nothing to sort
            return sources, targets
        order = np.argsort(targets, kind="stable")
        overlaps = targets[order][1:] < ends[order][:-1]
        if overlaps.any():
            row = int(order[1:][overlaps][0])
            problem = f"row {row} of a write overlaps another row at its destination"
            raise ArgumentError(problem, row, "name each destination once")
        return sources, targets

    def _inside(
        self, regions: Mapping[int, Region | RemoteRegion], indices: Ints, offsets: Ints, lengths: Ints, side: str
    ) -> Ints:
        if not lengths.size:
            return lengths
        one_layer = bool((indices == indices[0]).all())
        present = indices[:1] if one_layer else np.unique(indices)
        for index in present.tolist():
            if index not in regions:
                remedy = "register memory before the endpoint is made, and use the indices of `Region`"
                raise ArgumentError(f"{side} region {index} is not registered", index, remedy)
        spans = np.array([(regions[at].address, regions[at].nbytes) for at in present.tolist()], dtype=np.int64)
        begins, sizes = spans[0].tolist() if one_layer else spans[np.searchsorted(present, indices)].T
        invariants.transfer_bounds(offsets, lengths, 0, sizes, object=self, operation=f"write ({side})")
        addresses: Ints = offsets + begins
        return addresses


def check_trusted(why: str, trusted_network: bool) -> None:
    """ArgumentError: an open port that authenticates no client, and nobody has said that strangers cannot reach it."""
    if trusted_network is not True:
        problem = f"{why}, and lets every caller of its port write into registered memory"
        remedy = (
            "keep all but the workers out by a firewall or a network namespace, and pass trusted_network=True; "
            'or open "tcp", which lets in only who knows a secret'
        )
        raise ArgumentError(problem, trusted_network, remedy)


_HOMES = {
    "tcp": ("batchstate.transport.engines.tcp", "TcpEngine"),
    "nixl": ("batchstate.transport.engines.nixl", "NixlEngine"),
    "mooncake": ("batchstate.transport.engines.mooncake", "MooncakeEngine"),
}

ENGINES = tuple(_HOMES)
"""Names that `open_engine` knows. The engine of tests, `InProcessEngine`, needs a network and is made by itself."""


def open_engine(name: str = "tcp", **options: Any) -> Engine:
    """The engine of this name; packages that it needs are imported now.

    Args:
        name: `tcp`, `nixl` or `mooncake`; with ports of their libraries, the last two want `trusted_network=True`.
        options: of its class.

    Raises:
        ArgumentError: no such engine.
        TransferError: it is not installed here, or cannot be started; the message says what to install.
    """
    if name not in _HOMES:
        raise ArgumentError(f"no engine is called {name!r}", name, one_of(ENGINES, name))
    module, kind = _HOMES[name]
    engine: Engine = getattr(importlib.import_module(module), kind)(**options)
    return engine
