"""Memory of the simulated device: blocks that are handed out again as soon as they are free, and poisoned in between.

A block goes back at once, in program order, to the stream that it was allocated on, whose next allocation may get it:
for that stream its own order suffices. Another stream is protected only where the allocator was told of it
(`record_stream`); the block then waits aside until that stream has run all it had when the block was freed. That
orders nothing: it only keeps the block away.

A freed block is poisoned at the point of its stream where this next allocates anything: before, no tensor can have got
it, and from then on any may have. The one that really gets it depends on sizes, and is chance.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate._source_lines import SourceLine
from batchstate.errors import BatchStateError
from batchstate.races.tracing.clocks import unused_name
from batchstate.runtime.base import Counters

_WORD = np.uint32(0xFFF5A5A5)
"""The content of memory that was never filled: numbers that no program can take for its own."""


def poison(memory: npt.NDArray[np.uint8]) -> None:
    """Makes any number in it a wrong one: integers are negative and large, floats of 32 and 64 bits are not numbers."""
    words = memory.nbytes // 4 * 4
    memory[:words].view(np.uint32)[...] = _WORD
    memory[words:] = 0xA5


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """New host memory full of poison."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        poison(tensor.view(-1).view(torch.uint8).numpy())
    return tensor


@final
class DeviceFault(BatchStateError, RuntimeError):
    """An operation failed when it ran, long after it was enqueued: an illegal access, mostly.

    On an accelerator this is the error that surfaces anywhere, names nothing, and leaves the device useless. The usual
    reason is an index that was read before it was there, or after its memory had been given away.

    Attributes:
        operation: its name.
        stream: that ran it.
        step: in which it was enqueued.
        site: the line that enqueued it.
    """

    def __init__(self, operation: str, stream: str, step: int, site: str, reason: str) -> None:
        super().__init__(
            f"{operation} failed when stream {stream!r} ran it: {reason}\n  enqueued in step {step} at {site}",
            value=reason,
            remedy="find what orders its operands before it; the race detector names the two accesses",
        )
        self.operation = operation
        self.stream = stream
        self.step = step
        self.site = site


Memory = npt.NDArray[np.uint8] | torch.Tensor
"""A block as bytes, other memory as a tensor."""


@final
@attrs.define(eq=False)
class Marker:
    """A point in a stream.

    Attributes:
        reached: everything before it has run.
    """

    stream: "DeviceStream"
    reached: bool = False


@final
@attrs.define(eq=False)
class Await:
    """Nothing behind it runs before a mark was reached."""

    marker: Marker


@final
@attrs.define(eq=False)
class Wipe:
    """Memory that was freed may be another tensor's from here on: it is poisoned as soon as everything before has run.

    It takes no turn of a scheduler: Python's garbage collection may decide when memory is freed, and the order of the
    streams must not depend on it.
    """

    memory: npt.NDArray[np.uint8] = attrs.field(repr=False)


@final
@attrs.define(eq=False)
class Task:
    """An operation that has not run.

    Attributes:
        name: for reports.
        step: in which it was enqueued.
        at: the line that enqueued it.
        work: does it.
        writes: returns memory that it may change: blocks as bytes, other memory as a tensor.
        reads_host: the allocation of host memory that it reads, or None.
        dormant: whether it is still undecided if it is the device's at all; it takes a turn, and counts for nothing.
    """

    name: str
    step: int
    at: SourceLine | None
    work: Callable[[], None]
    writes: Callable[[], Sequence[Memory]]
    reads_host: object = None
    dormant: bool = False


Entry = Task | Marker | Await | Wipe


@final
@attrs.define(eq=False)
class DeviceStream:
    """A stream of the device.

    Attributes:
        number: in the order in which they were created, from 0.
        name: for reports; no other stream has it.
        queue: entries that it has not run.
    """

    number: int
    name: str
    queue: deque[Entry] = attrs.field(factory=deque, repr=False)

    def entries(self) -> list[Entry]:
        """A copy of the queue, which changes when a garbage collection frees memory."""
        return list(self.queue)


Scheduler = Callable[[Sequence[DeviceStream], DeviceStream | None], DeviceStream | None]
"""Picks the stream that runs its next operation now, and is asked again after each; None: the host goes on instead.

It gets the streams that can run, oldest first, at least one; and the one among them that a waiting host needs next,
None if the host does not wait."""


