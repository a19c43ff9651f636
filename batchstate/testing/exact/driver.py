"""Random histories of requests, drawn by Hypothesis and played on an engine; one that fails is shrunk."""

import time
from collections.abc import Callable
from typing import Any, final

import attrs
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from batchstate._arrays import count
from batchstate.testing.exact.history import (
    AdapterError,
    Arrival,
    EngineUnderTest,
    History,
    Outcome,
    Settings,
    Wave,
    play,
)
from batchstate.testing.exact.model import ExactModel, LanguageModel
from batchstate.testing.exact.reduce import reduced
from batchstate.testing.exact.text import ExactSpec, Oracle
from batchstate.testing.exact.verify import Verifier
from batchstate.testing.runner import error_of, same_examples

__all__ = ["ExactReport", "histories", "hunt"]

_DOCUMENTS = (1, 2, 6)
"""The prompts of a history are pieces of so many; with one each prompt begins as others do."""
_BATCH = 40
"""Histories that Hypothesis makes at a time; between them it is asked whether there were enough."""


def histories(engine: EngineUnderTest) -> st.SearchStrategy[History]:
    """Histories for an engine: waves of requests with prefixes in common, cold ones and ones that come again."""
    longest = engine.longest_prompt
    lengths = st.one_of(st.integers(1, min(8, longest)), st.integers(1, longest))
    aborts = st.lists(st.integers(0, 7), max_size=2).map(tuple) if engine.aborts else st.just(())
    chosen = st.fixed_dictionaries({name: st.sampled_from(list(values)) for name, values in engine.choices.items()})

    def with_documents(documents: int) -> st.SearchStrategy[History]:
        pieces = st.lists(st.tuples(st.integers(0, documents - 1), lengths), min_size=1, max_size=3).map(tuple)
        arrivals = st.builds(
            Arrival, pieces, st.integers(1, engine.longest_answer), st.sampled_from(list(engine.temperatures))
        )
        waves = st.builds(Wave, st.lists(arrivals, max_size=8).map(tuple), st.integers(0, 40), aborts)
        return st.builds(History, chosen, st.lists(waves, min_size=1, max_size=8).map(tuple))

    return st.sampled_from(_DOCUMENTS).flatmap(with_documents)


@final
@attrs.frozen
class ExactReport:
    """The result of a hunt.

    Attributes:
        engine: its name.
        requests: served, with those of the failing history as it was first found.
        differences: wrong answers in that history, with 1 for an error of the engine; 0 where all was right.
        seconds: wall time, shrinking included.
        histories: played, shrinking left out.
        steps: of the engine.
        failure: the shortest history that fails.
        outcome: of it; None if the adapter was refused.
        message: what went wrong in it, with the verifier's words.
        before: requests that had finished when the first wrong answer did, over all histories; None without one.
    """

    engine: str
    requests: int
    differences: int
    seconds: float
    histories: int
    steps: int = 0
    failure: History | None = None
    outcome: Outcome | None = None
    message: str = ""
    before: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        names = ("engine", "requests", "differences", "seconds", "histories")
        return {name: getattr(self, name) for name in names} | {"failure": self.message or None}


def hunt(
    engine: EngineUnderTest,
    *,
    requests: int,
    number: int = 0,
    verify: bool = False,
    shrink: bool = True,
    model: Callable[[ExactSpec, Settings], LanguageModel] | None = None,
    progress: Callable[[int], None] | None = None,
) -> ExactReport:
    """Plays random histories until so many requests were served, or one history fails.

    Args:
        engine: to be put to the test.
        requests: how many at least.
        number: the same seed plays the same histories.
        verify: compare entries as they are read too; a failing history is always verified once it is shrunk.
        shrink: look for the shortest history that fails.
        model: makes the model that an engine runs; by default an `ExactModel` on the CPU, with the setting `dtype`.
        progress: called with the requests served so far.

    Raises:
        ArgumentError: no request, or a negative seed.
    """
    count(requests, "hunt: requests", least=1)
    count(number, "hunt: number")
    hunter = _Hunter(engine, verify=verify, model=model or _exact)
    start, batch, error = time.perf_counter(), 0, None
    while hunter.requests < requests and error is None:
        error = hunter.run(number * 10_007 + batch, requests, progress)
        batch += 1
    report = ExactReport(
        engine.name, hunter.requests, hunter.differences, time.perf_counter() - start, hunter.histories, hunter.steps
    )
    if error is None:
        return report
    if hunter.failing is None:
        raise error
    history = reduced(engine, hunter.failing, hunter.fails) if shrink else hunter.failing
    message, outcome = hunter.told(history)
    return attrs.evolve(
        report, seconds=time.perf_counter() - start, failure=history, outcome=outcome, message=message,
        before=hunter.before,
    )  # fmt: skip


