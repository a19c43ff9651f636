"""Sizes of pools, checked at the door: what the arrays of the books can count."""

from typing import SupportsIndex

from batchstate.errors import ArgumentError
from batchstate.values.host_arrays import count

MOST_INDICES = 2**31 - 2
"""Entries of one pool: tables hold them in int32, and each has a row more than there are entries."""

MOST_TOKENS = 2**62
"""Tokens of one pool: sums of two such numbers are still int64."""


def size_of(value: SupportsIndex, what: str, *, least: int = 0, most: int = MOST_INDICES) -> int:
    """`value` as an int from `least` to `most`.

    Raises:
        DtypeError: no integer.
        ArgumentError: too small or too large.
    """
    number = count(value, what, least=least)
    if number > most:
        raise ArgumentError(f"{what} is {number}", value=number, remedy=f"pass {most} or less")
    return number
