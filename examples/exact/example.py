"""The adapter of `examples/engine`: its scheduler, pools, relay and steps as they are, the model replaced."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from batchstate.races.devices import open_device
from batchstate.testing.exact import EngineUnderTest, ExactModel, ExactSpec, Oracle, Request, Verifier
from examples.engine.batch import RunningBatch, Step
from examples.engine.engine import Engine
from examples.engine.model import prefill
from examples.engine.request import Request as EngineRequest
from examples.engine.settings import EngineSettings
from examples.exact.answers import new_tokens
from examples.exact.drafts import ExactDrafter
from examples.exact.served import ServedModel


@final
class ExampleAdapter:
    """See `batchstate.testing.exact.Adapter`."""

    def __init__(self, settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None) -> None:
        size = settings["page_size"]
        self._served = ServedModel(model, size, verifier, guesses=bool(settings["drafts"]))
        self._prebuilt = settings["prebuilt"]
        self.engine = Engine(
            open_device("cpu"),
            self._served,  # type: ignore[arg-type]  # it answers to the same calls
            EngineSettings(
                max_running=settings["max_running"],
                num_pages=-(-settings["kv_tokens"] // size),
                page_size=size,
                max_tokens_per_request=settings["room"],
                max_tokens_per_step=settings["step_tokens"],
                overlap=settings["overlap"],
                mixed=settings["mixed"],
                num_drafts=settings["drafts"],
            ),
        )
        forward = self.engine.scheduler.forward
        self._oracle, self._drafter = Oracle(model.spec), None
        if settings["drafts"]:
            history = forward._drafter.history
            self._drafter = ExactDrafter(settings["drafts"], history, model.spec.vocab_size, settings["accepted"])
            forward._drafter = self._drafter  # type: ignore[assignment]  # it guesses as `Drafter` does
        self._run, self._requests, self._seen = forward.run, dict[int, EngineRequest](), dict[int, int]()
        forward.run = self._running  # type: ignore[method-assign]

    def _running(self, step: Step) -> RunningBatch:
        self._served.requests = [request.number for request in step.batch.requests]
        return self._run(step)

    def add(self, request: Request) -> None:
        """A request arrives; each third has been prefilled elsewhere, if so set."""
        self._served.requests = ()
        if self._drafter is not None:
            answer = self._oracle.answer(request.prompt, request.max_new_tokens + self._drafter.num_drafts)
            self._drafter.expect([*request.prompt, *answer.tokens])
        sent = None
        if self._prebuilt and request.number % 3 == 0:
            sent = prefill(self._served, request.prompt)  # type: ignore[arg-type]
        self._requests[request.number] = served = EngineRequest(
            request.number, list(request.prompt), request.max_new_tokens, sent
        )
        self._seen[request.number] = 0
        self.engine.add(served)

    def abort(self, number: int) -> None:
        """Its client hangs up, unless the engine knows already that it has ended."""
        if self._requests.pop(number).state in ("waiting", "running"):
            self.engine.abort(number)

    def step(self) -> Mapping[int, Sequence[int]]:
        """One step of the engine."""
        if self.engine.busy:
            self.engine.step()
        return new_tokens(self._requests, self._seen)

    @property
    def busy(self) -> bool:
        """Whether the engine has anything to do, or a request anything to tell."""
        return self.engine.busy or any(request.state == "finished" for request in self._requests.values())

    def close(self) -> None:
        """Nothing is held."""


EXAMPLE = EngineUnderTest(
    "example",
    ExampleAdapter,
    {
        "page_size": (16, 1, 2, 3, 4, 8),
        "kv_tokens": (1024, 140, 200, 320),
        "max_running": (16, 1, 2, 4, 8),
        "step_tokens": (128, 8, 16, 32, 64),
        "overlap": (False, True),
        "mixed": (True, False),
        "drafts": (0, 1, 2, 4),
        "accepted": (0.7, 0.0, 0.3, 1.0),
        "prebuilt": (False, True),
        "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
        "words": (1, 2),
        "room": (120,),
    },
    lambda settings: ExactSpec(heads=settings["words"]),
)
