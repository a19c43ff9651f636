"""The engine example's models: paged attention, random weights and the reference answers."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from batchstate.runtime import Runtime
from batchstate.testing import no_hidden_sync
from examples.engine.attention import IMPLEMENTATION, PagedView
from examples.engine.model import Family, Model
from examples.engine.reference import generate

FAMILIES: list[Family] = ["llama", "qwen3", "plain"]
CAPACITY = 1024
PADDING = 16  # rows of page 0


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, device: str) -> Model:
    """A random float64 model of each family."""
    return random_model(request.param, device)


@pytest.fixture(params=["llama", "qwen3"])
def of_transformers(request: pytest.FixtureRequest, device: str) -> Model:
    """A random float64 model of each family of transformers."""
    return random_model(request.param, device)


def random_model(
    family: Family, device: torch.device | str, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Model:
    """A random model; all but the plain one need transformers."""
    if family != "plain":
        pytest.importorskip("transformers")
    return Model.random(family, device=device, dtype=dtype, seed=seed)


def some_prompts(count: int, *, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Random token ids, of random lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.randint(1, longest))] for _ in range(count)]


class Requests:
    """Requests whose KV rows are scattered over the memory; `step` runs some tokens of each."""

    def __init__(self, rt: Runtime, model: Model, prompts: Sequence[Sequence[int]], room: int) -> None:
        self.rt, self.model, self.kv = rt, model, model.new_kv(CAPACITY)
        self.tokens = [list(prompt) for prompt in prompts]
        self.done = [0] * len(prompts)  # tokens whose KV is in memory
        width = max(map(len, prompts)) + room
        rows = random.Random(1).sample(range(PADDING, CAPACITY), width * len(prompts))
        self.kv_rows = np.array(rows, dtype=np.int64).reshape(len(prompts), width)

    def step(self, queries: Sequence[int], *, padded_tokens: int = 0, garbage: int = 0) -> torch.Tensor:
        """Runs `queries[i]` more tokens of request i; logits of the last token of each that has some.

        `padded_tokens` lanes follow, and KV rows beyond a request's length are `garbage`.
        """
        runs = [range(done, done + count) for done, count in zip(self.done, queries, strict=True)]
        self.done = [run.stop for run in runs]
        positions = [position for run in runs for position in run] + [0] * padded_tokens
        ids = [self.tokens[row][position] for row, run in enumerate(runs) for position in run] + [7] * padded_tokens
        slots = [self.kv_rows[row, position] for row, run in enumerate(runs) for position in run] + [0] * padded_tokens
        table = self.kv_rows[:, : max(self.done)].copy()
        table[np.arange(table.shape[1]) >= np.array(self.done)[:, None]] = garbage
        starts = np.cumsum([0, *queries])
        lasts = [start - 1 for start, count in zip(starts[1:], queries, strict=True) if count]
        arrays = [np.array(values, dtype=np.int64) for values in (positions, slots, self.done, ids, lasts)]
        packed = self.rt.upload([*arrays, starts.astype(np.int32), table])
        view = PagedView(
            positions=packed.view(0),
            slot_mapping=packed.view(1),
            query_start_loc=packed.view(5),
            query_lens=np.array(queries, dtype=np.int64),
            kv_lens=packed.view(2),
            kv_tokens=packed.view(6),
        )
        return self.model.forward(packed.view(3), view, self.kv, packed.view(4))

    def answers(self, max_new_tokens: int, *, chunk: int, padded_tokens: int = 0, garbage: int = 0) -> list[list[int]]:
        """Greedy answers: prompts in chunks of up to `chunk` tokens, beside requests that already decode."""
        draw = random.Random(chunk)
        prompt_lens = [len(tokens) for tokens in self.tokens]
        ends = [length + max_new_tokens for length in prompt_lens]
        while any(len(tokens) < end for tokens, end in zip(self.tokens, ends, strict=True)):
            queries = []
            for tokens, done, end in zip(self.tokens, self.done, ends, strict=True):
                prefilling = len(tokens) - done > 1
                count = draw.randint(0, min(chunk, len(tokens) - done)) if prefilling else 1
                queries.append(count if len(tokens) < end else 0)
            if not any(queries):
                continue
            logits = self.step(queries, padded_tokens=padded_tokens, garbage=garbage)
            chosen = iter(logits.argmax(-1).tolist())
            sampled = [next(chosen) if count else None for count in queries]
            for tokens, done, token in zip(self.tokens, self.done, sampled, strict=True):
                if token is not None and done == len(tokens):
                    tokens.append(token)
        return [tokens[length:] for tokens, length in zip(self.tokens, prompt_lens, strict=True)]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_paged_attention_answers_as_the_reference_does(rt: Runtime, model: Model, chunk: int) -> None:
    """Prompts in any chunks beside decodes, over scattered KV, give exactly the tokens of the reference."""
    prompts = some_prompts(8)
    expected = generate(model, prompts, [12] * len(prompts), eos_token_ids=())
    assert Requests(rt, model, prompts, room=12).answers(12, chunk=chunk) == expected


def test_padding_changes_nothing(rt: Runtime, model: Model) -> None:
    """Padded lanes, requests without queries and table entries beyond a request's length leave the answers alone."""
    prompts = some_prompts(5)
    expected = Requests(rt, model, prompts, room=6).answers(6, chunk=9)
    assert Requests(rt, model, prompts, room=6).answers(6, chunk=9, padded_tokens=3, garbage=10**9) == expected


