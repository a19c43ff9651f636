"""Which bytes of a token's row go from which source rank to which target rank, whatever the two degrees.

Each byte of a target row is written by exactly one source rank. Where several ranks hold the same heads, the targets
that need them are spread over those ranks.
"""

from typing import final

import attrs

from batchstate.transport.layout import Held, KVLayout, held_by


@final
@attrs.frozen
class Slice:
    """Consecutive bytes of a token's row, in each buffer the same.

    Attributes:
        source_offset: where they begin in the row of the source rank.
        target_offset: where they begin in the row of the target rank.
        nbytes: how many, at least one.
    """

    source_offset: int
    target_offset: int
    nbytes: int


def slice_between(source: KVLayout, target: KVLayout) -> Slice | None:
    """What the source's rank writes into a row of the target's rank, or None if it writes nothing there.

    The layouts fit (`layout.check_fit`).
    """
    ours, theirs = source.held, target.held
    if not _writes(ours, theirs):
        return None
    first = max(ours.first, theirs.first)
    heads = min(ours.first + ours.heads, theirs.first + theirs.heads) - first
    size = target.head_bytes
    return Slice((first - ours.first) * size, (first - theirs.first) * size, heads * size)


def sources_of(target: KVLayout, source_degree: int) -> tuple[int, ...]:
    """The ranks of a source group of `source_degree` that write into the target's rank, in order.

    Raises:
        ArgumentError: the heads cannot be shared evenly by so many ranks.
    """
    heads = 1 if target.replicated else target.heads
    held = target.held
    source = held_by(0, source_degree, heads)
    first, end = held.first // source.heads, -(-(held.first + held.heads) // source.heads)
    replica = held.replica * source.replicas // held.replicas
    return tuple(group * source.replicas + replica for group in range(first, end))


def _writes(source: Held, target: Held) -> bool:
    meets = source.first < target.first + target.heads and target.first < source.first + source.heads
    return meets and source.replica == target.replica * source.replicas // target.replicas
