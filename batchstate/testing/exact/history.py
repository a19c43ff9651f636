"""Histories of requests, and what an engine needs to be put through one. Needs no Hypothesis."""

import contextlib
import heapq
import itertools
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn, Protocol, final

import attrs

from batchstate.errors import BatchStateError
from batchstate.testing.exact.hashing import mix
from batchstate.testing.exact.model import ExactModel
from batchstate.testing.exact.text import Answer, ExactSpec, Oracle
from batchstate.testing.exact.verify import Verifier

__all__ = [
    "Adapter", "AdapterError", "Arrival", "Difference", "EngineUnderTest", "History", "Outcome", "Request", "Wave",
    "play",
]  # fmt: skip

Settings = Mapping[str, Any]


@final
class AdapterError(BatchStateError):
    """An engine, or its adapter, has lost a request, returned too many tokens, or does not end."""


@final
@attrs.frozen
class Request:
    """One request as the engine gets it.

    Attributes:
        number: names it; requests of a history are numbered from 0 in the order of their arrival.
        prompt: token ids, at least one.
        max_new_tokens: length of the answer: no token ends it before.
        temperature: of its sampling row; 0 where the engine samples greedily.
    """

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0


class Adapter(Protocol):
    """One engine, freshly made. The driver calls it from one thread."""

    def add(self, request: Request) -> None:
        """A request arrives."""

    def abort(self, number: int) -> None:
        """The client of a request that has not finished hangs up; its further tokens are of no interest."""

    def step(self) -> Mapping[int, Sequence[int]]:
        """Lets the engine do one step, and returns the tokens that have come of it, by request."""

    @property
    def busy(self) -> bool:
        """Whether the engine has anything to do."""

    def close(self) -> None:
        """Gives back what it holds."""


@final
@attrs.frozen
class EngineUnderTest:
    """An engine that histories are played on.

    Attributes:
        name: of the engine.
        open: makes an engine with these settings that runs this model, and tells the verifier, if there is one, what
            it reads.
        choices: each setting with its values, the plainest first.
        spec: the shape of the model for these settings.
        longest_prompt, longest_answer: tokens of a request at most.
        temperatures: that requests may have.
        aborts: whether requests can be aborted.
        texts: whether it runs the exact model, so that its texts can be compared.
        patience: steps without a token after which it is said not to end.
        step_seconds: after which a single step is ended. By SIGALRM: in the main thread only, and not on Windows.
    """

    name: str
    open: Callable[[Settings, ExactModel, Verifier | None], Adapter]
    choices: Mapping[str, Sequence[Any]] = attrs.field(factory=dict)
    spec: Callable[[Settings], ExactSpec] = attrs.field(default=lambda settings: ExactSpec())
    longest_prompt: int = 96
    longest_answer: int = 24
    temperatures: Sequence[float] = (0.0,)
    aborts: bool = True
    texts: bool = True
    patience: int = 500
    step_seconds: float = 20.0


@final
@attrs.frozen
class Arrival:
    """A request of a history, written briefly.

    Attributes:
        prompt: pairs of a document and how many of its first tokens; the tokens of all pairs, one behind the other. A
            document is a number, or its tokens, which begin again behind the last.
        answer: its length.
        temperature: of its sampling row.
        abort: steps of the engine, from its arrival on, after which its client hangs up, or None.
    """

    prompt: tuple[tuple[int | tuple[int, ...], int], ...]
    answer: int
    temperature: float = 0.0
    abort: int | None = None

    def request(self, number: int, vocab_size: int) -> Request:
        """The request."""
        tokens = itertools.chain.from_iterable(itertools.starmap(_tokens, self.prompt))
        return Request(number, tuple(token % vocab_size for token in tokens), self.answer, self.temperature)


def _tokens(document: int | tuple[int, ...], length: int) -> Iterable[int]:
    if isinstance(document, int):
        return (mix(mix(document) + at) for at in range(length))
    return itertools.islice(itertools.cycle(document), length)


@final
@attrs.frozen
class Wave:
    """Requests that arrive together, and steps behind them.

    Attributes:
        arrivals: the requests.
        steps: of the engine before the next wave; fewer if it has nothing to do.
    """

    arrivals: tuple[Arrival, ...]
    steps: int


