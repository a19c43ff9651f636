"""Requests a second of the example engine with the exact model: 16 running, 100 tokens of prompt, 100 of answer."""

import sys
import time

import attrs
import torch

from batchstate.testing.exact import Arrival, ExactModel, History, Oracle, Verifier, Wave, play
from examples.exact.example import EXAMPLE

REQUESTS, TOKENS = 160, 100


def main() -> int:
    """Prints the figures without and with the verifier; each text is compared, too."""
    torch.set_num_threads(1)
    engine = attrs.evolve(EXAMPLE, longest_prompt=TOKENS, longest_answer=TOKENS)
    plain = {name: values[0] for name, values in engine.choices.items()}
    settings = {**plain, "room": 2 * TOKENS, "kv_tokens": 16 * 2 * TOKENS + 256, "step_tokens": 512}
    history = History(settings, (Wave(tuple(Arrival(((n, TOKENS),), TOKENS) for n in range(REQUESTS)), 0),))
    oracle = Oracle(engine.spec(settings))
    wrong = False
    for verifier in (None, None, Verifier()):
        start, cpu = time.perf_counter(), time.process_time()
        outcome = play(engine, history, oracle, ExactModel(oracle.spec), verifier)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        wrong |= outcome.wrong or bool(verifier and verifier.reports)
        kind = "with the verifier" if verifier else "without it"
        print(f"{kind}: {REQUESTS / cpu:.1f} requests a second of one core, {REQUESTS / wall:.1f} of wall time")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
