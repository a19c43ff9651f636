"""Inputs of forwards: deferred values of tokens against a copy per field, and overlapped steps against synchronous."""

import time
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from batchstate.batch import Batch
from batchstate.columns import mirrored, slot_column
from batchstate.forward.inputs import ForwardInputs
from batchstate.forward.plan import ForwardPlan
from batchstate.forward.token_array import TokenArray
from batchstate.kv.pages import PagePool
from batchstate.levels import Level
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from benchmarks.comparisons import Comparison, require_equal
from benchmarks.steady_steps import Steady
from benchmarks.timing import Contender

Ints = npt.NDArray[np.int64]

PAGE_SIZE = 16
FORWARD_US = (100, 300)
"""Microseconds for which the stand-in of a device is busy with a forward."""


class Prompts(Batch):
    """Requests whose prompt is scheduled."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


def types_and_grids(prompts: list[Ints]) -> tuple[list[npt.NDArray[np.int32]], list[Ints]]:
    """Types of each request's tokens, int32[n], and their places in a grid, int64[n, 3]."""
    types = [(prompt % 2).astype(np.int32) for prompt in prompts]
    return types, [np.stack((prompt, prompt, prompt), axis=1) for prompt in prompts]


@final
class Deferred:
    """Ids, types and places in a grid of prompts, uploaded at forward entry in one copy; or not `deferred`, at once."""

    def __init__(self, runtime: Runtime, prompts: list[Ints], *, deferred: bool = True) -> None:
        self._runtime, self._prompts, self._deferred = runtime, prompts, deferred
        self._types, self._grids = types_and_grids(prompts)
        self._lens = np.array([len(prompt) for prompt in prompts])
        n, most = len(prompts), -(-int(self._lens.max()) // PAGE_SIZE)
        slots = SlotPool(runtime, n)
        self.pages = PagePool(runtime, slots, n * most, PAGE_SIZE, max_tokens_per_request=most * PAGE_SIZE)
        self.batch = Prompts.build(runtime, slots=slots.take(n), seq_lens=self._lens)
        self.pages.extend(self.batch.slots, self._lens)
        self._forward = runtime.stream("forward")

    def step(self) -> dict[str, torch.Tensor]:
        """The inputs of a step, on the forward's stream."""
        self._runtime.next_step()
        arrays = {
            "types": TokenArray(self._types, torch.int32),
            "grid": TokenArray(self._grids, shape=(3,)),
        }
        plan = ForwardPlan.of(
            self.batch.slots,
            self.batch.seq_lens,
            self._lens,
            prompt_ids=self._prompts,
            pages=self.pages,
            token_arrays=arrays,
            deferred=self._deferred,
        )
        uploaded = self.batch.upload(extras=plan.extras)
        with self._runtime.use(self._forward):
            inputs = ForwardInputs.of(plan, uploaded)
        if inputs.slot_mapping is None:
            raise RuntimeError("a plan with pages has a slot mapping")
        return {
            "input_ids": inputs.input_ids,
            "positions": inputs.positions,
            "slot_mapping": inputs.slot_mapping,
            "query_start_loc": inputs.query_start_loc,
            "kv_lens": inputs.kv_lens,
            "last_token_indices": inputs.last_token_indices,
            **inputs.arrays,
        }


@final
class CopyPerField:
    """The same as engines write it: an array for each field, each copied by itself on the stream of the scheduler.

    The forward's stream then waits for an event. Nothing is checked.
    """

    def __init__(self, runtime: Runtime, prompts: list[Ints], page_table: npt.NDArray[np.int32]) -> None:
        self._runtime, self._prompts, self._page_table = runtime, prompts, page_table
        self._types, self._grids = types_and_grids(prompts)
        self._pinned = runtime.device.type == "cuda"
        self._forward = runtime.stream("forward of the baseline")

    def step(self) -> dict[str, torch.Tensor]:
        """The inputs of a step, on the forward's stream."""
        prompts = self._prompts
        lens = np.array([len(prompt) for prompt in prompts])
        starts = np.zeros(len(prompts) + 1, dtype=np.int32)
        np.cumsum(lens, out=starts[1:])
        ids = np.concatenate(prompts)
        positions = np.concatenate([np.arange(n) for n in lens])
        pages = self._page_table[np.repeat(np.arange(len(prompts)), lens), positions // PAGE_SIZE]
        fields = {
            "input_ids": ids,
            "positions": positions,
            "slot_mapping": pages.astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE,
            "query_start_loc": starts,
            "kv_lens": lens.astype(np.int32),
            "last_token_indices": starts[1:].astype(np.int64) - 1,
            "types": np.concatenate(self._types),
            "grid": np.concatenate(self._grids),
        }
        sent = {name: self._copied(torch.from_numpy(array)) for name, array in fields.items()}
        done = self._runtime.record()
        with self._runtime.use(self._forward):
            self._runtime.wait(done)
        return sent

    def _copied(self, host: torch.Tensor) -> torch.Tensor:
        if self._pinned:
            return host.pin_memory().to(self._runtime.device, non_blocking=True)
        return host.clone()  # `.to` of a CPU would return the host's own memory


def deferred_against_copies(runtime: Runtime, *, num_requests: int = 16, num_tokens: int = 512) -> Comparison:
    """A step of prompts at `cheap` and `off` against a copy for each field."""
    dice = np.random.default_rng(7)
    prompts = [dice.integers(0, 1000, num_tokens) for _ in range(num_requests)]
    ours = {level: Deferred(runtime, prompts) for level in (Level.CHEAP, Level.OFF)}
    first = ours[Level.CHEAP]
    theirs = CopyPerField(runtime, prompts, first.pages.page_table[first.batch.slots.np])
    at_once = Deferred(runtime, prompts, deferred=False)

    def verify() -> None:
        wanted = first.step()
        for way in (theirs, at_once):
            for name, tensor in way.step().items():
                require_equal(name, wanted[name].cpu(), tensor.cpu())

    return Comparison(
        task=f"inputs of prompts with types and grid, {num_requests} x {num_tokens} tokens",
        ours=[Contender(f"deferred, checks {level.value}", way.step, level) for level, way in ours.items()],
        baselines=[
            Contender("a copy per field on the scheduling stream", theirs.step),
            Contender("in the copy of the batch, checks cheap", at_once.step, Level.CHEAP),
        ],
        verify=verify,
    )


@final
class Forwards:
    """Stands for a device that is busy with each forward for so long, one after the other."""

    def __init__(self, busy_us: float) -> None:
        self._busy, self._free_at = busy_us * 1e-6, 0.0

    def launch(self) -> float:
        """A forward comes behind those that were launched; the moment when it is over."""
        self._free_at = max(self._free_at, time.perf_counter()) + self._busy
        return self._free_at

    @staticmethod
    def wait(until: float) -> None:
        """The host waits for a forward."""
        while time.perf_counter() < until:
            pass


@final
class Engine:
    """Decode steps of a planner, over a device that is busy with each.

    Overlapped, a step is planned and launched while the one before is under way, and then that one's results are read.
    """

    def __init__(self, runtime: Runtime, n: int, busy_us: float, *, overlapped: bool) -> None:
        self._steady, self._forwards = Steady(runtime, n, 0), Forwards(busy_us)
        self._overlapped, self._before = overlapped, 0.0

    def step(self) -> torch.Tensor:
        """A step; returns its ids."""
        inputs = self._steady.step()
        done = self._forwards.launch()
        self._forwards.wait(self._before if self._overlapped else done)
        self._before = done
        return inputs.ids


def overlapped_against_synchronous(runtime: Runtime, *, busy_us: int, num_requests: int = 64) -> Comparison:
    """The same steps with one in flight and with none."""
    overlapped, synchronous = (Engine(runtime, num_requests, busy_us, overlapped=mode) for mode in (True, False))

    def verify() -> None:
        for _ in range(2 * PAGE_SIZE):
            require_equal("ids", overlapped.step().cpu(), synchronous.step().cpu())

    return Comparison(
        task=f"decode step over forwards of {busy_us} us, {num_requests} requests",
        ours=[Contender("overlapped", overlapped.step, Level.CHEAP)],
        baselines=[Contender("synchronous", synchronous.step, Level.CHEAP)],
        verify=verify,
    )
