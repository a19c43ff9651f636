"""The first mistakes of somebody new: what is typed, and which error says what to type instead."""

import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import batchstate
import batchstate.testing
import batchstate.transport
import batchstate.watch
from batchstate import (
    Batch,
    FutureMap,
    MirroredTensor,
    PrefixCache,
    SlotPool,
    device_only,
    host_list,
    mirrored,
    open_runtime,
    relay_field,
    slot_column,
)
from batchstate._guidance import Guided, shows_signature
from batchstate.errors import BatchStateError
from batchstate.kv.pages import PagePool
from batchstate.testing import (
    TwinSpec,
)
from batchstate.transport import KVLayout


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


TYPED = {
    # what is typed: (what the error says, what it tells to do)
    "Decode(rt, seq_lens=[1])": ("Decode cannot be called directly", "Decode.build("),
    "Decode(rt)": ("Decode cannot be called directly", "Decode.build("),
    "Decode.build('cpu')": ("expected a Runtime, got 'cpu'", "open_runtime"),
    "SlotPool('cpu', 3)": ("expected a Runtime, got 'cpu'", "open_runtime"),
    "without(decode, seq_lens=None, seq_len=[1, 1])": ("seq_len", "mean 'seq_lens'"),
    "without(decode, seq_lens=[1])": ("has 1 row, expected 2", "one row per request"),
    "without(decode, seq_lens=5)": ("per request, got one number", "one row per request"),
    "without(decode, slots=3)": ("per request, got the number 3", "`pool.take`"),
    "without(decode, slots=[1, 2])": ("expected slots", "from_host(runtime, numbers)"),
    "decode.filter([1, 1])": ("row 1 appears twice", "integers are row indices"),
    "mirrored(np.int64)": ("expected a torch dtype", "pass torch.int64"),
    "mirrored('tokens')": ("got 'tokens'", "such as torch.int64"),
    "relay_field(int)": ("expected a torch dtype", "pass torch.int64"),
    "FutureMap(pool, ['tok'])": ("expected fields by name", "relay_field("),
    "decode.advance('seq_len')": ("'seq_len' is not declared", "mean 'seq_lens'"),
    "decode.advance('requests')": ("holds Python objects", "use one of: seq_lens, last_token"),
    "decode[0]": ("expected the name of a column, got 0", "batch.filter(rows)"),
    "decode[:1]": ("expected the name of a column", "batch.filter(rows)"),
    "decode['seq_len']": ("'seq_len'", "mean 'seq_lens'"),
    "list(decode)": ("cannot be iterated", "batch.to_dict()"),
    "dict(decode)": ("cannot be iterated", "batch.to_dict()"),
    "decode.replace(seq_len=[1, 2])": ("'seq_len'", "mean 'seq_lens'"),
    "setattr(decode, 'seq_lens', [1])": ("cannot assign to column", "batch.replace(seq_lens=...)"),
    "decode.__setitem__('seq_lens', [1])": ("cannot assign to column 'seq_lens'", "batch.replace(seq_lens=...)"),
    "delattr(decode, 'seq_lens')": ("cannot delete column", "declare another class"),
    "Batch.build(rt, seq_lens=[1])": ("is not declared", "in a subclass of `Batch`"),
    "decode.filter(0)": ("got the number 0", "list of row indices"),
    "decode.filter([2])": ("row 2 is out of range, expected rows of 0 to 1", "numbered anew"),
    "decode.filter([-1])": ("row -1", "rows do not count from the end; the last one is 1"),
    "decode.filter(slice(1))": ("row indices or a mask, got slice(None, 1, None)", "list(range(0, 1, 1))"),
    "decode.filter('a')": ("row indices or a mask, got 'a'", "a list of row indices"),
    "decode.merge(3)": ("expected another Decode, got 3", "a batch of the same class"),
    "pool.take(-1)": ("n is -1, expected >= 0", "pass 0 or more"),
    "pool.take('ten')": ("'ten', expected an integer", "pass an integer"),
    "pool.take(True)": ("True, expected an integer", "pass an integer"),
    "checks('ful').__enter__()": ("'ful'", "mean 'full'"),
    "open_runtime('tpu')": ("'tpu'", "'cpu' or 'cuda'"),
    "ForwardPlan.of(decode.slots, lens, 1, prompt_ids=[1, 2])": ("got the number 1", "a list of lists"),
    "decode.upload(extras={'positions': np.zeros(2, np.int64)})['position']": (
        "no extra 'position'",
        "mean 'positions'",
    ),
    "lens[0]": ("cannot be indexed", "`.np[...]`"),
    "lens[:1]": ("cannot be indexed", "`.take(rows)`"),
    "lens.__setitem__(0, 1)": ("immutable", "`.update(rows, values)`"),
    "lens * 2": ("only `+` and `-`", "`.np`"),
    "2 * lens": ("only `+` and `-`", "`.device`"),
    "lens // 16": ("only `+` and `-`", "`.np`"),
    "10 - lens": ("cannot be subtracted from 10", "10 - x.np on the host"),
    "float(lens)": ("not one number", "`.np[row]`"),
    "int(lens)": ("not one number", "`.np[row]`"),
    "bool(lens)": ("ambiguous", "len(value) > 0"),
    "torch.add(lens, 1)": ("torch.add: expected a tensor", "`.device`"),
    "torch.stack([lens])": ("torch.stack: expected a tensor", "`.device`"),
    "torch.as_tensor(lens)": ("two sides", "`.device`"),
    "torch.utils.dlpack.from_dlpack(lens)": ("two sides", "`.device`"),
    "SlotPool(rt, '8')": ("size is '8', expected an integer", "pass an integer"),
    "SlotPool(rt, 0)": ("size is 0, expected >= 1", "pass 1 or more"),
    "pool.take(2.0)": ("n is 2.0, expected an integer", "pass an integer"),
    "pool.take(99)": ("99 requested", "make the pool"),
    "pool.free(batch)": ("expected slots, got a batch, Rows(", "batch.slots"),
    "pool.free(batch.slots, after=rt)": ("expected a fence as `after`, got CpuRuntime", "Runtime.record()"),
    "pool.free(batch.slots, after=True)": ("expected a fence as `after`, got True", "Runtime.record()"),
    "pool.table('t', 4, torch.int32)": ("expected a shape, got 4", "a tuple, as `(4,)`"),
    "pool.table('t', (4,), 'int32')": ("expected a torch dtype, got 'int32'", "torch.int32"),
    "pages.extend(pool, 3)": ("expected slots, got a SlotPool", "as the pool returns them"),
    "pages.extend([1, 2], [3, 3])": ("expected slots, got [1, 2]", "as the pool returns them"),
    "pages.extend(batch.slots, [3])": (
        "expected one number, or one for each of 2 rows, got a list of 1",
        "one number per row",
    ),
    "pages.commit(batch.slots, 99)": ("99 tokens asked for, a request may have 64 (max_tokens_per_request)", ""),
    "pages.share(batch.slots, batch.slots, 3)": ("share: expected one slot, got 2", "the slot of one request"),
    "Rows.build(rt)": ("no value for slots, seq_lens, requests", "every declared column"),
    "Rows.build(rt, slots=[1, 2], seq_lens=[1, 2], requests=[1, 2])": ("expected slots, got numbers", "pool.take"),
    "Rows.build(rt, slots=batch.slots, seq_lens=['a', 'b'], requests=[1, 2])": (
        "expected numbers",
        "pass a list of numbers",
    ),
    "Rows.build(rt, slots=batch.slots, seq_lens=[1, 2], requests=None)": ("expected a sequence", "one object"),
    "batch.merge([batch])": ("expected another Rows, got a list", "the same class, one in each call"),
    "batch.merge(None)": ("expected another Rows, got None", "the same class"),
    "batch.next_batch(keep=[5])": ("row 5 is out of range, expected rows of 0 to 1", "numbered anew after each filter"),
    "batch.upload(extras=[1])": ("expected extras by name, got [1]", "name -> host array"),
    "batch.upload(extras={'x': 'abc'})": ("extra 'x': expected numbers, got 'abc'", "pass a list of numbers"),
    "batch.upload(writes=pages)": ("expected `writes`, a list of table writes, got PagePool", "Table.entry"),
    "open_runtime('gpu')": ("unknown device 'gpu'", "'cuda'"),
    "torch.cat([batch.seq_lens, batch.seq_lens])": ("expected a tensor, got a MirroredTensor", "`.device`"),
    "setattr(batch, 'seq_lens', 3)": ("cannot assign to column", "batch.replace(seq_lens=...)"),
    "bool(batch.seq_lens)": ("is ambiguous", "`.any()`"),
    "int(batch.seq_lens)": ("is not one number", "`.np[row]`"),
    "SlotPool(8)": ("`runtime` is 8, expected a Runtime", "SlotPool(runtime, 8)"),
    "SlotPool()": ("got SlotPool()", "`runtime` and `size` are missing: SlotPool(runtime, size)"),
    "SlotPool(rt, 8, 2)": (
        "got SlotPool(a CpuRuntime, 8, 2)",
        "give `reserve` by name: SlotPool(runtime, 8, reserve=2)",
    ),
    "SlotPool(rt, sizes=8)": ("got SlotPool(a CpuRuntime, sizes=8)", "did you mean 'size'?"),
    "len(pool)": ("SlotPool has no length", "`pool.size` is how many slots it has"),
    "list(pool)": ("SlotPool cannot be indexed or iterated", "`pool.live_slots()`"),
    "pool[0]": ("SlotPool cannot be indexed", "`pool.live_slots()`"),
    "3 in pool": ("SlotPool cannot be searched with `in`", "`pool.live_slots()`"),
    "pool.free(3)": ("expected slots, got 3", "as the pool returns them"),
    "pool.free([1, 2])": ("expected slots, got [1, 2]", "as the pool returns them"),
    "pool.free(batch.seq_lens)": ("expected slots, got 'seq_lens', a column of plain numbers", "batch.slots"),
    "pool.stats()": ("SlotStats is not a function", "free"),
    "pool.stats['free']": ("SlotStats cannot be indexed", "free"),
    "pool.adopt(np.zeros((9, 4)), 't')": ("expected a tensor to adopt, got an ndarray", "pass a tensor"),
    "HybridSlotPool(rt, 8)": ("expected HybridSlotPool(runtime, size, *, states", "`states` is missing"),
    "table[0]": ("Table cannot be indexed", "`table.gather(slots)`"),
    "table.write([1, 2], [0, 0], [7, 7])": ("expected slots, got [1, 2]", "as the pool returns them"),
    "PagePool(rt, 16, 4)": ("`slots` is 16, expected a SlotPool", "PagePool(runtime, slots, 16, 4, max_tokens_per"),
    "PagePool(pool, 32, 4, max_tokens_per_request=64)": (
        "`runtime` is a SlotPool, expected a Runtime",
        "PagePool(runtime, slots, 32, 4, max_tokens_per_request=64)",
    ),
    "PagePool(rt, 8, 32, 4, max_tokens_per_request=64)": ("expected a SlotPool, got 8", "pass the SlotPool"),
    "PagePool(rt, pool, 32, 4, max_tokens=64)": ("max_tokens=64", "did you mean 'max_tokens_per_request'?"),
    "len(pages)": ("PagePool has no length", "`pages.num_pages`"),
    "pages.extend(batch.slots, '5')": ("expected numbers, got '5'", "pass a list of numbers"),
    "pages.table('t', 4)": ("expected a shape, got 4", "`(4,)`"),
    "pages.advance([1, 2])": ("expected slots, got [1, 2]", "as the pool returns them"),
    "PrefixCache(pool)": ("expected a PagePool, got a SlotPool", "PrefixCache(pages)"),
    "cache.match('abc')": ("expected a list of keys, got 'abc'", "pass a list: ['abc']"),
    "cache.match([[1, 2]])": ("expected keys that can be hashed", "tuples of tokens"),
    "cache['a']": ("PrefixCache cannot be indexed", "`cache.match(keys)`"),
    "cache.evict('all')": ("expected a number of pages, got 'all'", "cache.evict(pages.num_pages)"),
    "del batch['x']": ("Rows has no column 'x'; cannot delete", "declare another class"),
    "batch + batch": ("Rows has no `+`", "`batch.merge(other)`"),
    "'seq_lens' in batch": ("cannot be searched with `in`", "'seq_lens' in batch.columns()"),
    "batch.to_static({})": ("expected StaticBuffers, got {}", "StaticBuffers(runtime"),
    "slot_column(torch.int64)": (
        "expected slot_column(), got slot_column(torch.int64)",
        "it takes no arguments: slot_column()",
    ),
    "host_list([])": ("expected a type, got []", "host_list(Request)"),
    "mirrored(torch.int64, (4,))": ("got mirrored(torch.int64, (4,))", "mirrored(torch.int64, shape=(4,))"),
    "mirrored()": ("expected mirrored(dtype, *", "`dtype` is missing: mirrored(dtype)"),
    "FutureMap(rt, {})": ("expected a SlotPool, got a CpuRuntime", "the pool whose requests"),
    "FutureMap(pool)": ("expected FutureMap(slots, fields, *", "`fields` is missing: FutureMap(slots, fields)"),
    "FutureMap(pool, tok=1)": ("got FutureMap(a SlotPool, tok=1)", "FutureMap(pool, {'tok': relay_field("),
    "relay['tok']": ("FutureMap cannot be indexed", "`relay.gather(slots, 'field')`"),
    "relay.publish(batch.slots, toc=[1, 2])": ("publish of 'toc'", "did you mean 'tok'?"),
    "relay.gather(batch.slots, 'toc')": ("gather of 'toc'", "did you mean 'tok'?"),
    "StepPlanner(Rows)": ("expected StepPlanner(batch, *, pages", "`pages` is a PagePool"),
    "StepPlanner(batch, pages=pages)": ("expected a subclass of Batch, got a Rows", "not a batch of it"),
    "StepPlanner(Rows, pages=pool)": ("`pages`: expected a PagePool, got a SlotPool", "pass pages=pages"),
    "StepPlanner(Rows, pages=pages, relay=relay, ids='toc')": ("field 'toc' is not declared", "mean 'tok'?"),
    "StepPlanner(Rows, pages=pages, layouts='flashatention')": ("'flashatention'", "did you mean 'flash_attention'?"),
    "StepPlanner(Rows, pages=pages, int32=['position'])": ("'position' in int32", "did you mean 'positions'?"),
    "StepPlanner(Rows, pages=pages).plan(Rows)": (
        "expected a batch of Rows, got the class Rows",
        "pass what `Rows.build` returned",
    ),
    "StaticBuffers(rt, Rows, 4)": (
        "got StaticBuffers(a CpuRuntime, the class Rows, 4)",
        "StaticBuffers(runtime, batch, rows=4)",
    ),
    "Runtime('cpu')": ("got the base class `Runtime`", "`open_runtime('cpu')`"),
    "open_runtime('cpu', 2)": ("got open_runtime('cpu', 2)", "open_runtime('cpu', steps_in_flight=2)"),
    "open_runtime('cpu', steps_in_flight=0)": ("expected steps_in_flight of 1 to", "2 for one step of overlap"),
    "set_checks('ful')": ("unknown level of checks 'ful'", "did you mean 'full'?"),
    "Level('ful')": ("unknown level of checks 'ful'", "did you mean 'full'?"),
    "Contract('exat')": ("unknown contract 'exat'", "did you mean 'exact'?"),
    "HostKVPool(rt, 4)": ("expected HostKVPool(runtime, num_pages", "`layers` is missing"),
    "HiSparse(pool, pages, 3)": ("expected a PagePool, got a SlotPool", "the KV on the device"),
    "watch(Engine)": ("expected watch(cls, *, num_rows", "watch(Engine, num_rows='num_reqs', after=['step'], pairs="),
    "watch('Engine', num_rows='n', after=['step'])": ("expected a class, got 'Engine'", "pass the class itself"),
    "watch(Engine, num_rows='n', after='step')": ("is the text 'step', expected a list", "after=['step']"),
    "watch(Engine, num_rows='n', after=['stepp'], pairs=[('a', 'b')])": ("has no method 'stepp'", "it has step"),
    "watch(Engine, num_rows='n', after=['step'])": ("no column is declared", "name columns in `pairs`"),
    "watch(Engine, num_rows=3, after=['step'])": ("`num_rows` is 3", "pass a name of an attribute, or a function"),
    "watch(Engine, num_rows='n', after=['step'], pairs=('a', 'b'))": ("expected a list of pairs", "pairs=[(host"),
    "watch(Engine, num_rows='n', after=['step'], columns=['a'])": ("columns=['a']", "did you mean 'rows'?"),
    "watch(Engine, num_rows='n', after=['step'], pair=[('a', 'b')])": ("pair=[('a', 'b')]", "did you mean 'pairs'?"),
    "watch_slots(Engine)": ("expected watch_slots(cls, *, after, live, free", "`after`, `live` and `free` are missing"),
    "audit(Engine)": ("expected a subclass of Batch", "use `watch`"),
    "fuzz_twins()": ("expected fuzz_twins(spec, *", "`spec` is missing"),
    "fuzz_twins(Engine)": ("expected a TwinSpec, got the class Engine", "pass a TwinSpec"),
    "twin(twins=[('a', 'b')])": ("expected a Twin, got ('a', 'b')", "Twin('seq_lens_cpu', 'seq_lens')"),
    "twin(twins=[])": ("expected twins, got none", "Twin('seq_lens_cpu', 'seq_lens')"),
    "twin(twins=[Twin('a', 'b')])": ("expected `merge` or `add`, got neither", "merge=Engine.merge"),
    "Twin('a')": ("expected Twin(host, device, contract", "`device` is missing: Twin('seq_lens_cpu', 'seq_lens')"),
    "fuzz_twins(twin(twins=[Twin('len', 'lens_cpu')], add=lambda b, r: b))": ("'len'", ""),
    "fuzz_pool(SlotPool)": ("expected a PoolSpec, got the class SlotPool", "how to make it"),
    "run_machine('slots')": ("expected a state machine, got 'slots'", "`twin_machine`"),
    "RaceRuntime('cpu')": ("expected a Runtime, got 'cpu'", "`open_runtime`"),
    "no_hidden_sync('cpu').__enter__()": ("expected a Runtime, got 'cpu'", "`open_runtime`"),
    "cuda_on_cpu('race', 'collect')": ("got cuda_on_cpu('race', 'collect')", "on_race='collect'"),
    "open_device('rac')": ("unknown device 'rac'", "'race'"),
    "open_engine('tpc')": ("no engine is called 'tpc'", "did you mean 'tcp'?"),
    "open_engine('tcp', prot=1)": ("got TcpEngine(prot=1)", "did you mean 'port'?"),
    "open_engine('tcp', port='x')": ("port is 'x', expected an integer", "pass an integer"),
    "KVLayout(4)": ("expected KVLayout(page_size, dtype, layers", "`dtype`, `layers` and `item_bytes` are missing"),
    "KVLayout(4, 'float33', ['a'], 64)": ("expected a dtype, got 'float33'", "'bfloat16'"),
    "Description('w', 'i', layout, 'here')": ("expected bytes, got 'here'", "`Engine.endpoint()`"),
    "Receiver('tcp', layout, [])": ("expected an Engine, got 'tcp'", "`open_engine`"),
    "Sender('tcp', layout, [])": ("expected an Engine, got 'tcp'", "`open_engine`"),
}


