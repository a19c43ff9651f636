"""`Batch` against a list of requests, each a dictionary of its columns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, multiple, rule

from batchstate import Batch, Code, Runtime, SlotPool, StaticBuffers, invariants, levels
from batchstate._arrays import of_dtype
from batchstate.columns import MirroredColumn, TensorColumn, device_only, host_list, mirrored, slot_column
from batchstate.errors import ArgumentError, ContractError, RowIndexError, ShapeError, ValueOverflowError
from batchstate.mirror import Contract, MirroredTensor, Pages, Slots, rows_of
from batchstate.tables import TableWrite
from tests.doubles import forged
from tests.selfcheck.machine import Machine, Misuse, ShownByRepr, agree, agree_on, ask, misuses
from tests.selfcheck.machines.mirrored_tensor import Operations, check_reported, has_rows, write_uncounted
from tests.selfcheck.strategies import amounts, fits, keep_lists, plus, split_sizes

Array = npt.NDArray[Any]


class Decode(Batch):
    """A column of every kind."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    small = mirrored(torch.uint8, pad=7)
    temperature = mirrored(torch.float32, shape=(1,), pad=1.0)
    greedy = mirrored(torch.bool, pad=True)
    bias = mirrored(torch.float16, shape=(2,))
    accepted = mirrored(torch.int64, contract="upper_bound")
    drafts = mirrored(torch.int32, shape=(2,), contract="upper_bound")
    last_token = device_only(torch.int64, pad=3)
    hidden = device_only(torch.float32, shape=(2,))
    states = device_only(torch.bfloat16, shape=(2,), pad=1.5)
    requests = host_list()


COLUMNS: dict[str, TensorColumn] = {
    name: column for name, column in Decode.columns().items() if isinstance(column, TensorColumn)
}
BOUNDED = ("accepted", "drafts")
COUNTED = ("seq_lens", "small", "accepted", "drafts", "last_token")


def numbers(name: str, n: int, first: int) -> Array:
    """Values [n, ...] of a column: another number in every element, near both ends of the small column's dtype."""
    column = COLUMNS[name]
    size = (n, *column.shape)
    counted = np.arange(first, first + int(np.prod(size, dtype=np.int64))).reshape(size) + 10 * len(name)
    if column.np_dtype.kind == "b":
        return np.asarray(counted % 2 == 0)
    if column.np_dtype == np.uint8:
        return (counted % 7 - 3).astype(np.uint8)  # 253 to 255, 0 to 3
    values = counted.astype(column.np_dtype)
    return np.where(counted % 5 == 0, np.nan, values).astype(values.dtype) if column.np_dtype.kind == "f" else values


@final
@attrs.frozen(eq=False)
class Cell:
    """One column of one request, by its sides; `host` is None where there is none."""

    host: Array | None
    device: Array


Row = dict[str, Any]
"""Column -> `Cell`; `requests` -> the request; `generation` of the slot."""