LONGEST_QUEUE = 1024
"""Entries that a stream may have waiting; then the host waits, as where CUDA's launch queue is full."""

TRACED = 1 << 18
"""Newest operations in a trace."""


@final
class Device:
    """Streams with their queues. A scheduler picks the stream that runs next.

    A stream runs in order and stops at a wait until the mark it waits for was reached. Marks are older than the waits
    for them, so one stream can always run. The scheduler also decides how far the host gets before.

    Args:
        scheduler: picks the stream that runs next.
        step: returns the present step.

    Attributes:
        streams: its streams.
        at_once: everything runs when it is enqueued: outside of a window nothing would notice late results.
        depths: step -> the most steps with operations that had not run, when this one enqueued an operation.
        fault: of the first operation that failed.
        runs: times that an entry left a queue, or an operation ran at once.
        before_wipe: called with memory that is about to be poisoned.
    """

    def __init__(self, scheduler: Scheduler, step: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._step = step
        self._pending: Counter[int] = Counter()
        self._running = False
        self._trace: deque[tuple[str, str, int]] = deque(maxlen=TRACED)
        self._ran = 0
        self.streams: list[DeviceStream] = []
        self.at_once = True
        self.depths: dict[int, int] = {}
        self.fault: DeviceFault | None = None
        self.runs = 0
        self.before_wipe: Callable[[npt.NDArray[np.uint8]], None] = lambda memory: None

    def add(self, name: str) -> DeviceStream:
        """A new stream."""
        self.streams.append(
            DeviceStream(len(self.streams), unused_name(name, [stream.name for stream in self.streams]))
        )
        return self.streams[-1]

    # The host's side

    def enqueue(self, stream: DeviceStream, task: Task) -> None:
        """Appends an operation to a stream."""
        self._refuse_after_fault()
        stream.queue.append(task)
        if not task.dormant:
            self._count(task)
        if self.at_once:
            self.drain(stream)
            return
        while len(stream.queue) > LONGEST_QUEUE and self._ready() and len(stream.queue) > LONGEST_QUEUE:
            self._run(self.next_towards(stream))  # fences and waits that were over have gone by now
        self.get_on()

    def awaken(self, task: Task) -> None:
        """An operation that has not run turns out to be the device's."""
        task.dormant = False
        self._count(task)

    def _count(self, task: Task) -> None:
        self._pending[task.step] += 1
        if task.step:
            self.depths[task.step] = max(self.depths.get(task.step, 0), self.depth)

    def wipe(self, stream: DeviceStream, memory: npt.NDArray[np.uint8]) -> None:
        """A stream may write this memory from here on: no tensor has it any more."""
        stream.queue.append(Wipe(memory))

    def mark(self, stream: DeviceStream) -> Marker:
        """A mark behind all that a stream has so far."""
        marker = Marker(stream)
        stream.queue.append(marker)
        return marker

    def wait_on(self, stream: DeviceStream, marker: Marker) -> None:
        """The next operations of a stream run after a mark was reached."""
        stream.queue.append(Await(marker))

    def has_reached(self, marker: Marker) -> bool:
        """Whether all before a mark has run."""
        self.settle()
        return marker.reached

    def run_until(self, marker: Marker) -> None:
        """The host waits for a mark.

        Raises:
            DeviceFault: an operation failed, now or before.
        """
        self._refuse_after_fault()
        while not self.has_reached(marker):
            needed = self.next_towards(marker.stream)
            stream = self._scheduler(self._ready(), needed)
            self._run(needed if stream is None else stream)

    def drain(self, stream: DeviceStream) -> None:
        """The host waits for all that a stream has."""
        self.run_until(self.mark(stream))

    def drain_all(self) -> None:
        """The host waits for the whole device."""
        for marker in [self.mark(stream) for stream in self.streams]:
            self.run_until(marker)

    def step_towards(self, marker: Marker) -> None:
        """Runs the next operation on the way to a mark."""
        if not self.has_reached(marker):
            self._run(self.next_towards(marker.stream))

    def _tasks(self, streams: Sequence[DeviceStream]) -> Iterator[Task]:
        return (entry for stream in streams for entry in stream.entries() if isinstance(entry, Task))

    def pending(self, stream: DeviceStream | None = None) -> int:
        """Operations that have not run."""
        return sum(not task.dormant for task in self._tasks(self.streams if stream is None else [stream]))

    @property
    def depth(self) -> int:
        """Steps with operations that have not run. Operations before the first `next_step` belong to no step."""
        return len(self._pending) - (0 in self._pending)

    def reads_host(self, allocation: object) -> bool:
        """Whether an operation that has not run reads this host memory."""
        return any(task.reads_host is allocation for task in self._tasks(self.streams))

    def note(self, stream: DeviceStream, name: str, step: int) -> None:
        """An operation has run."""
        self._ran += 1
        self.runs += 1
        self._trace.append((stream.name, name, step))

    def trace(self) -> list[str]:
        """The newest operations that have run, in order."""
        first = self._ran - len(self._trace) + 1
        return [f"{first + at} {stream}: {name}, step {step}" for at, (stream, name, step) in enumerate(self._trace)]

    # The device's side

    def next_towards(self, stream: DeviceStream) -> DeviceStream:
        """The stream that has to run for this one to get on: itself, or the one that it waits for, and so on."""
        head = stream.queue[0]
        while isinstance(head, Await):
            stream = head.marker.stream
            head = stream.queue[0]
        return stream

    def get_on(self) -> None:
        """The host has enqueued an operation, or asks a fence: streams run that the scheduler picks."""
        if self._running or self.fault is not None:
            return
        while ready := self._ready():
            stream = self._scheduler(ready, None)
            if stream is None:
                return
            self._run(stream)

    def _ready(self) -> list[DeviceStream]:
        self.settle()
        return [stream for stream in self.streams if stream.queue and isinstance(stream.queue[0], Task)]

    def settle(self) -> None:
        """Removes entries that take no time: marks are reached, waits for such are over, memory is wiped."""
        moved = True
        while moved:
            moved = False
            for stream in self.streams:
                queue = stream.queue
                while queue:
                    head = queue[0]
                    if isinstance(head, Marker):
                        head.reached = True
                    elif isinstance(head, Wipe):
                        self.before_wipe(head.memory)
                        poison(head.memory)
                    elif isinstance(head, Task) or not head.marker.reached:
                        break
                    self.runs += 1
                    queue.popleft()
                    moved = True

    def _run(self, stream: DeviceStream) -> None:
        task = stream.queue.popleft()
        if not isinstance(task, Task):
            raise TypeError(f"{stream} has no operation to run, but {task!r}")
        self._running = True
        try:
            execute(task, stream)
        except DeviceFault as fault:
            self.fault = fault
            raise
        finally:
            self._running = False
            self.runs += 1
            if not task.dormant:
                self._pending[task.step] -= 1
                if not self._pending[task.step]:
                    del self._pending[task.step]
        if not task.dormant:
            self.note(stream, task.name, task.step)

    def _refuse_after_fault(self) -> None:
        if self.fault is not None:
            fault = self.fault
            raise DeviceFault(fault.operation, fault.stream, fault.step, fault.site, f"{fault.value} (before this)")


def execute(task: Task, stream: DeviceStream) -> None:
    """Runs an operation, unseen by modes of torch.

    Raises:
        DeviceFault: it fails.
    """
    try:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch._C._InferenceMode(True):
            task.work()
    except (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError) as error:
        line, caller = ("an unknown line", None) if task.at is None else task.at.words()
        if caller is not None:
            line += f", called at {caller}"
        reason = f"{type(error).__name__}: {error}"
        raise DeviceFault(task.name, stream.name, task.step, line, reason) from error


PATIENCE = 1_000
"""Times that a fence is asked before each further time runs an operation: a host that polls gets on."""


@final
@attrs.define(eq=False)
class SimFence:
    """A point in a stream. Complete once everything before it has run."""

    marker: Marker
    device: Device
    _counters: Counters
    _asked: int = 0

    def __repr__(self) -> str:
        return f"<fence on {self.marker.stream.name!r}>"

    def query(self) -> bool:
        """Whether everything before it has run. Never waits; the device may get on meanwhile."""
        if not self.device.has_reached(self.marker):
            self._asked += 1
            if self._asked > PATIENCE:
                self.device.step_towards(self.marker)
            self.device.get_on()
        return self.device.has_reached(self.marker)

    def wait(self) -> None:
        """The host waits: the device runs until everything before it has run."""
        self._counters.fence_waits += 1
        self.device.run_until(self.marker)


_HOST = -1
"""The host in place of a stream, among free blocks."""

SMALLEST = 512
"""Bytes of the smallest block, as CUDA's allocator rounds: small results share a size, so that they meet again."""


@final
@attrs.define(eq=False)
class Block:
    """A piece of device memory. The allocator owns it; tensors are views of it, and so are operations' own views.

    A program holds one storage object over the block, and the end of that object frees the block. Operations that have
    not run yet refer to the block and make views of their own when they run: they keep no tensor of the program alive.

    Attributes:
        memory: the bytes.
        stream: the stream that allocated it.
        users: other streams that the allocator was told of, by number.
    """

    memory: npt.NDArray[np.uint8] = attrs.field(repr=False)
    stream: DeviceStream
    users: dict[int, DeviceStream] = attrs.field(factory=dict)
    _typed: dict[torch.dtype, torch.Tensor] = attrs.field(factory=dict, repr=False)

    def handed_out(self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """The tensor that a program gets for an allocation."""
        return torch.from_numpy(self.memory).view(dtype).as_strided(shape, stride)

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
        """The same memory for an operation that runs. Only inference mode may call it."""
        flat = self._typed.get(dtype)
        if flat is None:
            flat = self._typed[dtype] = torch.from_numpy(self.memory).view(dtype)
        view: torch.Tensor = flat.as_strided(shape, stride, offset)
        return view


def bytes_of(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Bytes from the first to the last element."""
    if 0 in shape:
        return 0
    last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    return (last + 1) * dtype.itemsize


@final
class BlockAllocator:
    """Hands out blocks and takes them back.

    Args:
        device: its streams wipe the blocks.

    Attributes:
        reused: times that a block was handed out again.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[tuple[int, int], list[Block]] = {}
        self._given_back: dict[int, list[Block]] = {}
        self._aside: list[tuple[Block, list[Marker]]] = []
        self.reused = 0

    def allocate(self, stream: DeviceStream, nbytes: int) -> Block:
        """A block for a stream: the last one that it gave back, or a new one."""
        if self._aside:
            self._reclaim()
        if stream.number in self._given_back:
            for block in self._given_back.pop(stream.number):
                self._device.wipe(stream, block.memory)
                self._free.setdefault((stream.number, block.memory.nbytes), []).append(block)
        free = self._free.get((stream.number, rounded(nbytes)))
        if not free:
            return self.fresh(stream, nbytes)
        self.reused += 1
        return free.pop()

    def fresh(self, stream: DeviceStream, nbytes: int) -> Block:
        """A block that was never used before."""
        memory = np.empty(rounded(nbytes), np.uint8)
        poison(memory)
        return Block(memory, stream)

    def pinned(self, nbytes: int) -> Block:
        """A block of pinned host memory: the last one of its size that was given back, or a new one."""
        free = self._free.get((_HOST, rounded(nbytes)))
        if not free:
            return self.fresh(self._device.streams[0], nbytes)
        self.reused += 1
        return free.pop()

    def free(self, block: Block, *, pinned: bool = False) -> None:
        """The last tensor of a block is gone. Only notes it: this may be called anywhere."""
        if pinned:
            self._free.setdefault((_HOST, block.memory.nbytes), []).append(block)
            return
        users, block.users = list(block.users.values()), {}
        if users:
            self._aside.append((block, [self._device.mark(stream) for stream in users]))
        else:
            self._given_back.setdefault(block.stream.number, []).append(block)

    def _reclaim(self) -> None:
        aside, self._aside = self._aside, []
        for block, markers in aside:
            if all(self._device.has_reached(marker) for marker in markers):
                self._given_back.setdefault(block.stream.number, []).append(block)
            else:
                self._aside.append((block, markers))


def rounded(nbytes: int) -> int:
    """Bytes of the block for an allocation."""
    return max(SMALLEST, 1 << max(nbytes - 1, 0).bit_length())
