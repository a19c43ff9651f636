"""`Indices` of the core: a call that is refused names the row, and leaves every byte as it was."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from batchstate._core import STATES, Indices

_, FREE, PENDING, LIVE, RETIRED = STATES
NOTED = {"seen", "rows", "gens"}
"""Arrays that a look may write: they are asked in the same call alone."""
COUNTS = ("free", "free_reserved", "pending", "live", "retired", "taken_total", "freed_total", "takes", "peak_live")


def rows(*numbers: int) -> np.ndarray:
    """Indices or generations, int64[n], read-only as arrays of handles are."""
    array = np.array(numbers, dtype=np.int64)
    array.setflags(write=False)
    return array


def everything(core: Indices) -> dict[str, Any]:
    """All numbers, but for those that a look may write."""
    arrays = {name: array.tobytes() for name, array in core.arrays.items() if name not in NOTED}
    return arrays | {name: getattr(core, name) for name in COUNTS}


def small() -> Indices:
    """Indices 1 to 6 and a reserve of 2: 1 and 2 are live, 3, 4 and 5 a chain with the head 5, the others free."""
    core = Indices(6, 2)
    assert core.take(5, False, True) == -1
    assert core.defer(rows(3, 4, 5), 0) == 5
    return core


def write(name: str, index: int, value: int) -> Callable[[Indices], None]:
    """Damages an array of the core."""

    def damage(core: Indices) -> None:
        core.arrays[name][index] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "call", "answer"),
    [
        (None, lambda core: core.take(2, False, True), -2),
        (None, lambda core: core.take(4, True, True), -2),
        (write("stack", 0, 0), lambda core: core.take(1, False, True), 0),
        (write("stack", 0, 7), lambda core: core.take(1, False, True), 0),
        (write("stack", 0, 1), lambda core: core.take(1, False, True), 0),
        (write("stack", 0, 3), lambda core: core.take(1, False, True), 0),
        (write("reserved", 0, 7), lambda core: core.take(2, True, True), 1),
        (write("state", 6, RETIRED), lambda core: core.take(3, True, True), 2),
        (None, lambda core: core.release(rows(1, 3)), 1),
        (None, lambda core: core.release(rows(1, 2, 1)), 2),
        (None, lambda core: core.release(rows(0)), 0),
        (None, lambda core: core.release(rows(9)), 0),
        (None, lambda core: core.release(rows(-1)), 0),
        (None, lambda core: core.defer(rows(1, 6), 5), -2),
        (None, lambda core: core.defer(rows(2, 2), 5), -2),
        (None, lambda core: core.reap(5, 2), 2),
        (None, lambda core: core.reap(5, 4), 3),
        (None, lambda core: core.reap(1, 1), 0),
        (write("link", 4, 5), lambda core: core.reap(5, 3), 2),
        (write("link", 4, 9), lambda core: core.reap(5, 3), 2),
        (write("state", 4, FREE), lambda core: core.reap(5, 3), 1),
        (None, lambda core: core.first_not_held(rows(1, 2), rows(1, 2)), 1),
        (None, lambda core: core.first_not_held(rows(1, 0), rows(1, 0)), 1),
        (None, lambda core: core.first_not_held(rows(1, 0, 2, 0), rows(1, 0, 1, 0), True), 1),
        (None, lambda core: core.first_not_held(rows(1, 2, 1), rows(1, 1, 1), False, True), 2),
        (None, lambda core: core.first_not_to_free(rows(2, 2), rows(1, 1)), 1),
    ],
)
def test_what_is_refused_changes_nothing(
    damage: Callable[[Indices], None] | None, call: Callable[[Indices], int], answer: int
) -> None:
    """Too few, free, pending, padding, out of range, named twice, a chain with others or another length."""
    core = small()
    if damage is not None:
        damage(core)
    before = everything(core)
    assert call(core) == answer
    assert everything(core) == before


def test_a_chain_comes_back_in_the_order_in_which_it_was_freed() -> None:
    """The indices behind a fence are named in that order, and taken in that order next, whatever came before."""
    core = small()
    head = core.defer(rows(2, 1), 5)
    chain = np.empty(5, dtype=np.int64)
    assert (core.chain(head, chain), chain.tolist()) == (0, [3, 4, 5, 2, 1])
    assert (core.reap(head, 5), core.pending, core.free, core.whole(0)) == (-1, 0, 6, True)
    assert core.take(5, False, True) == -1
    assert core.arrays["rows"][:5].tolist() == [3, 4, 5, 2, 1]
    assert core.arrays["gens"][:5].tolist() == [2] * 5
    assert core.first_not_held(rows(3, 1, 0, 0), rows(2, 2, 0, 0), True) == -1


def test_sorted_they_come_in_order() -> None:
    """Free ones of both lists, whatever was freed when."""
    core = Indices(4, 2)
    core.take(6, True, True)
    core.release(rows(5, 2, 6, 4, 1, 3))
    core.sort()
    core.take(6, True, True)
    assert core.arrays["rows"].tolist() == [5, 6, 1, 2, 3, 4]
