"""Fuzzing a batch class of the engine's own: a correct one is left in peace, a forgotten field is found."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from batchstate.errors import ArgumentError
from batchstate.testing import Twin, TwinSpec, fuzz_twins, run_machine, twin_machine
from examples.handwritten_batch import ForgetfulBatch, HandwrittenBatch, spec_of

TestHandwritten = twin_machine(spec_of(HandwrittenBatch)).TestCase
TestHandwritten.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


def on(device: str, batch: type[HandwrittenBatch], **changes: Any) -> TwinSpec[HandwrittenBatch, int]:
    """The specification of a class whose device is the one under test, with changes."""
    there = type(batch.__name__, (batch,), {"device": torch.device(device)})
    return attrs.evolve(spec_of(there), **changes)


def killed(device: str, code: str, **methods: Any) -> str:
    """The report on a class in which some methods are replaced."""
    broken = type("BrokenBatch", (HandwrittenBatch,), methods)
    result = fuzz_twins(on(device, broken), examples=60, shrink=False)
    assert result.code == code, result.failure or "nothing was found"
    return str(result.failure)


def test_correct_class_is_left_in_peace(device: str) -> None:
    """A class that keeps its twins right is never accused, while every interesting state is reached."""
    result = fuzz_twins(on(device, HandwrittenBatch), examples=100)
    assert result.failure is None, result.failure
    assert all(result.reached.values())


def test_forgotten_field_is_found(device: str) -> None:
    """A field that one operation forgets is reported by name, with a short program that shows it."""
    result = fuzz_twins(on(device, ForgetfulBatch), examples=60)
    assert result.code == "ROW_COUNT"
    report = str(result.failure)
    assert "'temperatures'" in report
    assert "operation  filter" in report
    assert report.count("state.build(") == report.count("state.filter(") == 1
    assert "fuzz_twins(spec, examples=60, seed=0, steps=50)  # the TwinSpec of ForgetfulBatch" in report


def _sampled(dtype: torch.dtype | None) -> Callable[..., None]:
    """A constructor that makes temperatures of the lengths, with that dtype, or with the one that torch takes."""

    def build(self: HandwrittenBatch, reqs: list[str], lengths: list[int]) -> None:
        HandwrittenBatch.__init__(self, reqs, lengths)
        self.temperatures = torch.tensor(lengths, dtype=dtype, device=self.device)

    return build


BROKEN: dict[str, tuple[str, str, dict[str, Callable[..., None]]]] = {
    "a twin advanced on one side": (
        "MIRROR_EQUAL",
        "seq_lens_cpu / seq_lens",
        {"prepare_for_decode": lambda self: setattr(self, "seq_lens_cpu", self.seq_lens_cpu + 1)},
    ),
    "a device value beyond its bound": (
        "MIRROR_BOUND",
        "kv_bound_cpu / kv_lens",
        {"prepare_for_decode": lambda self: setattr(self, "kv_lens", self.kv_lens + 3)},
    ),
    "rows in another order than those of other fields": (
        "MODEL",
        "filter moved other rows than it was told to: 'temperatures'",
        {"_filter_sampling": lambda self, rows: setattr(self, "temperatures", self.temperatures[rows.sort().values])},
    ),
    "another dtype, and nothing else": (
        "MODEL",
        "the dtype of 'temperatures' changed from float32 to float16",
        {
            "__init__": _sampled(torch.float32),
            "_filter_sampling": lambda self, rows: setattr(self, "temperatures", self.temperatures[rows].half()),
        },
    ),
    "`torch.tensor([])`, which is float32, merged with integers": (
        "MODEL",
        "the dtype of 'temperatures' changed from int64 to float32",
        {"__init__": _sampled(None)},
    ),
}


@pytest.mark.parametrize("bug", BROKEN)
def test_a_broken_class_is_found(device: str, bug: str) -> None:
    """By the code of an invariant or by the model, and the report names the field."""
    code, words, methods = BROKEN[bug]
    assert words in killed(device, code, **methods)


def test_aliased_twins_are_found() -> None:
    """On a CPU device, twins in one memory are MIRROR_ALIASED: they could never disagree."""
    killed("cpu", "MIRROR_ALIASED", prepare_for_decode=lambda self: setattr(self, "seq_lens_cpu", self.seq_lens))


def test_shared_memory_between_batches_is_found(device: str) -> None:
    """A batch whose numbers lie in memory that the next batch writes is found, although it is right when it is made."""
    buffer = torch.zeros(8, device=device)

    def build(self: HandwrittenBatch, reqs: list[str], lengths: list[int]) -> None:
        HandwrittenBatch.__init__(self, reqs, lengths)
        self.temperatures = buffer[: len(lengths)].copy_(self.temperatures)

    assert "an operation on another batch changed it" in killed(device, "MODEL", __init__=build)


def test_batches_returned_and_batches_changed_in_place_are_both_taken(device: str) -> None:
    """An operation may return the batch, an empty one too, or change it in place and return nothing."""

    def filter_and_return(batch: HandwrittenBatch, keep: list[int]) -> HandwrittenBatch:
        batch.filter_batch(keep)
        return batch

    class Sized(HandwrittenBatch):
        def __len__(self) -> int:
            return len(self.reqs)

    assert fuzz_twins(on(device, Sized, filter=filter_and_return), examples=20).failure is None


def test_classes_that_are_never_empty(device: str) -> None:
    """With least_rows=1 no batch is built or filtered to nothing."""
    spec = on(device, HandwrittenBatch, least_rows=1)
    result = run_machine(twin_machine(spec), examples=20)
    assert result.failure is None
    assert not result.reached["an empty batch"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"twins": [], "rows": []}, "expected twins, got none"),
        ({"rows": ["seq_lens"]}, "seq_lens twice"),
        ({"least_rows": 5}, "use 0 <= least_rows <= most_rows"),
        ({"most_rows": 0}, "most_rows at least 1"),
        ({"max_rows": 3}, "max_rows=3, and 4 rows are built"),
        ({"merge": None}, "expected `merge` or `add`, got neither"),
        ({"lazy": ["penalty"]}, "penalty in `lazy` or `padding`, and not in"),
        ({"padding": {"length": 0}}, "length in `lazy` or `padding`, and not in"),
        ({"slots": "rows_cpu"}, "slots in 'rows_cpu'"),
        ({"ops": {"split": (len,)}}, r"ops\['split'\] is"),
        ({"ops": {"split": (len, lambda at: at, st.just(1))}}, r"ops\['split'\]: a model of 0 batches"),
        ({"ops": {"merge": (len, lambda rows: rows)}}, "the name is taken"),
        ({"ops": {"pad": (len, lambda rows: rows)}}, "the name is taken"),
        ({"ops": {"a name": (len, lambda rows: rows)}}, "choose another identifier"),
    ],
)
def test_bad_specifications_are_refused(changes: dict, message: str) -> None:
    """A specification that cannot be meant is refused when it is made."""
    with pytest.raises(ArgumentError, match=message):
        attrs.evolve(spec_of(HandwrittenBatch), **changes)
    with pytest.raises(ArgumentError, match="name an attribute that has no twin in `rows`"):
        Twin("last_token", "last_token", "device_only")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_floats_that_numpy_lacks_are_judged(device: str, dtype: torch.dtype) -> None:
    """Rows in bfloat16 or an 8-bit float are followed like others, and told from the float32 they are read as."""

    def build(self: HandwrittenBatch, reqs: list[str], lengths: list[int]) -> None:
        HandwrittenBatch.__init__(self, reqs, lengths)
        self.temperatures = torch.tensor(lengths, dtype=torch.float32, device=self.device).to(dtype)

    as_bits = torch.uint8 if dtype.itemsize == 1 else torch.int16  # not all operations take 8-bit floats

    def select(self: HandwrittenBatch, rows: torch.Tensor) -> None:
        self.temperatures = self.temperatures.view(as_bits)[rows].view(dtype)

    def merge(self: HandwrittenBatch, other: HandwrittenBatch) -> None:
        both = [one.temperatures.float() for one in (self, other)]
        HandwrittenBatch.merge_batch(self, other)
        self.temperatures = torch.cat(both).to(dtype)

    right = type("LowBatch", (HandwrittenBatch,), {"__init__": build, "_filter_sampling": select, "merge_batch": merge})
    assert fuzz_twins(on(device, right), examples=20).failure is None

    def widen(self: HandwrittenBatch, rows: torch.Tensor) -> None:
        self.temperatures = self.temperatures.float()[rows]

    report = killed(device, "MODEL", __init__=build, _filter_sampling=widen)
    assert f"changed from {str(dtype).removeprefix('torch.')} to float32" in report


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"twins": [Twin("seq_lens_cpu", "seq_len")]}, "attribute 'seq_len' of a batch just built: AttributeError"),
        ({"rows": ["reqs", "sampling.temperatures"]}, "attribute 'sampling.temperatures' of a batch just built"),
        ({"rows": ["from_lengths"]}, "attribute 'from_lengths' of a batch just built: TypeError"),
        ({"num_rows": lambda batch: len(batch.requests)}, "num_rows of a batch just built: AttributeError"),
    ],
)
def test_typing_error_in_a_specification_is_no_bug_of_the_class(changes: dict, problem: str) -> None:
    """An attribute that the spec names and the class lacks is refused before the fuzzing begins."""
    with pytest.raises(ArgumentError, match=problem):
        fuzz_twins(attrs.evolve(spec_of(HandwrittenBatch), **changes), examples=5)


def test_build_that_fails_is_left_to_the_fuzzer() -> None:
    """A class that cannot be built has a bug, and gets its shrunk program."""

    def build(rows: list[int]) -> HandwrittenBatch:
        raise KeyError("nobody builds this")

    assert fuzz_twins(attrs.evolve(spec_of(HandwrittenBatch), build=build), examples=5).code == "KeyError"


def test_dotted_attributes_are_reached() -> None:
    """Attributes of parts of a batch are named with dots."""

    class Part:
        def __init__(self) -> None:
            self.lens = [1]
            self.lens_device = torch.tensor([2])

    class Whole:
        def __init__(self) -> None:
            self.part = Part()

    spec = TwinSpec[Whole, int](
        name="Whole",
        row=st.just(1),
        build=lambda rows: Whole(),
        filter=lambda batch, keep: None,
        merge=lambda batch, other: None,
        twins=[Twin("part.lens", "part.lens_device")],
        num_rows=lambda batch: 1,
        least_rows=1,
        most_rows=1,
    )
    assert fuzz_twins(spec, examples=5).code == "MIRROR_EQUAL"
