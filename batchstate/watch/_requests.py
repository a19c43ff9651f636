"""Derived values that follow from the requests of a batch, each of which is asked once while it lives."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Final, final

import attrs

from batchstate.errors import ArgumentError

__all__ = ["OverRequests", "over_requests"]

NEVER_CHANGE: Final = frozenset({int, float, bool, str, bytes, type(None)})
"""Types of values that cannot change in place."""

MOST_KEPT = 1_000
"""Values found right that are remembered."""


@final
@attrs.frozen(eq=False)
class OverRequests:
    """`any`, `all`, `max` or `min` of what a function says of each request. Made by `over_requests`."""

    combine: Callable[[Iterable[Any]], Any]
    function: Callable[[Any], Any]

    def __call__(self, requests: Iterable[Any]) -> Any:
        """The answer for these requests, each of which is asked."""
        return self.combine(map(self.function, requests))


def over_requests(combine: Callable[[Iterable[Any]], Any], function: Callable[[Any], Any]) -> OverRequests:
    """What a batch has because its requests have it, for `derived` and `implied` of `watch`.

    Each request, as it stands in the column `key`, is asked once, when it is first seen: of 256 requests the next call
    then costs microseconds. So `function` is for what does not change while a request lives; write another function
    of the batch for what does::

        implied = {"has_grammar": over_requests(any, lambda req: req.grammar is not None)}

    Args:
        combine: `any`, `all`, `max` or `min`.
        function: takes a request; for `max` and `min` it returns something hashable.

    Raises:
        ArgumentError: another `combine`, for which it would matter how many requests say the same.
    """
    if combine not in (any, all, max, min):
        problem = f"over_requests: expected any, all, max or min, got {combine!r}"
        raise ArgumentError(problem, combine, "for a sum or a count write a function of the batch")
    return OverRequests(combine, function)


@final
@attrs.define(eq=False)
class Kind:
    """Requests of which all functions say the same."""

    answers: tuple[Any, ...]


@final
class RequestAnswers:
    """What several functions say of requests. Keeps no request alive."""

    def __init__(self, wants: Sequence[OverRequests]) -> None:
        self._wants = wants
        self._kind_of: dict[int, Kind] = {}  # by the identity of a request that is alive
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._kinds: weakref.WeakValueDictionary[tuple[Any, ...], Kind] = weakref.WeakValueDictionary()
        self._right: set[tuple[Any, ...]] = set()

    def kinds_of(self, requests: Sequence[Any]) -> list[Kind]:
        """The kind of each request, without rows that have none."""
        known = self._kind_of
        try:
            return [known[id(one)] for one in requests]
        except KeyError:
            return [known.get(id(one)) or self._ask(one) for one in requests if one is not None]

    def _ask(self, request: Any) -> Kind:
        answers = tuple(
            bool(want.function(request)) if want.combine in (any, all) else want.function(request)
            for want in self._wants
        )
        kind = self._kinds.setdefault(answers, Kind(answers))
        number, known, alive = id(request), self._kind_of, self._alive

        def forget(_: object) -> None:
            known.pop(number, None)
            alive.pop(number, None)

        with contextlib.suppress(TypeError):  # of a text, which is asked each time
            alive[number] = weakref.ref(request, forget)
            known[number] = kind
        return kind

    def combined(self, want: OverRequests, kinds: frozenset[Kind]) -> Any:
        """What one of the functions says of all requests together."""
        at = self._wants.index(want)
        return want.combine(kind.answers[at] for kind in kinds)

    def were_right(self, found: tuple[Any, ...], kinds: frozenset[Kind]) -> bool:
        """Whether these values were found before where there were requests of these kinds, and were right."""
        try:
            return (found, kinds) in self._right
        except TypeError:  # a value without a hash
            return False

    def note_right(self, found: tuple[Any, ...], kinds: frozenset[Kind]) -> None:
        """Notes that these values are right for these kinds, if they cannot change in place."""
        if all(type(one) in NEVER_CHANGE or isinstance(one, Enum) for one in found):
            if len(self._right) >= MOST_KEPT:
                self._right.clear()
            self._right.add((found, kinds))
