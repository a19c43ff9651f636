"""`python -m benchmarks.adoption.controllers`: whole classes of released engines that order streams; see `streams`.

SGLang's `HiCacheController` moves KV between its own pools on the device and on the host while forwards run; its radix
cache's loops ask what is over. The kernels that copy are stood in for: numpy copies the same rows. LMDeploy's
`BaseModelAgent` runs its two loops, with its own steps, sampling and stopping, over a model of a few operations.
"""

import asyncio
import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from batchstate.races import declared_kernel
from benchmarks.adoption import streams
from benchmarks.adoption.checkouts import module_of
from benchmarks.adoption.streams import Code, Helper, cuda

LAYERS, ROWS, TOKENS, IN_FLIGHT, VISITS = 2, 15, 3, 2, 3
STEPS, SERVED = 60, 15


@functools.cache
def module(name: str, packages: tuple[str, ...] = ()) -> Any:
    """A module of an engine; memory can be pinned in the window."""
    makers = {maker: getattr(torch, maker) for maker in ("zeros", "empty", "ones", "tensor", "full")}
    imported = module_of(name, packages=packages)
    for maker, function in makers.items():
        setattr(torch, maker, function)
    return imported


# SGLang


@declared_kernel(
    reads=["src_k", "src_v", "src_indices", "dst_indices"],
    writes=["dst_k", "dst_v"],
    rows={"src_k": "src_indices", "src_v": "src_indices", "dst_k": "dst_indices", "dst_v": "dst_indices"},
)
def transfer_kv_per_layer(
    src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any, item_size: int
) -> None:
    """Rows of one layer, between device and host."""
    source, target = src_indices.numpy(), dst_indices.numpy()
    dst_k.numpy()[target] = src_k.numpy()[source]
    dst_v.numpy()[target] = src_v.numpy()[source]


class Memory:
    """The pools of SGLang on device and host, and the controller between them."""

    def __init__(self, code: Code) -> None:
        self.device = code.MHATokenToKVPool(ROWS, 1, torch.float32, 1, 2, LAYERS, "cuda", False)
        self.allocator = code.TokenToKVPoolAllocator(ROWS, torch.float32, "cuda", self.device, False)
        with module("sglang.srt.mem_cache.pool_host.base").host_memory_budget_scope(1 << 20):
            self.host = code.MHATokenToKVPoolHost(
                self.device._mha_buffer_info(),
                2.0,
                0,
                1,
                "layer_first",
                device_capacity_tokens=ROWS,
                start_layer=0,
                end_layer=LAYERS,
            )
        layers = {
            id(table): tensors
            for table, tensors in (
                (self.device.k_data_ptrs, self.device.k_buffer),
                (self.device.v_data_ptrs, self.device.v_buffer),
                (self.host.k_data_ptrs, self.host.k_data_refs),
                (self.host.v_data_ptrs, self.host.v_data_refs),
            )
        }

        def transfer_kv_all_layer(
            *,
            src_k_layers: Any,
            dst_k_layers: Any,
            src_v_layers: Any,
            dst_v_layers: Any,
            num_layers: int,
            **options: Any,
        ) -> None:
            tables = [layers[id(table)] for table in (src_k_layers, dst_k_layers, src_v_layers, dst_v_layers)]
            for layer in range(num_layers):
                transfer_kv_per_layer(*(table[layer] for table in tables), **options)

        module("sglang.srt.mem_cache.pool_host.mha").transfer_kv_all_layer = transfer_kv_all_layer
        module("sglang.srt.mem_cache.pool_host.mha").transfer_kv_per_layer = transfer_kv_per_layer
        self.controller = code.HiCacheController(
            self.allocator, self.host, 1, None, None, write_policy="write_through", io_backend="kernel"
        )


class Request:
    """A prompt: its rows on the device and on the host, and the value that is stored in them."""

    def __init__(self, number: int, rows: Any) -> None:
        self.number, self.rows, self.on_host, self.visits = number, rows, None, 0


