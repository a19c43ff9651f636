"""Batches for a machine: builds them, keeps them, and judges the newest after every rule."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, rule

from batchstate.columns import MirroredColumn
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.pools import SlotPool
from batchstate.static import StaticBuffers
from batchstate.testing.machine import Machine
from batchstate.testing.machines.batch_model import BOUNDED, COLUMNS, Cell, Decode, Row, Rows, numbers

Array = npt.NDArray[Any]

BATCHES = Bundle("batches")

GRAPH_ROWS = 8
"""Rows of the buffers with fixed addresses: as many as there are slots."""
_POOL = 7
"""Identity of the pool that the slots of every batch pretend to come from."""
_KEPT = 6
"""Batches that are judged after every rule: the newest."""


class BatchBuilder(Machine):
    """Builds batches of requests with few slots, so that they collide; subclasses move them about."""

    @initialize()
    def begin(self) -> None:
        """Opens the runtime, and a table for the writes that ride in an upload."""
        self.open()
        self.alive: list[Rows] = []
        self.seen: list[Rows] = []
        self.pool = SlotPool(self.rt, 8)
        self.table = self.pool.table("table", (2,), host=True)
        self.graph = StaticBuffers(self.rt, Decode, rows=GRAPH_ROWS, extras={"positions": np.zeros(3, np.int32)})
        self.captured = dict(self.graph)  # what a graph would read from now on
        self.requests = 0

    def judge(self) -> None:
        """The newest batches are as they were, and those whose device sides were read have them still."""
        for one in self.alive[-_KEPT:]:
            one.judge()
        for one in self.seen[-2:]:
            one.judge_devices()
        self.table.check()

    def snapshot(self) -> object:
        """Versions, host sides and what of the batches is uploaded."""
        return [
            (
                one.batch.version,
                [one.batch[name].np.tobytes() for name, c in COLUMNS.items() if isinstance(c, MirroredColumn)],
                [one.batch[name].device_side.made is None for name in COLUMNS],
            )
            for one in self.alive[-_KEPT:]
        ]

    def kept(self, one: Rows, *, look: bool = False) -> Rows:
        """A batch that is judged from now on; `look` reads its device sides at once."""
        self.alive.append(one)
        if look:
            self.look(one)
        return one

    def look(self, one: Rows, *, side: bool = False) -> None:
        """Compares all device sides."""
        with self.on(side):
            one.judge_devices()
        self.seen.append(one)
        self.reached("padded rows read on the device", one.padding > 0)
        self.reached("a bounded column read on the device", bool(one.bounded) and len(one) > 0)

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
        """A batch of new requests in these slots."""
        generations = np.arange(1, len(slots) + 1, dtype=np.int64)
        handles = Slots.from_host(self.rt, slots, generations=generations, pool=_POOL)
        requests = self._new_requests(len(slots))
        values: dict[str, object] = {"slots": handles, "requests": requests}
        cells = {"slots": [Cell(one, one) for one in np.array(slots, np.int64)]}
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

    def column(self, name: str, n: int, first: int, bounds: bool) -> tuple[object, list[Cell]]:
        """A value for a column, as a list, an array or a mirrored value, and what it makes of each request."""
        column = COLUMNS[name]
        device = numbers(name, n, first)
        form = ("array", "list", "value")[(first + len(name)) % 3]
        if not isinstance(column, MirroredColumn):
            given: object = self.on_device(device) if form == "value" else device
            return given, [Cell(None, one) for one in device]
        if name in BOUNDED and bounds:
            host = device + (np.arange(n) % 3).reshape(-1, *[1] * (device.ndim - 1)).astype(device.dtype)
            value = MirroredTensor.from_pair(self.rt, host, self.on_device(device), contract="upper_bound")
            return value, [Cell(above, one) for above, one in zip(host, device, strict=True)]
        given = MirroredTensor.from_host(self.rt, device) if form == "value" else device
        return device.tolist() if form == "list" and n else given, [Cell(one, one) for one in device]
