"""`watch_cuda`, which watches plain torch code on a GPU: here over a window of `cuda_on_cpu`, which judges too."""

# mypy: disable-error-code="no-untyped-call"

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import Event, Stream, current_stream, synchronize

from batchstate.cli import main, race_run
from batchstate.errors import ArgumentError
from batchstate.races import Race, RaceReport
from batchstate.races.cuda import CudaRuntime, WatchedCuda, cuda_on_cpu, declared_kernel, watch_cuda
from tests import idiom_verdicts
from tests.cuda_idioms import IDIOMS
from tests.race_cases import CASES, Case
from tests.race_cases.plain import PlainCuda
from tests.race_cases.tools import Says, Verdict
from tests.race_cases.verdicts import Column, Made, Table
from tests.selfcheck.machines.plain_torch import watched_over
from tests.test_cuda_on_cpu import attributes, left_over


@contextlib.contextmanager
def watched(gpu: Any = "race", **given: Any) -> Iterator[tuple[WatchedCuda, CudaRuntime]]:
    """A window of `watch_cuda` in one of `cuda_on_cpu`, which stands for the GPU; and both runtimes."""
    with cuda_on_cpu(gpu, on_race="collect") as device, watched_over(device, **{"on_race": "collect", **given}) as rt:
        yield rt, device


def said(race: RaceReport) -> tuple[object, ...]:
    """All that a report says of a race, but for the numbers of events and tensors, and where the window ended."""
    accesses = [
        (one.lane, one.does, one.operation, one.site.partition(" and ")[0], one.caller)
        for one in (race.first, race.second)
    ]
    return race.kind, race.rows, race.missing, race.suggestion, *accesses


@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_races_or_not(name: str) -> None:
    """The same is found as by `cuda_on_cpu`, in the same words; the safe twin has nothing."""
    kind, program = IDIOMS[name]
    for racy in (True, False):
        with cuda_on_cpu(on_race="collect") as device:
            program(racy)
        with watched() as (rt, _):
            program(racy)
        assert {race.kind for race in rt.races} == ({kind} if racy and kind else set())
        assert [said(race) for race in rt.races] == [said(race) for race in device.races]
        assert rt.accesses


@pytest.mark.parametrize("case", CASES.values(), ids=[case.name for case in CASES.values()])
def test_race_cases_in_plain_torch(case: Case) -> None:
    """Both sides of all pairs: the one race that is there, in the words of `cuda_on_cpu`."""
    with cuda_on_cpu(on_race="collect") as device:
        case.run(PlainCuda(device))
    with watched() as (rt, _):
        case.run(PlainCuda(rt))
    unseen = case.pair == "landing written through numpy"  # nothing shows it where the GPU itself lands on top
    assert [said(race) for race in rt.races] == [said(race) for race in device.races if not unseen]
    assert bool(rt.races) is (case.racy and not unseen)


def test_torch_is_left_as_it_was() -> None:
    """Also where the code fails, which gets a note of what was found."""
    if torch.cuda.is_available():
        torch.cuda.init()  # torch does that once
    before = attributes()
    with pytest.raises(ZeroDivisionError) as caught, watched():
        print(IDIOMS["wait_stream_before_the_launch"][1](True).tolist()[0] / 0)
    assert "1 race(s) had been found" in "".join(caught.value.__notes__)
    assert left_over(before) == []


def test_the_first_race_is_raised_and_told_again_at_the_end() -> None:
    """Code that catches every exception does not hide it."""
    with pytest.raises(Race, match="nothing orders"), watched(on_race="raise"), contextlib.suppress(Race):
        IDIOMS["kv_offload"][1](True)


def test_eager_fences_answer_as_the_gpu_does() -> None:
    """An event that is asked is complete when the GPU says so; by default once the host has waited."""

    def asked() -> tuple[bool, bool, bool]:
        side, out, done = Stream(), torch.zeros(4, device="cuda"), Event()
        never = done.query()
        with torch.cuda.stream(side):
            out.fill_(1)
            done.record()
        answers = never, done.query(), side.query()
        synchronize()
        assert done.query()
        assert side.query()
        return answers

    for fences, answers in (("lazy", (True, False, False)), ("eager", (True, True, True))):
        with watched("race:prompt", fences=fences):
            assert asked() == answers


def test_an_idle_stream_is_idle_behind_all_of_its_work() -> None:
    """A stream of which the host asks while work comes behind it is idle only when that work is over too."""
    with watched() as (rt, _):
        source, side = torch.zeros(4).pin_memory(), Stream()
        for _ in range(3):
            source.fill_(1)
            with torch.cuda.stream(side):
                source.to("cuda", non_blocking=True)
            side.query()
            with torch.cuda.stream(side):
                source.to("cuda", non_blocking=True)
            while not side.query():
                pass
            source.fill_(-1)
    assert not rt.races


def test_watching_adds_no_wait() -> None:
    """The device under it waits as often as without, and sees as many operations, but where it looks at an index."""

    def counted(device: CudaRuntime) -> tuple[int, ...]:
        return device.counters.forced_syncs, device.counters.fence_waits, device.waited_at.total(), device.accesses

    looked = []
    for name, (_, program) in IDIOMS.items():
        with cuda_on_cpu(on_race="collect") as plain:
            program(False)
        with watched() as (rt, device):
            program(False)
        syncs, *others = counted(device)
        assert (syncs - rt.lookups, *others) == counted(plain), name
        looked += [name] * bool(rt.lookups)
    assert looked == ["rows_of_two_requests"]


