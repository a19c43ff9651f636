"""Random histories of requests, drawn by Hypothesis and played on an engine; one that fails is shrunk."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, final

import attrs
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from batchstate._arrays import count
from batchstate.testing.exact.history import Arrival, EngineUnderTest, History, Outcome, Wave, play
from batchstate.testing.exact.model import ExactModel
from batchstate.testing.exact.reduce import reduced
from batchstate.testing.exact.text import ExactSpec, Oracle
from batchstate.testing.exact.verify import Verifier, WrongRead
from batchstate.testing.runner import same_examples

__all__ = ["ExactReport", "drawn", "hunt"]

_log = logging.getLogger("batchstate")

_DOCUMENTS = (1, 2, 6)
"""The prompts of a history are pieces of so many; with one each prompt begins as others do."""


def _histories(engine: EngineUnderTest) -> st.SearchStrategy[History]:
    """Waves of requests with prefixes in common, cold ones and ones that come again."""
    longest = engine.longest_prompt
    lengths = st.one_of(st.integers(1, min(8, longest)), st.integers(1, longest))
    aborts = st.one_of(st.none(), st.integers(-60, 20).map(lambda at: at if at >= 0 else None))
    chosen = st.fixed_dictionaries({name: st.sampled_from(list(values)) for name, values in engine.choices.items()})

    def within(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        before = itertools.accumulate((length for _, length in pieces), initial=0)
        left = [(document, min(length, longest - at)) for (document, length), at in zip(pieces, before, strict=False)]
        return tuple((document, length) for document, length in left if length > 0)

    def with_documents(documents: int) -> st.SearchStrategy[History]:
        pieces = st.lists(st.tuples(st.integers(0, documents - 1), lengths), min_size=1, max_size=3)
        arrivals = st.builds(
            Arrival,
            pieces.map(within),
            st.integers(1, engine.longest_answer),
            st.sampled_from(list(engine.temperatures)),
            aborts if engine.aborts else st.none(),
        )
        waves = st.builds(Wave, st.lists(arrivals, max_size=8).map(tuple), st.integers(0, 40))
        return st.builds(History, chosen, st.lists(waves, min_size=1, max_size=8).map(tuple))

    return st.sampled_from(_DOCUMENTS).flatmap(with_documents)


def drawn(engine: EngineUnderTest, number: int, *, batch: int = 40) -> Iterator[History]:
    """Random histories for an engine, without end; the same for the same number.

    Hypothesis makes a batch of them at a time, of which the first tenth, or the first ten, are small ones.
    """
    strategy = _histories(engine)
    profile = settings(
        max_examples=batch, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    kept: list[History] = []

    def keep(history: History) -> None:
        kept.append(history)

    for batch_seed in itertools.count(number * 10_007):
        kept.clear()
        with same_examples():
            seed(batch_seed)(profile(given(strategy)(keep)))()
        yield from kept


@final
@attrs.define
class ExactReport:
    """The result of a hunt.

    Attributes:
        engine: its name.
        requests: served, with those of the failing history as it was first found.
        differences: wrong answers in that history, with 1 for an error of the engine; 0 where all was right.
        seconds: wall time, shrinking included.
        histories: played, shrinking left out.
        failure: the shortest history that fails.
        outcome: of it.
        message: says in words what went wrong in it, with those of the verifier.
    """

    engine: str
    requests: int = 0
    differences: int = 0
    seconds: float = 0.0
    histories: int = 0
    failure: History | None = None
    outcome: Outcome | None = None
    message: str = ""

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
    shrink_seconds: float = 60.0,
    progress: Callable[[int], None] | None = None,
) -> ExactReport:
    """Plays random histories until so many requests were served, or one history fails, which is shrunk.

    An engine runs an `ExactModel` on the CPU, of the dtype that its setting `dtype` says, if it has one.

    Args:
        engine: to be put to the test.
        requests: how many at least.
        number: the same seed plays the same histories.
        verify: compare entries as they are read too; a failing history is always verified once it is shrunk.
        shrink_seconds: to shrink a failing history for, at most, and for the last history that it tries; a line of the
            logger `batchstate` says that it begins, and what failed.
        progress: called with the requests served so far.

    Raises:
        ArgumentError: no request, or a negative seed.
    """
    count(requests, "hunt: requests", least=1)
    count(number, "hunt: number")
    report, start, oracles = ExactReport(engine.name), time.perf_counter(), dict[ExactSpec, Oracle]()

    def played(history: History, *, verify: bool = verify) -> tuple[Outcome, list[WrongRead]]:
        spec = engine.spec(history.settings)
        verifier = Verifier() if verify else None
        model = ExactModel(spec, dtype=history.settings.get("dtype", torch.float32))
        outcome = play(engine, history, oracles.setdefault(spec, Oracle(spec)), model, verifier)
        return outcome, [] if verifier is None else verifier.reports

    def fails(history: History) -> bool:
        outcome, reports = played(history)
        return outcome.wrong or bool(reports)

    for history in drawn(engine, number):
        outcome, reports = played(history)
        report.histories += 1
        if outcome.wrong or reports:
            report.differences = len(outcome.differences) + (outcome.error is not None)
            served = report.requests + history.requests
            first = (str(outcome) or str(reports[0])).partition("\n")[0]
            _log.warning("a history of %s failed by request %d, and is shrunk: %s", engine.name, served, first)
            report.failure = reduced(engine, history, fails, seconds=shrink_seconds).smallest
            report.outcome, reports = played(report.failure, verify=True)
            report.message = "\n".join([str(report.failure), str(report.outcome), *map(str, reports[:4])])
        report.requests += history.requests
        if report.failure is not None or report.requests >= requests:
            break
        if progress is not None:
            progress(report.requests)
    report.seconds = time.perf_counter() - start
    return report