@final
@attrs.frozen
class History:
    """All that is done to an engine; behind the last wave it runs until nothing is left.

    Attributes:
        settings: of the engine.
        waves: in order.
    """

    settings: Settings
    waves: tuple[Wave, ...]

    @property
    def requests(self) -> int:
        """Number of requests."""
        return sum(len(wave.arrivals) for wave in self.waves)

    def __str__(self) -> str:
        return "\n".join([f"settings: {dict(self.settings)}", *(f"  {wave}" for wave in self.waves)])


@final
@attrs.frozen
class Difference:
    """An answer that is not the right one.

    Attributes:
        request: whose.
        at: the first token that differs.
        got, right: both texts.
    """

    request: Request
    at: int
    got: tuple[int, ...]
    right: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"request {self.request.number} (a prompt of {len(self.request.prompt)}): token {self.at} of its answer is "
            f"{self.got[self.at]}, expected {self.right[self.at]}"
        )


@final
@attrs.define
class Outcome:
    """The end of a history.

    Attributes:
        finished: requests that finished, in order.
        texts: the answer of each request that finished or was aborted, in order, as far as it came.
        differences: those that are wrong.
        error: the exception of the engine that ended it early, or an `AdapterError`.
    """

    finished: list[int] = attrs.field(factory=list)
    texts: dict[int, tuple[int, ...]] = attrs.field(factory=dict)
    differences: list[Difference] = attrs.field(factory=list)
    error: Exception | None = None

    @property
    def wrong(self) -> bool:
        """Whether a text differs or the engine has failed."""
        return bool(self.differences or self.error)

    def __str__(self) -> str:
        lines = [*map(str, self.differences)]
        if self.error is not None:
            lines.append(f"the engine has failed: {type(self.error).__name__}: {self.error}")
        if self.error is not None and not isinstance(self.error, AdapterError):
            last = traceback.extract_tb(self.error.__traceback__)[-1]
            lines.append(f"  {last.filename}:{last.lineno}, in {last.name}")
        return "\n".join(lines)


def play(
    engine: EngineUnderTest,
    history: History,
    oracle: Oracle,
    model: ExactModel,
    verifier: Verifier | None = None,
    *,
    until: Callable[[Outcome], bool] = lambda outcome: False,
) -> Outcome:
    """Plays a history, and compares each answer, aborted ones as far as they came.

    An engine that fails, also as it is made or closed, is a result, and so is an adapter that loses a request, returns
    tokens behind its end or of nobody, or never ends: see `Outcome.error`.

    Args:
        engine: made anew for it.
        history: to be played.
        oracle: knows the right texts.
        model: that the engine runs.
        verifier: expects the requests of the history, and is told of what is read.
        until: asked after each step: whether the rest is of no interest.
    """
    outcome = Outcome()
    try:
        with (
            _timed(engine) as begin_step,
            contextlib.closing(engine.open(history.settings, model, verifier)) as adapter,
        ):
            player = _Player(engine, oracle, verifier, adapter, outcome, begin_step)
            for _ in _steps(player, history):
                if until(outcome):
                    break
    except Exception as error:
        outcome.error = error
    return outcome


@contextlib.contextmanager
def _timed(engine: EngineUnderTest) -> Iterator[Callable[[], object]]:
    """Makes a function to be called before each step: an `AdapterError` ends one that takes too long."""
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
        or signal.getitimer(signal.ITIMER_REAL)[0]  # that of a test runner bounds the step too
    ):
        yield lambda: None
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        at = "" if frame is None else f", in {frame.f_code.co_name}, {frame.f_code.co_filename}:{frame.f_lineno}"
        problem = f"{engine.name} has not ended a step for {engine.step_seconds} s{at}"
        remedy = "raise `step_seconds` if a step takes so long; else it waits or loops for ever"
        raise AdapterError(problem, engine.step_seconds, remedy)

    begin_step = partial(signal.setitimer, signal.ITIMER_REAL, engine.step_seconds)
    handler = signal.signal(signal.SIGALRM, end)
    try:
        begin_step()
        yield begin_step
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def _steps(player: "_Player", history: History) -> Iterator[None]:
    """Does each step of a history; behind the last answer too, for requests that were aborted."""
    aborts, done = list[tuple[int, int]](), 0
    for wave in (*history.waves, None):
        for arrival in wave.arrivals if wave is not None else ():
            if arrival.abort is not None:
                heapq.heappush(aborts, (done + arrival.abort, len(player.requests)))
            player.add(arrival.request(len(player.requests), player.oracle.spec.vocab_size))
        for _ in itertools.count() if wave is None else range(wave.steps):
            while aborts and aborts[0][0] <= done:
                player.abort(heapq.heappop(aborts)[1])
            if not player.busy:
                break
            player.step()
            done += 1
            yield


