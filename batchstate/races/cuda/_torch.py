"""Torch's answers inside of the window: the C functions that `torch.cuda` calls, and the methods of tensors.

`torch.cuda` itself stays as it is: only the C functions below it are missing, which are looked up when they are called.
A CPU-only build lacks them, and those of a build with CUDA are taken away: a GPU, if there is one, is not touched. So
names that the code has imported early go on working. All attributes are put back later.
"""

import contextlib
import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._device
import torch.utils.dlpack
from torch.autograd.variable import Variable

from batchstate.errors import ArgumentError
from batchstate.races.cuda._backward import StreamedEngine
from batchstate.races.cuda._streams import GENERIC, makers
from batchstate.races.cuda._tracer import CPU, CUDA, NotModelledError, check_declared
from batchstate.races.cuda._triton import interpreted
from batchstate.races.cuda._window import CudaWindow
from batchstate.races.tracing.memory import MemoryKind

Attributes = dict[str, Any]
_base: Any = torch._C.TensorBase
_unseen = torch._C._is_torch_function_all_disabled
_MISSING = object()


_DYNAMO = "torch._dynamo.device_interface"

_VERSION = "12.8"
"""Version of CUDA: code asks for it to learn whether the device is one of NVIDIA's."""

_REFUSED = ("_cuda_", "_accelerator_get", "_accelerator_set")
"""Prefixes of functions of `torch._C` that must not reach CUDA: without an answer here they are refused by name."""

_POOLS = (
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_beginAllocateToPool",
    "_cuda_endAllocateCurrentStreamToPool",
    "_cuda_endAllocateToPool",
    "_cuda_releasePool",
)
"""Functions that choose a memory pool: here each allocation has memory of its own."""


@contextlib.contextmanager
def replaced(rt: CudaWindow[Any]) -> Iterator[None]:
    """A window in which torch has a device `cuda:0`, with `rt` behind it; afterwards torch is as it was.

    Raises:
        ArgumentError: an attribute or operator of `stands_for` does not exist.
    """
    c: Any = torch._C
    cuda: Any = torch.cuda
    if cuda.is_available():
        cuda.init()  # torch does that once, and not inside of a window
    answers = _answers(rt)
    engine = StreamedEngine(Variable._execution_engine, rt)
    with contextlib.ExitStack() as stack:
        stack.callback(_default_device, torch.utils._device.CURRENT_DEVICE)
        refused = [
            (c, name, value)
            for name, value in vars(c).items()
            if name.startswith(_REFUSED) and name not in answers and not isinstance(value, type)
        ]
        stack.callback(_restore, refused)
        for _, name, _ in refused:
            delattr(c, name)
        stack.enter_context(interpreted(rt))
        for name, function in rt.stands_for.items():
            _stand_in(stack, name, function)
        if _DYNAMO in sys.modules:  # functions that were compiled before run as they are written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            stack.callback(_forget_stream)
        before = list[tuple[Any, str, Any]]()  # one callback: one for each costs more than the window's other work
        stack.callback(_restore, before)
        graphs = {"_cuda_isCurrentStreamCapturing": lambda: rt.capturing, "_graph_pool_handle": rt.new_graph_pool}
        for owner, attributes in (
            (c, answers),
            *makers(rt),
            *_to_dlpack(rt),
            (cuda, _of_cuda(rt)),
            (cuda.graphs, graphs),
            (cuda.memory, dict.fromkeys(_POOLS, _nothing)),
            (cuda.graphs.graph, {"default_capture_stream": None}),
            (cuda.nvtx, {"_nvtx": _Silent()}),
            (torch.Tensor, {**_of_tensors(rt), "register_hook": _hooks(engine)}),
            (Variable, {"_execution_engine": engine}),
            (torch.UntypedStorage, _of_storages(rt)),
            (torch, _of_torch()),
            (torch.jit, {"script": _as_it_is, "trace": _as_it_is, "trace_module": _as_it_is}),
            (torch.version, {"cuda": _VERSION}),
            (torch.amp.autocast_mode.autocast, {"__init__": _autocast(torch.amp.autocast_mode.autocast.__init__)}),
        ):
            for name, value in attributes.items():
                before.append((owner, name, vars(owner).get(name, _MISSING)))
                setattr(owner, name, value)
        _forget_functions()
        stack.callback(_forget_functions)
        yield


