"""What an operation touches, byte by byte: regions and operations against brute force, and where a call came from."""

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate._source_lines import source_line
from batchstate.errors import ArgumentError, DeviceError, OwnerThreadError
from batchstate.mirror import MirroredTensor
from batchstate.races import RaceRuntime, SimRuntime
from batchstate.races.tracing.dispatch import tracing
from batchstate.races.tracing.memory import Allocation, Allocations, MemoryKind
from batchstate.races.tracing.operations import MemoryAccess, Operation
from batchstate.races.tracing.regions import ByteRegion, of_elements, of_index, of_rows, of_tensor, union, union_of
from batchstate.runtime import CpuRuntime, DoneFence
from batchstate.testing import LateRuntime
from tests.doubles import in_a_thread

BYTES = 96


def bytes_of(region: ByteRegion | None) -> set[int]:
    """The bytes of a region, one by one."""
    return set() if region is None else {byte for lo, hi in region.intervals() for byte in range(lo, hi)}


def bytes_of_elements(tensor: torch.Tensor) -> set[int]:
    """The bytes of a tensor, element by element."""
    size = tensor.element_size()
    found: set[int] = set()
    for place in np.ndindex(tuple(tensor.shape)):
        start = tensor.storage_offset() + sum(at * step for at, step in zip(place, tensor.stride(), strict=True))
        found.update(range(start * size, (start + 1) * size))
    return found


intervals = st.lists(
    st.tuples(st.integers(0, BYTES - 1), st.integers(1, 12)).map(lambda one: (one[0], one[0] + one[1])),
    min_size=1,
    max_size=8,
)


@given(intervals, intervals)
@settings(deadline=None)
def test_regions_are_sets_of_bytes(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    """Overlap, common bytes, cover and union are those of sets."""
    first, second = union(one), union(other)
    ours, theirs = bytes_of(first), bytes_of(second)
    assert first.overlaps(second) is bool(ours & theirs)
    assert second.overlaps(first) is bool(ours & theirs)
    assert bytes_of(first.common(second)) == ours & theirs
    assert first.covers(second) is (theirs <= ours)
    assert second.covers(first) is (ours <= theirs)
    assert bytes_of(union_of([first, second])) == ours | theirs
    assert ours == {byte for lo, hi in one for byte in range(lo, hi)}


@given(intervals)
@settings(deadline=None)
def test_a_region_is_written_in_one_way_only(one: list[tuple[int, int]]) -> None:
    """Intervals are sorted, and a gap lies between any two of them."""
    region = union(one)
    found = region.intervals()
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(found))
    assert (region.lo, region.hi) == (found[0][0], found[-1][1])
    assert (region.starts is None) == (len(found) == 1)
    assert union_of([region]).intervals() == found


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A view with any shape, strides and offset, also overlapping itself."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.int64]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    contiguous = list(torch.empty(shape).stride())
    stride = contiguous if draw(st.booleans()) else [draw(st.integers(0, 9)) for _ in shape]
    offset = draw(st.integers(0, 5))
    return torch.zeros(200, dtype=dtype).as_strided(shape, stride, offset)


@given(strided())
@settings(deadline=None)
def test_the_region_of_a_tensor_is_that_of_its_elements(tensor: torch.Tensor) -> None:
    """Whatever its strides are: overlapping windows, expanded dimensions, gaps and columns."""
    assert bytes_of(of_tensor(tensor)) == bytes_of_elements(tensor)


@given(strided(), st.data())
@settings(deadline=None)
def test_the_region_of_rows_is_that_of_the_rows(tensor: torch.Tensor, data: st.DataObject) -> None:
    """`of_rows` names what `index_select` reads, in any dimension."""
    if not tensor.ndim or not tensor.numel():
        return
    dim = data.draw(st.integers(-tensor.ndim, tensor.ndim - 1))
    length = tensor.shape[dim]
    index = data.draw(st.lists(st.integers(0, length - 1), max_size=5))
    expected = set[int]().union(*(bytes_of_elements(tensor.select(dim, at)) for at in index))
    assert bytes_of(of_rows(tensor, dim, np.array(index, np.int64))) == expected


