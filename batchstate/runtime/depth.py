"""How many steps an engine declares to have under way."""

import operator
from typing import SupportsIndex

from batchstate.errors import ArgumentError, DtypeError


def declared_depth(steps_in_flight: SupportsIndex) -> int:
    """`steps_in_flight` as a positive int.

    Raises:
        DtypeError, ArgumentError: it is none.
    """
    remedy = "declare 1 for a synchronous engine, 2 for one step of overlap"
    problem = f"steps_in_flight is {steps_in_flight!r}"
    if isinstance(steps_in_flight, bool):
        raise DtypeError(problem, value=steps_in_flight, remedy=remedy)
    try:
        depth = operator.index(steps_in_flight)
    except TypeError:
        raise DtypeError(problem, value=steps_in_flight, remedy=remedy) from None
    if depth < 1:
        raise ArgumentError(problem, value=depth, remedy=remedy)
    return depth
