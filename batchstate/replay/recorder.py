"""Records what an engine asks of its state, in a ring that is written to a file when a violation is found.

Recording replaces public methods by functions that write an event and call the method; stopping puts the methods back,
and a process that does not record pays nothing. The seams are the calls that change slots, pages, relay entries or
batches, and those that ask about them (`SEAMS`); results are written down when the engine has read them, so nothing is
read from the device. Hooked methods of watched engines are events too. A plan, inputs and publish that say nothing new
are a pack of numbers each.

The ring is a few segments of memory that is taken once. Each begins with the state of every pool and relay that is
alive, from which a replay starts, so that the oldest segment can go at any time. What a segment has not seen being made
is written by value when it is first used there: a batch as its columns, slots as numbers with generations.
"""

import contextlib
import functools
import inspect
import json
import logging
import os
import signal as signals
import struct
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch

from batchstate import levels, violations
from batchstate.batch import Batch
from batchstate.columns import DeviceColumn, HostColumn
from batchstate.errors import ArgumentError
from batchstate.future_map import FutureMap, Prefetched
from batchstate.kv.pages import Extension, PageLease, PagePool
from batchstate.mirror import Handles, MirroredTensor, Slots
from batchstate.pools import SlotPool
from batchstate.replay.format import (
    DTYPES,
    FIRST_METHOD,
    HEAD,
    KINDS,
    STATE,
    Device,
    Finding,
    Host,
    Part,
    Ref,
    body_of,
    save,
    tagged,
)  # fmt: skip
from batchstate.replay.objects import OBJECTS
from batchstate.replay.ring import Ring
from batchstate.runtime.base import Runtime
from batchstate.step import PlannedStep, StepPlanner
from batchstate.tables import TableWrite
from batchstate.violations import Violation
from batchstate.watch import hooks

__all__ = ["METHODS", "REFERRED", "SEAMS", "Recorder", "record_operations", "recorder"]

_log = logging.getLogger("batchstate")

SEAMS: Mapping[type, tuple[str, ...]] = {
    SlotPool: ("take", "free", "release_requests", "clear", "verify", "expect_idle", "check_handles"),
    PagePool: (
        "take_requests", "grow", "commit", "accept", "extend", "advance", "take", "assign", "share", "hold", "rebase",
        "truncate", "release", "release_requests", "entry", "locations", "pages_of", "verify", "expect_idle",
    ),
    FutureMap: ("publish", "gather", "prefetch", "resolve", "discard", "check"),
    StepPlanner: ("plan",),
    PlannedStep: ("inputs", "publish", "accept", "rollback"),
    Batch: (
        "build", "empty", "filter", "merge", "next_batch", "advance", "split", "pad", "update", "replace", "tighten",
        "upload", "check", "check_live",
    ),
}  # fmt: skip
REFERRED = Batch, PlannedStep, Prefetched, list, tuple, TableWrite, Extension, PageLease
"""Products of calls that later events refer to; others are written by value."""
METHODS = [f"{owner.__name__}.{name}" for owner, names in SEAMS.items() for name in names]
_CODES = {name: FIRST_METHOD + number for number, name in enumerate(METHODS)}
_KIND = {name: number for number, name in enumerate(KINDS)}
_HEAD = HEAD.size
_MOST_FILES = 16


_OPAQUE: Any = {"$": ["o"]}