@given(strided(), st.data())
@settings(deadline=None)
def test_the_region_of_an_index_is_that_of_torch(tensor: torch.Tensor, data: st.DataObject) -> None:
    """`of_index` names what an index of arrays over some dimensions takes; negative positions count from the end."""
    if not tensor.ndim or not tensor.numel():
        return
    dims = data.draw(st.sets(st.integers(0, tensor.ndim - 1), min_size=1))
    count = data.draw(st.integers(0, 4))
    indices = {
        dim: np.array(
            [data.draw(st.integers(-tensor.shape[dim], tensor.shape[dim] - 1)) for _ in range(count)], np.int64
        )
        for dim in sorted(dims)
    }
    expected: set[int] = set()
    for at in range(count):
        view = tensor
        for dim in sorted(dims, reverse=True):
            view = view.select(dim, int(indices[dim][at]))
        expected |= bytes_of_elements(view)
    assert bytes_of(of_index(tensor, indices)) == expected


def test_an_index_out_of_range_names_the_whole_tensor() -> None:
    """Torch will refuse it, so nothing has to be right but that nothing fails before."""
    tensor = torch.zeros(4, 2)
    assert bytes_of(of_index(tensor, {0: np.array([4])})) == bytes_of(of_tensor(tensor))
    assert bytes_of(of_elements(torch.tensor(3), 0, np.array(0))) == set(range(8))


