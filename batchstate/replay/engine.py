"""The requests of an engine, recorded through its adapter, and served again by its own scheduler.

The adapter is that of `batchstate.testing.exact`. A replay serves the same requests in the same steps, with answers as
long as they were, by the exact model: its text says whether the engine's state was right, also where no invariant was
broken. A request that the ring has only from its middle on begins with the tokens that it had by then.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

from batchstate.errors import RecordingError
from batchstate.replay.format import Finding, Recording
from batchstate.replay.recorder import Recorder, recorder
from batchstate.testing.exact.history import Adapter, Arrival, EngineUnderTest, History, Outcome, Request, Wave, play
from batchstate.testing.exact.model import ExactModel
from batchstate.testing.exact.text import Oracle
from batchstate.testing.exact.verify import Verifier

__all__ = ["drive", "history_of", "recorded"]

MOST_TOKENS = 1 << 26
Piece: TypeAlias = tuple[tuple[int, ...], int]


def history_of(recording: Recording, engine: EngineUnderTest) -> History:
    """The requests of a recording, for an engine whose settings have the recorded names.

    Raises:
        RecordingError: it has none, or settings that this engine does not have.
    """
    events = iter(recording.events)
    opened = next((event.body for event in events if event.kind == "open"), None)
    if opened is None:
        problem = "the recording has no requests: it was made without an adapter"
        raise RecordingError(problem, None, "record the engine's adapter: `recorded(ENGINE)`; or replay the calls")
    arrivals, since, waves, step = dict[int, Arrival](), dict[int, int](), [(list[int](), 0)], 0

    def add(number: int, answer: Any, temperature: Any, *pieces: Piece) -> None:
        arrivals[number] = Arrival(pieces, operator.index(answer), float(temperature))
        since[number] = step
        waves[-1][0].append(number)

    try:
        settings = {name: _setting(engine, name, value) for name, value in opened["settings"].items()}
        for number, prompt, tokens, answer, temperature in opened["open"]:
            had = [(tuple(map(operator.index, tokens)), len(tokens))] if tokens else []
            add(number, max(answer - len(tokens), 1), temperature, _piece(prompt), *had)
        for event in events:
            if event.kind == "add":
                number, prompt, answer, temperature = event.body
                if waves[-1][1]:
                    waves.append(([], 0))
                add(number, answer, temperature, _piece(prompt))
            elif event.kind == "abort" and event.body in arrivals:
                arrivals[event.body] = attrs.evolve(arrivals[event.body], abort=step - since[event.body])
            elif event.kind == "step":
                step += 1
                waves[-1] = waves[-1][0], waves[-1][1] + 1
        if (tokens := sum(length for arrival in arrivals.values() for _, length in arrival.prompt)) > MOST_TOKENS:
            raise ValueError(f"prompts of {tokens:,} tokens")
    except (KeyError, TypeError, ValueError) as error:
        problem = f"requests that {engine.name} cannot serve: {type(error).__name__}: {str(error)[:80]}"
        raise RecordingError(problem, engine.name, "name the engine that was recorded") from None
    return History(settings, tuple(Wave(tuple(arrivals[number] for number in numbers), n) for numbers, n in waves))


def _piece(prompt: Any) -> Piece:
    *tokens, length = prompt if isinstance(prompt, list) else (*prompt, len(prompt))
    if not 0 < operator.index(length) <= MOST_TOKENS:
        raise ValueError(f"a prompt of {length} tokens")
    return tuple(map(operator.index, tokens)), length


def _setting(engine: EngineUnderTest, name: str, value: Any) -> Any:
    return next((choice for choice in engine.choices.get(name, ()) if str(choice) == value), value)


class _Recorded:
    """An adapter that writes down what it is asked, and what comes of it."""

    def __init__(self, adapter: Adapter, recording: Recorder, engine: str, settings: Mapping[str, Any]) -> None:
        plain = {
            name: value if isinstance(value, int | float | str) else str(value) for name, value in settings.items()
        }
        self._adapter, self._recorder, self._header = adapter, recording, {"engine": engine, "settings": plain}
        self._open: dict[int, tuple[Request, list[int]]] = {}
        recording.engines.add(self)
        self.write_open()

    def write_open(self) -> None:
        """Says which requests are open, with the tokens that they have by now; a segment begins with it."""
        requests = [
            (number, _prompt(request), tokens, request.max_new_tokens, request.temperature)
            for number, (request, tokens) in self._open.items()
        ]
        self._recorder.write("open", {**self._header, "open": requests})

    def add(self, request: Request) -> None:
        self._recorder.write("add", (request.number, _prompt(request), request.max_new_tokens, request.temperature))
        self._open[request.number] = request, []
        self._adapter.add(request)

    def abort(self, number: int) -> None:
        self._recorder.write("abort", number)
        self._open.pop(number, None)
        self._adapter.abort(number)

    def step(self) -> Mapping[int, Sequence[int]]:
        self._recorder.begin_step()
        self._recorder.write("step", None)
        came = self._adapter.step()
        if came:
            tokens = np.fromiter(itertools.chain.from_iterable(came.values()), np.int32)
            counts = [np.array(list(numbers), np.int32) for numbers in (came, map(len, came.values()))]
            self._recorder.write("note", {"numbers": counts[0], "counts": counts[1], "tokens": tokens})
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
        self._recorder.engines.discard(self)
        self._adapter.close()


def _prompt(request: Request) -> Any:
    prompt = request.prompt
    if len(prompt) > 8 and len(set(prompt)) == 1:
        return prompt[0], len(prompt)
    return np.array(prompt, np.int32)


def recorded(engine: EngineUnderTest) -> EngineUnderTest:
    """The engine, of which the recording under way notes what each adapter is asked to do."""

    def opened(settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None) -> Adapter:
        adapter, recording = engine.open(settings, model, verifier), recorder()
        return adapter if recording is None else _Recorded(adapter, recording, engine.name, settings)

    return attrs.evolve(engine, open=opened)


def drive(engine: EngineUnderTest, history: History, *, stop: Callable[[], bool] = lambda: False) -> Finding | None:
    """Plays a history until something is wrong, and returns the first finding; None where all was right.

    That is a violation or another error of the engine, a text that is not the right one (`TEXT`), or an entry that
    was read and should not have been (`WRONG_READ`).

    Args:
        engine: made anew.
        history: the requests.
        stop: asked after each step: whether to give up, as if nothing had been found.
    """
    spec, verifier = engine.spec(history.settings), Verifier() if engine.texts else None
    reports = [] if verifier is None else verifier.reports
    model = ExactModel(spec, dtype=history.settings.get("dtype", torch.float32))

    def until(outcome: Outcome) -> bool:
        return bool(outcome.differences or reports or stop())

    outcome = play(engine, history, Oracle(spec), model, verifier, until=until)
    for wrong in outcome.differences:
        return Finding("TEXT", str(wrong), f"request {wrong.request.number}", row=wrong.at)
    for read in reports:
        return Finding("WRONG_READ", str(read), f"request {read.request}", row=read.position, slot=read.page)
    return None if outcome.error is None else Finding.of(outcome.error)
