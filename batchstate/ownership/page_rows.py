"""Which pages each slot has, in order, and how many of their tokens are committed.

    row of a slot      [ p0 | p1 | p2 | 0 | 0 ]        one int32 for each page, 0 beyond the last
    0 <= committed <= allocated = num_pages * page_size <= width

Host bookkeeping only; whose turn it is to be freed is decided by `page_references`.
"""

from typing import final

import numpy as np
import numpy.typing as npt

from batchstate.ownership.extent_list import spread

Ints = npt.NDArray[np.int64]
ONE = np.array(1)


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
        # As arrays: numpy takes as long to convert one number as to add 100 of them.
        self._size, self._rounding, self._width = np.array(page_size), np.array(page_size - 1), np.array(self.width)

    def __repr__(self) -> str:
        return f"PageRows({len(self.table)} rows of {self.width} pages of {self.page_size})"

    def pages_needed(self, lengths: Ints) -> Ints:
        """Pages that hold `lengths` tokens, int64[n]."""
        needed: Ints = (lengths + self._rounding) // self._size
        return needed

    def pages_at(self, rows: Ints, columns: Ints) -> Ints:
        """The page at each place, int64[n]; 0 beyond the last page of a row."""
        return self._flat[self._places(rows, columns)].astype(np.int64)

    def prefix(self, row: int, n: int) -> Ints:
        """The first `n` pages of one row, int64[n], a new array."""
        return self.table[row, :n].astype(np.int64)

    def tokens_at(self, rows: Ints, positions: Ints) -> Ints:
        """The token that holds each position of a request, int64[n]."""
        columns = positions // self._size
        return self.tokens_on(self.pages_at(rows, columns), columns, positions)

    def next_places(self, rows: Ints, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Where tokens at positions within the rows' width go: column, and place in the table; and the page there."""
        columns = positions // self._size
        places = self._places(rows, columns)
        return columns, places, self._flat[places].astype(np.int64)

    def tokens_on(self, pages: Ints, columns: Ints, positions: Ints) -> Ints:
        """The tokens of positions that lie in these columns, on these pages."""
        tokens: Ints = (pages - columns) * self._size + positions
        return tokens

    def _places(self, rows: Ints, columns: Ints) -> Ints:
        places: Ints = rows * self._width + columns
        return places

    def append(self, rows: Ints, counts: Ints, pages: Ints) -> None:
        """Gives each row `counts` further pages; `pages` are those of all rows in turn."""
        have = self.num_pages[rows]
        if rows.size == 1:
            at = int(rows[0]) * self.width + int(have[0])
            self._put(slice(at, at + pages.size), pages)
        else:
            self._put(spread(self._places(rows, have), counts), pages)
        self.num_pages[rows] = have + counts

    def append_at(self, places: Ints, rows: Ints, pages: Ints) -> None:
        """Gives each row one further page; `places` are those behind their last ones."""
        self._put(places, pages)
        self.num_pages[rows] += ONE

    def cut(self, rows: Ints, keep: Ints) -> Ints:
        """Takes all but the first `keep` pages from each row, and returns them, int64[k]."""
        counts = self.num_pages[rows] - keep
        places: Ints | slice
        if rows.size == 1:
            at = int(rows[0]) * self.width + int(keep[0])
            places = slice(at, at + int(counts[0]))
        else:
            places = spread(self._places(rows, keep), counts)
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

    def _put(self, places: Ints | slice, pages: Ints) -> None:
        self._flat[places] = pages.astype(np.int32)  # apart from the scatter, which would convert one by one

    def _clear(self, places: Ints | slice) -> None:
        # An entry left behind would name a page that is somebody else's by the time the row is used again.
        self._flat[places] = 0
