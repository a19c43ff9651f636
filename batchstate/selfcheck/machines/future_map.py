"""`FutureMap` put to use: forwards of prompts, decodes and both, results that come late, and every misuse."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import invariants, levels
from batchstate._relay import DEVICE, HOST
from batchstate._upload import Extras
from batchstate.batch import Batch
from batchstate.columns import mirrored, slot_column
from batchstate.errors import ArgumentError, DeclarationError, DeviceError, DtypeError, ShapeError, ValueOverflowError
from batchstate.forward.inputs import ForwardInputs
from batchstate.forward.plan import ForwardPlan
from batchstate.future_map import EntryState, FutureMap, Prefetched, RelayField, relay_field
from batchstate.indices import Pages, Slots
from batchstate.kv.pages import PagePool
from batchstate.mirror import MirroredTensor
from batchstate.pools import SlotPool
from batchstate.runtime import CpuRuntime, Fence, Runtime, Stream, open_runtime
from batchstate.testing.fences import LateRuntime, is_behind
from batchstate.testing.machine import Machine, Misuse, agree, agree_on
from batchstate.testing.models import snapshot_pages, snapshot_slots
from batchstate.violations import Code

# What a relay should hold, as a dictionary: for each slot and field the values, and who has taken them.

Array = npt.NDArray[Any]

NUM_DRAFTS = 2


def declared(hidden: torch.dtype) -> dict[str, RelayField]:
    """One field for each reader, with and without a shape; `hidden` has a dtype that numpy may lack."""
    return {
        "token": relay_field(torch.int64, read_by="both", non_negative=True),
        "drafts": relay_field(torch.int64, (NUM_DRAFTS,), non_negative=True),
        "lengths": relay_field(torch.int64, read_by="both"),
        "accepted": relay_field(torch.int64, read_by="host"),
        "hidden": relay_field(hidden, (2, 3)),
    }


class Running(Batch):
    """The requests of one forward, lengths with its tokens; `bound_lens` is what the host knows of them."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    bound_lens = mirrored(torch.int64, contract="upper_bound")


@final
@attrs.define(eq=False, repr=False)
class Request:
    """One request.

    Attributes:
        handle: its slot.
        reused: whether the slot was another request's before.
        length: tokens in KV memory.
        bound: the most that the host knows of: tokens for which there are pages.
    """

    handle: Slots
    reused: bool = False
    length: int = 0
    bound: int = 0

    def __repr__(self) -> str:
        return f"<request in slot {self.slot}: {self.length} tokens, at most {self.bound}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would list the fields

    @property
    def slot(self) -> int:
        """The number of its slot."""
        return int(self.handle.np[0])


def handles_of(requests: Sequence[Request], runtime: Runtime) -> Slots:
    """Their handles, in order."""
    if not requests:
        return Slots.from_host(runtime, [])
    return Slots.cat([one.handle for one in requests])


@final
@attrs.define
class _Entry:
    """What a slot has in one field, and the readers that have taken it, as bits."""

    values: Array
    taken: int = 0


@final
class RelayModel:
    """The entries of all fields."""

    def __init__(self, fields: Mapping[str, RelayField]) -> None:
        self.fields = fields
        self._entries: dict[tuple[str, int], _Entry] = {}

    def publish(
        self, requests: Iterable[Request], values: Mapping[str, Array], *, from_host: Iterable[str] = ()
    ) -> None:
        """Each request gets its row of each field; the host knows the values of the fields `from_host`."""
        known = set(from_host)
        for row, one in enumerate(requests):
            for name, array in values.items():
                self._entries[name, one.slot] = _Entry(array[row].copy(), HOST if name in known else 0)

    def unread(self, one: Request, field: str) -> bool:
        """Whether the entry is wanted by somebody who has not taken it."""
        entry = self._entries.get((field, one.slot))
        readers = self.fields[field].readers
        return entry is not None and entry.taken & readers != readers

    def refusal(self, requests: Iterable[Request], fields: Iterable[str], reader: int) -> Code | None:
        """Why a read is refused, or None."""
        for name in fields:
            entries = [self._entries.get((name, one.slot)) for one in requests]
            if None in entries:
                return Code.FUTURE_UNWRITTEN
            if any(entry is not None and entry.taken & reader for entry in entries):
                return Code.FUTURE_CONSUMED
        return None

    def peek(self, one: Request, field: str) -> Array | None:
        """What the entry holds, whoever has taken it; None where nothing was published."""
        entry = self._entries.get((field, one.slot))
        return None if entry is None else entry.values

    def take(self, requests: Sequence[Request], field: str, reader: int, num_rows: int) -> Array:
        """The values that `reader` takes, [num_rows, *shape]; zeros for padded rows."""
        declared = self.fields[field]
        dtype = np.int64 if declared.dtype is torch.int64 else np.float32
        found = np.zeros((num_rows, *declared.shape), dtype)
        for row, one in enumerate(requests):
            entry = self._entries[field, one.slot]
            entry.taken |= reader
            found[row] = entry.values
        return found

    def clear(self, requests: Iterable[Request], fields: Iterable[str]) -> None:
        """Nobody wants these entries any more."""
        names = list(fields)
        for one in requests:
            for name in names:
                self._entries.pop((name, one.slot), None)

    def state(self, one: Request, field: str) -> EntryState:
        """What has become of an entry."""
        if (field, one.slot) not in self._entries:
            return EntryState.UNWRITTEN
        return EntryState.PUBLISHED if self.unread(one, field) else EntryState.CONSUMED

    def readable(self, one: Request, fields: Iterable[str]) -> bool:
        """Whether the next forward may take these entries."""
        return self.refusal([one], fields, DEVICE) is None


