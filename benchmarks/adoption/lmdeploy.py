"""LMDeploy's `ARStepInputs` as released, watched: nothing of it is changed.

Each row is known by the slot of its recurrent state, which the scheduler gives out; what is true of a sequence is what
the scheduler says of it.
"""

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from batchstate.watch import Watched, watch
from benchmarks.adoption.checkouts import module_of

PACKAGES = ["lmdeploy", "lmdeploy.pytorch"]
module = module_of("lmdeploy.pytorch.strategies.ar.step_inputs", packages=PACKAGES)
inputs_module = module_of("lmdeploy.pytorch.strategies.ar.model_inputs", packages=PACKAGES)
agent = module_of("lmdeploy.pytorch.strategies.ar.model_agent", packages=PACKAGES)
base = module_of("lmdeploy.pytorch.model_inputs", packages=PACKAGES)
ARStepInputs = module.ARStepInputs
BLOCK = 4

SCHEDULER: dict[int, Any] = {}
"""Slot of the recurrent state -> the sequence that has it."""

INPUTS = "seq_length history_lengths num_ignored_history local_adapter_ids model_metas"


AXES = {"model_inputs.input_ids": 1, "model_inputs.mrope_pos_ids": 1}
SAYS: dict[Any, Callable[[Any], Any]] = {
    "model_inputs.input_ids": lambda seq: seq.ids[-1:],
    "model_inputs.seq_length": lambda seq: 1,
    "model_inputs.history_lengths": lambda seq: seq.length,
    "model_inputs.block_offsets": lambda seq: blocks_of(seq)[: seq.length // BLOCK + 1],
    "model_inputs.num_ignored_history": lambda seq: seq.ignored,
    "model_inputs.local_adapter_ids": lambda seq: seq.adapter,
    "model_inputs.model_metas": lambda seq: {"sequence": seq.number},
    "model_inputs.mrope_pos_ids": lambda seq: [seq.length] * 3,
    "stopping_criteria.num_appendable_ids": lambda seq: seq.limit - (len(seq.ids) - seq.prompt),
    "sampling_delta.num_ignore_eos": lambda seq: seq.least - (len(seq.ids) - seq.prompt),
    "sampling_delta.random_offsets": lambda seq: len(seq.ids),
}
"""What each column holds of a sequence, as the scheduler knows it."""


def count(step: Any) -> int:
    """How many sequences there are."""
    parts = (step.model_inputs, "seq_length"), (step.stopping_criteria, "num_appendable_ids")
    return max((len(getattr(part, name)) for part, name in parts if part is not None), default=0)


def missing(step: Any) -> list[str]:
    """Parts that are not there while there are sequences."""
    return [name for name in ("model_inputs", "stopping_criteria", "sampling_delta") if getattr(step, name) is None]


def running(step: Any) -> list[Any]:
    """The sequence of each row, by the slot of its state."""
    if step.model_inputs is None:
        return [None] * count(step)
    return [SCHEDULER[slot] for slot in step.model_inputs.state_offsets.tolist()]


def total(step: Any) -> int:
    """The entries of the cache that the next step reads."""
    return sum(seq.length + 1 for seq in running(step))


def all_tokens(step: Any) -> Any:
    """The tokens of each row, wherever in it they stand: `merge_sampling_delta` puts them at its beginning."""
    return None if step.sampling_delta is None else step.sampling_delta.all_ids.sort(1).values


ALIGNED = "sampling_delta.all_ids"
"""As logits processors read it, from its end: as released they find other tokens there, once lengths differ."""


# fmt: off
def declare(ids: Any = all_tokens, **options: Any) -> Watched:
    """The declaration."""
    return watch(
        ARStepInputs, after=["merge_prefill", "reindex", "step_decode"], key=running, axis=AXES, moves=["reindex"],
        num_rows=count,
        rows=["model_inputs.state_offsets"],
        from_requests={**SAYS, ids: lambda seq: seq.ids},
        upto={ids if isinstance(ids, str) else "all_tokens": lambda s: [-len(seq.ids) for seq in running(s)],
              "model_inputs.block_offsets": lambda s: [seq.length // BLOCK + 1 for seq in running(s)]},
        derived={missing: lambda _: [], "model_inputs.sum_kv_seqlen": total},
        implied={"model_inputs.max_kv_seqlen": lambda s: max(seq.length for seq in running(s)) + 1},
        **options)
# fmt: on


_number = itertools.count(1)


def make_sequence(drawn: random.Random) -> Any:
    """A sequence of the scheduler."""
    number, prompt = next(_number), drawn.randrange(2, 9)
    return SimpleNamespace(
        number=number,
        slot=number,
        length=0,
        prompt=prompt,
        limit=drawn.randrange(4, 9),
        least=drawn.randrange(0, 5),
        adapter=number % 3,
        ignored=number % 2,
        ids=[100 * number + at for at in range(prompt)],
    )


def blocks_of(sequence: Any) -> list[int]:
    """Its blocks, with one ahead."""
    return [100 * sequence.number + at for at in range((sequence.length + sequence.prompt) // BLOCK + 2)]


def padded(rows: list[list[int]], *, right: bool = False) -> Any:
    """Rows of unequal length, filled with 0 at their end, or at their beginning."""
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(r)) + r if right else r + [0] * (width - len(r)) for r in rows])


def metas_of(sequences: list[Any]) -> list[dict[str, Any]]:
    """What a vision model keeps of each."""
    return [{"sequence": sequence.number} for sequence in sequences]


def prefill(step: Any, sequences: list[Any]) -> None:
    """Their prompts go through the model, and they join the running ones."""
    lengths = torch.tensor([sequence.prompt for sequence in sequences])
    total = int(lengths.sum())
    inputs = base.ModelInputs(
        input_ids=torch.tensor([[token for sequence in sequences for token in sequence.ids]]),
        seq_length=lengths,
        history_lengths=torch.zeros_like(lengths),
        block_offsets=padded([blocks_of(sequence) for sequence in sequences]),
        is_decoding=False,
        num_ignored_history=torch.tensor([sequence.ignored for sequence in sequences]),
        max_q_seqlen=int(lengths.max()),
        max_kv_seqlen=int(lengths.max()),
        sum_kv_seqlen=total,
        local_adapter_ids=torch.tensor([sequence.adapter for sequence in sequences]),
        model_metas=metas_of(sequences),
        state_offsets=torch.tensor([sequence.slot for sequence in sequences]),
        mrope_pos_ids=torch.cat([torch.arange(sequence.prompt) for sequence in sequences]).expand(3, total).clone(),
    )
    inputs.sum_kv_seqlen = total + len(sequences) - len(sequences) * inputs.max_q_seqlen
    delta = module.SamplingInputsDelta(
        num_ignore_eos=torch.tensor([sequence.least for sequence in sequences]),
        random_offsets=torch.tensor([sequence.prompt for sequence in sequences]),
        all_ids=padded([sequence.ids for sequence in sequences], right=True),
    )
    criteria = agent.ARStoppingCriteria(torch.tensor([sequence.limit - 1 for sequence in sequences]))
    for sequence in sequences:
        SCHEDULER[sequence.slot] = sequence
        sequence.length = sequence.prompt
    step.merge_prefill(
        inputs, agent.ARExtraInputs(), criteria, delta, sampled(sequences), metas_of(sequences), agent.ARExtraOutputs()
    )


def sampled(sequences: list[Any]) -> Any:
    """The next token of each."""
    for sequence in sequences:
        sequence.ids.append(100 * sequence.number + len(sequence.ids))
    return torch.tensor([sequence.ids[-1] for sequence in sequences])


def leave(step: Any, sequences: list[Any], keep: list[int]) -> list[Any]:
    """The scheduler keeps these rows, and says what follows from them."""
    kept = [sequences[row] for row in keep]
    step.reindex(
        base.ModelInputsDelta(
            indices=torch.tensor(keep),
            block_offsets=padded([blocks_of(sequence) for sequence in kept]),
            indice_cpu=np.array(keep),
            max_q_seqlen=1,
            max_kv_seqlen=max(sequence.length for sequence in kept) + 1,
            sum_kv_seqlen=sum(sequence.length + 1 for sequence in kept),
            num_ignored_history=torch.tensor([sequence.ignored for sequence in kept]),
        )
    )
    return kept


def decode(step: Any, sequences: list[Any]) -> None:
    """One token for each."""
    for sequence in sequences:
        sequence.length += 1
    _, _, criteria = step.stopping_criteria.step(torch.zeros(len(sequences)), None)
    step.step_decode(
        step.model_inputs,
        step.extra_inputs,
        criteria,
        step.sampling_delta,
        sampled(sequences),
        metas_of(sequences),
        agent.ARExtraOutputs(),
    )


def drive(seed: int, steps: int = 20, after_each: Callable[[Any], object] = id) -> None:
    """A running batch that sequences join and leave. Nothing is compared."""
    global _number
    _number = itertools.count(1)
    SCHEDULER.clear()
    drawn = random.Random(seed)
    step, running = ARStepInputs(), [make_sequence(drawn) for _ in range(3)]
    prefill(step, running)
    after_each(step)
    for _ in range(steps):
        keep = [row for row, sequence in enumerate(running) if drawn.random() < 0.85] or [0]
        running = leave(step, running, keep)
        after_each(step)
        if drawn.random() < 0.4:
            joining = [make_sequence(drawn) for _ in range(drawn.randrange(1, 3))]
            prefill(step, joining)
            running = running + joining
        else:
            decode(step, running)
        after_each(step)


DECLARED: dict[str, dict[str, Any]] = {"full": {}, "lag": {"lag": 1}}
KNOWN: dict[str, dict[str, Any]] = {"ids as logits processors read them": {"ids": ALIGNED}}
"""What else can be declared, and is reported of the engine as released."""


def endless(text: str) -> bool:
    """No statement keeps a loop from ending."""
    return False


TARGETS = [(ARStepInputs, name, module) for name in ("merge_prefill", "reindex", "step_decode")]
"""Methods whose statements are deleted, one at a time; functions follow."""
TARGETS += [
    (module, name, module) for name in ("step_sampling_delta", "merge_sampling_delta", "reindex_sampling_delta")
]
TARGETS += [
    (inputs_module, name, inputs_module)
    for name in ("get_model_inputs_next_decoding", "merge_model_inputs", "index_select_model_inputs")
]
