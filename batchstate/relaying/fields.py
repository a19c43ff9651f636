"""Declarations of relay fields: what a forward leaves for the next step, and who takes it."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import torch

from batchstate.errors import DeclarationError, DtypeError, ShapeError
from batchstate.runtime import NUMPY_DTYPES, numpy_dtype
from batchstate.values.host_arrays import count

DEVICE, HOST = 1, 2
"""The readers of an entry, as bits: the next forward, and the host."""

_MOVABLE = {*NUMPY_DTYPES, torch.bfloat16, torch.complex64, torch.complex128}
"""Dtypes that torch moves by index on every device."""

_READERS = {"device": DEVICE, "host": HOST, "both": DEVICE | HOST}


@final
@attrs.frozen
class RelayField:
    """One declared field of a `FutureMap`; made by `relay_field`.

    Attributes:
        dtype: of the elements.
        shape: of one entry.
        readers: who takes each publish once: `DEVICE`, `HOST`, or both bits.
        non_negative: whether a negative value is a stand-in that escaped.
        must_read: whether an entry that a reader has not taken must not be overwritten.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    readers: int
    non_negative: bool
    must_read: bool

    @property
    def readers_named(self) -> str:
        """The readers in words."""
        return {DEVICE: "the next forward", HOST: "the host"}.get(self.readers, "the next forward and the host")


def relay_field(
    dtype: torch.dtype,
    shape: Sequence[int] = (),
    *,
    read_by: str = "device",
    non_negative: bool = False,
    must_read: bool = True,
) -> RelayField:
    """Declares a field of a `FutureMap`.

    Args:
        dtype: any that torch moves by index (no float8, nothing quantised); one that numpy shares if the host reads it,
            or if `non_negative`.
        shape: of one entry.
        read_by: who takes each published entry, once: `device` (the next forward, by `gather`), `host` (by `prefetch`
            or `resolve`) or `both`. An entry that one of them has not taken must not be overwritten.
        non_negative: the values are ids, lengths or indices. A negative one is then SENTINEL_ESCAPED wherever the host
            sees it, and at `full` on the device too.
        must_read: whether overwriting what was not read is a violation. Not for what is wanted now and then, such as
            log-probabilities.

    Raises:
        DeclarationError: another reader.
        DtypeError: no torch dtype, one that cannot be moved, or one that the host cannot read.
        ShapeError: `shape` is no sequence.
        ArgumentError, DtypeError: it holds something else than counts.
    """
    given: Any = read_by
    if not isinstance(given, str) or given not in _READERS:
        raise DeclarationError(
            f"a relay field read by {given!r}", value=given, remedy=f"use one of: {', '.join(_READERS)}"
        )
    given = dtype
    if not isinstance(given, torch.dtype):
        raise DtypeError(f"a relay field of {given!r}", value=given, remedy="pass a torch dtype, as torch.int64")
    if given not in _MOVABLE:
        raise DtypeError(
            f"a relay field of {given}", value=given, remedy="view such values as torch.uint8, and declare that"
        )
    readers = _READERS[read_by]
    if readers & HOST or non_negative:
        numpy_dtype(dtype)
    given = shape
    if not isinstance(given, tuple | list):
        raise ShapeError(f"a relay field of shape {given!r}", value=given, remedy="pass a tuple, as `(8,)`")
    return RelayField(
        dtype, tuple(count(size, "shape") for size in shape), readers, bool(non_negative), bool(must_read)
    )


def checked_fields(fields: Mapping[str, RelayField], what: str) -> dict[str, RelayField]:
    """The declarations by name.

    Raises:
        DeclarationError: none at all, a name that is no identifier, or something that is no field.
    """
    given: Any = fields
    if not isinstance(given, Mapping) or not given:
        raise DeclarationError(f"{what}: no fields", value=given, remedy="pass a mapping of names to relay_field(...)")
    for name, field in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name in ("slots", "self", "by"):
            raise DeclarationError(
                f"{what}: {name!r} cannot name a field", value=name, remedy="use an identifier other than slots and by"
            )
        if not isinstance(field, RelayField):
            raise DeclarationError(
                f"{what}: field {name!r} is {type(field).__name__}", value=field, remedy="declare it with relay_field"
            )
    return dict(given)
