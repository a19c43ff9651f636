"""How large the simulated engine is, and how long its steps would take with a model."""

from typing import final

import attrs

from batchstate.errors import ArgumentError
from batchstate.traffic.workload import Workload


@final
@attrs.frozen(kw_only=True)
class EngineSettings:
    """Sizes and speed of the engine.

    The speed is that of a large model: a full step of 2,048 tokens takes about 140 ms, a step of 64 decoding requests
    about 43 ms. Under the load of the fitted hour some 75 requests run at once and pages get scarce in its peak.

    Attributes:
        max_running: requests in the batch at once.
        max_tokens_per_step: tokens that one step computes, decode and prompt chunks together.
        page_size: tokens of a KV page.
        num_pages: KV pages.
        step_seconds: simulated time of a step, whatever it holds.
        token_seconds: simulated time that each token of the step adds.

    Raises:
        ArgumentError: a size below 1, a time below 0, or a step too small for a full batch to decode.
    """

    max_running: int = 256
    max_tokens_per_step: int = 2048
    page_size: int = 16
    num_pages: int = 10_240
    step_seconds: float = 0.04
    token_seconds: float = 0.000_05

    def __attrs_post_init__(self) -> None:
        least = {"max_running": 1, "max_tokens_per_step": 1, "page_size": 1, "num_pages": 1}
        least |= {"step_seconds": 0, "token_seconds": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if not value >= bound:
                raise ArgumentError(f"{name} is {value}", value=value, remedy=f"use {bound} or more")
        if self.max_tokens_per_step < self.max_running:
            raise ArgumentError(
                f"max_tokens_per_step is {self.max_tokens_per_step} and max_running {self.max_running}",
                value=self.max_tokens_per_step,
                remedy="let a step hold one token of each running request at least",
            )

    def check_fits(self, workload: Workload) -> None:
        """Refuses a workload with a request that could not run even alone.

        Raises:
            ArgumentError: its longest request needs more pages than there are.
        """
        needed = -(-workload.longest // self.page_size)
        if needed > self.num_pages:
            raise ArgumentError(
                f"the longest request needs {needed} pages for {workload.longest} tokens; there are {self.num_pages}",
                value=needed,
                remedy="raise num_pages (`batchstate traffic --num-pages`), or leave out the longest requests",
            )