# What the relay machine drives: requests that come and go on a device that lags, and a model of their entries.

MOST_TOKENS = 16
_PAGE_SIZE = 2
STREAMS = st.sampled_from(["default", "forward", "seeding"])
PADS = st.sampled_from([0, 0, 1, 2])
OFTEN = st.sampled_from([True, True, True, False])


@final
@attrs.frozen(eq=False)
class Asked:
    """What was asked for, and what was there when it was.

    Attributes:
        prefetched: what the relay handed out.
        requests: whose entries.
        values: the entries, by field.
    """

    prefetched: Prefetched
    requests: Sequence[Request]
    values: Mapping[str, Array]

    @property
    def read(self) -> Fence:
        """Behind the read of the relay's memory, before the copy to the host."""
        return self.prefetched._read[1]


class RelayMachine(Machine):
    """Requests come and go, and time passes. Subclasses publish, read and run forwards."""

    def open_runtime(self) -> Runtime:
        """A plain CPU runtime has fences that are always complete: one that lags takes its place."""
        opened = super().open_runtime()
        return LateRuntime(steps_in_flight=opened.steps_in_flight) if type(opened) is CpuRuntime else opened

    @initialize(size=st.integers(2, 5), hidden=st.sampled_from([torch.float32, torch.bfloat16]))
    def begin(self, size: int, hidden: torch.dtype) -> None:
        """Opens a relay so small that slots are used again and again."""
        self.open()
        self.streams = {name: self.rt.stream(name) for name in ("forward", "seeding")}
        self.streams["default"] = self.rt.current_stream
        self.pool = SlotPool(self.rt, size)
        self.table = self.pool.table("req_to_token", (MOST_TOKENS,), holds="location", host=True)
        self.pages = PagePool(
            self.rt,
            self.pool,
            2 * size * MOST_TOKENS // _PAGE_SIZE,
            _PAGE_SIZE,
            max_tokens_per_request=MOST_TOKENS,
            req_to_token=self.table,
        )
        fields = declared(hidden)
        self.relay = FutureMap(self.pool, fields)
        self.model = RelayModel(fields)
        self.foreign = SlotPool(self.rt, 1, name="other").take(1)
        self.requests: list[Request] = []
        self.gone: deque[Request] = deque(maxlen=4)
        self.asked: list[Asked] = []
        self.steps: deque[list[Fence]] = deque()
        self.published_on: dict[tuple[str, int], Stream] = {}
        self.numbers = 0

    # Judging

    def check(self) -> None:
        """States and slot 0 of every field, and every law of the pools; below `full` the rules alone judge."""
        if levels.full:
            self.relay.check()
            self.pages.verify()
            self.pool.verify()
            agree(self._model_states(), self._states(), "states of entries")

    def snapshot(self) -> object:
        """States, pools, tokens in flight, and what was launched so far."""
        counted = self.rt.counters
        return (
            self._states(),
            snapshot_slots(self.pool),
            snapshot_pages(self.pages),
            (counted.device_operations, counted.host_to_device_copies, counted.device_to_host_copies),
        )

    def _states(self) -> dict[str, list[EntryState]]:
        handles = handles_of(self.requests, self.rt)
        return {name: self.relay.states(handles, name) for name in self.relay.fields}

    def _model_states(self) -> dict[str, list[EntryState]]:
        return {name: [self.model.state(one, name) for one in self.requests] for name in self.model.fields}

    def _agree_device(self, expected: Array, tensor: torch.Tensor, what: str) -> None:
        if levels.full:
            exact = tensor.to(torch.float32) if tensor.dtype is torch.bfloat16 else tensor
            agree_on(expected, self.rt.inspect(exact), what)

    # Time

    @rule(n=st.integers(1, 6))
    def complete(self, n: int) -> None:
        """The device gets somewhere."""
        if isinstance(self.rt, LateRuntime):
            self.rt.complete(n)

    @rule()
    def synchronize(self) -> None:
        """The host waits for everything."""
        self.rt.synchronize()
        agree(True, all(one.prefetched.ready() for one in self.asked), "ready when nothing is in flight")

    @rule()
    def next_step(self) -> None:
        """The next step begins, once the one before the last is over: no runtime is run deeper than declared."""
        self._next_step()

    def _next_step(self) -> None:
        streams = (*self.streams.values(), self.relay._private)
        self.steps.append([self.rt.record(stream) for stream in streams])
        while len(self.steps) >= self.rt.steps_in_flight:
            over = self.steps.popleft()
            for fence in over:  # a host that waits for all at once would hide every race
                fence.wait()
        self.rt.next_step()

    # Requests

    @rule(n=st.integers(1, 3), seeded=st.booleans())
    def arrive(self, n: int, seeded: bool) -> None:
        """Requests take slots, and are seeded if they arrive prebuilt."""
        slots = self.pool.take(min(n, self.pool.stats.free))
        came = [Request(one, bool(one.generations[0] > 1)) for one in slots.split([1] * len(slots))]
        self.requests += came
        self.reached("a slot used by another request", any(one.reused for one in came))
        if seeded:
            self._make_decodable(came, "seeding")

    @precondition(lambda self: bool(self.requests))
    @rule(at=st.integers(0, 4), behind=st.sampled_from([None, "forward", "default"]))
    def leave(self, at: int, behind: str | None) -> None:
        """A request leaves: its entries end, whatever has become of them; its slot is free now or behind a fence."""
        self._leave(self.requests[at % len(self.requests)], behind)

    def _leave(self, one: Request, behind: str | None) -> None:
        self.reached("left with an entry unread", self.model.unread(one, "token"))
        self.pages.release_requests(one.handle, after=None if behind is None else self.rt.record(self.streams[behind]))
        self.model.clear([one], self.model.fields)
        self.requests.remove(one)
        self.gone.append(one)

    # What a step does with entries

    def _chosen(self, data: st.DataObject) -> list[Request]:
        order = data.draw(st.permutations(self.requests), label="requests")
        return order[: data.draw(st.integers(1, len(order)), label="how many")]

    def _readers(self, data: st.DataObject, names: Sequence[str], reader: int) -> list[Request]:
        """Requests, mostly such that have what is read."""
        chosen = self._chosen(data)
        able = [one for one in chosen if self.model.refusal([one], names, reader) is None]
        sound: Any = data.draw(OFTEN, label="there")
        return able if able and sound else chosen

    def _padded(self, requests: Sequence[Request], pads: int) -> Slots:
        handles = handles_of(requests, self.rt)
        self.reached("padded rows", pads > 0)
        return handles.pad(len(handles) + pads) if pads else handles

    def _values(self, requests: Sequence[Request], names: Sequence[str]) -> dict[str, Array]:
        """New numbers; the lengths are what they are."""
        values: dict[str, Array] = {}
        for name in names:
            shape = (len(requests), *self.model.fields[name].shape)
            if name == "lengths":
                values[name] = np.array([one.length for one in requests], np.int64)
                continue
            self.numbers += 1
            numbers = np.arange(int(np.prod(shape))).reshape(shape) + 7 * self.numbers
            values[name] = numbers if name != "hidden" else (numbers % 251).astype(np.float32)
        return values

    def _given(self, values: Mapping[str, Array], mirrored: bool = False) -> dict[str, Any]:
        """Device values, made on the current stream, or mirrored ones."""
        given: dict[str, Any] = {}
        for name, array in values.items():
            if mirrored and name != "hidden":
                given[name] = MirroredTensor.from_host(self.rt, array)
            else:
                given[name] = self.on_device(array).to(self.model.fields[name].dtype)
        return given

    def _published(
        self, requests: Sequence[Request], values: Mapping[str, Array], stream: str, *, from_host: Iterable[str] = ()
    ) -> None:
        self.model.publish(requests, values, from_host=from_host)
        self.published_on |= {(name, one.slot): self.streams[stream] for one in requests for name in values}
        if isinstance(self.rt, LateRuntime):
            self._check_order({one.slot for one in requests}, values, self.rt.record(self.streams[stream]))

    def _check_order(self, slots: set[int], names: Iterable[str], written: Fence) -> None:
        """The write waits for whoever still reads what was there, also for a request that has left since."""
        for asked in self.asked:
            for name in asked.values:
                if name in names and not slots.isdisjoint(one.slot for one in asked.requests):
                    invariants.future_order(
                        is_behind(written, asked.read),
                        f"the read of {name!r} of slots {sorted(slots)} for the host",
                        "a write into the same memory",
                        "a wait for that read",
                        object=self.relay,
                        operation="check",
                    )

    def _clear_way(self, requests: Sequence[Request], names: Sequence[str]) -> None:
        """What nobody will read any more is discarded."""
        for name in names:
            unread = [one for one in requests if self.model.unread(one, name)]
            if unread:
                self.relay.discard(handles_of(unread, self.rt), name)
                self.model.clear(unread, [name])

    def _make_decodable(self, requests: Sequence[Request], stream: str) -> None:
        """Seeds what a decode takes, for requests that come back or arrive prebuilt."""
        names = ("token", "drafts", "lengths")
        lacking = [one for one in requests if not self.model.readable(one, names)]
        if lacking:
            self._clear_way(lacking, names)
            values = self._values(lacking, names)
            with self.rt.use(self.streams[stream]):
                self.relay.publish(handles_of(lacking, self.rt), **values)
            self._published(lacking, values, stream, from_host=names)