def names() -> dict[str, Any]:
    """What a reader of the first pages has: the public names, a runtime, pools, batches and what goes with them."""
    rt = open_runtime("cpu")
    pool = SlotPool(rt, 8)
    pages = PagePool(rt, pool, 32, 4, max_tokens_per_request=64)
    slots = pool.take(2)
    decode = Decode.build(rt, slots=slots, seq_lens=[5, 3], last_token=[1, 2], requests=["a", "b"])
    parts = (batchstate, batchstate.testing, batchstate.transport, batchstate.watch)
    found = {name: getattr(part, name) for part in parts for name in part.__all__} | globals()
    found |= {"rt": rt, "pool": pool, "pages": pages, "decode": decode, "lens": decode.seq_lens}
    found["batch"] = Rows.build(rt, slots=slots, seq_lens=[5, 3], requests=["a", "b"])
    found["relay"] = FutureMap(pool, {"tok": relay_field(torch.int64)})
    found |= {"cache": PrefixCache(pages), "table": pool.table("t", (4,), torch.int32)}
    return found | {"layout": KVLayout(4, "float32", ["k", "v"], 64)}


def test_what_is_typed_wrong_is_answered() -> None:
    """Each of these lines is a typed error that shows what was given, and says what to pass instead."""
    known = names()
    for line, (says, remedy) in TYPED.items():
        with pytest.raises((BatchStateError, KeyError)) as caught:
            exec(line, known)
        problem, _, told = str(caught.value).partition("remedy")
        assert says in problem, (line, str(caught.value))
        assert remedy in (told or problem), (line, str(caught.value))


