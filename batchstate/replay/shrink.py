"""Shrinks what fails: fewer requests or calls first, then shorter ones, then plainer settings.

A shrink ends by itself, after its time, or at Ctrl-C, each time with the shortest that has failed by then.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, final

import attrs

from batchstate.replay.engine import EngineLog, Served
from batchstate.testing.exact.history import EngineUnderTest

__all__ = ["Shrunk", "shrunk", "shrunk_log"]

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Takes the number of tries, and the size of the shortest that has failed."""


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
    tries: int = 0
    interrupted: bool = False


def shrunk(
    begin: T,
    candidates: Callable[[T], Iterator[T]],
    fails: Callable[[T], bool],
    size: Callable[[T], int],
    *,
    seconds: float = 120.0,
    progress: Progress | None = None,
) -> Shrunk[T]:
    """Takes the first candidate that fails, again and again, until none of them does.

    Args:
        begin: that fails.
        candidates: smaller ones than the one that it is given, the boldest first.
        fails: tries one.
        size: for progress.
        seconds: after which no further one is tried.
        progress: called after each try.
    """
    result, end = Shrunk(begin), time.perf_counter() + seconds
    try:
        again = True
        while again:
            again = False
            offered = candidates(result.smallest)
            while time.perf_counter() < end and (candidate := next(offered, None)) is not None:
                result.tries += 1
                if fails(candidate):
                    result.smallest, again = candidate, True
                    break
                if progress is not None:
                    progress(result.tries, size(result.smallest))
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def chunks(number: int) -> Iterator[tuple[int, int]]:
    """Runs of neighbours to leave out, long ones and late ones first: an error needs what lies close before it."""
    size = number
    while size := size // 2:
        for stop in range(number, 0, -size):
            yield max(stop - size, 0), stop


def shrunk_log(
    engine: EngineUnderTest,
    log: EngineLog,
    fails: Callable[[EngineLog], bool],
    *,
    seconds: float = 120.0,
    progress: Progress | None = None,
) -> Shrunk[EngineLog]:
    """The shortest failing log that passes of smaller and smaller changes lead to."""

    def candidates(log: EngineLog) -> Iterator[EngineLog]:
        yield from _fewer(log)
        yield from _shorter(engine, log)
        yield from _plainer(engine, log)

    return shrunk(log, candidates, fails, lambda log: len(log.requests), seconds=seconds, progress=progress)


def _with(log: EngineLog, requests: Sequence[Served]) -> EngineLog:
    return attrs.evolve(log, requests=tuple(requests))


def _fewer(log: EngineLog) -> Iterator[EngineLog]:
    requests = log.requests
    for part in (8, 4, 2):  # the end alone, as the engine was then, or the beginning
        if len(requests) > part * 4:
            yield _with(log, _from_zero(requests[-(len(requests) // part) :]))
            yield _with(log, requests[: len(requests) // part])
    for start, stop in chunks(len(requests)):
        yield _with(log, _from_zero([*requests[:start], *requests[stop:]]))


def _from_zero(requests: Sequence[Served]) -> list[Served]:
    first = min((served.at for served in requests), default=0)
    return [_moved(served, served.at - first) for served in requests]


def _moved(served: Served, at: int) -> Served:
    late = served.at - at
    return attrs.evolve(served, at=at, abort=None if served.abort is None else max(served.abort - late, 0))


def _shorter(engine: EngineUnderTest, log: EngineLog) -> Iterator[EngineLog]:
    requests = log.requests
    if any(served.at for served in requests):
        yield _with(log, [_moved(served, 0) for served in requests])
        yield _with(log, [_moved(served, served.at // 2) for served in requests])
    yield from _evolved(log, lambda served: [attrs.evolve(served, abort=None)] if served.abort is not None else [])
    plain = engine.temperatures[0]
    yield from _evolved(log, lambda it: [attrs.evolve(it, temperature=plain)] if it.temperature != plain else [])
    for part in (2, 4):
        halves = [attrs.evolve(it, prompt=it.prompt[: max(len(it.prompt) // part, 1)]) for it in requests]
        if halves != list(requests):
            yield _with(log, halves)
    yield from _evolved(log, lambda served: [
        attrs.evolve(served, prompt=served.prompt[:length]) for length in _less(len(served.prompt))
    ])  # fmt: skip
    yield from _evolved(log, lambda served: [attrs.evolve(served, answer=length) for length in _less(served.answer)])
    yield from _evolved(log, lambda served: [_moved(served, at) for at in _less(served.at + 1) if at < served.at])


def _less(number: int) -> list[int]:
    return sorted({1, number // 2, number - number // 4, number - 1} - {0, number}) if number > 1 else []


def _evolved(log: EngineLog, smaller: Callable[[Served], Sequence[Served]]) -> Iterator[EngineLog]:
    for place, served in enumerate(log.requests):
        for other in smaller(served):
            yield _with(log, [*log.requests[:place], other, *log.requests[place + 1 :]])


def _plainer(engine: EngineUnderTest, log: EngineLog) -> Iterator[EngineLog]:
    for name, values in engine.choices.items():
        if name in log.settings and log.settings[name] != values[0]:
            yield attrs.evolve(log, settings={**log.settings, name: values[0]})


def shrunk_calls(
    numbers: Sequence[int],
    fails: Callable[[frozenset[int]], bool],
    *,
    seconds: float = 120.0,
    progress: Progress | None = None,
) -> Shrunk[Any]:
    """The fewest of the calls `numbers` with which a recording still fails."""

    def candidates(left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for start, stop in chunks(len(left)):
            yield left[:start] + left[stop:]

    everything = frozenset(numbers)
    return shrunk(
        tuple(numbers), candidates, lambda left: fails(everything - set(left)), len, seconds=seconds, progress=progress
    )
