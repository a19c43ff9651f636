"""`python -m benchmarks.adoption.kernels`: Triton kernels of vLLM's Model Runner V2, interpreted under `cuda_on_cpu`.

`RequestState`, `BlockTables` and the functions around them run as released, with their kernels, and are driven as
`GPUModelRunner` drives them, with two steps in flight. `--table` lists all kernels: which of them the interpreter runs.
"""

import argparse
import contextlib
import os
from collections import Counter, deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that vLLM takes Triton although there is no driver

import torch

from batchstate.races import RaceReport, cuda_on_cpu
from benchmarks.adoption.placeholders import stand_in

MAKERS = {name: getattr(torch, name) for name in ("zeros", "empty", "ones", "tensor", "full")}
stand_in()
for name, maker in MAKERS.items():  # memory can be pinned in the window
    setattr(torch, name, maker)

import vllm.utils.import_utils as import_utils  # noqa: E402

import_utils.has_triton_kernels = lambda: False  # a package of that name, which is stood in for

import vllm.utils.torch_utils as torch_utils  # noqa: E402
import vllm.v1.worker.gpu.block_table as block_module  # noqa: E402
import vllm.v1.worker.gpu.buffer_utils as buffers  # noqa: E402
import vllm.v1.worker.gpu.input_batch as inputs  # noqa: E402
import vllm.v1.worker.gpu.sample.gumbel as gumbel  # noqa: E402
import vllm.v1.worker.gpu.sample.min_p as min_p  # noqa: E402
import vllm.v1.worker.gpu.sample.penalties as penalties  # noqa: E402
import vllm.v1.worker.gpu.states as states  # noqa: E402

torch_utils.PIN_MEMORY = True
buffers.is_uva_available = lambda: True
buffers.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor

ROWS, LENGTH, VOCABULARY, BLOCK, BLOCKS = 4, 64, 40, 4, 16
STEPS = 50
CUDA: Any = torch.device("cuda")
cuda: Any = torch.cuda


