"""One decode step of batch state: some requests leave, others join, all advance, the device hears of it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.batch import Batch
from batchstate.columns import TensorColumn, mirrored, slot_column
from batchstate.levels import Level
from batchstate.mirror import Slots
from batchstate.runtime import Runtime
from batchstate.static import StaticBuffers
from benchmarks.baselines.persistent_buffers import MakePair, PersistentBuffers, PinnedPair
from benchmarks.baselines.staged_slots import StagedSlots
from benchmarks.baselines.twin_columns import ARRAYS, TENSORS, HostKind, TwinColumns
from benchmarks.comparisons import Asked, Comparison, require_equal
from benchmarks.timing import Contender

Array = npt.NDArray[Any]

FILLERS = (torch.int64, torch.float32, torch.int32, torch.float32, torch.int32)
"""Dtypes of the columns that merely come along, in turns: much what sampling parameters are."""


class Decode(Batch):
    """The two columns that each batch here has."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


class DecodeBaseline(Protocol):
    """Another way to do the step.

    Attributes:
        name: for reports.
        keeps_order: whether its rows are in the order of our batch. Else they are compared by slot.
    """

    @property
    def name(self) -> str: ...

    @property
    def keeps_order(self) -> bool: ...

    def step(self) -> object:
        """The step. Both sides are there at its end."""
        ...

    def after_one_step(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Host and device side of each column, one step after the start."""
        ...


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
        batch = self.running.next_batch(keep=self.keep, joining=self.joining, advance="seq_lens")
        batch.upload()
        return batch

    def packed_operations(self) -> Decode:
        """The same in three operations, for engines that do them in different places."""
        batch = self.running.filter(self.keep).merge(self.joining).advance("seq_lens", 1)
        batch.upload()
        return batch

    def packed_step_read(self) -> dict[str, torch.Tensor]:
        """The step, and the forward asks for the device side of each column."""
        return self.packed_step().on_device()

    def static_step(self, buffers: StaticBuffers) -> StaticBuffers:
        """The step at the fixed addresses of a graph, whose tensors are there already."""
        self.running.next_batch(keep=self.keep, joining=self.joining, advance="seq_lens").to_static(buffers)
        return buffers

    def buffers(self) -> StaticBuffers:
        """Fixed addresses of as many rows as the step has."""
        rows = int(np.count_nonzero(self.keep)) + len(self.joining)
        return StaticBuffers(self.runtime, type(self.running), rows=rows)

    def packed_contenders(self) -> list[Contender]:
        """The step as this library does it, at two levels of checks."""
        return [
            Contender(f"packed, checks {level.value}", self.packed_step, level) for level in (Level.CHEAP, Level.OFF)
        ]

    def twins(self, kind: HostKind) -> "TwinStep":
        """The step as the baseline does it."""
        return TwinStep(
            TwinColumns.of(_host_values(self.running), kind, self.runtime.device),
            TwinColumns.of(_host_values(self.joining), kind, self.runtime.device),
            self.keep,
        )

    def persistent(self, name: str = "persistent buffers", make: MakePair = PinnedPair) -> PersistentBuffers:
        """The step with one copy a column, out of buffers that stay."""
        running, joining = _host_values(self.running), _host_values(self.joining)
        return PersistentBuffers(name, running, joining, self.keep, self.runtime.device, make)

    def staged(self) -> StagedSlots:
        """The step in tables whose rows stay."""
        return StagedSlots(_host_values(self.running), _host_values(self.joining), self.keep, self.runtime.device)

    def verify(self, others: Sequence[DecodeBaseline]) -> None:
        """Both sides of each column are equal after a step.

        Raises:
            MismatchError: one is not.
        """
        ours = self.packed_step()
        same = [("three operations", self.packed_operations().on_device()), ("read at once", self.packed_step_read())]
        same.append(("static buffers", dict(self.static_step(self.buffers()))))
        for way, sides in same:
            for name in ours.columns():
                require_equal(f"device side of {name}: {way}", ours[name].device.cpu(), sides[name].cpu())
        for other in others:
            host, device = other.after_one_step()
            every = np.arange(len(host["slots"]))
            mine, theirs = (every, every) if other.keeps_order else (ours.slots.np.argsort(), host["slots"].argsort())
            for name in ours.columns():
                require_equal(f"host side of {name}: {other.name}", ours[name].np[mine], host[name][theirs])
                require_equal(
                    f"device side of {name}: {other.name}", ours[name].device.cpu()[mine], device[name][theirs]
                )


@final
@attrs.frozen(eq=False)
class TwinStep:
    """The baseline's running batch, the requests that join it, and those that stay."""

    running: TwinColumns
    joining: TwinColumns
    keep: npt.NDArray[np.bool_]

    @property
    def name(self) -> str:
        """The kind of the host side."""
        return self.running.kind.name

    @property
    def keeps_order(self) -> bool:
        """It does what our batch does."""
        return True

    def step(self) -> TwinColumns:
        """The step. Both sides are there at its end."""
        batch = self.running.copied()
        batch.filter(self.keep)
        batch.merge(self.joining)
        batch.advance("seq_lens", 1)
        return batch

    def after_one_step(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Host and device side of each column, one step after the start."""
        batch = self.step()
        return (
            {name: np.asarray(values) for name, values in batch.host.items()},
            {name: values.cpu().numpy() for name, values in batch.device.items()},
        )


def against_twins(runtime: Runtime, *, num_columns: int, rows: int = 256, churn: int = 5) -> Comparison:
    """Packed columns against one tensor per side and column."""
    scene = Scene.of(runtime, num_columns=num_columns, rows=rows, churn=churn)
    twins = [scene.twins(kind) for kind in (TENSORS, ARRAYS)]
    ways: Sequence[tuple[str, Callable[[], object]]] = (
        ("packed", scene.packed_step),
        ("packed, in three operations", scene.packed_operations),
        ("packed, each device side read", scene.packed_step_read),
        ("packed, to fixed addresses", functools.partial(scene.static_step, scene.buffers())),
    )
    return Comparison(
        task=f"decode step, {num_columns} columns, {rows} rows",
        ours=[
            Contender(f"{name}, checks {level.value}", run, level)
            for name, run in ways
            for level in (Level.CHEAP, Level.OFF)
        ],
        baselines=[Contender(way.name, way.step) for way in twins],
        verify=lambda: scene.verify(twins),
        asks=_asked(runtime, num_columns, rows),
    )


def against_stable_rows(runtime: Runtime, *, num_columns: int, rows: int = 256, churn: int = 5) -> Comparison:
    """Packed columns against the two ways that move few rows or none: persistent buffers, and stable slots."""
    scene = Scene.of(runtime, num_columns=num_columns, rows=rows, churn=churn)
    others: Sequence[DecodeBaseline] = (scene.persistent(), scene.staged())
    return Comparison(
        task=f"decode step, {num_columns} columns, {rows} rows",
        ours=scene.packed_contenders(),
        baselines=[Contender(way.name, way.step) for way in others],
        verify=lambda: scene.verify(others),
    )


def against_checks(runtime: Runtime, *, num_columns: int, rows: int = 256, churn: int = 5) -> Comparison:
    """The cost of checks: the ratio is a step at a level to a step without checks."""
    scene = Scene.of(runtime, num_columns=num_columns, rows=rows, churn=churn)
    return Comparison(
        task=f"decode step, {num_columns} columns, {rows} rows",
        ours=[Contender("checks off", scene.packed_step, Level.OFF)],
        baselines=[Contender(f"checks {level.value}", scene.packed_step, level) for level in (Level.CHEAP, Level.FULL)],
        verify=lambda: scene.verify([scene.twins(TENSORS)]),
    )


def _asked(runtime: Runtime, num_columns: int, rows: int) -> dict[tuple[str, str], Asked]:
    """The demands on the packed step, at both levels, against tensors: more on a device that is not the host."""
    targets = {12: 8.0 if runtime.device.type == "cuda" else 5.0, 40: 12.0}
    if rows != 256 or num_columns not in targets:
        return {}
    asked = Asked(target=targets[num_columns])
    return {(f"packed, checks {level.value}", TENSORS.name): asked for level in (Level.CHEAP, Level.OFF)}


def _values(
    runtime: Runtime, kind: type[Decode], rng: np.random.Generator, *, first_slot: int, rows: int
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, column in kind.columns().items():
        if isinstance(column, TensorColumn):
            values[name] = rng.integers(0, 10_000, rows).astype(column.np_dtype)
    values["slots"] = Slots.from_host(runtime, np.arange(first_slot, first_slot + rows, dtype=np.int64))
    return values


def _host_values(batch: Decode) -> dict[str, Array]:
    return {name: batch[name].np for name in batch.columns()}


def against_floors(runtime: Runtime, *, num_columns: int, rows: int = 256, churn: int = 5) -> Comparison:
    """A packed step against one bare copy of as many bytes, and against one launch of a kernel for one number."""
    scene = Scene.of(runtime, num_columns=num_columns, rows=rows, churn=churn)
    nbytes = bytes_of_a_step(scene)
    source = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    if runtime.device.type == "cuda":
        source = source.pin_memory()
    target, number = (torch.zeros(n, dtype=torch.uint8, device=runtime.device) for n in (nbytes, 1))

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    def launch() -> None:
        number.add_(1)

    def verify() -> None:
        before = int(number)
        copy()
        launch()
        require_equal("copied bytes", target.cpu(), source)
        require_equal("the number", number.cpu(), torch.tensor([before + 1], dtype=torch.uint8))
        require_equal("bytes of a step", bytes_of_a_step(scene), nbytes)

    return Comparison(
        task=f"decode step, {num_columns} columns, {rows} rows",
        ours=scene.packed_contenders(),
        baselines=[Contender(f"floor: one copy of {nbytes:,} bytes", copy), Contender("floor: one launch", launch)],
        verify=verify,
    )


def bytes_of_a_step(scene: Scene) -> int:
    """Bytes that the packed step sends, alignment included."""
    before = scene.runtime.counters.snapshot()
    scene.packed_step()
    return (scene.runtime.counters - before).host_to_device_bytes
