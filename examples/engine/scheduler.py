"""The host's part: who runs, with how many tokens each. Nothing here touches the device or waits for it.

One plan, in the order in which it is made; one call of the planner then carries all of it out::

    leave    requests that are finished or aborted; their slots and pages are free behind the last launched step
    share    the tokens of the step: to decode, then to chunks of prompts, oldest requests first
    retract  while the pages do not suffice: the youngest request gives back what it has, and waits to be resumed
    admit    waiting requests, while slots, pages and tokens last

Overlapped, the results of the last launched step are unknown here. Known without them: how many tokens each request
will have, or, with speculation, how many at most.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import PagePool, PoolExhaustedError, SlotPool
from batchstate.runtime import Fence, Runtime
from examples.engine.batch import RunningBatch
from examples.engine.forward import Forward
from examples.engine.model import Model
from examples.engine.request import Request, check_request
from examples.engine.settings import EngineSettings

T = TypeVar("T")
Ints = npt.NDArray[np.int64]


Row = tuple[Request, int]
"""A running request, and its tokens in KV memory after the last launched step."""


@final
@attrs.define(eq=False)
class Turn:
    """A step as the host plans it. Its requests are those of the batch that stay, then those that join.

    Attributes:
        queries: tokens scheduled for each request, int64[n].
        prompt_ids: their ids; None where the relay has them.
        samples: bool[n], whether it gets a token: it decodes, or is new, and this is the last chunk of its prompt.
        joining: those that join.
        keep: bool[requests of the batch], those that stay; None for all.
    """

    queries: Ints
    prompt_ids: list[Ints | None]
    samples: npt.NDArray[np.bool_]
    joining: Sequence[Request] = ()
    keep: npt.NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, rows: Sequence[Row], queries: list[int], joining: Sequence[Request] = ()) -> "Turn":
        """From the requests, the tokens scheduled for each, and the last of them, that join."""
        prompt_ids, samples = list[Ints | None](), list[bool]()
        for (request, length), tokens in zip(rows, queries, strict=True):
            fill = request.fill_ids
            decodes = tokens > 0 and length >= len(fill)
            prompt_ids.append(None if decodes else fill[length : length + tokens])
            samples.append(decodes or (0 < tokens == len(fill) - length and not request.output))
        return cls(np.array(queries, np.int64), prompt_ids, np.array(samples, np.bool_), joining)

    @property
    def columns(self) -> dict[str, object] | None:
        """Rows of those that join, without slots: the step takes them, and pages for what was prefilled elsewhere."""
        if not self.joining:
            return None
        lens = [request.kv_len if request.prebuilt else 0 for request in self.joining]
        return {"seq_lens": np.array(lens), "requests": self.joining}


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
    in_flight: deque[Fence] = attrs.field(factory=deque, init=False)

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

    def plan(self) -> Turn:
        """The part of each request in the next step."""
        rows = list(zip(self.batch.requests, self.batch.seq_lens.np.tolist(), strict=True))
        running = [row for row in rows if row[0].state == "running"]
        queries, youngest = self._queries(running), list[Request]()
        while (fit := self._that_fit(running, queries)) < len(running):
            youngest = [request for request, _ in running[fit:]] + youngest
            running, queries = running[:fit], self._queries(running[:fit])
        leaving = len(rows) - len(running)
        if joining := [] if youngest else self._joining(running, queries):
            new = [(request, request.kv_len if request.prebuilt else 0) for request in joining]
            stayed, queries = len(running), self._queries(running + new)
            served = queries[
                stayed:
            ]  # one that gets no token of this step goes on waiting: nothing would write its row
            joining = [request for request, tokens in zip(joining, served, strict=True) if tokens]
            running += [row for row, tokens in zip(new, served, strict=True) if tokens]
            queries = queries[:stayed] + [tokens for tokens in served if tokens]
            self._join(joining)
        self._retract(youngest)
        turn = Turn.of(running, queries, joining)
        if leaving:
            keep = np.array([request.state == "running" for request, _ in rows], np.bool_)
            gone = [row for row in rows if row[0].state != "running"]
            together = len(rows) + len(joining) <= self.settings.max_running
            together &= self._that_fit(gone + running, [0] * leaving + queries) == leaving + len(running)
            if together and any(queries):
                turn.keep = keep
            else:
                self._leave(keep)
        return turn

    def _leave(self, keep: npt.NDArray[np.bool_]) -> None:
        """Requests leave before the step, which cannot do without what they have; else they leave with it."""
        self.slots.release_requests(self.batch.filter(~keep).slots, after=self.last_step)
        self.batch = self.batch.filter(keep)

    def arrived(self, batch: RunningBatch, joined: Sequence[Request]) -> None:
        """The last requests have joined: KV computed elsewhere goes into their pages, known tokens into the relay."""
        first = len(batch) - len(joined)
        answered = [(row, request) for row, request in enumerate(joined, first) if request.output]
        for row, request in answered:
            if request.prebuilt is not None:
                slot = batch.filter([row]).slots
                places = self.pages.locations(slot, 0, request.kv_len)
                self.forward.load(places, slot, request.prompt, request.prebuilt)
                request.prebuilt = None  # once: when it is retracted, the KV is gone
        if answered:
            self.forward.publish_known(
                batch.filter([row for row, _ in answered]).slots, [request for _, request in answered]
            )

    def _queries(self, rows: Sequence[Row]) -> list[int]:
        """Tokens scheduled for each: one to decode, and its guesses; or the rest of the step for its prompt."""
        settings, queries, fills = self.settings, list[int](), list[tuple[int, int]]()
        decode_len, guesses = settings.decode_len, bool(settings.num_drafts)
        for row, (request, length) in enumerate(rows):
            left = len(request.fill_ids) - length
            if left > 0:
                fills.append((row, left))
                queries.append(0)
            # Without guesses it is known how many tokens are on their way: all, maybe.
            elif guesses or len(request.output) + request.in_flight < request.max_new_tokens:
                queries.append(decode_len)
            else:
                queries.append(0)
        if fills and not settings.mixed:
            queries = [0] * len(queries)
        spare = max(settings.max_tokens_per_step - sum(queries), 1)
        for row, left in fills:
            queries[row] = min(left, spare)
            spare -= queries[row]
        return queries

    def _that_fit(self, rows: Sequence[Row], queries: Sequence[int]) -> int:
        """How many of the oldest have pages for their tokens, once the others have given back theirs."""
        pages, size = self.settings.num_pages, self.settings.page_size
        for row, ((_, length), tokens) in enumerate(zip(rows, queries, strict=True)):
            pages += -(length + tokens) // size
            if pages < 0:
                return row
        return len(rows)

    def _joining(self, rows: Sequence[Row], queries: Sequence[int]) -> list[Request]:
        """Waiting requests for which there are tokens, a slot, and pages, counting those that steps in flight hold."""
        settings, joining = self.settings, list[Request]()
        tokens, room = settings.max_tokens_per_step - sum(queries), settings.max_running - len(rows)
        if not self.waiting or tokens <= 0 or not room:
            return joining
        pages, size, decode_len = settings.num_pages, settings.page_size, settings.decode_len
        for (_, length), puts_in in zip(rows, queries, strict=True):
            pages += -(length + (puts_in or decode_len)) // size
        for request in self.waiting:
            if request.in_flight:  # it was retracted, and gets a token that is not known yet
                continue
            pages += -(request.kv_len + decode_len) // size
            if tokens <= 0 or pages < 0 or len(joining) == room:
                break
            joining.append(request)
            tokens -= request.kv_len
        for request in joining:
            request.fill_ids = request.known_ids()
        return joining

    def _join(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.waiting.remove(request)
            request.state = "running"

    def _retract(self, youngest: Sequence[Request]) -> None:
        """Makes requests wait again. Results in flight for them still count."""
        for request in youngest:
            request.state = "waiting"
        self.waiting.extendleft(reversed(youngest))
        self.retractions += len(youngest)

    def when_free(self, take: Callable[[], T]) -> T:
        """The result of `take`. Plans count pending pages as free, so now and then a step in flight must end first."""
        while True:
            try:
                return take()
            except PoolExhaustedError:  # nothing was taken
                if not self.in_flight:
                    raise
                self.in_flight.popleft().wait()  # the oldest first: the newest may be far from its end
