"""The declaration of a planner, and arrays that cross with a step besides its own."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import attrs
import numpy as np
import torch

from batchstate._allocator import Transaction
from batchstate._arrays import Array, Ints
from batchstate._core import Indices, StepRules
from batchstate._rows import RowState
from batchstate.errors import DeclarationError
from batchstate.kv.pages import PagePool
from batchstate.runtime.base import Runtime
from batchstate.runtime.memory import ALIGNMENT
from batchstate.tables import TableWrite
from batchstate.violations import Code

if TYPE_CHECKING:
    from batchstate.future_map import FutureMap


TAKEN = Code.SLOT_STALE_HANDLE, Code.DERIVED_STALE, Code.PAGE_UNWRITTEN, Code.FUTURE_CONSUMED
NO_IDS: Ints = np.zeros(0, dtype=np.int64)


@final
@attrs.frozen(eq=False)
class Declared:
    """The declaration of a planner; see `StepPlanner`.

    Attributes:
        index: number of each mirrored column in a block.
        lengths, accepted: fields that `PlannedStep.accept` alone publishes; both or none.
        read: the fields whose entries `inputs` takes.
        flat: the relay's fields of ids as one vector; None where no ids come from a relay.
        places: int64[most], where id i of a request lies behind the first element of its slot.
        least: the fewest ids that the relay has of a request; fewer than `most` where the last field is ragged.
        rules: the same, for the core.
        asked: the invariants that `inputs` asks of requests which the relay feeds.
    """

    pages: PagePool
    relay: "FutureMap | None"
    index: Mapping[str, int]
    seq_lens: str
    kv_offset: str | None
    ids: tuple[str, ...]
    lengths: str | None
    accepted: str | None
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
    asked: tuple[Code, ...] = attrs.field(init=False)
    runtime: Runtime = attrs.field(init=False)
    transaction: Transaction = attrs.field(init=False)
    id_dtype: torch.dtype = attrs.field(init=False)
    pool_id: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        def put(**values: object) -> None:
            for name, value in values.items():
                object.__setattr__(self, name, value)

        pages, relay, stride = self.pages, self.relay, 0
        table = pages.req_to_token
        put(slots=pages.slots._allocator.core, runtime=pages.runtime, transaction=pages.slots.transaction)
        put(id_dtype=torch.int32 if "input_ids" in self.int32 else torch.int64, pool_id=pages.slots.pool_id)
        put(read=self.ids if self.lengths is None else (*self.ids, self.lengths))
        if relay is not None and self.lengths is not None:
            for name in (self.lengths, str(self.accepted)):
                relay.check_lengths_field(name)
                relay._published.pop(name, None)
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
            written=NO_IDS.copy() if table is None else table._written,
            read=[] if relay is None else [relay._entries.fields[name] for name in self.read],
        )
        codes = (Code.FUTURE_UNWRITTEN, Code.FUTURE_GENERATION, Code.FUTURE_CONSUMED)
        put(rules=rules, asked=(*TAKEN, *codes * len(self.read)))


@final
@attrs.frozen(eq=False)
class Joined:
    """Requests that join.

    Attributes:
        state: their rows.
        num_reqs: how many.
        pool_id: of their slots; None if the step takes slots for them.
    """

    state: RowState
    num_reqs: int
    pool_id: int | None


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