@final
@attrs.frozen(eq=False)
class Rows(ShownByRepr):
    """A batch and its model."""

    batch: Decode
    rows: Sequence[Row]
    bounded: frozenset[str]  # columns whose host side may be a bound
    padding: int = 0  # padded rows after the requests

    def __repr__(self) -> str:
        slots = [int(row["slots"].device) for row in self.rows]
        return f"<{self.batch!r}: slots {slots}, bounds {sorted(self.bounded)}>"

    def __len__(self) -> int:
        return len(self.rows)

    def side(self, name: str, side: str) -> Array:
        column = COLUMNS[name]
        values = [getattr(row[name], side) for row in self.rows] + [column.pad] * self.padding
        return np.array(values, dtype=column.np_dtype).reshape(len(values), *column.shape)

    def contract(self, name: str) -> Contract:
        if not isinstance(COLUMNS[name], MirroredColumn):
            return Contract.DEVICE_ONLY
        return Contract.UPPER_BOUND if name in self.bounded else Contract.EXACT

    def check(self) -> None:
        """Compares everything but the device sides, and checks every invariant of the batch."""
        batch = self.batch
        batch.check("check")  # first: a broken invariant says more than a difference
        agree((len(self), len(self) + self.padding), (len(batch), batch.num_rows), "requests and rows", batch)
        agree([row["requests"] for row in self.rows], list(batch.requests), "requests", batch)
        generations = [row["generation"] for row in self.rows] + [0] * self.padding
        agree(generations, batch.slots.generations.tolist(), "generations", batch)
        for name, column in COLUMNS.items():
            agree(self.contract(name), batch[name].contract, f"contract of {name}", batch)
            if isinstance(column, MirroredColumn):
                agree_on(self.side(name, "host"), batch[name].np, f"host side of {name}", batch)

    def check_devices(self) -> None:
        """Compares the device side of every column, which uploads the batch if that has not happened yet."""
        devices = {name: self.batch[name].device for name in COLUMNS}
        ask(self.batch.check, "check")
        self.compare(devices, f"model of {self.batch!r}", "check")

    def compare(self, devices: Mapping[str, torch.Tensor], where: str, operation: str) -> None:
        for name in COLUMNS:
            actual, expected = rows_of(self.batch.runtime, devices[name]), self.side(name, "device")
            ask(invariants.mirror_equal, expected, actual, object=where, column=name, operation=operation)

    def moved(self, batch: Decode, rows: Sequence[Row], *, padding: int = 0) -> "Rows":
        return Rows(batch, rows, self.bounded, padding)

    def changed(self, batch: Decode, name: str, change: Callable[[int, Cell], Cell]) -> "Rows":
        """The model of `batch`, in which `change` made the cells of one column anew."""
        rows = [{**row, name: change(at, row[name])} for at, row in enumerate(self.rows)]
        return Rows(batch, rows, self.bounded)


@attrs.define(eq=False)
class Graph:
    """Buffers, the replay of a graph over them, which returns its inputs, and the batch that they hold."""

    buffers: StaticBuffers
    replay: Callable[[Decode], dict[str, torch.Tensor]]
    filled: Decode | None = None

    @classmethod
    def of(cls, runtime: Runtime, rows: int) -> "Graph":
        buffers = StaticBuffers(runtime, Decode, rows=rows, extras={"positions": np.zeros(3, np.int32)})
        captured = dict(buffers)
        return cls(buffers, buffers.bind(lambda: captured))


def _bound(batch: Decode) -> MirroredTensor:
    return MirroredTensor.from_host(batch.runtime, np.zeros(len(batch), np.int64)).weaken("upper_bound")


def _zeros(batch: Decode, name: str, n: int) -> torch.Tensor:
    """The zeros of a kernel for `n` rows of a column."""
    zeros = np.zeros((n, *COLUMNS[name].shape), COLUMNS[name].np_dtype)
    return of_dtype(batch.runtime.upload([zeros]).view(0).clone(), COLUMNS[name].dtype)


def _verified(name: str, *, n: int = 0, bound: Any = None) -> Callable[[Decode], Decode]:
    return lambda batch: batch.update_device(name, (), _zeros(batch, name, n), bound)


def _every_slot(number: int) -> Callable[[Decode], Decode]:
    return lambda it: it.replace(slots=forged(Slots, it.runtime, [number] * len(it), [0] * len(it), _POOL))


def _has_two(batch: Decode) -> bool:
    return len(batch) > 1


def _rows_of_others(batch: Decode) -> Decode:
    return batch.update_device("last_token", [0], batch.filter([1]).last_token)


def _pages_for_slots(batch: Decode) -> Decode:
    return batch.replace(slots=Pages.from_host(batch.runtime, [1] * len(batch), dtype=torch.int64))


_POOL = 10**9  # id of the pool that the slots of every batch pretend to come from; no real one has it

