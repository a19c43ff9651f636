"""`PageLease`: pages held without a slot."""

from collections.abc import Callable
from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate.runtime import Fence
from batchstate.tables import read_only

__all__ = ["PageLease"]

Ints = npt.NDArray[np.int64]


@final
@attrs.define(eq=False)
class PageLease:
    """Pages held without a slot: the first `tokens` tokens of a request, kept after it, or pages taken before one.

    Made by `PagePool.hold` and `PagePool.take`; give it back with `release`.

    Attributes:
        tokens: how many tokens; whole pages.
        released: whether it was given back.
    """

    _pages: Ints
    tokens: int
    _release: "Callable[[PageLease, Ints, Fence | None], None]"
    _written: int  # tokens whose writes are launched, and the stream that wrote them last; the pool keeps both
    _writer: int
    released: bool = attrs.field(default=False, init=False)

    def __repr__(self) -> str:
        return f"PageLease({self.tokens} tokens, {self._pages.size} pages{', released' if self.released else ''})"

    @property
    def pages(self) -> Ints:
        """int64[tokens / page_size], in the order of their tokens; a read-only view."""
        return read_only(self._pages)

    def release(self, *, after: Fence | None = None) -> None:
        """Gives the references back, at once or when `after` is complete.

        Raises:
            Violation: SLOT_DOUBLE_FREE: it was given back before.
        """
        self._release(self, self._pages, after)
