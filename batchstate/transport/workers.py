"""The workers that exchange KV: how each describes itself, which instance is the current one, which have ended.

A `Description` crosses as bytes over a channel that the engine's user trusts: it holds the secret of the engine, and is
believed. Its MAC, under that secret, shows that it is whole. `check_peers` is symmetric: whatever one side refuses, the
other refuses too, so that no side is left waiting for a peer that has gone.

A worker that is *lost* is only suspected: it may still write. It is *ended* when a caller that can know it says so (a
supervisor that saw its process exit), or when another instance introduces itself under its name, since a supervisor
starts the next only after the last has ended. Nothing here is concluded from time alone.
"""

import abc
import base64
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, final

import attrs

from batchstate.errors import ArgumentError, DtypeError, HandshakeError, ShapeError
from batchstate.transport.engines.base import Endpoint, Engine, Peer, Region, RemoteRegion, nonce
from batchstate.transport.plan import KVLayout, Layouts, buffers_of, check_fit
from batchstate.transport.wire import (
    DEVICE,
    HOST,
    MOST_BYTES,
    Grant,
    Kind,
    Notice,
    array,
    binary,
    check_mac,
    flag,
    number,
    packed,
    parsed,
    record,
    sealed,
    text,
    unpacked,
)

Clock = Callable[[], float]
_log = logging.getLogger("batchstate")

_LOOKS = 4
"""How often this side looks, at the least, in the grace period of a worker that has ended."""

ON_DEVICE = " on device"
"""Behind the name of a layer, that of its buffer in device pages, beside the one in host memory."""
DESCRIPTION = "batchstate worker"
VERSION = 4
MOST_LAYOUTS = 64


def _layouts(value: KVLayout | list[KVLayout] | Layouts) -> Layouts:
    layouts = (value,) if isinstance(value, KVLayout) else tuple(value)
    if not 0 < len(layouts) <= MOST_LAYOUTS:
        remedy = f"pass one KVLayout or a list of 1 to {MOST_LAYOUTS}"
        raise ArgumentError(f"expected layouts, got {len(layouts)}", len(layouts), remedy)
    ranks = [(layout.rank, layout.degree) for layout in layouts]
    if len(set(ranks)) > 1:
        remedy = "give each layout of a worker the rank and the degree of that worker"
        raise ArgumentError(f"layouts of ranks {ranks}", ranks, remedy)
    names = [layer for layout in layouts for layer in layout.layers]
    if len(set(names)) < len(names) or not any(layout.stage for layout in layouts):
        remedy = "name each buffer once in all layouts together, at least one of them in the worker's stage"
        raise ArgumentError(f"layouts of the layers {names[:12]}", names, remedy)
    return layouts


@final
@attrs.frozen
class Description:
    """One worker, as it describes itself to a peer.

    Attributes:
        worker: its name.
        instance: nonce of its engine; another one after each start.
        layouts: of its KV: one, or several for buffers that differ in bytes of a row, dtype, heads or kind of row,
            in the same order on both sides.
        endpoint: from `Engine.endpoint`.
        reach: the same, read.

    Raises:
        ArgumentError: layouts that do not go together.
        HandshakeError: not an endpoint, or one of another instance.
    """

    worker: str
    instance: str
    layouts: Layouts = attrs.field(converter=_layouts)
    endpoint: bytes = attrs.field(repr=False)
    reach: Endpoint = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        reach = Endpoint.from_bytes(self.endpoint)
        object.__setattr__(self, "reach", reach)
        if reach.instance != self.instance:
            problem = f"{self.worker} says that its instance is {self.instance}, its endpoint is of {reach.instance}"
            remedy = "after a restart, describe the worker anew: instance and endpoint of one engine"
            raise HandshakeError(problem, (self.instance, reach.instance), remedy)

    @property
    def layout(self) -> KVLayout:
        """The first, whose rank, degree and page size are those of the worker."""
        return self.layouts[0]

    def to_bytes(self) -> bytes:
        """For `from_bytes` of a peer. HandshakeError: too large to be read."""
        fields = {
            "is": DESCRIPTION,
            "version": VERSION,
            "worker": self.worker,
            "instance": self.instance,
            "layouts": list(map(attrs.asdict, self.layouts)),
            "endpoint": base64.b64encode(self.endpoint).decode(),
        }
        data = sealed(fields, self.reach.secret)
        if len(data) > MOST_BYTES:
            remedy = f"register fewer regions: a description has at most {MOST_BYTES} bytes"
            raise HandshakeError(f"a description of {len(data)} bytes", len(data), remedy)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """A description that came from a peer.

        Raises:
            HandshakeError: too large, truncated, malformed, damaged, of another version, or with an impossible layout.
        """
        remedy = "pass what the other side's `Description.to_bytes()` returned, all of it"
        description: Self = parsed(data, cls._checked, "a description of a worker", HandshakeError, remedy)
        return description

    @classmethod
    def _checked(cls, value: Any) -> Self:
        fields = _SCHEMA(value)
        try:
            layouts = [KVLayout(**layout) for layout in fields["layouts"]]
            description = cls(fields["worker"], fields["instance"], layouts, fields["endpoint"])
        except (ArgumentError, DtypeError) as error:
            problem = f"worker {fields['worker']!r} describes an impossible layout: {error.problem:.200}"
            raise HandshakeError(problem, error.value, f"on that worker: {error.remedy}") from error
        check_mac(value, description.reach.secret)
        return description


