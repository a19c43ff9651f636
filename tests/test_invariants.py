"""Every invariant by itself: what breaks it, what does not, and what its report says."""

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest

from batchstate import invariants
from batchstate.errors import BatchStateError
from batchstate.invariants import INVARIANTS, times_checked
from batchstate.violations import Code, Violation

ints = np.array
NAN = np.array([np.nan, 1.0], dtype=np.float32)


def by_row(row: int) -> str:
    """Says of a row which publish wrote its entry."""
    return f"publish of row {row}"


def not_called(row: int) -> str:
    """The writer is put into words only for a report."""
    raise AssertionError("an invariant that holds has called for the writer")


def explained(shorter: int, longer: int, width: int) -> tuple[str, str]:
    """The words of a place for a length."""
    return f"{shorter} of {longer} in {width}", "do less"


# code -> arguments that break it, arguments that nearly do, where the report points
CASES: dict[Code, tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = {
    Code.MIRROR_EQUAL: ((ints([1, 2, 3]), ints([1, 2, 4])), (NAN, NAN.copy()), {"row": 2, "expected": 3, "actual": 4}),
    Code.MIRROR_BOUND: ((ints([5, 5]), ints([5, 6])), (ints([5, 5]), ints([5, 4])), {"row": 1, "actual": 6}),
    Code.MIRROR_STALE_READ: (("host", ("verifying",)), ("host", ()), {}),
    Code.MIRROR_FOREIGN_WRITE: (("device", 0, 1), ("device", 3, 3), {}),
    Code.MIRROR_ALIASED: (((100, 200), (199, 300)), ((100, 200), (200, 300)), {}),
    Code.ROW_COUNT: ((3, {"a": 3, "b": 2}), (3, {"a": 3, "b": 3}), {"column": "b", "expected": 3, "actual": 2}),
    Code.ROW_KEPT: ((ints([4, 5]), ints([4, 6])), (NAN, NAN.copy()), {"row": 1, "expected": 5, "actual": 6}),
    Code.SLOT_ZERO_ALLOCATED: ((ints([3, 0]),), (ints([3, 1]),), {"row": 1, "slot": 0}),
    Code.SLOT_ZERO_DIRTY: ((ints([0, 0, 7]),), (ints([0, 0, 0]),), {"slot": 0, "actual": 7}),
    Code.SLOT_OUT_OF_RANGE: ((ints([0, 9]), 9), (ints([0, 8]), 9), {"row": 1, "slot": 9}),
    Code.SLOT_DOUBLE_FREE: (
        (ints([4, 5, 4]), np.array([True] * 3)),
        (ints([4, 5]), np.array([True] * 2)),
        {"row": 2, "slot": 4},
    ),
    Code.SLOT_STALE_HANDLE: (
        (ints([4, 5]), ints([1, 1]), ints([1, 2])),
        (ints([4, 5]), ints([1, 2]), ints([1, 2])),
        {"row": 1, "slot": 5, "generation": 1},
    ),
    Code.SLOT_SHARED: ((ints([3, 0, 3]),), (ints([3, 0, 0]),), {"row": 2, "slot": 3}),
    Code.SLOT_CONSERVATION: ((3, 1, 1, 6), (3, 1, 2, 6), {"actual": 5}),
    Code.SLOT_IN_FLIGHT: (
        (ints([4, 5]), np.array([False, True])),
        (ints([4, 5]), np.array([False, False])),
        {"row": 1, "slot": 5},
    ),
    Code.TABLE_CAPACITY: ((8, 9), (9, 9), {"actual": 8}),
    Code.ROW_UNWRITTEN: (
        (ints([4, 5]), ints([2, 1]), ints([2, 2])),
        (ints([4, 0]), ints([2, 0]), ints([2, 0])),
        {"row": 1, "slot": 5, "generation": 2, "actual": "written for generation 1, which has left"},
    ),
    Code.STATE_TURN: (
        (ints([4, 5]), ints([7, 8]), ints([7, 9]), "state"),
        (ints([4, 0]), ints([7, 0]), ints([7, 0]), "state"),
        {"row": 1, "slot": 5, "expected": "state 8", "actual": "state 9"},
    ),
    Code.RANKS_DIFFER: (
        (ints([[4, 5, 7], [4, 5, 7], [4, 5, 9]]),),
        (ints([[4, 5, 7], [4, 5, 7]]),),
        {"row": 2, "expected": "4 fences, memory 00000005, calls 00000007"},
    ),
    Code.PAGE_OWNER: ((ints([0, 1, 2]), ints([0, 1, 1])), (ints([0, -1]), ints([0, -1])), {"slot": 2}),
    Code.PAGE_UNWRITTEN: ((ints([4, 8]), ints([4, 7])), (ints([4, 8]), ints([4, 9])), {"row": 1, "actual": 8}),
    Code.TABLE_LINK: ((ints([8]), ints([0]), ints([5])), (ints([8]), ints([5]), ints([5])), {"slot": 8, "actual": 5}),
    Code.PAGE_RELEASED: ((ints([4, 3]), ints([0, 4])), (ints([4, 3]), ints([4, 0])), {"row": 1, "actual": 3}),
    Code.PAGE_ZERO_FINITE: ((np.array([True, False]),), (np.array([True, True]),), {"row": 1, "slot": 0}),
    Code.PAGE_ALIGNMENT: ((ints([16, 17]), 16), (ints([16, 32]), 16), {"row": 1, "actual": 17}),
    Code.LENGTH_ORDER: ((ints([3]), ints([2]), 8), (ints([2]), ints([2]), 2), {"row": 0}),
    Code.TAIL_STALE: ((ints([0, 7]), 0, 4), (ints([0, 0]), 0, 4), {"row": 5, "actual": 7}),
    Code.SENTINEL_ESCAPED: ((ints([3, -1]),), (ints([3, 0]),), {"row": 1, "actual": -1}),
    Code.UNIT_MISMATCH: (("slot", "page"), ("slot", "slot"), {"expected": "slot", "actual": "page"}),
    Code.DERIVED_STALE: (
        (np.array([False, True]), lambda row: (f"row {row}", "then", "now")),
        (np.array([False, False]), not_called),
        {"row": 1, "expected": "then", "actual": "now"},
    ),
    Code.HIDDEN_SYNC: (("item", False), ("item", True), {"actual": "item"}),
    Code.STAGING_OVERRUN: ((3, None, 5, 2), (4, None, 5, 2), {"actual": 3}),
    Code.STAGING_REUSED: ((7, 9), (7, 7), {"expected": "lending 7", "actual": "lending 9"}),
    Code.FUTURE_UNWRITTEN: (
        (ints([4, 5]), np.array([True, False]), "gather"),
        (ints([4, 5]), np.array([True, True]), "gather"),
        {"row": 1, "slot": 5, "writer": "not written", "reader": "gather", "actual": "unwritten"},
    ),
    Code.FUTURE_GENERATION: (
        (ints([4, 5]), ints([3, 3]), ints([3, 4]), by_row, "gather"),
        (ints([4, 5]), ints([3, 4]), ints([3, 4]), not_called, "gather"),
        {"row": 1, "slot": 5, "generation": 4, "writer": "publish of row 1", "reader": "gather"},
    ),
    Code.FUTURE_CONSUMED: (
        (ints([4, 5]), np.array([False, True]), by_row, "gather"),
        (ints([4, 5]), np.array([False, False]), not_called, "gather"),
        {"row": 1, "slot": 5, "writer": "publish of row 1", "reader": "gather", "actual": "consumed"},
    ),
    Code.FUTURE_UNREAD_OVERWRITTEN: (
        (ints([4, 5]), np.array([False, True]), by_row, "stash", "the host"),
        (ints([4, 5]), np.array([False, False]), not_called, "stash", "the host"),
        {"row": 1, "slot": 5, "writer": "stash", "reader": "not read yet", "expected": "read by the host"},
    ),
    Code.FUTURE_ORDER: (
        (False, "publish", "gather", "a wait for publish"),
        (True, "publish", "gather", "a wait for publish"),
        {"writer": "publish", "reader": "gather", "expected": "a wait for publish"},
    ),
    Code.TIER_STATE: (
        (ints([4, 5]), ints([1, 2]), (1, 3), ("OUTSIDE", "STAGED", "DIRECT", "READY")),
        (ints([4, 5]), ints([1, 3]), (1, 3), ("OUTSIDE", "STAGED", "DIRECT", "READY")),
        {"row": 1, "slot": 5, "expected": "STAGED or READY", "actual": "DIRECT"},
    ),
    Code.TRANSFER_BOUNDS: (
        (ints([0, 96]), ints([96, 33]), 0, 128),
        (ints([0, 96]), ints([96, 32]), 0, 128),
        {"row": 1, "expected": "inside 0 to 128 (exclusive)", "actual": "96, 33 long"},
    ),
    Code.TRANSFER_IDLE: ((ints([3, 4]), 3, ["a", "b"]), (ints([3, 3]), 3, ["a", "b"]), {"row": 1, "actual": "4"}),
    Code.TRANSFER_LATE_WRITE: (
        (ints([16, 32]), np.array([False, True])),
        (ints([16, 32]), np.array([False, False])),
        {"row": 1, "slot": 32, "actual": "other bytes"},
    ),
    Code.PEER_UNKNOWN: ((b"his", b"hers"), (b"hers", b"hers"), {"expected": b"his", "actual": b"hers"}),
    Code.RACE: (
        (False, "a write may pass a read", "a wait for the read"),
        (True, "a write may pass a read", "a wait for the read"),
        {"expected": "an order", "actual": "a wait for the read"},
    ),
}
STATES = ("OUTSIDE", "STAGED", "DIRECT", "READY")
# further ways to break an invariant, beside the first
MORE: list[tuple[Code, tuple[Any, ...]]] = [
    (Code.MIRROR_EQUAL, (ints([1]), np.array([1], dtype=np.int32))),
    (Code.MIRROR_EQUAL, (ints([1]), ints([1, 2]))),
    (Code.MIRROR_EQUAL, (np.array([0.0]), np.array([-0.0]))),
    (Code.MIRROR_EQUAL, (ints([[1, 2], [3, 4]]), ints([[1, 2], [3, 5]]))),
    (Code.MIRROR_BOUND, (ints([1]), np.array([1], dtype=np.int32))),
    (Code.SLOT_OUT_OF_RANGE, (ints([-1]), 9)),
    (Code.SLOT_DOUBLE_FREE, (ints([4, 5]), np.array([True, False]))),
    (Code.SLOT_CONSERVATION, (-1, 1, 6, 6)),
    (Code.ROW_UNWRITTEN, (ints([4]), ints([0]), ints([1]))),
    (Code.SLOT_CONSERVATION, (4, 1, 2, 6)),
    (Code.LENGTH_ORDER, (ints([-1]), ints([2]), 8)),
    (Code.LENGTH_ORDER, (ints([1]), ints([9]), 8)),
    (Code.TAIL_STALE, (ints([[0, 0], [0, 1]]), 0, 4)),
    (Code.MIRROR_ALIASED, ((100, 200), (120, 130))),
    (Code.STAGING_OVERRUN, (0, None, 1, 1)),
    (Code.STAGING_REUSED, (7, 0)),
    (Code.TIER_STATE, (ints([4]), ints([0]), (3,), ("OUTSIDE", "STAGED", "DIRECT", "READY"))),
    (Code.TRANSFER_BOUNDS, (ints([-1]), ints([1]), 0, 128)),
    (Code.TRANSFER_BOUNDS, (ints([5]), ints([0]), 0, 128)),
    (Code.TRANSFER_BOUNDS, (ints([2**62]), ints([2**62]), 0, 128)),
    (Code.TRANSFER_BOUNDS, (ints([8, 8]), ints([1, 1]), ints([8, 9]), ints([9, 10]))),
    (Code.FUTURE_GENERATION, (ints([4]), ints([5]), ints([4]), by_row, "gather")),
]


# arguments in the words of a place, and what the report then says
WORDS: list[tuple[Code, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
    (
        Code.MIRROR_EQUAL,
        (ints([1, 2, 3]), ints([1, 3, 2])),
        {},
        {"problem": "the device side differs from the host side in 2 of 3 rows, as the same rows in another order"},
    ),
    (
        Code.SLOT_CONSERVATION,
        (3, 1, 1, 6),
        {"leaked": ints([7, 8])},
        {"problem": "2 leaked: 7, 8; without them 3 free + 1 pending + 1 live is 5", "slot": 7},
    ),
    (
        Code.SLOT_CONSERVATION,
        (3, 1, 1, 6),
        {"leaked": ints(range(1, 10)), "problem": "a leak", "remedy": "free it"},
        {"problem": "a leak", "remedy": "free it", "slot": 1},
    ),
    (
        Code.LENGTH_ORDER,
        (ints([3]), ints([2]), 8),
        {"explain": explained},
        {"problem": "3 of 2 in 8", "remedy": "do less", "expected": "0 to 2", "actual": 3},
    ),
    (Code.PAGE_OWNER, (ints([1, 2]), ints([1, 1])), {"pages": ints([5, 9])}, {"slot": 9, "row": None}),
    (Code.TIER_STATE, (ints([4]), ints([1]), (1,), STATES), {"missing": ints([3])}, {"actual": "3 tokens are missing"}),
    (Code.TIER_STATE, (ints([4]), ints([1]), (1,), STATES), {"missing": ints([-3])}, {"actual": "3 tokens too many"}),
    (
        Code.TRANSFER_BOUNDS,
        (ints([5]), ints([0]), 0, 128),
        {"what": "tokens"},
        {"problem": "row 0 of a transfer covers 0 tokens from 5 on"},
    ),
    (Code.PEER_UNKNOWN, (b"", b"", 65, 64), {}, {"actual": 65, "expected": "64 at most"}),
    (Code.RACE, (False, "a race", "a wait"), {"remedy": "wait"}, {"problem": "a race", "remedy": "wait"}),
]


def test_every_code_has_an_invariant_and_a_case() -> None:
    """No code without an invariant, no invariant without a case here, and each says what it is and what to do."""
    assert set(INVARIANTS) == set(Code) == set(CASES)
    for code, invariant in INVARIANTS.items():
        assert getattr(invariants, code.lower()) is invariant
        assert invariant.level in ("always", "cheap", "full", "test")
        assert len(invariant.statement) > 80
        assert "Cost:" in invariant.statement or "Cost " in invariant.statement
        assert "Broken" in invariant.statement
        assert invariant.remedy
        assert len(invariant.origins) >= 2 or code is Code.MIRROR_STALE_READ
        assert not invariant.remedy.endswith(".")


@pytest.mark.parametrize("code", list(Code))
def test_a_broken_invariant_is_reported(code: Code) -> None:
    """The violation has the code, where, what was expected, what was found and what to do; each check is counted."""
    invariant, (broken, _, report) = INVARIANTS[code], CASES[code]
    before = times_checked[code]
    with pytest.raises(Violation) as caught:
        invariant(*broken, object="thing", operation="deed", step=41)
    assert not invariant.holds(*broken)
    assert invariant.question(*broken) is not None
    assert times_checked[code] == before + 2
    violation = caught.value
    assert violation.code is code
    assert (violation.object, violation.operation, violation.step) == ("thing", "deed", 41)
    for field, value in report.items():
        assert getattr(violation, field) == value, field
    text = str(violation)
    assert text.startswith(f"{code}: ")
    if code is Code.DERIVED_STALE:
        violation.expected = None  # a state like others
        assert "  expected   None" in str(violation)
    for word in ("thing", "deed", "41", "expected", "actual", invariant.remedy):
        assert word in text


@pytest.mark.parametrize("code", list(Code))
def test_an_invariant_that_holds_is_silent(code: Code) -> None:
    """What nearly breaks an invariant does not, nor do no rows at all; each check is counted."""
    invariant, (broken, nearly, _) = INVARIANTS[code], CASES[code]
    before = times_checked[code]
    invariant(*nearly, object="thing")
    assert invariant.holds(*nearly)
    assert times_checked[code] == before + 2
    if isinstance(broken[0], np.ndarray):
        assert invariant.holds(*(value[:0] if isinstance(value, np.ndarray) else value for value in broken))


@pytest.mark.parametrize(("code", "broken"), MORE)
def test_further_ways_to_break_an_invariant(code: Code, broken: tuple[Any, ...]) -> None:
    """Each clause of an invariant has a case that breaks it alone."""
    with pytest.raises(Violation) as caught:
        INVARIANTS[code](*broken)
    assert caught.value.code is code


@pytest.mark.parametrize(("code", "broken", "options", "report"), WORDS)
def test_a_place_may_choose_the_words(
    code: Code, broken: tuple[Any, ...], options: dict[str, Any], report: dict[str, Any]
) -> None:
    """What a place knows better goes into the report, beside where it was."""
    with pytest.raises(Violation) as caught:
        INVARIANTS[code](*broken, **options, operation="deed", column="a")
    assert {field: getattr(caught.value, field) for field in report} == report
    assert (caught.value.operation, caught.value.column) == ("deed", "a")


def test_reports_survive_pickling() -> None:
    """A violation reaches another process with its fields and its text."""
    with pytest.raises(Violation) as caught:
        invariants.slot_shared(ints([1, 1]), object="pool", operation="take", step=2)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.as_dict() == caught.value.as_dict()
    assert isinstance(copy, BatchStateError | RuntimeError)


def test_reports_name_writer_and_reader() -> None:
    """The report of a relay entry says who wrote it and who reads it: as text, as plain values, after pickling."""
    slots, written = ints([4, 5]), np.array([False, True])
    with pytest.raises(Violation) as caught:
        invariants.future_consumed(slots, written, by_row, "gather in step 2", object="relay", column="tokens", step=2)
    for violation in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (violation.writer, violation.reader) == ("publish of row 1", "gather in step 2")
        report = violation.as_dict()
        assert (report["writer"], report["reader"]) == ("publish of row 1", "gather in step 2")
        assert re.search(r"^  writer +publish of row 1$", str(violation), re.MULTILINE)
        assert re.search(r"^  reader +gather in step 2$", str(violation), re.MULTILINE)
    with pytest.raises(Violation) as caught:
        invariants.slot_shared(ints([1, 1]))
    assert caught.value.as_dict()["writer"] is caught.value.as_dict()["reader"] is None
    assert "writer" not in str(caught.value)


def test_reports_name_no_tensor() -> None:
    """A report of a large array stays short: it shows the row, not the array."""
    with pytest.raises(Violation) as caught:
        invariants.mirror_equal(np.zeros((10_000, 64)), np.ones((10_000, 64)))
    assert len(re.sub(r"\d", "", str(caught.value))) < 2_000


@pytest.mark.parametrize(
    ("values", "row"), [([], None), ([1], None), ([1, 2, 3], None), ([1, 2, 1], 2), ([0, 5, 0, 5], 2), ([7] * 5, 1)]
)
def test_first_duplicate(values: list[int], row: int | None) -> None:
    """The first row whose value stands in an earlier one is found."""
    assert invariants.first_duplicate(np.array(values, dtype=np.int64)) == row


def test_an_invariant_is_copied_and_pickled_as_a_function() -> None:
    """By reference: there is one of each."""
    slot_shared = invariants.slot_shared
    assert pickle.loads(pickle.dumps(slot_shared)) is slot_shared
    assert copy.deepcopy(slot_shared) is slot_shared
    assert repr(slot_shared) == "<invariant SLOT_SHARED>"
