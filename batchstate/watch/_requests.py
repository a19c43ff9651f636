"""Derived values that follow from the requests of a batch, each of which is asked once while it lives."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import is_
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
    """`any`, `all`, `max` or `min` of a function's answer for each request. Made by `over_requests`."""

    combine: Callable[[Iterable[Any]], Any]
    function: Callable[[Any], Any]

    def __call__(self, requests: Iterable[Any]) -> Any:
        """The answer for these requests, each of which is asked."""
        return self.combine(map(self.function, requests))


def over_requests(combine: Callable[[Iterable[Any]], Any], function: Callable[[Any], Any]) -> OverRequests:
    """A value that a batch has because its requests have it, for `derived` and `implied` of `watch`.

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
class AnswerGroup:
    """Requests with equal answers."""

    answers: tuple[Any, ...]


@final
class RequestAnswers:
    """The answers of several functions for each request.

    Attributes:
        last: the batch of the last `groups_at`, its requests and their groups, kept while that batch lives.
    """

    def __init__(self, wants: Sequence[OverRequests]) -> None:
        self._wants = wants
        self._group_of: dict[int, AnswerGroup] = {}  # by the identity of a request that is alive
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._groups: weakref.WeakValueDictionary[tuple[Any, ...], AnswerGroup] = weakref.WeakValueDictionary()
        self._right: set[tuple[Any, ...]] = set()
        self.last: tuple[weakref.ref[Any], list[Any], list[AnswerGroup]] | None = None

    def groups_at(self, batch: Any, requests: list[Any]) -> list[AnswerGroup]:
        """As `groups_of`, for all requests of a batch: those that it had in the last call are not looked up again."""
        last, groups = self.last, list[AnswerGroup]()  # read once: another thread, or the end of a batch, may take it
        if last is not None and last[0]() is batch and len(last[1]) <= len(requests):
            groups = last[2] if all(map(is_, last[1], requests)) else []
        if not groups or len(groups) < len(requests):
            groups = groups + self.groups_of(requests[len(groups) :])
            self.last = None
            if len(groups) == len(requests):  # each row has its request
                with contextlib.suppress(TypeError):  # an object without weak references
                    self.last = weakref.ref(batch, self.forget), requests, groups
        return groups

    def forget(self, batch: "weakref.ref[Any] | None" = None) -> None:
        """Lets go of the requests of a batch, by default of any."""
        if batch is None or (self.last is not None and self.last[0] is batch):
            self.last = None

    def groups_of(self, requests: Sequence[Any]) -> list[AnswerGroup]:
        """The group of each request, without rows that have no request."""
        group_of = self._group_of
        try:
            return [group_of[id(request)] for request in requests]
        except KeyError:
            return [group_of.get(id(request)) or self._ask(request) for request in requests if request is not None]

    def _ask(self, request: Any) -> AnswerGroup:
        answers = tuple(
            bool(want.function(request)) if want.combine in (any, all) else want.function(request)
            for want in self._wants
        )
        group = self._groups.setdefault(answers, AnswerGroup(answers))
        number, group_of, alive = id(request), self._group_of, self._alive

        def forget(_: object) -> None:
            group_of.pop(number, None)
            alive.pop(number, None)

        with contextlib.suppress(TypeError):  # a text has no weak reference and is asked each time
            alive[number] = weakref.ref(request, forget)
            group_of[number] = group
        return group

    def combined(self, want: OverRequests, groups: frozenset[AnswerGroup]) -> Any:
        """The value that one of the functions gives for all requests together."""
        at = self._wants.index(want)
        return want.combine(group.answers[at] for group in groups)

    def were_right(self, values: tuple[Any, ...], groups: frozenset[AnswerGroup]) -> bool:
        """Whether these values were right before for requests of these groups."""
        try:
            return (values, groups) in self._right
        except TypeError:  # a value without a hash
            return False

    def note_right(self, values: tuple[Any, ...], groups: frozenset[AnswerGroup]) -> None:
        """Notes that these values are right for these groups, if they cannot change in place."""
        if all(type(value) in NEVER_CHANGE or isinstance(value, Enum) for value in values):
            if len(self._right) >= MOST_KEPT:
                self._right.clear()
            self._right.add((values, groups))
