"""The host's part: who runs, and how many tokens each puts in. Nothing here touches the device or waits for it.

One plan, in the order in which it happens::

    leave    requests that are finished or aborted; their slots and pages are free behind the last launched step
    share    the tokens of the step: to decode, then to chunks of prompts, oldest requests first
    retract  while the pages do not suffice: the youngest request gives back what it has, and waits to be resumed
    admit    waiting requests, while slots, pages and tokens last

Overlapped, the results of the last launched step are unknown here. What is known without them: how many tokens each
request will have, or, with speculation, how many at most.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import PagePool, PoolExhaustedError, SlotPool, Slots
from batchstate.runtime import Fence, Runtime
from batchstate.tables import TableWrite
from examples.engine.batch import RunningBatch
from examples.engine.forward import Forward
from examples.engine.model import Model
from examples.engine.request import Request, check_request
from examples.engine.settings import EngineSettings

T = TypeVar("T")
Ints = npt.NDArray[np.int64]


@final
@attrs.define(eq=False)
class Scheduler:
    """Owns the batch, the slots and the pages.

    Attributes:
        batch: the running requests.
        waiting: the others, first come first served; a retracted request goes to the front.
        slots, pages: the pools. `slots` is made over [slot, position] -> token, `req_to_token`.
        forward: takes what joins with tokens of its own.
        retractions: how often a request had to give its pages back.
        writes: table writes that are packed into the next upload.
        in_flight: the forward-done fences of launched steps, oldest first.
    """

    runtime: Runtime
    settings: EngineSettings
    model: Model
    slots: SlotPool = attrs.field(init=False)
    pages: PagePool = attrs.field(init=False)
    forward: Forward = attrs.field(init=False)
    batch: RunningBatch = attrs.field(init=False)
    waiting: deque[Request] = attrs.field(factory=deque, init=False)
    retractions: int = attrs.field(default=0, init=False)
    writes: list[TableWrite] = attrs.field(factory=list, init=False)
    in_flight: deque[Fence] = attrs.field(factory=deque, init=False)
    _fill_ids: dict[Request, Ints] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        settings = self.settings
        self.slots = SlotPool(self.runtime, settings.max_running)
        width = settings.row_width
        table = self.slots.table("req_to_token", (width,), torch.int32, holds="location")
        self.pages = PagePool(
            self.runtime,
            self.slots,
            settings.num_pages,
            settings.page_size,
            max_tokens_per_request=width,
            req_to_token=table,
        )
        self.forward = Forward(self.runtime, settings, self.model, self.pages, table)
        self.batch = RunningBatch.empty(self.runtime)

    @property
    def last_step(self) -> Fence | None:
        """Behind everything that was launched, or None if all of it has run."""
        return self.in_flight[-1] if self.in_flight else None

    def launched(self, forward_done: Fence) -> None:
        """A step was launched; those that have ended are forgotten."""
        self.in_flight.append(forward_done)
        while self.in_flight and self.in_flight[0].query():
            self.in_flight.popleft()

    def check(self, request: Request) -> None:
        """Refuses what could never run; see `check_request`."""
        check_request(request, self.settings, self.model.vocab_size, self.forward.kv)

    def plan(self) -> Ints:
        """Brings the batch up to date; tokens that each of its requests puts in now, int64[num_reqs]."""
        self._leave()
        queries = self._queries()
        fit = self._that_fit(queries)
        if fit == len(queries):
            return self._queries() if self._admit(queries) else queries
        while fit < len(queries):
            self._retract(fit)
            queries = self._queries()
            fit = self._that_fit(queries)
        return queries

    def prompt_ids(self, queries: Ints) -> list[Ints | None]:
        """For each request the ids that the host puts in, or None for what the relay has."""
        begin, fill = self.batch.seq_lens.np, self.batch.fill_lens.np
        known = ((begin < fill) | (queries == 0)).tolist()
        rows = zip(self.batch.requests, known, begin.tolist(), (begin + queries).tolist(), strict=True)
        return [self._fill_ids[request][first:stop] if here else None for request, here, first, stop in rows]

    def samples(self, queries: Ints) -> npt.NDArray[np.bool_]:
        """Requests that get a token: those that decode, and new ones with the last chunk of their prompt."""
        before, fill = self.batch.seq_lens.np, self.batch.fill_lens.np
        new = np.array([not request.output for request in self.batch.requests], np.bool_)
        samples: npt.NDArray[np.bool_] = (queries > 0) & ((before >= fill) | (new & (before + queries == fill)))
        return samples

    def _leave(self) -> None:
        leaves = np.array([request.state != "running" for request in self.batch.requests], np.bool_)
        if leaves.any():
            self._give_back(leaves)

    def _queries(self) -> Ints:
        before, fill = self.batch.seq_lens.np, self.batch.fill_lens.np
        fills = before < fill
        queries: Ints = np.where(fills, 0, self.settings.decode_len)
        if not self.settings.num_drafts:  # all tokens of these are on their way
            queries[before >= self.batch.kv_limits.np] = 0
        if not fills.any():
            return queries
        if not self.settings.mixed:
            queries[:] = 0
        left = np.where(fills, fill - before, 0)
        spare = max(self.settings.max_tokens_per_step - int(queries.sum()), 1)
        queries += np.minimum(np.maximum(spare - (left.cumsum() - left), 0), left)
        return queries

    def _that_fit(self, queries: Ints) -> int:
        """How many of the oldest requests have pages for their tokens, counting pages that steps in flight hold."""
        return int(np.searchsorted(self._more_pages(queries).cumsum(), self._pages_left(), side="right"))

    def _more_pages(self, tokens: Ints) -> Ints:
        """Pages that so many further tokens of each request need."""
        lens, size = self.batch.seq_lens.np, self.settings.page_size
        more: Ints = -lens // size - -(lens + tokens) // size
        return more

    def _pages_left(self) -> int:
        stats = self.pages.stats
        return stats.free + stats.pending

    def _retract(self, fit: int) -> None:
        """Makes all but the oldest `fit` requests wait again. What is in flight for them still counts."""
        youngest = self._give_back(np.arange(len(self.batch)) >= max(fit, 1))
        for request in youngest:
            request.state = "waiting"
        self.waiting.extendleft(reversed(youngest))
        self.retractions += len(youngest)

    def _give_back(self, leaves: npt.NDArray[np.bool_]) -> list[Request]:
        leaving = self.batch.filter(leaves)
        self.pages.release_requests(leaving.slots, after=self.last_step)
        self.batch = self.batch.filter(~leaves)
        for request in leaving.requests:
            del self._fill_ids[request]
        return list(leaving.requests)

    def _admit(self, queries: Ints) -> bool:
        settings, size = self.settings, self.settings.page_size
        tokens = settings.max_tokens_per_step - int(queries.sum())
        room = settings.max_running - len(self.batch)
        if not self.waiting or tokens <= 0 or not room:
            return False
        pages = self._pages_left() - int(self._more_pages(np.maximum(queries, settings.decode_len)).sum())
        joining: list[Request] = []
        for request in list(islice((one for one in self.waiting if not one.in_flight), room)):
            needed = -(-(request.kv_len + settings.decode_len) // size)
            if tokens <= 0 or needed > pages:
                break
            self.waiting.remove(request)
            joining.append(request)
            tokens, pages = tokens - request.kv_len, pages - needed
        if joining:
            self._join(joining)
        return bool(joining)

    def _join(self, joining: list[Request]) -> None:
        slots = self.when_free(lambda: self.slots.take(len(joining)))
        prebuilt = np.array([request.prebuilt is not None for request in joining], np.bool_)
        for row in np.flatnonzero(prebuilt).tolist():
            self._load(joining[row], slots.filter([row]))
        come_back = np.array([bool(request.output) for request in joining], np.bool_)
        if come_back.any():
            known = [request for request in joining if request.output]
            self.forward.publish_known(slots.filter(come_back), known)
        for request in joining:
            request.state = "running"
            self._fill_ids[request] = request.fill_ids()
        fill = [request.kv_len for request in joining]
        batch = RunningBatch.build(
            self.runtime,
            slots=slots,
            seq_lens=np.where(prebuilt, fill, 0),
            fill_lens=fill,
            kv_limits=[request.kv_limit for request in joining],
            requests=joining,
        )
        self.batch = self.batch.merge(batch)

    def _load(self, request: Request, slot: Slots) -> None:
        """A request whose prompt was prefilled elsewhere gets its pages, and its KV in them."""
        prebuilt, request.prebuilt = request.prebuilt, None  # once: when it is retracted, the KV is gone
        assert prebuilt is not None
        extension = self.when_free(lambda: self.pages.extend(slot, len(request.prompt)))
        self.writes.append(extension.entry())
        self.forward.load(extension.locations, slot, list(request.prompt), prebuilt)

    def when_free(self, take: Callable[[], T]) -> T:
        """What `take` returns. Plans count pending pages as free, so now and then a step in flight must end first."""
        while True:
            try:
                return take()
            except PoolExhaustedError:  # nothing was taken
                if not self.in_flight:
                    raise
                self.in_flight.popleft().wait()  # the oldest first: the newest may be far from its end
