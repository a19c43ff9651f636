"""Fuzzing a batch class with parts made lazily, padding, idle steps and copies: what they get wrong is found."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st

from batchstate.errors import ArgumentError
from batchstate.testing import Twin, TwinSpec, fuzz_twins


class Penalties:
    """A part that a batch has once a request asks for it."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class Lazy:
    """Lengths on both sides, and penalties that are made when a request first decodes."""

    def __init__(self, lengths: list[int]) -> None:
        self.reqs = [f"request of {length}" for length in lengths]
        self.lens_cpu = torch.tensor(lengths, dtype=torch.int64)
        self.lens = torch.tensor(lengths, dtype=torch.int64)
        self.penalties: Penalties | None = None

    def filter(self, keep: list[int]) -> None:
        self.reqs = [self.reqs[row] for row in keep]
        self.lens_cpu, self.lens = self.lens_cpu[keep], self.lens[keep]
        if self.penalties is not None:
            self.penalties = Penalties(self.penalties.values[keep])

    def merge(self, other: "Lazy") -> None:
        self.penalties = self.merged_penalties(other)
        self.reqs = self.reqs + other.reqs
        self.lens_cpu = torch.cat([self.lens_cpu, other.lens_cpu])
        self.lens = torch.cat([self.lens, other.lens])

    def merged_penalties(self, other: "Lazy") -> Penalties | None:
        parts = [(one, one.penalties) for one in (self, other)]
        if all(penalties is None for _, penalties in parts):
            return None
        return Penalties(
            torch.cat([torch.zeros(len(one.reqs)) if made is None else made.values for one, made in parts])
        )

    def decode(self) -> None:
        self.lens_cpu += 1
        self.lens += 1
        if self.penalties is None:
            self.penalties = Penalties(torch.arange(len(self.reqs)) / 2)

    def padded(self, rows: int) -> "Lazy":
        more = rows - len(self.reqs)
        batch = self.copied()
        batch.lens_cpu = torch.cat([self.lens_cpu, torch.ones(more, dtype=torch.int64)])
        batch.lens = torch.cat([self.lens, torch.ones(more, dtype=torch.int64)])
        return batch

    @classmethod
    def idle(cls) -> "Lazy":
        return cls([])

    def copied(self) -> "Lazy":
        batch = type(self)([])
        batch.reqs = self.reqs
        batch.lens_cpu, batch.lens = self.lens_cpu.clone(), self.lens.clone()
        batch.penalties = self.penalties
        return batch


def spec_of(batch: type[Lazy], **changes: Any) -> TwinSpec[Lazy, int]:
    """What there is to know of the class."""
    spec = TwinSpec(
        name=batch.__name__,
        row=st.integers(1, 9),
        build=batch,
        filter=batch.filter,
        merge=batch.merge,
        advance=batch.decode,
        twins=[Twin("lens_cpu", "lens")],
        rows=["reqs", "penalties.values"],
        num_rows=lambda one: len(one.reqs),
        lazy=["penalties.values"],
        pad=batch.padded,
        padding={"lens_cpu": 1, "lens": 1},
        idle=batch.idle,
        copy=batch.copied,
    )
    return attrs.evolve(spec, **changes)


class ForgetsPart(Lazy):
    """The part is not filtered with the rest."""

    def filter(self, keep: list[int]) -> None:
        penalties, self.penalties = self.penalties, None
        super().filter(keep)
        self.penalties = penalties


class LosesPart(Lazy):
    """Of two batches only one of which has the part, none has it."""

    def merged_penalties(self, other: Lazy) -> Penalties | None:
        if self.penalties is None or other.penalties is None:
            return None
        return super().merged_penalties(other)


class PutsPartFirst(Lazy):
    """The part of the second batch comes where the rows of the first one are."""

    def merged_penalties(self, other: Lazy) -> Penalties | None:
        if self.penalties is None and other.penalties is not None:
            return Penalties(torch.cat([other.penalties.values + 1, torch.zeros(len(self.reqs))]))
        return super().merged_penalties(other)


class PadsOneSide(Lazy):
    """The host side keeps its rows."""

    def padded(self, rows: int) -> Lazy:
        batch = super().padded(rows)
        batch.lens_cpu = self.lens_cpu.clone()
        return batch


class PadsWithWhatWasThere(Lazy):
    """Padded rows have a length that attention reads."""

    def padded(self, rows: int) -> Lazy:
        batch = super().padded(rows)
        batch.lens_cpu[len(self.reqs) :] = 7
        batch.lens[len(self.reqs) :] = 7
        return batch


class PadsAtTheFront(Lazy):
    """The requests come after the padding."""

    def padded(self, rows: int) -> Lazy:
        batch = super().padded(rows)
        batch.lens_cpu, batch.lens = batch.lens_cpu.flip(0), batch.lens.flip(0)
        return batch


class IdlesWithARow(Lazy):
    """An idle step carries a request that is none."""

    @classmethod
    def idle(cls) -> Lazy:
        return cls([1])


class CopiesViews(Lazy):
    """The copy has the tensors of the batch, which decoding writes in place."""

    def copied(self) -> Lazy:
        batch = super().copied()
        batch.lens_cpu, batch.lens = self.lens_cpu[:], self.lens[:]
        return batch


def test_a_correct_class_is_left_in_peace() -> None:
    """With every hook, in place and not, a class that does all of it right is not accused."""
    result = fuzz_twins(spec_of(Lazy), examples=30)
    assert result.failure is None, result.failure
    assert all(result.reached.values()), result.reached

    def pad_in_place(batch: Lazy, rows: int) -> None:
        padded = batch.padded(rows)
        batch.lens_cpu, batch.lens = padded.lens_cpu, padded.lens

    plain = spec_of(Lazy, pad=pad_in_place, padding={"lens_cpu": None, "lens": 1}, least_rows=1)
    result = fuzz_twins(plain, examples=20)
    assert result.failure is None, result.failure


@pytest.mark.parametrize(
    ("batch", "code", "words"),
    [
        (ForgetsPart, "ROW_COUNT", "'penalties.values' has"),
        (LosesPart, "MODEL", "'penalties.values' was lost"),
        (PutsPartFirst, "MODEL", "merge moved other rows than it was told to: 'penalties.values'"),
        (PadsOneSide, "ROW_COUNT", "column 'lens_cpu' has"),
        (PadsWithWhatWasThere, "TAIL_STALE", "column     lens"),
        (PadsAtTheFront, "MODEL", "pad moved rows"),
        (IdlesWithARow, "ROW_COUNT", "operation  idle"),
        (CopiesViews, "MODEL", "an operation on another batch changed it"),
    ],
)
def test_a_broken_class_is_found(batch: type[Lazy], code: str, words: str) -> None:
    """Each bug is found by an invariant or the model, in words that name the attribute or the operation."""
    result = fuzz_twins(spec_of(batch), examples=150, shrink=False)
    assert result.code == code, result.failure or "nothing was found"
    assert words in str(result.failure)


def test_a_part_that_is_not_called_lazy_has_to_be_there() -> None:
    """None in the place of an attribute is an error before the fuzzing, unless the spec says that it may be None."""
    with pytest.raises(ArgumentError, match=r"penalties\.values"):
        fuzz_twins(spec_of(Lazy, lazy=[]), examples=5)
