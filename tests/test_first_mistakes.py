"""The first mistakes of somebody new: what is typed, and which error says what to type instead."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import (
    Batch,
    ForwardPlan,
    FutureMap,
    SlotPool,
    checks,
    device_only,
    host_list,
    mirrored,
    open_runtime,
    relay_field,
    slot_column,
)
from batchstate.errors import BatchStateError
from batchstate.kv.pages import PagePool


class Decode(Batch):
    """A batch with a column of each kind."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    last_token = device_only(torch.int64)
    requests = host_list()


@pytest.fixture
def it() -> SimpleNamespace:
    """A runtime, a pool, a batch of two requests, and its lengths."""
    runtime = open_runtime("cpu")
    pool = SlotPool(runtime, size=8)
    batch = Decode.build(runtime, slots=pool.take(2), seq_lens=[5, 3], last_token=[1, 2], requests=["a", "b"])
    return SimpleNamespace(runtime=runtime, pool=pool, batch=batch, lens=batch.seq_lens)


def without(batch: Decode, **changed: Any) -> Any:
    """`build` of the columns of a batch, some of them changed, or left out where None."""
    columns = {"slots": batch.slots, "seq_lens": [1, 1], "last_token": [1, 1], "requests": [0, 0]} | changed
    return Decode.build(batch.runtime, **{name: value for name, value in columns.items() if value is not None})