def test_a_region_of_too_many_pieces_is_what_lies_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond `MOST_INTERVALS` a region is coarse: it may make a race up, and overlooks none."""
    from batchstate.races.tracing import regions

    monkeypatch.setattr(regions, "MOST_INTERVALS", 3)
    tensor = torch.zeros(8, 4)
    assert of_tensor(tensor[::2, :2]).intervals() == [(0, 4 * 26)]  # type: ignore[union-attr]
    chosen = of_index(tensor, {0: np.array([0, 2, 4, 6])})
    assert chosen is not None
    assert bytes_of(of_tensor(tensor)) >= bytes_of(chosen) >= bytes_of(of_tensor(tensor[::2]))


# Operations


class Calls:
    """A tracer that asks each operation for its accesses, and runs it."""

    def __init__(self) -> None:
        self.found: list[MemoryAccess] = []
        self.names: list[str] = []
        self.host: list[str] = []
        self.lifted: list[bool] = []

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lifted: bool) -> Any:
        """See `Tracer`."""
        operation = Operation.of(func)
        self.names.append(operation.name)
        if operation.name == "lift_fresh":
            self.lifted.append(lifted)
        if not operation.is_metadata:
            self.found += operation.accesses(args, kwargs, lambda index: index.numpy())
        return func(*args, **kwargs)

    def host_call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """See `Tracer`."""
        self.host.append(name)
        return False, None


def traced(call: Callable[[], Any]) -> tuple[Calls, Any]:
    """A call, traced."""
    calls = Calls()
    with tracing(cast(Any, calls)):
        result = call()
    return calls, result


def touched(calls: Calls, tensor: torch.Tensor, *, writes: bool) -> set[int]:
    """Elements of a contiguous tensor that were touched; each wholly or not at all."""
    memory = tensor.untyped_storage()._cdata
    size = tensor.element_size()
    found: set[int] = set()
    for touch in calls.found:
        if touch.writes is writes and touch.tensor.untyped_storage()._cdata == memory:
            found |= bytes_of(touch.region)
    elements = {byte // size for byte in found}
    assert found == {byte for at in elements for byte in range(at * size, (at + 1) * size)}
    return elements


def table() -> torch.Tensor:
    """float64[6, 4] of values that no operation below writes."""
    return torch.arange(1.0, 25.0, dtype=torch.float64).reshape(6, 4)


def index(*places: int) -> torch.Tensor:
    """int64[n]."""
    return torch.tensor(places, dtype=torch.int64)


def rows(count: int) -> torch.Tensor:
    """float64[count, 4] of large values."""
    return 1000.0 + torch.arange(count * 4.0, dtype=torch.float64).reshape(count, 4)


EVEN = torch.tensor([True, False, True, False, True, False])
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "fill_ of a slice": lambda t: t[1:3].fill_(-1),
    "fill_ of columns": lambda t: t[:, 1:3].fill_(-1),
    "fill_ of nothing": lambda t: t[2:2].fill_(-1),
    "setitem of a number": lambda t: t.__setitem__((1, 2), -1),
    "setitem of a row": lambda t: t.__setitem__(3, -1),
    "setitem by a list": lambda t: t.__setitem__([0, 5], -1),
    "setitem behind a new dimension": lambda t: t.__setitem__((slice(1, 3), None, 2), -1),
    "add_ to a turned view": lambda t: t.t()[1].add_(100),
    "zero_ of a diagonal": lambda t: t[:4].diagonal().zero_(),
    "copy_ into rows": lambda t: t[2:4].copy_(rows(2)),
    "copy_ within": lambda t: t[0].copy_(t[5]),
    "index_put_": lambda t: t.index_put_((index(1, 4),), rows(2)),
    "index_put_ that adds": lambda t: t.index_put_((index(1, 1),), rows(2), accumulate=True),
    "index_put_ of places": lambda t: t.__setitem__((index(1, 4), index(0, -1)), -1),
    "index_put_ of columns": lambda t: t.__setitem__((slice(None), index(0, 2)), -1),
    "index_put_ in a slice": lambda t: t.__setitem__((index(1, 3), slice(1, 3)), -1),
    "index_put_ of a grid": lambda t: t.__setitem__((index(1, 3)[:, None], index(0, 2)), -1),
    "index_put_ by a mask": lambda t: t.__setitem__(EVEN, rows(3)),
    "index_put_ by a mask of all": lambda t: t.__setitem__(t > 20, -1),
    "index_put_ by no index": lambda t: t.__setitem__(index(), -1),
    "masked_fill_": lambda t: t.masked_fill_(EVEN[:, None], -1),
    "masked_fill_ of columns": lambda t: t.masked_fill_(torch.tensor([True, False, False, True]), -1),
    "masked_fill_ of none": lambda t: t.masked_fill_(torch.tensor(False), -1),
    "masked_fill_ of a view": lambda t: t[:, 1].masked_fill_(EVEN, -1),
    "masked_scatter_": lambda t: t.masked_scatter_(EVEN[:, None], rows(3)),
    "index_copy_": lambda t: t.index_copy_(0, index(0, 3), rows(2)),
    "index_copy_ of columns": lambda t: t.index_copy_(1, index(2), rows(6)[:, :1]),
    "index_fill_": lambda t: t.index_fill_(-2, index(2, 5), -1),
    "index_add_": lambda t: t.index_add_(0, index(2, 2), rows(2)),
    "scatter_": lambda t: t.scatter_(1, index(0, 3, 2)[:, None], rows(3)),
    "scatter_ of a number": lambda t: t.scatter_(0, index(5, 1)[None, :], -1),
    "scatter_add_": lambda t: t.scatter_add_(1, index(1, 1)[:, None], rows(2)),
    "scatter_reduce_": lambda t: t.scatter_reduce_(1, index(1, 3)[:, None], rows(2), "sum"),
    "scatter_ of a view": lambda t: t[1:, 1:].scatter_(1, index(0, 2)[:, None], -1),
    "put_": lambda t: t.put_(index(3, -1), torch.tensor([-1.0, -2.0], dtype=torch.float64)),
    "out": lambda t: torch.add(rows(2), 1, out=t[4:]),
    "out of two": lambda t: torch.max(rows(4), 1, out=(t.view(-1)[:4], torch.empty(4, dtype=torch.int64))),
    "_foreach_add_": lambda t: torch._foreach_add_([t[0], t[3]], 100.0),
    "clamp_": lambda t: t[1:2].clamp_(max=0),
    "swapped rows": lambda t: t.__setitem__(index(0, 1), t[index(1, 0)]),
    "detach_": lambda t: t.clone().detach_(),
    "new_full": lambda t: t.new_full((2,), -1).add_(1),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_an_operation_writes_is_what_has_changed(name: str) -> None:
    """Element by element: nothing else is named as written, and nothing is left out."""
    tensor = table()
    before = tensor.clone()
    calls, _ = traced(lambda: WRITES[name](tensor))
    changed = {int(at) for at in (tensor != before).view(-1).nonzero()}
    assert touched(calls, tensor, writes=True) == changed


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "clone of a slice": lambda t: t[1:3].clone(),
    "sum of a column": lambda t: t[:, 2].sum(),
    "index_select": lambda t: t.index_select(0, index(1, 4)),
    "index_select of columns": lambda t: t.index_select(1, index(3)),
    "getitem": lambda t: t[index(2, -1)],
    "getitem of places": lambda t: t[index(2, 3), index(1, 1)],
    "getitem by a mask": lambda t: t[EVEN],
    "getitem by bytes": lambda t: t[:, 0][index(0, 2)],
    "gather": lambda t: t.gather(1, index(0, 3, 2)[:, None]),
    "gather of rows": lambda t: t.gather(0, index(5, 1)[None, :]),
    "take": lambda t: t.take(index(7, -2)),
    "take_along_dim": lambda t: torch.take_along_dim(t, index(0, 1, 2, 3, 0, 1)[:, None], 1),
    "masked_select": lambda t: t.masked_select(EVEN[:, None]),
    "embedding": lambda t: torch.nn.functional.embedding(index(5, 0, 5), t),
    "cat": lambda t: torch.cat([t[:1], t[4:]]),
    "stack": lambda t: torch.stack([t[0], t[2]]),
    "expand": lambda t: t[1, 1].expand(5) + 1,
    "unbind": lambda t: t.unbind()[3] + 1,
    "add of two views": lambda t: t[0] + t[:, 0][:4],
    "matmul": lambda t: t[:2] @ t[2:4].t(),
    "reshape that copies": lambda t: t[:3].t().reshape(-1),
    "contiguous": lambda t: t[:, 1:].contiguous(),
    "to another dtype": lambda t: t[2].to(torch.float32),
    "new_zeros": lambda t: t.new_zeros(3),
    "zeros_like": lambda t: torch.zeros_like(t),
    "is_pinned": lambda t: torch.tensor(0.0) if t.is_pinned() else torch.tensor(1.0),
    "sort": lambda t: t[1:3].sort(1).values,
    "where": lambda t: torch.where(EVEN[:4], t[0], t[1]) + t[1] + t[0],
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", READS)
def test_what_an_operation_reads_is_what_its_result_depends_on(name: str, inference: bool) -> None:
    """What is changed and changes the result was read, also in inference mode, and nothing else."""
    with torch.inference_mode(inference):
        tensor = table()
        call = READS[name]
        calls, result = traced(lambda: call(tensor))
        read = set()
        for at in range(tensor.numel()):
            other = tensor.clone()
            other.view(-1)[at] *= -3
            changed = call(other)
            if changed.shape != result.shape or not torch.equal(changed, result):
                read.add(at)
        assert touched(calls, tensor, writes=False) == read
        assert not touched(calls, tensor, writes=True)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_index_of_torch_reads_what_it_takes(data: st.DataObject) -> None:
    """Slices, arrays, masks and new dimensions, in any mixture that numpy knows."""
    tensor = torch.arange(1, 61).reshape(3, 4, 5)
    key: list[Any] = []
    lengths = iter(tensor.shape)
    for length in lengths:
        kind = data.draw(st.sampled_from(["slice", "array", "number", "mask", "new"]))
        if kind == "new":
            key.append(None)
            kind = "slice"
        if kind == "slice":
            start = data.draw(st.integers(0, length))
            key.append(slice(start, data.draw(st.integers(start, length)), data.draw(st.integers(1, 2))))
        elif kind == "array":
            key.append(index(*(data.draw(st.integers(-length, length - 1)) for _ in range(2))))
        elif kind == "number":
            key.append(data.draw(st.integers(-length, length - 1)))
        else:
            places = data.draw(st.permutations(range(length)))[:2]
            key.append(torch.tensor([at in places for at in range(length)]))
    calls, taken = traced(lambda: tensor[tuple(key)].clone())
    assert touched(calls, tensor, writes=False) == {int(value) - 1 for value in taken.view(-1)}


def test_views_touch_nothing() -> None:
    """Neither does what changes a tensor's shape in place."""
    tensor = table()
    calls, _ = traced(lambda: (tensor.view(-1)[2:], tensor.t(), tensor.unbind(), tensor.detach(), tensor.clone()))
    assert {touch.tensor.untyped_storage()._cdata for touch in calls.found} == {tensor.untyped_storage()._cdata}
    whole = tensor.clone()
    calls, _ = traced(lambda: whole.unsqueeze_(0).squeeze_().t_().detach_())
    assert calls.found == []
    assert calls.names[:3] == ["unsqueeze_", "squeeze_", "t_"]


