"""Prefill done elsewhere: what a prefill worker would send, made here by the same model in memory of its own."""

from collections.abc import Sequence

import numpy as np
import torch

from examples.engine.attention import PagedView
from examples.engine.model import Model
from examples.engine.request import Prebuilt


def prefill(model: Model, prompt: Sequence[int]) -> Prebuilt:
    """KV and first token of one prompt. Waits for the device, as another process would not."""
    num_tokens = len(prompt)
    kv = model.new_kv(num_tokens)
    places = torch.arange(num_tokens, device=model.device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=model.device)
    view = PagedView(places, places, starts, np.array([num_tokens]), starts[1:], places[None])
    ids = torch.tensor(prompt, device=model.device)
    logits = model.forward(ids, view, kv, places[-1:])
    return Prebuilt(int(logits.argmax()), kv.keys, kv.values)