def test_a_kernel_that_torch_does_not_see_is_declared() -> None:
    """What it reads and writes counts, on the stream that is current."""

    @declared_kernel(reads=["source"], writes=["out"])
    def doubled(source: torch.Tensor, out: torch.Tensor) -> None:
        out.numpy()[:] = source.numpy() * 2

    with watched() as (rt, _):
        side = Stream()
        source, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        synchronize()
        with torch.cuda.stream(side):
            doubled(source, out)
        assert not list(rt.races)
        source.zero_()
    assert [(str(race.kind), race.first.operation) for race in rt.races] == [("write after read", "doubled")]


def test_what_is_not_possible_is_refused() -> None:
    """Without a GPU, a second window."""
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="torch has no GPU"):
            watch_cuda()
    with watched() as (rt, _):
        with pytest.raises(ArgumentError, match="inside of"), watch_cuda():
            pass
        assert current_stream().query()
        with pytest.raises(ArgumentError, match="entered twice"), rt:
            pass


def test_a_script_runs_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`batchstate race run --device cuda`; without a GPU it says what needs none."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nside = torch.cuda.Stream()\nout = torch.zeros(4, device='cuda')\n"
        "with torch.cuda.stream(side):\n    out.fill_(1)\n",
        encoding="utf-8",
    )
    if not torch.cuda.is_available():
        assert main(["race", "run", "--device", "cuda", str(script)]) == 2
        assert "leave --device out" in capsys.readouterr().err
    asked: list[Any] = []

    @contextlib.contextmanager
    def on_stand_in(**given: Any) -> Iterator[WatchedCuda]:
        asked.append(given)
        with watched(**given) as (rt, _):
            yield rt

    monkeypatch.setattr("batchstate.races.cuda.watch_cuda", on_stand_in)
    monkeypatch.setattr(race_run, "_check_device", lambda device: None)
    assert main(["race", "run", "--device", "cuda:prompt", str(script)]) == 1
    assert asked == [{"on_race": "collect", "note_waits": False, "fences": "eager"}]
    assert "`side.wait_stream(torch.cuda.default_stream())` before fill_" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nothing_waits() -> None:
    """A kernel of a second still runs when everything behind it was enqueued and watched, in sync-debug mode too."""
    cuda: Any = torch.cuda
    with watch_cuda(on_race="collect") as rt:
        side, done = Stream(), Event()
        table, index = torch.zeros(64, 8, device="cuda"), torch.tensor([1, 3], device="cuda")
        host, back = torch.ones(64, 8).pin_memory(), torch.zeros(64, 8).pin_memory()

        def step() -> torch.Tensor:
            rt.next_step()
            table.copy_(host, non_blocking=True)
            picked = table.index_select(0, index)
            table[3:4] = 7.0
            side.wait_stream(current_stream())
            with torch.cuda.stream(side):
                back.copy_(table, non_blocking=True)
                moved = picked.to("cpu", non_blocking=True)
                picked.record_stream(side)
                done.record()
            current_stream().wait_event(done)
            return moved

        kept = [step() for _ in range(4)]  # what the allocators ask the driver for may wait
        cuda.synchronize()
        kept.clear()
        cuda.set_sync_debug_mode("error")
        try:
            cuda._sleep(2_000_000_000)
            kept += [step() for _ in range(3)]
        finally:
            cuda.set_sync_debug_mode("default")
        assert not super(Event, done).query()
        done.synchronize()
        assert all((one == 1).all() for one in kept)
        assert back[3].tolist() == [7.0] * 8
    assert rt.races == ()
    assert rt.in_flight_depths[-3:] == [1, 2, 3]
    assert rt.lookups == 0


# Beside torch's sanitizer


def test_verdicts_on_the_idioms() -> None:
    """`watch_cuda` is right of each idiom and pair; a missed race and one that was made up are called so."""

    @contextlib.contextmanager
    def window() -> Iterator[WatchedCuda]:
        with watched() as (rt, _):
            yield rt

    verdicts = {name: idiom_verdicts.watched(name, window) for name in idiom_verdicts.TOOLS["watched"][::7]}
    assert [name for name, verdict in verdicts.items() if not idiom_verdicts.right(name, verdict)] == []
    assert {verdict.says for verdict in verdicts.values()} == {Says.RACE, Says.NONE}
    racy, safe, *_ = idiom_verdicts.IDIOM_NAMES
    wrong = dict.fromkeys(idiom_verdicts.TOOLS["watched"], Verdict(Says.NONE))
    wrong[safe] = Verdict(Says.RACE, "read after write")
    lines = list(idiom_verdicts.lines(Table({"watched": Column(Made("2026-01-02", "a machine", "2.13.0"), wrong)})))
    assert f"{racy:58} watched: missed" in lines
    assert f"{safe:58} watched: false alarm: read after write" in lines
    assert "watched: right about 35 of 70 idioms" in lines
