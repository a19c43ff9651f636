"""Records what an engine asks of its state, in a ring that is written to a file when a violation is found.

Recording replaces public methods by functions that write an event and call the method; stopping puts the methods back,
and a process that does not record pays nothing. The seams are the calls that change slots, pages, relay entries or
batches, and those that ask about them (`SEAMS`); two properties say which batch and which results belong to a step.
Nothing is read from the device: results are written down when the engine has read them.

The ring is a few segments of memory that is taken once. Each begins with the state of every pool and relay that is
alive, from which a replay starts, so that the oldest segment can go at any time. What a segment has not seen being made
is written by value when it is first used there: a batch as its columns, slots as numbers with generations.
"""

import contextlib
import functools
import inspect
import logging
import os
import signal as signals
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch

from batchstate import levels, violations
from batchstate.batch import Batch
from batchstate.columns import DeviceColumn, HostColumn, SlotColumn, TensorColumn
from batchstate.errors import ArgumentError
from batchstate.future_map import FutureMap, Prefetched
from batchstate.kv.pages import Extension, PagePool
from batchstate.mirror import Handles, MirroredTensor, Slots
from batchstate.pools import SlotPool
from batchstate.replay.format import DTYPES, FIRST_METHOD, HEAD, KINDS, Finding, save
from batchstate.runtime.base import Runtime
from batchstate.step import PlannedStep, StepPlanner
from batchstate.tables import Table, TableWrite
from batchstate.violations import Violation

__all__ = ["METHODS", "SEAMS", "Recorder", "record_operations", "recorder"]

_log = logging.getLogger("batchstate")

SEAMS: Mapping[type, tuple[str, ...]] = {
    SlotPool: ("take", "free", "release_requests", "clear", "verify", "expect_idle", "check_handles"),
    PagePool: (
        "take_requests", "grow", "commit", "accept", "extend", "advance", "take", "assign", "share", "hold", "rebase",
        "truncate", "release", "release_requests", "entry", "locations", "pages_of", "verify", "expect_idle",
    ),
    FutureMap: ("publish", "gather", "prefetch", "resolve", "discard", "check"),
    StepPlanner: ("plan",),
    PlannedStep: ("inputs", "publish", "accept"),
    Batch: (
        "build", "empty", "filter", "merge", "next_batch", "advance", "split", "pad", "update", "replace", "tighten",
        "upload", "check", "check_live",
    ),
}  # fmt: skip
METHODS = [f"{owner.__name__}.{name}" for owner, names in SEAMS.items() for name in names]
_CODES = {name: FIRST_METHOD + number for number, name in enumerate(METHODS)}
_KIND = {name: number for number, name in enumerate(KINDS)}
_DTYPE_CODES = {dtype: number for number, dtype in enumerate(DTYPES)}
_pack = struct.Struct("<I").pack
_REF = struct.Struct("<cI").pack
_PLAN = struct.Struct("<BBIII15scI9s5s")  # head; (planner, (batch of a step,), {})
_STEP = struct.Struct("<BBIII5scI5s")  # head; (step, (), and what follows
_INPUTS = struct.Struct("<BBIII5scI10s")  # head; (step, (), {})
_LANDED = KINDS.index("landed")
_TRIPLE, _NO_ARGS, _NO_NAMES = b"t" + _pack(3), b"t" + _pack(0), b"d" + _pack(0)
_EMPTY = _NO_ARGS + _NO_NAMES
_FULL = 0.75
_MOST_FILES = 16


def _text(words: str) -> bytes:
    raw = words.encode()
    return _pack(len(raw)) + raw


