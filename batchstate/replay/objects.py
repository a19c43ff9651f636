"""The objects of a recording: how each is described, how it is made again, and the calls that bring back its state.

A description is a mapping of plain values and of objects that have one. `making` takes it with these objects made.
`state` are calls like those of an engine: slots are taken, pages extended, entries published; so a shrink can leave
them out too.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, final

import attrs
import numpy as np
import torch

from batchstate.batch import Batch, BatchType
from batchstate.columns import SlotColumn, TensorColumn, device_only, host_list, mirrored, slot_column
from batchstate.errors import RecordingError
from batchstate.future_map import FutureMap, relay_field
from batchstate.kv.pages import PagePool
from batchstate.mirror import Slots
from batchstate.pools import SlotPool
from batchstate.races.devices import open_device
from batchstate.replay.format import Device
from batchstate.runtime import Runtime
from batchstate.step import StepPlanner
from batchstate.tables import Table

__all__ = ["OBJECTS", "Described", "Room"]

MOST_SIZE = 1 << 24
_READ_BY = {1: "device", 2: "host", 3: "both"}
_FIELD = ("non_negative", "must_read", "ragged", "stale")
_TOOLS = {"RaceRuntime": "race", "SimRuntime": "sim"}
_PLANNER = ("seq_lens", "kv_offset", "ids", "lengths", "accepted", "results", "has_ids", "window")

Body: TypeAlias = dict[str, Any]
StateCall: TypeAlias = tuple[str, tuple[Any, ...], Body, Slots | None]
"""Method, arguments, keyword arguments, and the handles that it returned when the state came about."""


@final
@attrs.define
class Room:
    """Where the objects of a recording are made again, and the memory that is left for them.

    Attributes:
        device: see `batchstate.races.devices.open_device`.
        free: bytes.
    """

    device: str
    free: int = 2 << 30

    def bytes_of(self, *sizes: Any, of: int = 1) -> int:
        """The bytes of these sizes, each of which has to be a number; refused if they are more than are free."""
        for size in sizes:
            if type(size) is not int or not 0 <= size <= MOST_SIZE:
                raise RecordingError(f"a size of {str(size)[:40]}", size, "a damaged recording: copy the file again")
        needed: int = math.prod(sizes[:9]) * of
        if len(sizes) > 9 or needed > self.free:
            problem = f"{list(sizes[:9])} values of {of} bytes, and {self.free:,} bytes are left for a replay"
            raise RecordingError(problem, self.free, "a damaged recording: copy the file again; or record less")
        return needed

    def take(self, *sizes: Any, of: int = 1) -> None:
        """Takes these bytes for an object that stays."""
        self.free -= self.bytes_of(*sizes, of=of)


class Described(NamedTuple):
    """How objects of a class are recorded.

    Attributes:
        described: an object as a mapping.
        making: the mapping as an object, which takes its memory from the room.
        state: the calls that bring a new one to the state of this one.
    """

    described: Callable[[Any], Body]
    making: Callable[[Body, Room], Any]
    state: Callable[[Any], Iterator[StateCall]] = lambda _: iter(())


def dtype_named(name: Any) -> torch.dtype:
    """The dtype that a file names."""
    dtype = getattr(torch, str(name), None)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"no dtype {str(name)[:40]!r}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _attributes(value: Any, names: str) -> Body:
    return {name: getattr(value, name) for name in names.split()}


def _live(pool: SlotPool, rows: Any) -> Slots:
    rows = np.asarray(rows, np.int64)
    generations = pool._core.arrays["generation"][rows].astype(np.int64)
    return Slots.of_pool(pool.runtime, rows, generations, pool_id=pool.pool_id, name=pool.name)


def _runtime(body: Body, room: Room) -> Runtime:
    return open_device(room.device, steps_in_flight=int(body["steps_in_flight"]))


def _slot_pool(body: Body, room: Room) -> SlotPool:
    room.take(body["size"] + body["reserve"], of=64)
    return SlotPool(**body)


def _slots_taken(pool: SlotPool) -> Iterator[StateCall]:
    live = pool.live_slots()
    for rows, options in ((live[: pool.size], {}), (live[pool.size :], {"reserved": True})):
        if rows.size:
            yield "take", (rows.size,), options, _live(pool, rows)


def _described_table(table: Table) -> Body:
    shape = {"shape": list(table.shape[1:]), "dtype": _name(table.dtype)}
    return {"pool": table.space, **shape, **_attributes(table, "name holds row_zero")}


def _table(body: Body, room: Room) -> Table:
    space, dtype = body.pop("pool"), dtype_named(body.pop("dtype"))
    room.take(*body["shape"], space.capacity, of=dtype.itemsize)
    table: Table = space.table(dtype=dtype, **body)
    return table


def _page_pool(body: Body, room: Room) -> PagePool:
    pages = -(-body["max_tokens_per_request"] // body["page_size"])
    room.take(body["slots"].capacity, pages, of=16)
    room.take(body["num_pages"], of=64)
    room.take(body["num_pages"], body["page_size"], of=8)
    return PagePool(**body)


def _pages_taken(pages: PagePool) -> Iterator[StateCall]:
    """Pages of the requests as they were, those that one shares with one before it too."""
    slots, size, first = pages.slots, pages.page_size, dict[int, int]()
    live = slots.live_slots()
    if not live.size:
        return
    handles = _live(slots, live)
    table, allocated, committed = pages.page_table[live], pages.allocated(handles), pages.committed(handles)
    sources = [first.setdefault(int(page), row) if tokens else row for row, (page, tokens) in enumerate(
        zip(table[:, 0].tolist(), allocated.tolist(), strict=True))]  # fmt: skip
    alone = np.array([source == row for row, source in enumerate(sources)])
    for rows in (np.flatnonzero(alone & (allocated > 0)), *np.flatnonzero(~alone).reshape(-1, 1)):
        if not rows.size:
            continue
        owners, source = _live(slots, live[rows]), sources[rows[0]]
        if source != rows[0]:
            most = min(allocated[rows[0]], committed[source]) // size
            shared = int(np.cumprod(table[rows[0], :most] == table[source, :most]).sum())
            if shared:
                yield "share", (_live(slots, live[[source]]), owners, shared * size), {}, None
        yield "grow", (owners, np.minimum(allocated[rows], pages.max_tokens_per_request)), {}, None
        yield "commit", (owners, committed[rows]), {}, None


def _described_relay(relay: FutureMap) -> Body:
    fields = {
        name: {"dtype": _name(field.dtype), "shape": list(field.shape), "read_by": _READ_BY[field.readers]}
        | {option: getattr(field, option) for option in _FIELD}
        for name, field in relay.fields.items()
    }
    return {"slots": relay.slots, "name": relay.name, "fields": fields}


def _relay(body: Body, room: Room) -> FutureMap:
    slots, fields = body["slots"], {}
    for name, field in body["fields"].items():
        dtype = dtype_named(field.pop("dtype"))
        room.take(*field["shape"], slots.capacity, of=dtype.itemsize)
        fields[name] = relay_field(dtype, **field)
    return FutureMap(slots, fields, name=body["name"])


def _entries(relay: FutureMap) -> Iterator[StateCall]:
    """Entries as they were: results are on their way to the host, and count as read there."""
    live, alike = relay.slots.live_slots(), dict[tuple[str, ...], list[int]]()
    if live.size:
        handles = _live(relay.slots, live)
        for slot, *states in zip(live.tolist(), *(relay.states(handles, name) for name in relay.fields), strict=True):
            alike.setdefault(tuple(map(str, states)), []).append(slot)
    for entry, rows in alike.items():
        slots, n = _live(relay.slots, rows), len(rows)
        written = {name: state for name, state in zip(relay.fields, entry, strict=True) if state != "unwritten"}
        if written:
            fields = {name: relay.fields[name] for name in written}
            values = {name: Device(_name(field.dtype), [n, *field.shape]) for name, field in fields.items()}
            yield "publish", (slots,), values, None
        for name, state in written.items():
            if relay.fields[name].readers & 2:
                yield "prefetch", (slots, name), {}, None
            if relay.fields[name].readers & 1 and state == "consumed":
                yield "gather", (slots, name), {}, None


def _described_planner(planner: StepPlanner) -> Body:
    declared = planner._declared
    options = {name: getattr(declared, name) for name in _PLANNER}
    own = {"layouts": planner._layouts, "int32": sorted(declared.int32)}
    return {"batch": planner._kind, "pages": declared.pages, "relay": declared.relay, **options, **own}


def _described_kind(kind: type[Batch]) -> Body:
    columns = {}
    for name, column in kind.columns().items():
        own: Body = {"is": type(column).__name__}
        columns[name] = own
        if isinstance(column, TensorColumn) and not isinstance(column, SlotColumn):
            own |= {"dtype": _name(column.dtype), "shape": list(column.shape), "pad": np.array(column.pad)}
            own |= {"contract": column.contract.value, "holds": column.holds}
    return {"name": kind.__name__, "columns": columns}


def _kind(body: Body, room: Room) -> type[Batch]:
    name = str(body["name"])[:80]
    columns = {column: _column(column, own, room) for column, own in body["columns"].items()}
    kind: Any = BatchType(name if name.isidentifier() else "Recorded", (Batch,), columns)
    return kind  # type: ignore[no-any-return]


def _column(name: str, column: Mapping[str, Any], room: Room) -> Any:
    if not name.isidentifier() or name.startswith("_"):
        raise ValueError(f"a column called {name[:40]!r}")
    if column["is"] in ("SlotColumn", "HostColumn"):
        return slot_column() if column["is"] == "SlotColumn" else host_list()
    dtype, shape, holds = dtype_named(column["dtype"]), column["shape"], column["holds"]
    room.bytes_of(*shape, of=dtype.itemsize)
    if column["contract"] == "device_only":
        return device_only(dtype, shape=shape, holds=holds)
    return mirrored(dtype, shape=shape, pad=column["pad"].tolist(), contract=column["contract"], holds=holds)


OBJECTS: Mapping[type, Described] = {
    Runtime: Described(
        lambda made: {"device": _TOOLS.get(type(made).__name__), **_attributes(made, "steps_in_flight")}, _runtime
    ),
    SlotPool: Described(lambda pool: _attributes(pool, "runtime size reserve name"), _slot_pool, _slots_taken),
    Table: Described(_described_table, _table),
    PagePool: Described(
        lambda pages: _attributes(pages, "runtime slots num_pages page_size max_tokens_per_request name req_to_token"),
        _page_pool,
        _pages_taken,
    ),
    FutureMap: Described(_described_relay, _relay, _entries),
    StepPlanner: Described(_described_planner, lambda body, _: StepPlanner(**body)),
    type: Described(_described_kind, _kind),
}
"""Class -> how its objects are recorded; `type` are batch classes."""
