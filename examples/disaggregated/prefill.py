"""The prefill worker: computes the KV of prompts, chunk by chunk, and writes it into the decode worker's host memory.

One turn, one step ahead::

    hear     prompts, grants and aborts
    admit    prompts that have a slot and pages for all of their tokens
    launch   one forward: the next chunks of the oldest prompts, whole pages except a prompt's last
    read     the forward before: what it wrote may be sent, and a first token is known
    send     what is computed and not sent, of prompts whose grant is here
    leave    prompts that are sent, or given up: their pages are free behind `sources_free`

A chunk is on its way while the next one is computed.
"""

import contextlib
from collections import deque
from typing import Any, cast, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import (
    Batch,
    FutureMap,
    PagePool,
    SlotPool,
    Slots,
    StepPlanner,
    host_list,
    mirrored,
    relay_field,
    slot_column,
)
from batchstate.errors import ArgumentError, TransferError
from batchstate.future_map import Prefetched
from batchstate.runtime import Fence
from batchstate.transport.engines.base import Status
from batchstate.transport.sender import Sender, Transfer, TransferState
from examples.disaggregated.kv import ShardedKV, buffers_of
from examples.disaggregated.options import Options, writer_name
from examples.disaggregated.worker import Parts, described, layout_of, registered
from examples.engine.attention import PagedView

Ints = npt.NDArray[np.int64]
Key = tuple[str, int]
"""Name of a request, and number of the attempt."""


@attrs.define(eq=False)
class Job:
    """One attempt to prefill a prompt.

    Attributes:
        key: request and attempt.
        prompt: its ids.
        slot: whose pages hold the KV, once admitted.
        computed: tokens whose KV is in memory.
        written: the fence behind the forward that computed the last of them.
        transfer: what the decode worker has granted, once it has.
        first_token: of the answer.
        last_step: behind the last forward that works on it.
    """

    key: Key
    prompt: Ints
    slot: Slots | None = None
    computed: int = 0
    written: Fence | None = None
    transfer: Transfer | None = None
    first_token: int | None = None
    last_step: Fence | None = None


