"""What an engine does with requests that cannot be, settings at their ends, and a forward that fails."""

import pytest
import torch

from batchstate.errors import ArgumentError
from batchstate.runtime import Runtime

pytest.importorskip("transformers")

from examples.engine.engine import Engine
from examples.engine.model import Model, prefill
from examples.engine.reference import generate
from examples.engine.request import Request
from examples.engine.settings import EngineSettings

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture
def model(device: str) -> Model:
    """A small model in float64."""
    return Model.random("llama", device=device)


@pytest.mark.parametrize("drafts", [4, 8])
def test_more_guesses_than_known_tokens(rt: Runtime, model: Model, drafts: int) -> None:
    """Prompts shorter than what is guessed are served like all others."""
    requests = [Request(number, list(range(5, 6 + number)), 5) for number in range(7)]
    engine = Engine(rt, model, EngineSettings(num_drafts=drafts))
    for request in requests:
        engine.add(request)
    engine.run()
    prompts = [request.prompt for request in requests]
    assert [request.output for request in requests] == generate(model, prompts, [5] * 7, eos_token_ids=())


def test_a_failed_forward_ends_the_engine(rt: Runtime, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a step comes out once; the next step says that the engine is over, and does not hang."""
    engine = Engine(rt, model, EngineSettings())
    engine.add(Request(0, [1, 2, 3], 5))
    engine.step()

    def failing(*args: object) -> torch.Tensor:
        raise MemoryError("no room for activations")

    monkeypatch.setattr(Model, "forward", failing)
    with pytest.raises(MemoryError):
        engine.step()
    with pytest.raises(RuntimeError, match="make a new engine"):
        engine.run()


def test_requests_that_cannot_be_are_refused_at_the_door(rt: Runtime, model: Model) -> None:
    """Odd ids, limits and KV are typed errors, and whoever is here is served."""
    engine = Engine(rt, model, EngineSettings())
    good = Request(0, [1, 2, 3], 4)
    engine.add(good)
    long, short = prefill(model, [1, 2, 3]), prefill(model, [1, 2])
    odd = [
        Request(1, [-1, 2], 4),
        Request(2, [1, 10**6], 4),
        Request(3, [1.5], 4),  # type: ignore[list-item]
        Request(4, "abc", 4),  # type: ignore[arg-type]
        Request(5, [1], 2.5),  # type: ignore[arg-type]
        Request(6, [1, 2], 4, long),
        Request(7, [1, 2, 3], 4, short),
    ]
    for request in odd:
        with pytest.raises(ArgumentError):
            engine.add(request)
        assert request.state == "waiting"
        with pytest.raises(ArgumentError, match="not here"):
            engine.abort(request.number)
    engine.run()
    assert good.output == generate(model, [[1, 2, 3]], [4], eos_token_ids=())[0]


def test_engines_share_a_model_and_nothing_else(rt: Runtime, model: Model) -> None:
    """Two engines over one model take turns and answer as each would alone."""
    engines = [Engine(rt, model, EngineSettings(overlap=overlap)) for overlap in (True, False)]
    requests = [Request(0, [1, 2, 3, 4], 6), Request(0, [9, 8, 7], 6)]
    for engine, request in zip(engines, requests, strict=True):
        engine.add(request)
    while any(engine.busy for engine in engines):
        for engine in engines:
            engine.step()
    prompts = [request.prompt for request in requests]
    assert [request.output for request in requests] == generate(model, prompts, [6, 6], eos_token_ids=())


@pytest.mark.parametrize("size", ["max_running", "num_pages", "page_size", "max_tokens_per_step"])
def test_sizes_of_nothing_are_refused(size: str) -> None:
    """An engine without room would never end."""
    with pytest.raises(ValueError, match=size):
        EngineSettings(**{size: 0})  # type: ignore[arg-type]
