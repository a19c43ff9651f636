"""The requests of an engine, recorded through its adapter, and served again by its own scheduler.

The adapter is that of `batchstate.testing.exact`. A replay serves the same requests in the same steps, with answers as
long as they were, by the exact model: its text says whether the engine's state was right, also where no invariant was
broken. A request that the ring has only from its middle on begins with the tokens that it had by then.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np
import torch
from attrs.validators import instance_of

from batchstate.errors import RecordingError
from batchstate.replay.format import Finding, Recording
from batchstate.replay.recorder import recorder
from batchstate.testing.exact.history import Adapter, EngineUnderTest, Outcome, Player, Request, timed
from batchstate.testing.exact.model import ExactModel
from batchstate.testing.exact.text import Oracle
from batchstate.testing.exact.verify import Verifier

__all__ = ["EngineLog", "Served", "drive", "recorded"]


@final
@attrs.frozen
class Served:
    """A request of a log.

    Attributes:
        at: step before which it arrives.
        prompt: token ids.
        answer: tokens that it gets.
        temperature: of its sampling row.
        abort: step before which its client hangs up, or None.
    """

    at: int
    prompt: tuple[int, ...]
    answer: int = attrs.field(validator=instance_of(int))
    temperature: float = attrs.field(default=0.0, validator=instance_of((int, float)))
    abort: int | None = None


@final
@attrs.frozen
class EngineLog:
    """All that an engine was asked to do.

    Attributes:
        settings: of the engine.
        requests: in the order of their arrival.
        texts: whether the engine runs the exact model, so that its texts can be compared.
    """

    settings: Mapping[str, Any]
    requests: tuple[Served, ...]
    texts: bool = True

    @classmethod
    def of(cls, recording: Recording, engine: EngineUnderTest) -> "EngineLog":
        """The requests of a recording, for an engine whose settings have the recorded names.

        Raises:
            RecordingError: it has none, or settings that this engine does not have.
        """
        events = recording.events
        begin = next((place for place, event in enumerate(events) if event.kind == "open"), None)
        if begin is None:
            problem = "the recording has no requests: it was made without an adapter"
            raise RecordingError(problem, None, "record the engine's adapter: `recorded(ENGINE)`; or replay the calls")
        opened, step, served = events[begin].body, 0, dict[int, list[Any]]()
        try:
            settings = {name: _setting(engine, name, value) for name, value in opened["settings"].items()}
            for number, prompt, tokens, answer, temperature in opened["open"]:
                ids = (*_ids(prompt), *map(int, tokens))
                served[number] = [0, ids, max(answer - len(tokens), 1), temperature, None]
            for event in events[begin + 1 :]:
                if event.kind == "add":
                    number, prompt, answer, temperature = event.body
                    served[number] = [step, _ids(prompt), answer, temperature, None]
                elif event.kind == "abort":
                    served[event.body][4] = step
                elif event.kind == "step":
                    step += 1
            return cls(settings, tuple(Served(*values) for values in served.values()), bool(opened["texts"]))
        except (KeyError, TypeError, ValueError) as error:
            problem = f"requests that {engine.name} cannot serve: {type(error).__name__}: {str(error)[:80]}"
            raise RecordingError(problem, engine.name, "name the engine that was recorded") from None


def _ids(prompt: Any) -> tuple[int, ...]:
    if isinstance(prompt, list):  # one id, and how often
        token, number = map(int, prompt)
        if not 0 < number <= 1 << 22:
            raise ValueError(f"a prompt of {number} tokens")
        return (token,) * number
    return tuple(map(int, prompt))


def _setting(engine: EngineUnderTest, name: str, value: Any) -> Any:
    return next((choice for choice in engine.choices.get(name, ()) if str(choice) == value), value)


class _Recorded:
    """An adapter that writes down what it is asked, and what comes of it."""

    def __init__(self, adapter: Adapter, engine: EngineUnderTest, settings: Mapping[str, Any], texts: bool) -> None:
        self._adapter, self._texts, self._name = adapter, texts, engine.name
        self._settings = {
            name: value if isinstance(value, int | float | str) else str(value) for name, value in settings.items()
        }
        self._open: dict[int, tuple[Request, list[int]]] = {}
        self._recorder = recorder()
        if self._recorder is not None:
            self._recorder.engines.add(self)
            self.write_open()

    def write_open(self) -> None:
        """Says which requests are open, with the tokens that they have by now; a segment begins with it."""
        requests = [
            (number, _prompt(request), tokens, request.max_new_tokens, request.temperature)
            for number, (request, tokens) in self._open.items()
        ]
        body = {"engine": self._name, "settings": self._settings, "texts": self._texts, "open": requests}
        self._write("open", body)

    def _write(self, kind: str, body: object) -> None:
        if self._recorder is not None:
            self._recorder.write(kind, body)

    def add(self, request: Request) -> None:
        self._write("add", (request.number, _prompt(request), request.max_new_tokens, request.temperature))
        self._open[request.number] = request, []
        self._adapter.add(request)

    def abort(self, number: int) -> None:
        self._write("abort", number)
        self._open.pop(number, None)
        self._adapter.abort(number)

    def step(self) -> Mapping[int, Sequence[int]]:
        if self._recorder is not None:
            self._recorder.begin_step()
        self._write("step", None)
        came = self._adapter.step()
        if came:
            tokens = np.fromiter(itertools.chain.from_iterable(came.values()), np.int32)
            counts = [np.array(list(numbers), np.int32) for numbers in (came, map(len, came.values()))]
            self._write("note", {"numbers": counts[0], "counts": counts[1], "tokens": tokens})
        for number, ids in came.items():
            if number in self._open:
                request, had = self._open[number]
                had.extend(map(int, ids))
                if len(had) >= request.max_new_tokens:
                    del self._open[number]
        return came

    @property
    def busy(self) -> bool:
        return self._adapter.busy

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.engines.discard(self)
        self._adapter.close()


def _prompt(request: Request) -> Any:
    prompt = request.prompt
    if len(prompt) > 8 and len(set(prompt)) == 1:
        return prompt[0], len(prompt)
    return np.array(prompt, np.int32)


def recorded(engine: EngineUnderTest, *, texts: bool = True) -> EngineUnderTest:
    """The engine, of which the recording under way notes what each adapter is asked to do."""

    def opened(settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None) -> Adapter:
        return _Recorded(engine.open(settings, model, verifier), engine, settings, texts)

    return attrs.evolve(engine, open=opened)


def drive(
    engine: EngineUnderTest, log: EngineLog, *, verify: bool = False, stop: Callable[[], bool] | None = None
) -> Finding | None:
    """Serves the requests of a log, and returns the first finding; None where all was right.

    That is a violation or another error of the engine, a text that is not the right one (`TEXT`), or, with `verify`, an
    entry that was read and should not have been (`WRONG_READ`).

    Args:
        engine: made anew.
        log: the requests.
        verify: compare entries as they are read.
        stop: asked now and then: whether to give up, as if nothing had been found.
    """
    spec = engine.spec(log.settings)
    verifier, model = Verifier() if verify else None, ExactModel(spec, dtype=log.settings.get("dtype", torch.float32))
    try:
        opened = contextlib.closing(engine.open(log.settings, model, verifier))
        with timed(engine) as begin_step, opened as adapter:
            player = Player(engine, Oracle(spec), verifier, adapter, Outcome(), begin_step, texts=log.texts)
            for step, _ in enumerate(_steps(player, log, spec.vocab_size)):
                for wrong in player.outcome.differences:
                    return Finding("TEXT", str(wrong), f"request {wrong.request.number}", row=wrong.at)
                for read in verifier.reports if verifier is not None else ():
                    return Finding(
                        "WRONG_READ", str(read), f"request {read.request}", row=read.position, slot=read.page
                    )
                if stop is not None and step % 64 == 63 and stop():
                    break
    except Exception as error:
        return Finding.of(error)
    return None


def _steps(player: Player, log: EngineLog, vocab_size: int) -> Iterator[None]:
    """Does each step of the log; where nothing is left to do it goes on at the next arrival."""
    waiting = sorted(enumerate(log.requests), key=lambda served: served[1].at)[::-1]
    aborts = {number: served.abort for number, served in enumerate(log.requests) if served.abort is not None}
    now = 0
    while waiting or player.busy:
        if waiting and not player.busy:
            now = max(now, waiting[-1][1].at)
        while waiting and waiting[-1][1].at <= now:
            number, served = waiting.pop()
            ids = tuple(token % vocab_size for token in served.prompt) if log.texts else served.prompt
            player.add(Request(number, ids, served.answer, served.temperature))
        for number in [number for number, at in aborts.items() if at <= now and number in player.requests]:
            del aborts[number]
            if number in player.open:
                player.abort(number)
        player.step()
        now += 1
        yield
