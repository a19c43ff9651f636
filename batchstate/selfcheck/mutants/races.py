"""Streams, or the host, touch the same memory and nothing says who comes first.

All run with checks off: what finds them is the race detector, and nobody else.
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from batchstate._allocator import Allocator, Ints
from batchstate.kv.pages import PagePool
from batchstate.levels import Level
from batchstate.mirror import DeviceSide, MirroredTensor
from batchstate.runtime import DoneFence, Fence, FixedMemory, PackedUpload, Runtime, Stream
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.tables import Table
from batchstate.violations import Code

race = partial(mutant, Code.RACE, machine="overlap", level=Level.OFF, tool="race")


# Columns and what crosses with them


@race(origin="sglang #8056, vllm #50432", seeded="a")
def added_under_a_reader(patch: Patch) -> None:
    """`+ n` adds into the memory of the old value, which the forward that was launched before still reads."""

    def derived(
        self: MirroredTensor, host: Any, device: torch.Tensor | None, shape: Any, under_way: str, **kwargs: Any
    ) -> MirroredTensor:
        old = self._device.existing
        if under_way == "+ n" and device is not None and old is not None:
            device = old.copy_(device)
        result: MirroredTensor = original(self, host, device, shape, under_way, **kwargs)
        return result

    original = patch(MirroredTensor, "_derived", derived)


@race(origin="sglang #30435, sglang #18744")
def column_read_without_wait(patch: Patch) -> None:
    """A forward reads a column on its own stream and does not wait for the stream that made it."""

    def tensor(self: DeviceSide, runtime: Runtime) -> torch.Tensor:
        original(self, runtime)
        if self.existing is None:
            raise RuntimeError("a device side that was made and is not there")
        return self.existing

    original = patch(DeviceSide, "tensor", tensor)

    def use_on_current_stream(self: Runtime, tensor: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return tensor

    patch(Runtime, "use_on_current_stream", use_on_current_stream)


@race(origin="vllm #31841, TRT-LLM#15546")
def extras_read_without_wait(patch: Patch) -> None:
    """What crossed with a step is read on the forward's stream, and only the columns beside it are waited for."""

    def use_part_on_current_stream(self: Runtime, packed: PackedUpload, index: int) -> torch.Tensor:
        return packed.view(index)

    patch(Runtime, "use_part_on_current_stream", use_part_on_current_stream)


@race(origin="sglang #30471")
def one_stream_has_waited_for_all(patch: Patch) -> None:
    """Memory is noted as handed over, and not to whom: only the first stream that uses it waits."""

    def use_on_current_stream(
        self: Runtime, tensor: torch.Tensor, made_on: Stream, ready: Fence | None = None, *, synchronised: Any = None
    ) -> torch.Tensor:
        if synchronised:
            return tensor
        found: torch.Tensor = original(self, tensor, made_on, ready, synchronised=synchronised)
        return found

    original = patch(Runtime, "use_on_current_stream", use_on_current_stream)


@race(origin="sglang #31687")
def wrong_stream_waits(patch: Patch) -> None:
    """The fence of a hand-over is waited for on the stream that recorded it, where it changes nothing."""

    def wait(self: Runtime, fence: Fence, *, stream: Stream | None = None) -> None:
        current = self.current_stream
        waits = current if stream is None else stream
        here = next((one for one in _streams(self) if one != waits), waits) if waits == current else waits
        original(self, fence, stream=here)

    original = patch(Runtime, "wait", wait)

    def stream(self: Any, name: str) -> Stream:
        made: Stream = made_by(self, name)
        _streams(self).append(made)
        return made

    from batchstate.testing.race import RaceRuntime

    made_by = patch(RaceRuntime, "stream", stream)
    known: WeakKeyDictionary[Runtime, list[Stream]] = WeakKeyDictionary()

    def _streams(runtime: Runtime) -> list[Stream]:
        return known.setdefault(runtime, [])


@race(origin="sglang #30435")
def fence_of_the_reader(patch: Patch) -> None:
    """A hand-over waits for a fence that is recorded on the stream that reads, and not on the one that wrote."""

    def use_on_current_stream(
        self: Runtime, tensor: torch.Tensor, made_on: Stream, ready: Fence | None = None, *, synchronised: Any = None
    ) -> torch.Tensor:
        fence = self.record() if made_on != self.current_stream else ready
        found: torch.Tensor = original(self, tensor, made_on, fence, synchronised=synchronised)
        return found

    original = patch(Runtime, "use_on_current_stream", use_on_current_stream)