def _version(value: Any) -> Any:
    if type(value) is not int or value != VERSION:
        problem = f"version is {VERSION} here, {value!r:.60} there"
        raise HandshakeError(problem, (VERSION, value), "run the same version of batchstate on both workers")
    return value


_LAYOUT = record(
    page_size=number(),
    dtype=text(),
    layers=array(text(".+")),
    item_bytes=number(),
    rank=number(),
    degree=number(),
    heads=number(),
    replicated=flag,
    token_major=flag,
    stage=array(text(".+")),
    per_request=flag,
)
_SCHEMA = record(
    DESCRIPTION,
    version=_version,
    worker=text(".+"),
    instance=nonce,
    layouts=array(_LAYOUT, MOST_LAYOUTS),
    endpoint=binary,
    mac=text(),
)


def check_peers(ours: Description, theirs: Description) -> None:
    """Refuses a peer that this worker cannot exchange KV with. To be asked on both sides, before anything is written.

    Raises:
        HandshakeError: the peer is this very instance, the engines differ, or the layouts do not fit
            (`plan.check_fit`).
    """
    if ours.instance == theirs.instance:
        problem = f"instance is {ours.instance} here ({ours.worker}) and there ({theirs.worker})"
        remedy = "exchange descriptions between two workers, each with an engine of its own"
        raise HandshakeError(problem, ours.instance, remedy)
    engines = ours.reach.engine, theirs.reach.engine
    if engines[0] != engines[1]:
        problem = f"engine is {engines[0]} here, {engines[1]} there"
        raise HandshakeError(problem, engines, "open the same engine on both workers")
    if len(ours.layouts) != len(theirs.layouts):
        problem = f"layouts: {len(ours.layouts)} here, {len(theirs.layouts)} there"
        remedy = "describe the same kinds of buffers on both workers, in the same order"
        raise HandshakeError(problem, (len(ours.layouts), len(theirs.layouts)), remedy)
    for here, there in zip(ours.layouts, theirs.layouts, strict=True):
        check_fit(here, there)


