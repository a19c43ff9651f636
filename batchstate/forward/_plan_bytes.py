"""A plan as bytes, for other ranks: a header with a checksum, then its arrays, each with its name, dtype and shape."""

import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from batchstate._arrays import Array
from batchstate.errors import ArgumentError, DtypeError
from batchstate.runtime import NUMPY_DTYPES

Ints = npt.NDArray[np.int64]

_MAGIC = b"batchstate plan 1\n"
_SIZES = struct.Struct("<III")  # bytes of the header, checksum of the header, checksum of the arrays
_DTYPES = {str(dtype): dtype for dtype in NUMPY_DTYPES.values()}
_FIELDS = {
    "num_tokens": int,
    "num_padded_tokens": int,
    "bounded": bool,
    "exact": bool,
    "reach": int,
    "has_ids": bool,
    "deferred": bool,
    "int32": list,
}
_REQUIRED: tuple[str, ...] = (
    "slots",
    "generations",
    "query_lens",
    "seq_lens",
    "relay_rows",
    "sample_rows",
    "extra positions",
)
_REQUIRED += ("extra query_start_loc", "extra kv_lens", "extra last_token_indices")
_REMEDY = "pass what `ForwardPlan.to_bytes` returned, whole, from a rank with the same version of the library"


def packed(header: Mapping[str, object], arrays: Mapping[str, Array]) -> bytes:
    """The header, which JSON can hold, and the arrays."""
    listed = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": listed}).encode()
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return _MAGIC + _SIZES.pack(len(text), zlib.crc32(text), zlib.crc32(body)) + text + body


def unpacked(data: object, what: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """The header and the arrays, each in memory of its own.

    Raises:
        DtypeError: no bytes. ArgumentError: bytes that `packed` did not make.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise DtypeError(f"{what}: expected bytes, got {type(data).__name__}", value=data, remedy=_REMEDY)
    raw, start = bytes(data), len(_MAGIC) + _SIZES.size
    if len(raw) < start or not raw.startswith(_MAGIC):
        raise damaged(what, "no plan of this version")
    size, of_text, of_body = _SIZES.unpack_from(raw, len(_MAGIC))
    text, body = raw[start : start + size], raw[start + size :]
    if len(text) < size or zlib.crc32(text) != of_text or zlib.crc32(body) != of_body:
        raise damaged(what, "a plan that was cut or changed on the way")
    try:
        header, arrays = _parsed(text, body)
        _check(header, arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(what, f"a plan that does not agree with itself ({error})") from None
    return header, arrays


def _parsed(text: bytes, body: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    header: dict[str, Any] = json.loads(text)
    arrays: dict[str, Array] = {}
    at = 0
    for name, dtype, shape in header["arrays"]:
        kind = _DTYPES[dtype]
        nbytes = math.prod(shape) * kind.itemsize
        arrays[name] = np.frombuffer(body[at : at + nbytes], dtype=kind).reshape(shape).copy()
        at += nbytes
    return header, arrays


def _check(header: dict[str, Any], arrays: dict[str, Array]) -> None:
    """Refuses a header with other fields, and arrays of other lengths than the header says.

    Raises:
        ValueError, KeyError, TypeError: they do not go together.
    """
    for name, kind in _FIELDS.items():
        if type(header[name]) is not kind:
            raise ValueError(f"{name} is {header[name]!r}")
    missing = [name for name in _REQUIRED if name not in arrays]
    if missing:
        raise ValueError(f"no {missing}")
    rows, requests, tokens = len(arrays["slots"]), len(arrays["query_lens"]), header["num_padded_tokens"]
    lengths = {"slots": rows, "generations": rows, "extra kv_lens": rows, "extra query_start_loc": rows + 1}
    lengths |= dict.fromkeys(("query_lens", "seq_lens", "kv_offset", "kv_window"), requests)
    lengths |= dict.fromkeys(("extra positions", "extra slot_mapping", "extra input_ids"), tokens)
    lengths |= dict.fromkeys((name for name in arrays if name.startswith("token ")), tokens)
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != lengths.get(name, len(array)):
            raise ValueError(f"{name} has shape {list(array.shape)}")
    for name in ("relay_rows", "sample_rows"):
        if arrays[name].size and not 0 <= arrays[name].min() <= arrays[name].max() < requests:
            raise ValueError(f"{name} beyond {requests} requests")
    if not requests <= rows or not int(arrays["query_lens"].sum()) == header["num_tokens"] <= tokens:
        raise ValueError(f"{header['num_tokens']} tokens")


def damaged(what: str, problem: str) -> ArgumentError:
    """The error of bytes that are not a plan."""
    return ArgumentError(f"{what}: {problem}", value=problem, remedy=_REMEDY)
