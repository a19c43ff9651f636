"""The exact model: each text is the right one, a fault of the state changes one, and the verifier names it."""

import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import attrs
import pytest
import torch

from batchstate.errors import ArgumentError
from batchstate.testing.exact import (
    AdapterError,
    Arrival,
    EngineUnderTest,
    ExactModel,
    ExactSpec,
    History,
    Oracle,
    PackedCache,
    PagedMemory,
    Request,
    Verifier,
    Wave,
    hunt,
    play,
    reduced,
)
from batchstate.testing.exact.hashing import decode, encode, from_octets

PAGE = 4


class SmallEngine:
    """Pages, chunks, and a state row for each request; it can do wrong what `bug` says."""

    bug: ClassVar[str] = ""

    def __init__(self, settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None) -> None:
        self.model, self.verifier, self.chunk = model, verifier, settings["chunk"]
        spec = model.spec
        shapes = [(64, 8) if kept == "state" else (64, spec.heads, spec.head_dim) for kept in spec.layers]
        keys, values = ([torch.zeros(shape, dtype=model.dtype) for shape in shapes] for _ in range(2))
        self.memory = PagedMemory(keys, values, PAGE)
        self.free, self.rows = list(range(64 // PAGE)), list(range(8))
        self.waiting: list[Request] = []
        self.running: list[dict[str, Any]] = []

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.append(request)

    def abort(self, number: int) -> None:
        """Its client hangs up."""
        self.waiting = [request for request in self.waiting if request.number != number]
        for job in [job for job in self.running if job["request"].number == number]:
            self._leave(job)

    def _leave(self, job: dict[str, Any]) -> None:
        self.running.remove(job)
        self.free += job["pages"]
        self.rows.append(job["row"])

    def _admit(self) -> None:
        while self.waiting and self.rows:
            request = self.waiting[0]
            need = -(-(len(request.prompt) + request.max_new_tokens) // PAGE)
            if need > len(self.free):
                return
            self.waiting.pop(0)
            pages, self.free = self.free[:need], self.free[need:]
            self.running.append(
                {"request": request, "pages": pages, "row": self.rows.pop(), "ids": list(request.prompt), "done": 0}
            )

    def step(self) -> Mapping[int, Sequence[int]]:
        """One packed forward of all that run."""
        self._admit()
        ids, positions, queries, lens, read, write = ([] for _ in range(6))  # type: ignore[var-annotated]
        for job in self.running:
            done, n = job["done"], min(len(job["ids"]) - job["done"], self.chunk)
            shift = int(self.bug == "position" and done > 0)
            short = int(self.bug == "length" and done > 0)
            pages = job["pages"][1::-1] + job["pages"][2:] if self.bug == "swapped" else job["pages"]
            places = [page * PAGE + row for page in pages for row in range(PAGE)]
            written = [page * PAGE + row for page in job["pages"] for row in range(PAGE)]
            ids += job["ids"][done : done + n]
            positions += range(done - shift, done - shift + n)
            queries.append(n)
            lens.append(done + n - short)
            read += places[: done + n - short]
            write += written[done : done + n]
        if not ids:
            return {}
        cache = PackedCache(
            self.memory, torch.tensor(positions), queries, lens, torch.tensor(read), torch.tensor(write),
            windows=self.model.spec.layers, requests=[job["request"].number for job in self.running],
            state_rows=torch.tensor([0 if self.bug == "state" else job["row"] for job in self.running]),
            verifier=self.verifier,
        )  # fmt: skip
        hidden = self.model.run(torch.tensor(ids)[None], torch.tensor(positions)[None], cache)
        last = torch.tensor(queries).cumsum(0) - 1
        temperatures = torch.tensor([job["request"].temperature for job in self.running])
        tokens = self.model.sample(self.model.logits(hidden[0, last]), temperatures).tolist()
        came: dict[int, Sequence[int]] = {}
        for job, n, token in zip(list(self.running), queries, tokens, strict=True):
            request, job["done"] = job["request"], job["done"] + n
            if job["done"] < len(job["ids"]):
                continue
            job["ids"].append(token)
            came[request.number] = [token]
            if len(job["ids"]) == len(request.prompt) + request.max_new_tokens:
                self._leave(job)
            elif self.bug == "freed" and len(job["pages"]) > 1:
                self.free.append(job["pages"].pop(0))
                job["pages"].insert(0, self.free[-1])
        return came

    @property
    def busy(self) -> bool:
        """Whether anything is to be done."""
        return bool(self.waiting or self.running)

    def close(self) -> None:
        """Nothing is held."""


SMALL = EngineUnderTest(
    "small", SmallEngine, {"chunk": (8, 3, 64), "window": (None, 5), "dtype": (torch.float32, torch.bfloat16)},
    lambda settings: ExactSpec((settings["window"], "state", None), heads=2), longest_prompt=20, longest_answer=9,
    temperatures=(0.0, 0.7),
)  # fmt: skip
BUGS = ("position", "length", "swapped", "state", "freed")


@pytest.mark.parametrize("number", [0, 1])
def test_an_engine_without_a_fault_is_not_accused(number: int) -> None:
    """Windows, states, chunks, dtypes, sampling rows and aborts: every text is right, and so is every entry read."""
    report = hunt(SMALL, requests=150, number=number, verify=True)
    assert report.failure is None
    assert report.differences == 0
    assert report.requests >= 150
    assert report.as_dict() == {
        "engine": "small", "requests": report.requests, "differences": 0, "seconds": report.seconds,
        "histories": report.histories, "failure": None,
    }  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_fault_changes_a_text_and_is_named(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is found within 60 requests, shrunk to at most three, and the words say who read what."""
    monkeypatch.setattr(SmallEngine, "bug", bug)
    report = hunt(SMALL, requests=300)
    assert report.requests < 60
    assert report.failure is not None
    assert report.failure.requests <= 3
    assert report.outcome is not None
    assert "expected" in report.message
    assert "of its answer is" in report.message
    assert "read from page" in report.message


def test_the_same_number_plays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing history comes again."""
    monkeypatch.setattr(SmallEngine, "bug", "position")
    first, second = (hunt(SMALL, requests=100, number=3) for _ in range(2))
    assert first.failure == second.failure
    assert first.requests == second.requests


class Forgetful(SmallEngine):
    """Loses a request that waits."""

    def step(self) -> Mapping[int, Sequence[int]]:
        """Forgets the others."""
        came = super().step()
        self.waiting = []
        return came


class Generous(SmallEngine):
    """Returns a token too many."""

    def step(self) -> Mapping[int, Sequence[int]]:
        """Each token twice."""
        return {number: [*tokens, *tokens] for number, tokens in super().step().items()}


class Stranger(SmallEngine):
    """Returns tokens of a request that never came."""

    def step(self) -> Mapping[int, Sequence[int]]:
        """One token of nobody."""
        return {**super().step(), 77: [1]}


class Stuck(SmallEngine):
    """Never ends."""

    def step(self) -> Mapping[int, Sequence[int]]:
        """Does nothing."""
        return {}


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (Forgetful, r"small has nothing left to do, and requests \[2\] have not finished"),
        (Generous, "small has returned 2 tokens for request 0, expected at most 1"),
        (Stranger, "small has returned 1 tokens for request 77, expected at most 0"),
        (Stuck, r"small has made 31 steps without a token; open are \[0, 1, 2\]"),
    ],
)
def test_bad_adapters_are_refused(adapter: type[SmallEngine], words: str) -> None:
    """One that loses a request, returns too many tokens or never ends gets an error with the request in it."""
    engine = attrs.evolve(SMALL, open=adapter, patience=30)
    history = History({"chunk": 64, "window": None, "dtype": torch.float32},
                      (Wave((Arrival(((0, 20),), 1), Arrival(((1, 20),), 9), Arrival(((2, 20),), 9)), 3),))  # fmt: skip
    spec = engine.spec(history.settings)
    outcome = play(engine, history, Oracle(spec), ExactModel(spec))
    assert isinstance(outcome.error, AdapterError)
    assert re.match(words, str(outcome.error))
    assert "remedy: " in str(outcome.error)
    report = hunt(engine, requests=20)
    assert report.differences == 1
    assert report.failure is not None
    assert "small has" in report.message


def test_a_step_that_never_ends_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    """The report says in which line it was, and shrinking ends; a thread, and the timer of a test runner, stay free."""

    class Endless(SmallEngine):
        def step(self) -> Mapping[int, Sequence[int]]:
            while self.running:
                pass
            return super().step()

    handler, engine = signal.getsignal(signal.SIGALRM), attrs.evolve(SMALL, open=Endless, step_seconds=0.2)
    report = hunt(engine, requests=20, shrink_seconds=1.0)
    assert report.failure is not None
    assert report.failure.requests == 1
    assert report.seconds < 10
    assert re.search(rf"AdapterError: small has not ended a step for 0.2 s, in step, {__file__}:\d+", report.message)
    assert "is shrunk: the engine has failed: AdapterError: small has not ended a step" in caplog.text
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]) == (handler, 0.0)
    right = attrs.evolve(SMALL, step_seconds=1e-4)  # a thread gets no signal, and another's timer is not touched
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(hunt, right, requests=5).result().failure is None
    signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        assert hunt(right, requests=5).failure is None
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_many_requests_shrink_together_with_memory() -> None:
    """A failure that needs full memory, into which each request fits four times, comes with less memory too."""

    def fails(history: History) -> bool:
        lengths = [arrival.prompt[0][1] for wave in history.waves for arrival in wave.arrivals]
        return sum(lengths) >= history.settings["memory"] >= 4 * max(lengths, default=0)

    engine = attrs.evolve(SMALL, choices={"memory": (16, 1024)})
    many = History({"memory": 1024}, tuple(Wave((Arrival(((0, 40),), 9),), 3) for _ in range(200)))
    result = reduced(engine, many, fails)
    assert (result.size, result.smallest.settings, len(result.smallest.waves)) == (16, {"memory": 16}, 1)


