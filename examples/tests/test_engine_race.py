"""The engine example under the race detector: nothing is unordered, and what an engine may forget is found."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from batchstate import Code, checks
from batchstate.races import Race, RaceKind, RaceRuntime
from batchstate.runtime import DoneFence, Runtime, open_runtime

pytest.importorskip("transformers")

from examples.engine.attention import PagedKV
from examples.engine.forward import Forward
from examples.engine.scheduler import Scheduler
from examples.engine.settings import EngineSettings
from examples.tests.engine_cases import (
    SMALL,
    busy,
    model_of,
    nothing_left,
    outputs,
    right_answers,
    some_requests,
    started,
)

TIGHT = attrs.evolve(SMALL, num_pages=40)


@pytest.fixture
def race(device: str) -> RaceRuntime:
    """The detector round the device under test."""
    return RaceRuntime(open_runtime(device))


def serve(race: RaceRuntime, settings: EngineSettings, count: int, *, level: str = "off") -> list[list[int]]:
    """Serves requests, of which each fourth comes prebuilt, under the detector, and checks their tokens behind it."""
    model = model_of("llama", str(race.device))
    with race, checks(level):
        requests = some_requests(model, count, seed=1, prebuilt_every=4)
        before = race.counters.forced_syncs  # on a GPU one per prebuilt request: its maker waits for the first token
        engine = started(race, model, settings, requests, eos_token_ids=())
        while busy(engine):
            engine.step()
            race.device_empty((1,), torch.int64)  # where prebuilt requests arrive, memory is wanted for others
        nothing_left(engine)
        assert race.counters.forced_syncs == before
    assert outputs(requests) == right_answers(model, requests)
    return outputs(requests)


@pytest.mark.parametrize(
    ("overlap", "num_drafts", "level"), [(False, 0, "off"), (False, 3, "cheap"), (True, 0, "full"), (True, 3, "off")]
)
def test_engine_has_no_race(race: RaceRuntime, overlap: bool, num_drafts: int, level: str) -> None:
    """Every access is ordered, with checks off, and what checks read is never taken for a race; two steps overlap."""
    serve(race, attrs.evolve(TIGHT, overlap=overlap, num_drafts=num_drafts), 10, level=level)
    assert race.races == ()
    assert race.accesses > 5_000
    if overlap:
        assert race.in_flight_depth_max >= 2


def test_cost_does_not_grow_with_the_run(device: str) -> None:
    """In a run of three times the length an access is held against as few others: kept is what is in flight."""
    short, long = RaceRuntime(open_runtime(device)), RaceRuntime(open_runtime(device))
    for race, count in ((short, 9), (long, 27)):
        serve(race, attrs.evolve(SMALL, max_running=4), count)
    held = [race.comparisons / race.accesses for race in (short, long)]
    assert held[1] < 1.2 * held[0] < 1.2
    assert long.accesses > 30_000  # of kernels and copies: metadata operations are none


# Orders that an engine may forget

Forget = Callable[[pytest.MonkeyPatch], None]


def _after(patch: pytest.MonkeyPatch) -> None:
    """Slots and pages change hands while a forward uses them: prebuilt KV is written over them."""
    patch.setattr(Scheduler, "last_step", property(lambda self: DoneFence()))
    load = Forward.load

    def on_arrivals(self: Forward, *args: Any) -> None:
        forward, self.stream = self.stream, self._arrivals  # another worker's stream writes the pages
        try:
            load(self, *args)
        finally:
            self.stream = forward

    patch.setattr(Forward, "load", on_arrivals)


def _hand_over(patch: pytest.MonkeyPatch) -> None:
    """Prebuilt KV is used on the forward's stream and dropped, and the allocator is not told."""

    def use_on_current_stream(self: Runtime, tensor: torch.Tensor, made_on: Any, ready: Any = None, **_: Any) -> Any:
        if made_on != self.current_stream:
            self.wait(ready or self.record(made_on))
        return tensor

    patch.setattr(Runtime, "use_on_current_stream", use_on_current_stream)


def _kv_on_two_streams(patch: pytest.MonkeyPatch) -> None:
    """KV memory is zeroed on the stream of the engine's making, and written on the forward's without a wait."""
    zeros = PagedKV.zeros.__func__  # type: ignore[attr-defined]

    def made_elsewhere(cls: type[PagedKV], /, config: Any, location_capacity: int, **where: Any) -> PagedKV:
        kv: PagedKV = zeros(cls, config, location_capacity, **where)
        other = RUNTIME[0].stream("allocator")
        with RUNTIME[0].use(other):
            for memory in (*kv.keys, *kv.values):
                memory.zero_()
        return kv

    patch.setattr(PagedKV, "zeros", classmethod(made_elsewhere))


RUNTIME: list[RaceRuntime] = []


@pytest.mark.parametrize(
    ("forget", "kind"),
    [
        (_after, None),
        (_hand_over, RaceKind.FREED_IN_USE),
        (_kv_on_two_streams, RaceKind.WRITE_AFTER_WRITE),
    ],
)
def test_what_an_engine_forgets_is_found(
    race: RaceRuntime, forget: Forget, kind: RaceKind | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that leaves out one order is stopped, and told between which two lines it is missing."""
    RUNTIME[:] = [race]
    forget(monkeypatch)
    with pytest.raises(Race) as caught:
        serve(race, TIGHT, 10)
    assert caught.value.code is Code.RACE
    report = caught.value.report
    assert kind is None or report.kind is kind, report
    assert report.first.lane != report.second.lane
    assert ".py:" in report.first.site
    assert ".py:" in report.second.site
    assert "wait" in report.suggestion or "use_on_current_stream" in report.suggestion