# Entries of a relay against a dictionary, on three streams and under fences that complete late.


class RelayEntries(RelayMachine):
    """Entries are published, gathered, fetched and overwritten. Subclasses run forwards."""

    # Entries

    @precondition(lambda self: bool(self.requests))
    @rule(
        data=st.data(),
        names=st.sampled_from([("token",), ("lengths",), ("token", "drafts", "accepted"), ("hidden", "token")]),
        stream=STREAMS,
        pads=PADS,
        way=st.sampled_from(["device", "host", "both"]),
        mirrored=st.booleans(),
        cleared=st.booleans(),
    )
    def write(
        self,
        data: st.DataObject,
        names: tuple[str, ...],
        stream: str,
        pads: int,
        way: str,
        mirrored: bool,
        cleared: bool,
    ) -> None:
        """Values are published; where somebody still wants what is there, it is refused."""
        requests = self._chosen(data)
        if cleared:
            self._clear_way(requests, names)
        from_host = {"device": (), "host": names, "both": names[:1]}[way]
        from_host = tuple(name for name in from_host if self.model.fields[name].dtype is not torch.bfloat16)
        values = self._values(requests, names)
        slots = self._padded(requests, pads)
        rows = {name: _with_padding(array, pads) for name, array in values.items()}
        unread = any(self.model.unread(one, name) for one in requests for name in names)
        with self.rt.use(self.streams[stream]):
            given: Mapping[str, Any] = self._given(rows, mirrored) | {name: rows[name] for name in from_host}
            if unread:
                self.reached("overwriting unread refused")
                with self.refused(Code.FUTURE_UNREAD_OVERWRITTEN):
                    self.relay.publish(slots, **given)
                return
            self.relay.publish(slots, **given)
        self._published(requests, values, stream, from_host=from_host)

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), names=st.sampled_from([(), ("token",), ("lengths", "hidden")]))
    def discard(self, data: st.DataObject, names: tuple[str, ...]) -> None:
        """Entries that nobody wants become unwritten, whatever they were."""
        requests = self._chosen(data)
        self.relay.discard(handles_of(requests, self.rt), *names)
        self.model.clear(requests, names or self.model.fields)

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), name=st.sampled_from(["token", "drafts", "lengths", "hidden"]), stream=STREAMS, pads=PADS)
    def gather(self, data: st.DataObject, name: str, stream: str, pads: int) -> None:
        """A forward takes entries; what was not published, or was taken before, is refused."""
        requests = self._readers(data, [name], DEVICE)
        slots = self._padded(requests, pads)
        with self.rt.use(self.streams[stream]):
            if self._refused_read(requests, [name], DEVICE, lambda: self.relay.gather(slots, name)):
                return
            rows = self.relay.gather(slots, name)
            self.reached(
                "read on another stream than the publish",
                any(self.published_on[name, one.slot] != self.streams[stream] for one in requests),
            )
            self._agree_device(self.model.take(requests, name, DEVICE, len(slots)), rows, f"gather of {name}")

    def _refused_read(self, requests: Sequence[Request], names: Sequence[str], reader: int, read: Any) -> bool:
        code = self.model.refusal(requests, names, reader)
        if code is None:
            return False
        self.reached(
            "read before the publish refused" if code is Code.FUTURE_UNWRITTEN else "read a second time refused"
        )
        with self.refused(code):
            read()
        return True

    # To the host

    @precondition(lambda self: bool(self.requests))
    @rule(
        data=st.data(),
        names=st.sampled_from([("token",), ("lengths", "token"), ("accepted",), ("token", "accepted", "lengths")]),
        stream=STREAMS,
        pads=PADS,
    )
    def prefetch(self, data: st.DataObject, names: tuple[str, ...], stream: str, pads: int) -> None:
        """The host asks for entries, and goes on."""
        requests = self._readers(data, names, HOST)
        with self.rt.use(self.streams[stream]):
            self._prefetch(requests, names, self._padded(requests, pads))

    def _prefetch(self, requests: Sequence[Request], names: Sequence[str], slots: Slots) -> None:
        if self._refused_read(requests, names, HOST, lambda: self.relay.prefetch(slots, *names)):
            return
        syncs = self.rt.counters.forced_syncs, self.rt.counters.fence_waits
        asked = self.relay.prefetch(slots, *names)
        agree(syncs, (self.rt.counters.forced_syncs, self.rt.counters.fence_waits), "waits of a prefetch")
        agree(False, isinstance(self.rt, LateRuntime) and asked.ready(), "ready while the device is not there")
        values = {name: self.model.take(requests, name, HOST, len(requests)) for name in names}
        self.asked.append(Asked(asked, list(requests), values))

    @precondition(lambda self: bool(self.asked))
    @rule(at=st.integers(0, 5), stream=STREAMS)
    def fetch(self, at: int, stream: str) -> None:
        """The host reads what it asked for: what was there then, whatever has become of the slots."""
        self._fetch(self.asked.pop(at % len(self.asked)), stream)

    def _fetch(self, one: Asked, stream: str) -> None:
        self.reached("fetched after its slot was freed", any(request not in self.requests for request in one.requests))
        self.reached("fetched while the device was not there yet", not one.prefetched.ready())
        with self.rt.use(self.streams[stream]):
            found = one.prefetched.resolve()
            for name, values in one.values.items():
                now = [(row, self.model.peek(r, name)) for row, r in enumerate(one.requests) if r in self.requests]
                self.reached(
                    "fetched after its entry was overwritten",
                    any(value is not None and value != values[row] for row, value in now),
                )
                agree_on(values, np.array(found[name].np), f"{name}, fetched")
                self._agree_device(values, found[name].device, f"{name}, fetched, on the device")
        agree(True, one.prefetched.ready(), "ready once it was fetched")

    @precondition(lambda self: bool(self.asked))
    @rule()
    def forget(self) -> None:
        """Nobody wants what was asked for: its memory goes back by itself."""
        self.asked.pop(0)

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), name=st.sampled_from(["token", "accepted"]))
    def resolve(self, data: st.DataObject, name: str) -> None:
        """The host asks and waits."""
        requests = self._readers(data, [name], HOST)
        slots = handles_of(requests, self.rt)
        if not self._refused_read(requests, [name], HOST, lambda: self.relay.resolve(slots, name)):
            found = self.relay.resolve(slots, name)
            agree_on(self.model.take(requests, name, HOST, len(requests)), np.array(found.np), f"resolve of {name}")


