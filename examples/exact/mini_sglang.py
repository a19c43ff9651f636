"""The adapter of mini-sglang: its scheduler, managers, radix cache, KV pool and batches, on a CPU.

Replaced are the forward of the model and the three kernels that the host calls. Needs a checkout of
sgl-project/mini-sglang; see `stand_ins.checkout`.
"""

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final
from unittest import mock

import attrs
import torch

from batchstate.testing.exact import EngineUnderTest, ExactModel, PackedCache, PagedMemory, Request, Verifier
from examples.exact.stand_ins import checkout, import_with_stand_ins, without_cuda

ABSENT = ("zmq", "zmq.asyncio", "msgpack", "tvm_ffi", "triton", "triton.language", "flashinfer", "sgl_kernel")
MODULES = ("scheduler.scheduler", "attention.fa", "engine.engine", "kvcache.mha_pool", "kvcache.radix_cache", "kernel")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def modules() -> Any:
    """The engine's package, imported."""
    checkout("mini-sglang", "python")
    os.environ.setdefault("LOG_LEVEL", "ERROR")  # it says for each engine that graphs are off
    for name in MODULES:
        import_with_stand_ins(f"minisgl.{name}", *ABSENT)
    return sys.modules["minisgl"]


class ExactForward:
    """In the place of the engine's model: reads by the metadata that its flash-attention backend has prepared."""

    def __init__(self, core: Any, model: ExactModel, verifier: Verifier | None) -> None:
        self._core, self._model, self._verifier = core, model, verifier

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        """Logits float32[requests, vocab_size] of the batch in the engine's context."""
        context = self._core.get_global_ctx()
        batch, memory = context.batch, context.kv_cache
        metadata, size = batch.attn_metadata, context.page_size
        lens = metadata.cache_seqlens.tolist()
        rows = [
            (pages[: -(-length // size), None].long() * size + torch.arange(size)).flatten()[:length]
            for pages, length in zip(metadata.page_table, lens, strict=True)
        ]
        keys, values = (
            [cache(layer).view(memory._storage_shape) for layer in range(memory.num_layers)]
            for cache in (memory.k_cache, memory.v_cache)
        )
        packed = PackedCache(
            PagedMemory(keys, values, size),
            batch.positions,
            metadata.cu_seqlens_q.diff().tolist(),
            lens,
            torch.cat(rows),
            batch.out_loc,
            requests=[request.uid for request in batch.padded_reqs],
            verifier=self._verifier,
        )
        hidden = self._model.run(batch.input_ids[None], batch.positions[None], packed)
        return self._model.logits(hidden[0, metadata.get_last_indices(batch.size).long()])


@final
class MiniSGLang:
    """See `batchstate.testing.exact.Adapter`."""

    def __init__(self, settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None) -> None:
        minisgl = modules()
        self.windows = contextlib.ExitStack()
        self.windows.enter_context(without_cuda())
        try:
            self.scheduler = self._scheduler(minisgl, settings, model, verifier)
        except BaseException:
            self.windows.close()
            raise
        self._overlap, self._message = settings["overlap"], minisgl.message
        self._sampling = minisgl.core.SamplingParams
        self._messages: deque[Any] = deque()
        self._came: dict[int, list[int]] = {}
        self._under_way: Any = None
        self.scheduler.receive_msg = self._receive
        self.scheduler.send_result = self._send

    def _scheduler(
        self, minisgl: Any, settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None
    ) -> Any:
        """A scheduler as its constructor makes it, and an engine likewise, without a process group and without CUDA."""
        core, scheduling, engine_module = minisgl.core, minisgl.scheduler.scheduler, minisgl.engine.engine
        size, spec = settings["page_size"], model.spec
        pages = -(-settings["kv_tokens"] // size)
        core._GLOBAL_CTX = None
        engine = object.__new__(engine_module.Engine)
        engine.device, engine.dtype, engine.stream = torch.device("cpu"), model.dtype, torch.cuda.current_stream()
        engine.ctx, engine.num_pages, engine.max_seq_len = core.Context(size), pages, min(256, pages * size)
        core.set_global_ctx(engine.ctx)
        minisgl.distributed.info._TP_INFO = minisgl.distributed.DistributedInfo(0, 1)
        pool = minisgl.kvcache.mha_pool.MHAKVCache(
            spec.heads, len(spec.layers), spec.head_dim, pages + 1, size, model.dtype, engine.device
        )
        engine.ctx.kv_cache = engine.kv_cache = pool
        running = settings["max_running"]
        engine.ctx.page_table = engine.page_table = torch.zeros(running + 1, 256, dtype=torch.int32)
        engine.page_table[running].fill_(pages * size)
        engine.attn_backend = engine.ctx.attn_backend = object.__new__(minisgl.attention.fa.FlashAttentionBackend)
        engine.attn_backend.kvcache, engine.attn_backend.page_size = pool, size
        engine.sampler = engine_module.Sampler(engine.device, spec.vocab_size)
        engine.model = ExactForward(core, model, verifier)
        engine.graph_runner = engine_module.GraphRunner(
            engine.stream, engine.device, engine.model, engine.attn_backend, [], None, 0, 256, spec.vocab_size, None
        )

        def compare(one: torch.Tensor, other: torch.Tensor) -> int:
            length = min(len(one), len(other))
            differ = (one[:length] != other[:length]).nonzero()
            return int(differ[0]) if len(differ) else length

        def sample(logits: torch.Tensor, temperatures: torch.Tensor, *others: object) -> torch.Tensor:
            return model.sample(logits, temperatures)

        for module, name, value in (
            (minisgl.kernel, "fast_compare_key", compare),
            (minisgl.engine.sample, "sample_impl", sample),
        ):
            self.windows.enter_context(mock.patch.object(module, name, value))

        scheduler = object.__new__(scheduling.Scheduler)
        scheduler.engine, scheduler.device, scheduler.stream = engine, engine.device, engine.stream
        scheduler.engine_stream_ctx = contextlib.nullcontext()
        scheduler.table_manager = scheduling.TableManager(running, engine.page_table)
        scheduler.cache_manager = scheduling.CacheManager(pages, size, engine.page_table, settings["cache"])
        scheduler.decode_manager = scheduling.DecodeManager(size)
        scheduler.prefill_manager = scheduling.PrefillManager(
            scheduler.cache_manager, scheduler.table_manager, scheduler.decode_manager
        )
        scheduler.finished_reqs, scheduler.eos_token_id = set(), -1
        scheduler.token_pool = scheduler.table_manager.token_pool
        scheduler.prefill_budget = settings["step_tokens"]
        return scheduler

    def _receive(self, blocking: bool = False) -> list[Any]:
        messages, self._messages = list(self._messages), deque()
        return messages

    def _send(self, reply: list[Any]) -> None:
        for message in reply:
            self._came.setdefault(message.uid, []).append(message.next_token)

    def add(self, request: Request) -> None:
        """A request arrives."""
        sampling = self._sampling(temperature=request.temperature, max_tokens=request.max_new_tokens, ignore_eos=True)
        ids = torch.tensor(request.prompt, dtype=torch.int32)
        self._messages.append(self._message.UserMsg(uid=request.number, input_ids=ids, sampling_params=sampling))

    def abort(self, number: int) -> None:
        """Its client hangs up."""
        self._messages.append(self._message.AbortBackendMsg(uid=number))

    @torch.inference_mode()
    def step(self) -> Mapping[int, Sequence[int]]:
        """One turn of the scheduler's loop, overlapped or not."""
        self._came = {}
        if self._overlap:
            self._under_way = self.scheduler.overlap_loop(self._under_way)
        else:
            self.scheduler.normal_loop()
        return self._came

    @property
    def busy(self) -> bool:
        """Whether a message waits, a request runs, or a result is unread."""
        scheduler = self.scheduler
        return bool(
            self._messages
            or self._under_way is not None
            or scheduler.prefill_manager.runnable
            or scheduler.decode_manager.runnable
        )

    def close(self) -> None:
        """Ends the windows of the stand-ins."""
        self.windows.close()


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """A window without three faults.

    Pull request #142: an unfinished request that has computed what the radix tree has by now goes on with the pages of
    the tree, since its own are freed. And with overlap, a request that is aborted while its last batch is under way
    has given everything back; its result gives nothing back a second time. And each request that joins reserves the
    rest of its last page, too.
    """
    scheduling = modules().scheduler
    manager, scheduler = scheduling.cache.CacheManager, scheduling.scheduler.Scheduler
    adder = scheduling.prefill.PrefillAdder
    cached, freed_all, joined = manager.cache_req, scheduler._free_req_resources, adder._add_one_req

    def cache_req(self: Any, request: Any, *, finished: bool) -> None:
        if getattr(request, "released", False):
            return
        free, freed = self._free, list[torch.Tensor]()
        self._free = lambda pages: freed.append(pages.clone())
        try:
            cached(self, request, finished=finished)
        finally:
            self._free = free
        for pages in freed:
            free(pages)
        request.released = finished
        if not finished:
            kept = request.cache_handle
            if kept.cached_len:
                self.page_table[request.table_idx, : kept.cached_len] = kept.get_matched_indices()

    def free_req_resources(self: Any, request: Any) -> None:
        if not getattr(request, "released", False):
            freed_all(self, request)

    def add_one_req(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = joined(self, *args, **kwargs)
        self.reserved_size += self.cache_manager.page_size - 1
        return request

    with (
        mock.patch.object(adder, "_add_one_req", add_one_req),
        mock.patch.object(manager, "cache_req", cache_req),
        mock.patch.object(scheduler, "_free_req_resources", free_req_resources),
    ):
        yield


def _mended(settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None) -> MiniSGLang:
    adapter = MiniSGLang(settings, model, verifier)
    adapter.windows.enter_context(mended())
    return adapter


MINI_SGLANG = EngineUnderTest(
    "mini_sglang",
    MiniSGLang,
    {
        "page_size": (1, 2, 4, 16),
        "kv_tokens": (2048, 128, 256, 400),
        "max_running": (16, 1, 2, 4, 8),
        "step_tokens": (256, 16, 32, 64),
        "overlap": (False, True),
        "cache": ("radix", "naive"),
        "dtype": DTYPES,
    },
    temperatures=(0.5, 0.75, 1.0, 1.5),
)

MENDED = attrs.evolve(MINI_SGLANG, name="mini_sglang_mended", open=_mended)