def test_an_engine_that_fails_is_a_result(caplog: pytest.LogCaptureFixture) -> None:
    """Its exception is kept with the history that brought it about, which is shrunk no longer than was asked."""

    class Failing(SmallEngine):
        def step(self) -> Mapping[int, Sequence[int]]:
            raise RuntimeError("no page left")

    class Unmade(SmallEngine):
        def __init__(self, *args: Any) -> None:
            raise RuntimeError("no such page size")

    unmade = hunt(attrs.evolve(SMALL, open=Unmade), requests=10)
    assert "settings: {'chunk': 8, 'window': None, 'dtype': torch.float32}\n" in unmade.message
    assert "the engine has failed: RuntimeError: no such page size\n" in unmade.message
    engine = attrs.evolve(SMALL, open=Failing)
    as_drawn, report = hunt(engine, requests=10, shrink_seconds=0.0).failure, hunt(engine, requests=10)
    assert "failed by request" in caplog.text
    assert as_drawn is not None
    assert report.failure is not None
    assert as_drawn.requests > report.failure.requests == 1
    failed = re.escape(f"the engine has failed: RuntimeError: no page left\n  {__file__}:")
    assert re.search(failed + r"\d+, in step$", report.message)


def test_answers_are_forced_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded tokens are the text of a request, sampling rows included; a wrong state changes even that."""
    code = "import sys, batchstate.testing.exact as e; e.play, e.Oracle; sys.exit('hypothesis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    settings = {"chunk": 3, "window": None, "dtype": torch.float32}
    history = History(settings, (Wave((Arrival(((0, 7),), 4), Arrival(((0, 5), (1, 4)), 3, 0.7)), 0),))
    oracle = Oracle(SMALL.spec(settings))
    for arrival, tokens in zip(history.waves[0].arrivals, ([5, 0, 8191, 5], [7, 7]), strict=True):
        oracle.force(arrival.request(0, 8192).prompt, tokens, arrival.temperature)
    model = ExactModel(oracle.spec, forced=oracle.forced)
    outcome = play(SMALL, history, oracle, model)
    assert (outcome.wrong, outcome.texts[0], outcome.texts[1][:2]) == (False, (5, 0, 8191, 5), (7, 7))
    monkeypatch.setattr(SmallEngine, "bug", "length")
    assert [difference.request.number for difference in play(SMALL, history, oracle, model).differences] == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_words_survive_memory_of_every_dtype(dtype: torch.dtype) -> None:
    """An entry is the same word again; any other byte is another word, and what is no byte is none."""
    words = torch.arange(-5, 5) * 0x9E3779B97F4A7C15 % (1 << 62)
    entries = encode(words, 2, 8, dtype)
    assert entries.shape == (10, 2, 8)
    read = decode(entries)
    assert len(set(read.tolist())) == 10
    assert decode(entries[:0]).shape == (0,)
    for value in (torch.nan, 0.5, 300.0):
        spoilt = entries.clone()
        spoilt[3, 1, 2] = value
        assert (decode(spoilt) != read).nonzero().tolist() == [[3]]
    assert int(from_octets(torch.zeros(8, dtype=dtype))) == 0


def test_settings_are_refused() -> None:
    """A shape that is none, and a hunt for nothing."""
    for shape in ({"layers": ()}, {"heads": 1, "head_dim": 4}, {"heads": 0}):
        with pytest.raises(ArgumentError, match="an exact model of layers"):
            ExactSpec(**shape)
    for refused in ({"layers": (0,)}, {"vocab_size": 1}):
        with pytest.raises(ArgumentError):
            ExactSpec(**refused)
    with pytest.raises(ArgumentError, match="hunt: requests"):
        hunt(SMALL, requests=0)
    with pytest.raises(ArgumentError, match="hunt: number"):
        hunt(SMALL, requests=1, number=-1)
