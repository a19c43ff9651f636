"""A prompt on its way through the prefill worker, the batch of those under way, and a forward that is not read yet."""

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import Batch, Slots, host_list, mirrored, slot_column
from batchstate.future_map import Prefetched
from batchstate.runtime import Fence
from batchstate.transport.sender import Transfer

Ints = npt.NDArray[np.int64]
Key = tuple[str, int]
"""Name of a request, and number of the attempt."""


@attrs.define(eq=False)
class Job:
    """One attempt to prefill a prompt.

    Attributes:
        key: request and attempt.
        prompt: its ids.
        slot: whose pages hold the KV, once admitted.
        sources: int64[tokens], where the KV of each token is.
        computed: tokens whose KV is in memory.
        transfer: what the decode worker has granted, once it has.
        first_token: of the answer.
        last_step: behind the last forward that works on it.
    """

    key: Key
    prompt: Ints
    slot: Slots | None = None
    sources: Ints | None = None
    computed: int = 0
    transfer: Transfer | None = None
    first_token: int | None = None
    last_step: Fence | None = None


class PromptBatch(Batch):
    """Prompts under way."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)  # tokens for which a forward was launched
    jobs = host_list(Job)


@attrs.define(eq=False)
class Step:
    """A forward under way: what each prompt has when it has run, and the first tokens of those that it finishes."""

    done: Fence
    computed: list[tuple[Job, int]]
    sampling: list[Job]
    results: Prefetched | None
