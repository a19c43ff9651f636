"""The declaration of a planner, and the arguments of a plan: checked, and as arrays."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate._allocator import Transaction
from batchstate._arrays import Array, amounts
from batchstate._core import Indices, StepRules
from batchstate.errors import DeclarationError
from batchstate.forward.plan import STAND_IN, rows_that_sample
from batchstate.forward.token_array import TokenArray
from batchstate.kv.pages import PagePool
from batchstate.runtime.base import Runtime
from batchstate.runtime.memory import ALIGNMENT
from batchstate.tables import TableWrite

if TYPE_CHECKING:
    from batchstate.future_map import FutureMap

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.uint8]

NO_IDS: Ints = np.zeros(0, dtype=np.int64)


@final
@attrs.frozen(eq=False)
class Declared:
    """The declaration of a planner; see `StepPlanner`.

    Attributes:
        index: number of each mirrored column in a block.
        read: the fields whose entries `inputs` takes.
        flat: the relay's fields of ids as one vector; None where no ids come from a relay.
        places: int64[most], where id i of a request lies behind the first element of its slot.
        least: the fewest ids that the relay has of a request; fewer than `most` where the last field is ragged.
        rules: the same, for the core.
    """

    pages: PagePool
    relay: "FutureMap | None"
    index: Mapping[str, int]
    seq_lens: str
    kv_offset: str | None
    ids: tuple[str, ...]
    lengths: str | None
    results: tuple[str, ...]
    has_ids: bool
    int32: frozenset[str]
    window: int | None
    read: tuple[str, ...] = attrs.field(init=False)
    flat: torch.Tensor | None = attrs.field(init=False, default=None)
    places: Ints = attrs.field(init=False, default=NO_IDS)
    least: int = attrs.field(init=False, default=0)
    rules: StepRules = attrs.field(init=False)
    slots: Indices = attrs.field(init=False)
    runtime: Runtime = attrs.field(init=False)
    transaction: Transaction = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        def put(**values: object) -> None:
            for name, value in values.items():
                object.__setattr__(self, name, value)

        pages, relay, stride = self.pages, self.relay, 0
        table = pages.req_to_token
        put(slots=pages.slots._allocator.core, runtime=pages.runtime, transaction=pages.slots.transaction)
        put(read=self.ids if self.lengths is None else (*self.ids, self.lengths))
        if relay is not None and self.lengths is not None:
            relay.check_lengths_field(self.lengths)
        if relay is not None and self.ids:
            least, widths = relay.id_widths(self.ids, self.id_dtype)
            lying = relay.flat_ids(self.ids)
            if lying is None:
                problem = f"StepPlanner: fields {', '.join(self.ids)} do not lie side by side in the relay"
                raise DeclarationError(problem, self.ids, "declare ids of one dtype, of at most 256 bytes each")
            memory, stride, offsets = lying
            parts = [at + np.arange(width) for at, width in zip(offsets, widths, strict=True)]
            put(flat=memory, places=np.concatenate(parts).astype(np.int64), least=least)
        rules = StepRules(
            self.slots,
            pages._rows,
            lens=self.index[self.seq_lens],
            offset=-1 if self.kv_offset is None else self.index[self.kv_offset],
            ids=self.has_ids,
            least=self.least,
            stride=stride,
            window=self.window or 0,
            table=0 if table is None else int(table.shape[1]),
            places=self.places,
            epochs=pages.epochs.rows,
            shares=pages.shares.rows,
        )
        put(rules=rules)

    @property
    def id_dtype(self) -> torch.dtype:
        return torch.int32 if "input_ids" in self.int32 else torch.int64


@final
@attrs.frozen(eq=False)
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
        """From the arguments of a plan of n requests; raises as `ForwardPlan.of`. Ids have to fit into `id_dtype`."""
        if type(query_lens) is int and query_lens == 1 and prompt_ids is None and samples is None:
            return ONE_EACH
        subject, numbers = "StepPlanner: plan", query_lens
        if type(numbers) is not int:
            array = amounts(query_lens, n, f"{subject}: query_lens")
            numbers = array if array.ndim else int(array)
        if type(numbers) is int and numbers > 0 and prompt_ids is None and samples is None:
            return cls(numbers)
        each = np.full(n, numbers, dtype=np.int64)
        told = ids = mask = None
        if prompt_ids is not None:
            prompts = TokenArray(prompt_ids, id_dtype, fill=STAND_IN, non_negative=True)
            rows = prompts.values(np.maximum(each, 0), num_rows, f"{subject}: prompt_ids")
            there = [values for values in rows if values is not None]
            if there:
                told = np.array([values is not None for values in rows], dtype=np.uint8)
                ids = np.concatenate(there).astype(np.int64, copy=False)
                prompts.check(ids, {"object": "StepPlanner", "operation": "plan", "column": "input_ids"})
        sampling = rows_that_sample(samples, each, num_rows)
        if sampling.size < n:
            mask = np.zeros(n, dtype=np.uint8)
            mask[sampling] = 1
        return cls(each if told is not None or mask is not None else numbers, told, ids, mask)

    def each(self, n: int) -> Ints:
        """Tokens of each request, int64[n], a new array."""
        return np.full(n, self.numbers, dtype=np.int64)

    def fed(self, n: int) -> Ints:
        """The requests whose ids the relay has, int64[r]."""
        fed = self.each(n) > 0
        if self.told is not None:
            fed &= self.told == 0
        return np.flatnonzero(fed)

    def sampling(self, n: int) -> Ints:
        """The requests that sample, int64[s]."""
        return np.arange(n) if self.samples is None else np.flatnonzero(self.samples)


ONE_EACH = StepTokens(1)


@final
@attrs.define(eq=False)
class Further:
    """Arrays that cross with a step besides its own.

    Attributes:
        arrays: by name, in the order in which they lie.
        named: name -> what the engine passed for an extra.
        writes: of tables, checked.
        token_arrays: values of single tokens, laid out.
        needs: column that is gathered on the device -> places of its arrays among `arrays`.
    """

    arrays: dict[str, Array] = attrs.field(factory=dict)
    named: dict[str, object] = attrs.field(factory=dict)
    writes: list[TableWrite] = attrs.field(factory=list)
    token_arrays: dict[str, Array] = attrs.field(factory=dict)
    needs: dict[str, range] = attrs.field(factory=dict)

    @property
    def nbytes(self) -> int:
        """Room for them."""
        return sum(array.nbytes + ALIGNMENT for array in self.arrays.values()) if self.arrays else 0


NO_FURTHER = Further()
