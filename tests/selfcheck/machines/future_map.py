"""`FutureMap` in use: forwards of prompts, decodes and both, results that come late, and every misuse."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import Batch, Code, ForwardInputs, ForwardPlan, SlotPool, TokenArray, Violation, invariants, levels
from batchstate._relay import DEVICE, HOST
from batchstate._upload import Extras
from batchstate.columns import mirrored, slot_column
from batchstate.future_map import EntryState, FutureMap, Prefetched, RelayField, relay_field
from batchstate.mirror import MirroredTensor, Slots
from batchstate.runtime import Fence, Stream
from batchstate.testing.fences import LateRuntime
from tests.refusals import RELAY, RelayCase
from tests.selfcheck.machine import Machine, Misuse, ShownByRepr, agree, agree_on, ask, is_behind
from tests.selfcheck.models import snapshot_pages, snapshot_slots
from tests.worlds import Pools

Array = npt.NDArray[Any]

_NUM_DRAFTS = 2
_MOST_TOKENS = 16
_PAGE_SIZE = 2
_STREAMS = st.sampled_from(["default", "forward", "seeding"])
_PADS = st.sampled_from([0, 0, 1, 2])
_OFTEN = st.sampled_from([True, True, True, False])


def declared(hidden: torch.dtype, ragged: bool = False) -> dict[str, RelayField]:
    """One field for each reader, with and without a shape; `hidden` has a dtype that numpy may lack.

    With `ragged` requests put in different numbers of drafts.
    """
    return {
        "token": relay_field(torch.int64, read_by="both", non_negative=True),
        "drafts": relay_field(torch.int64, (_NUM_DRAFTS,), non_negative=True, ragged=ragged),
        "lengths": relay_field(torch.int64, read_by="both"),
        "accepted": relay_field(torch.int64, read_by="host"),
        "hidden": relay_field(hidden, (2, 3)),
    }


class RelayBatch(Batch):
    """The requests of one forward, lengths with its tokens; `bound_lens` is what the host knows of them."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    bound_lens = mirrored(torch.int64, contract="upper_bound")


@final
@attrs.define(eq=False, repr=False)
class RelayRequest(ShownByRepr):
    handle: Slots
    reused: bool = False  # its slot was another request's before
    encoder: int = 0  # tokens of an encoder, which its pages have before the first
    length: int = 0  # tokens in KV memory
    bound: int = 0  # the most tokens that the host knows of: those with pages

    def __repr__(self) -> str:
        return f"<request in slot {self.slot}: {self.length} tokens, at most {self.bound}>"

    @property
    def slot(self) -> int:
        return int(self.handle.np[0])


@final
class RelayModel:
    """The entries of all fields, as a dictionary: (field, slot) -> values, and the bits of readers that took them."""

    def __init__(self, fields: Mapping[str, RelayField]) -> None:
        self.fields = fields
        self._entries: dict[tuple[str, int], tuple[Array, int]] = {}

    def publish(
        self, requests: Iterable[RelayRequest], values: Mapping[str, Array], *, from_host: Sequence[str] = ()
    ) -> None:
        """Each request gets its row of each field; the host knows the values of the fields `from_host`."""
        for row, req in enumerate(requests):
            for name, array in values.items():
                self._entries[name, req.slot] = (array[row].copy(), HOST if name in from_host else 0)

    def state(self, req: RelayRequest, field: str) -> EntryState:
        if (field, req.slot) not in self._entries:
            return EntryState.UNWRITTEN
        readers = self.fields[field].readers
        return EntryState.CONSUMED if self._entries[field, req.slot][1] & readers == readers else EntryState.PUBLISHED

    def unread(self, req: RelayRequest, field: str) -> bool:
        return self.state(req, field) is EntryState.PUBLISHED

    def refusal(self, requests: Iterable[RelayRequest], fields: Iterable[str], reader: int) -> Code | None:
        for name in fields:
            entries = [self._entries.get((name, req.slot)) for req in requests]
            if None in entries:
                return Code.FUTURE_UNWRITTEN
            if any(entry is not None and entry[1] & reader for entry in entries):
                return Code.FUTURE_CONSUMED
        return None

    def readable(self, req: RelayRequest, fields: Iterable[str]) -> bool:
        return self.refusal([req], fields, DEVICE) is None

    def peek(self, req: RelayRequest, field: str) -> Array | None:
        """The value of an entry, taken or not; None where nothing was published."""
        return self._entries.get((field, req.slot), (None, 0))[0]

    def take(self, requests: Sequence[RelayRequest], field: str, reader: int, num_rows: int) -> Array:
        declared = self.fields[field]
        dtype = np.int64 if declared.dtype is torch.int64 else np.float32
        values = np.zeros((num_rows, *declared.shape), dtype)
        for row, req in enumerate(requests):
            values[row], taken = self._entries[field, req.slot]
            self._entries[field, req.slot] = (values[row].copy(), taken | reader)
        return values

    def clear(self, requests: Iterable[RelayRequest], fields: Iterable[str]) -> None:
        names = list(fields)
        for req in requests:
            for name in names:
                self._entries.pop((name, req.slot), None)


