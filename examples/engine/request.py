"""A request: what a client asked for, what has come of it so far, and the check of it before it is accepted."""

from collections.abc import Collection, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import ArgumentError
from examples.engine.attention import PagedKV
from examples.engine.settings import EngineSettings


@attrs.frozen(eq=False)
class Prebuilt:
    """The work of a prefill done elsewhere.

    Attributes:
        first_token: the answer's first token.
        keys, values: for each layer, dtype[num_prompt_tokens, num_kv_heads, head_dim] on the device.
    """

    first_token: int
    keys: tuple[torch.Tensor, ...] = attrs.field(repr=False)
    values: tuple[torch.Tensor, ...] = attrs.field(repr=False)


@attrs.define(eq=False)
class Request:
    """One request. It belongs to the engine that it was added to.

    Attributes:
        number: names it.
        prompt: token ids, at least one.
        max_new_tokens: length of the answer, unless it ends before.
        prebuilt: KV and first token, if it was prefilled elsewhere, until the engine has taken them over.
        output: the answer as far as the host knows it.
        fill_ids: ids whose KV is computed before it decodes, while it runs.
        in_flight: launched steps that sample for it and whose results have not been read.
        state: waiting, running, finished or aborted.
    """

    number: int
    prompt: Sequence[int]
    max_new_tokens: int
    prebuilt: Prebuilt | None = None
    output: list[int] = attrs.field(factory=list, init=False)
    fill_ids: npt.NDArray[np.int64] = attrs.field(factory=lambda: np.zeros(0, np.int64), init=False, repr=False)
    in_flight: int = attrs.field(default=0, init=False)
    state: str = attrs.field(default="waiting", init=False)

    @property
    def kv_len(self) -> int:
        """Tokens in KV memory while the last token of the output is not scheduled yet; the prompt without output."""
        return len(self.prompt) + max(len(self.output) - 1, 0)

    @property
    def kv_limit(self) -> int:
        """Tokens in KV memory when the answer has its full length."""
        return len(self.prompt) + self.max_new_tokens - 1

    def known_ids(self) -> npt.NDArray[np.int64]:
        """The prompt, and of an answer all but its last token: that is scheduled by the first step that decodes."""
        return np.array([*self.prompt, *self.output[:-1]], dtype=np.int64)

    def append(self, tokens: Sequence[int], eos_token_ids: Collection[int]) -> None:
        """New tokens of the answer; those behind its end are dropped, and the request is then finished."""
        for token in tokens:
            if self.state != "finished":
                self.output.append(token)
                if len(self.output) == self.max_new_tokens or token in eos_token_ids:
                    self.state = "finished"


def check_request(request: Request, settings: EngineSettings, vocab_size: int, kv: PagedKV) -> None:
    """Refuses requests that could never run.

    Raises:
        ArgumentError: ids that the model does not know; too long for a request, or for the pages; KV of another model
            or prompt.
    """
    who, prebuilt, ids = f"request {request.number}", request.prebuilt, np.asarray(request.prompt)
    tokens = ids if prebuilt is None else np.append(ids, prebuilt.first_token)
    if ids.ndim != 1 or not ids.size or tokens.dtype.kind != "i" or not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ArgumentError(
            f"{who}: a prompt of {ids.size} ids ({tokens.dtype}, {ids.ndim} dimensions)",
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
        wanted = [(ids.size, *memory.shape[1:], memory.dtype, memory.device) for memory in (*kv.keys, *kv.values)]
        if [(*layer.shape, layer.dtype, layer.device) for layer in (*prebuilt.keys, *prebuilt.values)] != wanted:
            raise ArgumentError(
                f"{who}: KV that is not of this model and prompt",
                value=request.number,
                remedy=f"pass {len(kv.keys)} layers of keys and of values, each {wanted[0]}",
            )
