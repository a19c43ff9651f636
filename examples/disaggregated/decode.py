"""The decode worker: KV arrives in its host memory, and it decodes with a hot buffer of each request on the device.

One turn, one step ahead: step N + 1 is planned from host sides alone and launched before the results of step N are
read. Requests that came from a prefill worker (direct) and those that were prefilled here (staged) run in one batch.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import Contract, ForwardPlan, HostKVPool, PagePool, PoolExhaustedError, SlotPool, Slots
from batchstate.kv.hisparse import HiSparse
from batchstate.runtime import Fence
from batchstate.tables import TableWrite
from batchstate.transport.receiver import Receiver
from batchstate.transport.workers import Clock
from examples.disaggregated.arrivals import Arrival, Arrivals
from examples.disaggregated.decode_forward import Launched, TierBatch, TierForward
from examples.disaggregated.kv import TieredKV, buffers_of
from examples.disaggregated.options import Options, writer_name
from examples.disaggregated.worker import Parts, described, layout_of, registered
from examples.engine.request import Request

HOT_PAGE = 8
"""Tokens a page of the hot buffers: another size than that of the host tier, which knows nothing of it."""
MOST_STAGED = 2
"""Prompts that are prefilled here, or copied out to the host, at once: they need device pages for all their tokens."""


@final
class DecodeWorker:
    """Belongs to the runtime's thread.

    Args:
        parts: device, model, engine.
        options: sizes.
        requests: all that will be served.
        clock: seconds, by which an attempt is given up.

    Attributes:
        arrivals: requests on their way.
        tier: the host tier.
        slots, pages, host: the pools.
        steps: decode steps launched.
        mixed_steps: of these, steps in which direct and staged requests ran together.
        staged: requests prefilled here.
        in_flight_depth_max: the most turns of which results were unread at once.
        quarantined_max: the most host locations of failed attempts that could not be handed out again.
        result_copies: copies to the host that carried results.
        drafted, accepted: tokens that were guessed for requests that ran, and those of them that were right.
    """

    def __init__(
        self, parts: Parts, options: Options, requests: Sequence[Request], *, clock: Clock = time.monotonic
    ) -> None:
        self.runtime, self._options = parts.runtime, options
        model, size = parts.model, options.host_page_size or options.page_size
        longest = max(len(request.prompt) for request in requests)
        most = max(options.room(request) for request in requests)
        width = max(longest, options.hot_tokens)
        self.slots = SlotPool(self.runtime, options.max_running)
        self._hot_table = self.slots.table("hot_row_to_token", (width,), torch.int32, holds="location")
        self._host_table = self.slots.table("position_to_host_token", (most,), torch.int32, holds="host_location")
        self.pages = PagePool(
            self.runtime,
            self.slots,
            options.max_running * -(-options.hot_tokens // HOT_PAGE) + MOST_STAGED * -(-longest // HOT_PAGE),
            HOT_PAGE,
            max_tokens_per_request=width,
            req_to_token=self._hot_table,
        )
        layout = layout_of(model, size)
        config = model.lm.config
        self.host = HostKVPool(
            self.runtime,
            max(-(-most // size), options.max_running * most // (2 * size)),
            size,
            layers=layout.layers,
            item_shape=(int(config.num_key_value_heads), int(config.head_dim)),
            dtype=model.dtype,
        )
        hot = model.new_kv(self.pages.location_capacity)
        self.tier = HiSparse(self.pages, self.host, buffers_of(hot), hot_tokens=options.hot_tokens)
        self._forward = TierForward(
            model, self.pages, TieredKV(hot, self.host.buffers), self._hot_table, self._host_table, options.speculate
        )
        regions = registered(parts.engine, layout, [buffer.memory for buffer in self.host.contiguous_buffers()])
        receiver = Receiver(parts.engine, described(parts.engine, layout, "decode"), regions)
        writers = tuple(writer_name(rank) for rank in range(options.prefill_workers))
        self.arrivals = Arrivals(
            self.tier, self.slots, receiver, writers, options.room, lease_seconds=options.lease_seconds, clock=clock
        )
        self._eos = frozenset(model.eos_token_ids)
        self._stream = self.runtime.stream("schedule")
        self._batch = TierBatch.empty(self.runtime)
        self._here: deque[Request] = deque()
        self._staging: list[TierBatch] = []
        self._writes: list[TableWrite] = []
        self._in_flight: deque[list[Launched]] = deque()
        self._last_step: Fence | None = None
        self._staged: set[int] = set()
        self.steps = self.mixed_steps = self.staged = self.quarantined_max = self.in_flight_depth_max = (
            self.result_copies
        ) = self.drafted = self.accepted = 0
        draw = np.random.default_rng(options.seed)
        for request in requests:
            if draw.random() < options.staged:
                self._here.append(request)
            else:
                self.arrivals.waiting.append((request, None))

    @property
    def busy(self) -> bool:
        """Whether any request is here or on its way, or any result unread."""
        return bool(self.arrivals.busy or self._here or self._staging or len(self._batch) or self._in_flight)

    @property
    def leaks(self) -> int:
        """Slots, pages and host locations that are not free."""
        slots, pages, host = self.slots.stats, self.pages.stats, self.host.stats
        return self.slots.size - slots.free + pages.num_pages - pages.free + host.size - host.free

    @property
    def quarantined(self) -> int:
        """Host locations that are freed, and may still be written by a writer, or be copied by the device."""
        return self.host.stats.pending

    def turn(self) -> bool:
        """One turn. Whether anything happened."""
        self.arrivals.keep_free = min(len(self._here), MOST_STAGED - len(self._staging))
        arrived = self.arrivals.turn()
        self.quarantined_max = max(self.quarantined_max, self.arrivals.quarantined)
        self.tier.poll_staged()
        staged = [request for request in self._staging if self.tier.ready(request.slots).all()]
        prefills = len(self._staging) < MOST_STAGED + len(staged)
        prefills = bool(self._here) and prefills and self.arrivals.room_for(self._here[0])
        launched: list[Launched] = []
        if len(self._batch) or arrived or staged or prefills:
            self.runtime.next_step()
            with self.runtime.use(self._stream):
                launched = self._launch(arrived, staged, prefills=prefills)
        moved = bool(launched or arrived or self._in_flight)
        if launched:
            self._in_flight.append(launched)
            self.in_flight_depth_max = max(self.in_flight_depth_max, len(self._in_flight))
        while len(self._in_flight) > (1 if launched else 0):
            self._read(self._in_flight.popleft())
        if not moved and self._last_step is not None:
            self._last_step.wait()  # nothing to launch: what the last step holds is waited for
            self._last_step = None
        return moved

    def _launch(self, arrived: list[Arrival], staged: list[TierBatch], *, prefills: bool) -> list[Launched]:
        self._leave()
        self._join_staged(staged)
        self._join_direct(arrived)
        launched = [] if not len(self._batch) else [self._decode()]
        if prefills:
            launched.append(self._prefill(self._here.popleft()))
        for step in launched:
            self._last_step = step.done
            for request in step.requests:
                request.in_flight += 1
            self.result_copies += 1
        return launched

    # Who runs

    def _leave(self) -> None:
        batch = self._batch
        ended = np.array([request.state == "finished" for request in batch.requests], dtype=np.bool_)
        leaves = ended | (self._confirmed() >= batch.kv_limits.np)  # with results still on their way
        if leaves.any():
            self.tier.finish(batch.filter(leaves).slots, after=self._last_step)
            self._batch = batch.filter(~leaves)

    def _join_direct(self, arrived: list[Arrival]) -> None:
        for number, arrival in enumerate(arrived):
            request, slot = arrival.request, arrival.slot
            try:
                with self.runtime.use(self._forward.stream):
                    hot = self.tier.admit_direct(slot)
            except PoolExhaustedError:  # pages of requests that have left are still pending
                self.arrivals.put_back(arrived[number:])
                return
            assert arrival.first_token is not None
            request.append([arrival.first_token], self._eos)
            if self._goes_on(slot, request):
                self._writes.append(hot.entry())
                self._forward.publish_known(slot, request.prompt, arrival.first_token)
                self._batch = self._batch.merge(self._row(slot, request))

    def _join_staged(self, staged: list[TierBatch]) -> None:
        for batch in staged:
            self._staging.remove(batch)
            if self._goes_on(batch.slots, batch.requests[0]):
                self._batch = self._batch.merge(batch)

    def _goes_on(self, slot: Slots, request: Request) -> bool:
        """Whether a request that has come decodes at all: an answer of one token has ended before it began.

        If so, its row of the host table is written, growth included: no step writes it again.
        """
        if request.state == "finished" or request.kv_limit == len(request.prompt):
            self.tier.finish(slot, after=self._last_step)
            return False
        room = self._options.room(request)
        rows = slot.take(np.zeros(room, dtype=np.int64))
        self._writes.append(self._host_table.entry(rows, np.arange(room), self.tier.host_locations(slot, room)))
        return True

    def _row(self, slot: Slots, request: Request) -> TierBatch:
        return TierBatch.build(
            self.runtime,
            slots=slot,
            seq_lens=[len(request.prompt)],
            kv_limits=[request.kv_limit],
            requests=[request],
        )

    # Forwards

    def _decode(self) -> Launched:
        width, confirmed = 1 + self._options.speculate, self._confirmed()
        batch = self._batch.advance("seq_lens", width)
        location = self.tier.map_last_location(batch.slots, batch.seq_lens, width, confirmed=confirmed)
        plan = ForwardPlan.of(batch.slots, batch.seq_lens, width)
        self._writes.append(location.entry(self._hot_table))
        extras = {**plan.extras, **location.extras}
        uploaded = batch.upload(writes=self._taken_writes(), extras=extras)
        launched, self._batch = self._forward.decode(batch, plan, location, self.tier, uploaded)
        self.steps += 1
        kinds = {request.number in self._staged for request in batch.requests}
        self.mixed_steps += len(kinds) == 2
        return launched

    def _prefill(self, request: Request) -> Launched:
        """Prefills a prompt on this device, and sends its KV out to the host behind the forward."""
        slot = self.slots.take(1)
        length = len(request.prompt)
        self._writes.append(self.pages.extend(slot, length).entry())
        batch = self._row(slot, request)
        plan = ForwardPlan.of(slot, [length], [length], prompt_ids=[request.prompt], pages=self.pages)
        uploaded = batch.upload(writes=self._taken_writes(), extras=plan.extras)
        launched = self._forward.prefill(batch, plan, uploaded)
        self.tier.admit_staged(slot, self._options.room(request), after=launched.done)
        self._staging.append(batch)
        self._staged.add(request.number)
        self.staged += 1
        return launched

    def _taken_writes(self) -> list[TableWrite]:
        writes, self._writes = self._writes, []
        return writes

    def _confirmed(self) -> npt.NDArray[np.int64]:
        """Tokens of each running request that have KV for certain: a forward under way brings at least one more."""
        return self._known() + self._under_way()

    def _known(self) -> npt.NDArray[np.int64]:
        return np.array([len(request.prompt) + len(request.output) - 1 for request in self._batch.requests], np.int64)

    def _under_way(self) -> npt.NDArray[np.int64]:
        return np.array([request.in_flight for request in self._batch.requests], np.int64)

    def _read(self, turn: list[Launched]) -> None:
        for launched in turn:
            outputs, lens = (launched.results[name].np.tolist() for name in ("outputs", "seq_lens"))
            for request, tokens, length in zip(launched.requests, outputs, lens, strict=True):
                new = length + 1 - len(request.prompt) - len(request.output)
                request.in_flight -= 1
                if request.output and request.state != "finished":  # else a prefill, which guesses nothing, or too late
                    self.drafted += self._options.speculate
                    self.accepted += new - 1
                request.append(tokens[:new], self._eos)
        if self._batch.seq_lens.contract is Contract.UPPER_BOUND:
            bounds, lengths = self._known() + (1 + self._options.speculate) * self._under_way(), self._batch.seq_lens.np
            runs = np.array([request.state != "finished" for request in self._batch.requests], dtype=np.bool_)
            lengths = np.where(runs, np.minimum(lengths, bounds), lengths)  # an answer is cut at its end, its KV is not
            self._batch = self._batch.tighten("seq_lens", lengths, slots=self._batch.slots)
