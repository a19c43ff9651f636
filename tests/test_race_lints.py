"""Mutants of memory that comes back (`reuse=True`) and of the lints of the race detector: waits, polls, streams.

No race depends on these, so no machine accuses anything: each bug changes what a program is told, and its clean twin,
the same program without the bug, is told what is right.
"""

# mypy: disable-error-code="no-untyped-call"

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.cuda import Stream, synchronize

from batchstate.cli import main
from batchstate.races import cuda_on_cpu
from tests.selfcheck.mutants.diffs import changed
from tests.test_race_waits import one_event_for_all_steps, waits
from tests.test_unseen_idioms import offloaded_by_address


def address_of(make: Callable[[], torch.Tensor]) -> int:
    """The address of a tensor that is freed again."""
    return make().data_ptr()


def blocks_that_come_back() -> Any:
    """Whether addresses come again: of the block freed last, on its stream, of its size, that nobody was told of."""
    with cuda_on_cpu(reuse=True):
        side = Stream()
        kept = [torch.full((4,), float(value), device="cuda") for value in range(3)]
        older, newer = kept[1].data_ptr(), kept[2].data_ptr()
        del kept[1]
        del kept[1]
        with torch.cuda.stream(side):
            elsewhere = address_of(lambda: torch.zeros(4, device="cuda")) in (older, newer)
        both = torch.ones(4, device="cuda"), torch.ones(3, device="cuda")
        newest_first = [tensor.data_ptr() for tensor in both] == [newer, older]
        lent = torch.zeros(4, device="cuda")
        at = lent.data_ptr()
        with torch.cuda.stream(side):
            lent.record_stream(side)
        del lent
        others = [np.empty(512, np.uint8) for _ in range(64)]  # so that malloc gives that memory to them
        in_use = torch.zeros(4, device="cuda").data_ptr() == at
        synchronize()
        del others
        return elsewhere, newest_first, in_use, kept[0].tolist()


def a_table_by_address() -> Any:
    """The entry of a freed tensor is taken for that of the next one, unless it is removed."""
    with cuda_on_cpu(reuse=True):
        return [offloaded_by_address(racy) for racy in (True, False)]


def wide_waits() -> Any:
    """Waits for more than is needed, and what need not be waited for."""
    wide = [*waits(late=True), *waits(late=False), *waits(late=True, uses_logits=True), *waits(late=True, through=True)]
    return [(wait.lane, wait.of, wait.orders and wait.orders.split(" at ")[0], len(wait.spare)) for wait in wide]


def an_event_for_all_steps() -> Any:
    """Whether the recording that was in time is told, with one event and with one per step."""
    return [[wait.recorded is not None for wait in one_event_for_all_steps(racy=racy)] for racy in (True, False)]


def waits_of_the_host() -> Any:
    """The host waits for a read, and then has the table written."""
    with cuda_on_cpu(note_waits=True) as rt:
        side, table = Stream(), torch.zeros(4, device="cuda")
        synchronize()
        with torch.cuda.stream(side):
            table.clone()
        side.record_event().synchronize()
        table.fill_(1)
        return [wait.lane for wait in rt.wide_waits()]


def a_loop_that_sleeps() -> Any:
    """How often it asks, and how many lines are told."""
    with cuda_on_cpu() as rt:
        torch.zeros(4, device="cuda")
        done, asked = torch.cuda.current_stream().record_event(), 0
        while not done.query() and asked < 200:
            asked += 1
            time.sleep(0)
        return asked < 200, len(rt.polled_at)


def streams_in_turn() -> Any:
    """Pairs of streams that are one: none of 33 that are dropped, one of 33 that are kept."""
    with cuda_on_cpu() as rt:
        for _ in range(33):
            Stream()
        dropped = len(rt.aliased_streams)
        kept = [Stream() for _ in range(33)]
        return dropped, len(rt.aliased_streams), len(kept)


WAITED = """
import torch
for _ in range(3):
    torch.zeros(1, device="cuda").item()
"""


@pytest.fixture
def exits(tmp_path: Path) -> Callable[[], Any]:
    """A script that waits three times on one line, with two and with three allowed."""
    script = tmp_path / "waits.py"
    script.write_text(WAITED)
    return lambda: [main(["race", "run", "--max-waits", number, str(script)]) for number in "23"]


BLOCKS, WAITS = "races.cuda._blocks:Blocks", "races.waits"
MUTANTS: dict[str, tuple[str, str, str, Callable[[], Any] | None]] = {
    "blocks of every stream": (
        f"{BLOCKS}.move",
        "self._free.get((stream, ",
        "self._free.get((1, ",
        blocks_that_come_back,
    ),
    "the block that was freed first": (f"{BLOCKS}.move", "free.pop()", "free.pop(0)", blocks_that_come_back),
    "a block that is still used": (f"{BLOCKS}.move", "free.pop() if free", "free[-1] if free", blocks_that_come_back),
    "a block that another stream was recorded for": (
        f"{BLOCKS}.free",
        " and not allocation.kept_for",
        "",
        blocks_that_come_back,
    ),
    "sizes of their own": (f"{BLOCKS}.move", "(stream, rounded(nbytes))", "(stream, nbytes)", a_table_by_address),
    "the first need is all": (f"{WAITS}:Waits.needs", "event > wait.needed", "not wait.needed", wide_waits),
    "work of every stream": (
        f"{WAITS}:Waits.note",
        "earlier.stream is of and earlier.number < event and",
        "",
        wide_waits,
    ),
    "a wait through others is for nothing": (f"{WAITS}:Waits.needs", "self.needs(wait.of", "(wait.of", wide_waits),
    "a later recording counts": (
        f"{WAITS}:_Wait.wide",
        "self.needed < entry.number < spare[-1].number",
        "entry.number > spare[-1].number",
        an_event_for_all_steps,
    ),
    "waits of the host are for nothing": (f"{WAITS}:Waits.needs", "{stream, 0}", "{stream}", waits_of_the_host),
    "pauses do not count": (
        "races.runtime:RaceFence.query",
        "1 if self._slept == self.owner.slept else SLEPT",
        "1",
        a_loop_that_sleeps,
    ),
    "streams that are gone": (
        "races.cuda._window:TorchWindow.stream_made",
        "other() is not None",
        "other_name",
        streams_in_turn,
    ),
    "one wait too few": ("cli.race_run:run", "waited > args.max_waits", "waited > args.max_waits + 1", None),
    "lines are counted": ("cli.race_run:run", "sum(rt.synchronised.values())", "len(waits)", None),
}
"""Function, piece of its source, the bug, and the program of which the outcome changes; None is the command."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants(mutant: str, exits: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Each changes what the program is told; `test_clean_twins` has what is right."""
    where, before, after, program = MUTANTS[mutant]
    program = program or exits
    right = program()
    with changed(where, before, after):
        assert program() != right
    assert program() == right


def test_clean_twins(exits: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a bug each program is told what is so."""
    assert blocks_that_come_back() == (False, True, False, [0.0] * 4)
    assert a_table_by_address() == [[1.0] * 4, [2.0] * 4]
    assert wide_waits() == [("schedule", "forward", "clone", 2), ("middle", "forward", "clone", 2)]
    assert an_event_for_all_steps() == [[True], []]
    assert waits_of_the_host() == []
    assert a_loop_that_sleeps() == (True, 1)
    assert streams_in_turn() == (0, 1, 33)
    assert exits() == [1, 0]
