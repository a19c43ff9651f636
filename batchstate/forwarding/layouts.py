"""How attention kernels want to be told of the KV pages of each request.

`flash_attention` is what FlashAttention's variable-length functions take for paged KV (`cu_seqlens_k`, `block_table`),
`flashinfer` what the wrappers of flashinfer take in `plan` (`paged_kv_indptr`, `paged_kv_indices`,
`paged_kv_last_page_len`). Both use int32. Padded rows have no pages.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from batchstate.errors import DeclarationError
from batchstate.values.host_arrays import check_range

Ints = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[np.int32]]


def flash_attention(pages: npt.NDArray[np.int32], kv_lens: Ints, page_size: int, num_rows: int) -> Arrays:
    """`kv_start_loc` int32[num_rows + 1] and `block_table` int32[num_rows, most pages of a request]."""
    counts = -(-kv_lens // page_size)
    most = int(counts.max(initial=0))
    table = np.zeros((num_rows, most), dtype=np.int32)
    table[: len(kv_lens)] = np.where(np.arange(most) < counts[:, None], pages[:, :most], 0)
    return {"kv_start_loc": _starts(kv_lens, num_rows), "block_table": table}


def flashinfer(pages: npt.NDArray[np.int32], kv_lens: Ints, page_size: int, num_rows: int) -> Arrays:
    """`kv_page_indptr` int32[num_rows + 1], `kv_page_indices` int32[pages], `kv_last_page_len` int32[num_rows]."""
    counts = -(-kv_lens // page_size)
    most = int(counts.max(initial=0))
    last = np.zeros(num_rows, dtype=np.int32)
    last[: len(kv_lens)] = kv_lens - np.maximum(counts - 1, 0) * page_size
    return {
        "kv_page_indptr": _starts(counts, num_rows),
        "kv_page_indices": pages[:, :most][np.arange(most) < counts[:, None]],
        "kv_last_page_len": last,
    }


def _starts(lengths: Ints, num_rows: int) -> npt.NDArray[np.int32]:
    starts = np.zeros(num_rows + 1, dtype=np.int32)
    check_range(0, int(lengths.sum()), starts.dtype, "ForwardPlan: tokens of all requests together")
    np.cumsum(lengths, out=starts[1 : len(lengths) + 1])
    starts[len(lengths) + 1 :] = starts[len(lengths)]
    return starts


LAYOUTS: dict[str, Callable[[npt.NDArray[np.int32], Ints, int, int], Arrays]] = {
    "flash_attention": flash_attention,
    "flashinfer": flashinfer,
}
"""Layout -> its function of `pages` int32[n, m], the pages of each live request, and `kv_lens` int64[n]."""


def check_layouts(layouts: object, what: str) -> tuple[str, ...]:
    """The names of layouts.

    Raises:
        DeclarationError: an unknown one.
    """
    names = (layouts,) if isinstance(layouts, str) else layouts
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name in LAYOUTS for name in names):
        raise DeclarationError(
            f"{what}: layouts {layouts!r}", value=layouts, remedy=f"use some of: {', '.join(LAYOUTS)}"
        )
    return tuple(names)
