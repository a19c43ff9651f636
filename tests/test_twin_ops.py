"""Operations of a batch class beyond filter and merge: one line each, and what they get wrong is found."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st

from batchstate.testing import Twin, TwinSpec, fuzz_twins


@attrs.define(eq=False)
class Request:
    """A request; `retracted` is set by the batch that gives it up."""

    length: int
    retracted: bool = False


class Scheduled:
    """A batch in the style of SGLang's `ScheduleBatch`: operations work in place, and some return more than a batch."""

    def __init__(self, lengths: list[int]) -> None:
        self.set([Request(length) for length in lengths], lengths)

    def set(self, reqs: list[Request], lengths: list[int]) -> None:
        """New rows."""
        self.reqs = reqs
        self.lens_cpu = torch.tensor(lengths, dtype=torch.int64)
        self.lens = torch.tensor(lengths, dtype=torch.int64)
        self.chunk = torch.zeros(len(reqs), dtype=torch.bool)

    def filter_batch(self, keep: list[int]) -> None:
        """Some rows stay."""
        self.reqs = [self.reqs[row] for row in keep]
        self.lens_cpu, self.lens, self.chunk = self.lens_cpu[keep], self.lens[keep], self.chunk[keep]

    def merge_batch(self, other: "Scheduled") -> None:
        """More rows."""
        self.reqs = self.reqs + other.reqs
        for name in ("lens_cpu", "lens", "chunk"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))

    def split_batch(self, at: int) -> tuple["Scheduled", "Scheduled"]:
        """The first rows, and the others."""
        halves = Scheduled([]), Scheduled([])
        for half, rows in zip(halves, (slice(None, at), slice(at, None)), strict=True):
            half.reqs = self.reqs[rows]
            half.lens_cpu, half.lens, half.chunk = (
                self.lens_cpu[rows].clone(),
                self.lens[rows].clone(),
                self.chunk[rows],
            )
        return halves

    def mix_with_running(self, running: "Scheduled") -> None:
        """The running requests put in a token beside the prompts of this batch."""
        running.lens_cpu, running.lens = running.lens_cpu + 1, running.lens + 1
        self.merge_batch(running)

    def prepare_for_idle(self) -> None:
        """A step without requests."""
        self.set([], [])

    def prepare_for_prebuilt(self) -> None:
        """Requests whose KV came from elsewhere: the lengths are as they were, and all chunks are done."""
        self.chunk = torch.ones(len(self.reqs), dtype=torch.bool)

    def retract_decode(self) -> list[Request]:
        """Gives up every request that is too long, and returns them."""
        for one, length in zip(self.reqs, self.lens_cpu.tolist(), strict=True):
            one.retracted = length > 6
        gone = [one for one in self.reqs if one.retracted]
        self.filter_batch([row for row, one in enumerate(self.reqs) if not one.retracted])
        return gone


def _retract(batch: Scheduled) -> None:
    batch.retract_decode()


def _longer(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "lens": row["lens"] + 1, "lens_cpu": row["lens_cpu"] + 1}


def spec_of(batch: type[Scheduled], **changes: Any) -> TwinSpec[Scheduled, int]:
    """Every operation of the class, one line each."""
    spec = TwinSpec(
        name=batch.__name__,
        row=st.integers(1, 9),
        build=batch,
        filter=batch.filter_batch,
        merge=batch.merge_batch,
        twins=[Twin("lens_cpu", "lens")],
        rows=["reqs", "chunk"],
        num_rows=lambda one: len(one.reqs),
        ops={
            "split_batch": (batch.split_batch, lambda rows, at: (rows[:at], rows[at:]), st.integers(0, 3)),
            "mix_with_running": (
                batch.mix_with_running,
                lambda rows, running: rows + [_longer(row) for row in running],
            ),
            "prepare_for_idle": (batch.prepare_for_idle, lambda rows: []),
            "prepare_for_prebuilt": (batch.prepare_for_prebuilt, lambda rows: [{**row, "chunk": True} for row in rows]),
            "retract": (_retract, lambda rows: [row for row in rows if not row["reqs"].retracted]),
        },
    )
    return attrs.evolve(spec, **changes)