def _hooks(engine: StreamedEngine) -> Callable[..., Any]:
    register: Any = torch.Tensor.register_hook
    return lambda self, hook: register(self, engine.on_stream_of(self, hook) if self.requires_grad else hook)


def _default_device(before: torch.device | None) -> None:
    """Takes back a `torch.set_default_device("cuda")` of the window, after which torch could make no tensor."""
    if before != torch.utils._device.CURRENT_DEVICE:
        torch.set_default_device(before)


def _forget_functions() -> None:
    """Clears torch's caches of its own functions, such as those that a default device applies to."""
    for cache in _caches():
        cache.cache_clear()


@functools.cache
def _caches() -> list[Any]:
    modules = torch, torch.overrides, torch.utils._device
    return [value for m in modules for value in vars(m).values() if isinstance(value, functools._lru_cache_wrapper)]


def _forget_stream() -> None:
    """Gives dynamo back a function of torch, if it was imported in the window."""
    module: Any = sys.modules.get(_DYNAMO)
    if module is not None:
        module.get_cuda_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(_restore, [(owner, name, vars(owner).get(name, _MISSING))])
    setattr(owner, name, value)


def _restore(attributes: list[tuple[Any, str, Any]]) -> None:
    """Gives attributes the values that they had, in reverse order."""
    for owner, name, before in reversed(attributes):
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _stand_in(stack: contextlib.ExitStack, name: str, function: Callable[..., Any]) -> None:
    namespace, _, operator = name.partition("::")
    if operator:
        library: Any = torch.library
        library = library.Library(namespace, "IMPL")
        stack.callback(library._destroy)
        try:
            torch._C._dispatch_find_schema_or_throw(name, "")
            library.impl(operator, function, "CPU")
        except RuntimeError as error:
            problem = f"stands_for names {name!r}: {str(error).splitlines()[0]}"
            raise ArgumentError(problem, name, "define the operator first") from None
        return
    path, _, attribute = name.rpartition(".")
    try:
        owner: Any = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        owner = None
    if owner is None or (not hasattr(owner, attribute) and owner is not torch._C):
        remedy = "name an attribute as `package.module.attribute` or an operator as `namespace::operator`"
        raise ArgumentError(f"stands_for names {name!r}, which does not exist", name, remedy)
    replace(stack, owner, attribute, function)


# The C functions


def _answers(rt: CudaWindow[Any]) -> Attributes:
    def not_modelled(name: str) -> Any:
        if name.startswith(_REFUSED):
            remedy = f'say what stands for it: cuda_on_cpu(stands_for={{"torch._C.{name}": function}})'
            raise NotModelledError.of(f"torch._C.{name}", remedy)
        raise AttributeError(f"module 'torch._C' has no attribute {name!r}")

    def set_device(index: int) -> None:
        if index >= 0:
            check_declared(torch.device("cuda", index))

    def current(_: int = 0) -> tuple[int, int, int]:
        return rt.current_id, 0, 1

    return {
        "__getattr__": not_modelled,
        "_has_cuda": True,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": set_device,
        "_cuda_synchronize": rt.wait_for_everything,
        "_cuda_getCurrentStream": current,
        "_cuda_getCurrentRawStream": lambda _=0: rt.current_id,
        "_cuda_getDefaultStream": lambda _=0: (0, 0, 1),
        "_cuda_setStream": lambda stream_id, device_index, device_type: rt.set_current(stream_id),
        "_cuda_isCurrentStreamCapturing": lambda: rt.capturing,
        "_cuda_emptyCache": _nothing,
        "_host_emptyCache": _nothing,
        "_cuda_ipc_collect": _nothing,
        "_cuda_memoryStats": rt.memory_stats,
        "_cuda_resetPeakMemoryStats": rt.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": _nothing,
        "_cuda_setMemoryFraction": _nothing,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_getArchFlags": lambda: "sm_{}{}".format(*rt.capability),
        "_cuda_canDeviceAccessPeer": lambda *_: False,
        "_cuda_set_sync_debug_mode": _nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_sleep": _nothing,
        **dict.fromkeys(_POOLS, _nothing),
        "_get_accelerator": lambda *_: torch.device("cuda"),
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: 0,
        "_accelerator_setDeviceIndex": set_device,
        "_accelerator_exchangeDevice": _exchange_device,
        "_accelerator_maybeExchangeDevice": _exchange_device,
        "_accelerator_getStream": lambda index=0: torch.cuda.current_stream(),
        "_accelerator_setStream": lambda stream: rt.set_current(stream.stream_id),
        "_accelerator_synchronizeDevice": lambda index=0: rt.wait_for_everything(),
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": _nothing,
        "_accelerator_emptyHostCache": _nothing,
        "_accelerator_setAllocatorSettings": _nothing,
        "_accelerator_getAllocatorSettings": str,
        "_accelerator_getDeviceStats": rt.memory_stats,
        "_accelerator_resetPeakStats": rt.reset_peak,
        "_accelerator_resetAccumulatedStats": _nothing,
        "_accelerator_getMemoryInfo": rt.memory_info,
    }


