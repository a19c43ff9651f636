"""An engine that overlaps, on several streams: the machine that races are looked for with.

The engine launches a step before it reads the results of the one before. Nothing waits for the device except reading
the results of older steps, and every number that the device holds ends up in a token. So a wait that the library
forgets is a conflict of two operations, which the race detector sees, or a wrong token on the simulated device.

Order of this file: requests and the model of a forward (plain Python), `Choices` (how one step is run), `OverlapEngine`
(host and device part), `OverlapMachine` (the rules).
"""

import functools
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import ForwardPlan, MirroredTensor, PagePool, SlotPool, Slots, device_only, levels, mirrored
from batchstate._upload import Extras
from batchstate.future_map import FutureMap, Prefetched, relay_field
from batchstate.runtime import Fence, PackedUpload, Runtime, Stream
from batchstate.runtime.base import Download
from batchstate.tables import TableWrite
from batchstate.testing.fences import LateRuntime
from examples.traffic.scheduler import BatchScheduler, ScheduledBatch, StepPlan, pages_for
from tests.selfcheck.machine import Machine, ShownByRepr, agree, agree_on, disagree

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Reached = Callable[[str, bool], None]
"""Counts a coverage target, if it is reached."""

MAX_TOKENS = 12  # per request, a speculative one included
MARKS = 2  # numbers in a request's row of the table of marks
MAX_UNREAD = 4  # steps whose results may be left unread; fences decide how many may run, which is less


class Arrival(Enum):
    """How a request arrives; the last two are prebuilt, with KV."""

    PROMPT = "prompt"  # the forward computes the KV of its prompt
    WRITTEN = "written"  # its KV is written into its pages on the stream on which it arrives
    HANDED = "handed"  # its KV arrives on one stream and is passed to the forward's stream, which writes it


class OverlapBatch(ScheduledBatch):
    num_generated = mirrored(torch.int64)
    temperature = mirrored(torch.float32, pad=1.0)
    odd = mirrored(torch.int64, contract="upper_bound")  # steps with an odd mix, of which the host counts all
    last = device_only(torch.int64)  # the mix of the last step


@final
@attrs.define(eq=False)
class DeviceState:
    """The memory of a request on the device, once everything launched has run."""

    state: int  # its row of the table of states
    kv: list[tuple[int, int]] = attrs.field(factory=list)  # the KV row of each token
    marks: tuple[int, ...] = (0,) * MARKS  # its row of the table of marks
    last: int = 0  # this and the next three are its columns
    odd: int = 0
    age: int = 0
    temperature: int = 1
    token: int = 0  # its relay entry


@final
@attrs.define(eq=False, repr=False)
class OverlapRequest(ShownByRepr):
    """One request, of prompt ids `prompt` and `answer` tokens to sample."""

    number: int
    prompt: Sequence[int]
    answer: int
    arrival: Arrival = Arrival.PROMPT  # the first time
    marks: tuple[int, ...] = (0,) * MARKS  # the row of marks that it is to have
    handle: Slots | None = None  # its slot, while it runs
    fill: Sequence[int] = ()  # ids that are prefilled, or were when it arrived, before it decodes
    num_generated: int = 0  # tokens sampled, those in flight included
    in_flight: int = 0  # steps that sampled for it and are unread
    output: dict[int, int] = attrs.field(factory=dict)  # index in the answer -> token that the host has read
    aborted: bool = False
    held: DeviceState = attrs.field(factory=lambda: DeviceState(0))  # while it runs

    def __repr__(self) -> str:
        return f"<request {self.number}: {len(self.prompt)} ids, {self.num_generated} of {self.answer} tokens>"

    @property
    def length(self) -> int:
        return len(self.held.kv)

    @property
    def over(self) -> bool:
        return self.aborted or self.num_generated >= self.answer

    @property
    def known(self) -> Sequence[int]:
        """All ids that the host knows: what is prefilled when the request has no KV."""
        return [*self.prompt, *(self.output[index] for index in range(self.num_generated))]

    @property
    def tokens_to_prefill(self) -> int:
        """The number of `known` ids; for a prebuilt request one more, since it decodes at once."""
        return len(self.prompt) + self.num_generated + (self.arrival is not Arrival.PROMPT)

    def ids(self, query: int) -> Sequence[int] | None:
        """The next ids as the host knows them, or None where the relay has the one id."""
        return self.fill[self.length : self.length + query] if self.length < len(self.fill) else None


def handles_of(requests: Sequence[OverlapRequest]) -> Slots:
    """The handles of running requests, in order, as a value whose device side does not exist yet."""
    return Slots.cat([req.handle for req in requests if req.handle is not None])


# The model of a forward: a checksum of everything that it reads, of integers below `PRIME`, so that host and device
# agree to the last bit. A value read too early, too late, or from another request's memory changes all later tokens.

PRIME = 999_983

SALT, LENGTH, TEMPERATURE, AGE, MARK, ID, NUDGE, LAST, ODD, STATE = 3, 11, 13, 19, 23, 29, 37, 41, 43, 47
"""The factor of each number that a forward reads."""

WEIGHTS = np.arange(1, 2 * MAX_TOKENS + 1, dtype=np.int64).reshape(MAX_TOKENS, 2)
"""The factors of the KV of each position, int64[MAX_TOKENS, 2]."""

_WEIGHT_ROWS = WEIGHTS.tolist()


class Outcome(NamedTuple):
    """The results of a forward for one request: its token, and a log for the host."""

    token: int
    log: tuple[int, int]


def kv_row(token: int, position: int) -> tuple[int, int]:
    """The KV of a token."""
    return (token * 31 + position * 17 + 5) % PRIME, (token * 7 + position * 3 + 1) % PRIME


