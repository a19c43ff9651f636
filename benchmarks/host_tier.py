"""`python -m benchmarks.host_tier`: what planning a decode step in the host tier costs the host.

The batch has 8, 64 and 512 requests, their contexts 1 k, 16 k and 128 k tokens, the pools room for all of them. All
combinations take turns in one process. The time is to grow with the batch, and with nothing else.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from batchstate import HiSparse, HostKVPool, PagePool, SlotPool
from batchstate.runtime import Counters, Runtime, open_runtime
from benchmarks.machine import machine
from examples.console import Row, Section, add_json, show, whole, write_json

BATCHES = (8, 64, 512)
CONTEXTS = (1_024, 16_384, 131_072)
PAGE_SIZE = 64
HOT = 256


@final
class Decode:
    """A steady decode of the host tier: every step each request gets one token.

    Args:
        runtime: the device.
        requests: in the batch.
        context: tokens of each when it is admitted.
        steps: that there is room for.
    """

    def __init__(self, runtime: Runtime, requests: int, context: int, steps: int) -> None:
        self.slots = SlotPool(runtime, requests)
        self.pages = PagePool(runtime, self.slots, requests * (HOT // PAGE_SIZE), PAGE_SIZE, max_tokens_per_request=HOT)
        room = -(-(context + steps) // PAGE_SIZE)
        # One byte a token: the planning asks how many tokens there are and not how large they are.
        self.host = HostKVPool(runtime, requests * room, PAGE_SIZE, layers=1, item_shape=(1,), dtype=torch.uint8)
        kv = [runtime.device_zeros((self.pages.location_capacity, 1), torch.uint8)]
        self.tier = HiSparse(self.pages, self.host, kv, hot_tokens=HOT)
        self.requests = self.slots.take(requests)
        self.tier.reserve(self.requests, context, context + steps)
        self.tier.admit_direct(self.requests)
        self.lengths = np.full(requests, context, dtype=np.int64)

    def step(self) -> float:
        """Plans a step and launches its backup; microseconds that the planning took."""
        self.lengths = self.lengths + 1
        start = time.perf_counter_ns()
        location = self.tier.map_last_location(self.requests, self.lengths)
        took = (time.perf_counter_ns() - start) / 1e3
        self.tier.back_up(location)
        return took


def measured(runtime: Runtime, rounds: int) -> tuple[dict[tuple[int, int], np.ndarray[Any, Any]], Counters]:
    """Microseconds a step, float64[rounds], for each batch and context; and what the runtime counted meanwhile."""
    scenes = {(n, c): Decode(runtime, n, c, rounds + 10) for n in BATCHES for c in CONTEXTS}
    for scene in scenes.values():
        for _ in range(10):  # from here on the step before is backed up in every step
            scene.step()
    before = runtime.counters.snapshot()
    samples = {key: np.empty(rounds) for key in scenes}
    for round_ in range(rounds):
        runtime.next_step()
        for key, scene in scenes.items():
            samples[key][round_] = scene.step()
    return samples, runtime.counters - before


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_tier", description=__doc__)
    parser.add_argument("--rounds", metavar="N", type=whole(1), default=200, help="default: %(default)s")
    add_json(parser)
    args = parser.parse_args(argv)
    runtime = open_runtime("cpu")
    samples, cost = measured(runtime, args.rounds)
    medians = {key: float(np.median(times)) for key, times in samples.items()}
    steps = args.rounds * len(samples)
    rows = [
        Row(f"{n} requests of {c:,} tokens", f"{medians[n, c]:,.0f} us", f"{medians[n, c] / n:.2f} us a request")
        for n, c in medians
    ]
    spread = [
        Row(
            f"{n} requests: longest against shortest contexts",
            f"{medians[n, CONTEXTS[-1]] / medians[n, CONTEXTS[0]]:.2f}",
            f"{CONTEXTS[-1] // CONTEXTS[0]} times the tokens, and as large a pool",
        )
        for n in BATCHES
    ]
    counts = [
        Row("copies to the host a step", f"{cost.device_to_host_copies / steps:g}"),
        Row("forced syncs a step", f"{cost.forced_syncs / steps:g}"),
    ]
    show(
        f"planning a decode step in the host tier, medians of {args.rounds} rounds",
        [Section("Time", rows), Section("Ratios", spread), Section("Counts", counts)],
    )
    write_json(
        args.json,
        {
            "machine": machine(runtime),
            "rows": [{"requests": n, "context": c, "us": us} for (n, c), us in medians.items()],
            "device_to_host_copies": cost.device_to_host_copies,
            "forced_syncs": cost.forced_syncs,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
