"""`Indices` of the core: a call that is refused names the row, and leaves every byte as it was."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from batchstate._core import STATES, Indices, Left, PageRows, Requests

_, FREE, PENDING, LIVE, RETIRED = STATES
NOTED = {"seen", "rows", "gens"}
"""Arrays that a look may write: they are asked in the same call alone."""
COUNTS = (
    "free",
    "free_reserved",
    "pending",
    "deferred",
    "live",
    "retired",
    "taken_total",
    "freed_total",
    "takes",
    "peak_live",
)


def rows(*numbers: int, gens: tuple[int, ...] = ()) -> Requests:
    """Handles, of generation 1 by default, whose arrays are read-only as those of handles are."""
    arrays = np.array([numbers, gens or [1] * len(numbers)], dtype=np.int64)
    arrays.setflags(write=False)
    return Requests(*arrays)


def everything(core: Indices) -> dict[str, Any]:
    """All numbers, but for those that a look may write."""
    arrays = {name: array.tobytes() for name, array in core.arrays.items() if name not in NOTED}
    return arrays | {name: getattr(core, name) for name in COUNTS}


def small() -> tuple[Indices, Left]:
    """Indices 1 to 6 and a reserve of 2: 1 and 2 are live, 3, 4 and 5 wait for a fence, the others are free."""
    core, left = Indices(6, 2), Left()
    assert core.take(5, False, True).n == 5
    assert left.defer(core, rows(3, 4, 5), True) == -1
    return core, left


def write(name: str, index: int, value: int) -> Callable[[Indices], None]:
    """Damages an array of the core."""

    def damage(core: Indices) -> None:
        core.arrays[name][index] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "call", "answer"),
    [
        (None, lambda core, _: core.take(2, False, True), -2),
        (None, lambda core, _: core.take(4, True, True), -2),
        (write("stack", 0, 0), lambda core, _: core.take(1, False, True), 0),
        (write("stack", 0, 7), lambda core, _: core.take(1, False, True), 0),
        (write("stack", 0, 1), lambda core, _: core.take(1, False, True), 0),
        (write("stack", 0, 3), lambda core, _: core.take(1, False, True), 0),
        (write("reserved", 0, 7), lambda core, _: core.take(2, True, True), 1),
        (write("state", 6, RETIRED), lambda core, _: core.take(3, True, True), 2),
        (None, lambda core, _: core.release(rows(1, 3), True), 1),
        (None, lambda core, _: core.release(rows(1, 2, 1), True), 2),
        (None, lambda core, _: core.release(rows(0), True), 0),
        (None, lambda core, _: core.release(rows(9), True), 0),
        (None, lambda core, _: core.release(rows(-1), True), 0),
        (None, lambda core, left: left.defer(core, rows(1, 6), True), 1),
        (None, lambda core, left: left.defer(core, rows(2, 2), True), 1),
        (None, lambda core, _: Left().defer(core, rows(1, 3), True), 1),
        (write("link", 4, 5), lambda core, left: left.reap(True), 0),
        (write("link", 4, 0), lambda core, left: left.reap(True), 0),
        (write("link", 3, 2), lambda core, left: left.reap(True), 0),
        (write("link", 4, 9), lambda core, left: left.reap(True), 0),
        (write("state", 4, FREE), lambda core, left: left.reap(True), 0),
        (None, lambda core, _: core.first_not_held(rows(1, 2, gens=(1, 2))), 1),
        (None, lambda core, _: core.first_not_held(rows(1, 0, gens=(1, 0))), 1),
        (None, lambda core, _: core.first_not_held(rows(1, 0, 2, 0, gens=(1, 0, 1, 0)), True), 1),
        (None, lambda core, _: core.first_not_held(rows(1, 2, 1), False, True), 2),
    ],
)
def test_what_is_refused_changes_nothing(
    damage: Callable[[Indices], None] | None, call: Callable[[Indices, Left], int], answer: int
) -> None:
    """Too few, free, pending, padding, out of range, named twice, a chain with others or another length."""
    core, left = small()
    if damage is not None:
        damage(core)
    before = everything(core)
    assert call(core, left) == answer
    assert everything(core) == before


def test_a_chain_comes_back_in_the_order_in_which_it_was_freed() -> None:
    """The indices behind a fence are named in that order, and taken in that order next, whatever came before."""
    core, left = small()
    assert left.defer(core, rows(2, 1), True) == -1
    assert left.of(core).tolist() == [3, 4, 5, 2, 1]
    assert (left.reap(True), core.pending, core.free, core.whole(), left.freed(core)) == (-1, 0, 6, True, 5)
    taken = core.take(5, False, True)
    assert [part.tolist() for part in taken.handles()] == [[3, 4, 5, 2, 1], [2] * 5]
    assert core.first_not_held(rows(3, 1, 0, 0, gens=(2, 2, 0, 0)), True) == -1


def test_a_fence_gives_back_all_pools_or_none() -> None:
    """Slots, states and pages behind one fence; a page as often as holders of it have left."""
    core, left = small()
    states, pages = Indices(3), PageRows(7, 4, 2, 8)
    states.take(2, False, True)
    taken = np.empty(2, np.int64)
    pages.take(taken)
    pages.hold(taken, 1, False)
    assert left.defer(states, rows(1), True) == -1
    for _ in range(2):
        assert pages.drop(taken, True, True) == -1
        left.add(pages, taken)
    assert (pages.pending, left.of(pages).tolist()) == (2, [1, 2, 1, 2])
    pages.arrays["leaving"][2] = 1  # the last part is broken
    before = everything(core), everything(states), pages.arrays["leaving"].tolist()
    assert left.reap(True) == 3
    assert (everything(core), everything(states), pages.arrays["leaving"].tolist()) == before
    pages.arrays["leaving"][2] = 2
    assert left.reap(True) == -1
    assert [left.freed(pool) for pool in (core, states, pages)] == [3, 1, 2]
    assert [pool.pending for pool in (core, states, pages)] == [0, 0, 0]


def test_sorted_they_come_in_order() -> None:
    """Free ones of both lists, whatever was freed when."""
    core = Indices(4, 2)
    core.take(6, True, True)
    core.release(rows(5, 2, 6, 4, 1, 3), True)
    core.sort()
    core.take(6, True, True)
    assert core.arrays["rows"].tolist() == [5, 6, 1, 2, 3, 4]
