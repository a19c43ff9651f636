"""One engine with any settings, whatever clients and devices do: every invariant holds, and every token is right."""

import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate.runtime import Fence, Runtime
from batchstate.testing import LateRuntime
from tests.selfcheck.machine import Machine

pytest.importorskip("transformers")

from examples.engine.batch import RunningBatch, Step
from examples.engine.engine import Engine
from examples.engine.model import Family, Model, prefill
from examples.engine.reference import generate
from examples.engine.request import Request
from examples.engine.settings import EngineSettings
from examples.tests.engine_cases import model_of, nothing_left, whole
from tests.coverage_targets import reach_all

Arrivals = list[tuple[list[int], int, bool]]

LONGEST_PROMPT, MOST_NEW, MOST_HERE = 14, 12, 6
KNOWN: dict[Model, dict[tuple[int, ...], list[int]]] = {}
"""Model -> prompt -> the right answer, as long as any here."""

prompts = st.one_of(
    st.lists(st.integers(0, 255), min_size=1, max_size=LONGEST_PROMPT),
    # Prompts that repeat themselves, so that what is guessed from them may be right.
    st.tuples(st.lists(st.integers(0, 255), min_size=1, max_size=3), st.integers(1, LONGEST_PROMPT)).map(
        lambda drawn: (drawn[0] * drawn[1])[: drawn[1]]
    ),
)
arrivals = st.lists(
    st.tuples(prompts, st.integers(1, MOST_NEW), st.sampled_from([False, False, True])), min_size=1, max_size=3
)


