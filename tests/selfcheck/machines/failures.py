"""Uploads, launches and fences that fail or are interrupted in the middle of a call, or that call their pool."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

import attrs
import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from batchstate import FutureMap, HybridSlotPool, Slots, Violation, invariants, relay_field
from batchstate._arrays import Ints
from batchstate.errors import ArgumentError, PoolBrokenError, PoolExhaustedError
from batchstate.kv.pages import PageLease, PagePool
from batchstate.pools import SlotListener
from batchstate.runtime import Fence
from batchstate.testing.fences import ManualFence
from tests.selfcheck.machine import Machine, agree, ask


class PlantedError(RuntimeError):
    """The error of everything that fails here."""


@contextlib.contextmanager
def failing(
    owner: object, method: str, nth: int, *, late: bool = False, error: type[BaseException] = PlantedError
) -> Iterator[None]:
    """A window in which the n-th call of a method raises an error, before it does anything or, `late`, after it has."""
    before, calls = getattr(owner, method), 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = before(*args, **kwargs) if late or calls != nth else None
        if calls == nth:
            raise error(f"{method} is made to fail")
        return result

    setattr(owner, method, fails)
    try:
        yield
    finally:
        delattr(owner, method)


@final
class _Listener(SlotListener):
    """The pool calls only what is overridden."""

    def on_take(self, rows: Ints) -> None:
        pass

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        pass

    def on_clear(self) -> None:
        pass


@final
@attrs.define(eq=False)
class _Calling:
    """A fence that makes one call when it is queried, and is complete."""

    call: Callable[[], object]
    made: bool = False

    def query(self) -> bool:
        if not self.made:
            self.made = True
            self.call()
        return True

    def wait(self) -> None:
        """Not called."""


_FAILURES = st.sampled_from(["on_take", None, "on_take", "upload", "launch", "_copied_to_device"])
_INTERRUPTS = (
    ("take", "on_take"),
    ("take", "_copied_to_device"),
    ("hold", "_done"),
    ("leave", "on_free"),
    ("publish", "launch"),
    ("clear", "on_free"),
    ("clear", "on_clear"),
)
"""A call, and the method that is interrupted in it."""


class FailureMachine(Machine):
    """Requests with slot, states, pages, leases and relay entries, of which calls fail in the middle."""

    NAME = "failures"
    TARGETS = (
        "a take failed",
        "a publish failed half way",
        "a fence freed what a call was about",
        "interrupted, and broken",
        "interrupted, and whole",
    )

    @initialize()
    def begin(self) -> None:
        self.open()
        self.make()

    def make(self) -> None:
        self.slots = HybridSlotPool(self.rt, 5, states=10, states_per_slot=2)
        self.listener = _Listener()
        self.slots.add_listener(self.listener)
        self.pages = PagePool(self.rt, self.slots, 9, 2, max_tokens_per_request=6)
        field = relay_field(torch.int64, must_read=False)
        self.relay = FutureMap(self.slots, {"a": field, "b": field})
        self.live: list[Slots] = []
        self.leases: list[PageLease] = []
        self.values: dict[int, int] = {}  # slot -> what `a` holds
        self.published = 0
        self.give(self.slots.take(2))

    def check(self) -> None:
        agree(sorted(int(req.np[0]) for req in self.live), self.slots.live_slots().tolist(), "live slots")
        ask(self.slots.verify)
        ask(self.pages.verify)

    def some(self, at: int) -> Slots:
        return self.live[at % len(self.live)] if self.live else self.slots.take(0)

    def give(self, slots: Slots) -> None:
        self.live += [slots.take([row]) for row in range(len(slots))]

    def forget(self, slots: Slots) -> None:
        self.live = [req for req in self.live if req is not slots]
        for slot in slots.np.tolist():
            self.values.pop(slot, None)

    @rule(n=st.integers(1, 2), failure=_FAILURES)
    def take(self, n: int, failure: str | None) -> None:
        with contextlib.ExitStack() as window:
            window.enter_context(contextlib.suppress(PoolExhaustedError))
            if failure is not None:
                owner = self.listener if failure == "on_take" else self.rt
                window.enter_context(failing(owner, failure, 1, late=failure == "_copied_to_device"))
            try:
                self.give(self.slots.take(n))
            except PlantedError:
                self.reached("a take failed")
                self.shut_down()

    @rule(at=st.integers(0, 4), total=st.integers(0, 6))
    def extend(self, at: int, total: int) -> None:
        slots = self.some(at)
        with contextlib.suppress(PoolExhaustedError, Violation):
            if total >= int(self.pages.committed(slots).max(initial=0)):
                self.pages.extend(slots, total)
                self.pages.commit(slots, total)

    @rule(at=st.integers(0, 4), cached=st.booleans(), fails=st.booleans())
    def hold(self, at: int, cached: bool, fails: bool) -> None:
        slots = self.some(at)
        whole = int(self.pages.committed(slots).max(initial=0)) // 2 * 2
        self.pages.commit(slots, self.pages.committed(slots))
        window = failing(self.pages, "_done", 1) if fails else contextlib.nullcontext()
        with contextlib.suppress(PoolExhaustedError, PlantedError), window:
            self.leases.append(self.pages.hold(slots, whole) if cached and whole else self.pages.take(1))

    @rule(at=st.integers(0, 4))
    def end_lease(self, at: int) -> None:
        if self.leases:
            self.leases.pop(at % len(self.leases)).release(after=None)

    @rule(at=st.integers(0, 4), late=st.booleans())
    def leave(self, at: int, late: bool) -> None:
        slots = self.some(at)
        after = ManualFence(1, None, True) if late else None  # type: ignore[arg-type]
        self.pages.release_requests(slots, after=after)
        self.forget(slots)

    @rule(at=st.integers(0, 4), fails=st.booleans())
    def publish(self, at: int, fails: bool) -> None:
        """A publish, and one whose second launch fails: what the first had written cannot be read any more."""
        slots = self.some(at)
        if not len(slots):
            return
        slot = int(slots.np[0])
        self._publish(slots)
        if fails:
            with contextlib.suppress(PlantedError), failing(self.rt, "launch", 2):
                self._publish(slots)
            self.reached("a publish failed half way")
            if str(self.relay.states(slots, "a")[0]) == "unwritten":
                del self.values[slot]
            self._gather(slots)

    def _publish(self, slots: Slots) -> None:
        new = self.on_device(np.full(1, self.published))
        self.published += 1
        self.relay.publish(slots, a=new, b=new)
        self.values[int(slots.np[0])] = self.published - 1

    @rule(at=st.integers(0, 4))
    def gather(self, at: int) -> None:
        self._gather(self.some(at))

    def _gather(self, slots: Slots) -> None:
        slot = int(slots.np.max(initial=0))
        if slot in self.values:
            values = self.rt.inspect(self.relay.gather(slots, "a"))
            ask(invariants.mirror_equal, np.array([self.values.pop(slot)]), values, object="model", operation="gather")

    @rule(total=st.integers(1, 6), freeing=st.booleans())
    def fence_calls(self, total: int, freeing: bool) -> None:
        """A fence gives away a request, or takes slots, while a call about the request queries the fence."""
        if self.slots.stats.free < 2 or not self.pages.stats.free:
            return
        self.give(self.slots.take(2))
        slots, other = self.live[-2:]
        self.pages.extend(other, 1)

        def call() -> None:
            if freeing:
                self.pages.release_requests(slots, after=None)
                self.forget(slots)
                self.reached("a fence freed what a call was about")
            else:
                self.give(self.slots.take(1))

        self.pages.release(other, after=_Calling(call))
        with contextlib.suppress(PoolExhaustedError, Violation, ArgumentError):
            self.pages.extend(slots, total)

    @rule(point=st.sampled_from(_INTERRUPTS), at=st.integers(0, 4))
    def interrupt(self, point: tuple[str, str], at: int) -> None:
        """An interrupt comes in the middle; the pool is whole, or says that it is not, and is made anew."""
        (call, method), slots = point, self.some(at)
        values = self.on_device(np.full(len(slots), 0))
        calls: dict[str, Callable[[], object]] = {
            "take": lambda: self.give(self.slots.take(1)),
            "hold": lambda: self.leases.append(self.pages.take(1)),
            "leave": lambda: self.pages.release_requests(slots, after=None),
            "publish": lambda: self.relay.publish(slots, a=values, b=values) if len(slots) else None,
            "clear": self.slots.clear,
        }
        owner = self.pages if method == "_done" else self.listener if method.startswith("on_") else self.rt
        refusals = contextlib.suppress(PoolExhaustedError, Violation, KeyboardInterrupt)
        with refusals, failing(owner, method, 1, error=KeyboardInterrupt):
            calls[call]()
        self.values.clear()
        try:
            self.slots.take(0)
        except PoolBrokenError:
            self.reached("interrupted, and broken")
            self.make()
            return
        self.reached("interrupted, and whole")  # then the call was over, or has changed nothing
        if call == "take" and owner is self.rt:  # the slots are taken, and no one has got them
            self.live = [self.slots._allocator.handles(rows) for rows in self.slots.live_slots()[:, None]]
        self.live = [request for request in self.live if self.slots.is_live(request.np)[0]]
        self.leases = list(self.pages._holders.leases.values())

    @rule()
    def shut_down(self) -> None:
        for lease in self.leases:
            lease.release(after=None)
        for slots in list(self.live):
            self.pages.release_requests(slots, after=None)
        self.live, self.leases = [], []
        self.values.clear()
        self.pages.expect_idle()
        self.slots.expect_idle()