def _of_cuda(rt: CudaWindow[Any]) -> Attributes:
    major, minor = rt.capability
    properties = _Declared(
        name=rt.name,
        major=major,
        minor=minor,
        total_memory=rt.memory,
        multi_processor_count=132,
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20,
        gcnArchName="",
    )
    return {
        "_initialized": True,
        "_cached_device_count": 1,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": lambda index: _exchange_device(index),  # dynamo tells the two apart
        "_get_device_properties": lambda index: properties,
        "_cudart": _Declared(
            cudaError=SimpleNamespace(success=0),
            cudaHostRegister=rt.tracer.register,
            cudaHostUnregister=rt.tracer.unregister,
            cudaMemGetInfo=rt.memory_info,
            cudaProfilerStart=lambda: 0,
            cudaProfilerStop=lambda: 0,
        ),
        "default_generators": (torch.default_generator,),  # that of the CPU, which draws
    }


def _exchange_device(index: int) -> int:
    if index < 0:
        return -1
    check_declared(torch.device("cuda", index))
    return 0


def _nothing(*_: object, **__: object) -> None:
    return None


class _Declared(SimpleNamespace):
    """Attributes of a device, or of its runtime."""

    def __getattr__(self, name: str) -> Any:
        raise NotModelledError.of(name, "leave it out, or replace its caller")


class _Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


# Functions of torch


def _of_torch() -> Attributes:
    tensor, as_tensor, asarray, generator = torch.tensor, torch.as_tensor, torch.asarray, torch.Generator

    def placed(made: Callable[..., Any], value: Any, args: tuple[Any, ...], kwargs: Attributes, *, copies: bool) -> Any:
        device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if args and made is as_tensor and len(args) > 1:
            device, args = args[1], args[:1]
        if isinstance(value, torch.Tensor) and not copies:
            result = made(value, *args, **kwargs) if not args and not kwargs else value.to(*args, **kwargs)
            return result if device is None else result.to(device)
        if isinstance(value, torch.Tensor):
            device = value.device if device is None else device
            value = value.tolist() if value.device.type == "cuda" else value
        elif copies:
            value = numbers_of(value)
        if device is None:
            device = torch.empty(0).device if torch._C._is_torch_function_mode_enabled() else CPU
        wanted = device_of(device)
        if wanted.type != "cuda":
            result = made(value, *args, device=wanted, **kwargs)
            return result.pin_memory() if pinned else result
        grad = kwargs.pop("requires_grad", False)
        return made(value, *args, device=CPU, **kwargs).to(wanted).requires_grad_(grad)

    class Meta(type):
        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            wanted = device_of(device)
            if wanted.type != "cuda":
                return generator(wanted)
            check_declared(wanted)
            return generator(CPU)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, generator)

    return {
        "tensor": lambda data, *args, **kwargs: placed(tensor, data, args, kwargs, copies=True),
        "as_tensor": lambda data, *args, **kwargs: placed(as_tensor, data, args, kwargs, copies=False),
        "compile": _eager,
        "asarray": lambda obj, *args, **kwargs: placed(asarray, obj, args, kwargs, copies=False),
        "Generator": Meta("Generator", (), {"__module__": "torch"}),
        **GENERIC,
    }


def numbers_of(value: Any) -> Any:
    """The data of `torch.tensor`, with tensors among its lists read one by one, as torch does unseen."""
    if not isinstance(value, list | tuple) or not any(isinstance(part, list | tuple | torch.Tensor) for part in value):
        return value
    return [_numbers(part) if isinstance(part, torch.Tensor) else numbers_of(part) for part in value]


def _numbers(tensor: torch.Tensor) -> Any:
    return tensor.cpu().tolist() if tensor.ndim else tensor.item()


