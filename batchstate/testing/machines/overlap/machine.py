"""A small engine that overlaps, on several streams: every hand-over of the library, between real operations.

Nothing here waits for the device but reading results of older steps, and every number that the device holds ends up in
a token. So a wait that the library forgets is a conflict of two operations, which the race detector sees, or a wrong
token, which the simulated device brings about.
"""

import sys

import attrs
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import levels
from batchstate.runtime import CpuRuntime, Runtime
from batchstate.testing.late import LateRuntime
from batchstate.testing.machine import Machine, agree, agree_on
from batchstate.testing.machines.overlap.choices import CHOICES, Choices
from batchstate.testing.machines.overlap.engine import Engine
from batchstate.testing.machines.overlap.memory import Memory
from batchstate.testing.machines.overlap.model import column
from batchstate.testing.machines.overlap.requests import MARKS, MOST_TOKENS, Request, Way

_WAYS = st.sampled_from(list(Way))
_MOST_WAITING = 4
_STRIDE = 1237
"""From one way of running a step to the next, in `churn`: all of them come in turn, unlike ones close together."""


class OverlapMachine(Machine):
    """Requests arrive, run, hang up and finish, while the device is always a step behind."""

    NAME = "overlap"

    _opened = False

    def open_runtime(self) -> Runtime:
        """A plain CPU runtime has fences that are always complete: one that lags takes its place."""
        opened = super().open_runtime()
        return LateRuntime(steps_in_flight=opened.steps_in_flight) if type(opened) is CpuRuntime else opened

    @initialize(size=st.integers(2, 4), page_size=st.integers(1, 3), spare=st.integers(0, 8), chunk=st.integers(2, 6))
    def begin(self, size: int, page_size: int, spare: int, chunk: int) -> None:
        """Opens an engine so small that slots and pages are used again and again."""
        self.open()
        self.memory = Memory(self.rt, size, -(-MOST_TOKENS // page_size) + spare, page_size)
        self.engine = Engine(self.memory, chunk, self.reached)
        self.numbers = 0
        self._opened = True

    # Judging

    def judge(self) -> None:
        """What the host holds, at every level; at `full` every law besides. Nothing here waits for the device."""
        batch, ages, memory = self.engine.schedule.batch, self.engine.schedule.ages, self.memory
        lens = [one.length for one in batch.requests]
        agree_on(np.array(lens, np.int64), np.array(batch.seq_lens.np), "lengths")
        agree_on(memory.pages.committed(batch.slots), np.array(batch.seq_lens.np), "committed tokens")
        agree_on(column(batch.requests, "age"), np.array(ages.np), "ages")
        agree(True, bool((batch.odd.np >= column(batch.requests, "odd")).all()), "bounds are bounds")
        agree(len(batch), memory.slots.stats.live, "live slots")
        agree(0, self.rt.counters.forced_syncs, "forced syncs")
        if levels.full:
            memory.slots.verify()
            memory.pages.verify()
            memory.relay.check("judge")
            batch.check("judge")

    def teardown(self) -> None:
        """Reads everything that is still on its way, if all was well, and closes the example."""
        try:
            if self._opened and sys.exc_info()[1] is None:
                self._drain()
        finally:
            super().teardown()

    def _drain(self) -> None:
        """One more step shows what was broken by the one before; then everybody leaves, and nothing may be left."""
        engine, memory = self.engine, self.memory
        for _ in range(2):
            engine.schedule.waiting.clear()  # those that the first step retracts, too
            engine.step(Choices())
            for one in engine.schedule.batch.requests:
                one.aborted = True
        engine.audit.what_is_left()
        while engine.audit.unread:
            engine.audit.read(0)
        while engine.steps.running:
            engine.steps.wait()
        memory.slots.expect_idle()
        memory.pages.expect_idle()
        free = memory.slots.stats.free, memory.pages.stats.free
        agree((memory.slots.size, memory.pages.num_pages), free, "free slots and pages when idle")
        agree(0, self.rt.counters.forced_syncs, "forced syncs")

    # Rules

    @precondition(lambda self: len(self.engine.schedule.waiting) < _MOST_WAITING)
    @rule(
        n=st.integers(1, 2),
        prompt=st.integers(1, 6),
        answer=st.integers(1, 4),
        way=_WAYS,
        marked=st.booleans(),
    )
    def arrive(self, n: int, prompt: int, answer: int, way: Way, marked: bool) -> None:
        """Requests come."""
        for _ in range(n):
            self._arrive(prompt, answer, way, marked)

    def _arrive(self, prompt: int, answer: int, way: Way, marked: bool, *, first: bool = False) -> None:
        self.numbers += 1
        ids = [self.numbers * 101 + at * 13 for at in range(prompt)]
        request = Request(self.numbers, ids, answer + (way is not Way.PROMPT), way)
        request.marks = self._marks() if marked else request.marks
        waiting = self.engine.schedule.waiting
        if first:
            waiting.appendleft(request)
        else:
            waiting.append(request)

    def _marks(self) -> tuple[int, ...]:
        self.numbers += 1
        return tuple(self.numbers * 17 + at for at in range(MARKS))

    @rule()
    def churn(self) -> None:
        """A request comes, each time in another way, and the engine steps, each time in another way.

        Hypothesis takes this rule first, since it has no arguments: so even its simplest example is a busy one.
        """
        round_, odd = divmod(self.engine.steps.launched, 2)
        if not odd and not self.engine.schedule.waiting:
            self._arrive(1 + round_ % 4, 2 + round_ % 2, list(Way)[round_ % len(Way)], round_ % 5 < 3)
        self.engine.step(Choices.numbered(_STRIDE * self.engine.steps.launched))

    @rule(steps=st.lists(CHOICES, min_size=1, max_size=2))
    def run(self, steps: list[Choices]) -> None:
        """The engine steps, one ahead of the device."""
        for choices in steps:
            self.engine.step(choices)

    @rule(prompt=st.integers(1, 4), way=_WAYS, marked=st.booleans(), steps=st.tuples(CHOICES, CHOICES, CHOICES))
    def step_finish_admit_step(
        self, prompt: int, way: Way, marked: bool, steps: tuple[Choices, Choices, Choices]
    ) -> None:
        """A short request runs to its end beside the others, and another takes its place at once."""
        self._arrive(1, 1, Way.PROMPT, marked, first=True)
        self.engine.step(steps[0])
        self._arrive(prompt, 2, way, not marked, first=True)
        self.engine.step(steps[1])
        self.engine.step(steps[2])

    @precondition(lambda self: len(self.engine.schedule.batch) > 0)
    @rule(at=st.integers(0, 3), way=_WAYS, steps=st.tuples(CHOICES, CHOICES))
    def abort_and_replace(self, at: int, way: Way, steps: tuple[Choices, Choices]) -> None:
        """A client hangs up while a step runs for it, and somebody else comes."""
        here = self.engine.schedule.batch.requests
        here[at % len(here)].aborted = True
        self._arrive(3, 2, way, True, first=True)
        for choices in steps:
            self.engine.step(choices)

    @precondition(lambda self: len(self.engine.schedule.batch) > 0)
    @rule(n=st.integers(1, 2), prompt=st.integers(1, 4), way=_WAYS, steps=st.tuples(CHOICES, CHOICES))
    def try_and_admit(self, n: int, prompt: int, way: Way, steps: tuple[Choices, Choices]) -> None:
        """Pages that a step only tries are taken back at once, and others arrive and want pages."""
        self.engine.step(attrs.evolve(steps[0], tries=True))
        for _ in range(n):
            self._arrive(prompt, 2, way, False, first=True)
        self.engine.step(steps[1])

    @rule(way=_WAYS, steps=st.tuples(CHOICES, CHOICES))
    def abandon(self, way: Way, steps: tuple[Choices, Choices]) -> None:
        """Everybody hangs up; nobody reads what is in flight for them, and others come."""
        self.engine.step(steps[0])
        for one in self.engine.schedule.batch.requests:
            one.aborted = True
        self.engine.steps.forget()
        self._arrive(2, 3, way, True, first=True)
        self.engine.step(steps[1])

    @rule(prompt=st.integers(3, 6), steps=st.tuples(CHOICES, CHOICES))
    def crowd(self, prompt: int, steps: tuple[Choices, Choices]) -> None:
        """More than fits: requests grow until somebody has to give its pages back."""
        while len(self.engine.schedule.waiting) < _MOST_WAITING:
            self._arrive(prompt, 4, Way.PROMPT, False)
        for choices in steps:
            self.engine.step(choices)

    @precondition(lambda self: len(self.engine.schedule.batch) > 0)
    @rule(
        at=st.integers(0, 3),
        streams=st.lists(st.sampled_from(["schedule", "arrivals", "upload"]), min_size=1, max_size=2),
        choices=CHOICES,
    )
    def rewrite_marks(self, at: int, streams: list[str], choices: Choices) -> None:
        """A row that the step in flight reads is written, perhaps twice, before the next step reads it."""
        here = self.engine.schedule.batch.requests
        one = here[at % len(here)]
        for name in streams:
            stream = None if name == "upload" else getattr(self.memory.streams, name)
            self.engine.schedule.mark(one, self._marks(), stream)
        self.reached("a row rewritten while a step reads it", self.engine.steps.depth > 0)
        self.reached("a row written on two streams", "arrivals" in streams and {*streams} != {"arrivals"})
        self.engine.step(choices)

    @precondition(lambda self: len(self.engine.schedule.batch) > 0)
    @rule(at=st.integers(0, 3), temperature=st.integers(1, 9), age=st.integers(0, 50))
    def retune(self, at: int, temperature: int, age: int) -> None:
        """Values of one request change on both sides, between two steps."""
        schedule = self.engine.schedule
        row = at % len(schedule.batch)
        held = schedule.batch.requests[row].held
        schedule.batch = schedule.batch.update("temperature", [row], float(temperature))
        with self.rt.use(self.memory.streams.schedule):
            schedule.ages = schedule.ages.update([row], age)
        held.temperature, held.age = temperature, age

    @precondition(lambda self: len(self.engine.schedule.batch) > 0)
    @rule(what=st.sampled_from(["columns", "tables", "rows in another order", "results"]), choices=CHOICES)
    def look(self, what: str, choices: Choices) -> None:
        """Another stream looks at what there is, and the next step goes on with what it made."""
        schedule, audit = self.engine.schedule, self.engine.audit
        if what == "rows in another order":
            with self.rt.use(self.memory.streams.schedule):
                schedule.reorder()
        if what == "tables":
            audit.tables(schedule.batch)
        elif what == "results":
            if self.engine.steps.unread:
                audit.results(self.engine.steps.read(0))
        else:
            audit.columns(schedule.batch, schedule.ages)
        self.reached("looked at while a step is in flight", self.engine.steps.depth > 0)
        self.engine.step(choices)

    @precondition(lambda self: bool(self.engine.audit.unread))
    @rule(at=st.integers(0, 5))
    def read_a_look(self, at: int) -> None:
        """The host reads what was seen, in any order."""
        self.engine.audit.read(at % len(self.engine.audit.unread))

    @precondition(lambda self: len(self.engine.steps.unread) > 0)
    @rule(steps=st.tuples(CHOICES, CHOICES))
    def read_out_of_order(self, steps: tuple[Choices, Choices]) -> None:
        """The newest results are read first; the oldest wait in their memory while others land."""
        for choices in steps:
            self.engine.step(attrs.evolve(choices, unread=True))
            if self.engine.steps.unread:
                self.engine.steps.read(len(self.engine.steps.unread) - 1)

    @rule(n=st.integers(1, 6))
    def complete(self, n: int) -> None:
        """The device gets somewhere, and the host could know."""
        if isinstance(self.rt, LateRuntime):
            self.rt.complete(n)

    @precondition(lambda self: self.engine.steps.running)
    @rule()
    def wait(self) -> None:
        """The host waits for the oldest forward that runs."""
        self.engine.steps.wait()