def _with_padding(values: Array, pads: int) -> Array:
    """Rows for padded lanes, which a forward computes too and nobody may see."""
    return np.concatenate([values, np.full((pads, *values.shape[1:]), -1, values.dtype)])


# Forwards as an engine that uses a relay would launch them, and what their inputs should be, token by token.


@final
@attrs.frozen(eq=False)
class Part:
    """What one request puts into a forward.

    Attributes:
        request: whose.
        prompt: its ids, or None where the relay has them.
        query: how many.
        samples: whether this is all of its prompt, or a decode.
    """

    request: Request
    prompt: tuple[int, ...] | None
    query: int
    samples: bool


@final
@attrs.frozen(eq=False)
class Shape:
    """How a forward is laid out.

    Attributes:
        drafts: decodes put in a token and drafts.
        bounded: the host knows only bounds of the lengths of decodes.
        lengths: the field of lengths is named; with bounds it has to be.
        pad_rows: padded requests.
        pad_tokens: padded tokens, or None.
    """

    drafts: bool
    bounded: bool
    lengths: bool
    pad_rows: int
    pad_tokens: int | None

    @property
    def ids(self) -> tuple[str, ...]:
        """The fields that the ids of decodes come from."""
        return ("token", "drafts") if self.drafts else ("token",)

    @property
    def takes(self) -> tuple[str, ...]:
        """All fields that a decode takes."""
        return (*self.ids, "lengths") if self.bounded or self.lengths else self.ids

    @property
    def width(self) -> int:
        """The tokens of a decode."""
        return 1 + NUM_DRAFTS if self.drafts else 1


