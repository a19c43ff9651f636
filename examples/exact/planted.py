"""State bugs, planted one at a time in the code of engines: how many change a text, and after how many requests.

`bugs.py` has them. Of each random history that is played with a bug, three things are noted: whether any forward
read something that it does not read without the bug, whether a text of the exact model is another one, and whether a
text of a model of floating point is another one than without the bug. The first is found without the hash of the exact
model: of each query the bytes are compared that it is pointed at.
"""

import argparse
import gc
import hashlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any, final

import attrs
import torch

from batchstate.testing.exact import (
    Cache,
    EngineUnderTest,
    ExactModel,
    ExactSpec,
    History,
    Oracle,
    Outcome,
    Read,
    Verifier,
    Wave,
    WrongRead,
    drawn,
    play,
)
from examples import console
from examples.exact.__main__ import engine_named
from examples.exact.bugs import Bug, bugs, is_true
from examples.exact.disaggregated import over
from examples.exact.float_model import FloatModel
from examples.exact.stand_ins import MissingPeerError

Reads = set[bytes]
Key = tuple[str, int, int]
"""An engine, with the settings if they are narrowed, the number of a sequence of histories, and the place of one."""
SCALES = (0.3, 0.02)
"""Weights of the float models: sharp ones, and those that checkpoints begin with."""
FLOAT_REQUESTS = 60
"""Requests of a sequence that float models are given, or as many as the exact model needs."""