def test_padding_leaves_logits_alone(rt: Runtime, model: Model) -> None:
    """A request's logits do not depend on the padded lanes behind it."""
    alone, padded = (Requests(rt, model, some_prompts(3), room=1) for _ in range(2))
    queries = [len(tokens) for tokens in alone.tokens]
    assert torch.allclose(alone.step(queries), padded.step(queries, padded_tokens=5), rtol=0, atol=1e-6)


def test_stale_kv_is_never_read(rt: Runtime, model: Model) -> None:
    """Memory that no request owns may hold NaN: it reaches no logits."""
    requests = Requests(rt, model, some_prompts(4), room=1)
    for memory in (*requests.kv.keys, *requests.kv.values):
        memory[PADDING:] = torch.nan
    stale = int(requests.kv_rows[0, -1])  # room that nothing was written to
    assert not requests.step([len(tokens) for tokens in requests.tokens], garbage=stale).isnan().any()


def test_forward_never_waits_for_the_device(rt: Runtime, model: Model) -> None:
    """A mixed batch of chunks, decodes, padding and requests without queries hides no synchronisation."""
    requests = Requests(rt, model, some_prompts(5, longest=20), room=4)
    requests.step([len(tokens) - 1 for tokens in requests.tokens[:3]] + [0, 0])
    with no_hidden_sync(rt):
        logits = requests.step([1, 1, 0, 1, len(requests.tokens[4])], padded_tokens=2)
    assert logits.shape == (4, model.vocab_size)
    assert not logits.is_inference()
    assert not logits.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_dtypes_come_close(rt: Runtime, family: Family, dtype: torch.dtype) -> None:
    """Logits of float32 and bfloat16 models are those of the float64 model, but for rounding."""
    logits = []
    for kind in (torch.float64, dtype):
        model = random_model(family, rt.device, kind)
        requests = Requests(rt, model, some_prompts(4), room=1)
        requests.step([len(tokens) - 1 for tokens in requests.tokens])
        logits.append(requests.step([1] * 4))
    assert logits[1].dtype == dtype
    assert torch.allclose(logits[0], logits[1].double(), rtol=0, atol=50 * torch.finfo(dtype).eps)


