"""Plain torch code that says `cuda`, on a CPU: what it sees of torch, which races are found, and how torch is left."""

# mypy: disable-error-code="no-untyped-call"

import contextlib
import copy
import functools
import gc
import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.cuda import Event, Stream, current_stream, synchronize

from batchstate.errors import ArgumentError
from batchstate.races import Race, RaceKind
from batchstate.races.cuda import cuda_on_cpu, declared_kernel
from tests.cuda_idioms import IDIOMS
from tests.race_cases import CASES, Case
from tests.race_cases.plain import PlainCuda
from tests.race_cases.tools import expected

GPU = torch.cuda.is_available()

_LOOKED_AT = (
    torch,
    torch.version,
    torch.Tensor,
    torch._C,
    torch.cuda,
    torch.cuda.graphs,
    torch.cuda.memory,
    torch.cuda.Stream,
    torch.cuda.Event,
    torch.cuda.CUDAGraph,
    torch.cuda.MemPool,
    threading.Thread,
)


def _gradient(of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    of(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def left_over(before: list[dict[str, Any]]) -> list[str]:
    """Attributes of torch that are not what they were."""
    found = []
    for owner, then in zip(_LOOKED_AT, before, strict=True):
        now = dict(vars(owner))
        modules = {name for name in now if name not in then and type(now[name]) is type(torch)}
        found += [name for name in now.keys() ^ then.keys() if name not in modules]
        found += [name for name in then if name in now and then[name] is not now[name]]
    return found


def attributes() -> list[dict[str, Any]]:
    """What torch has now."""
    importlib.import_module("torch._dynamo")  # which replaces functions of torch itself
    if GPU:
        torch.cuda.init()  # as a window does
    return [dict(vars(one)) for one in _LOOKED_AT]


@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_races_or_not(name: str) -> None:
    """The racy one is reported, by its kind, once; its safe twin is not."""
    kind, program = IDIOMS[name]
    for racy in (True, False):
        with cuda_on_cpu(on_race="collect") as rt:
            program(racy)
        wanted = {kind} if racy and kind else set()
        assert {race.kind for race in rt.races} == wanted, "\n".join(map(str, rt.races))
        assert rt.accesses


@pytest.mark.parametrize("case", CASES.values(), ids=[case.name for case in CASES.values()])
def test_race_cases_in_plain_torch(case: Case) -> None:
    """Both sides of all pairs, said to torch alone: the one race that is there, and no other."""
    with cuda_on_cpu(on_race="collect") as rt:
        case.run(PlainCuda(rt))
    if not case.racy:
        assert rt.races == ()
        return
    (race,) = rt.races
    assert expected(case, race, operations=case.pair != "uploads step after step")  # torch calls an upload `empty`


def test_torch_says_that_there_is_a_device() -> None:
    """As it was declared; tensors answer `cuda:0`, have memory of their own, and mixing them with the host's raises."""
    with cuda_on_cpu(name="a GPU", memory=1 << 30, capability=(8, 6)):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.get_device_name() == "a GPU"
        assert torch.cuda.get_device_capability() == (8, 6)
        assert torch.get_device_module() is torch.cuda
        assert torch.version.cuda
        assert torch.cuda.is_bf16_supported()
        on_host = torch.arange(4.0)
        made = [
            on_host.cuda(),
            on_host.to("cuda:0"),
            on_host.to(torch.device("cuda"), torch.float16, non_blocking=True),
            torch.zeros(4, device="cuda"),
            torch.tensor([1.0], device="cuda"),
            torch.as_tensor([1.0], device="cuda"),
            torch.zeros(4).new_tensor([1], device="cuda"),
            torch.zeros_like(on_host, device="cuda"),
            torch.nn.Linear(2, 2, device="cuda").weight,
        ]
        for one in made:
            assert one.device == torch.device("cuda", 0)
            assert one.is_cuda
            assert not one.is_cpu
            assert type(one) in (torch.Tensor, torch.nn.Parameter)
            assert one.cpu().device.type == "cpu"
            assert one.cpu().data_ptr() != one.data_ptr()
            assert copy.deepcopy(one).is_cuda
        assert made[1].to("cuda") is made[1]
        assert on_host.to("cpu") is on_host
        assert made[3].type() == "torch.cuda.FloatTensor"
        assert torch.cuda.memory_allocated() == sum(one.untyped_storage().nbytes() for one in {*made})
        assert torch.cuda.mem_get_info() == ((1 << 30) - torch.cuda.memory_allocated(), 1 << 30)
        with pytest.raises(RuntimeError, match="at least two devices"):
            made[3] + on_host
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            made[3].numpy()
        with torch.device("cuda"):
            assert torch.tensor([1]).is_cuda
            assert torch.zeros(1).is_cuda
        assert not torch.zeros(1).is_cuda
        assert torch.rand(2, device="cuda", generator=torch.Generator(device="cuda")).is_cuda
        assert isinstance(current_stream(), Stream)
        assert isinstance(torch.Event("cuda"), Event)
    assert torch.cuda.is_available() is GPU
    assert not made[3].is_cuda


def test_an_element_that_is_set_to_a_number_waits() -> None:
    """On a GPU torch copies the number from pageable memory, and fills where a part is set: a race may be hidden so."""
    for key, waits in ((4, 1), (slice(4, 5), 0)):
        with cuda_on_cpu(on_race="collect") as rt:
            side, lengths = Stream(), torch.zeros(8, device="cuda")
            synchronize()
            with torch.cuda.stream(side):
                lengths[key] = 7
            lengths[key] = 8
        assert rt.synchronised["copy_"] == 2 * waits
        assert bool(rt.races) is not bool(waits)


def test_rows_that_are_set_to_a_number_wait_where_indices_name_them() -> None:
    """The number is copied to the device first, from pageable memory; where a mask names the rows, torch fills them."""
    for make, value, waits in (
        (lambda: torch.tensor([1, 2], device="cuda"), 7, 1),
        (lambda: torch.arange(8, device="cuda") < 2, 7, 0),
    ):
        with cuda_on_cpu() as rt:
            lengths, rows = torch.zeros(8, dtype=torch.int64, device="cuda"), make()
            before = sum(rt.synchronised.values())
            lengths[rows] = value
            assert sum(rt.synchronised.values()) - before == waits
            assert lengths.cpu().sum() == 14
        with cuda_on_cpu() as rt:
            lengths, rows = torch.zeros(8, dtype=torch.int64, device="cuda"), make()
            one = torch.full((), 7, device="cuda")
            before = sum(rt.synchronised.values())
            lengths[rows] = one
            assert sum(rt.synchronised.values()) - before == (1 - waits), "a value of the device, where a mask says"


def test_a_graph_runs_when_it_is_replayed() -> None:
    """Capturing changes nothing; what would wait for the device is refused while it lasts."""
    with cuda_on_cpu():
        counter, graph = torch.zeros(2, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = counter * 2
            counter += 1
            assert torch.cuda.is_current_stream_capturing()
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                doubled.sum().item()
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                synchronize()
        assert counter.tolist() == [0, 0]
        graph.replay()
        graph.replay()
        assert (counter.tolist(), doubled.tolist()) == ([2, 2], [2, 2])


def test_reports_speak_of_the_code_and_of_torch() -> None:
    """Streams and events by the attribute or variable that holds them, and a line of torch that adds the edge."""

    class Engine:
        def __init__(self) -> None:
            self.copy_stream: Any = Stream()
            self.copied: Any = Event()

    with cuda_on_cpu(on_race="collect") as rt:
        engine = Engine()
        out = torch.zeros(4, device="cuda")
        synchronize()
        with torch.cuda.stream(engine.copy_stream):
            out.fill_(1)
            engine.copied.record()
        out.clone()
    (race,) = rt.races
    assert (race.first.lane, race.second.lane) == ("copy_stream", "default")
    assert "test_cuda_on_cpu.py" in race.first.site
    assert race.missing == "stream 'default' never waits for fill_ on stream 'copy_stream'"
    assert "`torch.cuda.default_stream().wait_event(engine.copied)` before clone" in race.suggestion
    assert "batchstate" not in str(race).replace("tests", "")


def test_a_use_behind_no_allocation_is_said_as_such() -> None:
    """Freed memory that is in use; the remedy is a wait for the stream that allocates, not `record_stream`."""
    with cuda_on_cpu(on_race="collect") as rt:
        IDIOMS["empty_gets_what_its_stream_has_freed"][1](True)
    (race,) = rt.races
    assert race.problem == (
        "memory is used on 'copies' with no order after its allocation on 'default', "
        "whose earlier work may still use that block"
    )
    assert race.first.does == "allocates"
    assert race.suggestion == "`copies.wait_stream(torch.cuda.default_stream())` before copy to device"


def test_a_remedy_names_an_event_that_has_a_name() -> None:
    """One that `wait_stream` has recorded in between has none."""
    with cuda_on_cpu(on_race="collect") as rt:
        copies = Stream()
        used = Event()
        buffer = torch.zeros(4, device="cuda")
        synchronize()
        buffer.clone()
        Stream().wait_stream(current_stream())
        used.record()
        with torch.cuda.stream(copies):
            buffer.fill_(1)
    assert rt.races[0].suggestion.startswith("`copies.wait_event(used)` before fill_")


class _Staging:
    """A buffer with its stream and the event behind its last write."""

    def __init__(self) -> None:
        self.copies: Any = Stream()
        self.done: Any = Event()
        self.buffer = torch.zeros(4, device="cuda")
        synchronize()

    def write(self, records: bool) -> None:
        with torch.cuda.stream(self.copies):
            self.buffer.fill_(1)
            if records:
                self.done.record()

    def read(self) -> None:
        self.buffer.clone()


@pytest.mark.parametrize(
    ("records", "inside", "remedy"),
    [
        (True, True, "wait_event(self.done)` before clone; the event is recorded at tests"),
        (False, True, "wait_stream(self.copies)` before clone"),
        (True, False, "wait_event(<done>)` before clone; the event is recorded at tests"),
        (False, False, "wait_stream(<copies>)` before clone; <copies> is the stream made at tests"),
    ],
)
def test_a_remedy_says_names_as_the_second_access_does(records: bool, inside: bool, remedy: str) -> None:
    """`self.done` in a method; `<done>` where no variable holds that event, also beside another one called `done`."""

    def read_elsewhere(buffer: torch.Tensor) -> tuple[Any, Any]:
        done, copies = Event(), Stream()
        done.record()
        buffer.clone()
        return done, copies

    with cuda_on_cpu(on_race="collect") as rt:
        staging = _Staging()
        staging.write(records)
        staging.read() if inside else read_elsewhere(staging.buffer)
    assert rt.races[0].suggestion.startswith(f"`torch.cuda.default_stream().{remedy}"), rt.races[0].suggestion


def test_streams_of_one_line_are_told_apart() -> None:
    """By the variables that take them, whatever stands beside them; in a list by their number."""

    class Holder:
        inner: Any
        left: Any

    def make(priority: int) -> Any:
        return Stream(priority=priority)

    with cuda_on_cpu(on_race="collect") as rt:
        holder, table = Holder(), dict[str, Any]()
        holder.inner = Holder()
        first, second, third = Stream(), make(-1), Stream(priority=0)
        holder.left, holder.inner.right = make(0), Stream()
        both = also = Stream()
        listed, table["a"] = [Stream(), Stream()], Stream()
        made = (first, second, third, holder.left, holder.inner.right, both)
        assert [rt.label_of_stream(stream) for stream in made] == ["first", "second", "third", "left", "right", "both"]
        assert also is both
        unnamed = [rt.label_of_stream(stream) for stream in (*listed, table["a"])]
        assert all(name.startswith("stream ") for name in unnamed), unnamed
        buffer = torch.zeros(4, device="cuda")
        synchronize()
        with torch.cuda.stream(listed[0]):
            buffer.fill_(1)
        with torch.cuda.stream(listed[1]):
            buffer.fill_(2)
    said = rt.races[0].suggestion.split("; ")
    assert [part.rpartition(", ")[2] for part in said[1:]] == ["number 1 of the 3 so far", "number 2 of the 3 so far"]


def test_a_report_keeps_no_tensor_of_the_code() -> None:
    """Local variables are looked at for a remedy; a tensor that one of them held is gone when the variable is."""

    def races() -> None:
        copies = Stream()
        buffer, other = torch.zeros(4, device="cuda"), torch.zeros(4)
        gone = weakref.ref(other)
        with torch.cuda.stream(copies):
            buffer.fill_(1)
        del other
        assert gone() is None

    with cuda_on_cpu(on_race="collect") as rt:
        races()
    assert rt.races[0].suggestion.startswith("`copies.wait_stream(")


def test_threads_that_start_inside_are_traced() -> None:
    """Torch's modes are of one thread each, and so is the current stream."""
    seen: list[Any] = []

    def work() -> None:
        with torch.cuda.stream(Stream()):
            seen.append((torch.ones(2, device="cuda").device.type, current_stream().stream_id))

    with cuda_on_cpu():
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        assert seen[0][0] == "cuda"
        assert seen[0][1] != current_stream().stream_id


@pytest.mark.parametrize("ends", ["well", "badly", "by a race"])
def test_torch_is_as_it_was(ends: str) -> None:
    """After the window, also where an error or a race ended it."""
    before = attributes()
    try:
        with cuda_on_cpu():
            torch.cuda.graph(torch.cuda.CUDAGraph())
            if ends == "badly":
                raise ZeroDivisionError
            if ends == "by a race":
                IDIOMS["to_cpu_without_waiting"][1](True)
    except (ZeroDivisionError, Race):
        pass
    assert left_over(before) == []
    if GPU:
        assert torch.zeros(1, device="cuda").tolist() == [0]
        return
    with pytest.raises((AssertionError, RuntimeError)):  # torch remembers that it has asked for the device once
        torch.zeros(1, device="cuda")


def test_a_default_device_ends_with_the_window() -> None:
    """`with torch.device(...)` works inside and after it; `torch.set_default_device("cuda")` inside holds for it."""
    torch.utils._device._device_constructors.cache_clear()  # functions by which it goes, which torch collects once
    with cuda_on_cpu(), torch.device("cuda"):
        assert torch.zeros(1).is_cuda
    with torch.device("meta"):
        assert torch.zeros(1).is_meta
        assert torch.arange(3).is_meta
    with cuda_on_cpu(on_race="collect"):
        torch.set_default_device("cuda")
        assert torch.zeros(1).is_cuda
    assert torch.zeros(1).device.type == "cpu"
    with torch.device("meta"), cuda_on_cpu(on_race="collect"):
        pass
    assert torch.zeros(1).device.type == "cpu"


def test_a_race_that_the_code_catches_is_raised_at_the_end() -> None:
    """Code that catches every exception hides none."""
    with pytest.raises(Race) as caught, cuda_on_cpu(), contextlib.suppress(Exception):
        IDIOMS["to_cpu_without_waiting"][1](True)
    assert caught.value.report.kind is RaceKind.HOST_READS_EARLY


def test_an_engine_that_dies_takes_its_findings_along() -> None:
    """The error that ends the window has a note of what was found by then."""

    def dies() -> None:
        IDIOMS["to_cpu_without_waiting"][1](True)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught, cuda_on_cpu(on_race="collect"):
        dies()
    assert "1 race(s)" in caught.value.__notes__[0]


def test_what_cannot_be_meant_is_refused() -> None:
    """A window in a window, a device that was not declared, a stream of a window that is over, names that are none."""
    with cuda_on_cpu():
        stream, event, graph = Stream(), Event(), torch.cuda.CUDAGraph()
        with pytest.raises(ArgumentError, match="inside of cuda_on_cpu"), cuda_on_cpu():
            pass
        assert torch.cuda.is_available()
        for use in (lambda: torch.zeros(1, device="cuda:1"), lambda: torch.zeros(1).cuda(1), lambda: Stream("cuda:1")):
            with pytest.raises(RuntimeError, match="cuda:1 was not declared"):
                use()
    for late in (
        lambda: stream.synchronize(),
        lambda: event.record(),
        lambda: stream.wait_event(event),
        lambda: graph.replay(),
    ):
        with pytest.raises(ArgumentError, match="used after its window had ended"):
            late()
    for name in ("no.such.thing", "no_namespace::operator"):
        with pytest.raises(ArgumentError, match="stands_for names"), cuda_on_cpu(stands_for={name: print}):
            pass
    with pytest.raises(ArgumentError, match="no argument 'y'"):
        declared_kernel(reads=["y"])(lambda x: x)


def test_what_is_not_modelled_is_said_by_name() -> None:
    """And how to say what stands for it."""
    with cuda_on_cpu():
        one = torch.zeros(2, device="cuda")
        of_torch: Any = torch
        for use, name in (
            (lambda: torch.cuda.current_blas_handle(), "_cuda_getCurrentBlasHandle"),
            (lambda: one.__dlpack__(), "Tensor.__dlpack__"),
            (lambda: of_torch.from_dlpack(one), "Tensor.__dlpack__"),
            (lambda: of_torch.utils.dlpack.to_dlpack(one), "torch.utils.dlpack.to_dlpack"),
            (lambda: of_torch.to_dlpack(one), "torch.to_dlpack"),
            (lambda: of_torch._C._to_dlpack(one), "torch._C._to_dlpack"),
            (lambda: one.__cuda_array_interface__, "Tensor.__cuda_array_interface__"),
            (lambda: torch.autocast("cuda"), "torch.autocast"),
        ):
            with pytest.raises(ArgumentError, match=name):
                use()
        assert one.data_ptr()
        host = torch.zeros(2)
        assert all(of_torch.from_dlpack(it).tolist() == [0.0, 0.0] for it in (host, of_torch.to_dlpack(host)))
    with cuda_on_cpu(stands_for={"torch._C._cuda_getCurrentBlasHandle": lambda: 17}):
        assert torch.cuda.current_blas_handle() == 17


def test_each_thread_leaves_the_streams_that_it_has_entered() -> None:
    """`with stream:` of two threads that overlap: each has the stream again that was its own before."""
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with Stream():
            entered.set()
            left.wait(10)
        seen.append(current_stream() == torch.cuda.default_stream())

    seen: list[bool] = []
    with cuda_on_cpu():
        thread, mine = threading.Thread(target=other), Stream()
        with torch.cuda.stream(mine):
            with Stream():
                thread.start()
                entered.wait(10)
            seen.append(current_stream() == mine)
        left.set()
        thread.join()
    assert seen == [True, True]


def test_random_numbers_of_the_device_come_from_its_generator() -> None:
    """A seed and a state that `torch.cuda` is given are those of what is drawn on `cuda`."""
    with cuda_on_cpu():
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4, device="cuda").tolist()
        torch.cuda.set_rng_state(state)
        assert torch.rand(4, device="cuda").tolist() == first
        torch.cuda.manual_seed(3)
        assert torch.rand(4, device="cuda").tolist() == first


def test_tensors_of_a_transform_say_where_they_lie() -> None:
    """Inside of `vmap` and `grad`, and of what `torch.jit.script` is given in the window."""

    def plus_one(x: Any) -> Any:
        return x + torch.ones(3, device=x.device)

    with cuda_on_cpu():
        x = torch.zeros(2, 3, device="cuda")
        assert torch.vmap(plus_one)(x).is_cuda
        assert torch.func.grad(lambda x: plus_one(x).sum())(x).is_cuda
        assert torch.jit.script(plus_one)(x).is_cuda


DIFFERENTIATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a sum": torch.sum,
    "a part": lambda x: x[1:, :2],
    "prod": torch.prod,
    "cumprod": lambda x: x.cumprod(0),
    "an index": lambda x: x[[0, 2]],
    "half": lambda x: x.half(),
}

OF_TORCH: dict[str, Callable[[torch.Tensor], Any]] = {
    "one_hot": lambda x: torch.nn.functional.one_hot(x.argsort(-1)),
    "quantile": lambda x: torch.quantile(x, 0.5),
    "pad_sequence": lambda x: torch.nn.utils.rnn.pad_sequence([x[0], x[1]]),
    "combinations": lambda x: torch.combinations(x[0]),
    "matrix_rank": torch.linalg.matrix_rank,
    "vander": lambda x: torch.vander(x[0]),
    "batch_norm": lambda x: torch.nn.functional.batch_norm(x, x[0], x[1].abs()),
    "embedding_bag": lambda x: torch.nn.functional.embedding_bag(x.argsort(-1), x),
    **{f"gradient of {name}": functools.partial(_gradient, of) for name, of in DIFFERENTIATED.items()},
}
"""What C++ of torch computes by tensors that it makes itself, as it would beside an operand."""


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize("device", ["race", "sim:lazy"])
def test_what_torch_makes_itself_lies_beside_its_operands(device: str, name: str) -> None:
    """On the device for a tensor of the device, on the host for one of the host; with the values of plain torch."""
    program, values = OF_TORCH[name], torch.tensor([[2.0, 1.0, 3.0], [1.0, 4.0, 1.0], [3.0, 1.0, 5.0]])
    wanted = program(values)
    with cuda_on_cpu(device):
        for place in ("cuda", "cpu"):
            result = program(values.to(place))
            assert result.device.type == place
            assert torch.equal(result.cpu().float(), wanted.float())


def test_what_torch_makes_itself_can_race() -> None:
    """It is written on the stream that is current: another one that reads it unordered is found."""
    for waits in (True, False):
        with cuda_on_cpu(on_race="collect") as rt:
            side, rows = Stream(), torch.ones(3, device="cuda")
            side.wait_stream(current_stream())
            padded = torch.nn.utils.rnn.pad_sequence([rows, rows])
            if waits:
                side.wait_stream(current_stream())
            with torch.cuda.stream(side):
                padded.sum()
            synchronize()
        assert bool(rt.races) is not waits


@pytest.mark.parametrize("waits", [True, False])
def test_host_memory_is_pinned_by_its_address(waits: bool) -> None:
    """`cudaHostRegister`: a copy from there is asynchronous, and refilling it before it has run is a race."""
    with cuda_on_cpu(on_race="collect") as rt:
        staging, runtime = torch.zeros(8), torch.cuda.cudart()
        assert int(runtime.cudaHostRegister(staging.data_ptr(), staging.nbytes, 0)) == 0
        assert staging[2:].is_pinned()
        assert not torch.zeros(8).is_pinned()
        landed = staging.to("cuda", non_blocking=True)
        if waits:
            current_stream().synchronize()
        staging.fill_(1)
        assert int(runtime.cudaHostUnregister(staging.data_ptr())) == 0
        torch.cuda.profiler.start()
        torch.cuda.profiler.stop()
        for missing in (lambda: runtime.cudaStreamCreate(0), lambda: torch.cuda.get_device_properties(0).uuid):
            with pytest.raises(ArgumentError, match="no model of"):
                missing()
        del landed
    assert [race.kind for race in rt.races] == ([] if waits else [RaceKind.STAGING_REFILLED])


def test_functions_of_a_build_with_cuda_are_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the window answers are replaced, the others refused by name; afterwards all are there again."""
    called: list[str] = []
    functions: Any = torch._C
    for name in ("_cuda_synchronize", "_cuda_lock_mutex"):
        monkeypatch.setattr(torch._C, name, lambda *_, name=name: called.append(name), raising=False)
    before = dict(vars(torch._C))
    with cuda_on_cpu():
        synchronize()
        with pytest.raises(ArgumentError, match=r"no model of torch\._C\._cuda_lock_mutex"):
            functions._cuda_lock_mutex()
    assert called == []
    assert dict(vars(torch._C)) == before


def test_streams_of_a_window_pass_for_those_of_torch() -> None:
    """On any build, whatever the class of torch is made of; what it has besides is refused by name."""
    torch_stream: Any = Stream

    class Mine(Stream):
        pass

    with cuda_on_cpu():
        side, event = Stream(priority=-1), Event(enable_timing=True)
        assert isinstance(side, Stream)
        assert isinstance(event, Event)
        assert isinstance(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph)
        assert isinstance(torch.cuda.MemPool(), torch.cuda.MemPool)
        assert side == torch.cuda.ExternalStream(side.cuda_stream)
        assert side != current_stream()
        assert torch_stream.priority_range() == (0, -5)
        with side:
            assert current_stream() == side
        for use, name in (
            (Mine, "Mine, a subclass of Stream"),
            (lambda: torch.cuda.ExternalStream(12345), "no stream 0x3039"),
            (lambda: torch.cuda.CUDAGraph().debug_dump("graph"), "CUDAGraph.debug_dump"),
            (lambda: event.ipc_handle(), "Event.ipc_handle"),
        ):
            with pytest.raises(ArgumentError, match=name):
                use()
        assert not hasattr(side, "no_such_thing")
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            assert torch.ones(2, device="cuda").tolist() == [1, 1]


@declared_kernel(reads=["source"], writes=["target"])
def foreign_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """A kernel that torch does not see."""
    target.numpy()[:] = source.numpy()


def test_a_declared_kernel_is_an_access() -> None:
    """Of the current stream, by the names of its arguments; outside of a window it is the function."""
    with cuda_on_cpu(on_race="collect") as rt:
        source, target, side = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda"), Stream()
        synchronize()
        with torch.cuda.stream(side):
            foreign_copy(source, target=target)
        assert target.tolist() == [1, 1, 1, 1]
    (race,) = rt.races
    assert (race.first.operation, race.first.lane) == ("foreign_copy", "side")
    target = torch.zeros(4)
    foreign_copy(torch.ones(4), target)
    assert target.tolist() == [1, 1, 1, 1]


def test_an_operator_without_a_cpu_kernel_has_a_stand_in() -> None:
    """By its name; what the stand-in reads and writes is seen, as its schema says it."""
    library: Any = torch.library
    library = library.Library("batchstate_test_kernels", "DEF")
    library.define("raise_(Tensor(a!) x) -> ()")
    raise_ = torch.ops.batchstate_test_kernels.raise_
    try:
        with cuda_on_cpu(), pytest.raises(NotImplementedError, match="batchstate_test_kernels::raise_"):
            raise_(torch.zeros(2, device="cuda"))
        with cuda_on_cpu(
            on_race="collect", stands_for={"batchstate_test_kernels::raise_": lambda x: x.add_(1) and None}
        ) as rt:
            numbers, side = torch.zeros(1, device="cuda"), Stream()
            raise_(numbers)
            with torch.cuda.stream(side):
                numbers.clone()
            assert numbers.tolist() == [1]
        assert {race.kind for race in rt.races} == {RaceKind.READ_AFTER_WRITE}
    finally:
        library._destroy()


def _in_an_old_thread(start: threading.Event, made: list[Any]) -> None:
    start.wait()
    try:
        made.append(torch.zeros(1, device="cuda"))
    except (AssertionError, RuntimeError) as error:
        made.append(error)


def test_rows_of_the_table_of_what_is_not_covered() -> None:
    """Each as the page says it."""
    start, made = threading.Event(), list[Any]()
    thread = threading.Thread(target=_in_an_old_thread, args=(start, made))
    thread.start()
    early = torch.tensor
    with cuda_on_cpu(on_race="collect") as rt:
        start.set()
        thread.join()
        if GPU:
            with pytest.raises(ArgumentError, match="of the GPU of this machine"):
                made[0].add_(1)
            with pytest.raises(ArgumentError, match="of the GPU of this machine"):
                early([1], device="cuda").add_(1)
        else:
            assert isinstance(made[0], Exception)
            with pytest.raises(RuntimeError, match=r"not linked with support for cuda|CUDA error"):
                early([1], device="cuda")
        with torch.autocast("cuda", enabled=False):
            pass
        weights = torch.ones(2, device="cuda", requires_grad=True)
        side = Stream()
        synchronize()
        with torch.cuda.stream(side):
            loss = (weights * 2).sum()
        side.synchronize()
        loss.backward()
        assert weights.grad is not None
        assert weights.grad.tolist() == [2, 2]
        streams = [Stream() for _ in range(40)]
        assert len({one.stream_id for one in streams}) == 40
        rt.name_stream(streams[0], "mine")
        streams[0].record_event()
        assert rt.label_of_stream(streams[0]) == "mine"
        numbers, graph, branch = torch.zeros(2, device="cuda"), torch.cuda.CUDAGraph(), Stream()
        with torch.cuda.graph(graph):
            branch.wait_stream(current_stream())
            with torch.cuda.stream(branch):
                numbers.add_(1)
            doubled = numbers * 2  # does not wait for the branch
            current_stream().wait_stream(branch)
        graph.replay()
        assert doubled.tolist() == [2, 2]
        assert torch.compile(lambda x: x + 1)(numbers).is_cuda  # runs as it is written
        with pytest.raises(NotImplementedError, match=r"torch.sparse_coo"):
            numbers.to_sparse()
        torch.save(doubled, "/dev/null")
        torch._foreach_copy_([doubled], [torch.ones(2)])
        assert doubled.tolist() == [1, 1]
        assert "CUDA" in torch.cuda.memory_summary()
        for name in ("share_memory_", "new"):
            with pytest.raises(ArgumentError, match=f"Tensor.{name}"):
                getattr(numbers, name)()
    assert rt.races == ()


def test_threads_that_outlive_the_window_go_on() -> None:
    """As if there had been no window; what they hold are tensors of the CPU."""
    ready, over, seen = threading.Event(), threading.Event(), list[Any]()

    def work() -> None:
        mine = torch.zeros(2, device="cuda")
        ready.set()
        over.wait()
        seen.append((mine + 1).device.type)

    with cuda_on_cpu():
        worker = threading.Thread(target=work)
        worker.start()
        ready.wait()
    over.set()
    worker.join()
    assert seen == ["cpu"]


def test_device_reads_factories_and_views_keep_nothing() -> None:
    """Ten thousand of each leave no memory in the books and no comparisons behind."""
    with cuda_on_cpu() as rt:
        table = torch.zeros(8, 8, device="cuda")
        before = rt.comparisons
        for _ in range(10_000):
            assert table[3].is_cuda
            torch.empty(4, device="cuda")
        assert len(rt.tracer.allocations) == 1
        assert rt.comparisons == before
        assert torch.cuda.memory_allocated() == 256


CALLS = {"a factory": 125, "a view": 18, "where it lies": 15}
"""Functions that one call of torch enters at most, of Python and of C: a factory of 35 us took 150."""


def test_what_it_costs_in_calls() -> None:
    """A factory, a view and `.device` stay cheap, whatever was made before; time is the machine's, calls are not."""
    with cuda_on_cpu():
        table = torch.zeros(8, 8, device="cuda")
        programs = {
            "a factory": lambda: torch.empty(4, device="cuda"),
            "a view": lambda: table[3],
            "where it lies": lambda: (table.device, table.is_cuda),
        }
        kept: list[torch.Tensor] = []
        for _ in range(2):
            found = {name: _calls(program) for name, program in programs.items()}
            for name, most in CALLS.items():
                assert found[name] <= most, found
            kept += [torch.empty(4, device="cuda") for _ in range(1000)]


def _calls(program: Any) -> int:
    """Functions that ten runs of a program enter, by run, once it has run: what is kept then is not made again."""
    program()
    count = 0

    def seen(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # Hypothesis and others have callbacks there
    sys.setprofile(seen)
    try:
        for _ in range(10):
            program()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count // 10


def test_events_that_complete_at_once_hide_one_idiom() -> None:
    """With eager events the racy idiom that asks once is in order, as it may be on a device; nothing else changes."""
    for name, (kind, program) in IDIOMS.items():
        for racy in (True, False):
            with cuda_on_cpu("race:prompt", on_race="collect") as rt:
                program(racy)
            assert bool(rt.races) is bool(racy and kind and name != "event_asked_once"), name


def test_threads_take_turns() -> None:
    """Four threads with a stream each, switched often: right values, nothing found, and the current stream stays."""
    wrong: list[object] = []

    def work() -> None:
        mine, host, numbers = Stream(), torch.zeros(4, pin_memory=True), torch.zeros(4, device="cuda")
        mine.wait_stream(current_stream())
        with torch.cuda.stream(mine):
            doubled = numbers
            for step in range(100):
                host.fill_(step)
                numbers.copy_(host, non_blocking=True)
                copied = mine.record_event()
                doubled = numbers * 2
                copied.synchronize()
                if current_stream() != mine:
                    wrong.append(step)
            mine.synchronize()
            if doubled.tolist() != [198] * 4:
                wrong.append(doubled.tolist())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with cuda_on_cpu(on_race="collect") as rt:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert rt.races == ()
