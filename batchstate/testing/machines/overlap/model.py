"""What a forward of the overlap machine computes, in Python: a checksum of everything that it reads.

All numbers are integers below `PRIME`, so that host and device agree to the last bit. A value that is read too early,
too late, or from somebody else's memory, changes the next token, and all that come after it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batchstate.testing.machines.overlap.requests import MOST_TOKENS, OnDevice, Request

PRIME = 999_983

SALT, LENGTH, TEMPERATURE, AGE, MARK, ID, NUDGE, LAST, ODD, STATE = 3, 11, 13, 19, 23, 29, 37, 41, 43, 47
"""What each number that a forward reads is multiplied by."""

WEIGHTS = np.arange(1, 2 * MOST_TOKENS + 1, dtype=np.int64).reshape(MOST_TOKENS, 2)
"""What the KV of each position is multiplied by, int64[MOST_TOKENS, 2]."""

_ROWS = WEIGHTS.tolist()


class Outcome(NamedTuple):
    """What a forward leaves for one request: its token, and what it logs for the host."""

    token: int
    log: tuple[int, int]


def kv_row(token: int, position: int) -> tuple[int, int]:
    """The KV of one token."""
    return (token * 31 + position * 17 + 5) % PRIME, (token * 7 + position * 3 + 1) % PRIME


def next_state(state: int, mix: int) -> int:
    """The state of a request after a forward."""
    return (53 * state + 59 * mix + 1) % PRIME


def forward(request: Request, query: int, salt: int, nudge: int) -> Outcome:
    """Runs one request: changes what the device holds for it, and returns what it left."""
    held = request.held
    ids = request.ids(query) or (held.token,)
    held.kv += [kv_row(token, len(held.kv) + at) for at, token in enumerate(ids)]
    held.age += 1
    attended = sum(one * k + two * v for (k, v), (one, two) in zip(held.kv, _ROWS, strict=False)) % PRIME
    mix = _mix(held, attended, ids[-1], salt, nudge)
    held.state = next_state(held.state, mix)
    held.last = mix
    held.odd += mix % 2
    return Outcome(mix, (held.state, attended))


def _mix(held: OnDevice, attended: int, last_id: int, salt: int, nudge: int) -> int:
    return (
        SALT * salt
        + LENGTH * len(held.kv)
        + TEMPERATURE * held.temperature
        + AGE * held.age
        + MARK * sum(held.marks)
        + ID * last_id
        + NUDGE * nudge
        + LAST * held.last
        + ODD * (held.odd + 1)  # the host's step counts until the forward has found out
        + STATE * held.state
        + attended
    ) % PRIME


def column(requests: Sequence[Request], name: str) -> npt.NDArray[Any]:
    """One number of what the device holds for each request, int64[n]."""
    return np.array([getattr(one.held, name) for one in requests], np.int64)
