"""A small engine that overlaps, on several streams: the machine that races are looked for with.

Read it in this order:

    requests, model     what a request is, and what its tokens should be
    memory              pools, tables, KV, relay and streams of one example
    choices             how one step is run
    schedule, arrivals  the host's part: who runs, and how a request begins
    forward             the device's part
    engine, steps       the loop, and what is in flight
    audit               a stream that only looks
    machine             the rules
"""

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

from batchstate import levels
from batchstate._upload import Extras
from batchstate.batch import Batch
from batchstate.columns import device_only, host_list, mirrored, slot_column
from batchstate.forward.plan import ForwardPlan
from batchstate.future_map import FutureMap, Prefetched, relay_field
from batchstate.indices import Slots
from batchstate.kv.pages import Extension, PagePool
from batchstate.mirror import MirroredTensor
from batchstate.pools import SlotPool
from batchstate.runtime import CpuRuntime, Fence, PackedUpload, Runtime, Stream
from batchstate.runtime.memory import Download
from batchstate.tables import TableWrite
from batchstate.testing.fences import LateRuntime
from batchstate.testing.machine import Machine, agree, agree_on

# The requests of the overlap machine: what the engine keeps of each, and what the device should hold for it.

MOST_TOKENS = 12
"""Tokens that a request may have, one that is only tried included."""

MARKS = 2
"""Numbers in a request's row of the table of marks."""


class Way(Enum):
    """How a request arrives."""

    PROMPT = "prompt"
    """The forward computes the KV of its prompt."""
    WRITTEN = "written"
    """Prebuilt: its KV is written into its pages on the stream on which it arrives."""
    HANDED = "handed"
    """Prebuilt: its KV arrives on one stream, and is handed to the forward's, which writes it."""


