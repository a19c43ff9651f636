"""A window of `cuda_on_cpu` that stands for a GPU, so that `watch_cuda` can be checked where there is none."""

import contextlib
from collections.abc import Iterator
from typing import Any

from batchstate.testing.cuda import CudaRuntime, WatchedCuda, _streams, _window, watch_cuda, watching
from batchstate.testing.cuda._torch import replace


@contextlib.contextmanager
def watched_over(window: CudaRuntime, **given: Any) -> Iterator[WatchedCuda]:
    """A window of `watch_cuda` inside of one of `cuda_on_cpu`, which is open.

    Args:
        window: stands for the GPU: its tensors, streams, events and graphs count as the GPU's.
        given: what `watch_cuda` takes.
    """
    with contextlib.ExitStack() as stack:
        replace(stack, _window, "_open", [])
        replace(stack, watching, "KINDS", (_streams._Stream, _streams._Event, _streams._Graph))
        replace(stack, watching.WatchTracer, "on_device", lambda self, tensor: window.tracer.on_device(tensor))
        yield stack.enter_context(watch_cuda(**given))
