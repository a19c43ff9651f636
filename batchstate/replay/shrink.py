"""Shrinks what fails: fewer requests or calls first, then shorter ones, then plainer settings.

A shrink ends by itself, after its time, or at Ctrl-C, each time with the shortest that has failed by then.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar, final

import attrs

from batchstate.replay.engine import EngineLog, Served
from batchstate.testing.exact.history import EngineUnderTest

__all__ = ["Shrunk", "shrunk_calls", "shrunk_log"]

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
    _end: float = attrs.field(repr=False)
    _progress: Progress | None = attrs.field(repr=False)
    tries: int = 0
    interrupted: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        self.interrupted = isinstance(error, KeyboardInterrupt)
        return isinstance(error, KeyboardInterrupt | _TimeUp)

    def fails(self, candidate: T) -> bool:
        """Tries one, which becomes the smallest if it fails."""
        if time.perf_counter() > self._end:
            raise _TimeUp
        self.tries += 1
        failed = self._fails(candidate)
        if failed is not None:
            self.smallest = failed
        if self._progress is not None:
            self._progress(self.tries, self._size(self.smallest))
        return failed is not None

    def leave_out(self, without: Callable[[T, int, int], T]) -> None:
        """Leaves out runs of neighbours, long and late ones first: an error needs what lies close before it."""
        run = self._size(self.smallest)
        while run := run // 2:
            stop = self._size(self.smallest)
            while stop > 0:
                self.fails(without(self.smallest, max(stop - run, 0), stop))
                stop = min(stop - run, self._size(self.smallest))


def shrunk_log(
    engine: EngineUnderTest,
    log: EngineLog,
    fails: Callable[[EngineLog], bool],
    *,
    seconds: float = 120.0,
    progress: Progress | None = None,
) -> Shrunk[EngineLog]:
    """The shortest failing log that passes of smaller and smaller changes lead to.

    Args:
        engine: that serves it.
        log: that fails.
        fails: serves one.
        seconds: after which no further one is tried.
        progress: called after each try.
    """

    def size(log: EngineLog) -> int:
        return len(log.requests)

    end = time.perf_counter() + seconds
    with Shrunk(log, lambda other: other if fails(other) else None, size, end, progress) as result:
        part = 8
        while part > 1:  # the end alone, as the engine was then, or the beginning
            requests, few = result.smallest.requests, size(result.smallest) // part
            parts = (_with(log, _from_zero(requests[-few:])), _with(log, requests[:few])) if few > 1 else ()
            part = 8 if any(map(result.fails, parts)) else part // 2
        before = None
        while result.smallest is not before:
            before = result.smallest
            result.leave_out(_without)
            candidates = _smaller(engine, result.smallest)
            while (candidate := next(candidates, None)) is not None:
                if result.fails(candidate):
                    candidates = _smaller(engine, result.smallest)
    return result


def shrunk_calls(
    numbers: Sequence[int],
    fails: Callable[[frozenset[int]], Collection[int]],
    *,
    seconds: float = 120.0,
    progress: Progress | None = None,
) -> Shrunk[Any]:
    """The fewest of the calls `numbers` with which a recording still fails.

    Args:
        numbers: of the calls.
        fails: makes them without some, and returns those that were made if it failed, else none.
        seconds: after which no further ones are tried.
        progress: called after each try.
    """
    everything, end = frozenset(numbers), time.perf_counter() + seconds

    def made(left: tuple[int, ...]) -> tuple[int, ...] | None:
        calls = frozenset(fails(everything - set(left)))
        return tuple(number for number in left if number in calls) if calls else None

    with Shrunk(tuple(numbers), made, len, end, progress) as result:
        before = None
        while result.smallest is not before:
            before = result.smallest
            result.leave_out(lambda left, start, stop: left[:start] + left[stop:])
    return result


def _with(log: EngineLog, requests: Sequence[Served]) -> EngineLog:
    return attrs.evolve(log, requests=tuple(requests))


def _without(log: EngineLog, start: int, stop: int) -> EngineLog:
    return _with(log, _from_zero([*log.requests[:start], *log.requests[stop:]]))


def _from_zero(requests: Sequence[Served]) -> list[Served]:
    first = min((served.at for served in requests), default=0)
    return [_moved(served, served.at - first) for served in requests]


def _moved(served: Served, at: int) -> Served:
    late = served.at - at
    return attrs.evolve(served, at=at, abort=None if served.abort is None else max(served.abort - late, 0))


def _smaller(engine: EngineUnderTest, log: EngineLog) -> Iterator[EngineLog]:
    """Shorter requests, then plainer settings."""
    requests, plain = log.requests, engine.temperatures[0]
    if any(served.at for served in requests):
        yield _with(log, [_moved(served, 0) for served in requests])
        yield _with(log, [_moved(served, served.at // 2) for served in requests])
    for part in (2, 4):
        halves = [attrs.evolve(it, prompt=it.prompt[: max(len(it.prompt) // part, 1)]) for it in requests]
        if halves != list(requests):
            yield _with(log, halves)
    changes: list[Callable[[Served], list[Served]]] = [
        lambda it: [attrs.evolve(it, abort=None)] if it.abort is not None else [],
        lambda it: [attrs.evolve(it, temperature=plain)] if it.temperature != plain else [],
        lambda it: [attrs.evolve(it, prompt=it.prompt[:length]) for length in _less(len(it.prompt))],
        lambda it: [attrs.evolve(it, answer=length) for length in _less(it.answer)],
        lambda it: [_moved(it, at) for at in _less(it.at + 1) if at < it.at],
    ]
    for change in changes:
        for place, served in enumerate(requests):
            for other in change(served):
                yield _with(log, [*requests[:place], other, *requests[place + 1 :]])
    for name, values in engine.choices.items():
        if name in log.settings and log.settings[name] != values[0]:
            yield attrs.evolve(log, settings={**log.settings, name: values[0]})


def _less(number: int) -> list[int]:
    return sorted({1, number // 2, number - number // 4, number - 1} - {0, number}) if number > 1 else []
