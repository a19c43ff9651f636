"""Replays a recording: the objects are made anew on a CPU, and the recorded calls are made again, in order.

Slots of the recording are names of requests: each handle is translated into the one that the same call has returned
now. Values that only the device had are those that landed later in the recording, or zeros. Calls are those of
`recorder.SEAMS`, on objects that the recording defines, and nothing else: a file from a stranger runs no code of its
own, and asks for no more memory than `MOST_BYTES` at once.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, final

import attrs
import numpy as np
import torch

from batchstate import levels
from batchstate.batch import Batch, BatchType
from batchstate.columns import device_only, host_list, mirrored, slot_column
from batchstate.errors import BatchStateError, RecordingError
from batchstate.future_map import FutureMap, relay_field
from batchstate.kv.pages import PagePool
from batchstate.mirror import MirroredTensor, Slots
from batchstate.pools import SlotPool
from batchstate.races.devices import open_device, window_of
from batchstate.replay.format import Device, Event, Finding, Handles, Host, Opaque, Part, Recording, Ref
from batchstate.replay.recorder import SEAMS
from batchstate.runtime import Runtime
from batchstate.step import PlannedStep, StepPlanner
from batchstate.violations import Violation

__all__ = ["Replay", "replay"]

MOST_BYTES = 1 << 30
_ERRORS = BatchStateError, KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError
_SEAMS = {f"{owner.__name__}.{name}": owner for owner, names in SEAMS.items() for name in names}
_READ_BY = {1: "device", 2: "host", 3: "both"}


@final
@attrs.define
class Replay:
    """The end of a replay.

    Attributes:
        finding: the one that the recording has, if it came again; else the first other one, or None.
        repeated: whether it came again.
        event: the event at which it came.
        calls: made.
        refused: calls that raised something else than a violation, or whose objects were not there.
        others: findings that came before.
    """

    finding: Finding | None = None
    repeated: bool = False
    event: Event | None = None
    calls: int = 0
    refused: int = 0
    others: list[Finding] = attrs.field(factory=list)


def replay(
    recording: Recording,
    *,
    device: str = "cpu",
    level: str = "full",
    alike: Callable[[Finding, Finding], bool] = Finding.repeats,
    without: Collection[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Replay:
    """Makes the recorded calls again, until the finding of the recording comes again.

    Args:
        recording: as `load` returned it.
        device: see `batchstate.races.devices.open_device`: `cpu`, `race`, `sim`.
        level: of the checks.
        alike: says whether a finding is the one of the recording.
        without: numbers of events that are left out.
        progress: called with the number of events replayed and of all, now and then.

    Raises:
        RecordingError: an object that cannot be made here.
    """
    replayer = _Replayer(recording, device, alike)
    with levels.checks(level), contextlib.ExitStack() as windows:
        replayer.windows = windows
        for number, event in enumerate(recording.events):
            if event.number in without and event.is_call:
                continue
            if replayer.play(event):
                break
            if progress is not None and number % 256 == 0:
                progress(number, len(recording.events))
    outcome = replayer.outcome
    if outcome.finding is None and outcome.others:
        outcome.finding = outcome.others[0]
    return outcome


class _Missing(Exception):
    """A call refers to something that was not made."""


class _Replayer:
    def __init__(self, recording: Recording, device: str, alike: Callable[[Finding, Finding], bool]) -> None:
        self._device, self._alike, self._wanted = device, alike, recording.finding
        self.windows = contextlib.ExitStack()
        self.outcome = Replay()
        self._objects: dict[int, Any] = {}
        self._handles: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._latest: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._streams: dict[tuple[int, int], Any] = {}
        self._step = -1
        events = recording.events
        self._results = {event.number: event.body for event in events if event.kind == "result"}
        self._taken = {
            (handles.pool, *handle)
            for handles in self._results.values()
            if isinstance(handles, Handles)
            for handle in zip(handles.slots.tolist(), handles.generations.tolist(), strict=True)
        }
        self._landed: dict[int, dict[str, Any]] = {}
        for event in events:
            if event.kind == "landed" and isinstance(event.body, dict):
                self._landed.setdefault(event.number, {}).update(event.body)

    def play(self, event: Event) -> bool:
        """One event; whether it brought the finding that is looked for."""
        if event.kind == "define":
            if event.number not in self._objects:
                self._define(event.number, event.body)
        elif event.is_call:
            return self._call(event)
        return False

    # Calls

    def _call(self, event: Event) -> bool:
        outcome, owner = self.outcome, _SEAMS.get(event.kind)
        if owner is None:
            raise RecordingError(
                f"a call of {event.kind[:60]!r}", event.kind, "replay it with the library that wrote it"
            )
        target, args, kwargs = event.body
        try:
            made = self._made(event, owner, self._value(target), args, kwargs)
        except Violation as violation:
            finding = Finding.of(violation)
            if self._wanted is not None and self._alike(self._wanted, finding):
                outcome.finding, outcome.repeated, outcome.event = finding, True, event
                return True
            if outcome.event is None:
                outcome.event = event
            outcome.others.append(finding)
        except (*_ERRORS, _Missing):
            outcome.refused += 1
        else:
            outcome.calls += 1
            self._objects[event.number] = made
        return False

    def _made(self, event: Event, owner: type, target: Any, args: Any, kwargs: Any) -> Any:
        is_class = isinstance(target, type)
        if not (issubclass(target, owner) if is_class else isinstance(target, owner)):
            raise _Missing
        if not isinstance(args, tuple) or not isinstance(kwargs, Mapping):
            raise _Missing
        values = [self._value(value) for value in args]
        landed = self._landed_at(event)
        if event.kind == "PlannedStep.accept" and args and isinstance(args[0], Device) and landed:
            values[0] = self._device_value(args[0], next(iter(landed.values())), self._runtime_of(target))
        named = dict[str, Any]()
        for name, value in kwargs.items():
            if name == "after" and value is not None:
                named[name] = value if value is ... else self._runtime_of(target).record()
            elif isinstance(value, Device):
                named[name] = self._device_value(value, landed.get(name), self._runtime_of(target))
            elif value is ... and isinstance(target, PlannedStep):
                named[name] = self._published(target, name, landed.get(name))
            else:
                named[name] = self._value(value)
        for name in ("pad_rows", "pad_tokens", "to"):
            if isinstance(named.get(name), int) and named[name] > 1 << 20:
                raise _Missing
        runtime = values[0] if is_class and values else self._runtime_of(target)
        if not isinstance(runtime, Runtime):
            raise _Missing
        if event.step > self._step:
            self._step = event.step
            runtime.next_step()
        with runtime.use(self._stream(runtime, event.stream)):
            made = getattr(target, event.kind.partition(".")[2])(*values, **named)
        self._translate(event, made)
        return made

    def _landed_at(self, event: Event) -> Mapping[str, Any]:
        target = event.body[0]
        if not isinstance(target, Ref) or event.kind not in ("PlannedStep.publish", "PlannedStep.accept"):
            return {}
        landed = self._landed.get(target.number)
        if not isinstance(landed, Mapping):
            return {}
        step = self._objects.get(target.number)
        accepted = getattr(getattr(step, "_declared", None), "accepted", None)
        return {accepted: landed[accepted]} if event.kind.endswith("accept") and accepted in landed else landed

    def _stream(self, runtime: Runtime, number: int) -> Any:
        key = id(runtime), number
        if key not in self._streams:
            first = all(other != id(runtime) for other, _ in self._streams)
            self._streams[key] = runtime.current_stream if first else runtime.stream(f"stream {number}")
        return self._streams[key]

    def _runtime_of(self, target: Any) -> Any:
        if isinstance(target, PlannedStep):
            return target.sent.runtime
        if isinstance(target, StepPlanner):
            return next(value for value in self._objects.values() if isinstance(value, Runtime))
        return getattr(target, "runtime", None)

    def _translate(self, event: Event, made: Any) -> None:
        """The handles of the recording that are now those of `made`."""
        recorded = self._results.get(event.number)
        if not isinstance(recorded, Handles):
            return
        rows, generations = (made.np, made.generations) if isinstance(made, Slots) else (made.rows, made.generations)
        for names in zip(
            recorded.slots[::-1].tolist(), recorded.generations[::-1].tolist(), rows[::-1].tolist(),
            generations[::-1].tolist(), strict=False,
        ):  # fmt: skip
            self._name(recorded.pool, *names)

    def _name(self, pool: int, slot: int, generation: int, now: int, generation_now: int) -> None:
        self._handles[pool, slot, generation] = now, generation_now
        self._latest[pool, slot] = generation, now, generation_now

    # Values

    def _value(self, value: Any) -> Any:
        if isinstance(value, Ref):
            if value.number not in self._objects:
                raise _Missing
            return self._objects[value.number]
        if isinstance(value, Part):
            made = self._objects.get(value.number)
            if value.name == "batch" and isinstance(made, PlannedStep):
                return made.batch
            if isinstance(made, list) and value.name.isdecimal():
                return made[int(value.name)]
            raise _Missing
        if isinstance(value, Handles):
            return self._slots(value)
        if isinstance(value, Host):
            return self._mirrored(value)
        if isinstance(value, Device):
            runtime = next((made for made in self._objects.values() if isinstance(made, Runtime)), None)
            return self._device_value(value, None, runtime)
        if isinstance(value, list | tuple):
            return type(value)(self._value(part) for part in value)
        if isinstance(value, dict):
            return {name: self._value(part) for name, part in value.items()}
        return None if isinstance(value, Opaque) else value

    def _slots(self, handles: Handles) -> Slots:
        pool = self._objects.get(handles.pool)
        if not isinstance(pool, SlotPool):
            raise _Missing
        rows = list[tuple[int, int]]()
        for slot, generation in zip(handles.slots.tolist(), handles.generations.tolist(), strict=True):
            now = self._handles.get((handles.pool, slot, generation))
            if now is None and (handles.pool, slot, generation) in self._taken:
                raise _Missing  # its take is left out, or was refused
            if now is None and (latest := self._latest.get((handles.pool, slot))) is not None:
                # Handles from before the recording: as much older as they were.
                now = latest[1], max(latest[2] - (latest[0] - generation), 0)
            rows.append((slot, generation) if now is None else now)
        numbers, gens = np.array(rows, np.int64).reshape(-1, 2).T.copy()
        return Slots.of_pool(pool.runtime, numbers, gens, pool_id=pool.pool_id, name=pool.name)

    def _mirrored(self, value: Host) -> MirroredTensor:
        runtime = next(made for made in self._objects.values() if isinstance(made, Runtime))
        if value.contract == "upper_bound":
            device = MirroredTensor.from_host(runtime, value.values).device
            return MirroredTensor.from_pair(runtime, value.values, device, contract=value.contract)
        return MirroredTensor.from_host(runtime, value.values, contract=value.contract)

    def _device_value(self, value: Device, landed: Any, runtime: Any) -> torch.Tensor:
        dtype = _dtype(value.dtype)
        if math.prod(value.shape) * dtype.itemsize > MOST_BYTES or min(value.shape, default=0) < 0 or runtime is None:
            raise _Missing
        made = torch.zeros(value.shape, dtype=dtype)
        if isinstance(landed, np.ndarray) and landed.shape[1:] == value.shape[1:] and value.shape:
            rows = min(len(landed), value.shape[0])
            made[:rows] = torch.from_numpy(landed[:rows].copy()).to(dtype)
        tensor: torch.Tensor = made.to(runtime.device)
        return tensor

    def _published(self, step: PlannedStep, name: str, landed: Any) -> torch.Tensor:
        """Values that a forward published: those that landed, or zeros, one for each request that samples."""
        field = next(
            made.fields[name] for made in self._objects.values() if isinstance(made, FutureMap) and name in made.fields
        )
        rows = len(step.sampled_slots)
        return self._device_value(
            Device(str(field.dtype).removeprefix("torch."), (rows, *field.shape)), landed, step.sent.runtime
        )

    # Objects and their states

    def _define(self, number: int, body: Any) -> None:
        kind = body.get("is") if isinstance(body, dict) else None
        make = _MAKERS.get(str(kind))
        if make is None:
            raise RecordingError(
                f"an object of kind {str(kind)[:40]!r}", kind, "replay it with the library that wrote it"
            )
        try:
            self._objects[number] = make(self, number, body)
        except Violation:
            raise
        except (*_ERRORS, _Missing) as error:
            problem = f"{kind} of event {number} cannot be made: {type(error).__name__}: {str(error)[:120]}"
            raise RecordingError(problem, number, "a damaged recording, or one of another library") from None

    def _runtime(self, number: int, body: Mapping[str, Any]) -> Runtime:
        runtime = open_device(self._device, steps_in_flight=int(body["steps_in_flight"]))
        self.windows.enter_context(window_of(runtime))
        return runtime

    def _slot_pool(self, number: int, body: Mapping[str, Any]) -> SlotPool:
        size, reserve = _size(body["size"]), _size(body["reserve"])
        pool = SlotPool(self._objects[body["runtime"]], size, reserve=reserve, name=str(body["name"])[:80])
        live, ordinary = len(body["live"]), min(len(body["live"]), size)
        taken = [pool.take(ordinary)] if ordinary else []
        if live > ordinary:
            taken.append(pool.take(live - ordinary, reserved=True))
        for part, start in zip(taken, (0, ordinary), strict=False):
            names = (body[name][start : start + len(part)].tolist() for name in ("live", "generations"))
            for each in zip(*names, part.np.tolist(), part.generations.tolist(), strict=True):
                self._name(number, *each)
        return pool

    def _table(self, number: int, body: Mapping[str, Any]) -> Any:
        space, shape, dtype = self._objects[body["pool"]], tuple(map(_size, body["shape"])), _dtype(body["dtype"])
        rows = space.capacity if isinstance(space, SlotPool) else 1
        if math.prod(shape) * rows * dtype.itemsize > MOST_BYTES:
            raise ValueError(f"a table of {rows} rows of {list(shape)}")
        return space.table(str(body["name"])[:80], shape, dtype, holds=body["holds"], row_zero=body["row_zero"])

    def _page_pool(self, number: int, body: Mapping[str, Any]) -> PagePool:
        slots, table = self._objects[body["slots"]], body["req_to_token"]
        most, size = _size(body["max_tokens_per_request"]), _size(body["page_size"], least=1)
        if slots.capacity * (most // size + 1) * 16 > MOST_BYTES:
            raise ValueError(f"{slots.capacity} requests of {most} tokens")
        pages = PagePool(
            slots.runtime, slots, _size(body["num_pages"]), size, max_tokens_per_request=most,
            name=str(body["name"])[:80], req_to_token=None if table is None else self._objects[table],
        )  # fmt: skip
        for row, slot in self._alive(body):
            self._give_pages(pages, body, row, self._live(body["slots"], [slot]))
        return pages

    def _give_pages(self, pages: PagePool, body: Mapping[str, Any], row: int, slot: Slots) -> None:
        """Pages of a request as they were, those that it shared with one before it too."""
        table, size, committed = body["pages"], pages.page_size, body["committed"].tolist()
        allocated = int(body["allocated"][row])
        mine = table[row, : allocated // size]
        for other in range(row):
            most = min(len(mine), committed[other] // size)
            shared = int(np.cumprod(mine[:most] == table[other, :most]).sum())
            if shared and (body["slots"], int(body["live"][other])) in self._latest:
                source = self._live(body["slots"], body["live"][other : other + 1].tolist())
                with contextlib.suppress(BatchStateError):
                    pages.share(source, slot, shared * size)
                break
        if allocated:
            pages.grow(slot, allocated)
        if committed[row]:
            pages.commit(slot, committed[row])

    def _alive(self, body: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Rows and slots of requests that live: all, unless calls that took some are left out."""
        slots: list[int] = body["live"].tolist()
        return [(row, slot) for row, slot in enumerate(slots) if (body["slots"], slot) in self._latest]

    def _live(self, pool: int, slots: list[int]) -> Slots:
        generations = [self._latest[pool, slot][0] for slot in slots]
        return self._slots(Handles(pool, np.array(slots, np.int64), np.array(generations, np.int64)))

    def _relay(self, number: int, body: Mapping[str, Any]) -> FutureMap:
        slots, fields = self._objects[body["slots"]], {}
        for name, field in body["fields"].items():
            shape, dtype = tuple(map(_size, field["shape"])), _dtype(field["dtype"])
            if math.prod(shape) * slots.capacity * dtype.itemsize > MOST_BYTES:
                raise ValueError(f"a field of {list(shape)}")
            fields[name] = relay_field(
                dtype, shape, read_by=_READ_BY[field["readers"]],
                **{option: field[option] for option in ("non_negative", "must_read", "ragged", "stale")},
            )  # fmt: skip
        relay = FutureMap(slots, fields, name=str(body["name"])[:80])
        for row, slot in self._alive(body):
            states = {name: str(body["states"][name][row]) for name in fields}
            self._publish(relay, self._live(body["slots"], [slot]), states)
        return relay

    @staticmethod
    def _publish(relay: FutureMap, slot: Slots, states: Mapping[str, str]) -> None:
        """Entries of a request as they were: results are on their way to the host, and count as read there."""
        values, fields = {}, relay.fields
        for name, state in states.items():
            if state != "unwritten":
                values[name] = torch.zeros(
                    (1, *fields[name].shape), dtype=fields[name].dtype, device=relay.runtime.device
                )
        if not values:
            return
        with contextlib.suppress(BatchStateError):
            relay.publish(slot, **values)
            for name in values:
                if fields[name].readers & 2:
                    relay.prefetch(slot, name)
                if fields[name].readers & 1 and states[name] == "consumed":
                    relay.gather(slot, name)

    def _planner(self, number: int, body: Mapping[str, Any]) -> StepPlanner | None:
        if body["batch"] is None:
            return None  # it was made before the recording began, and its steps cannot be replayed
        return StepPlanner(self._objects[body["batch"]], **self._value(body["options"]))

    def _batch_kind(self, number: int, body: Mapping[str, Any]) -> type[Batch]:
        columns = dict(_columns(body["columns"]))
        name = str(body["name"])[:80]
        kind: Any = BatchType(name if name.isidentifier() else "Recorded", (Batch,), columns)
        return kind  # type: ignore[no-any-return]


