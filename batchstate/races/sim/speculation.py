"""Speculative reads: a stream runs, memory is read, and everything is put back.

Results of a run are kept for the next read, until the device really runs an operation. So many reads of a lagging
device cost one run of its queue. A copy from pinned memory is then seen as the first read saw it. In memory that the
host writes too, only results are kept: the host's own writes are seen as they are.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.races.sim.device import Device, DeviceStream, Entry, Marker, Memory, Task, execute

Saved = dict[int, tuple[Memory, Memory]]


@final
@attrs.define(eq=False)
class _Seen:
    """Results of speculative runs since the device last ran.

    Attributes:
        runs: of the device, by which a later run shows.
        entries: entries of its queues that were run, by id.
        memory: memory that they wrote, by id, with its content afterwards.
        was: content before, of memory that the host writes too.
    """

    runs: int
    entries: dict[int, Entry] = attrs.field(factory=dict)
    memory: Saved = attrs.field(factory=dict)
    was: dict[int, npt.NDArray[np.uint8]] = attrs.field(factory=dict)


@final
class SpeculativeRead:
    """Reads memory as the device will leave it. `shared` tells whether the host writes a block of memory too."""

    def __init__(self, device: Device, shared: Callable[[npt.NDArray[np.uint8]], bool]) -> None:
        self._device = device
        self._shared = shared
        self._seen = _Seen(0)

    @contextlib.contextmanager
    def behind(self, stream: DeviceStream) -> Iterator[None]:
        """A window in which a stream, and all that it waits for, has run. Nothing is enqueued in it.

        Raises:
            DeviceFault: an operation fails there.
        """
        device = self._device
        if self._seen.runs != device.runs:
            self._seen = _Seen(device.runs)
        seen = self._seen
        queues = [other.queue for other in device.streams]
        before = {key: (memory, _copied(memory)) for key, (memory, _) in seen.memory.items()}
        for key, (memory, after) in seen.memory.items():
            _set(memory, after, seen.was.get(key))
        for entry in seen.entries.values():
            if isinstance(entry, Marker):
                entry.reached = True
        for other, queue in zip(device.streams, queues, strict=True):
            other.queue = deque(entry for entry in list(queue) if id(entry) not in seen.entries)
        wiped, device.before_wipe = device.before_wipe, lambda memory: _save(memory, before)
        try:
            self._run(stream, before)
            yield
        finally:
            device.before_wipe = wiped
            self._leave(queues, before)

    def _run(self, stream: DeviceStream, before: Saved) -> None:
        end = self._device.mark(stream)
        while not self._device.has_reached(end):
            runs = self._device.next_towards(stream)
            task = runs.queue.popleft()
            if isinstance(task, Task):
                for memory in task.writes():
                    _save(memory, before)
                execute(task, runs)

    def _leave(self, queues: list[deque[Entry]], before: Saved) -> None:
        seen = self._seen
        seen.runs = self._device.runs
        for stream, queue in zip(self._device.streams, queues, strict=True):
            before_run, left = list(queue), list(stream.queue)
            old, not_run = {id(entry) for entry in before_run}, {id(entry) for entry in left}
            came = [entry for entry in left if id(entry) not in old]  # memory that was freed meanwhile
            seen.entries.update((id(entry), entry) for entry in before_run if id(entry) not in not_run)
            queue.extend(came)
            stream.queue = queue
        for entry in seen.entries.values():
            if isinstance(entry, Marker):
                entry.reached = False
        seen.memory = {key: (memory, _copied(memory)) for key, (memory, _) in before.items()}
        seen.was = {
            key: was
            for key, (memory, was) in before.items()
            if isinstance(memory, np.ndarray) and isinstance(was, np.ndarray) and self._shared(memory)
        }
        for memory, was in reversed(before.values()):  # the last saved first: tensors may share memory
            _set(memory, was)


def _save(memory: Memory, before: Saved) -> None:
    if id(memory) not in before:
        before[id(memory)] = memory, _copied(memory)


def _copied(memory: Memory) -> Memory:
    if isinstance(memory, np.ndarray):
        return memory.copy()
    with torch._C._DisableTorchDispatch():
        return memory.clone()


def _set(memory: Memory, values: Memory, was: npt.NDArray[np.uint8] | None = None) -> None:
    """Sets memory to `values`; where it `was` the same already, it stays as it is."""
    if isinstance(memory, np.ndarray):
        memory[...] = values if was is None else np.where(values == was, memory, values)
    elif isinstance(values, torch.Tensor):
        with torch._C._DisableTorchDispatch():
            memory.copy_(values)
