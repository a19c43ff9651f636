"""A request as the engine's user sends it, and what the engine notes about it while it is not in the batch."""

from typing import final

import attrs
import numpy as np

from batchstate.errors import ArgumentError
from batchstate.traffic.workload import Workload

END_OF_TEXT = 2
"""Token id at which an answer would end. Here lengths are given, and the id only fills its column."""

LONGEST_PATIENCE = 20.0
"""Seconds after which a client that hangs up has done so; drawn evenly from 0 on."""


@final
@attrs.frozen
class SamplingParams:
    """How the tokens of one request are drawn. Every field becomes a column of the batch."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int
    eos_id: int
    lora_id: int


@final
@attrs.define(eq=False)
class Request:
    """One request.

    Attributes:
        request_id: its row in the workload.
        arrival: seconds since the first request.
        prompt_tokens: tokens of the prompt.
        answer_tokens: tokens to generate.
        priority: of the request; rides along.
        sampling: how its tokens are drawn.
        hangs_up: second at which the client gives up, or infinity.
        num_generated: tokens generated when it last left the batch; a retracted request goes on from there.
        done: it has finished or was aborted.
    """

    request_id: int
    arrival: float
    prompt_tokens: int
    answer_tokens: int
    priority: int
    sampling: SamplingParams
    hangs_up: float = float("inf")
    num_generated: int = 0
    done: bool = False

    @property
    def tokens_to_prefill(self) -> int:
        """Tokens whose KV has to be computed before the next one is generated: prompt and answer so far."""
        return self.prompt_tokens + self.num_generated


def draw_requests(workload: Workload, *, seed: int = 0, aborts: float = 0.0) -> list[Request]:
    """Makes the requests of a workload, in order of arrival, with sampling parameters and impatient clients drawn.

    Args:
        workload: arrivals and lengths.
        seed: the same seed gives the same requests.
        aborts: share of clients that hang up within `LONGEST_PATIENCE` seconds, 0 to 1. Some answers finish first.

    Raises:
        ArgumentError: `aborts` is no share, or a negative seed.
    """
    if not 0 <= aborts <= 1:
        raise ArgumentError(f"aborts is {aborts}", value=aborts, remedy="give a share from 0 (none) to 1 (all)")
    if seed < 0:
        raise ArgumentError(f"seed is {seed}", value=seed, remedy="use a seed of 0 or more")
    rng = np.random.default_rng(seed)
    count = len(workload)
    greedy = rng.random(count) < 0.2
    sampling = map(
        SamplingParams,
        np.where(greedy, 0.0, rng.choice([0.6, 0.7, 1.0], count)).tolist(),
        rng.choice([0.9, 0.95, 1.0], count).tolist(),
        np.where(greedy, 1, rng.choice([-1, 20, 50], count)).tolist(),
        rng.choice([0.0, 0.05], count).tolist(),
        rng.choice([1.0, 1.05, 1.1], count).tolist(),
        rng.integers(0, 2**31, count).tolist(),
        [END_OF_TEXT] * count,
        rng.choice(4, count, p=[0.85, 0.05, 0.05, 0.05]).tolist(),
    )
    priority = rng.choice(3, count, p=[0.1, 0.8, 0.1]).tolist()
    impatient = rng.random(count) < aborts
    hangs_up = np.where(impatient, workload.arrival + rng.uniform(0, LONGEST_PATIENCE, count), np.inf)
    return [
        Request(*row)
        for row in zip(
            range(count),
            workload.arrival.tolist(),
            workload.context_tokens.tolist(),
            workload.generated_tokens.tolist(),
            priority,
            sampling,
            hangs_up.tolist(),
            strict=True,
        )
    ]