@final
class Recorder:
    """A recording under way, which `record_operations` begins. Calls of other threads are not recorded.

    Attributes:
        files: written by now.
        dropped: events that did not fit into a segment.
    """

    def __init__(
        self, directory: Path, ring_bytes: int, segments: int, everything: bool, rank: int, signal: int | None
    ) -> None:
        self.directory, self.rank = directory, rank
        self.files: list[Path] = []
        self.dropped = 0
        self._size = max(ring_bytes // segments, 1 << 14)
        self._segments = [memoryview(bytearray(self._size)) for _ in range(1 if everything else segments)]
        self._ends = [0] * len(self._segments)
        self._spool: list[bytes] | None = [] if everything else None
        self._turns = self._at = self._number = 0
        self._buffer = self._segments[0]
        self._mark = int(self._size * _FULL)
        self._thread = threading.get_ident()
        self._inside = False
        self._told: set[object] = set()
        self._failed = False
        self._batches: dict[tuple[int, int], int] = {}
        self._made_by: dict[int, int] = {}  # id of what a seam has made, which is made by seams alone, -> its event
        self._landed: set[tuple[int, str]] = set()
        self._objects: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._planned: weakref.WeakKeyDictionary[StepPlanner, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._kinds: dict[type, int] = {}
        self._streams: dict[int, tuple[int, Any]] = {}  # with the stream, so that its id stays its own
        self._stream_last: Any = None
        self._stream_number = 0
        self._runtime: Any = None  # of the last plan
        self._tensors: dict[Any, bytes] = {}
        self._heads: dict[int, bytes] = {}
        self._encoders: dict[type, Callable[[Any], bytes]] = dict(self._plain_encoders())
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo = contextlib.ExitStack()
        if signal is not None:
            before = signals.signal(signal, lambda *_: self.dump("signal"))
            self._undo.callback(signals.signal, signal, before)
        self._install()
        violations.observers.append(self._violated)
        self._undo.callback(violations.observers.remove, self._violated)
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Puts the methods back."""
        global _active
        if _active is self:
            _active = None
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
            header = {"reason": reason, "rank": self.rank, "level": level, "dropped": self.dropped}
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
        if self._spool is not None:
            return b"".join([*self._spool, self._buffer[: self._at]])
        count, present = len(self._segments), self._turns % len(self._segments)
        order = [(present + 1 + number) % count for number in range(count - 1)]
        return b"".join([*(self._segments[i][: self._ends[i]] for i in order), self._buffer[: self._at]])

    def _violated(self, error: Violation) -> None:
        identity = error.code, error.operation, error.object if error.row is None else None
        if threading.get_ident() == self._thread and identity not in self._told and len(self._told) < _MOST_FILES:
            self._told.add(identity)
            self.dump("violation", Finding.of(error))

    # Writing events

    def write(self, kind: str, body: object, *, number: int | None = None) -> None:
        """Writes an event that is no call."""
        self._event(_KIND[kind], 0, 0, self._number if number is None else number, self._encoded(body))

    def begin_step(self) -> None:
        """Begins the next segment if this one is nearly full: between two steps of an engine."""
        if self._at > self._mark:
            self._turn()

    def _event(self, code: int, stream: int, step: int, number: int, body: bytes) -> None:
        at = self._at
        end = at + 14 + len(body)
        if end > self._size:
            if end - at > self._size:
                self.dropped += 1
                return
            if self._spool is None:
                self.dropped += 1  # the next plan begins a segment; what does not fit until then is lost
                return
            self._turn()
            at, end = 0, 14 + len(body)
        HEAD.pack_into(self._buffer, at, code, stream, step, number, len(body))
        self._buffer[at + 14 : end] = body
        self._at = end

    def _turn(self) -> None:
        """Begins the next segment."""
        if self._spool is not None:
            self._spool.append(bytes(self._buffer[: self._at]))
            self._at = 0
            return
        present = self._turns % len(self._segments)
        self._ends[present] = self._at
        self._turns += 1
        self._buffer = self._segments[self._turns % len(self._segments)]
        self._at = 0
        self._begin()

    def _begin(self) -> None:
        """Forgets what earlier segments have made, and writes down the state of all that is alive."""
        self._batches.clear()
        self._made_by.clear()
        self._landed.clear()
        inside, self._inside = self._inside, True
        try:
            self.write("begin", {"segment": self._turns})
            for kind, number in self._kinds.items():
                self._define_kind(kind, number)
            for number, ref in list(self._objects.values()):
                if (alive := ref()) is not None:
                    self._define(alive, number)
            for engine in list(self.engines):
                engine.write_open()
        finally:
            self._inside = inside

    def _call(self, code: int, target: Any, runtime: Runtime, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if self._at > self._mark:
            self._turn()
        body = b"".join([_TRIPLE, self._encoded(target), self._encoded(args), self._named(kwargs)])
        self._number = number = self._number + 1
        self._event(code, self._stream(runtime), runtime.step, number, body)
        return number

    def _stream(self, runtime: Runtime) -> int:
        """The number of the current stream."""
        stream = runtime.current_stream
        if stream is not self._stream_last:
            entry = self._streams.setdefault(id(stream), (min(len(self._streams), 255), stream))
            self._stream_number, self._stream_last = entry
        return self._stream_number

    def _raised(self, number: int, error: BaseException) -> None:
        self.write("raised", str(getattr(error, "code", type(error).__name__)), number=number)

    def _made(self, number: int, made: Any) -> None:
        """Notes what a call has made, so that later events can refer to it."""
        if isinstance(made, Batch):
            self._batches[made.version, id(made.runtime)] = number
        elif isinstance(made, Slots):
            self.write("result", made, number=number)
        elif isinstance(made, list | tuple):
            for place, part in enumerate(made):
                if isinstance(part, Batch):
                    self._batches[part.version, id(part.runtime)] = number | place << 32
        elif made is not None and not isinstance(made, torch.Tensor | np.ndarray | int | str):
            self._made_by[id(made)] = number

    # Objects

    def _target(self, value: Any) -> bytes:
        entry = self._objects.get(id(value))
        if entry is None or entry[1]() is not value:
            self._number += 1
            self._define(value, self._number)
            entry = self._objects[id(value)]
        return _REF(b"r", entry[0])

    def _number_of(self, value: Any) -> int:
        self._target(value)
        return self._objects[id(value)][0]

    def _pool_number(self, pool_id: int) -> int:
        for number, ref in self._objects.values():
            pool = ref()
            if isinstance(pool, SlotPool) and pool.pool_id == pool_id:
                return number
        return 0

    def _define(self, value: Any, number: int) -> None:
        """Writes down what an object is, and its state."""
        inside, self._inside = self._inside, True
        try:
            kind = _kind_of(value)
            # Encoded first: what it refers to is defined before it, also when a later segment begins.
            body = self._encoded({"is": kind.__name__, **_DESCRIBED[kind](self, value)})
            self._objects[id(value)] = number, weakref.ref(value)
            self._event(_KIND["define"], 0, 0, number, body)
        finally:
            self._inside = inside

    def batch_kind(self, kind: type[Batch]) -> int:
        """The number of a batch class, which is described where it comes first."""
        number = self._kinds.get(kind)
        if number is None:
            number = self._number = self._kinds[kind] = self._number + 1
            self._define_kind(kind, number)
        return number

    def _define_kind(self, kind: type[Batch], number: int) -> None:
        columns = {}
        for name, column in kind.columns().items():
            body: dict[str, Any] = {"is": type(column).__name__}
            if isinstance(column, TensorColumn) and not isinstance(column, SlotColumn):
                body |= {
                    "dtype": str(column.dtype).removeprefix("torch."), "shape": tuple(column.shape),
                    "pad": np.array(column.pad), "contract": column.contract.value, "holds": column.holds,
                }  # fmt: skip
            columns[name] = body
        self.write("define", {"is": "Batch", "name": kind.__name__, "columns": columns}, number=number)

    # Values

    def _encoded(self, value: Any) -> bytes:
        encoder = self._encoders.get(type(value))
        if encoder is None:
            encoder = self._encoders[type(value)] = self._encoder_of(value)
        return encoder(value)

    def _named(self, values: Mapping[str, Any]) -> bytes:
        if not values:
            return _NO_NAMES
        encoded, parts = self._encoded, [b"d", _pack(len(values))]
        for name, value in values.items():
            parts += _text(name), encoded(value)
        return b"".join(parts)

    def _plain_encoders(self) -> Iterator[tuple[type, Callable[[Any], bytes]]]:
        pack_int, pack_float = struct.Struct("<q").pack, struct.Struct("<d").pack
        yield type(None), lambda _: b"N"
        yield type(...), lambda _: b"e"
        yield bool, lambda value: b"T" if value else b"F"
        yield int, lambda value: b"i" + pack_int(value) if -(2**63) <= value < 2**63 else b"o"
        yield float, lambda value: b"f" + pack_float(value)
        yield str, lambda value: b"s" + _text(value)
        yield list, lambda value: b"".join([b"l", _pack(len(value)), *map(self._encoded, value)])
        yield tuple, lambda value: b"".join([b"t", _pack(len(value)), *map(self._encoded, value)])
        yield dict, self._named
        yield np.ndarray, self._array
        yield torch.Tensor, self._tensor

    def _encoder_of(self, value: Any) -> Callable[[Any], bytes]:
        if isinstance(value, Batch):
            return self._batch
        if isinstance(value, Slots):
            return self._slots
        if isinstance(value, MirroredTensor):
            return self._mirrored
        if any(kind in _DESCRIBED for kind in type(value).__mro__):
            return self._target
        if isinstance(value, PlannedStep | Prefetched | TableWrite | Extension) or type(value).__name__ == "PageLease":
            return self._earlier
        if isinstance(value, np.generic):
            return lambda number: self._encoded(number.item())
        if isinstance(value, type) and issubclass(value, Batch):
            return lambda kind: _REF(b"r", self.batch_kind(kind))
        if isinstance(value, torch.Tensor):
            return self._tensor
        if isinstance(value, Mapping):
            return self._named
        if callable(getattr(value, "query", None)):
            return lambda _: b"s" + _text("fence")
        return lambda _: b"o"

    def _array(self, array: Any) -> bytes:
        code = _DTYPE_CODES.get(array.dtype)
        if code is None:
            return b"o"
        raw: bytes = array.tobytes()
        return struct.pack(f"<cBB{array.ndim}I", b"a", code, array.ndim, *array.shape) + raw

    def _tensor(self, tensor: torch.Tensor) -> bytes:
        key = tensor.dtype, tensor.shape
        encoded = self._tensors.get(key)
        if encoded is None:
            name = str(tensor.dtype).removeprefix("torch.")
            encoded = self._tensors[key] = b"D" + _text(name) + self._encoded(tuple(tensor.shape))
        return encoded

    def _handles(self, pool: int, slots: Any, generations: Any) -> bytes:
        return b"".join([b"h", _pack(pool), _pack(len(slots)), slots.tobytes(), generations.tobytes()])

    def _slots(self, slots: Slots) -> bytes:
        return self._handles(self._pool_number(slots.pool_id), slots.np, slots.generations)

    def _mirrored(self, value: MirroredTensor) -> bytes:
        if value.contract.value == "device_only":
            return self._tensor(value.device)
        if isinstance(value, Handles) or value.open_windows:  # reading them may be refused
            return b"o"
        return b"H" + _text(value.contract.value) + self._array(value.np)

    def _earlier(self, value: Any) -> bytes:
        number = self._made_by.get(id(value))
        return b"o" if number is None else _REF(b"r", number)

    def _batch(self, batch: Batch) -> bytes:
        number = self._batches.get((batch.version, id(batch.runtime)))
        if number is not None:
            if number >= 0 and number < 1 << 32:
                return _REF(b"r", number)
            return (
                b"p" + _pack(~number) + _text("batch")
                if number < 0
                else b"p" + _pack(number & 0xFFFFFFFF) + _text(str(number >> 32))
            )
        inside, self._inside = self._inside, True
        try:
            kind, values = self.batch_kind(type(batch)), dict[str, Any]()
            runtime = self._target(batch.runtime)
            for name, column in batch.columns().items():
                host = isinstance(column, HostColumn)
                value = list(batch.objects(name)) if host else batch[name]
                values[name] = value if host or not isinstance(column, DeviceColumn) else batch[name].device
            self._number += 1
            body = b"".join([_TRIPLE, _REF(b"r", kind), b"t" + _pack(1) + runtime, self._named(values)])
            self._event(_CODES["Batch.build"], 0, batch.runtime.step, self._number, body)
            self._batches[batch.version, id(batch.runtime)] = self._number
            return _REF(b"r", self._number)
        finally:
            self._inside = inside

    # Seams

    def _install(self) -> None:
        for owner, names in SEAMS.items():
            for name in names:
                code = _CODES[f"{owner.__name__}.{name}"]
                short = {"inputs": self._inputs_seam, "plan": self._plan_seam, "publish": self._publish_seam}
                make = short.get(name, self._seam) if owner in (StepPlanner, PlannedStep) else self._seam
                self._replace(owner, name, functools.partial(make, code))
        self._replace(StepPlanner, "__init__", self._planner_seam)
        self._replace(Prefetched, "__getitem__", self._landing_seam)
        self._replace(PlannedStep, "batch", self._batch_seam)
        self._replace(PlannedStep, "results", self._results_seam)

    def _replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        before = inspect.getattr_static(owner, name)
        if isinstance(before, property):
            after: Any = property(make(before.fget), doc=before.__doc__)
        elif isinstance(before, classmethod):
            after = classmethod(make(before.__func__))
        else:
            after = make(before)
        setattr(owner, name, after)
        self._undo.callback(setattr, owner, name, before)

    def _seam(self, code: int, method: Any) -> Any:
        def recorded(target: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return method(target, *args, **kwargs)
            runtime = args[0] if isinstance(target, type) else getattr(target, "runtime", self._runtime)
            number = self._call(code, target, runtime, args, kwargs)
            self._inside = True
            try:
                made = method(target, *args, **kwargs)
            except BaseException as error:
                self._raised(number, error)
                raise
            finally:
                self._inside = False
            self._made(number, made)
            return made

        return functools.wraps(method)(recorded)

    # The three calls of each step have a short way: one pack of plain numbers. At `full` the library calls seams inside
    # of them, and they go the general way.

    def _plan_seam(self, code: int, method: Any) -> Any:
        batches, made_by, heads, general = self._batches, self._made_by, self._heads, self._seam(code, method)
        pack_into, get_ident, batch_part, length = _PLAN.pack_into, threading.get_ident, _text("batch"), _PLAN.size - 14

        def plan(planner: StepPlanner, batch: Batch, *args: Any, **kwargs: Any) -> PlannedStep:
            runtime = self._runtime = batch.runtime
            if self._inside or get_ident() != self._thread:
                step: PlannedStep = method(planner, batch, *args, **kwargs)
                made_by.pop(id(step), None)  # an earlier step may have had its place
                return step
            made = batches.get((batch.version, id(runtime)), 0)
            at, head = self._at, heads.get(id(planner))
            if made >= 0 or kwargs or args or head is None or at > self._mark or levels.full:
                step = general(planner, batch, *args, **kwargs)
                if kwargs.get("joining") is not None and (joined := _rows_joining(kwargs["joining"])):
                    pages = self._planned[planner]["options"]["pages"]
                    handles = self._number_of(pages.slots), step.rows[-joined:], step.generations[-joined:]
                    number = made_by[id(step)]
                    self._event(_KIND["result"], 0, 0, number, self._handles(*handles))
                if head is None and planner in self._planned:
                    heads[id(planner)] = _TRIPLE + self._target(planner) + b"t" + _pack(1)
                return step
            stream = runtime.current_stream
            if stream is not self._stream_last:
                self._stream(runtime)
            number = self._number = self._number + 1
            pack_into(
                self._buffer, at, code, self._stream_number, runtime.step, number, length,
                head, b"p", ~made, batch_part, _NO_NAMES,
            )  # fmt: skip
            self._at = at + _PLAN.size
            try:
                step = method(planner, batch)
            except BaseException as error:
                self._raised(number, error)
                raise
            made_by[id(step)] = number
            return step

        return functools.wraps(method)(plan)

    def _inputs_seam(self, code: int, method: Any) -> Any:
        made_by, pack_into, general = self._made_by, _INPUTS.pack_into, self._seam(code, method)

        def inputs(step: PlannedStep) -> Any:
            number, at = made_by.get(id(step)), self._at
            if number is None or self._inside or levels.full or at + 34 > self._size:
                return general(step) if number is not None else method(step)
            runtime = self._runtime
            stream = runtime.current_stream
            if stream is not self._stream_last:
                self._stream(runtime)
            own = self._number = self._number + 1
            pack_into(
                self._buffer, at, code, self._stream_number, runtime.step, own, 20,
                _TRIPLE, b"r", number, _EMPTY,
            )  # fmt: skip
            self._at = at + 34
            try:
                return method(step)
            except BaseException as error:
                self._raised(own, error)
                raise

        return functools.wraps(method)(inputs)

    def _publish_seam(self, code: int, method: Any) -> Any:
        return self._step_seam(code, method)

    def _step_seam(self, code: int, method: Any) -> Any:
        tails: dict[tuple[str, ...], bytes] = {}
        made_by, pack_into, general, tensor = self._made_by, _STEP.pack_into, self._seam(code, method), torch.Tensor

        def recorded(step: PlannedStep, **values: Any) -> Any:
            number, at = made_by.get(id(step)), self._at
            tail = tails.get(tuple(values))
            if tail is None:
                for value in values.values():
                    if not isinstance(value, tensor):
                        return general(step, **values)
                tail = tails[tuple(values)] = self._named(dict.fromkeys(values, ...))
            end = at + _STEP.size + len(tail)
            if number is None or self._inside or levels.full or end > self._size:
                return general(step, **values) if number is not None else method(step, **values)
            runtime = self._runtime
            stream = runtime.current_stream
            if stream is not self._stream_last:
                self._stream(runtime)
            own = self._number = self._number + 1
            buffer = self._buffer
            pack_into(
                buffer, at, code, self._stream_number, runtime.step, own, end - at - 14, _TRIPLE, b"r", number, _NO_ARGS
            )
            buffer[at + _STEP.size : end] = tail
            self._at = end
            try:
                return method(step, **values)
            except BaseException as error:
                self._raised(own, error)
                raise

        return functools.wraps(method)(recorded)

    def _planner_seam(self, method: Any) -> Any:
        @functools.wraps(method)
        def made(planner: StepPlanner, batch: type[Batch], **options: Any) -> None:
            method(planner, batch, **options)
            self._planned[planner] = {"batch": batch, "options": options}

        return made

    def _batch_seam(self, method: Any) -> Any:
        batches, made_by = self._batches, self._made_by

        def batch(step: PlannedStep) -> Batch:
            made: Batch = method(step)
            number = made_by.get(id(step))
            if number is not None:
                batches[made.version, id(made.runtime)] = ~number
            return made

        return batch

    def _results_seam(self, method: Any) -> Any:
        made_by = self._made_by

        def results(step: PlannedStep) -> Prefetched:
            made: Prefetched = method(step)
            number = made_by.get(id(step))
            if number is not None and not self._inside:
                made_by[id(made)] = number
            return made

        return results

    def _landing_seam(self, method: Any) -> Any:
        made_by, landed, at_once = self._made_by, self._landed, _text

        def read(fields: Prefetched, field: str) -> MirroredTensor:
            value: MirroredTensor = method(fields, field)
            number = made_by.get(id(fields))
            if number is not None and not self._inside and (number, field) not in landed:
                landed.add((number, field))
                head = b"d" + _pack(1) + at_once(field)
                self._event(_LANDED, 0, 0, number, head + self._array(value.np))
            return value

        return functools.wraps(method)(read)


def _rows_joining(joining: Any) -> int:
    return len(joining) if isinstance(joining, Batch) else max(map(len, joining.values()), default=0)


# Descriptions of objects, and their states


def _kind_of(value: Any) -> type:
    return next(kind for kind in type(value).__mro__ if kind in _DESCRIBED)


def _runtime(recorder: Recorder, runtime: Runtime) -> dict[str, Any]:
    return {"device": str(runtime.device), "steps_in_flight": runtime.steps_in_flight}


def _live(pool: SlotPool) -> Slots:
    rows = pool.live_slots()
    generations = pool._core.arrays["generation"][rows].astype(np.int64)
    return Slots.of_pool(pool.runtime, rows, generations, pool_id=pool.pool_id, name=pool.name)


def _slot_pool(recorder: Recorder, pool: SlotPool) -> dict[str, Any]:
    live = _live(pool)
    runtime = recorder._number_of(pool.runtime)
    return {
        "runtime": runtime, "size": pool.size, "reserve": pool.reserve, "name": pool.name,
        "live": np.array(live.np), "generations": np.array(live.generations),
    }  # fmt: skip


def _table(recorder: Recorder, table: Table) -> dict[str, Any]:
    return {
        "pool": recorder._number_of(table.space), "name": table.name, "shape": table.shape[1:],
        "dtype": str(table.dtype).removeprefix("torch."), "holds": table.holds, "row_zero": table.row_zero,
    }  # fmt: skip


def _page_pool(recorder: Recorder, pages: PagePool) -> dict[str, Any]:
    live, table = _live(pages.slots), pages.req_to_token
    body = {
        "slots": recorder._number_of(pages.slots), "num_pages": pages.num_pages, "page_size": pages.page_size,
        "max_tokens_per_request": pages.max_tokens_per_request, "name": pages.name,
        "req_to_token": None if table is None else recorder._number_of(table), "live": np.array(live.np),
    }  # fmt: skip
    if len(live):
        body |= {"allocated": np.array(pages.allocated(live)), "committed": np.array(pages.committed(live))}
        body["pages"] = np.array(pages.page_table[live.np])
    return body


def _relay(recorder: Recorder, relay: FutureMap) -> dict[str, Any]:
    fields = {
        name: {
            "dtype": str(field.dtype).removeprefix("torch."), "shape": field.shape, "readers": field.readers,
            "non_negative": field.non_negative, "must_read": field.must_read, "ragged": field.ragged,
            "stale": field.stale,
        }
        for name, field in relay.fields.items()
    }  # fmt: skip
    live = _live(relay.slots)
    states = {name: [str(state.value) for state in relay.states(live, name)] for name in fields if len(live)}
    slots = recorder._number_of(relay.slots)
    return {"slots": slots, "name": relay.name, "fields": fields, "live": np.array(live.np), "states": states}


def _step_planner(recorder: Recorder, planner: StepPlanner) -> dict[str, Any]:
    noted = recorder._planned.get(planner)
    if noted is None:
        return {"batch": None}
    options = {
        name: sorted(option) if isinstance(option, frozenset | set) else option
        for name, option in noted["options"].items()
    }
    return {"batch": recorder.batch_kind(noted["batch"]), "options": options}


_DESCRIBED: dict[type, Callable[[Recorder, Any], dict[str, Any]]] = {
    Runtime: _runtime, SlotPool: _slot_pool, Table: _table, PagePool: _page_pool, FutureMap: _relay,
    StepPlanner: _step_planner,
}  # fmt: skip

_active: Recorder | None = None


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
    """Begins to record this process, until `stop` or the end of a `with` block. To be called before planners are made.

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
