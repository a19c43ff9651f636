"""Where the rows of a write begin, once everything has been judged that can be before a byte moves."""

from typing import Unpack

import numpy as np

from batchstate import invariants
from batchstate.errors import ArgumentError
from batchstate.transport.copies import Copies, Ints
from batchstate.transport.regions import Region, RemoteRegion
from batchstate.violations import Where

ByIndex = dict[int, Region] | dict[int, RemoteRegion]


def addresses(
    here: ByIndex, there: ByIndex, copies: Copies, *, name: str, max_rows: int, **where: Unpack[Where]
) -> tuple[Ints, Ints]:
    """Address of each row here and there, int64[n] each.

    Args:
        here: local regions by index.
        there: the peer's.
        copies: the rows.
        name: of the engine.
        max_rows: that it takes in one write.
        where: for reports.

    Raises:
        Violation: TRANSFER_BOUNDS. ArgumentError: an unknown region, too many rows, or rows that overlap there.
    """
    if len(copies) > max_rows:
        raise ArgumentError(
            f"{len(copies)} rows in one write; {name} takes {max_rows}",
            value=len(copies),
            remedy="cut it with `transport.plan.chunked`",
        )
    sources = _inside(here, copies.source_regions, copies.source_offsets, copies, "source", where)
    targets = _inside(there, copies.target_regions, copies.target_offsets, copies, "target", where)
    ends = targets + copies.lengths
    if (targets[1:] >= ends[:-1]).all():  # in order, as the plan makes them: nothing to sort
        return sources, targets
    order = np.argsort(targets, kind="stable")
    overlaps = targets[order][1:] < ends[order][:-1]
    if overlaps.any():
        row = int(order[1:][overlaps][0])
        raise ArgumentError(
            f"row {row} of a write lands on bytes of another row", value=row, remedy="name each destination once"
        )
    return sources, targets


def _inside(regions: ByIndex, indices: Ints, offsets: Ints, copies: Copies, side: str, where: Where) -> Ints:
    if not len(copies):
        return np.empty(0, dtype=np.int64)
    there: Where = {**where, "operation": f"write ({side})"}
    first = int(indices[0])
    if (indices == first).all():  # one layer
        region = _region(regions, first, side)
        invariants.transfer_bounds(offsets, copies.lengths, 0, region.nbytes, **there)
        return offsets + region.address
    present = np.unique(indices)
    found = [_region(regions, index, side) for index in present.tolist()]
    which = np.searchsorted(present, indices)
    sizes = np.array([region.nbytes for region in found], dtype=np.int64)[which]
    invariants.transfer_bounds(offsets, copies.lengths, 0, sizes, **there)
    begins: Ints = np.array([region.address for region in found], dtype=np.int64)[which]
    return begins + offsets


def _region(regions: ByIndex, index: int, side: str) -> Region | RemoteRegion:
    if index not in regions:
        raise ArgumentError(
            f"{side} region {index} is not registered",
            value=index,
            remedy="register memory before the endpoint is made, and use the indices of `Region`",
        )
    return regions[index]
