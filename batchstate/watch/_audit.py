"""Comparison of two sides without a wait: device sides travel to the host by themselves, and are compared a step later.

The device sides are packed on the stream that the engine uses, so that what it writes next comes behind, and copied on
a private stream behind an event of its own. One launch and one copy for a sample, whatever the number of columns.
"""

import threading
from collections import deque
from typing import Any, final

import attrs
import numpy as np
import torch

from batchstate.errors import BatchStateError
from batchstate.runtime import Runtime, Stream, open_runtime
from batchstate.runtime.base import Download
from batchstate.watch.declaration import CallSite, Declaration, Pair
from batchstate.watch.hooks import Hooked
from batchstate.watch.snapshots import Array, array_from, bytes_of, copy_of, entries_of, without_tails

_BYTE = np.dtype(np.uint8)

MOST_UNDER_WAY = 8
"""Samples whose copies may be under way. While there are so many, no more are taken."""


@final
@attrs.define(eq=False)
class _Sample:
    """Host sides as they were, with how many entries of each row count, and the device sides of the same moment."""

    call: int
    site: CallSite
    requests: list[Any]
    hosts: list[tuple[Pair, Array | list[Any], Any]]
    device_types: list[tuple[torch.dtype, torch.Size]]
    download: Download


@final
@attrs.define(eq=False)
class _Lane:
    """The samples of one thread: a runtime belongs to one."""

    runtime: Runtime
    stream: Stream
    samples: deque[_Sample] = attrs.field(factory=deque)


@final
class Audit:
    """The samples of a watched class that are on their way."""

    def __init__(self, declared: Declaration, hooked: Hooked, lag: int, runtime: Runtime | None) -> None:
        self._declared = declared
        self._hooked = hooked
        self._lag = lag
        self._runtime = runtime
        self._thread = threading.local()
        self._lanes: list[_Lane] = []
        self._of_ended = threading.RLock()

    def _lane(self, batch: Any = None, device: torch.device | None = None) -> _Lane | None:
        lane: _Lane | None = getattr(self._thread, "lane", None)
        own = self._runtime or getattr(batch, "runtime", None)
        if own is not None and not isinstance(own, Runtime):
            own = None
        if lane is not None and own is not None and lane.runtime is not own and not lane.samples:
            lane = None  # a runtime may end before the watch does
        if lane is None and device is not None:
            runtime = own or open_runtime(str(device))
            if runtime.owner.ident != threading.get_ident():
                return None  # a runtime that was passed belongs to another thread
            replaced = getattr(self._thread, "lane", None)
            lane = self._thread.lane = _Lane(runtime, runtime.stream("watch"))
            with self._of_ended:
                kept = [old for old in self._lanes if old.samples or (old is not replaced and old.runtime.owner.ident)]
                self._lanes = [*kept, lane]
        return lane

    def sample(self, batch: Any, site: CallSite, call: int) -> None:
        """Takes a sample. Never waits."""
        n = self._declared.count(batch)
        if not n:
            return
        lane = self._lane(batch)
        if lane is not None and (len(lane.samples) >= MOST_UNDER_WAY or lane.runtime.capturing):
            self._hooked.count("skipped")
            return
        declared, read = self._declared, dict[str, Any]()
        hosts, parts, counted, failing = [], [], bool(declared.upto), None
        try:
            for pair, host, device, whole in declared.sides(batch, n):
                if not isinstance(device, torch.Tensor):
                    declared.compare_at_once(pair, host, device, batch, n, site)
                    continue
                counts = declared.counts_of(pair, batch, n) if counted else None
                if pair.host not in read:
                    read[pair.host] = copy_of(entries_of(host, None if whole else n))
                hosts.append((pair, read[pair.host], counts))
                parts.append(device if whole or device.shape[0] == n else device[:n])
                if isinstance(counts, torch.Tensor):
                    parts.append(counts)
        except BatchStateError as error:  # the others are sampled
            failing = error
        if failing is not None:
            self._hooked.report(failing)
        if not parts:
            self._hooked.count("compared", site.compared)
            return
        if lane is None:
            lane = self._lane(batch, parts[0].device)
            if lane is None or lane.runtime.capturing:
                self._hooked.count("skipped")
                return
        runtime, made_on = lane.runtime, lane.runtime.current_stream
        flat = [bytes_of(part) for part in parts]
        packed = runtime.launch(torch.cat, flat, reads=flat, name="watch: pack")
        with runtime.use(lane.stream):
            runtime.use_on_current_stream(packed, made_on)
            runs = [(_BYTE, run.shape, run.shape[0]) for run in flat]
            download = Download(runtime, packed, runs, "watch", lane.stream)
        types = [(part.dtype, part.shape) for part in parts]
        lane.samples.append(_Sample(call, site, declared.requests(batch, on_host=True), hosts, types, download))
        self._hooked.count("samples")
        self._hooked.pending.append(None)

    def compare(self, call: int | None) -> None:
        """Compares what has arrived and is old enough; with None everything, and waits for it.

        These are samples of this thread, and of threads that have ended.
        """
        lane = self._lane()
        if lane is not None:
            self._compare_lane(lane, call)
        if len(self._lanes) > (lane is not None):
            with self._of_ended:
                for other in self._lanes:
                    if not other.runtime.owner.ident:
                        self._compare_lane(other, call)

    def _compare_lane(self, lane: _Lane, call: int | None) -> None:
        while lane.samples and (call is None or not lane.runtime.capturing):
            sample = lane.samples[0]
            if call is not None and (call - sample.call < self._lag or not sample.download.ready()):
                return
            lane.samples.popleft()
            self._hooked.pending.pop()
            self._hooked.count("compared")
            self._compare(sample)

    def _compare(self, sample: _Sample) -> None:
        landed = zip(sample.download.resolve(), sample.device_types, strict=True)
        arrays = (array_from(packed, dtype, shape) for packed, (dtype, shape) in landed)
        for pair, host, counts in sample.hosts:
            device: Any = next(arrays)
            if counts is not None:
                counts = next(arrays) if isinstance(counts, torch.Tensor) else counts
                host, device = without_tails(host, counts), without_tails(device, counts)
            self._declared.compare(pair, host, device, sample.site, sample.requests)
