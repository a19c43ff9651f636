"""Kernels that torch does not see (`raw_kernel`), which are enqueued as a whole."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from batchstate.errors import ArgumentError, DeviceError
from batchstate.testing.sim.calls import Call, packed, written
from batchstate.testing.sim.places import Places
from batchstate.testing.sim.queues import Task
from batchstate.testing.watching.memory import Place
from batchstate.testing.watching.sites import site


def task_of(
    name: str,
    function: Callable[..., Any],
    given: tuple[Sequence[Any], Mapping[str, Any]],
    declared: Sequence[torch.Tensor],
    places: Places,
    step: int,
) -> Task:
    """A call of a raw kernel, to be run later.

    Raises:
        ArgumentError: it declares nothing, or something that is not among its arguments.
        DeviceError: an argument lies in pageable host memory.
    """
    args, kwargs = given
    tensors = list(_tensors((*args, *kwargs.values())))
    for one in tensors:
        if one.ndim and places.of(one) is Place.HOST:
            raise DeviceError(
                f"{name} of a host tensor {tuple(one.shape)}",
                value=tuple(one.shape),
                remedy="bring it to the device first, with `Runtime.upload`, or use pinned memory",
            )
    memory = [one.untyped_storage()._cdata for one in tensors]
    missing = [one for one in declared if one.untyped_storage()._cdata not in memory]
    if missing or not declared:
        raise ArgumentError(
            f"the raw kernel {name!r} declares {'memory that it is not given' if missing else 'nothing'}",
            value=name,
            remedy="pass each tensor as an argument and say `reads=` and `writes=`: it runs later, on its arguments",
        )

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.data if places.of(tensor) is Place.PINNED else places.pack(tensor)

    call_args = [packed(one, pack) for one in args]
    call_kwargs = {key: packed(one, pack) for key, one in kwargs.items()}
    pinned = next((places.memories.of(one) for one in tensors if places.of(one) is Place.PINNED), None)
    everything = (*call_args, *call_kwargs.values())
    return Task(name, step, site(3), Call(function, call_args, call_kwargs), lambda: written(everything), pinned)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for one in values:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += _tensors(one)
    return found
