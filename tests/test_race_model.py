"""The race detector against a model that keeps every access and every order: the first race of any program, or none."""

from collections.abc import Sequence
from typing import NamedTuple

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate.races import Race, RaceRuntime
from batchstate.runtime import Fence, Stream

STREAMS, ROWS, TABLES = 3, 6, 2


class Use(NamedTuple):
    """Rows of a table are read or written on a stream."""

    stream: int
    table: int
    rows: tuple[int, ...]
    writes: bool


class Record(NamedTuple):
    """A fence is recorded on a stream."""

    stream: int


class Wait(NamedTuple):
    """A stream waits for one of the newest fences; the host does where it is None."""

    stream: int | None
    fence: int


streams = st.integers(0, STREAMS - 1)
uses = st.builds(
    Use,
    streams,
    st.integers(0, TABLES - 1),
    st.sets(st.integers(0, ROWS - 1), max_size=3).map(lambda rows: tuple(sorted(rows))),
    st.booleans(),
)
waits = st.builds(Wait, st.one_of(st.none(), streams), st.integers(0, 2))
programs = st.lists(st.one_of(uses, st.builds(Record, streams), waits, uses), max_size=40)


@attrs.define
class Model:
    """Everything that happened, and what lies before what.

    Attributes:
        known: lane -> all events that lie before what comes next there; the host is the last lane.
        done: event -> what it did.
        fences: what each knew.
    """

    known: list[set[int]] = attrs.field(factory=lambda: [set() for _ in range(STREAMS + 1)])
    done: dict[int, Use] = attrs.field(factory=dict)
    fences: list[set[int]] = attrs.field(factory=list)

    def races(self, use: Use) -> bool:
        """Whether a use comes across another that nothing orders before it. If not, it happens."""
        before = self.known[use.stream] | self.known[-1]
        for event, other in self.done.items():
            conflict = other.table == use.table and set(other.rows) & set(use.rows) and (other.writes or use.writes)
            if conflict and event not in before:
                return True
        self.known[use.stream] = before | {len(self.done)}
        self.done[len(self.done)] = use
        return False

    def record(self, stream: int) -> None:
        """A fence is recorded."""
        self.known[stream] |= self.known[-1]
        self.fences.append(set(self.known[stream]))

    def wait(self, stream: int | None, fence: int) -> None:
        """A stream waits, or the host."""
        lane = STREAMS if stream is None else stream
        self.known[lane] |= self.fences[-1 - fence % len(self.fences)]


@given(programs)
@settings(max_examples=250, deadline=None)
def test_the_first_race_is_found_where_it_is(program: Sequence[Use | Record | Wait]) -> None:
    """At the very access that the model names, or nowhere: any rows, any fences in any order."""
    model = Model()
    with RaceRuntime() as rt:
        tables = [rt.device_zeros((ROWS, 2), torch.int64) for _ in range(TABLES)]
        lanes = [rt.stream(f"stream {number}") for number in range(STREAMS)]
        rt.synchronize()
        fences: list[Fence] = []
        for one in program:
            if isinstance(one, Record):
                model.record(one.stream)
                fences.append(rt.record(lanes[one.stream]))
            elif isinstance(one, Wait):
                if fences:
                    fence = fences[-1 - one.fence % len(fences)]
                    model.wait(one.stream, one.fence)
                    if one.stream is None:
                        fence.wait()
                    else:
                        rt.wait(fence, stream=lanes[one.stream])
            else:
                racy = model.races(one)
                assert _raises(rt, tables[one.table], one, lanes) is racy, one
                if racy:
                    return


def _raises(rt: RaceRuntime, table: torch.Tensor, use: Use, lanes: Sequence[Stream]) -> bool:
    with rt.use(lanes[use.stream]):
        rows = [table[row] for row in use.rows]
        try:
            if rows and use.writes:
                torch._foreach_add_(rows, 1)
            elif rows:
                torch.stack(rows)
        except Race:
            return True
    return False
