"""What the programs of the micro-cases begin with: tensors that every stream may use, and indices of rows."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from batchstate.runtime import Fence, Stream, numpy_dtype
from tests.race_cases.plain import CaseRuntime

T = TypeVar("T")

_held: weakref.WeakKeyDictionary[CaseRuntime, list[torch.Tensor]] = weakref.WeakKeyDictionary()
"""Tables outlive their program, as an engine's do: else each would end by freeing what streams may still use."""


def table(rt: CaseRuntime, rows: int = 8, columns: int = 4, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Device memory `dtype[rows, columns]` of unlike values; everything that comes later lies behind its making."""
    return _filled(rt, (rows, columns), dtype)


def vector(rt: CaseRuntime, length: int = 8, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Device memory `dtype[length]` of unlike values; everything that comes later lies behind its making."""
    return _filled(rt, (length,), dtype)


def _filled(rt: CaseRuntime, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = np.arange(1, 1 + np.prod(shape), dtype=numpy_dtype(dtype)).reshape(shape)
    made = rt.device_empty(shape, dtype)
    made.copy_(rt.upload([values]).view(0))
    rt.synchronize()
    _held.setdefault(rt, []).append(made)
    return made


def index(rt: CaseRuntime, *places: int) -> torch.Tensor:
    """int64[n] on the device, brought there by the current stream."""
    return given(rt, np.array(places, np.int64))


def given(rt: CaseRuntime, values: Any) -> torch.Tensor:
    """Values of an array, brought to the device by the current stream."""
    return rt.upload([np.asarray(values)]).view(0)


@contextlib.contextmanager
def use(rt: CaseRuntime, stream: Stream, *, behind: Fence | None) -> Iterator[None]:
    """Work on a stream, which first waits for a fence where there is one."""
    with rt.use(stream):
        if behind is not None:
            rt.wait(behind)
        yield


def result_and_fence(rt: CaseRuntime, stream: Stream, operation: Callable[[], T]) -> tuple[T, Fence]:
    """Enqueues an operation on a stream; returns its result and a fence behind it."""
    with rt.use(stream):
        return operation(), rt.record()


def fence_behind(rt: CaseRuntime, stream: Stream, operation: Callable[[], object]) -> Fence:
    """Enqueues an operation on a stream; returns a fence behind it."""
    return result_and_fence(rt, stream, operation)[1]


def record_stream(rt: CaseRuntime, tensor: torch.Tensor, stream: Stream) -> None:
    """What `Tensor.record_stream` does: keeps the memory for a stream, and orders nothing."""
    rt._keep_alive(tensor, stream)


def read_and_written(
    rt: CaseRuntime, left: Stream, right: Stream, read: torch.Tensor, written: torch.Tensor
) -> list[torch.Tensor]:
    """One stream copies a view while another overwrites a view, and nothing orders them."""
    with rt.use(left):
        copy = read.clone()
    with rt.use(right):
        written.fill_(-1)
    return [copy]
