"""Arrays of pinned memory that say when they are read: numpy reads where torch sees nothing.

The class goes with every view of such an array. `np.asarray` makes a plain array of it, and so counts as a read.
"""

from collections.abc import Callable
from typing import Any, final

import numpy as np

TellsRead = Callable[["np.ndarray[Any, Any]", str], None]
"""Is told of a read of an array, and by which call, before it happens."""


@final
class PinnedArray(np.ndarray[Any, Any]):
    """An array over pinned memory. Made by `pinned_array`."""

    _read_by: TellsRead | None = None

    def __array_finalize__(self, of: Any) -> None:
        self._read_by = getattr(of, "_read_by", None)

    def _reads(self, name: str) -> "np.ndarray[Any, Any]":
        plain = self.view(np.ndarray)
        if self._read_by is not None:
            self._read_by(plain, name)
        return plain

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        if not isinstance(part, np.ndarray):
            whole = (*key, ...) if isinstance(key, tuple) else (key, ...)
            self.view(np.ndarray)[whole].view(PinnedArray)._told(self._read_by)
        elif not np.may_share_memory(part, self):  # a copy, by an index
            self._reads("an index of numpy")
            return part.view(np.ndarray)
        return part

    def _told(self, read_by: TellsRead | None) -> None:
        self._read_by = read_by
        self._reads("an element of numpy")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [part._reads(ufunc.__name__) if isinstance(part, PinnedArray) else part for part in inputs]
        out = kwargs.get("out")
        if out is not None:
            kwargs["out"] = tuple(part.view(np.ndarray) if isinstance(part, PinnedArray) else part for part in out)
        result = getattr(ufunc, method)(*plain, **kwargs)
        return result if out is None or len(out) > 1 else out[0]

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func.__name__ not in _NO_READS:
            for part in args:
                for array in part if isinstance(part, list | tuple) else (part,):
                    if isinstance(array, PinnedArray):
                        array._reads(func.__name__)
        return super().__array_function__(func, types, args, kwargs)


_NO_READS = ("copyto", "may_share_memory", "ndim", "place", "put", "putmask", "shape", "shares_memory", "size")
"""Functions of numpy that read nothing of their first argument."""


def _reading(name: str) -> Any:
    def method(self: PinnedArray, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._reads(name), name)(*args, **kwargs)

    return method


_METHODS = (
    *("__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "__reduce__", "__reduce_ex__"),
    *("__repr__", "__str__", "argmax", "argmin", "argsort", "astype", "compress", "copy", "cumsum", "dot", "flatten"),
    *("item", "mean", "nonzero", "repeat", "round", "std", "take", "tobytes", "tofile", "tolist"),
)
"""Methods that read elements, and are no functions of numpy."""

for _name in _METHODS:
    setattr(PinnedArray, _name, _reading(_name))


def pinned_array(array: "np.ndarray[Any, Any]", read_by: TellsRead) -> PinnedArray:
    """The array, with its reads told."""
    guarded = array.view(PinnedArray)
    guarded._read_by = read_by
    return guarded
