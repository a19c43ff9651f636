"""Relay entries on their way to the host."""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch

from batchstate import invariants, levels
from batchstate.contracts import Contract
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.relaying.entries import Publication
from batchstate.relaying.fields import RelayField
from batchstate.runtime import Fence, Runtime, Stream
from batchstate.runtime.download import Download
from batchstate.values.device_side import DeviceSide, Made
from batchstate.violations import Where


@final
class Prefetched(Mapping[str, MirroredTensor]):
    """Fields of some requests, asked for with `FutureMap.prefetch`; row i is that of `slots[i]`.

    Reading a field waits for the copy, if it has not run yet: `prefetched["tokens"]`, or `resolve()` for all. What
    becomes of the slots meanwhile does not matter: the rows were taken out when they were asked for.

    Attributes:
        slots: the requests.
    """

    def __init__(
        self,
        runtime: Runtime,
        slots: Slots,
        fields: Mapping[str, RelayField],
        rows: Sequence[torch.Tensor],
        made: tuple[Stream, Fence],
        download: Download,
        publications: Sequence[Publication],
        where: Where,
    ) -> None:
        self.slots = slots
        self._runtime = runtime
        self._fields = fields
        self._rows = rows
        self._made = made
        self._download = download
        self._publications = publications
        self._where = where
        self._values: dict[str, MirroredTensor] | None = None

    def __repr__(self) -> str:
        return f"Prefetched({', '.join(self._fields)} of {len(self.slots)} requests)"

    # Two prefetches are never equal; a mapping would compare values, and wait for them.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def ready(self) -> bool:
        """Whether `resolve` would return at once. Never waits."""
        return self._values is not None or (not self._runtime.capturing and self._download.ready())

    def resolve(self) -> Mapping[str, MirroredTensor]:
        """Each field as an exact value, both sides from one read of the relay. Waits for that copy alone.

        Raises:
            OwnerThreadError: called from a second thread.
            CaptureError: a stream is being captured; what is waited for may then not be asked.
            Violation: FUTURE_ORDER, SENTINEL_ESCAPED, STAGING_REUSED, at `cheap`.
        """
        if self._values is None:
            self._runtime.check_owner(f"{self._download.name}: resolve")
            arrays = self._download.resolve()
            if levels.cheap:
                self._check_order()
            values = {}
            for (name, field), array, device in zip(self._fields.items(), arrays, self._rows, strict=True):
                if levels.cheap and field.non_negative:
                    where: Where = {**self._where, "column": name}
                    invariants.sentinel_escaped(array.reshape(-1), **where)
                values[name] = MirroredTensor(
                    self._runtime,
                    array,
                    DeviceSide(None, Made(device, *self._made, set())),
                    dtype=field.dtype,
                    shape=array.shape,
                    contract=Contract.EXACT,
                    name=name,
                )
                values[name].check("resolve")
            self._values = values
        return self._values

    def _check_order(self) -> None:
        """What was read had been published by then, as its own fence says, and has landed."""
        for made in self._publications:
            self._ordered(made.fence, made.by, f"a wait for {made.by}")
        self._ordered(self._download.done, "the copy from the device", "a wait for the copy")

    def _ordered(self, fence: Fence, writer: str, missing: str) -> None:
        invariants.future_order(fence.query(), writer, "the host", missing, **self._where)

    def __getitem__(self, field: str) -> MirroredTensor:
        if field not in self._fields:
            raise KeyError(f"{field!r} was not prefetched, only {', '.join(self._fields)}")
        return self.resolve()[field]

    def __contains__(self, field: object) -> bool:
        return field in self._fields  # and waits for nothing, which `__getitem__` would

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)