# Tables


@race(origin="sglang #26376, sglang #26380")
def table_written_under_a_reader(patch: Patch) -> None:
    """A table is written without waiting for forwards that still read it."""

    def await_readers(self: FixedMemory) -> None:
        self._readers = []
        original(self)

    original = patch(FixedMemory, "await_readers", await_readers)


@race(origin="sglang #31687")
def read_done_at_the_top_of_the_loop(patch: Patch) -> None:
    """Writers wait for the read-done of the step before: the barrier stands before the last read."""
    before: WeakKeyDictionary[Table, Fence] = WeakKeyDictionary()

    def read_until(self: Table, fence: Fence) -> None:
        original(self, before.get(self, DoneFence()))
        before[self] = fence

    original = patch(Table, "read_until", read_until)


@race(origin="sglang #26376")
def row_cleared_under_a_reader(patch: Patch) -> None:
    """Writes of a table wait for its readers, and the clearing of a row that goes back does not."""

    def clear(self: Table, slots: object) -> None:
        readers, self._fixed._readers = self._fixed._readers, []
        original(self, slots)
        self._fixed._readers = readers

    original = patch(Table, "clear", clear)


@race(origin="sglang #30435")
def table_read_before_it_is_written(patch: Patch) -> None:
    """A table is read on another stream than the one that wrote it last, without a wait."""
    patch(FixedMemory, "ordered", lambda self: self.memory)


@race(origin="sglang #26376, sglang #29352")
def table_written_from_two_streams(patch: Patch) -> None:
    """A write waits for readers and not for the last write, which another stream has launched."""

    def await_readers(self: FixedMemory) -> None:
        current = self.runtime.current_stream
        for fence, waited in self._readers:
            if current not in waited:
                self.runtime.wait(fence, stream=current)
                waited.add(current)
        self._last_writer = current

    patch(FixedMemory, "await_readers", await_readers)


@race(origin="sglang #30471")
def write_fence_before_the_write(patch: Patch) -> None:
    """The fence that readers of a table wait for is recorded before the scatter is launched."""

    def await_readers(self: FixedMemory) -> None:
        original(self)
        self._written = self.runtime.record()
        self._synchronised = set()

    original = patch(FixedMemory, "await_readers", await_readers)
    patch(FixedMemory, "note_write", lambda self: None)


# Slots and pages


@race(origin="sglang #18744, sglang #18746, sglang #18803", seeded="f")
def freed_under_a_forward(patch: Patch) -> None:
    """Slots and pages are free as soon as the host says so, and their next owner writes while a forward reads them."""

    def release(self: Allocator, indices: Ints, after: Fence | None, operation: str) -> None:
        original(self, indices, None, operation)

    original = patch(Allocator, "release", release)


@race(origin="sglang #29352, sglang #29353")
def freed_behind_an_older_forward(patch: Patch) -> None:
    """What a request held is freed behind the forward before the last: a fence that is too early for ownership."""
    before: WeakKeyDictionary[PagePool, Fence] = WeakKeyDictionary()

    def release_requests(self: PagePool, slots: Any, *, after: Fence | None = None) -> None:
        older = before.get(self, DoneFence())
        if after is not None:
            before[self] = after
        original(self, slots, after=older)

    original = patch(PagePool, "release_requests", release_requests)


@race(origin="sglang #29352, sglang #27967", tool="race:prompt")
def freed_behind_the_plan(patch: Patch) -> None:
    """What a request held is freed behind a fence of the stream that plans, which knows nothing of the forward."""

    def release_requests(self: PagePool, slots: Any, *, after: Fence | None = None) -> None:
        original(self, slots, after=self.slots.runtime.record())

    original = patch(PagePool, "release_requests", release_requests)


@race(origin="sglang #29353, sglang #6888")
def pages_taken_back_under_a_forward(patch: Patch) -> None:
    """Pages beyond a request's true length are free at once, while a forward still writes guesses into them."""

    def truncate(self: PagePool, slots: Any, lengths: Any, *, after: Fence | None = None) -> Any:
        return original(self, slots, lengths, after=None)

    original = patch(PagePool, "truncate", truncate)