class Scheduler:
    """SGLang's order of a step: what is over, what leaves, what comes back, the forward, and its backup."""

    def __init__(self, code: Code) -> None:
        self.code, self.memory = code, Memory(code)
        self.schedule, self.forward, self.numbers = cuda.Stream(), cuda.Stream(), itertools.count(1)
        self.controller = self.memory.controller
        self.controller.load_fence_stream = self.controller.write_fence_stream = self.forward
        self.under_way: deque[Any] = deque()
        self.written: dict[int, Request] = {}
        self.backed_up: deque[Request] = deque()
        self.away: deque[Request] = deque()
        self.seen: list[Any] = []
        self.tree = SimpleNamespace(
            cache_controller=self.controller,
            pp_rank=0,
            metrics_collector=None,
            buffer_pipeline=None,
            ongoing_write_through=self.written,
            ongoing_load_back={},
            tree_core=SimpleNamespace(write_back_duplicate_reclaim_digest=0, finish_load_back=self.is_back),
            dec_lock_ref=lambda node, parameters: None,
            dec_host_lock_ref=lambda node, parameters: None,
            _all_reduce=lambda tensor, operation: None,
            _finish_write_through_ack=lambda node: self.backed_up.append(self.written.pop(node)),
            _log_write_ack_metrics=lambda ack: None,
        )
        self.tree._count_ready_acks = functools.partial(code._count_ready_acks, self.tree)

    def is_back(self, request: Request) -> None:
        """A request has come back: it will again, or its rows on the host are free."""
        request.visits += 1
        if request.visits < VISITS:
            self.away.append(request)
        else:
            self.controller.evict_host(request.on_host)

    def result(self) -> None:
        """Whether the oldest forward has read what was stored; in each order requests come back in other steps."""
        host, done, _, back, _ = self.under_way.popleft()
        done.synchronize()
        stored = 0.0 if back is None else float(LAYERS * back.number)
        self.seen.append(host.tolist() == [stored, -stored])

    def step(self) -> None:
        """One step, while another is under way."""
        if len(self.under_way) == IN_FLIGHT:
            self.result()
        self.code.writing_check(self.tree)
        self.code.loading_check(self.tree)
        if self.memory.allocator.available_size() < 2 * TOKENS:
            self.code.writing_check(self.tree, write_back=True)  # as it evicts
        while self.backed_up:
            self.away.append(self.backed_up.popleft())
            self.memory.allocator.free(self.away[-1].rows)
        back = self.away.popleft() if len(self.away) > 1 else None
        consumer = -1
        if back is not None:
            back.rows = self.controller.load(back.on_host, node_id=back.number)
            self.tree.ongoing_load_back[back.number] = back, None, None
            consumer = self.controller.start_loading()
        number = next(self.numbers)
        new = Request(number, self.memory.allocator.alloc(TOKENS))
        with cuda.stream(self.forward):
            self.forward.wait_stream(self.schedule)
            self.under_way.append(self.run(new, back, consumer))
        if number % VISITS == 1:
            new.on_host = self.controller.write(new.rows, node_id=number)
            self.written[number] = new
        ended = [request for request in (new, back) if request is not None and request.number not in self.written]
        for request in ended:
            self.memory.allocator.free(request.rows)  # a forward under way still uses them
        self.code.window.next_step()

    def run(self, new: Request, back: Request | None, consumer: int) -> Any:
        """A forward: it writes the rows of a prompt, and reads those that come back."""
        self.controller.layer_done_counter.set_consumer(consumer)
        total = torch.zeros(2, device="cuda")
        for layer in range(LAYERS):
            keys, values = self.memory.device.get_kv_buffer(layer)
            keys.index_fill_(0, new.rows, float(new.number))
            values.index_fill_(0, new.rows, float(-new.number))
            if back is not None:
                total += torch.stack((keys[back.rows].mean(), values[back.rows].mean()))
        host = torch.zeros(2, pin_memory=True)
        host.copy_(total, non_blocking=True)
        return host, self.forward.record_event(), new, back, total


def offloads(code: Code) -> Any:
    """Prompts are stored, backed up, leave the device, and come back; two forwards are in flight."""
    scheduler = Scheduler(code)
    with cuda.stream(scheduler.schedule):
        for _ in range(STEPS):
            scheduler.step()
        while scheduler.under_way:
            scheduler.result()
    return scheduler.seen


def of_sglang() -> Mapping[str, Any]:
    """What the classes take from SGLang, with the pools."""
    controller = module("sglang.srt.managers.cache_controller")
    memory = module("sglang.srt.mem_cache.memory_pool")
    host = module("sglang.srt.mem_cache.pool_host.mha")
    common = module("sglang.srt.mem_cache.pool_host.common")
    allocator = module("sglang.srt.mem_cache.allocator.token")
    host.ALLOC_MEMORY_FUNCS["cuda"] = lambda dims, dtype, pin_memory, **options: torch.zeros(
        dims, dtype=dtype, pin_memory=pin_memory
    )
    common._resolve_device_accessible_ptr_fn = lambda: None
    return {
        **vars(module("sglang.srt.mem_cache.l2_transfer")),
        **vars(controller),
        "device_module": cuda,
        "MHATokenToKVPool": memory.MHATokenToKVPool,
        "MHATokenToKVPoolHost": host.MHATokenToKVPoolHost,
        "TokenToKVPoolAllocator": allocator.TokenToKVPoolAllocator,
    }


# LMDeploy

VOCABULARY, LONGEST = 31, 6
AGENT = "lmdeploy/pytorch/engine/model_agent/agent.py"