class PromptBatch(Batch):
    """Prompts under way."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)  # tokens for which a forward was launched
    jobs = host_list(Job)


@attrs.define(eq=False)
class Step:
    """A forward under way: what each prompt has when it has run, and the first tokens of those that it finishes."""

    done: Fence
    computed: list[tuple[Job, int]]
    sampling: list[Job]
    results: Prefetched | None


CHUNK_TOKENS = 64
"""Tokens of one forward, at least; a page if that is more."""


@final
class PrefillWorker:
    """Belongs to the runtime's thread.

    Args:
        parts: device, model, engine.
        options: sizes.
        rank: of the prefill group.

    Attributes:
        sender: writes; its outbox is carried by the caller.
        words: what is to be said to the decode worker, in words.
        steps: forwards launched.
    """

    def __init__(self, parts: Parts, options: Options, rank: int) -> None:
        self.runtime, self._model, self._options = parts.runtime, parts.model, options
        size = options.page_size
        room = -(-options.max_prompt // size) * size
        self.slots = SlotPool(self.runtime, options.max_running)
        self._table = self.slots.table("prompt_to_token", (room,), torch.int32, holds="location")
        self.pages = PagePool(
            self.runtime,
            self.slots,
            max(4 * room // size, 1024 // size),
            size,
            max_tokens_per_request=room,
            req_to_token=self._table,
        )
        self._stream = self.runtime.stream("forward")
        relay = FutureMap(self.slots, {"first_token": relay_field(torch.int64, read_by="host", non_negative=True)})
        self._planner = StepPlanner(
            PromptBatch, pages=self.pages, relay=relay, ids="first_token", results=("first_token",)
        )
        layout = layout_of(self._model, size, rank, options.prefill_degree, options.prefill_stages)
        with self.runtime.use(self._stream):
            self._kv = ShardedKV.of(self._model.new_kv(self.pages.location_capacity), layout)
            self.pages.register_kv(*buffers_of(self._kv.whole))
        regions = registered(parts.engine, layout, buffers_of(self._kv.share))
        self.sender = Sender(parts.engine, described(parts.engine, layout, writer_name(rank)), regions)
        self.words: list[dict[str, Any]] = []
        self.steps = 0
        self.bytes_written = 0
        self._chunk = max(CHUNK_TOKENS // size, 1) * size
        self._batch = PromptBatch.empty(self.runtime)
        self._jobs: dict[Key, Job] = {}
        self._waiting: deque[Job] = deque()
        self._granted: dict[Key, Transfer] = {}
        self._in_flight: deque[Step] = deque()
        self._leaving: list[Job] = []

    @property
    def leaks(self) -> int:
        """Slots and pages that are not free."""
        slots, pages = self.slots.stats, self.pages.stats
        return self.slots.size - slots.free + pages.num_pages - pages.free

    @property
    def busy(self) -> bool:
        """Whether a prompt is here, or bytes of one may still be read."""
        return bool(self._jobs or self._leaving or self._in_flight or self.sender.transfers())

    def prompt(self, request: str, attempt: int, prompt: list[int]) -> None:
        """A prompt arrives.

        Raises:
            ArgumentError: it is empty, or too long.
        """
        if not 0 < len(prompt) <= self._options.max_prompt:
            raise ArgumentError(
                f"{request} has a prompt of {len(prompt)} ids",
                value=len(prompt),
                remedy=f"send 1 to {self._options.max_prompt} ids; --max-prompt is the same for both workers",
            )
        job = Job((request, attempt), np.array(prompt, dtype=np.int64))
        self._jobs[job.key] = job
        self._waiting.append(job)

    def turn(self) -> bool:
        """One turn. Whether anything happened."""
        moved = self._hear_sender()
        self._admit()
        launched = self._launch()
        moved |= launched or bool(self._in_flight)
        self._read_all_but(1 if launched else 0)
        self._send()
        self._leave()
        return moved

    # Hearing

    def _hear_sender(self) -> bool:
        changed = self.sender.poll()
        for transfer in changed:
            key = (transfer.request, transfer.grant.attempt)
            if transfer.state is TransferState.OPEN:
                self._granted[key] = transfer
                continue
            self._granted.pop(key, None)
            self.bytes_written += sum(handle.nbytes for handle in transfer.handles if handle.status is Status.DONE)
            job = self._jobs.get(key)
            if job is not None:
                job.transfer = transfer
                if transfer.state is not TransferState.DONE:
                    self._drop(job)
        for key in [key for key in self._granted if key in self._jobs]:
            self._jobs[key].transfer = self._granted.pop(key)
        return bool(changed)

    def _drop(self, job: Job) -> None:
        """Gives a prompt up: no further forward works on it."""
        del self._jobs[job.key]
        if job.slot is None:
            self._waiting.remove(job)
            return
        self._batch = self._batch.filter([other is not job for other in self._batch.jobs])
        self._leaving.append(job)

    # Computing

    def _admit(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            needed = -(-job.prompt.size // self.pages.page_size)
            if not self.slots.stats.free or self.pages.stats.free < needed:
                return
            self._waiting.popleft()
            job.slot = self.slots.take(1)
            self.pages.grow(job.slot, job.prompt.size)
            joining = PromptBatch.build(self.runtime, slots=job.slot, seq_lens=[0], jobs=[job])
            self._batch = self._batch.merge(joining)

    def _launch(self) -> bool:
        done = self._batch.seq_lens.np
        total = np.array([job.prompt.size for job in self._batch.jobs], dtype=np.int64)
        left = total - done
        queries = np.clip(self._chunk - (np.cumsum(left) - left), 0, left)
        whole = (done + queries) // self.pages.page_size * self.pages.page_size - done
        queries = np.where(queries == left, left, np.maximum(whole, 0))
        if not queries.any():
            return False
        self.runtime.next_step()
        working = self._batch.filter(queries > 0)
        queries, samples = queries[queries > 0], (queries == left)[queries > 0]
        ids = [
            job.prompt[start : start + n]
            for job, start, n in zip(working.jobs, working.seq_lens.np.tolist(), queries.tolist(), strict=True)
        ]
        planned = self._planner.plan(working, queries, prompt_ids=ids, samples=samples)
        grown, results = cast(PromptBatch, planned.batch), None
        with self.runtime.use(self._stream):
            inputs = planned.inputs()
            table = self._table.device_for(grown.slots)
            rows = table.index_select(0, inputs.slots)[:, : inputs.max_kv_len].long()
            self._table.read_until(self.runtime.record())
            assert inputs.slot_mapping is not None
            view = PagedView(
                inputs.positions, inputs.slot_mapping, inputs.query_start_loc, inputs.query_lens, inputs.kv_lens, rows
            )
            logits = self._model.forward(inputs.input_ids, view, self._kv, inputs.last_token_indices)
            if samples.any():
                planned.publish(first_token=logits.argmax(-1))
                results = planned.results
            forward_done = self.runtime.record()
        jobs = list(grown.jobs)
        for job in jobs:
            job.last_step = forward_done
        computed = list(zip(jobs, grown.seq_lens.np.tolist(), strict=True))
        sampling = [jobs[row] for row in np.flatnonzero(samples)]
        self._in_flight.append(Step(forward_done, computed, sampling, results))
        self._batch = self._rest(grown, samples)
        self.steps += 1
        return True

    def _rest(self, grown: PromptBatch, finished: npt.NDArray[np.bool_]) -> PromptBatch:
        """The prompts of which something is left, oldest first."""
        untouched = self._batch.filter([job not in grown.jobs for job in self._batch.jobs])
        return grown.filter(~finished).merge(untouched)

    def _read_all_but(self, newest: int) -> None:
        """Results of forwards; waits for those that have not run."""
        while len(self._in_flight) > newest:
            step = self._in_flight.popleft()
            step.done.wait()
            for job, computed in step.computed:
                job.computed, job.written = computed, step.done
            if step.results is None:
                continue
            for job, token in zip(step.sampling, step.results["first_token"].np.tolist(), strict=True):
                job.first_token = token
                self.words.append({"request": job.key[0], "attempt": job.key[1], "first_token": token})

    # Sending

    def _send(self) -> None:
        for job in self._jobs.values():
            transfer = job.transfer
            if transfer is None or transfer.state is not TransferState.OPEN:
                continue
            if transfer.sent >= job.computed:
                self.sender.hold(transfer)  # its prompt is here, and waits for its turn
                continue
            assert job.slot is not None
            assert job.written is not None
            first, stop = transfer.sent, job.computed
            sources = self.pages.locations(job.slot, first, stop)
            with contextlib.suppress(TransferError):  # refused: it has failed now, as the next poll says
                self.sender.send(transfer, sources, first, stop == job.prompt.size, after=job.written)

    def _leave(self) -> None:
        for job in list(self._jobs.values()):
            sent = job.transfer is not None and job.transfer.state is TransferState.DONE
            if sent and job.first_token is not None:
                del self._jobs[job.key]
                self._leaving.append(job)
        still = [job for job in self._leaving if job.last_step is not None and not job.last_step.query()]
        for job in self._leaving:
            if job not in still:
                assert job.slot is not None
                assert job.transfer is not None
                self.pages.release_requests(job.slot, after=job.transfer.sources_free)
        self._leaving = still
