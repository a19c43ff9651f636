"""What the relay machine drives: requests that come and go on a device that lags, and a model of their entries."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import invariants, levels
from batchstate.future_map import EntryState, FutureMap, Prefetched
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.pages import PagePool
from batchstate.pools import SlotPool
from batchstate.runtime import CpuRuntime, Fence, Runtime, Stream
from batchstate.testing.late import LateRuntime, is_behind
from batchstate.testing.machine import Machine, agree, agree_on
from batchstate.testing.machines.future_map_model import RelayModel, Request, declared, handles_of
from batchstate.testing.snapshots import snapshot_pages, snapshot_slots

Array = npt.NDArray[Any]

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
        return self.prefetched._made[1]


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
        self.table = self.pool.table("req_to_token", (MOST_TOKENS,), holds="token", host=True)
        self.pages = PagePool(
            self.rt,
            self.pool,
            2 * size * MOST_TOKENS // _PAGE_SIZE,
            _PAGE_SIZE,
            max_tokens_per_request=MOST_TOKENS,
            token_table=self.table,
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

    def judge(self) -> None:
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
        self, requests: Sequence[Request], values: Mapping[str, Array], stream: str, *, seeded: bool = False
    ) -> None:
        self.model.publish(requests, values, seeded=seeded)
        self.published_on |= {(name, one.slot): self.streams[stream] for one in requests for name in values}
        if isinstance(self.rt, LateRuntime):
            self._judge_order({one.slot for one in requests}, values, self.rt.record(self.streams[stream]))

    def _judge_order(self, slots: set[int], names: Iterable[str], written: Fence) -> None:
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
                        operation="judge",
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
                self.relay.seed(handles_of(lacking, self.rt), **values)
            self._published(lacking, values, stream, seeded=True)