class SplitsUnequally(Scheduled):
    """The last row goes to neither half, or to both, on one side and the other alike."""

    def split_batch(self, at: int) -> tuple[Scheduled, Scheduled]:
        first, second = super().split_batch(at)
        if len(second.reqs) > 1:
            second.filter_batch(list(range(len(second.reqs) - 1)))
        return first, second


class MixesOneSide(Scheduled):
    """The running requests get longer on the device alone."""

    def mix_with_running(self, running: Scheduled) -> None:
        running.lens = running.lens + 1
        self.merge_batch(running)


class MixesBothSidesWrongly(Scheduled):
    """The running requests do not get longer; both sides agree about it."""

    def mix_with_running(self, running: Scheduled) -> None:
        self.merge_batch(running)


class IdlesHalf(Scheduled):
    """An idle step keeps the lengths on the host."""

    def prepare_for_idle(self) -> None:
        kept = self.lens_cpu
        super().prepare_for_idle()
        self.lens_cpu = kept


class PrebuiltIsNarrow(Scheduled):
    """The column that a prebuilt batch sets has another dtype."""

    def prepare_for_prebuilt(self) -> None:
        self.chunk = torch.ones(len(self.reqs), dtype=torch.int32)


class RetractsNeighbours(Scheduled):
    """Rows of the requests after those given up are kept on both sides, in the place of their own."""

    def retract_decode(self) -> list[Request]:
        before = self.lens_cpu, self.lens
        gone = super().retract_decode()
        self.lens_cpu, self.lens = (one[: len(self.reqs)] for one in before)
        return gone


def test_a_correct_class_is_left_in_peace() -> None:
    """Every operation is called, and a class that does all of them right is not accused."""
    result = fuzz_twins(spec_of(Scheduled), examples=40)
    assert result.failure is None, result.failure
    assert all(result.reached.values()), result.reached


@pytest.mark.parametrize(
    ("batch", "code", "words"),
    [
        (SplitsUnequally, "ROW_COUNT", "operation  split_batch"),
        (MixesOneSide, "MIRROR_EQUAL", "operation  mix_with_running"),
        (MixesBothSidesWrongly, "MODEL", "mix_with_running moved other rows than it was told to: 'lens_cpu', row"),
        (IdlesHalf, "ROW_COUNT", "operation  prepare_for_idle"),
        (PrebuiltIsNarrow, "MODEL", "the dtype of 'chunk' changed from bool to int32"),
        (RetractsNeighbours, "MODEL", "retract moved other rows than it was told to: 'lens_cpu', row"),
    ],
)
def test_a_broken_operation_is_found(batch: type[Scheduled], code: str, words: str) -> None:
    """Each bug is found by an invariant or by the model of its operation, which the report names."""
    result = fuzz_twins(spec_of(batch), examples=150, shrink=False)
    assert result.code == code, result.failure or "nothing was found"
    assert words in str(result.failure)


def test_a_model_of_other_attributes_is_refused() -> None:
    """A row of the model that has an attribute which the spec lacks is an error of the spec, not of the class."""
    typo = {"idle": (lambda batch: batch, lambda rows: [{**row, "length": 1} for row in rows])}
    result = fuzz_twins(spec_of(Scheduled, ops={"stay": typo["idle"]}), examples=20, shrink=False)
    assert "the model has 'length'" in str(result.failure)


def test_results_have_to_be_as_many_as_in_the_model() -> None:
    """A call that returns one batch where the model has two is reported, by its name."""
    ops = {"halve": (lambda batch: batch, lambda rows: (rows[:1], rows[1:]))}
    result = fuzz_twins(spec_of(Scheduled, ops=ops), examples=20, shrink=False)
    assert result.code == "MODEL"
    assert "Scheduled.halve: expected 2 batches" in str(result.failure)
