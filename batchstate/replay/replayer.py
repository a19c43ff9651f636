"""Replays a recording: the objects are made anew on a CPU, and the recorded calls are made again, in order.

Slots of the recording are names of requests: each handle is translated into the one that the same call has returned
now. Values that only the device had are those that landed later in the recording, or zeros. A batch whose making is
left out is the one that it was made from, so that steps can be left out of a chain. Calls are those of
`recorder.SEAMS`, on objects that the recording defines, and nothing else: a file from a stranger runs no code of its
own, and its objects take no more memory than `Room` has.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import levels
from batchstate.errors import BatchStateError, RecordingError
from batchstate.future_map import FutureMap
from batchstate.mirror import MirroredTensor, Slots
from batchstate.pools import SlotPool
from batchstate.races.devices import window_of
from batchstate.replay.format import (
    STATE,
    Device,
    Event,
    Finding,
    Handles,
    Host,
    Opaque,
    Part,
    Recording,
    Ref,
    referred,
)
from batchstate.replay.objects import OBJECTS, Room, dtype_named
from batchstate.replay.recorder import REFERRED, SEAMS, runtime_of
from batchstate.runtime import Fence, Runtime
from batchstate.step import PlannedStep
from batchstate.testing.exact.reduce import Shrunk
from batchstate.violations import Violation

__all__ = ["Replay", "replay", "shrunk_calls"]

_ERRORS = BatchStateError, KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError
_SEAMS = {f"{owner.__name__}.{name}": owner for owner, names in SEAMS.items() for name in names}
_KINDS = {kind.__name__: described for kind, described in OBJECTS.items()}
_COUNTS = "pad_rows", "pad_tokens", "to"


@final
@attrs.define
class Replay:
    """The end of a replay.

    Attributes:
        finding: the one that the recording has, if it came again; else the first that came, or None.
        repeated: whether it came again.
        made: numbers of the calls that were made.
        refused: calls that raised something else than a violation, or whose objects were not there.
    """

    finding: Finding | None = None
    repeated: bool = False
    made: list[int] = attrs.field(factory=list)
    refused: int = 0


def replay(
    recording: Recording,
    *,
    device: str | None = None,
    level: str = "full",
    alike: Callable[[Finding, Finding], bool] = Finding.repeats,
    without: Collection[int] = (),
    progress: Callable[[int, int], None] | None = None,
    seen: Callable[[int, "Replayer"], None] = lambda _place, _replayer: None,
) -> Replay:
    """Makes the recorded calls again, until the finding of the recording comes again.

    Args:
        recording: as `load` returned it.
        device: `cpu`, `race` or `sim`; see `batchstate.races.devices.open_device`. By default that of the recording.
        level: of the checks.
        alike: says whether a finding is the one of the recording.
        without: numbers of calls that are left out.
        progress: called with the number of events replayed and of all, now and then.
        seen: called behind each call that was made, with the place of its event.

    Raises:
        RecordingError: a damaged event, or an object that cannot be made here.
    """
    with levels.checks(level), contextlib.ExitStack() as windows:
        replayer = Replayer(recording, device or recording.device, alike, windows)
        for number, event in enumerate(recording.events):
            if event.kind == "define":
                replayer.define(event)
            elif event.kind == "same" or (event.is_call and event.number in without):
                replayer.leave_out(event)
            elif event.is_call:
                came = replayer.call(event)
                seen(number, replayer)
                if came:
                    break
            if progress is not None and number % 256 == 0:
                progress(number, len(recording.events))
    return replayer.outcome


def shrunk_calls(
    recording: Recording,
    numbers: Sequence[int],
    *,
    device: str | None = None,
    level: str = "full",
    seconds: float = 120.0,
    progress: Callable[[int, int], None] | None = None,
) -> Shrunk[Sequence[int]]:
    """The fewest of the calls `numbers` with which a finding of the same code, object and operation comes.

    Args:
        recording: as `load` returned it.
        numbers: of the calls that `replay` made.
        device: of the replays; by default that of the recording.
        level: of their checks.
        seconds: after which no further ones are tried.
        progress: called after each try, with the number of tries, and of the calls that are left.
    """
    everything = frozenset(numbers)

    def failing(left: Sequence[int]) -> Sequence[int] | None:
        without = everything - set(left)
        tried = replay(recording, device=device, level=level, alike=Finding.resembles, without=without)
        return tried.made if tried.repeated else None

    with Shrunk(numbers, failing, len, seconds, progress) as result:
        before = None
        while result.smallest is not before:
            before = result.smallest
            result.leave_out(lambda left, start, stop: [*left[:start], *left[stop:]])
    return result


class _Missing(Exception):
    """A call refers to an object that was not made."""


class Replayer:
    """The objects of a recording, made anew, and its calls made on them.

    Attributes:
        outcome: by now.
        objects: number of the event that defines it -> an object.
        names: pool -> the slots of the recording, by those of the replay.
    """

    def __init__(
        self,
        recording: Recording,
        device: str,
        alike: Callable[[Finding, Finding], bool],
        windows: contextlib.ExitStack,
    ) -> None:
        self._room, self._alike, self._wanted, self._windows = Room(device), alike, recording.finding, windows
        self.outcome = Replay()
        self.objects: dict[int, Any] = {}
        self._products: dict[int, Any] = {}
        self._left_out: dict[int, Any] = {}
        self._fresh: set[int] = set()  # objects that have not got their state yet
        self._runtimes: list[Runtime] = []
        self._handles: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.names: dict[int, npt.NDArray[np.int64]] = {}
        self._latest: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._streams: dict[tuple[int, int], Any] = {}
        self._fences: dict[int, list[list[Fence]]] = {}
        self._results: dict[int, Handles] = {}
        self._landed: dict[int, dict[str, Any]] = {}
        self._last = dict[int, int]()  # number of a product -> that of the last call that refers to it
        for _, event in recording.events.of("call", "same", "result", "landed"):
            if event.is_call or event.kind == "same":
                self._last.update(dict.fromkeys(referred(event.body), event.number))
            elif event.kind == "result" and isinstance(handles := event.body, Handles):
                self._room.take(handles.slots.size, of=400)  # of their names
                self._results[event.number] = handles
            elif event.kind == "landed" and isinstance(fields := event.body, dict):
                arrays = {name: values for name, values in fields.items() if isinstance(values, np.ndarray)}
                self._landed.setdefault(event.number, {}).update(arrays)
        self._taken = {
            (handles.pool, *handle)
            for handles in self._results.values()
            for handle in zip(handles.slots.tolist(), handles.generations.tolist(), strict=False)
        }

    def define(self, event: Event) -> None:
        """Makes an object; one that there is has its state."""
        number, body = event.number, event.body
        self._fresh.discard(number)
        if number in self.objects:
            return
        kind = body.pop("is", None) if isinstance(body, dict) else None
        described = _KINDS.get(str(kind))
        if described is None:
            raise RecordingError(
                f"an object of kind {str(kind)[:40]!r}", kind, "replay it with the library that wrote it"
            )
        try:
            self._room.take(1024 + len(event.raw), of=64)  # that any object takes
            self.objects[number] = made = described.making(self._value(body), self._room)
        except (Violation, RecordingError):
            raise
        except (*_ERRORS, _Missing) as error:
            problem = f"{kind} of event {number} cannot be made: {type(error).__name__}: {str(error)[:120]}"
            raise RecordingError(problem, number, "a damaged recording, or one of another library") from None
        self._fresh.add(number)
        if isinstance(made, Runtime):
            self._runtimes.append(made)
            self._windows.enter_context(window_of(made))

    def leave_out(self, event: Event) -> None:
        """Leaves a call out: what refers to its product refers to its source."""
        self._left_out[event.number] = source = event.source if event.is_call else event.body
        if isinstance(source, Ref | Part) and event.number in self._last:
            self._last[source.number] = max(self._last[source.number], self._last[event.number])
        self._let_go(event, event.body)

    def _let_go(self, event: Event, body: Any) -> None:
        """Lets go of products that no later call refers to: steps that are held keep their memory."""
        for number in referred(body):
            if self._last[number] <= event.number:
                self._products.pop(number, None)

    def call(self, event: Event) -> bool:
        """Makes a call; whether it brought the finding that is looked for."""
        outcome, owner = self.outcome, _SEAMS.get(event.kind)
        if owner is None:
            raise RecordingError(
                f"a call of {event.kind[:60]!r}", event.kind, "replay it with the library that wrote it"
            )
        target, args, kwargs = event.body
        if event.stream == STATE and not (isinstance(target, Ref) and target.number in self._fresh):
            return False
        try:
            made = self._made(event, owner, target, args, kwargs)
            if isinstance(made, REFERRED) and event.number in self._last:
                self._products[event.number] = made
            outcome.made.append(event.number)
        except Violation as violation:
            finding = Finding.of(violation)
            if self._wanted is not None and self._alike(self._wanted, finding):
                outcome.finding, outcome.repeated = finding, True
                outcome.made.append(event.number)
                return True
            outcome.finding = outcome.finding or finding
        except (*_ERRORS, _Missing) as error:
            if isinstance(error, RecordingError):
                raise
            outcome.refused += 1
        self._let_go(event, [target, args, kwargs])
        return False

    def _made(self, event: Event, owner: type, target: Any, args: Any, kwargs: Any) -> Any:
        landed = self._landed.get(target.number, {}) if isinstance(target, Ref) else {}
        target = self._value(target)
        if not (issubclass(target, owner) if isinstance(target, type) else isinstance(target, owner)):
            raise _Missing
        values = [self._value(value) for value in args]
        runtime = values[0] if isinstance(target, type) and values else runtime_of(target)
        if not isinstance(runtime, Runtime):
            raise _Missing
        if event.step > runtime.step:
            self._begin(runtime, event.step)
        with runtime.use(self._stream(runtime, event.stream)):
            if event.kind == "PlannedStep.accept" and isinstance(args[0], Device):
                values[0] = self._on_device(args[0], landed.get(target._declared.accepted))
            named = dict[str, Any]()
            for name, value in kwargs.items():
                if name == "after" and value not in (None, ...):
                    named[name] = runtime.record()
                elif value is ... and isinstance(target, PlannedStep):
                    named[name] = self._published(target, name, landed.get(name))
                elif name in _COUNTS and isinstance(value, int) and value > 1 << 20:
                    raise _Missing
                else:
                    named[name] = self._value(value)
            made = getattr(target, event.kind.partition(".")[2])(*values, **named)
        if event.number in self._results:
            self._translate(self._results[event.number], made)
        return made

    def _begin(self, runtime: Runtime, step: int) -> None:
        """Begins a step: no more are in flight than were declared, since recordings do not have the host's waits."""
        streams = [runtime.current_stream, *(made for (of, _), made in self._streams.items() if of == id(runtime))]
        fences = self._fences.setdefault(id(runtime), [])
        fences.append([runtime.record(stream) for stream in streams])
        if len(fences) >= runtime.steps_in_flight:
            for fence in fences.pop(0):
                fence.wait()
        runtime.step = step - 1
        runtime.next_step()

    def _stream(self, runtime: Runtime, number: int) -> Any:
        key = id(runtime), number
        if number == STATE:
            return runtime.current_stream
        if key not in self._streams:
            first = all(other != id(runtime) for other, _ in self._streams)
            self._streams[key] = runtime.current_stream if first else runtime.stream(f"stream {number}")
        return self._streams[key]

    def _translate(self, recorded: Handles, made: Any) -> None:
        """The handles of the recording that are now those of `made`: of a step those of its last rows."""
        rows, generations = (made.np, made.generations) if isinstance(made, Slots) else (made.rows, made.generations)
        pool = self.objects[recorded.pool]
        own = self.names.setdefault(pool.pool_id, np.arange(pool.capacity))
        arrays = recorded.slots, recorded.generations, rows, generations
        for names in zip(*(array[::-1].tolist() for array in arrays), strict=False):
            slot, generation, *now = names
            own[now[0]] = slot % pool.capacity  # of a damaged recording any number
            self._handles[recorded.pool, slot, generation] = now[0], now[1]
            self._latest[recorded.pool, slot] = generation, now[0], now[1]

    # Values

    def _value(self, value: Any) -> Any:
        if isinstance(value, Ref | Part):
            return self._product(value)
        if isinstance(value, Handles):
            return self._slots(value)
        if isinstance(value, Host):
            return self._mirrored(value)
        if isinstance(value, Device):
            return self._on_device(value, None)
        if isinstance(value, list):
            return [self._value(part) for part in value]
        if isinstance(value, dict):
            return {name: self._value(part) for name, part in value.items()}
        return None if isinstance(value, Opaque) else value

    def _product(self, value: Ref | Part) -> Any:
        """What a call made; of one that is left out the batch that it was made from."""
        number = value.number
        while number in self._left_out:
            source = self._left_out[number]
            if not isinstance(source, Ref | Part) or source.number >= number:
                raise _Missing
            value, number = source, source.number
        made = self._products.get(number, self.objects.get(number))
        if made is None:
            raise _Missing
        if isinstance(value, Ref):
            return made
        if value.name == "batch" and isinstance(made, PlannedStep):
            return made.batch
        if isinstance(made, list | tuple) and value.name.isdecimal():
            return made[int(value.name)]
        raise _Missing

    def _slots(self, handles: Handles) -> Slots:
        pool = self.objects.get(handles.pool)
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
        numbers, generations = np.array(rows, np.int64).reshape(-1, 2).T.copy()
        return Slots.of_pool(pool.runtime, numbers, generations, pool_id=pool.pool_id, name=pool.name)

    def _mirrored(self, value: Host) -> MirroredTensor:
        runtime, contract = self._runtimes[0], value.contract
        if contract == "upper_bound":
            device = MirroredTensor.from_host(runtime, value.values).device
            return MirroredTensor.from_pair(runtime, value.values, device, contract=contract)
        return MirroredTensor.from_host(runtime, value.values, contract=contract)

    def _on_device(self, value: Device, landed: Any) -> torch.Tensor:
        dtype = dtype_named(value.dtype)
        self._room.bytes_of(*value.shape, of=dtype.itemsize)
        made = torch.zeros(value.shape, dtype=dtype)
        if isinstance(landed, np.ndarray) and list(landed.shape[1:]) == value.shape[1:] and value.shape:
            rows = min(len(landed), value.shape[0])
            made[:rows] = torch.from_numpy(landed[:rows].copy()).to(dtype)
        tensor: torch.Tensor = made.to(self._runtimes[0].device)
        return tensor

    def _published(self, step: PlannedStep, name: str, landed: Any) -> torch.Tensor:
        """Values that a forward published: those that landed, or zeros, one for each request that samples."""
        relay: FutureMap = step._declared.relay  # type: ignore[assignment]
        field, rows = relay.fields[name], len(step.sampled_slots)
        return self._on_device(Device(str(field.dtype).removeprefix("torch."), [rows, *field.shape]), landed)
