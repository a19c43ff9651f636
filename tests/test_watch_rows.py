"""Watching rows: what requests say of them, what they hold without one, tables of unequal widths, other axes."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Violation, checks
from batchstate.errors import ArgumentError, DeclarationError
from batchstate.violations import Code
from batchstate.watch import POISON, WatchedPool, watch, watch_log, watch_pages


class Rows:
    """An object with whatever attributes a test gives it."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def run(self, change: Callable[[Any], object] = lambda rows: None) -> None:
        """An operation."""
        change(self)

    def late(self) -> None:
        """A method behind it."""


@contextlib.contextmanager
def watched(**declared: Any) -> Iterator[Any]:
    """`Rows`, watched at `full` after `run`."""
    usual: dict[str, Any] = {"after": ["run"], "num_rows": lambda r: len(r.reqs)}
    with checks("full"), watch(Rows, **usual | declared) as rows:
        yield rows


@contextlib.contextmanager
def reported(code: Code, column: str) -> Iterator[None]:
    """The block is reported with this code, at this column."""
    with pytest.raises(Violation) as caught:
        yield
    assert (caught.value.code, caught.value.column) == (code, column), caught.value


def requests(*lengths: int) -> list[Any]:
    """Requests with a number each."""
    return [SimpleNamespace(seq_id=at, length=length) for at, length in enumerate(lengths)]


def test_a_column_that_becomes_none_is_reported() -> None:
    """A column that had entries and has none is forgotten, unless it is declared as optional, or not in use then."""
    there = {"a": lambda rows: rows.a is not None}
    always, told = {"a": lambda rows: True}, "function in `when`"
    for when, remedy in ((None, "when={'a': None}"), (always, told), ({"a": None}, None), (there, None)):
        rows: Any = Rows(reqs=["x", "y"], a=torch.tensor([1, 2]), b=torch.tensor([1, 2]))
        with watched(key="reqs", moves=["run"], rows=["a", "b"], when=when):
            rows.run()
            with contextlib.nullcontext() if remedy is None else pytest.raises(Violation, match=remedy) as caught:
                rows.run(lambda r: setattr(r, "a", None))
        assert caught is None or (caught.value.code, caught.value.actual) == (Code.ROW_KEPT, "None")


def test_a_condition_exempts_from_the_row_count() -> None:
    """A column that is not valid may have any length; one that is may not."""
    rows: Any = Rows(reqs=["x", "y"], a=torch.zeros(5), used=False)
    with watched(rows=["a"], when={"a": "used"}):
        rows.run()
        with reported(Code.ROW_COUNT, "a"):
            rows.run(lambda r: setattr(r, "used", True))


@pytest.mark.parametrize("right", [False, True])
def test_lists_of_unequal_length_beside_a_padded_tensor(right: bool) -> None:
    """Each row counts as far as the list has entries, or from its end; the width of the tensor may change in a move."""
    table = torch.tensor([[1, 2, 3], [9, 4, 5] if right else [4, 5, 9]])
    rows: Any = Rows(reqs=["x", "y"], lists=[[1, 2, 3], [4, 5]], table=table)
    counts: Any = {"lists": lambda r: [-len(entry) if right else len(entry) for entry in r.lists]}
    with watched(key="reqs", moves=["run"], pairs=[("lists", "table")], upto=counts):
        rows.run()

        def keep_last(rows: Any) -> None:
            rows.reqs, rows.lists, rows.table = ["y"], [[4, 5]], torch.tensor([[4, 5]])

        rows.run(keep_last)
        with reported(Code.MIRROR_EQUAL, "lists / table"):
            rows.run(lambda r: setattr(r, "table", torch.tensor([[4, 6]])))
    if not right:
        with watched(pairs=[("lists", "table")]):
            Rows(reqs=["x", "y"], lists=[[1], [4, 5]], table=table).run()
            with reported(Code.MIRROR_EQUAL, "lists / table"):
                Rows(reqs=["x", "y"], lists=[[1], [4, 6]], table=table).run()