@final
@attrs.define(eq=False)
class Worker:
    """One instance of a worker on the other side.

    Attributes:
        peer: to write to, or None where this side never connects.
        lost: why it is suspected to be gone, or None.
        grace_left: seconds after which nothing that it sent can land; None while it may live.
    """

    description: Description
    peer: Peer | None = attrs.field(repr=False)
    lost: str | None = None
    grace_left: float | None = None

    @property
    def name(self) -> str:
        """The same for every instance of the worker."""
        return self.description.worker

    @property
    def instance(self) -> str:
        """Nonce of its engine."""
        return self.description.instance

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended. Bytes that it has sent may still be under way."""
        return self.grace_left is not None

    @property
    def quiet(self) -> bool:
        """Whether it is known to have ended, so long ago that nothing it sent can still land."""
        return self.grace_left is not None and self.grace_left <= 0

    def regions(self, holds: str) -> list[RemoteRegion]:
        """Its region of each of its buffers in that memory, in order; none where it does not have all of them."""
        by_name = {} if self.peer is None else {region.name: region for region in self.peer.regions.values()}
        names = region_names(self.description.layouts, holds)
        return [by_name[name] for name in names] if by_name.keys() >= set(names) else []


def _check_memory(region: Region, layout: KVLayout) -> None:
    """Refuses memory of another dtype, or whose rows are neither the tokens of its layout nor its pages."""
    memory, problem = region.memory, f"region {region.name!r}: expected "
    dtype, tokens = str(memory.dtype).removeprefix("torch."), 1
    if dtype not in ("uint8", layout.dtype):
        problem += f"memory of {layout.dtype}, as its layout says, got {dtype}"
        raise DtypeError(problem, dtype, "describe the memory as it is, or register its bytes: uint8")
    if memory.ndim > 1:
        row, tokens = region.nbytes // memory.shape[0], 1 if layout.per_request else layout.page_size
        if row not in (layout.item_bytes, tokens * layout.item_bytes):
            problem += f"rows of {layout.item_bytes} bytes, as its layout says, or pages of {tokens}, got {row} bytes"
            raise ShapeError(problem, tuple(memory.shape), "let `item_bytes` be those of one token in this memory")
        split = layout.token_major and memory.ndim > 2 and row > layout.item_bytes
        if split and memory.shape[1] != tokens:
            problem += f"[pages, {tokens}, ...], tokens of a page one after the other, got {list(memory.shape)}"
            raise ShapeError(problem, tuple(memory.shape), "say `token_major=False`: whole pages are sent then")


def suffix_of(holds: str, layout: KVLayout) -> str:
    """The suffix of a region's name behind that of its layer. States are in one place, wherever the tokens are."""
    return ON_DEVICE if holds == DEVICE and not layout.per_request else ""


def region_names(layouts: Layouts, holds: str) -> list[str]:
    """Names of a worker's regions in one kind of memory, in the order of its buffers."""
    return [layer + suffix_of(holds, layout) for layer, layout in buffers_of(layouts)]