@final
@attrs.frozen(eq=False)
class Asked:
    """The entries of a `prefetch`: whose they are, and their values at that time."""

    prefetched: Prefetched
    requests: Sequence[RelayRequest]
    values: Mapping[str, Array]


@final
@attrs.frozen(eq=False)
class ForwardPart:
    request: RelayRequest
    prompt: tuple[int, ...] | None  # ids; None where the relay has them
    query: int  # how many
    samples: bool  # a decode, or the end of a prompt


@final
@attrs.frozen(eq=False)
class Shape:
    drafts: bool  # decodes have a token and drafts
    bounded: bool  # the host knows only bounds of the lengths of decodes
    lengths: bool  # the field of lengths is named; with bounds it has to be
    pad_rows: int
    pad_tokens: int | None
    has_ids: bool
    arrays: bool  # further values of tokens come from the host
    deferred: bool  # these, and ids of prompts, are uploaded at its entry
    alone: bool  # where no request waits for the relay, it takes no part, and there is no batch
    carried: bool  # it was planned on another rank
    int32: tuple[str, ...]  # inputs that kernels take as int32

    @property
    def ids(self) -> tuple[str, ...]:
        if not self.has_ids:
            return ()
        return ("token", "drafts") if self.drafts else ("token",)

    @property
    def takes(self) -> tuple[str, ...]:
        lengths = self.bounded or (self.lengths and self.has_ids)
        return (*self.ids, "lengths") if lengths else self.ids

    @property
    def width(self) -> int:
        return 1 + _NUM_DRAFTS if self.drafts else 1


@final
@attrs.frozen(eq=False)
class Launched:
    """A forward whose inputs are made, from the parts of its requests."""

    parts: Sequence[ForwardPart]
    shape: Shape
    plan: ForwardPlan
    uploaded: Extras
    inputs: ForwardInputs


_SHAPES = st.builds(
    Shape,
    drafts=st.booleans(),
    bounded=st.booleans(),
    lengths=st.booleans(),
    pad_rows=_PADS,
    pad_tokens=st.sampled_from([None, 0, 3]),
    has_ids=_OFTEN,
    arrays=st.booleans(),
    deferred=_OFTEN,
    alone=st.booleans(),
    carried=st.sampled_from([False, False, True]),
    int32=st.sampled_from([(), ("positions",), ("last_token_indices", "slot_mapping")]),
)