@pytest.mark.parametrize("lag", [None, 1])
def test_lists_on_both_sides(lag: int | None) -> None:
    """Numbers or lists of unequal length, by value; a list and an array, either way round; rows without a request."""
    right = [[1000, 2], [3000]], np.array([1000, 3000]), [1000, 3000], [torch.tensor([1000]), torch.tensor([3000])]
    wrong = [[1000, 2], [4000]], [1000, 4000], np.array([1000, 4000]), [torch.tensor([1000]), torch.tensor([4000])]
    for ours, theirs in zip(right, wrong, strict=True):
        rows: Any = Rows(reqs=["x", "y"], a=ours, b=copy.deepcopy(ours))
        with watched(key="reqs", pairs=[("a", "b")], lag=lag):
            for _ in range(3):
                rows.run()
            rows.reqs, rows.b = ["x", None], theirs
            rows.run()
            with pytest.raises(Violation, match="in 1 of 2 rows: request 'y'"):
                rows.run(lambda r: setattr(r, "reqs", ["x", "y"]))


def test_a_column_that_is_a_list_in_prefill() -> None:
    """It is a tensor afterwards: an entry is what it was, if it is equal."""
    rows: Any = Rows(reqs=["x", "y"], ids=[[1, 2], [3]])
    with watched(key="reqs", moves=["run"], rows=["ids"]):
        for now, later in ([[4]], torch.tensor([[4]])), (torch.tensor([[4]]), [[5]]), ([[5]], torch.tensor([[6]])):
            rows.reqs, rows.ids = ["y"], now
            right = torch.equal(torch.as_tensor(now), torch.as_tensor(later))
            with contextlib.nullcontext() if right else reported(Code.ROW_KEPT, "ids"):
                rows.run(lambda r, later=later: setattr(r, "ids", later))


def test_rows_without_a_request_are_not_compared() -> None:
    """`key` may be a dictionary from row to request; rows that are not in it are left out, and none is named so."""
    rows: Any = Rows(owners={0: "x"}, host=torch.tensor([1, 7]), device=torch.tensor([1, 8]))
    with watched(num_rows=lambda r: 2, key="owners", pairs=[("host", "device")]):
        rows.run()
        with pytest.raises(Violation, match="request 'y'"):
            rows.run(lambda r: r.owners.update({1: "y"}))


def test_what_a_request_says() -> None:
    """Both sides may be wrong alike: the request says what they are to be; None says nothing."""
    rows: Any = Rows(reqs=requests(3, 5), a=torch.tensor([3, 5]), objects=["3", "5"])
    says: dict[Any, Any] = {"a": lambda req: req.length or None, "objects": lambda req: str(req.length)}
    with watched(key="reqs", from_requests=says):
        rows.run()
        with pytest.raises(Violation, match="request 1"):
            rows.run(lambda r: setattr(r, "a", torch.tensor([3, 3])))
        rows.a = torch.tensor([3, 5])
        with reported(Code.MIRROR_EQUAL, "requests' objects / objects"):
            rows.run(lambda r: setattr(r, "objects", ["3", "3"]))
    with pytest.raises(ArgumentError, match="`from_requests` without `key`"):
        watch(Rows, after=["run"], num_rows=len, from_requests=says)


def test_what_a_request_says_is_sampled() -> None:
    """With `lag`, too; so are derived tensors."""
    for column in ("a", "total"):
        rows: Any = Rows(reqs=requests(3, 5), a=torch.tensor([3, 5]), total=torch.tensor([8]))
        with checks("cheap"):
            derived: Any = {"total": lambda r: torch.tensor([sum(req.length for req in r.reqs)])}
            says: dict[Any, Any] = {"a": lambda req: req.length}
            with watch(
                Rows, after=["run"], num_rows=lambda r: 2, key="reqs", from_requests=says, derived=derived, lag=1
            ) as watched_rows:
                rows.run()
                watched_rows.flush()
                getattr(rows, column)[0] = 1
                rows.run()
                with pytest.raises(Violation, match="MIRROR_EQUAL"):
                    watched_rows.flush()


