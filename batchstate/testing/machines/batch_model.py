"""A batch as an engine's author would think of it: a list of requests, each a dictionary of its columns."""

from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants
from batchstate.batch import Batch
from batchstate.columns import MirroredColumn, TensorColumn, device_only, host_list, mirrored, slot_column
from batchstate.contracts import Contract
from batchstate.testing.machine import agree, agree_on

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
    """One column of one request: what its host side and its device side hold; `host` is None where there is none."""

    host: Array | None
    device: Array


Row = dict[str, Any]
"""Column -> `Cell`; `requests` -> the request; `generation` of the slot."""


@final
@attrs.frozen(eq=False)
class Rows:
    """A batch and its model.

    Attributes:
        batch: the batch.
        rows: its requests.
        bounded: columns whose host side may be a bound.
        padding: padded rows behind the requests.
    """

    batch: Decode
    rows: Sequence[Row]
    bounded: frozenset[str]
    padding: int = 0

    def __repr__(self) -> str:
        slots = [int(row["slots"].device) for row in self.rows]
        return f"<{self.batch!r}: slots {slots}, bounds {sorted(self.bounded)}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __len__(self) -> int:
        return len(self.rows)

    def side(self, name: str, side: str) -> Array:
        """One side of a column, padding included."""
        column = COLUMNS[name]
        values = [getattr(row[name], side) for row in self.rows] + [column.pad] * self.padding
        return np.array(values, dtype=column.np_dtype).reshape(len(values), *column.shape)

    def contract(self, name: str) -> Contract:
        """The contract of a column."""
        if not isinstance(COLUMNS[name], MirroredColumn):
            return Contract.DEVICE_ONLY
        return Contract.UPPER_BOUND if name in self.bounded else Contract.EXACT

    def judge(self) -> None:
        """Compares everything but the device sides, and asks every law of the batch.

        Raises:
            DisagreementError, Violation: they differ.
        """
        batch = self.batch
        batch.check("judge")  # first: a law that was broken says more than a difference
        agree((len(self), len(self) + self.padding), (len(batch), batch.num_rows), f"requests and rows of {batch!r}")
        agree([row["requests"] for row in self.rows], list(batch.requests), f"requests of {batch!r}")
        generations = [row["generation"] for row in self.rows] + [0] * self.padding
        agree(generations, batch.slots.generations.tolist(), f"generations of {batch!r}")
        for name, column in COLUMNS.items():
            agree(self.contract(name), batch[name].contract, f"contract of {name} of {batch!r}")
            if isinstance(column, MirroredColumn):
                agree_on(self.side(name, "host"), batch[name].np, f"host side of {name} of {batch!r}")

    def judge_devices(self) -> None:
        """Compares the device side of every column, which uploads the batch if nobody did.

        Raises:
            Violation: MIRROR_EQUAL; the model stands for the host side.
        """
        devices = {name: self.batch[name].device for name in COLUMNS}
        self.batch.check("judge")
        for name in COLUMNS:
            device = self.batch.runtime.inspect(devices[name])
            where = f"model of {self.batch!r}"
            invariants.mirror_equal(self.side(name, "device"), device, object=where, column=name, operation="judge")

    def moved(self, batch: Decode, rows: Sequence[Row], *, padding: int = 0) -> "Rows":
        """The model of `batch`, which has `rows` of this one."""
        return Rows(batch, rows, self.bounded, padding)

    def changed(self, batch: Decode, name: str, change: Callable[[int, Cell], Cell]) -> "Rows":
        """The model of `batch`, in which `change` made the cells of one column anew."""
        rows = [{**row, name: change(at, row[name])} for at, row in enumerate(self.rows)]
        return Rows(batch, rows, self.bounded)
