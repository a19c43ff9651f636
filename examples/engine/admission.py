"""What is asked of a request at the door, so that none fails in the middle of a step, where others would suffer."""

import numpy as np

from batchstate.errors import ArgumentError
from examples.engine.attention import PagedKV
from examples.engine.request import Request
from examples.engine.settings import EngineSettings


def check_request(request: Request, settings: EngineSettings, vocab_size: int, kv: PagedKV) -> None:
    """Refuses what could never run.

    Raises:
        ArgumentError: ids that the model does not know; too long for a request, or for the pages; KV of another model
            or prompt.
    """
    who, prebuilt, ids = f"request {request.number}", request.prebuilt, np.asarray(request.prompt)
    known = ids if prebuilt is None else np.append(ids, prebuilt.first_token)
    if ids.ndim != 1 or not ids.size or known.dtype.kind != "i" or not 0 <= known.min() <= known.max() < vocab_size:
        raise ArgumentError(
            f"{who}: a prompt of {ids.size} ids ({known.dtype}, {ids.ndim} dimensions)",
            value=request.number,
            remedy=f"pass a list of at least one token id, from 0 to {vocab_size - 1}",
        )
    longest = min(settings.max_tokens_per_request, settings.num_pages * settings.page_size - 3 * settings.decode_len)
    most = longest - ids.size
    if type(request.max_new_tokens) is not int or not 1 <= request.max_new_tokens <= most:
        raise ArgumentError(
            f"{who}: {ids.size} tokens and {request.max_new_tokens} new ones",
            value=request.max_new_tokens,
            remedy=f"ask for at least one, and for at most {longest} with the prompt",
        )
    if prebuilt is not None:
        wanted = [(ids.size, *one.shape[1:], one.dtype, one.device) for one in (*kv.keys, *kv.values)]
        if [(*one.shape, one.dtype, one.device) for one in (*prebuilt.keys, *prebuilt.values)] != wanted:
            raise ArgumentError(
                f"{who}: KV that is not of this model and prompt",
                value=request.number,
                remedy=f"pass {len(kv.keys)} layers of keys and of values, each {wanted[0]}",
            )