def test_inference_mode_shows_the_same_operations() -> None:
    """There torch shows a tool whole functions, which may or may not copy: they are taken apart as everywhere else."""
    tensor = table()

    def call() -> None:
        tensor.t().reshape(-1)
        tensor.t().contiguous()
        tensor.to(torch.float32)
        torch.take_along_dim(tensor, index(0, 1, 2, 3, 0, 1)[:, None], 1)

    outside, _ = traced(call)
    with torch.inference_mode():
        inside, _ = traced(call)
    assert [name for name in inside.names if name in ("clone", "_to_copy", "gather")] == [
        "clone",
        "clone",
        "_to_copy",
        "gather",
    ]
    assert [name for name in outside.names if "detach" not in name] == [
        name for name in inside.names if "detach" not in name
    ]


def test_a_number_that_is_written_is_the_hosts() -> None:
    """`torch.tensor(5, device=...)` says where its number lies; `t[0] = 5` and `torch.from_numpy` lift the host's."""
    tensor = table()

    def call() -> None:
        tensor[0, 0] = 5
        torch.tensor(5)
        torch.from_numpy(np.zeros(3))

    calls, _ = traced(call)
    assert calls.lifted == [False, True, False]


def test_calls_that_never_dispatch_are_told() -> None:
    """On a CPU nothing else shows that numbers came to the host."""
    tensor = torch.zeros(2)
    calls, _ = traced(lambda: (tensor.tolist(), tensor.cpu(), tensor.to("cpu"), np.asarray(tensor), tensor.numpy()))
    assert calls.host[:3] == ["tolist", "cpu", "to"]
    assert {"__array__", "numpy"} & set(calls.host)


