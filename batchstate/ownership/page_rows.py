"""Which pages each slot has, in order, and how many of their tokens are committed.

    row of a slot      [ p0 | p1 | p2 | 0 | 0 ]        one int32 for each page, 0 beyond the last
    0 <= committed <= allocated = num_pages * page_size <= width

Host bookkeeping only; whose turn it is to be freed is decided by `page_references`.
"""

from typing import final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@final
class PageRows:
    """The page table of every slot, padding included.

    Attributes:
        page_size: tokens a page.
        max_tokens: most tokens of one request.
        width: most pages of one request.
        table: int32[capacity, width].
        num_pages: int64[capacity].
        committed: int64[capacity], in tokens.
    """

    def __init__(self, capacity: int, page_size: int, max_tokens: int) -> None:
        self.page_size = page_size
        self.max_tokens = max_tokens
        self.width = -(-max_tokens // page_size)
        self.table = np.zeros((capacity, self.width), dtype=np.int32)
        self.num_pages = np.zeros(capacity, dtype=np.int64)
        self.committed = np.zeros(capacity, dtype=np.int64)
        self._flat = self.table.reshape(-1)

    def __repr__(self) -> str:
        return f"PageRows({len(self.table)} rows of {self.width} pages of {self.page_size})"

    def pages_needed(self, lengths: Ints) -> Ints:
        """Pages that hold `lengths` tokens, int64[n]."""
        return -(-lengths // self.page_size)

    def pages_at(self, rows: Ints, columns: Ints) -> Ints:
        """The page at each place, int64[n]; 0 beyond the last page of a row."""
        pages: Ints = self._flat[rows * self.width + columns].astype(np.int64)
        return pages

    def prefix(self, row: int, n: int) -> Ints:
        """The first `n` pages of one row, int64[n], a new array."""
        return self.table[row, :n].astype(np.int64)

    def tokens_at(self, rows: Ints, positions: Ints) -> Ints:
        """The token that holds each position of a request, int64[n]."""
        columns = positions // self.page_size
        return self.pages_at(rows, columns) * self.page_size + (positions - columns * self.page_size)

    def append(self, rows: Ints, counts: Ints, pages: Ints) -> None:
        """Gives each row `counts` further pages; `pages` are those of all rows in turn."""
        have = self.num_pages[rows]
        owners, columns = ragged(have, counts)
        self._put(rows[owners] * self.width + columns, pages)
        self.num_pages[rows] = have + counts

    def cut(self, rows: Ints, keep: Ints) -> Ints:
        """Takes all but the first `keep` pages from each row, and returns them, int64[k]."""
        counts = self.num_pages[rows] - keep
        owners, columns = ragged(keep, counts)
        places = rows[owners] * self.width + columns
        pages: Ints = self._flat[places].astype(np.int64)
        self._clear(places)
        self.num_pages[rows] = keep
        return pages

    def commit(self, rows: Ints, lengths: Ints | int) -> None:
        """Sets how many tokens of each row are committed."""
        self.committed[rows] = lengths

    def holders(self, num_pages: int) -> Ints:
        """How often each page stands in the table, int64[num_pages + 1]; page 0 is not counted."""
        counted = np.bincount(self._flat, minlength=num_pages + 1).astype(np.int64)
        counted[0] = 0
        return counted

    def _put(self, places: Ints, pages: Ints) -> None:
        self._flat[places] = pages

    def _clear(self, places: Ints) -> None:
        # An entry left behind would name a page that is somebody else's by the time the row is used again.
        self._flat[places] = 0


def ragged(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """For each i the numbers starts[i] .. starts[i] + counts[i] - 1, in turn, without a loop.

    Returns:
        the i that each number belongs to, and the numbers; both int64[counts.sum()].
    """
    if counts.size == 1:  # one request, as admission and retraction have it
        count, start = int(counts[0]), int(starts[0])
        return np.zeros(count, dtype=np.int64), np.arange(start, start + count, dtype=np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    owners = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
    return owners, np.arange(total, dtype=np.int64) - (ends - counts - starts)[owners]
