"""Slots of an engine's own batch class: slot 0, slots that two rows share, and slots without an owner are found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from batchstate.testing import Twin, TwinSlots, TwinSpec, fuzz_twins


class RowPool:
    """Rows of requests, in the style of SGLang's `ReqToTokenPool`."""

    def __init__(self, first: int = 1) -> None:
        self.free_slots = list(range(first, 512))
        self.live: set[int] = set()

    def alloc(self) -> int:
        """The next row."""
        slot = self.free_slots.pop(0)
        self.live.add(slot)
        return slot

    def free(self, slots: list[int]) -> None:
        """Rows are free again, the last one first in line."""
        self.live -= {*slots}
        self.free_slots = slots + self.free_slots


class Scheduled:
    """A batch with the pool slot and the length of each request on both sides."""

    pool = RowPool()

    def __init__(self, slots: list[int], lengths: list[int]) -> None:
        self.slots_cpu, self.slots = (torch.tensor(slots, dtype=torch.int64) for _ in range(2))
        self.lens_cpu, self.lens = (torch.tensor(lengths, dtype=torch.int64) for _ in range(2))

    @classmethod
    def build(cls, lengths: list[int]) -> "Scheduled":
        """New requests."""
        return cls([cls.pool.alloc() for _ in lengths], lengths)

    def filter(self, keep: list[int], freed: Callable[[list[int]], list[int]]) -> "Scheduled":
        """Some rows stay; the slots of the others, through `freed`, are given back."""
        slots = self.slots_cpu.tolist()
        self.pool.free(freed([slot for row, slot in enumerate(slots) if row not in keep]))
        return Scheduled([slots[row] for row in keep], self.lens_cpu[keep].tolist())

    def merge(self, other: "Scheduled") -> "Scheduled":
        """The rows of both."""
        return Scheduled(
            self.slots_cpu.tolist() + other.slots_cpu.tolist(), self.lens_cpu.tolist() + other.lens_cpu.tolist()
        )

    def pad(self, rows: int, slot: int) -> "Scheduled":
        """Rows up to so many, on `slot`."""
        more = rows - len(self.lens_cpu)
        return Scheduled(self.slots_cpu.tolist() + [slot] * more, self.lens_cpu.tolist() + [0] * more)


def spec(**changed: Any) -> TwinSpec[Scheduled, int]:
    """The class as it should be described; `changed` is what the test gets wrong."""

    def begin(first: int = 1) -> None:
        Scheduled.pool = RowPool(first)

    usual: dict[str, Any] = {
        "name": "Scheduled",
        "row": st.integers(1, 9),
        "build": Scheduled.build,
        "filter": lambda batch, keep: batch.filter(keep, lambda slots: slots),
        "merge": Scheduled.merge,
        "twins": [Twin("slots_cpu", "slots"), Twin("lens_cpu", "lens")],
        "num_rows": lambda batch: len(batch.lens_cpu),
        "slots": TwinSlots("slots_cpu", live=lambda: Scheduled.pool.live, begin=begin),
        "pad": lambda batch, rows: batch.pad(rows, 0),
        "padding": {"slots_cpu": None, "slots": None, "lens_cpu": 0, "lens": 0},
        "copy": lambda batch: Scheduled(batch.slots_cpu.tolist(), batch.lens_cpu.tolist()),
    }
    return TwinSpec(**(usual | changed))


def test_a_right_class_is_never_accused() -> None:
    """Slots move with their rows, are given back with them, and padded rows are on slot 0: nothing is reported."""
    result = fuzz_twins(spec(), examples=25)
    assert result.failure is None, result.failure
    assert all(result.reached.values()), result.reached


def _merged_twice(first: Scheduled, second: Scheduled) -> Scheduled:
    both = first.merge(second)
    both.slots_cpu[-1:] = both.slots[-1:] = both.slots_cpu[:1].clone()
    return both


def _lost(batch: Scheduled, keep: list[int]) -> Scheduled:
    kept = batch.filter(keep, lambda slots: slots)
    kept.slots_cpu[:1] = kept.slots[:1] = -1
    return kept


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a pool that counts from 0": (
        {
            "slots": TwinSlots(
                "slots_cpu",
                live=lambda: Scheduled.pool.live,
                begin=lambda: setattr(Scheduled, "pool", RowPool(0)),
            )
        },
        "SLOT_ZERO_ALLOCATED",
    ),
    "padded rows on a slot of a request": ({"pad": lambda batch, rows: batch.pad(rows, 1)}, "TAIL_STALE"),
    "rows that leave and keep their slots": (
        {"filter": lambda batch, keep: batch.filter(keep, lambda slots: [])},
        "SLOT_CONSERVATION",
    ),
    "the last row that leaves keeps its slot": (
        {"filter": lambda batch, keep: batch.filter(keep, lambda slots: slots[:-1])},
        "SLOT_CONSERVATION",
    ),
    "the slots of all rows are given back": (
        {"filter": lambda batch, keep: batch.filter(keep, lambda slots: batch.slots_cpu.tolist())},
        "SLOT_STALE_HANDLE",
    ),
    "a merge that gives two rows one slot": ({"merge": _merged_twice}, "MODEL"),
    "a slot that is not known yet": ({"filter": _lost}, "MODEL"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_goes_wrong_with_slots_is_found(wrong: str) -> None:
    """Each mistake is reported by its code, within 50 histories."""
    changed, code = WRONG[wrong]
    result = fuzz_twins(spec(**changed), examples=50, shrink=False)
    assert result.code == code, result.failure


def test_two_batches_that_share_a_slot_are_found() -> None:
    """A build that gives out what another batch has is found without a word about the pool."""
    counter = iter(range(10**6))

    def build(lengths: list[int]) -> Scheduled:
        return Scheduled([next(counter) % 5 + 1 for _ in lengths], lengths)

    wrong = spec(build=build, slots="slots_cpu", filter=lambda batch, keep: batch.filter(keep, lambda slots: []))
    result = fuzz_twins(wrong, examples=20, shrink=False)
    assert result.code == "SLOT_SHARED"
    assert "Scheduled" in str(result.failure)