@pytest.mark.parametrize("lag", [None, 1])
def test_what_calls_say_of_requests(lag: int | None) -> None:
    """The arguments of each call are recorded, whatever `every` says; lists on the host are compared with `lag` too."""

    class Later(Rows):
        reqs: list[str]

        def join(self, name: str, length: int) -> None:
            self.reqs.append(name)

    def note(records: dict[str, int], rows: Any, name: str, length: int) -> None:
        records[name] = length

    for column, wrong in (("a", torch.tensor([3, 6])), ("b", [[3, 1], [6, 1]])):
        rows: Any = Later(reqs=[], a=torch.tensor([3, 5]), b=[[3, 1], [5, 1]])
        with checks("full" if lag is None else "cheap"), watch(
            Later, after=["run"], num_rows=lambda r: len(r.reqs), key="reqs", records={"join": note}, every=2, lag=lag,
            from_requests={"a": lambda length: length, "b": lambda length: [length]}, upto={"b": lambda r: [1, 1]},
        ) as watched_rows:  # fmt: skip
            for name, length in (("x", 3), ("y", 5)):
                rows.join(name, length)
            rows.run()
            setattr(rows, column, wrong)
            rows.run()
            with pytest.raises(Violation, match="request 'y'"):
                [call() for call in (rows.run, watched_rows.flush)]
            with pytest.raises(DeclarationError, match=r"records\['join'\]: TypeError"):
                rows.join(name=["no hash"], length=1)


def test_a_row_that_nobody_wrote_for_its_request() -> None:
    """A freed row is poisoned at `full`: a request that gets it and does not write it is named."""
    for column in ("a", "b", "c"):
        rows: Any = Rows(
            owners={0: "x", 1: "y"}, a=torch.zeros(2, dtype=torch.int64), b=torch.zeros(2), c=np.zeros((2, 3), int)
        )
        with watched(
            num_rows=lambda r: 2,
            key="owners",
            rows=["a", "b", "c"],
            upto={"c": lambda r: [2, 2]},
            vacant=dict.fromkeys("abc", POISON),
        ):
            rows.run(lambda r: r.owners.pop(0))
            assert rows.a[0] != 0
            assert rows.a[1] == 0

            def join(rows: Any, *, without: str = column) -> None:
                rows.owners[0] = "z"
                for name in {"a", "b", "c"} - {without}:
                    getattr(rows, name)[0] = 1
                if without == "c":
                    rows.c[0, :1] = 1  # and the second entry that counts is forgotten

            with reported(Code.ROW_UNWRITTEN, column):
                rows.run(join)
            rows.run(lambda r: [field.__setitem__(0, 1) for field in (r.a, r.b, r.c)])


def test_rows_of_no_request_hold_a_neutral_value() -> None:
    """A mask is filled for some requests: all other rows hold the value that masks nothing."""
    rows: Any = Rows(reqs=[*requests(0, 4), None], mask=torch.tensor([[False] * 2, [True] * 2, [False] * 2]))
    says: dict[Any, Any] = {"mask": lambda req: [True, True] if req.length else None}
    with watched(key="reqs", from_requests=says, vacant={"mask": False}):
        rows.run()
        for row in (0, 2):
            rows.mask[row, 1] = True
            with reported(Code.TAIL_STALE, "mask"):
                rows.run()
            rows.mask[row, 1] = False


def test_rows_along_another_axis() -> None:
    """Columns of `[1, B]` and `[3, B]` are moved as the others are."""
    rows: Any = Rows(reqs=["x", "y"], ids=torch.tensor([[1, 2]]), rope=torch.arange(6).view(3, 2))
    with watched(key="reqs", moves=["run"], rows=["ids", "rope"], axis={"ids": 1, "rope": 1}):
        rows.run()
        with reported(Code.ROW_KEPT, "rope"):
            rows.run(lambda r: setattr(r, "rope", r.rope.flip(1)))
        with reported(Code.ROW_COUNT, "ids"):
            rows.run(lambda r: setattr(r, "ids", r.ids[:, :1]))


def test_entries_that_are_relative_to_their_row() -> None:
    """Both sides agree, and no move keeps them."""
    for third, context in ((["relative"], contextlib.nullcontext()), ([], reported(Code.ROW_KEPT, "host"))):
        rows: Any = Rows(reqs=["x", "y"], host=[0, 1], device=torch.tensor([0, 1]))

        def filter_rows(rows: Any) -> None:
            rows.reqs, rows.host, rows.device = ["y"], [0], torch.tensor([0])

        with watched(key="reqs", moves=["run"], pairs=[("host", "device", *third)]), context:
            rows.run(filter_rows)


