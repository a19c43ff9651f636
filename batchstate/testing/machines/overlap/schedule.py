"""Who runs in the next step of the overlap machine: rows leave, are retracted, and join, while a forward uses them."""

from collections import deque
from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from batchstate.mirror import MirroredTensor
from batchstate.runtime import Stream
from batchstate.tables import TableWrite
from batchstate.testing.machines.overlap.arrivals import Arrivals
from batchstate.testing.machines.overlap.choices import Choices
from batchstate.testing.machines.overlap.memory import Memory
from batchstate.testing.machines.overlap.requests import Request, Running, Way, handles_of
from batchstate.testing.machines.overlap.steps import Reached, Steps

Ints = npt.NDArray[np.int64]


@final
class Schedule:
    """The running requests and those that wait.

    Attributes:
        batch: the running requests, as they are after the last launched step.
        ages: steps of each; a vector of its own beside the batch, moved as the batch is.
        waiting: requests without a slot, first come first served.
        arrivals: how those begin that get one.
    """

    def __init__(self, memory: Memory, steps: Steps, chunk: int, reached: Reached) -> None:
        self._memory = memory
        self._steps = steps
        self._chunk = chunk
        self._reached = reached
        self.arrivals = Arrivals(memory)
        self.waiting: deque[Request] = deque()
        self.batch = Running.empty(memory.runtime)
        self.ages = MirroredTensor.from_host(memory.runtime, np.zeros(0, np.int64), name="ages")
        self._marks_due: dict[Request, tuple[int, ...]] = {}  # to be written with the next upload
        self._retracted: list[Request] = []
        self._pages_used: set[int] = set()

    def plan(self, choices: Choices) -> None:
        """Brings the batch up to date, on the current stream."""
        self._leave(choices)
        if not self._make_room(choices):
            self._admit(choices)

    @property
    def queries(self) -> Ints:
        """Ids that each running request puts in next, int64[n]."""
        return np.array([one.query(self._chunk) for one in self.batch.requests], np.int64)

    # Leaving

    def _leave(self, choices: Choices) -> None:
        leaves = np.array([one.over for one in self.batch.requests], np.bool_)
        if leaves.any():
            self._reached("left while a step uses the row", self._steps.depth > 0)
            self._give_back(leaves, choices)

    def _give_back(self, leaves: npt.NDArray[np.bool_], choices: Choices) -> Sequence[Request]:
        """Takes rows out of the batch; their slots and pages are free behind the last launched forward."""
        memory, leaving = self._memory, self.batch.filter(leaves)
        marked = [row for row, one in enumerate(leaving.requests) if any(one.held.marks)]
        if marked:
            stream = memory.streams.arrivals if choices.clears_aside else memory.streams.schedule
            with memory.runtime.use(stream):
                memory.marks.clear(leaving.slots.filter(marked))
            self._reached("a row cleared on another stream", choices.clears_aside)
        memory.pages.release_requests(leaving.slots, after=self._steps.last)
        self.batch, self.ages = self.batch.filter(~leaves), self.ages.filter(~leaves)
        for one in leaving.requests:
            self._marks_due.pop(one, None)
            one.handle = None
        return leaving.requests

    def reorder(self) -> None:
        """The rows in the opposite order; what only the device has is gathered by whoever reads it first."""
        backwards = np.arange(len(self.batch))[::-1]
        self.batch, self.ages = self.batch.filter(backwards), self.ages.filter(backwards)

    # Pages

    def _make_room(self, choices: Choices) -> int:
        """Lets the youngest requests give their pages back until the others can grow; how many had to."""
        retracted = 0
        while (lacking := self._lacking(choices) - self._memory.pages.stats.free) > 0:
            if self._steps.running and (len(self.batch) == 1 or self._memory.pages.stats.pending >= lacking):
                self._reached("waited for a step that held what was needed", True)
                self._steps.wait()
                continue
            youngest = self._give_back(np.arange(len(self.batch)) == len(self.batch) - 1, choices)
            self.waiting.extendleft(youngest)
            self._retracted += youngest
            retracted += 1
        return retracted

    def _lacking(self, choices: Choices) -> int:
        """Pages that the running requests need for the next step."""
        if not len(self.batch):
            return 0
        size, pages = self._memory.pages.page_size, self._memory.pages
        wanted = -(-(self.batch.seq_lens.np + self.queries + int(choices.tries)) // size)
        return int(np.maximum(wanted - pages.allocated(self.batch.slots) // size, 0).sum())

    # Joining

    def _admit(self, choices: Choices) -> None:
        if not len(self.batch) and self.waiting:
            while self._steps.running and not self._fit(choices):
                self._steps.wait()
        joining = self._fit(choices)
        if joining:
            for one in joining:
                self.waiting.remove(one)
            self._join(joining)

    def _fit(self, choices: Choices) -> list[Request]:
        """The first of those that wait for which there is room now; who has results in flight waits for these."""
        slots, pages = self._memory.slots.stats.free, self._memory.pages.stats.free - self._lacking(choices)
        size, fit = self._memory.pages.page_size, list[Request]()
        for one in self.waiting:
            if one.in_flight:
                continue
            tokens = len(one.known) + (one.way is not Way.PROMPT) + int(choices.tries)
            needed = -(-tokens // size)
            if slots < 1 or needed > pages:
                break
            fit.append(one)
            slots, pages = slots - 1, pages - needed
        return fit

    def _join(self, joining: Sequence[Request]) -> None:
        memory, in_flight = self._memory, self._steps.depth > 0
        taken = memory.slots.take(len(joining))
        for one, slot in zip(joining, taken.split([1] * len(joining)), strict=True):
            one.handle = slot
        used = [one for one in joining if in_flight and one.handle is not None and one.handle.generations[0] > 1]
        prebuilt = [one for one in joining if one.way is not Way.PROMPT]
        prompts = [one for one in joining if one.way is Way.PROMPT]
        self._reached("a slot used again while a step is in flight", bool(used))
        self._reached("a prebuilt request in a used slot", any(one in prebuilt for one in used))
        self._reached("prebuilt KV handed to the forward", any(one.way is Way.HANDED for one in joining))
        self._reached("a retracted request came back", any(one in self._retracted for one in joining))
        joined = [self.arrivals.begin(prompts)] if prompts else []
        joined += [self.arrivals.begin_prebuilt(one) for one in prebuilt]
        self._marks_due.update({one: one.marks for one in prompts if any(one.marks)})
        self._reached("joined while a step is in flight", in_flight and len(self.batch) > 0)
        for batch in joined:
            self.batch = self.batch.merge(batch)
        self.ages = self.ages.merge(MirroredTensor.from_host(memory.runtime, np.zeros(len(joining), np.int64)))
        written = self._pages_of(prebuilt)
        self._reached("a prebuilt request on used pages", in_flight and not self._pages_used.isdisjoint(written))

    def grew(self) -> None:
        """The running requests have the pages that they have now."""
        self._pages_used.update(self._pages_of(self.batch.requests))

    def _pages_of(self, requests: Sequence[Request]) -> list[int]:
        if not requests:
            return []
        pages: list[int] = self._memory.pages.page_table[handles_of(requests).np].reshape(-1).tolist()
        return [page for page in pages if page]

    # Marks

    def mark(self, one: Request, marks: tuple[int, ...], stream: Stream | None) -> None:
        """Another row of marks for a running request, at once on a stream, or with the next upload."""
        one.marks = marks
        if stream is None:
            self._marks_due[one] = marks
            return
        self._marks_due.pop(one, None)
        one.held.marks = marks
        with self._memory.runtime.use(stream):
            self._memory.marks.write(handles_of([one]), None, [marks])

    def writes(self) -> list[TableWrite]:
        """What rides in the next upload besides the tokens of the step."""
        writes, self.arrivals.writes = self.arrivals.writes, []
        if self._marks_due:
            for one, marks in self._marks_due.items():
                one.held.marks = marks
            values = list(self._marks_due.values())
            writes.append(self._memory.marks.entry(handles_of(list(self._marks_due)), None, values))
            self._marks_due.clear()
        return writes
