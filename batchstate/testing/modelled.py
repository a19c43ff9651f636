"""A mirrored value beside what its two sides have to hold."""

from collections.abc import Callable
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate.contracts import Contract
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.runtime import Runtime
from batchstate.testing.machine import agree, agree_on

Array = npt.NDArray[Any]
Operation = Callable[[Array], Array]


@final
@attrs.frozen(eq=False)
class Modelled:
    """A value and its model.

    Attributes:
        value: the value.
        host: what its host side holds, or None for `device_only`.
        device: what its device side holds, or will once it is made.
        generations: of slots, int64[n]; None for other values.
    """

    value: MirroredTensor
    host: Array | None
    device: Array
    generations: Array | None = None

    def __repr__(self) -> str:
        sides = [] if self.host is None else [f"host {self.host.tolist()}"]
        if self.host is None or self.value.contract is Contract.UPPER_BOUND:
            sides.append(f"device {self.device.tolist()}")
        if self.generations is not None:
            sides.append(f"generations {self.generations.tolist()}")
        return f"<{self.value!r}: {', '.join(sides)}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would list the fields

    def __len__(self) -> int:
        return len(self.device)

    def moved(self, value: MirroredTensor, operation: Operation) -> "Modelled":
        """The model of `value`, to which `operation` moved the rows of this one."""
        return Modelled(
            value,
            None if self.host is None else operation(self.host),
            operation(self.device),
            None if self.generations is None else operation(self.generations),
        )

    def judge(self) -> None:
        """Compares the value with the model, without making its device side.

        Raises:
            DisagreementError, Violation: they differ.
        """
        value = self.value
        value.check("judge")  # first: a law that was broken says more than a difference
        agree(self.device.shape, value.shape, f"shape of {value!r}")
        if self.host is not None:
            agree_on(self.host, value.np, f"host side of {value!r}")
        if isinstance(value, Slots) and self.generations is not None:
            agree_on(self.generations, value.generations, f"generations of {value!r}")
        if value.device_side.made is not None:
            self.judge_device()

    def judge_device(self) -> None:
        """Compares the device side, which is made if it does not exist, with the model.

        Raises:
            Violation: MIRROR_EQUAL; the model stands for the host side.
        """
        device = self.value.runtime.inspect(self.value.device)
        invariants.mirror_equal(self.device, device, object=f"model of {self.value!r}", operation="judge")


def value_of(runtime: Runtime, host: Array, device: Array, contract: Contract, *, touch: bool = False) -> Modelled:
    """A value with these sides.

    Args:
        runtime: the device.
        host: the host side; for `exact` and `host_only` the device side too.
        device: the device side of the others.
        contract: how they relate.
        touch: make the device side now.
    """
    if contract in (Contract.EXACT, Contract.HOST_ONLY):
        value = MirroredTensor.from_host(runtime, host, contract=contract)
    elif contract is Contract.UPPER_BOUND:
        value = MirroredTensor.from_pair(runtime, host, _uploaded(runtime, device), contract=contract)
    else:
        value = MirroredTensor.from_device(runtime, _uploaded(runtime, device))
    if touch:
        _ = value.device
    return Modelled(value, None if contract is Contract.DEVICE_ONLY else np.array(host), np.array(device))


def _uploaded(runtime: Runtime, values: Array) -> Any:
    return runtime.upload([values]).view(0).clone()
