"""`examples.transformers_batching`: transformers' continuous batching, as installed, with its state on batchstate."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators",
    reason="the example takes the place of allocators that this transformers does not have: see its requirement",
)

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from batchstate import checks
from examples.transformers_batching import comparison
from examples.transformers_batching.__main__ import main
from examples.transformers_batching.adoption import adopted
from examples.transformers_batching.blocks import PooledBlocks
from examples.transformers_batching.comparison import answers, decoding, prompts_of, random_model, step_time

FIGURES = {"requests", "tokens", "mismatches", "violations", "host_us_per_step", "original_us_per_step", "ratio"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' loop keeps its warnings to itself; a short run times few steps."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr(comparison, "TURN", 2)
    monkeypatch.setattr(comparison.compare, "__kwdefaults__", {"batch_size": 4, "steps": 8})


@pytest.fixture
def model(device: str) -> Any:
    """The example's random model."""
    return random_model(device, 0)


def test_another_transformers_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the classes are not there whose places it takes, the command says which version has them, and returns 2."""
    for name in [module for module in sys.modules if module.startswith("examples.transformers_batching.")]:
        if not name.endswith("__main__"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers.generation.continuous_batching.cache_allocators", None)
    assert main(["--requests", "1", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("examples.transformers_batching: needs torch and transformers 5.23, ")


def test_command_reports_the_same_tokens(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each request has the tokens of transformers alone, and the file has every figure; all well is 0."""
    file = tmp_path / "figures.json"
    assert main(["--requests", "8", "--device", device, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert set(figures) >= FIGURES
    assert (figures["requests"], figures["mismatches"], figures["violations"]) == (8, 0, 0)
    assert figures["tokens"] > 8
    assert figures["ratio"] == pytest.approx(figures["original_us_per_step"] / figures["host_us_per_step"])
    assert "requests that differ" in capsys.readouterr().out


def test_tokens_are_the_same_when_pages_run_out(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too few pages requests give theirs back and begin anew; all checks are on, and no token changes."""
    offloaded: list[bool] = []
    offload = OffloadingManager.offload_requests

    def offload_requests(self: Any) -> bool:
        offloaded.append(offload(self))
        return offloaded[-1]

    monkeypatch.setattr(OffloadingManager, "offload_requests", offload_requests)
    prompts = prompts_of(16, seed=3)
    with comparison._quiet():
        expected = answers(model, prompts, num_blocks=24)
        offloaded.clear()
        with checks("full"), adopted():
            outputs = answers(model, prompts, num_blocks=24)
    assert [output.error for output in outputs] == [None] * 16
    assert any(offloaded)
    assert [output.generated_tokens for output in outputs] == [output.generated_tokens for output in expected]


def settings() -> ContinuousBatchingConfig:
    """Settings of short sessions that the example takes over."""
    return ContinuousBatchingConfig(num_blocks=20, max_batch_tokens=64, use_cuda_graph=False, use_async_batching=False)


def test_sessions_follow_each_other(model: Any) -> None:
    """A manager that persists serves a second session in another thread."""
    asked = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sessions = []
    with comparison._quiet(), adopted():
        for _ in range(2):
            answered = model.generate_batch(
                prompts_of(3, seed=1),
                generation_config=asked,
                continuous_batching_config=settings(),
                progress_bar=False,
                persistent_manager=True,
            )
            sessions.append([output.generated_tokens for output in answered.values()])
        model.destroy_cached_continuous_batching_manager()
    assert sessions[0] == sessions[1]
    assert [len(tokens) for tokens in sessions[0]] == [5, 5, 5]


def processors(model: Any, batch_size: int) -> list[Any]:
    """One with batchstate and one without, in a decode step of requests with a prompt of 100 tokens."""
    made = []
    with comparison._quiet():
        for window in (adopted(), nullcontext()):
            with window:
                made.append(decoding(model, batch_size, 40))
    return made


def kernel_inputs(processor: Any) -> dict[str, Any]:
    """Inputs of a kernel with a block table; blocks are counted, since each side may choose which to use."""
    arguments = processor.inputs_and_outputs.get_model_kwargs()
    table = arguments.pop("block_table")[0].cpu().numpy()
    names = ("input_ids", "position_ids", "cu_seq_lens_q", "logits_indices")
    return {
        **{name: arguments[name].tolist() for name in names},
        "cu_seq_lens_k": arguments["cu_seq_lens_k"]["full_attention"].tolist(),
        "lengths": (arguments["max_length_q"], arguments["max_length_k"]),
        "blocks of each": (table >= 0).sum(axis=1).tolist(),
        "blocks": np.unique(table[table >= 0]).size,
        "width": table.shape[1],
    }


def test_kernels_with_a_block_table_get_the_same_inputs(model: Any) -> None:
    """Over several pages, and when a request was cancelled, both prepare the same inputs for FlashAttention."""
    both = processors(model, 5)
    for step in range(36):
        if step == 20:
            for processor in both:
                processor.scheduler.set_request_cancellation("request 2")
        for processor in both:
            assert processor.prepare_next_batch()
        ours, original = (kernel_inputs(processor) for processor in both)
        assert ours == original
        assert len(ours["blocks of each"]) == (5 if step < 20 else 4)
        for processor in both:
            sampled = processor.inputs_and_outputs.output_ids
            sampled[0, :5] = torch.arange(step, step + 5)
            processor.inputs_and_outputs.retrieve_device_outputs()
            processor.update_batch()


def calls_of(processor: Any) -> int:
    """Calls, of Python and of C, that prepare a step and hand out its inputs."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        processor.prepare_next_batch()
        processor.inputs_and_outputs.get_model_kwargs()
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_makes_calls_for_all_requests_together(model: Any) -> None:
    """The calls that prepare a decode step do not grow with the requests; those of transformers alone do."""
    few, many = processors(model, 8), processors(model, 64)
    for processor, size in zip([*few, *many], [8, 8, 64, 64], strict=True):
        for _ in range(3):
            step_time(processor, size)
    ours, original = ([calls_of(processor) for processor in sizes] for sizes in zip(few, many, strict=True))
    assert ours[1] <= ours[0] + 10
    assert original[1] > 5 * original[0]
    assert original[1] > 4 * ours[1]


def test_a_mistake_ends_the_run_with_a_report(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request whose pages are released while it runs is reported at once, and the command returns 1."""
    begin_step, steps = PooledBlocks.begin_step, [0]

    def releasing(self: PooledBlocks) -> None:
        steps[0] += 1
        if steps[0] == 6:
            self.free_blocks(next(iter(self._rows)))
        begin_step(self)

    monkeypatch.setattr(PooledBlocks, "begin_step", releasing)
    file = tmp_path / "figures.json"
    assert main(["--requests", "8", "--device", device, "--json", str(file)]) == 1
    assert json.loads(file.read_text())["violations"] > 0
    assert "DERIVED_STALE" in capsys.readouterr().err


def test_several_answers_to_a_prompt_are_refused(model: Any) -> None:
    """Forks are not taken over, and the error says so."""
    asked = GenerationConfig(max_new_tokens=5, num_return_sequences=2, do_sample=True, eos_token_id=-1, pad_token_id=0)
    with comparison._quiet(), adopted():
        answered = model.generate_batch(
            prompts_of(2, seed=1), generation_config=asked, continuous_batching_config=settings(), progress_bar=False
        )
    assert {output.error for output in answered.values()} == {
        "expected one answer to each prompt, got num_return_sequences above 1"
    }


@pytest.mark.parametrize("layers", ["full_attention sliding_attention", "sliding_attention sliding_attention"])
def test_sliding_windows_are_refused(model: Any, layers: str) -> None:
    """A model with sliding windows in some or all of its layers is refused before anything runs."""
    model.config.layer_types, model.config.sliding_window = layers.split(), 16
    with comparison._quiet(), adopted():
        manager = ContinuousBatchingManager(model, GenerationConfig(do_sample=False, eos_token_id=-1), settings())
        with pytest.raises((NotImplementedError, TypeError), match=r"^expected a (model with full|cache with Pooled)"):
            manager._create_batch_processor()
