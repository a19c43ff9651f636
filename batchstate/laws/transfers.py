"""Laws of the host tier and of what another process writes into it."""

from typing import Unpack

import numpy.typing as npt
from numpy import bool_

from batchstate.laws.catalog import Ints, broken, first_row, law, made
from batchstate.violations import Code, Where


@law(
    Code.TIER_STATE,
    asked="always",
    remedy="follow the states: reserve or stage, wait until the KV is there, admit, decode, release",
    origins=("sglang #27258", "sglang #21591", "sglang #22453"),
)
def tier_state(
    slots: Ints,
    states: Ints,
    allowed: tuple[int, ...],
    names: tuple[str, ...],
    *,
    missing: Ints | None = None,
    **where: Unpack[Where],
) -> None:
    """What is asked of a request in the host tier goes with its state. `states` integer[n], of `slots` integer[n].

    `allowed` are the states in which the operation is meant, `names` the name of each state by number; `missing`
    integer[n] says, where the operation needs all of the KV, of how many tokens it has not arrived.
    Cost: one comparison a request. Broken by decoding a request whose KV has not arrived.
    """
    made[Code.TIER_STATE] += 1
    wrong = states != allowed[0]
    for state in allowed[1:]:
        wrong &= states != state
    if wrong.any():
        row = first_row(wrong)
        broken(
            Code.TIER_STATE,
            f"the request on slot {slots[row]} is {names[int(states[row])]}",
            where,
            expected=" or ".join(names[state] for state in allowed),
            actual=names[int(states[row])],
            row=row,
            slot=int(slots[row]),
        )
    if missing is not None and missing.any():
        row = first_row(missing != 0)
        broken(
            Code.TIER_STATE,
            f"the KV of the request on slot {slots[row]} has not arrived",
            where,
            expected="all of it, and a writer that has ended",
            actual=f"{missing[row]} tokens are missing" if missing[row] > 0 else f"{-missing[row]} tokens too many",
            row=row,
            slot=int(slots[row]),
            remedy="admit when the lease of the request is DELIVERED; abort it when the lease has failed",
        )


@law(
    Code.TRANSFER_BOUNDS,
    asked="always",
    remedy="write only rows of the granted run, inside the registered memory, and as many as were agreed on",
    origins=("sglang #31482", "sglang #24527", "sglang #14439"),
)
def transfer_bounds(
    starts: Ints, lengths: Ints, least: Ints | int, most: Ints | int, *, what: str = "bytes", **where: Unpack[Where]
) -> None:
    """Each row [start, start + length) lies in [least, most), and none is empty. All integer[n], bounds also numbers.

    Cost: four comparisons a row. Broken by an index of another space, or by a destination that is not the request's.
    """
    made[Code.TRANSFER_BOUNDS] += 1
    outside = (starts < least) | (lengths <= 0) | (lengths > most - starts)
    if outside.any():
        row = first_row(outside)
        low = least if isinstance(least, int) else least[row]
        high = most if isinstance(most, int) else most[row]
        broken(
            Code.TRANSFER_BOUNDS,
            f"row {row} of a transfer covers {lengths[row]} {what} from {starts[row]} on",
            where,
            expected=f"inside {low} to {high} (exclusive)",
            actual=f"{starts[row]}, {lengths[row]} long",
            row=row,
        )


@law(
    Code.TRANSFER_LATE_WRITE,
    asked="full",
    remedy="keep the memory of a failed transfer until its writer has ended; never free it by time-out alone",
    origins=("sglang #24527", "sglang #35049", "sglang #27372", "sglang #38961", "vllm #32255"),
)
def transfer_late_write(tokens: Ints, changed: npt.NDArray[bool_], **where: Unpack[Where]) -> None:
    """Memory that nobody owns does not change. `changed` bool[n] says so of host tokens integer[n].

    Cost: reads the memory that is freed and handed out. Broken by reusing a run while a peer may still write into it.
    """
    made[Code.TRANSFER_LATE_WRITE] += 1
    if changed.any():
        row = first_row(changed)
        broken(
            Code.TRANSFER_LATE_WRITE,
            f"host token {tokens[row]} was written while it was nobody's",
            where,
            expected="the bytes it was left with",
            actual="other bytes",
            row=row,
            slot=int(tokens[row]),
        )
