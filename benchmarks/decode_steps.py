"""One decode step of batch state: some requests leave, others join, all advance, the device hears of it."""

from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.batch import Batch
from batchstate.columns import TensorColumn, mirrored, slot_column
from batchstate.indices import Slots
from batchstate.levels import Level
from batchstate.runtime import Runtime
from benchmarks.comparisons import Comparison, require_equal
from benchmarks.timing import Contender
from benchmarks.twin_columns import ARRAYS, TENSORS, HostKind, TwinColumns

Array = npt.NDArray[Any]

FILLERS = (torch.int64, torch.float32, torch.int32, torch.float32, torch.int32)
"""Dtypes of the columns that merely come along, in turns: much what sampling parameters are."""


class Decode(Batch):
    """The two columns that each batch here has."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


def declared(num_columns: int) -> type[Decode]:
    """A batch class of that many columns, all with both sides."""
    fillers = {f"column_{i}": mirrored(FILLERS[i % len(FILLERS)]) for i in range(num_columns - 2)}
    return type(f"Decode{num_columns}", (Decode,), fillers)


@final
@attrs.frozen(eq=False)
class Scene:
    """A running batch, the requests that join it, and those that stay.

    Attributes:
        runtime: the device.
        running, joining: our batches.
        keep: bool[rows of running].
    """

    runtime: Runtime
    running: Decode
    joining: Decode
    keep: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, runtime: Runtime, *, num_columns: int, rows: int, churn: int) -> "Scene":
        """`rows` requests run; `churn` of them leave and as many join."""
        rng = np.random.default_rng(num_columns + rows)
        kind = declared(num_columns)
        keep = np.ones(rows, dtype=np.bool_)
        keep[rng.choice(rows, churn, replace=False)] = False
        running = kind.build(runtime, **_values(runtime, kind, rng, first_slot=1, rows=rows))
        joining = kind.build(runtime, **_values(runtime, kind, rng, first_slot=1 + rows, rows=churn))
        return cls(runtime, running, joining, keep)

    def packed_step(self) -> Decode:
        """The step as this library does it, up to the copy."""
        batch = self.running.filter(self.keep).merge(self.joining).advance("seq_lens", 1)
        batch.upload()
        return batch

    def packed_step_read(self) -> list[torch.Tensor]:
        """The same, and somebody reads the device side of each column."""
        batch = self.packed_step()
        return [batch[name].device for name in batch.columns()]

    def twins(self, kind: HostKind) -> "TwinStep":
        """The step as the baseline does it."""
        return TwinStep(
            TwinColumns.of(_host_values(self.running), kind, self.runtime.device),
            TwinColumns.of(_host_values(self.joining), kind, self.runtime.device),
            self.keep,
        )

    def verify(self, others: Sequence["TwinStep"]) -> None:
        """Both sides of each column are equal after a step.

        Raises:
            MismatchError: one is not.
        """
        ours = self.packed_step()
        for twins in others:
            theirs = twins.step()
            for name in ours.columns():
                require_equal(f"host side of {name}", ours[name].np, theirs.host[name])
                require_equal(f"device side of {name}", ours[name].device.cpu(), theirs.device[name].cpu())


@final
@attrs.frozen(eq=False)
class TwinStep:
    """The baseline's running batch, the requests that join it, and those that stay."""

    running: TwinColumns
    joining: TwinColumns
    keep: npt.NDArray[np.bool_]

    def step(self) -> TwinColumns:
        """The step. Both sides are there at its end."""
        batch = self.running.copied()
        batch.filter(self.keep)
        batch.merge(self.joining)
        batch.advance("seq_lens", 1)
        return batch


def against_twins(runtime: Runtime, *, num_columns: int, rows: int = 256, churn: int = 5) -> Comparison:
    """Packed columns against one tensor per side and column."""
    scene = Scene.of(runtime, num_columns=num_columns, rows=rows, churn=churn)
    twins = [scene.twins(kind) for kind in (TENSORS, ARRAYS)]
    ways: Sequence[tuple[str, Callable[[], object]]] = (
        ("packed", scene.packed_step),
        ("packed, each device side read", scene.packed_step_read),
    )
    return Comparison(
        task=f"decode step, {num_columns} columns, {rows} rows",
        ours=[
            Contender(f"{name}, checks {level.value}", run, level)
            for name, run in ways
            for level in (Level.CHEAP, Level.OFF)
        ],
        baselines=[Contender(one.running.kind.name, one.step) for one in twins],
        verify=lambda: scene.verify(twins),
    )


def against_checks(runtime: Runtime, *, num_columns: int, rows: int = 256, churn: int = 5) -> Comparison:
    """What checks add: the ratio is a step at a level to a step without checks."""
    scene = Scene.of(runtime, num_columns=num_columns, rows=rows, churn=churn)
    return Comparison(
        task=f"decode step, {num_columns} columns, {rows} rows",
        ours=[Contender("checks off", scene.packed_step, Level.OFF)],
        baselines=[Contender(f"checks {level.value}", scene.packed_step, level) for level in (Level.CHEAP, Level.FULL)],
        verify=lambda: scene.verify([scene.twins(TENSORS)]),
    )


def _values(
    runtime: Runtime, kind: type[Decode], rng: np.random.Generator, *, first_slot: int, rows: int
) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, column in kind.columns().items():
        if isinstance(column, TensorColumn):
            values[name] = rng.integers(0, 10_000, rows).astype(column.np_dtype)
    values["slots"] = Slots.from_host(runtime, np.arange(first_slot, first_slot + rows, dtype=np.int64))
    return values


def _host_values(batch: Decode) -> dict[str, Array]:
    return {name: batch[name].np for name in batch.columns()}
