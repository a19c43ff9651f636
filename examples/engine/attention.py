"""Attention over paged KV, in plain torch, for the models of transformers and the plain one.

Each request's keys and values lie in rows of one KV memory, in any order; a table says which row holds which position.
Guarantees: a query sees exactly the positions of its own request up to its own position, rows beyond a request's length
are never read, and the host never waits for the device: whatever it decides, it decides by lengths of its own.

No mask function is registered beside the attention. Without one transformers builds no mask. With one it would first
ask the device whether the positions look like packed sequences, and wait for the answer.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

IMPLEMENTATION = "batchstate_paged"
"""Name of this attention in a transformers config."""


@attrs.frozen(eq=False)
class PagedRun:
    """Neighbouring requests with equally many queries: one dense attention, without padding."""

    requests: slice  # which requests these are
    tokens: slice  # the queries of all of them
    kv_rows: torch.Tensor  # int64[num_reqs, max_kv_len] -> row of KV memory; 0 beyond the request's length
    visible: torch.Tensor  # bool[num_reqs, 1, query_len, max_kv_len]


@attrs.frozen(eq=False)
class PagedView:
    """Inputs of one forward beyond its token ids. Tokens of one request are neighbours, in the order of the requests.

    Tokens behind the last request are padding: their KV goes where `slot_mapping` says, they attend to nothing. A
    request without queries takes no part.

    Attributes:
        positions: int64[num_tokens], position of each token in its request.
        slot_mapping: int64[num_tokens] -> row of KV memory that takes the token's keys and values.
        query_start_loc: int32[num_reqs + 1], first token of each request. For kernels that pack requests; the attention
            here cuts by `query_lens`.
        query_lens: int64[num_reqs], on the host.
        kv_lens: int[num_reqs], length of each request after this step.
        kv_tokens: int64[num_reqs, max_kv_len] -> row of KV memory of each position; anything beyond `kv_lens`.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    query_lens: npt.NDArray[np.int64]
    kv_lens: torch.Tensor
    kv_tokens: torch.Tensor

    def runs(self) -> Sequence[PagedRun]:
        """The batch as dense attentions: all decode rows in one, a prefill chunk in one of its own.

        Index arithmetic only, and the same for every layer: call it once a forward.
        """
        key_positions = torch.arange(self.kv_tokens.shape[1], device=self.kv_tokens.device)  # int64[max_kv_len]
        # A row beyond the length may belong to another request or hold NaN, which a mask alone does not stop.
        kv_rows = torch.where(key_positions < self.kv_lens[:, None], self.kv_tokens, 0)
        runs: list[PagedRun] = []
        request, token = 0, 0
        for query_len, equals in groupby(self.query_lens.tolist()):
            num_reqs = len(list(equals))
            requests = slice(request, request + num_reqs)
            tokens = slice(token, token + num_reqs * query_len)
            request, token = requests.stop, tokens.stop
            if query_len:
                positions = self.positions[tokens].view(num_reqs, 1, query_len, 1)
                runs.append(PagedRun(requests, tokens, kv_rows[requests], key_positions <= positions))
        return runs


class KVMemory(Protocol):
    """Where the attention keeps keys and values. The view and the runs are of the kind that goes with the memory."""

    def store(self, layer: int, view: PagedView, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keeps what is new, of all tokens of the view: dtype[num_tokens, num_kv_heads, head_dim] each."""
        ...

    def fetch(self, layer: int, run: PagedRun) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a run's requests, dtype[num_reqs, max_kv_len, num_kv_heads, head_dim] each."""
        ...


@attrs.frozen(eq=False)
class PagedKV:
    """KV memory: for each layer keys and values, dtype[location_capacity, num_kv_heads, head_dim].

    The rows of page 0 take what padded tokens write.
    """

    keys: tuple[torch.Tensor, ...] = attrs.field(repr=False)
    values: tuple[torch.Tensor, ...] = attrs.field(repr=False)

    @classmethod
    def zeros(cls, config: Any, location_capacity: int, *, device: torch.device, dtype: torch.dtype) -> "PagedKV":
        """Memory for `location_capacity` tokens of a model with this transformers config."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (location_capacity, config.num_key_value_heads, head_dim)
        layers = range(config.num_hidden_layers)
        return cls(
            tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in layers),
            tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in layers),
        )

    def store(self, layer: int, view: PagedView, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts the keys and values of a view's tokens where its slot mapping says."""
        self.keys[layer].index_copy_(0, view.slot_mapping, keys)
        self.values[layer].index_copy_(0, view.slot_mapping, values)

    def fetch(self, layer: int, run: PagedRun) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a run's requests; row 0 behind their lengths."""
        return self.keys[layer][run.kv_rows], self.values[layer][run.kv_rows]

    def write(self, rows: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Puts KV computed elsewhere into rows int64[n]; for each layer dtype[n, num_kv_heads, head_dim]."""
        for memory, new in zip((*self.keys, *self.values), (*keys, *values), strict=True):
            memory.index_copy_(0, rows, new)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    paged_view: PagedView,
    paged_runs: Sequence[PagedRun],
    paged_kv: KVMemory,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention: stores the new keys and values, then attends to all of each request.

    Args:
        module: the attention layer; its `layer_idx` chooses the KV memory.
        query: dtype[1, num_heads, num_tokens, head_dim].
        key: dtype[1, num_kv_heads, num_tokens, head_dim], of the new tokens.
        value: likewise.
        attention_mask: transformers makes none for this implementation.
        scaling: factor of the scores.
        paged_view: the batch.
        paged_runs: `paged_view.runs()`.
        paged_kv: the KV memory, written in place.
        others: what a model says to every attention.

    Returns:
        dtype[1, num_tokens, num_heads, head_dim], and no attention weights.

    Raises:
        ValueError: the model wants a window or a soft cap, which this attention has not.
    """
    for unsupported in ("sliding_window", "softcap", "s_aux"):
        if others.get(unsupported) is not None:
            raise ValueError(f"{IMPLEMENTATION} has no {unsupported}, the model wants {others[unsupported]!r}")
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # a plain int, where torch expects tensors and modules
    paged_kv.store(layer, paged_view, key[0].transpose(0, 1), value[0].transpose(0, 1))

    queries = query[0].transpose(0, 1)  # dtype[num_tokens, num_heads, head_dim]
    # Zeros: what padded tokens get here becomes, a layer later, the KV of row 0, which has to stay finite.
    output = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    for run in paged_runs:
        num_reqs, _, query_len, _ = run.visible.shape
        keys, values = paged_kv.fetch(layer, run)
        attended = scaled_dot_product_attention(
            queries[run.tokens].reshape(num_reqs, query_len, *queries.shape[1:]).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=run.visible,
            scale=scaling,
            enable_gqa=True,
        )  # dtype[num_reqs, num_heads, query_len, head_dim]
        output[run.tokens] = attended.transpose(1, 2).flatten(0, 1)
    return output[None], None