class Running(Batch):
    """The requests that run, with the lengths that they have after the step."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    temperature = mirrored(torch.float32, pad=1.0)
    odd = mirrored(torch.int64, contract="upper_bound")  # steps with an odd mix, of which the host counts all
    last = device_only(torch.int64)  # the mix of the last step
    requests = host_list()


@final
@attrs.define(eq=False)
class OnDevice:
    """What the device holds for a request when all that was launched has run.

    Attributes:
        kv: the row of each token in KV memory.
        state: its row of the table of states.
        marks: its row of the table of marks.
        last, odd, age, temperature: its columns.
        token: its entry in the relay.
    """

    state: int
    kv: list[tuple[int, int]] = attrs.field(factory=list)
    marks: tuple[int, ...] = (0,) * MARKS
    last: int = 0
    odd: int = 0
    age: int = 0
    temperature: int = 1
    token: int = 0


@final
@attrs.define(eq=False, repr=False)
class Request:
    """One request.

    Attributes:
        number: names it.
        prompt: ids.
        answer: tokens that it wants.
        way: how it arrives the first time.
        marks: what its row of marks should hold; zeros are not written.
        handle: its slot, while it runs.
        fill: ids that are put in, or were when it arrived, before it decodes.
        sampled: tokens sampled, those in flight included.
        in_flight: steps that sampled for it and were not read.
        output: place in the answer -> token that the host has read.
        aborted: whether its client hung up.
        held: what the device holds for it, while it runs.
    """

    number: int
    prompt: Sequence[int]
    answer: int
    way: Way = Way.PROMPT
    marks: tuple[int, ...] = (0,) * MARKS
    handle: Slots | None = None
    fill: Sequence[int] = ()
    sampled: int = 0
    in_flight: int = 0
    output: dict[int, int] = attrs.field(factory=dict)
    aborted: bool = False
    held: OnDevice = attrs.field(factory=lambda: OnDevice(0))

    def __repr__(self) -> str:
        return f"<request {self.number}: {len(self.prompt)} ids, {self.sampled} of {self.answer} tokens>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would list the fields

    @property
    def length(self) -> int:
        """Tokens in KV memory after the last launched step."""
        return len(self.held.kv)

    @property
    def over(self) -> bool:
        """Whether it leaves before the next step."""
        return self.aborted or self.sampled >= self.answer

    @property
    def known(self) -> Sequence[int]:
        """All ids that the host knows, to be put in where its KV is not there."""
        return [*self.prompt, *(self.output[place] for place in range(self.sampled))]

    def query(self, chunk: int) -> int:
        """Ids that it puts in next, `chunk` of its prompt at most."""
        return min(chunk, len(self.fill) - self.length) if self.length < len(self.fill) else 1

    def ids(self, query: int) -> Sequence[int] | None:
        """The next ids as the host knows them, or None where the relay has the one."""
        return self.fill[self.length : self.length + query] if self.length < len(self.fill) else None


def handles_of(requests: Sequence[Request]) -> Slots:
    """The handles of requests that run, in order: fresh ones, whose device side nobody has made."""
    handles = [one.handle for one in requests]
    return Slots.cat([one for one in handles if one is not None])


# What a forward of the overlap machine computes, in Python: a checksum of everything that it reads.
#
# All numbers are integers below `PRIME`, so that host and device agree to the last bit. A value that is read too early,
# too late, or from somebody else's memory, changes the next token, and all that come after it.

PRIME = 999_983

SALT, LENGTH, TEMPERATURE, AGE, MARK, ID, NUDGE, LAST, ODD, STATE = 3, 11, 13, 19, 23, 29, 37, 41, 43, 47
"""What each number that a forward reads is multiplied by."""

WEIGHTS = np.arange(1, 2 * MOST_TOKENS + 1, dtype=np.int64).reshape(MOST_TOKENS, 2)
"""What the KV of each position is multiplied by, int64[MOST_TOKENS, 2]."""

_ROWS = WEIGHTS.tolist()


class Outcome(NamedTuple):
    """What a forward leaves for one request: its token, and what it logs for the host."""

    token: int
    log: tuple[int, int]


def kv_row(token: int, position: int) -> tuple[int, int]:
    """The KV of one token."""
    return (token * 31 + position * 17 + 5) % PRIME, (token * 7 + position * 3 + 1) % PRIME


def next_state(state: int, mix: int) -> int:
    """The state of a request after a forward."""
    return (53 * state + 59 * mix + 1) % PRIME


def forward(request: Request, query: int, salt: int, nudge: int) -> Outcome:
    """Runs one request: changes what the device holds for it, and returns what it left."""
    held = request.held
    ids = request.ids(query) or (held.token,)
    held.kv += [kv_row(token, len(held.kv) + at) for at, token in enumerate(ids)]
    held.age += 1
    attended = sum(one * k + two * v for (k, v), (one, two) in zip(held.kv, _ROWS, strict=False)) % PRIME
    mix = _mix(held, attended, ids[-1], salt, nudge)
    held.state = next_state(held.state, mix)
    held.last = mix
    held.odd += mix % 2
    return Outcome(mix, (held.state, attended))


def _mix(held: OnDevice, attended: int, last_id: int, salt: int, nudge: int) -> int:
    return (
        SALT * salt
        + LENGTH * len(held.kv)
        + TEMPERATURE * held.temperature
        + AGE * held.age
        + MARK * sum(held.marks)
        + ID * last_id
        + NUDGE * nudge
        + LAST * held.last
        + ODD * (held.odd + 1)  # the host's step counts until the forward has found out
        + STATE * held.state
        + attended
    ) % PRIME


def column(requests: Sequence[Request], name: str) -> npt.NDArray[Any]:
    """One number of what the device holds for each request, int64[n]."""
    return np.array([getattr(one.held, name) for one in requests], np.int64)


# The memory of the overlap machine: each piece made on another stream than those that use it.


@final
@attrs.frozen(eq=False)
class Streams:
    """The streams of the engine; the relay has one more, to the host.

    Attributes:
        schedule: plans are uploaded, table rows written, slots begun.
        forward: forwards.
        arrivals: what comes from outside: prebuilt requests, nudges.
        audit: looks at what the others hold, and tells the host.
        origin: what was current before. The relay is made on it, and nothing else ever happens there.
    """

    schedule: Stream
    forward: Stream
    arrivals: Stream
    audit: Stream
    origin: Stream

    @property
    def all(self) -> tuple[Stream, ...]:
        """All of them."""
        return self.schedule, self.forward, self.arrivals, self.audit, self.origin


@final
class Memory:
    """Pools, tables, KV memory and relay of one example.

    Whoever first uses a piece on another stream than the one that made it zero has to wait for that one.

    Args:
        runtime: the device.
        size: slots.
        num_pages: pages.
        page_size: tokens a page.

    Attributes:
        runtime: the device.
        streams: of the engine.
        slots, pages: who owns what.
        tokens: [slot, position] -> token; the library orders who reads and writes it.
        marks: [slot, MARKS], like that, but whole rows are rewritten and cleared.
        states: [slot], the engine's own. Nothing orders a slot's next owner behind its last but the fence of the free.
        relay: tokens and logs of forwards, and nudges for them.
    """

    def __init__(self, runtime: Runtime, size: int, num_pages: int, page_size: int) -> None:
        self.runtime = runtime
        self.slots = SlotPool(runtime, size)
        fields = {
            "token": relay_field(torch.int64, read_by="both", non_negative=True),
            "log": relay_field(torch.int64, (2,), read_by="host"),
            "nudge": relay_field(torch.int64),
        }
        self.relay = FutureMap(self.slots, fields)
        schedule, forward, arrivals, audit = (
            runtime.stream(name) for name in ("schedule", "forward", "arrivals", "audit")
        )
        self.streams = Streams(schedule, forward, arrivals, audit, origin=runtime.current_stream)
        with runtime.use(self.streams.schedule):
            self.tokens = self.slots.table("req_to_token", (MOST_TOKENS,), holds="location", host=True)
            self.marks = self.slots.table("marks", (MARKS,), torch.int64, host=True)
        with runtime.use(self.streams.arrivals):
            self.states = self.slots.table("states", (), torch.int64)
        self.pages = PagePool(
            runtime,
            self.slots,
            num_pages,
            page_size,
            max_tokens_per_request=MOST_TOKENS,
            req_to_token=self.tokens,
        )
        with runtime.use(self.streams.forward):
            self._kv = runtime.device_zeros((self.pages.location_capacity, 2), torch.int64)
            self._zeroed = runtime.record()
        self._synchronised: set[object] = set()

    @property
    def kv(self) -> torch.Tensor:
        """int64[token, 2], behind its being made."""
        return self.runtime.use_on_current_stream(
            self._kv, self.streams.forward, self._zeroed, synchronised=self._synchronised
        )


# How one step of the overlap machine is run: an engine of another kind each time.

READINGS = ("salts", "columns", "ages", "tokens", "marks")
"""What a forward reads at its entry, each handed over from the stream of the schedule in a way of its own."""


@final
@attrs.frozen(repr=False)
class Choices:
    """How a step is run.

    Attributes:
        first: which of `READINGS` the forward begins with: what comes first is covered by no other wait.
        nudged: another stream seeds numbers for this forward.
        tries: each request writes KV behind its last token, and its tokens beyond are taken back at once.
        by_hand: a forward of decodes gathers its inputs itself, and looks places up in the token table.
        own_handles: results are asked for by handles that hold no memory of the step.
        unread: results are left unread a while.
        watched: another stream looks at what crossed with the step.
        clears_aside: rows of requests that leave are cleared on another stream.
    """

    first: int = 0
    nudged: bool = False
    tries: bool = False
    by_hand: bool = False
    own_handles: bool = False
    unread: bool = False
    watched: bool = False
    clears_aside: bool = False

    def __repr__(self) -> str:
        changed = [one.name for one in attrs.fields(Choices) if getattr(self, one.name) != one.default]
        return f"Choices({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def readings(self) -> tuple[str, ...]:
        """`READINGS` in the order of this step."""
        return READINGS[self.first :] + READINGS[: self.first]

    @classmethod
    def numbered(cls, number: int) -> "Choices":
        """The way of that number; 0 is the plainest."""
        digits = []
        for options in _OPTIONS:
            number, digit = divmod(number, options)
            digits.append(digit)
        first, nudged, by_hand, own_handles, clears_aside, unread, tries, watched = digits
        return cls(
            first=first,
            nudged=bool(nudged),
            tries=tries == _SELDOM - 1,
            by_hand=bool(by_hand),
            own_handles=bool(own_handles),
            unread=bool(unread),
            watched=watched == _SELDOM - 1,
            clears_aside=bool(clears_aside),
        )


_SELDOM = 4
_OPTIONS = (len(READINGS), 2, 2, 2, 2, 2, _SELDOM, _SELDOM)
_ALL = math.prod(_OPTIONS)

CHOICES = st.integers(0, _ALL - 1).map(Choices.numbered)
"""One number each: drawing many is what makes examples slow, and their programs long."""

# The device's part of a step: plain torch operations and launched kernels on the forward's stream; nobody waits.
#
# Everything that a forward reads ends up in its tokens, in the sums of `overlap_model`.


@final
@attrs.frozen(eq=False)
class Work:
    """What the schedule hands over to one forward.

    Attributes:
        choices: how it is run.
        batch: the requests.
        ages: steps of each, with this one.
        uploaded: what crossed with the batch.
        plan: of its inputs; None where the forward gathers them itself.
        sampling: which requests sample.
        came: fences behind what arrived for them on another stream.
    """

    choices: Choices
    batch: Running
    ages: MirroredTensor
    uploaded: Extras
    plan: ForwardPlan | None
    sampling: tuple[int, ...]
    came: tuple[Fence, ...]


@final
@attrs.frozen(eq=False)
class Launched:
    """A forward on its way.

    Attributes:
        batch: the requests as they are after it.
        results: tokens and logs, on their way to the host; None where nobody samples.
        done: forward-done.
    """

    batch: Running
    results: Prefetched | None
    done: Fence


@final
@attrs.frozen(eq=False)
class _Inputs:
    """int64[t] ids, positions and places in KV memory, and what results are published by."""

    ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    sampled_slots: Slots


@final
class Forward:
    """Launches forwards over the memory of one engine."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._runtime = memory.runtime

    def run(self, work: Work) -> Launched:
        """One forward. What is handed over is read first, each in its own way; what is the forward's own comes last."""
        memory, runtime, batch = self._memory, self._runtime, work.batch
        with runtime.use(memory.streams.forward):
            total, rows = self._read(work)
            inputs = self._inputs(work, rows)
            if work.choices.nudged:
                total = total + memory.relay.gather(batch.slots, "nudge") * NUDGE
            for fence in work.came:
                runtime.wait(fence)
            odd = batch.odd.device
            total = total + batch.last.device * LAST + odd * ODD
            total = total + inputs.ids.index_select(0, work.uploaded["ends"]) * ID
            attended = self._attend(work, rows, inputs)
            slots = batch.slots.device
            states = memory.states.device
            state = states.index_select(0, slots)
            mix = (total + attended + state * STATE) % PRIME
            state = runtime.launch(_next_state, state, mix, reads=(state, mix), name="next state")
            states.index_copy_(0, slots, state)
            results = self._leave(work, inputs, mix, torch.stack((state, attended), dim=1))
            true_odd = MirroredTensor.from_pair(runtime, batch.odd.np, odd - 1 + mix % 2, contract="upper_bound")
            batch = batch.replace(last=MirroredTensor.from_device(runtime, mix), odd=true_odd)
            return Launched(batch, results, runtime.record())

    def _read(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """What the schedule hands over: a sum int64[n], and the rows [n, MOST_TOKENS] of the token table."""
        memory, batch = self._memory, work.batch
        parts: list[torch.Tensor] = []
        rows: torch.Tensor | None = None
        for name in work.choices.readings:
            if name == "salts":
                parts.append(work.uploaded["salts"] * SALT)
            elif name == "columns":
                parts.append(batch.seq_lens.device * LENGTH)
                parts.append(batch.temperature.device.to(torch.int64) * TEMPERATURE)
            elif name == "ages":
                parts.append(work.ages.device * AGE)
            elif name == "marks":
                slots = batch.slots.device
                parts.append(memory.marks.device.index_select(0, slots).sum(1) * MARK)
                memory.marks.read_until(self._runtime.record())
            else:
                slots = batch.slots.device
                rows = memory.tokens.device.index_select(0, slots)
                memory.tokens.read_until(self._runtime.record())  # read-done: the next plan may write it
        assert rows is not None
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total, rows

    def _inputs(self, work: Work, rows: torch.Tensor) -> _Inputs:
        batch, relay = work.batch, self._memory.relay
        if work.plan is None:
            positions = batch.seq_lens.device - 1
            places = rows.gather(1, positions[:, None]).view(-1).to(torch.int64)
            return _Inputs(relay.gather(batch.slots, "token"), positions, places, batch.slots)
        inputs = relay.resolve_forward_inputs(work.plan, work.uploaded, ids="token")
        assert inputs.slot_mapping is not None  # the plan has pages
        return _Inputs(inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.sampled_slots)

    def _attend(self, work: Work, rows: torch.Tensor, inputs: _Inputs) -> torch.Tensor:
        """Writes the KV of the new tokens, and reads that of all: int64[n]."""
        runtime, kv = self._runtime, self._memory.kv
        ids, positions, places = inputs.ids, inputs.positions, inputs.places
        runtime.launch(
            _write_kv, kv, places, ids, positions, reads=(places, ids, positions), writes=(kv,), name="write KV"
        )
        if work.choices.tries:
            tried = work.uploaded["tried"]
            kv.index_copy_(0, tried, torch.stack((tried, tried + 1), dim=1))
        there = work.uploaded["columns"] < work.batch.seq_lens.device[:, None]
        known = (rows * there).to(torch.int64)  # beyond its tokens a request reads token 0, which is zero
        weights = work.uploaded["weights"]
        return runtime.launch(_attend, kv, known, weights, reads=(kv, known, weights), name="attend", operations=3)

    def _leave(self, work: Work, inputs: _Inputs, mix: torch.Tensor, log: torch.Tensor) -> Prefetched | None:
        """Tokens for the next forward and the host, and logs for the host alone."""
        if not work.sampling:
            return None
        if len(work.sampling) < len(work.batch):
            chosen = work.uploaded["chosen"]
            mix, log = mix.index_select(0, chosen), log.index_select(0, chosen)
        relay = self._memory.relay
        relay.publish(inputs.sampled_slots, token=mix, log=log)
        asked = inputs.sampled_slots
        if work.choices.own_handles:
            asked = handles_of([work.batch.requests[row] for row in work.sampling])
            _ = asked.device  # crosses here: what the relay's stream uploads would be over only when it is read
        return relay.prefetch(asked, "token", "log")


def _write_kv(kv: torch.Tensor, places: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> None:
    keys = (ids * 31 + positions * 17 + 5) % PRIME
    values = (ids * 7 + positions * 3 + 1) % PRIME
    kv.index_copy_(0, places, torch.stack((keys, values), dim=1))


def _attend(kv: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64[n]: the KV at `places` [n, MOST_TOKENS], weighted by position."""
    found = kv.index_select(0, places.view(-1)).view(-1, MOST_TOKENS, 2)
    return (found * weights).sum((1, 2)) % PRIME


def _next_state(state: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    return (state * 53 + mix * 59 + 1) % PRIME


# Steps that the overlap machine has launched: which of them may still run, and which the host has not read.

Reached = Callable[[str, bool], None]
"""Counts an interesting state, if it is there."""

MOST_UNREAD = 4
"""Steps whose results may be left unread; how many may run is a matter of fences, and less."""


@final
@attrs.frozen(eq=False)
class Step:
    """A launched step.

    Attributes:
        number: from 1.
        requests: those that sampled.
        places: in the answer of each.
        outcomes: what the model says of each.
        results: what the device says; None where nobody samples.
        done: forward-done.
    """

    number: int
    requests: Sequence[Request]
    places: Sequence[int]
    outcomes: Sequence[Outcome]
    results: Prefetched | None
    done: Fence


@final
@attrs.frozen(eq=False)
class _Closed:
    """A step of the runtime that is planned and launched: what each stream had to do by then."""

    ends: Sequence[Fence]
    launched: int


@final
class Steps:
    """Launched steps, oldest first.

    Attributes:
        unread: whose results the host has not read.
        launched: how many were ever launched.
    """

    def __init__(self, memory: Memory, reached: Reached) -> None:
        self._runtime = memory.runtime
        self._streams = memory.streams.all
        self._reached = reached
        self._closed: deque[_Closed] = deque()
        self._running: deque[Step] = deque()  # that may not be over
        self._ahead: list[Step] = []  # of which the host has seen no end, by waiting
        self.unread: list[Step] = []
        self.launched = 0

    @property
    def depth(self) -> int:
        """Launched steps of which the host does not know whether they are over.

        A device that is asked may be quick, which says nothing, and a host that asked knows more than it should.
        """
        asks = isinstance(self._runtime, LateRuntime)
        return sum(not (asks and one.done.query()) for one in self._ahead)

    @property
    def last(self) -> Fence | None:
        """Behind everything that was launched, or None before that."""
        return self._running[-1].done if self._running else None

    @property
    def running(self) -> bool:
        """Whether the host could wait for something."""
        return bool(self._running)

    def begin(self) -> None:
        """The next step of the runtime begins, once those are over that would make it run deeper than it declares."""
        if self.launched:
            self._closed.append(_Closed([self._runtime.record(one) for one in self._streams], self.launched))
        while len(self._closed) >= self._runtime.steps_in_flight:
            closed = self._closed.popleft()
            for fence in closed.ends:
                if not fence.query():
                    fence.wait()
            self._seen(closed.launched)
            while self._running and self._running[0].number <= closed.launched:
                self._running.popleft()
        self._runtime.next_step()

    def add(self, step: Step) -> None:
        """A step was launched."""
        self.launched = step.number
        self._running.append(step)
        self._ahead.append(step)
        self.unread.append(step)
        self._reached("two steps in flight", self.depth >= 2)

    def wait(self) -> None:
        """The host waits for the oldest forward that may run."""
        step = self._running.popleft()
        if not step.done.query():
            step.done.wait()
        self._seen(step.number)

    def read_all_but(self, newest: int) -> None:
        """Reads results, oldest first."""
        while len(self.unread) > newest:
            self.read(0)

    def read(self, at: int) -> Step:
        """Reads the results of one step, waits for that one if it must, and returns it.

        Raises:
            DisagreementError: the device has computed something else than the model.
        """
        step = self.unread.pop(at)
        self._reached("results read out of order", at > 0)
        if step.results is not None:
            tokens, logs = (np.array(step.results[name].np) for name in ("token", "log"))
            agree_on(_column(step.outcomes, "token"), tokens, f"tokens of step {step.number}")
            agree_on(_column(step.outcomes, "log"), logs, f"logs of step {step.number}")
            self._seen(step.number)
            for one, place, token in zip(step.requests, step.places, tokens.tolist(), strict=True):
                one.output[place] = token
                one.in_flight -= 1
        return step

    def forget(self) -> None:
        """Nobody wants the results of steps all of whose requests hung up: their memory goes back by itself."""
        for step in [one for one in self.unread if all(request.aborted for request in one.requests)]:
            self.unread.remove(step)
            for one in step.requests:
                one.in_flight -= 1
            self._reached("results that nobody reads", step.results is not None)

    def _seen(self, number: int) -> None:
        self._ahead = [one for one in self._ahead if one.number > number]


def _column(outcomes: Sequence[Outcome], name: str) -> npt.NDArray[Any]:
    return np.array([getattr(one, name) for one in outcomes], np.int64)


# A stream that looks at what the others hold, and tells the host later: it waits for all, and nobody waits for it.

Array = npt.NDArray[Any]


@final
@attrs.frozen(eq=False)
class Look:
    """What was looked at, on its way to the host, and what should be there."""

    download: Download
    expected: Sequence[Array]

    def check(self) -> None:
        """Reads it.

        Raises:
            DisagreementError: the host finds something else.
        """
        for place, (expected, found) in enumerate(zip(self.expected, self.download.resolve(), strict=True)):
            agree_on(expected, found, f"{self.download.name}, array {place}")


@final
class Audit:
    """Looks, and keeps what the host has not read.

    Attributes:
        unread: oldest first.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._runtime = memory.runtime
        self.unread: list[Look] = []

    def columns(self, batch: Running, ages: MirroredTensor) -> None:
        """The columns of a batch that was not launched: they cross here, and what only the device has is gathered."""
        with self._runtime.use(self._memory.streams.audit):
            total = batch.seq_lens.device + 2 * ages.device + 3 * batch.last.device + 5 * batch.odd.device
            expected = batch.seq_lens.np + 2 * ages.np
            expected = expected + 3 * column(batch.requests, "last") + 5 * column(batch.requests, "odd")
            self._tell("columns", [total, batch.slots.device], [expected, batch.slots.np])

    def tables(self, batch: Running) -> None:
        """Rows of the tables, which may be written again once this has read them."""
        tokens, marks = self._memory.tokens, self._memory.marks
        with self._runtime.use(self._memory.streams.audit):
            slots = batch.slots.device
            rows = [table.device.index_select(0, slots) for table in (marks, tokens)]
            read_done = self._runtime.record()
            for table in (marks, tokens):
                table.read_until(read_done)
            assert tokens.host is not None
            expected = np.array([one.held.marks for one in batch.requests], np.int64)
            self._tell("tables", rows, [expected, tokens.host[batch.slots.np]])

    def extras(self, uploaded: Extras, salts: Array) -> None:
        """What crossed with a step."""
        with self._runtime.use(self._memory.streams.audit):
            self._tell("salts", [uploaded["salts"] * 2], [salts * 2])

    def results(self, step: Step) -> None:
        """The device side of results that the host has read, from the relay's own stream."""
        if step.results is not None:
            with self._runtime.use(self._memory.streams.audit):
                tokens, logs = (step.results[name] for name in ("token", "log"))
                total = tokens.device[:, None] + 2 * logs.device
                self._tell("results", [total], [tokens.np[:, None] + 2 * logs.np])

    def what_is_left(self) -> None:
        """When everybody has gone: marks are cleared, and nobody wrote for slot, page or token 0."""
        memory = self._memory
        with self._runtime.use(memory.streams.audit):
            padding = torch.stack((memory.kv[0].sum(), memory.states.device[0]))
            marks = memory.marks.device.sum(0)
            nothing = np.zeros(2, np.int64)
            self._tell("what is left", [padding, marks], [nothing, np.zeros(MARKS, np.int64)])

    def read(self, at: int) -> None:
        """The host reads one."""
        self.unread.pop(at).check()

    def _tell(self, what: str, found: Sequence[torch.Tensor], expected: Sequence[Array]) -> None:
        self.unread.append(Look(self._runtime.download(found, name=what), expected))


# How requests begin: their slot's state is set on the stream that brings them, which waits for no forward.
#
# That is allowed because a slot changes hands only when the last forward of its owner is done. Nothing else orders the
# two: a slot or a page that is given out too early is written here while a forward still uses it.


@final
class Arrivals:
    """Begins requests that have slots.

    Attributes:
        writes: rows of the token table that ride in the next upload.
        came: fences of what the next forward has to wait for.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._runtime = memory.runtime
        self.writes: list[TableWrite] = []
        self.came: list[Fence] = []

    def begin(self, requests: Sequence[Request]) -> Running:
        """Requests whose prompt the forward computes begin on the current stream, which uploads the step."""
        for one in requests:
            one.held = OnDevice(_first_state(one))
            one.fill = one.known
        batch, _ = self._begun(requests)
        return batch

    def begin_prebuilt(self, request: Request) -> Running:
        """A request that arrives with its KV and a token begins where it arrives."""
        memory, runtime, slot = self._memory, self._runtime, handles_of([request])
        token = (request.number * 7919 + 11) % PRIME
        held = request.held = OnDevice(_first_state(request), token=token, last=token, marks=request.marks)
        held.kv = [kv_row(one, at) for at, one in enumerate(request.prompt)]
        request.output[0], request.sampled, request.fill = token, 1, request.prompt
        with runtime.use(memory.streams.arrivals):
            batch, crossed = self._begun([request], np.array(held.kv, np.int64))
            extension = memory.pages.extend(slot, len(request.prompt))
            if request.way is Way.WRITTEN:
                _put_kv(memory.kv, extension.locations.device, crossed.view(3))
            came = runtime.record()
            self.came.append(came)
            self._note(request, slot, extension)
            memory.relay.publish(slot, token=[token])
        if request.way is Way.HANDED:
            with runtime.use(memory.streams.forward):
                rows = runtime.use_on_current_stream(crossed.view(3), memory.streams.arrivals, came)
                _put_kv(memory.kv, extension.locations.device, rows)
        request.way = Way.PROMPT  # should it come again: its KV is then gone
        return batch

    def _begun(self, requests: Sequence[Request], *more: np.ndarray) -> tuple[Running, PackedUpload]:
        """The rows of a batch, made on the current stream, which sets the states; and `more` in the same copy."""
        handles, states = handles_of(requests), self._memory.states.device
        values = [np.array([getattr(one.held, name) for one in requests], np.int64) for name in ("state", "last")]
        crossed = self._runtime.upload([handles.np, *values, *more])
        states.index_copy_(0, crossed.view(0), crossed.view(1))
        batch = Running.build(
            self._runtime,
            slots=handles,
            seq_lens=[one.length for one in requests],
            temperature=[float(one.held.temperature) for one in requests],
            odd=[0] * len(requests),
            last=crossed.view(2),
            requests=list(requests),
        )
        return batch, crossed

    def _note(self, request: Request, slot: Slots, extension: Extension) -> None:
        """Its tokens go into the table here, or with the step's upload; its marks here."""
        if request.number % 2:
            self._memory.tokens.write(extension.slots, extension.positions, extension.locations)
        else:
            self.writes.append(extension.entry())
        if any(request.marks):
            self._memory.marks.write(slot, None, [request.marks])


def _put_kv(kv: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    kv.index_copy_(0, places, rows)


def _first_state(request: Request) -> int:
    return (request.number * 104_729 + request.sampled) % PRIME


# Who runs in the next step of the overlap machine: rows leave, are retracted, and join, while a forward uses them.

Ints = npt.NDArray[np.int64]


@final
class Schedule:
    """The running requests and those that wait.

    Attributes:
        batch: the running requests, as they are after the last launched step.
        ages: steps of each; a vector of its own beside the batch, moved as the batch is.
        waiting: requests without a slot, first come first served.
        arrivals: how those begin that get one.
    """

    def __init__(self, memory: Memory, steps: Steps, chunk: int, reached: Reached) -> None:
        self._memory = memory
        self._steps = steps
        self._chunk = chunk
        self._reached = reached
        self.arrivals = Arrivals(memory)
        self.waiting: deque[Request] = deque()
        self.batch = Running.empty(memory.runtime)
        self.ages = MirroredTensor.from_host(memory.runtime, np.zeros(0, np.int64), name="ages")
        self._marks_due: dict[Request, tuple[int, ...]] = {}  # to be written with the next upload
        self._retracted: list[Request] = []
        self._pages_used: set[int] = set()

    def plan(self, choices: Choices) -> None:
        """Brings the batch up to date, on the current stream."""
        self._leave(choices)
        if not self._make_room(choices):
            self._admit(choices)

    @property
    def queries(self) -> Ints:
        """Ids that each running request puts in next, int64[n]."""
        return np.array([one.query(self._chunk) for one in self.batch.requests], np.int64)

    # Leaving

    def _leave(self, choices: Choices) -> None:
        leaves = np.array([one.over for one in self.batch.requests], np.bool_)
        if leaves.any():
            self._reached("left while a step uses the row", self._steps.depth > 0)
            self._give_back(leaves, choices)

    def _give_back(self, leaves: npt.NDArray[np.bool_], choices: Choices) -> Sequence[Request]:
        """Takes rows out of the batch; their slots and pages are free behind the last launched forward."""
        memory, leaving = self._memory, self.batch.filter(leaves)
        marked = [row for row, one in enumerate(leaving.requests) if any(one.held.marks)]
        if marked:
            stream = memory.streams.arrivals if choices.clears_aside else memory.streams.schedule
            with memory.runtime.use(stream):
                memory.marks.clear(leaving.slots.filter(marked))
            self._reached("a row cleared on another stream", choices.clears_aside)
        memory.pages.release_requests(leaving.slots, after=self._steps.last)
        self.batch, self.ages = self.batch.filter(~leaves), self.ages.filter(~leaves)
        for one in leaving.requests:
            self._marks_due.pop(one, None)
            one.handle = None
        return leaving.requests

    def reorder(self) -> None:
        """The rows in the opposite order; what only the device has is gathered by whoever reads it first."""
        backwards = np.arange(len(self.batch))[::-1]
        self.batch, self.ages = self.batch.filter(backwards), self.ages.filter(backwards)

    # Pages

    def _make_room(self, choices: Choices) -> int:
        """Lets the youngest requests give their pages back until the others can grow; how many had to."""
        retracted = 0
        while (lacking := self._lacking(choices) - self._memory.pages.stats.free) > 0:
            if self._steps.running and (len(self.batch) == 1 or self._memory.pages.stats.pending >= lacking):
                self._reached("waited for a step that held what was needed", True)
                self._steps.wait()
                continue
            youngest = self._give_back(np.arange(len(self.batch)) == len(self.batch) - 1, choices)
            self.waiting.extendleft(youngest)
            self._retracted += youngest
            retracted += 1
        return retracted

    def _lacking(self, choices: Choices) -> int:
        """Pages that the running requests need for the next step."""
        if not len(self.batch):
            return 0
        size, pages = self._memory.pages.page_size, self._memory.pages
        wanted = -(-(self.batch.seq_lens.np + self.queries + int(choices.tries)) // size)
        return int(np.maximum(wanted - pages.allocated(self.batch.slots) // size, 0).sum())

    # Joining

    def _admit(self, choices: Choices) -> None:
        if not len(self.batch) and self.waiting:
            while self._steps.running and not self._fit(choices):
                self._steps.wait()
        joining = self._fit(choices)
        if joining:
            for one in joining:
                self.waiting.remove(one)
            self._join(joining)

    def _fit(self, choices: Choices) -> list[Request]:
        """The first of those that wait for which there is room now; who has results in flight waits for these."""
        slots, pages = self._memory.slots.stats.free, self._memory.pages.stats.free - self._lacking(choices)
        size, fit = self._memory.pages.page_size, list[Request]()
        for one in self.waiting:
            if one.in_flight:
                continue
            tokens = len(one.known) + (one.way is not Way.PROMPT) + int(choices.tries)
            needed = -(-tokens // size)
            if slots < 1 or needed > pages:
                break
            fit.append(one)
            slots, pages = slots - 1, pages - needed
        return fit

    def _join(self, joining: Sequence[Request]) -> None:
        memory, in_flight = self._memory, self._steps.depth > 0
        taken = memory.slots.take(len(joining))
        for one, slot in zip(joining, taken.split([1] * len(joining)), strict=True):
            one.handle = slot
        used = [one for one in joining if in_flight and one.handle is not None and one.handle.generations[0] > 1]
        prebuilt = [one for one in joining if one.way is not Way.PROMPT]
        prompts = [one for one in joining if one.way is Way.PROMPT]
        self._reached("a slot used again while a step is in flight", bool(used))
        self._reached("a prebuilt request in a used slot", any(one in prebuilt for one in used))
        self._reached("prebuilt KV handed to the forward", any(one.way is Way.HANDED for one in joining))
        self._reached("a retracted request came back", any(one in self._retracted for one in joining))
        joined = [self.arrivals.begin(prompts)] if prompts else []
        joined += [self.arrivals.begin_prebuilt(one) for one in prebuilt]
        self._marks_due.update({one: one.marks for one in prompts if any(one.marks)})
        self._reached("joined while a step is in flight", in_flight and len(self.batch) > 0)
        for batch in joined:
            self.batch = self.batch.merge(batch)
        self.ages = self.ages.merge(MirroredTensor.from_host(memory.runtime, np.zeros(len(joining), np.int64)))
        written = self._pages_of(prebuilt)
        self._reached("a prebuilt request on used pages", in_flight and not self._pages_used.isdisjoint(written))

    def grew(self) -> None:
        """The running requests have the pages that they have now."""
        self._pages_used.update(self._pages_of(self.batch.requests))

    def _pages_of(self, requests: Sequence[Request]) -> list[int]:
        if not requests:
            return []
        pages: list[int] = self._memory.pages.page_table[handles_of(requests).np].reshape(-1).tolist()
        return [page for page in pages if page]

    # Marks

    def mark(self, one: Request, marks: tuple[int, ...], stream: Stream | None) -> None:
        """Another row of marks for a running request, at once on a stream, or with the next upload."""
        one.marks = marks
        if stream is None:
            self._marks_due[one] = marks
            return
        self._marks_due.pop(one, None)
        one.held.marks = marks
        with self._memory.runtime.use(stream):
            self._memory.marks.write(handles_of([one]), None, [marks])

    def writes(self) -> list[TableWrite]:
        """What rides in the next upload besides the tokens of the step."""
        writes, self.arrivals.writes = self.arrivals.writes, []
        if self._marks_due:
            for one, marks in self._marks_due.items():
                one.held.marks = marks
            values = list(self._marks_due.values())
            writes.append(self._memory.marks.entry(handles_of(list(self._marks_due)), None, values))
            self._marks_due.clear()
        return writes


# The engine of the overlap machine: it launches a step before it reads the one before, as in any engine that
# overlaps.
#
# One step: rows leave and join, all grow, one upload, one forward, and the results of an older step are read. What
# leaves is freed behind the last launched forward. The host waits for the step that runs only where it needs what
# that holds.


@final
class Engine:
    """Serves requests.

    Args:
        memory: of the example.
        chunk: ids of a prompt that one step takes.
        reached: hears of interesting states.

    Attributes:
        schedule: who runs.
        steps: launched and perhaps running, or unread.
        audit: looks at everything from a stream of its own.
    """

    def __init__(self, memory: Memory, chunk: int, reached: Reached) -> None:
        self._memory = memory
        self._runtime = memory.runtime
        self._reached = reached
        self._forward = Forward(memory)
        self._drawn = 0
        self.steps = Steps(memory, reached)
        self.schedule = Schedule(memory, self.steps, chunk, reached)
        self.audit = Audit(memory)

    def step(self, choices: Choices) -> bool:
        """Plans and launches a step, then reads older ones. Whether anybody runs."""
        self.steps.begin()
        with self._runtime.use(self._memory.streams.schedule):
            self.schedule.plan(choices)
            runs = len(self.schedule.batch) > 0
            if runs:
                self._launch(choices)
        if not choices.unread:
            self.steps.read_all_but(self._runtime.steps_in_flight - 1 if runs else 0)
        self.steps.read_all_but(MOST_UNREAD)
        while len(self.audit.unread) > MOST_UNREAD:
            self.audit.read(0)
        return runs

    def _launch(self, choices: Choices) -> None:
        """Everybody grows; one upload; the forward; and what was only tried is taken back."""
        schedule, pages = self.schedule, self._memory.pages
        queries, requests = schedule.queries, schedule.batch.requests
        ids = [one.ids(query) for one, query in zip(requests, queries.tolist(), strict=True)]
        ends = [one.length + query >= len(one.fill) for one, query in zip(requests, queries.tolist(), strict=True)]
        sampling = tuple(row for row, samples in enumerate(ends) if samples)
        batch = schedule.batch.advance({"seq_lens": queries, "odd": 1})
        schedule.ages = schedule.ages + 1
        lens = np.array(batch.seq_lens.np)
        extension = pages.extend(batch.slots, lens + int(choices.tries))
        schedule.grew()
        plan = None
        if not choices.by_hand or any(one is not None for one in ids):
            plan = ForwardPlan.of(batch.slots, batch.seq_lens, queries, prompt_ids=ids, samples=ends, pages=pages)
        salts, nudges = self._draw(len(batch)), self._draw(len(batch)) if choices.nudged else [0] * len(batch)
        extras: dict[str, object] = {
            "salts": np.array(salts),
            "ends": np.cumsum(queries) - 1,
            "chosen": np.array(sampling, np.int64),
            "columns": np.arange(MOST_TOKENS),
            "weights": WEIGHTS,
            "tried": self._places_behind(batch, lens) if choices.tries else np.zeros(0, np.int64),
        }
        writes = [extension.entry(), *schedule.writes()]
        uploaded = batch.upload(writes=writes, extras=extras | dict({} if plan is None else plan.extras))
        if choices.nudged:
            with self._runtime.use(self._memory.streams.arrivals):
                self._memory.relay.publish(batch.slots, nudge=nudges)
        came, schedule.arrivals.came = tuple(schedule.arrivals.came), []
        work = Work(choices, batch, schedule.ages, uploaded, plan, sampling, came)
        launched = self._forward.run(work)
        if choices.watched:
            self.audit.extras(uploaded, np.array(salts))
        outcomes = [
            forward(one, query, salt, nudge)
            for one, query, salt, nudge in zip(requests, queries.tolist(), salts, nudges, strict=True)
        ]
        self._launched(launched, sampling, outcomes)
        if choices.tries:
            pages.truncate(batch.slots, lens, after=launched.done)
        self._note(choices, ids, plan)

    def _launched(self, launched: Launched, sampling: tuple[int, ...], outcomes: list[Outcome]) -> None:
        self.schedule.batch = launched.batch
        sampled = [launched.batch.requests[row] for row in sampling]
        chosen = [outcomes[row] for row in sampling]
        places = [one.sampled for one in sampled]
        self.steps.add(Step(self.steps.launched + 1, sampled, places, chosen, launched.results, launched.done))
        for one, outcome in zip(sampled, chosen, strict=True):
            one.held.token = outcome.token
            one.sampled += 1
            one.in_flight += 1

    def _draw(self, n: int) -> list[int]:
        """Numbers that differ from step to step and from row to row: what never changes hides what is late."""
        self._drawn += 1
        return [(self._drawn * 7001 + row * 131 + 1) % PRIME for row in range(n)]

    def _places_behind(self, batch: Running, lens: Ints) -> Ints:
        """Where the token behind the last one of each request lies, int64[n]."""
        pages, size = self._memory.pages, self._memory.pages.page_size
        row: Ints = pages.page_table[batch.slots.np, lens // size].astype(np.int64)
        return row * size + lens % size

    def _note(self, choices: Choices, ids: list[object], plan: ForwardPlan | None) -> None:
        prompts = [one is not None for one in ids]
        self._reached("a forward of prompts and decodes", any(prompts) and not all(prompts))
        self._reached("inputs gathered by hand", plan is None)
        self._reached("tokens taken back while a step writes them", choices.tries)
        self._reached("nudged from another stream", choices.nudged)


# A small engine that overlaps, on several streams: every hand-over of the library, between real operations.
#
# Nothing here waits for the device but reading results of older steps, and every number that the device holds ends up
# in a token. So a wait that the library forgets is a conflict of two operations, which the race detector sees, or a
# wrong token, which the simulated device brings about.

_WAYS = st.sampled_from(list(Way))
_MOST_WAITING = 4
_STRIDE = 1237
"""From one way of running a step to the next, in `churn`: all of them come in turn, unlike ones close together."""


class OverlapMachine(Machine):
    """Requests arrive, run, hang up and finish, while the device is always a step behind."""

    NAME = "overlap"
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
        "nudged from another stream",
        "inputs gathered by hand",
        "a forward of prompts and decodes",
        "looked at while a step is in flight",
        "results read out of order",
        "results that nobody reads",
    )

    _opened = False

    def open_runtime(self) -> Runtime:
        """A plain CPU runtime has fences that are always complete: one that lags takes its place."""
        opened = super().open_runtime()
        return LateRuntime(steps_in_flight=opened.steps_in_flight) if type(opened) is CpuRuntime else opened

    @initialize(size=st.integers(2, 4), page_size=st.integers(1, 3), spare=st.integers(0, 8), chunk=st.integers(2, 6))
    def begin(self, size: int, page_size: int, spare: int, chunk: int) -> None:
        """Opens an engine so small that slots and pages are used again and again."""
        self.open()
        self.memory = Memory(self.rt, size, -(-MOST_TOKENS // page_size) + spare, page_size)
        self.engine = Engine(self.memory, chunk, self.reached)
        self.numbers = 0
        self._opened = True

    # Judging

    def check(self) -> None:
        """What the host holds, at every level; at `full` every law besides. Nothing here waits for the device."""
        batch, ages, memory = self.engine.schedule.batch, self.engine.schedule.ages, self.memory
        lens = [one.length for one in batch.requests]
        agree_on(np.array(lens, np.int64), np.array(batch.seq_lens.np), "lengths")
        agree_on(memory.pages.committed(batch.slots), np.array(batch.seq_lens.np), "committed tokens")
        agree_on(column(batch.requests, "age"), np.array(ages.np), "ages")
        agree(True, bool((batch.odd.np >= column(batch.requests, "odd")).all()), "bounds are bounds")
        agree(len(batch), memory.slots.stats.live, "live slots")
        agree(0, self.rt.counters.forced_syncs, "forced syncs")
        if levels.full:
            memory.slots.verify()
            memory.pages.verify()
            memory.relay.check("check")
            batch.check("check")

    def teardown(self) -> None:
        """Reads everything that is still on its way, if all was well, and closes the example."""
        try:
            if self._opened and sys.exc_info()[1] is None:
                self._drain()
        finally:
            super().teardown()

    def _drain(self) -> None:
        """One more step shows what was broken by the one before; then everybody leaves, and nothing may be left."""
        engine, memory = self.engine, self.memory
        for _ in range(2):
            engine.schedule.waiting.clear()  # those that the first step retracts, too
            engine.step(Choices())
            for one in engine.schedule.batch.requests:
                one.aborted = True
        engine.audit.what_is_left()
        while engine.audit.unread:
            engine.audit.read(0)
        while engine.steps.running:
            engine.steps.wait()
        memory.slots.expect_idle()
        memory.pages.expect_idle()
        free = memory.slots.stats.free, memory.pages.stats.free
        agree((memory.slots.size, memory.pages.num_pages), free, "free slots and pages when idle")
        agree(0, self.rt.counters.forced_syncs, "forced syncs")

    # Rules

    @precondition(lambda self: len(self.engine.schedule.waiting) < _MOST_WAITING)
    @rule(
        n=st.integers(1, 2),
        prompt=st.integers(1, 6),
        answer=st.integers(1, 4),
        way=_WAYS,
        marked=st.booleans(),
    )
    def arrive(self, n: int, prompt: int, answer: int, way: Way, marked: bool) -> None:
        """Requests come."""
        for _ in range(n):
            self._arrive(prompt, answer, way, marked)

    def _arrive(self, prompt: int, answer: int, way: Way, marked: bool, *, first: bool = False) -> None:
        self.numbers += 1
        ids = [self.numbers * 101 + at * 13 for at in range(prompt)]
        request = Request(self.numbers, ids, answer + (way is not Way.PROMPT), way)
        request.marks = self._marks() if marked else request.marks
        waiting = self.engine.schedule.waiting
        if first:
            waiting.appendleft(request)
        else:
            waiting.append(request)

    def _marks(self) -> tuple[int, ...]:
        self.numbers += 1
        return tuple(self.numbers * 17 + at for at in range(MARKS))

    @rule()
    def churn(self) -> None:
        """A request comes, each time in another way, and the engine steps, each time in another way.

        Hypothesis takes this rule first, since it has no arguments: so even its simplest example is a busy one.
        """
        round_, odd = divmod(self.engine.steps.launched, 2)
        if not odd and not self.engine.schedule.waiting:
            self._arrive(1 + round_ % 4, 2 + round_ % 2, list(Way)[round_ % len(Way)], round_ % 5 < 3)
        self.engine.step(Choices.numbered(_STRIDE * self.engine.steps.launched))

    @rule(steps=st.lists(CHOICES, min_size=1, max_size=2))
    def run(self, steps: list[Choices]) -> None:
        """The engine steps, one ahead of the device."""
        for choices in steps:
            self.engine.step(choices)

    @rule(prompt=st.integers(1, 4), way=_WAYS, marked=st.booleans(), steps=st.tuples(CHOICES, CHOICES, CHOICES))
    def step_finish_admit_step(
        self, prompt: int, way: Way, marked: bool, steps: tuple[Choices, Choices, Choices]
    ) -> None:
        """A short request runs to its end beside the others, and another takes its place at once."""
        self._arrive(1, 1, Way.PROMPT, marked, first=True)
        self.engine.step(steps[0])
        self._arrive(prompt, 2, way, not marked, first=True)
        self.engine.step(steps[1])
        self.engine.step(steps[2])

    @precondition(lambda self: len(self.engine.schedule.batch) > 0)
    @rule(at=st.integers(0, 3), way=_WAYS, steps=st.tuples(CHOICES, CHOICES))
    def abort_and_replace(self, at: int, way: Way, steps: tuple[Choices, Choices]) -> None:
        """A client hangs up while a step runs for it, and somebody else comes."""
        here = self.engine.schedule.batch.requests
        here[at % len(here)].aborted = True
        self._arrive(3, 2, way, True, first=True)
        for choices in steps:
            self.engine.step(choices)

    @precondition(lambda self: len(self.engine.schedule.batch) > 0)
    @rule(n=st.integers(1, 2), prompt=st.integers(1, 4), way=_WAYS, steps=st.tuples(CHOICES, CHOICES))
    def try_and_admit(self, n: int, prompt: int, way: Way, steps: tuple[Choices, Choices]) -> None:
        """Pages that a step only tries are taken back at once, and others arrive and want pages."""
        self.engine.step(attrs.evolve(steps[0], tries=True))
        for _ in range(n):
            self._arrive(prompt, 2, way, False, first=True)
        self.engine.step(steps[1])

    @rule(way=_WAYS, steps=st.tuples(CHOICES, CHOICES))
    def abandon(self, way: Way, steps: tuple[Choices, Choices]) -> None:
        """Everybody hangs up; nobody reads what is in flight for them, and others come."""
        self.engine.step(steps[0])
        for one in self.engine.schedule.batch.requests:
            one.aborted = True
        self.engine.steps.forget()
        self._arrive(2, 3, way, True, first=True)
        self.engine.step(steps[1])

    @rule(prompt=st.integers(3, 6), steps=st.tuples(CHOICES, CHOICES))
    def crowd(self, prompt: int, steps: tuple[Choices, Choices]) -> None:
        """More than fits: requests grow until somebody has to give its pages back."""
        while len(self.engine.schedule.waiting) < _MOST_WAITING:
            self._arrive(prompt, 4, Way.PROMPT, False)
        for choices in steps:
            self.engine.step(choices)

    @precondition(lambda self: len(self.engine.schedule.batch) > 0)
    @rule(
        at=st.integers(0, 3),
        streams=st.lists(st.sampled_from(["schedule", "arrivals", "upload"]), min_size=1, max_size=2),
        choices=CHOICES,
    )
    def rewrite_marks(self, at: int, streams: list[str], choices: Choices) -> None:
        """A row that the step in flight reads is written, perhaps twice, before the next step reads it."""
        here = self.engine.schedule.batch.requests
        one = here[at % len(here)]
        for name in streams:
            stream = None if name == "upload" else getattr(self.memory.streams, name)
            self.engine.schedule.mark(one, self._marks(), stream)
        self.reached("a row rewritten while a step reads it", self.engine.steps.depth > 0)
        self.reached("a row written on two streams", "arrivals" in streams and {*streams} != {"arrivals"})
        self.engine.step(choices)

    @precondition(lambda self: len(self.engine.schedule.batch) > 0)
    @rule(at=st.integers(0, 3), temperature=st.integers(1, 9), age=st.integers(0, 50))
    def retune(self, at: int, temperature: int, age: int) -> None:
        """Values of one request change on both sides, between two steps."""
        schedule = self.engine.schedule
        row = at % len(schedule.batch)
        held = schedule.batch.requests[row].held
        schedule.batch = schedule.batch.update("temperature", [row], float(temperature))
        with self.rt.use(self.memory.streams.schedule):
            schedule.ages = schedule.ages.update([row], age)
        held.temperature, held.age = temperature, age

    @precondition(lambda self: len(self.engine.schedule.batch) > 0)
    @rule(what=st.sampled_from(["columns", "tables", "rows in another order", "results"]), choices=CHOICES)
    def look(self, what: str, choices: Choices) -> None:
        """Another stream looks at what there is, and the next step goes on with what it made."""
        schedule, audit = self.engine.schedule, self.engine.audit
        if what == "rows in another order":
            with self.rt.use(self.memory.streams.schedule):
                schedule.reorder()
        if what == "tables":
            audit.tables(schedule.batch)
        elif what == "results":
            if self.engine.steps.unread:
                audit.results(self.engine.steps.read(0))
        else:
            audit.columns(schedule.batch, schedule.ages)
        self.reached("looked at while a step is in flight", self.engine.steps.depth > 0)
        self.engine.step(choices)

    @precondition(lambda self: bool(self.engine.audit.unread))
    @rule(at=st.integers(0, 5))
    def read_a_look(self, at: int) -> None:
        """The host reads what was seen, in any order."""
        self.engine.audit.read(at % len(self.engine.audit.unread))

    @precondition(lambda self: len(self.engine.steps.unread) > 0)
    @rule(steps=st.tuples(CHOICES, CHOICES))
    def read_out_of_order(self, steps: tuple[Choices, Choices]) -> None:
        """The newest results are read first; the oldest wait in their memory while others land."""
        for choices in steps:
            self.engine.step(attrs.evolve(choices, unread=True))
            if self.engine.steps.unread:
                self.engine.steps.read(len(self.engine.steps.unread) - 1)

    @rule(n=st.integers(1, 6))
    def complete(self, n: int) -> None:
        """The device gets somewhere, and the host could know."""
        if isinstance(self.rt, LateRuntime):
            self.rt.complete(n)

    @precondition(lambda self: self.engine.steps.running)
    @rule()
    def wait(self) -> None:
        """The host waits for the oldest forward that runs."""
        self.engine.steps.wait()


__all__ = ["OverlapMachine"]