class FutureMapMachine(Machine):
    """An engine that runs ahead of its device, in all the orders it can, while requests come and go."""

    NAME = "future_map"
    LAGS = True
    TARGETS = (
        "overwriting unread refused",
        "fewer drafts than there is room for",
        "read before the publish refused",
        "read a second time refused",
        "handle of a slot used again refused",
        "a slot used by another request",
        "a request freed under its forward refused",
        "cleared with an entry unread",
        "left with an entry unread",
        "left between launch and results",
        "read on another stream than the publish",
        "fetched while the device was not there yet",
        "fetched after its slot was freed",
        "fetched after its entry was overwritten",
        "true lengths of a forward without ids",
        "a forward without the relay",
        "tokens of an encoder before the first",
        "bounded lengths set right",
        "a plan used twice refused",
        "a plan used late",
        "a plan of pages that changed refused",
        "a plan of other rows refused",
        "results of a former owner refused",
    )

    @initialize(
        size=st.integers(2, 5),
        hidden=st.sampled_from([torch.float32, torch.bfloat16]),
        data=st.data(),
        waiting=st.integers(0, 3),
        encoder=st.sampled_from([0, 0, 1, 3]),
        shapes=st.tuples(_SHAPES, _SHAPES),
    )
    def begin(
        self,
        size: int,
        hidden: torch.dtype,
        data: st.DataObject,
        waiting: int,
        encoder: int,
        shapes: tuple[Shape, Shape],
    ) -> None:
        """Opens a relay so small that slots are used again and again; requests that are `waiting` decode."""
        self.open()
        self.streams = {name: self.rt.stream(name) for name in ("forward", "seeding")}
        self.streams["default"] = self.rt.current_stream
        pages = 2 * size * _MOST_TOKENS // _PAGE_SIZE
        self.pools = Pools.of(self.rt, size, pages=pages, page_size=_PAGE_SIZE, longest=_MOST_TOKENS)
        self.pool, self.table, self.pages = self.pools.slots, self.pools.table, self.pools.pages
        self.pages.register_kv(self.rt.device_zeros((self.pages.location_capacity, 2), torch.float32, name="kv"))
        fields = declared(hidden, ragged=hidden is torch.bfloat16)
        self.relay = FutureMap(self.pool, fields)
        self.model = RelayModel(fields)
        self.foreign = SlotPool(self.rt, 1, name="other").take(1)
        self.requests: list[RelayRequest] = []
        self.gone: deque[RelayRequest] = deque(maxlen=4)
        self.asked: list[Asked] = []
        self.steps: deque[list[Fence]] = deque()
        self.published_on: dict[tuple[str, int], Stream] = {}
        self.numbers = 0
        if waiting:
            self.arrive(waiting, False, encoder)
            self.write(data, ("hidden",), "default", 0, "host", False, False)
            self.run_ahead(data, shapes, False, False)

    # Checks

    def check(self) -> None:
        """States and slot 0 of every field, and every invariant of the pools; below `full` only the rules check."""
        if levels.full:
            self.relay.check()
            self.pages.verify()
            self.pool.verify()
            expected = {name: [self.model.state(req, name) for req in self.requests] for name in self.model.fields}
            agree(expected, self._states(), "states of entries")

    def snapshot(self) -> object:
        counted = self.rt.counters
        return (
            self._states(),
            snapshot_slots(self.pool),
            snapshot_pages(self.pages),
            (counted.device_operations, counted.host_to_device_copies, counted.device_to_host_copies),
        )

    def _states(self) -> dict[str, list[EntryState]]:
        handles = self._handles(self.requests)
        return {name: self.relay.states(handles, name) for name in self.relay.fields}

    def _agree_device(self, expected: Array, tensor: torch.Tensor, label: str) -> None:
        if levels.full:
            exact = tensor.to(torch.float32) if tensor.dtype is torch.bfloat16 else tensor
            agree_on(expected, self.rt.inspect(exact), label)

    # Time

    @rule(n=st.integers(1, 6))
    def complete(self, n: int) -> None:
        if isinstance(self.rt, LateRuntime):
            self.rt.complete(n)

    @rule()
    def synchronize(self) -> None:
        self.rt.synchronize()
        agree(True, all(asked.prefetched.ready() for asked in self.asked), "ready when nothing is in flight")

    @rule()
    def next_step(self) -> None:
        """The next step begins, once the one before the last is over: no runtime is run deeper than declared."""
        streams = (*self.streams.values(), self.relay._private)
        self.steps.append([self.rt.record(stream) for stream in streams])
        while len(self.steps) >= self.rt.steps_in_flight:
            over = self.steps.popleft()
            for fence in over:  # a host that waits for all at once would hide every race
                fence.wait()
        self.rt.next_step()

    # Requests

    @rule(n=st.integers(1, 3), prebuilt=st.booleans(), encoder=st.sampled_from([0, 0, 1, 3]))
    def arrive(self, n: int, prebuilt: bool, encoder: int) -> None:
        """Requests take slots; for those that arrive prebuilt, the host publishes what a decode takes."""
        slots = self.pool.take(min(n, self.pool.stats.free))
        handles = slots.split([1] * len(slots))
        came = [RelayRequest(handle, bool(handle.generations[0] > 1), encoder) for handle in handles]
        self.requests += came
        self.reached("a slot used by another request", any(req.reused for req in came))
        if prebuilt:
            self._make_decodable(came, "seeding")

    @precondition(lambda self: bool(self.requests))
    @rule(at=st.integers(0, 4), behind=st.sampled_from([None, "forward", "default"]))
    def leave(self, at: int, behind: str | None) -> None:
        self._leave(self.requests[at % len(self.requests)], behind)

    def _leave(self, req: RelayRequest, behind: str | None) -> None:
        after = None if behind is None else self.rt.record(self.streams[behind])
        try:
            self.pages.release_requests(req.handle, after=after)
        except Violation as violation:
            if after is not None or violation.code is not Code.SLOT_IN_FLIGHT:
                raise
            self.reached("a request freed under its forward refused")
            self.pages.release_requests(req.handle, after=self.rt.record(self.streams["forward"]))
        self._left(req)

    def _left(self, req: RelayRequest) -> None:
        self.reached("left with an entry unread", self.model.unread(req, "token"))
        self.model.clear([req], self.model.fields)
        self.requests.remove(req)
        self.gone.append(req)

    @precondition(lambda self: bool(self.requests))
    @rule(among=st.integers(0, 3))
    def clear(self, among: int) -> None:
        """The host waits for everything and begins anew, now and then: no request and no entry is left."""
        if among:
            return
        self.rt.synchronize()
        self.pool.clear()
        self.reached("cleared with an entry unread", any(self.model.unread(req, "token") for req in self.requests))
        for req in list(self.requests):
            self._left(req)

    # Parts of rules

    def _chosen(self, data: st.DataObject) -> list[RelayRequest]:
        order = data.draw(st.permutations(self.requests), label="requests")
        return order[: data.draw(st.integers(1, len(order)), label="how many")]

    def _readers(self, data: st.DataObject, names: Sequence[str], reader: int) -> list[RelayRequest]:
        """Requests, mostly those whose entries can be read."""
        chosen = self._chosen(data)
        able = [req for req in chosen if self.model.refusal([req], names, reader) is None]
        sound: Any = data.draw(_OFTEN, label="there")
        return able if able and sound else chosen

    def _handles(self, requests: Sequence[RelayRequest]) -> Slots:
        return Slots.cat([req.handle for req in requests]) if requests else Slots.from_host(self.rt, [])

    def _padded(self, requests: Sequence[RelayRequest], pads: int) -> Slots:
        handles = self._handles(requests)
        return handles.pad(len(handles) + pads) if pads else handles

    def _values(self, requests: Sequence[RelayRequest], names: Sequence[str]) -> dict[str, Array]:
        """New numbers; the lengths are what they are."""
        values: dict[str, Array] = {}
        for name in names:
            shape = (len(requests), *self.model.fields[name].shape)
            if name == "lengths":
                values[name] = np.array([req.length for req in requests], np.int64)
                continue
            self.numbers += 1
            numbers = np.arange(int(np.prod(shape))).reshape(shape) + 7 * self.numbers
            values[name] = numbers if name != "hidden" else (numbers % 251).astype(np.float32)
            if self.model.fields[name].ragged:  # each request has its own number of them
                counts = (np.arange(len(requests)) + self.numbers) % (1 + _NUM_DRAFTS)
                values[name][np.arange(_NUM_DRAFTS) >= counts[:, None]] = -1
        return values

    def _device_values(self, values: Mapping[str, Array], mirrored: bool = False) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, array in values.items():
            if mirrored and name != "hidden":
                made[name] = MirroredTensor.from_host(self.rt, array)
            else:
                made[name] = self.on_device(array).to(self.model.fields[name].dtype)
        return made

    def _from_host(self, name: str, array: Array) -> Array:
        """Host values: numbers, or the bits of a dtype that numpy lacks."""
        if self.model.fields[name].dtype is not torch.bfloat16:
            return array
        return torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy()

    def _published(
        self,
        requests: Sequence[RelayRequest],
        values: Mapping[str, Array],
        stream: str,
        *,
        from_host: Sequence[str] = (),
    ) -> None:
        self.model.publish(requests, values, from_host=from_host)
        self.published_on |= {(name, req.slot): self.streams[stream] for req in requests for name in values}
        if isinstance(self.rt, LateRuntime):
            self._check_order({req.slot for req in requests}, values, self.rt.record(self.streams[stream]))

    def _check_order(self, slots: set[int], names: Iterable[str], written: Fence) -> None:
        """The write waits for reads of what was there, also those for a request that has left since."""
        for asked in self.asked:
            for name in asked.values:
                if name in names and not slots.isdisjoint(req.slot for req in asked.requests):
                    ask(
                        invariants.future_order,
                        is_behind(written, asked.prefetched._read[1]),  # type: ignore[index]
                        f"the read of {name!r} of slots {sorted(slots)} for the host",
                        "a write into the same memory",
                        "a wait for that read",
                        object=self.relay,
                        operation="check",
                    )

    def _clear_way(self, requests: Sequence[RelayRequest], names: Sequence[str]) -> None:
        for name in names:
            unread = [req for req in requests if self.model.unread(req, name)]
            if unread:
                self.relay.discard(self._handles(unread), name)
                self.model.clear(unread, [name])

    def _make_decodable(self, requests: Sequence[RelayRequest], stream: str) -> None:
        """Publishes from the host the fields of a decode, for requests that come back or arrive prebuilt."""
        names = ("token", "drafts", "lengths")
        lacking = [req for req in requests if not self.model.readable(req, names)]
        if lacking:
            self._clear_way(lacking, names)
            values = self._values(lacking, names)
            with self.rt.use(self.streams[stream]):
                self.relay.publish(self._handles(lacking), **values)
            self._published(lacking, values, stream, from_host=names)

    # Entries

    @precondition(lambda self: bool(self.requests))
    @rule(
        data=st.data(),
        names=st.sampled_from([("token",), ("lengths",), ("token", "drafts", "accepted"), ("hidden", "token")]),
        stream=_STREAMS,
        pads=_PADS,
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
        """Values are published; over entries that a reader has not taken, that is refused."""
        requests = self._chosen(data)
        if cleared:
            self._clear_way(requests, names)
        from_host = {"device": (), "host": names, "both": names[:1]}[way]
        values = self._values(requests, names)
        slots = self._padded(requests, pads)
        rows = {
            name: np.pad(array, [(0, pads), *[(0, 0)] * (array.ndim - 1)], constant_values=-1)
            for name, array in values.items()
        }
        unread = any(self.model.unread(req, name) for req in requests for name in names)
        with self.rt.use(self.streams[stream]):
            published: Mapping[str, Any] = self._device_values(rows, mirrored) | {
                name: self._from_host(name, rows[name]) for name in from_host
            }
            if unread:
                self.reached("overwriting unread refused")
                self.refused(Code.FUTURE_UNREAD_OVERWRITTEN, lambda: self.relay.publish(slots, **published))
                return
            self.relay.publish(slots, **published)
        self._published(requests, values, stream, from_host=from_host)

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), names=st.sampled_from([(), ("token",), ("lengths", "hidden")]))
    def discard(self, data: st.DataObject, names: tuple[str, ...]) -> None:
        requests = self._chosen(data)
        self.relay.discard(self._handles(requests), *names)
        self.model.clear(requests, names or self.model.fields)

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), name=st.sampled_from(["token", "drafts", "lengths", "hidden"]), stream=_STREAMS, pads=_PADS)
    def gather(self, data: st.DataObject, name: str, stream: str, pads: int) -> None:
        """A forward takes entries; those that were not published, or were taken before, are refused."""
        requests = self._readers(data, [name], DEVICE)
        slots = self._padded(requests, pads)
        with self.rt.use(self.streams[stream]):
            if self._refused_read(requests, [name], DEVICE, lambda: self.relay.gather(slots, name)):
                return
            rows = self.relay.gather(slots, name)
            self.reached(
                "read on another stream than the publish",
                any(self.published_on[name, req.slot] != self.streams[stream] for req in requests),
            )
            self._agree_device(self.model.take(requests, name, DEVICE, len(slots)), rows, f"gather of {name}")

    def _refused_read(self, requests: Sequence[RelayRequest], names: Sequence[str], reader: int, read: Any) -> bool:
        code = self.model.refusal(requests, names, reader)
        if code is None:
            return False
        self.reached(
            "read before the publish refused" if code is Code.FUTURE_UNWRITTEN else "read a second time refused"
        )
        self.refused(code, read)
        return True

    # To the host

    @precondition(lambda self: bool(self.requests))
    @rule(
        data=st.data(),
        names=st.sampled_from([("token",), ("lengths", "token"), ("accepted",), ("token", "accepted", "lengths")]),
        stream=_STREAMS,
        pads=_PADS,
    )
    def prefetch(self, data: st.DataObject, names: tuple[str, ...], stream: str, pads: int) -> None:
        requests = self._readers(data, names, HOST)
        with self.rt.use(self.streams[stream]):
            self._prefetch(requests, names, self._padded(requests, pads))

    def _prefetch(self, requests: Sequence[RelayRequest], names: Sequence[str], slots: Slots) -> None:
        if self._refused_read(requests, names, HOST, lambda: self.relay.prefetch(slots, *names)):
            return
        syncs = self.rt.counters.forced_syncs, self.rt.counters.fence_waits
        asked = self.relay.prefetch(slots, *names)
        agree(syncs, (self.rt.counters.forced_syncs, self.rt.counters.fence_waits), "waits of a prefetch")
        agree(False, isinstance(self.rt, LateRuntime) and asked.ready(), "ready while the device is not there")
        values = {name: self.model.take(requests, name, HOST, len(requests)) for name in names}
        self.asked.append(Asked(asked, list(requests), values))

    @precondition(lambda self: bool(self.asked))
    @rule(at=st.integers(0, 5), stream=_STREAMS)
    def fetch(self, at: int, stream: str) -> None:
        """The host reads the entries as they were when it asked, whatever has become of the slots."""
        self._fetch(self.asked.pop(at % len(self.asked)), stream)

    def _fetch(self, asked: Asked, stream: str) -> None:
        self.reached(
            "fetched after its slot was freed", any(request not in self.requests for request in asked.requests)
        )
        self.reached("fetched while the device was not there yet", not asked.prefetched.ready())
        with self.rt.use(self.streams[stream]):
            results = asked.prefetched.resolve()
            for name, values in asked.values.items():
                now = [(row, self.model.peek(r, name)) for row, r in enumerate(asked.requests) if r in self.requests]
                self.reached(
                    "fetched after its entry was overwritten",
                    any(value is not None and value != values[row] for row, value in now),
                )
                agree_on(values, np.array(results[name].np), f"{name}, fetched")
                self._agree_device(values, results[name].device, f"{name}, fetched, on the device")
        self._line_up(asked, results)
        agree(True, asked.prefetched.ready(), "ready once it was fetched")

    def _line_up(self, asked: Asked, results: Mapping[str, MirroredTensor]) -> None:
        """Requests that are still here find their rows by handle, in any order; the next owner of a slot finds none."""
        here = self._with_results(asked)[::-1]
        if here:
            lined_up = {name: results[name].aligned(self._handles(here)) for name in asked.values}
            rows = [asked.requests.index(request) for request in here]
            for name, values in asked.values.items():
                agree_on(values[rows], lined_up[name], f"{name} of requests that are here")
        slots = {request.slot for request in asked.requests}
        for request in self.requests:
            if request.slot in slots and request not in asked.requests:
                self.reached("results of a former owner refused")
                self.refused(Code.DERIVED_STALE, partial(next(iter(results.values())).aligned, request.handle))

    def _with_results(self, asked: Asked) -> list[RelayRequest]:
        return [request for request in self.requests if request in asked.requests]

    @precondition(lambda self: bool(self.asked))
    @rule()
    def forget(self) -> None:
        """Results that the host asked for are dropped: their memory goes back by itself."""
        self.asked.pop(0)

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), name=st.sampled_from(["token", "accepted"]))
    def resolve(self, data: st.DataObject, name: str) -> None:
        requests = self._readers(data, [name], HOST)
        slots = self._handles(requests)
        if not self._refused_read(requests, [name], HOST, lambda: self.relay.resolve(slots, name)):
            results = self.relay.resolve(slots, name)
            agree_on(self.model.take(requests, name, HOST, len(requests)), np.array(results.np), f"resolve of {name}")

    # Forwards

    @precondition(lambda self: bool(self.requests))
    @rule(
        data=st.data(),
        who=st.sampled_from(["prompts", "decodes", "mixed"]),
        shape=_SHAPES,
        twice=st.booleans(),
        leaves=st.sampled_from([False, False, True]),
        fetched=_OFTEN,
    )
    def forward(self, data: st.DataObject, who: str, shape: Shape, twice: bool, leaves: bool, fetched: bool) -> None:
        """A whole step: plan, upload, inputs at entry, lengths early, tokens late, and the host asks for them."""
        requests = self._chosen(data) if who != "mixed" else list(self.requests)
        if who != "prompts":
            self._make_decodable(requests if who == "decodes" else requests[::2], "seeding")
        kinds = ["prompts" if who == "mixed" and row % 2 else who for row in range(len(requests))]
        drawn = [self._part(data, req, kind, shape) for req, kind in zip(requests, kinds, strict=True)]
        parts = [part for part in drawn if part is not None]
        if parts:
            self._results(self._launch(parts, shape, twice), leaves, fetched)

    @precondition(lambda self: bool(self.requests))
    @rule(
        data=st.data(),
        shapes=st.tuples(_SHAPES, _SHAPES),
        leaves=st.sampled_from([False, False, True]),
        replaced=st.booleans(),
    )
    def run_ahead(self, data: st.DataObject, shapes: tuple[Shape, Shape], leaves: bool, replaced: bool) -> None:
        """Two decodes of the same requests, one behind the other; the host reads the first when the second runs.

        By then a request may have left, and another have its slot.
        """
        self._make_decodable(self.requests, "forward")
        for shape in shapes:
            parts = [part for req in self.requests if (part := self._part(data, req, "decodes", shape)) is not None]
            if not parts:
                return
            asked = len(self.asked)
            self._results(self._launch(parts, shape, False), leaves, True)
            if asked:
                first = self.asked.pop(asked - 1)
                for request in self._with_results(first)[:replaced]:
                    self._leave(request, None)
                    self.arrive(1, False, 0)
                self._fetch(first, "default")

    def _launch(self, parts: Sequence[ForwardPart], shape: Shape, twice: bool) -> Launched:
        self.next_step()
        requests = [part.request for part in parts]
        self._make_exact([part.request for part in parts if not shape.bounded or part.prompt is not None])
        queries = np.array([part.query for part in parts], dtype=np.int64)
        bounds = np.array([req.bound for req in requests], dtype=np.int64) + queries
        exact = np.array([req.length for req in requests], dtype=np.int64) + queries
        handles = self._handles(requests)
        encoders = self._encoders(requests)
        extension = self.pages.extend(handles, bounds + encoders)
        true = self.rt.upload([exact]).view(0)
        bound_lens = MirroredTensor.from_pair(self.rt, bounds, true, contract="upper_bound")
        batch = RelayBatch.build(self.rt, slots=handles, seq_lens=exact, bound_lens=bound_lens)
        if shape.pad_rows:
            batch = batch.pad(len(parts) + shape.pad_rows)
        plan = ForwardPlan.of(
            batch.slots,
            batch.bound_lens if shape.bounded else batch.seq_lens,
            queries,
            prompt_ids=[part.prompt for part in parts],
            samples=[part.samples for part in parts],
            pages=self.pages,
            kv_offset=encoders if encoders.any() else None,
            pad_tokens=None if shape.pad_tokens is None else int(queries.sum()) + shape.pad_tokens,
            has_ids=shape.has_ids,
            deferred=shape.deferred,
            int32=shape.int32,
            token_arrays=self._token_arrays(parts) if shape.arrays else None,
        )
        if shape.carried:
            plan = ForwardPlan.from_bytes(plan.to_bytes(), self.pool, pages=self.pages)
        alone = shape.alone and not plan.relay_rows.size
        writes = [extension.entry()]
        uploaded = plan.upload(writes=writes) if alone else batch.upload(writes=writes, extras=plan.extras)
        with self.rt.use(self.streams["forward"]):
            launched = Launched(parts, shape, plan, uploaded, self._inputs(plan, uploaded, shape))
            self.table.read_until(self.rt.record())
        for req, query in zip(requests, queries.tolist(), strict=True):
            req.bound += query
        ids = [self._ids(part, shape) for part in parts]
        if levels.full:
            self._check_inputs(launched, ids)
        self.reached("true lengths of a forward without ids", not shape.has_ids and plan.bounded)
        self.reached("a forward without the relay", alone)
        self.reached("tokens of an encoder before the first", plan.kv_offset is not None)
        loose = any(req.bound > req.length + query for req, query in zip(requests, queries.tolist(), strict=True))
        self.reached("bounded lengths set right", plan.bounded and loose)
        if twice:
            self.reached("a plan used twice refused")
            with self.rt.use(self.streams["forward"]):
                self.refused(Code.FUTURE_CONSUMED, lambda: self._inputs(plan, uploaded, shape))
        return launched

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), change=st.sampled_from(("other rows", "nothing", "grow", "truncate", "release")))
    def plan_late(self, data: st.DataObject, change: str) -> None:
        """A plan and a table write are used late: not once their pages have changed, and not for other rows."""
        chosen = self.requests if change == "other rows" else self._chosen(data)
        requests = [req for req in chosen if req.length + req.encoder < _MOST_TOKENS]
        if not requests:
            return
        self.next_step()
        self._make_exact(requests)
        handles, lens = self._handles(requests), np.array([req.length for req in requests], dtype=np.int64)
        encoders = self._encoders(requests)
        held = np.where(lens > 0, lens + encoders, 0)  # with the first token an encoder's are written
        extension = self.pages.extend(handles, lens + 1 + encoders)
        batch = RelayBatch.build(self.rt, slots=handles, seq_lens=lens + 1, bound_lens=lens + 1)
        prompts, none = [[1]] * len(requests), np.zeros(len(requests), dtype=np.bool_)
        plan = ForwardPlan.of(
            batch.slots, batch.seq_lens, prompt_ids=prompts, samples=none, pages=self.pages, kv_offset=encoders
        )
        write, uploaded, later = extension.entry(), batch.upload(extras=dict(plan.extras)), batch
        if change == "grow":
            self.pages.grow(handles, _MOST_TOKENS)
        elif change == "truncate":
            self.pages.truncate(handles, held, after=self.rt.record())
        elif change == "release":
            self.pages.release(handles, after=self.rt.record())
            batch.upload(writes=[self.pages.extend(handles, held).entry()])
            self.pages.extend(handles, lens + 1 + encoders)  # as many tokens as were planned, elsewhere perhaps
        elif change == "other rows":
            later = batch.filter(np.arange(len(requests))[::-1])
            uploaded = later.upload(extras=dict(plan.extras))
        enter = partial(self.relay.resolve_forward_inputs, plan, uploaded, ids="token", req_to_token=self.table)
        if change in ("truncate", "release"):
            self.reached("a plan of pages that changed refused")
            self.refused(Code.DERIVED_STALE, lambda: later.upload(writes=[write]), extension.entry)
        if change in ("truncate", "release") or (change == "other rows" and len(requests) > 1):
            self.reached("a plan of other rows refused", change == "other rows")
            self.refused(Code.DERIVED_STALE, lambda: later.upload(extras=plan.extras), enter)
        else:
            self.reached("a plan used late")
            later.upload(writes=[write])
            enter()
        self.pages.truncate(handles, held, after=self.rt.record())

    def _inputs(self, plan: ForwardPlan, uploaded: Extras, shape: Shape) -> ForwardInputs:
        if shape.alone and not plan.relay_rows.size:
            return ForwardInputs.of(plan, uploaded)
        return self.relay.resolve_forward_inputs(
            plan,
            uploaded,
            ids=shape.ids[0] if len(shape.ids) == 1 else list(shape.ids),
            lengths="lengths" if "lengths" in shape.takes else None,
            req_to_token=self.table,
        )

    def _encoders(self, requests: Sequence[RelayRequest]) -> npt.NDArray[np.int64]:
        return np.array([req.encoder for req in requests], dtype=np.int64)

    def _token_arrays(self, parts: Sequence[ForwardPart]) -> dict[str, TokenArray]:
        """A kind and a place in a grid for each token of a prompt; others have the kind 5, and lie at 0."""
        prompts = [part.prompt for part in parts]
        kinds = [None if ids is None else [token % 3 for token in ids] for ids in prompts]
        grids = [None if ids is None else [[token, -token] for token in ids] for ids in prompts]
        return {
            "kinds": TokenArray(kinds, torch.int32, fill=5, non_negative=True),
            "grids": TokenArray(grids, torch.float32, (2,)),
        }

    def _make_exact(self, requests: Sequence[RelayRequest]) -> None:
        """The host has learned the lengths: pages beyond go back."""
        loose = [req for req in requests if req.bound > req.length]
        if loose:
            held = np.array([req.length + req.encoder for req in loose], dtype=np.int64)
            self.pages.truncate(self._handles(loose), held, after=self.rt.record(self.streams["forward"]))
            for req in loose:
                req.bound = req.length

    def _ids(self, part: ForwardPart, shape: Shape) -> list[int]:
        """The ids of a request; the model takes those of a decode, as the forward did."""
        if part.prompt is not None:
            return list(part.prompt)
        taken = {name: self.model.take([part.request], name, DEVICE, 1) for name in shape.takes}
        return [int(number) for name in shape.ids for number in taken[name].reshape(-1)][: part.query]

    def _check_inputs(self, launched: Launched, ids_of_parts: Sequence[list[int]]) -> None:
        parts, inputs, plan, shape = launched.parts, launched.inputs, launched.plan, launched.shape
        ids = [number for of_part in ids_of_parts for number in of_part]
        tokens = [(part.request, part.request.length + at) for part in parts for at in range(part.query)]
        positions = [at for _, at in tokens]
        locations = [self.pools.locations(req.slot, [at + req.encoder])[0] for req, at in tokens]
        starts = [0, *np.cumsum([part.query for part in parts]).tolist()]
        counts = starts[-1], starts[-1] + (shape.pad_tokens or 0)
        agree(counts, (plan.num_tokens, plan.num_padded_tokens), "token counts")
        behind, pads = [0] * (shape.pad_tokens or 0), [0] * shape.pad_rows
        last = [starts[row + 1] - 1 for row, part in enumerate(parts) if part.samples]
        if len(last) == len(parts):
            last += pads
        slot_mapping = torch.empty(0) if inputs.slot_mapping is None else inputs.slot_mapping
        for name, expected, actual in (
            ("slots", [part.request.slot for part in parts] + pads, inputs.slots),
            ("input_ids", ids + behind if shape.has_ids else [], inputs.input_ids if shape.has_ids else torch.empty(0)),
            ("positions", positions + behind, inputs.positions),
            ("slot_mapping", locations + behind, slot_mapping),
            ("query_start_loc", starts + [starts[-1]] * shape.pad_rows, inputs.query_start_loc),
            ("kv_lens", [part.request.length + part.query for part in parts] + pads, inputs.kv_lens),
            ("last_token_indices", last, inputs.last_token_indices),
        ):
            agree(expected, self.rt.inspect(actual).tolist(), f"{name} of a forward of {shape}")
            agree(True, name not in shape.int32 or actual.dtype == torch.int32, f"{name} is int32")
        host_ids = [token for part in parts for token in (part.prompt or [None] * part.query)]
        unknown = [None] * (shape.pad_tokens or 0)
        for name, values in (
            ("kinds", [5 if token is None else token % 3 for token in host_ids + unknown]),
            ("grids", [[0, 0] if token is None else [token, -token] for token in host_ids + unknown]),
        ):
            if shape.arrays:
                agree(values, self.rt.inspect(inputs.arrays[name]).tolist(), f"{name} of a forward of {shape}")
        sampled = [part.request.slot for part in parts if part.samples]
        agree(sampled, [slot for slot in inputs.sampled_slots.np.tolist() if slot], "sampled slots")

    def _part(self, data: st.DataObject, req: RelayRequest, who: str, shape: Shape) -> ForwardPart | None:
        """The part of a request in a forward, or None if it has to sit this one out."""
        length = self.model.peek(req, "lengths")
        decodes = who != "prompts" and self.model.readable(req, shape.takes)
        if decodes and "lengths" in shape.takes:
            decodes = length is not None and int(length) == req.length
        if not decodes and who == "decodes":
            return None
        query = shape.width if decodes else data.draw(st.integers(1, 3), label="tokens of a prompt")
        if decodes and "drafts" in shape.ids and self.model.fields["drafts"].ragged:
            query = 1 + int(np.count_nonzero(np.asarray(self.model.peek(req, "drafts")) >= 0))
            self.reached("fewer drafts than there is room for", query < shape.width)
        if req.bound + req.encoder + query > _MOST_TOKENS:
            return None
        if decodes:
            return ForwardPart(req, None, query, True)
        self.numbers += 1
        return ForwardPart(
            req, tuple(range(self.numbers, self.numbers + query)), query, data.draw(st.booleans(), label="last")
        )

    def _results(self, launched: Launched, leaves: bool, fetched: bool) -> None:
        """Lengths are published early, tokens after sampling; one may have left since the launch."""
        for part in launched.parts:
            accepted = part.query if part.prompt is not None else 1 + self.numbers % part.query
            part.request.length += accepted
        sampled = [part.request for part in launched.parts if part.samples]
        if leaves and sampled:
            self._leave(sampled[0], "forward")
            self.reached("left between launch and results")
        here = [req for req in sampled if req in self.requests]  # a request that has left gets no results
        if not here:
            return
        complete = len(here) == len(sampled)
        slots = launched.inputs.sampled_slots if complete else self._handles(here)
        late = ("token", "drafts", "hidden", "accepted")
        self._clear_way([req for req in here if req in self.requests], ("lengths", *late))
        early, values = self._values(here, ("lengths",)), self._values(here, late)
        with self.rt.use(self.streams["forward"]):
            self.relay.publish(slots, **self._device_values(early))
            self.relay.publish(slots, **self._device_values(values))
            self._published(here, early | values, "forward")
            if fetched:
                self._prefetch(here, ("token", "lengths", "accepted"), slots)

    # Misuse

    @precondition(lambda self: bool(self.gone))
    @rule(at=st.integers(0, 3), name=st.sampled_from(["token", "lengths"]))
    def misuse_a_handle(self, at: int, name: str) -> None:
        """A request that has left gets nothing more, reads nothing, and does not pass for the slot's next owner."""
        slots = self.gone[at % len(self.gone)].handle
        values = self.on_device(np.zeros(1, np.int64))
        self.reached("handle of a slot used again refused", bool(self.pool.is_live(slots.np).any()))
        self.refused(
            Code.SLOT_STALE_HANDLE,
            lambda: self.relay.publish(slots, **{name: values}),
            lambda: self.relay.publish(slots, **{name: [0]}),
            lambda: self.relay.gather(slots, name),
            lambda: self.relay.prefetch(slots, name),
        )

    @precondition(lambda self: bool(self.requests))
    @rule(misuse=st.sampled_from(RELAY))
    def misuse(self, misuse: Misuse[RelayCase]) -> None:
        self.refuses(misuse, RelayCase(self.relay, self._handles(self.requests), self.foreign))
