"""What can go wrong with a write of the in-process engine, and how often. All choices come from one generator."""

import random
from typing import final

import attrs

from batchstate.transport.engines.base import Status


@final
@attrs.frozen
class Faults:
    """How likely each fault is, 0 to 1 a write. Without arguments nothing goes wrong.

    Attributes:
        delay: most steps before the first byte of a write lands, and before its tag arrives.
        split: its rows are cut in pieces that land at different times, in any order.
        failed: some of it lands, then it ends as FAILED.
        unknown: it is told to be UNKNOWN, and goes on landing, all of it or some.
        stuck: of the unknown ones: it never drains while both ends live.
        lost_tag: all of it lands, and its tag never arrives.
        duplicate_tag: its tag arrives more than once.
        duplicate_rows: some of its bytes are written again before it ends.
        refused: the write raises before anything is sent.
    """

    delay: int = 0
    split: float = 0.0
    failed: float = 0.0
    unknown: float = 0.0
    stuck: float = 0.0
    lost_tag: float = 0.0
    duplicate_tag: float = 0.0
    duplicate_rows: float = 0.0
    refused: float = 0.0


@final
@attrs.frozen
class Fate:
    """What becomes of one write.

    Attributes:
        delay: steps before its first byte.
        split: whether its pieces land one by one.
        ends: what its writer is told.
        share: the part of its pieces that lands, 0 to 1.
        stuck: whether it never drains while both ends live.
        tags: how often its tag arrives, once all of it has landed.
        again: whether some bytes are written a second time.
    """

    delay: int
    split: bool
    ends: Status
    share: float
    stuck: bool
    tags: int
    again: bool


def chosen(faults: Faults, dice: random.Random) -> Fate:
    """The fate of one write."""
    throw = dice.random()
    ends = Status.DONE
    if throw < faults.failed:
        ends = Status.FAILED
    elif throw < faults.failed + faults.unknown:
        ends = Status.UNKNOWN
    tags = 0 if dice.random() < faults.lost_tag else dice.randint(2, 3) if dice.random() < faults.duplicate_tag else 1
    return Fate(
        delay=dice.randint(0, faults.delay),
        split=dice.random() < faults.split,
        ends=ends,
        share=1.0 if ends is Status.DONE else dice.choice((0.0, dice.random(), 1.0)),
        stuck=ends is Status.UNKNOWN and dice.random() < faults.stuck,
        tags=0 if ends is Status.FAILED else tags,
        again=dice.random() < faults.duplicate_rows,
    )
