"""The footprint of a launch: elements that two programs share."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchstate._source_lines import SourceLine
from batchstate.races.tracing.footprint import Footprint

LINE = SourceLine(None, None)
TOUCH = st.tuples(
    st.lists(st.integers(0, 11), min_size=1, max_size=4),  # elements
    st.sampled_from([1, 2, 4, 8]),  # bytes of each
    st.booleans(),  # writes
    st.booleans(),  # atomic
)


@given(st.lists(st.lists(TOUCH, max_size=4), min_size=1, max_size=4))
def test_as_byte_by_byte(programs: list[list[tuple[list[int], int, bool, bool]]]) -> None:
    """A clash is found exactly if two programs share a byte, one of them writing and not both atomic."""
    footprint = Footprint()
    seen = []
    for program, touches in enumerate(programs):
        for elements, size, writes, atomic in touches:
            addresses = 64 + np.array(elements, np.uint64) * np.uint64(size)
            footprint.add((program,), addresses, size, LINE, writes=writes, atomic=atomic)
            covered = {64 + element * size + byte for element in elements for byte in range(size)}
            seen.append((program, covered, writes, atomic))
    shared = [
        first[1] & second[1]
        for first, second in itertools.combinations(seen, 2)
        if first[0] != second[0] and (first[2] or second[2]) and not (first[3] and second[3])
    ]
    clashes = list(footprint.clashes())
    assert bool(clashes) is any(shared)
    for clash in clashes:
        assert any(clash.address in both for both in shared)


def test_atomics_order_what_is_around_them() -> None:
    """Behind an atomic that acquires lies what was before one that releases, also over a third program."""
    for acquires, releases, found in ((True, True, 0), (True, False, 1), (False, True, 1)):
        footprint = Footprint()
        for program in range(3):
            for address, atomic in ((8, True), (80, False), (8, True)):
                if not (program == 1 and address == 80):
                    addresses = np.array([address], np.uint64)
                    footprint.add((program,), addresses, 4, LINE, writes=True, atomic=atomic)
                if atomic:
                    footprint.orders(address, acquires=acquires, releases=releases)
        assert len(list(footprint.clashes())) == found