@final
@attrs.define
class _Player:
    """Does to an engine what a history says, and compares what comes of it.

    Attributes:
        engine: that the adapter is of.
        oracle: knows the right texts.
        verifier: see `play`.
        adapter: of the engine.
        outcome: of what was done by now.
        begin_step: called before each step; see `_timed`.
        requests: that have arrived, by their numbers.
        open: tokens of each request that has not finished.
        aborted: requests whose clients have hung up.
        silent: steps without a token since the last one that had some.
    """

    engine: EngineUnderTest
    oracle: Oracle
    verifier: Verifier | None
    adapter: Adapter
    outcome: Outcome
    begin_step: Callable[[], object]
    requests: dict[int, Request] = attrs.field(factory=dict)
    open: dict[int, list[int]] = attrs.field(factory=dict)
    aborted: set[int] = attrs.field(factory=set)
    silent: int = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.open or self.adapter.busy)

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.requests[request.number] = request
        if self.verifier is not None:
            self.verifier.expect(request.number, self._answer(request))
        self.open[request.number] = []
        self.adapter.add(request)

    def abort(self, number: int) -> None:
        """The client of a request hangs up, if that is open."""
        if number in self.open:
            self._end(number)
            self.aborted.add(number)
            self.adapter.abort(number)

    def step(self) -> None:
        """One step of the engine.

        Raises:
            AdapterError: it has lost a request, made too many tokens, or does not end; or an error of the engine.
        """
        name, waiting = self.engine.name, sorted(self.open)[:8]
        if self.open and not self.adapter.busy:
            remedy = "let `busy` be true until each request has all its tokens, and return all of them from `step`"
            raise AdapterError(
                f"{name} has nothing left to do, and requests {waiting} have not finished", waiting, remedy
            )
        self.begin_step()
        came = self.adapter.step()
        self.silent = 0 if any(came.values()) else self.silent + 1
        if self.silent > self.engine.patience:
            remedy = "raise `patience` if so many are needed; else requests wait for ever"
            raise AdapterError(
                f"{name} has made {self.silent} steps without a token; open are {waiting}", self.silent, remedy
            )
        for number, tokens in came.items():
            if tokens and number not in self.aborted:
                self._take(number, tokens)

    def _take(self, number: int, tokens: Sequence[int]) -> None:
        left = self.requests[number].max_new_tokens - len(self.open[number]) if number in self.open else 0
        if len(tokens) > left:
            problem = (
                f"{self.engine.name} has returned {len(tokens)} tokens for request {number}, expected at most {left}"
            )
            remedy = "return each token once, of requests that have arrived, and none behind the end of an answer"
            raise AdapterError(problem, number, remedy)
        self.open[number] += map(int, tokens)
        if len(tokens) == left:
            self._end(number)
            self.outcome.finished.append(number)

    def _end(self, number: int) -> None:
        request = self.requests[number]
        self.outcome.texts[number] = got = tuple(self.open.pop(number))
        if self.engine.texts:
            right = self._answer(request).tokens
            at = next((at for at, token in enumerate(got) if token != right[at]), None)
            if at is not None:
                self.outcome.differences.append(Difference(request, at, got, right))

    def _answer(self, request: Request) -> Answer:
        return self.oracle.answer(request.prompt, request.max_new_tokens, request.temperature)