@final
class Recorder:
    """A recording under way, which `record_operations` begins. Calls of other threads are not recorded.

    Attributes:
        files: written by now.
    """

    def __init__(
        self, directory: Path, ring_bytes: int, segments: int, everything: bool, rank: int, signal: int | None
    ) -> None:
        self.directory, self.rank = directory, rank
        self.files: list[Path] = []
        size, count = max(ring_bytes // segments, 1 << 14), 0 if everything else segments
        self._ring = Ring(size, count, self._begin, _last)
        self._thread = threading.get_ident()
        self._failed = False
        self._told: set[object] = set()
        # By runtime: version of a batch -> the number of the step that made it, or how else it is referred to.
        self._batches: defaultdict[int, dict[int, int | Part | Ref]] = defaultdict(dict)
        self._products: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._objects: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._pools: dict[int, int] = {}
        self._streams: dict[int, tuple[int, Any]] = {}  # with the stream, so that its id stays its own
        self._blobs: list[bytes] = []
        self._encode = json.JSONEncoder(default=self._special, separators=(",", ":"), check_circular=False).encode
        self._encoders: dict[type, Callable[[Any], Any]] = {}
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo = contextlib.ExitStack()
        if signal is not None:
            before = signals.signal(signal, lambda *_: self.dump("signal"))
            self._undo.callback(signals.signal, signal, before)
        self._install()
        told: list[tuple[list[Any], Any]] = [(violations.observers, self._violated), (hooks.observers, self._hooked)]
        for observers, observer in told:
            observers.append(observer)
            self._undo.callback(observers.remove, observer)
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Puts the methods back."""
        ring = self._ring
        global _active, _last
        if _active is self:
            _active = None
        _last = ring.number
        self._undo.close()

    # Files

    def dump(self, reason: str = "asked", finding: Finding | None = None) -> Path | None:
        """Writes what the ring has to a new file of the directory.

        Returns the file; None where it cannot be written, which the logger `batchstate` says once.
        """
        name = f"{reason}-rank{self.rank}-{os.getpid()}-{len(self.files)}.ops"
        path = self.directory / name
        level = levels.current_checks().value
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            header = {"reason": reason, "rank": self.rank, "level": level, "dropped": self._ring.dropped}
            save(path, self.events(), METHODS, finding=finding, **header)
        except OSError as error:
            self.tell_unwritable(path, error)
            return None
        self.files.append(path)
        _log.warning("recorded %s: batchstate replay %s", finding or reason, path)
        return path

    def tell_unwritable(self, path: Path, error: object) -> None:
        """Logs, once, that files cannot be written."""
        if not self._failed:
            self._failed = True
            _log.error("a recording cannot be written to %s: %s; the engine goes on", path, error)

    def events(self) -> bytes:
        """The events of the ring, oldest first."""
        return self._ring.events()

    def _violated(self, error: Violation) -> None:
        identity = error.code, error.operation, error.object if error.row is None else None
        if threading.get_ident() == self._thread and identity not in self._told and len(self._told) < _MOST_FILES:
            self._told.add(identity)
            self.dump("violation", Finding.of(error))

    # Writing events

    def write(self, kind: str, body: object, *, number: int = 0) -> None:
        """Writes an event that is no call."""
        ring = self._ring
        ring.write(_KIND[kind], 0, 0, number, self._body(body))

    def begin_step(self) -> None:
        """Begins the next segment if this one is nearly full: between two steps of an engine."""
        ring = self._ring
        if ring.at > ring.mark:
            ring.turn()

    def _begin(self) -> None:
        """Forgets the products of earlier segments, and writes down the state of all that is alive."""
        ring = self._ring
        self._products.clear()
        for versions in self._batches.values():  # which planners have
            versions.clear()
        alive = [(number, value) for number, ref in self._objects.values() if (value := ref()) is not None]
        if ring.number > 1 << 31:
            ring.number = 0
            self._objects.clear()
            alive = []
        ring.first = ring.number
        self.write("begin", {"segment": ring.turns})
        for number, value in alive:
            self._define(value, number)
        for engine in list(self.engines):
            engine.write_open()

    def _call(self, code: int, target: Any, runtime: Runtime, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        ring = self._ring
        if ring.at > ring.mark:
            ring.turn()
        body = self._body([target, args, kwargs])  # which may define objects before
        ring.number = number = ring.number + 1
        ring.write(code, self._stream_of(runtime), runtime.step, number, body)
        return number

    def _stream_of(self, runtime: Runtime) -> int:
        """The number of the current stream."""
        ring = self._ring
        stream = runtime.current_stream
        if stream is not ring.stream:
            entry = self._streams.setdefault(id(stream), (min(len(self._streams), STATE - 1), stream))
            ring.stream_number, ring.stream = entry
        return ring.stream_number

    def _made(self, number: int, product: Any) -> None:
        """Notes the product of a call, so that later events can refer to it."""
        if isinstance(product, Slots):
            self.write("result", product, number=number)
        elif isinstance(product, PlannedStep | Prefetched):
            product._recorded = number  # type: ignore[union-attr]
            if isinstance(product, PlannedStep):
                self._batches[id(product._declared.runtime)][product.batch.version] = number
        elif isinstance(product, Batch):
            self._batches[id(product.runtime)][product.version] = Ref(number)
        elif isinstance(product, list | tuple):
            for place, part in enumerate(product):
                if isinstance(part, Batch):
                    self._batches[id(part.runtime)][part.version] = Part(number, str(place))
        elif isinstance(product, REFERRED):
            self._products[id(product)] = number, weakref.ref(product)

    # Values

    def _body(self, value: object) -> bytes:
        """A value as the body of an event. A value that cannot be written does not trouble the engine."""
        ring = self._ring
        outer, self._blobs = self._blobs, []
        inside, ring.inside = ring.inside, True
        try:
            return body_of(self._encode(value), self._blobs)
        except (TypeError, ValueError, RecursionError):
            return body_of(self._encode(_OPAQUE), [])
        finally:
            self._blobs, ring.inside = outer, inside

    def _special(self, value: Any) -> Any:
        """A value that JSON does not have."""
        encoder = self._encoders.get(type(value))
        if encoder is None:
            encoder = self._encoders[type(value)] = self._encoder_of(value)
        return encoder(value)

    def _encoder_of(self, value: Any) -> Callable[[Any], Any]:
        encoders: list[tuple[Any, Callable[[Any], Any]]] = [
            (np.ndarray, self._array), (torch.Tensor, self._tensor), (Slots, self._handles),
            (MirroredTensor, self._mirrored), (Batch, self._batch), (tuple(OBJECTS)[:-1], self._target),
            ((PlannedStep, Prefetched), lambda made: self._known(getattr(made, "_recorded", 0))),
            (np.generic, lambda number: number.item()), (Mapping, dict), ((Part, Ref, Device, Host), tagged),
            (type(...), lambda _: {"$": ["e"]}),
        ]  # fmt: skip
        if isinstance(value, type):
            return self._target if issubclass(value, Batch) else lambda _: _OPAQUE
        if callable(getattr(value, "query", None)):
            return lambda _: "fence"
        return next((encoder for kind, encoder in encoders if isinstance(value, kind)), self._earlier)

    def _array(self, array: Any) -> Any:
        name = DTYPES.get(array.dtype)
        if name is None:
            return _OPAQUE
        self._blobs.append(array.tobytes())
        return {"$": ["a", name, array.shape]}

    def _tensor(self, tensor: torch.Tensor) -> Any:
        return tagged(Device(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))

    def _handles(self, slots: Slots) -> Any:
        return {"$": ["h", self._pools.get(slots.pool_id, 0), slots.np, slots.generations]}

    def _mirrored(self, value: MirroredTensor) -> Any:
        if value.contract.value == "device_only":
            return self._tensor(value.device)
        if isinstance(value, Handles) or value.open_windows:  # reading them may be refused
            return _OPAQUE
        return tagged(Host(value.contract.value, value.np))

    def _earlier(self, value: Any) -> Any:
        number, ref = self._products.get(id(value), (0, lambda: None))
        return {"$": ["r", number]} if ref() is value else _OPAQUE

    def _known(self, number: int) -> Any:
        ring = self._ring
        return {"$": ["r", number]} if number > ring.first else _OPAQUE

    def _batch(self, batch: Batch) -> Any:
        ring, versions = self._ring, self._batches[id(batch.runtime)]
        if (made := versions.get(batch.version)) is None:
            values = dict[str, Any]()
            for name, column in batch.columns().items():
                host = isinstance(column, HostColumn)
                values[name] = list(batch.objects(name)) if host else batch[name]
                if isinstance(column, DeviceColumn):
                    values[name] = batch[name].device
            body = self._body([type(batch), [batch.runtime], values])
            ring.number += 1
            ring.write(_CODES["Batch.build"], 0, batch.runtime.step, ring.number, body)
            versions[batch.version] = made = Ref(ring.number)
        return tagged(Part(made, "batch") if isinstance(made, int) else made)

    # Objects

    def _target(self, value: Any) -> Any:
        ring = self._ring
        number, ref = self._objects.get(id(value), (0, lambda: None))
        if ref() is not value:
            self._objects.pop(id(value), None)  # of an object that is gone; the order is that of the definitions
            ring.number = number = ring.number + 1
            self._define(value, number)
        return {"$": ["r", number]}

    def _define(self, value: Any, number: int) -> None:
        """Writes down what an object is, and the calls that bring it to its state."""
        ring = self._ring
        kind = type if isinstance(value, type) else next(kind for kind in OBJECTS if isinstance(value, kind))
        # Encoded first: what it refers to is defined before it, also when a later segment begins.
        body = self._body({"is": kind.__name__, **OBJECTS[kind].described(value)})
        ring.write(_KIND["define"], 0, 0, number, body)
        self._objects[id(value)] = number, weakref.ref(value)
        if isinstance(value, SlotPool):
            self._pools[value.pool_id] = number
        inside, ring.inside = ring.inside, True
        try:
            for method, args, kwargs, product in OBJECTS[kind].state(value):
                body = self._body([value, args, kwargs])
                ring.number += 1
                ring.write(_CODES[f"{kind.__name__}.{method}"], STATE, value.runtime.step, ring.number, body)
                if product is not None:
                    self.write("result", product, number=ring.number)
        finally:
            ring.inside = inside

    # Seams

    def _install(self) -> None:
        short = {(StepPlanner, "plan"): self._plan, (PlannedStep, "inputs"): self._inputs}
        short[PlannedStep, "publish"] = self._publish
        for owner, names in SEAMS.items():
            for name in names:
                make = short.get((owner, name), self._seam)
                self._replace(owner, name, functools.partial(make, _CODES[f"{owner.__name__}.{name}"]))
        self._replace(Prefetched, "resolve", self._landing)
        self._replace(SlotPool, "release_rows", self._leaving)
        unknown: list[tuple[Any, int | None]] = [(StepPlanner, None), (PlannedStep, 0), (Prefetched, 0)]
        for owner, number in unknown:
            owner._recorded = number
            self._undo.callback(delattr, owner, "_recorded")

    def _replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        before = inspect.getattr_static(owner, name)
        after = classmethod(make(before.__func__)) if isinstance(before, classmethod) else make(before)
        setattr(owner, name, after)
        self._undo.callback(setattr, owner, name, before)

    def _seam(self, code: int, method: Any) -> Any:
        ring = self._ring

        @functools.wraps(method)
        def recorded(target: Any, *args: Any, **kwargs: Any) -> Any:
            if ring.inside or threading.get_ident() != self._thread:
                return method(target, *args, **kwargs)
            runtime = args[0] if isinstance(target, type) and args else runtime_of(target)
            if not isinstance(runtime, Runtime):
                return method(target, *args, **kwargs)
            number = self._call(code, target, runtime, args, kwargs)
            ring.inside = True
            try:
                made = method(target, *args, **kwargs)
            finally:
                ring.inside = False
            self._made(number, made)
            return made

        return recorded

    # The three calls of each step have a short way where they say nothing new. At `full` the library calls seams inside
    # of them, and they go the general way.

    def _plan(self, code: int, method: Any) -> Any:
        ring = self._ring
        pack_into, general = HEAD.pack_into, self._seam(code, method)

        @functools.wraps(method)
        def plan(planner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            at, declared = ring.at, planner._recorded
            if ring.inside:
                return method(planner, batch, *args, **kwargs)
            if args or kwargs or declared is None or at > ring.mark or levels.full:
                step = general(planner, batch, *args, **kwargs)
                self._planned_generally(planner, step, kwargs.get("joining"))
                return step
            number, planned, runtime = declared
            version = getattr(batch, "version", None)
            made = planned.get(version)
            if type(made) is not int:
                return general(planner, batch)
            if runtime.current_stream is not ring.stream:
                self._stream_of(runtime)
            ring.number = own = ring.number + 1
            pack_into(ring.buffer, at, code, ring.stream_number, runtime.step, own, number, made, 0)
            ring.at = at + _HEAD
            step = method(planner, batch)
            planned.pop(version, None)  # a batch goes on in one step: who asks it again writes it by value
            step._recorded = own
            planned[step.batch.version] = own
            return step

        return plan

    def _planned_generally(self, planner: Any, step: Any, joining: Any) -> None:
        """Notes the handles that those who join have got, and that the planner has a short way from now on."""
        runtime = planner._runtime
        if step._recorded and joining is not None and not isinstance(joining, Batch):  # else of another thread
            pool, kept = planner._slots, step.num_reqs - max(map(len, joining.values()), default=0)
            rows, generations = step.rows[kept:], step.generations[kept:]
            own = Slots.of_pool(runtime, rows, generations, pool_id=pool.pool_id, name=pool.name)
            self.write("result", own, number=step._recorded)
        number, ref = self._objects.get(id(planner), (0, lambda: None))
        planner._recorded = None if ref() is not planner else (number, self._batches[id(runtime)], runtime)

    def _inputs(self, code: int, method: Any) -> Any:
        ring = self._ring
        pack_into, general = HEAD.pack_into, self._seam(code, method)

        @functools.wraps(method)
        def inputs(step: Any) -> Any:
            number, at = step._recorded, ring.at
            if ring.inside or levels.full or number <= ring.first or at + _HEAD > ring.size:
                return general(step) if number > ring.first else method(step)
            runtime = step._declared.runtime
            if runtime.current_stream is not ring.stream:
                self._stream_of(runtime)
            ring.number = own = ring.number + 1
            pack_into(ring.buffer, at, code, ring.stream_number, runtime.step, own, number, 0, 0)
            ring.at = at + _HEAD
            return method(step)

        return inputs

    def _publish(self, code: int, method: Any) -> Any:
        ring = self._ring
        general, tensor = self._seam(code, method), torch.Tensor
        events: dict[tuple[str, ...], tuple[struct.Struct, bytes, int]] = {}

        def event(names: tuple[str, ...]) -> tuple[struct.Struct, bytes, int]:
            tail = self._body(dict.fromkeys(names, ...))
            layout = struct.Struct(f"{HEAD.format}{len(tail)}s")
            events[names] = made = layout, tail, layout.size
            return made

        @functools.wraps(method)
        def publish(step: Any, **values: Any) -> None:
            number, at = step._recorded, ring.at
            layout, tail, size = events.get(names := tuple(values)) or event(names)
            plain = number > ring.first and at + size <= ring.size and not (ring.inside or levels.full)
            for value in values.values():
                if type(value) is not tensor:
                    plain = False
            if plain:
                runtime = step._declared.runtime
                if runtime.current_stream is not ring.stream:
                    self._stream_of(runtime)
                ring.number = own = ring.number + 1
                layout.pack_into(
                    ring.buffer, at, code, ring.stream_number, runtime.step, own, number, 0, size - _HEAD, tail
                )
                ring.at = at + size
                method(step, **values)
            else:
                (general if number > ring.first else method)(step, **values)
            if step._results is not None:
                step._results._recorded = number

        return publish

    def _landing(self, method: Any) -> Any:
        ring = self._ring
        landed = _KIND["landed"]
        last: Any = None, 0, None, HEAD, b"", 0

        def event(results: Any) -> Any:
            arrays = results._arrays
            body = self._body(dict(zip(results._names, arrays, strict=True)))
            size = sum(array.nbytes for array in arrays)
            head = body[: len(body) - size]
            layout = struct.Struct(f"{HEAD.format}{len(head)}s{size}s")
            return results._names, results.num_reqs, results._source, layout, head, layout.size

        @functools.wraps(method)
        def resolve(results: Any) -> Any:
            nonlocal last
            there = results._arrays is not None
            if there:
                return method(results)
            made, number, at = method(results), results._recorded, ring.at
            if number > ring.first:
                names, num_reqs, source, layout, head, size = last
                if num_reqs != results.num_reqs or names is not results._names or source is not results._source:
                    *_, layout, head, size = last = event(results)
                arrays = results._arrays
                raw = arrays[0].tobytes() if len(arrays) == 1 else b"".join([array.tobytes() for array in arrays])
                if at + size > ring.size:
                    ring.write(landed, 0, 0, number, head + raw)
                else:
                    layout.pack_into(ring.buffer, at, landed, 0, 0, number, 0, 0, size - _HEAD, head, raw)
                    ring.at = at + size
            return made

        return resolve

    def _leaving(self, method: Any) -> Any:
        @functools.wraps(method)
        def release_rows(pool: Any, rows: Any, *args: Any) -> None:
            if args[-1] == "plan" and threading.get_ident() == self._thread:
                self.write("left", rows, number=self._ring.number)  # which its arguments say by row alone
            method(pool, rows, *args)

        return release_rows

    def _hooked(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hooked method of a watched engine is called."""
        ring = self._ring
        if not ring.inside and threading.get_ident() == self._thread:
            self.begin_step()
            self.write("hook", {"call": name, "args": args[1:], "kwargs": kwargs})


def runtime_of(target: Any) -> Any:
    """The runtime of what a call is made on."""
    if isinstance(target, PlannedStep):
        return target._declared.runtime
    return target._runtime if isinstance(target, StepPlanner) else getattr(target, "runtime", None)


_active: Recorder | None = None
_last = 0
"""Number of the last event of earlier recordings, whose steps are known by it to be none of this one."""


def recorder() -> Recorder | None:
    """The recording under way, or None."""
    return _active


def record_operations(
    directory: str | Path,
    *,
    ring_bytes: int = 8 << 20,
    segments: int = 4,
    everything: bool = False,
    rank: int | None = None,
    signal: int | None = None,
) -> Recorder:
    """Begins to record this process, until `stop` or the end of a `with` block.

    Args:
        directory: files of violations are written there.
        ring_bytes: memory of the ring.
        segments: parts of it, two or more; the oldest is given up when the next begins.
        everything: keep all events in memory of its own instead of a ring, for a short run.
        rank: of the process in its group; by default that of the variable RANK, or 0.
        signal: writes a file too, such as `signal.SIGUSR2`; from the main thread alone.

    Raises:
        ArgumentError: a recording is under way; sizes that are none.
    """
    global _active
    if _active is not None:
        raise ArgumentError("a recording is under way", str(_active.directory), "stop it first: `recorder().stop()`")
    if segments < 2 or ring_bytes < segments << 14:
        problem = f"a ring of {ring_bytes} bytes in {segments} segments"
        raise ArgumentError(problem, ring_bytes, "use two segments or more, of 16 KiB each at least")
    own = rank if rank is not None else int(os.environ.get("RANK", "0"))
    _active = Recorder(Path(directory), ring_bytes, segments, everything, own, signal)
    return _active


def switch_on(directory: str) -> None:
    """Records from now on, as the variable BATCHSTATE_RECORD asks; says so where files could not be written."""
    if _active is not None:
        return
    recorder = record_operations(directory)
    try:
        recorder.directory.mkdir(parents=True, exist_ok=True)
        unwritable = not os.access(recorder.directory, os.W_OK)
    except OSError:
        unwritable = True
    if unwritable:
        recorder.tell_unwritable(recorder.directory, "it is no folder that can be written")