def of_lmdeploy() -> Mapping[str, Any]:
    """What the agent's class takes from LMDeploy, and what its engine gives it."""
    packages = ("lmdeploy", "lmdeploy.pytorch")
    agent, strategy, steps, inputs, logits, config, devices = (
        module(f"lmdeploy.pytorch.{name}", packages)
        for name in (
            "engine.model_agent.agent",
            "strategies.ar.model_agent",
            "strategies.ar.step_inputs",
            "model_inputs",
            "engine.logits_process",
            "config",
            "devices",
        )
    )
    return {
        **vars(agent),
        "strategy": strategy,
        "ARStepInputs": steps.ARStepInputs,
        "ModelInputs": inputs.ModelInputs,
        "ModelInputsDelta": inputs.ModelInputsDelta,
        "SamplingInputs": logits.SamplingInputs,
        "DistConfig": config.DistConfig,
        "DeviceContext": devices.DeviceContext,
    }


def agent_of(code: Code) -> Any:
    """An agent without a model of its own: its next token is the sum of the row of the cache that a sequence has."""
    cache = torch.zeros(2 * LONGEST, 2, dtype=torch.int64, device="cuda")
    cuda.synchronize()

    class Agent(code.BaseModelAgent):  # type: ignore[misc, name-defined] # the engine's
        def __init__(self) -> None:
            self._pre_in_que = self._in_que = self._out_que = None
            self._pending_h2d_transfers: deque[Any] = deque()
            self.tasks: set[Any] = set()
            self.stream, self.out_stream, self.cache_stream = cuda.Stream(), cuda.Stream(), cuda.Stream()
            self.dist_config = code.DistConfig()
            self.dist_ctx = code.DistContext(dist_config=self.dist_config)
            self.device_ctx, self.rank, self.need_output = code.DeviceContext(), 0, True
            self.cache_config = SimpleNamespace(role=code.EngineRole.Hybrid)
            self.misc_config = SimpleNamespace(logprobs_mode=None)
            self.kv_connector = self.memdecode_agent = self.cache_engine = self.guided_decoding_manager = None
            self.agent_strategy = code.strategy.ARModelAgentStrategy()
            self.step_inputs, self._prev_chunk_output = code.ARStepInputs(), None
            self.spec_agent = SimpleNamespace(
                is_enabled=lambda: False,
                async_model_forward=self.drafts,
                post_broadcast=lambda *arguments: contextlib.nullcontext(),
            )

        async def drafts(self, inputs: Any, extra_inputs: Any, sampling_inputs: Any) -> Any:
            return extra_inputs

        async def _async_model_forward(self, inputs: Any, return_logits: bool, cache_inputs: Any = None) -> Any:
            ids, lengths, rows = inputs.input_ids[0], inputs.seq_length, inputs.block_offsets[:, 0]
            last = ids[lengths.cumsum(0) - 1]
            cache.index_add_(0, rows, torch.stack((last, inputs.history_lengths), 1))
            tokens = cache.index_select(0, rows).sum(1) % VOCABULARY
            scores = torch.zeros(len(rows), VOCABULARY, device="cuda").scatter_(1, tokens[:, None], 1.0)
            return {"logits": scores[None], "seq_length": torch.ones_like(lengths), "model_metas": None}

    return Agent()