class Runner:
    """The state of a runner, and its step: requests leave and join, inputs, a model that draws logits, outputs."""

    def __init__(self, in_flight: int) -> None:
        self.state = states.RequestState(ROWS, LENGTH, LENGTH, 0, VOCABULARY, CUDA)
        self.tables = block_module.BlockTables([BLOCK, 2 * BLOCK], ROWS, LENGTH, [BLOCKS, BLOCKS], CUDA)
        self.buffers = inputs.InputBuffers(ROWS, LENGTH, CUDA)
        self.mask = torch.zeros(ROWS, -(-VOCABULARY // 32), dtype=torch.int32, device=CUDA)
        self.counts = torch.zeros(ROWS, VOCABULARY, dtype=torch.int32, device=CUDA)
        self.sampling = {
            name: buffers.UvaBackedTensor(ROWS, dtype=torch.float32)
            for name in ("temperature", "min_p", "repetition", "frequency", "presence")
        }
        for name, value in (("temperature", 0.5), ("min_p", 0.1), ("repetition", 1.5), ("presence", 0.5)):
            self.sampling[name].np.fill(value)
        self.copies: Any = cuda.Stream()
        self.in_flight = in_flight
        self.under_way: deque[tuple[Any, torch.Tensor, list[str]]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.left: dict[str, int] = {}

    def join(self, name: str, prompt: list[int], tokens: int) -> None:
        """A request joins, in a free row."""
        self.state.add_request(name, len(prompt), prompt, 0, tokens)
        row = self.state.req_id_to_index[name]
        need = len(prompt) + tokens + 1
        self.tables.append_block_ids(
            row, tuple([*range(1, 1 + -(-need // size))] for size in (BLOCK, 2 * BLOCK)), overwrite=True
        )
        self.outputs[name], self.left[name] = [], tokens

    def step(self, generator: torch.Generator) -> None:
        """One step, while others are in flight."""
        while len(self.under_way) >= self.in_flight:
            self.receive()
        for name in [name for name, left in self.left.items() if not left]:
            self.state.remove_request(name)
            del self.left[name]
        if len(self.left) < ROWS:
            size = int(torch.randint(2, 9, (1,), generator=generator))
            prompt = torch.randint(0, VOCABULARY, (size,), generator=generator).tolist()
            self.join(f"request {len(self.outputs)}", prompt, int(torch.randint(2, 9, (1,), generator=generator)))
        new = [name for name in self.left if self.state.num_computed_tokens_np[self.row(name)] == 0]
        self.state.apply_staged_writes()
        self.tables.apply_staged_writes()
        for twin in self.sampling.values():
            twin.copy_to_uva()
        self.forward(new)

    def row(self, name: str) -> int:
        """The row of a request."""
        return int(self.state.req_id_to_index[name])

    def forward(self, new: list[str]) -> None:
        """The batch of this step, in order of its requests."""
        names, state = list(self.left), self.state
        rows = [self.row(name) for name in names]
        scheduled = [
            int(state.prefill_len.np[row]) if name in new else 1 for name, row in zip(names, rows, strict=True)
        ]
        starts = [0]
        for count in scheduled:
            starts.append(starts[-1] + count)
        mapping = torch_utils.async_tensor_h2d(rows, device=CUDA, dtype=torch.int32)
        starts_gpu = torch_utils.async_tensor_h2d(starts, device=CUDA, dtype=torch.int32)
        if new:
            news = torch_utils.async_tensor_h2d([self.row(name) for name in new], device=CUDA, dtype=torch.int64)
            penalties.bincount(
                news,
                state.all_token_ids.gpu,
                state.prompt_len.gpu,
                state.prefill_len.gpu,
                self.mask,
                self.counts,
                max(int(state.prefill_len.np[self.row(name)]) for name in new),
            )
        where = self.buffers
        inputs.prepare_prefill_inputs(
            where.input_ids,
            state.next_prefill_tokens,
            mapping,
            starts_gpu,
            state.all_token_ids.gpu,
            state.prefill_len.gpu,
            state.num_computed_tokens.gpu,
        )
        inputs.prepare_pos_seq_lens(mapping, starts_gpu, state.num_computed_tokens.gpu, where.positions, where.seq_lens)
        ends = torch_utils.async_tensor_h2d([*range(len(names) + 1)], device=CUDA, dtype=torch.int32)
        logits_at = inputs.combine_sampled_and_draft_tokens(
            where.input_ids,
            mapping,
            state.last_sampled_tokens,
            starts_gpu,
            where.seq_lens,
            state.prefill_len.gpu,
            state.draft_tokens,
            ends,
            len(names),
        )
        expanded, local = inputs.expand_idx_mapping(mapping, len(names), ends, 1)
        self.tables.gather_block_tables(mapping, len(names))
        self.tables.compute_slot_mappings(mapping, starts_gpu, where.positions, LENGTH)
        tokens = where.input_ids[: starts[-1]].float() + where.positions[: starts[-1]].float()
        logits = torch.sin(torch.outer(tokens, torch.arange(1.0, VOCABULARY + 1, device=CUDA)))[logits_at]
        penalties.apply_penalties(
            logits,
            expanded,
            where.input_ids[: len(names)],
            local,
            *(self.sampling[name].gpu for name in ("repetition", "frequency", "presence")),
            self.mask,
            self.counts,
        )
        gumbel.apply_temperature(logits, expanded, self.sampling["temperature"].gpu)
        min_p.apply_min_p(logits, expanded, self.sampling["min_p"].gpu)
        sampled = logits.argmax(-1, keepdim=True)
        count, rejected = inputs.get_num_sampled_and_rejected(
            torch.ones(len(names), dtype=torch.int32, device=CUDA),
            where.seq_lens,
            ends,
            mapping,
            state.prefill_len.gpu,
        )
        inputs.post_update(
            mapping,
            state.num_computed_tokens.gpu,
            state.last_sampled_tokens,
            self.counts,
            sampled,
            count,
            rejected,
            starts_gpu,
            state.all_token_ids.gpu,
            state.total_len.gpu,
        )
        self.send(names, rows, scheduled, sampled)

    def send(self, names: list[str], rows: list[int], scheduled: list[int], sampled: torch.Tensor) -> None:
        """The tokens go to the host on a stream of their own."""
        with cuda.stream(self.copies):
            self.copies.wait_stream(cuda.default_stream())
            landed = sampled.to("cpu", non_blocking=True)
            sampled.record_stream(self.copies)
            over = self.copies.record_event()
        self.under_way.append((over, landed, names))
        for name, row, tokens in zip(names, rows, scheduled, strict=True):
            self.state.num_computed_tokens_np[row] += tokens
            self.left[name] -= 1

    def receive(self) -> None:
        """The tokens of the oldest step."""
        over, landed, names = self.under_way.popleft()
        over.synchronize()
        for name, token in zip(names, landed[:, 0].tolist(), strict=True):
            self.outputs[name].append(token)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """A window that counts launches by kernel."""
    from triton.runtime.interpreter import GridExecutor

    launches: Counter[str] = Counter()
    call = GridExecutor.__call__

    def counting(grid: Any, *args: Any, **kwargs: Any) -> Any:
        launches[grid.fn.__name__] += 1
        return call(grid, *args, **kwargs)

    GridExecutor.__call__ = counting
    try:
        yield launches
    finally:
        GridExecutor.__call__ = call


def drive(in_flight: int = 2, steps: int = STEPS, device: str = "race") -> SimpleNamespace:
    """Steps of the runner: its outputs, its launches and what was found."""
    with counted() as launches, cuda_on_cpu(device, on_race="collect") as rt:
        runner = Runner(in_flight)
        cuda.synchronize()
        generator = torch.Generator().manual_seed(7)
        for _ in range(steps):
            rt.next_step()
            runner.step(generator)
        while runner.under_way:
            runner.receive()
        cuda.synchronize()
    races = list(getattr(rt, "races", ()))
    return SimpleNamespace(outputs=runner.outputs, launches=launches, races=races, depth=rt.in_flight_depth_max)


def staged(second: int) -> list[RaceReport]:
    """Two staged writes to row 2 of a block table, from columns 1 and `second` on, three numbers each."""
    with cuda_on_cpu(on_race="collect") as rt:
        table = buffers.StagedWriteTensor((4, 16), torch.int32, CUDA)
        table.stage_write(2, 1, [5, 6, 7])
        table.stage_write(2, second, [8, 9, 10])
        table.apply_write()
    return list(rt.races)


def main() -> int:
    """Prints what was found; 1 if it is not what is expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="also list every kernel, and which do not interpret")
    options = parser.parse_args()
    (clash,), apart = staged(3), staged(4)
    print(f"two staged writes of one element:\n{clash}\nbeside each other: {len(apart)} findings")
    clean, late = drive(), drive(in_flight=3, steps=6)
    print(
        f"{STEPS} steps, {clean.launches.total()} launches of {len(clean.launches)} kernels, {clean.depth} in flight:"
    )
    print("\n".join(f"  {times:5} {name}" for name, times in clean.launches.most_common()))
    print(f"{len(clean.races)} findings; {len(clean.outputs)} requests")
    print("\n".join(map(str, clean.races)))
    kinds = Counter(str(race.kind) for race in late.races)
    print(f"with three steps in flight over buffers for two: {dict(kinds)}")
    failed = bool(apart or clean.races) or not late.races or len(clean.launches) < 10
    if options.table:
        from benchmarks.adoption.kernel_table import print_table

        print_table(clean.launches)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