def _exact(spec: ExactSpec, chosen: Settings) -> LanguageModel:
    return ExactModel(spec, **({"dtype": chosen["dtype"]} if "dtype" in chosen else {}))


class _Hunter:
    def __init__(
        self, engine: EngineUnderTest, *, verify: bool, model: Callable[[ExactSpec, Settings], LanguageModel]
    ) -> None:
        self._engine, self._verify, self._model = engine, verify, model
        self._oracles: dict[ExactSpec, Oracle] = {}
        self.requests = self.histories = self.steps = self.differences = 0
        self.failing: History | None = None
        self.before: int | None = None

    def run(self, number: int, enough: int, progress: Callable[[int], None] | None) -> BaseException | None:
        """Plays some histories until there are enough requests; the error of one that fails."""
        profile = settings(
            max_examples=_BATCH,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
        )

        @seed(number)
        @profile
        @given(histories(self._engine))
        def test(history: History) -> None:
            if self.failing is None and self.requests >= enough:
                return
            self._play(history)
            if progress is not None and self.failing is None:
                progress(self.requests)

        with same_examples():
            return error_of(test)

    def _play(self, history: History) -> None:
        first = self.failing is None
        if first:
            self.histories += 1
        try:
            outcome, verifier = self._played(history, verify=self._verify)
        except AdapterError:
            if first:
                self.requests, self.differences = self.requests + history.requests, 1
            self.failing = history
            raise
        reports = verifier.reports if verifier is not None else []
        if first:
            self.requests += history.requests
            self.steps += outcome.steps
        if outcome.wrong or reports:
            if first:
                self.differences = len(outcome.differences) + (outcome.error is not None)
                ahead = min((difference.finished for difference in outcome.differences), default=len(outcome.finished))
                self.before = self.requests - history.requests + ahead
            self.failing = history
            raise WrongTextError(outcome.error or (outcome.differences or reports)[0])

    def fails(self, history: History) -> bool:
        """Whether a history, smaller than one that failed, does so too."""
        try:
            outcome, verifier = self._played(history, verify=self._verify)
        except AdapterError:
            return True
        return outcome.wrong or bool(verifier is not None and verifier.reports)

    def _played(self, history: History, *, verify: bool) -> tuple[Outcome, Verifier | None]:
        spec = self._engine.spec(history.settings)
        oracle = self._oracles.setdefault(spec, Oracle(spec))
        verifier = Verifier() if verify else None
        model = self._model(spec, history.settings)
        return play(self._engine, history, oracle, model, verifier), verifier

    def told(self, history: History) -> tuple[str, Outcome | None]:
        """A failing history in words: what was done, what differs, what was read."""
        lines = [f"settings: {dict(history.settings)}"]
        for wave in history.waves:
            lines += [f"  {wave}"]
        try:
            outcome, verifier = self._played(history, verify=True)
        except AdapterError as error:
            return "\n".join([*lines, str(error)]), None
        lines += [str(difference) for difference in outcome.differences]
        if outcome.error is not None:
            lines.append(f"the engine has failed: {type(outcome.error).__name__}: {outcome.error}")
        if verifier is not None:
            lines += [str(report) for report in verifier.reports[:4]]
        return "\n".join(lines), outcome


@final
class WrongTextError(Exception):
    """A history whose texts are not the right ones; tells Hypothesis so."""
