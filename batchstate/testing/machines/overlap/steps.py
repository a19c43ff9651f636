"""Steps that the overlap machine has launched: which of them may still run, and which the host has not read."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.future_map import Prefetched
from batchstate.runtime import Fence
from batchstate.testing.late import LateRuntime
from batchstate.testing.machine import agree_on
from batchstate.testing.machines.overlap.memory import Memory
from batchstate.testing.machines.overlap.model import Outcome
from batchstate.testing.machines.overlap.requests import Request

Reached = Callable[[str, bool], None]
"""Counts an interesting state, if it is there."""

MOST_UNREAD = 4
"""Steps whose results may be left unread; how many may run is a matter of fences, and less."""


@final
@attrs.frozen(eq=False)
class Step:
    """A launched step.

    Attributes:
        number: from 1.
        requests: those that sampled.
        places: in the answer of each.
        outcomes: what the model says of each.
        results: what the device says; None where nobody samples.
        done: forward-done.
    """

    number: int
    requests: Sequence[Request]
    places: Sequence[int]
    outcomes: Sequence[Outcome]
    results: Prefetched | None
    done: Fence


@final
@attrs.frozen(eq=False)
class _Closed:
    """A step of the runtime that is planned and launched: what each stream had to do by then."""

    ends: Sequence[Fence]
    launched: int


@final
class Steps:
    """Launched steps, oldest first.

    Attributes:
        unread: whose results the host has not read.
        launched: how many were ever launched.
    """

    def __init__(self, memory: Memory, reached: Reached) -> None:
        self._runtime = memory.runtime
        self._streams = memory.streams.all
        self._reached = reached
        self._closed: deque[_Closed] = deque()
        self._running: deque[Step] = deque()  # that may not be over
        self._ahead: list[Step] = []  # of which the host has seen no end, by waiting
        self.unread: list[Step] = []
        self.launched = 0

    @property
    def depth(self) -> int:
        """Launched steps of which the host does not know whether they are over.

        A device that is asked may be quick, which says nothing, and a host that asked knows more than it should.
        """
        asks = isinstance(self._runtime, LateRuntime)
        return sum(not (asks and one.done.query()) for one in self._ahead)

    @property
    def last(self) -> Fence | None:
        """Behind everything that was launched, or None before that."""
        return self._running[-1].done if self._running else None

    @property
    def running(self) -> bool:
        """Whether the host could wait for something."""
        return bool(self._running)

    def begin(self) -> None:
        """The next step of the runtime begins, once those are over that would make it run deeper than it declares."""
        if self.launched:
            self._closed.append(_Closed([self._runtime.record(one) for one in self._streams], self.launched))
        while len(self._closed) >= self._runtime.steps_in_flight:
            closed = self._closed.popleft()
            for fence in closed.ends:
                if not fence.query():
                    fence.wait()
            self._seen(closed.launched)
            while self._running and self._running[0].number <= closed.launched:
                self._running.popleft()
        self._runtime.next_step()

    def add(self, step: Step) -> None:
        """A step was launched."""
        self.launched = step.number
        self._running.append(step)
        self._ahead.append(step)
        self.unread.append(step)
        self._reached("two steps in flight", self.depth >= 2)

    def wait(self) -> None:
        """The host waits for the oldest forward that may run."""
        step = self._running.popleft()
        if not step.done.query():
            step.done.wait()
        self._seen(step.number)

    def read_all_but(self, newest: int) -> None:
        """Reads results, oldest first."""
        while len(self.unread) > newest:
            self.read(0)

    def read(self, at: int) -> Step:
        """Reads the results of one step, waits for that one if it must, and returns it.

        Raises:
            DisagreementError: the device has computed something else than the model.
        """
        step = self.unread.pop(at)
        self._reached("results read out of order", at > 0)
        if step.results is not None:
            tokens, logs = (np.array(step.results[name].np) for name in ("token", "log"))
            agree_on(_column(step.outcomes, "token"), tokens, f"tokens of step {step.number}")
            agree_on(_column(step.outcomes, "log"), logs, f"logs of step {step.number}")
            self._seen(step.number)
            for one, place, token in zip(step.requests, step.places, tokens.tolist(), strict=True):
                one.output[place] = token
                one.in_flight -= 1
        return step

    def forget(self) -> None:
        """Nobody wants the results of steps all of whose requests hung up: their memory goes back by itself."""
        for step in [one for one in self.unread if all(request.aborted for request in one.requests)]:
            self.unread.remove(step)
            for one in step.requests:
                one.in_flight -= 1
            self._reached("results that nobody reads", step.results is not None)

    def _seen(self, number: int) -> None:
        self._ahead = [one for one in self._ahead if one.number > number]


def _column(outcomes: Sequence[Outcome], name: str) -> npt.NDArray[Any]:
    return np.array([getattr(one, name) for one in outcomes], np.int64)
