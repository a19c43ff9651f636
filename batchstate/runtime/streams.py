"""Streams and fences: the words in which the library speaks of the order of a device's work."""

# ruff: noqa: D102 (the methods of `StreamOrder` are documented in `Runtime`)

from typing import Any, Protocol, runtime_checkable

import attrs
import torch


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
class Stream:
    """A queue of device operations that run in order.

    Attributes:
        name: for reports.
        native: the backend's stream object, or None on a device without streams.
        key: common to all names of one backend stream; streams compare by it.
    """

    name: str = attrs.field(eq=False)
    native: Any = attrs.field(eq=False)
    key: object


@runtime_checkable
class Writer(Fence, Protocol):
    """The end of a writer in another process, which also knows what has arrived: `Lease.ended`."""

    def arrived(self) -> int:
        """How many tokens have arrived."""


def missing(writer: Fence, tokens: int) -> int:
    """How many of `tokens` tokens have not arrived from a writer; negative where it brings more."""
    if isinstance(writer, Writer):
        return tokens - writer.arrived()
    return 0 if writer.query() else tokens


class StreamOrder(Protocol):
    """The part of `Runtime` that orders the use of memory by several streams."""

    @property
    def current_stream(self) -> Stream: ...

    @property
    def capturing(self) -> bool: ...

    def record(self, stream: Stream | None = None) -> Fence: ...

    def wait(self, fence: Fence, *, stream: Stream | None = None) -> None: ...

    def use_on_current_stream(
        self,
        tensor: torch.Tensor,
        made_on: Stream,
        ready: Fence | None = None,
        *,
        synchronised: dict[object, Stream] | None,
    ) -> torch.Tensor: ...