@final
@attrs.frozen(eq=False)
class Launched:
    """A forward whose inputs are made.

    Attributes:
        parts: who is in it.
        shape: how it is laid out.
        plan, uploaded, inputs: what the library made.
    """

    parts: Sequence[Part]
    shape: Shape
    plan: ForwardPlan
    uploaded: Extras
    inputs: ForwardInputs


@final
class Forwards:
    """Launches forwards on a stream of their own.

    Args:
        relay: whose entries the decodes take.
        pages: with a token table.
        stream: of the forwards.
        model: of the relay.
    """

    def __init__(self, relay: FutureMap, pages: PagePool, stream: Stream, model: RelayModel) -> None:
        self._runtime: Runtime = relay.runtime
        self._relay = relay
        self._pages = pages
        self._stream = stream
        self._model = model

    def launch(self, parts: Sequence[Part], shape: Shape) -> Launched:
        """Plans, uploads, and makes the inputs at forward entry."""
        requests = [part.request for part in parts]
        if not shape.bounded:
            self._make_exact(requests)
        else:
            self._make_exact([part.request for part in parts if part.prompt is not None])
        queries = np.array([part.query for part in parts], dtype=np.int64)
        bounds = np.array([one.bound for one in requests], dtype=np.int64) + queries
        exact = np.array([one.length for one in requests], dtype=np.int64) + queries
        handles = handles_of(requests, self._runtime)
        extension = self._pages.extend(handles, bounds)
        true = self._runtime.upload([exact]).view(0)
        bound_lens = MirroredTensor.from_pair(self._runtime, bounds, true, contract="upper_bound")
        batch = Running.build(self._runtime, slots=handles, seq_lens=exact, bound_lens=bound_lens)
        if shape.pad_rows:
            batch = batch.pad(len(parts) + shape.pad_rows)
        plan = ForwardPlan.of(
            batch.slots,
            batch.bound_lens if shape.bounded else batch.seq_lens,
            queries,
            prompt_ids=[part.prompt for part in parts],
            samples=[part.samples for part in parts],
            pages=self._pages,
            pad_tokens=None if shape.pad_tokens is None else int(queries.sum()) + shape.pad_tokens,
        )
        uploaded = batch.upload(writes=[extension.entry()], extras=plan.extras)
        with self._runtime.use(self._stream):
            inputs = self.inputs(plan, uploaded, shape)
            if self._pages.req_to_token is not None:
                self._pages.req_to_token.read_until(self._runtime.record())
        for one, query in zip(requests, queries.tolist(), strict=True):
            one.bound += query
        return Launched(parts, shape, plan, uploaded, inputs)

    def inputs(self, plan: ForwardPlan, uploaded: Extras, shape: Shape) -> ForwardInputs:
        """At forward entry, on the stream of the forward."""
        return self._relay.resolve_forward_inputs(
            plan,
            uploaded,
            ids=shape.ids[0] if len(shape.ids) == 1 else shape.ids,
            lengths="lengths" if "lengths" in shape.takes else None,
            req_to_token=self._pages.req_to_token,
        )

    def _make_exact(self, requests: Sequence[Request]) -> None:
        """The host has learned the lengths: pages beyond go back."""
        loose = [one for one in requests if one.bound > one.length]
        if loose:
            lengths = np.array([one.length for one in loose], dtype=np.int64)
            self._pages.truncate(handles_of(loose, self._runtime), lengths, after=self._runtime.record(self._stream))
            for one in loose:
                one.bound = one.length

    def take(self, parts: Sequence[Part], shape: Shape) -> dict[int, list[int]]:
        """The model of what a forward takes from the relay: row -> ids. Call it once the forward was launched."""
        taken = {}
        for row, part in enumerate(parts):
            if part.prompt is None:
                found = {name: self._model.take([part.request], name, DEVICE, 1) for name in shape.takes}
                taken[row] = [int(number) for name in shape.ids for number in found[name].reshape(-1)]
        return taken

    def check(self, launched: Launched, relayed: dict[int, list[int]]) -> None:
        """The inputs of a forward, built again token by token.

        Raises:
            DisagreementError: they are others.
        """
        parts, inputs, plan = launched.parts, launched.inputs, launched.plan
        ids: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        starts = [0]
        size = self._pages.page_size
        for row, part in enumerate(parts):
            ids += relayed[row] if part.prompt is None else part.prompt
            for at in range(part.request.length, part.request.length + part.query):
                positions.append(at)
                tokens.append(int(self._pages.page_table[part.request.slot][at // size]) * size + at % size)
            starts.append(len(ids))
        shape = launched.shape
        agree((len(ids), len(ids) + (shape.pad_tokens or 0)), (plan.num_tokens, plan.num_padded_tokens), "token counts")
        behind, pads = [0] * (shape.pad_tokens or 0), [0] * shape.pad_rows
        last = [starts[row + 1] - 1 for row, part in enumerate(parts) if part.samples]
        if len(last) == len(parts):
            last += pads
        slot_mapping = torch.empty(0) if inputs.slot_mapping is None else inputs.slot_mapping
        for name, expected, actual in (
            ("slots", [part.request.slot for part in parts] + pads, inputs.slots),
            ("input_ids", ids + behind, inputs.input_ids),
            ("positions", positions + behind, inputs.positions),
            ("slot_mapping", tokens + behind, slot_mapping),
            ("query_start_loc", starts + [starts[-1]] * shape.pad_rows, inputs.query_start_loc),
            ("kv_lens", [part.request.length + part.query for part in parts] + pads, inputs.kv_lens),
            ("last_token_indices", last, inputs.last_token_indices),
        ):
            agree(expected, self._runtime.inspect(actual).tolist(), f"{name} of a forward of {shape}")
        sampled = [part.request.slot for part in parts if part.samples]
        agree(sampled, [slot for slot in inputs.sampled_slots.np.tolist() if slot], "who samples")


# Ways to misuse a `FutureMap`.


@final
@attrs.frozen(eq=False)
class RelayCase:
    """A relay, and handles of its live requests, at least one.

    Attributes:
        relay: to be misused.
        slots: the handles.
        foreign: handles of another pool.
    """

    relay: FutureMap
    slots: Slots
    foreign: Slots

    @property
    def runtime(self) -> Runtime:
        """The device."""
        return self.relay.runtime

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A device tensor."""
        return torch.zeros(shape, dtype=dtype, device=self.runtime.device)

    def column(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A device tensor with a row for each request."""
        return self.zeros(len(self.slots), *shape, dtype=dtype)


def _publishes(**makes: Callable[[RelayCase], Any]) -> Callable[[RelayCase], object]:
    """A publish for all requests."""
    return lambda case: case.relay.publish(case.slots, **{name: make(case) for name, make in makes.items()})


def _publishes_host(**makes: Callable[[int], object]) -> Callable[[RelayCase], object]:
    """A publish of host values for all requests; the values are made from their number."""
    return lambda case: case.relay.publish(case.slots, **{name: make(len(case.slots)) for name, make in makes.items()})


def _elsewhere(case: RelayCase) -> MirroredTensor:
    return MirroredTensor.from_host(open_runtime(case.runtime.device), np.zeros(len(case.slots), np.int64))


def _after_padding(case: RelayCase) -> Slots:
    zero = Slots.from_host(case.runtime, [0], generations=[0], pool=case.relay.slots.identity)
    return Slots.cat([zero, case.slots])


def _twice(case: RelayCase) -> Slots:
    return case.slots.take([0, 0])


def _made(fields: Any) -> Callable[[RelayCase], object]:
    return lambda case: FutureMap(case.relay.slots, fields)


MISUSES: tuple[Misuse[RelayCase], ...] = (
    Misuse("publish an undeclared field", (DeclarationError,), _publishes(tokens=RelayCase.column)),
    Misuse("publish nothing", (DeclarationError,), _publishes()),
    Misuse("publish None", (DtypeError,), _publishes(token=lambda case: None)),
    Misuse("publish int32", (DtypeError,), _publishes(token=lambda case: case.column(dtype=torch.int32))),
    Misuse("publish a row too many", (ShapeError,), _publishes(token=lambda case: case.zeros(len(case.slots) + 1))),
    Misuse("publish drafts without a shape", (ShapeError,), _publishes(drafts=RelayCase.column)),
    Misuse("publish a scalar", (ShapeError,), _publishes(token=RelayCase.zeros)),
    Misuse(
        "publish from another device",
        (DeviceError,),
        _publishes(token=lambda case: torch.zeros(len(case.slots), dtype=torch.int64, device="meta")),
    ),
    Misuse("publish a value of another runtime", (DeviceError,), _publishes(token=_elsewhere)),
    Misuse(
        "publish a good field and a bad one", (DtypeError,), _publishes(token=RelayCase.column, lengths=lambda _: None)
    ),
    Misuse(
        "publish for a slot twice",
        (Code.SLOT_SHARED,),
        lambda case: case.relay.publish(_twice(case), token=case.zeros(2)),
    ),
    Misuse(
        "publish behind a padded row",
        (Code.SLOT_ZERO_ALLOCATED,),
        lambda case: case.relay.publish(_after_padding(case), token=case.zeros(len(case.slots) + 1)),
    ),
    Misuse(
        "publish for another pool",
        (ArgumentError,),
        lambda case: case.relay.publish(case.foreign, token=case.zeros(len(case.foreign))),
    ),
    Misuse(
        "publish for pages",
        (Code.UNIT_MISMATCH,),
        lambda case: case.relay.publish(Pages.from_host(case.runtime, [1]), token=case.zeros(1)),  # type: ignore[arg-type]
    ),
    Misuse("publish a list of a row too few", (ShapeError,), _publishes_host(token=lambda n: [0] * (n - 1))),
    Misuse(
        "publish an array of drafts without a shape",
        (ShapeError,),
        _publishes_host(drafts=lambda n: np.zeros(n, np.int64)),
    ),
    Misuse("publish half a token", (DtypeError,), _publishes_host(token=lambda n: [0.5] * n)),
    Misuse("publish more than int64", (ValueOverflowError,), _publishes_host(token=lambda n: [2**63] * n)),
    Misuse("publish a stand-in", (Code.SENTINEL_ESCAPED,), _publishes_host(token=lambda n: [0] * (n - 1) + [-1])),
    Misuse(
        "publish a stand-in among drafts", (Code.SENTINEL_ESCAPED,), _publishes_host(drafts=lambda n: [[0, -1]] * n)
    ),
    Misuse(
        "gather what only the host reads", (DeclarationError,), lambda case: case.relay.gather(case.slots, "accepted")
    ),
    Misuse("gather an undeclared field", (DeclarationError,), lambda case: case.relay.gather(case.slots, "tokens")),
    Misuse("gather by numbers", (DtypeError,), lambda case: case.relay.gather(case.slots.np, "token")),  # type: ignore[arg-type]
    Misuse("prefetch nothing", (DeclarationError,), lambda case: case.relay.prefetch(case.slots)),
    Misuse(
        "prefetch a field twice", (DeclarationError,), lambda case: case.relay.prefetch(case.slots, "token", "token")
    ),
    Misuse(
        "prefetch what only the next forward reads",
        (DeclarationError,),
        lambda case: case.relay.prefetch(case.slots, "drafts", "token"),
    ),
    Misuse(
        "discard an undeclared field", (DeclarationError,), lambda case: case.relay.discard(case.slots, "token", "no")
    ),
    Misuse("states of an undeclared field", (DeclarationError,), lambda case: case.relay.states(case.slots, "tokens")),
    Misuse(
        "inputs of no plan",
        (ArgumentError,),
        lambda case: case.relay.resolve_forward_inputs(None, None, ids="token"),  # type: ignore[arg-type]
    ),
    Misuse("a relay of no fields", (DeclarationError,), _made({})),
    Misuse("a relay of no field", (DeclarationError,), _made({"token": torch.int64})),
    Misuse("a relay of no name", (DeclarationError,), _made({"a b": relay_field(torch.int64)})),
    Misuse("a relay over no pool", (ArgumentError,), lambda case: FutureMap(case.runtime, {})),  # type: ignore[arg-type]
    Misuse("a field for nobody", (DeclarationError,), lambda case: relay_field(torch.int64, read_by="nobody")),
    Misuse(
        "a field for the host of what numpy lacks",
        (DtypeError,),
        lambda case: relay_field(torch.bfloat16, read_by="host"),
    ),
    Misuse("a field of a negative size", (ArgumentError,), lambda case: relay_field(torch.int64, (-1,))),
)

_SHAPES = st.builds(Shape, st.booleans(), st.booleans(), st.booleans(), PADS, st.sampled_from([None, 0, 3]))


class FutureMapMachine(RelayEntries):
    """An engine that runs ahead of its device, in all the orders it can."""

    NAME = "future_map"
    TARGETS = (
        "overwriting unread refused",
        "read before the publish refused",
        "read a second time refused",
        "handle of a slot used again refused",
        "a slot used by another request",
        "left with an entry unread",
        "left between launch and results",
        "padded rows",
        "read on another stream than the publish",
        "fetched while the device was not there yet",
        "fetched after its slot was freed",
        "fetched after its entry was overwritten",
        "a forward of prompts alone",
        "a forward of decodes alone",
        "a forward of prompts and decodes",
        "drafts put in",
        "bounded lengths set right",
        "padded to a graph's size",
        "a plan used twice refused",
    )

    @property
    def forwards(self) -> Forwards:
        """Launches forwards over the relay of the example."""
        return Forwards(self.relay, self.pages, self.streams["forward"], self.model)

    # Forwards

    @precondition(lambda self: bool(self.requests))
    @rule(
        data=st.data(),
        who=st.sampled_from(["prompts", "decodes", "mixed"]),
        shape=_SHAPES,
        twice=st.booleans(),
        leaves=st.sampled_from([False, False, True]),
        fetched=OFTEN,
    )
    def forward(self, data: st.DataObject, who: str, shape: Shape, twice: bool, leaves: bool, fetched: bool) -> None:
        """A whole step: plan, upload, inputs at entry, lengths early, tokens late, and the host asks for them."""
        requests = self._chosen(data) if who != "mixed" else list(self.requests)
        if who != "prompts":
            self._make_decodable(requests if who == "decodes" else requests[::2], "seeding")
        kinds = ["prompts" if who == "mixed" and row % 2 else who for row in range(len(requests))]
        drawn = [self._part(data, one, kind, shape) for one, kind in zip(requests, kinds, strict=True)]
        parts = [part for part in drawn if part is not None]
        if parts:
            self._results(self._launch(parts, shape, twice), leaves, fetched)

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), shapes=st.tuples(_SHAPES, _SHAPES), leaves=st.sampled_from([False, False, True]))
    def run_ahead(self, data: st.DataObject, shapes: tuple[Shape, Shape], leaves: bool) -> None:
        """Two decodes of the same requests, one behind the other; the host reads the first when the second runs."""
        self._make_decodable(self.requests, "forward")
        for shape in shapes:
            parts = [part for one in self.requests if (part := self._part(data, one, "decodes", shape)) is not None]
            if not parts:
                return
            asked = len(self.asked)
            self._results(self._launch(parts, shape, False), leaves, True)
            if asked:
                self._fetch(self.asked.pop(asked - 1), "default")

    def _launch(self, parts: Sequence[Part], shape: Shape, twice: bool) -> Launched:
        self._next_step()
        launched = self.forwards.launch(parts, shape)
        relayed = self.forwards.take(parts, shape)
        if levels.full:
            self.forwards.check(launched, relayed)
        self._reached_by(launched)
        if twice:
            self.reached("a plan used twice refused")
            with self.rt.use(self.streams["forward"]), self.refused(Code.FUTURE_CONSUMED):
                self.forwards.inputs(launched.plan, launched.uploaded, shape)
        return launched

    def _part(self, data: st.DataObject, one: Request, who: str, shape: Shape) -> Part | None:
        """What a request puts in, or None if it has to sit this one out."""
        known = self.model.peek(one, "lengths")
        decodes = who != "prompts" and self.model.readable(one, shape.takes)
        if decodes and "lengths" in shape.takes:
            decodes = known is not None and int(known) == one.length
        if not decodes and who == "decodes":
            return None
        query = shape.width if decodes else data.draw(st.integers(1, 3), label="tokens of a prompt")
        if one.bound + query > MOST_TOKENS:
            return None
        if decodes:
            return Part(one, None, query, True)
        self.numbers += 1
        return Part(
            one, tuple(range(self.numbers, self.numbers + query)), query, data.draw(st.booleans(), label="last")
        )

    def _results(self, launched: Launched, leaves: bool, fetched: bool) -> None:
        """Lengths are published early, tokens after sampling; one may have left since the launch."""
        for part in launched.parts:
            known = part.query if part.prompt is not None else 1 + self.numbers % part.query
            part.request.length += known
        sampled = [part.request for part in launched.parts if part.samples]
        if leaves and sampled:
            self._leave(sampled[0], "forward")
            self.reached("left between launch and results")
        here = [one for one in sampled if one in self.requests]  # a request that has left gets no results
        if not here:
            return
        complete = len(here) == len(sampled)
        slots = launched.inputs.sampled_slots if complete else handles_of(here, self.rt)
        late = ("token", "drafts", "hidden", "accepted")
        self._clear_way([one for one in here if one in self.requests], ("lengths", *late))
        early, values = self._values(here, ("lengths",)), self._values(here, late)
        with self.rt.use(self.streams["forward"]):
            self.relay.publish(slots, **self._given(early))
            self.relay.publish(slots, **self._given(values))
            self._published(here, early | values, "forward")
            if fetched:
                self._prefetch(here, ("token", "lengths", "accepted"), slots)

    def _reached_by(self, launched: Launched) -> None:
        decodes = [part.prompt is None for part in launched.parts]
        shape = launched.shape
        self.reached("a forward of prompts alone", not any(decodes))
        self.reached("a forward of decodes alone", all(decodes))
        self.reached("a forward of prompts and decodes", any(decodes) and not all(decodes))
        self.reached("drafts put in", shape.drafts and any(decodes))
        self.reached("padded to a graph's size", bool(shape.pad_tokens))
        self.reached(
            "bounded lengths set right",
            launched.plan.bounded
            and any(part.request.bound > part.request.length + part.query for part in launched.parts),
        )

    # Misuse

    @precondition(lambda self: bool(self.gone))
    @rule(at=st.integers(0, 3), name=st.sampled_from(["token", "lengths"]))
    def misuse_a_handle(self, at: int, name: str) -> None:
        """Who has left gets nothing more, reads nothing, and does not pass for the slot's next owner."""
        slots = self.gone[at % len(self.gone)].handle
        values = self.on_device(np.zeros(1, np.int64))
        self.reached("handle of a slot used again refused", bool(self.pool.is_live(slots.np).any()))
        for call in (
            lambda: self.relay.publish(slots, **{name: values}),
            lambda: self.relay.publish(slots, **{name: [0]}),
            lambda: self.relay.gather(slots, name),
            lambda: self.relay.prefetch(slots, name),
            lambda: self.relay.discard(slots),
            lambda: self.relay.states(slots, name),
        ):
            with self.refused(Code.SLOT_STALE_HANDLE):
                call()

    @precondition(lambda self: bool(self.requests))
    @rule(misuse=st.sampled_from(MISUSES))
    def misuse(self, misuse: Misuse[RelayCase]) -> None:
        """What cannot be meant is refused, and changes nothing."""
        case = RelayCase(self.relay, handles_of(self.requests, self.rt), self.foreign)
        with self.refused(*misuse.expected):
            misuse.call(case)
