"""Tokens of requests that are new since an adapter was asked last, for engines whose requests keep their output."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Protocol, TypeVar


class Answering(Protocol):
    """A request of an engine."""

    @property
    def output(self) -> Sequence[int]:
        """The tokens of its answer so far."""

    @property
    def state(self) -> str:
        """The word "finished" once it has ended."""


R = TypeVar("R", bound=Answering)


def new_tokens(requests: MutableMapping[int, R], seen: MutableMapping[int, int]) -> Mapping[int, Sequence[int]]:
    """New tokens by the number of their request: they count as `seen`, and requests that have ended are taken out."""
    came: dict[int, Sequence[int]] = {}
    for number, request in list(requests.items()):
        new = request.output[seen[number] :]
        if new:
            came[number] = new
            seen[number] += len(new)
        if request.state == "finished":
            del requests[number]
    return came
