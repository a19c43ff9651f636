"""Ranks of one decode group: the same calls on each, fences that complete at different times, and the same answers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, final

import attrs
import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import Code, HiSparse, HostKVPool, PagePool, SlotPool, Slots
from batchstate.errors import ArgumentError, PoolExhaustedError
from batchstate.runtime.agreement import Agreement, QueriedFence
from batchstate.testing.fences import LateRuntime, ManualFence, ManualStream
from tests.selfcheck.machine import Machine, agree, ask

T = TypeVar("T")
HOT = 4
KINDS = "staged", "direct", "plain"
"""Copied out to the host tier, written there by another worker, or on the device alone."""


@final
@attrs.define(eq=False)
class Rank:
    """One rank: its device, its pools, and the requests by the number in which they came."""

    runtime: LateRuntime
    group: Agreement
    slots: SlotPool
    pages: PagePool
    host: HostKVPool
    tier: HiSparse
    requests: dict[int, Slots] = attrs.field(factory=dict)
    writers: dict[int, tuple[ManualStream, ManualFence, QueriedFence]] = attrs.field(factory=dict)
    plain: dict[int, Slots] = attrs.field(factory=dict)
    staged: set[int] = attrs.field(factory=set)
    ready: set[int] = attrs.field(factory=set)

    @classmethod
    def opened(cls, size: int, pages: int, host_pages: int) -> "Rank":
        runtime = LateRuntime(steps_in_flight=8)
        group = runtime.join_group(size=2)
        slots = SlotPool(runtime, size)
        device = PagePool(runtime, slots, pages, 2, max_tokens_per_request=8)
        host = HostKVPool(runtime, host_pages, layers=1, item_shape=(1,), dtype=torch.int64)
        kv = [runtime.device_zeros((device.location_capacity, 1), torch.int64)]
        return cls(runtime, group, slots, device, host, HiSparse(device, host, kv, hot_tokens=HOT))

    def state(self) -> Any:
        return (
            self.slots.stats,
            self.slots.live_slots().tolist(),
            self.pages.stats,
            self.pages.page_table.tolist(),
            self.host.stats,
            {slot: ranges.table.tolist() for slot, ranges in self.tier._requests.ranges.items()},
            self.tier._requests.states.tolist(),
        )

    def come(self, number: int, tokens: int, room: int, kind: str) -> None:
        slot = self.slots.take(1)
        try:
            if kind == "plain":
                self.pages.extend(slot, tokens)
                self.plain[number] = slot
            elif kind == "staged":
                self.pages.extend(slot, tokens)
                self.pages.commit(slot, tokens)
                self.tier.admit_staged(slot, room, after=self.runtime.record())
                self.staged.add(number)
            else:
                stream = ManualStream("writer")
                ended = stream.record()
                self.tier.reserve(slot, tokens, room, writer=ended)
                self.writers[number] = stream, ended, self.group.watch(ended)
        except PoolExhaustedError:
            self.pages.release_requests(slot, after=self.runtime.record())
            raise
        self.requests[number] = slot

    def admit(self) -> list[int]:
        """The requests that decode from now on: those that every rank has."""
        admitted = []
        for number, (_, _, arrived) in list(self.writers.items()):
            if number in self.requests and arrived.complete:
                try:
                    self.tier.admit_direct(self.requests[number])
                except PoolExhaustedError:
                    continue
                del self.writers[number]
                admitted.append(number)
        self.tier.poll_staged()
        copied = [number for number in self.staged if self.tier.ready(self.requests[number])[0]]
        self.staged -= set(copied)
        self.ready |= {*admitted, *copied}
        return admitted + copied

    def decode(self) -> None:
        """A token more for each request that is on the device alone: few of them need another page for it."""
        for slot in self.plain.values():
            if self.pages.committed(slot)[0] < 8:
                self.pages.advance(slot)

    def leave(self, number: int) -> None:
        slot, plain = self.requests.pop(number), self.plain.pop(number, None)
        if plain is not None:
            self.pages.release_requests(slot, after=self.runtime.record())
            return
        self.tier.abort(slot, after=self.runtime.record())
        self.staged.discard(number)
        self.ready.discard(number)


class RanksMachine(Machine):
    """Two ranks that are told the same, and that see their fences complete at different times."""

    NAME = "ranks"

    TARGETS = (
        "something agreed",
        "seen complete on one rank alone",
        "a request admitted",
        "a staged request admitted",
        "a request decoded",
        "exhausted on both",
    )

    @initialize(size=st.integers(2, 4), pages=st.integers(4, 9), host_pages=st.integers(13, 30))
    def begin(self, size: int, pages: int, host_pages: int) -> None:
        self.open()
        self.ranks = [Rank.opened(size, pages, host_pages) for _ in range(2)]
        self.named = 0

    def check(self) -> None:
        first, second = (rank.state() for rank in self.ranks)
        agree(first, second, "what the ranks have")
        for rank in self.ranks:
            ask(rank.slots.verify)
            ask(rank.host.verify)

    def each(self, call: Callable[[Rank], T]) -> list[T]:
        """The same call on every rank: the answers, which have to be alike."""
        answers: list[T] = []
        exhausted = 0
        for rank in self.ranks:
            try:
                answers.append(call(rank))
            except PoolExhaustedError:
                exhausted += 1
        agree(exhausted in (0, len(self.ranks)), True, "exhausted on all ranks or on none")
        self.reached("exhausted on both", exhausted == len(self.ranks))
        for answer in answers[1:]:
            agree(answers[0], answer, "answers of two ranks")
        return answers

    @rule(tokens=st.integers(1, 7), room=st.integers(0, 6), kind=st.sampled_from((*KINDS[:2] * 3, "plain")))
    def come(self, tokens: int, room: int, kind: str) -> None:
        self.named += 1
        number = self.named
        self.each(lambda rank: rank.come(number, tokens, tokens + room, kind))

    @precondition(lambda self: any(rank.requests for rank in self.ranks))
    @rule(which=st.integers(0, 3))
    def leave(self, which: int) -> None:
        numbers = sorted(set.intersection(*(set(rank.requests) for rank in self.ranks)))
        if numbers:
            number = numbers[which % len(numbers)]
            self.each(lambda rank: rank.leave(number))

    @rule(which=st.integers(0, 1), fences=st.integers(1, 6), writers=st.integers(0, 3))
    def time_passes(self, which: int, fences: int, writers: int) -> None:
        """One device gets on, and writers of one rank end; the other rank knows nothing of it."""
        rank = self.ranks[which]
        rank.runtime.complete(fences)
        for stream, _, _ in list(rank.writers.values())[:writers]:
            stream.complete()
        open_fences = [set(rank.group.report()[3:]) for rank in self.ranks]
        self.reached("seen complete on one rank alone", open_fences[0] != open_fences[1])

    @rule(fences=st.integers(1, 4), step=st.booleans())
    def turn(self, fences: int, step: bool) -> None:
        """Both devices get on, differently; the ranks exchange reports, and admit requests that all have."""
        for number, rank in enumerate(self.ranks):
            rank.runtime.complete(fences + number)
            for stream, _, _ in list(rank.writers.values())[: fences + number]:
                stream.complete()
        self.exchange()
        self.reached("a request decoded", any(rank.plain for rank in self.ranks))
        self.each(Rank.decode)
        before = set(self.ranks[0].staged)
        for admitted in self.each(Rank.admit):
            self.reached("a request admitted", bool(admitted))
            self.reached("a staged request admitted", bool(before & set(admitted)))
        if step:
            self.each(lambda rank: rank.slots.stats)

    @rule()
    def exchange(self) -> None:
        reports: Sequence[list[int]] = [rank.group.report() for rank in self.ranks]
        for rank in self.ranks:
            self.reached("something agreed", rank.group.agree(list(reversed(reports))) > 0)

    @rule()
    def wrong_exchange(self) -> None:
        """Reports without one's own, or of other calls, are refused and count nothing."""
        rank = self.ranks[0]
        report = rank.group.report()
        before = rank.group.open
        other = [report[0] + 1, *report[1:]]
        for wrong in ([], [other], [report], [[*report, 10**9]] * 2):
            self.refused(ArgumentError, partial(rank.group.agree, wrong))
        self.refused(Code.RANKS_DIFFER, lambda: rank.group.agree([report, other]))
        self.refused(ArgumentError, partial(rank.runtime.join_group, size=2))
        agree(before, rank.group.open, "open fences after refused exchanges")

    @rule()
    def all_leave(self) -> None:
        for number in sorted(set.intersection(*(set(rank.requests) for rank in self.ranks))):
            self.each(lambda rank, number=number: rank.leave(number))  # type: ignore[misc]
        for rank in self.ranks:
            rank.runtime.synchronize()
            for stream, _, _ in rank.writers.values():
                stream.complete()
            rank.writers.clear()
        self.exchange()
        for stats in self.each(lambda rank: rank.host.stats):
            agree(stats.size, stats.free, "free host locations, all gone")
        self.each(lambda rank: np.asarray(rank.slots.stats.free).item())
