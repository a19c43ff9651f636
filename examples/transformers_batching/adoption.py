"""Where the three classes go in."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from transformers.generation.continuous_batching import cache, continuous_api, scheduler

from examples.transformers_batching.blocks import PooledBlocks
from examples.transformers_batching.inputs import PlannedInputs
from examples.transformers_batching.scheduling import SteadyScheduler


@contextmanager
def adopted() -> Iterator[None]:
    """A window in which transformers' continuous batching keeps its state with batchstate.

    Two classes are registered in the dictionaries that transformers has for them. Its class of inputs has none, and is
    replaced where the batch processor looks it up.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(cache.ATTN_TYPE_TO_ALLOCATOR, full_attention=PooledBlocks))
        stack.enter_context(mock.patch.dict(scheduler.SCHEDULER_MAPPING, fifo=SteadyScheduler))
        stack.enter_context(mock.patch.object(continuous_api, "ContinuousBatchingIOs", PlannedInputs))
        yield
