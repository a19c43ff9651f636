"""The loop: plan a step, launch it, and read the results of the one before.

Synchronous::

    plan N   launch N   read N   plan N+1   launch N+1   read N+1

Overlapped, the CPU is one step ahead, and never waits for the step that runs::

    plan N   launch N   read N-1   plan N+1   launch N+1   read N

Both run the same code; the one difference is how many launched steps may stay unread.
"""

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator
from typing import cast, final

import numpy as np

from batchstate import Contract, StepPlanner
from batchstate.errors import ArgumentError
from batchstate.runtime import Runtime
from examples.engine.batch import RunningBatch, Step
from examples.engine.model import Model
from examples.engine.request import Request
from examples.engine.scheduler import Scheduler, Turn
from examples.engine.settings import EngineSettings


@final
class Engine:
    """Serves requests, greedily. Belongs to the runtime's thread.

    Args:
        runtime: the device.
        model: on the same device.
        settings: sizes and modes.
        eos_token_ids: tokens that end an answer; the model's own by default.

    Attributes:
        scheduler: the host's part, with the batch and the pools.
        steps: steps launched.
        in_flight_depth_max: the most steps that were launched and unread at once.
        accepted_drafts: guesses that were right.
        host_seconds: time spent on planning, uploading and reading results; not on the forward.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: Model,
        settings: EngineSettings,
        *,
        eos_token_ids: Collection[int] | None = None,
    ) -> None:
        self.runtime = runtime
        self.settings = settings
        self.eos_token_ids = frozenset(model.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.scheduler = Scheduler(runtime, settings, model)
        self.steps = 0
        self.in_flight_depth_max = 0
        self.host_seconds = 0.0
        self.accepted_drafts = 0
        self._planner = StepPlanner(
            RunningBatch,
            pages=self.scheduler.pages,
            relay=self.scheduler.forward.relay,
            ids=self.scheduler.forward.ids,
            lengths="seq_lens" if settings.num_drafts else None,
            accepted="accepted" if settings.num_drafts else None,
            results=self.scheduler.forward.results,
        )
        self._stream = runtime.stream("schedule")
        self._in_flight: deque[Step] = deque()
        self._requests: dict[int, Request] = {}
        self._failed = False

    @property
    def busy(self) -> bool:
        """Whether any request is here, or any result unread."""
        scheduler = self.scheduler
        unread = any(step.sampling for step in self._in_flight)
        return bool(len(scheduler.batch) or scheduler.waiting or unread)

    def add(self, request: Request) -> None:
        """A request arrives.

        Raises:
            ArgumentError: it could never run, or its number is taken.
        """
        self.scheduler.check(request)
        if request.number in self._requests or request.state != "waiting" or request.output:
            raise ArgumentError(
                f"request {request.number} is here already, or has run", value=request.number, remedy="add it once"
            )
        if request.prebuilt is not None:
            request.append([request.prebuilt.first_token], self.eos_token_ids)
        if request.state == "waiting":
            self._requests[request.number] = request
            self.scheduler.waiting.append(request)

    def abort(self, number: int) -> None:
        """The client of a request hung up. Results in flight for it are dropped when they come.

        Raises:
            ArgumentError: no such request is waiting or running.
        """
        request = self._requests.get(number)
        if request is None:
            raise ArgumentError(
                f"abort of request {number}, which is not here",
                value=number,
                remedy="abort a request between `add` and its end",
            )
        if request.state == "waiting":
            self.scheduler.waiting.remove(request)
        request.state = "aborted"
        del self._requests[number]

    def step(self) -> bool:
        """Plans and launches one step, then reads results. Whether a step was launched.

        Raises:
            RuntimeError: a step has failed before. The engine has then no more to say: make a new one.
        """
        with self._stepping():
            turn = self.scheduler.plan()
            launched = bool(turn.queries.any())
            if launched:
                self._launch(self.scheduler.batch, turn)
            self._read_all_but(1 if launched and self.settings.overlap else 0)
        return launched

    def idle(self) -> None:
        """A step of no requests: what a rank does while others of its group have some. One padded lane on slot 0."""
        with self._stepping():
            self._launch(RunningBatch.empty(self.runtime), Turn.of([], []), padding=1)
            self._read_all_but(1 if self.settings.overlap else 0)

    def run(self) -> None:
        """Steps until nothing is left."""
        while self.busy:
            self.step()

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """A step begins before it is planned: what planning uploads is of this step, not of the one before."""
        if self._failed:
            raise RuntimeError("a step of this engine has failed: what its forward did is unknown; make a new engine")
        start = time.perf_counter()
        self.runtime.next_step()
        try:
            with self.runtime.use(self._stream):
                yield
        except BaseException:
            self._failed = True
            raise
        self.host_seconds += time.perf_counter() - start

    def _launch(self, batch: RunningBatch, turn: Turn, *, padding: int | None = None) -> None:
        """Sends a step on its way: one copy, then the forward on its own stream."""
        scheduler = self.scheduler
        extras = {}
        if self.settings.num_drafts:
            rows = np.flatnonzero(turn.samples)
            decodes = [turn.prompt_ids[row] is None for row in rows.tolist()]
            extras = {"sample_rows": rows, "decodes": np.array(decodes, np.bool_)}
        planned = scheduler.when_free(
            lambda: self._planner.plan(
                batch,
                turn.queries,
                keep=turn.keep,
                joining=turn.columns,
                after=scheduler.last_step,
                prompt_ids=turn.prompt_ids,
                samples=turn.samples,
                pad_rows=padding,
                pad_tokens=padding,
                extras=extras,
            )
        )
        batch = cast(RunningBatch, planned.batch)
        if turn.joining:
            scheduler.arrived(batch, turn.joining)
        step = Step(
            planned, [request for request, samples in zip(batch.requests, turn.samples, strict=True) if samples]
        )
        start = time.perf_counter()
        after = scheduler.forward.run(step)
        self.host_seconds -= time.perf_counter() - start
        for request in step.sampling:
            request.in_flight += 1
        if step.forward_done is not None:
            scheduler.launched(step.forward_done)
        if len(batch):
            scheduler.batch = after
        self.steps += 1
        self._in_flight.append(step)
        self.in_flight_depth_max = max(self.in_flight_depth_max, len(self._in_flight))

    def _read_all_but(self, newest: int) -> None:
        while len(self._in_flight) > newest:
            self._read(self._in_flight.popleft())

    def _read(self, step: Step) -> None:
        """The results of one step: tokens for its requests, and certainty about their lengths."""
        if step.results is None:
            step.await_end()  # nothing to read, but the host runs no further ahead than it declared
            return
        outputs = step.results[self.scheduler.forward.results[0]].np.reshape(len(step.sampling), -1).tolist()
        lens = step.results["seq_lens"].np.tolist() if self.settings.num_drafts else None
        for row, request in enumerate(step.sampling):
            request.in_flight -= 1
            if request.state in ("waiting", "running"):
                new = 1 if lens is None else lens[row] + 1 - len(request.prompt) - len(request.output)
                self.accepted_drafts += new - 1
                waits = request.state == "waiting"  # it was retracted while this step was in flight
                request.append(outputs[row][:new], self.eos_token_ids)
                if request.state == "finished":
                    del self._requests[request.number]
                    if waits:
                        self.scheduler.waiting.remove(request)
        if self.settings.num_drafts:
            self._tighten(step)

    def _tighten(self, step: Step) -> None:
        """Brings the host's bounds of the lengths down to what is now certain, and gives back pages beyond."""
        scheduler = self.scheduler
        batch, width = scheduler.batch, self.settings.decode_len
        if batch.seq_lens.contract is not Contract.UPPER_BOUND or not len(batch):
            return
        if step.results is not None and not self._in_flight and step.sampling == list(batch.requests):
            # Nothing is in flight: the lengths are exact, on both sides, those of finished requests too.
            lens = step.results["seq_lens"]
            scheduler.pages.truncate(batch.slots, lens.np, after=scheduler.last_step)
            scheduler.batch = batch.replace(seq_lens=lens)
            return
        bounds = batch.seq_lens.np.copy()
        for row, request in enumerate(batch.requests):
            if request.state == "running" and request.output:
                bounds[row] = min(bounds[row], request.kv_len + width * request.in_flight)
        scheduler.pages.truncate(batch.slots, bounds, after=scheduler.last_step)
        scheduler.batch = batch.tighten("seq_lens", bounds, slots=batch.slots)
