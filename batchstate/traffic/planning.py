"""The scheduler's decisions as arithmetic: arrays in, arrays out, nothing changed.

Rows stand in order of admission, so the last row is the youngest request.
"""

from typing import final

import attrs
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@final
@attrs.frozen(eq=False)
class StepPlan:
    """What each row does in a step, if no row leaves or joins before; see `plan_step`.

    Attributes:
        remaining: int64[rows], tokens to compute until the row's next token comes out: 1 when it decodes.
        chunks: int64[rows], tokens that it computes in this step.
        owned_pages: int64[rows], pages that it has.
        new_pages: int64[rows], pages that its chunk needs on top.
    """

    remaining: Ints
    chunks: Ints
    owned_pages: Ints
    new_pages: Ints

    @property
    def only_decodes(self) -> bool:
        """Whether every row computes and generates exactly one token."""
        return int(self.remaining.max(initial=1)) == 1

    @property
    def generates(self) -> Ints:
        """1 for each row whose next token comes out of this step, else 0; int64[rows]."""
        generates: Ints = (self.chunks == self.remaining).astype(np.int64)
        return generates


def plan_step(seq_lens: Ints, prefill_lens: Ints, *, budget: int, page_size: int) -> StepPlan:
    """Plans one step.

    Args:
        seq_lens: int64[rows], tokens whose KV is computed.
        prefill_lens: int64[rows], tokens whose KV has to be computed before the row decodes.
        budget: tokens of a step, at least the number of rows.
        page_size: tokens of a page.
    """
    remaining = np.maximum(prefill_lens - seq_lens, 1)
    chunks = chunk_lengths(remaining, budget)
    owned_pages = pages_for(seq_lens, page_size)
    return StepPlan(remaining, chunks, owned_pages, pages_for(seq_lens + chunks, page_size) - owned_pages)


def chunk_lengths(remaining: Ints, budget: int) -> Ints:
    """How many tokens of each row this step computes.

    Rows that decode go first, one token each. What is left of the budget goes to the prompts, oldest first; the one
    that does not fit is cut, and goes on in the next step (chunked prefill).

    Args:
        remaining: int64[rows], tokens to compute until the row's next token comes out; 1 for a row that decodes.
        budget: tokens of a step, at least the number of rows.

    Returns:
        int64[rows], each from 0 to `remaining`, together at most `budget`.
    """
    if int(remaining.sum()) <= budget:
        return remaining
    decodes = remaining == 1
    wanted = np.where(decodes, 0, remaining)
    room = budget - np.count_nonzero(decodes)
    before = np.cumsum(wanted) - wanted
    chunks: Ints = np.clip(room - before, 0, wanted) + decodes
    return chunks


def pages_for(tokens: Ints, page_size: int) -> Ints:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)


def rows_that_fit(new_pages: Ints, owned_pages: Ints, available: int) -> int:
    """How many of the oldest rows can take their next step when all younger ones give back their pages.

    Args:
        new_pages: int64[rows], pages that each row's next tokens need.
        owned_pages: int64[rows], pages that each row has.
        available: pages nobody has.
    """
    if int(new_pages.sum()) <= available:
        return len(new_pages)
    needed = np.concatenate([[0], np.cumsum(new_pages)])
    given_back = owned_pages.sum() - np.concatenate([[0], np.cumsum(owned_pages)])
    return int(np.flatnonzero(needed <= available + given_back)[-1])
