"""Laws of mirrored values and of the columns of a batch."""

from collections.abc import Mapping
from typing import Unpack

import numpy as np

from batchstate.laws.catalog import Array, Ints, bits, broken, first_row, law, made, rows_hit
from batchstate.violations import Code, Where


@law(
    Code.MIRROR_EQUAL,
    asked="full",
    remedy="one side was written alone: change the value through an operation that acts on both sides",
    origins=("sglang #25944", "sglang #26020", "sglang #18647", "vllm #48419"),
)
def mirror_equal(host: Array, device: Array, **where: Unpack[Where]) -> None:
    """Host and device side hold the same dtype, shape and bits.

    Cost: reads the device side back. Broken by writing one side alone, or by an operation that forgets one side.
    """
    made[Code.MIRROR_EQUAL] += 1
    _same_kind(Code.MIRROR_EQUAL, host, device, where)
    unequal = bits(host) != bits(device)
    if unequal.any():
        row = first_row(unequal)
        broken(
            Code.MIRROR_EQUAL,
            f"the device side differs from the host side in {rows_hit(unequal)} of {len(host)} rows",
            where,
            expected=host[row],
            actual=device[row],
            row=row,
        )


@law(
    Code.MIRROR_BOUND,
    asked="full",
    remedy="raise the host bound before the forward that may exceed it is launched, or resolve the exact value",
    origins=("sglang #26128", "sglang #28480"),
)
def mirror_bound(host: Array, device: Array, **where: Unpack[Where]) -> None:
    """Under contract `upper_bound` every host element is at least its device element.

    Cost: reads the device side back. Broken by adding on the device more than was added on the host.
    """
    made[Code.MIRROR_BOUND] += 1
    _same_kind(Code.MIRROR_BOUND, host, device, where)
    above = device > host
    if above.any():
        row = first_row(above)
        broken(
            Code.MIRROR_BOUND,
            f"the device side exceeds the host bound in {rows_hit(above)} of {len(host)} rows",
            where,
            expected=f"at most {host[row]}",
            actual=device[row],
            row=row,
        )


@law(
    Code.MIRROR_STALE_READ,
    asked="always",
    remedy="read the other side, or read after the stale window has closed",
    origins=("sglang #25944", "sglang #30435"),
)
def mirror_stale_read(side: str, reasons: tuple[str, ...], **where: Unpack[Where]) -> None:
    """No side is read while a window declares it stale. `reasons` are those of the open windows of that side.

    Cost: one branch. Broken by planning with lengths that a launched verification is about to change.
    """
    made[Code.MIRROR_STALE_READ] += 1
    if reasons:
        broken(
            Code.MIRROR_STALE_READ,
            f"the {side} side was read while it is declared stale",
            where,
            expected=f"no read of the {side} side",
            actual=f"a read, although {'; '.join(reasons)}",
        )


@law(
    Code.MIRROR_FOREIGN_WRITE,
    asked="cheap",
    remedy="values are immutable: replace the write in place by `update`, `+ n` or `evolve`, which return a new value",
    origins=("sglang #8056", "sglang free_group view", "vllm #50432"),
)
def mirror_foreign_write(side: str, expected: int, actual: int, **where: Unpack[Where]) -> None:
    """The mark of a side's memory is the one taken when the value was made.

    The mark is torch's version counter at `cheap` and a checksum of the host memory at `full`. Cost: one comparison
    of two numbers at `cheap`, one pass over the host side at `full`. Broken by writing in place through a tensor or
    array that the value handed out.
    """
    made[Code.MIRROR_FOREIGN_WRITE] += 1
    if expected != actual:
        broken(
            Code.MIRROR_FOREIGN_WRITE,
            f"the {side} side was written in place from outside",
            where,
            expected="no write since the value was made",
            actual=f"at least one (mark {actual}, was {expected})",
        )


