"""Names of streams in reports, each once."""

import itertools
from collections.abc import Collection


def unused_name(name: str, taken: Collection[str]) -> str:
    """The name itself, or with the first number from 2 on that makes it another than those that are taken."""
    numbered = (f"{name} {number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], numbered) if one not in taken)
