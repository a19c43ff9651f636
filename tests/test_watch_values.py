"""`watch` over values: rows with garbage behind their end, what was compared, names that only `full` reads."""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from batchstate import Violation
from batchstate.errors import BatchStateError, DeclarationError
from batchstate.levels import checks
from batchstate.races.devices import open_device, window_of
from batchstate.testing import fuzz_twins
from batchstate.violations import Code
from batchstate.watch import Watched, watch
from tests.test_watch import Engine, reported, watched

# Rows with garbage behind their end


class Tokens:
    """Token ids on both sides, whose rows end in garbage; `step` writes what `wrong` says on the device."""

    def __init__(self) -> None:
        self.ids = ["a", "b"]
        self.tokens = torch.tensor([[1, 2, 9], [3, 9, 9]])
        self.tokens_gpu = torch.tensor([[1, 2, 7], [3, 8, 7]])
        self.n, self.n_gpu = torch.tensor([2, 1]), torch.tensor([2, 1])
        self.wrong: tuple[int, int] | None = None

    def num(self) -> int:
        return len(self.ids)

    def step(self) -> None:
        if self.wrong is not None:
            self.tokens_gpu[self.wrong] = 77

    def swap(self) -> None:
        self.ids, self.n, self.n_gpu = self.ids[::-1], self.n.flip(0), self.n_gpu.flip(0)
        self.tokens_gpu = self.tokens_gpu.flip(0)

    def swap_all(self) -> None:
        self.swap()
        self.tokens = self.tokens.flip(0)


def watched_tokens(**changes: Any) -> Watched:
    """The declaration; `upto` of one side is that of the pair."""
    declared: dict[str, Any] = {
        "after": ["step"],
        "num_rows": "num",
        "pairs": [("tokens", "tokens_gpu"), ("n", "n_gpu")],
        "upto": {"tokens": "n"},
    }
    return watch(Tokens, **(declared | changes))


UPTO: list[dict[str, Any]] = [
    {"tokens": "n"},
    {"tokens_gpu": "n"},
    {"tokens": "n_gpu"},
    {"tokens": lambda batch: [2, 1]},
    {"tokens": "n", "tokens_gpu": "n_gpu"},
]


@pytest.mark.parametrize("lag", [None, 1])
@pytest.mark.parametrize("upto", UPTO)
def test_tails_of_both_sides_are_left_out(full: None, upto: dict[str, Any], lag: int | None) -> None:
    """Named for one side or both, `upto` cuts both, at `full` and with `lag`; a wrong token before the end is found."""
    found: list[BatchStateError] = []
    with watched_tokens(upto=upto, lag=lag, on_violation=found.append) as watching:
        batch = Tokens()
        batch.step()
        watching.flush()
        assert not found
        batch.wrong = (0, 2)  # behind the end
        batch.step()
        watching.flush()
        assert not found
        batch.wrong = (1, 0)
        batch.step()
        watching.flush()
    assert watching.counters.compared == 3
    (violation,) = found
    assert isinstance(violation, Violation)
    assert (violation.code, violation.column, violation.row) == (Code.MIRROR_EQUAL, "tokens / tokens_gpu", 1)


@pytest.mark.parametrize("device", ["cpu", "sim:lazy", "sim:random", "sim:pct", "race"])
@pytest.mark.parametrize("counts", ["n", "n_gpu"])
def test_tails_are_left_out_without_a_wait(device: str, counts: str) -> None:
    """Counts on either side: those on the device travel with the tokens, in the one copy of a sample."""
    found: list[BatchStateError] = []
    with window_of(open_device(device, seed=3)) as rt:
        batch = Tokens()
        batch.tokens_gpu = rt.upload([batch.tokens_gpu.numpy()]).view(0).clone()
        batch.n_gpu = rt.upload([batch.n_gpu.numpy()]).view(0).clone()
        with watched_tokens(upto={"tokens": counts}, lag=1, runtime=rt, on_violation=found.append) as watching:
            before = rt.counters.snapshot()
            batch.step()
            batch.n[:] = 3  # after the sample was taken
            spent = rt.counters - before
            watching.flush()
            assert not found
            batch.n[:] = torch.tensor([2, 1])
            batch.tokens_gpu[0, 1] += 5
            batch.step()
            watching.flush()
        rt.synchronize()
    (violation,) = found
    assert isinstance(violation, Violation)
    assert (violation.code, violation.column, violation.row) == (Code.MIRROR_EQUAL, "tokens / tokens_gpu", 0)
    assert (watching.counters.samples, watching.counters.compared) == (2, 2)
    assert spent.forced_syncs == spent.fence_waits == spent.check_reads == 0
    assert spent.device_operations == spent.device_to_host_copies == 1