_MAKERS: dict[str, Callable[[_Replayer, int, Mapping[str, Any]], Any]] = {
    "Runtime": _Replayer._runtime, "SlotPool": _Replayer._slot_pool, "Table": _Replayer._table,
    "PagePool": _Replayer._page_pool, "FutureMap": _Replayer._relay, "StepPlanner": _Replayer._planner,
    "Batch": _Replayer._batch_kind,
}  # fmt: skip


def _columns(columns: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, column in columns.items():
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"a column called {name[:40]!r}")
        if column["is"] == "SlotColumn":
            yield name, slot_column()
        elif column["is"] == "HostColumn":
            yield name, host_list()
        else:
            dtype, shape = _dtype(column["dtype"]), tuple(map(_size, column["shape"]))
            if column["contract"] == "device_only":
                yield name, device_only(dtype, shape=shape, holds=column["holds"])
            else:
                pad = column["pad"].tolist() if isinstance(column["pad"], np.ndarray) else column["pad"]
                yield name, mirrored(dtype, shape=shape, pad=pad, contract=column["contract"], holds=column["holds"])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"no dtype {name[:40]!r}")


def _size(number: Any, least: int = 0) -> int:
    if type(number) is not int or not least <= number <= 1 << 26:
        raise ValueError(f"a size of {str(number)[:40]}")
    return number
