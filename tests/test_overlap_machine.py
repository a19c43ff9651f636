"""The overlap machine: it overlaps, waits for nothing but results, and finds what is broken, late as it may show."""

from functools import partial

import attrs
import pytest
import torch

from batchstate.future_map import FutureMap
from batchstate.mirror import Slots
from batchstate.races.devices import is_tool
from batchstate.tables import Table
from batchstate.testing import DisagreementError, LateRuntime, no_hidden_sync, run_machine
from batchstate.testing.machine import session
from tests.selfcheck.machines import overlap as overlap_forward
from tests.selfcheck.machines.overlap import CHOICES, READINGS, Arrival, Choices, OverlapMachine
from tests.selfcheck.mutants import MUTANTS

EXAMPLES = 56

LEAST = {
    "two steps in flight": 1130,
    "left while a step uses the row": 800,
    "joined while a step is in flight": 460,
    "a slot used again while a step is in flight": 680,
    "a prebuilt request in a used slot": 280,
    "a prebuilt request on used pages": 280,
    "prebuilt KV handed to the forward": 240,
    "a retracted request came back": 5,
    "waited for a step that held what was needed": 160,
    "tokens taken back while a step writes them": 330,
    "a row rewritten while a step reads it": 14,
    "a row written on two streams": 5,
    "a row cleared on another stream": 210,
    "a forward of prompts and decodes": 430,
    "looked at while a step is in flight": 70,
    "results read out of order": 100,
    "results dropped unread": 50,
    "results of a batch in another order": 270,
}
"""Coverage target -> times that `EXAMPLES` examples on a CPU reach it at least."""

depths: list[int] = []


class Watched(OverlapMachine):
    """Notes how deep it runs."""

    def check(self) -> None:
        depths.append(self.engine.depth)
        super().check()


@pytest.fixture(autouse=True)
def no_depths() -> None:
    """Each test notes its own."""
    depths.clear()


def opened(level: str = "off") -> OverlapMachine:
    """A machine that has begun, driven by hand, on a CPU that lags."""
    with session(level=level):
        machine = OverlapMachine()
    machine.begin(size=3, page_size=2, spare=2, chunk=3)
    return machine


# As it is


def test_nothing_is_found(device: str) -> None:
    """The library as it is breaks nothing, two steps deep, in every state that makes this mean something."""
    result = run_machine(Watched, device=device, examples=EXAMPLES, derandomize=True, level="cheap")
    assert result.failure is None, result.failure
    assert result.examples == EXAMPLES
    assert max(depths) == 2
    if device == "cpu":
        assert list(LEAST) == list(OverlapMachine.TARGETS)
        assert not {target: times for target, times in result.reached.items() if times < LEAST[target]}


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_depth_is_what_is_declared(steps_in_flight: int) -> None:
    """As many steps are in flight as the runtime declares, and on a device that lags no fence of theirs is complete."""
    runtimes = partial(LateRuntime, steps_in_flight=steps_in_flight)
    result = run_machine(Watched, runtimes=runtimes, examples=6, derandomize=True, level="cheap")
    assert result.failure is None, result.failure
    assert max(depths) == steps_in_flight


def test_nothing_waits_for_the_device(device: str) -> None:
    """No operation of a step makes the host wait, as far as the guard knows them."""
    if is_tool(device):
        pytest.skip("a tool watches by itself what the guard watches")

    class Guarded(OverlapMachine):
        def open(self) -> None:
            super().open()
            self._windows.enter_context(no_hidden_sync(self.rt))

    result = run_machine(Guarded, device=device, examples=6, derandomize=True, level="cheap")
    assert result.failure is None, result.failure


def test_simplest_example_is_busy() -> None:
    """The example that Hypothesis tries first, the first rule again and again, meets most of the states."""
    result = run_machine(OverlapMachine, examples=1, derandomize=True, level="off")
    assert result.failure is None, result.failure
    assert sum(times > 0 for times in result.reached.values()) >= 11
    assert result.reached["two steps in flight"] >= 40


# Bugs are found