MISUSES = misuses(
    ("a row kept twice", ArgumentError, lambda it: it.filter([0, 0]), has_rows),
    ("a merge with itself", Code.SLOT_SHARED, lambda it: it.merge(it), has_rows),
    ("advance beyond uint8", ValueOverflowError, lambda it: it.advance("small", 256), has_rows),
    ("update the device alone", ArgumentError, lambda it: it.update("last_token", [], [])),
    ("update beyond the last row", RowIndexError, lambda it: it.update("seq_lens", [len(it)], 1)),
    ("verified rows of an exact column", ContractError, _verified("seq_lens", bound=0)),
    ("verified rows without a bound", ArgumentError, _verified("accepted")),
    ("a bound of a column without a host side", ArgumentError, _verified("last_token", bound=9)),
    ("a verified row too many", ShapeError, _verified("drafts", n=1, bound=9)),
    ("a bound beyond the dtype", ValueOverflowError, _verified("drafts", bound=2**40)),
    ("rows of other requests", Code.DERIVED_STALE, _rows_of_others, _has_two),
    ("replace an exact column to a bound", ContractError, lambda it: it.replace(seq_lens=_bound(it))),
    ("replace slots to pages", Code.UNIT_MISMATCH, _pages_for_slots),
    ("two requests in one slot", Code.SLOT_SHARED, _every_slot(1), _has_two),
    ("a request in slot 0", Code.SLOT_ZERO_ALLOCATED, _every_slot(0), has_rows),
    ("a request in slot -1", Code.SENTINEL_ESCAPED, _every_slot(-1), has_rows),
)

OPERATIONS: Operations = (
    ("filter", lambda it: it.batch.filter(range(len(it.batch))[::-1])),
    ("merge", lambda it: it.batch.merge(it.other)),
    ("merge", lambda it: it.other.merge(it.batch)),
    ("next_batch", lambda it: it.batch.next_batch(advance="seq_lens", n=0)),
    ("next_batch", lambda it: it.other.next_batch(joining=it.batch)),
    ("split", lambda it: it.batch.split([len(it.batch)])),
    ("pad", lambda it: it.batch.pad(len(it.batch))),
    ("advance", lambda it: it.batch.advance(it.counted, 0)),
    ("update", lambda it: it.batch.update(it.copied, [], [])),
    ("update_device", lambda it: it.batch.update_device("last_token", [], _zeros(it.batch, "last_token", 0))),
    ("tighten", lambda it: it.batch.tighten("accepted", it.batch["accepted"].np, slots=it.batch.slots)),
    ("replace", lambda it: it.batch.replace(**{it.copied: it.batch[it.copied].np.copy()})),
    ("upload", lambda it: it.batch.upload()),
    ("on_device", lambda it: it.batch.on_device()),
    ("to_static", lambda it: it.batch.to_static(it.graph, extras={"positions": np.zeros(3, np.int32)})),
)
"""Every operation, by the name that it has in reports: each compares both sides of every batch that it takes."""


@final
@attrs.frozen
class Written:
    """A batch that was written from outside, a batch of other requests, and a graph, for `OPERATIONS`.

    The device side of a column that an operation does not change stays, and with it the write: operations that give
    one column other values take the `written` one, where they can.
    """

    batch: Decode
    other: Decode
    graph: StaticBuffers
    written: str = "seq_lens"

    @property
    def counted(self) -> str:
        return self.written if self.written in COUNTED else "seq_lens"

    @property
    def copied(self) -> str:
        """A column with an exact host side, but the slots."""
        of_both = isinstance(COLUMNS[self.written], MirroredColumn) and self.written != "slots"
        return self.written if of_both and self.batch[self.written].contract is Contract.EXACT else "seq_lens"


BATCHES = Bundle("batches")

GRAPH_ROWS = (4, 8)  # of the buffers of two graphs; the larger ones have a row for each slot
_KEPT = 6  # newest batches, checked after every rule


