"""The declaration of a relay's fields."""

import math
from collections.abc import Sequence
from typing import final

import attrs
import torch

from batchstate._arrays import padding_row, shape_of
from batchstate._relay import DEVICE, HOST
from batchstate.errors import DeclarationError, DtypeError, expected, one_of
from batchstate.runtime.memory import BITS, NUMPY_DTYPES, host_dtype, numpy_dtype

_MOVABLE = {*NUMPY_DTYPES, *BITS, torch.complex64, torch.complex128}
"""Dtypes that torch moves by index on every device."""

_READ_BY = {"device": DEVICE, "host": HOST, "both": DEVICE | HOST}


@final
@attrs.frozen
class RelayField:
    """One declared field of a `FutureMap`; `relay_field` makes it, and says what each attribute means."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    readers: int  # bits: DEVICE, HOST
    non_negative: bool
    must_read: bool
    ragged: bool = False
    stale: bool | float | None = None
    refuses: bool = attrs.field(init=False)  # negative values on the host, whatever is behind those that count

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "refuses", self.non_negative and not self.ragged)

    @property
    def nbytes(self) -> int:
        """Size of one entry."""
        return math.prod(self.shape) * self.dtype.itemsize


def relay_field(
    dtype: torch.dtype,
    shape: Sequence[int] = (),
    *,
    read_by: str = "device",
    non_negative: bool = False,
    must_read: bool = True,
    ragged: bool = False,
    stale: bool | float | None = None,
) -> RelayField:
    """Declares a field of a `FutureMap`.

    Args:
        dtype: any that torch moves by index (nothing quantised; of float8 those with a zero); one that numpy shares if
            the host reads it, or if `non_negative`.
        shape: of one entry.
        read_by: the reader that takes each published entry, once: `device` (the next forward, by `gather`), `host` (by
            `prefetch` or `resolve`) or `both`. An entry that one of them has not taken must not be overwritten.
        non_negative: the values are ids, lengths or indices. A negative one is then SENTINEL_ESCAPED wherever the host
            sees it, and at `full` on the device too.
        must_read: whether overwriting what was not read is a violation. Not for what is wanted now and then, such as
            log-probabilities.
        ragged: requests have different numbers of values, such as the drafts of an n-gram or a tree, and `shape` is the
            most, `(k,)`. A forward puts in the first ones of each request, as many as its plan says; what follows them
            may hold anything. Lists of unequal lengths are published with -1 behind them.
        stale: entries may be read again and again, by the readers of the field, and overwritten unread, such as the
            confidence that a scheduler looks at now and then. A request for which none was published, whoever had its
            slot before, reads this value. Feeds no ids and no lengths.
    """
    if read_by not in _READ_BY:
        raise DeclarationError(f"relay_field: read_by is {read_by!r}", read_by, one_of(_READ_BY, read_by))
    if dtype not in _MOVABLE:
        raise DtypeError(f"a relay field of {dtype}", dtype, "view such values as torch.uint8, and declare that")
    readers = _READ_BY[read_by]
    if readers & HOST or non_negative:
        numpy_dtype(dtype)
    sizes = shape_of(shape, "a relay field")
    if ragged and (len(sizes) != 1 or dtype not in (torch.int32, torch.int64)):
        remedy = "declare the most values of a request, as relay_field(torch.int64, (k,), ragged=True)"
        raise DeclarationError(f"a ragged relay field of {dtype}{list(sizes)}", sizes, remedy)
    if stale is not None:
        padding_row(stale, *host_dtype(dtype), "relay_field: stale")
        if non_negative and stale < 0:
            raise expected(
                "relay_field: stale", "0 or more, as the field is non_negative", stale, kind=DeclarationError
            )
    return RelayField(dtype, sizes, readers, non_negative, must_read, ragged, stale)