def device_of(device: Any) -> torch.device:
    """The device of a `device=` argument; a number is one of CUDA."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _eager(model: Any = None, **_: Any) -> Any:
    """The result of `torch.compile`: the code itself, since code that is compiled for a GPU does not run here."""
    return _eager if model is None else model


def _as_it_is(obj: Any, *_: object, **__: object) -> Any:
    """The result of `torch.jit.script` and `trace`: in a compiled function a tensor's `.device` would be the CPU's."""
    return obj


def _autocast(init: Callable[..., None]) -> Callable[..., None]:
    def autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        enabled = kwargs.get("enabled", args[1] if len(args) > 1 else True)
        if device_type == "cuda" and enabled:
            raise NotModelledError.of("torch.autocast('cuda')", "pass `enabled=False`, or give the model its dtype")
        init(self, device_type, *args, **kwargs)

    return autocast


# Methods of tensors

_array_interface: Any = vars(torch.Tensor)["__cuda_array_interface__"].fget


def _refusal(rt: CudaWindow[Any], name: str, before: Callable[..., Any]) -> Callable[..., Any]:
    """A function that refuses a tensor of the device, whose memory it would hand out unseen."""

    def refused(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _unseen() and rt.tracer.on_device(tensor):
            remedy = "copy the tensor to the host first, or replace the caller with `stands_for`"
            raise NotModelledError.of(f"{name} of a tensor of {CUDA}", remedy)
        return before(tensor, *args, **kwargs)

    return refused


def _to_dlpack(rt: CudaWindow[Any]) -> list[tuple[Any, Attributes]]:
    """The functions that share a tensor's memory with another library, under each of their names in torch."""
    owners: dict[str, Any] = {"torch._C": torch._C, "torch": torch, "torch.utils.dlpack": torch.utils.dlpack}
    return [
        (owner, {name: _refusal(rt, f"{module}.{name}", vars(owner)[name])})
        for module, owner in owners.items()
        for name in ("_to_dlpack", "_to_dlpack_versioned", "to_dlpack")
        if name in vars(owner)
    ]


def _of_storages(rt: CudaWindow[Any]) -> Attributes:
    """Memory that code frees and gets again under the same tensors, as FSDP does."""
    storage: Any = torch.UntypedStorage
    resize, size, nbytes = storage.resize_, storage.size, storage.nbytes

    def resize_(self: Any, number: int) -> Any:
        whole = _base.set_(torch.empty(0, dtype=torch.uint8), self)
        if _unseen() or not rt.tracer.on_device(whole):
            return resize(self, number)
        with rt.lock:
            rt.tracer.resize(whole, number, lambda: resize(self, number))
        return self

    def length(before: Callable[[Any], int]) -> Callable[[Any], int]:
        return lambda self: rt.tracer.resized.get(self._cdata, before(self)) if rt.tracer.resized else before(self)

    return {"resize_": resize_, "size": length(size), "nbytes": length(nbytes)}


def _destination(args: list[Any], kwargs: Mapping[str, Any]) -> tuple[Any, torch.dtype | None, bool, bool]:
    """The arguments of `Tensor.to`: device and dtype, each or None, `non_blocking` and `copy`."""
    other = kwargs.get("other", args[0] if args and isinstance(args[0], torch.Tensor) else None)
    device, dtype = (None, None) if other is None else (other.device, other.dtype)
    if args and args[0] is other is not None:
        del args[0]
    elif args and not isinstance(args[0], torch.dtype):
        device = args.pop(0)
    if args and not isinstance(args[0], bool):
        dtype = args.pop(0)
    flags = {**dict(zip(("non_blocking", "copy"), args, strict=False)), **kwargs}
    device, dtype = kwargs.get("device", device), kwargs.get("dtype", dtype)
    return device, dtype, bool(flags.get("non_blocking", False)), bool(flags.get("copy", False))