def test_the_fuzzer_leaves_tails_out(full: None) -> None:
    """`upto` of one side is that of both in `fuzz_twins` too, where each side has garbage of its own."""

    class Built(Tokens):
        def __init__(self, counts: list[int]) -> None:
            self.ids = [str(row) for row in range(len(counts))]
            self.n, self.n_gpu = torch.tensor(counts), torch.tensor(counts)
            self.tokens = torch.full((len(counts), 3), 9)
            self.tokens_gpu = torch.full((len(counts), 3), 7)
            for row, count in enumerate(counts):
                self.tokens[row, :count] = self.tokens_gpu[row, :count] = count

        def move(self, keep: list[int]) -> None:
            self.ids = [self.ids[row] for row in keep]
            for name in ("n", "n_gpu", "tokens", "tokens_gpu"):
                setattr(self, name, getattr(self, name)[keep])

        def merge(self, other: "Built") -> None:
            self.ids = self.ids + other.ids
            for name in ("n", "n_gpu", "tokens", "tokens_gpu"):
                setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))

        step = None  # type: ignore[assignment]

    pairs = [("tokens", "tokens_gpu"), ("n", "n_gpu")]
    with watch(Built, after=["move"], num_rows="num", pairs=pairs, upto={"tokens": "n"}) as watching:
        spec = watching.spec(row=st.integers(1, 3), build=Built, filter=Built.move, merge=Built.merge)
        assert fuzz_twins(spec, examples=10).failure is None


# What was compared, and what was not


def test_the_counters_say_whether_values_were_compared() -> None:
    """A clean run at `cheap` has 0 comparisons of values; at `full` pairs and moved rows count, lengths do not."""
    declared: dict[str, Any] = {
        "pairs": [("tokens", "tokens_gpu")],
        "rows": ["n"],
        "key": "ids",
        "upto": {"tokens": "n"},
    }
    for level, moves, after, expected in (
        ("cheap", ["swap_all"], ["swap_all"], 0),
        ("full", ["swap_all"], ["swap_all"], 2),
        ("full", ["swap_all"], [], 2),
        ("full", [], ["swap_all"], 2),
    ):
        with checks(level), watch(Tokens, num_rows="num", moves=moves, after=after, **declared) as watching:
            batch = Tokens()
            batch.swap_all()
            batch.swap_all()
        assert watching.counters.as_dict()["compared"] == expected
        assert watching.counters.checked == 2
    with checks("full"), watch(Tokens, num_rows="num", after=["step"], rows=["n"]) as watching:
        Tokens().step()
    assert watching.counters.compared == 0


NEVER_READ: list[tuple[dict[str, Any], str]] = [
    ({"when": {"seq_lens": "frehs"}}, r"when\['seq_lens'\]: AttributeError.*'frehs'"),
    ({"when": {"seq_lens": "not sampling.gredy"}}, r"when\['seq_lens'\]: AttributeError.*'gredy'"),
    ({"upto": {"extra.masks": "num"}}, r"upto\['extra.masks'\]: AttributeError.*'num'"),
    ({"indices": {"masekd": "extra.masks"}}, r"indices\['masekd'\]: AttributeError"),
    ({"indices": {"masked": "extra.maks"}}, r"indices\['masked'\]: KeyError: 'maks'"),
    ({"key": "requests"}, "key: AttributeError"),
]


@pytest.mark.parametrize(("changes", "message"), NEVER_READ)
def test_a_typo_is_told_at_cheap(changes: dict[str, Any], message: str) -> None:
    """A name that only `full` reads is looked for in the first watched call at `cheap`."""
    with checks("cheap"), watched(derived={}, implied={}, **changes), pytest.raises(DeclarationError, match=message):
        Engine([3, 4]).prepare_for_decode()


def test_names_of_what_is_not_in_use_are_not_looked_for() -> None:
    """Of a column that is None neither `when` nor `upto` has to be there yet, and a property is not read."""

    class Later(Engine):
        reads = 0

        @property
        def fresh(self) -> bool:
            type(self).reads += 1
            return True

    changes: dict[str, Any] = {"when": {"sampling.seeds": "sampling.count", "seq_lens": "fresh"}}
    with checks("cheap"), watched(Later, derived={}, implied={}, **changes):
        batch = Later([3, 4])
        batch.prepare_for_decode()
        batch.sampling.seeds = torch.tensor([1, 2])
        with pytest.raises(DeclarationError, match="'count'"):
            batch.prepare_for_decode()
    assert Later.reads == 0


# What to do about it


def test_a_pair_the_wrong_way_round_is_thought_of(full: None) -> None:
    """Where a moving method leaves the first side of a pair alone, the remedy asks which of the two is the host's."""
    declared: dict[str, Any] = {"num_rows": "num", "key": "ids", "moves": ["swap"], "after": ["step"]}
    paired = watch(Tokens, pairs=[("n", "n_gpu"), ("tokens", "tokens_gpu")], **declared)
    with paired, reported(Code.ROW_KEPT, "tokens") as caught:
        Tokens().swap()
    assert "name the host side first" in caught.value.remedy
    with watch(Tokens, rows=["tokens"], **declared), reported(Code.ROW_KEPT) as caught:
        Tokens().swap()
    assert "host side" not in caught.value.remedy


def test_a_wrong_number_of_rows_is_thought_of() -> None:
    """A length that differs may be that of `num_rows`, and the remedy says so."""
    with watched(num_rows=lambda batch: len(batch.reqs) - 1), reported(Code.ROW_COUNT) as caught:
        Engine([3, 4]).prepare_for_decode()
    assert "`num_rows` is wrong" in caught.value.remedy