# Where a call came from, and whose memory it is


def test_the_source_line_is_the_line_of_the_call() -> None:
    """Relative to where the process runs, with the function's name; no line outside led there."""
    line, caller = source_line(1)
    assert str(line).endswith("in test_the_source_line_is_the_line_of_the_call")
    assert str(line).startswith("tests/test_tracing.py:")
    assert caller is None


def test_the_source_line_skips_torch_and_the_tools(rt: Any) -> None:
    """Inside of the library the innermost line counts, and the line outside that led there."""
    found = []

    class Asks(Calls):
        def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lifted: bool) -> Any:
            found.append(source_line(2))
            return super().operation(func, args, kwargs, lifted)

    mirror = MirroredTensor.from_host(rt, np.arange(4))
    with tracing(cast(Any, Asks())):
        torch.nn.functional.softmax(torch.zeros(2), 0)
        (mirror + 1).device  # noqa: B018 - it is made when it is asked for
    assert str(found[0].line).startswith("tests/test_tracing.py:")
    assert found[0].caller is None
    inner = [one for one in found if one.caller is not None]
    assert inner
    assert str(inner[0].line).startswith("batchstate/mirror.py")
    assert "test_the_source_line_skips_torch_and_the_tools" in str(inner[0].caller)


def test_memory_lives_as_long_as_any_view_of_it() -> None:
    """It dies once, when the last tensor goes, and is forgotten then."""
    died: list[Allocation] = []
    allocations: Allocations[Allocation] = Allocations(died.append)
    tensor = torch.zeros(4, 2)
    owned = allocations.add(tensor, Allocation(MemoryKind.DEVICE))
    view = tensor.view(-1)[3:5].view(torch.int32)
    assert allocations.of(view) is owned
    del tensor
    gc.collect()
    assert died == []
    assert allocations.of(view) is owned
    del view
    assert died == [owned]
    assert len(allocations) == 0


def test_memory_that_is_kept_anew_dies_as_the_new_one() -> None:
    """What was kept before is neither reported nor found."""
    died: list[Allocation] = []
    allocations: Allocations[Allocation] = Allocations(died.append)
    tensor = torch.zeros(4)
    allocations.add(tensor, Allocation(MemoryKind.HOST))
    later = allocations.add(tensor, Allocation(MemoryKind.DEVICE))
    del tensor
    assert died == [later]


