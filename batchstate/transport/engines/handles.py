"""What an engine hands out: peers, writes under way, and tags that have arrived."""

import enum
from typing import Any, final

import attrs

from batchstate.transport.regions import RemoteRegion


class Status(enum.Enum):
    """Where a write is.

    PENDING: under way. DONE: all of it has landed. FAILED: it failed, and no byte of it can still land.
    UNKNOWN: it failed, and bytes may still land; see `Engine.drain`.
    """

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"


@final
@attrs.frozen
class Capabilities:
    """What an engine can do.

    Attributes:
        one_sided: whether the peer takes no part in a write.
        max_rows: most rows of one write.
    """

    one_sided: bool
    max_rows: int


@final
@attrs.frozen
class Delivery:
    """A tag that has arrived behind its data.

    Attributes:
        tag: as given to `write`.
        instance: nonce of the engine that wrote.
    """

    tag: bytes
    instance: str


@final
@attrs.define(eq=False)
class Peer:
    """Another engine that this one can write to. Made by `connect`.

    Attributes:
        instance: its nonce; another one after each start.
        regions: its memory by index, as it was when its endpoint was made.
        native: of the engine.
        lost: why it is gone, or None.
    """

    instance: str
    regions: dict[int, RemoteRegion] = attrs.field(repr=False)
    native: Any = attrs.field(default=None, repr=False)
    lost: str | None = None


@final
@attrs.define(eq=False)
class Handle:
    """One write under way. Made by `write`.

    Attributes:
        peer: where it goes.
        tag: its tag.
        nbytes: its bytes.
        status: the last answer of `poll`; final once it is not PENDING.
        drained: whether no byte of it can still land.
        reason: why it failed.
        interrupted: whether `write` was, once it may have begun: it is UNKNOWN, and the engine still follows it.
        native: of the engine.
    """

    peer: Peer
    tag: bytes
    nbytes: int
    status: Status = Status.PENDING
    drained: bool = False
    reason: str = ""
    interrupted: bool = False
    native: Any = attrs.field(default=None, repr=False)
