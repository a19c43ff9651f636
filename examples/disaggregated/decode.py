"""The decode worker: KV arrives in its host memory, or in pages of its device, as is chosen for each request.

One turn, one step ahead: step N + 1 is planned from host sides alone and launched before the results of step N are
read. Three kinds of requests run in one batch: *direct* ones, whose KV has come into the host tier, and *staged* ones,
whose KV was on the device first, because it came into its pages or was prefilled here, have a hot buffer on the device;
*ordinary* ones, whose KV has come into device pages, stay there with all of it.
"""

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import Contract, ForwardPlan, HostKVPool, HostLocations, PagePool, PoolExhaustedError, SlotPool, Slots
from batchstate.kv.hisparse import HiSparse
from batchstate.runtime import Fence
from batchstate.tables import TableWrite
from batchstate.transport.receiver import Receiver
from batchstate.transport.workers import ON_DEVICE, Clock
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
LANDINGS = 6
"""Of the longest requests so many have room in device pages at once, beside the hot buffers."""


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
        mixed_steps: of these, steps in which requests of several kinds ran together.
        staged: requests prefilled here.
        landed: requests whose KV came into device pages.
        ordinary: of these, requests that stayed there.
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
        width = max(longest if options.landing == "host" else most, options.hot_tokens)
        self.slots = SlotPool(self.runtime, options.max_running)
        self._hot_table = self.slots.table("hot_row_to_token", (width,), torch.int32, holds="location")
        self._host_table = self.slots.table("position_to_host_token", (most,), torch.int32, holds="host_location")
        self._hot_pages = hot_pages = options.max_running * -(-options.hot_tokens // HOT_PAGE)
        landings = 0 if options.landing == "host" else hot_pages + LANDINGS * -(-most // HOT_PAGE)
        self.pages = PagePool(
            self.runtime,
            self.slots,
            hot_pages + MOST_STAGED * -(-longest // HOT_PAGE) + landings,
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
        there = registered(parts.engine, layout, buffers_of(hot), ON_DEVICE) if landings else []
        self.runtime.record().wait()  # a writer in another process is on no stream that could wait for the zeros
        receiver = Receiver(parts.engine, described(parts.engine, layout, "decode"), regions, there)
        writers = tuple(writer_name(rank) for rank in range(options.prefill_workers))
        self.arrivals = Arrivals(
            self.tier,
            self.slots,
            receiver,
            writers,
            options.room,
            self._landing_pages,
            hot_pages,
            lease_seconds=options.lease_seconds,
            clock=clock,
        )
        self._eos = frozenset(model.eos_token_ids)
        self._stream = self.runtime.stream("schedule")
        self._batch = TierBatch.empty(self.runtime)
        self._here: deque[Request] = deque()
        self._staging: list[TierBatch] = []
        self._writes: list[TableWrite] = []
        self._in_flight: deque[list[Launched]] = deque()
        self._last_step: Fence | None = None
        self.steps = self.mixed_steps = self.staged = self.quarantined_max = self.in_flight_depth_max = (
            self.result_copies
        ) = self.drafted = self.accepted = self.landed = self.ordinary = 0
        self._draws = np.random.default_rng(options.seed), np.random.default_rng(options.seed + 1)
        self._kinds: dict[int, str] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """A request arrives, no longer than those that the worker was made for."""
        draw, kinds = self._draws
        landing = {"host": ["direct"], "device": ["staged", "ordinary"], "mixed": ["direct", "staged", "ordinary"]}
        if draw.random() < self._options.staged:
            self._here.append(request)
            self._kinds[request.number] = "staged"
        else:
            self.arrivals.waiting.append((request, None))
            self._kinds[request.number] = str(kinds.choice(landing[self._options.landing]))

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
        """Locations that are freed, and may still be written by a writer, or be copied by the device."""
        return self.host.stats.pending + self.pages.stats.pending * HOT_PAGE

    def turn(self) -> bool:
        """One turn. Whether anything happened."""
        self.arrivals.keep_free = max(0, min(len(self._here), MOST_STAGED - len(self._staging)))
        arrived = self.arrivals.turn()
        self.quarantined_max = max(self.quarantined_max, self.arrivals.quarantined)
        self.tier.poll_staged()
        staged = [request for request in self._staging if self.tier.ready(request.slots).all()]
        prefills = len(self._staging) < MOST_STAGED + len(staged)
        prefills = bool(self._here) and prefills and self._room_here(self._here[0])
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
        self._join_arrived(arrived)
        launched = [] if not len(self._batch) else [self._decode()]
        if prefills and self._room_here(self._here[0]):  # those that arrived may have taken it
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
            tiered = self._tiered(batch)
            if (leaves & tiered).any():
                self.tier.finish(batch.filter(leaves & tiered).slots, after=self._last_step)
            if (leaves & ~tiered).any():
                self.pages.release_requests(batch.filter(leaves & ~tiered).slots, after=self._last_step)
            self._batch = batch.filter(~leaves)

    def _tiered(self, batch: TierBatch) -> npt.NDArray[np.bool_]:
        """The requests that are in the host tier."""
        return np.array([self._kinds[request.number] != "ordinary" for request in batch.requests], dtype=np.bool_)

    def _landing_pages(self, request: Request) -> int:
        kind = self._kinds[request.number]
        tokens = {"direct": 0, "staged": len(request.prompt), "ordinary": self._options.room(request)}[kind]
        return -(-tokens // HOT_PAGE)

    def _room_here(self, request: Request) -> bool:
        """Whether there is room to prefill a prompt here, and to stage it out."""
        pages = -(-len(request.prompt) // HOT_PAGE)
        fits = self._options.landing == "host" or self.pages.stats.free >= pages + self._hot_pages
        return fits and self.slots.stats.free > 0 and self.arrivals.host_room_for(request)

    def _join_arrived(self, arrived: list[Arrival]) -> None:
        without_room: list[Arrival] = []
        for arrival in arrived:
            request, slot, kind = arrival.request, arrival.slot, self._kinds[arrival.request.number]
            with self.runtime.use(self._forward.stream):
                hot = self._admitted(arrival, kind)
            if hot is None:
                without_room.append(arrival)  # one behind it may hold what it waits for
                continue
            assert arrival.first_token is not None
            request.append([arrival.first_token], self._eos)
            if kind == "staged":
                self._forward.publish_known(slot, request.prompt, arrival.first_token)
                self._staging.append(self._row(slot, request))
            elif self._goes_on(slot, request):
                self._writes.append(hot)
                self._forward.publish_known(slot, request.prompt, arrival.first_token)
                self._batch = self._batch.merge(self._row(slot, request))
        self.arrivals.put_back(without_room)

    def _admitted(self, arrival: Arrival, kind: str) -> TableWrite | None:
        """Takes over a request that is here; the write of its row of the hot table. None: there is no room yet."""
        request, slot = arrival.request, arrival.slot
        if arrival.pages is None:
            with contextlib.suppress(PoolExhaustedError):  # pages of requests that have left are still pending
                return self.tier.admit_direct(slot).entry()
            return None
        if kind == "staged" and not self.arrivals.host_room_for(request):
            return None
        self.landed += 1
        self.ordinary += kind == "ordinary"
        self.pages.commit(arrival.pages, len(request.prompt))
        self.pages.assign(arrival.pages, slot, len(request.prompt))
        if kind == "staged":
            self.tier.admit_staged(slot, self._options.room(request), after=self.runtime.record())
        return self.pages.entry(slot)  # up to the end of its pages: those of an ordinary request hold all its tokens

    def _join_staged(self, staged: list[TierBatch]) -> None:
        for batch in staged:
            self._staging.remove(batch)
            if self._goes_on(batch.slots, batch.requests[0]):
                self._writes.append(self.pages.entry(batch.slots))  # the pages that it has kept
                self._batch = self._batch.merge(batch)

    def _goes_on(self, slot: Slots, request: Request) -> bool:
        """Whether a request that has come decodes at all: an answer of one token has ended before it began.

        If so, its row of the host table is written, growth included: no step writes it again.
        """
        ordinary = self._kinds[request.number] == "ordinary"
        if request.state == "finished" or request.kv_limit == len(request.prompt):
            (self.pages.release_requests if ordinary else self.tier.finish)(slot, after=self._last_step)
            return False
        if ordinary:  # no position is read from the host: padding stands for all
            padding = HostLocations.from_host(self.runtime, np.zeros(1, dtype=np.int64))
            self._writes.append(self._host_table.entry(slot, np.zeros(1, dtype=np.int64), padding))
            return True
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
        batch, tiered = self._batch.advance("seq_lens", width), self._tiered(self._batch)
        hosted = batch.filter(tiered)
        slots, lens = hosted.slots, hosted.seq_lens
        location = self.tier.map_last_location(slots, lens, width, confirmed=confirmed[tiered])
        plan = ForwardPlan.of(batch.slots, batch.seq_lens, width)
        self._writes.append(location.entry(self._hot_table))
        hot_from = np.zeros(len(batch), dtype=np.int64)
        hot_from[tiered] = location.hot_from
        spans = np.where(tiered, self.tier.hot_tokens, self._hot_table.shape[1])
        extras = {**plan.extras, **location.extras, "hot_from": hot_from, "spans": spans}
        uploaded = batch.upload(writes=self._taken_writes(), extras=extras)
        launched, self._batch = self._forward.decode(batch, plan, location, self.tier, uploaded)
        if not tiered.all():  # each has one token more for certain
            self.pages.commit(batch.filter(~tiered).slots, confirmed[~tiered] + 1)
        self.steps += 1
        self.mixed_steps += len({self._kinds[request.number] for request in batch.requests}) > 1
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
