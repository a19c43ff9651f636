"""Laws of the relay: every entry is written once and read once, by its owner, in the order of the streams."""

from collections.abc import Callable
from typing import Unpack

import numpy as np
import numpy.typing as npt

from batchstate.laws.catalog import Ints, broken, first_row, law, made
from batchstate.violations import Code, Where

Mask = npt.NDArray[np.bool_]
Writer = Callable[[int], str]
"""Says of a row which publish wrote its entry; asked only when a law is broken."""


@law(
    Code.FUTURE_UNWRITTEN,
    asked="cheap",
    remedy="publish or seed the field for this request before it is read; a request that arrives prebuilt, or comes "
    "back, is seeded first",
    origins=("sglang #25945", "vllm #40768", "vllm #48245", "sglang #27258"),
)
def future_unwritten(slots: Ints, written: Mask, reader: str, **where: Unpack[Where]) -> None:
    """An entry is read only after somebody has published it for the slot's present owner. `written` bool[n].

    Cost: one mask. Broken by a first decode step without a token to start from, and by a stand-in for one.
    """
    made[Code.FUTURE_UNWRITTEN] += 1
    if not written.all():
        row = first_row(~written)
        broken(
            Code.FUTURE_UNWRITTEN,
            f"the entry of slot {slots[row]} was read before anybody published it",
            where,
            expected="published",
            actual="unwritten",
            row=row,
            slot=int(slots[row]),
            writer="nobody",
            reader=reader,
        )


@law(
    Code.FUTURE_GENERATION,
    asked="cheap",
    remedy="entries end with their owner: free slots through their pool, and drop results of requests that have left",
    origins=("sglang #11970", "sglang #11976", "sglang #18744"),
)
def future_generation(
    slots: Ints, published: Ints, held: Ints, writer: Writer, reader: str, **where: Unpack[Where]
) -> None:
    """An entry is read by the request that it was published for. Generations int64[n], row by row.

    Cost: one comparison. Broken by a slot that is reused with the entry of its former owner still in it.
    """
    made[Code.FUTURE_GENERATION] += 1
    foreign = published != held
    if foreign.any():
        row = first_row(foreign)
        broken(
            Code.FUTURE_GENERATION,
            f"the entry of slot {slots[row]} was published for another request",
            where,
            expected=f"generation {held[row]}",
            actual=f"generation {published[row]}",
            row=row,
            slot=int(slots[row]),
            generation=int(held[row]),
            writer=writer(row),
            reader=reader,
        )


@law(
    Code.FUTURE_CONSUMED,
    asked="cheap",
    remedy="a published value is taken once by each of its readers: look for a forward that ran twice, a step whose "
    "publish was left out, or inputs installed again after they were used",
    origins=("sglang #25945", "sglang #11970", "sglang #18647"),
)
def future_consumed(slots: Ints, taken: Mask, writer: Writer, reader: str, **where: Unpack[Where]) -> None:
    """A published entry is taken at most once by each of its readers. `taken` bool[n] says who has been there.

    Cost: one mask. Broken by reading again what the last forward read: the step then repeats an old token.
    """
    made[Code.FUTURE_CONSUMED] += 1
    if taken.any():
        row = first_row(taken)
        broken(
            Code.FUTURE_CONSUMED,
            f"the entry of slot {slots[row]} was read before, and nobody has published it anew",
            where,
            expected="published",
            actual="consumed",
            row=row,
            slot=int(slots[row]),
            writer=writer(row),
            reader=reader,
        )


@law(
    Code.FUTURE_UNREAD_OVERWRITTEN,
    asked="cheap",
    remedy="read every entry before the next publish (`prefetch` what the host needs right behind the forward), or "
    "`discard` what nobody wants",
    origins=("sglang-jax#1487", "sglang-jax#1504", "sglang #13713", "sglang #30435"),
)
def future_unread_overwritten(
    slots: Ints, unread: Mask, before: Writer, writer: str, readers: str, **where: Unpack[Where]
) -> None:
    """An entry is overwritten only after each of its readers has taken it. `unread` bool[n].

    Cost: one mask. Broken by a relay ring that wraps, by two publishes in one step, and by results nobody fetched.
    """
    made[Code.FUTURE_UNREAD_OVERWRITTEN] += 1
    if unread.any():
        row = first_row(unread)
        broken(
            Code.FUTURE_UNREAD_OVERWRITTEN,
            f"the entry of slot {slots[row]} by {before(row)} would be overwritten unread",
            where,
            expected=f"read by {readers}",
            actual="unread",
            row=row,
            slot=int(slots[row]),
            writer=writer,
            reader="nobody",
        )


@law(
    Code.FUTURE_ORDER,
    asked="cheap",
    remedy="wait for the fence of the very publish that wrote the entry, and give each publish a fence of its own",
    origins=("sglang #30435", "sglang #30471", "vllm #51571", "vllm #36013", "sglang #26376"),
)
def future_order(ordered: bool, writer: str, reader: str, missing: str, **where: Unpack[Where]) -> None:
    """Whoever touches an entry comes behind the publish that wrote it, and behind those that read it, by its fences.

    `missing` names the order that must hold. Cost: a set lookup or the query of a fence for each publish, not for each
    row. Broken by one event for two publishers, and by a host that reads before its copy has run.
    """
    made[Code.FUTURE_ORDER] += 1
    if not ordered:
        broken(
            Code.FUTURE_ORDER,
            f"nothing orders {reader} behind {writer}",
            where,
            expected=missing,
            actual="no wait for that fence",
            writer=writer,
            reader=reader,
        )
