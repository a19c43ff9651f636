"""Memory crosses to another stream and goes back to its own while the other still uses it.

To wait for a stream orders what runs; it does not keep memory.
"""

from functools import partial
from typing import Any

import torch

from batchstate.levels import Level
from batchstate.runtime import Fence, PackedUpload, Runtime, Stream
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code

race = partial(mutant, Code.RACE, machine="overlap", level=Level.OFF, tool="race")


def _acquire_with(patch: Patch, keep_alive: Any) -> None:
    """`Runtime.use_on_current_stream` as it is, with something else in place of `_keep_alive`."""

    def use_on_current_stream(
        self: Runtime, tensor: torch.Tensor, made_on: Stream, ready: Fence | None = None, *, synchronised: Any = None
    ) -> torch.Tensor:
        current = self.current_stream
        if current == made_on or (synchronised is not None and current.key in synchronised):
            return tensor
        self.wait(ready or self.record(made_on), stream=current)
        keep_alive(self, tensor, made_on, current)
        if synchronised is not None:
            synchronised.add(current.key)
        return tensor

    patch(Runtime, "use_on_current_stream", use_on_current_stream)


@race(origin="sglang #34076", seeded="g")
def handed_over_unprotected(patch: Patch) -> None:
    """A tensor is used on another stream, which waits for it, and nobody tells the allocator."""
    _acquire_with(patch, lambda self, tensor, made_on, current: None)


@race(origin="sglang #34076, vllm #29623")
def kept_alive_for_its_own_stream(patch: Patch) -> None:
    """The allocator is told of the stream that made the memory, which it knows, and not of the one that uses it."""
    _acquire_with(patch, lambda self, tensor, made_on, current: self._keep_alive(tensor, made_on))


@race(origin="sglang #34076")
def extras_handed_over_unprotected(patch: Patch) -> None:
    """Columns are handed over with their memory, and what crosses beside them only with a wait."""

    def use_part_on_current_stream(self: Runtime, packed: PackedUpload, index: int) -> torch.Tensor:
        if self.current_stream != packed.stream:
            self.wait(packed.ready)
        return packed.view(index)

    patch(Runtime, "use_part_on_current_stream", use_part_on_current_stream)


@race(origin="vllm #29623, sglang #34076")
def column_memory_handed_once(patch: Patch) -> None:
    """Memory is kept for the first stream that takes it over, and a second one only waits."""

    def use_on_current_stream(
        self: Runtime, tensor: torch.Tensor, made_on: Stream, ready: Fence | None = None, *, synchronised: Any = None
    ) -> torch.Tensor:
        if synchronised and self.current_stream != made_on:
            self.wait(ready or self.record(made_on))
            return tensor
        found: torch.Tensor = original(self, tensor, made_on, ready, synchronised=synchronised)
        return found

    original = patch(Runtime, "use_on_current_stream", use_on_current_stream)
