"""Entries of a relay against a dictionary, on three streams and under fences that complete late."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from batchstate.indices import Slots
from batchstate.relaying.fields import DEVICE, HOST
from batchstate.testing.late import LateRuntime
from batchstate.testing.machine import agree, agree_on
from batchstate.testing.machines.future_map_base import PADS, STREAMS, Asked, RelayMachine
from batchstate.testing.machines.future_map_model import Request, handles_of
from batchstate.violations import Code

Array = npt.NDArray[Any]


class RelayEntries(RelayMachine):
    """Entries are published, gathered, fetched and overwritten. Subclasses run forwards."""

    # Entries

    @precondition(lambda self: bool(self.requests))
    @rule(
        data=st.data(),
        names=st.sampled_from([("token",), ("lengths",), ("token", "drafts", "accepted"), ("hidden", "token")]),
        stream=STREAMS,
        pads=PADS,
        way=st.sampled_from(["publish", "stash", "seed"]),
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
        if way == "seed":
            names = tuple(name for name in names if self.model.fields[name].dtype is not torch.bfloat16)
        values = self._values(requests, names)
        slots = self._padded(requests, pads)
        rows = {name: _with_padding(array, pads) for name, array in values.items()}
        unread = any(self.model.unread(one, name) for one in requests for name in names)
        with self.rt.use(self.streams[stream]):
            given: Mapping[str, Any] = rows if way == "seed" else self._given(rows, mirrored)
            if unread:
                self.reached("overwriting unread refused")
                with self.refused(Code.FUTURE_UNREAD_OVERWRITTEN):
                    getattr(self.relay, way)(slots, **given)
                return
            getattr(self.relay, way)(slots, **given)
        self._published(requests, values, stream, seeded=way == "seed")

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
