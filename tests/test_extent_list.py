"""Free indices as intervals: as many and the same ones as a plain set knows, in as few ranges as there can be."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchstate._arrays import arange_per_row
from batchstate.kv._ranges import FreeRanges, ranges_of


def ranges(indices: set[int]) -> list[tuple[int, int]]:
    """The maximal intervals of a set: start and length."""
    found: list[tuple[int, int]] = []
    for index in sorted(indices):
        if found and found[-1][0] + found[-1][1] == index:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return found


@given(size=st.integers(0, 30), data=st.data())
def test_is_a_set_that_hands_out_best_fits(size: int, data: st.DataObject) -> None:
    """What is taken was free, lies in one run where one run is long enough (the shortest such), and comes back."""
    extents, free, taken = FreeRanges(1, size), set(range(1, size + 1)), set[int]()
    for _ in range(data.draw(st.integers(0, 12), label="operations")):
        push: bool = data.draw(st.booleans(), label="push")
        if taken and push:
            back = data.draw(st.lists(st.sampled_from(sorted(taken)), unique=True), label="back")
            extents.push(np.array(back, dtype=np.int64))
            free |= set(back)
            taken -= set(back)
        else:
            n = data.draw(st.integers(0, len(free)), label="n")
            before = ranges(free)
            given_out = extents.top(n)
            assert extents.count == len(free), "looking takes nothing"
            extents.drop(n)
            numbers = given_out.tolist()
            assert given_out.dtype == np.int64
            assert len(set(numbers)) == len(numbers) == n
            assert set(numbers) <= free
            fitting = [length for _, length in before if length >= n]
            pieces = ranges_of(given_out)[1].tolist()
            if n and fitting:
                assert pieces == [n]
                assert next(length for start, length in before if start == numbers[0]) == min(fitting)
            elif n:
                longest = sorted((length for _, length in before), reverse=True)
                needed = next(k for k in range(1, len(longest) + 1) if sum(longest[:k]) >= n)
                assert len(pieces) <= needed
            free -= set(numbers)
            taken |= set(numbers)
        assert extents.entries().tolist() == sorted(free)
        assert (extents.count, extents.capacity) == (len(free), size)
        assert extents.largest == max((length for _, length in ranges(free)), default=0)
        assert f"{len(free)} of {size} in {len(ranges(free))} ranges" in repr(extents)


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 6))))
def test_runs_spread_and_join_again(pieces: list[tuple[int, int]]) -> None:
    """Ranges expand to their indices in order, and joining those again names the same indices."""
    starts = np.array([start for start, _ in pieces], dtype=np.int64)
    lengths = np.array([length for _, length in pieces], dtype=np.int64)
    everything = [index for start, length in pieces for index in range(start, start + length)]
    assert arange_per_row(starts, lengths).tolist() == everything
    again = ranges_of(np.array(everything, dtype=np.int64))
    assert arange_per_row(*again).tolist() == everything
    assert (again[1] > 0).all()
    assert (again[0][1:] != again[0][:-1] + again[1][:-1]).all(), "neighbours in order are one run"
