"""What a forward plan is given, read and checked on the host."""

import numpy as np
import numpy.typing as npt

from batchstate.contracts import Contract
from batchstate.errors import ArgumentError, ShapeError
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.values.host_arrays import as_array, check_range, converted
from batchstate.values.integers import amounts

Ints = npt.NDArray[np.int64]


def handles_of(slots: Slots, rows: Ints) -> Slots:
    """The handles in some rows, without a device side of their own."""
    if len(rows) == len(slots):
        return slots
    return Slots.of_pool(slots.runtime, slots.np[rows], slots.generations[rows], pool=slots.pool, name=slots.name)


def num_live(slots: Slots) -> int:
    """Rows before the padding at the end."""
    used = np.flatnonzero(slots.np)
    return int(used[-1]) + 1 if used.size else 0


def lengths(seq_lens: object, num_reqs: int, num_rows: int, what: str) -> tuple[Ints, MirroredTensor | None]:
    """Lengths int64[num_reqs], and the column if they are bounds."""
    if isinstance(seq_lens, MirroredTensor) and seq_lens.unit is None and seq_lens.contract is Contract.UPPER_BOUND:
        return per_request(seq_lens.np, num_reqs, num_rows, f"{what}: seq_lens"), seq_lens
    return per_request(as_array(seq_lens, f"{what}: seq_lens"), num_reqs, num_rows, f"{what}: seq_lens"), None


def per_request(numbers: object, num_reqs: int, num_rows: int, what: str) -> Ints:
    """One number a request, int64[num_reqs]; those of padded rows are dropped."""
    array = as_array(numbers, what)
    rows = num_rows if array.ndim == 1 and array.shape[0] == num_rows else num_reqs
    given = amounts(array, rows, what)
    return np.full(num_reqs, given, dtype=np.int64) if given.ndim == 0 else given[:num_reqs]


def check_queries(queries: Ints, lens: Ints, what: str) -> None:
    """Refuses a request that puts in more than it has, and lengths beyond what kernels count."""
    check_range(0, max(int(lens.max(initial=0)), int(queries.sum())), np.dtype(np.int32), f"{what}: tokens")
    wrong = np.flatnonzero((queries < 0) | (queries > lens))
    if wrong.size:
        row = int(wrong[0])
        raise ArgumentError(
            f"{what}: row {row} puts in {queries[row]} tokens of {lens[row]}",
            value=int(queries[row]),
            remedy="seq_lens counts the tokens of this step too; a request puts in 0 to seq_len of them",
        )


def known_ids(prompt_ids: object, queries: Ints, num_rows: int, what: str) -> list[Ints | None]:
    """The ids that the host knows, for each request; None where the relay has them."""
    num_reqs = len(queries)
    if prompt_ids is None:
        return [None] * num_reqs
    if isinstance(prompt_ids, list | tuple) and len(prompt_ids) == num_rows:
        prompt_ids = prompt_ids[:num_reqs]
    if not isinstance(prompt_ids, list | tuple) or len(prompt_ids) != num_reqs:
        size = len(prompt_ids) if isinstance(prompt_ids, list | tuple) else type(prompt_ids).__name__
        raise ShapeError(
            f"{what}: prompt_ids of {size} for {num_reqs} requests",
            value=size,
            remedy="pass a list with the ids of each request, and None for those that the relay feeds",
        )
    given: list[Ints | None] = []
    for row, ids in enumerate(prompt_ids):
        array = None if ids is None else converted(ids, np.dtype(np.int64), f"{what}: prompt_ids of row {row}")
        if array is not None and array.ndim != 1:
            raise ShapeError(
                f"{what}: prompt_ids of row {row} are {list(array.shape)}",
                value=array.shape,
                remedy="pass one dimension of ids; None where there are none",
            )
        if array is not None and len(array) != queries[row]:
            raise ShapeError(
                f"{what}: {len(array)} ids for the {queries[row]} tokens of row {row}",
                value=len(array),
                remedy="pass exactly the ids of this chunk",
            )
        given.append(array)
    return given


def sample_rows(samples: object, queries: Ints, num_rows: int, what: str) -> Ints:
    """Rows that sample, int64[s]; each has a last token."""
    num_reqs = len(queries)
    mask = np.ones(num_reqs, dtype=np.bool_) if samples is None else as_array(samples, f"{what}: samples")
    if mask.shape == (num_rows,):
        mask = mask[:num_reqs]
    if mask.shape != (num_reqs,) or (mask.dtype != np.bool_ and mask.size):
        raise ShapeError(
            f"{what}: samples are {mask.dtype}{list(mask.shape)}", value=mask.shape, remedy="pass a mask bool[num_reqs]"
        )
    rows = np.flatnonzero(mask)
    without = rows[queries[rows] == 0]
    if without.size:
        raise ArgumentError(
            f"{what}: the request in row {without[0]} samples and puts in no token",
            value=int(without[0]),
            remedy="pass samples=query_lens > 0",
        )
    return rows
