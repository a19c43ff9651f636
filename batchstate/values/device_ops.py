"""What runs on the device: one function a kernel, for `Runtime.launch`.

torch has few kernels for unsigned dtypes wider than a byte. Moving and adding integers is the same on signed bits, so
those are viewed as signed for the operation.
"""

from collections.abc import Sequence

import torch

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def signed_twin(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose kernels serve `dtype`: of the same width, and signed where `dtype` has none of its own."""
    return _SIGNED.get(dtype, dtype)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(signed_twin(tensor.dtype)) if tensor.dtype in _SIGNED else tensor


def select_rows(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`source[rows]`; rows int64[k]. One kernel."""
    return torch.index_select(_movable(source), 0, rows).view(source.dtype)


def concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All rows of `parts`. One kernel."""
    return torch.cat([_movable(part) for part in parts]).view(parts[0].dtype)


def replace_rows(source: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`source` with `values` at `rows`, in new memory. Two kernels: a copy and a scatter."""
    return torch.index_copy(_movable(source), 0, rows, _movable(values)).view(source.dtype)


def put_rows(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """`values` into `target` at `rows` int64[k], in place. One kernel."""
    _movable(target).index_copy_(0, rows, _movable(values))


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """`source` into `target`, of one shape and dtype, in place. One kernel."""
    target.copy_(source)


def add(source: torch.Tensor, amount: torch.Tensor | int) -> torch.Tensor:
    """`source + amount`, in new memory; the caller has shown that it fits. One kernel."""
    return torch.add(_movable(source), amount).view(source.dtype)