class BatchMachine(Machine):
    """Builds batches of requests with few slots, so that they collide; moves, changes and uploads them."""

    NAME = "batch"
    TARGETS = (
        "merge of exact with bound",
        "a bounded column read on the device",
        "a request in both batches refused",
        "overflow refused",
        "table writes of one table joined",
        "fewer requests in a graph than before",
        "leave, join and advance at once",
        "write from outside found",
        "a graph of another batch refused",
        "bounds tightened by results in another order",
        "some rows verified, and read with the others",
        "what did not change stayed on the device",
    )

    @initialize()
    def begin(self) -> None:
        self.open()
        self.alive: list[Rows] = []
        self.seen: list[Rows] = []
        self.pool = SlotPool(self.rt, 8)
        self.table = self.pool.table("table", (2,), host=True)
        self.owners = self.pool.take(8)
        self.graphs = {rows: Graph.of(self.rt, rows) for rows in GRAPH_ROWS}
        self.requests = 0
        self.tried_all = False

    def check(self) -> None:
        """The newest batches are as they were, and those whose device sides were read have them still."""
        for model in self.alive[-_KEPT:]:
            model.check()
        for model in self.seen[-2:]:
            model.check_devices()
        self.table.check()

    def snapshot(self) -> object:
        return [
            (
                model.batch.version,
                [model.batch[name].np.tobytes() for name, c in COLUMNS.items() if isinstance(c, MirroredColumn)],
                [model.batch[name].device_side.existing is None for name in COLUMNS],
            )
            for model in self.alive[-_KEPT:]
        ]

    def kept(self, model: Rows, *, look: bool = False) -> Rows:
        """A batch that is checked from now on; `look` reads its device sides at once."""
        self.alive.append(model)
        if look:
            self.look(model)
        return model

    def look(self, model: Rows, *, side: bool = False) -> None:
        with self.on(side):
            model.check_devices()
        self.seen.append(model)
        self.reached("a bounded column read on the device", bool(model.bounded) and len(model) > 0)

    # Building

    @rule(
        target=BATCHES,
        slots=st.lists(st.integers(1, 8), max_size=3, unique=True),
        first=st.integers(0, 9),
        bounds=st.booleans(),
        look=st.booleans(),
    )
    def build(self, slots: list[int], first: int, bounds: bool, look: bool) -> Rows:
        """A batch of new requests; their numbers follow from `first`, so that a program stays readable."""
        return self.kept(self.built(slots, first, bounds=bounds), look=look)

    def built(self, slots: list[int], first: int, *, bounds: bool) -> Rows:
        generations = np.arange(1, len(slots) + 1, dtype=np.int64)
        handles = forged(Slots, self.rt, slots, generations, _POOL)
        requests = self._new_requests(len(slots))
        values: dict[str, Any] = {"slots": handles, "requests": requests}
        cells = {"slots": [Cell(slot, slot) for slot in np.array(slots, np.int64)]}
        for name in COLUMNS:
            if name != "slots":
                values[name], cells[name] = self.column(name, len(slots), first, bounds)
        rows: list[Row] = [
            {name: cells[name][at] for name in COLUMNS} | {"requests": request, "generation": at + 1}
            for at, request in enumerate(requests)
        ]
        bounded = frozenset(BOUNDED if bounds else ())
        return Rows(Decode.build(self.rt, **values), rows, bounded)

    def _new_requests(self, n: int) -> list[str]:
        self.requests += n
        return [f"request {self.requests - at}" for at in range(n)]

    def column(self, name: str, n: int, first: int, bounds: bool) -> tuple[Any, list[Cell]]:
        """A value for a column, as a list, an array or a mirrored value, and the cell of each request."""
        column = COLUMNS[name]
        device = numbers(name, n, first)
        form = ("array", "list", "value")[(first + len(name)) % 3]
        if not isinstance(column, MirroredColumn):
            value: object = of_dtype(self.on_device(device), column.dtype) if form == "value" else device
            return value, [Cell(None, cell) for cell in device]
        if name in BOUNDED and bounds:
            host = device + (np.arange(n) % 3).reshape(-1, *[1] * (device.ndim - 1)).astype(device.dtype)
            value = MirroredTensor.from_pair(self.rt, host, self.on_device(device), contract="upper_bound")
            return value, [Cell(above, below) for above, below in zip(host, device, strict=True)]
        value = MirroredTensor.from_host(self.rt, device) if form == "value" else device
        return device.tolist() if form == "list" and n else value, [Cell(cell, cell) for cell in device]

    # Moving rows

    @rule(target=BATCHES, model=BATCHES, data=st.data(), look=st.booleans())
    def filter(self, model: Rows, data: st.DataObject, look: bool) -> Rows:
        keep = data.draw(keep_lists(len(model)), label="keep")
        return self.kept(model.moved(model.batch.filter(keep), [model.rows[at] for at in _rows(keep)]), look=look)

    @rule(target=BATCHES, first=BATCHES, second=BATCHES, look=st.booleans())
    def merge(self, first: Rows, second: Rows, look: bool) -> Any:
        """`merge` is the sum of the lists; a request in both is refused."""
        slots = [int(row["slots"].device) for row in (*first.rows, *second.rows)]
        if len(set(slots)) < len(slots):
            self.reached("a request in both batches refused")
            self.refused(Code.SLOT_SHARED, lambda: first.batch.merge(second.batch))
            return multiple()
        return self.kept(self.joined(first, second), look=look)

    @rule(target=BATCHES, model=BATCHES, data=st.data(), look=st.booleans())
    def split(self, model: Rows, data: st.DataObject, look: bool) -> Any:
        sizes = data.draw(split_sizes(len(model)), label="sizes")
        stops = np.cumsum(sizes).tolist()
        pieces = model.batch.split(sizes)
        agree(len(sizes), len(pieces), "pieces of a split")
        return multiple(
            *(
                self.kept(model.moved(piece, model.rows[stop - size : stop]), look=look)
                for piece, size, stop in zip(pieces, sizes, stops, strict=True)
            )
        )

    @rule(model=BATCHES, more=st.integers(0, 2), side=st.booleans())
    def pad(self, model: Rows, more: int, side: bool) -> None:
        """`pad` appends rows of slot 0 and the declared pad values; a padded batch does not move rows."""
        padded = model.moved(model.batch.pad(len(model) + more), model.rows, padding=more)
        ask(padded.check)
        if more:
            for call in (lambda: padded.batch.filter([]), lambda: padded.batch.pad(9), lambda: padded.batch.split([])):
                self.refused(ArgumentError, call)
        self.look(padded, side=side)

    # Changing values

    @rule(target=BATCHES, model=BATCHES, data=st.data(), look=st.booleans())
    def advance(self, model: Rows, data: st.DataObject, look: bool) -> Any:
        names = data.draw(st.lists(st.sampled_from(COUNTED), min_size=1, max_size=2, unique=True), label="columns")
        near = amounts(len(model))
        n = data.draw(st.one_of(near, near, near, amounts(len(model), 2**63 - 1, 2**63 - 1)), label="n")
        each = np.broadcast_to(np.asarray(n), len(model)).tolist()
        columns = names[0] if len(names) == 1 else names
        if any(not fits(model.side(name, "host"), each) for name in names if name != "last_token"):
            self.reached("overflow refused")
            self.refused(ValueOverflowError, lambda: model.batch.advance(columns, n))
            return multiple()
        if any(not fits(model.side(name, "device"), each) for name in names):
            return multiple()  # the host cannot know that a number which only the device has leaves its dtype
        batch = model.batch.advance(columns, n)
        result = model
        for name in names:
            result = result.changed(batch, name, lambda at, cell: _shifted(cell, each[at]))
        return self.kept(result, look=look)

    @rule(target=BATCHES, model=BATCHES, data=st.data(), look=st.booleans())
    def update(self, model: Rows, data: st.DataObject, look: bool) -> Any:
        """Some requests change; a bounded column is refused, since its host side is not a copy."""
        name = data.draw(st.sampled_from(["seq_lens", "temperature", "bias", "accepted"]), label="column")
        rows = list(_rows(data.draw(keep_lists(len(model)), label="rows")))
        new = numbers(name, len(rows), 100)
        if name in model.bounded:
            self.refused(ArgumentError, lambda: model.batch.update(name, rows, new))
            return multiple()
        batch = model.batch.update(name, rows, new)
        by_row = dict(zip(rows, new, strict=True))
        updated = model.changed(batch, name, lambda at, cell: Cell(by_row[at], by_row[at]) if at in by_row else cell)
        return self.kept(updated, look=look)

    @rule(
        target=BATCHES,
        model=BATCHES,
        name=st.sampled_from([name for name in COLUMNS if name != "slots"]),
        first=st.integers(0, 9),
        bounds=st.booleans(),
        look=st.booleans(),
    )
    def replace(self, model: Rows, name: str, first: int, bounds: bool, look: bool) -> Rows:
        """`replace` gives one column other values, and with them perhaps another contract."""
        value, cells = self.column(name, len(model), first, bounds)
        changed = model.changed(model.batch.replace(**{name: value}), name, lambda at, _: cells[at])
        bounded = model.bounded | {name} if name in BOUNDED and bounds else model.bounded - {name}
        return self.kept(Rows(changed.batch, changed.rows, bounded), look=look)

    @rule(target=BATCHES, model=BATCHES, name=st.sampled_from(list(COLUMNS)[1:]), first=st.integers(0, 9))
    def replace_what_crossed(self, model: Rows, name: str, first: int) -> Rows:
        """If no row moves and no value changes, all stays on the device; else all crosses in one copy."""
        model.batch.on_device()
        value, cells = self.column(name, len(model), first, bounds=False)
        before = self.rt.counters.snapshot()
        batch = model.batch.filter(range(len(model))).replace(requests=list(model.batch.requests))
        batch.on_device()
        agree(0, (self.rt.counters - before).host_to_device_bytes, "bytes copied of a batch in which nothing changed")
        batch = batch.replace(**{name: value})
        batch.on_device()
        spent = self.rt.counters - before
        agree(True, spent.host_to_device_copies <= 1, f"{spent} copied for {name}, expected one copy")
        self.reached("what did not change stayed on the device", len(model) > 0)
        changed = model.changed(batch, name, lambda at, _: cells[at])
        return self.kept(Rows(changed.batch, changed.rows, model.bounded - {name}), look=True)

    @rule(
        target=BATCHES,
        model=BATCHES,
        data=st.data(),
        name=st.sampled_from((*BOUNDED, "last_token", "states")),
        spare=st.integers(0, 2),
        look=st.booleans(),
    )
    def update_device(self, model: Rows, data: st.DataObject, name: str, spare: int, look: bool) -> Rows:
        """A mixed step has verified some rows: the device has them, and the host a bound of each."""
        rows = list(_rows(data.draw(keep_lists(len(model)), label="rows")))
        values = numbers(name, len(rows), 200)
        bound = values + values.dtype.type(spare) if name in BOUNDED else None
        batch = model.batch.update_device(name, rows, of_dtype(self.on_device(values), COLUMNS[name].dtype), bound)
        cells = {row: Cell(None if bound is None else bound[at], values[at]) for at, row in enumerate(rows)}
        self.reached("some rows verified, and read with the others", look and 0 < len(rows) < len(model))
        changed = model.changed(batch, name, lambda at, cell: cells.get(at, cell))
        bounded = model.bounded | {name} if name in BOUNDED else model.bounded
        return self.kept(Rows(changed.batch, changed.rows, bounded), look=look)

    @rule(target=BATCHES, model=BATCHES, data=st.data(), name=st.sampled_from(BOUNDED), look=st.booleans())
    def tighten(self, model: Rows, data: st.DataObject, name: str, look: bool) -> Any:
        """Results of the same requests in another order bring bounds down: rows go by handle."""
        order = data.draw(st.permutations(range(len(model))), label="order of the results")
        results = model.batch.filter(order)[name].resolve()
        if name not in model.bounded:
            self.refused(ContractError, lambda: model.batch.tighten(name, results))
            return multiple()
        self.refused(ArgumentError, lambda: model.batch.tighten(name, results.np))
        if not all(fits(model.side(name, side), [1] * len(model)) for side in ("device", "host")):
            return multiple()
        ahead = model.batch.advance(name, 1)  # a step is launched before the results of the last are there
        _ = ahead[name].device
        lower = np.minimum(results.aligned(ahead.slots) + 1, ahead[name].np)
        self.reached("bounds tightened by results in another order", len(model) > 1)
        batch = ahead.tighten(name, lower, slots=ahead.slots)
        return self.kept(
            model.changed(batch, name, lambda _, cell: _shifted(Cell(cell.device, cell.device), 1)), look=look
        )

    # To the device

    @rule(model=BATCHES, data=st.data(), side=st.booleans())
    def upload(self, model: Rows, data: st.DataObject, side: bool) -> None:
        """Columns, table writes and derived arrays cross in one copy, and one operation scatters the writes."""
        first = all(model.batch[name].device_side.existing is None for name in COLUMNS)
        slots = data.draw(st.lists(st.integers(1, 8), max_size=3, unique=True), label="written slots")
        new = np.arange(len(slots), dtype=np.int32) + self.requests
        halves = np.array_split(np.arange(len(slots)), 2)
        rows = self.owners.take(np.array(slots, np.int64) - 1)
        writes = [self.table.entry(rows.take(half), half % 2, new[half]) for half in halves if half.size]
        before = self.rt.counters.snapshot()
        with self.on(side):
            extras = model.batch.upload(writes=writes, extras={"positions": new, "chosen": model.batch.greedy})
        cost = self.rt.counters - before
        agree((1, 0), (cost.host_to_device_copies, cost.forced_syncs), "copies and forced syncs of an upload")
        if first:
            agree(int(bool(writes)), cost.device_operations, "device operations of an upload")
        agree_on(new, self.rt.inspect(extras["positions"]), "an extra array")
        agree_on(model.batch.greedy.np, self.rt.inspect(extras["chosen"]), "an extra of the batch's rows")
        self.reached("table writes of one table joined", len(writes) > 1)
        self.look(model, side=side)

    @rule(model=BATCHES, slots=st.lists(st.integers(1, 8), max_size=3, unique=True), side=st.booleans())
    def to_static(self, model: Rows, slots: list[int], side: bool) -> None:
        """A graph reads the batch where it read the one before, and padding after it."""
        size = next(rows for rows in GRAPH_ROWS if rows >= len(model))
        graph = self.graphs[size]
        self.reached("fewer requests in a graph than before", len(model) < graph.buffers.num_reqs)
        new = np.arange(3, dtype=np.int32) + self.requests
        rows = self.owners.take(np.array(slots, np.int64) - 1)
        writes = [self.table.entry(rows, [0] * len(slots), new[: len(slots)])] if slots else []
        before = self.rt.counters.snapshot()
        with self.on(side):
            self._fill(size, model.batch, writes, new)
        captured = graph.replay(model.batch)
        cost = self.rt.counters - before
        padded = Rows(model.batch, model.rows, model.bounded, size - len(model))
        padded.compare(captured, f"graph input of {model.batch!r}", "replay")
        agree_on(new, self.rt.inspect(captured["positions"]), "an extra of the graph")
        on_host = max(
            sum(length for _, length in rows.sources) for rows in model.batch.device_side.state.device.values()
        )
        fits_in_one = on_host <= size
        copies = cost.host_to_device_copies
        agree(
            (fits_in_one, 0), (copies == 1, cost.forced_syncs) if fits_in_one else (copies > 2, 0), "copies of a step"
        )

    def _fill(self, size: int, batch: Decode, writes: Sequence[TableWrite], positions: Array) -> None:
        batch.to_static(self.graphs[size].buffers, writes=writes, extras={"positions": positions})
        self.graphs[size].filled = batch

    @rule(model=BATCHES, rows=st.sampled_from([4, 8]))
    def replay_late(self, model: Rows, rows: int) -> None:
        """A graph runs the batch in its buffers, however late, and no other."""
        graph = self.graphs[rows]
        if graph.filled is not None:
            graph.replay(graph.filled)
        if graph.filled is not model.batch:
            self.reached("a graph of another batch refused")
            self.refused(Code.DERIVED_STALE, lambda: graph.replay(model.batch))

    @rule(
        target=BATCHES,
        model=BATCHES,
        leaves=st.integers(0, 3),
        n=st.integers(0, 2),
        first=st.integers(0, 9),
        at_once=st.booleans(),
    )
    def step(self, model: Rows, leaves: int, n: int, first: int, at_once: bool) -> Rows:
        """A step of an engine: one leaves, others join under the other contract, all advance, one upload."""
        keep = [at for at in range(len(model)) if at != leaves]
        taken = {int(model.rows[at]["slots"].device) for at in keep}
        free = [slot for slot in range(1, 9) if slot not in taken][: n + 1]
        joining = self.built(free, first, bounds=not model.bounded)
        left = model.moved(model.batch.filter(keep), [model.rows[at] for at in keep])
        both = self.joined(left, joining)
        before = self.rt.counters.snapshot()
        if at_once:
            batch = model.batch.next_batch(keep=keep, joining=joining.batch, advance="seq_lens")
        else:
            batch = both.batch.advance("seq_lens", 1)
        self.reached("leave, join and advance at once", at_once and 0 < len(keep) < len(model) and bool(free))
        batch.upload()
        cost = self.rt.counters - before
        agree((1, 0), (cost.host_to_device_copies, cost.device_operations), "copies and operations of a step")
        return self.kept(both.changed(batch, "seq_lens", lambda _, cell: _shifted(cell, 1)), look=True)

    def joined(self, first: Rows, second: Rows) -> Rows:
        self.reached("merge of exact with bound", first.bounded != second.bounded and bool(len(first) and len(second)))
        merged = first.batch.merge(second.batch)
        return Rows(merged, [*first.rows, *second.rows], first.bounded | second.bounded)

    @rule(
        first=st.integers(0, 9),
        bounds=st.booleans(),
        column=st.sampled_from(list(COLUMNS)),
        side=st.sampled_from(["host", "device"]),
        uploaded=st.booleans(),
        chosen=st.integers(0, len(OPERATIONS) - 1),
    )
    def write_from_outside(self, first: int, bounds: bool, column: str, side: str, uploaded: bool, chosen: int) -> None:
        """The write of a kernel into either side of a column is noticed by the next operation."""
        if not levels.full or (side == "host" and not isinstance(COLUMNS[column], MirroredColumn)):
            return
        other = self.built([3], first, bounds=not bounds).batch
        for at in range(chosen, chosen + (1 if self.tried_all else len(OPERATIONS))):
            victim = self.built([1, 2], first, bounds=bounds).batch
            if uploaded:
                victim.upload()
            write_uncounted(victim[column], side, 1)
            written = Written(victim, other, self.graphs[GRAPH_ROWS[0]].buffers, column)
            check_reported(OPERATIONS, at % len(OPERATIONS), written, column, 1)
            self.reached("write from outside found")
        self.tried_all = True

    @rule(model=BATCHES, misuse=st.sampled_from(MISUSES))
    def misuse(self, model: Rows, misuse: Misuse[Decode]) -> None:
        self.refuses(misuse, model.batch)


def _rows(keep: Any) -> list[int]:
    array = np.asarray(keep)
    rows: list[int] = (np.flatnonzero(array) if array.dtype.kind == "b" else array.astype(np.int64)).tolist()
    return rows


def _shifted(cell: Cell, n: int) -> Cell:
    return Cell(None if cell.host is None else plus(cell.host, n), plus(cell.device, n))