class Engine:
    """A batch class as engines have it."""

    def __init__(self, lengths: Any = ()) -> None:
        self.lens = self.lens_cpu = torch.tensor(lengths)

    def step(self) -> None:
        """What is watched."""


def twin(**rest: Any) -> TwinSpec[Any, Any]:
    """A specification of `Engine`."""
    return TwinSpec("Engine", st.integers(1, 9), Engine, lambda batch, keep: batch, lambda batch: 1, **rest)


CALLS = {
    # a call of a method: (what the error says, what it tells to do)
    "batch.update(seq_lens=[1, 2])": ("expected Rows.update(column, rows, values)", "batch.replace(seq_lens=...)"),
    "batch.advance(seq_lens=1)": ("expected Rows.advance(columns, n=1)", "batch.advance('seq_lens', 1)"),
    "Rows.build()": ("expected Rows.build(runtime, /, **columns)", "Rows.build(runtime, slots=..., seq_lens=..."),
    "Rows()": ("Rows cannot be called directly", "Rows.build(runtime, ...)"),
    "MirroredTensor([1, 2])": ("cannot be called directly", "MirroredTensor.from_host(runtime, [1, 2])"),
    "MirroredTensor.from_host([1, 2])": ("`runtime` is [1, 2], expected", "MirroredTensor.from_host(runtime, [1, 2])"),
    "Slots([1, 2])": ("Slots cannot be called directly", "Slots.from_host(runtime, [1, 2])"),
    "batch.seq_lens.take()": ("expected MirroredTensor.take(rows)", "`rows` is missing: value.take(rows)"),
    "batch.seq_lens.stale()": ("expected MirroredTensor.stale(side, *, reason", "`side` and `reason` are missing"),
    "ForwardPlan.of()": ("expected ForwardPlan.of(slots, seq_lens, query_lens=1", "ForwardPlan.of(slots, seq_lens)"),
    "rt.stream()": ("expected CpuRuntime.stream(name)", "`name` is missing: runtime.stream(name)"),
}


