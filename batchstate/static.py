"""`StaticBuffers`: the device side of a batch at fixed addresses, which a captured graph reads.

Columns and extras lie one after the other, in the order in which a step packs them, so that `Batch.to_static` is one
copy straight to the inputs of the graph. Rows beyond those of the batch are padding: slot 0, and each column's pad
value. A column whose host side is not a copy is gathered, and copied to its place on the device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import SupportsIndex, TypeVar, final

import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._allocator import size_of
from batchstate._arrays import Array, of_dtype
from batchstate._core import Block
from batchstate._origin import DerivedArrays, Origin
from batchstate._rows import RowState
from batchstate._upload import Extras, append_needs, column_view, extra_array, joined_writes
from batchstate.batch import Batch
from batchstate.errors import ArgumentError, DeclarationError, DtypeError, another_runtime, expected, wrong_shape
from batchstate.mirror import Contract, DeviceSide, rows_of, write_count
from batchstate.runtime.base import Fence, OfThisProcess, Runtime, check_fence
from batchstate.runtime.memory import ALIGNMENT, FixedMemory, ReadyTensor, dtype_of_bits, packed_places, view_at
from batchstate.tables import TableWrite
from batchstate.violations import Where

__all__ = ["StaticBuffers"]

T = TypeVar("T")

_BY_ROW = {"query_start_loc": 1, "kv_start_loc": 1, "kv_page_indptr": 1, "kv_lens": 0, "kv_last_page_len": 0}
"""Arrays of a plan with an element for each row of the graph, and so many more."""

_BYTES_PER_WRITE = 16
"""Bytes of one element of a table write: its index, and a value of the widest dtype."""


@final
class StaticBuffers(OfThisProcess, Mapping[str, torch.Tensor]):
    """Memory for the columns of a batch class, and for extras, at one number of rows: name -> device tensor.

    At first all rows are padding. After `batch.to_static(buffers)` a graph that was captured over its tensors reads
    that batch. The tensors are for reading; each has the same address for as long as the buffers live.

    `rows` are those of the graph. `extras` are arrays by name, of the dtype and shape that each has in every step, such
    as `plan.extras` of a plan that is padded to these rows. The copy has room for `num_writes` elements of table
    writes, by default 32 per row: a new page of 16 tokens in each. More of them, or more rows of device-only columns on
    the host than the buffers have, take a second copy.

    Attributes:
        num_reqs: requests of the batch that is in it; padded rows follow them.

    Raises:
        ShapeError: an array of a plan whose shape follows from the rows is of other rows. ArgumentError, DtypeError.
    """

    def __init__(
        self,
        runtime: Runtime,
        batch: type[Batch],
        *,
        rows: SupportsIndex,
        extras: Mapping[str, object] | None = None,
        num_writes: SupportsIndex | None = None,
    ) -> None:
        runtime.check_owner("StaticBuffers")
        self.runtime = runtime
        self.rows = size_of(rows, "StaticBuffers: rows", least=1)
        if runtime.agreement is not None:
            runtime.agreement.note_memory("graph", self.rows)
        self.num_reqs = 0
        self._write_count: int | None = None
        self._held: dict[str, Array] = {}  # at `full`: the contents of the device after the last step
        self._version = 0
        self._origin: Origin | None = None
        self._batch = batch
        layout = batch._layout
        self._columns = layout.tensors
        self._extras = {name: extra_array(name, array) for name, array in (extras or {}).items()}
        twice = [name for name in self._extras if name in batch.columns()]
        if twice:
            raise ArgumentError(f"extras are named as columns: {twice}", twice, "rename the extras")
        for name, more in _BY_ROW.items():
            shape = self._extras[name].shape if name in self._extras else (self.rows + more,)
            if shape != (self.rows + more,):
                problem = f"StaticBuffers of {self.rows} rows: extra {name!r}"
                remedy = f"plan for the rows of the graph: ForwardPlan.of(batch.pad({self.rows}).slots, ...)"
                raise wrong_shape(problem, (self.rows + more,), shape, remedy)
        writes = 32 * self.rows if num_writes is None else size_of(num_writes, "StaticBuffers: num_writes")
        # Packed as a step packs them: the mirrored columns, the extras, and room for the rest of a step.
        block = Block(layout.core, self.rows)
        places, used = packed_places([*self._extras.values()], block.start(layout.core.num))
        room = writes * _BYTES_PER_WRITE + 2 * ALIGNMENT
        for column in layout.tensors.values():
            if column.contract is not Contract.EXACT:  # to gather it: an index, an amount, rows that are on the host
                room += self.rows * (16 + 2 * column.pad.nbytes) + 4 * ALIGNMENT
        end = packed = -(-(used + room) // ALIGNMENT) * ALIGNMENT
        at = dict(zip(self._extras, places, strict=True))
        for name, column in layout.tensors.items():
            if name not in layout.index:
                at[name] = (end, column.np_dtype, (self.rows, *column.shape))
                end += -(-self.rows * column.pad.nbytes // ALIGNMENT) * ALIGNMENT
        self._fixed = FixedMemory(runtime, runtime.device_zeros((end,), torch.uint8, name="static buffers"))
        self._views = {name: column_view(self._fixed.memory, layout, block, name, {}) for name in layout.index}
        for name, place_of in at.items():
            view = view_at(self._fixed.memory, place_of)
            dtype = self._columns[name].dtype if name in self._columns else dtype_of_bits(place_of[1])
            self._views[name] = view if dtype is None else of_dtype(view, dtype)
        self._fixed_part = self._fixed.memory[:used]
        self._packed_part = self._fixed.memory[:packed]
        self.receive(batch.empty(runtime), (), self._extras)
        for view in self._views.values():
            runtime.own_rows(view, lambda rows: np.full(rows.size, runtime.step), by_step=True)

    def __repr__(self) -> str:
        return f"StaticBuffers({self._batch.__name__}, {self.num_reqs} requests in {self.rows} rows)"

    def __getitem__(self, name: str) -> torch.Tensor:
        """A column `[rows, *shape]` or an extra, safe to read on the current stream; the same tensor each time."""
        self.runtime.check_owner("StaticBuffers")
        view = self._views[name]
        self._fixed.ordered()
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def bind(self, replay: Callable[[], T]) -> Callable[[Batch], T]:
        """The replay of a graph that was captured over these buffers, as a function of its batch.

        The function refuses another batch than the one in the buffers (DERIVED_STALE, at `cheap`), arrays of a plan
        whose pages have changed since, and a request that has left (SLOT_STALE_HANDLE). The replay waits for the copy
        on the device, and the next copy for the replay; the host does not wait.

        `replay` launches the graph on the current stream, such as `torch.cuda.CUDAGraph.replay`.
        """

        def run(batch: Batch) -> T:
            self.runtime.check_owner("StaticBuffers: replay")
            if levels.cheap:
                where, other = self._where("replay"), np.array(batch.version != self._version)
                versions = f"batch version {batch.version}", self._version or "none"
                invariants.derived_stale(other, lambda _: ("the graph would run another batch", *versions), **where)
                batch.check_live("replay")
                if self._origin is not None:
                    self._origin.check(**where)
            if levels.full:
                self._check_unwritten("replay")
            self._fixed.ordered()
            returned = replay()
            self._fixed.read_until(self.runtime.record())
            return returned

        return run

    def _where(self, operation: str) -> Where:
        return {"object": self, "operation": operation, "step": self.runtime.step}

    def read_until(self, fence: Fence) -> None:
        """Declares that a launched graph reads until `fence`. A step that is written on another stream waits for it."""
        self.runtime.check_owner("StaticBuffers.read_until")
        check_fence(fence, "StaticBuffers.read_until", needed=True)
        self._fixed.read_until(fence)

    def receive(self, batch: Batch, writes: Sequence[TableWrite], extras: Mapping[str, object]) -> Extras:
        """Fills the buffers with a step that `Batch.to_static` has checked."""
        if levels.cheap:
            self._check_unwritten("to_static")
        arrays = self._checked(batch, extras)
        padded = batch if batch.num_rows == self.rows else batch.pad(self.rows)
        state = padded.device_side.state
        joined = joined_writes(self.runtime, writes) if writes else []
        fixed = [state.crossing(), *arrays.values()]
        others: list[Array] = []
        needs = append_needs(others, state)
        first_write = len(others)
        for write in joined:
            others += (write.index, write.values)
        where, group = self._where("to_static"), self.runtime.agreement
        if group is not None:
            group.note(np.array([self.rows, batch.num_reqs]))
        for name, rows in state.device.items():
            rows.check_sources(self.runtime, {**where, "column": name})  # before anything is written
        upload = self.runtime.upload
        self._fixed.await_readers()
        self._version = 0  # after an error below, the buffers do not hold a batch
        try:
            if others and packed_places([*fixed, *others])[1] > self._packed_part.numel():
                copied, packed, skipped = upload(fixed, into=self._fixed_part), upload(others), 0  # there is no room
            else:
                into, skipped = self._packed_part if others else self._fixed_part, len(fixed)
                copied = packed = upload([*fixed, *others], into=into)
            self.num_reqs = batch.num_reqs
            for name, rows in state.device.items():
                crossed = [packed.view(skipped + index) for index in needs[name]]
                gathered = rows.gathered(self.runtime, crossed, self[name].dtype, {**where, "column": name})
                source = gathered.on_current_stream(self.runtime)
                target = self._views[name].data  # without a count of writes: this one is not from outside
                launched = f"static: {name}"
                self.runtime.launch(target.copy_, source, reads=(source,), writes=(target,), name=launched)
                if len(batch.device_side.state.device[name].sources) > 1:  # each is memory kept alive
                    batch.device_side.start_from(name, gathered)
            for i, write in enumerate(joined):
                at = skipped + first_write + 2 * i
                write.table.launch_checked(write, packed.view(at), packed.view(at + 1))
        finally:  # after the scatters too, which read the copy; and also where one of them failed
            self._fixed.note_write()
            self._write_count = write_count(self._fixed.memory)
        if levels.full and not self.runtime.checks_suspended():
            self._check(state, arrays)
        self._version, self._origin = batch.version, None
        if isinstance(extras, DerivedArrays):  # of a plan: the forward may change them, and does
            self._origin = extras.origin
            self._held = {name: rows for name, rows in self._held.items() if name in self._columns}
        places = {name: 1 + i for i, name in enumerate(arrays)}
        slots, column = None, self._batch._slot_column
        if column is not None:
            slots = state.column(column), DeviceSide(ReadyTensor.uploaded(self._views[column], copied))
        return Extras(self.runtime, copied, places, dict(extras), slots)

    def _check_unwritten(self, operation: str) -> None:
        """Reports a write from outside since the last step, once, as the next one rewrites them."""
        where = self._where(operation)
        held, self._held = self._held, {}
        if levels.full and not self.runtime.checks_suspended():
            for name, rows in held.items():
                of_column: Where = {**where, "column": name}
                invariants.mirror_foreign_write("device", rows, rows_of(self.runtime, self[name]), **of_column)
            self._held = held
        before, self._write_count = self._write_count, write_count(self._fixed.memory)
        if before is not None and self._write_count is not None:
            invariants.mirror_foreign_write("device", before, self._write_count, **where)

    def _checked(self, batch: Batch, extras: Mapping[str, object]) -> dict[str, Array]:
        subject = f"{type(batch).__name__}.to_static"
        if type(batch) is not self._batch:
            problem = f"{subject}: expected buffers of {type(batch).__name__}, got buffers of {self._batch.__name__}"
            raise DeclarationError(problem, self, "make StaticBuffers for each batch class")
        if batch.runtime is not self.runtime:
            raise another_runtime(subject, self)
        if batch.num_rows > self.rows:
            problem = f"{subject}: {batch.num_rows} rows into buffers of {self.rows}"
            raise ArgumentError(problem, batch.num_rows, "use the buffers of a larger graph, or `split` the batch")
        if extras.keys() != self._extras.keys():
            missing, undeclared = (
                sorted(a.keys() - b.keys()) for a, b in ((self._extras, extras), (extras, self._extras))
            )
            problem = f"{subject}: extras missing: {missing}; not declared: {undeclared}"
            raise ArgumentError(problem, missing or undeclared, "give the extras that the buffers were made with")
        arrays = {name: extra_array(name, extras[name], subject) for name in self._extras}
        for name, declared in self._extras.items():
            array, label = arrays[name], f"{subject}: extra {name!r}"
            if array.dtype != declared.dtype:
                raise expected(label, declared.dtype, array.dtype, "keep the dtype that was captured", DtypeError)
            if array.shape != declared.shape:
                remedy = "pad it to the rows of the graph: what is not written would be of an earlier step"
                raise wrong_shape(label, declared.shape, array.shape, remedy)
        return arrays

    def _check(self, state: RowState, extras: Mapping[str, Array]) -> None:
        """The device holds the sent values in every row. Reads it back: at `full` alone."""
        self._held = {name: rows_of(self.runtime, view) for name, view in self._views.items()}
        for name, device in self._held.items():
            column = self._columns.get(name)
            where: Where = {**self._where("to_static"), "column": name}
            if column is None:
                invariants.mirror_equal(extras[name], device, **where)
                continue
            invariants.tail_stale(device[self.num_reqs :], column.pad, self.num_reqs, **where)
            rows = state.device.get(name)
            if name in state.layout.index:
                invariant = invariants.mirror_equal if rows is None else invariants.mirror_bound
                invariant(state.column(name), device, **where)
            contents = None if rows is None else rows.contents(self.runtime)
            if contents is not None:
                invariants.mirror_equal(contents[1], device, **where)
