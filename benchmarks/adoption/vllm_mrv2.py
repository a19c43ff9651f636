"""vLLM's Model Runner V2, its default: `RequestState`, `BlockTables` and `SamplingStates` as released, watched.

Rows stay where they are; what changes is staged and applied once a step; block tables are on the device alone. The
runner below calls them as `GPUModelRunner` does, which cannot be made without a model. The kernels are written here.
"""

import contextlib
import itertools
import random
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch

from batchstate.watch import POISON, watch, watch_log
from benchmarks.adoption.placeholders import stand_in

stand_in()

import vllm.v1.worker.gpu.block_table as block_module  # noqa: E402
import vllm.v1.worker.gpu.buffer_utils as buffers  # noqa: E402
import vllm.v1.worker.gpu.sample.states as sample_module  # noqa: E402
import vllm.v1.worker.gpu.states as state_module  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402

RequestState, BlockTables = state_module.RequestState, block_module.BlockTables
SamplingStates, StagedWriteTensor = sample_module.SamplingStates, buffers.StagedWriteTensor
ROWS, WIDTH, BLOCK = 6, 64, 4
TABLES: dict[int, Any] = {}
"""Address -> the table that lies there: the fused kernel gets addresses."""


class Kernel:
    """Runs a function where a compiled kernel would be launched."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.function


def apply_writes(
    output: Any, strides: Any, indices: Any, starts: Any, contents: Any, ends: Any, groups: Any, **options: Any
) -> None:
    """What `_apply_write_kernel` does."""
    start = 0
    for at, (row, first, end) in enumerate(zip(indices.tolist(), starts.tolist(), ends.tolist(), strict=True)):
        table = output if groups is None else TABLES[int(output[int(groups[at])])]
        flat = table[row].reshape(-1)
        flat[first : first + end - start] = contents[start:end].to(table.dtype)
        start = end


buffers.is_uva_available = lambda: True
buffers.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
buffers.async_tensor_h2d = lambda values, device, dtype: torch.tensor(values, dtype=dtype)
buffers._apply_write_kernel = Kernel(apply_writes)


class Runner:
    """The states of a runner, and its methods that change them."""

    def __init__(self) -> None:
        self.req_states = RequestState(ROWS, WIDTH, 64, 0, 100, torch.device("cpu"))
        self.block_tables = BlockTables([BLOCK, 2 * BLOCK], ROWS, 64, [16, 16], torch.device("cpu"))
        self.sampling_states = SamplingStates(ROWS, 100)
        TABLES.update({table.gpu.data_ptr(): table.gpu for table in self.block_tables.block_tables})

    def finish_requests(self, names: list[str]) -> None:
        """Requests leave."""
        for name in sorted(names):
            self.req_states.remove_request(name)

    def add_requests(self, requests: list[Any]) -> None:
        """Requests join."""
        for request in requests:
            self.req_states.remove_request(request.name)
            self.req_states.add_request(
                request.name, len(request.prompt), request.prompt, request.cached, request.params.max_tokens
            )
            row = self.req_states.req_id_to_index[request.name]
            self.block_tables.append_block_ids(row, request.blocks, overwrite=True)
            self.sampling_states.add_request(row, request.params)
        if requests:
            self.req_states.apply_staged_writes()
        self.sampling_states.apply_staged_writes()

    def update_requests(self, requests: list[Any]) -> None:
        """Requests go on, some with another block."""
        for request in requests:
            row = self.req_states.req_id_to_index[request.name]
            self.req_states.num_computed_tokens_np[row] = request.computed
            if request.new_blocks is not None:
                self.block_tables.append_block_ids(row, request.new_blocks, overwrite=False)
        self.block_tables.apply_staged_writes()

    def execute_model(self) -> None:
        """The device counts the tokens that it has computed."""
        for name, row in self.req_states.req_id_to_index.items():
            tokens = self.req_states.num_computed_tokens.gpu
            tokens[row] = self.req_states.num_computed_tokens_np[row]
            self.req_states.last_sampled_tokens[row] = hash(name) % 7


STAGED = "req_states.total_len req_states.all_token_ids req_states.num_computed_tokens"


def tables(runner: Any) -> list[Any]:
    """The block table of each group."""
    logs: list[Any] = runner.block_tables.block_tables
    return logs


def blocks_in(group: int, runner: Any) -> Any:
    """How many blocks each row has."""
    return runner.block_tables.num_blocks.np[group]


def unapplied(runner: Any) -> list[str]:
    """Logs with writes that have not been applied."""
    logs = [
        (name, getter(runner)) for name, getter in zip(STAGED.split(), map(attrgetter, STAGED.split()), strict=True)
    ]
    logs += [("block_tables", table) for table in tables(runner)]
    return [name for name, log in logs if log._staged_write_indices]


PARTS = ("indices", "starts", "contents", "cu_lens", "max_len")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seeds")
LOGPROBS: dict[Any, int] = {None: sample_module.NO_LOGPROBS, -1: 100}
STATES, BLOCKS, SAMPLES = "req_states.", "block_tables.block_tables.", "sampling_states."
SAYS: dict[Any, Callable[[Any], Any]] = {
    f"{STATES}prompt_len.gpu": lambda req: len(req.prompt),
    f"{STATES}prefill_len.gpu": lambda req: len(req.prompt),
    f"{STATES}all_token_ids.gpu": lambda req: req.prompt,
    f"{STATES}max_seq_len": lambda req: len(req.prompt) + req.params.max_tokens,
    f"{STATES}num_computed_prefill_tokens": lambda req: req.cached,
    **{f"{BLOCKS}{group}.gpu": partial(lambda group, req: req.blocks[group], group) for group in (0, 1)},
    f"{SAMPLES}temperature.gpu": lambda req: req.params.temperature,
    f"{SAMPLES}top_k.gpu": lambda req: req.params.top_k if 0 < req.params.top_k <= 100 else 100,
    f"{SAMPLES}top_p.gpu": lambda req: req.params.top_p,
    f"{SAMPLES}min_p.gpu": lambda req: req.params.min_p,
    f"{SAMPLES}seeds.gpu": lambda req: req.params.seed,
    f"{SAMPLES}seeds_set": lambda req: req.params.seed is not None,
    f"{SAMPLES}num_logprobs": lambda req: LOGPROBS.get(req.params.logprobs, req.params.logprobs),
}
"""What each column holds of a request, by the arguments of `add_requests` and `update_requests`."""
BEGINS: dict[Any, Callable[[Any], Any]] = {
    f"{STATES}total_len.gpu": lambda req: len(req.prompt) if req.new else None,
    f"{STATES}num_computed_tokens.gpu": lambda req: req.cached if req.new else None,
}
"""What the device goes on to count, as it begins."""


def joined(records: dict[str, Any], runner: Any, requests: list[Any]) -> None:
    """Keeps what the scheduler says of requests that join."""
    for req in requests:
        blocks = tuple(list(numbers) for numbers in req.blocks)
        records[req.name] = SimpleNamespace(
            prompt=req.prompt, params=req.params, cached=req.cached, blocks=blocks, new=True
        )


def went_on(records: dict[str, Any], runner: Any, requests: list[Any]) -> None:
    """Keeps what the scheduler says of requests that go on."""
    for req in requests:
        records[req.name].new = False
        for blocks, new in zip(records[req.name].blocks, req.new_blocks or (), strict=False):
            blocks += new


def left(records: dict[str, Any], runner: Any, names: list[str]) -> None:
    """Lets go of requests that leave."""
    for name in names:
        records.pop(name, None)


RECORDS: dict[str, Any] = {"add_requests": joined, "update_requests": went_on, "finish_requests": left}


# fmt: off
def declare(**options: Any) -> contextlib.ExitStack:
    """The declaration: of the states, and of the logs of staged writes."""
    sides = [("req_states.prompt_len", ".np", ".gpu"), ("req_states.prefill_len", ".np", ".gpu"),
             *((f"sampling_states.{name}", ".np", ".gpu") for name in SAMPLING)]
    columns = [name + side for name, *ends in sides for side in ends]
    alone = ["req_states.total_len.gpu", "req_states.all_token_ids.gpu", "req_states.max_seq_len",
             "req_states.num_computed_prefill_tokens", "sampling_states.num_logprobs",
             *(f"block_tables.block_tables.{group}.gpu" for group in (0, 1))]
    watches = contextlib.ExitStack()
    watches.enter_context(watch(
        Runner, after=["execute_model"], moves=["finish_requests"], num_rows=lambda _: ROWS, buffers=True,
        key="req_states.index_to_req_id", from_requests=SAYS, records=RECORDS,
        pairs=[*((name + host, name + device) for name, host, device in sides),
               ("block_tables.num_blocks.np", "block_tables.num_blocks.gpu"),
               ("req_states.num_computed_tokens_np", "req_states.num_computed_tokens.gpu", "upper_bound")],
        rows=[*alone, "sampling_states.seeds_set"],
        axis={"block_tables.num_blocks.np": 1, "block_tables.num_blocks.gpu": 1},
        upto={"req_states.all_token_ids.gpu": "req_states.prefill_len.np",
              **{f"block_tables.block_tables.{group}.gpu": partial(blocks_in, group)
                 for group in (0, 1)}},
        vacant=dict.fromkeys(
            [*columns, *alone, "req_states.num_computed_tokens_np", "req_states.num_computed_tokens.gpu",
             "block_tables.num_blocks.np", "block_tables.num_blocks.gpu"], POISON),
        derived={"req_states.index_to_req_id": lambda r: {row: n for n, row in r.req_states.req_id_to_index.items()},
                 "req_states.free_indices": free_rows, unapplied: lambda _: []},
        **options))
    watches.enter_context(watch(
        Runner, after=["add_requests"], num_rows=lambda _: ROWS, buffers=True, key="req_states.index_to_req_id",
        from_requests=BEGINS, records=RECORDS, **options))
    if not options:
        watches.enter_context(watch_log(
            StagedWriteTensor, apply=["apply_write", (buffers.FusedStagedWriter, "apply")], device="gpu",
            staged=[f"_staged_write_{part}" for part in PARTS],
            stage={"stage_write": lambda index, start, x: (index, start, x),
                   "stage_write_elem": lambda index, x: (index, 0, [x])}))
    return watches


def free_rows(runner: Any) -> list[int]:
    """The rows that no request has, in the order in which they were freed."""
    states, taken = runner.req_states, runner.req_states.index_to_req_id
    listed = [row for row in states.free_indices if row not in taken]
    return listed + [row for row in range(ROWS) if row not in taken and row not in listed]
# fmt: on


_number = itertools.count()


def make_request(drawn: random.Random) -> Any:
    """A request; what it wants differs from what others want."""
    number = next(_number)
    prompt = [100 + number + at for at in range(drawn.randrange(2, 9))]
    params = SamplingParams(
        temperature=round(drawn.uniform(0.1, 1), 3),
        top_p=round(drawn.uniform(0.1, 1), 3),
        top_k=drawn.choice([0, 3, 5, 200]),
        min_p=round(drawn.uniform(0, 0.5), 3),
        seed=number,
        logprobs=drawn.choice([None, 1, 2, -1]),
        max_tokens=20 + number,
    )
    blocks = tuple([1000 * group + 10 * number + at for at in range(-(-len(prompt) // BLOCK))] for group in (1, 2))
    return SimpleNamespace(
        name=f"r{number}", prompt=prompt, cached=drawn.randrange(2), params=params, blocks=blocks, computed=0,
        number=number, new_blocks=None,
    )  # fmt: skip


def drive(seed: int, steps: int = 20, after_each: Callable[[Any], object] = id) -> None:
    """A runner that requests join and leave. Nothing is compared."""
    global _number
    _number = itertools.count()
    TABLES.clear()
    drawn, runner, running = random.Random(seed), Runner(), list[Any]()
    for _ in range(steps):
        leaving = [request for request in running if drawn.random() < 0.25]
        running = [request for request in running if request not in leaving]
        runner.finish_requests([request.name for request in leaving])
        joining = [make_request(drawn) for _ in range(min(drawn.randrange(3), ROWS - len(running)))]
        runner.add_requests(joining)
        for request in running:
            request.computed += 1
            length = len(request.blocks[0])
            request.new_blocks = None
            if request.computed > length * BLOCK:
                at = 10 * request.number + length
                request.new_blocks = ([1000 + at], [2000 + at])
                for table, new in zip(request.blocks, request.new_blocks, strict=True):
                    table.extend(new)
        for request in joining:
            request.computed = len(request.prompt)
        running += joining
        runner.update_requests(running)
        runner.execute_model()
        after_each(runner)


DECLARED: dict[str, dict[str, Any]] = {"full": {}, "lag": {"lag": 1}}


def endless(text: str) -> bool:
    """No statement keeps a loop from ending."""
    return False


TARGETS = [(RequestState, name, state_module) for name in ("add_request", "apply_staged_writes", "remove_request")]
TARGETS += [(BlockTables, name, block_module) for name in ("append_block_ids", "apply_staged_writes")]
TARGETS += [(SamplingStates, name, sample_module) for name in ("add_request", "apply_staged_writes")]
TARGETS += [(StagedWriteTensor, name, buffers) for name in ("stage_write", "stage_write_elem", "apply_write")]
TARGETS += [(StagedWriteTensor, "clear_staged_writes", buffers), (buffers.FusedStagedWriter, "apply", buffers)]
TARGETS += [(buffers.UvaBackedTensor, "copy_to_uva", buffers)]
"""Methods whose statements are deleted, one at a time."""