@law(
    Code.MIRROR_ALIASED,
    asked="full",
    remedy="give each side memory of its own: copy before pairing (`.to('cpu')` and `from_numpy` alias on CPU)",
    origins=("sglang #34076", "vllm #43894"),
)
def mirror_aliased(host: tuple[int, int], device: tuple[int, int], **where: Unpack[Where]) -> None:
    """The two sides share no byte; each is given as (first address, address after the last), empty when equal.

    Cost: four comparisons. Broken on CPU, where `.to("cpu")` and `torch.from_numpy` return the same memory: such a
    pair always agrees, and every other check on it would be vacuous.
    """
    made[Code.MIRROR_ALIASED] += 1
    start, stop = max(host[0], device[0]), min(host[1], device[1])
    if start < stop:
        broken(
            Code.MIRROR_ALIASED,
            f"host and device side share {stop - start} bytes of memory",
            where,
            expected="disjoint memory",
            actual=f"{start:#x} to {stop:#x} on both sides",
        )


@law(
    Code.ROW_COUNT,
    asked="cheap",
    remedy="every column takes part in every operation: declare the column, do not carry it beside the batch",
    origins=("sglang #18647", "sglang #7585", "sglang #40629", "vllm #48419"),
)
def row_count(expected: int, actual: Mapping[str, int], **where: Unpack[Where]) -> None:
    """Every column of a batch has exactly as many rows as the batch has requests. `actual` maps column -> rows.

    Cost: one comparison a column. Broken by an operation that forgets a column.
    """
    made[Code.ROW_COUNT] += 1
    for column, rows in actual.items():
        if rows != expected:
            broken(
                Code.ROW_COUNT,
                f"column {column!r} has {rows} rows in a batch of {expected}",
                {**where, "column": column},
                expected=expected,
                actual=rows,
            )


@law(
    Code.TAIL_STALE,
    asked="cheap",
    remedy="padding writes the declared pad value into every padded row of every column, each step anew",
    origins=("lmdeploy#4569", "sglang #15132", "sglang #18647", "vllm #42494"),
)
def tail_stale(tail: Array, pad: object, start: int, **where: Unpack[Where]) -> None:
    """Rows beyond the last request hold the column's pad value. `tail` is those rows, `start` the first of them.

    Cost: one comparison a padded element. Broken by reusing a padded buffer without resetting its tail.
    """
    made[Code.TAIL_STALE] += 1
    filler: Array = np.asarray(pad)
    dirty = (tail != filler) & ~((tail != tail) & (filler != filler))  # a pad of NaN is kept by NaN
    if dirty.any():
        row = first_row(dirty)
        broken(
            Code.TAIL_STALE,
            f"{rows_hit(dirty)} padded rows hold old values",
            where,
            expected=pad,
            actual=tail[row],
            row=start + row,
        )


@law(
    Code.SENTINEL_ESCAPED,
    asked="cheap",
    remedy="resolve or mask placeholders before they are used as an index; -1 is the last row in Python",
    origins=("sglang #36880", "sglang #25944", "vllm #40768", "vllm #48245", "vllm #43810"),
)
def sentinel_escaped(indices: Ints, **where: Unpack[Where]) -> None:
    """No negative number is used as an index.

    Cost: one minimum. Broken by a placeholder such as -1 that reaches a gather, a scatter or an embedding.
    """
    made[Code.SENTINEL_ESCAPED] += 1
    if indices.size and indices.min() < 0:
        row = first_row(indices < 0)
        broken(
            Code.SENTINEL_ESCAPED,
            "a negative placeholder is used as an index",
            where,
            expected="0 or more",
            actual=indices[row],
            row=row,
        )


@law(
    Code.UNIT_MISMATCH,
    asked="always",
    remedy="convert with a function that names the page size and the token count, or pass the other index",
    origins=("sglang #31482", "sglang #24039", "sglang #22453", "sglang #26427"),
)
def unit_mismatch(expected: str, actual: str, **where: Unpack[Where]) -> None:
    """An index is used in the index space it belongs to (slot, page, token, host token).

    Cost: one comparison. Broken by page ids where tokens are meant, or host tokens where device tokens are meant.
    """
    made[Code.UNIT_MISMATCH] += 1
    if expected != actual:
        broken(
            Code.UNIT_MISMATCH,
            f"indices of unit {actual!r} were given where {expected!r} is meant",
            where,
            expected=expected,
            actual=actual,
        )


def _same_kind(code: Code, host: Array, device: Array, where: Where) -> None:
    if host.dtype != device.dtype or host.shape != device.shape:
        broken(
            code,
            "the two sides differ in dtype or shape",
            where,
            expected=f"{host.dtype}{list(host.shape)} (host)",
            actual=f"{device.dtype}{list(device.shape)} (device)",
        )