def test_left_padded_batches_answer_as_single_prompts(model: Model) -> None:
    """In float64 the reference gives the same tokens whether prompts run together or alone."""
    prompts = some_prompts(12, longest=60)
    together = generate(model, prompts, [10] * 12, eos_token_ids=())
    assert generate(model, prompts, [10] * 12, eos_token_ids=(), batch_size=1) == together


def test_reference_cuts_answers(model: Model) -> None:
    """An answer ends at its own limit or with its first EOS; answers keep the order of their prompts."""
    prompts = some_prompts(6)
    full = generate(model, prompts, [8] * 6, eos_token_ids=())
    eos = {full[0][2], full[3][4]}
    seen: list[tuple[int, int]] = []
    cut = generate(
        model, prompts, [8, 0, 1, 8, 5, 8], eos_token_ids=eos, batch_size=2, progress=lambda *step: seen.append(step)
    )
    for answer, whole, limit in zip(cut, full, [8, 0, 1, 8, 5, 8], strict=True):
        ends = [index + 1 for index, token in enumerate(whole) if token in eos]
        assert answer == whole[: min([limit, *ends])]
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_reference_restores_the_model(of_transformers: Model) -> None:
    """After `generate`, also one that fails, the model has its own attention and its own settings again."""
    model = of_transformers
    settings = model.lm.generation_config

    def fails(*_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        generate(model, [[1]], [1], eos_token_ids=(), progress=fails)
    assert model.lm.config._attn_implementation == IMPLEMENTATION
    assert model.lm.generation_config is settings


def test_reference_refuses_what_it_cannot_answer(model: Model) -> None:
    """An empty prompt, or a limit too few, is an error at the door."""
    with pytest.raises(ValueError, match="empty"):
        generate(model, [[1], []], [1, 1], eos_token_ids=())
    with pytest.raises(ValueError, match="limit"):
        generate(model, [[1], [2]], [1], eos_token_ids=())


def test_random_models_wander(model: Model) -> None:
    """Greedy answers are varied, and repeat themselves now and then, so that drafts from the past can be right."""
    answers = generate(model, some_prompts(32), [48] * 32, eos_token_ids=())
    assert len({answer[-1] for answer in answers}) > 16
    assert sum(len(set(answer)) > 12 for answer in answers) > 24
    repeats = sum(
        tuple(answer[end - 2 : end]) in {tuple(answer[at : at + 2]) for at in range(end - 2)}
        for answer in answers
        for end in range(3, 49)
    )
    assert repeats > 32


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_depend_on_the_seed_alone(device: str, family: Family) -> None:
    """The same seed draws the same weights, another draws others, and torch's own generator is not touched."""
    state = torch.get_rng_state()
    first, again, other = (random_model(family, device, seed=seed).lm.lm_head.weight for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_checkpoints_load(of_transformers: Model, device: str, tmp_path: Path) -> None:
    """A saved checkpoint loads from its folder, with its EOS tokens, and answers as before."""
    model = of_transformers
    model.lm.generation_config.eos_token_id = [5, 9]
    model.lm.save_pretrained(str(tmp_path))
    loaded = Model.load(str(tmp_path), device=device, dtype=torch.float64)
    assert loaded.eos_token_ids == (5, 9)
    assert loaded.lm.config._attn_implementation == IMPLEMENTATION
    prompts = some_prompts(3)
    assert generate(loaded, prompts, [8] * 3, eos_token_ids=()) == generate(model, prompts, [8] * 3, eos_token_ids=())


def test_a_plain_model_sees_order_and_past(device: str) -> None:
    """Its answer depends on where a token stands and on the first of many: no bag of words, and no last word alone."""
    model = random_model("plain", device)
    prompts = [[1, 2, 3, 4, 5, 6], [2, 1, 3, 4, 5, 6], [9, 2, 3, 4, 5, 6]]
    answers = generate(model, prompts, [8] * 3, eos_token_ids=())
    assert len({tuple(answer) for answer in answers}) == 3
