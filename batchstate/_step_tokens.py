"""`StepTokens`: what the requests of a step put in where they do not all decode: chunks of prompts, or nothing."""

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate._arrays import Array, amounts
from batchstate._origin import DerivedArrays, Origin
from batchstate.forward.plan import STAND_IN, ForwardPlan, rows_that_sample
from batchstate.forward.token_array import TokenArray
from batchstate.indices import Slots
from batchstate.kv.pages import PagePool
from batchstate.mirror import MirroredTensor

Ints = npt.NDArray[np.int64]

_WHAT, _IDS = "StepPlanner", "input_ids"

NAMES = {"positions", "query_start_loc", "kv_lens", "slot_mapping", "last_token_indices", _IDS}
NAMES |= {"sample_slots", "relay_slots", "relay_tokens"}
"""What `StepTokens.arrays` may name."""


def each_puts_in_one(n: int, query_lens: object, prompt_ids: Sequence[object] | None, samples: object) -> bool:
    """Whether each of `n` requests puts in the one token that the relay has for it, and samples."""
    if type(query_lens) is int:
        if query_lens != 1:
            return False
    elif (
        not isinstance(query_lens, np.ndarray)
        or query_lens.dtype.kind not in "iu"
        or query_lens.shape != (n,)
        or np.count_nonzero(query_lens != 1)
    ):
        return False
    if prompt_ids is not None and (len(prompt_ids) != n or [1 for ids in prompt_ids if ids is not None]):
        return False
    return samples is None or (
        isinstance(samples, np.ndarray)
        and samples.dtype == np.bool_
        and samples.shape == (n,)
        and np.count_nonzero(samples) == n
    )


@final
@attrs.frozen(eq=False)
class StepTokens:
    """The tokens of a step, of n requests.

    Attributes:
        counts: int64[n], tokens that each puts in.
        starts: int64[n + 1], where those of each begin, and where the last end.
        relay_rows: int64[r], requests whose token the relay has.
        sample_rows: int64[s], requests that sample.
        ids: int64[t], those that the host knows, 0 elsewhere; None where all come from the relay, or none are taken.
        known: whether the host knows any.
    """

    counts: Ints
    starts: Ints
    relay_rows: Ints
    sample_rows: Ints
    ids: Array | None
    known: bool

    @classmethod
    def of(
        cls,
        n: int,
        query_lens: object,
        prompt_ids: Sequence[object] | None,
        samples: object,
        *,
        has_ids: bool,
        fed: int,
    ) -> "StepTokens | None":
        """From the arguments of a plan; None where only the parts serve them, or refuse them.

        `n` are the requests, and `fed` the tokens that the relay has of each; the others are as for `ForwardPlan.of`.

        Raises:
            As `ForwardPlan.of`, for these.
        """
        if isinstance(query_lens, MirroredTensor):
            return None
        counts = amounts(query_lens, n, f"{_WHAT}: query_lens")
        if not counts.ndim:
            counts = counts.repeat(n)
        if 1 in (counts < 0).tobytes():
            return None
        prompts = None if prompt_ids is None else TokenArray(prompt_ids, torch.int64, fill=STAND_IN, non_negative=True)
        given = [] if prompts is None else prompts.known(counts, n, f"{_WHAT}: prompt_ids")
        relayed = counts > 0
        if prompts is not None:
            relayed &= np.array([ids is None for ids in given], dtype=np.bool_)
        relay_rows = relayed.nonzero()[0] if has_ids else np.zeros(0, dtype=np.int64)
        if 1 in (counts[relay_rows] != fed).tobytes():
            return None
        sample_rows = rows_that_sample(samples, counts, n)
        starts = np.zeros(n + 1, dtype=np.int64)
        counts.cumsum(out=starts[1:])
        ids, known = None, False
        if has_ids and relay_rows.size < n:
            known = int(starts[-1]) > relay_rows.size  # these put in one token each
            if prompts is not None and known:
                ids = prompts.laid_out(given, starts, int(starts[-1]))
                ids[starts[relay_rows]] = 0
                prompts.check(ids, {"object": _WHAT, "operation": "plan", "column": _IDS})
            else:
                ids = np.zeros(int(starts[-1]), dtype=np.int64)
        return cls(counts, starts, relay_rows, sample_rows, ids, known)

    def arrays(self, rows: Ints, positions: Ints, locations: Ints, lens: Ints) -> dict[str, Array]:
        """What the forward takes, by name, from the slots int64[n], the places of tokens int64[t], and all lengths."""
        starts, sampling, relayed = self.starts, self.sample_rows, self.relay_rows
        arrays: dict[str, Array] = {
            "positions": positions,
            "query_start_loc": starts.astype(np.int32),
            "kv_lens": lens.astype(np.int32),
            "slot_mapping": locations,
        }
        last = starts[1:] - 1
        if sampling.size == rows.size:
            arrays["last_token_indices"] = last
        else:
            arrays["last_token_indices"], arrays["sample_slots"] = last[sampling], rows[sampling]
        if self.ids is not None:
            arrays[_IDS] = self.ids
            if relayed.size:
                arrays["relay_slots"], arrays["relay_tokens"] = rows[relayed], starts[relayed]
        return arrays

    def plan(
        self,
        slots: Slots,
        lens: Ints,
        arrays: dict[str, Array],
        pages: PagePool,
        origin: Origin,
        *,
        has_ids: bool,
        reach: int | None,
    ) -> ForwardPlan:
        """The plan of the forward; `arrays` are those of `arrays`, and `slots` have crossed with them."""
        t = int(self.starts[-1])
        return ForwardPlan(
            slots=slots,
            num_tokens=t,
            num_padded_tokens=t,
            query_lens=self.counts,
            seq_lens=lens,
            bounds=None,
            relay_rows=self.relay_rows,
            sample_rows=self.sample_rows,
            extras=DerivedArrays(arrays, origin),
            origin=origin,
            pages=pages,
            has_ids=has_ids,
            token_arrays={_IDS: arrays[_IDS]} if self.known else {},
            deferred=False,
            reach=reach,
            shares=pages.shares.last,
        )
