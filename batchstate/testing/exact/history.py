"""Histories of requests, and what an engine needs to be put through one. Needs no Hypothesis."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import attrs

from batchstate.errors import BatchStateError
from batchstate.testing.exact.hashing import mix
from batchstate.testing.exact.model import LanguageModel
from batchstate.testing.exact.text import ExactSpec, Oracle
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
        ...

    def abort(self, number: int) -> None:
        """The client of a request that has not finished hangs up; its further tokens are of no interest."""
        ...

    def step(self) -> Mapping[int, Sequence[int]]:
        """Lets the engine do one step, and returns the tokens that have come of it, by request."""
        ...

    @property
    def busy(self) -> bool:
        """Whether the engine has anything to do."""
        ...

    def close(self) -> None:
        """Gives back what it holds."""
        ...


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
        patience: steps without a token after which it is said not to end.
    """

    name: str
    open: Callable[[Settings, LanguageModel, Verifier | None], Adapter]
    choices: Mapping[str, Sequence[Any]] = attrs.field(factory=dict)
    spec: Callable[[Settings], ExactSpec] = attrs.field(default=lambda settings: ExactSpec())
    longest_prompt: int = 96
    longest_answer: int = 24
    temperatures: Sequence[float] = (0.0,)
    aborts: bool = True
    patience: int = 500


@final
@attrs.frozen
class Arrival:
    """A request of a history, written briefly.

    Attributes:
        prompt: pairs of a document and how many of its first tokens; the tokens of all pairs, one behind the other.
        answer: its length.
        temperature: of its sampling row.
    """

    prompt: tuple[tuple[int, int], ...]
    answer: int
    temperature: float = 0.0

    def request(self, number: int, vocab_size: int, longest: int) -> Request:
        """The request."""
        places = [(document, place) for document, length in self.prompt for place in range(length)]
        tokens = [mix(mix(document) + place) % vocab_size for document, place in places]
        return Request(number, tuple(tokens[:longest]), self.answer, self.temperature)


@final
@attrs.frozen
class Wave:
    """Requests that arrive together, and steps behind them.

    Attributes:
        arrivals: the requests.
        steps: of the engine before the next wave; fewer if it has nothing to do.
        aborts: clients that hang up before these steps: numbers, counted round the requests that are open then.
    """

    arrivals: tuple[Arrival, ...]
    steps: int
    aborts: tuple[int, ...] = ()


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


@final
@attrs.frozen
class Difference:
    """An answer that is not the right one.

    Attributes:
        request: whose.
        finished: how many requests had finished before it.
        at: the first token that differs.
        got, right: both texts.
    """

    request: Request
    finished: int
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
        texts: the answer of each, as far as it came.
        differences: those that are wrong.
        steps: of the engine.
        error: the exception of the engine that ended it early.
    """

    finished: list[int] = attrs.field(factory=list)
    texts: dict[int, tuple[int, ...]] = attrs.field(factory=dict)
    differences: list[Difference] = attrs.field(factory=list)
    steps: int = 0
    error: Exception | None = None

    @property
    def wrong(self) -> bool:
        """Whether a text differs or the engine has failed."""
        return bool(self.differences or self.error)


def play(
    engine: EngineUnderTest,
    history: History,
    oracle: Oracle,
    model: LanguageModel,
    verifier: Verifier | None = None,
    *,
    expected: Mapping[int, Sequence[int]] | None = None,
) -> Outcome:
    """Plays a history, and compares each answer, aborted ones as far as they came.

    Args:
        engine: made anew for it.
        history: to be played.
        oracle: knows the right texts.
        model: that the engine runs.
        verifier: expects the requests of the history, and is told of what is read.
        expected: right texts of another model, by request.

    Raises:
        AdapterError: a request was lost, got tokens after its end or without having arrived, or never ended.
    """
    player = _Player(engine, history, oracle, model, verifier, expected)
    try:
        player.play()
    except AdapterError:
        raise
    except Exception as error:  # an engine that fails is a result
        player.outcome.error = error
    finally:
        player.adapter.close()
    return player.outcome


class _Player:
    def __init__(
        self,
        engine: EngineUnderTest,
        history: History,
        oracle: Oracle,
        model: LanguageModel,
        verifier: Verifier | None,
        expected: Mapping[int, Sequence[int]] | None,
    ) -> None:
        self._engine, self._history, self._oracle, self._expected = engine, history, oracle, expected
        self._verifier = verifier
        self.adapter = engine.open(history.settings, model, verifier)
        self.outcome = Outcome()
        self._requests: list[Request] = []
        self._open: dict[int, list[int]] = {}
        self._aborted: set[int] = set()
        self._silent = 0

    def play(self) -> None:
        for wave in self._history.waves:
            for arrival in wave.arrivals:
                self._add(arrival)
            for client in wave.aborts:
                if self._open:
                    self._abort(sorted(self._open)[client % len(self._open)])
            for _ in range(wave.steps):
                if not self._open and not self.adapter.busy:
                    break
                self._step()
        while self._open:
            self._step()
        while self.adapter.busy:  # for requests that were aborted
            self._step()

    def _add(self, arrival: Arrival) -> None:
        engine, spec = self._engine, self._oracle.spec
        request = arrival.request(len(self._requests), spec.vocab_size, engine.longest_prompt)
        self._requests.append(request)
        if self._verifier is not None:
            self._verifier.expect(request.number, self._answer(request))
        self._open[request.number] = []
        self.adapter.add(request)

    def _abort(self, number: int) -> None:
        self._end(number, self._open.pop(number))
        self._aborted.add(number)
        self.adapter.abort(number)

    def _step(self) -> None:
        if self._open and not self.adapter.busy:
            raise AdapterError(
                f"{self._engine.name} has nothing left to do, and requests {sorted(self._open)[:8]} have not finished",
                value=sorted(self._open),
                remedy="let `busy` be true until each request has all its tokens, and return all of them from `step`",
            )
        came = self.adapter.step()
        self.outcome.steps += 1
        self._silent = 0 if any(came.values()) else self._silent + 1
        if self._silent > self._engine.patience:
            raise AdapterError(
                f"{self._engine.name} has made {self._silent} steps without a token; open are {sorted(self._open)[:8]}",
                value=self._silent,
                remedy="raise `patience` if so many are needed; else requests wait for ever",
            )
        for number, tokens in came.items():
            self._take(number, tokens)

    def _take(self, number: int, tokens: Sequence[int]) -> None:
        if number in self._aborted or not tokens:
            return
        text = self._open.get(number)
        if text is None or len(text) + len(tokens) > self._requests[number].max_new_tokens:
            most = 0 if text is None else self._requests[number].max_new_tokens - len(text)
            raise AdapterError(
                f"{self._engine.name} has returned {len(tokens)} tokens for request {number}, expected at most {most}",
                value=number,
                remedy="return each token once, of requests that have arrived, and none behind the end of an answer",
            )
        text += map(int, tokens)
        if len(text) == self._requests[number].max_new_tokens:
            self._end(number, self._open.pop(number))
            self.outcome.finished.append(number)

    def _end(self, number: int, text: list[int]) -> None:
        request = self._requests[number]
        self.outcome.texts[number] = got = tuple(text)
        right = self._answer(request).tokens if self._expected is None else tuple(self._expected[number])
        if got != right[: len(got)]:
            at = next(place for place, token in enumerate(got) if token != right[place])
            self.outcome.differences.append(Difference(request, len(self.outcome.finished), at, got, right))

    def _answer(self, request: Request) -> Any:
        return self._oracle.answer(request.prompt, request.max_new_tokens, request.temperature)
