"""transformers' asynchronous continuous batching, as it is installed, on a CPU: race detector and simulated device.

It has three streams, three events for each of two pairs of buffers, and a thread of its own. Nothing of it is changed
but where a test says so: a statement is deleted, or the one missing edge is added.
"""

# mypy: disable-error-code="no-untyped-call"

import contextlib
import functools
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from batchstate.races import RaceReport
from batchstate.races.cuda import CudaRuntime, CudaSimRuntime, cuda_on_cpu

pytest.importorskip("transformers.generation.continuous_batching")
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs, HostDeviceIOPair

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [11, 12, 13, 14], [3, 1, 4, 1, 5, 9, 2, 6]]

PAGE_SIZE = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
"""Its name in transformers 5.23, and in 5.17."""

RESETS = ("_reset_static_tensors", "_setup_static_tensors", "_reset_read_and_write_indices")
"""Functions that clear buffers of the device on the default stream, for which no other stream waits."""


def forget_what_was_asked() -> None:
    """Transformers remembers which devices there are."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers"):
            for member in list(vars(module).values()):
                if isinstance(member, functools._lru_cache_wrapper):
                    member.cache_clear()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without its log, and without what it remembers of another device."""
    logging.disable(logging.ERROR)
    forget_what_was_asked()
    yield
    forget_what_was_asked()
    logging.disable(logging.NOTSET)