def test_a_call_of_a_method_is_answered_with_its_signature() -> None:
    """A method called with other arguments is a typed error in whole sentences: the signature, and how to write it."""
    known = names()
    for line, (says, remedy) in CALLS.items():
        with pytest.raises(BatchStateError) as caught:
            eval(line, known)
        problem, _, told = str(caught.value).partition("remedy")
        assert isinstance(caught.value, TypeError), line
        assert says in problem, (line, str(caught.value))
        assert remedy in told, (line, str(caught.value))
        assert "positional argument" not in problem, line


PLAIN = {
    # a call of a method without a wrapper: the signature, and how to write it
    "pool.take()": "expected SlotPool.take(n, *, reserved=False), as in pool.take(2); Python says",
    "pool.take(count=3)": "expected SlotPool.take(n, *, reserved=False), as in pool.take(2); Python says",
    "pool.free()": "expected SlotPool.free(slots, *, after=None), as in pool.free(slots, after=fence); Python says",
    "pool.free(batch.slots, rt.record())": "expected SlotPool.free(slots, *, after=None), as in pool.free(slots",
    "pages.extend(batch.slots)": "expected PagePool.extend(slots, total_lens), as in pages.extend(batch.slots, ",
    "batch.filter()": "expected Batch.filter(keep), as in batch.filter([True, False]) or batch.filter([0]); Python",
    "batch.upload(1)": "expected Batch.upload(*, writes=(), extras=None), as in batch.upload(writes=[entry], extras={",
    "batch.next_batch([0])": "expected Batch.next_batch(*, keep=None, joining=None, advance=(), n=1), as in batch",
    "batch.objects()": "expected Batch.objects(column); Python says of this call: Batch.objects() missing",
}


