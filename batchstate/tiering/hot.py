"""The hot buffers: which device token has, or takes, the KV of a position, and whether it agrees with host memory."""

from typing import Unpack, final

import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate.errors import ArgumentError
from batchstate.host_tokens import HostTokenPool
from batchstate.indices import Slots
from batchstate.ownership import length_words
from batchstate.pages import PagePool
from batchstate.tiering.books import TierBooks, TierState
from batchstate.tiering.moves import Moves
from batchstate.violations import Where

Ints = npt.NDArray[np.int64]


@final
class HotBuffers:
    """The device's part of the requests of a host tier: position p lies in row p % size of its buffer.

    Args:
        pages: that the buffers are made of.
        host: what they are a window of.
        books: lengths and states.
        moves: the device memory itself.
        size: tokens of a buffer.
    """

    def __init__(self, pages: PagePool, host: HostTokenPool, books: TierBooks, moves: Moves, size: int) -> None:
        self._pages = pages
        self._host = host
        self._books = books
        self._moves = moves
        self._size = size

    def __repr__(self) -> str:
        return f"HotBuffers({self._size} tokens each)"

    def tokens(self, rows: Ints, positions: Ints, **where: Unpack[Where]) -> Ints:
        """The device token of one position of each row, int64[n].

        Raises:
            Violation: SLOT_ZERO_ALLOCATED, at `cheap`: a position that has no page.
        """
        page = self.pages_of(rows, positions)
        if levels.cheap and page.size and int(page.min()) == 0:
            invariants.slot_zero_allocated(page, **where)
        size = self._pages.page_size
        tokens: Ints = page * size + positions % self._size % size
        return tokens

    def pages_of(self, rows: Ints, positions: Ints) -> Ints:
        """The page of one position of each row, int64[n]; 0 for none."""
        column = positions % self._size // self._pages.page_size
        return self._pages.page_table[rows, column].astype(np.int64)

    def check_step(self, slots: Slots, rows: Ints, length: Ints, **where: Unpack[Where]) -> None:
        """Refuses lengths that are not those of the last step and one token each, or that go beyond what was reserved.

        Raises:
            Violation: LENGTH_ORDER; MIRROR_EQUAL, at `cheap`: pages that somebody else has moved.
            ArgumentError: another number of new tokens.
        """
        before, room = self._books.length[rows], self._books.room[rows]
        invariants.length_order(length, room, int(room.max(initial=0)), explain=length_words.outgrown, **where)
        wrong = length != before + 1
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ArgumentError(
                f"slot {rows[row]} has {length[row]} tokens with the new one, and had {before[row]}",
                value=int(length[row]),
                remedy="map one new token a step; each request once a step",
            )
        if levels.cheap:
            invariants.mirror_equal(np.minimum(before, self._size), self._pages.committed(slots), **where)

    def check_backed(self, rows: Ints, owed: int, **where: Unpack[Where]) -> None:
        """What is backed up equals what is hot, but for the `owed` newest tokens. Reads device memory.

        Raises:
            Violation: MIRROR_EQUAL.
        """
        books, inspect = self._books, self._host.runtime.inspect
        first = np.maximum(books.hot_from[rows], books.length[rows] - self._size)
        counts = np.maximum(books.backed[rows] - owed - first, 0)
        at, positions = np.repeat(rows, counts), np.repeat(first, counts) + within(counts)
        tokens, kept = self.tokens(at, positions, **where), books.host_tokens(at, positions)
        for device, host in zip(self._moves.kv, self._host.buffers, strict=True):
            invariants.mirror_equal(inspect(device)[tokens], inspect(host)[kept], **where)

    def verify(self, owed: int, **where: Unpack[Where]) -> None:
        """Every request has the pages that its length says, and hot rows that equal host memory.

        Raises:
            Violation: MIRROR_EQUAL.
        """
        books = self._books
        everyone = np.flatnonzero((books.states == TierState.READY) | (books.states == TierState.STAGED))
        length = books.length[everyone]
        ready = books.states[everyone] == TierState.READY
        hot = np.where(ready, np.minimum(length, self._size), length)
        invariants.mirror_equal(hot, self._pages.committed_lengths[everyone], **where)
        self.check_backed(everyone[ready], owed, **where)


def within(lengths: Ints) -> Ints:
    """0 .. n-1 for each n of `lengths`, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if ends.size else 0, dtype=np.int64) - np.repeat(ends - lengths, lengths)
