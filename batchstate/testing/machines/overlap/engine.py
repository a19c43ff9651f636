"""The engine of the overlap machine: it launches a step before it reads the one before, as in any engine that overlaps.

One step: rows leave and join, all grow, one upload, one forward, and the results of an older step are read. What leaves
is freed behind the last launched forward. The host waits for the step that runs only where it needs what that holds.
"""

from typing import final

import numpy as np
import numpy.typing as npt

from batchstate.forward_plan import ForwardPlan
from batchstate.testing.machines.overlap.audit import Audit
from batchstate.testing.machines.overlap.choices import Choices
from batchstate.testing.machines.overlap.forward import Forward, Launched, Work
from batchstate.testing.machines.overlap.memory import Memory
from batchstate.testing.machines.overlap.model import PRIME, WEIGHTS, Outcome, forward
from batchstate.testing.machines.overlap.requests import MOST_TOKENS, Running
from batchstate.testing.machines.overlap.schedule import Schedule
from batchstate.testing.machines.overlap.steps import MOST_UNREAD, Reached, Step, Steps

Ints = npt.NDArray[np.int64]


@final
class Engine:
    """Serves requests.

    Args:
        memory: of the example.
        chunk: ids of a prompt that one step takes.
        reached: hears of interesting states.

    Attributes:
        schedule: who runs.
        steps: launched and perhaps running, or unread.
        audit: looks at everything from a stream of its own.
    """

    def __init__(self, memory: Memory, chunk: int, reached: Reached) -> None:
        self._memory = memory
        self._runtime = memory.runtime
        self._reached = reached
        self._forward = Forward(memory)
        self._drawn = 0
        self.steps = Steps(memory, reached)
        self.schedule = Schedule(memory, self.steps, chunk, reached)
        self.audit = Audit(memory)

    def step(self, choices: Choices) -> bool:
        """Plans and launches a step, then reads older ones. Whether anybody runs."""
        self.steps.begin()
        with self._runtime.use(self._memory.streams.schedule):
            self.schedule.plan(choices)
            runs = len(self.schedule.batch) > 0
            if runs:
                self._launch(choices)
        if not choices.unread:
            self.steps.read_all_but(self._runtime.steps_in_flight - 1 if runs else 0)
        self.steps.read_all_but(MOST_UNREAD)
        while len(self.audit.unread) > MOST_UNREAD:
            self.audit.read(0)
        return runs

    def _launch(self, choices: Choices) -> None:
        """Everybody grows; one upload; the forward; and what was only tried is taken back."""
        schedule, pages = self.schedule, self._memory.pages
        queries, requests = schedule.queries, schedule.batch.requests
        ids = [one.ids(query) for one, query in zip(requests, queries.tolist(), strict=True)]
        ends = [one.length + query >= len(one.fill) for one, query in zip(requests, queries.tolist(), strict=True)]
        sampling = tuple(row for row, samples in enumerate(ends) if samples)
        batch = schedule.batch.advance({"seq_lens": queries, "odd": 1})
        schedule.ages = schedule.ages + 1
        lens = np.array(batch.seq_lens.np)
        extension = pages.extend(batch.slots, lens + int(choices.tries))
        schedule.grew()
        plan = None
        if not choices.by_hand or any(one is not None for one in ids):
            plan = ForwardPlan.of(batch.slots, batch.seq_lens, queries, prompt_ids=ids, samples=ends, pages=pages)
        salts, nudges = self._draw(len(batch)), self._draw(len(batch)) if choices.nudged else [0] * len(batch)
        extras: dict[str, object] = {
            "salts": np.array(salts),
            "ends": np.cumsum(queries) - 1,
            "chosen": np.array(sampling, np.int64),
            "columns": np.arange(MOST_TOKENS),
            "weights": WEIGHTS,
            "tried": self._places_behind(batch, lens) if choices.tries else np.zeros(0, np.int64),
        }
        writes = [extension.entry(), *schedule.writes()]
        uploaded = batch.upload(writes=writes, extras=extras | dict({} if plan is None else plan.extras))
        if choices.nudged:
            with self._runtime.use(self._memory.streams.arrivals):
                self._memory.relay.seed(batch.slots, nudge=nudges)
        came, schedule.arrivals.came = tuple(schedule.arrivals.came), []
        work = Work(choices, batch, schedule.ages, uploaded, plan, sampling, came)
        launched = self._forward.run(work)
        if choices.watched:
            self.audit.extras(uploaded, np.array(salts))
        outcomes = [
            forward(one, query, salt, nudge)
            for one, query, salt, nudge in zip(requests, queries.tolist(), salts, nudges, strict=True)
        ]
        self._launched(launched, sampling, outcomes)
        if choices.tries:
            pages.truncate(batch.slots, lens, after=launched.done)
        self._note(choices, ids, plan)

    def _launched(self, launched: Launched, sampling: tuple[int, ...], outcomes: list[Outcome]) -> None:
        self.schedule.batch = launched.batch
        sampled = [launched.batch.requests[row] for row in sampling]
        chosen = [outcomes[row] for row in sampling]
        places = [one.sampled for one in sampled]
        self.steps.add(Step(self.steps.launched + 1, sampled, places, chosen, launched.results, launched.done))
        for one, outcome in zip(sampled, chosen, strict=True):
            one.held.token = outcome.token
            one.sampled += 1
            one.in_flight += 1

    def _draw(self, n: int) -> list[int]:
        """Numbers that differ from step to step and from row to row: what never changes hides what is late."""
        self._drawn += 1
        return [(self._drawn * 7001 + row * 131 + 1) % PRIME for row in range(n)]

    def _places_behind(self, batch: Running, lens: Ints) -> Ints:
        """Where the token behind the last one of each request lies, int64[n]."""
        pages, size = self._memory.pages, self._memory.pages.page_size
        row: Ints = pages.page_table[batch.slots.np, lens // size].astype(np.int64)
        return row * size + lens % size

    def _note(self, choices: Choices, ids: list[object], plan: ForwardPlan | None) -> None:
        prompts = [one is not None for one in ids]
        self._reached("a forward of prompts and decodes", any(prompts) and not all(prompts))
        self._reached("inputs gathered by hand", plan is None)
        self._reached("tokens taken back while a step writes them", choices.tries)
        self._reached("nudged from another stream", choices.nudged)
