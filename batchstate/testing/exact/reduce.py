"""Shrinks what fails: fewer requests first, then shorter ones, then plainer settings.

Hypothesis, which draws the histories, shrinks what it has drawn too, one draw at a time. Here that stops early: a page
is reused only after so many tokens, and a request can only go if another one takes its tokens. These passes know that.
A shrink ends by itself, after its time, or at Ctrl-C, each time with the shortest that has failed by then.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Self, TypeVar, final

import attrs

from batchstate.testing.exact.history import Arrival, EngineUnderTest, History, Wave

__all__ = ["Shrunk", "reduced"]

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Takes the number of tries, and the size of the shortest that has failed."""


class _TimeUp(Exception):
    pass


@final
@attrs.define
class Shrunk(Generic[T]):
    """The result of a shrink.

    Attributes:
        smallest: that fails.
        tries: made.
        interrupted: whether Ctrl-C has ended it.
    """

    smallest: T
    _fails: Callable[[T], T | None] = attrs.field(repr=False)
    _size: Callable[[T], int] = attrs.field(repr=False)
    _seconds: float = attrs.field(repr=False)
    _progress: Progress | None = attrs.field(repr=False)
    tries: int = 0
    interrupted: bool = False
    _begin: float = attrs.field(factory=time.perf_counter, repr=False, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        self.interrupted = isinstance(error, KeyboardInterrupt)
        return isinstance(error, KeyboardInterrupt | _TimeUp)

    @property
    def size(self) -> int:
        """Calls or requests of the smallest."""
        return self._size(self.smallest)

    def fails(self, candidate: T) -> bool:
        """Tries a candidate, which becomes the smallest if it fails."""
        if time.perf_counter() - self._begin > self._seconds:
            raise _TimeUp
        self.tries += 1
        failed = self._fails(candidate)
        if failed is not None:
            self.smallest = failed
        if self._progress is not None:
            self._progress(self.tries, self.size)
        return failed is not None

    def leave_out(self, without: Callable[[T, int, int], T]) -> None:
        """Leaves out runs of neighbours, long and late ones first: an error needs what lies close before it."""
        run = self.size
        while run := run // 2:
            stop = self.size
            while stop > 0:
                self.fails(without(self.smallest, max(stop - run, 0), stop))
                stop = min(stop - run, self.size)


def reduced(
    engine: EngineUnderTest,
    history: History,
    fails: Callable[[History], bool],
    *,
    seconds: float = 60.0,
    progress: Progress | None = None,
) -> Shrunk[History]:
    """The shortest failing history that passes of smaller and smaller changes lead to.

    Args:
        engine: whose settings these are.
        history: that fails.
        fails: plays one, and says whether it fails too.
        seconds: after which no further one is tried.
        progress: called after each try.
    """
    with Shrunk(history, lambda it: it if fails(it) else None, lambda it: it.requests, seconds, progress) as result:
        if result.size > 64:  # a try is slow
            _shrink(engine, result, _plainer)
        part = 8
        while part > 1:  # a part alone, late ones first
            whole, places, few = result.smallest, _places(result.smallest), result.size // part
            stops = range(len(places), few - 1, -few) if few > 1 else ()
            parts = (_changed(whole, dict.fromkeys([*places[: stop - few], *places[stop:]])) for stop in stops)
            part = 8 if any(map(result.fails, parts)) else part // 2
        before = None
        while result.smallest is not before:
            before = result.smallest
            result.leave_out(_without)
            _shrink(engine, result, _plainer, _sooner, _longer, _shorter)
    return result


def _shrink(engine: EngineUnderTest, result: Shrunk[History], *passes: Callable[..., Iterator[History]]) -> None:
    for smaller in passes:
        candidates = smaller(engine, result.smallest)
        while (candidate := next(candidates, None)) is not None:
            if candidate != result.smallest and result.fails(candidate):
                candidates = smaller(engine, result.smallest)


def _without(history: History, start: int, stop: int) -> History:
    """Without a run of requests, counted through all waves."""
    return _changed(history, dict.fromkeys(_places(history)[start:stop]))


def _plainer(engine: EngineUnderTest, history: History) -> Iterator[History]:
    """All requests shorter, where memory is less too; one plainer setting; all requests at once or in half the time."""
    settings = {name: values for name, values in engine.choices.items() if name in history.settings}
    plainest = {**history.settings, **{name: values[0] for name, values in settings.items()}}
    for part in (16, 4, 2, 1):
        cut = {(wave, at): _cut(history.waves[wave].arrivals[at], part) for wave, at in _places(history)}
        yield attrs.evolve(_changed(history, cut), settings=plainest)
        yield _changed(history, cut)
    for name, values in settings.items():
        for value in values:
            if value == history.settings[name]:
                break
            yield attrs.evolve(history, settings={**history.settings, name: value})
    for part in (0, 2):
        steps = [wave.steps // part if part else 0 for wave in history.waves]
        yield attrs.evolve(history, waves=tuple(map(Wave, (wave.arrivals for wave in history.waves), steps)))


def _cut(arrival: Arrival, part: int) -> Arrival:
    prompt = tuple((document, -(-length // part)) for document, length in arrival.prompt)
    return attrs.evolve(arrival, prompt=prompt, answer=-(-arrival.answer // part))


def _sooner(engine: EngineUnderTest, history: History) -> Iterator[History]:
    """Each wave together with the next, or with fewer steps behind it."""
    waves = history.waves
    for number, wave in enumerate(waves):
        if number + 1 < len(waves):
            merged = Wave(wave.arrivals + waves[number + 1].arrivals, waves[number + 1].steps)
            yield attrs.evolve(history, waves=(*waves[:number], merged, *waves[number + 2 :]))
        for steps in _less(wave.steps, least=0):
            fewer = attrs.evolve(wave, steps=steps)
            yield attrs.evolve(history, waves=(*waves[:number], fewer, *waves[number + 1 :]))


def _longer(engine: EngineUnderTest, history: History) -> Iterator[History]:
    """Without one request, while the one before it, or all others, get as many tokens as an answer may have."""
    longest = {
        (wave, at): attrs.evolve(history.waves[wave].arrivals[at], answer=engine.longest_answer)
        for wave, at in _places(history)
    }
    for wave, at in longest:
        before = (wave, at - 1)
        yield _changed(history, {(wave, at): None} | ({before: longest[before]} if at else {}))
        yield _changed(history, {**longest, (wave, at): None})


def _shorter(engine: EngineUnderTest, history: History) -> Iterator[History]:
    """One request at a time with a shorter prompt or answer, or as others are."""
    for wave, at in _places(history):
        for smaller in _smaller_arrivals(engine, history.waves[wave].arrivals[at]):
            yield _changed(history, {(wave, at): smaller})


def _smaller_arrivals(engine: EngineUnderTest, arrival: Arrival) -> Iterator[Arrival]:
    for number, (document, length) in enumerate(arrival.prompt):
        for shorter in _less(length, least=0):
            piece = ((document, shorter),) if shorter else ()
            if prompt := (*arrival.prompt[:number], *piece, *arrival.prompt[number + 1 :]):
                yield attrs.evolve(arrival, prompt=prompt)
    for answer in _less(arrival.answer):
        yield attrs.evolve(arrival, answer=answer)
    if arrival.temperature != engine.temperatures[0]:
        yield attrs.evolve(arrival, temperature=engine.temperatures[0])
    if arrival.abort is not None:
        for abort in (None, *_less(arrival.abort, least=0)):
            yield attrs.evolve(arrival, abort=abort)


def _less(number: int, *, least: int = 1) -> list[int]:
    return [other for other in sorted({least, 1, number // 2, number - 1}) if least <= other < number]


def _places(history: History) -> list[tuple[int, int]]:
    return [(wave, at) for wave, it in enumerate(history.waves) for at in range(len(it.arrivals))]


def _changed(history: History, changes: Mapping[tuple[int, int], Arrival | None]) -> History:
    """With other requests at some places of some waves, None for no request; the steps of a wave without any go on."""
    waves = list[Wave]()
    for number, wave in enumerate(history.waves):
        changed = (changes.get((number, at), arrival) for at, arrival in enumerate(wave.arrivals))
        arrivals = tuple(arrival for arrival in changed if arrival is not None)
        if arrivals:
            waves.append(Wave(arrivals, wave.steps))
        elif waves:
            waves[-1] = attrs.evolve(waves[-1], steps=waves[-1].steps + wave.steps)
    return attrs.evolve(history, waves=tuple(waves))
