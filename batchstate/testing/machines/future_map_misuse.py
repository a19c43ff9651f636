"""Ways to misuse a `FutureMap`."""

from collections.abc import Callable
from typing import Any, final

import attrs
import numpy as np
import torch

from batchstate.errors import (
    ArgumentError,
    DeclarationError,
    DeviceError,
    DtypeError,
    ShapeError,
    ValueOverflowError,
)
from batchstate.future_map import FutureMap, relay_field
from batchstate.indices import Pages, Slots
from batchstate.mirror import MirroredTensor
from batchstate.runtime import Runtime, open_runtime
from batchstate.testing.misuse import Misuse
from batchstate.violations import Code


@final
@attrs.frozen(eq=False)
class RelayCase:
    """A relay, and handles of its live requests, at least one.

    Attributes:
        relay: to be misused.
        slots: the handles.
        foreign: handles of another pool.
    """

    relay: FutureMap
    slots: Slots
    foreign: Slots

    @property
    def runtime(self) -> Runtime:
        """The device."""
        return self.relay.runtime

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A device tensor."""
        return torch.zeros(shape, dtype=dtype, device=self.runtime.device)

    def column(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A device tensor with a row for each request."""
        return self.zeros(len(self.slots), *shape, dtype=dtype)


def _publishes(**makes: Callable[[RelayCase], Any]) -> Callable[[RelayCase], object]:
    """A publish for all requests."""
    return lambda case: case.relay.publish(case.slots, **{name: make(case) for name, make in makes.items()})


def _seeds(**makes: Callable[[int], object]) -> Callable[[RelayCase], object]:
    """A seed for all requests; the values are made from their number."""
    return lambda case: case.relay.seed(case.slots, **{name: make(len(case.slots)) for name, make in makes.items()})


def _elsewhere(case: RelayCase) -> MirroredTensor:
    return MirroredTensor.from_host(open_runtime(case.runtime.device), np.zeros(len(case.slots), np.int64))


def _after_padding(case: RelayCase) -> Slots:
    zero = Slots.from_host(case.runtime, [0], generations=[0], pool=case.relay.slots.identity)
    return Slots.cat([zero, case.slots])


def _twice(case: RelayCase) -> Slots:
    return case.slots.take([0, 0])


def _made(fields: Any) -> Callable[[RelayCase], object]:
    return lambda case: FutureMap(case.relay.slots, fields)


MISUSES: tuple[Misuse[RelayCase], ...] = (
    Misuse("publish an undeclared field", (DeclarationError,), _publishes(tokens=RelayCase.column)),
    Misuse("publish nothing", (DeclarationError,), _publishes()),
    Misuse("publish a list", (DtypeError,), _publishes(token=lambda case: [0] * len(case.slots))),
    Misuse("publish int32", (DtypeError,), _publishes(token=lambda case: case.column(dtype=torch.int32))),
    Misuse("publish a row too many", (ShapeError,), _publishes(token=lambda case: case.zeros(len(case.slots) + 1))),
    Misuse("publish drafts without a shape", (ShapeError,), _publishes(drafts=RelayCase.column)),
    Misuse("publish a scalar", (ShapeError,), _publishes(token=RelayCase.zeros)),
    Misuse(
        "publish from another device",
        (DeviceError,),
        _publishes(token=lambda case: torch.zeros(len(case.slots), dtype=torch.int64, device="meta")),
    ),
    Misuse("publish a value of another runtime", (DeviceError,), _publishes(token=_elsewhere)),
    Misuse(
        "publish a good field and a bad one", (DtypeError,), _publishes(token=RelayCase.column, lengths=lambda _: None)
    ),
    Misuse(
        "publish for a slot twice",
        (Code.SLOT_SHARED,),
        lambda case: case.relay.publish(_twice(case), token=case.zeros(2)),
    ),
    Misuse(
        "publish behind a padded row",
        (Code.SLOT_ZERO_ALLOCATED,),
        lambda case: case.relay.publish(_after_padding(case), token=case.zeros(len(case.slots) + 1)),
    ),
    Misuse(
        "publish for another pool",
        (ArgumentError,),
        lambda case: case.relay.publish(case.foreign, token=case.zeros(len(case.foreign))),
    ),
    Misuse(
        "publish for pages",
        (Code.UNIT_MISMATCH,),
        lambda case: case.relay.publish(Pages.from_host(case.runtime, [1]), token=case.zeros(1)),  # type: ignore[arg-type]
    ),
    Misuse("seed a row too few", (ShapeError,), _seeds(token=lambda n: [0] * (n - 1))),
    Misuse("seed drafts without a shape", (ShapeError,), _seeds(drafts=lambda n: np.zeros(n, np.int64))),
    Misuse("seed half a token", (DtypeError,), _seeds(token=lambda n: [0.5] * n)),
    Misuse("seed more than int64", (ValueOverflowError,), _seeds(token=lambda n: [2**63] * n)),
    Misuse("seed a stand-in", (Code.SENTINEL_ESCAPED,), _seeds(token=lambda n: [0] * (n - 1) + [-1])),
    Misuse("seed a stand-in among drafts", (Code.SENTINEL_ESCAPED,), _seeds(drafts=lambda n: [[0, -1]] * n)),
    Misuse(
        "gather what only the host reads", (DeclarationError,), lambda case: case.relay.gather(case.slots, "accepted")
    ),
    Misuse("gather an undeclared field", (DeclarationError,), lambda case: case.relay.gather(case.slots, "tokens")),
    Misuse("gather by numbers", (DtypeError,), lambda case: case.relay.gather(case.slots.np, "token")),  # type: ignore[arg-type]
    Misuse("prefetch nothing", (DeclarationError,), lambda case: case.relay.prefetch(case.slots)),
    Misuse(
        "prefetch a field twice", (DeclarationError,), lambda case: case.relay.prefetch(case.slots, "token", "token")
    ),
    Misuse(
        "prefetch what only the next forward reads",
        (DeclarationError,),
        lambda case: case.relay.prefetch(case.slots, "drafts", "token"),
    ),
    Misuse(
        "discard an undeclared field", (DeclarationError,), lambda case: case.relay.discard(case.slots, "token", "no")
    ),
    Misuse("states of an undeclared field", (DeclarationError,), lambda case: case.relay.states(case.slots, "tokens")),
    Misuse(
        "inputs of no plan",
        (ArgumentError,),
        lambda case: case.relay.resolve_forward_inputs(None, None, ids="token"),  # type: ignore[arg-type]
    ),
    Misuse("a relay of no fields", (DeclarationError,), _made({})),
    Misuse("a relay of no field", (DeclarationError,), _made({"token": torch.int64})),
    Misuse("a relay of no name", (DeclarationError,), _made({"a b": relay_field(torch.int64)})),
    Misuse("a relay over no pool", (ArgumentError,), lambda case: FutureMap(case.runtime, {})),  # type: ignore[arg-type]
    Misuse("a field for nobody", (DeclarationError,), lambda case: relay_field(torch.int64, read_by="nobody")),
    Misuse(
        "a field for the host of what numpy lacks",
        (DtypeError,),
        lambda case: relay_field(torch.bfloat16, read_by="host"),
    ),
    Misuse("a field of a negative size", (ArgumentError,), lambda case: relay_field(torch.int64, (-1,))),
)