def _of_tensors(rt: CudaWindow[Any]) -> Attributes:
    tracer = rt.tracer
    on_device, cast_base = tracer.on_device, _base.to
    real_device = _base.device.__get__

    def device(self: torch.Tensor) -> Any:
        return real_device(self) if _unseen() or not on_device(self) else CUDA

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _unseen():
            return cast_base(self, *args, **kwargs)
        device, dtype, non_blocking, copy = _destination(list(args), kwargs)
        layout = {name: value for name, value in kwargs.items() if name == "memory_format" and value is not None}
        here = on_device(self)
        wanted = (CUDA if here else CPU) if device is None else device_of(device)
        if wanted.type not in ("cuda", "cpu"):
            return cast_base(self, *args, **kwargs)
        if wanted.type == "cuda":
            check_declared(wanted)
        if (wanted.type == "cuda") is here:
            return cast_base(self, self.dtype if dtype is None else dtype, non_blocking, copy, **layout)
        return torch.ops.aten._to_copy.default(self, dtype=dtype, device=wanted, non_blocking=non_blocking, **layout)

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        return to(self, "cuda" if device is None else device_of(device), non_blocking=non_blocking, **kwargs)

    def cpu(self: torch.Tensor, **kwargs: Any) -> Any:
        return _base.cpu(self, **kwargs) if _unseen() else to(self, CPU, **kwargs)

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _unseen() and on_device(self):
            problem = "can't convert cuda:0 device type tensor to numpy."
            raise TypeError(f"{problem} Use Tensor.cpu() to copy the tensor to host memory first.")
        array = _base.numpy(self, *args, **kwargs)
        return array if _unseen() or not is_pinned(self) else tracer.seen_by_numpy(array)

    def is_pinned(tensor: torch.Tensor) -> bool:
        allocation = tracer.allocations.of(tensor)
        return allocation is not None and allocation.kind is MemoryKind.PINNED

    array: Any = torch.Tensor.__array__

    def as_array(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _unseen() and on_device(self):
            return numpy(self)
        if not _unseen() and is_pinned(self):
            tracer.read_by_numpy(_base.numpy(self.detach()), "np.asarray")
        return array(self, *args, **kwargs)

    reduce: Any = torch.Tensor.__reduce_ex__

    def reduce_ex(self: torch.Tensor, protocol: Any) -> Any:
        if not _unseen() and is_pinned(self):
            tracer.read_by_numpy(_base.numpy(self.detach()), "pickle")
        return reduce(self, protocol)

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        if on_device(self):
            rt.keep_for(self, stream.stream_id)

    deepcopy: Any = torch.Tensor.__deepcopy__

    def deep_copy(self: torch.Tensor, memo: Any) -> Any:
        if not on_device(self) or not self.is_leaf or id(self) in memo:
            return deepcopy(self, memo)
        memo[id(self)] = result = self.detach().clone().requires_grad_(self.requires_grad)
        return result

    def cast_like(self: torch.Tensor, other: torch.Tensor) -> Any:
        return to(self, other)

    def new_tensor(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        options = {"dtype": self.dtype, "device": self.device, **{k: v for k, v in kwargs.items() if v is not None}}
        return torch.tensor(data, **options)

    def type_name(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        name = (
            dtype if isinstance(dtype, str) else f"{getattr(dtype, '__module__', '')}.{getattr(dtype, '__name__', '')}"
        )
        if name.endswith("Tensor") and (on_device(self) or name.startswith("torch.cuda.")):
            kind = _base.type(torch.empty(0), name.replace("torch.cuda.", "torch.")).dtype
            return to(self, CUDA if name.startswith("torch.cuda.") else CPU, kind, non_blocking=non_blocking)
        result = _base.type(self) if dtype is None else _base.type(self, dtype, non_blocking, **kwargs)
        return result.replace("torch.", "torch.cuda.") if dtype is None and on_device(self) else result

    return {
        "device": property(device),
        "is_cuda": property(lambda self: on_device(self)),
        "is_cpu": property(lambda self: _base.is_cpu.__get__(self) and (_unseen() or not on_device(self))),
        "get_device": lambda self: 0 if on_device(self) else _base.get_device(self),
        "to": to,
        "cuda": cuda,
        "cpu": cpu,
        "numpy": numpy,
        "__array__": as_array,
        "__reduce_ex__": reduce_ex,
        "tolist": lambda self: _base.tolist(self) if _unseen() else tracer.to_list(self),
        "pin_memory": lambda self, device=None: tracer.pin(self),
        "is_pinned": lambda self, device=None: tracer.kind_of(self) is MemoryKind.PINNED,
        "record_stream": record_stream,
        "type_as": cast_like,
        "new_tensor": new_tensor,
        "type": type_name,
        "__deepcopy__": deep_copy,
        "__cuda_array_interface__": property(_refusal(rt, "Tensor.__cuda_array_interface__", _array_interface)),
        **{
            name: _refusal(rt, f"Tensor.{name}", getattr(torch.Tensor, name))
            for name in ("__dlpack__", "share_memory_", "new")
        },
    }