@pytest.mark.parametrize(
    ("name", "level", "code"),
    [
        ("filter_forgets_device", "off", "MODEL"),
        ("filter_forgets_device", "full", "MIRROR_EQUAL"),
        ("merge_in_other_order", "off", "MODEL"),
        ("filter_forgets_device_column", "cheap", "ROW_COUNT"),
        ("free_ignores_fence", "cheap", "SLOT_IN_FLIGHT"),
        ("gather_before_publish", "cheap", "FUTURE_ORDER"),
        ("overwriting_passes_readers", "cheap", "FUTURE_ORDER"),
        ("host_reads_before_copy", "cheap", "FUTURE_ORDER"),
        ("landing_buffer_reused", "cheap", "STAGING_REUSED"),
        ("landing_buffer_reused", "off", "MODEL"),
        ("generations_not_filtered", "cheap", "SLOT_STALE_HANDLE"),
    ],
)
def test_mutants_are_found(name: str, level: str, code: str) -> None:
    """A bug of the library is found within few examples: by its law, or, with checks off, by a wrong token."""
    with MUTANTS[name].switched_on():
        result = run_machine(OverlapMachine, examples=20, derandomize=True, level=level, shrink=False)
    assert result.code == code, result.failure
    assert result.first_failure is not None
    assert result.first_failure <= 10


@pytest.mark.parametrize("name", ["_write_kv", "_attend", "_next_state"])
def test_forward_that_forgets_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a forward does not write or does not read changes a token."""
    forgets = {
        "_write_kv": lambda kv, locs, ids, positions: None,
        "_attend": lambda kv, locs, weights: torch.zeros_like(locs[:, 0]),
        "_next_state": lambda state, mix: state,
    }
    monkeypatch.setattr(overlap_forward, name, forgets[name])
    result = run_machine(OverlapMachine, examples=5, derandomize=True, level="off", shrink=False)
    assert result.code == "MODEL", result.failure


def test_nudge_of_another_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that another stream publishes count, row by row."""
    original = FutureMap.publish

    def seed(self: FutureMap, slots: Slots, /, **values: object) -> None:
        nudge = values.get("nudge")
        original(self, slots, **(values if not isinstance(nudge, list) else {"nudge": nudge[::-1]}))

    monkeypatch.setattr(FutureMap, "publish", seed)
    result = run_machine(OverlapMachine, examples=10, derandomize=True, level="off", shrink=False)
    assert result.code == "MODEL"


# How an example ends


def test_what_shows_late_is_found_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that nobody cleared and nobody read again is seen when everybody has gone."""
    monkeypatch.setattr(Table, "clear", lambda self, slots: None)
    machine = opened()
    machine._arrive(2, 1, Arrival.PROMPT, marked=True)
    machine.run([Choices()])
    machine.check()
    with pytest.raises(DisagreementError, match="what is left"):
        machine.teardown()


def test_unread_results_are_compared_at_the_end() -> None:
    """Results that no rule has read are read before the example is over."""
    machine = opened()
    machine._arrive(2, 4, Arrival.PROMPT, marked=False)
    machine.run([Choices(unread=True)])
    machine.engine.unread[0].requests[0].held.token = 0  # the model's, which is not asked again
    wrong = machine.engine.unread[0]
    machine.engine.unread[0] = attrs.evolve(wrong, outcomes=[outcome._replace(token=1) for outcome in wrong.outcomes])
    with pytest.raises(DisagreementError, match="tokens of step 1"):
        machine.teardown()


def test_failed_example_is_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rule has failed, the end of the example asks for nothing more and hides nothing."""
    drained: list[OverlapMachine] = []
    monkeypatch.setattr(OverlapMachine, "_drain", lambda self: drained.append(self))

    def fail() -> None:
        machine = opened()
        try:
            raise ZeroDivisionError
        finally:
            machine.teardown()

    with pytest.raises(ZeroDivisionError):
        fail()
    assert drained == []
    opened().teardown()
    assert len(drained) == 1
    OverlapMachine().teardown()  # one that never began
    assert len(drained) == 1


# Choices


def test_numbers_name_every_way() -> None:
    """Number 0 is the plainest way to run a step, and every value of every choice has numbers."""
    every = [Choices.numbered(number) for number in range(5120)]
    assert every[0] == Choices()
    assert {choices.first for choices in every} == set(range(len(READINGS)))
    assert {choices.readings[0] for choices in every} == set(READINGS)
    for field in attrs.fields(Choices)[1:]:
        assert {getattr(choices, field.name) for choices in every} == {False, True}, field.name
    assert {Choices.numbered(5120 + number) for number in range(50)} == set(every[:50])
    assert "max_value=5119" in repr(CHOICES)


def test_choices_name_what_is_special() -> None:
    """A program that failed shows of each step only what is unlike the plainest."""
    assert repr(Choices()) == "Choices()"
    assert repr(Choices(first=2, tries=True)) == "Choices(first=2, tries=True)"
