"""The dtypes that torch and numpy share, and the way from one to the other."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import DtypeError

NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
BITS = {torch.bfloat16: torch.int16}
"""Dtypes that numpy lacks, and the integers as which their bits lie on the host and cross to the device."""

TORCH_DTYPES = {dtype: torch_one for torch_one, dtype in NUMPY_DTYPES.items()}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Numpy's dtype of the same bits.

    Raises:
        DtypeError: numpy has none (bfloat16, for example).
    """
    try:
        return NUMPY_DTYPES[dtype]
    except (KeyError, TypeError):
        raise _unshared(dtype) from None


def host_dtype(dtype: torch.dtype) -> tuple[np.dtype[Any], torch.dtype | None]:
    """Numpy's dtype in which values of `dtype` lie on the host, and `dtype` itself if that has their bits alone.

    Raises:
        DtypeError: none.
    """
    return numpy_dtype(BITS.get(dtype, dtype)), dtype if dtype in BITS else None


def torch_dtype(dtype: npt.DTypeLike) -> torch.dtype:
    """Torch's dtype of the same bits.

    Raises:
        DtypeError: torch has none (strings and objects, for example).
    """
    try:
        return TORCH_DTYPES[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise _unshared(dtype) from None


def _unshared(dtype: object) -> DtypeError:
    if isinstance(dtype, torch.dtype):
        names = ", ".join(str(one) for one in NUMPY_DTYPES.values())
        return DtypeError(f"numpy has no dtype {dtype}", value=dtype, remedy=f"use one of: {names}")
    return DtypeError(f"expected a torch dtype, got {dtype!r}", value=dtype, remedy=dtype_meant(dtype))


def dtype_meant(given: object) -> str:
    """A remedy: the torch dtype that stands for what was given in its place."""
    try:
        meant = TORCH_DTYPES[np.dtype(given)]  # type: ignore[call-overload]
    except (KeyError, TypeError, ValueError):
        meant = None
    return f"pass {meant}" if meant is not None and given is not None else "pass a torch dtype, such as torch.int64"
