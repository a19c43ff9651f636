"""What a stream of the simulated device has not run, and who says that it may."""

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.testing.watching.sites import Site

Memory = npt.NDArray[np.uint8] | torch.Tensor
"""A block as bytes, other memory as a tensor."""


class Moment(enum.Enum):
    """When a scheduler is asked."""

    ENQUEUED = "the host has enqueued something"
    ASKED = "the host asks whether something has run"
    WAITS = "the host waits"


@final
@attrs.define(eq=False)
class Marker:
    """A place in a stream.

    Attributes:
        lane: of the stream.
        reached: everything before it has run.
    """

    lane: "Lane"
    reached: bool = False


@final
@attrs.define(eq=False)
class Await:
    """Nothing behind it runs before a mark was reached."""

    marker: Marker


@final
@attrs.define(eq=False)
class Wipe:
    """Memory that was freed may be somebody else's from here on: it is poisoned as soon as everything before has run.

    That takes nobody's turn. When memory is freed may be up to Python's garbage collection, and who gets on must not
    depend on it.
    """

    memory: npt.NDArray[np.uint8] = attrs.field(repr=False)


@final
@attrs.define(eq=False)
class Task:
    """An operation that has not run.

    Attributes:
        name: of it.
        step: in which it was enqueued.
        at: the line that enqueued it.
        work: does it.
        writes: what memory it may change: blocks as bytes, other memory as a tensor.
        reads_host: what is known of host memory that it reads, or None.
        dormant: it is not known yet whether it is the device's at all; it takes a turn, and counts for nothing.
    """

    name: str
    step: int
    at: Site | None
    work: Callable[[], None]
    writes: Callable[[], Sequence[Memory]]
    reads_host: object = None
    dormant: bool = False


Entry = Task | Marker | Await | Wipe


@final
@attrs.define(eq=False)
class Lane:
    """A stream of the device.

    Attributes:
        number: in the order in which they were made, from 0.
        name: for reports; no other has it.
        queue: what it has not run.
    """

    number: int
    name: str
    queue: deque[Entry] = attrs.field(factory=deque, repr=False)

    def entries(self) -> list[Entry]:
        """What it has not run. A copy: a collection of garbage may free memory, and that is noted in the queue."""
        return list(self.queue)


class Scheduler(Protocol):
    """Who gets on."""

    def choose(self, moment: Moment, ready: Sequence[Lane], needed: Lane | None) -> Lane | None:
        """The stream that runs its next operation now, or None: nobody, and the host gets on.

        Asked again after each operation. A host that waits gets on when what it waits for has run.

        Args:
            moment: why it is asked.
            ready: streams that can run something, oldest first; at least one.
            needed: the one of them without which a host that waits gets nowhere; None where the host does not wait.
        """
        ...
