"""Laws of pages and token lengths."""

from collections.abc import Callable
from typing import Unpack

from batchstate.laws.catalog import Ints, broken, first_row, law, made
from batchstate.violations import Code, Where


@law(
    Code.PAGE_OWNER,
    asked="full",
    remedy="take, share and release pages through the pool only; whoever keeps a page holds a reference to it",
    origins=("sglang #28754", "sglang #35501", "sglang #24527", "FreeToken#204", "sglang #36457"),
)
def page_owner(held: Ints, recorded: Ints, *, pages: Ints | None = None, **where: Unpack[Where]) -> None:
    """Each page has as many references recorded as holders. Both are integer[n], of `pages` int[n] or of page 0 to n-1.

    A free page has no holder, an owned one is in no free list (`held` counts -1 for each place in the free list, and
    `recorded` is -1 for a free page), and a live one has a holder. Cost: one pass over the pages. Broken by handing a
    page out twice.
    """
    made[Code.PAGE_OWNER] += 1
    unequal = held != recorded
    if unequal.any():
        row = first_row(unequal)
        page = row if pages is None else int(pages[row])
        broken(
            Code.PAGE_OWNER,
            f"page {page} has other holders than it has references",
            where,
            expected=f"{recorded[row]} (recorded; -1 is free)",
            actual=f"{held[row]} (counted)",
            slot=page,
        )


@law(
    Code.PAGE_ALIGNMENT,
    asked="always",
    remedy="share, hold and truncate at whole pages: round the token count down to a multiple of the page size",
    origins=("sglang #4913", "sglang #27789", "sglang #14439", "sglang #27779"),
)
def page_alignment(tokens: Ints, page_size: int, **where: Unpack[Where]) -> None:
    """Token counts at which ownership of pages changes are multiples of the page size.

    Cost: one remainder a count. Broken by sharing or releasing a page of which somebody uses a part.
    """
    made[Code.PAGE_ALIGNMENT] += 1
    if page_size == 1:
        return
    ragged = tokens % page_size != 0
    if ragged.any():
        row = first_row(ragged)
        broken(
            Code.PAGE_ALIGNMENT,
            f"{tokens[row]} tokens end inside a page",
            where,
            expected=f"a multiple of {page_size}",
            actual=tokens[row],
            row=row,
        )


@law(
    Code.LENGTH_ORDER,
    asked="always",
    remedy="grow before committing; never commit more tokens than are allocated, nor ask for more than a row holds",
    origins=("sglang #28754", "sglang #13741", "sglang #27731", "sglang #12224"),
)
def length_order(
    committed: Ints,
    allocated: Ints,
    width: int,
    *,
    explain: Callable[[int, int, int], tuple[str, str]] | None = None,
    **where: Unpack[Where],
) -> None:
    """0 <= committed <= allocated <= row width, in tokens, for each request.

    `explain` says what was asked for, from the three numbers: the problem and the remedy.
    Cost: three comparisons a request. Broken by committing speculated tokens before they are allocated.
    """
    made[Code.LENGTH_ORDER] += 1
    wrong = (committed < 0) | (committed > allocated) | (allocated > width)
    if wrong.any():
        row = first_row(wrong)
        least, most = int(committed[row]), int(allocated[row])
        if explain is not None:
            problem, remedy = explain(least, most, width)
            broken(
                Code.LENGTH_ORDER,
                problem,
                where,
                expected=f"0 <= {least} <= {most} <= {width}",
                actual="not in this order",
                row=row,
                remedy=remedy,
            )
        broken(
            Code.LENGTH_ORDER,
            "token lengths are out of order",
            where,
            expected=f"0 <= committed <= allocated <= {width}",
            actual=f"committed {least}, allocated {most}",
            row=row,
        )
