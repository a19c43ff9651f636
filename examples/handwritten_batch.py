"""A batch class with twins kept by hand, as engines write them today, and how to fuzz it.

Every field stands in three methods, and half of them twice. `ForgetfulBatch` is the same class after a change added
`temperatures` and did not add it to `filter_batch`: the bug that `batchstate.testing` finds in a second.

    python examples/handwritten_batch.py
"""

import torch
from hypothesis import strategies as st

from batchstate.testing import Twin, TwinSpec, fuzz_twins


class HandwrittenBatch:
    """Requests of a decode batch: every `_cpu` field mirrors the device field of its name."""

    device = torch.device("cpu")

    def __init__(self, reqs: list[str], lengths: list[int]) -> None:
        self.reqs = list(reqs)
        self.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int64, device=self.device)
        self.kv_bound_cpu = self.seq_lens_cpu + 2  # speculation may accept up to two drafts
        self.kv_lens = torch.tensor(lengths, dtype=torch.int64, device=self.device)
        self.temperatures = torch.tensor([length / 10 for length in lengths], device=self.device)

    @classmethod
    def from_lengths(cls, lengths: list[int]) -> "HandwrittenBatch":
        """New requests with prompts of these lengths."""
        return cls([f"request of {length}" for length in lengths], lengths)

    def filter_batch(self, keep: list[int]) -> None:
        """Keeps the rows of `keep`, in place."""
        rows = torch.tensor(keep, dtype=torch.int64)
        self.reqs = [self.reqs[row] for row in keep]
        self.seq_lens_cpu = self.seq_lens_cpu[rows]
        self.kv_bound_cpu = self.kv_bound_cpu[rows]
        rows = rows.to(self.device)
        self.seq_lens = self.seq_lens[rows]
        self.kv_lens = self.kv_lens[rows]
        self._filter_sampling(rows)

    def _filter_sampling(self, rows: torch.Tensor) -> None:
        self.temperatures = self.temperatures[rows]

    def merge_batch(self, other: "HandwrittenBatch") -> None:
        """Appends the rows of `other`, in place."""
        self.reqs = self.reqs + other.reqs
        self.seq_lens_cpu = torch.cat([self.seq_lens_cpu, other.seq_lens_cpu])
        self.seq_lens = torch.cat([self.seq_lens, other.seq_lens])
        self.kv_bound_cpu = torch.cat([self.kv_bound_cpu, other.kv_bound_cpu])
        self.kv_lens = torch.cat([self.kv_lens, other.kv_lens])
        self.temperatures = torch.cat([self.temperatures, other.temperatures])

    def prepare_for_decode(self) -> None:
        """One more token a request; of two drafts the device accepts one, and the host does not know."""
        self.seq_lens_cpu = self.seq_lens_cpu + 1
        self.seq_lens = self.seq_lens + 1
        self.kv_bound_cpu = self.kv_bound_cpu + 2
        self.kv_lens = self.kv_lens + 1


class ForgetfulBatch(HandwrittenBatch):
    """The same, with a field forgotten in one of its operations."""

    def _filter_sampling(self, rows: torch.Tensor) -> None:
        """The temperatures were forgotten."""


def spec_of(batch: type[HandwrittenBatch]) -> TwinSpec[HandwrittenBatch, int]:
    """A description of the class for the fuzzer; it is the same for both."""
    return TwinSpec(
        name=batch.__name__,
        row=st.integers(1, 9),
        build=batch.from_lengths,
        filter=batch.filter_batch,
        merge=batch.merge_batch,
        advance=batch.prepare_for_decode,
        twins=[Twin("seq_lens_cpu", "seq_lens"), Twin("kv_bound_cpu", "kv_lens", "upper_bound")],
        rows=["reqs", "temperatures"],
        num_rows=lambda batch: len(batch.reqs),
    )


if __name__ == "__main__":
    for kind in (HandwrittenBatch, ForgetfulBatch):
        result = fuzz_twins(spec_of(kind), examples=100)
        print(f"{result.name}: {result.failure or f'{result.examples} examples, nothing found'}\n")
