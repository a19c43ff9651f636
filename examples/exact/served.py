"""A language model with the calls of `examples.engine.model.Model`, over the KV memory of our engines."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import final

import torch

from batchstate.testing.exact import ExactModel, Read, Verifier
from batchstate.testing.exact.hashing import decode
from examples.engine.attention import KVMemory, PagedKV, PagedView


@final
class ServedModel:
    """See the module.

    Attributes:
        lm: says of its memory what a config of transformers would.
        requests: whose the next forward is, as numbers; for the verifier.
    """

    eos_token_ids = ()

    def __init__(
        self, model: ExactModel, page_size: int, verifier: Verifier | None = None, *, guesses: bool = False
    ) -> None:
        spec = model.spec
        self.exact, self._page_size, self._verifier, self._guesses = model, page_size, verifier, guesses
        self.vocab_size, self.dtype, self.device = spec.vocab_size, model.dtype, torch.device("cpu")
        config = SimpleNamespace(
            num_hidden_layers=len(spec.layers),
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab_size,
        )
        self.lm = SimpleNamespace(config=config)
        self.requests: Sequence[int] = ()

    def new_kv(self, location_capacity: int) -> PagedKV:
        """KV memory for so many tokens."""
        return PagedKV.zeros(self.lm.config, location_capacity, device=self.device, dtype=self.dtype)

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, view: PagedView, kv: KVMemory, logits_indices: torch.Tensor
    ) -> torch.Tensor:
        """Logits float32[num_rows, vocab_size]; see `Model.forward`."""
        cache = _Cache(view, kv, self._page_size, self.requests, self._verifier, guesses=self._guesses)
        hidden = self.exact.run(input_ids[None], view.positions[None], cache)
        return self.exact.logits(hidden[0, logits_indices])


class _Cache:
    """What our attention would read: its runs, with their masks, one behind the other."""

    def __init__(
        self,
        view: PagedView,
        kv: KVMemory,
        page_size: int,
        requests: Sequence[int],
        verifier: Verifier | None,
        *,
        guesses: bool,
    ) -> None:
        self._view, self._kv, self._runs = view, kv, view.runs()
        self._page_size, self._verifier = page_size, verifier
        sizes = [run.kv_rows.numel() for run in self._runs]
        self._visible = torch.zeros(1, len(view.positions), sum(sizes), dtype=torch.bool)
        columns, used, start = [], [], 0
        self._drafts: list[int] = []
        self._lens: list[int] = []
        for run, size in zip(self._runs, sizes, strict=True):
            n, _, queries, width = run.visible.shape
            numbers, lens = torch.arange(width), view.kv_lens[run.requests].long()
            last = view.positions[run.tokens].view(n, queries)[:, -1]
            columns.append((last[:, None] - (lens[:, None] - 1 - numbers)).flatten())
            used.append((numbers < lens[:, None]).flatten())
            visible = torch.zeros(n, queries, n, width, dtype=torch.bool)
            visible[range(n), :, range(n)] = run.visible[:, 0]
            self._visible[0, run.tokens, start : start + size] = visible.view(n * queries, size)
            self._lens += lens.clamp(max=width).tolist()
            self._drafts += [queries - 1 if guesses else 0] * n
            start += size
        self._columns = torch.cat(columns)[None]
        self._used = torch.cat(used)
        self._requests = [number for run in self._runs for number in list(requests)[run.requests]]

    def attend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Read:
        """See `Cache.attend`."""
        self._kv.store(layer, self._view, keys[0], values[0])
        fetched = [self._kv.fetch(layer, run) for run in self._runs]
        all_keys, all_values = (
            torch.cat([part.flatten(0, 1) for part in parts])[None] for parts in zip(*fetched, strict=True)
        )
        read = Read(all_keys, all_values, self._visible, self._columns)
        if self._verifier is not None and self._requests:
            rows = torch.cat([run.kv_rows.flatten() for run in self._runs])[self._used]
            words, columns = decode(all_keys[0, self._used]), self._columns[0, self._used]
            self._verifier.look(
                layer, words, columns, rows, self._requests, self._lens, drafts=self._drafts, page_size=self._page_size
            )
        return read

    def advance(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        """Our engines have no layers of state."""
        raise NotImplementedError