@st.composite
def engine_settings(draw: st.DrawFn) -> EngineSettings:
    """Any modes, with pages for one request of the longest kind and little more."""
    num_drafts = draw(st.integers(0, 3))
    page_size = draw(st.sampled_from([1, 2, 3, 8]))
    least = -(-(LONGEST_PROMPT + MOST_NEW + 3 * (1 + num_drafts)) // page_size)
    return EngineSettings(
        max_running=draw(st.integers(1, 5)),
        num_pages=least + draw(st.integers(0, 3)),
        page_size=page_size,
        max_tokens_per_request=LONGEST_PROMPT + MOST_NEW,
        max_tokens_per_step=draw(st.integers(1, 40)),
        overlap=draw(st.booleans()),
        mixed=draw(st.booleans()),
        num_drafts=num_drafts,
    )


class EngineMachine(Machine):
    """Clients of one engine, and what they were told."""

    NAME = "example engine"
    TARGETS = (
        "retraction",
        "right guess",
        "abort while waiting",
        "abort with a step in flight",
        "prebuilt request retracted",
        "retracted while a step is in flight",
        "answer ended by EOS",
        "waited for a step that held what was needed",
        "idle step between others",
        "a device that lags",
    )

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.prebuilt: set[Request] = set()
        self.told: dict[Request, list[int]] = {}
        self.since_drain = 0

    @initialize(
        family=st.sampled_from(["llama", "qwen3"]),
        sizes=engine_settings(),
        lags=st.booleans(),
        eos=st.sampled_from([(), tuple(range(0, 256, 12))]),
        first=arrivals,
    )
    def start(self, family: Family, sizes: EngineSettings, lags: bool, eos: tuple[int, ...], first: Arrivals) -> None:
        """An engine of any kind, with a request to serve."""
        self.lags = lags
        self.open()
        self.model = model_of(family, str(self.rt.device))
        self.eos = eos
        self.engine = Engine(self.rt, self.model, sizes, eos_token_ids=eos)
        self.reached("a device that lags", lags)
        self.pending: Fence | None = None
        run = self.engine.scheduler.forward.run

        def look(step: Step) -> RunningBatch:
            self.reached(
                "waited for a step that held what was needed", self.pending is not None and self.pending.query()
            )
            return run(step)

        self.engine.scheduler.forward.run = look  # type: ignore[method-assign]
        self.arrive(first)

    def open_runtime(self) -> Runtime:
        """The device of the run, or one that lags."""
        return LateRuntime() if self.lags else super().open_runtime()

    # Rules, few and each of several kinds: most examples would leave out most of many

    @precondition(lambda self: self.crowd < MOST_HERE)
    @rule(new=arrivals)
    def arrive(self, new: Arrivals) -> None:
        """Requests are added; some were prefilled elsewhere."""
        for prompt, most_new, prebuilt in new:
            request = Request(len(self.requests), prompt, most_new, prefill(self.model, prompt) if prebuilt else None)
            self.requests.append(request)
            self.told[request] = []
            if prebuilt:
                self.prebuilt.add(request)
            self.engine.add(request)

    @precondition(lambda self: self.engine.busy)
    @rule(times=st.sampled_from([1, 2, 3, 4, 9]), fences=st.integers(0, 20))
    def step(self, times: int, fences: int) -> None:
        """The device gets on, as the host will notice, and the engine steps."""
        if isinstance(self.rt, LateRuntime):
            self.rt.complete(fences)
        for _ in range(times):
            self.one_step()

    @precondition(lambda self: self.engine.busy)
    @rule(times=st.integers(1, 3))
    def idle(self, times: int) -> None:
        """Other ranks have requests."""
        slots = self.engine.scheduler.batch.slots.np.tolist()
        for _ in range(times):
            self.engine.idle()
        assert self.engine.scheduler.batch.slots.np.tolist() == slots
        self.reached("idle step between others", bool(slots))

    @precondition(lambda self: self.crowd > 2)
    @rule(data=st.data(), running=st.booleans())
    def abort(self, data: st.DataObject, running: bool) -> None:
        """A client hangs up."""
        if running:
            self.one_step()  # so that it has just been launched
        here = self.of("running" if running else "waiting")
        if here:
            request = data.draw(st.sampled_from(here))
            self.reached("abort with a step in flight", bool(request.in_flight))
            self.reached("abort while waiting", not running)
            self.engine.abort(request.number)

    @precondition(lambda self: self.since_drain >= 10)
    @rule()
    def drain(self) -> None:
        """Everybody is served; then every answer is looked at. Not all the time: most happens while many are here."""
        for _ in range(1_000):
            if self.engine.busy:
                self.one_step()
        nothing_left(self.engine)
        self.compare()
        self.since_drain = 0

    # Checks

    def check(self) -> None:
        """Every invariant holds, and no token that a client was told is taken back."""
        engine = self.engine
        with self.rt.use(engine._stream):
            whole(engine)
        assert self.rt.counters.forced_syncs == 0
        assert engine.in_flight_depth_max <= 1 + engine.settings.overlap
        for request, told in self.told.items():
            assert request.output[: len(told)] == told
            told.extend(request.output[len(told) :])

    def teardown(self) -> None:
        """Requests that are left are served now."""
        try:
            if sys.exc_info()[0] is None and hasattr(self, "engine"):
                self.drain()
        finally:
            super().teardown()

    # Helpers

    def of(self, state: str) -> list[Request]:
        return [request for request in self.requests if request.state == state]

    @property
    def crowd(self) -> int:
        return len(self.of("waiting")) + len(self.of("running"))

    def one_step(self) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        running = [request for request in scheduler.batch.requests if request.state == "running"]
        waits = {request for request in running if request.in_flight}
        guesses, retractions = engine.accepted_drafts, scheduler.retractions
        self.since_drain += 1
        last = scheduler.last_step
        self.pending = None if last is None or last.query() else last
        engine.step()
        self.pending = None
        back = [request for request in running if request in scheduler.waiting]
        self.reached("right guess", engine.accepted_drafts > guesses)
        self.reached("retraction", scheduler.retractions > retractions)
        self.reached("prebuilt request retracted", bool(self.prebuilt.intersection(back)))
        self.reached("retracted while a step is in flight", bool(waits.intersection(back)))

    def compare(self) -> None:
        """Finished requests have the answer of transformers; aborted ones the beginning of it."""
        answers = KNOWN.setdefault(self.model, {})
        new = list({tuple(request.prompt) for request in self.requests} - answers.keys())
        answers.update(zip(new, generate(self.model, new, [MOST_NEW] * len(new), eos_token_ids=()), strict=True))
        for request in self.requests:
            answer = answers[tuple(request.prompt)][: request.max_new_tokens]
            ends = [at + 1 for at, token in enumerate(answer) if token in self.eos]
            answer = answer[: min(ends, default=None)]
            self.reached("answer ended by EOS", bool(ends) and request.state == "finished")
            if request.state == "finished":
                assert request.output == answer
            else:
                assert request.state == "aborted"
                assert request.output == answer[: len(request.output)]


def test_engine_serves_whatever_happens(device: str) -> None:
    """Whatever the settings, the clients and the device do, every invariant holds, and every token is the right one."""
    reach_all(EngineMachine, device, steps=30)
