"""`Batch` against a list of dictionaries, and the packed way against moving each column by itself."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.stateful import multiple, rule

from batchstate import invariants
from batchstate.columns import MirroredColumn
from batchstate.contracts import Contract
from batchstate.errors import ArgumentError, ValueOverflowError
from batchstate.indices import Slots
from batchstate.invariants import Code
from batchstate.mirror import MirroredTensor
from batchstate.testing.arithmetic import fits, plus
from batchstate.testing.machine import agree, agree_on
from batchstate.testing.machines.batch_builder import BATCHES, GRAPH_ROWS, BatchBuilder
from batchstate.testing.machines.batch_misuse import MISUSES
from batchstate.testing.machines.batch_model import BOUNDED, COLUMNS, COUNTED, Cell, Decode, Rows, numbers
from batchstate.testing.misuse import Misuse
from batchstate.testing.strategies import amounts, keep_lists, split_sizes

Array = npt.NDArray[Any]


class BatchMachine(BatchBuilder):
    """Moves batches about, changes them and uploads them."""

    NAME = "batch"

    # Moving rows

    @rule(target=BATCHES, one=BATCHES, data=st.data(), look=st.booleans())
    def filter(self, one: Rows, data: st.DataObject, look: bool) -> Rows:
        """`filter` is indexing of the list."""
        keep = data.draw(keep_lists(len(one)), label="keep")
        return self.kept(one.moved(one.batch.filter(keep), [one.rows[at] for at in _rows(keep)]), look=look)

    @rule(target=BATCHES, first=BATCHES, second=BATCHES, look=st.booleans())
    def merge(self, first: Rows, second: Rows, look: bool) -> Any:
        """`merge` is the sum of the lists; a request in both is refused."""
        slots = [int(row["slots"].device) for row in (*first.rows, *second.rows)]
        if len(set(slots)) < len(slots):
            self.reached("a request in both batches refused")
            with self.refused(Code.SLOT_SHARED):
                first.batch.merge(second.batch)
            return multiple()
        return self.kept(self.joined(first, second), look=look)

    @rule(target=BATCHES, one=BATCHES, data=st.data(), look=st.booleans())
    def split(self, one: Rows, data: st.DataObject, look: bool) -> Any:
        """`split` slices the list."""
        sizes = data.draw(split_sizes(len(one)), label="sizes")
        stops = np.cumsum(sizes).tolist()
        pieces = one.batch.split(sizes)
        agree(len(sizes), len(pieces), "pieces of a split")
        return multiple(
            *(
                self.kept(one.moved(piece, one.rows[stop - size : stop]), look=look)
                for piece, size, stop in zip(pieces, sizes, stops, strict=True)
            )
        )

    @rule(one=BATCHES, more=st.integers(0, 2), side=st.booleans())
    def pad(self, one: Rows, more: int, side: bool) -> None:
        """`pad` appends rows of slot 0 and the declared pad values; a padded batch does not move rows."""
        padded = one.moved(one.batch.pad(len(one) + more), one.rows, padding=more)
        padded.judge()
        if more:
            for call in (lambda: padded.batch.filter([]), lambda: padded.batch.pad(9), lambda: padded.batch.split([])):
                with self.refused(ArgumentError):
                    call()
        self.look(padded, side=side)

    # Changing values

    @rule(target=BATCHES, one=BATCHES, data=st.data(), look=st.booleans())
    def advance(self, one: Rows, data: st.DataObject, look: bool) -> Any:
        """`advance` is exact integer arithmetic on both sides, or refused."""
        names = data.draw(st.lists(st.sampled_from(COUNTED), min_size=1, max_size=2, unique=True), label="columns")
        near = amounts(len(one))
        n = data.draw(st.one_of(near, near, near, amounts(len(one), 2**63 - 1, 2**63 - 1)), label="n")
        each = np.broadcast_to(np.asarray(n), len(one)).tolist()
        given = names[0] if len(names) == 1 else names
        if any(not fits(one.side(name, "host"), each) for name in names if name != "last_token"):
            self.reached("overflow refused")
            with self.refused(ValueOverflowError):
                one.batch.advance(given, n)
            return multiple()
        if any(not fits(one.side(name, "device"), each) for name in names):
            return multiple()  # the host cannot know that a number which only the device has leaves its dtype
        batch = one.batch.advance(given, n)
        result = one
        for name in names:
            result = result.changed(batch, name, lambda at, cell: _shifted(cell, each[at]))
        return self.kept(result, look=look)

    @rule(target=BATCHES, one=BATCHES, data=st.data(), look=st.booleans())
    def update(self, one: Rows, data: st.DataObject, look: bool) -> Any:
        """`update` changes some requests; a bounded column is refused, since its host side is no copy."""
        name = data.draw(st.sampled_from(["seq_lens", "temperature", "bias", "accepted"]), label="column")
        rows = list(_rows(data.draw(keep_lists(len(one)), label="rows")))
        new = numbers(name, len(rows), 100)
        if name in one.bounded:
            with self.refused(ArgumentError):
                one.batch.update(name, rows, new)
            return multiple()
        batch = one.batch.update(name, rows, new)
        by_row = dict(zip(rows, new, strict=True))
        updated = one.changed(batch, name, lambda at, cell: Cell(by_row[at], by_row[at]) if at in by_row else cell)
        return self.kept(updated, look=look)

    @rule(
        target=BATCHES,
        one=BATCHES,
        name=st.sampled_from([name for name in COLUMNS if name != "slots"]),
        first=st.integers(0, 9),
        bounds=st.booleans(),
        look=st.booleans(),
    )
    def evolve(self, one: Rows, name: str, first: int, bounds: bool, look: bool) -> Rows:
        """`evolve` gives one column other values, and with them perhaps another contract."""
        value, cells = self.column(name, len(one), first, bounds)
        self.reached("a bound made exact again", name in one.bounded and not bounds)
        changed = one.changed(one.batch.evolve(**{name: value}), name, lambda at, _: cells[at])
        bounded = one.bounded | {name} if name in BOUNDED and bounds else one.bounded - {name}
        return self.kept(Rows(changed.batch, changed.rows, bounded), look=look)

    # To the device

    @rule(one=BATCHES, data=st.data(), side=st.booleans())
    def upload(self, one: Rows, data: st.DataObject, side: bool) -> None:
        """Columns, table writes and derived arrays cross in one copy, and one operation scatters the writes."""
        first = all(one.batch[name].device_side.made is None for name in COLUMNS)
        slots = data.draw(st.lists(st.integers(1, 8), max_size=3, unique=True), label="written slots")
        new = np.arange(len(slots), dtype=np.int32) + self.requests
        halves = np.array_split(np.arange(len(slots)), 2)
        writes = [self.table.entry(np.array(slots)[half], half % 2, new[half]) for half in halves if half.size]
        before = self.rt.counters.snapshot()
        with self.on(side):
            extras = one.batch.upload(writes=writes, extras={"positions": new})
        cost = self.rt.counters - before
        agree((1, 0), (cost.host_to_device_copies, cost.forced_syncs), "copies and forced syncs of an upload")
        if first:
            agree(int(bool(writes)), cost.device_operations, "device operations of an upload")
        agree_on(new, self.rt.inspect(extras["positions"]), "an array that rode along")
        self.reached("table writes of one table joined", len(writes) > 1)
        self.look(one, side=side)

    @rule(one=BATCHES, slots=st.lists(st.integers(1, 8), max_size=3, unique=True), side=st.booleans())
    def to_static(self, one: Rows, slots: list[int], side: bool) -> None:
        """A graph reads the batch where it read the one before, and padding behind it."""
        self.reached("fewer requests in a graph than before", len(one) < self.graph.num_reqs)
        new = np.arange(3, dtype=np.int32) + self.requests
        writes = [self.table.entry(np.array(slots), [0] * len(slots), new[: len(slots)])] if slots else []
        before = self.rt.counters.snapshot()
        with self.on(side):
            one.batch.to_static(self.graph, writes=writes, extras={"positions": new})
        self.graph.before_replay()
        captured = self.captured
        cost = self.rt.counters - before
        padded = Rows(one.batch, one.rows, one.bounded, GRAPH_ROWS - len(one))
        for name in COLUMNS:
            where = f"graph input of {one.batch!r}"
            device = self.rt.inspect(captured[name])
            invariants.mirror_equal(padded.side(name, "device"), device, object=where, column=name, operation="replay")
        agree_on(new, self.rt.inspect(captured["positions"]), "an extra of the graph")
        on_host = max(sum(length for _, length in rows.sources) for rows in one.batch._device_rows.values())
        fits_in_one = on_host <= GRAPH_ROWS
        copies = cost.host_to_device_copies
        agree(
            (fits_in_one, 0), (copies == 1, cost.forced_syncs) if fits_in_one else (copies > 2, 0), "copies of a step"
        )

    @rule(
        target=BATCHES,
        one=BATCHES,
        leaves=st.integers(0, 3),
        n=st.integers(0, 2),
        first=st.integers(0, 9),
        at_once=st.booleans(),
    )
    def step(self, one: Rows, leaves: int, n: int, first: int, at_once: bool) -> Rows:
        """A step of an engine: one leaves, others join under the other contract, all advance, one upload."""
        keep = [at for at in range(len(one)) if at != leaves]
        taken = {int(one.rows[at]["slots"].device) for at in keep}
        free = [slot for slot in range(1, 9) if slot not in taken][: n + 1]
        joining = self.built(free, first, bounds=not one.bounded)
        left = one.moved(one.batch.filter(keep), [one.rows[at] for at in keep])
        both = self.joined(left, joining)
        before = self.rt.counters.snapshot()
        if at_once:
            batch = one.batch.step(keep=keep, joining=joining.batch, advance="seq_lens")
        else:
            batch = both.batch.advance("seq_lens", 1)
        self.reached("leave, join and advance at once", at_once and 0 < len(keep) < len(one) and bool(free))
        batch.upload()
        cost = self.rt.counters - before
        agree((1, 0), (cost.host_to_device_copies, cost.device_operations), "copies and operations of a step")
        return self.kept(both.changed(batch, "seq_lens", lambda _, cell: _shifted(cell, 1)), look=True)

    def joined(self, first: Rows, second: Rows) -> Rows:
        """Two batches of different requests as one."""
        self.reached("merge of exact with bound", first.bounded != second.bounded and bool(len(first) and len(second)))
        merged = first.batch.merge(second.batch)
        return Rows(merged, [*first.rows, *second.rows], first.bounded | second.bounded)

    # Both ways

    @rule(one=BATCHES, data=st.data(), how=st.sampled_from(["filter", "split", "pad", "advance"]))
    def both_ways(self, one: Rows, data: st.DataObject, how: str) -> None:
        """A batch moves its columns as each would move by itself."""
        n = len(one)
        argument: Any = n + 1
        if how == "filter":
            argument = data.draw(keep_lists(n), label="keep")
        elif how == "split":
            argument = data.draw(split_sizes(n), label="sizes")
        for name, column in COLUMNS.items():
            alone, batch = one.batch[name], one.batch
            if how == "filter":
                self._same(alone.filter(argument), batch.filter(argument)[name])
            elif how == "split":
                for mine, theirs in zip(alone.split(argument), batch.split(argument), strict=True):
                    self._same(mine, theirs[name])
            elif how == "pad" and not column.shape:
                self._same(alone.pad(argument, column.pad.item()), batch.pad(argument)[name])
            elif how == "advance" and name in COUNTED and self._fits_both(one, name):
                self._same(alone + 1, batch.advance(name, 1)[name])
        self.reached("packed and single ways compared", n > 0)

    def _fits_both(self, one: Rows, name: str) -> bool:
        sides = ("device", "host") if isinstance(COLUMNS[name], MirroredColumn) else ("device",)
        return all(fits(one.side(name, side), [1] * len(one)) for side in sides)

    @rule(first=BATCHES, second=BATCHES)
    def both_ways_merge(self, first: Rows, second: Rows) -> None:
        """Merging batches merges their columns."""
        slots = [int(row["slots"].device) for row in (*first.rows, *second.rows)]
        if len(set(slots)) == len(slots):
            merged = first.batch.merge(second.batch)
            for name in COLUMNS:
                self._same(first.batch[name].merge(second.batch[name]), merged[name])

    def _same(self, alone: MirroredTensor, packed: MirroredTensor) -> None:
        for one in (alone, packed):
            _ = one.device
            one.check("both ways")
        agree(alone.contract, packed.contract, f"contract of {packed!r}")
        if alone.contract is not Contract.DEVICE_ONLY:
            agree_on(alone.np, packed.np, f"host side of {packed!r}")
        both = self.rt.inspect(alone.device), self.rt.inspect(packed.device)
        invariants.mirror_equal(*both, object=packed, column=packed.name, operation="both ways")
        if isinstance(alone, Slots) and isinstance(packed, Slots):
            agree_on(alone.generations, packed.generations, f"generations of {packed!r}")

    @rule(one=BATCHES, misuse=st.sampled_from(MISUSES))
    def misuse(self, one: Rows, misuse: Misuse[Decode]) -> None:
        """What cannot be meant is refused, and changes nothing."""
        if misuse.applies(one.batch):
            with self.refused(*misuse.expected):
                misuse.call(one.batch)


def _rows(keep: Any) -> list[int]:
    array = np.asarray(keep)
    rows: list[int] = (np.flatnonzero(array) if array.dtype.kind == "b" else array.astype(np.int64)).tolist()
    return rows


def _shifted(cell: Cell, n: int) -> Cell:
    return Cell(None if cell.host is None else plus(cell.host, n), plus(cell.device, n))
