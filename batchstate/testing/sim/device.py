"""The simulated device itself: a queue for each stream, and who of them gets on.

A stream runs in order and stops at a wait until the mark it waits for was reached. Marks are older than the waits for
them, so somebody can always get on. Who does is the scheduler's choice, and so is how far the host gets before.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from batchstate.testing.sim.faults import DeviceFault
from batchstate.testing.sim.poison import poison
from batchstate.testing.sim.queues import Await, Lane, Marker, Moment, Scheduler, Task, Wipe
from batchstate.testing.watching.names import unused_name

LONGEST_QUEUE = 1024
"""What a stream may have before it; then the host waits, as where CUDA's launch queue is full."""

TRACED = 1 << 18
"""Operations that a trace goes back."""


@final
class Device:
    """Streams, and what they have not run.

    Args:
        scheduler: says who gets on.
        step: the present step.

    Attributes:
        lanes: its streams.
        at_once: everything runs when it is enqueued: nobody would see what comes late.
        depth_max: the most steps of which something had not run.
        fault: of the first operation that failed.
        runs: times that anything left a queue, or ran at once.
        held: nothing runs but what the host waits for.
        before_wipe: told of memory that is about to be poisoned.
    """

    def __init__(self, scheduler: Scheduler, step: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._step = step
        self._pending: Counter[int] = Counter()
        self._running = False
        self._trace: deque[tuple[str, str, int]] = deque(maxlen=TRACED)
        self._ran = 0
        self.lanes: list[Lane] = []
        self.at_once = True
        self.depth_max = 0
        self.fault: DeviceFault | None = None
        self.runs = 0
        self.held = False
        self.before_wipe: Callable[[npt.NDArray[np.uint8]], None] = _nothing

    def add(self, name: str) -> Lane:
        """A new stream."""
        self.lanes.append(Lane(len(self.lanes), unused_name(name, [lane.name for lane in self.lanes])))
        return self.lanes[-1]

    # The host's side

    def enqueue(self, lane: Lane, task: Task) -> None:
        """Something for a stream to do."""
        self._refuse_after_fault()
        lane.queue.append(task)
        if not task.dormant:
            self._count(task)
        if self.at_once:
            self.drain(lane)
            return
        while len(lane.queue) > LONGEST_QUEUE and self._ready() and len(lane.queue) > LONGEST_QUEUE:
            self._run(self.next_towards(lane))  # fences and waits that were over have gone by now
        self._chance(Moment.ENQUEUED)

    def awaken(self, task: Task) -> None:
        """Something that has not run turns out to be the device's."""
        task.dormant = False
        self._count(task)

    def _count(self, task: Task) -> None:
        self._pending[task.step] += 1
        self.depth_max = max(self.depth_max, self.depth)

    def wipe(self, lane: Lane, memory: npt.NDArray[np.uint8]) -> None:
        """A stream may write this memory from here on, whoever had it."""
        lane.queue.append(Wipe(memory))

    def mark(self, lane: Lane) -> Marker:
        """A mark behind all that a stream has so far."""
        marker = Marker(lane)
        lane.queue.append(marker)
        return marker

    def wait_on(self, lane: Lane, marker: Marker) -> None:
        """What comes next on a stream runs after a mark was reached."""
        lane.queue.append(Await(marker))

    def asked(self) -> None:
        """The host asks after something."""
        self._chance(Moment.ASKED)

    def has_reached(self, marker: Marker) -> bool:
        """Whether all before a mark has run."""
        self.settle()
        return marker.reached

    def run_until(self, marker: Marker) -> None:
        """The host waits for a mark.

        Raises:
            DeviceFault: something failed, now or before.
        """
        self._refuse_after_fault()
        while not self.has_reached(marker):
            needed = self.next_towards(marker.lane)
            lane = self._scheduler.choose(Moment.WAITS, self._ready(), needed)
            self._run(needed if lane is None else lane)

    def drain(self, lane: Lane) -> None:
        """The host waits for all that a stream has."""
        self.run_until(self.mark(lane))

    def drain_all(self) -> None:
        """The host waits for the whole device."""
        for marker in [self.mark(lane) for lane in self.lanes]:
            self.run_until(marker)

    def step_towards(self, marker: Marker) -> None:
        """One operation runs without which a mark will not be reached."""
        if not self.has_reached(marker):
            self._run(self.next_towards(marker.lane))

    # What can be seen of it

    def pending(self, lane: Lane | None = None) -> int:
        """Operations that have not run."""
        lanes = self.lanes if lane is None else [lane]
        return sum(isinstance(one, Task) and not one.dormant for each in lanes for one in each.entries())

    @property
    def depth(self) -> int:
        """Steps of which something has not run. What comes before the first `next_step` is no step."""
        return len(self._pending) - (0 in self._pending)

    def reads_host(self, known: object) -> bool:
        """Whether something that has not run reads this host memory."""
        return any(isinstance(one, Task) and one.reads_host is known for lane in self.lanes for one in lane.entries())

    def note(self, lane: Lane, name: str, step: int) -> None:
        """Something has run."""
        self._ran += 1
        self.runs += 1
        self._trace.append((lane.name, name, step))

    def trace(self) -> list[str]:
        """What has run, in order."""
        first = self._ran - len(self._trace) + 1
        return [f"{first + at} {lane}: {name}, step {step}" for at, (lane, name, step) in enumerate(self._trace)]

    # The device's side

    def next_towards(self, lane: Lane) -> Lane:
        """The stream that has to get on for this one to get on: itself, or the one that it waits for, and so on."""
        head = lane.queue[0]
        while isinstance(head, Await):
            lane = head.marker.lane
            head = lane.queue[0]
        return lane

    def _chance(self, moment: Moment) -> None:
        if self._running or self.held or self.fault is not None:
            return
        while ready := self._ready():
            lane = self._scheduler.choose(moment, ready, None)
            if lane is None:
                return
            self._run(lane)

    def _ready(self) -> list[Lane]:
        self.settle()
        return [lane for lane in self.lanes if lane.queue and isinstance(lane.queue[0], Task)]

    def settle(self) -> None:
        """Does what takes no time: marks are reached, waits for such are over, memory is wiped."""
        moved = True
        while moved:
            moved = False
            for lane in self.lanes:
                queue = lane.queue
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

    def _run(self, lane: Lane) -> None:
        task = lane.queue.popleft()
        if not isinstance(task, Task):
            raise TypeError(f"{lane} has no operation to run, but {task!r}")
        self._running = True
        try:
            execute(task, lane)
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
            self.note(lane, task.name, task.step)

    def _refuse_after_fault(self) -> None:
        if self.fault is not None:
            fault = self.fault
            raise DeviceFault(fault.operation, fault.stream, fault.step, fault.site, f"{fault.value} (before this)")


def _nothing(memory: npt.NDArray[np.uint8]) -> None:
    """Nobody wants to know."""


def execute(task: Task, lane: Lane) -> None:
    """Does what an operation is to do, unseen by modes of torch.

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
        raise DeviceFault(task.name, lane.name, task.step, line, reason) from error