# What both runtimes refuse

Tool = type[RaceRuntime] | type[SimRuntime]
tools = pytest.mark.parametrize("tool", [RaceRuntime, SimRuntime])


@tools
def test_a_runtime_is_entered_once(tool: Tool) -> None:
    """Neither inside of its window nor after it: what was freed in between would be unknown."""
    with tool() as rt, pytest.raises(ArgumentError, match="entered twice"):
        rt.__enter__()
    with pytest.raises(ArgumentError, match="entered twice"):
        rt.__enter__()


@tools
def test_fences_of_other_runtimes_are_refused(tool: Tool) -> None:
    """They order nothing here; one that is complete for good is accepted."""
    with tool() as rt:
        rt.wait(DoneFence())
        rt.wait(CpuRuntime().record())
        for foreign in (RaceRuntime().record(), LateRuntime().record(), tool().record()):
            with pytest.raises(ArgumentError, match="was not recorded by this runtime"):
                rt.wait(foreign)


def test_streams_of_other_runtimes_are_refused_by_the_simulated_device() -> None:
    """Nothing would ever run there. The race detector learns of streams when they are first used: torch has its own."""
    with (
        SimRuntime() as rt,
        pytest.raises(ArgumentError, match="is not a stream of this runtime"),
        rt.use(CpuRuntime().stream("one")),
    ):
        pass


@tools
@pytest.mark.parametrize(
    "call",
    [
        lambda rt: rt.record(),
        lambda rt: rt.wait(DoneFence()),
        lambda rt: rt.__enter__(),
        lambda rt: rt.launch(lambda: None),
        lambda rt: rt.upload([np.arange(2)]),
        lambda rt: rt.synchronize(),
        lambda rt: rt.next_step(),
        lambda rt: rt.use(rt.current_stream).__enter__(),
    ],
)
def test_a_second_thread_is_refused(tool: Tool, call: Callable[[Any], object]) -> None:
    """A tool follows one thread; it would not see what another does."""
    rt = tool()
    assert isinstance(in_a_thread(lambda: call(rt)), OwnerThreadError)


@tools
def test_host_and_device_memory_do_not_mix(tool: Tool) -> None:
    """On a CPU they look alike; an accelerator would refuse, and so do the tools, also what is put at an index."""
    with tool() as rt:
        here, host = rt.device_zeros((2,), torch.int64), torch.from_numpy(np.ones(2, np.int64))
        with pytest.raises(DeviceError, match="bring it to the device first"):
            here.add_(host)
        with pytest.raises(DeviceError, match="bring it to the device first"):
            here[here] = host
        with pytest.raises(DeviceError, match=r"use `Runtime.download` or `.cpu\(\)`"):
            here.numpy()
        with pytest.raises(DeviceError):
            np.asarray(here)
        with pytest.raises(ArgumentError, match="only host memory can be pinned"):
            here.pin_memory()


@tools
@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda t: t.index_put_((t > 0,), torch.tensor(7)), []),
        (lambda t: t.index_put_((t > 0,), t.clone()[:2]), ["index_put_"]),
        (lambda t: t.index_put((t > 0,), t.clone()[:2]), ["index_put"]),
        (lambda t: torch.repeat_interleave(t, output_size=3), []),
        (lambda t: torch.repeat_interleave(t), ["repeat_interleave"]),
        (lambda t: t[torch.from_numpy(np.array([1]))], ["index"]),
        (lambda t: torch.isin(t, t), []),  # 10 elements and more are sorted, of 3
        (lambda t: torch.isin(t, t.new_zeros(11)), ["isin"]),
        (lambda t: torch.isin(t, t.new_zeros(11), assume_unique=True), []),
        (lambda t: torch.isin(t, 1), []),
    ],
)
def test_both_tools_know_what_makes_the_host_wait(
    tool: Tool, call: Callable[[torch.Tensor], object], waits: list[str]
) -> None:
    """Where the shape of the result, or what is written, has to be known; one number put by a mask is a plain fill."""
    with tool() as rt:
        call(rt.upload([np.array([1, 0, 2])]).view(0))
        assert list(rt.synchronised) == waits
