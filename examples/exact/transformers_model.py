"""The exact model as one of transformers: its generation, caches and continuous batching run it as any other."""

from collections.abc import Callable
from typing import Any, final

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from batchstate.testing.exact import ExactModel, Read, Verifier
from batchstate.testing.exact.hashing import decode, from_octets, octets
from batchstate.testing.exact.model import advanced
from batchstate.testing.exact.text import Layer

KINDS: dict[Layer, str] = {None: "full_attention", "state": "linear_attention"}


def config_of(model: ExactModel) -> "ExactConfig":
    """A config that says of a model's memory what transformers wants to know."""
    spec = model.spec
    windows = {kept for kept in spec.layers if isinstance(kept, int)}
    config = ExactConfig(
        vocab_size=spec.vocab_size,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        head_dim=spec.head_dim,
        hidden_size=spec.heads * spec.head_dim,
        layer_types=[KINDS.get(kept, "sliding_attention") for kept in spec.layers],
        sliding_window=windows.pop() if windows else None,
        max_position_embeddings=1 << 20,
    )
    config._attn_implementation = "sdpa"  # the only one, besides flash attention, that continuous batching takes
    return config


class ExactConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers is not followed
    """The names of a config, and nothing else."""

    model_type = "batchstate_exact"


@final
class ExactLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Runs a `ExactModel` over the caches of transformers.

    Attributes:
        verifier: told of what is read.
        requests: called for whose it is.
        guesses: whether all queries of a forward but its first may be drafts.
        error_rate: share of the tokens that are another one than the model's, as those of a draft model are.
    """

    config_class = ExactConfig
    _supports_sdpa = True
    _supports_flash_attn = False
    _is_stateful = False

    def __init__(self, model: ExactModel, verifier: Verifier | None = None, error_rate: float = 0.0) -> None:
        super().__init__(config_of(model))
        self.anchor = torch.nn.Parameter(torch.zeros(1, dtype=model.dtype), requires_grad=False)  # of dtype and device
        self.exact, self.verifier, self.error_rate = model, verifier, error_rate
        self.requests: Callable[[], list[int]] = list
        self.guesses = False

    def _init_weights(self, module: torch.nn.Module) -> None:
        """There are none."""

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: Any = 0,
        cache: Any = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """As every causal language model of transformers."""
        t = input_ids.shape[1]
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(past, past + t).expand(input_ids.shape)
        view: _Paged | _Padded
        if cache is not None:
            view = _Paged(self, cache, attention_mask, position_ids, others)
        else:
            view = _Padded(self, past_key_values, attention_mask, position_ids)
        hidden = self.exact.run(input_ids, position_ids, view)
        if isinstance(logits_to_keep, int):
            hidden = hidden[:, -logits_to_keep:] if logits_to_keep else hidden
        else:
            hidden = hidden[:, logits_to_keep]
        logits = self.exact.logits(hidden)
        if self.error_rate:
            errs = torch.remainder(logits.argmax(-1) * 7919, 1000) < 1000 * self.error_rate
            logits = torch.where(errs.unsqueeze(-1), logits.roll(1, -1), logits)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


class _Paged:
    """The cache of continuous batching: indices of what is read and written, and a mask."""

    def __init__(self, lm: ExactLM, cache: Any, mask: Any, positions: torch.Tensor, others: dict[str, Any]) -> None:
        self._lm, self._cache, self._mask, self._positions, self._others = lm, cache, mask, positions.long(), others

    def attend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Read:
        """See `Cache.attend`."""
        kwargs = dict(self._others)  # the cache changes them
        kept = self._cache.update(
            key_states=keys.transpose(1, 2), value_states=values.transpose(1, 2), layer_idx=layer, kwargs=kwargs
        )
        read_keys, read_values = (entries.transpose(1, 2) for entries in kept)
        queries, entries = (kwargs[name].long() for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
        n = read_keys.shape[1]
        numbers = torch.arange(n)
        row = torch.searchsorted(entries[1:].contiguous(), numbers, right=True).clamp(max=len(entries) - 2)
        last = self._positions[0, (queries[1:] - 1).clamp(min=0)]
        columns = last[row] - (entries[1:][row] - 1 - numbers)
        kind = self._lm.config.layer_types[layer]
        mask = self._mask[kind] if isinstance(self._mask, dict) else self._mask
        visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
        read = Read(read_keys, read_values, visible[..., :n], columns[None])
        if self._lm.verifier is not None:
            self._look(layer, kind, read, kwargs, entries)
        return read

    def _look(self, layer: int, kind: str, read: Read, kwargs: dict[str, Any], entries: torch.Tensor) -> None:
        verifier, requests = self._lm.verifier, self._lm.requests()
        allocator = self._cache.layer_to_allocator[layer]
        lens = entries.diff().tolist()[: len(requests)]
        rows = kwargs["read_index"][allocator.index]
        if verifier is not None and len(rows) >= sum(lens):  # of a sliding layer new entries have no row of their own
            words = decode(read.keys[0])
            verifier.look(
                layer, words, read.columns[0], rows, requests, lens, page_size=allocator.block_physical_stride
            )

    def advance(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        """Continuous batching has no layers of state."""
        raise NotImplementedError


class _Padded:
    """A cache of `generate`: requests side by side, padded on the left."""

    def __init__(self, lm: ExactLM, cache: Any, mask: Any, positions: torch.Tensor) -> None:
        self._lm, self._cache, self._mask, self._positions = lm, cache, mask, positions.long()

    def attend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Read:
        """See `Cache.attend`."""
        t, window = keys.shape[1], self._lm.exact.spec.layers[layer]
        if self._cache is not None:
            kept = self._cache.update(keys.transpose(1, 2), values.transpose(1, 2), layer)
            keys, values = (entries.transpose(1, 2) for entries in kept)
        n = last = keys.shape[1]
        if hasattr(self._cache and self._cache.layers[layer], "max_cache_len"):  # of a static cache only a part is used
            last = int(self._cache.layers[layer].get_seq_length())
        numbers, ends = torch.arange(n), last - t + 1 + torch.arange(t)
        visible = numbers < ends[:, None]
        if isinstance(window, int):
            visible &= numbers >= ends[:, None] - window
        visible = visible.expand(keys.shape[0], t, n)
        mask = self._mask["full_attention"] if isinstance(self._mask, dict) else self._mask
        if mask is not None:
            visible = mask[:, 0, :, :n] if mask.ndim == 4 else visible & mask[:, None, -n:].bool()
        read = Read(keys, values, visible, self._positions[:, -1:] - (last - 1 - numbers))
        if self._lm.verifier is not None:
            self._look(layer, read, self._lm.verifier)
        return read

    def _look(self, layer: int, read: Read, verifier: Verifier) -> None:
        """What the last query of each request sees; there are no pages, and an entry's row is its place."""
        guesses = read.visible.shape[1] - 1 if self._lm.guesses else 0
        for row, request in enumerate(self._lm.requests()):
            places = read.visible[row, -1].nonzero()[:, 0]
            words, columns, count = decode(read.keys[row, places]), read.columns[row, places], len(places)
            verifier.look(layer, words, columns, places, [request], [count], drafts=[min(guesses, count)])

    def advance(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        """See `Cache.advance`. Padding on the left leaves the state at its beginning."""
        kept = self._cache.layers[layer]
        if kept.is_recurrent_states_initialized[0]:
            before = from_octets(kept.recurrent_states[0])
        else:
            before = torch.zeros_like(inputs[:, 0])
        used = None if self._mask is None else self._mask[:, -inputs.shape[1] :].bool()
        if self._lm.verifier is not None:
            count = torch.ones_like(inputs).sum(-1) if used is None else used.sum(-1)
            last = self._positions[:, -1] - count
            goes_on = (last >= 0) & (count > 0)  # others begin, or have a chunk of padding alone: they read no state
            for row, request in enumerate(self._lm.requests()):
                part = slice(row, row + int(goes_on[row]))
                rows = torch.arange(part.start, part.stop)
                self._lm.verifier.look(layer, before[part], last[part], rows, [request], [len(rows)])
        states = advanced(before, inputs, used)
        self._cache.update_recurrent_state(octets(states[:, -1], self._lm.exact.dtype), layer)
        return states