class Session(abc.ABC):
    """One rank of a worker that transfers KV: a `Sender` or a `Receiver`. Belongs to the thread of its engine.

    Args:
        engine: of this worker, its memory registered.
        description: of this worker.
        regions: one for each buffer of the description, in its order, named as the layers are.
        device: the same for the device pages beside them, their names with `ON_DEVICE` behind, but for those of states.
        clock: seconds, never going back.
        grace_seconds: how long after the end of a process its bytes may still be on their way.

    Attributes:
        writes: whether this side writes. It connects to the other then, or where both take part in a write.
        outbox: messages to be carried: name of the worker, and bytes.

    Raises:
        ArgumentError: description, regions and engine do not belong together, or an impossible `grace_seconds`.
        DtypeError: memory of another dtype than its layout; uint8 stands for bytes of any.
        ShapeError: memory whose rows are neither tokens nor pages of its layout; a vector has no rows.
    """

    writes: ClassVar[bool]
    _hears: ClassVar[tuple[Kind, ...]]

    def __init__(
        self,
        engine: Engine,
        description: Description,
        regions: Sequence[Region],
        device: Sequence[Region] = (),
        *,
        clock: Clock,
        grace_seconds: float,
    ) -> None:
        if description.instance != engine.instance:
            problem = f"the description is of instance {description.instance}, the engine is {engine.instance}"
            remedy = "describe the worker by its engine's instance and endpoint"
            raise ArgumentError(problem, description.instance, remedy)
        memories = ({HOST: regions} if regions or not device else {}) | ({DEVICE: device} if device else {})
        by_layer = dict(buffers_of(description.layouts))
        for region in (*regions, *device):
            layout = by_layer.get(region.name.removesuffix(ON_DEVICE))
            if layout is not None:
                _check_memory(region, layout)
        for holds, memory in memories.items():
            wanted, names = region_names(description.layouts, holds), [region.name for region in memory]
            if names != wanted:
                problem = f"expected regions {wanted}, got {names}"
                remedy = "register one region per layer under the layer's name, and pass them in the layout's order"
                raise ArgumentError(problem, len(names), remedy)
        if not (math.isfinite(grace_seconds) and grace_seconds >= 0):
            problem = f"grace_seconds: expected 0 or more, and finite, got {grace_seconds}"
            remedy = "pass the seconds in which bytes of an ended worker may still arrive"
            raise ArgumentError(problem, grace_seconds, remedy)
        self.outbox: list[tuple[str, bytes]] = []
        self._engine = engine
        self._description = description
        self._capacities = {holds: capacities(description, memory) for holds, memory in memories.items()}
        self._clock = clock
        self._grace = grace_seconds
        self._connects = self.writes or not engine.capabilities.one_sided
        self._workers: dict[str, Worker] = {}
        self._ended: set[str] = set()
        self._warned: set[tuple[int, int]] = set()  # page sizes here and there that differ
        self._ending: list[Worker] = []
        self._looked = 0.0

    @abc.abstractmethod
    def _fail_worker(self, worker: Worker, reason: str) -> None:
        """Fails all that a worker has to do with: it has ended, or is only suspected to be gone."""

    @abc.abstractmethod
    def _take(self, worker: Worker, message: Grant | Notice) -> None:
        """Takes a message of a current instance, of a kind that this side hears."""

    def introduce(self) -> bytes:
        """The bytes that each worker of the other side passes to its `accept`."""
        self._engine.check_owner("introduce")
        return self._description.to_bytes()

    def accept(self, introduction: bytes, from_worker: str | None = None) -> str:
        """Takes note of a worker, connects to it where this side writes, and returns its name.

        An earlier instance of that name has ended. So introductions under one name are to be passed in the order in
        which its instances started.

        Args:
            introduction: what the other side's `introduce` returned.
            from_worker: name of the worker that the channel has it from: then no other name is believed.

        Raises:
            HandshakeError: not an introduction, one that does not fit this worker, of an instance that has ended, of
                another worker than `from_worker`, of another rank, degree or stage than the instance before, or, where
                this side writes, without a region for each layer.
            TransferError: it cannot be reached.
        """
        self._engine.check_owner("accept")
        theirs = Description.from_bytes(introduction)
        if from_worker is not None and theirs.worker != from_worker:
            problem = f"an introduction of worker {theirs.worker!r} came from {from_worker!r}"
            remedy = "pass an introduction on as it is, with the name of the worker that sent it"
            raise HandshakeError(problem, theirs.worker, remedy)
        check_peers(self._description, theirs)
        before = self._workers.get(theirs.worker)
        earlier = theirs if before is None else before.description
        for name in ("rank", "degree", "stage"):  # one that cannot be the next would end one that may live
            was, now = getattr(earlier.layout, name), getattr(theirs.layout, name)
            if was != now:
                problem = f"{name} of worker {theirs.worker!r} was {was}, and is {now} in a new introduction"
                remedy = "give each rank a name of its own, and a new name where the group changes"
                raise HandshakeError(problem, (was, now), remedy)
        if theirs.instance in self._ended:
            problem = f"instance {theirs.instance} of {theirs.worker} has ended"
            raise HandshakeError(problem, theirs.instance, "introduce the instance that runs now")
        if before is not None and before.instance == theirs.instance:
            before.lost = None
            return before.name
        sizes = self._description.layout.page_size, theirs.layout.page_size
        if sizes[0] != sizes[1] and sizes not in self._warned:
            self._warned.add(sizes)
            _log.warning(
                "%s has pages of %d tokens, %s of %d: KV goes token by token, and adjacent tokens still in one piece",
                self._description.worker, sizes[0], theirs.worker, sizes[1],
            )  # fmt: skip
        worker = self._connected(theirs)
        if before is not None:
            self._end(before)
        self._workers[worker.name] = worker
        if before is not None:
            self._fail_worker(before, f"{before.name} was started again")
        return worker.name

    def peer_lost(self, worker: str, reason: str = "lost") -> None:
        """A worker is suspected to be gone: all transfers with it fail. Memory that it may still write stays taken."""
        self._engine.check_owner("peer_lost")
        suspected = self._named(worker)
        suspected.lost = reason
        self._fail_worker(suspected, f"{worker} is suspected to be gone: {reason}")

    def peer_ended(self, worker: str, instance: str | None = None) -> None:
        """A worker is known to have ended: its process was seen to exit. All transfers with it fail.

        Memory that it may have written is free of it after its grace period.

        Args:
            worker: its name.
            instance: the one that ended, if it may not be the current one.
        """
        self._engine.check_owner("peer_ended")
        ended = self._named(worker)
        if instance in (None, ended.instance):
            self._end(ended)
            self._fail_worker(ended, f"{worker} has ended")

    def on_message(self, message: bytes, from_worker: str) -> None:
        """Takes a message of a worker of the other side. Repeated and late ones change nothing.

        Raises:
            ArgumentError: malformed, or not for this side.
            HandshakeError: from an instance that has not been accepted.
        """
        self._engine.check_owner("on_message")
        heard = unpacked(message)
        if heard.kind not in self._hears:
            raise ArgumentError(f"{heard!r} is not what the other side says", heard, "give it to the other side")
        if heard.to != self._engine.instance or heard.sender in self._ended:
            return
        worker = self._named(from_worker)
        if heard.sender != worker.instance:
            problem = f"expected a message of instance {worker.instance} of {from_worker!r}, got one of instance"
            raise HandshakeError(f"{problem} {heard.sender}", heard.sender, "accept its introduction first")
        self._take(worker, heard)

    def _named(self, name: str) -> Worker:
        """The current instance of a worker. HandshakeError: it has not been accepted."""
        if name not in self._workers:
            raise HandshakeError(f"worker {name!r} is unknown", name, "accept its introduction first")
        return self._workers[name]

    def _connected(self, theirs: Description) -> Worker:
        if not self._connects:
            return Worker(theirs, None)
        peer = self._engine.connect(theirs.endpoint)
        worker = Worker(theirs, peer)
        names = sorted(region.name for region in peer.regions.values())
        layers = region_names(theirs.layouts, HOST)
        if not any(map(worker.regions, (HOST, DEVICE))) or len(set(names)) != len(names):
            self._engine.disconnect(peer)
            remedy = "there, register one region per layer under its name before `endpoint()`"
            raise HandshakeError(f"{worker.name} has regions {names[:12]} for layers {layers}", worker.name, remedy)
        return worker

    def _end(self, worker: Worker) -> None:
        """Notes that an instance is known to have ended; the first time counts."""
        if worker.grace_left is None:
            if not self._ending:
                self._looked = self._clock()
            worker.grace_left = self._grace
            self._ending.append(worker)
            self._ended.add(worker.instance)
            if worker.peer is not None:
                self._engine.disconnect(worker.peer)

    def _count_grace(self) -> None:
        """Counts time in which this side has run, and looked, towards the grace period of those that have ended.

        A process that was stopped has not taken what lay in its sockets: a long absence counts as a short one.
        """
        if not self._ending:
            return
        before, self._looked = self._looked, self._clock()
        passed = min(self._looked - before, self._grace / _LOOKS)
        for worker in self._ending:
            worker.grace_left = (worker.grace_left or 0.0) - passed
        self._ending = [worker for worker in self._ending if not worker.quiet]

    def _say(self, worker: Worker, kind: Kind, serial: int, reason: str = "") -> None:
        notice = Notice(kind, self._engine.instance, worker.instance, serial, reason)
        self.outbox.append((worker.name, packed(notice)))

    def _check_own(self, operation: str, made: object, instance: str) -> None:
        """Refuses a lease or transfer of another session: one whose engine is not this `instance`."""
        self._engine.check_owner(operation)
        if instance != self._engine.instance:
            noun, remedy = type(made).__name__.lower(), f"pass one that this {type(self).__name__.lower()} has returned"
            raise ArgumentError(f"expected a {noun} of {self!r}, got {made!r}", made, remedy)


def regions_by_layout(
    description: Description, regions: Sequence[Region | RemoteRegion]
) -> tuple[tuple[int, ...], ...]:
    """Indices of a worker's regions, which are in the order of its buffers: for each layout those of its stage."""
    indices = iter(region.index for region in regions)
    return tuple(tuple(next(indices) for _ in layout.stage) for layout in description.layouts)


def capacities(description: Description, regions: Sequence[Region | RemoteRegion]) -> tuple[int, int]:
    """Rows that all regions of a worker have: of tokens, and of requests; 0 for a kind that it does not have."""
    rows: dict[bool, list[int]] = {False: [0], True: [0]}
    for (_, layout), region in zip(buffers_of(description.layouts), regions, strict=True):
        rows[layout.per_request].append(region.nbytes // layout.item_bytes)
    return tuple(min(some[1:], default=0) for some in (rows[False], rows[True]))  # type: ignore[return-value]