def test_relative_entries_that_requests_say() -> None:
    """A column of a relative pair is kept by no move because requests say its values too."""
    rows: Any = Rows(reqs=["x", "y"], host=[0, 1], device=torch.tensor([0, 1]))

    def filter_rows(rows: Any) -> None:
        rows.reqs, rows.host, rows.device = ["y"], [0], torch.tensor([0])

    says = {"host": lambda req: 0 if len(rows.reqs) == 1 else rows.reqs.index(req)}
    with watched(key="reqs", moves=["run"], pairs=[("host", "device", "relative")], from_requests=says):
        rows.run(filter_rows)


def test_metadata_of_other_rows() -> None:
    """Metadata that were made from other rows of equal number, and not made anew."""
    rows: Any = Rows(reqs=["x"], seq_lens=torch.tensor([3]), meta=SimpleNamespace(cu=torch.tensor([0, 3])))
    with watched(rows=["seq_lens"], made_from={"meta": ["seq_lens"]}):
        rows.run()
        rows.run(lambda r: r.__dict__.update(seq_lens=torch.tensor([4]), meta=SimpleNamespace(cu=4)))
        with reported(Code.DERIVED_STALE, "meta"):
            rows.run(lambda r: setattr(r, "seq_lens", torch.tensor([5])))