def test_a_method_without_a_wrapper_says_its_signature() -> None:
    """Python's own refusal begins with the signature and a call that fits; no call is added."""
    known = names()
    for line, says in PLAIN.items():
        with pytest.raises(TypeError) as caught:
            eval(line, known)
        assert str(caught.value).startswith(says), (line, str(caught.value))
    for method in (SlotPool.take, SlotPool.free, PagePool.extend, Batch.upload, Batch.next_batch):
        assert not hasattr(method, "__wrapped__")


def test_an_error_of_the_function_itself_stays() -> None:
    """A TypeError that the called function raises is not taken for a call that does not fit."""

    class Failing(Guided):
        def __init__(self, runtime: object) -> None:
            raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        shows_signature(Failing)(1)


class Rows(Batch):
    """A batch as in the README."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    requests = host_list()


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
    "batch.to('cuda')": "build it with `open_runtime('cuda')`",
    "batch.clone()": "immutable",
    "batch.shape": "`len(batch)`",
    "batch.num_requests": "`len(batch)`",
    "batch.device": "`batch.runtime.device`",
    "pool.resize(9)": "make another one",
    "relay.stash(1)": "`relay.publish(slots, field=values)`",
    "table.device": "`table.device_for(slots)`",
    "cache.get('a')": "`cache.match(keys)`",
    "rt.sync()": "`runtime.synchronize()`",
    "batchstate.SlotPol": "did you mean 'SlotPool'?",
    "batch.seq_lens_cpu": "`.seq_lens.np`",
    "batch.seq_lens.add_(1)": "`batch = batch.advance(name, 1)`",
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
    known = names()
    for line, says in ABSENT.items():
        with pytest.raises(AttributeError) as caught:
            eval(line, known)
        assert "has no attribute" in str(caught.value), line
        assert says in str(caught.value), line
    one: Any
    for one in (known["batch"], known["pool"], known["pages"]):
        assert not hasattr(one, "alloc")
        with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
            one.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("typed", "meant"), [("batch.seq_len", "seq_lens"), ("batch.seq_lens_cp", "seq_lens"), ("pool.stat", "stats")]
)
def test_python_says_what_a_misspelt_name_resembles(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The traceback shows a name that exists, and none that is known from elsewhere."""
    with pytest.raises(AttributeError) as caught:
        eval(typed, names())
    sys.__excepthook__(caught.type, caught.value, caught.tb)
    assert f"Did you mean: '{meant}'?" in capsys.readouterr().err


def test_names_from_elsewhere_are_not_listed() -> None:
    """They stand in no `dir`, they are not there for `hasattr`, and a column or a method may have them."""
    rt = open_runtime("cpu")

    class Sized(Rows):
        size = mirrored(torch.int32)

        def pop(self) -> str:
            """Of the engine's own."""
            return "mine"

    batch: Any = Sized.build(rt, slots=SlotPool(rt, 8).take(1), seq_lens=[5], requests=["a"], size=[4])
    pool: Any = SlotPool(rt, 8)
    assert batch.size.tolist() == [4]
    assert batch.pop() == "mine"
    assert {"alloc", "seq_lens_cpu", "add_", "keys"}.isdisjoint([*dir(pool), *dir(batch), *dir(batch.seq_lens)])
    assert {"take", "name"} <= {*dir(pool)}
    for one, name in ((pool, "alloc"), (SlotPool, "alloc"), (batch, "seq_lens_cpu"), (batch.seq_lens, "add_")):
        assert not hasattr(one, name)
    for kind in (SlotPool, PagePool, FutureMap, type(rt), MirroredTensor, Batch):
        assert not hasattr(kind, "__getattr__"), "which slows each attribute down"
    assert not isinstance(pool, Iterable)


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
