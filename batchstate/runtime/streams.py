"""Streams and fences: the order in which a device runs what is launched."""

from typing import Any, Protocol, runtime_checkable

import attrs

from batchstate.errors import ArgumentError


@runtime_checkable
class Fence(Protocol):
    """A point in a stream. The device waits for it through `Runtime.wait`; the host asks or waits here."""

    def query(self) -> bool:
        """Whether everything before this point has run. Never waits."""
        ...

    def wait(self) -> None:
        """Blocks the host until everything before this point has run."""
        ...


@attrs.frozen
class DoneFence:
    """A complete fence: a device that runs everything at once records it."""

    def query(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Returns at once."""


@attrs.frozen(eq=False)
class Stream:
    """A queue of device operations that run in order.

    Attributes:
        name: for reports.
        native: the backend's stream object, or None on a device without streams.
        key: what two names of one backend stream have in common; streams compare by it.
    """

    name: str
    native: Any
    key: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def foreign_fence(fence: object) -> ArgumentError:
    """The error for a fence that another runtime recorded: this one cannot know when it completes."""
    return ArgumentError(f"{fence!r} was not recorded by this runtime", fence, "record fences with `Runtime.record`")


def check_fence(fence: Any, operation: str, *, needed: bool = False) -> None:
    """Refuses anything but a fence, or None unless a fence is `needed`.

    Raises:
        ArgumentError: `fence` has no method `query()`, or is a class.
    """
    if fence is None and not needed:
        return
    if isinstance(fence, type) or not callable(getattr(fence, "query", None)):
        problem = f"{operation}: expected a fence as `after`, got {fence!r}"
        raise ArgumentError(problem, fence, "pass what `Runtime.record()` returns")