def model() -> Any:
    """A small model with the same weights each time."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def tokens(of: Any, *, asynchronous: bool, persistent: bool = False, graphs: bool = False) -> list[list[int]]:
    """What it generates for the prompts."""
    out = of.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(
            max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=1
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            use_async_batching=asynchronous,
            use_cuda_graph=graphs,
            num_blocks=32,
            max_batch_tokens=32,
            **{PAGE_SIZE: 8},
        ),
        persistent_manager=persistent,
    )
    return [output.generated_tokens for output in out.values()]


@functools.cache
def expected() -> list[list[int]]:
    """The tokens of its synchronous mode."""
    forget_what_was_asked()
    with cuda_on_cpu(on_race="collect", memory=64 << 20):
        return tokens(model().cuda(), asynchronous=False)


@contextlib.contextmanager
def around(owner: Any, name: str, behind: Callable[[Any], object], before: Callable[[Any], object]) -> Iterator[None]:
    """A window in which something is done before and behind each call of a method."""
    called = owner.__dict__[name]

    @functools.wraps(called)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self)
        result = called(self, *args, **kwargs)
        behind(self)
        return result

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, called)


def nothing(_: Any) -> None:
    """Nothing."""


def cleared(_: Any) -> None:
    """The edge that is missing: what was cleared on the default stream is done."""
    torch.cuda.default_stream().synchronize()


def run(
    *, edge: bool, graphs: bool = False, before_reset: Callable[[Any], object] = nothing
) -> tuple[CudaRuntime, list[list[list[int]]]]:
    """Two sessions of one manager; with the missing edge, or as they are."""
    window = cuda_on_cpu(on_race="collect", memory=64 << 20)
    return window, sessions(window, edge=edge, graphs=graphs, before_reset=before_reset)


def sessions(
    window: CudaRuntime | CudaSimRuntime,
    *,
    edge: bool,
    graphs: bool = False,
    before_reset: Callable[[Any], object] = nothing,
) -> list[list[list[int]]]:
    """The tokens of two sessions of one manager in a window."""
    wanted = expected()
    assert wanted
    forget_what_was_asked()
    added = cleared if edge else nothing
    with window as rt, contextlib.ExitStack() as windows:
        windows.enter_context(around(ContinuousBatchProcessor, "_generation_step", nothing, lambda _: rt.next_step()))
        windows.enter_context(around(ContinuousBatchingAsyncIOs, "__init__", added, nothing))
        windows.enter_context(around(ContinuousBatchingAsyncIOs, "reset", added, before_reset))
        engine = model().cuda()
        got = [tokens(engine, asynchronous=True, persistent=True, graphs=graphs) for _ in range(2)]
        engine.destroy_cached_continuous_batching_manager()
    return got


@contextlib.contextmanager
def deleted(owner: Any, name: str, statement: str) -> Iterator[None]:
    """A window in which one statement of a method is not there."""
    whole = owner.__dict__[name]
    inner = inspect.unwrap(whole)
    lines = textwrap.dedent(inspect.getsource(inner)).split("\n")
    (at,) = [number for number, line in enumerate(lines) if line.strip().startswith(statement)]
    lines[at] = lines[at][: len(lines[at]) - len(lines[at].lstrip())] + "pass"
    made: dict[str, Any] = {}
    exec(compile("\n".join(lines), inner.__code__.co_filename, "exec"), inner.__globals__, made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, whole)


def where(race: RaceReport) -> tuple[str, str]:
    """The functions that a race is between."""
    return race.first.site.rpartition(" in ")[2], race.second.site.rpartition(" in ")[2]


def test_it_runs_as_it_is_and_what_is_found_has_one_cause() -> None:
    """The right tokens, two steps in flight; buffers cleared on the default stream, for which no stream waits."""
    rt, got = run(edge=False)
    assert got == [expected()] * 2
    assert max(rt.in_flight_depths[: len(rt.in_flight_depths) // 2]) == 2
    assert {stream.name for stream in rt._tracer.detector.clocks.streams} >= {
        "h2d_stream",
        "d2h_stream",
        "compute_stream",
    }
    assert rt.races
    assert {race.first.lane for race in rt.races} == {"default"}
    assert {where(race)[0] for race in rt.races} <= set(RESETS)


def test_with_that_edge_nothing_is_found() -> None:
    """In either session, and the depth is 2 in every steady step of both."""
    rt, got = run(edge=True)
    assert rt.races == ()
    assert got == [expected()] * 2
    assert max(rt.in_flight_depths) == 2
    assert sum(depth == 2 for depth in rt.in_flight_depths) >= len(rt.in_flight_depths) - 2


def test_with_graphs_its_warm_up_races() -> None:
    """Captured and replayed, with the right tokens and the same depth; buffers are cleared under a warm-up.

    A warm-up whose graph exists replays it, and the host waits for nothing. The next warm-up then clears the same
    pinned buffers, and the reset before the first step those of the device. What a warm-up computes is not read.
    """
    rt, got = run(edge=True, graphs=True)
    assert got == [expected()] * 2
    assert max(rt.in_flight_depths) == 2
    assert {race.second.step for race in rt.races} == {0}
    assert {where(race)[1] for race in rt.races} <= set(RESETS)
    assert {race.second.lane for race in rt.races} <= {"host", "default"}


@pytest.mark.parametrize(
    ("name", "statement", "between"),
    [
        ("get_model_kwargs", "self.h2d_stream.record_event", ("_transfer_inputs", "carry_over_tokens")),
        ("get_model_kwargs", "self.compute_stream.wait_event", ("_transfer_inputs", "carry_over_tokens")),
        ("retrieve_device_outputs", "self.compute_stream.record_event", ("_sample", "transfer_outputs_d2h")),
        ("retrieve_device_outputs", "self.d2h_stream.wait_event", ("_sample", "transfer_outputs_d2h")),
        ("retrieve_device_outputs", "self.d2h_stream.record_event", ("transfer_outputs_d2h", "prepare_batch_update")),
        ("prepare_batch_update", "io_pair.d2h_over.synchronize", ("transfer_outputs_d2h", "prepare_batch_update")),
    ],
)
def test_a_deleted_statement_is_found(name: str, statement: str, between: tuple[str, str]) -> None:
    """Each `record_event`, `wait_event` and `synchronize` of a step, one at a time."""
    with deleted(ContinuousBatchingAsyncIOs, name, statement):
        rt, _ = run(edge=True)
    assert between in {where(race) for race in rt.races}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("owner", "statement"),
    [
        (ContinuousBatchingAsyncIOs, "self.h2d_stream.synchronize"),
        (ContinuousBatchingAsyncIOs, "self.d2h_stream.synchronize"),
        (ContinuousBatchingAsyncIOs, "self.compute_stream.synchronize"),
        (HostDeviceIOPair, "event.synchronize"),
    ],
)
def test_what_a_reset_waits_for_is_over(owner: Any, statement: str) -> None:
    """Each of its waits is redundant: by the detector's clocks all streams and events are done when it begins."""
    done: list[bool] = []

    def ask(batching: Any) -> None:
        done.extend(stream.query() for stream in (batching.h2d_stream, batching.d2h_stream, batching.compute_stream))
        events = [event for pair in batching.io_pairs for event in (pair.h2d_over, pair.compute_over, pair.d2h_over)]
        done.extend(event.query() for event in events)

    with deleted(owner, "reset", statement):
        rt, got = run(edge=True, before_reset=ask)
    assert len(done) >= 9
    assert all(done)
    assert rt.races == ()
    assert got == [expected()] * 2


@pytest.mark.parametrize(("order", "graphs"), [("lazy", False), ("pct", True)])
def test_with_that_edge_its_tokens_are_right_in_another_order(order: str, graphs: bool) -> None:
    """On the simulated device, two steps in flight, and nothing waits that would not on a device."""
    window = cuda_on_cpu(f"sim:{order}", memory=64 << 20)
    assert isinstance(window, CudaSimRuntime)
    assert sessions(window, edge=True, graphs=graphs) == [expected()] * 2
    assert max(window.in_flight_depths) == 2
    assert not window.unmodelled


def test_without_that_edge_some_order_gives_other_tokens() -> None:
    """What is found is no matter of taste: buffers that are cleared late clear what the first copies have brought."""
    for seed in range(6):
        if sessions(cuda_on_cpu("sim:random", seed=seed, memory=64 << 20), edge=False) != [expected()] * 2:
            return
    pytest.fail("six orders gave the same tokens")
