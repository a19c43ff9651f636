"""What a stream would see if it ran now, without its running: it runs, is looked at, and everything is put back.

What was run for one look is kept for the next, until the device really gets on. So many looks at a device that lags
cost one run of what it has. A copy from pinned memory is then seen as the first look saw it. Of memory that the host
writes too, only what was run is kept: the host's own writes are seen as they are.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.races.sim.device import Block, Device, DeviceStream, Entry, Marker, Memory, Task, execute

Pack = Callable[[torch.Tensor], Any]
"""What stands for a tensor until the operation runs: a `View`, or a tensor of host memory."""


class View(NamedTuple):
    """A tensor of device memory, by where it lies."""

    block: Block
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, block: Block) -> "View":
        """The view that stands for a tensor of a block."""
        where = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return cls(block, tensor.dtype, *where, tensor.is_conj(), tensor.is_neg())

    def tensor(self) -> torch.Tensor:
        """The tensor, for an operation that runs."""
        view = self.block.view(self.dtype, self.shape, self.stride, self.offset)
        if self.conjugate:
            view = torch._conj(view)
        return torch._neg_view(view) if self.negative else view


@final
@attrs.frozen(eq=False)
class Call:
    """What an operation does when it runs.

    Attributes:
        func: is called.
        args, kwargs: packed.
        targets: where its new results go, in their order; nested like them, None for what is not kept.
        seed: of the numbers that it draws, or None.
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    targets: Sequence[Any] = ()
    seed: int | None = None

    def __call__(self) -> None:
        """Does it."""
        args = [unpacked(one) for one in self.args]
        kwargs = {name: unpacked(one) for name, one in self.kwargs.items()}
        result = self.func(*args, **kwargs) if self.seed is None else self._drawn(args, kwargs)
        if self.targets:
            _store(self.targets, (result,) if len(self.targets) == 1 else result)

    def _drawn(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(kwargs.get("generator"), torch.Generator):
            kwargs["generator"] = torch.Generator().manual_seed(self.seed or 0)
            return self.func(*args, **kwargs)
        generator = torch.default_generator
        state = generator.get_state()
        try:
            generator.manual_seed(self.seed or 0)
            return self.func(*args, **kwargs)
        finally:
            generator.set_state(state)


def packed(value: Any, pack: Pack) -> Any:
    """An argument with every tensor in it packed."""
    if isinstance(value, torch.Tensor):
        return pack(value)
    if isinstance(value, list | tuple) and not isinstance(value, View):
        return [packed(one, pack) for one in value]
    return value


def unpacked(value: Any) -> Any:
    """The argument again."""
    if isinstance(value, View):
        return value.tensor()
    if isinstance(value, list):
        return [unpacked(one) for one in value]
    return value


def written(values: Sequence[Any]) -> list[Memory]:
    """All memory that an operation may change through some packed arguments."""
    found: list[Memory] = []
    for one in values:
        if isinstance(one, View):
            found.append(one.block.memory)
        elif isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list):
            found += written(one)
    return found


def _store(targets: Sequence[Any], results: Sequence[Any]) -> None:
    for target, result in zip(targets, results, strict=True):
        if isinstance(target, list):
            _store(target, result)
        elif target is not None:
            memory = unpacked(target)
            if result.shape != memory.shape or result.dtype is not memory.dtype:
                expected = f"{memory.dtype}{list(memory.shape)}"
                raise RuntimeError(f"a result {result.dtype}{list(result.shape)}, where {expected} was expected")
            memory.copy_(result)


Saved = dict[int, tuple[Memory, Memory]]


@final
@attrs.define(eq=False)
class _Seen:
    """What the looks so far have run, while the device was where it is.

    Attributes:
        runs: of the device.
        entries: of its queues, by id.
        memory: what they wrote, by id, and what it holds then.
        was: what memory of them that the host writes too held before.
    """

    runs: int
    entries: dict[int, Entry] = attrs.field(factory=dict)
    memory: Saved = attrs.field(factory=dict)
    was: dict[int, npt.NDArray[np.uint8]] = attrs.field(factory=dict)


@final
class SpeculativeRead:
    """Reads what a device will hold. `shared` says of a block of memory whether the host writes it too."""

    def __init__(self, device: Device, shared: Callable[[npt.NDArray[np.uint8]], bool]) -> None:
        self._device = device
        self._shared = shared
        self._seen = _Seen(0)

    @contextlib.contextmanager
    def behind(self, stream: DeviceStream) -> Iterator[None]:
        """A window in which a stream, and whatever it waits for, has run all it has. Nothing is enqueued in it.

        Raises:
            DeviceFault: something fails there.
        """
        device = self._device
        if self._seen.runs != device.runs:
            self._seen = _Seen(device.runs)
        seen = self._seen
        queues = [one.queue for one in device.streams]
        before = {key: (memory, _copied(memory)) for key, (memory, _) in seen.memory.items()}
        for key, (memory, after) in seen.memory.items():
            _set(memory, after, seen.was.get(key))
        for entry in seen.entries.values():
            if isinstance(entry, Marker):
                entry.reached = True
        for one, queue in zip(device.streams, queues, strict=True):
            one.queue = deque(entry for entry in list(queue) if id(entry) not in seen.entries)
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
        for one, queue in zip(self._device.streams, queues, strict=True):
            had, left = list(queue), list(one.queue)
            known, not_run = {id(entry) for entry in had}, {id(entry) for entry in left}
            came = [entry for entry in left if id(entry) not in known]  # memory that was freed meanwhile
            seen.entries.update((id(entry), entry) for entry in had if id(entry) not in not_run)
            queue.extend(came)
            one.queue = queue
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
