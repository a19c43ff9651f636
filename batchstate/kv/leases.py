"""`PageLease`: pages held without a slot."""

from typing import TYPE_CHECKING, SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate._arrays import read_only
from batchstate.runtime import Fence

if TYPE_CHECKING:
    from batchstate.kv._sharing import PageSharing

__all__ = ["PageLease"]

Ints = npt.NDArray[np.int64]


@final
@attrs.define(eq=False)
class PageLease:
    """Pages held without a slot: tokens of a request, kept after it, pages taken before one, or a cached prefix.

    Made by `PagePool.hold`, `PagePool.take` and `PrefixCache.match`; give it back with `release`.

    Attributes:
        tokens: how many tokens; whole pages.
        released: whether it was given back.
    """

    _pages: Ints
    tokens: int
    _sharing: "PageSharing"
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
        self._sharing.end(self, self._pages, after)

    def split(self, num_tokens: SupportsIndex) -> "tuple[PageLease, PageLease]":
        """Cuts the lease in two: its first `num_tokens` tokens, and the others. This one counts as released then.

        As a node of a radix tree is split where two prompts part.

        Raises:
            Violation: PAGE_ALIGNMENT, LENGTH_ORDER: `num_tokens` are not whole pages, or more than there are.
            ArgumentError: it was released before.
        """
        return self._sharing.split(self, num_tokens)