def forward(request: OverlapRequest, query: int, salt: int, nudge: int) -> Outcome:
    """Runs one request: changes its device state, and returns the results."""
    held = request.held
    ids = request.ids(query) or (held.token,)
    held.kv += [kv_row(token, len(held.kv) + at) for at, token in enumerate(ids)]
    held.age += 1
    attended = sum(a * k + b * v for (k, v), (a, b) in zip(held.kv, _WEIGHT_ROWS, strict=False)) % PRIME
    mix = (
        SALT * salt
        + LENGTH * len(held.kv)
        + TEMPERATURE * held.temperature
        + AGE * held.age
        + MARK * sum(held.marks)
        + ID * ids[-1]
        + NUDGE * nudge
        + LAST * held.last
        + ODD * (held.odd + 1)  # the host's step counts until the forward has found out
        + STATE * held.state
        + attended
    ) % PRIME
    held.state = (53 * held.state + 59 * mix + 1) % PRIME
    held.last = mix
    held.odd += mix % 2
    return Outcome(mix, (held.state, attended))


def column(requests: Sequence[OverlapRequest], name: str) -> Array:
    """A column of requests, by the model."""
    return np.array([getattr(req.held, name) for req in requests], np.int64)


def _write_kv(kv: torch.Tensor, locs: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> None:
    keys = (ids * 31 + positions * 17 + 5) % PRIME
    values = (ids * 7 + positions * 3 + 1) % PRIME
    kv.index_copy_(0, locs, torch.stack((keys, values), dim=1))


def _attend(kv: torch.Tensor, locs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64[n]: the KV at `locs` [n, MAX_TOKENS], weighted by position."""
    rows = kv.index_select(0, locs.view(-1)).view(-1, MAX_TOKENS, 2)
    return (rows * weights).sum((1, 2)) % PRIME


def _next_state(state: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    return (state * 53 + mix * 59 + 1) % PRIME


READINGS = ("salts", "columns", "ages", "tokens", "marks")
"""Inputs that a forward reads at its entry, each synchronised with the schedule's stream in a way of its own."""


@final
@attrs.frozen(repr=False)
class Choices(ShownByRepr):
    """How a step is run."""

    first: int = 0  # which of `READINGS` the forward begins with: no earlier wait covers the first one
    nudged: bool = False  # another stream publishes numbers for this forward
    tries: bool = False  # each request writes KV after its last token; the locations beyond are given back at once
    by_hand: bool = False  # a forward of decodes gathers its inputs itself and looks locations up in the token table
    own_handles: bool = False  # results are prefetched by handles that hold no memory of the step
    asked_aside: bool = False  # results are asked for on the schedule's stream
    unread: bool = False  # results are left unread for a while
    watched: bool = False  # another stream looks at the extra arrays that were uploaded with the step
    clears_aside: bool = False  # rows of requests that leave are cleared on another stream

    def __repr__(self) -> str:
        changed = [field.name for field in attrs.fields(Choices) if getattr(self, field.name) != field.default]
        return f"Choices({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    @property
    def readings(self) -> tuple[str, ...]:
        return READINGS[self.first :] + READINGS[: self.first]

    @classmethod
    def numbered(cls, number: int) -> "Choices":
        values: dict[str, Any] = {}
        for name, options in _OPTIONS.items():
            number, digit = divmod(number, options)
            values[name] = digit if name == "first" else digit == options - 1
        return cls(**values)


_SELDOM = 4
_OPTIONS = {
    "first": len(READINGS),
    "nudged": 2,
    "by_hand": 2,
    "own_handles": 2,
    "clears_aside": 2,
    "unread": 2,
    "tries": _SELDOM,
    "watched": _SELDOM,
    "asked_aside": 2,
}

CHOICES = st.integers(0, math.prod(_OPTIONS.values()) - 1).map(Choices.numbered)
"""One number each: drawing many makes examples slow and their programs long."""


class Streams(NamedTuple):
    """The streams of the engine; the relay has one more, to the host."""

    schedule: Stream  # plans are uploaded, table rows written, slots begun
    forward: Stream
    arrivals: Stream  # prebuilt requests and nudges come from outside
    audit: Stream  # reads the memory of the others and tells the host; it waits for all, and nothing waits for it
    origin: Stream  # was current before; the relay is made on it, and nothing else happens there


@final
@attrs.frozen(eq=False)
class Step:
    number: int  # from 1
    requests: Sequence[OverlapRequest]  # those that sampled
    indices: Sequence[int]  # of the token in the answer of each
    outcomes: Sequence[Outcome]  # of each, by the model
    results: Prefetched | None  # by the device; None where no request samples
    done: Fence  # after the forward


@final
@attrs.frozen(eq=False)
class Look:
    """Values that the audit stream read, on their way to the host, and those of the model."""

    download: Download
    expected: Sequence[Array]

    def check(self) -> None:
        for number, (expected, actual) in enumerate(zip(self.expected, self.download.resolve(), strict=True)):
            agree_on(expected, actual, f"{self.download.name}, array {number}")


@final
class OverlapEngine(BatchScheduler[OverlapBatch, OverlapRequest]):
    """Serves requests, one step ahead of the device.

    One step: rows leave and join, all grow, one upload, one forward, and the results of an older step are read. Rows
    that leave are freed with the fence of the last launched forward. The host waits for a running step only where it
    needs the memory that the step holds. Each piece of memory is made on another stream than those that use it.
    """

    def __init__(
        self, runtime: Runtime, size: int, num_pages: int, page_size: int, *, chunk: int, reached: Reached
    ) -> None:
        self._reached = reached
        self._clears_aside = False  # in this step, see `Choices`
        self.slots = SlotPool(runtime, size)
        fields = {
            "token": relay_field(torch.int64, read_by="both", non_negative=True),
            "log": relay_field(torch.int64, (2,), read_by="host"),
            "nudge": relay_field(torch.int64),
        }
        self.relay = FutureMap(self.slots, fields)  # tokens and logs of forwards, and nudges for them
        self.streams = Streams(
            runtime.stream("schedule"),
            runtime.stream("forward"),
            runtime.stream("arrivals"),
            runtime.stream("audit"),
            origin=runtime.current_stream,
        )
        with runtime.use(self.streams.schedule):
            # [slot, position] -> location, and [slot, MARKS], of which whole rows are rewritten and cleared: the
            # library orders their readers and writers.
            self.tokens = self.slots.table("req_to_token", (MAX_TOKENS,), holds="location", host=True)
            self.marks = self.slots.table("marks", (MARKS,), torch.int64, host=True)
        with runtime.use(self.streams.arrivals):
            # The engine's own. Only the fence of the free orders a slot's next owner after its last.
            self.states = self.slots.table("states", (), torch.int64)
        pages = PagePool(
            runtime, self.slots, num_pages, page_size, max_tokens_per_request=MAX_TOKENS, req_to_token=self.tokens
        )
        super().__init__(pages, OverlapBatch.empty(runtime), max_tokens_per_step=size - 1 + chunk)
        with runtime.use(self.streams.forward):
            self._kv = runtime.device_zeros((self.pages.location_capacity, 2), torch.int64)
            self.pages.register_kv(self._kv)
            self._kv_ready = runtime.record()
        self._kv_synchronised: dict[object, Any] = {}
        self.ages = MirroredTensor.from_host(
            runtime, np.zeros(0, np.int64), name="ages"
        )  # in steps, moved as the batch
        self._marks_due: dict[OverlapRequest, tuple[int, ...]] = {}  # written with the next upload
        self._writes: list[TableWrite] = []  # the same, of prebuilt requests
        self._arrived: list[Fence] = []  # the next forward waits for these
        self._pages_used: set[int] = set()
        self._drawn = 0
        self.unread: list[Step] = []  # launched, and the host has not read the results; oldest first
        self.launched = 0  # steps so far
        self.running: deque[Step] = deque()  # that may not be over
        self._ahead: list[Step] = []  # that the host has not waited for
        self._closed: deque[tuple[Sequence[Fence], int]] = deque()  # fences of each stream, and steps launched by then
        self.looks: list[Look] = []  # that the host has not read, oldest first

    @property
    def kv(self) -> torch.Tensor:
        """int64[location, 2], synchronised with the current stream."""
        return self.runtime.use_on_current_stream(
            self._kv, self.streams.forward, self._kv_ready, synchronised=self._kv_synchronised
        )

    def step(self, choices: Choices) -> bool:
        """Plans and launches a step, then reads older ones. Returns whether any request runs."""
        self._begin_step()
        self._clears_aside = choices.clears_aside
        with self.runtime.use(self.streams.schedule):
            plan = self.schedule()
            runs = len(self.batch) > 0
            if plan is not None and runs:
                self._launch(choices, plan)
        if not choices.unread:
            self.read_all_but(self.runtime.steps_in_flight - 1 if runs else 0)
        self.read_all_but(MAX_UNREAD)
        while len(self.looks) > MAX_UNREAD:
            self.looks.pop(0).check()
        return runs

    # Steps in flight

    @property
    def depth(self) -> int:
        """Launched steps that the host does not know to be over."""
        # A quick device proves nothing, and a host that asks knows too much: fences are asked only where they lag.
        asks = isinstance(self.runtime, LateRuntime)
        return sum(not (asks and step.done.query()) for step in self._ahead)

    def _begin_step(self) -> None:
        """Begins the runtime's next step, after those that would make it deeper than the runtime declares."""
        if self.launched:
            self._closed.append(([self.runtime.record(stream) for stream in self.streams], self.launched))
        while len(self._closed) >= self.runtime.steps_in_flight:
            fences, launched = self._closed.popleft()
            for fence in fences:
                if not fence.query():
                    fence.wait()
            self._over(launched)
            while self.running and self.running[0].number <= launched:
                self.running.popleft()
        self.runtime.next_step()

    def _over(self, number: int) -> None:
        self._ahead = [step for step in self._ahead if step.number > number]

    @property
    def last_step(self) -> Fence | None:
        return self.running[-1].done if self.running else None

    def wait(self) -> None:
        step = self.running.popleft()
        if not step.done.query():
            step.done.wait()
        self._over(step.number)

    def wait_for_step(self) -> bool:
        if not self.running:
            return False
        self._reached("waited for a step that held what was needed", True)
        self.wait()
        return True

    def read_all_but(self, newest: int) -> None:
        while len(self.unread) > newest:
            self.read(0)

    def read(self, at: int) -> Step:
        """Reads the results of one unread step, waits for that one if it must, and returns it."""
        step = self.unread.pop(at)
        self._reached("results read out of order", at > 0)
        if step.results is not None:
            tokens, logs = (np.array(step.results[name].np) for name in ("token", "log"))
            for name, actual in (("token", tokens), ("log", logs)):
                expected = np.array([getattr(outcome, name) for outcome in step.outcomes], np.int64)
                agree_on(expected, actual, f"{name}s of step {step.number}")
            self._over(step.number)
            self._line_up(step.results, tokens, step.requests)
            for req, index, token in zip(step.requests, step.indices, tokens.tolist(), strict=True):
                req.output[index] = token
                req.in_flight -= 1
        return step

    def _line_up(self, results: Prefetched, tokens: Array, requests: Sequence[OverlapRequest]) -> None:
        """Requests that kept their slots find their results by handle, in the order that the batch has by now."""
        handles = {*zip(results.slots.np.tolist(), results.slots.generations.tolist(), strict=True)}
        rows = {req: row for row, req in enumerate(requests)}
        here = [
            req
            for req in self.batch.requests
            if req.handle is not None and (int(req.handle.np[0]), int(req.handle.generations[0])) in handles
        ]
        if here:
            self._reached("results of a batch in another order", [rows[req] for req in here] != list(range(len(here))))
            aligned = results["token"].aligned(handles_of(here))
            agree_on(tokens[[rows[req] for req in here]], aligned, "tokens by handle")

    def forget(self) -> None:
        """Drops the results of steps all of whose requests hung up: their memory goes back by itself."""
        for step in [step for step in self.unread if all(request.aborted for request in step.requests)]:
            self.unread.remove(step)
            for req in step.requests:
                req.in_flight -= 1
            self._reached("results dropped unread", step.results is not None)

    # Leaving

    def leave(self) -> None:
        leaves = np.array([req.over for req in self.batch.requests], np.bool_)
        if leaves.any():
            self._reached("left while a step uses the row", self.depth > 0)
            self.give_back(leaves)

    def give_back(self, leaves: npt.NDArray[np.bool_]) -> Sequence[OverlapRequest]:
        leaving = self.batch.filter(leaves)
        marked = [row for row, req in enumerate(leaving.requests) if any(req.held.marks)]
        if marked:
            with self.runtime.use(self.streams.arrivals if self._clears_aside else self.streams.schedule):
                self.marks.clear(leaving.slots.filter(marked))
            self._reached("a row cleared on another stream", self._clears_aside)
        self.ages = self.ages.filter(~leaves)
        requests = super().give_back(leaves)
        for req in requests:
            self._marks_due.pop(req, None)
            req.handle = None
        return requests

    def reverse(self) -> None:
        """Reverses the rows; columns that only the device has are gathered at their first read."""
        backwards = np.arange(len(self.batch))[::-1]
        self.batch, self.ages = self.batch.filter(backwards), self.ages.filter(backwards)

    # Joining

    @property
    def slots_available(self) -> int:
        """Free slots, for the first waiting requests all results of which are read; a retracted one waits for them."""
        complete = itertools.takewhile(lambda req: not req.in_flight, self.waiting)
        return min(self.slots.stats.free, sum(1 for _ in complete))

    def join(self, requests: Sequence[OverlapRequest]) -> StepPlan:
        """Begins requests before the step, in slots of their own, prebuilt ones with their KV."""
        in_flight = self.depth > 0
        self._reached("joined while a step is in flight", in_flight and len(self.batch) > 0)
        self._reached("a retracted request came back", any(req.num_generated for req in requests))
        taken = self.slots.take(len(requests))
        for req, slot in zip(requests, taken.split([1] * len(requests)), strict=True):
            req.handle = slot
        used = [req for req in requests if in_flight and req.handle is not None and req.handle.generations[0] > 1]
        prebuilt = [req for req in requests if req.arrival is not Arrival.PROMPT]
        prompts = [req for req in requests if req.arrival is Arrival.PROMPT]
        self._reached("a slot used again while a step is in flight", bool(used))
        self._reached("a prebuilt request in a used slot", any(req in prebuilt for req in used))
        self._reached("prebuilt KV handed to the forward", any(req.arrival is Arrival.HANDED for req in requests))
        joined = self._begin_prompts(prompts)
        for req in prebuilt:
            joined = joined.merge(self._begin_prebuilt(req))
        self._marks_due.update({req: req.marks for req in prompts})
        self.ages = self.ages.merge(MirroredTensor.from_host(self.runtime, np.zeros(len(requests), np.int64)))
        written = self._pages_of(prebuilt)
        self._reached("a prebuilt request on used pages", in_flight and not self._pages_used.isdisjoint(written))
        self.batch = self.batch.merge(joined)
        return self.plan()

    # A request begins on the stream that brings it, which sets its slot's state and waits for no forward. That is safe
    # because a slot changes hands only when the last forward of its owner is done. Nothing else orders the two: a slot
    # or a page that is taken too early is written here while a forward still uses it.

    def _begin_prompts(self, requests: Sequence[OverlapRequest]) -> OverlapBatch:
        for req in requests:
            req.held = DeviceState(_first_state(req))
            req.fill = req.known
        return self._begun(requests)[0] if requests else OverlapBatch.empty(self.runtime)

    def _begin_prebuilt(self, request: OverlapRequest) -> OverlapBatch:
        slot, token = handles_of([request]), (request.number * 7919 + 11) % PRIME
        held = request.held = DeviceState(_first_state(request), token=token, last=token, marks=request.marks)
        held.kv = [kv_row(token, at) for at, token in enumerate(request.prompt)]
        request.output[0], request.num_generated, request.fill = token, 1, request.prompt
        with self.runtime.use(self.streams.arrivals):
            batch, uploaded = self._begun([request], np.array(held.kv, np.int64))
            extension = self.when_free(lambda: self.pages.extend(slot, len(request.prompt)))
            if request.arrival is Arrival.WRITTEN:
                self.kv.index_copy_(0, extension.locations.device, uploaded.view(3))
            arrived = self.runtime.record()
            self._arrived.append(arrived)
            if request.number % 2:
                extension.entry().launch()
            else:
                self._writes.append(extension.entry())
            self.marks.write(slot, None, [request.marks])
            self.relay.publish(slot, token=[token])
        if request.arrival is Arrival.HANDED:
            with self.runtime.use(self.streams.forward):
                rows = self.runtime.use_on_current_stream(uploaded.view(3), self.streams.arrivals, arrived)
                self.kv.index_copy_(0, extension.locations.device, rows)
        request.arrival = Arrival.PROMPT  # when it comes back after a retraction, its KV is gone
        return batch

    def _begun(self, requests: Sequence[OverlapRequest], *more: Array) -> tuple[OverlapBatch, PackedUpload]:
        """The rows of a batch, made on the current stream, which sets the states; and `more` in the same copy."""
        handles, states = handles_of(requests), self.states.memory
        uploaded = self.runtime.upload([handles.np, column(requests, "state"), column(requests, "last"), *more])
        states.index_copy_(0, uploaded.view(0), uploaded.view(1))
        batch = OverlapBatch.build(
            self.runtime,
            slots=handles,
            seq_lens=[req.length for req in requests],
            prefill_lens=[len(req.fill) for req in requests],
            num_generated=[req.num_generated for req in requests],
            temperature=[float(req.held.temperature) for req in requests],
            odd=[0] * len(requests),
            last=uploaded.view(2),
            requests=list(requests),
        )
        return batch, uploaded

    def _pages_of(self, requests: Sequence[OverlapRequest]) -> list[int]:
        if not requests:
            return []
        pages: list[int] = self.pages.page_table[handles_of(requests).np].reshape(-1).tolist()
        return [page for page in pages if page]

    def mark(self, req: OverlapRequest, marks: tuple[int, ...], stream: Stream | None) -> None:
        """Sets another row of marks for a running request, at once on `stream`, or with the next upload if None."""
        req.marks = marks
        if stream is None:
            self._marks_due[req] = marks
            return
        self._marks_due.pop(req, None)
        req.held.marks = marks
        with self.runtime.use(stream):
            self.marks.write(handles_of([req]), None, [marks])

    def _table_writes(self) -> list[TableWrite]:
        writes, self._writes = self._writes, []
        if self._marks_due:
            for req, marks in self._marks_due.items():
                req.held.marks = marks
            due = list(self._marks_due)
            writes.append(self.marks.entry(handles_of(due), None, list(self._marks_due.values())))
            self._marks_due.clear()
        return writes

    # Launching

    def _launch(self, choices: Choices, step: StepPlan) -> None:
        pages, queries, requests = self.pages, step.chunks, self.batch.requests
        ids = [req.ids(query) for req, query in zip(requests, queries.tolist(), strict=True)]
        ends = step.samples
        sampling = np.flatnonzero(ends).tolist()
        batch = self.batch.advance({"seq_lens": queries, "num_generated": step.samples.astype(int), "odd": 1})
        self.ages = self.ages + 1
        lens = np.array(batch.seq_lens.np)
        missing = pages_for(lens + 1, pages.page_size) - step.owned_pages
        if missing.sum() > pages.stats.free + pages.stats.pending:
            choices = attrs.evolve(choices, tries=False)
        extension = self.when_free(lambda: pages.extend(batch.slots, lens))
        plan = None
        if not choices.by_hand or any(prompt is not None for prompt in ids):
            plan = ForwardPlan.of(batch.slots, batch.seq_lens, queries, prompt_ids=ids, samples=ends, pages=pages)
        tried = self.when_free(lambda: pages.extend(batch.slots, lens + int(choices.tries)))
        self._pages_used.update(self._pages_of(requests))
        salts, nudges = self._draw(len(batch)), self._draw(len(batch)) if choices.nudged else [0] * len(batch)
        extras: dict[str, object] = {
            "salts": np.array(salts),
            "ends": np.cumsum(queries) - 1,
            "chosen": np.array(sampling, np.int64),
            "columns": np.arange(MAX_TOKENS),
            "weights": WEIGHTS,
            "tried": tried.locations.np,
        }
        writes = [extension.entry(), tried.entry(), *self._table_writes()]
        uploaded = batch.upload(writes=writes, extras=extras | dict({} if plan is None else plan.extras))
        if choices.nudged:
            with self.runtime.use(self.streams.arrivals):
                self.relay.publish(batch.slots, nudge=nudges)
        batch, results, done = self._forward(choices, batch, uploaded, plan, sampling)
        if choices.watched:
            with self.runtime.use(self.streams.audit):
                self._look("salts", [uploaded["salts"] * 2], [np.array(salts) * 2])
        outcomes = [
            forward(req, query, salt, nudge)
            for req, query, salt, nudge in zip(requests, queries.tolist(), salts, nudges, strict=True)
        ]
        self.batch = batch
        self._launched([requests[row] for row in sampling], [outcomes[row] for row in sampling], results, done)
        if choices.tries:
            pages.truncate(batch.slots, lens, after=done)
        prompts = [prompt is not None for prompt in ids]
        self._reached("a forward of prompts and decodes", any(prompts) and not all(prompts))
        self._reached("tokens taken back while a step writes them", choices.tries)

    def _launched(
        self, sampled: Sequence[OverlapRequest], outcomes: Sequence[Outcome], results: Prefetched | None, done: Fence
    ) -> None:
        self.launched += 1
        step = Step(self.launched, sampled, [req.num_generated for req in sampled], outcomes, results, done)
        for steps in (self.running, self._ahead, self.unread):
            steps.append(step)
        self._reached("two steps in flight", self.depth >= 2)
        for req, outcome in zip(sampled, outcomes, strict=True):
            req.held.token = outcome.token
            req.num_generated += 1
            req.in_flight += 1

    def _draw(self, n: int) -> list[int]:
        """Numbers that differ from step to step and from row to row: a constant would hide that it is read late."""
        self._drawn += 1
        return [(self._drawn * 7001 + row * 131 + 1) % PRIME for row in range(n)]

    # The forward: plain torch operations and launched kernels on the forward's stream; nothing waits on the host.

    def _forward(
        self, choices: Choices, batch: OverlapBatch, uploaded: Extras, plan: ForwardPlan | None, sampling: Sequence[int]
    ) -> tuple[OverlapBatch, Prefetched | None, Fence]:
        """One forward: the batch after it, its results if any request samples, and forward-done.

        Reads first the memory that the schedule made, and last that of the forward.
        """
        rt, relay = self.runtime, self.relay
        arrived, self._arrived = self._arrived, []
        with rt.use(self.streams.forward):
            parts = {name: self._read(name, batch, uploaded) for name in choices.readings}
            rows = parts.pop("tokens")
            total = functools.reduce(torch.add, parts.values())
            if plan is None:
                positions = batch.seq_lens.device - 1
                locs = rows.gather(1, positions[:, None]).view(-1).to(torch.int64)
                ids, sampled = relay.gather(batch.slots, "token"), batch.slots
            else:
                inputs = relay.resolve_forward_inputs(plan, uploaded, ids="token")
                ids, positions, sampled = inputs.input_ids, inputs.positions, inputs.sampled_slots
                if inputs.slot_mapping is None:
                    disagree("expected a plan with pages")
                locs = inputs.slot_mapping
            if choices.nudged:
                total = total + relay.gather(batch.slots, "nudge") * NUDGE
            for fence in arrived:
                rt.wait(fence)
            odd = batch.odd.device
            total = total + batch.last.device * LAST + odd * ODD
            total = total + ids.index_select(0, uploaded["ends"]) * ID
            kv = self.kv
            rt.launch(_write_kv, kv, locs, ids, positions, reads=(locs, ids, positions), writes=(kv,), name="write KV")
            if choices.tries:
                tried = uploaded["tried"]
                kv.index_copy_(0, tried, torch.stack((tried, tried + 1), dim=1))
            there = uploaded["columns"] < batch.seq_lens.device[:, None]
            held = (rows * there).to(torch.int64)  # beyond its tokens a request reads location 0, which is zero
            weights = uploaded["weights"]
            attended = rt.launch(_attend, kv, held, weights, reads=(kv, held, weights), name="attend", operations=3)
            slots = batch.slots.device
            states = self.states.memory
            state = states.index_select(0, slots)
            mix = (total + attended + state * STATE) % PRIME
            state = rt.launch(_next_state, state, mix, reads=(state, mix), name="next state")
            states.index_copy_(0, slots, state)
            log = torch.stack((state, attended), dim=1)
            results = self._publish(choices, batch, uploaded, sampling, sampled, mix, log) if sampling else None
            true_odd = MirroredTensor.from_pair(rt, batch.odd.np, odd - 1 + mix % 2, contract="upper_bound")
            batch = batch.replace(last=MirroredTensor.from_device(rt, mix), odd=true_odd)
            return batch, results, rt.record()

    def _read(self, name: str, batch: OverlapBatch, uploaded: Extras) -> torch.Tensor:
        """One of `READINGS`: int64[n], to be summed up; of "tokens" the rows [n, MAX_TOKENS] of the token table."""
        if name == "salts":
            return uploaded["salts"] * SALT
        if name == "columns":
            lens = batch.seq_lens.device * LENGTH
            return lens + batch.temperature.device.to(torch.int64) * TEMPERATURE
        if name == "ages":
            return self.ages.device * AGE
        slots = batch.slots.device
        table = self.marks if name == "marks" else self.tokens
        rows = table.device_for(batch.slots).index_select(0, slots)
        if name == "marks":
            rows = rows.sum(1) * MARK
        table.read_until(self.runtime.record())  # read-done: the next plan may write it
        return rows

    def _publish(
        self,
        choices: Choices,
        batch: OverlapBatch,
        uploaded: Extras,
        sampling: Sequence[int],
        sampled: Slots,
        mix: torch.Tensor,
        log: torch.Tensor,
    ) -> Prefetched:
        """Tokens for the next forward and the host, and logs for the host alone."""
        if len(sampling) < len(batch):
            chosen = uploaded["chosen"]
            mix, log = mix.index_select(0, chosen), log.index_select(0, chosen)
        self.relay.publish(sampled, token=mix, log=log)
        if choices.own_handles:
            sampled = handles_of([batch.requests[row] for row in sampling])
            _ = sampled.device  # uploaded here: an upload on the relay's stream would be over only when it is read
        with self.runtime.use(self.streams.schedule if choices.asked_aside else self.streams.forward):
            return self.relay.prefetch(sampled, "token", "log")

    # A stream that only looks

    def look_at_columns(self) -> None:
        """The columns of a batch that was not launched: they are uploaded here, device-only columns are gathered."""
        batch, ages = self.batch, self.ages
        with self.runtime.use(self.streams.audit):
            total = batch.seq_lens.device + 2 * ages.device + 3 * batch.last.device + 5 * batch.odd.device
            expected = batch.seq_lens.np + 2 * ages.np
            expected = expected + 3 * column(batch.requests, "last") + 5 * column(batch.requests, "odd")
            self._look("columns", [total, batch.slots.device], [expected, batch.slots.np])

    def look_at_tables(self) -> None:
        """Rows of the tables, which may be written again once this has read them."""
        batch = self.batch
        with self.runtime.use(self.streams.audit):
            slots = batch.slots.device
            rows = [table.device_for(batch.slots).index_select(0, slots) for table in (self.marks, self.tokens)]
            read_done = self.runtime.record()
            for table in (self.marks, self.tokens):
                table.read_until(read_done)
            marks = np.array([req.held.marks for req in batch.requests], np.int64)
            self._look("tables", rows, [marks, self.tokens.host_for(batch.slots)])

    def look_at_results(self, step: Step) -> None:
        """The device side of results that the host has read, from the relay's own stream."""
        if step.results is not None:
            with self.runtime.use(self.streams.audit):
                tokens, logs = (step.results[name] for name in ("token", "log"))
                total = tokens.device[:, None] + 2 * logs.device
                self._look("results", [total], [tokens.np[:, None] + 2 * logs.np])

    def look_at_leftovers(self) -> None:
        """All requests have left: marks are cleared, and slot, page and location 0 were never written."""
        with self.runtime.use(self.streams.audit):
            padding = torch.stack((self.kv[0].sum(), self.states.memory[0]))
            marks = self.marks.memory.sum(0)
            self._look("what is left", [padding, marks], [np.zeros(2, np.int64), np.zeros(MARKS, np.int64)])

    def _look(self, name: str, values: Sequence[torch.Tensor], expected: Sequence[Array]) -> None:
        self.looks.append(Look(self.runtime.download(values, name=name), expected))


def _first_state(request: OverlapRequest) -> int:
    return (request.number * 104_729 + request.num_generated) % PRIME


_ARRIVALS = st.sampled_from(list(Arrival))
_MAX_WAITING = 4
_STRIDE = 1237
"""From one number of `Choices` to the next in `busy_step`: it meets all of them, and neighbours are unlike."""


class OverlapMachine(Machine):
    """Requests arrive, run, hang up and finish, while the device is always a step behind."""

    NAME = "overlap"
    LAGS = True
    TARGETS = (
        "two steps in flight",
        "left while a step uses the row",
        "joined while a step is in flight",
        "a slot used again while a step is in flight",
        "a prebuilt request in a used slot",
        "a prebuilt request on used pages",
        "prebuilt KV handed to the forward",
        "a retracted request came back",
        "waited for a step that held what was needed",
        "tokens taken back while a step writes them",
        "a row rewritten while a step reads it",
        "a row written on two streams",
        "a row cleared on another stream",
        "a forward of prompts and decodes",
        "looked at while a step is in flight",
        "results read out of order",
        "results dropped unread",
        "results of a batch in another order",
    )

    _opened = False

    @initialize(size=st.integers(2, 4), page_size=st.integers(1, 3), spare=st.integers(0, 8), chunk=st.integers(2, 6))
    def begin(self, size: int, page_size: int, spare: int, chunk: int) -> None:
        self.open()
        num_pages = -(-MAX_TOKENS // page_size) + spare
        self.engine = OverlapEngine(self.rt, size, num_pages, page_size, chunk=chunk, reached=self.reached)
        self.numbers = 0
        self._opened = True

    def check(self) -> None:
        """Compares the host side at every level; at `full` checks every invariant. Never waits for the device."""
        engine = self.engine
        batch, ages = engine.batch, engine.ages
        lens = np.array([req.length for req in batch.requests], np.int64)
        agree_on(lens, np.array(batch.seq_lens.np), "lengths")
        agree_on(engine.pages.committed(batch.slots), np.array(batch.seq_lens.np), "committed tokens")
        agree_on(column(batch.requests, "age"), np.array(ages.np), "ages")
        agree(True, bool((batch.odd.np >= column(batch.requests, "odd")).all()), "bounds are bounds")
        agree(len(batch), engine.slots.stats.live, "live slots")
        agree(0, self.rt.counters.forced_syncs, "forced syncs")
        if levels.full:
            engine.slots.verify()
            engine.pages.verify()
            engine.relay.check("check")
            batch.check("check")

    def teardown(self) -> None:
        """Reads everything that is still in flight, unless the example has failed."""
        try:
            if self._opened and sys.exc_info()[1] is None:
                self._drain()
        finally:
            super().teardown()

    def _drain(self) -> None:
        """One more step shows the damage of the one before; then all requests leave, and nothing may be left."""
        engine = self.engine
        for _ in range(2):
            engine.waiting.clear()  # those that the first step retracts, too
            engine.step(Choices())
            for req in engine.batch.requests:
                req.aborted = True
        engine.look_at_leftovers()
        while engine.looks:
            engine.looks.pop(0).check()
        while engine.running:
            engine.wait()
        engine.slots.expect_idle()
        engine.pages.expect_idle()
        free = engine.slots.stats.free, engine.pages.stats.free
        agree((engine.slots.size, engine.pages.num_pages), free, "free slots and pages when idle")
        agree(0, self.rt.counters.forced_syncs, "forced syncs")

    # Rules

    @precondition(lambda self: len(self.engine.waiting) < _MAX_WAITING)
    @rule(
        n=st.integers(1, 2), prompt=st.integers(1, 6), answer=st.integers(1, 4), arrival=_ARRIVALS, marked=st.booleans()
    )
    def arrive(self, n: int, prompt: int, answer: int, arrival: Arrival, marked: bool) -> None:
        for _ in range(n):
            self._arrive(prompt, answer, arrival, marked)

    def _arrive(self, prompt: int, answer: int, arrival: Arrival, marked: bool, *, first: bool = False) -> None:
        self.numbers += 1
        ids = [self.numbers * 101 + at * 13 for at in range(prompt)]
        request = OverlapRequest(self.numbers, ids, answer + (arrival is not Arrival.PROMPT), arrival)
        if marked:
            request.marks = self._marks()
        if first:
            self.engine.waiting.appendleft(request)
        else:
            self.engine.waiting.append(request)

    def _marks(self) -> tuple[int, ...]:
        self.numbers += 1
        return tuple(self.numbers * 17 + at for at in range(MARKS))

    @rule()
    def busy_step(self) -> None:
        """A request arrives, each time in another way, and the engine steps, each time with other choices.

        Hypothesis takes this rule first, since it has no arguments: so even its simplest example is a busy one.
        """
        round_, odd = divmod(self.engine.launched, 2)
        if not odd and not self.engine.waiting:
            self._arrive(1 + round_ % 4, 2 + round_ % 2, list(Arrival)[round_ % len(Arrival)], round_ % 5 < 3)
        self.engine.step(Choices.numbered(_STRIDE * self.engine.launched))

    @rule(steps=st.lists(CHOICES, min_size=1, max_size=2))
    def run(self, steps: list[Choices]) -> None:
        for choices in steps:
            self.engine.step(choices)

    @rule(prompt=st.integers(1, 4), arrival=_ARRIVALS, marked=st.booleans(), steps=st.tuples(CHOICES, CHOICES, CHOICES))
    def step_finish_admit_step(
        self, prompt: int, arrival: Arrival, marked: bool, steps: tuple[Choices, Choices, Choices]
    ) -> None:
        """A short request runs to its end beside the others, and another takes its slot at once."""
        self._arrive(1, 1, Arrival.PROMPT, marked, first=True)
        self.engine.step(steps[0])
        self._arrive(prompt, 2, arrival, not marked, first=True)
        self.run([*steps[1:]])

    @precondition(lambda self: len(self.engine.batch) > 0)
    @rule(at=st.integers(0, 3), arrival=_ARRIVALS, steps=st.tuples(CHOICES, CHOICES))
    def abort_and_replace(self, at: int, arrival: Arrival, steps: tuple[Choices, Choices]) -> None:
        """A client hangs up while a step runs for it, and another request arrives."""
        self._running(at).aborted = True
        self._arrive(3, 2, arrival, True, first=True)
        self.run([*steps])

    def _running(self, at: int) -> OverlapRequest:
        request: OverlapRequest = self.engine.batch.requests[at % len(self.engine.batch)]
        return request

    @precondition(lambda self: len(self.engine.batch) > 0)
    @rule(n=st.integers(1, 2), prompt=st.integers(1, 4), arrival=_ARRIVALS, steps=st.tuples(CHOICES, CHOICES))
    def try_and_admit(self, n: int, prompt: int, arrival: Arrival, steps: tuple[Choices, Choices]) -> None:
        """Speculative pages of a step are given back at once, while others arrive and want pages."""
        self.engine.step(attrs.evolve(steps[0], tries=True))
        for _ in range(n):
            self._arrive(prompt, 2, arrival, False, first=True)
        self.engine.step(steps[1])

    @rule(arrival=_ARRIVALS, steps=st.tuples(CHOICES, CHOICES))
    def abandon(self, arrival: Arrival, steps: tuple[Choices, Choices]) -> None:
        """All clients hang up, the results in flight for them are never read, and another request arrives."""
        self.engine.step(steps[0])
        for req in self.engine.batch.requests:
            req.aborted = True
        self.engine.forget()
        self._arrive(2, 3, arrival, True, first=True)
        self.engine.step(steps[1])

    @rule(prompt=st.integers(3, 6), steps=st.tuples(CHOICES, CHOICES))
    def crowd(self, prompt: int, steps: tuple[Choices, Choices]) -> None:
        while len(self.engine.waiting) < _MAX_WAITING:
            self._arrive(prompt, 4, Arrival.PROMPT, False)
        self.run([*steps])

    @precondition(lambda self: len(self.engine.batch) > 0)
    @rule(
        at=st.integers(0, 3),
        streams=st.lists(st.sampled_from(["schedule", "arrivals", "upload"]), min_size=1, max_size=2),
        choices=CHOICES,
    )
    def rewrite_marks(self, at: int, streams: list[str], choices: Choices) -> None:
        """A row that the step in flight reads is written, perhaps twice, before the next step reads it."""
        req = self._running(at)
        for name in streams:
            stream = None if name == "upload" else getattr(self.engine.streams, name)
            self.engine.mark(req, self._marks(), stream)
        self.reached("a row rewritten while a step reads it", self.engine.depth > 0)
        self.reached("a row written on two streams", "arrivals" in streams and {*streams} != {"arrivals"})
        self.engine.step(choices)

    @precondition(lambda self: len(self.engine.batch) > 0)
    @rule(at=st.integers(0, 3), temperature=st.integers(1, 9), age=st.integers(0, 50))
    def retune(self, at: int, temperature: int, age: int) -> None:
        engine, held = self.engine, self._running(at).held
        row = at % len(engine.batch)
        engine.batch = engine.batch.update("temperature", [row], float(temperature))
        with self.rt.use(engine.streams.schedule):
            engine.ages = engine.ages.update([row], age)
        held.temperature, held.age = temperature, age

    @precondition(lambda self: len(self.engine.batch) > 0)
    @rule(memory=st.sampled_from(["columns", "tables", "rows in another order", "results"]), choices=CHOICES)
    def look(self, memory: str, choices: Choices) -> None:
        """Another stream reads the batch, tables or results; the next step goes on with the tensors that it made."""
        engine = self.engine
        if memory == "rows in another order":
            with self.rt.use(engine.streams.schedule):
                engine.reverse()
        if memory == "tables":
            engine.look_at_tables()
        elif memory == "results":
            if engine.unread:
                engine.look_at_results(engine.read(0))
        else:
            engine.look_at_columns()
        self.reached("looked at while a step is in flight", engine.depth > 0)
        engine.step(choices)

    @precondition(lambda self: bool(self.engine.looks))
    @rule(at=st.integers(0, 5))
    def read_a_look(self, at: int) -> None:
        """The host reads the findings of the audit stream, in any order."""
        self.engine.looks.pop(at % len(self.engine.looks)).check()

    @precondition(lambda self: len(self.engine.unread) > 0)
    @rule(steps=st.tuples(CHOICES, CHOICES))
    def read_out_of_order(self, steps: tuple[Choices, Choices]) -> None:
        """The newest results are read first; the oldest wait in their memory while others land."""
        for choices in steps:
            self.engine.step(attrs.evolve(choices, unread=True))
            if self.engine.unread:
                self.engine.read(len(self.engine.unread) - 1)

    @rule(n=st.integers(1, 6))
    def complete(self, n: int) -> None:
        if isinstance(self.rt, LateRuntime):
            self.rt.complete(n)

    @precondition(lambda self: self.engine.running)
    @rule()
    def wait(self) -> None:
        self.engine.wait()