class Recorder(ExactModel):
    """An exact model that keeps of each query a digest of what it was pointed at.

    Attributes:
        reads: digests of token, position, and all entries that are visible, with their positions.
    """

    def __init__(self, spec: ExactSpec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype=dtype)
        self.reads = Reads()

    def run(self, ids: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """See `ExactModel.run`."""
        return super().run(ids, positions, _Recorded(cache, ids, positions, self.reads))


class _Recorded:
    def __init__(self, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, reads: Reads) -> None:
        self._cache, self._reads = cache, reads
        self._queries = torch.stack([ids.long(), positions.long()], -1)

    def attend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Read:
        """See `Cache.attend`."""
        read = self._cache.attend(layer, keys, values)
        for row, queries in enumerate(self._queries):
            parts = [part.numpy().reshape(len(part), -1) for part in _parts(read, row)]
            for query, visible in zip(queries.numpy(), read.visible[row].numpy(), strict=True):
                if visible.any():  # else padding
                    self._note(layer, query.tobytes(), *(part[visible].tobytes() for part in parts))
        return read

    def advance(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        """See `Cache.advance`."""
        states = self._cache.advance(layer, inputs)
        for query, state in zip(self._queries.flatten(0, 1).numpy(), states.flatten().numpy(), strict=True):
            self._note(layer, query.tobytes(), state.tobytes())
        return states

    def _note(self, *parts: Any) -> None:
        self._reads.add(hashlib.blake2b(b"".join(bytes(part) for part in parts), digest_size=8).digest())


def _parts(read: Read, row: int) -> tuple[torch.Tensor, ...]:
    return read.columns[row], read.keys[row].float(), read.values[row].float()


def first_histories(engine: EngineUnderTest, number: int, requests: int) -> list[History]:
    """The first random histories of a number, with so many requests at least."""
    kept: list[History] = []
    for history in drawn(engine, number, batch=requests):
        if history.requests:
            kept.append(history)
        if sum(other.requests for other in kept) >= requests:
            break
    return kept


@final
@attrs.define
class Trial:
    """One bug on one sequence of histories.

    Attributes:
        read: whether a forward read something that it does not read without the bug.
        text: how many requests had finished when the first text of the exact model was another one, with that request.
        error: what the engine said where it failed before any text was another one.
        report: the verifier's first words.
        true: whether they name a request and page that the bug has disturbed; None where it cannot say.
        floats: as `text`, for each float model: its text was another one than without the bug.
    """

    read: bool = False
    text: int | None = None
    error: str = ""
    report: str = ""
    true: bool | None = None
    floats: list[int | None] = attrs.field(factory=lambda: [None] * len(SCALES))


class Planter:
    """Plays histories with and without bugs; what is played without one is kept.

    Args:
        requests: of a sequence of histories, at most.

    Attributes:
        played: requests of the exact model that were played without a bug.
        false_alarms: histories of these in which a text was wrong, or the verifier said anything.
        alone: requests of the first float model that were played without a bug and alone, too.
        noise: those of them whose two texts differ.
    """

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._drawn: dict[tuple[str, int], list[History]] = {}
        self._reads: dict[Key, Reads] = {}
        self._texts: dict[tuple[Key, int], dict[int, tuple[int, ...]]] = {}
        self._oracles: dict[ExactSpec, Oracle] = {}
        self.played = self.false_alarms = self.alone = self.noise = 0

    def trial(self, bug: Bug, number: int) -> Trial:
        """One bug on the histories of one number, until a text of each model has changed."""
        trial, before = Trial(), 0
        engine = _engine(bug.engine)
        if bug.choices:
            choices = {**engine.choices, **bug.choices}
            engine = attrs.evolve(engine, name=f"{bug.engine} {bug.choices}", choices=choices)
        if (engine.name, number) not in self._drawn:
            self._drawn[engine.name, number] = first_histories(engine, number, self._requests)
        for place, history in enumerate(self._drawn[engine.name, number]):
            key = (engine.name, number, place)
            if trial.text is None:
                self._exact(bug, engine, history, key, trial, before)
            for model, seen in enumerate(trial.floats):
                needed = before < FLOAT_REQUESTS or trial.text is None
                if seen is None and needed and "state" not in engine.spec(history.settings).layers:
                    self._float(bug, engine, history, (key, model), trial, before)
            before += history.requests
            if trial.text is not None and (None not in trial.floats or before >= FLOAT_REQUESTS):
                break
        return trial

    def _exact(self, bug: Bug, engine: EngineUnderTest, history: History, key: Key, trial: Trial, before: int) -> None:
        if key not in self._reads:
            outcome, self._reads[key], reports = self._played(engine, history)
            self.played += history.requests
            self.false_alarms += outcome.wrong or bool(reports)
        with bug.planted():
            outcome, reads, reports = self._played(engine, history)
        # Ahead of results, and with guesses, another schedule alone makes a forward read what no other one does.
        ahead = any(history.settings.get(name) for name in ("overlap", "drafts"))
        trial.read |= bool(reports or (not ahead and reads - self._reads[key]))
        if reports and not trial.report:
            trial.report, trial.true = str(reports[0]), is_true(reports[0])
        if outcome.differences:
            wrong = {difference.request.number for difference in outcome.differences}
            trial.text = before + 1 + next(at for at, number in enumerate(outcome.texts) if number in wrong)
        elif outcome.error is not None and not trial.error:
            trial.error = f"{type(outcome.error).__name__}: {outcome.error}"

    def _played(self, engine: EngineUnderTest, history: History) -> tuple[Outcome, Reads, list[WrongRead]]:
        spec = engine.spec(history.settings)
        recorder = Recorder(spec, history.settings["dtype"])
        verifier = Verifier()
        outcome = play(engine, history, self._oracles.setdefault(spec, Oracle(spec)), recorder, verifier)
        return outcome, recorder.reads, verifier.reports

    def _float(
        self, bug: Bug, engine: EngineUnderTest, history: History, key: tuple[Key, int], trial: Trial, before: int
    ) -> None:
        if history.settings.get("sample"):  # by its logits, not greedily
            history = attrs.evolve(history, settings={**history.settings, "sample": False})
        model = key[1]
        if key not in self._texts:
            outcome = self._float_played(engine, history, model)
            self._texts[key] = outcome.texts
            if not model and key[0][1] == 0:
                self._alone(engine, history, outcome)
        with bug.planted():
            outcome = self._float_played(engine, history, model)
        texts = self._texts[key]
        for place, number in enumerate(outcome.finished):
            if outcome.texts[number] != texts.get(number, outcome.texts[number]):
                trial.floats[model] = before + 1 + place
                return

    def _alone(self, engine: EngineUnderTest, history: History, outcome: Outcome) -> None:
        arrivals = [arrival for wave in history.waves for arrival in wave.arrivals]
        for number in outcome.finished:
            single = History(history.settings, (Wave((arrivals[number],), 0),))
            self.noise += self._float_played(engine, single, 0).texts != {0: outcome.texts[number]}
        self.alone += len(outcome.finished)

    def _float_played(self, engine: EngineUnderTest, history: History, model: int) -> Outcome:
        spec = engine.spec(history.settings)
        oracle = self._oracles.setdefault(spec, Oracle(spec))
        return play(engine, history, oracle, FloatModel(spec, SCALES[model]))


def _engine(name: str) -> EngineUnderTest:
    return over("in_process") if name == "disaggregated" else engine_named(name)


def main(arguments: list[str] | None = None) -> int:
    """Plants each bug, prints a row of it, and returns 0 if each has changed a text."""
    parser = argparse.ArgumentParser(prog="python -m examples.exact.planted", description=__doc__.split(": ", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of bugs, or how they begin; default: all")
    parser.add_argument("--requests", type=console.whole(1), default=400, metavar="N", help="a sequence, at most")
    parser.add_argument("--sequences", type=console.whole(1), default=5, metavar="N", help="for each bug")
    console.add_json(parser)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gc.freeze()
    planter, rows = Planter(args.requests), []
    for bug in bugs():
        if args.names and not bug.name.startswith(tuple(args.names)):
            continue
        try:
            _engine(bug.engine)
        except MissingPeerError as error:
            print(f"{bug.name}: skipped: {error}")
            continue
        rows.append(_row(bug, [planter.trial(bug, number) for number in range(args.sequences)]))
        print(
            "  ".join(f"{name} {value}" for name, value in rows[-1].items() if name not in ("sentence", "choices")),
            flush=True,
        )
    seen = [row["requests"] for row in rows if row["text"]]
    summary = {
        "bugs": len(rows),
        "texts": len(seen),
        "median": statistics.median(seen) if seen else None,
        "named": sum(bool(row["named"]) for row in rows),
        "told": sum(row["told"] > 0 for row in rows),
        "true": sum(row["told"] > 0 and row["true"] == row["told"] for row in rows),
        "floats": {scale: sum(bool(row["floats"][model]) for row in rows) for model, scale in enumerate(SCALES)},
        "sequences": args.sequences,
        "requests": args.requests,
        **{name: getattr(planter, name) for name in ("played", "false_alarms", "alone", "noise")},
    }
    print(summary)
    console.write_json(args.json, {**summary, "rows": rows})
    return int(len(seen) < len(rows))


def _row(bug: Bug, trials: Sequence[Trial]) -> dict[str, Any]:
    """The figures of a bug: in how many sequences something was seen, and the median of requests until then."""
    texts = [trial.text for trial in trials if trial.text is not None]
    floats = [[seen for trial in trials if (seen := trial.floats[model]) is not None] for model in range(len(SCALES))]
    return {
        "bug": bug.name,
        "kind": bug.kind,
        "sentence": bug.sentence,
        "choices": {name: list(values) for name, values in bug.choices.items()},
        "read": sum(trial.read for trial in trials),
        "text": len(texts),
        "requests": statistics.median(texts) if texts else None,
        "errors": sum(bool(trial.error) for trial in trials),
        "named": sum(bool(trial.report) for trial in trials),
        "told": sum(trial.true is not None for trial in trials),
        "true": sum(bool(trial.true) for trial in trials),
        "floats": [len(numbers) for numbers in floats],
        "float_requests": [statistics.median(numbers) if numbers else None for numbers in floats],
        "report": next((trial.report for trial in trials if trial.report), ""),
        "error": next((trial.error for trial in trials if trial.error), ""),
    }


if __name__ == "__main__":
    sys.exit(main())
