"""Requests that publish, and `Prefetched`: entries of a relay on their way to the host."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, Protocol, Unpack, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._origin import RowSet
from batchstate._relay import FUTURE_ORDER, Use
from batchstate._relay_field import RelayField
from batchstate.invariants import times_checked
from batchstate.mirror import DeviceSide, MirroredTensor, Slots
from batchstate.runtime.base import Download, Fence, Runtime, Stream
from batchstate.runtime.memory import ReadyTensor, numpy_dtype
from batchstate.violations import Where

Array = npt.NDArray[Any]


class Publishing(Protocol):
    """Live requests that publish, each named once."""

    @property
    def num_rows(self) -> int:
        """How many there are with padded rows, which publish nothing."""

    def index(self, stream: Stream) -> torch.Tensor:
        """Their slots on the device, int64[n], safe on `stream`, the current one."""

    def handles(self) -> Slots:
        """Their handles."""


@final
@attrs.define
class LiveSlots:
    """Handles that publish; see `Publishing`."""

    slots: Slots
    num_reqs: int

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    def index(self, stream: Stream) -> torch.Tensor:
        return self.slots.device if self.num_reqs == self.num_rows else self.slots.device[: self.num_reqs]

    def handles(self) -> Slots:
        return unpadded(self.slots)


def unpadded(slots: Slots) -> Slots:
    """The rows before the padding at their end."""
    rows = slots.np
    if not rows.size or rows[-1]:
        return slots
    zeros = int(np.count_nonzero(rows == 0))
    padded = not rows[len(slots) - zeros :].any()
    return slots.split([len(slots) - zeros, zeros])[0] if padded else slots


class Source(NamedTuple):
    """The relay that entries come from: its runtime, its fields, its name in reports, and the pool of its slots."""

    runtime: Runtime
    fields: Mapping[str, RelayField]
    label: str
    pool_id: int


@final
class Prefetched(Mapping[str, MirroredTensor]):
    """Fields of some requests, asked for with `FutureMap.prefetch`; row i is that of `slots[i]`.

    Reading a field waits for the copy, if it has not run yet: `prefetched["tokens"]`, or `resolve()` for all. The slots
    may be freed meanwhile: the rows were taken out when they were asked for, and stay those of the requests that had
    the slots then. `prefetched["tokens"].aligned(batch.slots)` has the rows of a batch.
    """

    _arrays: list[Array] | None = None  # until they have landed
    counting: tuple[str, Callable[[], Array]] | None = None  # of tokens accepted: the field, and those put in, int64[n]

    def __init__(
        self,
        source: Source,
        names: Sequence[str],
        num_reqs: int,
        slots: Callable[[], Slots],
        download: Download,
        publishes: Sequence[Use],
        read: tuple[Stream, Fence] | None = None,
        rows: Sequence[torch.Tensor] | None = None,
        parts: Sequence[slice] | None = None,
    ) -> None:
        """For the library. The relay itself is not kept: its memory goes with it.

        `rows` were selected on a stream, behind which there is a fence: `read`. They are the device side, which else is
        made of the host's when it is asked for, unless all came in one piece, with the `parts` of each field in it.
        """
        self._source, self._names, self.num_reqs, self._slots = source, names, num_reqs, slots
        self._download, self._publishes = download, publishes
        self._read, self._parts, self._rows = read, parts, None if parts is not None else rows
        self._values: dict[str, MirroredTensor] = {}

    def __repr__(self) -> str:
        return f"Prefetched({', '.join(self._names)} of {self.num_reqs} requests)"

    @property
    def slots(self) -> Slots:
        """The requests."""
        return self._slots()

    @property
    def _where(self) -> Where:
        return {"object": self._source.label, "operation": "resolve", "step": self._download.step}

    # Two prefetches are never equal; a mapping would compare values, and wait for them.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def runtime(self) -> Runtime:
        """The runtime of the relay."""
        return self._source.runtime

    def ready(self) -> bool:
        """Whether `resolve` would return at once. Never waits."""
        return self._arrays is not None or (not self.runtime.capturing and self._download.ready())

    def resolve(self) -> Mapping[str, MirroredTensor]:
        """Each field as an exact value, both sides from one read of the relay. Waits for that copy alone.

        Raises:
            Violation: FUTURE_ORDER, SENTINEL_ESCAPED, STAGING_REUSED, LENGTH_ORDER (see `PlannedStep.accept`), at
                `cheap`.
        """
        if self._arrays is None:
            runtime, fields, _, _ = self._source
            download, names = self._download, self._names
            if get_ident() != runtime.owner.ident:
                runtime.check_owner(f"{download.name}: resolve")
            arrays = download.resolve()
            if self._parts is not None:
                pairs = zip(self._parts, (fields[name] for name in names), strict=True)
                pieces = [(arrays[0][:, part].copy().view(numpy_dtype(field.dtype)), field) for part, field in pairs]
                arrays = [piece.reshape(len(piece), *field.shape) for piece, field in pieces]
            if levels.cheap:
                done, publishes = download.done, self._publishes
                times_checked[FUTURE_ORDER] += 1 + len(publishes)
                for publish in publishes:
                    if publish.fence is not done:
                        self._check_order(publish.fence, publish.by, publish.by)
                if not done.query():
                    self._check_order(done, "the copy from the device", "the copy")
                for i, name in enumerate(names):
                    if fields[name].refuses:
                        where: Where = {**self._where, "column": name}
                        invariants.sentinel_escaped(arrays[i].reshape(-1), **where)
                if self.counting is not None and self.counting[0] in names:
                    counted, put_in = self.counting
                    of_field: Where = {**self._where, "column": counted}
                    check_accepted(arrays[names.index(counted)], put_in(), **of_field)
            self._arrays = arrays
            if self._rows is not None:
                for name in names:
                    self[name].check("resolve")
        return self

    def _value(self, i: int) -> MirroredTensor:
        """Field number `i`, which has landed."""
        runtime, fields, _, pool_id = self._source
        name, device = self._names[i], None
        array: Array = self._arrays[i]  # type: ignore[index]
        if self._rows is not None and self._read is not None:
            device = DeviceSide(ReadyTensor(self._rows[i], *self._read, {}))
        # Not by a method: a value that refers to this object, which has it, would be a cycle.
        rows = RowSet(0, partial(_numbers_of, self._slots), pool_id)
        return MirroredTensor(
            runtime, array, device, dtype=fields[name].dtype, shape=array.shape, name=name, row_set=rows
        )

    def _check_order(self, fence: Fence | None, writer: str, awaited: str) -> None:
        """The values had been published when they were read, as a fence says, and have landed."""
        if fence is None or not fence.query():
            invariants.future_order(False, writer, "the host", f"a wait for {awaited}", **self._where)

    def __getitem__(self, field: str) -> MirroredTensor:
        if field not in self._names:
            raise KeyError(f"{field!r} was not prefetched, only {', '.join(self._names)}")
        if self._arrays is None:
            self.resolve()
        value = self._values.get(field)
        if value is None:
            value = self._values[field] = self._value(self._names.index(field))
        return value

    def __contains__(self, field: object) -> bool:
        return field in self._names  # and waits for nothing, which `__getitem__` would

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _numbers_of(slots: Callable[[], Slots]) -> tuple[Array, Array]:
    handles = slots()
    return handles.np, handles.generations


def check_accepted(accepted: Array, put_in: Array, **where: Unpack[Where]) -> None:
    """LENGTH_ORDER: a request keeps between none and all of the tokens that it put in."""

    def explain(accepted: int, put_in: int, most: int) -> tuple[str, str]:
        problem = f"a request accepted {accepted} tokens of a step in which it put in {put_in}"
        return problem, "accept 1 + the drafts that were right, or fewer, in the order of the rows that sample"

    invariants.length_order(accepted, put_in, int(put_in.max(initial=0)), explain=explain, **where)
