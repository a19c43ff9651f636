"""`watch` over classes that know nothing of this library."""

import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import logging
import operator
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from batchstate import Batch, SlotPool, Violation, mirrored, slot_column
from batchstate.errors import ArgumentError, BatchStateError, DeclarationError
from batchstate.levels import checks
from batchstate.races.devices import open_device, window_of
from batchstate.testing import fuzz_twins
from batchstate.violations import Code
from batchstate.watch import Watched, audit, over_requests, watch

Req = type("Req", (), {})


@dataclasses.dataclass
class Sampling:
    temperatures: torch.Tensor
    greedy: bool
    seeds: torch.Tensor | None = None


class Engine:
    """A batch in the style of today's engines; `bug` names the line that is left out."""

    bug = ""

    def __init__(self, lengths: list[int]) -> None:
        self.reqs = [Req() for _ in lengths]
        for req, length in zip(self.reqs, lengths, strict=True):
            req.length = length
        self.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int64)
        self.orig_seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.seq_lens_sum: int | None = sum(lengths)
        self.sampling = Sampling(torch.tensor([length / 2 for length in lengths]), all(one == 1 for one in lengths))
        self.extra = {"masks": [length > 3 for length in lengths]}
        self.masked = torch.tensor([row for row, length in enumerate(lengths) if length > 3])

    def batch_size(self) -> int:
        return len(self.reqs)

    def filter_batch(self, keep: list[int]) -> None:
        self.reqs = [self.reqs[row] for row in keep]
        if self.bug != "one side":
            self.seq_lens_cpu = self.seq_lens_cpu[keep]
        self.seq_lens = self.seq_lens[keep]
        self.orig_seq_lens = self.orig_seq_lens[keep]
        self.seq_lens_sum = None
        if self.bug != "temperatures":
            self.sampling.temperatures = self.sampling.temperatures[keep if self.bug != "order" else keep[::-1]]
        self.extra["masks"] = [self.extra["masks"][row] for row in keep]
        if self.bug != "indices":
            self.masked = torch.tensor([row for row, mask in enumerate(self.extra["masks"]) if mask])

    def merge_batch(self, other: "Engine") -> None:
        self.masked = torch.cat([self.masked, other.masked + (len(self.reqs) if self.bug != "shift" else 0)]).long()
        self.reqs = self.reqs + other.reqs
        self.seq_lens_cpu = torch.cat([self.seq_lens_cpu, other.seq_lens_cpu])
        self.seq_lens = torch.cat([self.seq_lens, other.seq_lens])
        self.orig_seq_lens = torch.cat([self.orig_seq_lens, other.orig_seq_lens])
        if self.bug != "sum":
            self.seq_lens_sum = None
        self.sampling.temperatures = torch.cat([self.sampling.temperatures, other.sampling.temperatures])
        if self.bug != "greedy":
            self.sampling.greedy &= other.sampling.greedy
        self.extra["masks"] = self.extra["masks"] + other.extra["masks"]

    def prepare_for_decode(self) -> None:
        self.seq_lens = self.seq_lens + 1
        if self.bug != "host":
            self.seq_lens_cpu = self.seq_lens_cpu + 1
        self.orig_seq_lens = self.orig_seq_lens + 1
        self.seq_lens_sum = None
        if self.bug == "twice":
            self.seq_lens, self.seq_lens_cpu = self.seq_lens + 1, self.seq_lens_cpu + 1
            self.orig_seq_lens = self.orig_seq_lens + 1


class Bag:
    """A batch of any columns; `move` lets a function change it."""

    def __init__(self, **columns: Any) -> None:
        vars(self).update(columns)

    def move(self, change: Callable[..., object] = lambda *batches: None, *others: "Bag") -> None:
        change(self, *others)


def watched_bag(*rows: str, **options: Any) -> Watched:
    """`move` moves rows of these columns, known by the request."""
    of_bag: dict[str, Any] = {"num_rows": lambda bag: len(bag.reqs), "after": ["move"], "moves": ["move"]}
    return watch(Bag, key="reqs", rows=rows, **of_bag, **options)


def watched(cls: type = Engine, **changes: Any) -> Watched:
    """The declaration: what an engine's developer would write."""
    declared: dict[str, Any] = {
        "after": ["filter_batch", "merge_batch", "prepare_for_decode"],
        "num_rows": "batch_size",
        "pairs": [("seq_lens_cpu", "seq_lens"), ("seq_lens_cpu", "orig_seq_lens")],
        "rows": ["sampling.temperatures", "sampling.seeds", "extra.masks"],
        "key": "reqs",
        "moves": ["filter_batch", "merge_batch"],
        "adds": {"prepare_for_decode": {"seq_lens": 1, "seq_lens_cpu": 1, "orig_seq_lens": 1}},
        "derived": {"seq_lens_sum": lambda batch: int(batch.seq_lens_cpu.sum())},
        "implied": {"not sampling.greedy": lambda batch: any(one != 0.5 for one in batch.sampling.temperatures)},
        "indices": {"masked": "extra.masks"},
    }
    return watch(cls, **(declared | changes))


def drive() -> Engine:
    """A few steps of an engine."""
    batch = Engine([1, 1, 5])
    batch.merge_batch(Engine([2, 4]))
    batch.prepare_for_decode()
    batch.filter_batch([0, 2, 4])
    batch.merge_batch(Engine([7]))
    return batch


@contextlib.contextmanager
def reported(
    code: Code, column: str | None = None, row: int | None = None
) -> Iterator[pytest.ExceptionInfo[Violation]]:
    """A window in which a violation of this code is raised; of this column and this row, if they are named."""
    with pytest.raises(Violation) as caught:
        yield caught
    assert caught.value.code is code, caught.value
    assert column in (None, caught.value.column), caught.value
    assert row in (None, caught.value.row), caught.value


def python_calls(run: Callable[[], object]) -> list[str]:
    """The Python functions that are called in `run`, without itself."""
    names: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


def test_a_class_without_a_bug_is_silent(full: None) -> None:
    """A clean class gets no report, and its methods are as before afterwards."""
    before = dict(vars(Engine))
    with watched() as watching:
        drive()
    assert watching.counters.checked == watching.counters.calls == 4
    assert watching.counters.as_dict()["violations"] == 0
    assert dict(vars(Engine)) == before


@pytest.mark.parametrize(
    ("bug", "code", "column", "operation"),
    [
        ("one side", Code.ROW_COUNT, "seq_lens_cpu", "after filter_batch"),
        ("temperatures", Code.ROW_COUNT, "sampling.temperatures", "after filter_batch"),
        ("order", Code.ROW_KEPT, "sampling.temperatures", "after filter_batch"),
        ("indices", Code.SLOT_OUT_OF_RANGE, "masked", "after filter_batch"),
        ("shift", Code.DERIVED_STALE, "masked", "after merge_batch"),
        ("sum", Code.DERIVED_STALE, "seq_lens_sum", "after merge_batch"),
        ("greedy", Code.DERIVED_STALE, "not sampling.greedy", "after merge_batch"),
        ("host", Code.MIRROR_EQUAL, "seq_lens_cpu / seq_lens", "after prepare_for_decode"),
        ("twice", Code.ROW_KEPT, "seq_lens_cpu", "after prepare_for_decode"),
    ],
)
def test_a_forgotten_line_is_found(
    full: None, monkeypatch: pytest.MonkeyPatch, bug: str, code: Code, column: str, operation: str
) -> None:
    """Each line left out is named by class, method and column, with a remedy that speaks of the method."""
    monkeypatch.setattr(Engine, "bug", bug)

    def go() -> None:
        batch = Engine([1, 1]) if bug == "greedy" else drive()
        batch.merge_batch(Engine([2]))

    with watched(), reported(code, column) as caught:
        go()
    violation = caught.value
    assert (violation.object, violation.operation) == ("Engine", operation)
    assert operation.removeprefix("after ") in violation.remedy
    assert violation.step is not None


