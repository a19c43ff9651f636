"""Shrinks a failing history: fewer requests first, then shorter ones, then plainer settings.

Hypothesis, which draws the histories, shrinks what it has drawn too, one draw at a time. Here that stops early: a page
is reused only after so many tokens, and a request can only go if another one takes its tokens. These passes know that.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from batchstate.testing.exact.history import Arrival, EngineUnderTest, History, Wave

__all__ = ["reduced"]


def reduced(
    engine: EngineUnderTest,
    history: History,
    fails: Callable[[History], bool],
    *,
    seconds: float = 60.0,
) -> History:
    """The shortest failing history that passes of smaller and smaller changes lead to.

    Args:
        engine: whose settings these are.
        history: that fails.
        fails: plays one, and says whether it fails too.
        seconds: after which no further one is tried.
    """
    end, again = time.perf_counter() + seconds, True
    while again:
        again = False
        for smaller in (_without, _longer, _shorter, _plainer):
            candidates = smaller(engine, history)
            while time.perf_counter() < end and (candidate := next(candidates, None)) is not None:
                if candidate != history and fails(candidate):
                    history, again = candidate, True
                    candidates = smaller(engine, history)
    return history


def _without(engine: EngineUnderTest, history: History) -> Iterator[History]:
    """Without waves, without runs of neighbouring requests, long ones first, without aborts."""
    for number in range(len(history.waves)):
        yield _with(history, number, ())
    arrivals = [(wave, at) for wave, it in enumerate(history.waves) for at in range(len(it.arrivals))]
    size = len(arrivals) // 2
    while size:
        for first in range(0, len(arrivals) - size + 1, size):
            yield _changed(history, dict.fromkeys(arrivals[first : first + size]))
        size //= 2
    for number, wave in enumerate(history.waves):
        if wave.aborts:
            yield _with(history, number, (attrs.evolve(wave, aborts=wave.aborts[1:]),))
        if number + 1 < len(history.waves):
            other = history.waves[number + 1]
            merged = Wave(wave.arrivals + other.arrivals, other.steps, wave.aborts + other.aborts)
            yield History(history.settings, (*history.waves[:number], merged, *history.waves[number + 2 :]))


def _longer(engine: EngineUnderTest, history: History) -> Iterator[History]:
    """Without one request, while the one before it, or all others, get as many tokens as an answer may have."""
    longest = {
        (wave, at): attrs.evolve(arrival, answer=engine.longest_answer)
        for wave, it in enumerate(history.waves)
        for at, arrival in enumerate(it.arrivals)
    }
    for wave, at in longest:
        before = (wave, at - 1)
        yield _changed(history, {(wave, at): None} | ({before: longest[before]} if at else {}))
        yield _changed(history, {**longest, (wave, at): None})


def _shorter(engine: EngineUnderTest, history: History) -> Iterator[History]:
    """One request at a time with a shorter prompt, answer, or another temperature; then fewer steps."""
    for wave, it in enumerate(history.waves):
        for at, arrival in enumerate(it.arrivals):
            for smaller in _smaller_arrivals(engine, arrival):
                yield _changed(history, {(wave, at): smaller})
        for steps in sorted({0, it.steps // 2, it.steps - 1} - {it.steps, -1}):
            yield _with(history, wave, (attrs.evolve(it, steps=steps),))


def _smaller_arrivals(engine: EngineUnderTest, arrival: Arrival) -> Iterator[Arrival]:
    for number, (document, length) in enumerate(arrival.prompt):
        for shorter in sorted({0, 1, length // 2, length - 1} - {length}):
            piece = ((document, shorter),) if shorter else ()
            if prompt := (*arrival.prompt[:number], *piece, *arrival.prompt[number + 1 :]):
                yield attrs.evolve(arrival, prompt=prompt)
    for answer in sorted({1, arrival.answer // 2, arrival.answer - 1} - {0, arrival.answer}):
        yield attrs.evolve(arrival, answer=answer)
    if arrival.temperature != engine.temperatures[0]:
        yield attrs.evolve(arrival, temperature=engine.temperatures[0])


def _plainer(engine: EngineUnderTest, history: History) -> Iterator[History]:
    """One setting at a time with the plainest value."""
    for name, values in engine.choices.items():
        if history.settings[name] != values[0]:
            yield History({**history.settings, name: values[0]}, history.waves)


def _with(history: History, number: int, waves: Sequence[Wave]) -> History:
    return History(history.settings, (*history.waves[:number], *waves, *history.waves[number + 1 :]))


def _changed(history: History, changes: Mapping[tuple[int, int], Arrival | None]) -> History:
    """With other requests at some places of some waves, None for no request; a wave without anything goes."""
    waves = []
    for number, wave in enumerate(history.waves):
        changed = (changes.get((number, at), arrival) for at, arrival in enumerate(wave.arrivals))
        arrivals = tuple(arrival for arrival in changed if arrival is not None)
        if arrivals or wave.steps or wave.aborts:
            waves.append(attrs.evolve(wave, arrivals=arrivals))
    return History(history.settings, tuple(waves))
