"""`StepTokens`: how many tokens each request puts in, their ids where the host has them, and who samples."""

from collections.abc import Sequence
from typing import Any, Self, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import Ints, amounts, as_array
from batchstate.errors import ShapeError
from batchstate.forward.token_array import values_of

Mask = npt.NDArray[np.uint8]


@final
@attrs.define(eq=False)
class StepTokens:
    """The tokens of a step.

    Attributes:
        numbers: that each request puts in: one int, or int64[n].
        told: uint8[n], whether the host has the ids of a request; None where it has none.
        ids: those, request by request, int64[...]; None without.
        samples: uint8[n]; None where all do.
    """

    numbers: int | Ints
    told: Mask | None = None
    ids: Ints | None = None
    samples: Mask | None = None

    @classmethod
    def of(
        cls,
        n: int,
        num_rows: int,
        query_lens: object,
        prompt_ids: Sequence[object] | None,
        samples: object,
        id_dtype: torch.dtype = torch.int64,
    ) -> Self:
        """From the arguments of a planner's step of n requests; raises as `ForwardPlan.of`."""
        subject, numbers = "StepPlanner: plan", query_lens
        if type(numbers) is not int or not 0 <= numbers < 2**31:  # not as in a decode step
            array = amounts(query_lens, n, f"{subject}: query_lens")
            numbers = array if array.ndim else int(array)
        if type(numbers) is int and prompt_ids is None and samples is None:
            return cls(numbers)
        each: Any = np.full(n, numbers, dtype=np.int64) if type(numbers) is int else numbers
        tokens = cls.of_each(each, num_rows, prompt_ids, samples, id_dtype, subject)
        if tokens.ids is not None and levels.cheap:
            invariants.sentinel_escaped(tokens.ids, object="StepPlanner", operation="plan", column="input_ids")
        return tokens

    @classmethod
    def of_each(
        cls,
        each: Ints,
        num_rows: int,
        prompt_ids: Sequence[object] | None,
        samples: object,
        id_dtype: torch.dtype,
        subject: str,
    ) -> Self:
        """The same from int64[n] tokens of each. Callers refuse negative ids, and rows that sample without a token."""
        n, told, ids, mask = each.size, None, None, None
        if prompt_ids is not None:
            rows = values_of(prompt_ids, id_dtype, (), np.maximum(each, 0), num_rows, f"{subject}: prompt_ids")
            there = [values for values in rows if values is not None]
            if there:
                told = np.array([values is not None and values.size > 0 for values in rows], dtype=np.uint8)
                ids = np.concatenate(there).astype(np.int64, copy=False)
        if samples is not None:
            does = as_array(samples, f"{subject}: samples")
            if does.shape == (num_rows,):
                does = does[:n]
            if does.shape != (n,) or (does.dtype != np.bool_ and does.size):
                problem = f"{subject}: samples: expected bool[{n}], got {does.dtype}{list(does.shape)}"
                raise ShapeError(problem, does.shape, "pass a mask, one boolean per request")
            mask = None if does.all() else does.astype(np.uint8)
        return cls(each, told, ids, mask)

    def each(self, n: int) -> Ints:
        """Tokens of each request, int64[n], a new array."""
        return np.full(n, self.numbers, dtype=np.int64)

    def fed(self, n: int) -> Ints:
        """The requests whose ids the relay has, int64[r]."""
        fed = self.each(n) > 0
        if self.told is not None:
            fed &= self.told == 0
        return np.flatnonzero(fed)

    def direct(self, n: int, num_rows: int, padded: int) -> bool:
        """Whether the relay has all tokens, as many of each row; see `ForwardPlan.direct`."""
        return self.told is None and n == num_rows > 0 and not np.count_nonzero(self.each(n) * n != padded)

    def sampling(self, n: int) -> Ints:
        """The requests that sample, int64[s]."""
        return np.arange(n) if self.samples is None else np.flatnonzero(self.samples)


ONE_EACH = StepTokens(1)