MISTAKES: dict[str, tuple[Callable[[Any], object], str, str]] = {
    # what is typed: (it, what the error says, what it tells to do)
    "R(runtime, seq_lens=...)": (lambda it: Decode(it.runtime, seq_lens=[1]), "called with columns", "Decode.build("),
    "R(runtime)": (lambda it: Decode(it.runtime), "called with columns", "Decode.build("),
    "R.build('cpu')": (lambda it: Decode.build("cpu"), "expected a runtime, got 'cpu'", "open_runtime"),  # type: ignore[arg-type]
    "SlotPool('cpu')": (lambda it: SlotPool("cpu", 3), "expected a runtime, got 'cpu'", "open_runtime"),  # type: ignore[arg-type]
    "a column misspelt": (lambda it: without(it.batch, seq_lens=None, seq_len=[1, 1]), "seq_len", "mean 'seq_lens'"),
    "a column of one row": (
        lambda it: without(it.batch, seq_lens=[1]),
        "has 1 rows, expected 2",
        "one row per request",
    ),
    "a number for a column": (
        lambda it: without(it.batch, seq_lens=5),
        "per request, got one number",
        "one row per request",
    ),
    "a number for slots": (lambda it: without(it.batch, slots=3), "per request, got 3", "`pool.take`"),
    "numbers for slots": (lambda it: without(it.batch, slots=[1, 2]), "expected slots", "from_host(runtime, numbers)"),
    "a mask of 0 and 1": (lambda it: it.batch.filter([1, 1]), "row 1 is kept twice", "one boolean per row"),
    "mirrored(np.int64)": (lambda it: mirrored(np.int64), "expected a torch dtype", "pass torch.int64"),  # type: ignore[arg-type]
    "mirrored(int)": (lambda it: mirrored(int), "expected a torch dtype", "pass torch.int64"),  # type: ignore[arg-type]
    "mirrored('tokens')": (lambda it: mirrored("tokens"), "got 'tokens'", "such as torch.int64"),  # type: ignore[arg-type]
    "relay_field(int)": (lambda it: relay_field(int), "expected a torch dtype", "pass torch.int64"),  # type: ignore[arg-type]
    "relay of a list": (lambda it: FutureMap(it.pool, ["tok"]), "expected fields by name", "relay_field("),  # type: ignore[arg-type]
    "advance misspelt": (lambda it: it.batch.advance("seq_len"), "'seq_len' is not declared", "mean 'seq_lens'"),
    "advance of objects": (
        lambda it: it.batch.advance("requests"),
        "holds Python objects",
        "slots, seq_lens, last_token",
    ),
    "b[0]": (lambda it: it.batch[0], "expected the name of a column, got 0", "batch.filter(rows)"),
    "b[:1]": (lambda it: it.batch[:1], "expected the name of a column", "batch.filter(rows)"),
    "b['seq_len']": (lambda it: it.batch["seq_len"], "'seq_len'", "mean 'seq_lens'"),
    "list(b)": (lambda it: list(it.batch), "not iterable", "batch.to_dict()"),
    "dict(b)": (lambda it: dict(it.batch), "not iterable", "batch.to_dict()"),
    "b.replace misspelt": (lambda it: it.batch.replace(seq_len=[1, 2]), "'seq_len'", "mean 'seq_lens'"),
    "b.seq_lens = ...": (lambda it: setattr(it.batch, "seq_lens", [1]), "assigned", "batch.replace(seq_lens=...)"),
    "b['seq_lens'] = ...": (lambda it: it.batch.__setitem__("seq_lens", [1]), "assigned", "batch.replace("),
    "del b.seq_lens": (lambda it: delattr(it.batch, "seq_lens"), "was deleted", "declare another class"),
    "Batch.build": (lambda it: Batch.build(it.runtime, seq_lens=[1]), "is not declared", "in a subclass of `Batch`"),
    "filter(0)": (lambda it: it.batch.filter(0), "got the number 0", "list of row indices"),
    "filter([2])": (lambda it: it.batch.filter([2]), "row 2, expected rows of 0 to 1", "from this value"),
    "filter([-1])": (lambda it: it.batch.filter([-1]), "row -1", "do not count from the end"),
    "filter(slice)": (lambda it: it.batch.filter(slice(1)), "got slice(None, 1, None)", "pass numbers"),
    "filter('a')": (lambda it: it.batch.filter("a"), "got 'a'", "pass numbers"),
    "merge(3)": (lambda it: it.batch.merge(3), "expected another Decode, got 3", "one class"),
    "free([1])": (lambda it: it.pool.free([1]), "expected handles, got [1]", "whose slot"),
    "take(-1)": (lambda it: it.pool.take(-1), "n is -1, expected >= 0", "pass 0 or more"),
    "take('ten')": (lambda it: it.pool.take("ten"), "'ten', expected an integer", "pass an integer"),
    "take(True)": (lambda it: it.pool.take(True), "True, expected an integer", "pass an integer"),
    "checks('ful')": (lambda it: checks("ful").__enter__(), "'ful'", "mean 'full'"),
    "open_runtime('tpu')": (lambda it: open_runtime("tpu"), "'tpu'", "'cpu' or 'cuda'"),
    "flat prompt ids": (
        lambda it: ForwardPlan.of(it.batch.slots, it.lens, 1, prompt_ids=[1, 2]),
        "got the number 1",
        "one list per request",
    ),
    "extras misspelt": (
        lambda it: it.batch.upload(extras={"positions": np.zeros(2, np.int64)})["position"],
        "no extra 'position'",
        "mean 'positions'",
    ),
    "x[0]": (lambda it: it.lens[0], "not indexed", "`.np[...]`"),
    "x[:1]": (lambda it: it.lens[:1], "not indexed", "`.take(rows)`"),
    "x[0] = 1": (lambda it: it.lens.__setitem__(0, 1), "immutable", "`.update(rows, values)`"),
    "x * 2": (lambda it: it.lens * 2, "only `+` and `-`", "`.np`"),
    "2 * x": (lambda it: 2 * it.lens, "only `+` and `-`", "`.device`"),
    "x // 16": (lambda it: it.lens // 16, "only `+` and `-`", "`.np`"),
    "10 - x": (lambda it: 10 - it.lens, "only `+` and `-`", "`.np`"),
    "float(x)": (lambda it: float(it.lens), "not one number", "`.np[row]`"),
    "int(x)": (lambda it: int(it.lens), "not one number", "`.np[row]`"),
    "if x": (lambda it: bool(it.lens), "ambiguous", "len(value) > 0"),
    "torch.add(x, 1)": (lambda it: torch.add(it.lens, 1), "torch.add: expected a tensor", "`.device`"),
    "torch.stack([x])": (lambda it: torch.stack([it.lens]), "torch.stack: expected a tensor", "`.device`"),
    "torch.as_tensor(x)": (lambda it: torch.as_tensor(it.lens), "two sides", "`.device`"),
    "torch.from_dlpack(x)": (lambda it: torch.utils.dlpack.from_dlpack(it.lens), "two sides", "`.device`"),
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_the_error_says_what_to_type(it: SimpleNamespace, typed: str) -> None:
    """A first mistake is a typed error that shows what was given and names what is meant."""
    mistake, says, remedy = MISTAKES[typed]
    with pytest.raises((BatchStateError, KeyError)) as caught:
        mistake(it)
    problem, _, told = str(caught.value).partition("remedy: ")
    assert says in problem
    assert remedy in (told or problem)


WRITTEN = {
    # what is typed: (what the error says, what it tells to do)
    "SlotPool(rt, '8')": ("size is '8', expected an integer", "pass an integer"),
    "SlotPool(rt, 0)": ("size is 0, expected >= 1", "pass 1 or more"),
    "pool.take(2.0)": ("n is 2.0, expected an integer", "pass an integer"),
    "pool.take(99)": ("99 requested", "make the pool"),
    "pool.free(1)": ("expected handles, got 1", "as the pool returns them"),
    "pool.free(batch)": ("expected handles, got Rows(", "as the pool returns them"),
    "pool.free(batch.slots, after=rt)": ("expected a fence as `after`, got CpuRuntime", "Runtime.record()"),
    "pool.free(batch.slots, after=True)": ("expected a fence as `after`, got True", "Runtime.record()"),
    "pool.table('t', 4, torch.int32)": ("shape is 4", "a tuple, as `(8,)`"),
    "pool.table('t', (4,), 'int32')": ("expected a torch dtype, got 'int32'", "torch.int32"),
    "pages.extend(pool, 3)": ("expected handles, got SlotPool", "as the pool returns them"),
    "pages.extend([1, 2], [3, 3])": ("expected handles, got [1, 2]", "as the pool returns them"),
    "pages.extend(batch.slots, [3])": ("[1] amounts for 2 rows", "one per row"),
    "pages.commit(batch.slots, 99)": ("99 tokens asked for, a request may have 64 (max_tokens_per_request)", ""),
    "pages.share(batch.slots, batch.slots, 3)": ("share of 2 slots", "one slot"),
    "Rows.build(rt)": ("no value for slots, seq_lens, requests", "every declared column"),
    "Rows.build(rt, slots=[1, 2], seq_lens=[1, 2], requests=[1, 2])": ("expected slots, got numbers", "pool.take"),
    "Rows.build(rt, slots=batch.slots, seq_lens=['a', 'b'], requests=[1, 2])": ("expected numbers", "pass numbers"),
    "Rows.build(rt, slots=batch.slots, seq_lens=[1, 2], requests=None)": ("expected a sequence", "one object"),
    "batch.merge([batch])": ("expected another Rows, got [Rows(", "one class"),
    "batch.merge(None)": ("expected another Rows, got None", "one class"),
    "batch.next_batch(keep=[5])": ("row 5, expected rows of 0 to 1", "from this value"),
    "batch.upload(extras=[1])": ("extras are [1]", "name -> host array"),
    "batch.upload(extras={'x': 'abc'})": ("extra 'x': expected numbers, got 'abc'", "pass numbers"),
    "batch.upload(writes=pages)": ("writes are PagePool", "Table.entry"),
    "open_runtime('gpu')": ("unknown device 'gpu'", "'cuda'"),
    "torch.cat([batch.seq_lens, batch.seq_lens])": ("expected a tensor, got a MirroredTensor", "`.device`"),
    "setattr(batch, 'seq_lens', 3)": ("was assigned to", "batch.replace(seq_lens=...)"),
    "bool(batch.seq_lens)": ("is ambiguous", "`.any()`"),
    "int(batch.seq_lens)": ("is not one number", "`.np[row]`"),
}


class Rows(Batch):
    """A batch as in the README."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    requests = host_list()


def test_what_is_typed_wrong_is_answered() -> None:
    """Each of these lines is a typed error that shows what was given, and says what to pass instead."""
    rt = open_runtime("cpu")
    pool = SlotPool(rt, 8)
    pages = PagePool(rt, pool, 32, 4, max_tokens_per_request=64)
    batch = Rows.build(rt, slots=pool.take(2), seq_lens=[5, 3], requests=["a", "b"])
    names = {**globals(), "rt": rt, "pool": pool, "pages": pages, "batch": batch}
    for line, (says, remedy) in WRITTEN.items():
        with pytest.raises(BatchStateError) as caught:
            eval(line, names)
        problem, _, told = str(caught.value).partition("remedy")
        assert says in problem, line
        assert remedy in told, line


@pytest.mark.parametrize("name", ["cuda", "cpu", "to", "numpy", "item", "clone", "mean", "size", "data_ptr"])
def test_what_a_tensor_has_and_a_value_has_not(it: SimpleNamespace, name: str) -> None:
    """A method of tensors is an AttributeError that names the side to use."""
    assert not hasattr(it.lens, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; "):
        getattr(it.lens, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        it.lens.nonsense  # noqa: B018


ABSENT = {
    # what is typed: what the AttributeError says
    "batch.keys()": "`batch.to_dict()`",
    "batch.append(1)": "`batch.merge(other)`",
    "batch.pop()": "`batch.filter(keep)`",
    "batch.to('cuda')": "`batch.upload()`",
    "batch.clone()": "immutable",
    "batch.shape": "`len(batch)`",
    "batch.seq_lens_cpu": "`.seq_lens.np`",
    "batch.seq_lens.add_(1)": "`.update(rows, values)`",
    "batch.slots.free()": "`pool.free(slots, after=fence)`",
    "pool.alloc(1)": "`pool.take(n)`",
    "pool.release(batch.slots)": "`pool.free(slots, after=fence)`",
    "pool.available_size()": "`pool.stats`",
    "pages.alloc(1)": "`pages.extend(slots, total_lens)`",
    "pages.free(batch.slots)": "`pages.release_requests(slots, after=fence)`",
    "pages.block_table": "`pages.page_table`",
    "pages.block_size": "`pages.page_size`",
}


def test_a_name_from_elsewhere_is_answered() -> None:
    """A method known from a list, a tensor or another pool is an AttributeError that says what to write here."""
    rt = open_runtime("cpu")
    pool = SlotPool(rt, 8)
    pages = PagePool(rt, pool, 32, 4, max_tokens_per_request=64)
    batch = Rows.build(rt, slots=pool.take(2), seq_lens=[5, 3], requests=["a", "b"])
    for line, says in ABSENT.items():
        with pytest.raises(AttributeError) as caught:
            eval(line, {"pool": pool, "pages": pages, "batch": batch})
        assert "has no attribute" in str(caught.value), line
        assert says in str(caught.value), line
    one: Any
    for one in (batch, pool, pages):
        assert not hasattr(one, "alloc")
        with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
            one.nonsense  # noqa: B018


def test_an_error_inside_of_a_property_is_not_hidden() -> None:
    """A property that fails raises its own error, although its name is one that has a pointer."""

    class Shaped(Batch):
        seq_lens = mirrored(torch.int64)

        @property
        def shape(self) -> object:
            """Reads a name that is missing."""
            return object().missing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'object' object has no attribute 'missing'"):
        Shaped.build(open_runtime("cpu"), seq_lens=[1]).shape  # noqa: B018


def test_values_act_like_their_host_side(it: SimpleNamespace) -> None:
    """Iteration, `in`, `1 + x` and `repr` use the host side; numpy reads it by itself, and the device is not asked."""
    before = it.runtime.counters.snapshot()
    assert list(it.lens) == [5, 3]
    assert 5 in it.lens
    assert 4 not in it.lens
    assert (1 + it.lens).tolist() == [6, 4]
    assert (np.array([2, 2]) * it.lens).tolist() == (it.lens * np.array([2, 2])).tolist() == [10, 6]
    assert repr(it.lens) == "MirroredTensor 'seq_lens' int64[2] exact on cpu: [5, 3]"
    assert repr(it.batch.last_token) == "MirroredTensor 'last_token' int64[2] device_only on cpu"
    assert repr(it.batch) == "Decode(2 requests; slots, seq_lens, last_token, requests) on cpu"
    assert repr(it.lens.take([0] * 9)).endswith(": [5, 5, 5, ..., 5, 5, 5]")
    assert it.runtime.counters == before


def test_host_sides_by_name(it: SimpleNamespace) -> None:
    """`to_dict` gives the host side of each column that has one, read-only, and reads no device."""
    before = it.runtime.counters.snapshot()
    found = it.batch.to_dict()
    assert [*found] == ["slots", "seq_lens", "requests"]
    assert found["seq_lens"].tolist() == [5, 3]
    assert not found["seq_lens"].flags.writeable
    assert found["requests"] == ("a", "b")
    assert it.runtime.counters == before


def test_a_runtime_is_a_context_manager() -> None:
    """The end of the window waits for the device once and gives staging back; values made in it stay valid."""
    with open_runtime("cpu") as runtime:
        batch = Decode.build(runtime, slots=SlotPool(runtime, 4).take(1), seq_lens=[5], last_token=[1], requests=["a"])
        batch.upload()
        assert runtime.counters.forced_syncs == 0
    assert runtime.counters.forced_syncs == 1
    assert batch.advance("seq_lens").seq_lens.device.tolist() == [6]


def test_a_window_that_an_error_ends_does_not_wait() -> None:
    """Where an error is on its way, the device may be what failed: the end of the window does not wait for it."""
    with pytest.raises(KeyError), open_runtime("cpu") as runtime:
        raise KeyError
    assert runtime.counters.forced_syncs == 0