def test_cheap_reads_no_device_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """At `cheap` only lengths, dtypes and what the host holds are read: values that differ are left to `full`."""

    class Unreadable(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", str(func))
            assert name in ("__get__", "size", "dim"), f"{name} of a device tensor"
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    batch = Engine([3, 4])
    batch.seq_lens = batch.seq_lens.as_subclass(Unreadable)
    with checks("cheap"), watched() as watching:
        for _ in range(16):
            watching.check(batch)
    with checks("full"), watched() as watching, pytest.raises(DeclarationError, match="of a device tensor"):
        watching.check(batch)


def test_cheap_asks_derived_values_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """At `cheap` each fourth call asks one derived value, so that the cost does not grow with their number."""
    asked = []
    derived = {name: lambda batch, name=name: asked.append(name) for name in ("seq_lens_sum", "reqs")}
    with watched(derived=derived, implied={}, on_violation="log") as watching:
        for _ in range(16):
            watching.check(Engine([3]))
    assert asked == ["seq_lens_sum", "reqs"] * 2


def test_off_is_one_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checks off nothing is counted and nothing is asked."""
    monkeypatch.setattr(Engine, "bug", "one side")
    with checks("off"), watched() as watching:
        drive()
    assert watching.counters.calls == 0


def test_a_changed_dtype_is_found() -> None:
    """Merged with an empty float tensor, integers become floats: found at `cheap`."""
    batch = Engine([4, 5])
    with watched(indices={}) as watching:
        watching.check(batch)
        batch.seq_lens = batch.seq_lens.float()
        with reported(Code.ROW_KEPT, "seq_lens") as caught:
            watching.check(batch, "after merge_batch")
    assert (caught.value.expected, caught.value.actual) == ("torch.int64", "torch.float32")
    assert caught.value.remedy.startswith("`Engine.merge_batch` changes the dtype of 'seq_lens'")


def test_functions_without_a_name_are_columns_apart(full: None) -> None:
    """Two `functools.partial` are two columns, as two lambdas are."""

    def entries(name: str, batch: Engine) -> Any:
        return getattr(batch, name).tolist()

    pair = functools.partial(entries, "seq_lens_cpu"), functools.partial(entries, "seq_lens")
    batch = Engine([3, 4])
    batch.seq_lens = batch.seq_lens + 1
    with watched(pairs=[pair], adds={}) as watching, reported(Code.MIRROR_EQUAL, "column 0 / column 1"):
        watching.check(batch)


def test_a_function_under_the_name_of_an_attribute_is_called(full: None) -> None:
    """`operator.attrgetter` under a label reads what it was made for, not the attribute of that name."""
    batch: Any = Engine([3, 4])
    batch.lengths = [3, 4]
    with watched(rows=[("reqs", operator.attrgetter("lengths"))]) as watching:
        watching.check(batch)
        batch.lengths = [3]
        with reported(Code.ROW_COUNT, "reqs"):
            watching.check(batch)


def test_twins_that_share_memory_are_found(full: None) -> None:
    """On a CPU a device side made by `.to` is the host side, and can never differ."""
    batch = Engine([4, 5])
    batch.seq_lens = batch.seq_lens_cpu.to("cpu")
    with watched() as watching, reported(Code.MIRROR_ALIASED):
        watching.check(batch)


def test_a_bound_may_be_larger(full: None) -> None:
    """An `upper_bound` pair allows a larger host side and no smaller one."""
    batch = Engine([4, 5])
    pairs = [("seq_lens_cpu", "seq_lens", "upper_bound")]
    with watched(pairs=pairs, adds={}) as watching:
        batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens_cpu + 1, None
        watching.check(batch)
        batch.seq_lens = batch.seq_lens + 2
        with reported(Code.MIRROR_BOUND):
            watching.check(batch)


class Rows:
    """Buffers longer than the batch; the last row moves into a hole; rows are known by id."""

    def __init__(self) -> None:
        self.ids: list[str | None] = []
        self.tokens = np.zeros((8, 6), dtype=np.int32)
        self.counts = np.zeros(8, dtype=np.int32)
        self.top_p_cpu = torch.zeros(8)
        self.top_p = torch.full((8,), 9.0)
        self.generators: dict[int, str] = {}
        self.forget = ""

    def num(self) -> int:
        return sum(one is not None for one in self.ids)

    def add(self, name: str, tokens: list[int], top_p: float) -> None:
        row = len(self.ids)
        self.ids.append(name)
        self.tokens[row, : len(tokens)] = tokens
        self.counts[row] = len(tokens)
        self.top_p_cpu[row] = top_p
        self.generators[row] = f"generator of {name}"

    def remove(self, name: str) -> None:
        row = self.ids.index(name)
        self.ids[row] = None
        self.generators.pop(row)

    def condense(self) -> None:
        while None in self.ids:
            last, hole = len(self.ids) - 1, self.ids.index(None)
            name = self.ids.pop()
            if name is None:
                continue
            self.ids[hole] = name
            self.top_p_cpu[hole] = self.top_p_cpu[last]
            if self.forget != "tokens":
                self.tokens[hole] = self.tokens[last]
            if self.forget != "counts":
                self.counts[hole] = self.counts[last]
            if self.forget != "generators":
                self.generators[hole] = self.generators.pop(last)

    def refresh(self) -> None:
        if self.nucleus:
            self.top_p[: self.num()] = self.top_p_cpu[: self.num()]

    @property
    def nucleus(self) -> bool:
        return bool((self.top_p_cpu[: self.num()] < 1).any())


def watched_rows() -> Watched:
    """The declaration of rows by id."""
    return watch(
        Rows,
        after=["condense", "refresh"],
        num_rows="num",
        pairs=[("top_p_cpu", "top_p")],
        rows=["tokens", "counts", "generators", "ids"],
        key="ids",
        moves=["condense"],
        when={"top_p": "nucleus"},
        upto={"tokens": "counts"},
        buffers=True,
    )


def condensed(forget: str = "") -> Rows:
    """Four rows without the first."""
    rows = Rows()
    rows.forget = forget
    for number, name in enumerate("abcd"):
        rows.add(name, list(range(number, 2 * number + 1)), 1.0)
    rows.remove("a")
    rows.condense()
    return rows


def test_rows_by_key_in_long_buffers(full: None) -> None:
    """Rows that are known by id may move anywhere; buffers are longer than the batch, and rows end in garbage."""
    with watched_rows() as watching:
        rows = condensed()
        rows.tokens[0, 5] = 77  # behind the tokens of its request
        rows.refresh()  # not copied: nobody uses top_p, so the pair is left alone
        rows.top_p_cpu[1] = 0.5
        rows.refresh()
        assert watching.counters.violations.total() == 0
        rows.top_p_cpu[1] = 0.25
        with reported(Code.MIRROR_EQUAL, row=1):
            watching.check(rows)


@pytest.mark.parametrize(
    ("forget", "column", "code"),
    [
        ("tokens", "tokens", Code.ROW_KEPT),
        ("counts", "counts", Code.ROW_KEPT),
        ("generators", "generators", Code.SLOT_OUT_OF_RANGE),
    ],
)
def test_a_row_that_stays_behind_is_found(full: None, forget: str, column: str, code: Code) -> None:
    """What `condense` leaves behind is named with column and request, a column of lengths before what it measures."""
    with watched_rows(), reported(code, column) as caught:
        condensed(forget)
    assert ("request 'd'" in caught.value.problem) == (code is Code.ROW_KEPT)


def test_a_pair_of_lengths_is_compared_first(full: None) -> None:
    """Of two pairs, the one whose column says how long the rows of the other are is reported, whatever their order."""
    tokens, tokens_gpu = torch.ones(2, 4), torch.ones(2, 4)
    tokens_gpu[1, 2] = 9
    lengths = {"lengths": torch.tensor([2, 3]), "lengths_gpu": torch.tensor([2, 2])}
    pairs = [("tokens", "tokens_gpu"), ("lengths", "lengths_gpu")]
    upto = {"tokens": "lengths", "tokens_gpu": "lengths"}
    watching = watch(Bag, after=["move"], num_rows=lambda bag: 2, pairs=pairs, upto=upto)
    with watching, reported(Code.MIRROR_EQUAL, "lengths / lengths_gpu"):
        watching.check(Bag(tokens=tokens, tokens_gpu=tokens_gpu, **lengths))


def test_long_buffers_that_were_not_declared_are_told(full: None) -> None:
    """If a tensor is longer than the batch at its first check, the remedy names `buffers`; if it grew later, not."""
    rows, batch = condensed(), Engine([3, 4])
    watching = watch(Rows, after=["condense"], num_rows="num", rows=["top_p_cpu"])
    with watching, reported(Code.ROW_COUNT) as caught:
        watching.check(rows)
    assert "has 8 rows in a batch of 3" in caught.value.problem
    assert "declare buffers=True, or, in a prefill alone, `when`" in caught.value.remedy
    with watched() as watching:
        watching.check(batch)
        batch.seq_lens = torch.cat([batch.seq_lens, batch.seq_lens])
        with reported(Code.ROW_COUNT) as caught:
            watching.check(batch)
    assert "buffers" not in caught.value.remedy


def _bad(batch: Any) -> Any:
    raise ArgumentError("a function of the declaration failed")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"key": "requests"}, "key: AttributeError: .* no attribute 'requests'"),
    ({"key": lambda batch: 3}, "key: TypeError"),
    ({"num_rows": "size"}, "num_rows: AttributeError"),
    ({"num_rows": "reqs"}, r"num_rows: expected a number, got a list; .*lambda batch: len\("),
    ({"num_rows": _bad}, "num_rows: ArgumentError: a function of the declaration failed"),
    ({"rows": ["temps"]}, "column 'temps': AttributeError"),
    ({"rows": ["sampling.greedy"]}, "column 'sampling.greedy': TypeError"),
    ({"rows": ["extra.maks"]}, "column 'extra.maks': KeyError: 'maks'"),
    ({"rows": [("made", _bad)]}, "a function of the declaration failed"),
    ({"derived": {"sampling.greedy": lambda batch: batch.total}}, r"derived\['sampling.greedy'\]: AttributeError"),
    ({"implied": {"sampling.greedy": lambda batch: "many"}}, r"implied\['sampling.greedy'\]: "),
    ({"when": {"seq_lens": "fresh"}}, r"when\['seq_lens'\]: AttributeError"),
    ({"upto": {"extra.masks": "num"}}, r"upto\['extra.masks'\]: AttributeError"),
    ({"indices": {"mask": "extra.masks"}}, r"indices\['mask'\]: AttributeError"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
@pytest.mark.parametrize("lag", [None, 1])
def test_a_failing_declaration_leaves_the_engine_alone(
    full: None, changes: dict[str, Any], message: str, lag: int | None
) -> None:
    """Whatever of a declaration fails: the method runs, and the error says which argument it was."""
    found: list[BatchStateError] = []
    with watched(before=["filter_batch"], lag=lag, on_violation=found.append, **changes) as watching:
        batch = drive()
        batch.filter_batch([1])
        watching.flush()
    assert batch.seq_lens.tolist() == [6]
    assert not [error for error in found if not isinstance(error, DeclarationError)]
    said = [str(error) for error in found if re.search(message, str(error))]
    if lag is None:
        assert said
        assert len(said) == len(found)
        with watched(**changes), pytest.raises(DeclarationError, match=message):
            drive()


def test_each_failing_argument_is_logged_once(full: None, caplog: pytest.LogCaptureFixture) -> None:
    """With `log`, two arguments that fail are two lines, however often they fail, and no call of the engine is lost."""
    with caplog.at_level(logging.ERROR), watched(key="requests", num_rows="size", on_violation="log"):
        assert drive().seq_lens.tolist() == [2, 6, 5, 7]
    assert sorted(re.findall(r": (key|num_rows): ", caplog.text)) == ["key", "num_rows"]


def test_what_a_function_for_violations_raises_goes_on(full: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of `on_violation` itself is the caller's, and is not taken for a failure of the declaration."""

    def refuse(error: BatchStateError) -> None:
        raise KeyError("mine")

    monkeypatch.setattr(Engine, "bug", "host")
    with watched(adds={}, on_violation=refuse) as watching, pytest.raises(KeyError, match="mine"):
        Engine([3]).prepare_for_decode()
    assert watching.counters.as_dict()["violations"] == 1


def test_cheap_makes_few_python_calls() -> None:
    """A checked call at `cheap` makes at most as many calls of Python functions as it did when this was written."""
    batch = Engine([3, 4])
    plain: dict[str, Any] = {
        "pairs": [("seq_lens_cpu", "seq_lens")],
        "rows": ["orig_seq_lens"],
        "moves": [],
        "adds": {},
    }
    with checks("cheap"), watched(**plain, derived={}, implied={}, indices={}):
        batch.prepare_for_decode()
        assert len(python_calls(batch.prepare_for_decode)) <= 14


def test_between_samples_a_call_costs_one_call_of_python() -> None:
    """With `lag` and `every` a call that takes no sample runs the hook and the method, and nothing else."""
    batch = Engine([3, 4])
    with checks("cheap"), watched(lag=1, every=100) as watching:
        for _ in range(3):  # a sample, its comparison
            batch.prepare_for_decode()
        assert python_calls(batch.prepare_for_decode) == ["watched", "prepare_for_decode"]
    assert (watching.counters.calls, watching.counters.samples, watching.counters.compared) == (4, 1, 1)


def test_cheap_asks_what_follows_from_the_requests_in_one_question() -> None:
    """At `cheap` one call asks all values that are declared over the requests, so that a wrong last one is found."""
    flags = {name: over_requests(any, lambda req: req.length > 3) for name in ("first", "second", "third")}
    with checks("cheap"), watched(implied=flags, derived={}) as watching:
        batch: Any = Engine([3, 5])
        batch.first = batch.second = True
        batch.third = False
        for _ in range(3):
            watching.check(batch)
        with reported(Code.DERIVED_STALE, "third"):
            watching.check(batch)


def test_a_path_finds_its_way_anew(full: None) -> None:
    """A dictionary on a path may become an object, or None, and a dictionary again: the column is read each time."""
    batch: Any = Engine([3, 4])
    with watched(rows=["extra.masks"], indices={}, moves=[], adds={}) as watching:
        for extra in ({"masks": [1]}, dataclasses.make_dataclass("Extra", ["masks"])([1]), {"masks": [1]}):
            batch.extra = {"masks": [1, 2]}
            watching.check(batch)
            batch.extra = None
            watching.check(batch)
            batch.extra = extra
            with reported(Code.ROW_COUNT, "extra.masks"):
                watching.check(batch)


def test_full_makes_few_python_calls(full: None) -> None:
    """A checked call at `full` makes at most as many calls of Python functions as it did, whatever the rows."""
    calls: list[int] = []
    flags = {"not sampling.greedy": over_requests(any, lambda req: req.length != 1)}
    for n in (2, 256):
        batch = Engine([3] * n)
        with watched(derived={"reqs": lambda batch: batch.reqs}, implied=flags):
            for _ in range(2):
                batch.filter_batch(list(range(n)))
                calls.append(len(python_calls(batch.prepare_for_decode)))
    assert calls[1] == calls[3] <= 99


@pytest.mark.parametrize(
    "entries",
    [[None, [3]], [[3], None], [1, [3]], ["a", [3]], [[3], [4]], [1, torch.tensor([3])], [True, {3}], [{"a": 1}, None]],
)
def test_entries_that_change_in_place_are_found(full: None, entries: list[Any]) -> None:
    """Whatever the kinds of entries in a list: one that a moving method changes in place is named."""

    def change(bag: Any) -> None:
        for entry in bag.wants:
            if isinstance(entry, torch.Tensor):
                entry.fill_(5)
            elif isinstance(entry, list | set | dict):
                entry.clear()

    with watched_bag("wants"):
        bag = Bag(reqs=["a", "b"], wants=entries)
        bag.move()
        with reported(Code.ROW_KEPT, "wants"):
            bag.move(change)


@pytest.mark.parametrize("column", ["lengths", "wants", "marks", "reqs"])
@pytest.mark.parametrize("undone", [False, True])
def test_what_changes_between_two_calls_is_read_again(full: None, column: str, undone: bool) -> None:
    """Entries written past the counters of torch have to be kept; a method that brings old ones back is named."""

    def move(bag: Any, undo: bool = False) -> None:
        bag.reqs, bag.wants, bag.marks, bag.lengths = bag.reqs[:], bag.wants[:], bag.marks[:], bag.lengths.clone()
        if undo and column != "reqs":
            setattr(bag, column, old[column])
        elif undo:
            bag.marks[:2] = "xx"

    def columns() -> dict[str, Any]:
        return {"lengths": torch.tensor([3, 4, 5]), "wants": [[1], [2], [3]], "marks": list("xyz")}

    with watched_bag("lengths", "wants", "marks"):
        bag: Any = Bag(reqs=[Req() for _ in range(3)], **columns())
        bag.move(move)
        old = columns()
        bag.lengths.numpy()[1] += 7
        bag.wants[1].append(9)
        bag.marks[1] = "changed"
        bag.reqs[1] = Req()
        bag.move(move)
        if undone:
            with reported(Code.ROW_KEPT, "marks" if column == "reqs" else column, 1):
                bag.move(functools.partial(move, undo=True))


def test_columns_that_come_into_use_are_compared(full: None) -> None:
    """Of two merged batches one lacks a column, or has it as a list: the others are compared none the less."""

    def bag(names: str, extra: Any) -> Bag:
        return Bag(reqs=list(names), lengths=torch.arange(len(names)), slots=torch.arange(len(names)) + 5, extra=extra)

    def merge(bag: Any, other: Any) -> None:
        bag.reqs, bag.extra = bag.reqs + other.reqs, None
        bag.lengths, bag.slots = torch.cat([bag.lengths, other.lengths]), torch.cat([bag.slots, other.slots])

    def merge_wrongly(bag: Any, other: Any) -> None:
        merge(bag, other)
        bag.slots = bag.slots.roll(1)

    with watched_bag("lengths", "slots", "extra", when={"extra": None}):
        for extra in (None, torch.arange(2), torch.arange(2), [1, 2]):
            bag("ab", None).move(merge, bag("cd", extra))
            with reported(Code.ROW_KEPT, "slots"):
                bag("ab", extra).move(merge_wrongly, bag("cde", None))


def test_columns_with_gaps_are_compared(full: None) -> None:
    """A column may be one of a table, alone or beside others whose memory is whole."""

    class Table(Engine):
        def filter_batch(self, keep: list[int]) -> None:
            super().filter_batch(keep)
            self.sampling.temperatures = torch.stack([self.sampling.temperatures] * 2, dim=1)[:, 0]
            self.seq_lens_cpu = torch.stack([self.seq_lens_cpu] * 2, dim=1)[:, 0]

    with watched(Table):
        batch = Table([3, 4, 5])
        for _ in range(3):
            batch.filter_batch([0, 1, 2])
        batch.bug = "order"
        with reported(Code.ROW_KEPT, "sampling.temperatures"):
            batch.filter_batch([0, 1, 2])


# What follows from the requests


@pytest.mark.parametrize("level", ["cheap", "full"])
def test_a_flag_that_a_request_needs_is_found(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that ignores who joins is found through the requests, each of which is asked once and not kept alive."""
    asked: list[int] = []

    def wants(req: Any) -> bool:
        asked.append(id(req))
        return bool(req.length != 1)

    flags = {"not sampling.greedy": over_requests(any, wants), "longest": over_requests(max, lambda r: r.length)}
    with checks(level), watched(implied=flags, derived={}):
        batch: Any = Engine([1, 1])
        other = Engine([1])
        batch.longest = 9
        for _ in range(4):
            batch.prepare_for_decode()
        batch.merge_batch(other)
        assert len(asked) == len(set(asked)) == (3 if level == "full" else 2)
        gone = weakref.ref(batch.reqs[0])
        batch.filter_batch([1, 2])
        assert gone() is None
        monkeypatch.setattr(Engine, "bug", "greedy")
        joining = [Engine([4]) for _ in range(8)]
        with reported(Code.DERIVED_STALE, "not sampling.greedy"):
            collections.deque(map(batch.merge_batch, joining), maxlen=0)


@pytest.mark.parametrize(("by_value", "in_their_place"), [(False, False), (True, True), (False, True)])
def test_requests_are_known_by_identity_from_one_call_to_the_next(
    full: None, by_value: bool, in_their_place: bool
) -> None:
    """What was asked in the last call is used again for the same requests, and for no others in their place."""
    like: dict[str, Any] = {"__eq__": lambda one, other: True, "__hash__": lambda one: 1}
    equal = type("equal", (), {"wants": False, **(like if by_value else {})})
    replacing = type("replacing", (), {"wants": True, **(like if in_their_place else {})})
    asked: list[Any] = []

    def wants(req: Any) -> bool:
        asked.append(req)
        return bool(req.wants)

    flags = {"not sampling.greedy": over_requests(any, wants)}
    with watched(implied=flags, derived={}, indices={}, moves=[], adds={}):
        batch, other = Engine([1] * 3), Engine([1] * 2)
        batch.reqs, other.reqs = [equal() for _ in range(3)], [equal() for _ in range(2)]
        batch.prepare_for_decode()
        batch.prepare_for_decode()
        batch.merge_batch(other)
        assert len(asked) == len({id(one) for one in asked}) == 5
        gone = weakref.ref(batch.reqs[1])
        asked.clear()
        batch.filter_batch([0, 2, 3, 4])
        assert gone() is None
        for row in (0, 3, 2):
            before = batch.reqs[row]
            batch.reqs[row] = replacing()
            with pytest.raises(Violation, match="greedy"):
                batch.prepare_for_decode()
            batch.reqs[row] = before
            batch.prepare_for_decode()
    assert len(asked) == 3


def test_rows_without_a_request_are_not_compared(full: None) -> None:
    """Of a row without a request nothing is kept from one call to the next: it may change, and says nothing."""

    class Holes(Engine):
        def filter_batch(self, keep: list[int]) -> None:
            before = self.sampling.temperatures.clone()
            before[1] = 99.0
            self.sampling.temperatures = before[keep]

    flags = {"sampling.greedy": over_requests(all, lambda req: req.length == 1)}
    with watched(Holes, derived=flags, implied={}, indices={}, adds={}, moves=["filter_batch"]):
        batch: Any = Holes([1, 1, 1])
        batch.reqs[1] = None
        for _ in range(3):
            batch.prepare_for_decode()
            batch.filter_batch([0, 1, 2])
            batch.sampling.temperatures[1] = 0.5
        batch.reqs[0], batch.sampling.greedy = Req(), False
        batch.reqs[0].length = 2
        batch.prepare_for_decode()
        batch.sampling.greedy = True
        with pytest.raises(Violation, match=r"'sampling.greedy' is not what follows"):
            batch.filter_batch([0, 1, 2])


def test_what_is_remembered_may_go_while_it_is_looked_up(full: None) -> None:
    """Another thread, or the end of another batch, may take away the rows of the last call."""
    batch: Any = Engine([1, 1])
    batch.ones = True
    with watched(derived={"ones": over_requests(all, lambda req: req.length == 1)}, implied={}) as watching:
        answers: Any = watching.declared.answers
        watching.check(batch)
        answers.last = lambda: (answers.forget(), batch)[1], *answers.last[1:]
        watching.check(batch)


@pytest.mark.parametrize("end", ["empty", "cheap", "stop"])
def test_requests_are_let_go_of(full: None, end: str) -> None:
    """What the last call left is kept no longer than it is of use: not of a batch without rows, nor without `full`."""
    batch: Any = Engine([1, 1])
    batch.ones = True
    with watched(derived={"ones": over_requests(all, lambda req: req.length == 1)}, implied={}) as watching:
        batch.prepare_for_decode()
        gone = weakref.ref(batch.reqs[0])
        batch.reqs = []
        assert gone() is not None
        if end == "empty":
            batch.prepare_for_decode()
        elif end == "cheap":
            with checks("cheap"):
                Engine([1]).prepare_for_decode()
        else:
            watching.stop()
        assert gone() is None


def test_a_function_in_adds_is_called_round_its_method_alone(full: None) -> None:
    """It need not be in `rows`, is named in reports, and takes part in the fuzzing."""
    called: list[int] = []

    def steps(batch: Any) -> list[int]:
        called.append(len(batch.reqs))
        return [getattr(req, "steps", 0) for req in batch.reqs]

    class Counting(Engine):
        def prepare_for_decode(self) -> None:
            super().prepare_for_decode()
            for req in self.reqs[: -1 if self.bug == "last" else None]:
                req.steps = getattr(req, "steps", 0) + 1

    adds = {"prepare_for_decode": {"seq_lens_cpu": 1, "seq_lens": 1, "orig_seq_lens": 1, steps: 1}}
    with watched(Counting, adds=adds) as watching:
        batch = Counting([1, 2, 3])
        batch.merge_batch(Counting([4]))
        batch.filter_batch([0, 3])
        assert not called
        batch.prepare_for_decode()
        assert called == [2, 2]
        Counting.bug = "last"
        with reported(Code.ROW_KEPT, "steps", 1):
            batch.prepare_for_decode()
    calls: dict[str, Any] = {"build": Counting, "filter": Counting.filter_batch, "merge": Counting.merge_batch}
    spec = watching.spec(row=st.integers(1, 9), advance="prepare_for_decode", **calls)
    result = fuzz_twins(spec, examples=20)
    assert (result.code, "steps" in str(result.failure)) == ("MODEL", True)
    Counting.bug = ""
    result = fuzz_twins(spec, examples=20)
    assert result.failure is None
    assert "steps" not in result.unproved


def test_nothing_is_read_of_a_batch_without_requests(full: None) -> None:
    """A function that needs a row is not called for a batch that has none, before a method as behind it."""

    def first(batch: Engine) -> list[int]:
        return [batch.reqs[0].length for _ in batch.reqs] or batch.reqs[0].length

    with watched(rows=[first], moves=["merge_batch"], adds={"prepare_for_decode": {first: 0}}) as watching:
        batch = Engine([])
        batch.prepare_for_decode()
        batch.merge_batch(Engine([]))
        batch.merge_batch(Engine([2]))
    assert watching.counters.checked == 3


def test_a_function_in_adds_that_fails_is_named(full: None) -> None:
    """As a column of `rows` would be."""
    with (
        watched(adds={"prepare_for_decode": {"seq_lens": 1, (lambda batch: batch.absent): 1}}),
        pytest.raises(DeclarationError, match=r"column .*absent"),
    ):
        Engine([1, 2]).prepare_for_decode()


@pytest.mark.parametrize("flag", [True, torch.tensor(True)])
def test_a_value_that_was_right_may_become_wrong(full: None, flag: Any) -> None:
    """What was right for the same requests is not asked again, unless it is another value or may change in place."""
    batch: Any = Engine([1, 1])
    batch.short = flag
    with watched(derived={"short": over_requests(all, lambda req: req.length == 1)}, implied={}) as watching:
        watching.check(batch)
        watching.check(batch)
        batch.short = False if flag is True else flag.fill_(False)
        with pytest.raises(Violation, match="'short' is not what follows"):
            watching.check(batch)


# What happens to a violation


def test_violations_are_logged_once_for_each_place(
    full: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`log` lets the engine go on, logs a place once, and counts every violation."""
    monkeypatch.setattr(Engine, "bug", "host")
    batch = Engine([3])
    with caplog.at_level(logging.ERROR), watched(adds={}, on_violation="log") as watching:
        for _ in range(5):
            batch.prepare_for_decode()
    assert len(caplog.records) == 2  # two pairs
    assert watching.counters.as_dict()["violations_MIRROR_EQUAL"] == 10


def test_violations_are_handed_to_a_function(full: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function gets each violation, and may call the class itself."""
    monkeypatch.setattr(Engine, "bug", "host")
    batch, found = Engine([3]), []

    def keep(error: BatchStateError) -> None:
        found.append(error)
        batch.prepare_for_decode()

    with watched(adds={}, pairs=[("seq_lens_cpu", "seq_lens")], on_violation=keep):
        batch.prepare_for_decode()
    assert [error.as_dict()["code"] for error in found if isinstance(error, Violation)] == ["MIRROR_EQUAL"]


def test_every_nth_call_is_checked(full: None) -> None:
    """`every=3` checks the first call of each method, and each third behind it."""
    with watched(every=3) as watching:
        drive()
        drive()
    assert (watching.counters.calls, watching.counters.checked) == (8, 4)


@pytest.mark.parametrize("lag", [None, 1])
def test_methods_that_are_called_in_turn_are_checked_each(
    full: None, lag: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`every` divides by the number of methods in a step: each of them is still checked."""
    monkeypatch.setattr(Engine, "bug", "one side")
    found: list[BatchStateError] = []
    options: dict[str, Any] = {"lag": lag, "every": 4, "on_violation": found.append, "moves": [], "adds": {}}
    with watched(**options) as watching:
        for _ in range(9):
            batch = Engine([1, 2, 3])
            batch.prepare_for_decode()
            batch.filter_batch([1, 2])
    assert {one.operation for one in found if isinstance(one, Violation)} == {"after filter_batch"}
    assert watching.counters.checked == 6


def test_methods_keep_what_they_return_and_raise() -> None:
    """A hook is seen by nobody: the result, the error, the name and the docstring are the method's."""

    class Small:
        def __init__(self) -> None:
            self.rows = [1]

        def __len__(self) -> int:
            return len(self.rows)

        def step(self, fail: bool = False) -> "Small":
            """Step."""
            if fail:
                raise KeyError("theirs")
            return Small()

        @classmethod
        def make(cls) -> "Small":
            return cls()

    def use(first: int, batch: Small) -> int:
        return first + len(batch)

    module = type("Module", (), {"use": staticmethod(use)})
    with watch(Small, after=["step"], before=[(module, "use"), "make"], num_rows=len, rows=["rows"]) as watching:
        assert isinstance(Small().step(), Small)
        assert (Small.step.__name__, Small.step.__doc__) == ("step", "Step.")
        assert isinstance(Small.make(), Small)
        assert module.use(2, batch=Small()) == 3  # type: ignore[attr-defined]
        with pytest.raises(KeyError, match="theirs"):
            Small().step(fail=True)
    assert watching.counters.checked == 3
    assert module.use(2, Small()) == 3  # type: ignore[attr-defined]


def test_base_and_subclass_are_watched_apart() -> None:
    """A watch of a subclass leaves its base alone; with both, objects are checked once, by their own declaration."""

    class Sub(Engine):
        pass

    with watched(Sub) as watching:
        Engine([2]).prepare_for_decode()
        Sub([2]).prepare_for_decode()
        assert watching.counters.calls == 1
    assert "prepare_for_decode" not in vars(Sub)
    for first, second in ((Engine, Sub), (Sub, Engine)):
        with watched(first) as one, watched(second) as other:
            Sub([2]).prepare_for_decode()
            sub = one if first is Sub else other
            assert (sub.counters.calls, one.counters.calls + other.counters.calls) == (1, 1)
            Engine([2]).prepare_for_decode()
            assert one.counters.calls == other.counters.calls == 1


def test_a_hook_under_another_does_nothing_once_stopped() -> None:
    """Who wraps a watched method keeps what he wrapped: the hook below lets calls through."""

    class Own(Engine):
        def filter_batch(self, keep: list[int]) -> None:
            super().filter_batch(keep)

    watching = watched(Own, after=["filter_batch"], moves=[], adds={})
    inner = Own.filter_batch
    setattr(Own, "filter_batch", lambda self, keep: inner(self, keep))  # noqa: B010
    watching.stop()
    watching.stop()
    Own([2, 3]).filter_batch([1])
    assert watching.counters.calls == 0


@pytest.mark.parametrize("lag", [None, 1])
def test_threads(full: None, lag: int | None) -> None:
    """Calls of many threads are all counted, none as one inside another; each thread has samples of its own."""
    with watched(lag=lag) as watching:
        threads = [threading.Thread(target=lambda: [drive() for _ in range(5)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        watching.flush()
    counters = watching.counters
    assert counters.calls == counters.checked == 80
    assert counters.samples == (0 if lag is None else 80)
    assert (counters.compared, counters.violations.total()) == (80, 0)


def test_a_finalizer_calls_a_hooked_method_while_figures_are_read() -> None:
    """Garbage is collected anywhere, in the thread of an exporter of metrics too: it does not wait for itself."""

    class Held:
        def __del__(self) -> None:
            Engine([3]).prepare_for_decode()

    class Collecting(Counter[str]):
        def copy(self) -> "Collecting":
            gc.collect()
            return self

    with watched() as watching:
        vars(watching)["_violations"] = Collecting()
        held: Any = Held()
        held.itself = held
        del held
        thread = threading.Thread(target=lambda: watching.counters, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert watching.counters.checked == 1


class Made(Engine):
    """Batches that class methods make, of lists of batches."""

    short = False

    @classmethod
    def of(cls, lengths: list[int]) -> "Made":
        batch = cls(lengths)
        if cls.short:
            batch.seq_lens_cpu = batch.seq_lens_cpu[1:]
        return batch

    @classmethod
    def joined(cls, batches: list["Made"]) -> "Made":
        whole = cls([])
        for one in batches:
            whole.merge_batch(one)
        if cls.short:
            whole.sampling.temperatures = whole.sampling.temperatures.flip(0)
        return whole

    def split(self) -> list["Made"]:
        parts = [copy.copy(self), copy.copy(self)]
        for row, part in enumerate(parts):
            part.sampling = copy.copy(self.sampling)
            part.extra = dict(self.extra)
            part.filter_batch([row])
        if self.short:
            parts[1].seq_lens = parts[1].seq_lens + 1
        return parts


@pytest.mark.parametrize("method", ["of", "joined", "split"])
def test_what_class_methods_return_and_lists_hold_is_checked(
    full: None, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Checked are a batch that a class method makes, those in a list that is passed, and each of a returned list."""

    def call() -> object:
        if method == "of":
            return Made.of([3, 4])
        return Made.joined([Made([3]), Made([4])]) if method == "joined" else Made([3, 4]).split()

    hooks: dict[str, Any] = {"after": [method], "moves": [] if method == "of" else [method], "adds": {}}
    with watched(Made, **hooks) as watching:
        call()
        assert watching.counters.checked == watching.counters.calls == 1
        monkeypatch.setattr(Made, "short", True)
        with pytest.raises(Violation) as caught:
            call()
    expected = {"of": Code.ROW_COUNT, "joined": Code.ROW_KEPT, "split": Code.MIRROR_EQUAL}
    assert caught.value.code is expected[method]


def test_a_short_column_behind_a_moving_method_is_found(full: None) -> None:
    """A method in `moves` and not in `after` that leaves a column too short is named; a device side may be late."""

    class Late(Engine):
        def filter_batch(self, keep: list[int]) -> None:
            before = self.seq_lens
            super().filter_batch(keep)
            self.seq_lens = before[:1]
            self.sampling.temperatures = self.sampling.temperatures[: self.kept]

        kept = 2

    with watched(Late, after=["prepare_for_decode"], moves=["filter_batch"], adds={}):
        batch = Late([3, 4, 5])
        batch.filter_batch([0, 2])
        Late.kept = 1
        with reported(Code.ROW_COUNT, "sampling.temperatures"):
            Late([3, 4, 5]).filter_batch([0, 2])


def test_objects_are_copied_and_die() -> None:
    """A watch keeps nothing of the objects: copies are watched, and the dead are gone."""
    with watched():
        batch = drive()
        copy.deepcopy(batch).prepare_for_decode()
        alive = weakref.ref(batch)
        del batch
        gc.collect()
        assert alive() is None


# In production: a step later, without a wait


@pytest.mark.parametrize("device", ["cpu", "sim:lazy", "sim:random", "sim:pct"])
def test_a_write_on_the_device_is_named_without_a_wait(device: str) -> None:
    """A kernel writes one row: named by column, row and step within `every` steps, 0 syncs, one launch and one copy."""
    found: list[BatchStateError] = []
    with window_of(open_device(device, seed=3)) as rt:
        batch = Engine([3, 4, 5])
        for name in ("seq_lens", "orig_seq_lens"):
            setattr(batch, name, rt.upload([getattr(batch, name).numpy()]).view(0).clone())
        options: dict[str, Any] = {"lag": 1, "every": 4, "runtime": rt, "on_violation": found.append}
        with watched(moves=[], adds={}, **options) as watching:
            before = rt.counters.snapshot()
            for step in range(40):
                batch.prepare_for_decode()
                if step == 17:
                    batch.seq_lens[1] += 5
            spent = rt.counters - before
            watching.flush()
        counters = watching.counters
        rt.synchronize()
    assert spent.forced_syncs == spent.fence_waits == spent.check_reads == 0
    assert spent.device_operations == spent.device_to_host_copies == counters.samples
    assert counters.samples + counters.skipped == 10  # `sim:lazy` runs nothing before somebody waits
    assert counters.compared == counters.samples
    first = found[0]
    assert isinstance(first, Violation)
    assert (first.code, first.column, first.row) == (Code.MIRROR_EQUAL, "seq_lens_cpu / seq_lens", 1)
    assert first.step in range(18, 18 + 5)


def test_a_view_with_gaps_is_sampled() -> None:
    """A device side may be a column of a table: its entries are packed, and compared."""

    class Table(Engine):
        wrong = 0

        def filter_batch(self, keep: list[int]) -> None:
            super().filter_batch(keep)
            self.seq_lens = torch.stack([self.seq_lens + self.wrong] * 2, dim=1)[:, 0]

    with watched(Table, lag=1, moves=[], adds={}) as watching:
        batch = Table([3, 4, 5])
        batch.filter_batch([0, 2])
        watching.flush()
        batch.filter_batch([0])
        watching.flush()
        batch.wrong = 1
        batch.filter_batch([0])
        with reported(Code.MIRROR_EQUAL, "seq_lens_cpu / seq_lens"):
            watching.flush()
    assert watching.counters.compared == 3


def test_the_audit_raises_before_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `lag=1` a call that was wrong is reported by the next one, before that one has done anything."""
    batch = Engine([3, 4])
    with watched(lag=1):
        batch.prepare_for_decode()
        batch.prepare_for_decode()
        monkeypatch.setattr(Engine, "bug", "host")
        batch.prepare_for_decode()
        before = batch.seq_lens
        with pytest.raises(Violation) as caught:
            batch.prepare_for_decode()
    assert batch.seq_lens is before
    assert (caught.value.code, caught.value.operation, caught.value.step) == (
        Code.MIRROR_EQUAL,
        "after prepare_for_decode",
        3,
    )


class Decode(Batch):
    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    scales = mirrored(torch.float32)


@pytest.mark.parametrize("device", ["cpu", "sim:random", "sim:pct", "race"])
def test_a_batch_of_the_library_is_audited(device: str) -> None:
    """A kernel that writes a row is named within `every` calls, 0 syncs, one launch and one copy a sample; not else."""
    found: list[BatchStateError] = []
    with checks("cheap"), window_of(open_device(device, seed=3)) as rt:
        pool = SlotPool(rt, size=8)
        batch = Decode.build(rt, slots=pool.take(3), seq_lens=[3, 4, 5], scales=[0.5, 1.0, 2.0])
        with audit(Decode, every=4, on_violation=found.append) as watching:
            spent: Counter[str] = Counter()
            for step in range(40):
                lens = batch.on_device("seq_lens")["seq_lens"]
                if step == 16:
                    assert not found
                    rt.launch(lens.data[1:2].add_, 5, writes=[lens], name="a kernel")
                before = rt.counters.snapshot()
                batch = batch.advance("seq_lens") if step % 4 < 2 else batch.filter([0, 1, 2])
                spent.update(attrs.asdict(rt.counters - before))
            watching.flush()
        rt.synchronize()
    assert spent["forced_syncs"] == spent["fence_waits"] == spent["check_reads"] == 0
    counters = watching.counters
    assert spent["device_operations"] == spent["device_to_host_copies"] == counters.samples == counters.compared
    assert counters.samples + counters.skipped == 10  # under the race detector nothing has arrived before `flush`
    (violation,) = [one for one in found if isinstance(one, Violation)]
    assert (violation.code, violation.object, violation.operation) == (Code.MIRROR_EQUAL, "Decode", "before advance")
    assert (violation.column, violation.row, violation.step) == ("seq_lens / seq_lens.device", 1, 17)


def test_what_a_thread_left_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread for each step, as some servers have: the next call anywhere reports what the last one did."""
    found: list[BatchStateError] = []
    monkeypatch.setattr(Engine, "bug", "host")
    with watched(lag=1, on_violation=found.append) as watching:
        for number in range(5):
            thread = threading.Thread(target=Engine([3, 4]).prepare_for_decode)
            thread.start()
            thread.join()
            assert len(found) == 2 * number  # of two pairs
        monkeypatch.setattr(Engine, "bug", "")
        Engine([1]).prepare_for_decode()
        assert len(found) == 10
        assert len(watching.pending) == 1  # its own
        watching.flush()
        assert not watching.pending


def test_what_a_thread_leaves_behind_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that had nothing on its way when another one began is still known when it ends."""
    found: list[BatchStateError] = []
    batch, compared, begun = Engine([3, 4]), threading.Event(), threading.Event()

    def work() -> None:
        batch.prepare_for_decode()
        watching.flush()
        compared.set()
        begun.wait()
        batch.bug = "host"
        batch.prepare_for_decode()

    with watched(lag=1, on_violation=found.append) as watching:
        thread = threading.Thread(target=work)
        thread.start()
        compared.wait()
        Engine([1]).prepare_for_decode()
        begun.set()
        thread.join()
        watching.flush()
    assert len(found) == 2  # of two pairs
    assert not watching.pending


def test_the_runtime_that_is_passed_is_kept() -> None:
    """Samples of batches that have a runtime of their own go through it, all on one stream."""
    passed, batch = open_device("cpu"), Engine([3, 4])
    vars(batch)["runtime"] = open_device("cpu")
    with watched(lag=1, moves=[], adds={}, runtime=passed) as watching:
        made: Any = passed.stream("before").key
        for _ in range(3):
            batch.prepare_for_decode()
            watching.flush()
    assert passed.stream("behind").key == made + 2
    assert passed.counters.device_to_host_copies == watching.counters.samples == 3


def test_the_audit_leaves_a_key_on_the_device_alone() -> None:
    """A report then names the row without the request, and nothing waits."""

    def rows(batch: Engine) -> torch.Tensor:
        return torch.empty(len(batch.reqs), device="meta")  # whose values cannot be read at all

    with watched(lag=1, moves=[], adds={}, key=rows) as watching:
        batch = Engine([3, 4])
        batch.bug = "host"
        batch.prepare_for_decode()
        with reported(Code.MIRROR_EQUAL, row=0):
            watching.flush()


def test_a_row_that_differs_is_named_by_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `lag` rows have moved by the time a report is read: it says whose row it was."""
    found: list[BatchStateError] = []
    batch = Engine([3, 4, 5])
    for number, req in enumerate(batch.reqs):
        req.rid = f"r{number}"
    for level, lag in (("full", None), ("cheap", 1)):
        with checks(level), watched(lag=lag, on_violation=found.append, moves=[], adds={}) as watching:
            batch.seq_lens[1] += 7
            batch.prepare_for_decode()
            batch.seq_lens[1] -= 7
            watching.flush()
    named = [one for one in found if isinstance(one, Violation) and one.column == "seq_lens_cpu / seq_lens"]
    assert [(one.row, "request 'r1'" in one.problem) for one in named] == [(1, True)] * 2


def test_a_value_that_is_checked_now_and_then_accuses_no_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """At `cheap`, and with `every`, the call that made it wrong may be an earlier one, and the remedy says so."""
    batch: Any = Engine([3, 4])
    with checks("cheap"), watched(implied={}, derived={"count": lambda batch: len(batch.reqs)}):
        batch.count = 2
        batch.merge_batch(Engine([5]))
        with pytest.raises(Violation, match=r"prepare_for_decode`, or what ran since .*, changes rows"):
            collections.deque((batch.prepare_for_decode() for _ in range(9)), maxlen=0)
    batch.count = 3
    with checks("full"), watched(implied={}, derived={"count": lambda batch: len(batch.reqs)}):
        batch.count = 9
        with pytest.raises(Violation, match="prepare_for_decode`, or what ran since"):
            batch.prepare_for_decode()


# What is refused


OVER = {"not sampling.greedy": over_requests(any, bool)}


def seq_lens(batch: Engine) -> list[int]:
    """A function that is called as a column is."""
    return [1 for _ in batch.reqs]


class Odd:
    count = property(lambda self: 1)

    async def later(self) -> None:
        pass

    def now(self) -> None:
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"after": ["filter_batsh"], "moves": [], "adds": {}}, "Engine has no method 'filter_batsh'"),
        ({"after": [], "moves": [], "adds": {}}, "no method is named"),
        ({"after": [drive]}, "expected in `after` the name of a method, got <function drive"),
        ({"moves": ["prepare_for_extend"]}, "Engine has no method 'prepare_for_extend'"),
        ({"key": None}, "`moves` or `adds` without `key`"),
        ({"key": None, "moves": [], "adds": {}, "implied": OVER}, "`over_requests` without `key`"),
        ({"pairs": ["seq_lens"]}, "expected a pair"),
        ({"pairs": ("seq_lens_cpu", "seq_lens")}, "expected a pair"),
        ({"pairs": [("a", "b", "loose")]}, "expected a pair"),
        (
            {"pairs": [("a", "b", "uper_bound")]},
            "'upper_bound' or 'relative' in its third place.*\n.*mean 'upper_bound'",
        ),
        ({"rows": [("seq_lens", lambda batch: batch.reqs)]}, "two columns are called 'seq_lens': 'seq_lens' and <func"),
        ({"adds": {"prepare_for_decode": {seq_lens: 1}}}, "two columns are called 'seq_lens'"),
        ({"when": {"top_p": "fresh"}}, "top_p in `when`, and not in `pairs` or `rows`"),
        ({"upto": {"tokens": "n"}}, "tokens in `upto`"),
        ({"adds": {"prepare_for_decode": {"sum": 1}}}, "sum in `adds` of `prepare_for_decode`, and not in"),
        ({"pairs": [], "rows": [], "derived": {}, "implied": {}, "indices": {}, "adds": {}}, "no column is declared"),
        ({"lag": 0}, "expected lag=1 or more, got 0"),
        ({"every": 0}, "expected every=1 or more, got 0"),
        ({"on_violation": "print"}, "expected on_violation 'raise', 'log' or a function, got 'print'"),
    ],
)
def test_a_wrong_declaration_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Each mistake in a declaration is an error with the value and what to do, and leaves no hook."""
    before = dict(vars(Engine))
    with pytest.raises(ArgumentError, match=message) as caught:
        watched(**arguments)
    assert caught.value.remedy
    assert dict(vars(Engine)) == before
    with pytest.raises(ArgumentError, match="expected any, all, max or min, got"):
        over_requests(sum, len)


@pytest.mark.parametrize(
    ("cls", "method", "message"),
    [
        (Odd, "later", "returns before it has run"),
        (Odd, "count", "is a property, not a method"),
        (list, "append", "cannot set 'append' attribute"),
    ],
)
def test_what_cannot_be_hooked_is_refused(cls: Any, method: str, message: str) -> None:
    """Coroutines, properties, and classes in C."""
    with pytest.raises(ArgumentError, match=message):
        watch(cls, after=[method], num_rows=len, rows=["rows"])


def test_functions_of_the_class_are_named_by_themselves() -> None:
    """`after=[Engine.filter_batch]` is the method of that name."""
    with watched(after=[Engine.filter_batch], moves=[Engine.filter_batch], adds={}) as watching:
        drive()
    assert watching.counters.checked == 1


def test_a_method_is_watched_twice() -> None:
    """Two watches of one method both check, and take their hooks away in either order."""
    method = Engine.merge_batch
    for first_out in (0, 1):
        watches = [watch(Engine, after=["merge_batch"], num_rows="batch_size", rows=["reqs"]) for _ in range(2)]
        Engine([3]).merge_batch(Engine([4]))
        assert [watched.counters.checked for watched in watches] == [1, 1]
        watches.pop(first_out).stop()
        Engine([3]).merge_batch(Engine([4]))
        assert watches[0].counters.checked == 2
        watches[0].stop()
    assert getattr(Engine.merge_batch, "__wrapped__", method) is not None


def test_a_watch_is_not_pickled() -> None:
    """Hooks belong to a process."""
    with watched() as watching, pytest.raises(DeclarationError, match="cannot be copied or pickled"):
        pickle.dumps(watching)


# The same declaration, fuzzed


def fuzz(watching: Watched, **calls: Any) -> Any:
    """What the fuzzer finds with the declaration."""
    spec = watching.spec(
        row=st.integers(1, 7),
        build=Engine,
        filter=Engine.filter_batch,
        merge=Engine.merge_batch,
        advance=Engine.prepare_for_decode,
        **calls,
    )
    return fuzz_twins(spec, examples=15, shrink=False)


@pytest.fixture
def declared() -> Watched:
    """A declaration whose hooks are gone: the fuzzer alone looks."""
    watching = watched()
    watching.stop()
    return watching


def test_the_fuzzer_takes_the_declaration(declared: Watched) -> None:
    """A clean class is clean, and a column that never differed is said to have proved nothing."""
    result = fuzz(declared)
    assert result.failure is None, result.failure
    assert result.reached["batches merged"]
    assert result.reached["a batch advanced"]
    assert result.unproved == ("sampling.seeds",)  # None throughout


@pytest.mark.parametrize(
    ("bug", "code"),
    [
        ("one side", "ROW_COUNT MIRROR_EQUAL"),
        ("order", "MODEL"),
        ("indices", "SLOT_OUT_OF_RANGE DERIVED_STALE"),
        ("shift", "DERIVED_STALE"),
        ("sum", "DERIVED_STALE"),
        ("host", "MIRROR_EQUAL"),
        ("twice", "MODEL"),
    ],
)
def test_the_fuzzer_finds_what_the_watch_finds(
    declared: Watched, monkeypatch: pytest.MonkeyPatch, bug: str, code: str
) -> None:
    """One declaration for both; a report of the model names column, row and both values."""
    monkeypatch.setattr(Engine, "bug", bug)
    result = fuzz(declared)
    assert result.code in code.split()
    if code == "MODEL":
        assert re.search(
            r"'(sampling\.temperatures|seq_lens\w*)', row \d+: expected [\d.]+, found [\d.]+", result.failure
        )


def test_rows_by_key_are_fuzzed() -> None:
    """A class that puts rows where it likes, and lets single requests join, is fuzzed as it is."""
    number = itertools.count()

    def add(rows: Rows, n: int) -> None:
        rows.add(f"request {next(number)}", list(range(n)), n / 4)
        rows.refresh()

    def build(lengths: list[int]) -> Rows:
        rows = Rows()
        for n in lengths:
            add(rows, n)
        return rows

    def keep_rows(rows: Rows, keep: list[int]) -> None:
        for name in [name for row, name in enumerate(rows.ids) if row not in keep]:
            rows.remove(str(name))
        rows.condense()
        rows.refresh()

    with watched_rows() as watching:
        pass
    spec = watching.spec(row=st.integers(1, 4), build=build, filter=keep_rows, add=add, most_rows=3)
    result = fuzz_twins(spec, examples=10, steps=4)
    assert result.failure is None, result.failure
    assert result.reached["a request joined"]


def test_a_fixed_buffer_is_fuzzed_within_its_length() -> None:
    """With `max_rows` no merge and no join makes a batch longer than its buffers, and both are still reached."""
    sizes: list[int] = []

    def merge(batch: Engine, other: Engine) -> None:
        batch.merge_batch(other)
        sizes.append(batch.batch_size())

    def add(batch: Engine, n: int) -> None:
        merge(batch, Engine([n]))

    with watched() as watching:
        pass
    calls: dict[str, Any] = {"row": st.integers(1, 7), "build": Engine, "filter": Engine.filter_batch, "merge": merge}
    result = fuzz_twins(watching.spec(**calls, add=add, max_rows=5), examples=15, shrink=False)
    assert result.failure is None, result.failure
    assert 4 < max(sizes) <= 5
    sizes.clear()
    fuzz_twins(watching.spec(**calls, add=add), examples=15, shrink=False)
    assert max(sizes) > 5


def test_a_step_is_named(declared: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step adds is found by the name of its method; a function without a name is refused, and no such method."""
    calls: dict[str, Any] = {"row": st.integers(1, 9), "build": Engine, "filter": Engine.filter_batch}
    calls["merge"] = Engine.merge_batch
    monkeypatch.setattr(Engine, "bug", "twice")
    result = fuzz_twins(declared.spec(**calls, advance="prepare_for_decode"), examples=10, shrink=False)
    assert "'seq_lens" in str(result.failure)
    with pytest.raises(ArgumentError, match="`advance` has no name, and `adds` is of prepare_for_decode"):
        declared.spec(**calls, advance=lambda batch: batch.prepare_for_decode())
    with pytest.raises(ArgumentError, match="no method 'prepare'"):
        declared.spec(**calls, advance="prepare")


def test_a_spec_is_whole(declared: Watched) -> None:
    """Columns are declared in `watch` alone."""
    with pytest.raises(ArgumentError, match="beside what is declared"):
        fuzz(declared, rows=["reqs"])


def test_watch_loads_little() -> None:
    """Watching loads at most 7,500 lines of the package, and neither batches nor mirrored values."""
    code = (
        "import sys; from batchstate.watch import watch; "
        "print(*(f'{name}={m.__file__}' for name, m in sys.modules.items() if name.split('.')[0] == 'batchstate'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = dict(module.split("=") for module in done.stdout.split())
    assert not {"batchstate.batch", "batchstate.mirror"} & loaded.keys()
    assert sum(len(Path(file).read_text().splitlines()) for file in loaded.values()) <= 7_500
