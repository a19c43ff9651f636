"""What the machine of the host tier knows by itself: requests, what each position of them holds, and who may write."""

from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.host_tokens import HostRuns, HostTokenPool
from batchstate.indices import Slots
from batchstate.runtime.download import Download
from batchstate.runtime.mapped import bytes_of
from batchstate.testing.fences import ManualFence, ManualStream
from batchstate.tiering.books import TierState

Ints = npt.NDArray[np.int64]

LAYERS = 2
ITEM = 2
"""Numbers that one position has in each layer."""

SCRIBBLE = -77
"""What a writer writes that nobody expects any more."""


@final
class Stamps:
    """Numbers for the KV of new positions, none twice."""

    def __init__(self) -> None:
        self._next = 1

    def new(self, positions: int) -> Ints:
        """int64[LAYERS, positions, ITEM]."""
        n = LAYERS * positions * ITEM
        self._next += n
        return np.arange(self._next - n, self._next, dtype=np.int64).reshape(LAYERS, positions, ITEM)


@final
@attrs.define(eq=False)
class Arrival:
    """The end of a writer, which also says how much has arrived, as that of a lease does.

    Attributes:
        fence: complete when it writes no more.
        tokens: what a request may count on.
    """

    fence: ManualFence
    tokens: int = 0

    def query(self) -> bool:
        """Whether it writes no more."""
        return self.fence.query()

    def wait(self) -> None:
        """Ends it."""
        self.fence.wait()

    def arrived(self) -> int:
        """What a request may count on."""
        return self.tokens


@final
class PrefillWorker:
    """Another process, which writes into the host tokens of one request until it ends: by address, unseen by all.

    Args:
        host: the pool of the tokens.
        runs: which of them it may write.
        content: int64[LAYERS, n, ITEM], what it writes.
        stream: of its one fence.
        ended: what its memory was reserved behind.

    Attributes:
        runs, ended: see above.
    """

    def __init__(
        self, host: HostTokenPool, runs: HostRuns, content: Ints, stream: ManualStream, ended: Arrival
    ) -> None:
        self._memory = [bytes_of(one.memory).view(np.int64).reshape(-1, ITEM) for one in host.contiguous_buffers()]
        self.runs = runs
        self._content = content
        self._stream = stream
        self.ended = ended

    @property
    def tokens(self) -> Ints:
        """Its host tokens, int64[n]."""
        return self.runs.tokens(0, self._content.shape[1])

    def write(self, first: int, stop: int) -> None:
        """Writes some of its positions."""
        tokens = self.tokens[first:stop]
        for memory, content in zip(self._memory, self._content, strict=True):
            memory[tokens] = content[first:stop]

    def scribble(self) -> None:
        """Writes once more, into what it takes for its own still."""
        self._content = np.full_like(self._content, SCRIBBLE)
        self.write(0, self._content.shape[1])

    def end(self) -> None:
        """From now on it writes nothing."""
        self._stream.complete()


@final
@attrs.define(eq=False, repr=False)
class Tiered:
    """A request.

    Attributes:
        slot: its handle.
        content: int64[LAYERS, n, ITEM], what each position holds.
        room: tokens that it has host tokens for; 0 outside of the tier.
        state: where it should be.
        runs: its host tokens.
        writer: who brings its KV, or None.
        delivered: positions that have arrived.
        hot_from: first position that the device has.
        steps: that it has decoded in the tier.
        spoiled: whether somebody may write into what its last forwards still read.
    """

    slot: Slots
    content: Ints
    room: int = 0
    state: TierState = TierState.OUTSIDE
    runs: HostRuns | None = None
    writer: PrefillWorker | None = None
    delivered: int = 0
    hot_from: int = 0
    steps: int = 0
    spoiled: bool = False

    def __repr__(self) -> str:
        return f"<request on slot {self.number}: {self.length} tokens, {self.state.name}>"

    @property
    def number(self) -> int:
        """Of its slot."""
        return int(self.slot.np[0])

    @property
    def length(self) -> int:
        """Its tokens."""
        return int(self.content.shape[1])

    def add(self, content: Ints) -> None:
        """Further positions."""
        self.content = np.concatenate([self.content, content], axis=1)

    def host_tokens(self, stop: int) -> Ints:
        """Where the host has the positions up to `stop`, int64[stop]."""
        return np.empty(0, np.int64) if self.runs is None else self.runs.tokens(0, stop)

    def device_tokens(self, pages: npt.NDArray[np.int32], page_size: int, hot_tokens: int) -> Ints:
        """Where the device has the positions from `hot_from` on, int64[length - hot_from]; `pages` are its own."""
        places = []
        for position in range(self.hot_from, self.length):
            wraps = self.state is TierState.READY and position >= hot_tokens
            row = position % hot_tokens if wraps else position
            places.append(int(pages[row // page_size]) * page_size + row % page_size)
        return np.array(places, dtype=np.int64)


@final
@attrs.frozen(eq=False)
class Reading:
    """What a forward has read, on its way to the host.

    Attributes:
        download: int64[k, ITEM] for each layer.
        requests: whose KV it is, one after the other.
        expected: int64[LAYERS, n, ITEM] of each.
    """

    download: Download
    requests: tuple[Tiered, ...]
    expected: tuple[Ints, ...]
