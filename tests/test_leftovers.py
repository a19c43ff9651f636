"""`LEFTOVER_READ`: values that an earlier owner of a row, or an earlier step, has left."""

# mypy: disable-error-code="no-untyped-call"

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import SlotPool, checks
from batchstate.cli import main
from batchstate.errors import ArgumentError
from batchstate.races import Race, RaceKind, RaceRuntime
from batchstate.races.cuda import cuda_on_cpu
from batchstate.runtime import Runtime, open_runtime
from tests.leftovers import OWN, PROGRAMS
from tests.selfcheck.machines.plain_torch import watched_over


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_somebody_else_has_left(name: str) -> None:
    """It is found, with both lines; the repaired program is silent."""
    for racy in (True, False):
        with cuda_on_cpu(on_race="collect") as cuda:
            PROGRAMS[name](cuda, racy)
        assert {race.kind for race in cuda.races} == ({RaceKind.LEFTOVER_READ} if racy else set()), cuda.races
        for race in cuda.races:
            assert "leftovers.py:" in race.first.site
            assert "leftovers.py:" in race.second.site


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "replay" not in name])
def test_beside_a_device(name: str) -> None:
    """The same, told to `watch_cuda` alone."""
    for racy in (True, False):
        with cuda_on_cpu(on_race="collect") as device, watched_over(device, on_race="collect") as cuda:
            PROGRAMS[name](cuda, racy)
        assert {race.kind for race in cuda.races} == ({RaceKind.LEFTOVER_READ} if racy else set()), cuda.races


@contextlib.contextmanager
def opened(tool: str) -> Iterator[tuple[RaceRuntime, Runtime]]:
    """The race detector, and the runtime of the pools that it is to find out about."""
    with contextlib.ExitStack() as stack:
        if tool == "race":
            rt = stack.enter_context(RaceRuntime(on_race="collect"))
            yield rt, rt
            return
        cuda: Any = stack.enter_context(cuda_on_cpu(on_race="collect"))
        if tool == "watch_cuda":
            stack.enter_context(checks("full"))
            cuda = stack.enter_context(watched_over(cuda, on_race="collect"))
        yield cuda, open_runtime("cuda")


@pytest.mark.parametrize("tool", ["race", "cuda_on_cpu", "watch_cuda"])
@pytest.mark.parametrize("name", OWN)
def test_pools_say_whose_their_rows_are(name: str, tool: str) -> None:
    """Nothing is declared: what an earlier owner of a row has left is found, and the repaired program is silent."""
    for racy in (True, False):
        with opened(tool) as (detector, rt):
            OWN[name](rt, racy)
        assert {race.kind for race in detector.races} == ({RaceKind.LEFTOVER_READ} if racy else set()), detector.races
        for race in detector.races:
            assert "leftovers.py:" in f"{race.first.site} {race.first.caller}"
            assert "leftovers.py:" in f"{race.second.site} {race.second.caller}"
            assert not race.memory.startswith("tensor ") or "at batchstate/" not in race.memory, "a pool names its own"
    assert Runtime.told == []


def test_a_watch_below_full_is_not_told() -> None:
    """To look an index up on a GPU is to wait for it."""
    with cuda_on_cpu(on_race="collect") as device, watched_over(device, on_race="collect") as cuda:
        OWN["row_of_a_table"](open_runtime("cuda"), True)
    assert cuda.races == ()
    assert len(device.races) == 1


def test_memory_of_a_pool_that_is_not_judged() -> None:
    """A read of all rows, rows of padding, rows that nobody owns, and memory whose rows lie in pieces."""
    with RaceRuntime() as rt:
        slots = SlotPool(rt, 2)
        table = slots.table("marks", (2,), torch.int64)
        pieces = slots.adopt(rt.device_zeros((3, 8), torch.int64), "pieces")
        first = slots.take(2)
        for each in (table, pieces):
            each.write(first, None, np.ones((2, each.shape[1]), np.int64))
        rt.own_rows(pieces.memory.view(3, 4, 2).transpose(1, 2), slots.owners_of)
        slots.free(first, after=None)
        table.memory[1:] + 1
        slots.take(2)
        table.memory + 1
        table.memory[:1] + 1
        with pytest.raises(Race, match=r"reads for owner 2 what scatter_ .* wrote for owner 1"):
            table.memory[1] + 1


def test_a_report_names_both_owners() -> None:
    """And the elements, the lines, what is missing and what to do."""
    with cuda_on_cpu(on_race="collect") as cuda:
        PROGRAMS["recycled_page"](cuda, True)
    (race,) = cuda.races
    assert race.problem == (
        "a value is read that somebody else has left: "
        "sum on 'default' reads for 'b' what fill_ on 'default' wrote for 'a'"
    )
    assert race.rows == "parts of row 2"
    assert race.missing == "nothing writes it anew between fill_ and sum"
    assert race.suggestion.startswith("write or clear it when it gets its next owner")


def test_steps_are_named_where_they_are_the_owners() -> None:
    """A buffer that each step fills."""
    with pytest.raises(Race, match="reads for step 2 what copy_ on 'default' wrote for step 1"), cuda_on_cpu() as cuda:
        PROGRAMS["static_metadata"](cuda, True)


def test_what_is_no_leftover() -> None:
    """Memory from before the declaration, rows of nobody, a whole tensor without `valid`, and its own values."""
    before = torch.zeros(2)
    with RaceRuntime() as rt:
        table = rt.device_zeros((4, 2), torch.int64)
        table.fill_(1)
        rt.owned_by(table, [1], "a")
        table[1] + 1
        table[1].fill_(2)
        rt.owned_by(table, [1], "a")
        table[1] + 1
        rt.owned_by(table, [1], "b")
        table + 1
        table[2:] + 1
        table[1].copy_(table[2])
        table[1] + 1
        with pytest.raises(ArgumentError, match="rows \\[4\\] of 4"):
            rt.owned_by(table, [4], "a")
        with pytest.raises(ArgumentError, match="with strides"):
            rt.rows_of(table.T)
        with pytest.raises(ArgumentError, match="knows no memory"):
            rt.fresh(before)


ENGINE = """
    import torch

    class Engine:
        def __init__(self):
            self.state = torch.zeros(4, 2, device="cuda")
            self.owners = {}

        def admit(self, slot, request, clears):
            self.owners[slot] = request
            if clears:
                self.state[slot].zero_()

        def step(self, slot):
            self.state[slot].add_(1)
"""

DECLARATION = """
    def declare(cuda):
        cuda.after("leftover_engine:Engine.__init__", lambda it: cuda.rows_of(it.state, owner=lambda: it.owners))
        cuda.after("leftover_engine:Engine.step", lambda it: cuda.next_step())
"""

SCRIPT = """
    import sys
    from leftover_engine import Engine

    engine = Engine()
    for request in "ab":
        engine.admit(1, request, clears="--clear" in sys.argv)
        engine.step(1)
"""


def test_an_engine_is_declared_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`race run --declare FILE`: not a line of the engine is changed."""
    for name, source in (("leftover_engine", ENGINE), ("declare", DECLARATION), ("serve", SCRIPT)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    options: list[Any] = ["race", "run", "--declare", str(tmp_path / "declare.py"), str(tmp_path / "serve.py")]
    assert main(options) == 1
    assert "reads for 'b' what add_ on 'default' wrote for 'a'" in capsys.readouterr().err
    assert main([*options, "--clear"]) == 0
    (tmp_path / "declare.py").write_text("steps = 3\n")
    assert main(options) == 2
    assert "it has no function declare(cuda)" in capsys.readouterr().err