async def serves(code: Code, *, pinned: bool) -> Any:
    """Prompts and decode steps go to the agent one step ahead of their outputs."""
    agent, seen, rows = agent_of(code), [], itertools.count()
    agent.start()
    running: list[list[int]] = []  # of each sequence: its row of the cache, its length

    def sent(tensor: Any) -> Any:
        return tensor.pin_memory() if pinned else tensor

    def sampling(size: int) -> Any:
        return code.SamplingInputs(
            max_num_logprobs=-1,
            logits_processors=[],
            num_ignore_eos=sent(torch.zeros(size, dtype=torch.int64)),
            random_offsets=sent(torch.zeros(size, dtype=torch.int64)),
            all_ids=sent(torch.zeros(size, 1, dtype=torch.int64)),
            batch_size=size,
        )

    def blocks(sequences: list[list[int]]) -> Any:
        return sent(torch.tensor([[row] for row, _ in sequences]))

    async def take() -> None:
        output, loops = asyncio.create_task(agent.get_output_async()), [*agent.tasks]
        output.add_done_callback(lambda task: task.cancelled() or task.exception())  # which may be told nobody else
        await asyncio.wait([output, *loops], return_when=asyncio.FIRST_COMPLETED)
        for loop in loops:
            if loop.done():
                loop.result()  # its error: there will be no output
        taken = await output
        seen.append((taken.next_token_ids.tolist(), taken.stopped.tolist()))

    for step in range(SERVED):
        given = {"inputs": None, "delta": None, "stopping_criteria": None, "extra_inputs": None}
        if step % 3 == 0:
            new = [[next(rows) % (2 * LONGEST), 2 + at] for at in range(2)]
            lengths = torch.tensor([length for _, length in new])
            keep = [at for at, (_, length) in enumerate(running) if length < LONGEST]
            if running:
                given["delta"] = delta_of(code, running, keep, sent)
                running = [running[at] for at in keep]
            given["inputs"] = code.ModelInputs(
                input_ids=sent((torch.arange(int(lengths.sum())) + step)[None] % VOCABULARY),
                seq_length=sent(lengths),
                history_lengths=sent(torch.zeros_like(lengths)),
                block_offsets=blocks(new),
                is_decoding=False,
                num_ignored_history=sent(torch.zeros_like(lengths)),
                max_q_seqlen=int(lengths.max()),
                max_kv_seqlen=int(lengths.max()),
                sum_kv_seqlen=int(lengths.sum()),
            )
            given["stopping_criteria"] = code.strategy.ARStoppingCriteria(sent(torch.full((2,), LONGEST)))
            given["extra_inputs"] = code.strategy.ARExtraInputs()
            given["sampling_inputs"] = sampling(2)
            running += [[row, length + 1] for row, length in new]
        else:
            given["delta"] = delta_of(code, running, [*range(len(running))], sent)
            given["sampling_inputs"] = sampling(len(running))
            running = [[row, length + 1] for row, length in running]
        agent.set_forward_inputs(given)
        del given
        code.window.next_step()
        if step:
            await take()
    await take()
    await agent.stop_async()
    return seen


def delta_of(code: Code, running: list[list[int]], keep: list[int], sent: Any) -> Any:
    """The rows that stay, as the engine says them to the agent."""
    lengths = [running[at][1] for at in keep]
    return code.ModelInputsDelta(
        indices=sent(torch.tensor(keep)),
        block_offsets=sent(torch.tensor([[running[at][0]] for at in keep])),
        indice_cpu=np.array(keep),
        max_q_seqlen=1,
        max_kv_seqlen=max(lengths) + 1,
        sum_kv_seqlen=sum(lengths) + len(lengths),
        num_ignored_history=sent(torch.zeros(len(keep), dtype=torch.int64)),
    )


def loops(code: Code, *, pinned: bool) -> Any:
    """The agent's two loops, its inputs and its outputs, in one event loop; its pauses take no time."""
    pause = asyncio.sleep
    with patch.object(asyncio, "sleep", lambda seconds: pause(0)):
        return asyncio.run(serves(code, pinned=pinned))


HELPERS = (
    Helper(
        "SGLang: HiCacheController",
        {
            "sglang/srt/managers/cache_controller.py": (
                "LayerLoadingEvent",
                "LayerDoneCounter",
                "CacheOperation",
                "HiCacheAck",
                "HiCacheController",
            ),
            "sglang/srt/mem_cache/l2_transfer.py": (
                "make_timing_event_pair",
                "L2Transfer",
                "TransferCompletion",
                "L2TransferEngine",
            ),
            "sglang/srt/mem_cache/unified_radix_cache.py": (
                "UnifiedRadixCache._count_ready_acks",
                "UnifiedRadixCache.writing_check",
                "UnifiedRadixCache.loading_check",
            ),
        },
        offloads,
        given=of_sglang,
        redundant={
            "ack_start.record()": "only elapsed_time() reads it",
            "ack.finish_event.synchronize()": "query() has said yes",
            "stream.synchronize()": "it is for submissions that raise",
        },
        depth=IN_FLIGHT,
    ),
    *(
        Helper(
            f"LMDeploy: agent loops, inputs from {'pinned' if pinned else 'pageable'} memory",
            {AGENT: ("_try_to_cuda", "_record_forward_input_stream", "BaseModelAgent")},
            functools.partial(loops, pinned=pinned),
            given=of_lmdeploy,
            redundant={
                "while not event.query():": "event.wait() orders the output stream, and the copies wait for it",
                "event.wait()": "query() has said yes",
                "while not self.stream.query():": "it is for the profiler",
                "value.record_stream(stream)": "no input is a tensor by itself",
                "torch.cuda.synchronize()": "it is for warm-up, sleep or new weights",
                "self._update_params_ipc_event.wait()": "it is for new weights",
                "self._update_params_ipc_event.record()": "it is for new weights",
                "handle.wait()": "it is for new weights",
            },
            depth=IN_FLIGHT,
        )
        for pinned in (True, False)
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Examines them as `streams` examines its helpers."""
    return streams.main(arguments, HELPERS)


if __name__ == "__main__":
    raise SystemExit(main())