def test_attributes_that_are_not_declared(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that were as long as the batch in every call are named, at the end too."""
    with watched(rows=["a", "info.b"]) as watched_rows:
        for n in (1, 2):
            info = SimpleNamespace(b=[0] * n, c=torch.zeros(n))
            Rows(reqs=["x"] * n, a=[0] * n, other=[0] * n, two=[0, 0], info=info).run()
        assert watched_rows.undeclared() == ["info.c", "other", "reqs"]
        watched_rows.stop()
    assert "not declared: info.c, other, reqs" in capsys.readouterr().out


def test_a_bound_whose_device_side_is_never_written() -> None:
    """It is under each bound; that it never moves is reported."""
    rows: Any = Rows(reqs=["x"], host=torch.tensor([0]), device=torch.tensor([0]))
    with watched(pairs=[("host", "device", "upper_bound")]), reported(Code.DERIVED_STALE, "host / device"):
        for _ in range(40):
            rows.run(lambda r: setattr(r, "host", r.host + 1))
    rows = Rows(reqs=["x"], host=torch.tensor([0]), device=torch.tensor([0]))
    with watched(pairs=[("host", "device", "upper_bound")]):
        for _ in range(40):
            rows.run(lambda r: r.__dict__.update(host=r.host + 1, device=r.device + 1))


def test_a_method_that_raises_is_checked() -> None:
    """What it leaves behind is its own damage, and named so; a whole batch leaves the engine's error alone."""

    def fail(rows: Any, *, entries: int) -> None:
        rows.a = [0] * entries
        raise LookupError("engine")

    with watched(rows=["a"]):
        with pytest.raises(Violation, match="after run, which raised LookupError"):
            Rows(reqs=["x"]).run(lambda r: fail(r, entries=2))
        with pytest.raises(LookupError, match="engine"):
            Rows(reqs=["x"]).run(lambda r: fail(r, entries=1))
        with pytest.raises(Violation, match=r"look in `Rows\.run`"):
            Rows(reqs=["x"]).run(lambda r: fail(r, entries=2))


def test_what_an_inner_watch_raises_goes_on() -> None:
    """A method that raises a violation of another watch is not reported in its place."""

    def step(rows: Any) -> None:
        rows.a = [0, 0]
        Pool().step(lambda pool: setattr(pool, "used", 3))

    with watched_pool(), watched(rows=["a"]), reported(Code.DERIVED_STALE, "used"):
        Rows(reqs=["x"], a=[0]).run(step)


def test_moves_that_are_applied_later() -> None:
    """VLLM records moves and applies them with others: `settled` names the method behind which they have been."""

    class Later(Rows):
        b: Any
        order: Any

        def late(self) -> None:
            self.b = [self.b[row] for row in self.order]

    def rows_of(rows: Any) -> list[str]:
        entries: list[str] = rows.b[: len(rows.reqs)]
        return entries

    def condense(rows: Any) -> None:
        rows.reqs, rows.a, rows.order = ["y"], rows.a[1:], rows.wrong or [1]

    for wrong, context in ((None, contextlib.nullcontext()), ([0], reported(Code.ROW_KEPT, "b"))):
        rows: Any = Later(reqs=["x", "y"], a=torch.tensor([1, 2]), b=["1", "2"], wrong=wrong)
        with checks("full"), watch(
            Later, after=["late"], num_rows=lambda r: len(r.reqs), key="reqs", moves=["run"],
            rows=[("a", lambda r: r.a), ("b", rows_of)], settled={"b": "late"},
        ), context:  # fmt: skip
            rows.run(condense)
            rows.late()
    with pytest.raises(ArgumentError, match="not in `after`"):
        watch(Rows, after=["run"], num_rows=len, rows=["a"], settled={"a": "late"})


class Runner(Rows):
    """The owner of a batch, whose step calls the method that moves rows."""

    reqs: list[str]
    a: list[int]
    host: list[int]
    device: Any

    def step(self, keep: list[int], wrong: bool) -> None:
        """Drops requests; both sides are one value again when it ends."""
        self.host = [length + 1 for length in self.host]
        self.drop(keep, wrong)
        self.device = self.device + 1

    def drop(self, keep: list[int], wrong: bool) -> None:
        """Moves rows."""
        self.reqs = [self.reqs[row] for row in keep]
        self.host, self.device = [self.host[row] for row in keep], self.device[keep]
        self.a = [self.a[row] for row in (keep[::-1] if wrong else keep)]


@pytest.mark.parametrize("outer", ["after", "moves"])
@pytest.mark.parametrize("wrong", [False, True])
def test_moves_inside_another_hooked_call(outer: str, wrong: bool) -> None:
    """They are compared by their requests, unless the outer call is; all else waits for the outer call's end."""
    rows: Any = Runner(reqs=["x", "y", "z"], a=[1, 2, 3], host=[4, 5, 6], device=torch.tensor([4, 5, 6]))
    declared: dict[str, Any] = {"after": ["step", "drop", "late"], "moves": ["drop"]}
    if outer == "moves":
        declared = declared | {"moves": ["drop", "step"], "pairs": [("host", "device", "relative")]}
    errors: list[Any] = []
    declared = {"key": "reqs", "rows": ["a"], "pairs": [("host", "device")], **declared, "on_violation": errors.append}
    with checks("full"), watch(Runner, num_rows=lambda runner: len(runner.reqs), **declared) as watching:
        rows.step([0, 2], wrong)
        rows.late()
    named = [(error.code, error.column, error.operation) for error in errors]
    assert named == [(Code.ROW_KEPT, "a", "after drop" if outer == "after" else "after step")] * wrong
    counters = watching.counters
    assert (counters.calls, counters.nested) == (3, 0 if outer == "after" else 1)
    assert counters.checked == counters.compared == 3 - counters.nested


def test_a_row_without_a_request_is_not_poisoned_inside_a_call() -> None:
    """Whether it is one, is known when the outer call ends."""
    rows: Any = Rows(reqs=["x", None], a=torch.tensor([1, 0]))

    def write(r: Any) -> None:
        r.a[1] = 5
        r.late()
        r.reqs = ["x", "y"]

    with watched(key="reqs", moves=["late"], rows=["a"], vacant={"a": POISON}):
        rows.run(write)
        assert rows.a.tolist() == [1, 5]
        rows.run(lambda r: setattr(r, "reqs", ["x", None]))
        assert rows.a[1] > 5


def test_methods_that_were_never_compared_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A method in `moves` whose rows were not seen, for want of a call, or of a request that stayed."""
    with watched(key="reqs", moves=["run", "late"], rows=["a"]):
        Rows(reqs=["x"], a=[0]).run(lambda r: r.late())
    assert "in `moves` or `adds`, and never compared: late\n" in capsys.readouterr().out
    with watched(key="reqs", moves=["run"], rows=["a"]):
        Rows(reqs=["x"], a=[0]).run(lambda r: setattr(r, "reqs", ["y"]))
    assert "never compared: run\n" in capsys.readouterr().out
    with contextlib.suppress(Violation), watched(key="reqs", moves=["run", "late"], rows=["a"]):
        Rows(reqs=["x", "y"], a=[0, 1]).run(lambda r: r.a.reverse())
    assert capsys.readouterr().out == ""  # a violation is on its way, and ends the run early
    with watched(key="reqs", moves=["run"], rows=["a"]), contextlib.suppress(Violation):
        Rows(reqs=["x", "y"], a=[0, 1]).run(lambda r: r.a.reverse())
    assert not capsys.readouterr().out


def test_calls_of_a_pool_inside_another_are_counted() -> None:
    """Pages are counted when the outer call ends."""
    pool = Pool()
    with watched_pool() as watching:
        pool.step(lambda inner: inner.step(lambda innermost: None))
    assert (watching.counters.checked, watching.counters.nested) == (1, 1)


def test_functions_with_a_label() -> None:
    """Each argument that takes a path takes `(label, function)`."""
    rows: Any = Rows(reqs=["x"], a=torch.tensor([[1, 9]]), b=torch.tensor([[1, 8]]), n=1)
    declared: dict[str, Any] = {"upto": {"a": ("width", lambda r: [1])}, "when": {"a": ("used", lambda r: True)}}
    declared["derived"] = {("total", lambda r: r.n): lambda r: 1}
    with watched(pairs=[("a", "b")], key=("whose", lambda r: r.reqs), **declared):
        rows.run()
        with reported(Code.DERIVED_STALE, "total"):
            rows.run(lambda r: setattr(r, "n", 2))


def test_a_merge_that_pads_wider_is_told_of_upto() -> None:
    """Rows of another width are reported with the remedy, values of the same width without it."""
    for wider, told in ((3, True), (2, False)):
        rows: Any = Rows(reqs=["x"], a=torch.zeros(1, 2))
        with watched(key="reqs", moves=["run"], rows=["a"]), pytest.raises(Violation) as caught:
            rows.run(lambda r, wider=wider: setattr(r, "a", torch.ones(1, wider)))
        assert ("`upto`" in str(caught.value)) is told


def test_an_answer_of_another_shape_than_a_row() -> None:
    """With `axis` the rows come first: an answer has one entry for each of the other axes."""
    rows: Any = Rows(reqs=["x", "y"], groups=torch.zeros(3, 2, dtype=torch.int64))
    with watched(key="reqs", axis={"groups": 1}, from_requests={"groups": lambda req: [0, 0, 0]}):
        rows.run()
    message = r"expected for each row entries of shape \[3\], or None"
    declared: dict[str, Any] = {"axis": {"groups": 1}, "from_requests": {"groups": lambda req: 0}}
    with watched(key="reqs", **declared), pytest.raises(DeclarationError, match=message):
        rows.run()


def test_lists_that_are_longer_than_the_batch() -> None:
    """With `buffers` a list may be preallocated, as an array may; one that grows has to follow the batch."""
    with watched(rows=["a"], buffers=True):
        Rows(reqs=["x"], a=[1, 0, 0]).run()
        with reported(Code.ROW_COUNT, "a"):
            Rows(reqs=["x"], a=[1, 0]).run()
        with reported(Code.ROW_COUNT, "a"):
            Rows(reqs=["x", "y"], a=[1]).run()


@pytest.mark.parametrize("implied", [None, {"b": lambda rows: 1}])
def test_a_lag_that_compares_nothing_is_refused(implied: Any) -> None:
    """Rows alone, and flags, are not sampled."""
    with pytest.raises(ArgumentError, match="compares pairs and derived tensors"):
        watch(Rows, after=["run"], num_rows=len, rows=["a"], implied=implied, lag=1)


@pytest.mark.parametrize("total", [1, torch.tensor(1)])
def test_a_lag_that_compared_nothing_says_so(total: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A derived value may be a tensor or not: that is known at the end."""
    derived: Any = {"total": lambda rows: torch.tensor(1)}
    with watch(Rows, after=["run"], num_rows=lambda rows: 1, derived=derived, lag=1):
        Rows(total=total).run()
    assert ("`lag` compared nothing" in capsys.readouterr().out) is isinstance(total, int)


def test_a_lag_counts_what_is_compared_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A column on the host beside what requests say waits for nothing."""
    says: Any = {"a": lambda req: req.length}
    with watch(Rows, after=["run"], num_rows=lambda rows: 1, key="reqs", from_requests=says, lag=1) as watching:
        Rows(reqs=requests(3), a=[3]).run()
    assert (watching.counters.samples, watching.counters.compared) == (0, 1)
    assert not capsys.readouterr().out


def test_names_that_nearly_exist() -> None:
    """A misspelt method or column is met with a question, and other pairs are sampled none the less."""
    with pytest.raises(ArgumentError, match="did you mean 'late'"):
        watch(Rows, after=["laet"], num_rows=len, rows=["a"])
    errors: list[Any] = []
    rows: Any = Rows(reqs=["x"], host=[1], device=torch.tensor([2]))
    pairs = [("host", "devise"), ("host", "device")]
    with watch(
        Rows, after=["run"], num_rows=lambda r: 1, pairs=pairs, lag=1, on_violation=errors.append
    ) as watched_rows:
        rows.run()
        watched_rows.flush()
    assert [type(error) for error in errors] == [DeclarationError, DeclarationError, Violation]
    assert "did you mean 'device'?" in str(errors[0])


# Pools and logs


class Pool:
    """Pages of requests, a prefix index and a counter."""

    def __init__(self) -> None:
        self.tables: dict[str, list[int]] = {"x": [0, 1]}
        self.lengths = {"x": 7}
        self.free = [2, 3]
        self.keys, self.index, self.used = {0: "k"}, {"k": 0}, 2

    def step(self, change: Callable[[Any], object] = lambda pool: None) -> None:
        """An operation."""
        change(self)


@contextlib.contextmanager
def watched_pool() -> Iterator[WatchedPool]:
    """The pool, watched."""
    with watch_pages(
        Pool,
        after=["step"],
        holders=lambda p: p.tables.values(),
        free="free",
        num_pages=4,
        lengths=lambda p: [p.lengths[name] for name in p.tables],
        page_size=4,
        keys=lambda p: p.keys,
        index=lambda p: p.index,
        counters={"used": lambda p: sum(map(len, p.tables.values()))},
    ) as pool:
        yield pool


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("lengths", lambda p: p.lengths.update(x=9)),
        ("keys", lambda p: p.keys.update({2: "old"})),
        ("index", lambda p: p.index.update(k=1)),
        ("index", lambda p: p.index.clear()),
        ("index", lambda p: p.keys.clear()),
        ("used", lambda p: setattr(p, "used", 3)),
    ],
)
def test_what_a_pool_keeps_beside_its_pages(column: str, change: Callable[[Any], object]) -> None:
    """Lengths that pages do not cover, keys of free pages, an index that disagrees, a counter that miscounts."""
    with watched_pool():
        Pool().step()
        with reported(Code.DERIVED_STALE, column):
            Pool().step(change)


def test_an_idle_pool_holds_nothing() -> None:
    """At the end of a run, held pages have leaked."""
    with watched_pool() as watched_pages:
        pool = Pool()
        with pytest.raises(Violation, match="2 pages are held while no request runs"):
            watched_pages.expect_idle(pool)
        pool.tables.clear()
        watched_pages.expect_idle(pool)


class Log:
    """Writes that are staged and applied."""

    def __init__(self) -> None:
        self.gpu, self.staged = torch.zeros((2, 3)), list[Any]()
        self.lost, self.kept = False, False

    def stage(self, row: int, first: int, values: list[int]) -> None:
        """Stages a write."""
        self.staged.append((row, first, values))

    def apply(self) -> None:
        """Applies all."""
        for row, first, values in self.staged[self.lost :]:
            self.gpu[row, first : first + len(values)] = torch.tensor(values, dtype=torch.float32)
        if not self.kept:
            self.staged.clear()


def test_staged_writes_reach_the_device() -> None:
    """A write that is lost, one that is staged still, and two of one entry."""
    stage = {"stage": lambda row, first, values: (row, first, values)}
    with checks("full"), watch_log(Log, stage=stage, apply=["apply"], device="gpu", staged=["staged"]):
        for fields, again, problem in (
            ({}, 1, None),
            ({"lost": True}, 1, "was staged and is not on the device"),
            ({"kept": True}, 1, "'staged' is left"),
            ({}, 0, "is written twice"),
        ):
            log = Log()
            vars(log).update(fields)
            log.stage(0, 1, [4, 5])
            log.stage(again, 2, [6])
            with pytest.raises(Violation, match=problem) if problem else contextlib.nullcontext():
                log.apply()
