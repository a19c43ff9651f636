"""Pinned host memory that kernels address: one memory, seen from both sides, at one address."""

import time

import numpy as np
import torch

from batchstate import SlotPool
from batchstate.kv.hisparse import HiSparse
from batchstate.kv.host_pool import HostKVPool
from batchstate.kv.pages import PagePool
from batchstate.runtime import Runtime, open_runtime
from benchmarks.gpu.outcome import Notes, Setting


def run(setting: Setting, notes: Notes) -> None:
    """Address, host to kernel, kernel to host on another stream, and the backups of the host tier."""
    runtime = open_runtime(setting.device)
    _one_memory(runtime, notes)
    _from_another_stream(runtime, notes, rows=1 << (8 if setting.quick else 17))
    _backups(runtime, notes, steps=8 if setting.quick else 64)


def _one_memory(runtime: Runtime, notes: Notes) -> None:
    for dtype in (torch.uint8, torch.int32, torch.bfloat16, torch.float64):
        mapped = runtime.mapped_zeros((4, 3), dtype)
        host, device = mapped.host, mapped.device
        notes.require_equal(f"{dtype}: address for kernels", device.data_ptr(), host.data_ptr())
        notes.require_equal(f"{dtype}: device of the view", device.device, runtime.device)
        notes.require_equal(f"{dtype}: pinned", host.is_pinned() or runtime.device.type == "cpu", True)
        host[2] = 7
        read = runtime.read_back((device * 1).double().sum())
        notes.require_equal(f"{dtype}: what a kernel reads of the host's writes", float(read), 21.0)
        device[1] = 5
        runtime.synchronize()
        notes.require_equal(f"{dtype}: what the host reads of a kernel's writes", host[1].tolist(), [5, 5, 5])


def _from_another_stream(runtime: Runtime, notes: Notes, *, rows: int) -> None:
    """A scatter of rows into host memory, behind the fence of the stream that ran it; and how fast it went."""
    width = 64  # int64: 512 bytes a row
    mapped = runtime.mapped_zeros((rows, width), torch.int64)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(runtime.device)
    source = torch.arange(rows, device=runtime.device)[:, None].expand(rows, width).contiguous()
    side = runtime.stream("backups")
    made = runtime.record()
    runtime.synchronize()
    seconds = 0.0
    for _ in range(2):  # the first loads the kernel
        mapped.bytes[...] = 0
        start = time.perf_counter()
        with runtime.use(side):
            runtime.wait(made)
            mapped.device.index_copy_(0, order, source)
            done = runtime.record()
        done.wait()
        seconds = time.perf_counter() - start
    wanted = np.empty(rows, dtype=np.int64)
    wanted[order.cpu().numpy()] = np.arange(rows)
    wrong = int((mapped.host.numpy() != wanted[:, None]).any(axis=1).sum())
    notes.require_equal("rows of the scatter that are wrong on the host", wrong, 0)
    nbytes = source.numel() * source.element_size()
    notes.figures["scatter into host memory"] = {"bytes": nbytes, "gb_per_s": round(nbytes / seconds / 1e9, 2)}


def _backups(runtime: Runtime, notes: Notes, *, steps: int) -> None:
    """A decode step in the host tier writes its newest token through, without a copy to plan by and without waiting."""
    requests, tokens, hot = 8, 40, 16
    slots = SlotPool(runtime, requests)
    pages = PagePool(runtime, slots, requests, hot, max_tokens_per_request=hot)
    host = HostKVPool(runtime, requests * (tokens + steps), layers=2, item_shape=(4,), dtype=torch.float32)
    kv = [runtime.device_zeros((pages.location_capacity, 4), torch.float32, name=f"kv {layer}") for layer in range(2)]
    tier = HiSparse(pages, host, kv, hot_tokens=hot)
    taken = slots.take(requests)
    tier.reserve(taken, tokens, tokens + steps)
    tier.admit_direct(taken)
    lens = np.full(requests, tokens)
    memories = [buffer.memory for buffer in host.contiguous_buffers()]
    wrong, before = 0, runtime.counters.snapshot()
    for step in range(1, steps + 1):
        runtime.next_step()
        lens += 1
        location = tier.map_last_location(taken, lens)
        tier.back_up(location)  # the token of the step before
        written = location.locations.device
        for layer, memory in enumerate(kv):  # stands for the model's attention
            memory.index_fill_(0, written, 100 * step + layer)
        runtime.record().wait()
        if step > 1:
            rows = location.backup_to.np.copy()  # torch takes no array that is read-only
            wrong += sum(int((memory[rows] != 100 * step - 100 + i).sum()) for i, memory in enumerate(memories))
            wrong += abs(len(rows) - requests)
    spent = runtime.counters - before
    notes.figures["backups"] = {"steps": steps, "requests": requests, "wrong elements": wrong}
    notes.require_equal("elements of backups that are wrong on the host", wrong, 0)
    notes.require_equal("forced syncs of backups", spent.forced_syncs, 0)
